"""What every probe shares: source, outcome, snapshot, finding, metric, sample.

A probe is a folder. Only the child process (`probes.worker`) imports `read.py`, which reads the facts from the host and
sends them to this process as JSON. The module with the facts declares a `Source`, and `probe.py` has the checks.
`findings.toml` has the texts of the findings, `metrics.toml` the exported metric families.

Absent is not failed, and a value that was not read is ``None``, never zero.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from contracts.finding import Finding, Status
from contracts.tables import read_table

F = TypeVar("F")


class UnavailableError(Exception):
    """Raised by a probe's `read` when what it looks for is not on this host: becomes `Absent`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ok(Generic[F]):
    """The probe answered."""

    facts: F
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """The host does not have what the probe looks for; nothing is wrong with that by itself."""

    why: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The probe could not finish: an error, a crash or no answer within its time."""

    error: str
    seconds: float = 0.0


Outcome = Ok[Any] | Absent | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric family that a probe or the agent may export.

    Naming: https://prometheus.io/docs/practices/naming/.
    """

    name: str  # without the prefix: "rdma_port_rate_bytes_per_second"; base units, no `_total` on gauges
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter", "info"] = "gauge"

    @property
    def exposed(self) -> str:
        """The name that a query uses."""
        return f"topoflight_{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of one family; label values in the family's order."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


def known_samples(values: Iterable[tuple[str, float | None]], labels: tuple[str, ...] = ()) -> Iterator[Sample]:
    """A sample of each family whose value is known, all with these labels."""
    for metric, value in values:
        if value is not None:
            yield Sample(metric=metric, value=float(value), labels=labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(Generic[F]):
    """The facts of one probe, which a scan reads from a host."""

    name: str  # folder = probe = metric infix = finding prefix
    facts: type[F]
    timeout_seconds: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Source[F]):
    """A source with its checks and its metrics."""

    check: Callable[[F], Iterable[Finding]]
    codes: tuple[str, ...] = ()  # every finding code `check` may return
    metrics: tuple[Metric, ...] = ()
    samples: Callable[[F], Iterable[Sample]] = lambda _facts: ()
    unjudged: Callable[[F], Mapping[str, str]] = lambda _facts: {}  # codes these facts cannot decide, each with why


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One host at one time: the outcome of every probe, by name."""

    hostname: str
    taken_at_seconds: float  # Unix time
    outcomes: dict[str, Outcome]

    def facts(self, wanted: type[F]) -> F | None:
        """The facts of that type, or None where the probe is absent or failed."""
        for outcome in self.outcomes.values():
            if isinstance(outcome, Ok) and isinstance(outcome.facts, wanted):
                return outcome.facts
        return None

    def with_facts(self, kind: type[F], change: Callable[[F], F]) -> Snapshot:
        """The same host with other facts of that type, where its probe answered."""
        return replace(self, outcomes={
            name: replace(outcome, facts=change(outcome.facts))
            if isinstance(outcome, Ok) and isinstance(outcome.facts, kind) else outcome
            for name, outcome in self.outcomes.items()
        })  # fmt: skip


def host_name() -> str:
    """The name of this host.

    In a pod whose manifest sets NODE_NAME it is that of the node, as host names of pods change. Under a slurmd it is
    NodeName of slurm.conf, which may differ from the host's own.
    """
    of_node = os.environ.get("NODE_NAME", "") if os.environ.get("KUBERNETES_SERVICE_HOST") else ""
    return of_node or os.environ.get("SLURMD_NODENAME") or os.uname().nodename


Texts = Mapping[str, Mapping[str, Any]]
"""Key -> "message", and "status", "evidence" (a text or several) and "remedy" where the check does not give them.

A key is the finding's code, and after a space which of its cases. Texts have the names of values in braces; only what
is INFO has no remedy.
"""


def probe_of(module: str, source: Source[F], check: Callable[[F], Iterable[Finding]], **more: Any) -> Probe[F]:
    """Make the probe of a source; its codes and metric families are from the tables of the module's folder.

    A probe without `samples` has no `metrics.toml`.
    """
    codes = codes_of(read_table(module, "findings.toml"))
    rows = read_table(module, "metrics.toml") if "samples" in more else {}
    metrics = tuple(Metric(name=name, **row | {"labels": tuple(row.get("labels", ()))}) for name, row in rows.items())
    return Probe(
        name=source.name, facts=source.facts, timeout_seconds=source.timeout_seconds,
        check=check, codes=codes, metrics=metrics, **more,
    )  # fmt: skip


def codes_of(texts: Texts) -> tuple[str, ...]:
    """Every code of the table, in its order."""
    return tuple(dict.fromkeys(key.partition(" ")[0] for key in texts))


def finding(
    texts: Texts, key: str, status: Status | None = None, subject: str = "", evidence: tuple[str, ...] = (),
    **values: object,
) -> Finding:  # fmt: skip
    """The finding of that key, its texts filled in; `status` and `evidence` go before those of the table."""
    row = texts[key]
    seen = row.get("evidence", ())
    message, remedy, *own = (
        text.format(subject=subject, **values)
        for text in (row["message"], row.get("remedy", ""), *([seen] if isinstance(seen, str) else seen))
    )
    return Finding(
        code=key.partition(" ")[0],
        status=status or Status(row["status"]),
        subject=subject,
        message=message,
        evidence=evidence or tuple(own),
        remedy=remedy,
    )

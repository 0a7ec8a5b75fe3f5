"""Types that all probes share: source, outcome, snapshot, finding, metric, sample.

A probe is a folder. Only the child process (`probes.worker`) imports `read.py`, which reads the facts from the host and
sends them to this process as JSON. One module declares the facts and a `Source`; `probe.py` has the checks.
`findings.toml` has the texts of the findings, `metrics.toml` the exported metric families.

A probe that is absent has not failed, and a value that was not read is ``None``, never zero.
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
    """Raised by the `read` function of a probe if this host has no such devices; the outcome is then `Absent`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ok(Generic[F]):
    """The probe read its facts."""

    facts: F
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """The host does not have the devices that the probe reads. This alone is not a problem."""

    why: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The probe could not finish: an error, a crash, or no answer within its time limit."""

    error: str
    seconds: float = 0.0


Outcome = Ok[Any] | Absent | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric family that a probe or the agent may export.

    Naming: https://prometheus.io/docs/practices/naming/.
    """

    name: str  # without prefix: "rdma_port_rate_bytes_per_second"; in base units, gauges without `_total`
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter", "info"] = "gauge"

    @property
    def exposed(self) -> str:
        """Metric name for queries, with the prefix."""
        return f"topoflight_{self.name}"


def make_metric(name: str, row: Mapping[str, Any]) -> Metric:
    """Create the family of a row of `metrics.toml`."""
    return Metric(name=name, help=row["help"], labels=tuple(row.get("labels", ())), kind=row.get("kind", "gauge"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of a metric family; label values are in the order of the family's labels."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


def sample_known(values: Iterable[tuple[str, float | None]], labels: tuple[str, ...]) -> Iterator[Sample]:
    """Yield a sample, with these labels, for each metric whose value is known."""
    for metric, value in values:
        if value is not None:
            yield Sample(metric=metric, value=float(value), labels=labels)


def sample_facts(module: str, facts: object, labels: tuple[str, ...] = ()) -> Iterator[Sample]:
    """Yield a sample for each metric whose row in `metrics.toml` names a known fact of this record."""
    rows = read_table(module, "metrics.toml").items()
    yield from sample_known(((name, getattr(facts, row.get("fact", ""), None)) for name, row in rows), labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(Generic[F]):
    """A probe as seen by a scan: its name, the type of its facts and its time limit."""

    name: str  # also the name of the folder, and prefix of its metrics and findings
    facts: type[F]
    timeout_seconds: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Source[F]):
    """A source together with its checks and metrics."""

    check: Callable[[F], Iterable[Finding]]
    codes: tuple[str, ...] = ()  # all finding codes that `check` can return
    metrics: tuple[Metric, ...] = ()
    samples: Callable[[F], Iterable[Sample]] = lambda _facts: ()
    unjudged: Callable[[F], Mapping[str, str]] = lambda _facts: {}  # code that these facts cannot decide -> reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of one host at one time: the outcome of every probe, by probe name."""

    hostname: str
    taken_at_seconds: float  # Unix time
    outcomes: dict[str, Outcome]

    def facts(self, kind: type[F]) -> F | None:
        """Return the facts of this type; None if their probe is absent or failed."""
        for outcome in self.outcomes.values():
            if isinstance(outcome, Ok) and isinstance(outcome.facts, kind):
                return outcome.facts
        return None

    def with_facts(self, kind: type[F], change: Callable[[F], F]) -> Snapshot:
        """Return a copy of the snapshot with the facts of this type changed, if their probe succeeded."""
        return replace(self, outcomes={
            name: replace(outcome, facts=change(outcome.facts))
            if isinstance(outcome, Ok) and isinstance(outcome.facts, kind) else outcome
            for name, outcome in self.outcomes.items()
        })  # fmt: skip


def read_host_name() -> str:
    """Return the name of this host.

    In a pod whose manifest sets NODE_NAME, this is the name of the node, because pods' host names change. Under slurmd
    it is NodeName of slurm.conf, which may differ from the host name.
    """
    of_node = os.environ.get("NODE_NAME", "") if os.environ.get("KUBERNETES_SERVICE_HOST") else ""
    return of_node or os.environ.get("SLURMD_NODENAME") or os.uname().nodename


Texts = Mapping[str, Mapping[str, Any]]
"""Key -> "message", and, unless the check passes them, "status", "evidence" (one text or several) and "remedy".

A key is the finding code, followed by a space and a variant if the code has several. Texts contain the names of values
in braces. Only findings of status INFO have no remedy.
"""


def probe_of(module: str, source: Source[F], check: Callable[[F], Iterable[Finding]], **members: Any) -> Probe[F]:
    """Create the probe of a source. Its codes and metric families come from the tables in the module's folder.

    A probe that exports no samples has no `metrics.toml`. `fact` in a row of it: see `sample_facts`.
    """
    codes = list_codes(read_table(module, "findings.toml"))
    rows = read_table(module, "metrics.toml") if "samples" in members else {}
    metrics = tuple(make_metric(name, row) for name, row in rows.items())
    return Probe(
        name=source.name, facts=source.facts, timeout_seconds=source.timeout_seconds,
        check=check, codes=codes, metrics=metrics, **members,
    )  # fmt: skip


def list_codes(texts: Texts) -> tuple[str, ...]:
    """Return the finding codes of the table, in order."""
    return tuple(dict.fromkeys(key.partition(" ")[0] for key in texts))


def finding(
    texts: Texts, key: str, status: Status | None = None, subject: str = "", evidence: tuple[str, ...] = (),
    **values: object,
) -> Finding:  # fmt: skip
    """Create a finding from a row of the table; `status` and `evidence` override those of the row."""
    row = texts[key]
    templates = row.get("evidence", ())
    message, remedy, *formatted = (
        text.format(subject=subject, **values)
        for text in (row["message"], row.get("remedy", ""), *([templates] if isinstance(templates, str) else templates))
    )
    return Finding(
        code=key.partition(" ")[0],
        status=status or Status(row["status"]),
        subject=subject,
        message=message,
        evidence=evidence or tuple(formatted),
        remedy=remedy,
    )

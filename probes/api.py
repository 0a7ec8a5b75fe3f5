"""What every probe shares: outcome, metric, sample, probe, snapshot.

Absent is not failed, and a value that was not read is ``None``, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from contracts.finding import Finding
    from probes.host.protocol import Host

SCHEMA_VERSION = 1
"""Raised whenever an older reader would misread a snapshot or a recording."""

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
class Probe(Generic[F]):
    """A record the scan runs: what to read, how to judge it, what to export."""

    name: str  # file = probe = metric infix = finding prefix
    facts: type[F]
    read: Callable[[Host], F]
    check: Callable[[F], Iterable[Finding]]
    codes: tuple[str, ...] = ()  # every finding code `check` may return
    metrics: tuple[Metric, ...] = ()
    samples: Callable[[F], Iterable[Sample]] = lambda _facts: ()
    unjudged: Callable[[F], Mapping[str, str]] = lambda _facts: {}  # codes these facts cannot decide, each with why
    timeout_seconds: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One host at one time: the outcome of every probe, by name."""

    hostname: str
    taken_at_seconds: float  # Unix time
    topoflight_version: str
    outcomes: dict[str, Ok[Any] | Absent | Failed]
    schema_version: int = SCHEMA_VERSION

    def facts(self, wanted: type[F]) -> F | None:
        """The facts of that type, or None where the probe is absent or failed."""
        for outcome in self.outcomes.values():
            if isinstance(outcome, Ok) and isinstance(outcome.facts, wanted):
                return outcome.facts
        return None

"""The two values that every package passes on: a finding, and the interval of a forecast.

A finding is what one check says about one subject of one node, from a probe to the page. A check that was judged and
raised nothing is a finding too, with status "pass".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The result of one check, worst first; the gate's exit code follows from it."""

    FAIL = "fail"  # training will fail, or run far below what the hardware can do
    WARN = "warn"  # costs performance or will break later
    UNKNOWN = "unknown"  # could not be judged; a required check that ends here is exit code 5
    INFO = "info"  # worth knowing, never fails a gate
    PASS = "pass"  # noqa: S105 - judged, and nothing was found


FAILING_LOSS = 0.1
"""Share of a multi-node step from which on what costs it is a failure: docs/decisions/0020."""


def by_loss(share: float) -> Status:
    """FAIL where a finding takes at least a tenth of what bounds a multi-node step, else WARN.

    `share` is lost from a rate that the step waits for (0 to 1): a link's bandwidth, the slowest GPU's clock.
    """
    return Status.FAIL if share >= FAILING_LOSS else Status.WARN


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One verdict about one subject of one node, with what proves it and what to do."""

    code: str  # stable: "<probe>.<subject>.<what>", listed in docs/reference/findings.md
    status: Status
    node: str = ""  # the host; several of one run are joined by ", "
    subject: str = ""  # "GPU3", "mlx5_2:1", "eth0", or "" for the whole host
    message: str = ""
    evidence: tuple[str, ...] = ()  # each names its source: "/sys/...: value", "nvmlX(0) = value"
    remedy: str = ""  # one imperative sentence; empty for info and pass
    required: bool = False  # the gate insists on it: unknown is then no pass
    pending: bool = False  # a failure that one scan of the resident agent found, and no second one yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A quantity that is forecast: an 80 % interval around the best guess.

    `low` and `high` bound the middle 80 % of what is expected; all three in the unit of the quantity.
    """

    low: float
    mid: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """Return the interval of `factor` times the quantity; `factor` is positive."""
        return Interval(low=self.low * factor, mid=self.mid * factor, high=self.high * factor)

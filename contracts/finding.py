"""Two types that all packages exchange: the finding of a check, and the interval of a forecast.

A finding is the result of one check for one subject of one node; probes create it and reports show it. A check that
found no problem is a finding too, with status "pass".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The result of one check, from worst to best. The exit code of the gate is derived from it."""

    FAIL = "fail"  # training will fail, or run far below what the hardware can do
    WARN = "warn"  # reduces performance, or will cause a failure later
    UNKNOWN = "unknown"  # the check could not run; if the check is required, the gate ends with exit code 5
    INFO = "info"  # for information; never fails a gate
    PASS = "pass"  # noqa: S105 - the check ran and found no problem


def by_loss(share: float) -> Status:
    """Return FAIL if the loss is at least a tenth of the rate that bounds a multi-node step, else WARN (decision 0020).

    `share` (0 to 1) is the lost fraction of a rate that the step waits for: link bandwidth, clock of the slowest GPU.
    """
    return Status.FAIL if share >= 0.1 else Status.WARN


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check for one subject of one node, with its evidence and remedy."""

    code: str  # stable: "<probe>.<subject>.<what>", listed in docs/reference/findings.md
    status: Status
    node: str = ""  # host name; a finding about several hosts joins their names with ", "
    subject: str = ""  # "GPU3", "mlx5_2:1", "eth0", or "" for the whole host
    message: str = ""
    evidence: tuple[str, ...] = ()  # each entry names its source: "/sys/...: value", "nvmlX(0) = value"
    remedy: str = ""  # one imperative sentence; empty for info and pass
    required: bool = False  # the gate requires this check: status unknown then does not pass
    pending: bool = False  # a failure that the resident agent found in one scan; a second scan has not confirmed it yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A forecast quantity: the best estimate with its 80 % interval.

    `low` and `high` bound the central 80 % of the expected values. All three are in the unit of the quantity.
    """

    low: float
    mid: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """Return the interval of the quantity multiplied by `factor`, which must be positive."""
        return Interval(low=self.low * factor, mid=self.mid * factor, high=self.high * factor)

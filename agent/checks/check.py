"""One verdict about one subject, apart from the gate that makes most of them: `lint-env` loads no probe for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "info", "unknown", "warn", "fail"]
ORDER: tuple[Status, ...] = ("fail", "warn", "unknown", "info", "pass")  # worst first, as they are printed
_OF_DEVICES = ("gpu", "pci", "rdma", "interfaces", "topology")  # families whose subjects are devices

MANY_CODES = 8  # of one family and one reason: more are named by their family


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One verdict of the gate about one subject of one node."""

    id: str  # finding code
    status: Status
    node: str
    subject: str = ""
    message: str = ""
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    required: bool = False
    pending: bool = False  # a failure that one scan of the resident agent found, and no second one yet


def places(found: Sequence[Check]) -> str:
    """On how many nodes or devices these were found: "on 10 devices"; empty where it is one or none is named."""
    nodes = {name for check in found for name in check.node.split(", ") if name}
    if len(nodes) > 1:
        return f"on {len(nodes)} nodes"
    subjects = {name for check in found for name in check.subject.split(", ") if name}
    if len(subjects) < 2:
        return ""
    devices = all(check.id.split(".")[0] in _OF_DEVICES for check in found)
    return f"on {len(subjects)} devices" if devices else f"in {len(subjects)} places"


def worst_first(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Failures first, then by code and subject."""
    return tuple(sorted(checks, key=lambda check: (ORDER.index(check.status), check.id, check.node, check.subject)))

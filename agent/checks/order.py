"""The order of findings and the words for where they were found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from contracts.finding import Finding, Status

ORDER: tuple[Status, ...] = tuple(Status)  # worst first, as they are printed
_OF_DEVICES = ("gpu", "pci", "rdma", "interfaces", "topology")  # families whose subjects are devices

MANY_CODES = 8  # of one family and one reason: more are named by their family


def places(found: Sequence[Finding]) -> str:
    """On how many nodes or devices these were found: "on 10 devices"; empty where it is one or none is named."""
    nodes = {name for check in found for name in check.node.split(", ") if name}
    if len(nodes) > 1:
        return f"on {len(nodes)} nodes"
    subjects = {name for check in found for name in check.subject.split(", ") if name}
    if len(subjects) < 2:
        return ""
    devices = all(check.code.split(".")[0] in _OF_DEVICES for check in found)
    return f"on {len(subjects)} devices" if devices else f"in {len(subjects)} places"


def worst_first(checks: Iterable[Finding]) -> tuple[Finding, ...]:
    """Failures first, then by code and subject."""
    return tuple(sorted(checks, key=lambda check: (ORDER.index(check.status), check.code, check.node, check.subject)))

"""The order of findings, the words for where they were found, and those that are one thing to read as one group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.base import units
from contracts.finding import Finding, Status
from contracts.tables import read_table

ORDER: tuple[Status, ...] = tuple(Status)  # worst first, as they are printed
_OF_DEVICES = ("gpu", "pci", "rdma", "interfaces", "topology")  # families whose subjects are devices

MANY_CODES = 8  # of one family and one reason: more are named by their family


def worst_first(checks: Iterable[Finding]) -> tuple[Finding, ...]:
    """Failures first, then by code and subject."""
    return tuple(sorted(checks, key=lambda check: (ORDER.index(check.status), check.code, check.node, check.subject)))


# The trouble that a check reports, where several checks report the same one.
_TROUBLE_OF = {
    code: trouble for trouble, codes in read_table(__file__, "rules.toml")["troubles"].items() for code in codes
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The same finding on several subjects, or several of one trouble of one device: one thing to read and to fix."""

    id: str  # of the first; `codes` has all
    status: Status
    message: str  # of the first; the others differ by their subject or not at all
    remedy: str
    checks: tuple[Finding, ...]  # worst first
    trouble: str = ""  # "too hot", where several checks tell of it

    @property
    def codes(self) -> tuple[str, ...]:
        """Every finding code in it, once."""
        return tuple(dict.fromkeys(check.code for check in self.checks))

    @property
    def title(self) -> str:
        """Its codes in a few words: many of one family are named by it."""
        families = list(dict.fromkeys(code.split(".")[0] for code in self.codes))
        if len(self.codes) <= MANY_CODES:
            return ", ".join(self.codes)
        return ", ".join(f"{family}.*" for family in families) + f" ({len(self.codes)} checks)"

    @property
    def places(self) -> str:
        """Where it was found, if in several places: "on 2 nodes", "on 10 devices", "for gpus=8, gdr=on"; else ""."""
        nodes = {name for check in self.checks for name in check.node.split(", ") if name}
        if len(nodes) > 1:
            return f"on {len(nodes)} nodes"
        subjects = {name for check in self.checks for name in check.subject.split(", ") if name}
        return self._at(sorted(subjects)) if len(subjects) > 1 else ""

    @property
    def place(self) -> str:
        """The first subject that it is about: "on GPU3", "for gdr=on"."""
        return self._at(self.subjects[:1])

    def _at(self, subjects: Sequence[str]) -> str:
        if not all(code.split(".")[0] in _OF_DEVICES for code in self.codes):
            return units.some(subjects, "for ", 4)
        return f"on {subjects[0] if len(subjects) == 1 else f'{len(subjects)} devices'}"

    @property
    def subjects(self) -> tuple[str, ...]:
        """What it is about, in order and each once."""
        return tuple(dict.fromkeys(check.subject for check in self.checks if check.subject))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes it was found on."""
        return tuple(dict.fromkeys(check.node for check in self.checks if check.node))

    @property
    def required(self) -> bool:
        """Whether the gate requires one of them."""
        return any(check.required for check in self.checks)

    @property
    def alike(self) -> bool:
        """Whether every check says the same words."""
        return len({check.message for check in self.checks}) == 1


def grouped(checks: Iterable[Finding]) -> tuple[Group, ...]:
    """Findings that share code, status and remedy (but for its GPU's number) as one, worst first; so are pass and info.

    What several checks tell of one trouble of one device is one group, at the place of the worst of them; devices
    with the same trouble, told by the same checks, share it.
    """
    checks = worst_first(checks)
    together = _of_one_trouble(checks)
    found: dict[tuple[object, ...], list[Finding]] = {}
    for check in checks:
        bad = together.get(_device(check)) if check.status in ("fail", "warn") else None
        # one reason that kept many required checks from being measured is one thing to read
        unmeasured = ("unmeasured", check.message) if check.status == "unknown" and check.required else None
        found.setdefault(bad or unmeasured or (check.status, check.code, _of_any(check)), []).append(check)
    return tuple(_group(same, shared=key in together.values()) for key, same in found.items())


def _group(same: list[Finding], *, shared: bool) -> Group:
    first = same[0]
    if shared:  # device by device, each from its worst reading on
        same = sorted(same, key=lambda check: (check.node, check.subject))
    return Group(
        id=first.code, status=first.status, message=first.message, checks=tuple(same),
        # the checks of one trouble have one remedy: that of the worst
        remedy=_remedies([check for check in same if check.code == first.code] if shared else same),
        trouble=_TROUBLE_OF[first.code] if shared else "",
    )  # fmt: skip


def _device(check: Finding) -> tuple[str, str, str]:
    """Node, device and trouble of a check; the trouble is empty if the check shares none with others."""
    return check.node, check.subject, _TROUBLE_OF.get(check.code, "")


def _of_one_trouble(checks: Sequence[Finding]) -> dict[tuple[str, str, str], tuple[object, ...]]:
    """Devices for which several checks report the same trouble, each with the reports and the remedies."""
    raised: dict[tuple[str, str, str], list[Finding]] = {}
    for check in checks:
        if check.status in ("fail", "warn") and check.subject and check.code in _TROUBLE_OF:
            raised.setdefault(_device(check), []).append(check)
    return {
        device: (device[2], *((check.status, check.code, _of_any(check)) for check in found))
        for device, found in raised.items()
        if len({check.code for check in found}) > 1
    }


def _of_any(check: Finding) -> str:
    """Its remedy, with N for the GPU's own number: what fixes GPU0 and GPU1 in the same words is one thing to do."""
    number = check.subject.removeprefix("GPU")
    return re.sub(rf"(nvidia-smi (?:-r )?-i) {number}\b", r"\1 N", check.remedy) if number.isdigit() else check.remedy


def _remedies(checks: Sequence[Finding]) -> str:
    """Each remedy once, and none that another says too; one GPU's number where it is about that GPU only."""
    several = len({check.subject for check in checks}) > 1
    remedies = list(dict.fromkeys(_of_any(check) if several else check.remedy for check in checks if check.remedy))
    return " ".join(
        one for one in remedies if not any(one is not other and one.rstrip(".") in other for other in remedies)
    )


def passed_ids(groups: Iterable[Group]) -> tuple[str, ...]:
    """Checks that passed wherever they judged: on another node or device the same one may have had a worse result."""
    groups = tuple(groups)
    worse = {code for group in groups if group.status != "pass" for code in group.codes}
    return tuple(dict.fromkeys(group.id for group in groups if group.status == "pass" and group.id not in worse))


def unknown_ids(groups: Iterable[Group]) -> tuple[str, ...]:
    """Checks that were not measured somewhere, and failed or warned nowhere: as the verdict counts them."""
    groups = tuple(groups)
    worse = {code for group in groups if group.status in ("fail", "warn") for code in group.codes}
    unknown = dict.fromkeys(code for group in groups if group.status == "unknown" for code in group.codes)
    return tuple(code for code in unknown if code not in worse)


def reasons(unknown: Iterable[Group]) -> dict[str, tuple[str, ...]]:
    """Checks that were not measured, by what kept them from it."""
    found: dict[str, dict[str, None]] = {}
    for group in unknown:
        for check in group.checks:
            found.setdefault(check.message.rstrip("."), {})[check.code] = None
    return {why: tuple(codes) for why, codes in found.items()}

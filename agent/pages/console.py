"""The page of the whole cluster: what is asked of it, and every part that answers, from the nodes' records alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from urllib.parse import urlencode

from agent.base import units
from agent.checks.groups import Group, grouped
from agent.checks.history import OF_FINDINGS, clock
from agent.checks.verdict import Verdict, judge
from agent.cluster.nodes import DAY_SECONDS, Fleet, NodeRecord, seconds_of
from agent.cluster.places import Places
from agent.pages.nodes import ORDER, checks_of_records, first_of, gpu_text
from contracts.finding import Finding
from topology import diff

ROWS = 100  # of one page of the table
MOST_ODD = 16  # groups of each family; the table names the nodes of the others
HOURS = 24
SMALL_CELLS = 1000  # nodes from which on the cells of the map are small
GROUPS = {"": "nothing", "fault": "fault", "kind": "kind", "version": "version", "place": "place"}
SORTS = {"": "verdict", "name": "name", "since": "since", "age": "age"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the page's form and links ask; empty is everything."""

    search: str = ""
    verdict: str = ""
    fault: str = ""
    kind: str = ""
    version: str = ""
    place: str = ""
    group: str = ""
    sort: str = ""
    page: int = 1

    def query(self, **other: str | int) -> str:
        """The address of this page with some of it asked otherwise, from its first rows on."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"page": 1} | other
        told = {name: value for name, value in values.items() if value not in ("", 1)}
        return "cluster" + (f"?{urlencode(told)}" if told else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One node of the table and of the map."""

    name: str
    word: str
    worst: Group | None
    more: int
    codes: tuple[str, ...]  # of all that failed or warned, worst first
    gpus: str
    rdma: str
    kind: str
    version: str
    place: str
    age_seconds: float
    age: str
    since_seconds: float  # of the oldest finding that it has; 0 where none is known
    since: str

    def text(self) -> str:
        """What a search looks in."""
        found = self.worst.message if self.worst else ""
        about = (self.name, self.gpus, self.kind, self.version, self.place, *self.codes, found)
        return " ".join(about).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One finding over nodes."""

    group: Group
    since: str  # of the oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What happened at about one time, on one node or many."""

    at: str
    kind: str
    text: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """Everything that the page shows."""

    asked: Asked
    verdict: Verdict
    checks: tuple[Finding, ...]
    lines: tuple[Line, ...]  # all nodes
    matching: frozenset[str]  # names of those that were asked for
    sections: tuple[tuple[str, tuple[Line, ...]], ...]  # of this page: a heading, and its rows
    pages: int
    counts: dict[str, int]
    faults: tuple[Fault, ...]
    places: Places
    map: tuple[tuple[str, tuple[Line, ...]], ...]
    hours: tuple[tuple[str, dict[str, int]], ...]
    moments: tuple[Moment, ...]
    families: tuple[diff.FleetFamily, ...]
    choices: dict[str, list[str]] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """Beside the verdict: of how many nodes the tally below it is, and how many findings the list below has."""
        if not self.lines:
            return self.verdict.why
        bad, found = sum(line.word != "pass" for line in self.lines), units.count(len(self.faults), "finding")
        whole = units.count(len(self.lines), "node")
        return f"{bad} of {whole}, {found}" if bad else f"all of {whole}, {found}" if self.faults else f"all of {whole}"

    @property
    def small(self) -> bool:
        """Whether the map has too many cells for their marks."""
        return len(self.lines) >= SMALL_CELLS


def console(fleet: Fleet, places: Places, asked: Asked, now: float) -> Console:
    """The page's contents for what is asked, at `now` (Unix seconds)."""
    records = fleet.records()
    checks = checks_of_records(fleet, now)
    lines = _lines(fleet, records, checks, places, now)
    found = [line for line in lines if _matches(line, asked)]
    ordered = _sections(_sorted(found, asked.sort), asked.group)
    moments = _moments(records, now)
    return Console(
        asked=asked, verdict=judge(checks), checks=checks, lines=lines,
        matching=frozenset(line.name for line in found), sections=_page(ordered, asked.page),
        pages=max(1, -(-sum(len(mine) for _, mine in ordered) // ROWS)),
        counts=dict(Counter(line.word for line in lines)),
        faults=_faults(records, checks),
        places=places, map=_map(lines, places), hours=_hours(moments, now), moments=_last_events(moments),
        families=_families(fleet, records, now),
        choices={
            "fault": sorted({code for line in lines for code in line.codes}),
            "kind": list(dict.fromkeys(line.kind for line in sorted(lines, key=lambda line: line.kind))),
            "version": sorted({line.version for line in lines}),
            "place": sorted({line.place for line in lines if line.place}, key=_natural),
        },
    )  # fmt: skip


def _faults(records: Iterable[NodeRecord], checks: Iterable[Finding]) -> tuple[Fault, ...]:
    since = {
        (record.name, each.get("code"), each.get("subject")): seconds_of(each.get("since"))
        for record in records
        for each in record.findings
    }
    made = []
    for group in grouped([check for check in checks if check.status in ("fail", "warn") or check.required]):
        times = [since.get((check.node, check.code, check.subject), 0.0) for check in group.checks]
        first = min(filter(None, times), default=0.0)
        made.append(Fault(group=group, since=clock(first) if first else ""))
    return tuple(made)


def _lines(
    fleet: Fleet, records: Sequence[NodeRecord], checks: Sequence[Finding], places: Places, now: float
) -> tuple[Line, ...]:  # fmt: skip
    mine: dict[str, list[Finding]] = defaultdict(list)
    for check in checks:
        if check.status != "pass":
            mine[check.node].append(check)
    where, kinds = dict(places.of), _kinds(fleet, records)
    agents = {record.agent_version for record in records}
    return tuple(
        _line(record, mine[record.name], kinds[record.name], where.get(record.name, ""), len(agents) > 1, now)
        for record in records
    )


def _line(record: NodeRecord, checks: Sequence[Finding], kind: str, place: str, agents: bool, now: float) -> Line:
    worst, more = first_of(checks) if checks else (None, 0)
    codes = dict.fromkeys(check.code for check in checks if check.status in ("fail", "warn") or check.required)
    since = min(filter(None, (seconds_of(each.get("since")) for each in record.findings)), default=0.0)
    heard = record.scanned_at_seconds > 0
    driver = ((record.machine or {}).get("gpu") or {}).get("driverVersion")
    version = f"driver {driver or 'unknown'}" + (f", agent {record.agent_version or 'unknown'}" if agents else "")
    return Line(
        name=record.name, word="unknown" if record.silent(now) else record.verdict, worst=worst, more=more,
        codes=tuple(codes), gpus=gpu_text(record), rdma=record.rdma or "unknown", kind=kind, version=version,
        place=place, age_seconds=record.age_seconds(now), age=units.ago(record.age_seconds(now)) if heard else "never",
        since_seconds=since, since=clock(since) if since else "",
    )  # fmt: skip


def _kinds(fleet: Fleet, records: Iterable[NodeRecord]) -> dict[str, str]:
    """Each node's kind in words: nodes of one kind are alike to the last link."""
    named: dict[str | None, str] = {None: "unknown"}
    of = {record.name: fleet.kind(record) for record in records}
    sizes, first = Counter(of.values()), {of[record.name]: record for record in records}
    for key, _ in sizes.most_common():
        if key is not None:
            words = f"{gpu_text(first[key])}, {first[key].links or 'no links'}".replace("NVIDIA ", "")
            same = sum(known == words or known.startswith(f"{words} #") for known in named.values())
            named[key] = f"{words} #{same + 1}" if same else words
    return {name: named[key] for name, key in of.items()}


def _matches(line: Line, asked: Asked) -> bool:
    exact = all(
        not wanted or wanted == mine
        for wanted, mine in ((asked.kind, line.kind), (asked.version, line.version), (asked.place, line.place))
    )
    return bool(
        exact and asked.verdict in ("", line.word) and (not asked.fault or asked.fault in line.codes)
        and all(each in line.text() for each in asked.search.lower().split())
    )  # fmt: skip


def _sorted(lines: Iterable[Line], sort: str) -> list[Line]:
    named = sorted(lines, key=lambda line: _natural(line.name))
    if sort == "since":
        return sorted(named, key=lambda line: -line.since_seconds)
    if sort == "age":
        return sorted(named, key=lambda line: -line.age_seconds)
    return named if sort == "name" else sorted(named, key=lambda line: ORDER.index(line.word))


def _natural(text: str) -> list[tuple[int, str]]:
    """ "r2" before "r10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", text)]


def _sections(lines: Sequence[Line], group: str) -> list[tuple[str, list[Line]]]:
    if not group:
        return [("", list(lines))]
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        fault = line.codes[0] if line.codes else "nothing found"
        found[fault if group == "fault" else getattr(line, group) or "unknown"].append(line)
    if group == "fault":
        found["nothing found"] = found.pop("nothing found", [])  # last
        return [(name, mine) for name, mine in found.items() if mine]
    return sorted(found.items(), key=lambda pair: _natural(pair[0]))


def _page(sections: Iterable[tuple[str, list[Line]]], page: int) -> tuple[tuple[str, tuple[Line, ...]], ...]:
    """The rows of one page, under headings that say how many nodes each has in all."""
    skip, left, made = ROWS * (page - 1), ROWS, []
    for name, mine in sections:
        part = tuple(mine[skip : skip + left])
        skip, left = max(0, skip - len(mine)), left - len(part)
        if part:
            made.append((f"{name}: {units.count(len(mine), 'node')}" if name else "", part))
    return tuple(made)


def _map(lines: Sequence[Line], places: Places) -> tuple[tuple[str, tuple[Line, ...]], ...]:
    """Nodes by place, those without one last; all in one where no place is known."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: _natural(line.name)):
        found[line.place].append(line)
    if not places.label:
        return (("", tuple(found[""])),)
    ordered = sorted(found.items(), key=lambda pair: (not pair[0], _natural(pair[0])))
    return tuple((name or "no label", tuple(mine)) for name, mine in ordered)


Event = tuple[float, str, str, str]  # at, kind, text, node


def _moments(records: Iterable[NodeRecord], now: float) -> list[Event]:
    """What the records tell of the last day: their changes, findings that hold, agents that ended or fell silent."""
    found: set[Event] = set()
    for record in records:
        told = {
            (str(one.get("code")), str(one.get("subject"))) for one in record.changes if one.get("kind") == "raised"
        }
        for one in record.changes:
            text = str((one.get("kind") in OF_FINDINGS and one.get("code")) or one.get("text") or "")
            found.add((seconds_of(one.get("at")), str(one.get("kind")), text, record.name))
        for one in record.findings:
            if (str(one.get("code")), str(one.get("subject"))) not in told and one.get("severity") in ("fail", "warn"):
                found.add((seconds_of(one.get("since")), "raised", str(one.get("code")), record.name))
        if record.stopped_at_seconds is not None:
            found.add((record.stopped_at_seconds, "ended", "its agent ended", record.name))
        elif record.scanned_at_seconds and record.silent(now):
            found.add((record.scanned_at_seconds, "silent", "heard for the last time", record.name))
    return [event for event in found if now - DAY_SECONDS < event[0] <= now]


def _hours(events: Iterable[Event], now: float) -> tuple[tuple[str, dict[str, int]], ...]:
    """How many nodes each hour had something of each kind; the last hour is the one that ends now."""
    counts: list[Counter[str]] = [Counter() for _ in range(HOURS)]
    for at, kind, _ in {(min(HOURS - 1, int((now - at) // 3600)), kind, node) for at, kind, _, node in events}:
        word = kind if kind in OF_FINDINGS else "silent" if kind in ("silent", "ended") else "changed"
        counts[HOURS - 1 - at][word] += 1
    return tuple((clock(now - 3600.0 * (HOURS - hour)), dict(count)) for hour, count in enumerate(counts))


def _last_events(events: Iterable[Event], most: int = 8) -> tuple[Moment, ...]:
    """The newest, what came on many nodes within ten minutes as one."""
    found: dict[tuple[int, str, str], list[Event]] = defaultdict(list)
    for event in sorted(events, reverse=True):
        found[int(event[0] // 600), event[1], event[2]].append(event)
    return tuple(
        Moment(at=clock(mine[-1][0]), kind=kind, text=text, nodes=tuple(sorted({one[3] for one in mine})))
        for (_, kind, text), mine in list(found.items())[:most]
    )


def _families(fleet: Fleet, records: Iterable[NodeRecord], now: float) -> tuple[diff.FleetFamily, ...]:
    """Nodes with one kind of GPU and how the odd ones depart from what most of them have; of those that are heard of.

    Equal machines are compared once.
    """
    alike: dict[str, tuple[NodeRecord, list[str]]] = {}
    for record in records:
        key = fleet.machine_key(record)
        if key is not None and not record.silent(now):
            alike.setdefault(key, (record, []))[1].append(record.name)
    if not alike:
        return ()
    found = diff.fleet([fleet.snapshot(one) for one, _ in alike.values()], [names for _, names in alike.values()])
    return found.families

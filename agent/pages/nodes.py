"""Nodes as the pages show them: the rows of a table, and the page of the whole cluster from its records alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from urllib.parse import quote, urlencode

from agent.base import units
from agent.checks.codes import CLUSTER_CODES
from agent.checks.explain import point
from agent.checks.groups import Group, grouped
from agent.checks.history import clock
from agent.checks.verdict import Verdict, judge
from agent.cluster.gate import Places, checks_of
from agent.cluster.nodes import Fleet, NodeRecord, seconds_of
from agent.terminal.hosts import machine
from collectives.bench.results import BenchResult
from contracts.finding import Finding, Status
from probes.api import Snapshot
from topology import diff
from topology.graph import NodeTopology
from topology.reference import departures

ORDER = ("fail", "unknown", "warn", "pass")
ROWS = 100  # of one page of the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One node of a table, and of the map."""

    name: str
    word: str  # of its verdict
    worst: Group | None  # the first thing to read, where something failed or warned
    more: int  # further findings
    codes: tuple[str, ...]  # of all that failed or warned, worst first
    gpus: str
    links: str
    rdma: str
    memlock: str
    version: str
    age: float | None  # seconds since its scan; None: never scanned
    since: float  # Unix seconds at which the oldest of its findings began; 0 where that is not known
    link: str = ""  # to its own page
    kind: str = "unknown"
    place: str = ""

    def text(self) -> str:
        """Return the text that a search reads."""
        found = self.worst.message if self.worst else ""
        about = (self.name, self.gpus, self.kind, self.version, self.place, *self.codes, found)
        return " ".join(about).lower()


def rows(records: Sequence[NodeRecord], checks: Sequence[Finding], now: float) -> tuple[Row, ...]:
    """Return every node, failed ones first. A node that stopped reporting is unknown, whatever its last verdict was."""
    mine: dict[str, list[Finding]] = defaultdict(list)
    for check in checks:
        if check.status != "pass":
            mine[check.node].append(check)
    agents = {record.agent_version for record in records}
    made = (_row(record, mine[record.name], now, agents=len(agents) > 1) for record in records)
    return tuple(sorted(made, key=lambda row: (ORDER.index(row.word) if row.word in ORDER else 1, _natural(row.name))))


def _row(record: NodeRecord, checks: Sequence[Finding], now: float, *, agents: bool) -> Row:
    found = [
        group
        for group in grouped(checks)
        if group.status in ("fail", "warn") or (group.required and group.status == "unknown")
    ]
    codes = dict.fromkeys(check.code for check in checks if check.status in ("fail", "warn") or check.required)
    since = min(filter(None, (seconds_of(each.get("since")) for each in record.findings)), default=0.0)
    driver = ((record.machine or {}).get("gpu") or {}).get("driverVersion")
    version = f"driver {driver or 'unknown'}" + (f", agent {record.agent_version or 'unknown'}" if agents else "")
    return Row(
        name=record.name, word="unknown" if record.silent(now) else record.verdict,
        worst=found[0] if found else None, more=max(0, len(found) - 1), codes=tuple(codes), gpus=gpu_text(record),
        links=record.links or "unknown", rdma=record.rdma or "unknown", memlock=record.memlock or "unknown",
        version=version, since=since, age=record.age_seconds(now) if record.scanned_at_seconds > 0 else None,
    )  # fmt: skip


def lines(rows: Iterable[Row]) -> tuple[tuple[Row, ...], ...]:
    """The lines of a table, in the order of the rows: one for each failed node, and one for each group of equal nodes.

    Equal nodes have the same findings and the same hardware and versions; name, place and times may differ.
    """
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        same = replace(row, name="", link="", place="", age=0.0, since=0.0, worst=None)
        key = (row.name,) if row.word == "fail" else (row.worst and row.worst.message, *astuple(same))
        found.setdefault(key, []).append(row)
    return tuple(map(tuple, found.values()))


def gpu_text(record: NodeRecord) -> str:
    """As a record has them."""
    if not record.gpus:
        return "unknown" if record.gpus is None else "none"
    return f"{record.gpus} × {record.product or 'unknown model'}"


def checks_of_records(fleet: Fleet, now: float, names: Sequence[str] | None = None) -> tuple[Finding, ...]:
    """What the agents of these nodes found, or of all; where an older agent's record has no remedy, docs give one.

    A node that fell silent is unknown on the pages; the gate fails, for it was asked whether a job may run there.
    """
    found = checks_of([record.name for record in fleet.records()] if names is None else names, fleet, now=now)
    silent, _ = CLUSTER_CODES
    return tuple(
        check if check.status == "pass" else replace(
            check, remedy=check.remedy or point(check.code, "Remedy"), required=check.required or check.code == silent,
            status=Status.UNKNOWN if check.code == silent else check.status,
        )
        for check in found
    )  # fmt: skip


def glance(node: NodeTopology, snapshot: Snapshot, bench: BenchResult | None) -> Iterator[tuple[str, str]]:
    """The first facts to read of a machine: as the terminal shows them, and the newest measurement."""
    yield from machine(snapshot, node)
    found = [m for m in bench.measurements if m.op == "all_gather" and m.verified] if bench else []
    best = max(found, key=lambda m: m.bytes, default=None)
    rate = f"all_gather {units.rate(best.busbw_bytes_per_second)} bus bandwidth" if best else "no benchmark yet"
    yield "measured", rate + (f" at {units.size(best.bytes)}" if best else "")
    yield "recognised as", node.sku or "not in the reference table"
    for text in departures(node):
        yield "differs from the reference", text


# The page of the whole cluster.


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the page's form and links ask; empty is everything."""

    search: str = ""
    verdict: str = ""
    fault: str = ""
    kind: str = ""
    version: str = ""
    place: str = ""
    page: int = 1

    def query(self, **other: str | int) -> str:
        """The address of this page with some of it asked otherwise, from its first rows on."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"page": 1} | other
        told = {name: value for name, value in values.items() if value not in ("", 1)}
        return "cluster" + (f"?{urlencode(told)}" if told else "")

    def matches(self, row: Row) -> bool:
        """Whether the node is one of those that were asked for."""
        exact = all(getattr(self, name) in ("", getattr(row, name)) for name in ("kind", "version", "place"))
        fault = not self.fault or self.fault in row.codes
        found = all(each in row.text() for each in self.search.lower().split())
        return exact and fault and found and self.verdict in ("", row.word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """Everything that the page shows."""

    asked: Asked
    verdict: Verdict
    checks: tuple[Finding, ...]
    rows: tuple[Row, ...]  # all nodes
    matching: int  # nodes that were asked for
    shown: tuple[tuple[Row, ...], ...]  # the lines of the table on the requested page
    pages: int
    counts: dict[str, int]
    faults: tuple[tuple[Group, str], ...]  # each with the time of the oldest
    places: Places
    map: tuple[tuple[str, tuple[Row, ...]], ...]
    families: tuple[diff.FleetFamily, ...]
    choices: dict[str, list[str]] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """Beside the verdict: "64 nodes: 1 failed, 1 unknown, 62 passed; 2 findings"."""
        found = f"; {units.count(len(self.faults), 'finding')}" if self.faults else ""
        return f"{units.count(len(self.rows), 'node')}: {units.tally(self.counts) or 'none published yet'}{found}"


def console(fleet: Fleet, places: Places, asked: Asked, now: float) -> Console:
    """The page's contents for what is asked, at `now` (Unix seconds)."""
    records, checks = fleet.records(), checks_of_records(fleet, now)
    where, kinds = dict(places.of), _kinds(fleet, records)
    every = tuple(
        replace(
            row, kind=kinds[row.name], place=where.get(row.name, ""), link=f"cluster?node={quote(row.name, safe='')}"
        )
        for row in rows(records, checks, now)
    )
    matching = [row for row in every if asked.matches(row)]
    table = lines(matching)
    return Console(
        asked=asked, verdict=judge(checks), checks=checks, rows=every, matching=len(matching),
        shown=table[ROWS * (asked.page - 1) : ROWS * asked.page], pages=max(1, -(-len(table) // ROWS)),
        counts=dict(Counter(row.word for row in every)),
        faults=tuple(_faults(records, checks)), places=places, map=_map(every, places),
        families=_families(fleet, records, now),
        choices={
            "fault": sorted({code for row in every for code in row.codes}),
            **{name: sorted({getattr(row, name) for row in every} - {""}, key=_natural)
               for name in ("kind", "version", "place")},
        },
    )  # fmt: skip


def _faults(records: Iterable[NodeRecord], checks: Iterable[Finding]) -> Iterator[tuple[Group, str]]:
    """Each finding over all nodes, with the time of the oldest."""
    since = {
        (record.name, each.get("code"), each.get("subject")): seconds_of(each.get("since"))
        for record in records
        for each in record.findings
    }
    for group in grouped([check for check in checks if check.status in ("fail", "warn") or check.required]):
        times = [since.get((check.node, check.code, check.subject), 0.0) for check in group.checks]
        first = min(filter(None, times), default=0.0)
        yield group, clock(first) if first else ""


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


def _natural(text: str) -> list[tuple[int, str]]:
    """ "r2" before "r10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", text)]


def _map(rows: Sequence[Row], places: Places) -> tuple[tuple[str, tuple[Row, ...]], ...]:
    """Nodes by place, those without one last; all in one where no place is known."""
    found: Mapping[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: _natural(row.name)):
        found[row.place].append(row)
    if not places.label:
        return (("", tuple(found[""])),)
    ordered = sorted(found.items(), key=lambda pair: (not pair[0], _natural(pair[0])))
    return tuple((name or "no label", tuple(mine)) for name, mine in ordered)


def _families(fleet: Fleet, records: Iterable[NodeRecord], now: float) -> tuple[diff.FleetFamily, ...]:
    """Compare the reporting nodes with one kind of GPU, and return how some of them differ from the majority.

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

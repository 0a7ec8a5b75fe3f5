"""The agent's pages: one node, the cluster, a published node and what-if, from the sections of agent.pages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import urlencode

from markupsafe import Markup

from agent.advice.advise import EXPORTS, WHAT_IF_FIELDS
from agent.base import units, version
from agent.base.options import FIELDS, QUESTION, find_most
from agent.checks import history
from agent.checks.findings import FindingGroup, find_point, group_findings, is_problem
from agent.checks.host_checks import CLUSTER_CODES
from agent.checks.verdict import judge
from agent.checks.view import View
from agent.cluster.gate import check_nodes
from agent.cluster.nodes import Fleet, NodeRecord, parse_time
from agent.jobs import search
from agent.pages import digest, environment, group_rows, make_rows, render
from contracts.finding import Finding, Status
from planner.advice import Recommendation
from planner.forecast import machines, models
from topology import diff
from topology.paths import with_expectations

ROWS = 100  # per page of the table of the cluster's nodes


def render_node_page(
    view: View, advice: Recommendation | None, why_not: str, *, trouble: str | None, others: bool = False
) -> str:
    """Return the page of one node.

    `trouble` is why the newest scan failed, if this view is an older one; `others` says that the page of the whole
    cluster is not empty.
    """
    return render("node", view=view, advice=advice, why_not=why_not, trouble=trouble, others=others)


def render_fleet_page(fleet: Fleet, *, source: str, list_error: str | None, search: str = "", page: int = 1) -> str:
    """Return the page of all publishing nodes, from the records alone."""
    now = time.time()
    values = collect_fleet_values(fleet, now, search, page)
    return render("fleet", c=values, source=source, list_error=list_error, made_at=now, version=version())


def render_published_page(fleet: Fleet, record: NodeRecord, *, source: str) -> str:
    """Return the page of one node of the cluster, from its published record."""
    now = time.time()
    snapshot, node = fleet.snapshot(record), fleet.topology(record)
    topologies = () if node is None else (with_expectations(node),)
    checks = check_records(fleet, now, (record.name,))
    view = View(
        snapshots=(snapshot,), topologies=topologies, checks=checks, verdict=judge(checks),
        made_at_seconds=record.scanned_at_seconds,
    )  # fmt: skip
    age = units.duration(record.age_seconds(now))
    return render("published", view=view, record=record, source=source, silent=record.silent(now), age=age)


def render_what_if_page(view: View, fields: Mapping[str, str], advice: Recommendation | None, error: str) -> str:
    """Return the form and, if it was answered, the layouts."""
    query = {name: fields[name] for name in WHAT_IF_FIELDS if fields.get(name)}
    return render(
        "what_if", view=view, values={**dict.fromkeys(WHAT_IF_FIELDS, ""), **query}, query=query, advice=advice,
        error=error, machines=machines.names(), models=[model.name for model in models.KNOWN],
    )  # fmt: skip


def make_headers() -> dict[str, str]:
    """Return the headers of the agent's pages; their policy allows only content of the document and of this agent."""
    policy = (
        f"default-src 'none'; style-src '{digest('style.css')}'; script-src '{digest('page.js')}'; img-src data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
    return {
        "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-store", "Content-Security-Policy": policy,
    }  # fmt: skip


# The page of the whole cluster, created from the records alone.


def check_records(fleet: Fleet, now: float, names: Sequence[str] | None = None) -> tuple[Finding, ...]:
    """Return findings of these nodes' agents, or of all; if an older record has no remedy, use that of the docs.

    A silent node is unknown on the pages. The gate fails for it, because a job cannot be started there.
    """
    findings = check_nodes([record.name for record in fleet.records()] if names is None else names, fleet, now=now)
    silent = CLUSTER_CODES[0]
    return tuple(
        check if check.status == "pass" else replace(
            check, remedy=check.remedy or find_point(check.code, "Remedy"),
            required=check.required or check.code == silent,
            status=Status.UNKNOWN if check.code == silent else check.status,
        )
        for check in findings
    )  # fmt: skip


def cluster_address(search: str = "", page: int = 1) -> str:
    """Return the address of the cluster's page for a search and a page of its table."""
    query = {name: value for name, value in (("search", search), ("page", page)) if value not in ("", 1)}
    return "cluster" + (f"?{urlencode(query)}" if query else "")


def collect_fleet_values(fleet: Fleet, now: float, search: str = "", page: int = 1) -> SimpleNamespace:
    """Return all values that the page shows at `now` (Unix seconds); its table has the nodes that match `search`."""
    records, checks = fleet.records(), check_records(fleet, now)
    every = make_rows(records, checks, now)
    matching = [row for row in every if all(map(row.matches, search.lower().split()))]
    table = group_rows(matching)
    return SimpleNamespace(
        search=search, page=page, verdict=judge(checks), checks=checks, rows=every, matching=len(matching),
        shown=table[ROWS * (page - 1) : ROWS * page], pages=max(1, -(-len(table) // ROWS)),
        counts=dict(Counter(row.word for row in every)), faults=tuple(_list_faults(records, checks)),
        families=_compare_families(fleet, records, now),
    )  # fmt: skip


def _list_faults(records: Iterable[NodeRecord], checks: Iterable[Finding]) -> Iterator[tuple[FindingGroup, str]]:
    """Return each finding over all nodes, with the earliest start time."""
    rows = [(record.name, each) for record in records for each in record.findings]
    since = {(name, each.get("code"), each.get("subject")): parse_time(each.get("since")) for name, each in rows}
    for group in group_findings(filter(is_problem, checks)):
        times = [since.get((check.node, check.code, check.subject), 0.0) for check in group.checks]
        first = min(filter(None, times), default=0.0)
        yield group, units.clock(first) if first else ""


def _compare_families(fleet: Fleet, records: Iterable[NodeRecord], now: float) -> tuple[diff.FleetFamily, ...]:
    """Compare the reporting nodes with the same GPU model, and return how some of them differ from the majority.

    Equal machines are compared once. A record without a graph of this release is left out.
    """
    alike: dict[str, tuple[NodeRecord, list[str]]] = {}
    for record in records:
        if not record.silent(now) and fleet.topology(record):
            alike.setdefault(record.facts or "", (record, []))[1].append(record.name)
    if not alike:
        return ()
    result = diff.compare_fleet([(names, fleet.snapshot(record)) for record, names in alike.values()])
    return result.families


environment().globals.update(
    field=lambda name: QUESTION[FIELDS[name]], most=find_most, changed=history.describe_changes,
    exports=EXPORTS, cluster_address=cluster_address, search_summary=search.summarise,
    search_picture=lambda result: Markup(search.draw_pairs(result)),  # noqa: S704 - escaped there
)  # fmt: skip

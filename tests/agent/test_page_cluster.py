"""The page of the whole cluster: made of published records alone, sick nodes first, silent ones unknown."""

import re
import time
from dataclasses import replace
from pathlib import Path

from rigs.agents import agent
from rigs.fleet import record_of, resource_of, resources
from rigs.recorded import snapshot, view
from rigs.tables import ROOT, each_row

from agent.base import units
from agent.base.options import make_names_distinct
from agent.checks.verdict import judge
from agent.cluster.nodes import Fleet, NodeRecord, check_nodes as gate_of_nodes
from agent.http import pages
from agent.jobs.preflight import Report
from agent.pages import render_report
from contracts.finding import Interval

NAMES = ("hgx-h100-8xH100-8hca", "sick-h100-nvlink-missing", "sick-h100-memlock-64KiB", "sick-h100-thermal")


def published(*records: NodeRecord) -> Fleet:
    """As a watch of the NodeTopology resources has them: object and status, read back."""
    held = Fleet()
    held.replace(map(resource_of, records))
    return held


def page(held: Fleet, **asked) -> str:
    return pages.render_fleet_page(held, source="kubernetes", list_error=None, **asked)


def shown(held: Fleet, **asked):
    return pages.collect_fleet_values(held, time.time(), **asked)


def names_in(html: str) -> list[str]:
    table = html.split('<table class="nodes">')[1].split("</table>")[0]
    return re.findall(r'<a href="cluster\?node=[^"]*">([^<]+)', table)


def test_sick_nodes_come_first_and_silent_ones_are_unknown() -> None:
    """Order, first fault with its remedy, age; what a silent node said last does not count as its verdict."""
    silent = record_of(NAMES[0], "silent", scanned_at_seconds=time.time() - 7200)
    held = published(*map(record_of, NAMES), silent)
    html = page(held)
    assert names_in(html) == [
        "hgx-h100-sick-memlock", "hgx-h100-sick-nvlink", "hgx-h100-sick-thermal", "silent", "hgx-h100-01",
    ]  # fmt: skip
    assert "RLIMIT_MEMLOCK is 64 KiB" in html and "LimitMEMLOCK" in html
    seen = shown(held)
    failed = {check.node for check in seen.checks if check.status == "fail"}
    assert len(failed) == seen.counts["fail"] == 3 and seen.counts["unknown"] == 1
    assert {group.status for group, _ in seen.faults if "silent" in group.id} == {"unknown"}
    assert re.search(r"silent for 2(\.0\d)? h", html.lower())  # and what this test has taken since
    assert "source: kubernetes" in html


@each_row(("nodes", "sick"), [(1, True), (1, False), (64, True), (64, False), (400, True)])
def test_the_head_counts_what_the_tally_and_the_list_below_it_count(nodes: int, sick: bool) -> None:
    """Nodes as their verdicts are, findings as they are listed: one node that is sick is one of one."""
    held = Fleet()
    held.replace(resources(nodes, sick=sick))
    html, seen = page(held), shown(held)
    tally = dict(re.findall(r'class="(fail|unknown|warn)" href="[^"]*">[^<]*: (\d+) node', html))
    said = re.search(r'class="verdict v-\w+"><strong>[^<]*</strong> <span>([^<]*)</span>', html)
    whole = units.count(nodes, "node")
    words = [f"{tally[key]} {word}" for key, word in (("fail", "failed"), ("unknown", "unknown")) if key in tally]
    words += [f"{seen.counts['pass']} passed"] if "pass" in seen.counts else []
    found = f"; {units.count(len(seen.faults), 'finding')}" if sick else ""
    assert said and said[1] == f"{whole}: {', '.join(words)}{found}"
    assert sick == bool(tally.get("fail")) and nodes == len(seen.rows)


@each_row("nodes", [64, 400])
def test_equal_nodes_share_one_line_below_the_failed_ones(nodes: int) -> None:
    """Each failed node has its line; of the others those with the same findings, hardware and versions are one."""
    held = Fleet()
    held.replace(resources(nodes, sick=True))
    html, seen = page(held), shown(held)
    bad = seen.counts["fail"] + seen.counts["unknown"]
    lines = html.split('<table class="nodes">')[1].split("</table>")[0].count("<tr>") - 1
    assert lines <= bad + 1 and html.count("no finding") == 1
    first, last = names_in(html)[: seen.counts["fail"]], names_in(html)[-1]
    assert [row.word for row in seen.rows if row.name in first] == ["fail"] * seen.counts["fail"]
    assert f"<summary>{nodes - bad} equal nodes</summary>" in html and last not in first
    assert seen.matching == nodes == sum(map(len, seen.shown))
    report = Report(checks=seen.checks, verdict=seen.verdict, nodes=tuple(held.records()))
    assert f"<summary>{nodes - bad} equal nodes</summary>" in render_report(report)
    held = Fleet([*held.records(), record_of(NAMES[0], "other", links="NV4")])
    assert page(held).count("no finding") == 2


ODD: list = [
    "text", [1], {"gpus": "eight"}, {"gpus": 10**400}, {"gpus": True}, {"interval": 10**400}, {"interval": -1},
    {"interval": "x"}, {"findings": [1]}, {"findings": {"code": "x"}}, {"findings": [{"code": {}}]}, {"changes": "x"},
    {"verdict": "splendid"}, {"verdict": {}}, {"product": 1},
    {"links": []}, {"facts": 1}, {"facts": "text"},
    {"scannedAt": 10**400}, {"node": ["x"]}, {"agentVersion": 1},
    {"stoppedAt": [], "scannedAt": "9999-99-99T00:00:00Z"}, {"facts": "H4sI"},
]  # fmt: skip


@each_row("status", ODD)
def test_one_object_that_the_definition_would_refuse_hides_no_other(status) -> None:
    """Where the definition is older, or was changed by hand: that node is unknown, the others are as ever."""
    good = resource_of(record_of(NAMES[0]))
    whole = {"scannedAt": good["status"]["scannedAt"], **status} if isinstance(status, dict) else status
    held = Fleet()
    held.replace([{"metadata": {"name": "odd"}, "status": whole}, good])
    seen = {one.name: one for one in held.records()}
    assert set(seen) == {"odd", good["metadata"]["name"]} and seen["odd"].verdict == "unknown"
    assert page(held)
    assert judge(gate_of_nodes(sorted(seen), held)).word != "pass"


def test_without_kubernetes_the_page_says_how_to_see_more() -> None:
    """One agent knows its own node only."""
    http = agent()
    told = http.get("/nodes").json()
    assert [node["name"] for node in told["nodes"]] == ["hgx-h100-01"] and "--publish" in told["note"]
    assert "--publish" in http.get("/cluster").text


def test_the_node_with_two_links_fewer_differs_from_its_peers() -> None:
    """Machines are compared to the last link; heat makes no other machine."""
    (family,) = shown(published(*map(record_of, NAMES))).families
    odd = {group.nodes: [one.message for one in group.differences] for group in family.odd}
    assert any("NVLinks 18 -> 16" in text for text in odd["hgx-h100-sick-nvlink",])
    assert any("memlock unlimited -> 64 KiB" in text for text in odd["hgx-h100-sick-memlock",])


def test_a_large_cluster_keeps_the_page_readable() -> None:
    """The rows are bounded, the sick ones are among them, and the page says where the rest is."""
    many = [record_of(NAMES[0])] * pages.ROWS  # each with other links, so that no two share a line
    held = published(
        *(replace(one, name=f"node-{n:04}", links=f"NV{n}") for n, one in enumerate(many)),
        record_of(NAMES[2], "zz-sick"),
    )
    html = page(held)
    rows = names_in(html)
    assert rows[0] == "zz-sick"
    assert len(rows) == pages.ROWS
    assert "Page 1 of 2" in html and f"{pages.ROWS + 1} nodes" in html
    assert names_in(page(held, page=2)) == ["node-0099"]
    assert len(html) < 2_000_000


def test_nothing_published_is_said() -> None:
    """An empty cluster says how to deploy the agent, in the commands of the documentation."""
    html = page(Fleet())
    assert "<form" not in html and "0 nodes: none published yet" in html
    assert "<title>unknown" in html and 'class="verdict pass' not in html
    deploy = html.split('<pre id="deploy">')[1].split("</pre>")[0].splitlines()
    documented = (ROOT / "docs" / "how-to" / "deploy-kubernetes.md").read_text() + (ROOT / "README.md").read_text()
    assert len(deploy) == 3 and all(f"$ {line}\n" in documented for line in (x.strip() for x in deploy)), deploy


def test_recordings_of_one_host_name_get_the_names_of_their_files() -> None:
    """Pods often share a host name; a name that only one recording has stays as it is."""
    pod = snapshot("r760xa-2xA40-bf3")
    found = make_names_distinct((pod, pod, snapshot()), [Path("a/pod.json"), Path("b/pod.json"), Path("node.json")])
    assert [one.hostname for one in found] == ["lora-worker-0 (pod)", "lora-worker-0 (pod) 2", "hgx-h100-01"]
    assert make_names_distinct((pod,), [Path("a/pod.json")]) == (pod,)


def test_ages_and_counts_are_said_as_people_say_them() -> None:
    """An age in its largest unit; counts worst first, no zeros, no "1 warnings"; an interval with its units."""
    ends = {(0.528, 1.0): "727 ms (528 ms to 1 s)", (0.528, 0.9): "727 ms (528 to 900)"}
    assert {each: units.interval(Interval(low=each[0], mid=0.727, high=each[1]), "s") for each in ends} == ends
    ages = {0: "0 s", 60: "60 s", 120: "2 min", 7200: "2 h 0 min", 2e5: "2 d 7 h"}
    assert {seconds: units.duration(seconds) for seconds in ages} == ages
    counts = {"pass": 120, "fail": 0, "warn": 1, "unknown": 2, "info": 3}
    assert units.tally(counts) == "1 warning, 2 unknown, 120 passed"
    assert units.rest("fail", {"fail": 1, "warn": 2, "pass": 3}) == "3 passed"
    assert units.rest("pass", {"unknown": 1, "pass": 3}) == "3 passed" and units.rest("pass", {"unknown": 2}) == ""
    assert (units.bits(5e10), units.bits(4.5e11)) == ("400 Gb/s", "3.6 Tb/s")


def test_a_finding_has_the_same_remedy_on_every_page() -> None:
    """What the node's own page says, its record carries, and so the cluster's page and gate."""
    for name in NAMES[1:]:
        own = {(c.code, c.subject): c.remedy for c in view(name).checks if c.remedy}
        held = published(record_of(name))
        checks = [c for c in pages.check_records(held, time.time()) if c.status in ("fail", "warn")]
        assert checks and all(c.remedy == own[c.code, c.subject] for c in checks)


def test_the_search_reads_names_verdicts_and_findings() -> None:
    """All words have to be in the row."""
    held = published(*map(record_of, NAMES))

    def names(**asked) -> list[str]:
        return [row.name for mine in shown(held, **asked).shown for row in mine]

    assert names(search="MEMLOCK") == names(search="limits.memlock.low") == ["hgx-h100-sick-memlock"]
    assert names(search="pass") == ["hgx-h100-01"]
    assert names(search="nv18 thermal") == ["hgx-h100-sick-thermal"] and names(search="no such word") == []
    assert names_in(page(held, search="thermal")) == ["hgx-h100-sick-thermal"]
    held = published(*map(record_of, (*NAMES, "cpu-only-vm")))  # which shows "driver unknown"
    found = {word: shown(held, search=word).matching for word in ("fail", "unknown", "warn", "pass")}
    assert found == {"unknown": 0, "warn": 0} | shown(held).counts

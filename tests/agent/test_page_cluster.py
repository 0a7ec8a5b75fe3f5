"""The page of the whole cluster: made of published records alone, sick nodes first, silent ones unknown."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agent import units
from agent.cli.hosts import snapshots
from agent.cluster.nodes import Fleet, NodeRecord, records_of, to_resource
from agent.pages import nodes as page_nodes
from agent.pages import render as pages
from agent.view import look
from probes.host.recording import load
from probes.scan import scan

FOLDER = Path(__file__).parent.parent / "machines"
NAMES = ("hgx-h100-8xH100-8hca", "sick-h100-nvlink-missing", "sick-h100-memlock-64KiB", "sick-h100-thermal")


def record(machine: str, **changed: object) -> NodeRecord:
    (made,) = records_of(look((scan(load(FOLDER / f"{machine}.json")),)))
    return replace(made, **changed)  # type: ignore[arg-type]


def published(*records: NodeRecord) -> Fleet:
    """As a watch of the NodeTopology resources has them: object and status, read back."""
    held = Fleet()
    held.replace([{**about, "status": status["status"]} for about, status in map(to_resource, records)])
    return held


def page(held: Fleet) -> str:
    return pages.fleet_page(held, source="kubernetes", behind=None)


def names_in(html: str) -> list[str]:
    table = html.split('<table class="nodes">')[1].split("</table>")[0]
    return re.findall(r'<th scope="row">(?:<a href="[^"]*">)?([^<]+)', table)


def test_sick_nodes_come_first_and_silent_ones_are_unknown() -> None:
    """Order, first fault with its remedy, age; what a silent node said last does not count as its verdict."""
    silent = record(NAMES[0], name="silent", scanned_at_seconds=time.time() - 7200)
    held = published(*map(record, NAMES), silent)
    html = page(held)
    assert names_in(html) == [
        "hgx-h100-sick-memlock", "hgx-h100-sick-nvlink", "hgx-h100-sick-thermal", "silent", "hgx-h100-01",
    ]  # fmt: skip
    assert "RLIMIT_MEMLOCK is 64 KiB" in html and "LimitMEMLOCK" in html
    assert re.search(r"silent for 2(\.0\d)? h", html.lower())  # and what this test has taken since
    assert "source: kubernetes" in html


def test_a_node_whose_agent_has_never_written_is_unknown() -> None:
    """The object is there, its status is not."""
    held = published(record(NAMES[0]))
    held.put({"metadata": {"name": "new"}})
    html = page(held)
    assert names_in(html) == ["new", "hgx-h100-01"]
    assert "agent has never answered" in html and "never</td>" in html


def test_without_kubernetes_the_page_says_how_to_see_more() -> None:
    """One agent knows its own node only."""
    from starlette.testclient import TestClient

    from agent.http.server import create
    from agent.http.state import State

    state = State(lambda: (scan(load(FOLDER / f"{NAMES[0]}.json")),), interval_seconds=3600)
    state.refresh()
    http = TestClient(create(state))
    told = http.get("/nodes").json()
    assert [node["name"] for node in told["nodes"]] == ["hgx-h100-01"] and "--publish" in told["note"]
    assert "--publish" in http.get("/cluster").text


def test_classes_of_gpu_pairs_are_counted_in_words() -> None:
    """On the page of the cluster, in the resource and in kubectl's column; the first word stays the class."""
    assert record(NAMES[0]).links == "NV18 (28 pairs)"
    assert record("l40s-4x-pcie").links == "SYS (4 pairs), PIX (2 pairs)"
    assert record("titan-rtx-2x-nv2").links == "NV2 (1 pair)"


def test_the_node_with_two_links_fewer_is_a_kind_of_its_own() -> None:
    """Graphs are compared to the last link: memlock and heat do not make another kind."""
    found = page_nodes.kinds(published(*map(record, NAMES)))
    assert [kind.names for kind in found] == [
        ("hgx-h100-01", "hgx-h100-sick-memlock", "hgx-h100-sick-thermal"), ("hgx-h100-sick-nvlink",),
    ]  # fmt: skip


def test_a_large_cluster_keeps_the_page_readable() -> None:
    """The rows are bounded, the sick ones are among them, and the page says where the rest is."""
    many = [record(NAMES[0])] * page_nodes.SHOWN_ROWS
    held = published(
        *(replace(one, name=f"node-{n:04}") for n, one in enumerate(many)), record(NAMES[2], name="zz-sick")
    )
    html = page(held)
    rows = names_in(html)
    assert rows[0] == "zz-sick"
    assert len(rows) == page_nodes.SHOWN_ROWS
    assert "And 1 more, none sicker than these" in html
    assert f"{page_nodes.SHOWN_ROWS + 1} nodes" in html
    assert len(html) < 2_000_000


def test_names_of_strangers_stay_text() -> None:
    """A record is written by another machine."""
    hostile = "<script>alert(1)</script>"
    bad = record(NAMES[0], name="n", product=hostile, links=hostile, rdma=hostile,
                 findings=({"code": hostile, "severity": "fail", "subject": hostile, "message": hostile},))  # fmt: skip
    html = page(published(bad))
    assert "<script>alert" not in html


def test_nothing_published_is_said() -> None:
    """An empty cluster is a sentence, not an empty table."""
    assert "No agent publishes a node yet." in page(Fleet())


def test_two_recordings_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Pods often share a name: the file's name stands beside it; different names are left as they are."""
    text = (FOLDER / "r760xa-2xA40-bf3.json").read_bytes()
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "pod.json").write_bytes(text)
    found = snapshots([tmp_path / "a" / "pod.json", tmp_path / "b" / "pod.json", FOLDER / f"{NAMES[0]}.json"])
    names = [snapshot.hostname for snapshot in found]
    assert names == ["lora-worker-0 (pod)", "lora-worker-0 (pod) 2", "hgx-h100-01"]
    assert [s.hostname for s in snapshots([tmp_path / "a" / "pod.json"])] == ["lora-worker-0"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (2e5, "2.31 d")]
)
def test_an_age_is_said_in_its_largest_unit(seconds: float, said: str) -> None:
    """As people say it."""
    assert units.ago(seconds) == said


def test_counts_agree_with_their_nouns() -> None:
    """Worst first, no zeros, no "1 warnings"."""
    assert (
        units.tally({"pass": 120, "fail": 0, "warn": 1, "unknown": 2, "info": 3}) == "1 warning, 2 unknown, 120 passed"
    )
    assert units.rest("fail", {"fail": 1, "warn": 2, "pass": 3}) == "2 warnings, 3 passed"
    assert units.rest("pass", {"unknown": 1, "pass": 3}, "below") == "1 check unknown, named below; 3 passed"
    assert units.rest("pass", {"unknown": 2, "pass": 0}) == "2 checks unknown"
    assert units.rest("pass", {"unknown": 0, "pass": 3}, "below") == "3 passed"
    assert units.bits(5e10) == "400 Gb/s"
    assert units.bits(4.5e11) == "3.6 Tb/s"
    assert units.need("shm_bytes", "2147483648") == "2.0 GiB of shared memory (/dev/shm)"


def test_a_finding_has_the_same_remedy_on_every_page() -> None:
    """What the node's own page says, its record carries, and so the cluster's page and gate."""
    for name in NAMES[1:]:
        own = {(c.id, c.subject): c.remedy for c in look((scan(load(FOLDER / f"{name}.json")),)).checks if c.remedy}
        held = published(record(name))
        checks = [c for c in page_nodes.checks_of_records(held, time.time()) if c.status in ("fail", "warn")]
        assert checks and all(c.remedy == own[c.id, c.subject] for c in checks)

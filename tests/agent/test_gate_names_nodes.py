"""Several nodes in one report: each finding says of which node it is, in every format; and no verdict on no node."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient
from rigs.command import topoflight
from rigs.recorded import path_of
from rigs.tables import each_row

from agent.checks.verdict import judge
from agent.checks.view import look
from agent.cluster.nodes import Fleet
from agent.http.server import create
from agent.http.state import State
from agent.pages.render import fleet_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of three nodes: one healthy, two sick with something of their own."""
    made = tmp_path_factory.mktemp("nodes")
    for name in ("hgx-h100-8xH100-8hca", "sick-h100-gpu-lost", "sick-h100-nvlink-missing"):
        shutil.copy(path_of(name), made)
    return made


def preflight(folder: Path, *options: str) -> str:
    return topoflight("preflight", "-q", "--host", folder, *options).stdout


LOST, CUT, WELL = "hgx-h100-sick-lost", "hgx-h100-sick-nvlink", "hgx-h100-01"


def test_the_table_names_the_node_of_a_finding_that_only_one_has(folder: Path) -> None:
    """gpu.device.lost is the lost one's, gpu.nvlink.missing the other's."""
    verdict, *blocks = re.split(r"\n(?=[✗!?·✓])", preflight(folder))
    assert f"gpu.device.lost on GPU5 of {LOST}" in verdict
    (lost,) = [block for block in blocks if "gpu.device.lost" in block.splitlines()[0]]
    (cut,) = [block for block in blocks if "gpu.nvlink.missing" in block.splitlines()[0]]
    assert LOST in lost and CUT not in lost
    assert CUT in cut and LOST not in cut


def test_junit_and_github_name_the_node_of_every_finding(folder: Path) -> None:
    """The suite, its host and the message itself, which viewers show alone."""
    root = ElementTree.fromstring(preflight(folder, "-o", "junit"))  # noqa: S314 - our own text
    failures = [(suite, case) for suite in root for case in suite if case.find("failure") is not None]
    assert failures
    for suite, case in failures:
        failure: Any = case.find("failure")
        assert suite.get("hostname") == suite.get("name")
        assert failure.get("message").startswith(f"{suite.get('name')}: ")
    lines = preflight(folder, "-o", "github").splitlines()
    assert lines
    assert all(re.match(rf"::\w+ title=\S+( \S+)* on ({LOST}|{CUT}|{WELL})::", line) for line in lines), lines


@each_row("door", ["/cluster", "/nodes", "/nodes?scope=node", "/topology?scope=cluster"])
def test_before_the_first_scan_the_cluster_is_503_like_readyz(door: str) -> None:
    """Nothing is known of any node yet: no green page over none."""
    state = State(tuple, interval_seconds=3600)
    client = TestClient(create(state), raise_server_exceptions=False)  # without its life: nothing is scanned
    ready, answer = client.get("/readyz"), client.get(door)
    assert (ready.status_code, answer.status_code) == (503, 503)
    assert answer.headers["retry-after"] == ready.headers["retry-after"]
    assert answer.json()["detail"] == ready.json()["detail"] == "the first scan is not done yet"


def test_a_cluster_of_no_nodes_and_a_gate_of_no_checks_are_unknown() -> None:
    """An API server without records; a gate that skips everything; a view of no host."""
    page = fleet_page(Fleet(), source="kubernetes", behind=None)
    assert "<title>unknown" in page and 'class="verdict pass' not in page
    assert (judge(()).word, judge(()).exit_code) == ("unknown", 5)
    assert look(()).verdict.word == "unknown"
    result = topoflight("preflight", "-q", "--host", path_of("cpu-only-vm"), "--skip", "*", "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["verdict"]["why"]) == (5, "nothing was measured")

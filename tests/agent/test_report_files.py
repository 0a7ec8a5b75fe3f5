"""Reports in every format: whole or absent, naming the node of each finding, safe against what others have written."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient
from junitparser import JUnitXml
from rigs.command import topoflight
from rigs.recorded import path_of
from rigs.tables import each_row

from agent.base.output import write_atomic
from agent.checks.verdict import judge
from agent.http.server import create
from agent.http.state import State
from agent.jobs.preflight import Report, render_junit
from agent.pages import render_report
from contracts.finding import Finding, Status
from contracts.run_record import RunRecord
from probes.api import Absent, Snapshot

HOSTILE = "<script>alert(1)</script> ]]> \x00\x1b[31m & \"quotes\" 'and' | pipes `ticks`\ud800".encode(
    "utf-8", "replace"
).decode()


def report(*checks: Finding) -> Report:
    absent = {"gpu": Absent(why="no GPU")}
    snapshot = Snapshot(hostname="node-a", taken_at_seconds=0.0, outcomes=absent)
    return Report(snapshots=(snapshot,), checks=checks, verdict=judge(checks))


CHECKS = (
    Finding(code="a.fails", status=Status.FAIL, node="node-a", subject="GPU0", message=HOSTILE, evidence=(HOSTILE,),
            remedy=HOSTILE),
    Finding(code="a.warns", status=Status.WARN, node="node-a", message="slow"),
    Finding(code="a.unknown", status=Status.UNKNOWN, node="node-a", message="not measured"),
    Finding(code="a.required", status=Status.UNKNOWN, node="node-a", message="not measured", required=True),
    Finding(code="a.passes", status=Status.PASS, node="node-b"),
)  # fmt: skip


def test_junit_counts_what_ci_will_count(tmp_path: Path) -> None:
    """Failure, error (a required unknown) and skip (an unknown) as JUnit's own reader sees them."""
    path = tmp_path / "junit.xml"
    path.write_text(render_junit(report(*CHECKS)), encoding="utf-8")
    suites = {suite.name: suite for suite in JUnitXml.fromfile(str(path))}
    a = suites["node-a"]
    assert (a.tests, a.failures, a.errors, a.skipped) == (4, 1, 1, 1)
    assert suites["node-b"].tests == 1


def test_hostile_text_stays_text() -> None:
    """A log line quoted as evidence can neither break the XML nor run in the page."""
    whole = report(*CHECKS)
    ElementTree.fromstring(render_junit(whole))  # noqa: S314 - our own output
    html = render_report(replace(whole, run=RunRecord(status="failed", reason=HOSTILE)))
    assert "<script>alert" not in html
    assert "&lt;script&gt;" in html
    for word in ("http://", "https://", "src=", "@import", "url("):
        assert word not in html.replace("data:,", ""), "one file, which fetches nothing"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """Whole or absent: a reader never sees half a report."""
    target = tmp_path / "report.json"
    write_atomic(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(target, "\ud800")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


LOST, CUT, WELL = "hgx-h100-sick-lost", "hgx-h100-sick-nvlink", "hgx-h100-01"


def test_junit_and_github_name_the_node_of_every_finding(tmp_path: Path) -> None:
    """The suite, its host and the message itself, which viewers show alone; of three nodes one is healthy."""
    for name in ("hgx-h100-8xH100-8hca", "sick-h100-gpu-lost", "sick-h100-nvlink-missing"):
        shutil.copy(path_of(name), tmp_path)
    words = ("preflight", "-q", "--host", tmp_path, "-o")
    junit, github = (topoflight(*words, form).stdout for form in ("junit", "github"))
    root = ElementTree.fromstring(junit)  # noqa: S314 - our own text
    failures = [(suite, case) for suite in root for case in suite if case.find("failure") is not None]
    assert failures
    for suite, case in failures:
        failure = case.find("failure")
        assert suite.get("hostname") == suite.get("name")
        assert failure.get("message").startswith(f"{suite.get('name')}: ")
    lines = github.splitlines()
    assert lines
    assert all(re.match(rf"::\w+ title=\S+( \S+)* on ({LOST}|{CUT}|{WELL})::", line) for line in lines), lines


@each_row("door", ["/cluster", "/nodes"])
def test_before_the_first_scan_the_cluster_is_503_like_readyz(door: str) -> None:
    """Nothing is known of any node yet: no green page over none."""
    state = State(tuple, interval_seconds=3600)
    client = TestClient(create(state), raise_server_exceptions=False)  # without its life: nothing is scanned
    ready, answer = client.get("/readyz"), client.get(door)
    assert (ready.status_code, answer.status_code) == (503, 503)
    assert answer.headers["retry-after"] == ready.headers["retry-after"]
    assert answer.json()["detail"] == ready.json()["detail"] == "the first scan is not done yet"


STEERING = "\x1b]0;owned\x07\x1b[2J\x9b31m\x00\r::error::\u202egnp.exe\u2066 a\x7fb"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def recording(tmp_path: Path) -> str:
    """A sick machine whose names and words are hostile: hostname, product, board, driver and the kernel's log."""
    content: dict = json.loads(path_of("sick-h100-gpu-lost").read_text(encoding="utf-8"))
    answers = content["answers"]
    content["hostname"] = answers["identity"][""]["hostname"] = f"node{STEERING}"
    for path in answers["read_text"]:
        if path.endswith(("/product_name", "/board_id", "/fw_ver")):
            answers["read_text"][path] += STEERING
    answers["nvml"]["nvmlSystemGetDriverVersion"][""] = f"550{STEERING}"
    answers["nvml"]["nvmlDeviceGetName"]["gpu0"] = f"NVIDIA H100 80GB HBM3{STEERING}"  # so that models are mixed
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


@each_row(
    "words",
    [
        ("scan", "--all"), ("topo",), ("diff", path_of()), ("preflight", "-o", "table"), ("preflight", "-o", "junit"),
        ("preflight", "-o", "github"),
    ],
)  # fmt: skip
def test_control_characters_are_printed_by_no_verb(words: tuple[str, ...], recording: str, tmp_path: Path) -> None:
    verb, *options = words
    place = [recording] if verb == "diff" else ["--host", recording]
    made = topoflight(verb, *options, *place, TOPOFLIGHT_STATE=str(tmp_path))
    assert "owned" in made.output, made.output
    assert not STEERS.search(made.output), repr(STEERS.search(made.output))
    assert not any(line.startswith("::error::") for line in made.output.splitlines())
    if "junit" in words:
        ElementTree.fromstring(made.stdout)  # noqa: S314 - our own

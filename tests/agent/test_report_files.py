"""The report's files: whole or absent, parseable by what reads them, safe against what a log may hold."""

from __future__ import annotations

import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from junitparser import JUnitXml

from agent.base.output import write_atomic
from agent.checks.verdict import judge
from agent.jobs.preflight import Report, junit
from agent.pages.report import report_page
from contracts.finding import Finding, Status
from probes.api import Absent, Snapshot

HOSTILE = "<script>alert(1)</script> ]]> \x00\x1b[31m & \"quotes\" 'and' | pipes `ticks`\ud800".encode(
    "utf-8", "replace"
).decode()


def report(*checks: Finding) -> Report:
    snapshot = Snapshot(
        hostname="node-a", taken_at_seconds=0.0, topoflight_version="0", outcomes={"gpu": Absent(why="no GPU")}
    )
    return Report(
        started_at_seconds=time.time(), seconds=1.0, topoflight_version="0", snapshots=(snapshot,), topologies=(),
        checks=checks, verdict=judge(checks),
    )  # fmt: skip


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
    path.write_text(junit(report(*CHECKS)), encoding="utf-8")
    suites = {suite.name: suite for suite in JUnitXml.fromfile(str(path))}
    a = suites["node-a"]
    assert (a.tests, a.failures, a.errors, a.skipped) == (4, 1, 1, 1)
    assert suites["node-b"].tests == 1


def test_hostile_text_stays_text() -> None:
    """A log line quoted as evidence can neither break the XML nor run in the page."""
    whole = report(*CHECKS)
    ElementTree.fromstring(junit(whole))  # noqa: S314 - our own output
    html = report_page(whole)
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

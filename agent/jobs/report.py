"""The report of one preflight: the document, and the files a person keeps.

`report.json` is the whole document, `report.html` one self-contained page, `junit.xml` what CI systems read.
Every file is written beside its final name and renamed, so that none is ever half there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from agent.base.documents import document, write_atomic
from agent.checks.baseline import REPORT_VERSION
from agent.checks.groups import worst_first
from agent.checks.verdict import Verdict, unjudged
from agent.cluster.nodes import NodeRecord
from collectives.bench.results import BenchResult
from contracts.finding import Finding
from contracts.plain import printable
from contracts.run_record import Comparison, RunRecord, compare
from planner.advice import Recommendation
from probes.api import Snapshot
from topology.graph import NodeTopology

NAMED = 8  # hosts in a title


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that one run established, and what it could not."""

    started_at_seconds: float
    seconds: float
    topoflight_version: str
    snapshots: tuple[Snapshot, ...]
    topologies: tuple[NodeTopology, ...]
    checks: tuple[Finding, ...]
    verdict: Verdict
    bench: BenchResult | None = None
    recommendation: Recommendation | None = None
    flight: RunRecord | None = None
    flights: tuple[RunRecord, ...] = ()  # of this and earlier runs, newest first
    notes: tuple[str, ...] = ()  # steps that were left out, and why
    nodes: tuple[NodeRecord, ...] = ()  # judged by what their agents published, without their graphs
    schema_version: int = REPORT_VERSION

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Step time and memory of the run beside its forecast; empty without a run."""
        return compare(self.flight) if self.flight else ()

    @property
    def subject(self) -> str:
        """The hosts or nodes that this is about, in words."""
        names = [s.hostname for s in self.snapshots] or [node.name for node in self.nodes]
        return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def write_folder(report: Report, folder: Path, html: str) -> tuple[Path, ...]:
    """Write the report's files into `folder`, made if need be; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "report.json": json.dumps(document(report), indent=1, sort_keys=True) + "\n",
        "report.html": html,
        "junit.xml": junit(report),
    }
    return tuple(write_atomic(folder / name, text) for name, text in files.items())


def junit(report: Report) -> str:
    """JUnit XML: a suite per node, a case per check; unknown is an error only where it was required."""
    from xml.etree import ElementTree

    aside = unjudged(report.checks)
    root = ElementTree.Element("testsuites", name="topoflight preflight" + (f": {aside}" if aside else ""))
    nodes: dict[str, list[Finding]] = {}
    for check in report.checks:
        nodes.setdefault(check.node or "run", []).append(check)
    for node, checks in sorted(nodes.items()):
        suite = ElementTree.SubElement(root, "testsuite", name=node)
        if node != "run":
            suite.set("hostname", node)
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in _measured(report):
            ElementTree.SubElement(properties, "property", name=name, value=value)
        counts = {"tests": len(checks), "failures": 0, "errors": 0, "skipped": 0}
        for check in worst_first(checks):
            name = f"{check.code} [{check.subject}]" if check.subject else check.code
            case = ElementTree.SubElement(suite, "testcase", classname=f"{node}.{check.code.split('.')[0]}", name=name)
            # viewers show a message without its suite: it names the node by itself
            message = f"{check.node}: {check.message}" if check.node and check.message else check.message
            text = "\n".join((message, *check.evidence, check.remedy)).strip()
            if check.status == "fail":
                counts["failures"] += 1
                ElementTree.SubElement(case, "failure", message=message).text = text
            elif check.status == "unknown" and check.required:
                counts["errors"] += 1
                ElementTree.SubElement(case, "error", message=message).text = text
            elif check.status == "unknown":
                counts["skipped"] += 1
                ElementTree.SubElement(case, "skipped", message=f"unknown: {check.message}")
            elif text:
                ElementTree.SubElement(case, "system-out").text = f"{check.status}: {text}"
        for key, number in counts.items():
            suite.set(key, str(number))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + printable(ElementTree.tostring(root, encoding="unicode")) + "\n"


def _measured(report: Report) -> list[tuple[str, str]]:
    if report.bench is None:
        return []
    return [
        (f"{m.op}.{m.bytes}.busbw_bytes_per_second", f"{m.busbw_bytes_per_second:.6g}")
        for m in report.bench.measurements
        if m.verified
    ]

"""Whole verdicts: of short logs (tests/golden/evidence.jsonl has a log a line), and experts' of the corpus's logs."""

import json
from dataclasses import fields

import pytest
from rigs.logs import read
from rigs.tables import corpus_folder, each_row, golden_rows

from collectives.nccl_log import evidence
from collectives.nccl_log.codes import CODES
from collectives.nccl_log.transport import Evidence

TEXTS = ("problems", "notes", "proof", "fabric", "lines_read", "schema_version", "runs")


def row_of(verdict: Evidence) -> dict:
    """Every field that is not its type's default, problems with the lines that prove them, and what a gate answers."""
    usual = Evidence()
    plain = evidence.to_json(verdict)
    found = {each.name: plain[each.name] for each in fields(Evidence) if each.name not in TEXTS
             and getattr(verdict, each.name) != getattr(usual, each.name)}  # fmt: skip
    found["problems"] = [  # with the action where it is not that of the code
        [p.severity, p.code, p.message, p.place, [row.line for row in p.lines],
         *([p.action] if p.action != CODES[p.code].action else [])]
        for p in verdict.problems
    ]  # fmt: skip
    found["notes"] = [note.code for note in verdict.notes]
    found["runs"] = [[run.first.line, run.inter_node_transport, run.gdrdma, run.outcome] for run in verdict.runs]
    found["fabric"] = [[row.line, row.proves] for row in verdict.fabric]
    gates = [evidence.exit_code(verdict), evidence.exit_code(verdict, fail_on="warn")]
    return {name: value for name, value in found.items() if value} | {"exit_codes": gates}


def test_golden_verdicts() -> None:
    """A row says what it shows; rows that differ in one fact are adjacent."""
    golden_rows("evidence.jsonl", "verdict", lambda row: row_of(read(row["lines"])))


GDRDMA = {"on": True, "off": False, "partial": "partial", "none": None}


@pytest.mark.corpus
@each_row("case", lambda: json.loads((corpus_folder() / "nccl_logs/index.json").read_text()), ids=lambda c: c["file"])
def test_the_verdict_is_the_experts(corpus, case: dict) -> None:
    """Every field that the index states, no problem beyond those it lists, and proof by number and text of lines."""
    path = corpus / "nccl_logs" / case["file"]
    verdict = evidence.read_files([path])
    got: dict = {
        "inter_node_transport": verdict.inter_node_transport,
        "intra_node_transport": verdict.intra_node_transport,
        "gdrdma": GDRDMA[verdict.gdrdma],
        "problems": sorted(problem.code for problem in verdict.problems),
        "pxn": verdict.pxn,
        "link_layer": verdict.link_layer,
        "library": verdict.library,
    }
    want = {key: case[key] for key in got if key in case} | {"problems": sorted(case["problems"])}
    # An excerpt may have lost the line that states the version; what is not there cannot be read.
    version = case["nccl_version"]
    if version is None or version.removeprefix("RCCL ") in path.read_text(errors="replace"):
        got["nccl_version"], want["nccl_version"] = verdict.nccl_version, version
    assert {key: got[key] for key in want} == want
    lines = path.read_bytes().split(b"\n")
    assert verdict.lines_read == len(lines) - (lines[-1] == b"")
    rows = [row for problem in verdict.problems for row in problem.lines] + list(verdict.proof)
    for row in rows:
        assert row.text[:60].encode() in lines[row.line - 1]

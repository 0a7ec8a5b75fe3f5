"""What short logs prove, each with its whole verdict: tests/golden/evidence.jsonl has a log a line."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rigs.logs import read
from rigs.tables import golden_rows

from collectives.nccl_log import evidence
from collectives.nccl_log.codes import CODES
from collectives.nccl_log.transport import Evidence

TEXTS = ("problems", "notes", "proof", "fabric", "lines_read", "schema_version", "runs")


def row_of(verdict: Evidence) -> dict[str, Any]:
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
    """A row says what it shows: two that differ in one fact stand beside each other."""
    golden_rows("evidence.jsonl", "verdict", lambda row: row_of(read(row["lines"])))

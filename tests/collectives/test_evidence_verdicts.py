"""What short logs prove, each with its whole verdict: tests/golden/evidence.jsonl has a log a line.

`TOPOFLIGHT_UPDATE_GOLDEN=1` rewrites the verdicts; a new row needs `what` and `lines` alone. Read the difference.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from rigs.logs import read

from collectives.nccl_log import evidence
from collectives.nccl_log.codes import CODES
from collectives.nccl_log.transport import Evidence

FILE = Path(__file__).parents[1] / "golden" / "evidence.jsonl"
TEXTS = ("problems", "notes", "proof", "fabric", "lines_read", "schema_version", "runs")


def row_of(verdict: Evidence) -> dict[str, Any]:
    """Every field that is not its type's default, problems with the lines that prove them, and what a gate answers."""
    usual = Evidence()
    plain = evidence.to_json(verdict)
    found = {each.name: plain[each.name] for each in fields(Evidence) if each.name not in TEXTS
             and getattr(verdict, each.name) != getattr(usual, each.name)}  # fmt: skip
    found["problems"] = [  # with the action where it is not that of the code
        [
            p.severity,
            p.code,
            p.message,
            p.place,
            [row.line for row in p.lines],
            *([p.action] if p.action != CODES[p.code].action else []),
        ]
        for p in verdict.problems
    ]
    found["notes"] = [note.code for note in verdict.notes]
    found["runs"] = [[run.first.line, run.inter_node_transport, run.gdrdma, run.outcome] for run in verdict.runs]
    found["fabric"] = [[row.line, row.proves] for row in verdict.fabric]
    gates = [evidence.exit_code(verdict), evidence.exit_code(verdict, fail_on="warn")]
    return {name: value for name, value in found.items() if value} | {"exit_codes": gates}


def test_golden_verdicts() -> None:
    """A row says what it shows: two that differ in one fact stand beside each other."""
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    made = [row | {"verdict": json.loads(json.dumps(row_of(read(row["lines"]))))} for row in rows]
    if os.environ.get("TOPOFLIGHT_UPDATE_GOLDEN") == "1":
        FILE.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")
        return
    wrong = [
        (row["what"], row.get("verdict"), new["verdict"]) for row, new in zip(rows, made, strict=True) if row != new
    ]
    assert wrong == []

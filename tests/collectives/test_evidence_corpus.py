"""Experts' verdicts on real logs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from collectives.nccl_log import evidence

LOGS = Path(os.environ.get("TOPOFLIGHT_CORPUS", Path(__file__).parents[3] / "shared" / "corpus")) / "nccl_logs"
GDRDMA = {"on": True, "off": False, "partial": "partial", "none": None}

pytestmark = [
    pytest.mark.corpus,
    pytest.mark.skipif(not LOGS.is_dir(), reason="no corpus of NCCL logs: set TOPOFLIGHT_CORPUS"),
]


def cases() -> list[dict[str, Any]]:
    index = LOGS / "index.json"
    return json.loads(index.read_text()) if index.is_file() else []


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["file"])
def test_the_verdict_is_the_experts(case: dict[str, Any]) -> None:
    """Every field that the index states, no problem beyond those it lists, and proof by number and text of lines."""
    path = LOGS / case["file"]
    verdict = evidence.read_files([path])
    got: dict[str, Any] = {
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

"""Experts' verdicts on real logs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collectives.nccl_log import evidence

LOGS = Path(os.environ.get("TOPOFLIGHT_CORPUS", Path(__file__).parents[3] / "shared" / "corpus")) / "nccl_logs"
GDRDMA = {"on": True, "off": False, "partial": "partial", "none": None}

pytestmark = pytest.mark.corpus


def cases() -> list[dict[str, Any]]:
    index = LOGS / "index.json"
    return json.loads(index.read_text()) if index.is_file() else []


@pytest.mark.skipif(not LOGS.is_dir(), reason="no corpus of NCCL logs: set TOPOFLIGHT_CORPUS")
@pytest.mark.parametrize("case", cases(), ids=lambda case: case["file"])
def test_the_verdict_is_the_experts(case: dict[str, Any]) -> None:
    """Every field the index states, and no problem beyond those it lists."""
    path = LOGS / case["file"]
    verdict = evidence.read_file(path)
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


@pytest.mark.skipif(not LOGS.is_dir(), reason="no corpus of NCCL logs: set TOPOFLIGHT_CORPUS")
@pytest.mark.parametrize("case", cases(), ids=lambda case: case["file"])
def test_every_problem_shows_where_it_is(case: dict[str, Any]) -> None:
    """Proof lines carry the number and the text of a line of the file."""
    path = LOGS / case["file"]
    lines = path.read_bytes().split(b"\n")
    verdict = evidence.read_file(path)
    assert verdict.lines_read == len(lines) - (lines[-1] == b"")
    rows = [row for problem in verdict.problems for row in problem.lines] + list(verdict.proof)
    for row in rows:
        assert row.text[:60].encode() in lines[row.line - 1]


DRESSES: dict[str, Callable[[int, str], str]] = {
    "mpirun": lambda n, line: f"[1,{n % 16}]<stdout>:{line}",
    "horovodrun": lambda n, line: f"[{n % 16}]<stdout>:{line}",
    "srun": lambda n, line: f"{n % 16:2}: {line}",
    "torchrun": lambda n, line: f"[rank{n % 16}]: {line}",
    "ray": lambda n, line: f"\x1b[36m(RayTrainWorker pid={n}, ip=10.0.0.{n % 250})\x1b[0m {line}",
    "kubectl": lambda n, line: f"2026-01-02T03:04:{n % 60:02}.123456789Z {line}",
    "kubectl prefix": lambda n, line: f"[pod/trainer-{n % 4}/main] {line}",
    "compose": lambda n, line: f"worker-{n % 4}  | {line}",
    "slurm": lambda n, line: f"[2026-01-02 03:04:{n % 60:02}] {line}",
    "quoted": lambda _, line: f"> {line}",
    "list": lambda _, line: f"* {line}",
    "indented": lambda _, line: f"    {line}",
    "carriage return": lambda _, line: f"{line}\r",
    "colours": lambda _, line: f"\x1b[32m{line}\x1b[0m",
    "progress bar": lambda n, line: f" {n % 100}%|###  | {n}/900 [00:01<00:20]\r{line}",
    "html": lambda _, line: line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"),
    "torchrun tee": lambda n, line: f"[default{n % 8}]:{line}",
    "ray repeated": lambda n, line: f"(RayWorker pid={n}, ip=10.0.0.1) {line} [repeated 3x across cluster]",
    "syslog": lambda _, line: f"<14>1 2026-11-21T04:16:49.003Z node-1 train 1234 - - {line}",
    "cloudwatch": lambda _, line: f"  | 2026-01-02T03:04:05.208-07:00 | {line}",
    "loki": lambda _, line: f'2026-01-02T03:04:05Z {{app="train",pod="t-0"}} {line}',
    "cri": lambda _, line: f"2026-01-02T03:04:05.123456789+00:00 stdout F {line}",
    "table": lambda _, line: f"| {line} |",
    "page": lambda n, line: f'<span id="L{n}">' + line.replace("<", "&lt;").replace(">", "&gt;") + "</span><br>",
    "stackdriver": lambda _, line: json.dumps({"textPayload": line, "severity": "INFO"}),
    "fluent bit": lambda _, line: json.dumps({"message": json.dumps({"log": line + "\n"})}),
    "json": lambda _, line: json.dumps({"log": f"{line}\n", "stream": "stdout"}).replace(">", "\\u003e"),
}


def verdict_of(lines: list[str]) -> tuple[object, ...]:
    verdict = evidence.read([line + "\n" for line in lines])
    codes = tuple(sorted(problem.code for problem in verdict.problems))
    fields = (verdict.inter_node_transport, verdict.intra_node_transport, verdict.gdrdma, verdict.nccl_version)
    return (*fields, verdict.send, verdict.receive, codes)


@pytest.mark.skipif(not LOGS.is_dir(), reason="no corpus of NCCL logs: set TOPOFLIGHT_CORPUS")
@pytest.mark.parametrize("dress", DRESSES)
def test_a_launcher_changes_no_verdict(dress: str) -> None:
    """The same logs through every launcher, pager and container runtime."""
    for case in cases():
        lines = (LOGS / case["file"]).read_text(errors="replace").split("\n")
        dressed = [DRESSES[dress](number, line) for number, line in enumerate(lines)]
        assert verdict_of(dressed) == verdict_of(lines), case["file"]


def interleave(lines: list[str], chance: random.Random) -> list[str]:
    """As two processes write to one pipe: lines glued, split, and written into each other."""
    out: list[str] = []
    rest = iter(lines)
    for line in rest:
        kind = chance.random()
        cut = chance.randint(1, max(1, len(line) - 1))
        if kind < 0.03:
            out.append(line + next(rest, ""))
        elif kind < 0.06:
            out += [line[:cut], line[cut:]]
        elif kind < 0.09:
            out += [line[:cut] + next(rest, ""), line[cut:]]
        else:
            out.append(line)
    return out


@pytest.mark.skipif(not LOGS.is_dir(), reason="no corpus of NCCL logs: set TOPOFLIGHT_CORPUS")
@pytest.mark.parametrize("seed", range(6))
def test_interleaving_changes_no_verdict(seed: int) -> None:
    """One line in ten torn: what joins nodes and GPUs, and whether GPUDirect RDMA is on, stays."""
    chance = random.Random(seed)
    for case in cases():
        lines = (LOGS / case["file"]).read_text(errors="replace").split("\n")
        if len(lines) < 40:
            continue  # a tear in a short excerpt may take the only line that says it
        assert verdict_of(interleave(lines, chance))[:3] == verdict_of(lines)[:3], case["file"]

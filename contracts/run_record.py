"""The end of a job's record where the job could not write it itself: killed ranks, a killed launcher, a lost node.

Specification: docs/finetune.md, flight.json and metrics.jsonl. What started the ranks, `topoflight launch` on one host
or `finetune.pod` in a pod, tells what it saw; what the job has told stands.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any

from contracts import bounded
from contracts.plain import loads as plain

RESUMABLE = 75  # EX_TEMPFAIL: the job saved and ended; started again it goes on
KILLED = 128  # plus a signal's number, as a shell tells it
_MOST_RECORD_BYTES = 16 << 20  # as agent.jobs.run reads
_TAIL_BYTES = 65536  # of metrics.jsonl, whose lines take some 300
# torchrun's words of the rank that ended first (torch/distributed/elastic/multiprocessing/errors/__init__.py)
_FIRST = re.compile(r"Root Cause.*?rank\s*: (\d+) .*?exitcode\s*: (-?\d+)", re.DOTALL)
_STRUCK = re.compile(r"Root Cause.*?rank\s*: (\d+) .*?traceback : Signal \d+ \((\w+)\) received by PID", re.DOTALL)


def first_ended(log: str) -> int | None:
    """The exit code of the rank that torchrun saw end first, negative for a signal; None where its log does not say."""
    found = _FIRST.search(log)
    return int(found[2]) if found else None


def struck(log: str) -> tuple[int, str] | None:
    """(rank, "SIGKILL") of the rank that a signal ended first, by torchrun's log."""
    found = _STRUCK.search(log)
    return (int(found[1]), found[2]) if found else None


def read_record(path: Path) -> dict[str, Any] | None:
    """flight.json; None where it is missing or cannot be read."""
    try:
        record = plain(bounded.read_text(path, _MOST_RECORD_BYTES), unknown_numbers=True)  # a loss may be NaN
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def of_start(path: Path, began: float) -> dict[str, Any] | None:
    """flight.json, unless it cannot be read or an earlier start left it."""
    try:
        return read_record(path) if path.stat().st_mtime >= began else None
    except OSError:
        return None


def own_exit_code(path: Path, exit_code: int, began: float, *, cut_short: bool = False) -> int:
    """The job's own code where torchrun, which makes 1 of every failure, hides it; 75 is "start again to go on".

    `cut_short` says that torchrun was told to end: the job may have been done by then.
    """
    if exit_code == 0:
        return 0
    own = (of_start(path, began) or {}).get("exit_code")
    least = 0 if cut_short else 1
    return own if isinstance(own, int) and not isinstance(own, bool) and least <= own < 256 else exit_code


def ended(path: Path, *, status: str, exit_code: int, reason: str, began: float) -> dict[str, Any] | None:
    """The record of this start as it ended, None where it left none; one that still says "running" is written anew.

    The last step is that of metrics.jsonl, which is newer than the record's.
    """
    record = of_start(path, began)
    if record is None or exit_code == 0 or record.get("status") not in ("running", "complete"):
        return record
    code = exit_code if exit_code >= 0 else KILLED - exit_code
    told = {**record, "status": status, "exit_code": code, "reason": reason}
    if record["status"] == "running":  # else it has told its end, and the agent has it
        told["ended_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        told["steps_done"] = _logged_step(path.with_name("metrics.jsonl"), began) or record.get("steps_done", 0)
        with contextlib.suppress(OSError):  # the disk may be what ended the job
            write_record(path, told)
    return told


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Replace flight.json as a whole."""
    draft = path.with_name(f".{path.name}.ended")
    draft.write_text(json.dumps(record, indent=1))
    draft.replace(path)


def _logged_step(metrics: Path, began: float) -> int:
    """The last step that this start logged; 0 where it logged none."""
    try:
        if metrics.stat().st_mtime < began:
            return 0
        with metrics.open("rb") as stream:
            stream.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
            lines = stream.read(_TAIL_BYTES).splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # the job was killed as it wrote this line
            return int(json.loads(line)["step"])
    return 0

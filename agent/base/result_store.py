"""What benchmarks and runs leave for the agent to serve: files in its state folder, where that exists.

The folder is TOPOFLIGHT_STATE, by default /var/lib/topoflight. Where it is missing or not writable nothing is kept:
a run by hand on a workstation has its own report.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent.base.output import write_atomic
from collectives.bench.results import BenchResult, read_result
from contracts import plain
from contracts.run_record import RecordError, RunRecord
from contracts.run_record import read as read_record

log = logging.getLogger(__name__)

_logged: set[str] = set()

DEFAULT_FOLDER = Path("/var/lib/topoflight")
BENCH_FILE, SEARCH_FILE = "bench.json", "search.json"
RUNS_FOLDER = "runs"
STORED_RUNS = 50
MOST_HELD_BYTES = 4 << 20  # as text, of which a byte takes up to twenty of memory; 50 records of 4096 steps take 3 MiB
WRITTEN_WITHIN_SECONDS = 600.0  # however slow the disk


def folder() -> Path | None:
    """The state folder, where there is one."""
    path = Path(os.environ.get("TOPOFLIGHT_STATE") or DEFAULT_FOLDER)
    return path if path.is_dir() and os.access(path, os.W_OK) else None


def save_benchmark_result(result: BenchResult, place: Path | None = None) -> Path | None:
    """Leave the result as the last one; not one that was stopped before any."""
    where = place or folder()
    if where is None or (result.stopped_by and not result.measurements):
        return None
    return _write(where / BENCH_FILE, plain.write(result))


def save_search_result(result: dict[str, Any]) -> Path | None:
    """Leave the result of a search for bad nodes as the last one, on the host that planned it."""
    return None if (where := folder()) is None else _write(where / SEARCH_FILE, result)


def last_benchmark(place: Path) -> tuple[BenchResult | None, float | None]:
    """The last result, and the Unix time at which it was stored; None where there is none that can be read."""
    path = place / BENCH_FILE
    try:
        return read_result(path), path.stat().st_mtime
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, KeyError, TypeError) as error:
        left_out(path, error)
        return None, None


def store_run(record: RunRecord, place: Path | None = None) -> Path | None:
    """Leave the record of a run; the oldest beyond STORED_RUNS go."""
    where = place or folder()
    if where is None:
        return None
    runs = where / RUNS_FOLDER
    data = plain.write(record)
    content = hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]  # several may come within one second
    stored = _write(runs / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{content}.json", data)
    others = [path for path in runs.glob("*.json") if path != stored]  # a clock set back makes the new one look old
    for old in sorted(others, reverse=True)[STORED_RUNS - 1 :]:
        old.unlink(missing_ok=True)
    return stored


def read_runs(places: Iterable[Path]) -> tuple[RunRecord, ...]:
    """Records of runs, newest first and each once; a folder stands for those in it and one level below.

    All of them are held in memory: the oldest beyond MOST_HELD_BYTES are not read.
    """
    found: dict[tuple[str, str], RunRecord] = {}
    held = 0
    for place in places:
        own = place / "run.json"  # the other documents in the folder of a run, such as plan.json, are no records
        files = [place] if place.is_file() else [*([own] if own.is_file() else place.glob("*.json")),
                                                 *place.glob("*/run.json")]  # fmt: skip
        for path in sorted(files, reverse=True)[:STORED_RUNS]:
            with contextlib.suppress(OSError):  # the reader of the file reports the error
                held += path.stat().st_size
            if held > MOST_HELD_BYTES and found:
                break
            try:
                record = read_record(path)
                found.setdefault(start_of(record, path), record)
            except RecordError as error:
                left_out(path, error)
    newest = sorted(found.values(), key=lambda record: record.started_at or "", reverse=True)
    return tuple(newest[:STORED_RUNS])


def start_of(record: RunRecord, path: Path | None = None) -> tuple[str, str]:
    """Which start of which job a record is of: a host starts one at a time."""
    return str(record.host), str(record.started_at or path)


def sweep(place: Path) -> None:
    """Remove the temporary files (agent.base.output.write_atomic) of writers that were killed."""
    for path in (*place.glob(".*.json.*"), *(place / RUNS_FOLDER).glob(".*.json.*")):
        with contextlib.suppress(OSError):  # another agent may be quicker, or the folder not ours
            if time.time() - path.stat().st_mtime > WRITTEN_WITHIN_SECONDS:
                path.unlink()


def left_out(path: Path, error: Exception) -> None:
    """Name a file that cannot be used, once: it is looked at with every scan."""
    message = f"{error}: left out" if str(path) in str(error) else f"{path} is left out: {error}"
    if message not in _logged:
        _logged.add(message)
        log.warning(message)


def _write(path: Path, value: dict[str, Any]) -> Path | None:
    try:
        path.parent.mkdir(exist_ok=True)
        return write_atomic(path, json.dumps(value, indent=1) + "\n")
    except OSError as error:  # the run itself was fine: its own output holds the result
        log.warning("%s was not kept: %s", path, error)
        return None

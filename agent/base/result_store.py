"""Store results of benchmarks and runs in the agent's state folder, if it exists, so that the agent can serve them.

The folder is TOPOFLIGHT_STATE, by default /var/lib/topoflight. If it is missing or not writable, nothing is stored: a
run that a user starts on a workstation has its own report.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agent.base.output import write_atomic
from collectives.bench.results import MAX_RESULT_BYTES, BenchResult, read_result
from contracts import bounded, plain
from contracts.run_record import RunRecord, read as read_record

if TYPE_CHECKING:
    from collectives.search.plan import SearchResult

T = TypeVar("T")

log = logging.getLogger(__name__)

_logged: set[str] = set()

DEFAULT_FOLDER = Path("/var/lib/topoflight")
BENCH_FILE, SEARCH_FILE = "bench.json", "search.json"
RUNS_FOLDER = "runs"
STORED_RUNS = 50
MAX_HELD_BYTES = 4 << 20  # of text, which uses up to 20 times as much memory; 50 records of 4096 steps take 3 MiB
WRITTEN_WITHIN_SECONDS = 600.0  # upper bound, even for a slow disk


def find_folder() -> Path | None:
    """Return the state folder, if it exists."""
    path = Path(os.environ.get("TOPOFLIGHT_STATE") or DEFAULT_FOLDER)
    return path if path.is_dir() and os.access(path, os.W_OK) else None


def save_benchmark_result(result: BenchResult, place: Path | None = None) -> Path | None:
    """Store the result as the latest one, unless it was stopped before the first measurement."""
    folder = place or find_folder()
    if folder is None or (result.stopped_by and not result.measurements):
        return None
    return _write(folder / BENCH_FILE, plain.write(result))


def save_search_result(result: dict[str, Any]) -> Path | None:
    """Store the result of a search for bad nodes as the latest one, on the host that planned the search."""
    return None if (folder := find_folder()) is None else _write(folder / SEARCH_FILE, result)


def read_last_benchmark(place: Path) -> tuple[BenchResult | None, float | None]:
    """Return the latest result and the Unix time at which it was stored; None if there is no readable result."""
    return _read(place / BENCH_FILE, lambda path: (read_result(path), path.stat().st_mtime)) or (None, None)


def read_last_search(place: Path) -> SearchResult | None:
    """Return the latest search for bad nodes that this host planned; None if there is no readable one."""
    from collectives.search.plan import SearchResult

    return _read(place / SEARCH_FILE, lambda path: plain.read(
        plain.loads(bounded.read_text(path, MAX_RESULT_BYTES)), SearchResult))  # fmt: skip


def store_run(record: RunRecord, place: Path | None = None) -> Path | None:
    """Store the record of a run; delete the oldest records if there are more than STORED_RUNS."""
    folder = place or find_folder()
    if folder is None:
        return None
    import hashlib  # a gate that starts no job stores no run

    runs = folder / RUNS_FOLDER
    data = plain.write(record)
    content = hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]  # several can be stored within one second
    stored = _write(runs / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{content}.json", data)
    others = [path for path in runs.glob("*.json") if path != stored]  # a clock set back makes the new one look old
    for old in sorted(others, reverse=True)[STORED_RUNS - 1 :]:
        old.unlink(missing_ok=True)
    return stored


def read_runs(place: Path) -> tuple[RunRecord, ...]:
    """Read the records of runs in the state folder `place`, newest first.

    All records are held in memory, so the oldest beyond MAX_HELD_BYTES are not read.
    """
    records: list[RunRecord] = []
    size = 0
    for path in sorted((place / RUNS_FOLDER).glob("*.json"), reverse=True)[:STORED_RUNS]:
        size += _read(path, lambda path: path.stat().st_size) or 0
        if size > MAX_HELD_BYTES and records:
            break
        records += filter(None, [_read(path, read_record)])
    return tuple(sorted(records, key=lambda record: record.started_at or "", reverse=True))


def sweep(place: Path) -> None:
    """Remove temporary files (agent.base.output.write_atomic) of processes that were killed while writing."""
    for path in (*place.glob(".*.json.*"), *(place / RUNS_FOLDER).glob(".*.json.*")):
        with contextlib.suppress(OSError):  # another agent may have removed it, or the folder belongs to another user
            if time.time() - path.stat().st_mtime > WRITTEN_WITHIN_SECONDS:
                path.unlink()


def _read(path: Path, read: Callable[[Path], T]) -> T | None:
    """Return what is in a file; None if it is missing or unusable, which is logged once: every scan reads it again."""
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{error}: ignored" if str(path) in str(error) else f"{path} is ignored: {error}"
        if message not in _logged:
            _logged.add(message)
            log.warning(message)
        return None


def _write(path: Path, value: dict[str, Any]) -> Path | None:
    try:
        path.parent.mkdir(exist_ok=True)
        return write_atomic(path, json.dumps(value, indent=1) + "\n")
    except OSError as error:  # the run itself succeeded, and its own output has the result
        log.warning("%s was not stored: %s", path, error)
        return None

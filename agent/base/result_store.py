"""What benchmarks and flights leave for the agent to serve: files in its state folder, where that exists.

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

from agent.base import bench_history
from agent.base.documents import write_atomic
from collectives.bench.results import BenchResult
from contracts import bounded, codec
from contracts.plain import loads as plain
from contracts.run_record import MOST_RECORD_BYTES, RecordError, RunRecord
from contracts.run_record import read as read_record

log = logging.getLogger(__name__)

_logged: set[str] = set()

DEFAULT_FOLDER = Path("/var/lib/topoflight")
BENCH_FILE = "bench.json"
FLIGHTS_FOLDER = "flights"
KEPT_FLIGHTS = 50
MOST_HELD_BYTES = 4 << 20  # as text, of which a byte takes up to twenty of memory; 50 records of 4096 steps take 3 MiB
WRITTEN_WITHIN_SECONDS = 600.0  # however slow the disk


def folder() -> Path | None:
    """The state folder, where there is one."""
    path = Path(os.environ.get("TOPOFLIGHT_STATE") or DEFAULT_FOLDER)
    return path if path.is_dir() and os.access(path, os.W_OK) else None


def keep_bench(result: BenchResult, place: Path | None = None) -> Path | None:
    """Leave the result as the last one, and a line of it in the history; not one that was stopped before any."""
    from collectives.bench.results import result_to_json

    where = place or folder()
    if where is None or (result.stopped_by and not result.measurements):
        return None
    try:
        bench_history.remember(where, result)
    except OSError as error:
        left_out(where / bench_history.FILE, error)
    return _write(where / BENCH_FILE, result_to_json(result))


def keep_flight(record: RunRecord, place: Path | None = None) -> Path | None:
    """Leave the record of a flight; the oldest beyond KEPT_FLIGHTS go."""
    where = place or folder()
    if where is None:
        return None
    flights = where / FLIGHTS_FOLDER
    data = codec.write(record)
    content = hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]  # several may come within one second
    kept = _write(flights / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{content}.json", data)
    others = [path for path in flights.glob("*.json") if path != kept]  # a clock set back makes the new one look old
    for old in sorted(others, reverse=True)[KEPT_FLIGHTS - 1 :]:
        old.unlink(missing_ok=True)
    return kept


def flights(places: Iterable[Path]) -> tuple[RunRecord, ...]:
    """Records of flights, newest first and each once; a folder stands for those in it and one level below.

    All of them are held in memory: the oldest beyond MOST_HELD_BYTES are not read.
    """
    found: dict[tuple[str, str], RunRecord] = {}
    held = 0
    for place in places:
        files = [place] if place.is_file() else [*place.glob("*.json"), *place.glob("*/flight.json")]
        for path in sorted(files, reverse=True)[:KEPT_FLIGHTS]:
            with contextlib.suppress(OSError):  # whoever reads it says why
                held += path.stat().st_size
            if held > MOST_HELD_BYTES and found:
                break
            record = _record(path)
            if record is not None:
                found.setdefault(start_of(record, path), record)
    newest = sorted(found.values(), key=lambda record: record.started_at or "", reverse=True)
    return tuple(newest[:KEPT_FLIGHTS])


def start_of(record: RunRecord, path: Path | None = None) -> tuple[str, str]:
    """Which start of which job a record is of: a host starts one at a time."""
    return str(record.host), str(record.started_at or path)


def read(path: Path) -> Any:
    """A document that was kept; OSError or ValueError say why it cannot be had."""
    return plain(bounded.read_text(path, MOST_RECORD_BYTES), unknown_numbers=True)  # a loss may be NaN


def _record(path: Path) -> RunRecord | None:
    try:
        return read_record(path)
    except RecordError as error:
        left_out(path, error)
        return None


def sweep(place: Path) -> None:
    """Remove what a killed writer left: temporary files (agent.base.documents.write_atomic) that nobody writes now."""
    for path in (*place.glob(".*.json.*"), *(place / FLIGHTS_FOLDER).glob(".*.json.*")):
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

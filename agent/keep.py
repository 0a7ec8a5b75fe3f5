"""What benchmarks and flights leave for the agent to serve: files in its state folder, where that exists.

The folder is TOPOFLIGHT_STATE, by default /var/lib/topoflight. Where it is missing or not writable nothing is kept:
a run by hand on a workstation has its own report.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from agent.report import write_atomic
from collectives.results import BenchResult

log = logging.getLogger(__name__)

DEFAULT_FOLDER = Path("/var/lib/topoflight")
BENCH_FILE = "bench.json"
FLIGHTS_FOLDER = "flights"
KEPT_FLIGHTS = 50


def folder() -> Path | None:
    """The state folder, where there is one."""
    path = Path(os.environ.get("TOPOFLIGHT_STATE") or DEFAULT_FOLDER)
    return path if path.is_dir() and os.access(path, os.W_OK) else None


def keep_bench(result: BenchResult, place: Path | None = None) -> Path | None:
    """Leave the result as the last one."""
    from collectives.wire import result_to_json

    where = place or folder()
    return _write(where / BENCH_FILE, result_to_json(result)) if where else None


def keep_flight(record: dict[str, Any], place: Path | None = None) -> Path | None:
    """Leave the record of a flight; the oldest beyond KEPT_FLIGHTS go."""
    where = place or folder()
    if where is None:
        return None
    flights = where / FLIGHTS_FOLDER
    stamp = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}.json"
    kept = _write(flights / stamp, record)
    for old in sorted(flights.glob("*.json"), reverse=True)[KEPT_FLIGHTS:]:
        old.unlink(missing_ok=True)
    return kept


def _write(path: Path, value: dict[str, Any]) -> Path | None:
    try:
        path.parent.mkdir(exist_ok=True)
        return write_atomic(path, json.dumps(value, indent=1) + "\n")
    except OSError as error:  # the run itself was fine: its own output holds the result
        log.warning("%s was not kept: %s", path, error)
        return None

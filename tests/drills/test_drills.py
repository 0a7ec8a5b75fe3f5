"""Every drill, once or a few times; `make drills` runs the long form and writes docs/measurements/drills.md."""

from __future__ import annotations

import random
import time
import zlib
from pathlib import Path

import drills_bench
import drills_cluster
import drills_disk
import drills_files
import drills_kills
import drills_scan
import pytest
from drill_ground import Ground, obstacle
from drill_register import LONG, Drill, parameters

ROOMS = (
    drills_scan,
    drills_bench,
    drills_disk,
    drills_files,
    drills_cluster,
    drills_kills,
)  # in the order of the table


@pytest.mark.timeout(7200 if LONG else 1200)
@pytest.mark.parametrize("drill", parameters(ROOMS))
def test_nothing_is_lost(drill: Drill, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    """The fault happens; the agent is whole afterwards, and so is what it had."""
    if (why := obstacle()) is not None:
        pytest.skip(why)
    lost: list[str] = []
    seconds: list[float] = []
    notes: list[str] = []
    for number in range(drill.times):
        # the short form is the same every time; what has not been seen yet is for the long one to find
        seed = random.randrange(1 << 32) if LONG else zlib.crc32(f"{drill.name} {number}".encode())
        ground = Ground(tmp_path / str(number), random.Random(seed), long=LONG)
        started = time.monotonic()
        lost += [f"time {number + 1} (seed {seed}): {what}" for what in drill.run(ground)]
        seconds.append(time.monotonic() - started)
        notes += ground.notes
    record_property("drill", {"fault": drill.fault, "seconds": seconds, "lost": lost, "notes": notes})
    assert not lost, "\n".join(lost)

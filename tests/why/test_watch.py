"""`why --watch` looks at a run until it has ended, and leaves its verdict beside the record."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rigs.command import topoflight

from collectives.traces.states import NAME, RANKS_FOLDER, RankState, dumps
from contracts import run_record
from contracts.run_record import RunRecord


def test_watch_ends_with_the_run_and_keeps_the_verdict(tmp_path: Path) -> None:
    """The rank that failed first is named; the record's notes and why.json hold the same line."""
    ranks = tmp_path / RANKS_FOLDER
    ranks.mkdir()
    run_record.save(tmp_path / "run.json", RunRecord(status="failed", host="trainer-0"))
    for rank in range(3):
        error = "ValueError: bad row" if rank == 2 else "RuntimeError: Connection closed by peer [10.0.0.2]:4"
        state = RankState(rank=rank, world_size=3, written=time.time(), ended=True, error=error, host=f"trainer-{rank}")
        (ranks / NAME.format(rank=rank)).write_text(dumps(state))
    ended = topoflight("why", "--watch", "--run", tmp_path)
    assert ended.exit_code == 3, ended.output
    kept = json.loads((tmp_path / run_record.WHY).read_text())
    assert (kept["state"], kept["ranks"]) == ("failed", [2])
    assert kept["line"].split(": ")[0] in topoflight("why", tmp_path).output, "a run's folder among the logs"
    assert kept["line"] in ended.output
    assert run_record.read(tmp_path / "run.json").notes == [f"why: {kept['line']}"]

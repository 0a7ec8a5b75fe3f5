"""A job that was killed before it could tell its end: its launcher writes it, and posts it to the agent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rigs.serving import Asked, answering
from rigs.tables import each_row

from agent.http.posted import read_record as read
from agent.jobs.launch import Launched, record_of
from contracts import run_record
from contracts.run_record import RunRecord

RECORD: dict[str, Any] = {
    "schema_version": 1, "status": "running", "exit_code": None, "reason": None, "host": "sft-0", "notes": [],
    "started_at": "2026-11-01T10:00:00Z", "ended_at": None, "steps_done": 7, "loss": {"first": 5.0, "last": 3.0},
}  # fmt: skip
# What torchrun (torch 2.13.0) writes where rank 1 of 2 was killed, from its last twelve lines.
STRUCK = """\
  traceback : Signal 15 (SIGTERM) received by PID 7837
------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_13:53:06
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 7838)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 7838
======================================================"""
FATE = "rank 1 was ended by SIGKILL; the same command goes on from its last checkpoint, if it had saved one"


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Asked]]:
    """What an agent is sent."""
    with answering((201, {}, b"{}")) as (url, found):
        monkeypatch.setenv("TOPOFLIGHT_AGENT", url)
        monkeypatch.delenv("TOPOFLIGHT_AGENT_TOKEN_FILE", raising=False)
        yield found


def ended(folder: Path, **changed: Any) -> RunRecord:
    """The record after torchrun has ended with 1 because a rank was struck."""
    path = folder / "run.json"
    path.write_text(json.dumps({**RECORD, **changed}))
    done = Launched(exit_code=1, seconds=9.0, output=folder / "job.log", last_lines=tuple(STRUCK.splitlines()))
    record = record_of(path, done, path.stat().st_mtime)
    assert record is not None
    return record


def test_the_launcher_tells_the_end_of_a_killed_job(tmp_path: Path, posted: list[Asked]) -> None:
    """In run.json and to the agent, which takes it; the last step on the record stands."""
    record = ended(tmp_path)
    expected = {**RECORD, "status": "failed", "exit_code": 1, "reason": FATE, "ended_at": record.ended_at}
    assert record == run_record.record_of(expected)
    assert record.ended_at
    assert run_record.read(tmp_path / "run.json") == record
    (sent,) = posted
    assert (sent.path, read(sent.body)) == ("/runs", record)


def test_the_last_step_is_the_last_that_was_logged(tmp_path: Path) -> None:
    """The record is written with each checkpoint only; a line that was cut, and another start's, do not count."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 8, "loss": 2.0}\n{"step": 9, "loss": NaN}\n{"step": 10, "lo')
    os.utime(metrics, (4e9, 4e9))
    assert ended(tmp_path).steps_done == 9
    os.utime(metrics, (1, 1))
    assert ended(tmp_path).steps_done == 7
    metrics.write_bytes(b"\xff\n[]\n3\n{}\n")
    os.utime(metrics, (4e9, 4e9))
    assert ended(tmp_path).steps_done == 7


@each_row("status", ["complete", "failed"])
def test_what_told_its_end_itself_is_told_once(tmp_path: Path, posted: list[Asked], status: str) -> None:
    """The agent has it from the job: another record of the same start would be refused."""
    assert ended(tmp_path, status=status).status == "failed"
    assert json.loads((tmp_path / "run.json").read_text())["status"] == status
    assert posted == []


def test_an_agent_that_is_away_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The record is written all the same."""
    monkeypatch.setenv("TOPOFLIGHT_AGENT", "file:///etc/passwd")
    assert ended(tmp_path) == run_record.read(tmp_path / "run.json")
    assert "does not have this run's record: TOPOFLIGHT_AGENT must be http" in capfd.readouterr().err


def test_a_signal_of_torchrun_is_a_code_as_a_shell_tells_it(tmp_path: Path) -> None:
    """The agent takes 0 to 255."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RECORD))
    done = Launched(exit_code=-9, seconds=9.0, output=tmp_path / "job.log", last_lines=())
    record = record_of(path, done, path.stat().st_mtime)
    assert record is not None and record.exit_code == 137
    assert read(path.read_bytes()) == record


def test_who_told_the_end_is_known() -> None:
    """By the launcher's own words; a job that wrote no record told nothing."""
    done = Launched(exit_code=3, seconds=9.0, output=Path("job.log"), last_lines=())
    assert not done.wrote_its_end
    assert not replace(done, record=run_record.record_of({**RECORD, "reason": done.fate})).wrote_its_end
    assert replace(done, record=run_record.record_of({**RECORD, "reason": "the loss is not finite"})).wrote_its_end

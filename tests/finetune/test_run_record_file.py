"""Records of a run: what the agent makes of run.json, the job's own exit code, its MFU."""

import json
import time

import pytest
import torch
from rigs.tables import each_row, rows_of

from agent.pages import environment
from agent.terminal.measured import describe_run
from contracts import run_record
from contracts.job_config import JobPlan, RunForecast
from contracts.layout import Layout
from contracts.run_record import choose_exit_code, compare, read_since, record_of
from finetune import post
from finetune.recorder import Recorder

rows = rows_of(__file__)

pytestmark = pytest.mark.long

INTERVAL = {"low": 1.6, "mid": 1.9, "high": 2.3}
RECORD = {
    "status": "complete", "measured": {"step_seconds": 2.0}, "communication": {"exposed_share": 0.31},
    "comparison": [{"quantity": "step_seconds", "forecast": INTERVAL, "measured": 2.0}],
    "plan": {"forecast": {"step_seconds": INTERVAL, "memory_bytes": {"low": 1, "mid": 2, "high": 3}}},
}  # fmt: skip


def test_measurements_are_compared_with_the_forecast():
    """What was not measured is unknown."""
    record = record_of(RECORD)
    step, memory = compare(record)
    assert (step.verdict, memory.verdict) == ("inside", "unknown")
    warm_up = record_of({**RECORD, "measured": {**RECORD["measured"], "counted_steps": 0}})
    assert compare(warm_up)[0].verdict == "unknown (warm-up steps alone)"
    assert describe_run(record) == "steps unknown, loss unknown, tokens/s unknown, communication 31% exposed"
    assert "step: 2 s" in environment().get_template("sections.html.j2").module.runs([record])


@each_row(("written", "torchrun", "began", "told"), rows("own_codes"))
def test_a_failure_keeps_the_job_s_own_code(tmp_path, written, torchrun, began, told):
    """Torchrun makes 1 of every failure; the record of this start says which, and one of an earlier start nothing."""
    path = tmp_path / "run.json"
    if written is not None:
        path.write_text(json.dumps(written))
    assert choose_exit_code(read_since(path, began), torchrun) == told


def test_the_error_that_a_rank_printed_is_the_reason(tmp_path):
    """The last traceback's last line, not torchrun's own; and pod 0 leaves it where no record was written."""
    wrong = [(log, run_record.raised(log)) for log, reason in rows("raised")() if run_record.raised(log) != reason]
    assert not wrong, wrong
    said = "the ranks of pod 1 ended with exit code 1: OSError: x"
    post.write_termination_message(tmp_path / "run.json", tmp_path / "word", said)
    left = json.loads((tmp_path / "word").read_text())
    assert (left["status"], left["transports"]) == ("failed", []) and left["reason"].endswith("OSError: x")
    (tmp_path / "run.json").write_text(json.dumps({"status": "complete"}))
    # of an earlier start
    post.write_termination_message(tmp_path / "run.json", tmp_path / "word", "ended", time.time() + 60)
    assert json.loads((tmp_path / "word").read_text())["reason"] == "ended"


@pytest.mark.timeout(10)
def test_a_long_line_is_no_table_of_torchrun():
    """It is not read again from each of its blanks, or from each of its beginnings."""
    for line in (f"rank : 1 {' ' * 65000}x", "rank : 1 " * 7000):
        assert run_record.failed_ranks(f"{line}\nx") == []


def test_the_mfu_is_that_of_the_forecast_at_the_measured_rate(tmp_path):
    """Model FLOPs of a token and the peak of the device are the forecast's; without them it is unknown."""
    layout = Layout(world_size=1)
    for forecast, mfu in ((RunForecast(tokens_per_second=1000.0, mfu=0.4), 0.1), (RunForecast(), None)):
        recorder = Recorder(tmp_path, JobPlan(forecast=forecast), layout, torch.device("cpu"))
        for number in range(1, 6):
            recorder.step(number, 2.0, 1.0, 500)
        assert recorder.measured().tokens_per_second == 250.0
        assert recorder.measured().mfu == mfu

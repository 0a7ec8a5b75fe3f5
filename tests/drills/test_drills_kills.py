"""SIGKILL of a launch that has saved a checkpoint; SIGTERM of a whole preflight."""

import json
import signal

import pytest
from drill_ground import Ground, drill
from rigs.waiting import eventually

from agent.base import EXIT_STOPPED

pytestmark = pytest.mark.long

SMALL_JOB = (
    "--ranks=2", "--set=max_steps=6", "--set=save_steps=2", "--set=dataset_rows=64", "--set=eval_strategy=no",
    "--set=profile_steps=0",
)  # fmt: skip


@drill
def test_kill_during_a_launch(ground: Ground) -> None:
    """The verb launch, two ranks that train and save, from their first checkpoint on."""
    ground.store_earlier_results()
    out = ground.folder / "out"
    process = ground.start("launch", f"--output={out}", *SMALL_JOB)
    eventually(lambda: process.poll() is not None or [*out.glob("checkpoint-*")], "it has saved", 300)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    ground.assert_nothing_is_left(out)
    ground.assert_earlier_results_are_there()


@drill
def test_sigterm_of_a_preflight(ground: Ground) -> None:
    """The report holds the scan and the benchmark; verdict and exit code say that it was stopped."""
    ground.store_earlier_results()
    reports = ground.folder / "reports"
    process = ground.start("preflight", "--train", "-q", f"--report={reports}", "-o", "json", *SMALL_JOB, "--ranks=1")
    calibrates = "collectives.bench.calibrate"
    eventually(lambda: process.poll() is not None or ground.runs(calibrates), "it calibrates", 300)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == EXIT_STOPPED, err
    found = json.loads((reports / "report.json").read_text())
    assert json.loads(out) == found
    verdict = found["verdict"]
    assert (verdict["word"], verdict["why"]) == ("unknown", "stopped by SIGTERM before it was done")
    assert "not calibrated: stopped before it was done" in found["notes"]
    assert found["snapshots"] and found["bench"] and found["recommendation"]
    of_runs = [check for check in found["checks"] if check["code"].startswith(("run.", "forecast."))]
    assert {check["status"] for check in of_runs} == {"unknown"}
    ground.assert_nothing_is_left(reports)
    ground.assert_earlier_results_are_there()

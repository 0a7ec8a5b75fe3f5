"""The gate before a job on this host, and the record that stays of a job which failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.cmd_launch import _gate, launch
from agent.hosts import snapshots
from agent.launch import Launched, record_of
from agent.preflight import Options, _stopping
from agent.view import look

SICK = Path(__file__).parent.parent / "machines" / "sick-h100-dead-hca.json"


def test_a_failed_check_stops_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3, what failed, and the option that launches all the same."""
    with pytest.raises(SystemExit) as ended:
        _gate(snapshots([SICK]), {"hosts": (), "require": (), "root": "/"})
    told = capsys.readouterr().err
    assert ended.value.code == 3
    assert "fail topology.gpu_nic.down" in told and "not launched: " in told and "--no-preflight" in told


def test_a_required_check_that_is_unknown_stops_it_and_others_do_not(tmp_path: Path) -> None:
    """This host has no RDMA device; nothing is started, so nothing is written."""
    words = ["--require", "rdma.port.down", "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(launch, words)
    if list(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this host has RDMA devices, so the check is not unknown")
    assert done.exit_code == 5, done.output
    assert "unknown rdma.port.down" in done.stderr and not (tmp_path / "out").exists()


def test_preflight_flies_only_what_it_found_sound() -> None:
    """What failed before the flight stops it; --skip of that check and --force do not, nor does what is unknown."""
    sick = snapshots([SICK])
    checks = look(sick).checks
    failed = {check.id for check in checks if check.status == "fail"}
    assert failed
    assert all(code in _stopping(Options(fly=True), checks, None) for code in failed)
    assert _stopping(Options(fly=True, force=True), checks, None) == ""
    assert _stopping(Options(fly=True, skip=tuple(failed)), checks, None) == ""
    everywhere_the_same = {(check.id, check.node, check.subject): check.status for check in checks}
    assert _stopping(Options(fly=True), checks, everywhere_the_same) == ""


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ({"status": "mismatch", "exit_code": 76, "reason": "ddp"},
         {"status": "mismatch", "exit_code": 76, "reason": "ddp"}),
        ({"status": "running", "exit_code": None, "reason": ""},
         {"status": "failed", "exit_code": -9, "reason": "the job ended with exit code -9"}),
    ],
)  # fmt: skip
def test_the_record_of_a_failed_job_is_its_own(
    tmp_path: Path, written: dict[str, object], kept: dict[str, object]
) -> None:
    """Of this start only; the end of a job that was killed is told by what was seen."""
    path = tmp_path / "flight.json"
    code = written["exit_code"] or -9
    assert isinstance(code, int)
    done = Launched(exit_code=code, seconds=1.0, output=tmp_path / "job.log", last_lines=())
    assert record_of(path, done, 0.0) is None
    path.write_text(json.dumps({"schema_version": 1, **written}))
    assert record_of(path, done, path.stat().st_mtime) == {"schema_version": 1, **kept}
    assert record_of(path, done, path.stat().st_mtime + 1) is None


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_launch_that_fails_leaves_its_flight_to_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is not finite ends with 65 for the job and 3 for the verb; /flights serves what the folder holds."""
    monkeypatch.setenv("TOPOFLIGHT_STATE", str(tmp_path))
    words = ["--output", str(tmp_path / "out"), "--no-preflight", "--set", "learning_rate=1e30", "--set", "max_steps=5"]
    done = CliRunner().invoke(launch, [*words, "--set", "max_grad_norm=0"])
    assert done.exit_code == 3, done.output
    (kept,) = (tmp_path / "flights").glob("*.json")
    record = json.loads(kept.read_text())
    assert (record["exit_code"], record["status"]) == (65, "failed"), record["reason"]

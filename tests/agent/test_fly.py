"""`topoflight preflight --fly` on this host: two real ranks, a fine-tune that learns, a report that says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.real, pytest.mark.timeout(900)]  # one run feeds them all

# Sums with at most two-digit numbers are learnt far below half the loss of random weights within the default steps;
# a job that does not train, or trains one rank only, stays above.
LOSS_RATIO = 0.5


@pytest.fixture(scope="module")
def flown(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("fly") / "reports"
    done = subprocess.run(
        [sys.executable, "-m", "agent.cli", "preflight", "--fly", "--report", str(folder)],
        capture_output=True, text=True, timeout=800, check=False, env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip
    return done, folder


@pytest.fixture(scope="module")
def report(flown: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, Any]:
    done, folder = flown
    assert (folder / "report.json").exists(), done.stderr
    loaded: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return loaded


def test_it_ends_with_the_exit_code_of_its_verdict(
    flown: tuple[subprocess.CompletedProcess[str], Path], report: dict[str, Any]
) -> None:
    """0, or an honest other."""
    done, _ = flown
    assert done.returncode == report["verdict"]["exit_code"], done.stderr
    failed = [c for c in report["checks"] if c["status"] == "fail"]
    assert done.returncode == (3 if failed else 0), failed


def test_collectives_were_measured_by_two_ranks_and_verified(report: dict[str, Any]) -> None:
    """What the gate judges where there are links, each with its bus bandwidth."""
    bench = report["bench"]
    assert bench["world_size"] >= 2
    assert bench["complete"]
    assert {m["op"] for m in bench["measurements"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    for m in bench["measurements"]:
        n = len(m["ranks"])
        assert m["verified"]
        factor = (2 if m["op"] == "all_reduce" else 1) * (n - 1) / n
        assert m["busbw_bytes_per_second"] == pytest.approx(m["algbw_bytes_per_second"] * factor)


def test_the_fine_tune_learnt(report: dict[str, Any]) -> None:
    """The loss at the end is below half of that at the start, and adapter and checkpoint are there."""
    flight = report["flight"]
    assert flight["status"] == "complete"
    assert flight["loss"]["last"] < LOSS_RATIO * flight["loss"]["first"]
    assert (Path(flight["adapter"]) / "adapter_config.json").exists()
    assert Path(flight["checkpoint"]).is_dir()


def test_asked_is_got(report: dict[str, Any]) -> None:
    """FSDP over two ranks, sharded as DTensors: neither DDP nor a single process."""
    asked = report["recommendation"]["chosen"]["layout"]
    effective = report["flight"]["layout"]["effective"]
    assert asked["dp_shard"] == 2
    assert effective["world_size"] == 2
    assert effective["wrapper"] == "FSDP"
    assert effective["unsharded_parameters"] == 0
    assert effective["local_parameter_bytes"] < 0.6 * effective["parameter_bytes"]


def test_forecast_and_flight_stand_side_by_side(
    flown: tuple[subprocess.CompletedProcess[str], Path], report: dict[str, Any]
) -> None:
    """Step time and memory, one line each, in document and terminal."""
    assert [c["quantity"] for c in report["flight"]["comparison"]][:2] == ["step_seconds", "memory_bytes"]
    for line in report["flight"]["comparison"][:2]:
        assert line["forecast"]["low"] < line["forecast"]["high"]
        assert line["measured"] > 0
    assert "step time: forecast" in flown[0].stdout


def test_what_the_host_lacks_is_unknown(report: dict[str, Any]) -> None:
    """Where there is no GPU, no check of GPUs passes."""
    snapshot = report["snapshots"][0]
    if snapshot["outcomes"]["gpu"].get("why"):
        judged = [c for c in report["checks"] if c["code"].startswith("gpu.") and c["code"] != "gpu.probe.failed"]
        assert judged and {c["status"] for c in judged} == {"unknown"}


def test_plain_lines_in_a_pipe(flown: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """No escape codes, no overlong table, progress on stderr only."""
    done, _ = flown
    assert "\x1b" not in done.stdout + done.stderr
    assert "-- measure" in done.stderr
    assert "-- measure" not in done.stdout


def test_the_files_a_person_keeps_are_there(flown: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """report.json, report.html, junit.xml."""
    assert {"report.json", "report.html", "junit.xml"} <= {p.name for p in flown[1].iterdir()}

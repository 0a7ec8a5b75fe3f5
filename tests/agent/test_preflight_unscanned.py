"""Signals of a preflight: before its scan is done, and while the measurement starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from xml.etree import ElementTree

import pytest

from agent.base.exit_codes import EXIT_INTERRUPTED, EXIT_STOPPED
from agent.checks.codes import ALL_CODES, RDMA_BENCH_CODES
from agent.cluster.gate import CLUSTER_CODES

MACHINE = Path(__file__).parents[1] / "machines" / "hgx-h100-8xH100-8hca.json"

# In place of the binding of NVIDIA's driver: who loads it hangs, as with a driver that does not answer.
HANGING_DRIVER = "import pathlib, time; pathlib.Path({reached!r}).touch(); time.sleep(600)"


def test_sigterm_during_the_scan_leaves_only_unknowns(tmp_path: Path) -> None:
    """Every file is written; no check passes, and none counts as worse than the baseline's."""
    report, reached = tmp_path / "report", tmp_path / "reached"
    (tmp_path / "pynvml.py").write_text(HANGING_DRIVER.format(reached=str(reached)))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    line = [sys.executable, "-m", "agent.cli", "preflight", f"--report={report}", f"--baseline={MACHINE}",
            "--require=rdma.*", "--fail-on=warn"]  # fmt: skip
    with subprocess.Popen(line, stdout=PIPE, stderr=PIPE, text=True, env=environment) as process:
        try:
            while not reached.exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=250)
        finally:
            process.kill()
    assert process.returncode == EXIT_STOPPED, err
    assert "stopped by SIGTERM before it was done" in out
    assert "exit code 75" in err
    found = json.loads((report / "report.json").read_text())
    assert (found["verdict"]["word"], found["verdict"]["why"]) == ("unknown", "stopped by SIGTERM before it was done")
    assert (found["snapshots"], found["topologies"], found["recommendation"]) == ([], [], None)
    assert {check["code"] for check in found["checks"]} == set(ALL_CODES) - set(CLUSTER_CODES) - set(RDMA_BENCH_CODES)
    said = {(check["status"], check["message"]) for check in found["checks"]}
    assert said == {("unknown", "not scanned: stopped by SIGTERM before that")}
    assert found["notes"] == ["stopped by SIGTERM before the scan was done: nothing is known"]
    cases = ElementTree.parse(report / "junit.xml").iter("testcase")  # noqa: S314 - our own file
    assert all(case.find("skipped") is not None or case.find("error") is not None for case in cases)
    assert "stopped by SIGTERM before it was done" in (report / "report.html").read_text()


@pytest.mark.ranks
def test_a_signal_reaches_the_measurement_that_starts(tmp_path: Path) -> None:
    """SIGTERM and Ctrl-C as soon as its child is there: the exit code, the reason, and no child left."""
    wrong = []
    for sign, code in ((signal.SIGTERM, EXIT_STOPPED), (signal.SIGINT, EXIT_INTERRUPTED)):
        line = [sys.executable, "-m", "agent.cli", "preflight", "--measure", "--ranks=1", "--quick", "-q", "-o", "json"]
        with subprocess.Popen(line, stdout=PIPE, stderr=PIPE, text=True) as process:
            try:
                while not (child := measuring_child(process.pid)):
                    assert process.poll() is None, process.communicate()
                    time.sleep(0.01)
                process.send_signal(sign)
                out, err = process.communicate(timeout=250)
            finally:
                process.kill()
        found = json.loads(out) if out else {}
        why = found.get("verdict", {}).get("why")
        if (process.returncode, why) != (code, f"stopped by {sign.name} before it was done") or Path(child).exists():
            wrong.append((sign.name, process.returncode, why, err[-500:]))
    assert not wrong


def measuring_child(parent: int) -> str:
    """The /proc folder of the process that measures for `parent`; empty while there is none."""
    for task in Path(f"/proc/{parent}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if b"agent.jobs.benchmark" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return f"/proc/{pid}"
    return ""

"""A signal to a preflight before its scan is done."""

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

from agent.base import EXIT_STOPPED
from agent.checks.measured import ALL_CODES, CLUSTER_CODES, RDMA_BENCH_CODES, SEARCH_CODES

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
    assert {check["code"] for check in found["checks"]} == set(ALL_CODES).difference(
        CLUSTER_CODES, RDMA_BENCH_CODES, SEARCH_CODES
    )
    said = {(check["status"], check["message"]) for check in found["checks"]}
    assert said == {("unknown", "not scanned: stopped by SIGTERM before that")}
    assert found["notes"] == ["stopped by SIGTERM before the scan was done: nothing is known"]
    cases = ElementTree.parse(report / "junit.xml").iter("testcase")  # noqa: S314 - our own file
    assert all(case.find("skipped") is not None or case.find("error") is not None for case in cases)
    assert "stopped by SIGTERM before it was done" in (report / "report.html").read_text()

"""The tutorial's comparison of networks, on a real slurmctld and two real slurmd, each with its own two networks.

As with pods, `eth0` is slow (a vxlan that `tc tbf` limits) and `net1` is a fast secondary network. Both carry TCP: this
kernel has no RDMA, so the tutorial's third bar is not among them.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rigs import netns
from rigs.slurm import slurm_cluster
from rigs.waiting import eventually

from contracts.run_record import read

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "slurm.md"
# The layout and the length of a job that is small enough for a test; PEFT takes long to import.
RUNS = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
SMALL = "--ranks 1 --set use_peft=false --set dataset_rows=64"

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.netns,
    pytest.mark.timeout(1200),
    pytest.mark.nightly,  # minutes of waiting; with other clusters on the host its jobs have waited longer
    pytest.mark.skipif(netns.missing("tc") is not None, reason=str(netns.missing("tc"))),
]


def commands(shared: Path) -> list[str]:
    """The commands of the page that record the nodes and train over both TCP networks, as it has them.

    The names of the nodes, of the second interface and of the folder are those of the rig.
    """
    text = PAGE.read_text(encoding="utf-8")
    names = {"node01": "host-0", "node02": "host-1", "eth1": "net1", "/shared": str(shared),
             "max_steps=200": "max_steps=12"}  # fmt: skip
    for old, new in names.items():
        text = text.replace(old, new)
    found = [line for line in re.findall(r"^\$ (.*)", text, re.MULTILINE)
             if "topoflight capture" in line or " --over " in line]  # fmt: skip
    return [f"{line} {SMALL}" if " --over " in line else line for line in found]


def test_the_runs_of_the_tutorial_are_in_the_order_of_their_networks(tmp_path: Path) -> None:
    """The commands run as a reader types them; the slower network has the longer step."""
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"}
    (tmp_path / "slurm").mkdir()
    with netns.hosts(2, default_rate="40mbit") as hosts, slurm_cluster(tmp_path / "slurm", hosts=hosts) as cluster:
        for line in commands(tmp_path):
            done = subprocess.run(
                cluster.inside(["bash", "-c", f"cd {shlex.quote(str(tmp_path))} && {line}"]), capture_output=True,
                env={**cluster.environment, **environment}, text=True, timeout=300, check=False,
            )  # fmt: skip
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            if " --over " in line:
                number = done.stdout.split()[1]
                eventually(lambda number=number: cluster.job(number)["JobState"] not in RUNS, line, 300)
                logs = [path.read_text() for path in (tmp_path / "bars").glob(f"*/slurm-{number}.log")]
                assert cluster.job(number)["JobState"] == "COMPLETED", logs
    slow, fast = (read(tmp_path / "bars" / name / "run.json") for name in ("eth0", "net1"))
    for record, name in ((slow, "eth0"), (fast, "net1")):
        assert record.transports and all(f"TCP over {name} " in seen for seen in record.transports)
    assert slow.measured.step_seconds and fast.measured.step_seconds
    assert slow.measured.step_seconds > fast.measured.step_seconds

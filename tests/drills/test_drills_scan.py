"""Drivers and files that hang, crash, lie or go while a scan asks them."""

import contextlib
import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nvml_profile
import pytest
from blocking_file import BlockingFile
from drill_ground import MARK, Ground, drill
from rigs.recorded import path_of
from rigs.waiting import eventually

from probes.api import Failed, Ok, Snapshot
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts
from probes.registry import BY_NAME
from probes.scanner import Scanner

pytestmark = pytest.mark.long

ANSWERS = json.loads(path_of().read_text(encoding="utf-8"))["answers"]
HURRIED_SECONDS = 5.0  # for an answer of a driver that gives none; a driver that answers has another limit


def machine_root(ground: Ground) -> Path:
    """A recorded machine's files."""
    root = ground.folder / "root"
    nvml_profile.restore_files(ANSWERS, root)
    return root


@contextlib.contextmanager
def variables(ground: Ground, **more: str) -> Iterator[None]:
    """This process's environment, which the scanner's child inherits."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {MARK: ground.mark, **more}.items():
            patch.setenv(name, value)
        yield


def failed(snapshot: Snapshot) -> list[str]:
    """The probes that did not answer."""
    return [name for name, outcome in snapshot.outcomes.items() if isinstance(outcome, Failed)]


@drill
def test_sigterm_during_a_hang(ground: Ground) -> None:
    """It answers /healthz meanwhile, and ends well within a kubelet's 30 seconds."""
    profile = ground.folder / "profile"
    profile.write_text(nvml_profile.profile(ANSWERS["nvml"]), encoding="utf-8")
    inject = {
        "LD_LIBRARY_PATH": str(nvml_profile.build(ground.folder).parent), "FAKE_NVML_PROFILE": str(profile),
        "FAKE_NVML_INJECT": "nvmlDeviceGetName@gpu1=hang",
    }  # fmt: skip
    with ground.agent(f"--root={machine_root(ground)}", **inject) as (agent, _):
        eventually(lambda: ground.runs("probes.worker"), "the scan has begun")
        time.sleep(1.0)  # into the call that hangs: five files and a library away
        agent.send_signal(signal.SIGTERM)
        agent.wait(120)  # a kubelet waits 30 s; on a busy machine the test only requires that it ends


@drill
def test_sysfs_vanishes(ground: Ground) -> None:
    """Devices are unplugged between listing and reading; what is back is read again."""
    root = machine_root(ground)
    wanted = tuple(BY_NAME[name] for name in ("pci", "rdma", "interfaces", "hostinfo"))
    over = threading.Event()

    def unplug() -> None:
        bus = root / "sys/bus/pci/devices"  # stays: without it sysfs is not there at all, which is a failed probe
        found = (p for p in root.joinpath("sys").rglob("*") if p.is_dir() and not p.is_symlink())
        folders = [p for p in found if not bus.is_relative_to(p)]
        random.Random(1).shuffle(folders)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            if over.wait(0.001):
                return

    with variables(ground), Scanner(str(root), probes=wanted) as scanner:
        before = scanner.scan()
        thread = threading.Thread(target=unplug)
        thread.start()
        during = [scanner.scan() for _ in range(3)]
        over.set()
        thread.join()
        shutil.rmtree(root / "sys")
        nvml_profile.restore_files(ANSWERS, root)
        after = scanner.scan()
    assert [failed(one) for one in during] == [[]] * 3, during
    for kind in (PciFacts, RdmaFacts):
        assert before.facts(kind) is not None and after.facts(kind) == before.facts(kind)


@drill
def test_sysfs_blocks(ground: Ground) -> None:
    """The probe is failed, the others answer, no second child is sent into it, and all is whole once it answers."""
    root = machine_root(ground)
    state = root / "sys/class/infiniband/mlx5_3/ports/1/state"
    rdma = replace(BY_NAME["rdma"], timeout_seconds=HURRIED_SECONDS)
    with variables(ground), Scanner(str(root), probes=(BY_NAME["hostinfo"], rdma, BY_NAME["limits"]),
                                     retry_seconds=20.0) as scanner:  # fmt: skip
        with BlockingFile(state.resolve()) as blocking:
            scans = [scanner.scan() for _ in range(3)]
            stuck = len(ground.living()) - (scanner.child_pid is not None)
        eventually(lambda: isinstance(scanner.scan().outcomes["rdma"], Ok), "the probe answers once the file does")
    assert [failed(one) for one in scans] == [["rdma"]] * 3, scans
    assert blocking.readers == 1 and stuck <= 1, "children that were sent into the kernel, and hang there"

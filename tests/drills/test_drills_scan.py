"""Drivers and files that hang, crash, lie or go while a scan asks them."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nvml_profile
import pytest
from blocking_file import BlockingFile
from drill_ground import MARK, Ground, drill, eventually, machine

from probes.api import Failed, Ok, Snapshot
from probes.registry import BY_NAME
from probes.scanner import Scanner

pytestmark = pytest.mark.long

H100 = "hgx-h100-8xH100-8hca"
HURRIED_SECONDS = 5.0  # for an answer of a driver that gives none; a driver that answers has a time of its own


def machine_root(ground: Ground) -> Path:
    """A recorded machine's files."""
    root = ground.folder / "root"
    nvml_profile.restore_files(machine(H100)["answers"], root)
    return root


@contextlib.contextmanager
def variables(ground: Ground, **more: str) -> Iterator[None]:
    """This process's environment, which the scanner's child inherits."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {MARK: ground.mark, **more}.items():
            patch.setenv(name, value)
        yield


def others_lost(snapshot: Snapshot, probe: str) -> list[str]:
    """Probes that the fault was not about, and that did not answer."""
    found = snapshot.outcomes.items()
    return [f"{name}: {outcome}" for name, outcome in found if name != probe and isinstance(outcome, Failed)]


@drill(long=3)
def test_sigterm_during_a_hang(ground: Ground) -> list[str]:
    """It answers /healthz meanwhile, and ends well within a kubelet's 30 seconds."""
    profile = ground.folder / "profile"
    profile.write_text(nvml_profile.profile(machine(H100)["answers"]["nvml"]), encoding="utf-8")
    inject = {
        "LD_LIBRARY_PATH": str(nvml_profile.build(ground.folder).parent), "FAKE_NVML_PROFILE": str(profile),
        "FAKE_NVML_INJECT": "nvmlDeviceGetName@gpu1=hang",
    }  # fmt: skip
    with ground.agent(f"--root={machine_root(ground)}", **inject) as agent:
        lost = [] if agent.ask("/healthz")[0] == 200 else ["no /healthz"]
        eventually(lambda: any("probes.worker" in line for line in ground.commands()) or None)
        time.sleep(1.0)  # into the call that hangs: five files and a library away
        took = agent.term()
    if took is None:
        return [*lost, "the agent does not end", *ground.orphans()]
    return [*lost, *ground.orphans()]


@drill(long=20)
def test_sysfs_vanishes(ground: Ground) -> list[str]:
    """Devices are unplugged between listing and reading; what is back is read again."""
    root = machine_root(ground)
    wanted = tuple(BY_NAME[name] for name in ("pci", "rdma", "interfaces", "hostinfo"))
    over = threading.Event()

    def unplug() -> None:
        bus = root / "sys/bus/pci/devices"  # stays: without it sysfs is not there at all, which is a failed probe
        found = (p for p in root.joinpath("sys").rglob("*") if p.is_dir() and not p.is_symlink())
        folders = [p for p in found if not bus.is_relative_to(p)]
        ground.random.shuffle(folders)
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
        nvml_profile.restore_files(machine(H100)["answers"], root)
        after = scanner.scan()
    lost = [f"{name}: {o.error}" for s in during for name, o in s.outcomes.items() if isinstance(o, Failed)]
    for name in ("pci", "rdma"):
        then, now = before.outcomes[name], after.outcomes[name]
        if not isinstance(then, Ok) or not isinstance(now, Ok) or now.facts != then.facts:
            lost.append(f"{name} is not what it was before")
    return [*lost, *ground.orphans()]


@drill(long=3)
def test_sysfs_blocks(ground: Ground) -> list[str]:
    """The probe is failed, the others answer, no second child is sent into it, and all is whole once it answers."""
    root = machine_root(ground)
    state = root / "sys/class/infiniband/mlx5_3/ports/1/state"
    rdma = replace(BY_NAME["rdma"], timeout_seconds=HURRIED_SECONDS)
    with variables(ground), Scanner(str(root), probes=(BY_NAME["hostinfo"], rdma, BY_NAME["limits"]),
                                     retry_seconds=20.0) as scanner:  # fmt: skip
        with BlockingFile(state.resolve()) as blocking:
            scans = [scanner.scan() for _ in range(3)]
            stuck = len(ground.ours()) - (scanner.child_pid is not None)
        whole = eventually(lambda: isinstance(scanner.scan().outcomes["rdma"], Ok) or None)
    lost = [what for one in scans for what in others_lost(one, "rdma")]
    lost += [f"rdma: {one.outcomes['rdma']}" for one in scans if not isinstance(one.outcomes["rdma"], Failed)]
    if blocking.readers != 1 or stuck > 1:
        lost.append(f"{blocking.readers} children were sent into the kernel, {stuck} hang there")
    if whole is None:
        lost.append("the probe does not come back once the file answers")
    return [*lost, *ground.orphans()]

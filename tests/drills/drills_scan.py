"""Drivers and files that hang, crash, lie or go while a scan asks them."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from blocking_file import BlockingFile
from drill_ground import MARK, ROOT, Ground, eventually, machine
from drill_register import drill

from agent.checks.view import checks_of_snapshot
from contracts.finding import Status
from probes.api import Failed, Ok, Snapshot
from probes.gpu.facts import GpuFacts
from probes.registry import ALL, BY_NAME
from probes.scanner import Scanner

sys.path.insert(0, str(ROOT / "tests" / "fakes" / "nvml"))

import nvml_profile

H100 = "hgx-h100-8xH100-8hca"
HURRIED_SECONDS = 5.0  # for an answer of a driver that gives none; whoever answers has a time of its own


@functools.cache
def fake_library() -> Path:
    """The folder of the fake NVML, built once."""
    return nvml_profile.build(Path(tempfile.mkdtemp(prefix="drill-nvml-"))).parent


def gpu_environment(ground: Ground, name: str = H100, inject: str = "") -> dict[str, str]:
    """What lets a process find a recorded machine's GPUs."""
    profile = ground.folder / "profile"
    profile.write_text(nvml_profile.profile(machine(name)["answers"]["nvml"]), encoding="utf-8")
    return {
        "LD_LIBRARY_PATH": str(fake_library()), "FAKE_NVML_PROFILE": str(profile), "FAKE_NVML_INJECT": inject,
    }  # fmt: skip


def machine_root(ground: Ground) -> Path:
    """A recorded machine's files."""
    root = ground.folder / "root"
    nvml_profile.restore_files(machine(H100)["answers"], root)
    return root


@contextlib.contextmanager
def variables(ground: Ground, **more: str) -> Iterator[None]:
    """This process's environment, which the scanner's child inherits."""
    wanted = {MARK: ground.mark, **more}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def gpus(snapshot: Snapshot) -> tuple[Any, ...]:
    """Facts of the GPUs, without what comes from this machine's kernel log."""
    facts = snapshot.facts(GpuFacts)
    return tuple(replace(gpu, xids=None) for gpu in facts.gpus) if facts else ()


def others_lost(snapshot: Snapshot, probe: str) -> list[str]:
    """Probes that the fault was not about, and that did not answer."""
    found = snapshot.outcomes.items()
    return [f"{name}: {outcome}" for name, outcome in found if name != probe and isinstance(outcome, Failed)]


def _driver_ends(ground: Ground, inject: str, words: str, seconds: float | None = None) -> list[str]:
    """A call that ends the child: one probe failed in this scan, all of them there in the next."""
    root, gpu = machine_root(ground), BY_NAME["gpu"]
    gpu = replace(gpu, timeout_seconds=seconds or gpu.timeout_seconds)
    with variables(ground, **gpu_environment(ground)):
        last = (*(probe for probe in ALL if probe.name != "gpu"), gpu)  # the child that it ends is the last
        with Scanner(str(root), last, retry_seconds=0.0) as scanner:
            os.environ["FAKE_NVML_INJECT"] = inject
            broken = scanner.scan()
            os.environ["FAKE_NVML_INJECT"] = ""
            whole = scanner.scan()
        lost = others_lost(broken, "gpu")
        failed = broken.outcomes["gpu"]
        if not isinstance(failed, Failed) or words not in failed.error:
            lost.append(f"the gpu probe does not say {words!r}: {failed}")
        if len(gpus(whole)) != 8:
            lost.append(f"the next scan has {len(gpus(whole))} GPUs: {whole.outcomes['gpu']}")
    return [*lost, *ground.orphans()]


@drill("NVML: a call hangs")
def nvml_hangs(ground: Ground) -> list[str]:
    """For good, in the middle of a scan."""
    return _driver_ends(ground, "nvmlDeviceGetName=hang", "no answer after", HURRIED_SECONDS)


@drill("NVML: a call crashes the process")
def nvml_crashes(ground: Ground) -> list[str]:
    """SIGSEGV within the library."""
    return _driver_ends(ground, "nvmlInit=crash", "SIGSEGV")


def _one_gpu(ground: Ground, inject: str, hurt: int) -> tuple[Snapshot, list[str]]:
    """A scan with the fault, and which of the other GPUs do not answer as they did before."""
    root = machine_root(ground)
    with variables(ground, **gpu_environment(ground)):
        with Scanner(str(root), probes=(BY_NAME["gpu"],)) as scanner:
            before = gpus(scanner.scan())
        os.environ["FAKE_NVML_INJECT"] = inject
        with Scanner(str(root), probes=(BY_NAME["gpu"],)) as scanner:
            snapshot = scanner.scan()
    now = {gpu.index: gpu for gpu in gpus(snapshot)}
    lost = [f"GPU{gpu.index} differs" for gpu in before if gpu.index != hurt and now.get(gpu.index) != gpu]
    return snapshot, [*lost, *ground.orphans()]


@drill("NVML: answers garbage for one GPU")
def nvml_garbage(ground: Ground) -> list[str]:
    """Structures full of rubbish, text that is none."""
    symbols = ("Name", "UUID", "FieldValues", "NvLinkState", "GpuFabricInfoV", "MigMode", "ComputeRunningProcesses")
    inject = ";".join(f"nvmlDeviceGet{symbol}@gpu4=garbage" for symbol in symbols)
    return _one_gpu(ground, inject, 4)[1]


@drill("NVML: loses one GPU")
def nvml_loses_a_gpu(ground: Ground) -> list[str]:
    """Every call about it answers GPU_IS_LOST: a finding names it."""
    snapshot, lost = _one_gpu(ground, "*@gpu5=gpu_lost", 5)
    named = [(f.code, f.subject) for f in checks_of_snapshot(snapshot) if f.status is not Status.PASS]
    return lost if ("gpu.device.lost", "GPU5") in named else [*lost, f"no finding names GPU5: {named}"]


@drill("SIGTERM of the agent while a driver call hangs", long=3)
def sigterm_during_a_hang(ground: Ground) -> list[str]:
    """It answers /healthz meanwhile, and ends well within a kubelet's 30 seconds."""
    inject = gpu_environment(ground, inject="nvmlDeviceGetName@gpu1=hang")
    with ground.agent(f"--root={machine_root(ground)}", **inject) as agent:
        lost = [] if agent.ask("/healthz")[0] == 200 else ["no /healthz"]
        eventually(lambda: any("probes.worker" in line for line in ground.commands()) or None)
        time.sleep(1.0)  # into the call that hangs: five files and a library away
        took = agent.term()
    if took is None:
        return [*lost, "the agent does not end", *ground.orphans()]
    ground.notes.append("ended within 5 s" if took < 5 else "ended within 25 s")
    return [*lost, *ground.orphans()]


@drill("sysfs: folders vanish during a scan", long=20)
def sysfs_vanishes(ground: Ground) -> list[str]:
    """Devices are unplugged between listing and reading; what is back is read again."""
    root = machine_root(ground)
    wanted = tuple(BY_NAME[name] for name in ("pci", "rdma", "interfaces", "hostinfo"))
    over = threading.Event()

    def unplug() -> None:
        folders = [p for p in root.joinpath("sys").rglob("*") if p.is_dir() and not p.is_symlink()]
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


@drill("sysfs: a read blocks in the kernel, where SIGKILL does not reach", marks=("netns",), long=3)
def sysfs_blocks(ground: Ground) -> list[str]:
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


@drill("libibverbs missing")
def verbs_missing(ground: Ground) -> list[str]:
    """Its Python binding is there and the loader finds no libibverbs.so.1: RDMA facts come from the kernel."""
    root, package = machine_root(ground), ground.folder / "packages" / "pyverbs"
    package.mkdir(parents=True)
    library = ground.folder / "libibverbs.so.1"
    source = ground.folder / "device.c"
    source.write_text("int ibv_fork_init(void); int PyInit_device(void) { return ibv_fork_init(); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, "-xc", "-"], input=b"int ibv_fork_init(void) {return 0;}",
                   check=True)  # fmt: skip
    for name in ("device", "pyverbs_error"):
        target = package / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", target, source, library], check=True)
    (package / "__init__.py").write_text("")
    library.unlink()
    with variables(ground), Scanner(str(root), probes=(BY_NAME["rdma"],)) as scanner:
        plain = scanner.scan().outcomes["rdma"]
    with variables(ground, PYTHONPATH=str(package.parent)), Scanner(str(root), probes=(BY_NAME["rdma"],)) as scanner:
        without = scanner.scan().outcomes["rdma"]
    if not isinstance(without, Ok) or not isinstance(plain, Ok):
        return [f"rdma: {without}"]
    same = without.facts.devices == plain.facts.devices and "libibverbs.so.1" in (without.facts.pyverbs or "")
    return [*([] if same else [f"{without.facts.pyverbs}; the devices differ"]), *ground.orphans()]


@drill("netlink: the socket overruns (ENOBUFS)", marks=("netns",), long=20)
def netlink_overrun(ground: Ground) -> list[str]:
    """A storm of link events into a receive buffer of the smallest size, between two questions."""
    script = Path(__file__).with_name("netlink_storm.py")
    done = subprocess.run(
        ["unshare", "-n", sys.executable, str(script)], env=ground.environment(), capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    if done.returncode:
        return [f"{done.stdout[-400:]} {done.stderr[-600:]}"]
    ground.notes.append(done.stdout.strip())
    return ground.orphans()

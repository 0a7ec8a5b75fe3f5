"""Runs a job on two QEMU guests that each have a real RDMA device, Soft-RoCE, with real verbs traffic between.

The job is a bash script; it and the other paths lie in /job of each guest, in Python's path. See README.md.
"""

import compileall
import contextlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import guest_image

KERNEL_WORDS = (
    "console=ttyS0 loglevel=4 panic=-1 mitigations=off nokaslr audit=0 apparmor=0 no_timer_check random.trust_cpu=on "
    "net.ifnames=0"
)
RESULTS_BYTES = 64 << 20
GUESTS = 2
MARK = re.compile(rb"\x1eexit (\d+)\r?\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """What one guest's job said and left."""

    rank: int
    returncode: int | None  # None: it did not end in time, or the guest died
    output: str
    console: str  # the kernel's words
    results: Path  # what the job left in /out


def run(job: Path, paths: Sequence[Path], *, timeout_seconds: float) -> list[Guest]:
    """Boot the guests, run the bash script in each, end them, return what came back.

    The job finds RANK, WORLD, PEER (the other guest on the RoCE network) and MANAGEMENT_PEER in its environment.
    The caller owns the folders of results; they lie in the system's temporary folder.
    """
    cache = guest_image.build()
    folder = Path(tempfile.mkdtemp(prefix="softroce-"))
    try:
        _pack(folder / "job.tar", job, paths)
        machines = [_start(cache, folder, rank) for rank in range(GUESTS)]
        try:
            outputs = _wait(machines, folder, time.monotonic() + timeout_seconds)
        finally:
            for machine in machines:
                machine.kill()
                machine.wait()
        return [_collect(folder, rank, output) for rank, output in enumerate(outputs)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pack(archive: Path, job: Path, paths: Sequence[Path]) -> None:
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(job, "job.sh")
        for path in paths:
            for each, name in _compiled(path):
                tar.add(each, name, filter=_owned_by_root)
    size = archive.stat().st_size
    os.truncate(archive, -(-size // 512) * 512)


def _compiled(path: Path) -> Iterator[tuple[Path, str]]:
    """The path and its compiled modules, which an emulated processor would take minutes for, with their names in /job.

    A guest whose Python is another version passes over the compiled ones.
    """
    if path.is_dir():
        compileall.compile_dir(path, quiet=2)
    yield path, path.name
    if path.suffix == ".py" and compileall.compile_file(path, quiet=2):
        made = Path(importlib.util.cache_from_source(str(path)))
        yield made, f"__pycache__/{made.name}"


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry


def _start(cache: Path, folder: Path, rank: int) -> subprocess.Popen[bytes]:
    results = folder / f"results{rank}"
    with results.open("wb") as handle:
        handle.truncate(RESULTS_BYTES)
    # Software emulation by default: /dev/kvm inside a virtual machine is often there and hangs. It is fast enough.
    accelerator = os.environ.get("TOPOFLIGHT_SOFTROCE_ACCEL", "tcg,thread=multi")
    command = [
        # What guests measure must not be what else the machine does; where that is not allowed `nice` goes on without.
        *("nice", "-n", "-10"),
        "qemu-system-x86_64",
        *("-accel", accelerator, "-cpu", "max", "-M", "q35,hpet=off", "-smp", "1"),
        *("-m", "768", "-nodefaults", "-display", "none", "-no-reboot", "-monitor", "none"),
        *("-kernel", f"{cache}/vmlinuz", "-initrd", f"{cache}/initramfs"),
        *("-append", f"{KERNEL_WORDS} rank={rank} world={GUESTS} mtu=1500"),
        *("-serial", f"file:{folder}/console{rank}"),
        *("-device", "virtio-serial-pci", "-chardev", f"file,id=words,path={folder}/output{rank}"),
        *("-device", "virtconsole,chardev=words"),
        *_drive("root", f"{cache}/root.ext4", "snapshot=on,cache=unsafe"),
        *_drive("job", f"{folder}/job.tar", "readonly=on"),
        *_drive("results", str(results), "cache=unsafe"),
        *_network("mgmt", folder, rank, "52:54:00:77:01"),
        *_network("net1", folder, rank, "52:54:00:77:02"),
        *("-device", "virtio-rng-pci"),
    ]
    (folder / f"output{rank}").touch()
    with (folder / f"qemu{rank}").open("wb") as words:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=words, stderr=subprocess.STDOUT)


def _drive(name: str, path: str, options: str) -> list[str]:
    drive = f"file={path},if=none,id={name},format=raw,{options}"
    return ["-drive", drive, "-device", f"virtio-blk-pci,drive={name}"]


def _network(name: str, folder: Path, rank: int, mac: str) -> list[str]:
    """A wire of two Unix sockets between the guests."""
    here, there = (f"{folder}/{name}.{end}" for end in (rank, 1 - rank))
    wire = f"dgram,id={name},local.type=unix,local.path={here},remote.type=unix,remote.path={there}"
    return ["-netdev", wire, "-device", f"virtio-net-pci,netdev={name},mac={mac}:0{rank},host_mtu=9000"]


def _wait(machines: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> list[bytes]:
    """The words of every guest, once all jobs have ended, a guest has died, or the time is over."""
    outputs = [folder / f"output{rank}" for rank in range(len(machines))]
    while time.monotonic() < deadline:
        words = [path.read_bytes() for path in outputs]
        ended = [MARK.search(w) is not None for w in words]
        if all(ended):
            return words
        if any(m.poll() is not None and not e for m, e in zip(machines, ended, strict=True)):
            break
        time.sleep(0.2)
    return [path.read_bytes() for path in outputs]


def _collect(folder: Path, rank: int, output: bytes) -> Guest:
    results = Path(tempfile.mkdtemp(prefix=f"softroce-out{rank}-"))
    with contextlib.suppress(tarfile.TarError, OSError), tarfile.open(folder / f"results{rank}") as tar:
        tar.extractall(results, filter="data")
    mark = MARK.search(output)
    console, qemu = (folder / f"{n}{rank}" for n in ("console", "qemu"))
    return Guest(
        rank=rank,
        returncode=int(mark[1]) if mark else None,
        output=(output[: mark.start()] if mark else output).decode(errors="replace").replace("\r\n", "\n"),
        console="".join(p.read_text(errors="replace") for p in (console, qemu) if p.exists()),
        results=results,
    )


PACKAGES = ("contracts", "hardware", "probes", "topology", "agent", "collectives", "planner")
LIBRARIES = ("attr", "attrs", "cattr", "cattrs", "psutil", "pyroute2", "typing_extensions", "click", "rich", "yaml",
             "markupsafe", "jinja2")  # fmt: skip


def command_paths() -> list[Path]:
    """What the guest's Python needs to run our probes and `python3 -m agent.cli`: packages and libraries."""
    paths = [Path(str(importlib.import_module(name).__file__)) for name in LIBRARIES]
    libraries = (path.parent if path.name == "__init__.py" else path for path in paths)
    return [*(guest_image.ROOT / name for name in PACKAGES), *libraries]

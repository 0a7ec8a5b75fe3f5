"""Drivers and files that hang, crash, lie or go while a scan asks them; a launch and a preflight that are ended.

SIGKILL of a launch that has saved a checkpoint; SIGTERM of a whole preflight; a full disk. A drill is one fault that
happens for real in a folder and a mount namespace with its own lock. Commands run as a user would run them,
`python -m agent.cli VERB`, with TMPDIR, state folder and lock below the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import random
import select
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import nvml_profile
import psutil
import pytest
import resident
from rigs.netns import missing
from rigs.recorded import path_of, snapshot
from rigs.results import RUN, benchmark, measurement
from rigs.tables import ROOT
from rigs.waiting import eventually

from agent.base import EXIT_STOPPED
from agent.base.result_store import BENCH_FILE, RUNS_FOLDER
from agent.http.state import State
from collectives.bench import processes
from contracts import plain
from contracts.run_record import record_of
from probes.api import Failed, Ok, Snapshot
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts
from probes.registry import BY_NAME
from probes.scanner import Scanner

_INIT, _GETATTR, _OPEN, _READ, _FORGET, _INTERRUPT, _BATCH_FORGET = 26, 3, 14, 15, 2, 36, 42
_SILENT = {_FORGET, _INTERRUPT, _BATCH_FORGET, _READ}
_MNT_DETACH = 2


class BlockingFile:
    """Mounted over a file while the block lasts; a process that reads it then hangs in the kernel.

    It is a FUSE file system of one file, spoken over /dev/fuse without a library. Specification: Linux
    include/uapi/linux/fuse.h (protocol 7.31), Documentation/filesystems/fuse. A reader whose request was taken and not
    answered cannot be killed, as with a driver that hangs, until the file system is taken away.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.readers = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fuse = -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> BlockingFile:
        self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        options = f"fd={self._fuse},rootmode={stat.S_IFREG:o},user_id=0,group_id=0".encode()
        if self._libc.mount(b"drill", os.fsencode(self.path), b"fuse", 0, options) != 0:
            number = ctypes.get_errno()
            os.close(self._fuse)
            raise OSError(number, os.strerror(number), f"mount {self.path}")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._libc.umount2(os.fsencode(self.path), _MNT_DETACH)
        self._over.set()
        self._thread.join()  # a thread that reads it keeps it open
        os.close(self._fuse)  # every request in flight now ends with ENOTCONN

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._fuse, select.POLLIN)
        while not self._over.is_set():
            if not poll.poll(50):
                continue
            try:
                request = os.read(self._fuse, 1 << 17)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return  # unmounted
            _, operation, unique = struct.unpack_from("=IIQ", request)
            self.readers += operation == _READ
            if operation not in _SILENT:
                number, body = _answer(operation)
                os.write(self._fuse, struct.pack("=IiQ", 16 + len(body), -number, unique) + body)


def _answer(operation: int) -> tuple[int, bytes]:
    """(errno, body) for what the kernel asks of one regular file."""
    if operation == _INIT:
        return 0, struct.pack("=IIIIHHIIHHI28x", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0)
    if operation == _GETATTR:
        mode = stat.S_IFREG | 0o444
        attributes = struct.pack("=QQQQQQIIIIIIIIII", 1, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
        return 0, struct.pack("=QII", 1, 0, 0) + attributes
    if operation == _OPEN:
        return 0, struct.pack("=QII", 1, 1, 0)  # FOPEN_DIRECT_IO: each read is a request
    return errno.ENOSYS, b""


MARK = "TOPOFLIGHT_DRILL"
SMALL_BENCH = ("bench", "--ranks=2", "--size=1024", "--op=all_gather", "--budget=1", "--output=json")
# Mounts the lock of this ground over the machine's, and runs the other mount commands of the drill.
_ENTER = 'mount --bind "$DRILL_LOCK" /run/lock && eval "$DRILL_MOUNTS" && exec "$@"'
_TOPOFLIGHT = ("unshare", "-m", "sh", "-c", _ENTER, "sh", sys.executable, "-m", "agent.cli")


def drill(run: Callable[[Ground], None]) -> Callable[[Path], None]:
    """Make a test of a function. It ends what the drill has left running."""

    @pytest.mark.timeout(1200)
    @functools.wraps(run)
    def test(tmp_path: Path) -> None:
        if (why := missing("mount", "cc")) is not None:
            pytest.skip(why)
        ground = Ground(tmp_path)
        try:
            run(ground)
            eventually(lambda: not ground.living(), "every process that the drill has started has ended")
        finally:
            for process, words in ground.living():
                print(f"orphan: {process.pid} {words[-200:]}")
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    del test.__wrapped__  # pytest would read its arguments there
    return test


@dataclass(slots=True)
class Ground:
    """One run of one drill."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        for name in ("lock", "tmp", "state", "home"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    @property
    def state(self) -> Path:
        """The agent's state folder."""
        return self.folder / "state"

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's environment, marked and turned to this ground."""
        inherited = {k: v for k, v in os.environ.items() if k not in ("KUBERNETES_SERVICE_HOST", "KUBECONFIG", "CI")}
        return {
            **inherited, MARK: self.mark, "TMPDIR": str(self.folder / "tmp"), "TOPOFLIGHT_STATE": str(self.state),
            "HOME": str(self.folder / "home"), "DRILL_LOCK": str(self.folder / "lock"), "DRILL_MOUNTS": ":",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(more or {}),
        }  # fmt: skip

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start `topoflight WORDS`. DRILL_MOUNTS are commands run before it."""
        return subprocess.Popen(
            [*_TOPOFLIGHT, *words], env=self.environment(environment), cwd=self.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str, seconds: float = 300.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `topoflight WORDS` to its end."""
        process = self.start(*words, **environment)
        out, err = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    @contextlib.contextmanager
    def agent(self, *words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        """A `topoflight serve` that answers, and its port; it is ended at the end of the block."""
        port = resident.free_port()
        command = [*_TOPOFLIGHT, "serve", f"--port={port}", f"--state={self.state}", *words]
        with resident.process(command, self.environment(environment), self.folder / "serve.log") as one:
            resident.wait(port, "/healthz", one)
            yield one, port

    def living(self) -> list[tuple[psutil.Process, str]]:
        """Every living process that this ground's commands started, with its command line."""
        alive = []
        for process in processes.find_marked(MARK, self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append((process, " ".join(process.cmdline())))
        return alive

    def runs(self, module: str) -> bool:
        """Whether one of these processes runs this module."""
        return any(module in words for _, words in self.living())

    def assert_nothing_is_left(self, *folders: Path) -> None:
        """No process, no lock that stops the next benchmark, no half-written or temporary file that it would not sweep.

        Files whose names begin with a dot are renamed when they are whole.
        """
        eventually(lambda: not self.living(), "every process that the drill has started has ended")
        with processes.lock_host(self.folder / "lock" / processes.LOCK_NAME):
            pass
        for folder in (self.state, *folders):
            for path in folder.rglob("*.json"):
                if not any(part.startswith(".") for part in path.relative_to(folder).parts):
                    json.loads(path.read_text())
        processes.remove_stale_folders(self.folder / "tmp")
        assert list((self.folder / "tmp").iterdir()) == []

    def store_earlier_results(self) -> None:
        """What earlier runs left in the state folder."""
        (self.state / RUNS_FOLDER).mkdir(exist_ok=True)
        (self.state / BENCH_FILE).write_text(json.dumps(plain.write(EARLIER)))
        (self.state / RUNS_FOLDER / "20260101T000000-1.json").write_text(json.dumps(RUN))

    def assert_earlier_results_are_there(self) -> None:
        """What was stored before can be read back, or something newer in its place."""
        view = State(lambda: (snapshot(),), interval_seconds=3600, folder=self.state).refresh()
        assert view.bench is not None and record_of(RUN) in view.runs


EARLIER = benchmark(measurement(), hosts=("earlier",), started_at_seconds=1.0)


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
    root, machine = resident.restore(ground.folder)
    with ground.agent(f"--root={root}", FAKE_NVML_INJECT="nvmlDeviceGetName@gpu1=hang", **machine) as (agent, _):
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


@contextlib.contextmanager
def _disk(place: Path) -> Iterator[None]:
    """A separate small file system over a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _fill(place: Path) -> None:
    """To the last byte."""
    with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1024))


def _files(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def _assert_refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    """A message for the user that names the place, with this exit code and without a traceback."""
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done
    assert all(word in done.stderr for word in words), done


@drill
def test_disk_full(ground: Ground) -> None:
    """The state folder and a --save on such a disk: refused before any load, and what was stored stays."""
    with _disk(ground.state):
        ground.store_earlier_results()
        _fill(ground.state)
        before = _files(ground.state)
        _assert_refused(ground.run(*SMALL_BENCH, f"--save={ground.state / 'saved.json'}"), "saved.json", "is full")
        _assert_refused(ground.run("preflight", "-q", f"--report={ground.state / 'report'}"), "report", "is full")
        with ground.agent() as (agent, port):
            resident.wait(port, "/readyz", agent)
            assert record_of(RUN) in map(record_of, json.loads(resident.get(port, "/runs")[1]))
        ground.assert_earlier_results_are_there()
        assert _files(ground.state) <= before
    ground.assert_nothing_is_left()


@drill
def test_disk_full_temporary(ground: Ground) -> None:
    """Neither TMPDIR nor /tmp nor /var/tmp takes a byte: a benchmark says so and starts nothing."""
    places = ('"$TMPDIR"', "/tmp", "/var/tmp", "/dev/shm")
    commands = [f"mkdir /run/lock/project && mount --bind {shlex.quote(str(ROOT))} /run/lock/project"]
    for place in places:
        commands.append(f"mount -t tmpfs -o size=4k tmpfs {place}")
        if ROOT.is_relative_to(place):  # the project itself must stay in reach where it lies below
            there = shlex.quote(str(ROOT))
            commands.append(f"mkdir -p {there} && mount --bind /run/lock/project {there}")
        commands.append(f"head -c 4096 /dev/zero > {place}/filler")
    mounts = "; ".join(commands)
    done = ground.run(*SMALL_BENCH, DRILL_MOUNTS=f"{mounts}; cd /tmp")  # the working folder is the last resort
    _assert_refused(done, "temporary", code=1)
    ground.assert_nothing_is_left()

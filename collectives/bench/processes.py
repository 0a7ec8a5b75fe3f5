"""Resources of a run on its host that end with it: process trees, the benchmark lock, a temporary folder.

Surfaces: prctl(2) PR_SET_PDEATHSIG, /proc through psutil, and flock(2), which the kernel releases when its holder dies.
A launcher starts its ranks in their own sessions, so a process group does not contain all of them. Therefore every
process of a run has a marker in its environment (/proc/PID/environ), which also finds orphans.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h
RUN_VARIABLE = "TOPOFLIGHT_PROCESS_TREE"  # marks every process of one run, so that orphans are found at the end
PARENT_VARIABLE = "TOPOFLIGHT_PARENT"  # pid of the process that started the run
# For each Python process that we start, and its children: since 3.11, torch.py in the current folder is not imported.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
KILL_SECONDS = 5.0  # for the kernel to remove a killed process
POLL_SECONDS = 0.05


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent dies, and check that the parent has not died already.

    If the launcher of a rank died before this call, the rank now has another parent that is not part of the run.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    expected = os.getppid() if parent is None else parent
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected or (parent is None and not _of_the_run(expected)):
        os._exit(1)


def _of_the_run(parent: int) -> bool:
    """Return whether the parent has this run's marker, or is the process that started a run without a marker."""
    mark, starter = os.environ.get(RUN_VARIABLE), os.environ.get(PARENT_VARIABLE)
    if not mark:
        return starter in (None, str(parent))
    try:
        return f"{RUN_VARIABLE}={mark}".encode() in Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def tethered(argv: Sequence[str], parent: int | None = None) -> list[str]:
    """Return a command that runs `argv` and dies when the thread that starts it ends.

    `parent` is the pid of that process, by default this one; 0 for a command that another process will start.
    """
    pid = os.getpid() if parent is None else parent
    return [sys.executable, "-P", __file__, str(pid), *argv]  # by path, because the child may not find the package


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Find every process whose environment holds variable=value."""
    import psutil

    wanted = f"{variable}={value}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:  # it has ended, or belongs to another user
            continue
        if process.pid != os.getpid() and wanted in environment.split(b"\0"):
            found.append(process)
    return found


def end_all(processes: Iterable[psutil.Process], grace_seconds: float) -> list[int]:
    """End processes with SIGTERM, then SIGKILL after the grace period; return the pids that needed SIGKILL.

    A stopped process reacts only to SIGKILL.
    """
    listed = list(processes)
    for process in listed:
        _signal(process, signal.SIGTERM)
    left = _wait_gone(listed, grace_seconds)
    for process in left:
        _signal(process, signal.SIGKILL)
    _wait_gone(left, KILL_SECONDS)
    return [process.pid for process in left]


def _wait_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until all have ended (zombies count as ended); return those that have not."""
    deadline = time.monotonic() + seconds
    left = [process for process in processes if _lives(process)]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = [process for process in left if _lives(process)]
    return left


def _lives(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process.send_signal(number)


class Tree:
    """A command and all its descendants, which end with the command, with this process, or by `end`."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> None:
        """Start it with SAFE_PATH in its own session; its output is written to `output`."""
        self._mark = os.urandom(16).hex()
        self.process = subprocess.Popen(
            tethered(argv),
            env={**environment, **SAFE_PATH, RUN_VARIABLE: self._mark, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def members(self) -> list[psutil.Process]:
        """Return the living members, including orphans."""
        return marked(RUN_VARIABLE, self._mark)

    def wait(self, until: float, stop: threading.Event) -> Literal["", "stopped", "late"]:
        """Wait for the command's end, `stop`, or the time `until` (monotonic clock); return which of them happened."""
        while self.process.poll() is None:
            if stop.wait(POLL_SECONDS):
                return "stopped"
            if time.monotonic() > until:
                return "late"
        return ""

    def terminate(self) -> None:
        """Send SIGTERM to the command's children, or without children to the command.

        A command with children gets no signal: torchrun would kill its ranks 30 s later, even while they are saving
        (torch 2.13 torch/distributed/elastic/multiprocessing/api.py, close).
        """
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            command = psutil.Process(self.process.pid)
            for target in command.children() or [command]:
                _signal(target, signal.SIGTERM)

    def ask(self, grace_seconds: float) -> bool:
        """Terminate it and wait; return whether it ended."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_seconds)
        return self.process.poll() is not None

    def end(self, grace_seconds: float) -> list[int]:
        """End the whole tree like `end_all`, and reap the command; return the pids that needed SIGKILL."""
        killed: list[int] = []
        for _ in range(3):  # the command may start a process while they are listed
            if not (left := self.members()):
                break
            killed += end_all(left, grace_seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the kernel
            self.process.wait(KILL_SECONDS)
        return killed


def main(arguments: Sequence[str]) -> None:
    """Run the command, tied to the life of the parent whose pid is the first argument; 0 is any parent."""
    die_with_parent(int(arguments[0]) or None)
    os.execvp(arguments[1], list(arguments[1:]))  # noqa: S606 - no shell on purpose


# The host's lock, so that one benchmark runs at a time.

LOCK_NAME = "topoflight-bench.lock"


class BusyError(RuntimeError):
    """The host is in use by another benchmark, or by other processes on its GPUs."""


def default_lock_path() -> Path:
    """Return the path of the lock: in /run/lock, which every user may write on Debian, else in the temporary folder."""
    run_lock = Path("/run/lock")
    return (run_lock if os.access(run_lock, os.W_OK) else Path(tempfile.gettempdir())) / LOCK_NAME


@contextlib.contextmanager
def lock_host(path: Path | None = None) -> Iterator[None]:
    """Hold the host's benchmark lock, or raise BusyError that names the holder."""
    place = path or default_lock_path()
    descriptor = _open(place)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            raise BusyError(
                f"another benchmark runs on {socket.gethostname()} ({holder} holds {place}): wait for it to end"
            ) from None
        _sign(descriptor)
        yield
    finally:
        os.close(descriptor)


def refuse_busy_gpus(gpu_pids: Sequence[int], force: bool) -> None:
    """Raise BusyError if other processes use the GPUs, because they and a benchmark would disturb each other."""
    if gpu_pids and not force:
        raise BusyError(
            f"GPUs of {socket.gethostname()} are in use by {', '.join(f'pid {pid}' for pid in sorted(gpu_pids)[:8])}: "
            "a benchmark now would disturb that work and measure it; --force runs it anyway"
        )


def _open(path: Path) -> int:
    """Open the file without following a link that another user may have created in a shared folder."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        # Every user of the host must be able to lock it.
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o666)
        return descriptor
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def _sign(descriptor: int) -> None:
    """Write the pid of the holder into the lock file, if it is writable."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}".encode(), 0)
    except OSError:
        return


# A temporary folder for one run. The next run removes the folder of a run that was killed.

FOLDER_PREFIX = "topoflight-bench-"
NEW_FOLDER_PREFIX = "topoflight-new-"


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Create a temporary folder, locked with flock(2), which is removed at the end, or when the next run starts."""
    place = Path(tempfile.gettempdir())
    remove_stale_folders(place)
    made = Path(tempfile.mkdtemp(prefix=NEW_FOLDER_PREFIX, dir=place))
    descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Other runs look for this name, so the folder gets it once it is locked.
        made = made.rename(place / made.name.replace(NEW_FOLDER_PREFIX, FOLDER_PREFIX))
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(descriptor)


def remove_stale_folders(place: Path) -> None:
    """Remove the folders of this user that are not locked."""
    for path in place.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is locked, a link, of another user, or already removed
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])

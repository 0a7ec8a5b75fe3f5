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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h
RUN_VARIABLE = "TOPOFLIGHT_PROCESS_TREE"  # marks every process of one run, so that orphans are found at the end
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
    mark = os.environ.get(RUN_VARIABLE)  # a run of another launcher has none
    is_of_the_run = parent is not None or not mark or _has(expected, RUN_VARIABLE, mark)
    if os.getppid() != expected or not is_of_the_run:
        os._exit(1)


def _has(pid: int, variable: str, value: str) -> bool:
    """Return whether a process was started with variable=value; False if it has ended or is of another user."""
    try:
        return f"{variable}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def tie_to_parent(argv: Sequence[str], parent: int | None = None) -> list[str]:
    """Return a command that runs `argv` and dies when the thread that starts it ends.

    `parent` is the pid of that process, by default this one; 0 for a command that another process will start.
    """
    pid = os.getpid() if parent is None else parent
    return [sys.executable, "-P", __file__, str(pid), *argv]  # by path, because the child may not find the package


def find_marked(variable: str, value: str) -> list[psutil.Process]:
    """Find every living process whose environment holds variable=value; that of a zombie is empty."""
    import psutil

    return [one for one in psutil.process_iter() if one.pid != os.getpid() and _has(one.pid, variable, value)]


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
            tie_to_parent(argv),
            env={**environment, **SAFE_PATH, RUN_VARIABLE: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def members(self) -> list[psutil.Process]:
        """Return the living members, including orphans."""
        return find_marked(RUN_VARIABLE, self._mark)

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

    def end(self, grace_seconds: float = 3.0) -> None:
        """End the whole tree with SIGTERM, and after the grace period with SIGKILL, and reap the command.

        A stopped process reacts only to SIGKILL. A process may start another one while the tree is listed.
        """
        for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, KILL_SECONDS)):
            until, signalled = time.monotonic() + seconds, set[int]()
            while (left := self.members()) and time.monotonic() < until:
                for process in left:
                    if process.pid not in signalled:
                        _signal(process, number)
                signalled.update(process.pid for process in left)
                time.sleep(POLL_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the kernel
            self.process.wait(KILL_SECONDS)


def main(arguments: Sequence[str]) -> None:
    """Run the command, tied to the life of the parent whose pid is the first argument; 0 is any parent."""
    die_with_parent(int(arguments[0]) or None)
    os.execvp(arguments[1], list(arguments[1:]))  # noqa: S606 - no shell on purpose


# The host's lock, so that one benchmark runs at a time.

LOCK_NAME = "topoflight-bench.lock"


class BusyError(RuntimeError):
    """The host is in use by another benchmark, or by other processes on its GPUs."""


@contextlib.contextmanager
def lock_host(path: Path | None = None) -> Iterator[None]:
    """Hold the host's benchmark lock, or raise BusyError that names the holder."""
    run_lock = Path("/run/lock")  # on Debian every user may write in it
    place = path or (run_lock if os.access(run_lock, os.W_OK) else Path(tempfile.gettempdir())) / LOCK_NAME
    descriptor = _open(place)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            raise BusyError(
                f"another benchmark runs on {socket.gethostname()} ({holder} holds {place}): wait for it to end"
            ) from None
        with contextlib.suppress(OSError):  # the file may be of another user, and not writable
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()}".encode(), 0)
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


# A temporary folder for one run. The next run removes the folder of a run that was killed.

FOLDER_PREFIX = "topoflight-bench-"
NEW_FOLDER_PREFIX = "topoflight-new-"


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Create a temporary folder, locked with flock(2), which is removed at the end, or when the next run starts."""
    place = Path(tempfile.gettempdir())
    remove_stale_folders(place)
    folder = Path(tempfile.mkdtemp(prefix=NEW_FOLDER_PREFIX, dir=place))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Other runs look for this name, so the folder gets it once it is locked.
        folder = folder.rename(place / folder.name.replace(NEW_FOLDER_PREFIX, FOLDER_PREFIX))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
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

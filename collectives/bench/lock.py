"""What a run holds while it lives, by flock(2), which the kernel lets go when its holder dies: the host, so that one
benchmark runs at a time, and a folder of its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FILE_NAME = "topoflight-bench.lock"


class BusyError(RuntimeError):
    """The host is in use: by another benchmark, or by others' work on its GPUs."""


def default_path() -> Path:
    """Give the lock's place: /run/lock, which every user may write on Debian and its kin, else the temporary folder."""
    run_lock = Path("/run/lock")
    return (run_lock if os.access(run_lock, os.W_OK) else Path(tempfile.gettempdir())) / FILE_NAME


@contextmanager
def hold(path: Path | None = None) -> Iterator[None]:
    """Hold the host's benchmark lock, or raise BusyError that says who has it."""
    place = path or default_path()
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
    """Refuse to measure beside other work: it would spoil both."""
    if gpu_pids and not force:
        raise BusyError(
            f"GPUs of {socket.gethostname()} are in use by {', '.join(f'pid {pid}' for pid in sorted(gpu_pids)[:8])}: "
            "a benchmark now would disturb that work and measure it; force it to go on"
        )


def _open(path: Path) -> int:
    """Open the file, without following a link that another user may have left in a shared folder."""
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
    """Say who holds the lock, where the file lets us."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}".encode(), 0)
    except OSError:
        return


# A folder for one run; what a killed run left behind is removed by the next one.

FOLDER_PREFIX = "topoflight-bench-"
FOLDER_OWNER = "owner.lock"  # held with flock(2) by the living owner


@contextmanager
def run_folder() -> Iterator[Path]:
    """Make a folder that is gone at the end, at the latest when the next run starts."""
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name:
        descriptor = os.open(Path(name) / FOLDER_OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def sweep(place: Path) -> None:
    """Remove the folders of this user that are not locked."""
    for path in place.glob(f"{FOLDER_PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(path / FOLDER_OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # made a moment ago, or gone
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)

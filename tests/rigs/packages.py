"""What tests need from Debian and npm. Several test processes run at once: one installs, the others wait for it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CACHE = Path(__file__).parent.parent.parent / ".cache"
TRIES = 3  # of what fetches: a mirror that resets a connection is no fault of ours
PAUSE_SECONDS = 5.0
LOCK_SECONDS = 600.0  # for another apt-get of this machine, as its daily run
COMMAND_SECONDS = 900.0  # a few hundred MB over a slow line onto a slow disk


@contextmanager
def one_installs(what: str) -> Iterator[None]:
    """Only one process at a time is in here for `what`; the next one finds what the first has installed."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{what}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def apt_installed(program: str, *packages: str) -> str:
    """The path of `program`, from Debian's `packages` where it is missing and this is root; else skips the test."""
    told = "needs root and apt"
    with one_installs("apt"):
        if shutil.which(program) is None and os.geteuid() == 0 and shutil.which("apt-get"):
            for _ in _tries(lambda: shutil.which(program)):
                _apt("update")
                told = _apt("install", "-y", "--no-install-recommends", *packages).stderr.strip()[-300:]
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"no {program}, and it could not be installed ({told}): apt-get install {packages[0]}")
    return found


def apt_unpacked(program: str, package: str) -> Path:
    """The root folder of Debian's `package`, unpacked into .cache, where no service of it starts; else skips."""
    folder, fresh, told = CACHE / package, CACHE / f"{package}.new", ""
    with one_installs("apt"):  # of all packages: apt-get itself refuses to run twice at once
        if (folder / "usr" / "bin" / program).exists():
            return folder
        if not shutil.which("apt-get"):
            pytest.skip(f"no {program} on the PATH, and no apt-get to take Debian's {package} from")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        for _ in _tries(lambda: list(fresh.glob(f"{package}_*.deb"))):
            if _apt("download", package, cwd=fresh).returncode:
                _apt("update")
                told = _apt("download", package, cwd=fresh).stderr.strip()[-300:]
        if archives := sorted(fresh.glob(f"{package}_*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(archives[-1]), str(fresh)], check=True, timeout=COMMAND_SECONDS)
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)  # whole, or not there
            return folder
    pytest.skip(f"Debian's {package} cannot be had: {told}")


def npm_installed(source: Path, cache: str) -> Path:
    """The `node_modules` that the package-lock.json in `source` asks for; nothing of them is run to install them."""
    folder = CACHE / cache
    lock = (source / "package-lock.json").read_bytes()
    stamp = folder / "installed"  # npm makes the folder long before it is full
    apt_installed("npm", "npm")
    with one_installs("npm"):  # of all folders: they share npm's own cache
        if not stamp.exists() or stamp.read_bytes() != lock:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("package.json", "package-lock.json"):
                shutil.copy(source / name, folder / name)
            told = ""
            for _ in _tries(lambda: stamp.exists() and stamp.read_bytes() == lock):
                command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
                done = subprocess.run(command, cwd=folder, timeout=COMMAND_SECONDS, capture_output=True, text=True)
                told = done.stderr
                if done.returncode == 0:
                    stamp.write_bytes(lock)
            assert stamp.exists() and stamp.read_bytes() == lock, f"npm ci in {folder}: {told[-2000:]}"
    return folder / "node_modules"


def _tries(done: Callable[[], object]) -> Iterator[int]:
    """Number the tries, until one has done it."""
    for number in range(TRIES):
        if number:
            time.sleep(PAUSE_SECONDS)
        yield number
        if done():
            return


def _apt(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """apt-get, once no other one runs: the option waits for dpkg's lock, `update` and `download` know no such thing."""
    command = ["apt-get", "-q", "-o", f"DPkg::Lock::Timeout={LOCK_SECONDS:.0f}", *words]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    end = time.monotonic() + LOCK_SECONDS
    while True:
        done = subprocess.run(
            command, cwd=cwd, env=environment, timeout=COMMAND_SECONDS, check=False, capture_output=True, text=True
        )
        if done.returncode == 0 or "Could not get lock" not in done.stderr or time.monotonic() > end:
            return done
        time.sleep(PAUSE_SECONDS)

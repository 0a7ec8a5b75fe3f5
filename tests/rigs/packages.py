"""What tests need from Debian and npm. Several test processes run at once: one installs, the others wait for it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CACHE = Path(__file__).parent.parent.parent / ".cache"


@contextmanager
def one_installs(what: str) -> Iterator[None]:
    """Only one process at a time is in here for `what`; the next one finds what the first has installed."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{what}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def apt_installed(program: str, *packages: str) -> str:
    """The path of `program`, from Debian's `packages` where it is missing and this is root; else skips the test."""
    with one_installs("apt"):
        if shutil.which(program) is None and os.geteuid() == 0 and shutil.which("apt-get"):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
                subprocess.run(
                    ["apt-get", "-q", *command], env=environment, timeout=600, check=False, capture_output=True
                )
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"no {program}, and it could not be installed (needs root and apt): apt-get install {packages[0]}")
    return found


def apt_unpacked(program: str, package: str) -> Path:
    """The root folder of Debian's `package`, unpacked into .cache, where no service of it starts; else skips."""
    folder = CACHE / package
    with one_installs(package):
        if (folder / "usr" / "bin" / program).exists():
            return folder
        if not shutil.which("apt-get"):
            pytest.skip(f"no {program} on the PATH, and no apt-get to take Debian's {package} from")
        folder.mkdir(parents=True, exist_ok=True)
        for command in (["download", package], ["update"], ["download", package]):
            done = subprocess.run(
                ["apt-get", "-q", *command], cwd=folder, capture_output=True, text=True, timeout=240, check=False
            )
            if archives := sorted(folder.glob(f"{package}_*.deb")):
                subprocess.run(["dpkg-deb", "-x", str(archives[-1]), str(folder)], check=True, timeout=120)
                return folder
    pytest.skip(f"Debian's {package} cannot be had: {done.stderr.strip()[-300:]}")


def npm_installed(source: Path, cache: str) -> Path:
    """The `node_modules` that the package-lock.json in `source` asks for; nothing of them is run to install them."""
    folder = CACHE / cache
    lock = (source / "package-lock.json").read_bytes()
    stamp = folder / "installed"  # npm makes the folder long before it is full
    apt_installed("npm", "npm")
    with one_installs(cache):
        if not stamp.exists() or stamp.read_bytes() != lock:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("package.json", "package-lock.json"):
                shutil.copy(source / name, folder / name)
            command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            subprocess.run(command, cwd=folder, check=True, timeout=300, capture_output=True)
            stamp.write_bytes(lock)
    return folder / "node_modules"

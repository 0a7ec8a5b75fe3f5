"""What tests need from Debian and npm. Several test processes run at once: one installs, the others wait for it."""

import fcntl
import os
import re
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
ROOT_PACKAGES = (
    "python3", "python3-venv", "ca-certificates", "python3-pyverbs", "rdma-core", "ibverbs-utils", "ibverbs-providers",
    "perftest", "iproute2", "iputils-ping", "kmod", "busybox-static", "procps", "util-linux",
)  # fmt: skip


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
            for _ in tries(lambda: shutil.which(program)):
                _apt("update")
                told = _apt("install", "-y", "--no-install-recommends", *packages).stderr.strip()[-300:]
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"no {program}, and it could not be installed ({told}): apt-get install {packages[0]}")
    return found


def apt_unpacked(file: str, package: str) -> Path:
    """The root folder of Debian's `package`, unpacked into .cache, where no service of it starts; else skips.

    `file` is one of its files, or a pattern for it, by which an unpacked package is known.
    """
    folder, fresh, told = CACHE / package, CACHE / f"{package}.new", ""
    with one_installs("apt"):  # of all packages: apt-get itself refuses to run twice at once
        if list(folder.glob(file)):
            return folder
        if not shutil.which("apt-get"):
            pytest.skip(f"no apt-get to take Debian's {package} from")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        for _ in tries(lambda: list(fresh.glob(f"{package}_*.deb"))):
            if _apt("download", package, cwd=fresh).returncode:
                _apt("update")
                told = _apt("download", package, cwd=fresh).stderr.strip()[-300:]
        if archives := sorted(fresh.glob(f"{package}_*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(archives[-1]), str(fresh)], check=True, timeout=COMMAND_SECONDS)
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)  # whole, or not there
            return folder
    pytest.skip(f"Debian's {package} cannot be had: {told}")


def debian_root() -> Path:
    """The root file system of this machine's Debian with `ROOT_PACKAGES`, as a folder that users copy; else skips.

    One for the guests of tests/rigs/softroce and for the base of the images: making it takes 25 s of CPU time.
    """
    apt_installed("mmdebstrap", "mmdebstrap")
    found = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)
    folder, stamp = CACHE / "debian", CACHE / "debian.stamp"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", f"--include={','.join(ROOT_PACKAGES)}",
               *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")),
               found[1] if found else "stable", str(folder)]  # fmt: skip
    with one_installs("debian"):
        if stamp.exists() and stamp.read_text() == " ".join(command):
            return folder
        errors = ["not tried"]  # of each try; the last one is empty where it was made
        for _ in tries(lambda: not errors[-1]):
            shutil.rmtree(folder, ignore_errors=True)  # what a broken line has left
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
            errors.append(done.stderr[-2000:] or "failed" if done.returncode else "")
        assert not errors[-1], errors[-1]
        stamp.write_text(" ".join(command))
    return folder


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
            for _ in tries(lambda: stamp.exists() and stamp.read_bytes() == lock):
                command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
                done = subprocess.run(command, cwd=folder, timeout=COMMAND_SECONDS, capture_output=True, text=True)
                told = done.stderr
                if done.returncode == 0:
                    stamp.write_bytes(lock)
            assert stamp.exists() and stamp.read_bytes() == lock, f"npm ci in {folder}: {told[-2000:]}"
    return folder / "node_modules"


def apt_dependency(package: str) -> str:
    """The first package that Debian's `package`, which is empty itself, depends on; else skips."""
    words: list[str] = []
    with one_installs("apt"):
        for _ in tries(lambda: words):
            done = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True, timeout=60)
            words.extend(re.findall(r"Depends: (\S+)", done.stdout))
            if not words:
                _apt("update")
    if not words:
        pytest.skip(f"Debian's {package} is not known here")
    return words[0]


def tries(done: Callable[[], object]) -> Iterator[int]:
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

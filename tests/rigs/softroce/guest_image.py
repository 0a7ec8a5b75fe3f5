"""Builds the guest from Debian packages: QEMU and a kernel unpacked, a root file system, an initramfs.

Nothing is installed on the machine: packages are downloaded with apt and unpacked below the cache folder. The root
file system is made by mmdebstrap, which changes root for that, so building needs root; running does not.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CACHE = Path(os.environ.get("TOPOFLIGHT_SOFTROCE_CACHE", ROOT / ".cache" / "softroce"))

TOOLS = ("qemu-system-x86", "mmdebstrap")
GUEST = (
    "python3",
    "python3-pyverbs",
    "rdma-core",
    "ibverbs-utils",
    "ibverbs-providers",
    "perftest",
    "iproute2",
    "iputils-ping",
    "kmod",
    "busybox-static",
    "procps",
    "util-linux",
)
# The disk's modules go into the initramfs, the others onto the disk; each brings its dependencies along.
DISK_MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "crc32c_generic", "ext4")
GUEST_MODULES = (
    *DISK_MODULES,
    "virtio_net",
    "virtio_rng",
    "crc32_generic",
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
    "macvlan",
    "bonding",
    "dummy",
    "sch_tbf",
)
UNWANTED = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
IMAGE_MIB = 700
TRIES, PAUSE_SECONDS = 4, 10.0


class CannotBuildError(Exception):
    """Why this machine cannot build the rig."""


def obstacle() -> str | None:
    """Why the rig cannot be had here; None where it is built, or can be."""
    if is_built():
        return None
    if platform.machine() != "x86_64":
        return f"the rig's guests are x86_64, this machine is {platform.machine()}"
    if os.getuid() != 0:
        return "building the Soft-RoCE guests needs root (mmdebstrap changes root)"
    missing = [tool for tool in ("apt-get", "dpkg-deb", "mke2fs") if shutil.which(tool) is None]
    if missing or not Path("/etc/debian_version").exists() or _codename() is None:
        return f"building the Soft-RoCE guests needs a Debian with {', '.join(missing) or 'a release name'}"
    return None


def is_built() -> bool:
    """Whether the cache holds guests built from the present recipe."""
    stamp = CACHE / "stamp"
    return stamp.exists() and stamp.read_text() == _recipe()


def build() -> Path:
    """Make the guests if they are not there; one builder at a time."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / "lock"):
        if not is_built():
            if reason := obstacle():
                raise CannotBuildError(reason)
            _unpack_tools()
            version = _unpack_kernel()
            _make_root()
            modules = _copy_modules(version)
            _make_initramfs(modules, version)
            _make_image()
            (CACHE / "stamp").write_text(_recipe())
    return CACHE


def _recipe() -> str:
    files = ("guest_image.py", "guest-init", "initramfs-init")
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in files)).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run(*command: str | Path, cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """Run a command; its words are in the error where it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=None if environment is None else {**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2700,
    )
    if done.returncode:
        raise CannotBuildError(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _fetch(*command: str | Path, makes: Path | None = None, **more: Any) -> str:
    """Run what asks a mirror, again where that fails: lines break, and apt-get ends where another holds its lock."""
    for number in range(TRIES):
        if makes:
            shutil.rmtree(makes, ignore_errors=True)  # the folder, or what is left of it
        try:
            return _run(*command, **more)
        except CannotBuildError:
            if number == TRIES - 1:
                raise
            time.sleep(PAUSE_SECONDS)
    raise AssertionError


def _codename() -> str | None:
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            return value.strip('"')
    return None


def _fresh(name: str) -> Path:
    folder = CACHE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _download(packages: list[str]) -> list[Path]:
    folder = _fresh("downloads")
    _fetch("apt-get", "-q", "download", *packages, cwd=folder)
    return sorted(folder.glob("*.deb"))


def _unpack(archives: list[Path], folder: Path) -> None:
    """All of them in one folder, which is whole or not there."""
    new = _fresh(f"{folder.name}.new")
    for archive in archives:
        _run("dpkg-deb", "-x", archive, new)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def _unpack_tools() -> None:
    """QEMU and mmdebstrap with what they depend on that is not installed here."""
    tools = CACHE / "tools"
    if (tools / "usr/bin/qemu-system-x86_64").exists() and (tools / "usr/bin/mmdebstrap").exists():
        return
    _fetch("apt-get", "-q", "update")
    plan = _run("apt-get", "install", "-s", "--no-install-recommends", *TOOLS)
    wanted = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    _unpack(_download(wanted) if wanted else [], tools)
    for program in ("qemu-system-x86_64", "mmdebstrap", "mmtarfilter"):
        installed = shutil.which(program)
        if not (tools / "usr/bin" / program).exists() and installed:
            (tools / "usr/bin").mkdir(parents=True, exist_ok=True)
            (tools / "usr/bin" / program).symlink_to(installed)


def _unpack_kernel() -> str:
    """The newest generic kernel: the cloud flavour has no rdma_rxe."""
    kernel = CACHE / "kernel"
    if not list(kernel.glob("boot/vmlinuz-*")):
        depends = _run("apt-cache", "depends", "linux-image-amd64")
        package = next(word for word in depends.split() if word.startswith("linux-image-") and word[12:13].isdigit())
        _unpack(_download([package]), kernel)
    image = sorted(kernel.glob("boot/vmlinuz-*"))[-1]
    return image.name.removeprefix("vmlinuz-")


def _make_root() -> None:
    codename = _codename() or ""
    recipe = " ".join((codename, *GUEST, *UNWANTED))
    stamp = CACHE / "root-stamp"
    if stamp.exists() and stamp.read_text() == recipe:
        return
    stamp.unlink(missing_ok=True)
    sources = [
        path
        for path in (
            Path("/etc/apt/sources.list"),
            *sorted(Path("/etc/apt/sources.list.d").glob("*.list")),
            *sorted(Path("/etc/apt/sources.list.d").glob("*.sources")),
        )
        if path.exists() and codename in path.read_text(errors="replace")
    ]
    command = (
        CACHE / "tools/usr/bin/mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        '--aptopt=Apt::Install-Recommends "false"',
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in UNWANTED),
        f"--include={','.join(GUEST)}",
        codename,
        CACHE / "root",
        *sources,
    )
    path = f"{CACHE}/tools/usr/bin:{os.environ['PATH']}"
    _fetch(*command, makes=CACHE / "root", environment={"PATH": path})
    stamp.write_text(recipe)


def _closure(version: str, wanted: tuple[str, ...]) -> list[str]:
    """Paths of the modules and all they depend on, in the order of loading."""
    depends: dict[str, tuple[str, list[str]]] = {}
    for line in (CACHE / f"kernel/lib/modules/{version}/modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        depends[Path(path).name.partition(".")[0].replace("-", "_")] = (path, rest.split())
    order: list[str] = []
    for name in wanted:
        if name in depends:  # a module built into the kernel is not listed
            path, needs = depends[name]
            order += [module for module in (*reversed(needs), path) if module not in order]
    return order


def _copy_modules(version: str) -> list[str]:
    source, folder = CACHE / f"kernel/lib/modules/{version}", CACHE / f"root/lib/modules/{version}"
    if not (source / "modules.dep").exists():
        _run("depmod", "-b", CACHE / "kernel", version) if shutil.which("depmod") else _depmod_in_guest(version)
    folder.mkdir(parents=True, exist_ok=True)
    for module in _closure(version, GUEST_MODULES):
        (folder / module).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / module, folder / module)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copy(source / name, folder / name)
    _run("chroot", CACHE / "root", "depmod", version)
    return _closure(version, DISK_MODULES)


def _depmod_in_guest(version: str) -> None:
    """The package leaves modules.dep to its installation script: make it with the guest's own kmod."""
    source, folder = CACHE / f"kernel/lib/modules/{version}", CACHE / f"root/lib/modules/{version}"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    _run("chroot", CACHE / "root", "depmod", version)
    shutil.copy(folder / "modules.dep", source / "modules.dep")
    shutil.rmtree(folder)


def _make_initramfs(modules: list[str], version: str) -> None:
    entries: list[tuple[str, int, bytes, tuple[int, int]]] = [
        (folder, 0o40755, b"", (0, 0)) for folder in ("bin", "modules", "dev", "proc", "sys", "newroot")
    ]
    entries.append(("dev/console", 0o20600, b"", (5, 1)))
    entries.append(("bin/busybox", 0o100755, (CACHE / "root/bin/busybox").read_bytes(), (0, 0)))
    entries.append(("init", 0o100755, (HERE / "initramfs-init").read_bytes(), (0, 0)))
    names = [Path(module).name for module in modules]
    for module, name in zip(modules, names, strict=True):
        content = (CACHE / f"kernel/lib/modules/{version}" / module).read_bytes()
        entries.append((f"modules/{name}", 0o100644, content, (0, 0)))
    entries.append(("modules/order", 0o100644, "".join(f"{name}\n" for name in names).encode(), (0, 0)))
    (CACHE / "initramfs").write_bytes(b"".join(_cpio(i, *entry) for i, entry in enumerate((*entries, _TRAILER))))
    shutil.copy(CACHE / f"kernel/boot/vmlinuz-{version}", CACHE / "vmlinuz")


_TRAILER: tuple[str, int, bytes, tuple[int, int]] = ("TRAILER!!!", 0, b"", (0, 0))


def _cpio(inode: int, name: str, mode: int, content: bytes, device: tuple[int, int]) -> bytes:
    """One entry in the "newc" format (Linux Documentation/driver-api/early-userspace/buffer-format.rst)."""
    path = name.encode() + b"\0"
    numbers = (inode + 1, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % number for number in numbers) + path
    return head + b"\0" * (-len(head) % 4) + content + b"\0" * (-len(content) % 4)


def _make_image() -> None:
    root = CACHE / "root"
    shutil.copy(HERE / "guest-init", root / "sbin/guest-init")
    (root / "sbin/guest-init").chmod(0o755)
    if "tester:" not in (root / "etc/passwd").read_text():
        _run("chroot", root, "useradd", "--uid", "1000", "--create-home", "tester")
    image = CACHE / "root.ext4.new"
    image.unlink(missing_ok=True)
    with image.open("wb") as handle:
        handle.truncate(IMAGE_MIB << 20)
    _run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", root, image)
    image.rename(CACHE / "root.ext4")


if __name__ == "__main__":
    print(build())

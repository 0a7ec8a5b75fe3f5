"""Builds the guest from Debian packages: a kernel that is unpacked, a root file system, an initramfs.

QEMU and mmdebstrap are installed where they are missing. mmdebstrap changes root, so building needs root; running does
not.
"""

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from rigs.packages import CACHE as OF_ALL, apt_dependency, apt_installed, apt_unpacked, debian_root, one_installs

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CACHE = Path(os.environ.get("TOPOFLIGHT_SOFTROCE_CACHE", OF_ALL / "softroce"))

# The disk's modules go into the initramfs, the others onto the disk; each brings its dependencies along.
DISK_MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "crc32c_generic", "ext4")
GUEST_MODULES = (
    *DISK_MODULES, "virtio_net", "virtio_rng", "crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm", "macvlan",
    "bonding", "dummy", "sch_tbf",
)  # fmt: skip
IMAGE_MIB = 700


def build() -> Path:
    """Make the guests if the cache holds none of the present recipe; one builder at a time. Skips where it cannot."""
    apt_installed("qemu-system-x86_64", "qemu-system-x86")
    CACHE.mkdir(parents=True, exist_ok=True)
    with one_installs("softroce"):
        stamp, recipe = CACHE / "stamp", _recipe()
        if not stamp.exists() or stamp.read_text() != recipe:
            if platform.machine() != "x86_64" or os.geteuid() != 0:
                pytest.skip("building the Soft-RoCE guests needs root (mmdebstrap changes root) on x86_64")
            apt_installed("depmod", "kmod")
            apt_installed("mke2fs", "e2fsprogs")
            kernel = apt_unpacked("boot/vmlinuz-*", apt_dependency("linux-image-amd64"))
            version = sorted(kernel.glob("boot/vmlinuz-*"))[-1].name.removeprefix("vmlinuz-")
            shutil.rmtree(CACHE / "root", ignore_errors=True)
            _run("cp", "-a", "--one-file-system", debian_root(), CACHE / "root")
            _make_initramfs(kernel, version, _copy_modules(kernel, version))
            _make_image()
            stamp.write_text(recipe)
    return CACHE


def _recipe() -> str:
    files = ("guest_image.py", "guest-init", "initramfs-init")
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in files)).hexdigest()


def _run(*command: str | Path) -> None:
    """Run a command; its words are in the error where it fails."""
    done = subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2700)
    assert done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stderr[-2000:]}"


def _closure(modules: Path, wanted: tuple[str, ...]) -> list[str]:
    """Paths of the modules and all they depend on, in the order of loading."""
    depends: dict[str, tuple[str, list[str]]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        depends[Path(path).name.partition(".")[0].replace("-", "_")] = (path, rest.split())
    order: list[str] = []
    for name in wanted:
        if name in depends:  # a module built into the kernel is not listed
            path, needs = depends[name]
            order += [module for module in (*reversed(needs), path) if module not in order]
    return order


def _copy_modules(kernel: Path, version: str) -> list[Path]:
    """Put the guest's modules onto its disk. Returns those that the initramfs loads, in the order of loading."""
    source, folder = (place / f"lib/modules/{version}" for place in (kernel, CACHE / "root"))
    _run("depmod", "-b", kernel, version)
    for module in _closure(source, GUEST_MODULES):
        (folder / module).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / module, folder / module)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copy(source / name, folder / name)
    _run("chroot", CACHE / "root", "depmod", version)
    return [source / module for module in _closure(source, DISK_MODULES)]


def _make_initramfs(kernel: Path, version: str, modules: list[Path]) -> None:
    entries: list[tuple[str, int, bytes, tuple[int, int]]] = [
        (folder, 0o40755, b"", (0, 0)) for folder in ("bin", "modules", "dev", "proc", "sys", "newroot")
    ]
    entries.append(("dev/console", 0o20600, b"", (5, 1)))
    entries.append(("bin/busybox", 0o100755, (CACHE / "root/bin/busybox").read_bytes(), (0, 0)))
    entries.append(("init", 0o100755, (HERE / "initramfs-init").read_bytes(), (0, 0)))
    entries += [(f"modules/{module.name}", 0o100644, module.read_bytes(), (0, 0)) for module in modules]
    order = "".join(f"{module.name}\n" for module in modules)
    entries.append(("modules/order", 0o100644, order.encode(), (0, 0)))
    (CACHE / "initramfs").write_bytes(b"".join(_cpio(i, *entry) for i, entry in enumerate((*entries, _TRAILER))))
    shutil.copy(kernel / f"boot/vmlinuz-{version}", CACHE / "vmlinuz")


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

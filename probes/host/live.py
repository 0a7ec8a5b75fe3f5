"""The machine this process runs on, asked through files, NVML, netlink, verbs and getrlimit.

What is heavy to import is imported when asked for.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import socket
import time
from pathlib import Path

from probes.host import netlink, verbs
from probes.host.kernel_log import KernelLog
from probes.host.live_config import ConfigSpaces
from probes.host.live_paths import Paths
from probes.host.nvml import Nvml, Slot
from probes.host.protocol import GpuHandle, Json

TEXT_LIMIT_BYTES = 1 << 20  # /proc and /sys files are far smaller; a bigger one is not what a probe asks for
ENVIRONMENT = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|FI|OFI|UCX|NVIDIA)_"
    r"|(CUDA_VISIBLE_DEVICES|TOPOFLIGHT_NETWORK_STATUS|TOPOFLIGHT_ROLE|container)$"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW(OR)?D|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY", re.IGNORECASE)

# What the kernel stores when it finds a device, or the device cannot change. A third of all files that a scan reads.
_FIXED = re.compile(r"/sys/bus/pci/devices/[^/]+/(?:class|vendor|device|max_link_speed|max_link_width|sriov_totalvfs)")
_CONFIG = re.compile(r"/sys/bus/pci/devices/[^/]+/config")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_ATTRIBUTE_BYTES = 4096  # sysfs gives an attribute one page


class LiveHost:
    """This machine; every path is looked up below `root`, symbolic links included."""

    def __init__(self, root: str = "/") -> None:
        if not Path(root).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "the host's root is not a folder", root)
        self._paths = Paths(os.path.realpath(root).rstrip("/"))
        self._prefix = self._paths.prefix  # "" is this machine's own root
        self._texts: dict[str, str] | None = None  # of the scan under way, by path
        self._identities: dict[str, tuple[int, int]] = {}  # folder -> (device, inode), of the scan under way
        self._fixed: dict[str, tuple[tuple[int, int], str]] = {}  # path -> its folder's identity, text
        self._spaces = ConfigSpaces()
        self._nvml = Nvml()
        self._log = KernelLog()

    def begin_scan(self) -> None:
        """Look at everything again. Within one scan, what two probes ask is read once."""
        self._paths.forget()
        self._texts, self._identities = {}, {}

    # Files -----------------------------------------------------------------------------------------------------

    def _below_root(self, path: str) -> str:
        """Where the path lies on this machine."""
        if not self._prefix:
            return path
        folder, name = self._paths.place(path)
        found = f"{folder}/{name}"
        return f"{self._prefix}{self.resolve(path)}" if os.path.islink(found) else found  # noqa: PTH114

    def read_text(self, path: str) -> str:
        """Content of a small file."""
        if self._texts is None:
            return self._text(path)
        if path not in self._texts:
            self._texts[path] = self._fixed_text(path) if _FIXED.fullmatch(path) else self._text(path)
        return self._texts[path]

    def _text(self, path: str) -> str:
        return self.read_bytes(path, TEXT_LIMIT_BYTES).decode(errors="replace")

    def _fixed_text(self, path: str) -> str:
        """An attribute that a device keeps for life; another device in its slot has another folder."""
        identity = self._identity_of_folder(path)
        known, text = self._fixed.get(path, (None, ""))
        if known != identity:
            text = self._text(path)
            self._fixed[path] = identity, text
        return text

    def _identity_of_folder(self, path: str) -> tuple[int, int]:
        place, _ = self._paths.place(path)
        if place not in self._identities:
            found = os.stat(place)  # noqa: PTH116
            self._identities[place] = found.st_dev, found.st_ino
        return self._identities[place]

    def read_bytes(self, path: str, limit: int) -> bytes:
        """First `limit` bytes of a file; never waits for a device or a pipe."""
        descriptor = self._open(path)
        try:
            if self._texts is not None and _CONFIG.fullmatch(path):
                return self._spaces.read(path, self._identity_of_folder(path), descriptor)[:limit]
            chunks: list[bytes] = []
            while limit > 0 and (chunk := os.read(descriptor, min(limit, 1 << 16))):
                chunks.append(chunk)
                limit -= len(chunk)
                if len(chunk) < _ATTRIBUTE_BYTES and path.startswith("/sys/"):
                    break  # an attribute of sysfs comes whole in one read; /proc may come in pieces
            return b"".join(chunks)
        finally:
            os.close(descriptor)

    def _open(self, path: str) -> int:
        if not self._prefix:
            return os.open(path, _READ)
        folder, name = self._paths.place(path)
        try:
            return os.open(f"{folder}/{name}", _READ | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP:  # ELOOP: the last part is a link, to be followed inside the root
                raise
        return os.open(f"{self._prefix}{self.resolve(path)}", _READ)

    def list_dir(self, path: str) -> tuple[str, ...]:
        """Names in a folder, sorted."""
        return tuple(sorted(os.listdir(self._below_root(path))))  # noqa: PTH208 - names, no Path objects

    def exists(self, path: str) -> bool:
        """Whether the path exists, links followed."""
        try:
            return os.path.exists(self._below_root(path))  # noqa: PTH110 - a third of Path.exists' time
        except OSError:
            return False

    def resolve(self, path: str) -> str:
        """The path with every link followed, never leaving the root."""
        return self._paths.resolve(path)

    def usable(self, path: str) -> bool:
        """Whether this process may open the path for reading and writing."""
        return os.access(self._below_root(path), os.R_OK | os.W_OK)

    def statvfs(self, path: str) -> tuple[int, int]:
        """(size, available) of the filesystem in bytes."""
        answer = os.statvfs(self._below_root(path))
        return answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize

    # This process ----------------------------------------------------------------------------------------------

    def limit(self, name: str) -> tuple[int | None, int | None]:
        """(soft, hard) of RLIMIT_<NAME>; None is unlimited."""
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if number is None:
            raise OSError(errno.EINVAL, f"no such limit: RLIMIT_{name.upper()}")
        soft, hard = (None if v == resource.RLIM_INFINITY else v for v in resource.getrlimit(number))
        return soft, hard

    def environment(self) -> dict[str, str]:
        """What NCCL, gloo, libfabric and UCX read, where the networks' annotation lies; nothing that looks secret."""
        return {k: v for k, v in sorted(os.environ.items()) if ENVIRONMENT.match(k) and not SECRET.search(k)}

    def identity(self) -> dict[str, Json]:
        """Keys: hostname, pid, uid, kernel, architecture, time (Unix seconds), home."""
        return {
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "uid": os.getuid(),
            "kernel": platform.release(),
            "architecture": platform.machine(),
            "time": time.time(),
            "home": os.path.expanduser("~"),  # noqa: PTH111
        }

    def cpu(self) -> dict[str, Json]:
        """Keys: logical, physical, load_average (three floats), memory_bytes, memory_available_bytes."""
        import psutil

        memory = psutil.virtual_memory()
        return {
            "logical": psutil.cpu_count(),
            "physical": psutil.cpu_count(logical=False),
            "load_average": list(psutil.getloadavg()),
            "memory_bytes": memory.total,
            "memory_available_bytes": memory.available,
        }

    def kernel_log(self, word: str) -> tuple[str, ...]:
        """Lines of the kernel's log with the word; the log is the kernel's, whatever container asks."""
        return self._log.lines(word)

    # Drivers and the kernel's sockets --------------------------------------------------------------------------

    def give_driver_seconds(self, seconds: float | None) -> None:
        """How long NVML may be asked from now on; what is asked later is NOT_ASKED (see `probes.host.nvml`)."""
        self._nvml.give_seconds(seconds)

    def show_driver_questions(self, slot: Slot) -> None:
        """Where the question stands that NVML is asked (see `probes.host.nvml`)."""
        self._nvml.show_questions(slot)

    def leave_out_of_driver(self, questions: dict[str, str]) -> None:
        """Questions that NVML did not survive, and is not asked now (see `probes.host.nvml`)."""
        self._nvml.leave_out(questions)

    def nvml(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """Call one NVML function."""
        return self._nvml.call(symbol, *arguments)

    def netlink(self, what: str) -> tuple[dict[str, Json], ...]:
        """ "links", "addresses" or "routes" of this network namespace."""
        return netlink.ask_route(what)

    def port_link(self, netdev: str) -> dict[str, Json]:
        """Fastest mode and priority flow control of a network device."""
        return dict(netlink.ask_port(netdev))

    def rdma_netlink(self, what: str) -> tuple[dict[str, Json], ...]:
        """ "devices", "ports" or "system" through NETLINK_RDMA."""
        return netlink.ask_rdma(what)

    def verbs(self, what: str, *arguments: int | str) -> Json:
        """A question to libibverbs."""
        return verbs.ask(what, *arguments)

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
from probes.host.nvml import Nvml, Slot
from probes.host.protocol import GpuHandle, Json

LINKS_FOLLOWED = 40  # as the kernel's MAXSYMLINKS: path_resolution(7)
TEXT_LIMIT_BYTES = 1 << 20  # /proc and /sys files are far smaller; a bigger one is not what a probe asks for
ENVIRONMENT = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|FI|OFI|UCX|NVIDIA)_"
    r"|(CUDA_VISIBLE_DEVICES|TOPOFLIGHT_NETWORK_STATUS|TOPOFLIGHT_ROLE|container)$"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW(OR)?D|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY", re.IGNORECASE)

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_ATTRIBUTE_BYTES = 4096  # sysfs gives an attribute one page


class LiveHost:
    """This machine; every path is looked up below `root`, symbolic links included."""

    def __init__(self, root: str = "/") -> None:
        if not Path(root).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "the host's root is not a folder", root)
        self._prefix = os.path.realpath(root).rstrip("/")  # "" is this machine's own root
        self._texts: dict[str, str] | None = None  # of the scan under way, by path
        self._places: dict[str, str] | None = None  # where each path leads, of the scan under way
        self._nvml = Nvml()
        self._log = KernelLog()

    def begin_scan(self) -> None:
        """Look at everything again. Within one scan, what two probes ask is read once."""
        self._texts, self._places = {}, {}

    # Files -----------------------------------------------------------------------------------------------------

    def _below_root(self, path: str) -> str:
        """Where the path lies on this machine."""
        return f"{self._prefix}{self.resolve(path)}" if self._prefix else path

    def read_text(self, path: str) -> str:
        """Content of a small file."""
        if self._texts is None:
            return self._text(path)
        if path not in self._texts:
            self._texts[path] = self._text(path)
        return self._texts[path]

    def _text(self, path: str) -> str:
        return self.read_bytes(path, TEXT_LIMIT_BYTES).decode(errors="replace")

    def read_bytes(self, path: str, limit: int) -> bytes:
        """First `limit` bytes of a file; never waits for a device or a pipe."""
        descriptor = os.open(self._below_root(path), _READ)
        try:
            chunks: list[bytes] = []
            while limit > 0 and (chunk := os.read(descriptor, min(limit, 1 << 16))):
                chunks.append(chunk)
                limit -= len(chunk)
                if len(chunk) < _ATTRIBUTE_BYTES and path.startswith("/sys/"):
                    break  # an attribute of sysfs comes whole in one read; /proc may come in pieces
            return b"".join(chunks)
        finally:
            os.close(descriptor)

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
        """The path with every link followed, never leaving the root. Raises OSError where a part is missing."""
        if not self._prefix:
            return os.path.realpath(path, strict=True)
        return self._resolve(path, 0, {} if self._places is None else self._places) or "/"

    def _resolve(self, path: str, links: int, places: dict[str, str]) -> str:
        """`places` holds what is known; most paths of a scan lie below the same few hundred folders."""
        if path in places:
            return places[path]
        folder, _, name = path.rpartition("/")
        above = self._resolve(folder, links, places) if folder else ""
        if name in ("", "."):
            found = above
        elif name == "..":
            found = above.rpartition("/")[0]
        else:
            try:
                target = os.readlink(f"{self._prefix}{above}/{name}")  # noqa: PTH115 - the busiest place, no Path objects
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: there, and not a link
                    raise
                found = f"{above}/{name}"
            else:
                if links >= LINKS_FOLLOWED:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                found = self._resolve(target if target.startswith("/") else f"{above}/{target}", links + 1, places)
        places[path] = found
        return found

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

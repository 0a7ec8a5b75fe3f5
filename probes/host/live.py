"""The live host: reads files, NVML, netlink, libibverbs and getrlimit of the machine that runs this process.

Modules that are slow to import are imported on first use. Specification of the kernel log: syslog(2), klogctl(3).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from probes.api import read_host_name
from probes.host import netlink
from probes.host.nvml import Nvml
from probes.host.protocol import GpuHandle, Json

LINKS_FOLLOWED = 40  # MAXSYMLINKS of the kernel: path_resolution(7)
TEXT_LIMIT_BYTES = 1 << 20  # files in /proc and /sys are far smaller; a probe does not need a larger one
ENVIRONMENT = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|FI|OFI|UCX|NVIDIA)_"
    r"|(CUDA_VISIBLE_DEVICES|TOPOFLIGHT_NETWORK_STATUS|TOPOFLIGHT_ROLE|container)$"
    r"|(SLURM_(CONF|GPUS_ON_NODE|JOB_GPUS|JOB_ID|PROCID|SCRIPT_CONTEXT|STEP_GPUS)|SLURMD_NODENAME)$"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW(OR)?D|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY", re.IGNORECASE)

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_ATTRIBUTE_BYTES = 4096  # a sysfs attribute has at most one page


class LiveHost:
    """The live machine. Every path, and every symbolic link in it, is resolved below `root`."""

    def __init__(self, root: str = "/") -> None:
        self._prefix = os.path.realpath(root).rstrip("/")  # "" is the root of this machine
        self._texts: dict[str, str] = {}  # path -> content, for the current scan
        self._places: dict[str, str] = {}  # path -> resolved path, for the current scan
        self._nvml = Nvml()
        self._log: dict[str, deque[str]] = {}  # word -> kernel log lines, including lines since overwritten

    def begin_scan(self) -> None:
        """Clear the caches. Within one scan, each file is read only once, even if two probes need it."""
        self._texts, self._places = {}, {}

    # Files -----------------------------------------------------------------------------------------------------

    def _map_path(self, path: str) -> str:
        """Return the path on this machine, below the root."""
        return f"{self._prefix}{self.resolve(path)}" if self._prefix else path

    def read_text(self, path: str) -> str:
        """Return the content of a small file."""
        if path not in self._texts:
            self._texts[path] = self.read_bytes(path, TEXT_LIMIT_BYTES).decode(errors="replace")
        return self._texts[path]

    def read_bytes(self, path: str, limit: int) -> bytes:
        """Return the first `limit` bytes of a file; never blocks on a device or a pipe."""
        descriptor = os.open(self._map_path(path), _READ)
        try:
            chunks: list[bytes] = []
            while limit > 0 and (chunk := os.read(descriptor, min(limit, 1 << 16))):
                chunks.append(chunk)
                limit -= len(chunk)
                if len(chunk) < _ATTRIBUTE_BYTES and path.startswith("/sys/"):
                    break  # one read returns a whole sysfs attribute; /proc may need several
            return b"".join(chunks)
        finally:
            os.close(descriptor)

    def list_dir(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a folder."""
        return tuple(sorted(os.listdir(self._map_path(path))))  # noqa: PTH208 - names are needed, not Path objects

    def exists(self, path: str) -> bool:
        """Whether the path exists, after following symbolic links."""
        try:
            return os.path.exists(self._map_path(path))
        except OSError:
            return False

    def resolve(self, path: str) -> str:
        """Resolve all symbolic links without leaving the root. Raises OSError if a component is missing."""
        if not self._prefix:
            return os.path.realpath(path, strict=True)
        return self._resolve(path, 0) or "/"

    def _resolve(self, path: str, links: int) -> str:
        """Resolve a path with the cache, because most paths of a scan are in the same few hundred folders."""
        if path in self._places:
            return self._places[path]
        folder, _, name = path.rpartition("/")
        above = self._resolve(folder, links) if folder else ""
        if name in ("", "."):
            resolved = above
        elif name == "..":
            resolved = above.rpartition("/")[0]
        else:
            try:
                target = os.readlink(f"{self._prefix}{above}/{name}")  # noqa: PTH115 - hottest code, so no Path
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: exists and is not a link
                    raise
                resolved = f"{above}/{name}"
            else:
                if links >= LINKS_FOLLOWED:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                resolved = self._resolve(target if target.startswith("/") else f"{above}/{target}", links + 1)
        self._places[path] = resolved
        return resolved

    def usable(self, path: str) -> bool:
        """Whether this process has read and write access to the path."""
        return os.access(self._map_path(path), os.R_OK | os.W_OK)

    def statvfs(self, path: str) -> tuple[int, int]:
        """Return (size, available space) of the filesystem in bytes."""
        answer = os.statvfs(self._map_path(path))
        return answer.f_blocks * answer.f_frsize, answer.f_bavail * answer.f_frsize

    # This process ----------------------------------------------------------------------------------------------

    def limit(self, name: str) -> tuple[int | None, int | None]:
        """Return (soft, hard) of RLIMIT_<NAME>; None means unlimited."""
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if number is None:
            raise OSError(errno.EINVAL, f"no such limit: RLIMIT_{name.upper()}")
        soft, hard = (None if v == resource.RLIM_INFINITY else v for v in resource.getrlimit(number))
        return soft, hard

    def environment(self) -> dict[str, str]:
        """Return variables of NCCL, gloo, libfabric, UCX and Slurm, and Multus' annotation path; without secrets."""
        return {k: v for k, v in sorted(os.environ.items()) if ENVIRONMENT.match(k) and not SECRET.search(k)}

    def identity(self) -> dict[str, Json]:
        """Return a dict with hostname, pid, uid, kernel, architecture, time (Unix seconds), home."""
        return {
            "hostname": read_host_name(),
            "pid": os.getpid(),
            "uid": os.getuid(),
            "kernel": platform.release(),
            "architecture": platform.machine(),
            "time": time.time(),
            "home": os.path.expanduser("~"),  # noqa: PTH111
        }

    def cpu(self) -> dict[str, Json]:
        """Return a dict with logical, physical, load_average (three floats), memory_bytes."""
        import psutil

        return {
            "logical": psutil.cpu_count(),
            "physical": psutil.cpu_count(logical=False),
            "load_average": list(psutil.getloadavg()),
            "memory_bytes": psutil.virtual_memory().total,
        }

    def kernel_log(self, word: str) -> tuple[str, ...]:
        """Return kernel log lines with the word, including lines of earlier scans. A container sees the host's log."""
        lines = _read_log_lines(word)
        newest = self._log.setdefault(word, deque(maxlen=MAX_LINES))
        append_new_lines(newest, lines)
        return tuple(newest)

    # Drivers and the kernel's sockets --------------------------------------------------------------------------

    def name_driver_calls_in(self, descriptor: int) -> None:
        """Set the file in which each NVML call is named while it is in progress (see `probes.host.nvml`)."""
        self._nvml.call_file = descriptor

    def nvml(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """Call one NVML function."""
        return self._nvml.call(symbol, *arguments)

    def netlink(self, what: str) -> tuple[dict[str, Json], ...]:
        """Return the "links", "addresses" or "routes" of this network namespace."""
        return netlink.ask_route(what)

    def port_link(self, netdev: str) -> dict[str, Json]:
        """Return the fastest link mode and the priority flow control of a network device."""
        return dict(netlink.ask_port(netdev))

    def verbs(self, what: str, *arguments: Any) -> Json:
        """Query libibverbs: "version", or "register" (device name, number of bytes)."""
        return _VERBS[what](*arguments)


_READ_ALL, _SIZE_BUFFER = 3, 10  # SYSLOG_ACTION_*; neither changes the log
_MIN_BYTES, _MAX_BYTES = 1 << 17, 1 << 24  # usual sizes of the log; of a larger one, only the newest part is read
MAX_LINES = 256  # a failing GPU logs the same error repeatedly


def append_new_lines(newest: deque[str], lines: Iterable[str]) -> None:
    """Add the lines that are not in `newest`. Each line is unique, since it has the kernel's time stamp."""
    newest.extend([line for line in lines if line not in newest])


def _read_log_lines(word: str) -> tuple[str, ...]:
    """Return the newest kernel log lines with the word, oldest first. Raises OSError if access is denied."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = min(max(libc.klogctl(_SIZE_BUFFER, None, 0), _MIN_BYTES), _MAX_BYTES)
    content = ctypes.create_string_buffer(size)
    length = libc.klogctl(_READ_ALL, content, size)
    if length < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "kernel log")
    lines = ctypes.string_at(content, length).decode(errors="replace").splitlines()
    return tuple([line for line in lines if word in line][-MAX_LINES:])


# libibverbs through pyverbs, if the distribution's python3-pyverbs is installed. Specification: ibv_reg_mr(3),
# ibv_query_device(3). Memory is registered for local access only and deregistered at once.

_LOCAL_WRITE = 1  # IBV_ACCESS_LOCAL_WRITE; the module of pyverbs' enumerations differs between releases


@contextmanager
def _as_oserror() -> Iterator[None]:
    """Convert pyverbs errors, which carry an errno, to OSError; it is -1 if the kernel has no RDMA support."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        number = getattr(error, "error_code", 0) or 0
        raise OSError(number if number > 0 else errno.ENODEV, str(error).split("\n")[0]) from error


def _read_version() -> str:
    import pyverbs
    import pyverbs.device  # loads libibverbs, which may be missing although pyverbs is installed

    return str(getattr(pyverbs, "__version__", "unknown"))


def _register_memory(device: str, length: int) -> Json:
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD

    with _as_oserror(), Context(name=device) as context, PD(context) as domain, MR(domain, length, _LOCAL_WRITE):
        return {"registered_bytes": length, "pid": os.getpid()}


_VERBS: dict[str, Callable[..., Json]] = {"version": _read_version, "register": _register_memory}

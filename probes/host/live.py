"""The machine this process runs on, asked through files, NVML, netlink, verbs and getrlimit.

What is heavy to import is imported when asked for. Specification of the kernel's log: syslog(2), klogctl(3).
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from probes.api import host_name
from probes.host import netlink
from probes.host.nvml import Nvml
from probes.host.protocol import GpuHandle, Json

LINKS_FOLLOWED = 40  # as the kernel's MAXSYMLINKS: path_resolution(7)
TEXT_LIMIT_BYTES = 1 << 20  # /proc and /sys files are far smaller; a bigger one is not what a probe asks for
ENVIRONMENT = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|FI|OFI|UCX|NVIDIA)_"
    r"|(CUDA_VISIBLE_DEVICES|TOPOFLIGHT_NETWORK_STATUS|TOPOFLIGHT_ROLE|container)$"
    r"|(SLURM_(CONF|GPUS_ON_NODE|JOB_GPUS|JOB_ID|PROCID|SCRIPT_CONTEXT|STEP_GPUS)|SLURMD_NODENAME)$"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW(OR)?D|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY", re.IGNORECASE)

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_ATTRIBUTE_BYTES = 4096  # sysfs gives an attribute one page


class LiveHost:
    """This machine; every path is looked up below `root`, symbolic links included."""

    def __init__(self, root: str = "/") -> None:
        self._prefix = os.path.realpath(root).rstrip("/")  # "" is this machine's own root
        self._texts: dict[str, str] | None = None  # of the scan under way, by path
        self._places: dict[str, str] | None = None  # where each path leads, of the scan under way
        self._nvml = Nvml()
        self._log: dict[str, deque[str]] = {}  # word -> lines of the kernel's log, also those that it has overwritten

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
            "hostname": host_name(),
            "pid": os.getpid(),
            "uid": os.getuid(),
            "kernel": platform.release(),
            "architecture": platform.machine(),
            "time": time.time(),
            "home": os.path.expanduser("~"),  # noqa: PTH111
        }

    def cpu(self) -> dict[str, Json]:
        """Keys: logical, physical, load_average (three floats), memory_bytes."""
        import psutil

        return {
            "logical": psutil.cpu_count(),
            "physical": psutil.cpu_count(logical=False),
            "load_average": list(psutil.getloadavg()),
            "memory_bytes": psutil.virtual_memory().total,
        }

    def kernel_log(self, word: str) -> tuple[str, ...]:
        """Lines of the kernel's log with the word, of earlier looks too; a container sees the kernel's as well."""
        lines = _log_lines(word)
        newest = self._log.setdefault(word, deque(maxlen=LINES_MAX))
        append_new_lines(newest, lines)
        return tuple(newest)

    # Drivers and the kernel's sockets --------------------------------------------------------------------------

    def name_driver_calls_in(self, descriptor: int) -> None:
        """Name each NVML call in this file while it is under way (see `probes.host.nvml`)."""
        self._nvml.call_file = descriptor

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
        return _ask_verbs(what, *arguments)


_READ_ALL, _SIZE_BUFFER = 3, 10  # SYSLOG_ACTION_*; reading all leaves the log as it is
_LEAST_BYTES, _MOST_BYTES = 1 << 17, 1 << 24  # what kernels keep; the newest part where it is more
LINES_MAX = 256  # a failing GPU repeats itself


def append_new_lines(newest: deque[str], lines: Iterable[str]) -> None:
    """Add the lines that are not in `kept`. Each line is unique, since it has the kernel's time stamp."""
    newest.extend([line for line in lines if line not in newest])


def _log_lines(word: str) -> tuple[str, ...]:
    """The newest lines of the kernel's log with the word, oldest first. Raises OSError where it may not be read."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = min(max(libc.klogctl(_SIZE_BUFFER, None, 0), _LEAST_BYTES), _MOST_BYTES)
    content = ctypes.create_string_buffer(size)
    length = libc.klogctl(_READ_ALL, content, size)
    if length < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "kernel log")
    lines = ctypes.string_at(content, length).decode(errors="replace").splitlines()
    return tuple([line for line in lines if word in line][-LINES_MAX:])


# libibverbs through pyverbs, where the distribution's python3-pyverbs is installed. Specification: ibv_reg_mr(3),
# ibv_query_device(3), ibv_query_port(3); memory is registered for local access only and given back at once.

_LOCAL_WRITE = 1  # IBV_ACCESS_LOCAL_WRITE; pyverbs moved its enumerations between releases


def _ask_verbs(what: str, *arguments: int | str) -> Json:
    """ "version", "port" with a device's name and a port, "register" with a name and a number of bytes."""
    if what == "version":
        return _version()
    if what == "register":
        device, length = arguments
        return _register(str(device), int(length))
    if what == "port":
        device, number = arguments
        return _port(str(device), int(number))
    raise ValueError(f'verbs answers "version", "port" and "register", not {what!r}')


@contextmanager
def _as_oserror() -> Iterator[None]:
    """Pyverbs' own errors carry an errno, -1 where the kernel has no RDMA at all."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        number = getattr(error, "error_code", 0) or 0
        raise OSError(number if number > 0 else errno.ENODEV, str(error).split("\n")[0]) from error


def _version() -> str:
    import pyverbs
    import pyverbs.device  # the part that loads libibverbs, which may be missing where the binding is not

    return str(getattr(pyverbs, "__version__", "unknown"))


def _port(device: str, number: int) -> Json:
    """The codes of ibv_port_attr as they are: IBV_MTU_256 is 1, IBV_MTU_4096 is 5."""
    from pyverbs.device import Context

    with _as_oserror(), Context(name=device) as context:
        port = context.query_port(number)
        return {"active_mtu": int(port.active_mtu)}


def _register(device: str, length: int) -> Json:
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD

    with (
        _as_oserror(),
        Context(name=device) as context,
        PD(context) as domain,
        MR(domain, length, _LOCAL_WRITE),
    ):
        return {"registered_bytes": length, "pid": os.getpid()}

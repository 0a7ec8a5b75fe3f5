"""The interface through which probes read a host. Probes use nothing else.

There are three implementations: `LiveHost` reads this machine, `RecordedHost` answers from a recording, and
`RecordingHost` forwards queries to another host and keeps every answer, errors included. With a recording, the whole
product runs without the hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from probes.wire import Json as Json


@dataclass(frozen=True, slots=True)
class GpuHandle:
    """A placeholder for an NVML device handle in an `nvml` call, because a handle cannot be recorded."""

    index: int


class NvmlError(Exception):
    """NVML returned an error; `code` is NVML's number, `name` for example "NOT_SUPPORTED" or "GPU_IS_LOST"."""

    def __init__(self, symbol: str, code: int, name: str) -> None:
        super().__init__(f"{symbol}: {name} ({code})")
        self.symbol = symbol
        self.code = code
        self.name = name


class Host(Protocol):
    """Queries to a host. Paths are absolute; a live host may resolve them below another root.

    File queries raise the OSError of the system (FileNotFoundError, PermissionError, EINVAL, ...).
    """

    def read_text(self, path: str) -> str:
        """Return the content of a small file. Invalid UTF-8 is replaced, and the trailing newline is kept."""

    def read_bytes(self, path: str, limit: int) -> bytes:
        """Return the first `limit` bytes of a file, such as PCI configuration space."""

    def list_dir(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a folder."""

    def exists(self, path: str) -> bool:
        """Whether the path exists."""

    def resolve(self, path: str) -> str:
        """Return the path with every symbolic link followed, relative to the host's root."""

    def usable(self, path: str) -> bool:
        """Whether this process has read and write access to the path (a device node)."""

    def statvfs(self, path: str) -> tuple[int | None, int | None]:
        """Return (size, available space) of the filesystem in bytes; None if a recording does not have it."""

    def limit(self, name: str) -> tuple[int | None, int | None]:
        """Return (soft, hard) of RLIMIT_<NAME> of this process; None means unlimited."""

    def environment(self) -> dict[str, str]:
        """Return NCCL_*, TORCH_NCCL_*, GLOO_*, FI_*, OFI_*, UCX_*, NVIDIA_*, CUDA_VISIBLE_DEVICES of this process."""

    def identity(self) -> dict[str, Json]:
        """Return hostname, pid, uid, kernel release, architecture, time (Unix seconds) and the user's home folder."""

    def nvml(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """Call one NVML function. Structures are returned as dicts of their fields, bytes as str. Raises NvmlError.

        The first call initialises the library; it raises `NvmlError(name="LIBRARY_NOT_FOUND")` if there is none.
        """

    def netlink(self, what: str) -> tuple[dict[str, Json], ...]:
        """Return "links", "addresses" or "routes": one flat dict each, with pyroute2's attribute names.

        Raises OSError if netlink is refused.
        """

    def port_link(self, netdev: str) -> dict[str, Json]:
        """Return what the driver of a network device reports about its port (`probes.host.netlink`).

        Raises OSError if it reports nothing.
        """

    def verbs(self, what: str, *arguments: int | str) -> Json:
        """Query libibverbs through pyverbs: "version", ("register", device, bytes).

        Raises OSError from the library, or ImportError if pyverbs is not installed.
        """

    def kernel_log(self, word: str) -> tuple[str, ...]:
        """Return the newest kernel log lines that contain the word, oldest first.

        Raises OSError if access to the log is denied (CAP_SYSLOG).
        """

    def cpu(self) -> dict[str, Json]:
        """Return psutil's numbers: logical and physical CPU count, load average, memory in bytes."""

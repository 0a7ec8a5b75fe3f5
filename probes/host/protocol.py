"""What a probe may ask of a machine, and nothing else: the one edge between the project and the world.

Three hosts answer the same questions: `LiveHost` asks this machine, `RecordedHost` answers from a recording, and
`RecordingHost` passes questions on to another host and keeps every answer, errors included. A recording therefore
replays the whole product without the hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from probes.wire import Json as Json


@dataclass(frozen=True, slots=True)
class GpuHandle:
    """Stands for an NVML device handle in an `nvml` call: the handle itself cannot be recorded."""

    index: int


class NvmlError(Exception):
    """NVML answered with an error; `code` is NVML's number, `name` e.g. "NOT_SUPPORTED", "GPU_IS_LOST"."""

    def __init__(self, symbol: str, code: int, name: str) -> None:
        super().__init__(f"{symbol}: {name} ({code})")
        self.symbol = symbol
        self.code = code
        self.name = name


class Host(Protocol):
    """The questions. Paths are absolute; a live host may map them below an injected root.

    File questions raise OSError as the system does (FileNotFoundError, PermissionError, EINVAL, ...).
    """

    def read_text(self, path: str) -> str:
        """Content of a small file, decoded with replacement, trailing newline kept."""

    def read_bytes(self, path: str, limit: int) -> bytes:
        """First `limit` bytes of a file: PCI config space."""

    def list_dir(self, path: str) -> tuple[str, ...]:
        """Names in a folder, sorted."""

    def exists(self, path: str) -> bool:
        """Whether the path exists."""

    def resolve(self, path: str) -> str:
        """The path with every symbolic link followed, seen from the host's root."""

    def usable(self, path: str) -> bool:
        """Whether this process may open the path for reading and writing (a device node)."""

    def statvfs(self, path: str) -> tuple[int, int]:
        """(size, available) of the filesystem in bytes."""

    def limit(self, name: str) -> tuple[int | None, int | None]:
        """(soft, hard) of RLIMIT_<NAME> of this process; None is unlimited."""

    def environment(self) -> dict[str, str]:
        """NCCL_*, TORCH_NCCL_*, GLOO_*, FI_*, OFI_*, UCX_*, NVIDIA_*, CUDA_VISIBLE_DEVICES of this process."""

    def identity(self) -> dict[str, Json]:
        """hostname, pid, uid, kernel release, architecture, time (Unix seconds), user's home folder."""

    def nvml(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """Call one NVML function. Structures come back as dicts of their fields, bytes as str. Raises NvmlError.

        The library is initialised on the first call. `NvmlError(name="LIBRARY_NOT_FOUND")` where there is none.
        """

    def netlink(self, what: str) -> tuple[dict[str, Json], ...]:
        """ "links", "addresses" or "routes": one flat dict each, attribute names as pyroute2 spells them.

        Raises OSError where netlink is refused.
        """

    def port_link(self, netdev: str) -> dict[str, Json]:
        """What the driver of a network device says of its port, as far as it answers (`probes.host.netlink`).

        Raises OSError where it answers nothing.
        """

    def rdma_netlink(self, what: str) -> tuple[dict[str, Json], ...]:
        """ "devices", "ports" or "system" through NETLINK_RDMA. Raises OSError where the kernel has none."""

    def verbs(self, what: str, *arguments: int | str) -> Json:
        """A question to libibverbs through pyverbs: "version", ("port", device, number), ("register", device, bytes).

        Raises OSError from the library, ImportError where pyverbs is not installed.
        """

    def kernel_log(self, word: str) -> tuple[str, ...]:
        """The newest lines of the kernel's log that contain the word, oldest first.

        Raises OSError where the log may not be read (CAP_SYSLOG).
        """

    def cpu(self) -> dict[str, Json]:
        """psutil's numbers: logical and physical count, load average, memory in bytes."""

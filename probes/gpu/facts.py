"""What the gpu probe knows of a host: its GPUs, their NVLinks, every pair, and the GPUs of its PCI bus."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from contracts.tables import read_table
from probes.api import Source

UNREAD = "unread"
"""The remote end of a link that the driver failed to report. If a hypervisor hides it, it is None."""

LINKS_MAX = 36  # NVML_NVLINK_MAX_LINKS
PROC = "/proc/driver/nvidia/gpus"

BROKEN = frozenset({"GPU_IS_LOST", "RESET_REQUIRED", "INSUFFICIENT_POWER", "IRQ_ISSUE", "CORRUPTED_INFOROM"})
"""nvmlReturn_t of a GPU's handle that name a fault of the GPU or of its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink of one GPU (nvmlDeviceGetNvLink*)."""

    link: int
    active: bool | None  # None: its state was not read
    version: int | None = None  # generation: 3 on A100, 4 on H100, 5 on B200; one for all links of a GPU
    remote_kind: str | None = None  # "gpu", "nvswitch", "cpu"; None where a VM hides it, UNREAD
    remote_bus_id: str | None = None  # sysfs form, None where hidden, UNREAD
    # Since driver load: replay, recovery, crc_flit, crc_data; from Blackwell on receive, recovery_failed, effective,
    # symbol (NVML_FI_DEV_NVLINK_COUNT_*).
    errors: dict[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A compute process on the GPU (nvmlDeviceGetComputeRunningProcesses)."""

    pid: int
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MigSlice:
    """A compute instance of a GPU with MIG on: what a device plugin hands out."""

    uuid: str  # "MIG-<uuid>"
    profile: str | None  # "1g.10gb", "1c.3g.40gb", "1g.10gb+me"; None where its name tells none
    gpu_instance: int
    compute_instance: int  # within the GPU instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. `error` is set, and the rest unknown, where the driver does not give it: "GPU_IS_LOST (symbol)"."""

    index: int
    bus_id: str | None  # sysfs form: "0000:1b:00.0"
    uuid: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    numa_node: int | None = None  # of the CPUs next to it: sysfs, else nvmlDeviceGetMemoryAffinity
    gpu_numa_node: int | None = None  # of its own memory, where the GPU is a NUMA node (Grace): nvmlDeviceGetNumaNodeId
    cpu_affinity: str | None = None  # "0-47,96-143"
    nvlinks: tuple[NvLink, ...] = ()  # only links that exist; empty with `nvlinks_known` is "none"
    nvlinks_known: bool = False
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None  # what GPU and slot can do together
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    link_in_sysfs: bool = False  # the pci probe reads this link's width too
    pcie_replays: int | None = None
    bar1_bytes: int | None = None
    mig_enabled: bool | None = None
    mig_pending: bool | None = None  # after the next reset
    virtualization: str | None = None  # "none", "passthrough", "vgpu" (a part of a board), "host_vgpu", "host_vsga"
    mig_slices: tuple[MigSlice, ...] | None = None  # that this process may see; None where one of them was not read
    c2c_links: int | None = None
    c2c_enabled: bool | None = None  # nvmlDeviceGetC2cModeInfoV
    fabric_state: str | None = None  # "not_supported", "not_started", "in_progress", "completed"
    fabric_clique: str | None = None  # "<cluster uuid>/<clique id>": GPUs with the same one share an NVLink domain
    fabric_status: str | None = None  # the fabric probe's error where its state is "completed"; None: success, unknown
    fabric_degraded: bool | None = None  # nvmlGpuFabricInfo healthMask: NVSwitch bandwidth is degraded
    fabric_faults: tuple[str, ...] | None = None  # the mask's other fields: "route_unhealthy", "no_partition", ...
    fabric_summary: str | None = None  # "healthy", "unhealthy", "limited_capacity" (version 3 of the structure)
    recovery_action: str | None = None  # what the driver wants done: "none", "gpu_reset", "node_reboot", ...
    ecc_enabled: bool | None = None  # now
    ecc_pending: bool | None = None  # after the next reset
    ecc_default: bool | None = None  # as the board is delivered
    ecc_uncorrected: int | None = None  # volatile: since the driver was loaded
    ecc_uncorrected_lifetime: int | None = None  # aggregate: of the board's life
    sram_threshold_exceeded: bool | None = None  # the field diagnostic's limit (nvmlDeviceGetSramEccErrorStatus)
    sram_uncorrected: int | None = None  # volatile, parity and SEC-DED
    sram_uncorrected_lifetime: int | None = None  # aggregate
    remapped_rows_uncorrectable: int | None = None
    remapping_pending: bool | None = None
    remapping_failed: bool | None = None
    remap_banks_exhausted: int | None = None  # memory banks, or bank groups, without a spare left
    retired_pages: int | None = None
    temperature_celsius: float | None = None
    temperature_slowdown_celsius: float | None = None
    power_limit_watts: float | None = None
    power_limit_default_watts: float | None = None
    sm_clock_hertz: float | None = None
    sm_clock_max_hertz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None  # "sw_thermal", "hw_slowdown", "hw_power_brake", ...
    utilization_ratio: float | None = None
    persistence_mode: bool | None = None
    compute_mode: str | None = None
    processes: tuple[GpuProcess, ...] | None = None
    # Oldest first, in the kernel's log ("NVRM: Xid"), and as NVML events since the driver was first asked for them;
    # None where the log is not readable, or no events are to be had.
    xids: tuple[int, ...] | None = None
    xid_events: tuple[int, ...] | None = None
    unread: tuple[str, ...] = ()  # questions that were not answered: "nvmlDeviceGetTemperature(0) = TIMEOUT"
    error: str | None = None

    @property
    def refusal(self) -> str | None:
        """The driver's word in `error`: "GPU_IS_LOST", "NO_PERMISSION"."""
        return self.error.partition(" ")[0] if self.error else None

    @property
    def broken(self) -> bool:
        """Whether the driver says that this GPU cannot be used; a refusal for another reason leaves that open."""
        return self.refusal in BROKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPair:
    """What NVML says of two GPUs, `a` < `b`."""

    a: int
    b: int
    ancestor: str | None = None  # "PIX", "PXB", "PHB", "NODE", "SYS", "INTERNAL"
    p2p_read: str | None = None  # "ok", "chipset_not_supported", "gpu_not_supported", "disabled_by_regkey", ...
    p2p_nvlink: str | None = None
    unread: tuple[str, ...] = ()  # as of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class BusGpu:
    """One NVIDIA GPU of the bus that this host's own driver could hold."""

    bus_id: str
    driver: str | None = None
    minor: int | None = None  # N of /dev/nvidiaN; None if the driver's /proc does not show it
    node_exists: bool | None = None  # None where the minor is unknown
    node_usable: bool | None = None  # this process may open it


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBus:
    """The GPUs of the bus, and what decides which of them this process was given."""

    gpus: tuple[BusGpu, ...]
    container: str | None = None  # "kubernetes", "docker", ...
    nodes: int = 0  # /dev/nvidia0, /dev/nvidia1, ... that this process may open
    requested: int | None = None  # GPUs that NVIDIA_VISIBLE_DEVICES names; None where it names none, all, or MIG slices
    all_requested: bool = False  # NVIDIA_VISIBLE_DEVICES=all; images set it too, so it proves no request


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """All that NVML says of this host."""

    driver_version: str | None
    cuda_version: str | None  # highest the driver supports: "12.8"
    gpus: tuple[Gpu, ...]
    pairs: tuple[GpuPair, ...] = ()
    driver_error: str | None = None  # why NVML cannot be used although the host has NVIDIA GPUs: "DRIVER_NOT_LOADED"
    driver_error_symbol: str | None = None  # of the function that said so
    visible: str | None = None  # CUDA_VISIBLE_DEVICES of this process; None where it is not set
    granted: tuple[str, int] | None = None  # GPUs of this node that Slurm gave the job, and the variable that says so
    confidential: bool | None = None  # confidential computing is on
    unread: tuple[str, ...] = ()  # of the host, as of a GPU
    pci_gpus: int | None = None  # NVIDIA display functions on the PCI bus (sysfs), whatever NVML says
    bus: GpuBus | None = None  # GPUs of the PCI bus, and which of them this process was given; None without sysfs
    xids_off_bus: tuple[tuple[str, tuple[int, ...]], ...] = ()  # Xids at bus ids where the bus has no device any more


# The first NVML call on a host without persistence mode initialises every GPU: about 1 s each, 16 GPUs at most. A
# driver that takes 100 ms for an answer reports the health and the links of 8 GPUs in the remaining time.
SOURCE = Source(name="gpu", facts=GpuFacts, timeout_seconds=45.0)


@cache
def row_of(question: str) -> dict[str, Any]:
    """The row of `questions.toml` with the longest key that a question, "nvmlDeviceGetTemperature(0)", begins with.

    It is empty if no key matches.
    """
    rows: dict[str, dict[str, Any]] = read_table(__file__, "questions.toml")
    return rows.get(max(filter(question.startswith, rows), key=len, default=""), {})

"""Facts of the gpu probe: the GPUs of a host, their NVLinks, all pairs of GPUs, and the GPUs on the PCI bus."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from contracts.tables import read_table
from probes.api import Source

UNREAD = "unread"
"""The driver failed to report the remote end of a link. If a hypervisor hides the remote end, the value is None."""

MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS
PROC = "/proc/driver/nvidia/gpus"

BROKEN = frozenset({"GPU_IS_LOST", "RESET_REQUIRED", "INSUFFICIENT_POWER", "IRQ_ISSUE", "CORRUPTED_INFOROM"})
"""nvmlReturn_t names, returned for a GPU's handle, that mean a fault of the GPU or of its slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink of one GPU (nvmlDeviceGetNvLink*)."""

    link: int
    active: bool | None  # None: state could not be read
    version: int | None = None  # generation: 3 on A100, 4 on H100, 5 on B200; the same for all links of a GPU
    remote_kind: str | None = None  # "gpu", "nvswitch", "cpu"; None if hidden by a VM; or UNREAD
    remote_bus_id: str | None = None  # in sysfs form; None if hidden; or UNREAD
    # Counts since driver load: replay, recovery, crc_flit, crc_data; from Blackwell on receive, recovery_failed,
    # effective, symbol (NVML_FI_DEV_NVLINK_COUNT_*).
    errors: dict[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A compute process on the GPU (nvmlDeviceGetComputeRunningProcesses)."""

    pid: int
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. If the driver refuses access, `error` is set ("GPU_IS_LOST (symbol)") and other facts are unknown."""

    index: int
    bus_id: str | None  # in sysfs form: "0000:1b:00.0"
    uuid: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    numa_node: int | None = None  # of the nearest CPUs: from sysfs, else nvmlDeviceGetMemoryAffinity
    gpu_numa_node: int | None = None  # of the GPU's own memory, if it is a NUMA node (Grace): nvmlDeviceGetNumaNodeId
    cpu_affinity: str | None = None  # "0-47,96-143"
    nvlinks: tuple[NvLink, ...] = ()  # existing links; if empty and `nvlinks_known`, the GPU has none
    nvlinks_known: bool = False
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None  # supported by both GPU and slot
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    link_in_sysfs: bool = False  # the pci probe also reads the width of this link
    pcie_replays: int | None = None
    bar1_bytes: int | None = None
    mig_enabled: bool | None = None
    mig_pending: bool | None = None  # after the next reset
    virtualization: str | None = None  # "none", "passthrough", "vgpu" (part of a board), "host_vgpu", "host_vsga"
    c2c_links: int | None = None
    c2c_enabled: bool | None = None  # nvmlDeviceGetC2cModeInfoV
    fabric_state: str | None = None  # "not_supported", "not_started", "in_progress", "completed"
    fabric_clique: str | None = None  # "<cluster uuid>/<clique id>": GPUs with the same value share an NVLink domain
    fabric_status: str | None = None  # error reported with fabric state "completed"; None: success or unknown
    fabric_degraded: bool | None = None  # nvmlGpuFabricInfo healthMask: NVSwitch bandwidth is degraded
    fabric_faults: tuple[str, ...] | None = None  # other healthMask faults: "route_unhealthy", "no_partition", ...
    fabric_summary: str | None = None  # "healthy", "unhealthy", "limited_capacity" (version 3 of the structure)
    recovery_action: str | None = None  # action requested by the driver: "none", "gpu_reset", "node_reboot", ...
    ecc_enabled: bool | None = None  # current mode
    ecc_pending: bool | None = None  # after the next reset
    ecc_default: bool | None = None  # factory default
    ecc_uncorrected: int | None = None  # volatile: since driver load
    ecc_uncorrected_lifetime: int | None = None  # aggregate: over the life of the board
    sram_threshold_exceeded: bool | None = None  # limit for the field diagnostic (nvmlDeviceGetSramEccErrorStatus)
    sram_uncorrected: int | None = None  # volatile, parity and SEC-DED
    sram_uncorrected_lifetime: int | None = None  # aggregate
    remapped_rows_uncorrectable: int | None = None
    remapping_pending: bool | None = None
    remapping_failed: bool | None = None
    remap_banks_exhausted: int | None = None  # memory banks, or bank groups, without spare rows
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
    # Oldest first, from the kernel log ("NVRM: Xid"), and from NVML events since the probe first registered for them.
    # None if the log cannot be read, or if there are no events.
    xids: tuple[int, ...] | None = None
    xid_events: tuple[int, ...] | None = None
    unread: tuple[str, ...] = ()  # NVML calls that failed: "nvmlDeviceGetTemperature(0) = TIMEOUT"
    error: str | None = None

    @property
    def refusal(self) -> str | None:
        """Return NVML's error name in `error`: "GPU_IS_LOST", "NO_PERMISSION"."""
        return self.error.partition(" ")[0] if self.error else None

    @property
    def broken(self) -> bool:
        """Whether the driver reports that this GPU is unusable. Other errors do not show whether it is usable."""
        return self.refusal in BROKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPair:
    """NVML's report about a pair of GPUs, `a` < `b`."""

    a: int
    b: int
    ancestor: str | None = None  # "PIX", "PXB", "PHB", "NODE", "SYS", "INTERNAL"
    p2p_read: str | None = None  # "ok", "chipset_not_supported", "gpu_not_supported", "disabled_by_regkey", ...
    p2p_nvlink: str | None = None
    unread: tuple[str, ...] = ()  # as in Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class BusGpu:
    """One NVIDIA GPU on the PCI bus that this host's own driver can use."""

    bus_id: str
    driver: str | None = None
    minor: int | None = None  # N of /dev/nvidiaN; None if the driver's /proc files do not show it
    node_exists: bool | None = None  # None if `minor` is unknown
    node_usable: bool | None = None  # whether this process may open it
    xids: tuple[int, ...] = ()  # as in Gpu: NVML may not list this GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBus:
    """GPUs on the PCI bus, and the facts that determine which of them are assigned to this process."""

    gpus: tuple[BusGpu, ...]
    container: str | None = None  # "kubernetes", "docker", ...
    nodes: int = 0  # number of /dev/nvidiaN files that this process may open
    requested: int | None = None  # number of GPUs in NVIDIA_VISIBLE_DEVICES; None if it names none, all, or MIG slices
    all_requested: bool = False  # NVIDIA_VISIBLE_DEVICES=all; images also set this, so it proves no request


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """All facts that NVML reports for this host."""

    driver_version: str | None
    cuda_version: str | None  # highest version that the driver supports: "12.8"
    gpus: tuple[Gpu, ...]
    pairs: tuple[GpuPair, ...] = ()
    driver_error: str | None = None  # NVML error on a host with NVIDIA GPUs: "DRIVER_NOT_LOADED"
    driver_error_symbol: str | None = None  # function that returned driver_error
    visible: str | None = None  # CUDA_VISIBLE_DEVICES of this process; None if not set
    granted: tuple[str, int] | None = None  # (GPUs of this node that Slurm allocated to the job, source variable)
    confidential: bool | None = None  # whether confidential computing is on
    unread: tuple[str, ...] = ()  # host-level NVML calls that failed, as in Gpu
    pci_gpus: int | None = None  # NVIDIA display functions on the PCI bus (sysfs), independent of NVML
    bus: GpuBus | None = None  # None if sysfs is not available
    xids_off_bus: tuple[tuple[str, tuple[int, ...]], ...] = ()  # (bus id, Xids) without a device on the bus
    switch_errors: tuple[tuple[str, str], ...] = ()  # (bus id of an NVSwitch, fatal SXid in the kernel log)


# Without persistence mode, the first NVML call initialises every GPU: about 1 s each, at most 16 GPUs. In the remaining
# time, a driver that needs 100 ms per answer reports the health and links of 8 GPUs.
SOURCE = Source(name="gpu", facts=GpuFacts, timeout_seconds=45.0)


@cache
def find_question(question: str) -> dict[str, Any]:
    """Return the row of `questions.toml` with the longest key that is a prefix of an NVML call.

    The call is written as "nvmlDeviceGetTemperature(0)". The result is empty if no key matches.
    """
    rows: dict[str, dict[str, Any]] = read_table(__file__, "questions.toml")
    return rows.get(max(filter(question.startswith, rows), key=len, default=""), {})

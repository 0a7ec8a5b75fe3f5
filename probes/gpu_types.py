"""The facts of the gpu probe; import them from `probes.gpu`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink of one GPU (nvmlDeviceGetNvLink*)."""

    link: int
    active: bool | None
    version: int | None = None  # generation: 3 on A100, 4 on H100, 5 on B200
    remote_kind: str | None = None  # "gpu", "nvswitch", "cpu"; None where a VM hides it
    remote_bus_id: str | None = None  # sysfs form, None where hidden
    errors: dict[str, int] | None = None  # replay, recovery, crc_flit, crc_data since driver load


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A compute process on the GPU (nvmlDeviceGetComputeRunningProcesses)."""

    pid: int
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. `error` is set, and the rest unknown, where the driver says it is lost."""

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
    link_in_sysfs: bool = False  # the pci probe sees this link too
    pcie_replays: int | None = None
    bar1_bytes: int | None = None
    mig_enabled: bool | None = None
    c2c_links: int | None = None
    fabric_state: str | None = None  # "not_supported", "not_started", "in_progress", "completed"
    fabric_clique: str | None = None  # "<cluster uuid>/<clique id>": GPUs with the same one share an NVLink domain
    fabric_degraded: bool | None = None  # nvmlGpuFabricInfo healthMask: NVSwitch bandwidth is degraded
    ecc_uncorrected: int | None = None  # volatile: since the driver was loaded
    ecc_corrected: int | None = None  # volatile
    remapped_rows_uncorrectable: int | None = None
    remapping_pending: bool | None = None
    remapping_failed: bool | None = None
    retired_pages: int | None = None
    temperature_celsius: float | None = None
    temperature_slowdown_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_limit_default_watts: float | None = None
    sm_clock_hertz: float | None = None
    sm_clock_max_hertz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None  # "sw_thermal", "hw_slowdown", "hw_power_brake", ...
    utilization_ratio: float | None = None
    persistence_mode: bool | None = None
    compute_mode: str | None = None
    processes: tuple[GpuProcess, ...] | None = None
    xids: tuple[int, ...] | None = (
        None  # in the kernel's log ("NVRM: Xid"), oldest first; None where it is not readable
    )
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPair:
    """What NVML says of two GPUs, `a` < `b`."""

    a: int
    b: int
    ancestor: str | None = None  # "PIX", "PXB", "PHB", "NODE", "SYS", "INTERNAL"
    p2p_read: str | None = None  # "ok", "chipset_not_supported", "gpu_not_supported", "disabled_by_regkey", ...
    p2p_write: str | None = None
    p2p_nvlink: str | None = None
    p2p_atomics: str | None = None
    p2p_pcie: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """All that NVML says of this host."""

    driver_version: str | None
    cuda_version: str | None  # highest the driver supports: "12.8"
    gpus: tuple[Gpu, ...]
    pairs: tuple[GpuPair, ...] = ()
    driver_error: str | None = None  # why NVML cannot be used although the host has NVIDIA GPUs: "DRIVER_NOT_LOADED"
    pci_gpus: int | None = None  # NVIDIA display functions on the PCI bus (sysfs), whatever NVML says

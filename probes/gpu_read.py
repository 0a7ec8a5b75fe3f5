"""Asks NVML about every GPU and every pair; see `probes.gpu`.

Specification: NVML API reference. Counters and modes that a GPU does not support answer NOT_SUPPORTED: None here.
"""

from __future__ import annotations

from typing import Any

from probes import sysfs
from probes.api import UnavailableError
from probes.gpu_links import nvlinks
from probes.gpu_types import Gpu, GpuFacts, GpuPair, GpuProcess
from probes.host import GpuHandle, Host, NvmlError
from probes.nvml import sysfs_bus_id

GPUS_MAX = 64  # NVML lists GPUs, not MIG slices; no host has more
AFFINITY_WORDS = 32  # of 64 CPUs each: Linux' largest NR_CPUS on x86 is 8192, the largest server has under 2048

_NO_DRIVER = {"LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH"}
_LOST = {"GPU_IS_LOST", "RESET_REQUIRED"}
_ANCESTORS = {0: "INTERNAL", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t
_P2P = (  # nvmlGpuP2PStatus_t
    "ok", "chipset_not_supported", "gpu_not_supported", "topology_not_supported", "disabled_by_regkey",
    "not_supported", "unknown",
)  # fmt: skip
_FABRIC = ("not_supported", "not_started", "in_progress", "completed")  # nvmlGpuFabricState_t
_COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
_C2C_LINK_COUNT = 170  # NVML_FI_DEV_C2C_LINK_COUNT
_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE, of a process' memory
THROTTLE_REASONS = {  # nvmlClocksEventReason*; idle (bit 0) is no throttling
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}


class _Asker:
    """One GPU's questions: what it does not answer, or answers with nonsense, is None."""

    def __init__(self, host: Host, handle: GpuHandle) -> None:
        self.host, self.handle = host, handle
        self.lost: str | None = None

    def __call__(self, symbol: str, *arguments: GpuHandle | int | str) -> Any:
        try:
            return self.host.nvml(symbol, self.handle, *arguments)
        except NvmlError as error:
            if error.name in _LOST:
                self.lost = f"{error.name} ({error.symbol})"
            return None

    def number(self, symbol: str, *arguments: int | str, scale: float = 1.0) -> float | None:
        answer = self(symbol, *arguments)
        return answer * scale if isinstance(answer, int | float) else None

    def count(self, symbol: str, *arguments: int | str) -> int | None:
        answer = self(symbol, *arguments)
        return answer if isinstance(answer, int) else None

    def field(self, symbol: str, name: str) -> Any:
        answer = self(symbol)
        return answer.get(name) if isinstance(answer, dict) else None


def read(host: Host) -> GpuFacts:
    """Ask everything. Raises UnavailableError where there is neither a driver nor an NVIDIA GPU."""
    on_bus = pci_gpus(host)
    try:
        count = host.nvml("nvmlDeviceGetCount")
    except NvmlError as error:
        if error.name not in _NO_DRIVER or not on_bus:
            raise UnavailableError(f"no NVIDIA GPU that NVML can see ({error})") from None
        return GpuFacts(driver_version=None, cuda_version=None, gpus=(), driver_error=error.name, pci_gpus=on_bus)
    if not isinstance(count, int) or not 0 <= count <= GPUS_MAX:
        raise ValueError(f"nvmlDeviceGetCount = {count!r}: not a number of GPUs between 0 and {GPUS_MAX}")
    gpus = tuple(_gpu(host, index) for index in range(count))
    answering = [gpu.index for gpu in gpus if gpu.error is None]
    return GpuFacts(
        driver_version=_driver_text(host, "nvmlSystemGetDriverVersion"),
        cuda_version=_cuda_version(host),
        gpus=gpus,
        pairs=tuple(_pair(host, a, b) for a in answering for b in answering if a < b),
        pci_gpus=on_bus,
    )


def pci_gpus(host: Host) -> int | None:
    """How many NVIDIA display functions (vendor 0x10de, class 0x03xxxx) the PCI bus has; None without sysfs."""
    try:
        devices = host.list_dir("/sys/bus/pci/devices")
    except OSError:
        return None
    found = 0
    for device in devices:
        folder = f"/sys/bus/pci/devices/{device}"
        if sysfs.number(host, f"{folder}/vendor") == 0x10DE:
            found += ((sysfs.number(host, f"{folder}/class") or 0) >> 16) == 0x03
    return found


def _driver_text(host: Host, symbol: str) -> str | None:
    try:
        return str(host.nvml(symbol))
    except NvmlError:
        return None


def _cuda_version(host: Host) -> str | None:
    try:
        number = host.nvml("nvmlSystemGetCudaDriverVersion_v2")
    except NvmlError:
        return None
    return f"{number // 1000}.{number % 1000 // 10}" if isinstance(number, int) else None


def _gpu(host: Host, index: int) -> Gpu:
    ask = _Asker(host, GpuHandle(index))
    try:
        pci = host.nvml("nvmlDeviceGetPciInfo", ask.handle)
    except NvmlError as error:
        return Gpu(index=index, bus_id=None, error=f"{error.name} ({error.symbol})")
    bus_id = sysfs_bus_id(pci["busId"])
    capability = _pair_of_ints(ask("nvmlDeviceGetCudaComputeCapability"))
    known, links = nvlinks(host, ask.handle, capability)
    fabric = ask("nvmlDeviceGetGpuFabricInfoV") or ask("nvmlDeviceGetGpuFabricInfo") or {}
    remapped = ask("nvmlDeviceGetRemappedRows") or (None, None, None, None)
    mig = ask("nvmlDeviceGetMigMode")
    limit = ask.number("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3)
    return Gpu(
        index=index,
        bus_id=bus_id,
        uuid=ask("nvmlDeviceGetUUID"),
        name=ask("nvmlDeviceGetName"),
        memory_bytes=ask.field("nvmlDeviceGetMemoryInfo", "total"),
        memory_used_bytes=ask.field("nvmlDeviceGetMemoryInfo", "used"),
        compute_capability=capability,
        numa_node=_numa_node(ask, bus_id),
        gpu_numa_node=_non_negative(ask.count("nvmlDeviceGetNumaNodeId")),
        cpu_affinity=cpu_list(ask("nvmlDeviceGetCpuAffinity", AFFINITY_WORDS)),
        nvlinks=links,
        nvlinks_known=known,
        pcie_generation=ask.count("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask.count("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask.count("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask.count("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_replays=ask.count("nvmlDeviceGetPcieReplayCounter"),
        bar1_bytes=ask.field("nvmlDeviceGetBAR1MemoryInfo", "bar1Total"),
        mig_enabled=bool(mig[0]) if mig else None,
        c2c_links=_c2c_links(ask),
        fabric_state=_named(_FABRIC, fabric.get("state")),
        fabric_clique=_fabric_clique(fabric),
        fabric_degraded=_fabric_degraded(fabric.get("healthMask")),
        ecc_uncorrected=ask.count("nvmlDeviceGetTotalEccErrors", 1, 0),
        ecc_corrected=ask.count("nvmlDeviceGetTotalEccErrors", 0, 0),
        remapped_rows_uncorrectable=remapped[1],
        remapping_pending=_flag(remapped[2]),
        remapping_failed=_flag(remapped[3]),
        retired_pages=_retired_pages(ask),
        temperature_celsius=ask.number("nvmlDeviceGetTemperature", 0),
        temperature_slowdown_celsius=ask.number("nvmlDeviceGetTemperatureThreshold", 1),
        power_watts=ask.number("nvmlDeviceGetPowerUsage", scale=1e-3),
        power_limit_watts=limit,
        power_limit_default_watts=ask.number("nvmlDeviceGetPowerManagementDefaultLimit", scale=1e-3),
        sm_clock_hertz=ask.number("nvmlDeviceGetClockInfo", 1, scale=1e6),
        sm_clock_max_hertz=ask.number("nvmlDeviceGetMaxClockInfo", 1, scale=1e6),
        throttle_reasons=_throttle_reasons(ask),
        utilization_ratio=_ratio(ask.field("nvmlDeviceGetUtilizationRates", "gpu")),
        persistence_mode=_flag(ask("nvmlDeviceGetPersistenceMode")),
        compute_mode=_named(_COMPUTE_MODES, ask("nvmlDeviceGetComputeMode")),
        processes=_processes(ask("nvmlDeviceGetComputeRunningProcesses")),
        error=ask.lost,
    )


def _pair(host: Host, a: int, b: int) -> GpuPair:
    ask = _Asker(host, GpuHandle(a))
    level = ask("nvmlDeviceGetTopologyCommonAncestor", GpuHandle(b))
    read_, write, nvlink, atomics, pcie = (
        _named(_P2P, ask("nvmlDeviceGetP2PStatus", GpuHandle(b), capability)) for capability in range(5)
    )
    return GpuPair(
        a=a,
        b=b,
        ancestor=_ANCESTORS.get(level) if isinstance(level, int) else None,
        p2p_read=read_,
        p2p_write=write,
        p2p_nvlink=nvlink,
        p2p_atomics=atomics,
        p2p_pcie=pcie,
    )


def cpu_list(words: Any) -> str | None:
    """A bit mask of 64-bit words as "0-47,96-143"; None where it is empty."""
    if not words:
        return None
    cpus = [64 * i + bit for i, word in enumerate(words) if word for bit in range(64) if word >> bit & 1]
    return _runs(cpus) or None


def _runs(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _numa_node(ask: _Asker, bus_id: str | None) -> int | None:
    """Sysfs knows best; where it says -1 (a VM), NVML's mask counts if it has one node."""
    node = sysfs.number(ask.host, f"/sys/bus/pci/devices/{bus_id}/numa_node")
    if node is not None and node >= 0:
        return node
    nodes = cpu_list(ask("nvmlDeviceGetMemoryAffinity", 1, 0))
    return int(nodes) if nodes and nodes.isdigit() else None


def _c2c_links(ask: _Asker) -> int | None:
    values = ask("nvmlDeviceGetFieldValues", _C2C_LINK_COUNT)
    return values[0] if values else None


def _fabric_clique(fabric: dict[str, Any]) -> str | None:
    """None for the all-zero cluster id of a single NVSwitch host: two such hosts share no domain."""
    cluster = bytes(fabric.get("clusterUuid") or ())
    if fabric.get("state") != 3 or not any(cluster):
        return None
    return f"{cluster.hex()}/{fabric['cliqueId']}"


def _fabric_degraded(mask: int | None) -> bool | None:
    """Bits 0 and 1 of the health mask: 1 degraded, 2 not, 0 unknown."""
    return {1: True, 2: False}.get(mask & 3) if mask is not None else None


def _retired_pages(ask: _Asker) -> int | None:
    """Pages retired for single-bit (cause 0) and double-bit (1) errors; Ampere and later remap rows instead."""
    by_cause = [ask("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]
    return None if None in by_cause else sum(len(pages) for pages in by_cause)


def _throttle_reasons(ask: _Asker) -> tuple[str, ...] | None:
    mask = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    if mask is None:  # the older spelling is answered by every driver so far, but it is the one to go
        mask = ask("nvmlDeviceGetCurrentClocksEventReasons")
    return None if mask is None else tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit)


def _processes(answer: Any) -> tuple[GpuProcess, ...] | None:
    if answer is None:
        return None
    return tuple(GpuProcess(pid=p["pid"], memory_bytes=_memory(p["usedGpuMemory"])) for p in answer)


def _memory(value: int | None) -> int | None:
    return None if value == _NOT_AVAILABLE else value


def _named(names: tuple[str, ...], number: Any) -> str | None:
    return names[number] if isinstance(number, int) and 0 <= number < len(names) else None


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _ratio(percent: Any) -> float | None:
    return percent / 100 if isinstance(percent, int) and 0 <= percent <= 100 else None


def _non_negative(number: int | None) -> int | None:
    return number if number is not None and number >= 0 else None


def _pair_of_ints(answer: Any) -> tuple[int, int] | None:
    return (answer[0], answer[1]) if answer else None

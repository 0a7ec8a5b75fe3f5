"""Asks NVML about every GPU and every pair; see `probes.gpu`.

Specification: NVML API reference. Counters and modes that a GPU does not support answer NOT_SUPPORTED: None here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from probes import sysfs
from probes.api import UnavailableError
from probes.gpu_decode import (
    ANCESTORS,
    COMPUTE_MODES,
    FABRIC,
    P2P,
    THROTTLE_REASONS,
    cpu_list,
    fabric_clique,
    fabric_degraded,
    flag,
    named,
    non_negative,
    pair_of_ints,
    processes,
    ratio,
)  # fmt: skip
from probes.gpu_links import nvlinks
from probes.gpu_types import Gpu, GpuFacts, GpuPair
from probes.host import GpuHandle, Host, NvmlError
from probes.nvml import sysfs_bus_id

GPUS_MAX = 64  # NVML lists GPUs, not MIG slices; no host has more
AFFINITY_WORDS = 32  # of 64 CPUs each: Linux' largest NR_CPUS on x86 is 8192, the largest server has under 2048

_NO_DRIVER = {"LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH"}
_LOST = {"GPU_IS_LOST", "RESET_REQUIRED"}
_C2C_LINK_COUNT = 170  # NVML_FI_DEV_C2C_LINK_COUNT


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
    addresses = pci_gpus(host)
    on_bus = None if addresses is None else len(addresses)
    try:
        count = host.nvml("nvmlDeviceGetCount")
    except NvmlError as error:
        if error.name in _NO_DRIVER and not on_bus:
            raise UnavailableError(f"no NVIDIA GPU on the PCI bus, and no driver ({error})") from None
        return GpuFacts(driver_version=None, cuda_version=None, gpus=(), driver_error=error.name, pci_gpus=on_bus)
    if not isinstance(count, int) or not 0 <= count <= GPUS_MAX:
        raise ValueError(f"nvmlDeviceGetCount = {count!r}: not a number of GPUs between 0 and {GPUS_MAX}")
    xids = _xids(host)
    gpus = _placed(tuple(_gpu(host, index, xids) for index in range(count)), addresses or (), xids)
    answering = [gpu.index for gpu in gpus if gpu.error is None]
    return GpuFacts(
        driver_version=_driver_text(host, "nvmlSystemGetDriverVersion"),
        cuda_version=_cuda_version(host),
        gpus=gpus,
        pairs=tuple(_pair(host, a, b) for a in answering for b in answering if a < b),
        pci_gpus=on_bus,
    )


def pci_gpus(host: Host) -> tuple[str, ...] | None:
    """NVIDIA display functions (vendor 0x10de, class 0x03xxxx) on the PCI bus; None without sysfs."""
    try:
        devices = host.list_dir("/sys/bus/pci/devices")
    except OSError:
        return None
    folder = "/sys/bus/pci/devices"
    return tuple(
        device
        for device in devices
        if sysfs.number(host, f"{folder}/{device}/vendor") == 0x10DE
        and (sysfs.number(host, f"{folder}/{device}/class") or 0) >> 16 == 0x03
    )


def _placed(gpus: tuple[Gpu, ...], addresses: tuple[str, ...], xids: dict[str, list[int]] | None) -> tuple[Gpu, ...]:
    """A lost GPU does not tell where it is; where it is the only one, it is at the address that is left over."""
    lost = [gpu for gpu in gpus if gpu.bus_id is None]
    left = set(addresses) - {gpu.bus_id for gpu in gpus}
    if len(lost) != 1 or len(left) != 1:
        return gpus
    bus_id = left.pop()
    found = replace(lost[0], bus_id=bus_id, xids=_of(xids, bus_id))
    return tuple(found if gpu is lost[0] else gpu for gpu in gpus)


def _of(xids: dict[str, list[int]] | None, bus_id: str | None) -> tuple[int, ...] | None:
    return None if xids is None or bus_id is None else tuple(xids.get(bus_id.partition(".")[0], ()))


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


def _xids(host: Host) -> dict[str, list[int]] | None:
    """By bus id without the function, as the driver prints it: "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen ..."."""
    try:
        lines = host.kernel_log("NVRM: Xid")
    except OSError:
        return None
    found: dict[str, list[int]] = {}
    for line in lines:
        if match := re.search(r"NVRM: Xid \(PCI:([0-9a-f:]{8,16})\): (\d{1,4})\b", line, re.ASCII | re.IGNORECASE):
            found.setdefault(match[1].lower(), []).append(int(match[2]))
    return found


def _gpu(host: Host, index: int, xids: dict[str, list[int]] | None) -> Gpu:
    ask = _Asker(host, GpuHandle(index))
    try:
        pci = host.nvml("nvmlDeviceGetPciInfo", ask.handle)
    except NvmlError as error:
        return Gpu(index=index, bus_id=None, error=f"{error.name} ({error.symbol})")
    bus_id = sysfs_bus_id(pci["busId"])
    capability = pair_of_ints(ask("nvmlDeviceGetCudaComputeCapability"))
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
        gpu_numa_node=non_negative(ask.count("nvmlDeviceGetNumaNodeId")),
        cpu_affinity=cpu_list(ask("nvmlDeviceGetCpuAffinity", AFFINITY_WORDS)),
        nvlinks=links,
        nvlinks_known=known,
        pcie_generation=ask.count("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask.count("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask.count("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask.count("nvmlDeviceGetMaxPcieLinkWidth"),
        link_in_sysfs=host.exists(f"/sys/bus/pci/devices/{bus_id}/current_link_width") if bus_id else False,
        pcie_replays=ask.count("nvmlDeviceGetPcieReplayCounter"),
        bar1_bytes=ask.field("nvmlDeviceGetBAR1MemoryInfo", "bar1Total"),
        mig_enabled=bool(mig[0]) if mig else None,
        c2c_links=_c2c_links(ask),
        fabric_state=named(FABRIC, fabric.get("state")),
        fabric_clique=fabric_clique(fabric),
        fabric_degraded=fabric_degraded(fabric.get("healthMask")),
        ecc_uncorrected=ask.count("nvmlDeviceGetTotalEccErrors", 1, 0),
        ecc_corrected=ask.count("nvmlDeviceGetTotalEccErrors", 0, 0),
        remapped_rows_uncorrectable=remapped[1],
        remapping_pending=flag(remapped[2]),
        remapping_failed=flag(remapped[3]),
        retired_pages=_retired_pages(ask),
        temperature_celsius=_temperature(ask),
        temperature_slowdown_celsius=ask.number("nvmlDeviceGetTemperatureThreshold", 1),
        power_watts=ask.number("nvmlDeviceGetPowerUsage", scale=1e-3),
        power_limit_watts=limit,
        power_limit_default_watts=ask.number("nvmlDeviceGetPowerManagementDefaultLimit", scale=1e-3),
        sm_clock_hertz=ask.number("nvmlDeviceGetClockInfo", 1, scale=1e6),
        sm_clock_max_hertz=ask.number("nvmlDeviceGetMaxClockInfo", 1, scale=1e6),
        throttle_reasons=_throttle_reasons(ask),
        utilization_ratio=ratio(ask.field("nvmlDeviceGetUtilizationRates", "gpu")),
        persistence_mode=flag(ask("nvmlDeviceGetPersistenceMode")),
        compute_mode=named(COMPUTE_MODES, ask("nvmlDeviceGetComputeMode")),
        processes=processes(ask("nvmlDeviceGetComputeRunningProcesses")),
        xids=_of(xids, bus_id),
        error=ask.lost,
    )


def _pair(host: Host, a: int, b: int) -> GpuPair:
    ask = _Asker(host, GpuHandle(a))
    level = ask("nvmlDeviceGetTopologyCommonAncestor", GpuHandle(b))
    read_, write, nvlink, atomics, pcie = (
        named(P2P, ask("nvmlDeviceGetP2PStatus", GpuHandle(b), capability)) for capability in range(5)
    )
    return GpuPair(
        a=a,
        b=b,
        ancestor=ANCESTORS.get(level) if isinstance(level, int) else None,
        p2p_read=read_,
        p2p_write=write,
        p2p_nvlink=nvlink,
        p2p_atomics=atomics,
        p2p_pcie=pcie,
    )


def _numa_node(ask: _Asker, bus_id: str | None) -> int | None:
    """Sysfs knows best; where it says -1 (a VM), NVML's mask counts if it has one node."""
    node = sysfs.number(ask.host, f"/sys/bus/pci/devices/{bus_id}/numa_node")
    if node is not None and node >= 0:
        return node
    nodes = cpu_list(ask("nvmlDeviceGetMemoryAffinity", 1, 0))
    return int(nodes) if nodes and nodes.isdecimal() else None


def _c2c_links(ask: _Asker) -> int | None:
    values = ask("nvmlDeviceGetFieldValues", _C2C_LINK_COUNT)
    return values[0] if values else None


def _temperature(ask: _Asker) -> float | None:
    """Of the die (sensor 0); CUDA 14 drops the first spelling."""
    found = ask.number("nvmlDeviceGetTemperature", 0)
    return found if found is not None else ask.number("nvmlDeviceGetTemperatureV", 0)


def _retired_pages(ask: _Asker) -> int | None:
    """Pages retired for single-bit (cause 0) and double-bit (1) errors; Ampere and later remap rows instead."""
    by_cause = [ask("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]
    return None if None in by_cause else sum(len(pages) for pages in by_cause)


def _throttle_reasons(ask: _Asker) -> tuple[str, ...] | None:
    mask = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    if mask is None:  # the older spelling is answered by every driver so far, but it is the one to go
        mask = ask("nvmlDeviceGetCurrentClocksEventReasons")
    return None if mask is None else tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit)

"""Asks NVML about every GPU and every pair; see `probes.gpu.probe`.

Specification: NVML API reference. Counters and modes that a GPU does not support answer NOT_SUPPORTED: None here. What
failed in another way is None too, and named in `unread`.

The order counts where a driver is slow and its time ends before the questions do: who the GPUs are, then what is wrong
with them, then how they are joined; one kind of question is put to every GPU before the next.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from probes.api import UnavailableError
from probes.gpu.answers import (
    ANCESTORS,
    COMPUTE_MODES,
    FABRIC,
    FABRIC_SUMMARIES,
    LOST,
    P2P,
    THROTTLE_REASONS,
    Asker,
    LinkStates,
    cpu_list,
    does_not_apply,
    fabric_clique,
    fabric_degraded,
    fabric_faults,
    fabric_status,
    flag,
    link_states,
    mig_slices,
    named,
    non_negative,
    nvlinks,
    pair_of_ints,
    processes,
    ratio,
    recovery_action,
    settle,
    xid_of_line,
)
from probes.gpu.bus import PCI, read_bus
from probes.gpu.facts import Gpu, GpuFacts, GpuPair
from probes.host import sysfs
from probes.host.nvml import HANDLE, INIT, NO_DEVICE_FILES, XIDS, sysfs_bus_id
from probes.host.protocol import GpuHandle, Host, Json, NvmlError

GPUS_MAX = 64  # NVML lists GPUs, not MIG slices; no host has more
AFFINITY_WORDS = 32  # of 64 CPUs each: Linux' largest NR_CPUS on x86 is 8192, the largest server has under 2048

SLOW_SECONDS_PER_CALL = 0.01
"""An 8-GPU host with NVSwitch is asked some 1,000 questions at first: at this pace they take 10 s of the probe's 45."""

_NO_DRIVER = {"LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH"}
_MODULE, _CONTROL = "/sys/module/nvidia/version", "/dev/nvidiactl"
_C2C_LINK_COUNT = 170  # NVML_FI_DEV_C2C_LINK_COUNT
# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, _BANK_REMAPPER_HISTOGRAM_NONE, _PENDING_BANK_REMAPPING, _NVLINK_LINK_COUNT
_RECOVERY, _BANKS_EXHAUSTED, _BANK_PENDING, _LINK_COUNT = 230, 306, 307, 91
_MEASURED_SECONDS, _MEASURED_CALLS = 1.0, 20  # fewer say nothing of the driver's pace
_KEPT_SECONDS = 20e-6  # an answer that comes faster was kept, not asked for


class _Paced:
    """A host whose driver's pace is taken: calls that took time, and how long they took together."""

    def __init__(self, host: Host) -> None:
        self.host, self.calls, self.seconds = host, 0, 0.0

    def __getattr__(self, method: str) -> Any:
        """Every other question is passed on."""
        return getattr(self.host, method)

    def nvml(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """One NVML call."""
        start = time.perf_counter()
        try:
            return self.host.nvml(symbol, *arguments)
        finally:
            took = time.perf_counter() - start
            if took > _KEPT_SECONDS:
                self.calls, self.seconds = self.calls + 1, self.seconds + took

    @property
    def seconds_per_call(self) -> float | None:
        """Where the driver is slow."""
        if self.seconds < _MEASURED_SECONDS or self.calls < _MEASURED_CALLS:
            return None
        pace = self.seconds / self.calls
        return pace if pace >= SLOW_SECONDS_PER_CALL else None


_Found = dict[str, Any]  # fields of `Gpu`


def read(host: Host) -> GpuFacts:
    """Ask everything. Raises UnavailableError where there is neither a driver nor an NVIDIA GPU."""
    bus = read_bus(host)
    addresses = None if bus is None else tuple(gpu.bus_id for gpu in bus.gpus)
    on_bus = None if addresses is None else len(addresses)
    unread: tuple[str, ...] = ()
    try:
        count = host.nvml("nvmlDeviceGetCount")  # the first call: it loads and initialises the library
    except NvmlError as error:
        if error.name in _NO_DRIVER and not on_bus:
            raise UnavailableError(f"no NVIDIA GPU of this host on the PCI bus, and no driver ({error})") from None
        symbol = INIT if error.name in _NO_DRIVER else error.symbol
        hidden = error.name == "DRIVER_NOT_LOADED" and host.exists(_MODULE) and not host.exists(_CONTROL)
        unusable = GpuFacts(
            driver_version=None, cuda_version=None, gpus=(), driver_error_symbol=symbol,
            driver_error=NO_DEVICE_FILES if hidden else error.name,
            pci_gpus=on_bus, bus=bus,
        )  # fmt: skip
        if symbol == INIT or not on_bus:
            return unusable
        unread, count = (f"nvmlDeviceGetCount = {error.name}",), on_bus  # the GPUs may answer all the same
    if not isinstance(count, int) or not 0 <= count <= GPUS_MAX:
        raise ValueError(f"nvmlDeviceGetCount = {count!r}: not a number of GPUs between 0 and {GPUS_MAX}")
    xids = _xids(host)
    paced = _Paced(host)
    asks = [Asker(cast("Host", paced), GpuHandle(index)) for index in range(count)]
    gpus = _gpus(asks)
    if unread and all(gpu.error is not None for gpu in gpus):
        return unusable
    events, why = _xid_events(cast("Host", paced), count)
    gpus = tuple(
        replace(gpu, xids=_of(xids, gpu.bus_id), xid_events=None if events is None else events.get(gpu.index))
        for gpu in gpus
    )
    return GpuFacts(
        driver_version=_driver_text(host, "nvmlSystemGetDriverVersion"),
        cuda_version=_cuda_version(host),
        gpus=_placed(gpus, addresses or (), xids),
        pairs=_pairs(cast("Host", paced), [gpu.index for gpu in gpus if gpu.error is None]),
        pci_gpus=on_bus,
        bus=bus,
        xids_off_bus=_off_bus(host, xids or {}),
        seconds_per_call=paced.seconds_per_call,
        unread=(*unread, *why),
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


def _off_bus(host: Host, xids: dict[str, list[int]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Xids of places where sysfs shows no device, of whatever driver; none where sysfs does not tell."""
    try:
        present = {name.rpartition(".")[0].lower() for name in host.list_dir(PCI)} if xids else set()
    except OSError:
        return ()
    return tuple((place, tuple(numbers)) for place, numbers in xids.items() if present and place not in present)


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
    """By bus id without the function, in the order of the kernel's log; None where it is not readable."""
    try:
        lines = host.kernel_log("NVRM: Xid")
    except OSError:
        return None
    found: dict[str, list[int]] = {}
    for line in lines:
        if (parsed := xid_of_line(line)) is not None:
            found.setdefault(parsed[0], []).append(parsed[1])
    return found


def _xid_events(host: Host, count: int) -> tuple[dict[int, tuple[int, ...]] | None, tuple[str, ...]]:
    """(Xids by GPU that NVML reported since it was first asked; None where it reports none, what was left unread)."""
    try:
        answer = host.nvml(XIDS, count)
    except NvmlError as error:
        gone = does_not_apply(error) or error.name == "FUNCTION_NOT_FOUND"
        return None, () if gone else (f"{error.symbol} = {error.name}",)
    found: dict[int, tuple[int, ...]] = dict.fromkeys(answer["watched"], ())
    for index, number in answer["xids"]:
        found[index] = (*found.get(index, ()), number)
    return found, ()


def _gpus(asks: list[Asker]) -> tuple[Gpu, ...]:
    """Every GPU, one stage of questions after the other; a GPU that the driver does not give is asked no more."""
    found: list[_Found] = [_identity(ask) for ask in asks]
    readable = [(ask, facts) for ask, facts in zip(asks, found, strict=True) if "error" not in facts]
    for stage in _FIRST:
        for ask, facts in readable:
            facts.update(stage(ask))
    states = {ask.handle.index: link_states(ask) for ask, _ in readable}
    by_model: dict[Any, list[LinkStates]] = defaultdict(list)
    for ask, facts in readable:
        by_model[facts["name"]].append(states[ask.handle.index])
    for twins in by_model.values():
        for one in twins:
            settle(one, twins)
    for stage in _THEN:
        for ask, facts in readable:
            facts.update(stage(ask))
    for ask, facts in readable:
        mine = states[ask.handle.index]
        facts.update(nvlinks_known=mine.known, nvlinks=nvlinks(ask, mine.states, facts["compute_capability"]))
    for stage in _LAST:
        for ask, facts in readable:
            facts.update(stage(ask))
    for ask, facts in readable:
        bus_id = facts["bus_id"]
        facts.update(numa_node=_numa_node(ask, bus_id), link_in_sysfs=_width_in_sysfs(ask.host, bus_id), error=ask.lost)
    return tuple(
        Gpu(index=ask.handle.index, unread=tuple(ask.unread), **facts) for ask, facts in zip(asks, found, strict=True)
    )


def _identity(ask: Asker) -> _Found:
    """Who the GPU is; "error" where the driver does not give it."""
    refused = None
    bus_id = None
    try:
        bus_id = sysfs_bus_id(ask.host.nvml("nvmlDeviceGetPciInfo", ask.handle)["busId"])
    except NvmlError as error:
        refused = f"{error.name} ({error.symbol})"
        if error.symbol == HANDLE or error.name in LOST:
            return {"bus_id": None, "error": refused}
        ask.note("nvmlDeviceGetPciInfo", (), error.name)
    memory = ask("nvmlDeviceGetMemoryInfo") or {}
    found = {
        "bus_id": bus_id,
        "uuid": ask("nvmlDeviceGetUUID"),
        "name": ask("nvmlDeviceGetName"),
        "memory_bytes": memory.get("total"),
        "memory_used_bytes": memory.get("used"),
        "compute_capability": pair_of_ints(ask("nvmlDeviceGetCudaComputeCapability")),
    }
    # Older recordings hold a refused handle as the answer to the first question alone.
    if refused and found["uuid"] is None and found["name"] is None:
        return {"bus_id": None, "error": refused}
    return found


def _faults(ask: Asker) -> _Found:
    remapped = ask("nvmlDeviceGetRemappedRows")
    banks = (ask("nvmlDeviceGetRowRemapperHistogram") or {}) if remapped else {}  # it knows no NOT_SUPPORTED
    remapped = remapped or (None, None, None, None)
    action, exhausted, pending, ask.link_count = ask.fields(_RECOVERY, _BANKS_EXHAUSTED, _BANK_PENDING, _LINK_COUNT)
    mig = ask("nvmlDeviceGetMigMode")
    split = bool(mig[0]) if mig else None
    return {
        "recovery_action": recovery_action(action),
        "ecc_uncorrected": ask.count("nvmlDeviceGetTotalEccErrors", 1, 0),
        "remapped_rows_uncorrectable": remapped[1],
        "remapping_pending": flag(remapped[2] or pending) if remapped[2] is not None else flag(pending),
        "remapping_failed": flag(remapped[3]),
        "remap_banks_exhausted": max((n for n in (banks.get("none"), exhausted) if n is not None), default=None),
        "mig_enabled": split,
        "mig_slices": mig_slices(ask) if split else () if split is False else None,
        "throttle_reasons": _throttle_reasons(ask),
        "temperature_celsius": _temperature(ask),
    }


def _load(ask: Asker) -> _Found:
    return {
        "sm_clock_hertz": ask.number("nvmlDeviceGetClockInfo", 1, scale=1e6),
        "sm_clock_max_hertz": ask.number("nvmlDeviceGetMaxClockInfo", 1, scale=1e6),
        "utilization_ratio": ratio(ask.field("nvmlDeviceGetUtilizationRates", "gpu")),
        "processes": processes(ask("nvmlDeviceGetComputeRunningProcesses")),
        "compute_mode": named(COMPUTE_MODES, ask("nvmlDeviceGetComputeMode")),
    }


def _fabric(ask: Asker) -> _Found:
    fabric = ask("nvmlDeviceGetGpuFabricInfoV") or ask("nvmlDeviceGetGpuFabricInfo") or {}
    state = fabric.get("state")
    if state is not None and named(FABRIC, state) is None:
        ask.note("nvmlDeviceGetGpuFabricInfoV", (), f"state {state}, which nvml.h does not name")
    return {
        "fabric_state": named(FABRIC, state),
        "fabric_clique": fabric_clique(fabric),
        "fabric_status": fabric_status(fabric),
        "fabric_degraded": fabric_degraded(fabric.get("healthMask")),
        "fabric_faults": fabric_faults(fabric.get("healthMask")),
        "fabric_summary": named(FABRIC_SUMMARIES, fabric.get("healthSummary")),
    }


def _pcie(ask: Asker) -> _Found:
    return {
        "pcie_width": ask.count("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_width_max": ask.count("nvmlDeviceGetMaxPcieLinkWidth"),
        "pcie_generation": ask.count("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_generation_max": ask.count("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_replays": ask.count("nvmlDeviceGetPcieReplayCounter"),
    }


def _limits(ask: Asker) -> _Found:
    return {
        "power_limit_watts": ask.number("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3),
        "power_limit_default_watts": ask.number("nvmlDeviceGetPowerManagementDefaultLimit", scale=1e-3),
        "temperature_slowdown_celsius": ask.number("nvmlDeviceGetTemperatureThreshold", 1),
    }


def _ecc(ask: Asker) -> _Found:
    mode = ask("nvmlDeviceGetEccMode")
    default = ask("nvmlDeviceGetDefaultEccMode") if mode else None
    sram = ask("nvmlDeviceGetSramEccErrorStatus") or {}
    return {
        "ecc_enabled": bool(mode[0]) if mode else None,
        "ecc_pending": bool(mode[1]) if mode else None,
        "ecc_default": bool(default[0]) if default else None,
        "ecc_corrected": ask.count("nvmlDeviceGetTotalEccErrors", 0, 0),
        "ecc_uncorrected_lifetime": ask.count("nvmlDeviceGetTotalEccErrors", 1, 1),
        "sram_threshold_exceeded": flag(sram.get("bThresholdExceeded")),
        "sram_uncorrected": _sum(sram, "volatileUncParity", "volatileUncSecDed"),
        "sram_uncorrected_lifetime": _sum(sram, "aggregateUncParity", "aggregateUncSecDed"),
        "retired_pages": _retired_pages(ask),
    }


def _sum(answer: dict[str, Any], *names: str) -> int | None:
    values = [answer.get(name) for name in names]
    return None if None in values else sum(cast("list[int]", values))


def _rest(ask: Asker) -> _Found:
    return {
        "c2c_links": ask.fields(_C2C_LINK_COUNT)[0],
        "c2c_enabled": flag(ask.field("nvmlDeviceGetC2cModeInfoV", "isC2cEnabled")),
        "bar1_bytes": ask.field("nvmlDeviceGetBAR1MemoryInfo", "bar1Total"),
        "power_watts": ask.number("nvmlDeviceGetPowerUsage", scale=1e-3),
        "persistence_mode": flag(ask("nvmlDeviceGetPersistenceMode")),
        "gpu_numa_node": non_negative(ask.count("nvmlDeviceGetNumaNodeId")),
        "cpu_affinity": cpu_list(ask("nvmlDeviceGetCpuAffinity", AFFINITY_WORDS)),
    }


_FIRST: tuple[Callable[[Asker], _Found], ...] = (_faults, _load, _fabric)
_THEN: tuple[Callable[[Asker], _Found], ...] = (_pcie,)
_LAST: tuple[Callable[[Asker], _Found], ...] = (_limits, _ecc, _rest)


def _pairs(host: Host, answering: list[int]) -> tuple[GpuPair, ...]:
    """What joins two GPUs, for all pairs, before what their P2P can do in detail."""
    asks = {(a, b): Asker(host, GpuHandle(a)) for a in answering for b in answering if a < b}
    found: dict[tuple[int, int], list[Any]] = {pair: [] for pair in asks}
    for (_, b), ask in asks.items():
        found[ask.handle.index, b].append(ask("nvmlDeviceGetTopologyCommonAncestor", GpuHandle(b)))
    for capability in (2, 0, 1, 3, 4):  # NVLink, read, write, atomics, PCIe: nvmlGpuP2PCapsIndex_t
        for (a, b), ask in asks.items():
            found[a, b].append(ask("nvmlDeviceGetP2PStatus", GpuHandle(b), capability))
    made = []
    for (a, b), (level, *statuses) in found.items():
        nvlink, read_, write, atomics, pcie = (named(P2P, status) for status in statuses)
        made.append(
            GpuPair(
                a=a,
                b=b,
                ancestor=ANCESTORS.get(level) if isinstance(level, int) else None,
                p2p_read=read_,
                p2p_write=write,
                p2p_nvlink=nvlink,
                p2p_atomics=atomics,
                p2p_pcie=pcie,
                unread=tuple(asks[a, b].unread),
            )
        )
    return tuple(made)


def _width_in_sysfs(host: Host, bus_id: str | None) -> bool:
    """Whether the pci probe can judge the link: a file may be there and say nothing (0, 255 or "Unknown")."""
    folder = f"/sys/bus/pci/devices/{bus_id}"
    widths = [sysfs.number(host, f"{folder}/{end}_link_width") for end in ("current", "max")] if bus_id else []
    return bool(widths) and all(width is not None and 0 < width <= 32 for width in widths)


def _numa_node(ask: Asker, bus_id: str | None) -> int | None:
    """Sysfs knows best; where it says -1 (a VM), NVML's mask counts if it has one node."""
    node = sysfs.number(ask.host, f"/sys/bus/pci/devices/{bus_id}/numa_node")
    if node is not None and node >= 0:
        return node
    nodes = cpu_list(ask("nvmlDeviceGetMemoryAffinity", 1, 0))
    return int(nodes) if nodes and nodes.isdecimal() else None


def _temperature(ask: Asker) -> float | None:
    """Of the die (sensor 0); CUDA 14 drops the first spelling."""
    found = ask.either(("nvmlDeviceGetTemperature", 0), ("nvmlDeviceGetTemperatureV", 0))
    return found if isinstance(found, int | float) else None


def _retired_pages(ask: Asker) -> int | None:
    """Pages retired for single-bit (cause 0) and double-bit (1) errors; Ampere and later remap rows instead."""
    by_cause = [ask("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]
    return None if None in by_cause else sum(len(pages) for pages in by_cause)


def _throttle_reasons(ask: Asker) -> tuple[str, ...] | None:
    """The older spelling is answered by every driver so far, but it is the one to go."""
    mask = ask.either(("nvmlDeviceGetCurrentClocksThrottleReasons",), ("nvmlDeviceGetCurrentClocksEventReasons",))
    return None if mask is None else tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit)

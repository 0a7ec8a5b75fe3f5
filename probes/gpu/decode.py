"""What NVML's numbers mean: enumerations, bit masks and "not available" values; part of `probes.gpu.read`.

Specification: NVML API reference, enumerations. A number that no release documents is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from probes.gpu.types import GpuProcess
from probes.host.nvml import ERROR_NAMES

ANCESTORS = {0: "INTERNAL", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t
P2P = (  # nvmlGpuP2PStatus_t
    "ok", "chipset_not_supported", "gpu_not_supported", "topology_not_supported", "disabled_by_regkey",
    "not_supported", "unknown",
)  # fmt: skip
FABRIC = ("not_supported", "not_started", "in_progress", "completed")  # nvmlGpuFabricState_t
FABRIC_SUMMARIES = (None, "healthy", "unhealthy", "limited_capacity")  # NVML_GPU_FABRIC_HEALTH_SUMMARY_*
RECOVERY_ACTIONS = (  # nvmlDeviceGpuRecoveryAction_t
    "none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain", "bus_reset",
    "system_reboot",
)  # fmt: skip
COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
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


def fabric_clique(fabric: dict[str, Any]) -> str | None:
    """None for the all-zero cluster id of a single NVSwitch host: two such hosts share no domain.

    The status counts in state "completed" only, and a clique of a probe that failed is none (NCCL: src/mnnvl.cc).
    """
    cluster = bytes(fabric.get("clusterUuid") or ())
    if fabric.get("state") != 3 or fabric.get("status") or not any(cluster):
        return None
    return f"{cluster.hex()}/{fabric['cliqueId']}"


def fabric_status(fabric: dict[str, Any]) -> str | None:
    """The error with which the fabric's probe of the GPU completed; None where it succeeded, or is not done."""
    status = fabric.get("status")
    if fabric.get("state") != 3 or not isinstance(status, int) or status == 0:
        return None
    return ERROR_NAMES.get(status, f"CODE_{status}")


def fabric_degraded(mask: int | None) -> bool | None:
    """Bits 0 and 1 of the health mask: 1 degraded, 2 not, 0 unknown."""
    return {1: True, 2: False}.get(mask & 3) if mask is not None else None


def fabric_faults(mask: int | None) -> tuple[str, ...] | None:
    """The other fields of the health mask that tell of a fault; None where the mask tells nothing.

    nvml.h: NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_* and _WIDTH_*. In a field of two bits 1 is the fault and 2 its absence,
    but for the partition and the fabric manager, where 1 is well. Of the configuration 1 is correct.
    """
    if not mask:
        return None
    faults = [name for name, (shift, bad) in _FABRIC_FAULTS.items() if mask >> shift & 3 == bad]
    wrong = mask >> 8 & 0xF
    if wrong > 1:
        faults.append(_FABRIC_CONFIGURATIONS.get(wrong, f"incorrect_configuration_{wrong}"))
    return tuple(faults)


_FABRIC_FAULTS = {
    "route_recovery": (2, 1), "route_unhealthy": (4, 1), "access_timeout_recovery": (6, 1),
    "partition_not_assigned": (12, 2), "fabric_manager_disconnected": (14, 2),
}  # fmt: skip
_FABRIC_CONFIGURATIONS = {
    2: "incorrect_system_guid", 3: "incorrect_chassis_serial", 4: "no_partition", 5: "insufficient_nvlinks",
    6: "incompatible_gpu_firmware", 7: "invalid_location", 8: "gpu_state_invalid",
}  # fmt: skip


def processes(answer: Any) -> tuple[GpuProcess, ...] | None:
    """Compute processes; a process of another container has no memory figure."""
    if answer is None:
        return None
    return tuple(GpuProcess(pid=p["pid"], memory_bytes=_memory(p["usedGpuMemory"])) for p in answer)


def recovery_action(number: int | None) -> str | None:
    """nvmlDeviceGpuRecoveryAction_t; an action that no header names yet is one all the same."""
    return None if number is None else named(RECOVERY_ACTIONS, number) or f"action_{number}"


def _memory(value: int | None) -> int | None:
    return None if value == _NOT_AVAILABLE else value


def named(names: Sequence[str | None], number: Any) -> str | None:
    """The name of an enumeration's number."""
    return names[number] if isinstance(number, int) and 0 <= number < len(names) else None


def flag(value: Any) -> bool | None:
    """NVML's 0 and 1."""
    return None if value is None else bool(value)


def ratio(percent: Any) -> float | None:
    """Percent as a ratio; nonsense is None."""
    return percent / 100 if isinstance(percent, int) and 0 <= percent <= 100 else None


def non_negative(number: int | None) -> int | None:
    """A NUMA node; -1 is none."""
    return number if number is not None and number >= 0 else None


def pair_of_ints(answer: Any) -> tuple[int, int] | None:
    """(major, minor)."""
    return (answer[0], answer[1]) if answer else None

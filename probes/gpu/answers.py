"""NVML's answers about one GPU: what was answered and what it means, what does not apply, what was left unread and why.

Specification: NVML API reference (nvml.h): return codes of each function, enumerations, NvLink methods and
NVML_FI_DEV_NVLINK_* fields. NOT_SUPPORTED is an answer: the board has no such thing. Every other error leaves the fact
unknown, and is kept with the question that it answered. A number that no release documents is None.

NVLinks: state 0 is a link without a partner, a bridge that is not fitted or a broken one. INVALID_ARGUMENT is a link
that the board does not have, NOT_SUPPORTED on link 0 a board without NVLink. Any other error says nothing of the link:
its state, or where it ends, is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from probes.gpu.facts import LINKS_MAX, UNREAD, GpuProcess, MigSlice, NvLink
from probes.host.nvml import ERROR_NAMES, MIG_SLICE, sysfs_bus_id
from probes.host.protocol import GpuHandle, Host, NvmlError

MIG_MAX = 64  # slices of a GPU: A100 to B300 have seven
LOST = frozenset({"GPU_IS_LOST", "RESET_REQUIRED"})
_NOT_THERE = frozenset({"NOT_SUPPORTED", "VGPU_ECC_NOT_SUPPORTED", "FREQ_NOT_SUPPORTED", "NO_DATA"})
"""The board, its mode or its InfoROM has none: nothing is left to know."""

# An older driver lacks these functions, or knows an older form of their structure; all others are of every driver that
# the fields of `probes.gpu.facts` are read from.
_RECENT = frozenset(
    {
        "nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetC2cModeInfoV", "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetGpuFabricInfo", "nvmlDeviceGetNumaNodeId", "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetRowRemapperHistogram", "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetDefaultEccMode", "nvmlDeviceGetFieldValues", "nvmlDeviceGetRemappedRows",
    }
)  # fmt: skip
_OLD_DRIVER = frozenset({"FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED"})


def does_not_apply(error: NvmlError) -> bool:
    """Whether the error says that this board or this driver has no such thing."""
    if (error.symbol, error.name) == (MIG_SLICE, "NOT_FOUND"):  # an empty place
        return True
    return error.name in _NOT_THERE or (error.name in _OLD_DRIVER and error.symbol in _RECENT)


class Asker:
    """One GPU's questions: what it does not answer, or answers with nonsense, is None."""

    def __init__(self, host: Host, handle: GpuHandle) -> None:
        self.host, self.handle = host, handle
        self.lost: str | None = None
        self.link_count: int | None = None  # NVLinks of the board, where the driver counts them
        self.unread: dict[str, None] = {}  # "nvmlDeviceGetTemperature(0) = TIMEOUT", once each

    def __call__(self, symbol: str, *arguments: GpuHandle | int | str) -> Any:
        """The answer; None where there is none, and `unread` or `lost` says why."""
        try:
            return self.host.nvml(symbol, self.handle, *arguments)
        except NvmlError as error:
            if self._leaves_unread(error):
                self.note(symbol, arguments, error.name)
            return None

    def _leaves_unread(self, error: NvmlError) -> bool:
        """Whether something is left to know; a GPU that is lost is told once."""
        if error.name in LOST:
            self.lost = f"{error.name} ({error.symbol})"
            return False
        return not does_not_apply(error)

    def either(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> Any:
        """The answer to the first spelling of a question, else to the second; each (symbol, arguments...)."""
        known = dict(self.unread)
        answer = self(*first)
        if answer is None and (answer := self(*second)) is not None:
            self.unread = known
        return answer

    def note(self, symbol: str, arguments: tuple[GpuHandle | int | str, ...], why: str) -> None:
        """Keep that a question was not answered."""
        words = ", ".join(f"GPU{a.index}" if isinstance(a, GpuHandle) else str(a) for a in arguments[:3])
        words += f", {len(arguments) - 3} more" if len(arguments) > 3 else ""
        self.unread[f"{symbol}({words}) = {why}" if words else f"{symbol} = {why}"] = None

    def number(self, symbol: str, *arguments: int | str, scale: float = 1.0) -> float | None:
        """A number in base units."""
        answer = self(symbol, *arguments)
        return answer * scale if isinstance(answer, int | float) else None

    def count(self, symbol: str, *arguments: int | str) -> int | None:
        """A whole number."""
        answer = self(symbol, *arguments)
        return answer if isinstance(answer, int) else None

    def field(self, symbol: str, name: str) -> Any:
        """One field of a structure."""
        answer = self(symbol)
        return answer.get(name) if isinstance(answer, dict) else None

    def fields(self, *fields: int | str) -> list[int | None]:
        """Values of nvmlDeviceGetFieldValues in the same order; each field has a return code of its own."""
        symbol = "nvmlDeviceGetFieldValues"
        try:
            values = self.host.nvml(symbol, self.handle, *fields)
        except NvmlError as error:
            if self._leaves_unread(error):
                for number in (field for field in fields if isinstance(field, int)):
                    self.note(symbol, (number,), error.name)  # each has checks of its own that rest on it
                if of_links := tuple(field for field in fields if isinstance(field, str)):
                    self.note(symbol, of_links, error.name)
            return [None] * len(fields)
        if not isinstance(values, list) or len(values) != len(fields):
            return [None] * len(fields)
        for field_id, value in zip(fields, values, strict=True):
            if isinstance(value, str):  # the name of an error
                self.note("nvmlDeviceGetFieldValues", (field_id,), value)
        return [value if isinstance(value, int) else None for value in values]


_REMOTE_KINDS = {0: "gpu", 1: "cpu", 2: "nvswitch"}  # nvmlIntNvLinkDeviceType_t; 1 is IBM's NPU
_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}  # nvmlNvlinkVersion_t: 1.0 2.0 2.2 3.0 3.1 4.0 5.0 6.0
_ERRORS = ("replay", "recovery", "crc_flit", "crc_data")  # nvmlNvLinkErrorCounter_t 0 to 3
_ERROR_FIELDS = {  # NVML_FI_DEV_NVLINK_*, scope is the link: the first three on Hopper, the others from Blackwell on
    161: "replay",  # ERROR_DL_REPLAY
    162: "recovery",  # ERROR_DL_RECOVERY
    163: "crc_flit",  # ERROR_DL_CRC
    208: "receive",  # COUNT_RCV_ERRORS
    214: "recovery_failed",  # COUNT_LINK_RECOVERY_FAILED_EVENTS
    219: "effective",  # COUNT_EFFECTIVE_ERRORS
    221: "symbol",  # COUNT_SYMBOL_ERRORS
}


@dataclass(slots=True)
class LinkStates:
    """Up (True), down (False) or unread (None) by link; `known` where the driver told of one, or that there is none."""

    known: bool
    states: dict[int, bool | None] = field(default_factory=dict)
    absent: bool = False  # NOT_SUPPORTED: the board has no NVLink
    unlisted: set[int] = field(default_factory=set)  # INVALID_ARGUMENT: no such link


def link_states(ask: Asker) -> LinkStates:
    """Ask every link that a board may have for its state."""
    found = LinkStates(known=True)
    for link in range(LINKS_MAX):
        if ask.link_count and len(found.states) >= ask.link_count:
            break  # the others are not there, and a slow driver need not say so one by one
        try:
            state = ask.host.nvml("nvmlDeviceGetNvLinkState", ask.handle, link)
        except NvmlError as error:
            if error.name == "NOT_SUPPORTED" and link == 0:
                return LinkStates(known=True, absent=True)
            if error.name in ("INVALID_ARGUMENT", "NOT_SUPPORTED"):
                found.unlisted.add(link)
            else:
                ask.note("nvmlDeviceGetNvLinkState", (link,), error.name)
                found.states[link] = None
            continue
        if state not in (0, 1):
            ask.note("nvmlDeviceGetNvLinkState", (link,), f"{state!s:.20}, no state")
        found.states[link] = {0: False, 1: True}.get(state)
    found.known = found.states == {} or any(state is not None for state in found.states.values())
    return found


def settle(found: LinkStates, of_twins: Iterable[LinkStates]) -> None:
    """Take the number of links from all GPUs of one model: beyond it an unread link is none, below it none is left out.

    Where no GPU of the model tells a link's state, nothing is known of that link, not even that it exists.
    """
    known_links = {link for twin in of_twins for link, state in twin.states.items() if state is not None}
    found.states = {link: state for link, state in found.states.items() if state is not None or link in known_links}
    if not found.absent:
        found.states |= dict.fromkeys(found.unlisted & known_links)
    found.states = dict(sorted(found.states.items()))
    found.known = found.known and (not known_links or bool(found.states) or found.absent)


def nvlinks(ask: Asker, states: dict[int, bool | None], capability: tuple[int, int] | None) -> tuple[NvLink, ...]:
    """The links that exist. A link whose partner is missing is there and not active; an unread one is None."""
    errors = _errors(ask, [link for link, active in states.items() if active])
    return tuple(
        _active(ask, link, capability, errors.get(link)) if active else NvLink(link=link, active=active)
        for link, active in states.items()
    )


def _active(ask: Asker, link: int, capability: tuple[int, int] | None, errors: dict[str, int] | None) -> NvLink:
    version = _ask(ask, "nvmlDeviceGetNvLinkVersion", link)
    remote = _ask(ask, "nvmlDeviceGetNvLinkRemotePciInfo", link)
    kind = _ask(ask, "nvmlDeviceGetNvLinkRemoteDeviceType", link)
    return NvLink(
        link=link,
        active=True,
        version=None if version == UNREAD else _generation(version, capability),
        remote_kind=UNREAD if kind == UNREAD else _REMOTE_KINDS.get(kind),
        remote_bus_id=UNREAD if remote == UNREAD else sysfs_bus_id(remote["busId"]) if remote else None,
        errors=errors,
    )


def _generation(version: Any, capability: tuple[int, int] | None) -> int | None:
    """H100 answers 7 (5.0) for its fourth generation."""
    generation = _GENERATIONS.get(version)
    return 4 if generation == 5 and capability is not None and capability[0] == 9 else generation


def _errors(ask: Asker, links: list[int]) -> dict[int, dict[str, int]]:
    """Error counters by link: all of them in one call, else one by one as drivers before Hopper want it."""
    found: dict[int, dict[str, int]] = {}
    if links:
        wanted = [(number, link) for link in links for number in _ERROR_FIELDS]
        values = ask.fields(*(f"{number}:{link}" for number, link in wanted))
        for (number, link), value in zip(wanted, values, strict=True):
            if value is not None:
                found.setdefault(link, {})[_ERROR_FIELDS[number]] = value
    return found or {link: counters for link in links if (counters := _old_errors(ask, link))}


def _old_errors(ask: Asker, link: int) -> dict[str, int]:
    counters = {name: _ask(ask, "nvmlDeviceGetNvLinkErrorCounter", link, i) for i, name in enumerate(_ERRORS)}
    return {name: value for name, value in counters.items() if isinstance(value, int)}


def _ask(ask: Asker, symbol: str, *arguments: int) -> Any:
    """The answer; None where a hypervisor or the board has none, UNREAD where the driver failed to say."""
    try:
        return ask.host.nvml(symbol, ask.handle, *arguments)
    except NvmlError as error:
        if does_not_apply(error) or error.name == "INVALID_ARGUMENT":
            return None
        ask.note(symbol, arguments, error.name)
        return UNREAD


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


def mig_slices(ask: Asker) -> tuple[MigSlice, ...] | None:
    """Of a GPU with MIG on, in NVML's order; None where the driver did not tell of each."""
    most = ask.count("nvmlDeviceGetMaxMigDeviceCount")
    if most is None or not 0 <= most <= MIG_MAX:
        return None
    before = len(ask.unread)
    answers = [ask(MIG_SLICE, place) for place in range(most)]
    if len(ask.unread) > before or ask.lost:
        return None
    return tuple(
        MigSlice(uuid=one["uuid"], profile=_profile(one["name"]),
                 gpu_instance=one["gpuInstance"], compute_instance=one["computeInstance"])
        for one in answers if one is not None
    )  # fmt: skip


def _profile(name: str) -> str | None:
    match = _PROFILE.search(name)
    return match[1] if match else None


# nvmlDeviceGetName of a MIG device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "... MIG 1c.3g.40gb", "... MIG 1g.10gb+me"
_PROFILE = re.compile(r"\bMIG ((?:\d+c\.)?\d+g\.\d+gb(?:\+[\w.,+-]+)?)", re.ASCII)


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


# "NVRM: Xid (PCI:0000:1b:00): 79, ...", "NVRM: Xid (0000:03:00): 14, ..." of older drivers, "(PCI:0000:3b:00 GPU-I:05)"
# of a MIG slice.
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-f:]{7,16})[^)]{0,40}\): (\d{1,4})\b", re.ASCII | re.IGNORECASE)
_RECOVERED = re.compile(r"changed from .* to (?:0x0\b|.*\(None\))", re.IGNORECASE)


def xid_of_line(line: str) -> tuple[str, int] | None:
    """(bus id without the function, Xid) of a line of the kernel's log; None where it tells of no error.

    Xid 154 names the recovery action that the driver wants from now on: one that becomes "None" is no error.
    """
    found = _LINE.search(line)
    if found is None or (found[2] == "154" and _RECOVERED.search(line)):
        return None
    domain, _, place = found[1].lower().partition(":")
    if place.count(":") != 1:
        return None
    return f"{int(domain, 16):04x}:{place}", int(found[2])

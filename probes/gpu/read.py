"""Queries NVML about every GPU and every pair of GPUs, and translates the answers; see `probes.gpu.probe`.

Specification: NVML API reference (nvml.h): return codes of each function, enumerations, NvLink functions and
NVML_FI_DEV_NVLINK_* fields. NOT_SUPPORTED means that the board lacks the feature. A function or structure version that
this driver lacks is treated the same way. Any other error leaves the fact unknown and is recorded in `unread`, as is a
number outside the range that `questions.toml` allows.

NVLinks: state 0 means that no peer is connected (no bridge installed, or a broken one). INVALID_ARGUMENT means that the
board does not have this link; NOT_SUPPORTED on link 0 means a board without NVLink. After any other error, the state of
the link, or its remote end, is unknown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from contracts.tables import read_table
from probes.api import UnavailableError
from probes.gpu.facts import MAX_LINKS, UNREAD, Gpu, GpuFacts, GpuPair, GpuProcess, NvLink, find_question
from probes.host import sysfs
from probes.host.nvml import ERROR_NAMES, HANDLE, INIT, NO_DEVICE_FILES, XIDS, sysfs_bus_id
from probes.host.protocol import GpuHandle, Host, NvmlError
from probes.pci.facts import DEVICES
from probes.pci.read import read_bus

MAX_GPUS = 64  # NVML lists GPUs, not MIG slices; no host has more GPUs
MAX_MEMORY = 1 << 42  # 4 TiB: today's largest boards have 288 GiB
MAX_PIDS = 1 << 22  # PID_MAX_LIMIT of Linux
AFFINITY_WORDS = 32  # of 64 CPUs each: Linux' largest NR_CPUS on x86 is 8192; the largest server has fewer than 2048
LOST = frozenset({"GPU_IS_LOST", "RESET_REQUIRED"})
_NOT_THERE = frozenset({"NOT_SUPPORTED", "VGPU_ECC_NOT_SUPPORTED", "FREQ_NOT_SUPPORTED", "NO_DATA"})
"""The board, its mode or its InfoROM lacks the feature, so no information is missing."""

_OLD_DRIVER = frozenset({"FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED"})
"""The driver is older (R470) or newer than this function or structure version, and cannot answer."""

_NO_DRIVER = {"LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH"}
_MODULE, _CONTROL = "/sys/module/nvidia/version", "/dev/nvidiactl"
_LINK_STATE = "nvmlDeviceGetNvLinkState"
_FIELDS = "nvmlDeviceGetFieldValues"
_C2C_LINK_COUNT = 170  # NVML_FI_DEV_C2C_LINK_COUNT
# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, _BANK_REMAPPER_HISTOGRAM_NONE, _PENDING_BANK_REMAPPING, _NVLINK_LINK_COUNT
_RECOVERY, _BANKS_EXHAUSTED, _BANK_PENDING, _LINK_COUNT = 230, 306, 307, 91

_NAMES: dict[str, dict[str, Any]] = read_table(__file__, "names.toml")
_Found = dict[str, Any]  # keyword arguments for `Gpu`


def translate(kind: str, number: Any) -> Any:
    """Translate a number of an NVML enumeration with `names.toml`; None if the table does not have it."""
    return _NAMES[kind].get(str(number)) if isinstance(number, int) else None


def does_not_apply(error: NvmlError) -> bool:
    """Whether the error means that the board or driver lacks the feature."""
    return error.name in _NOT_THERE or (error.name in _OLD_DRIVER and error.symbol != _LINK_STATE)


def format_question(symbol: str, arguments: Sequence[GpuHandle | int | str]) -> str:
    """Format an NVML call for reports: "nvmlDeviceGetTemperature(0)"."""
    text = ", ".join(f"GPU{a.index}" if isinstance(a, GpuHandle) else str(a) for a in arguments[:3])
    text += f", {len(arguments) - 3} more" if len(arguments) > 3 else ""
    return f"{symbol}({text})" if text else symbol


class NvmlCalls:
    """NVML calls for one GPU. A failed call or an invalid answer becomes None."""

    def __init__(self, host: Host, handle: GpuHandle) -> None:
        self.host, self.handle = host, handle
        self.lost: str | None = None
        self.link_count: int | None = None  # NVLinks of the board, if the driver reports the number
        self.unread: dict[str, None] = {}  # failed calls without duplicates: "nvmlDeviceGetTemperature(0) = TIMEOUT"

    def __call__(self, symbol: str, *arguments: GpuHandle | int | str) -> Any:
        """Return the answer. If there is none, return None and record the reason in `unread` or `lost`."""
        try:
            return self.query(symbol, *arguments)
        except NvmlError as error:
            if self._leaves_unread(error):
                self.note(symbol, arguments, error.name)
            return None

    def query(self, symbol: str, *arguments: GpuHandle | int | str) -> Any:
        """Return the answer, with out-of-range numbers replaced by None and recorded. Raises NvmlError."""
        answer = self.host.nvml(symbol, self.handle, *arguments)
        return self._drop_impossible(format_question(symbol, arguments), answer)

    def _drop_impossible(self, question: str, answer: Any) -> Any:
        """Return the answer with None in place of each number that is out of range."""
        row = find_question(question)
        if "range" in row:
            return self._check_range(question, answer, row["range"])
        if "items" in row and isinstance(answer, list) and len(answer) >= len(row["items"]):
            return [self._check_range(question, one, limits) for one, limits in zip(answer, row["items"], strict=False)]
        if "fields" in row and isinstance(answer, dict):
            fields = row["fields"]
            return answer | {
                name: self._check_range(question, answer[name], fields[name]) for name in fields if name in answer
            }
        if "items" in row or "fields" in row:
            return self._check_range(question, answer, (1, 0))
        return answer

    def _check_range(self, question: str, number: Any, limits: Sequence[int]) -> Any:
        if isinstance(number, int) and limits[0] <= number <= limits[1]:
            return number
        if number is not None:
            self.unread[f"{question} = {number!s:.24}, which is impossible"] = None
        return None

    def _leaves_unread(self, error: NvmlError) -> bool:
        """Whether the error leaves a fact unknown. The loss of a GPU is recorded once, in `lost`."""
        if error.name in LOST:
            self.lost = f"{error.name} ({error.symbol})"
            return False
        return not does_not_apply(error)

    def either(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> Any:
        """Return the answer of the first call, or if it fails of the second; each is (symbol, arguments...)."""
        before = dict(self.unread)
        answer = self(*first)
        if answer is None and (answer := self(*second)) is not None:
            self.unread = before
        return answer

    def note(self, symbol: str, arguments: tuple[GpuHandle | int | str, ...], error: str) -> None:
        """Record that a call was not answered."""
        self.unread[f"{format_question(symbol, arguments)} = {error}"] = None

    def numbers(self, symbol: str, count: int) -> Sequence[int | None]:
        """Return a list of `count` numbers; unknown numbers are None."""
        answer = self(symbol)
        return answer if isinstance(answer, list) and len(answer) == count else [None] * count

    def fields(self, *fields: int | str) -> list[int | None]:
        """Return the values of nvmlDeviceGetFieldValues in order; each field has its own return code."""
        try:
            values = self.host.nvml(_FIELDS, self.handle, *fields)
        except NvmlError as error:
            if self._leaves_unread(error):
                for number in (field for field in fields if isinstance(field, int)):
                    self.note(_FIELDS, (number,), error.name)  # other checks depend on each of these fields
                if of_links := tuple(field for field in fields if isinstance(field, str)):
                    self.note(_FIELDS, of_links, error.name)
            return [None] * len(fields)
        if not isinstance(values, list) or len(values) != len(fields):
            return [None] * len(fields)
        return [self._read_field(field_id, value) for field_id, value in zip(fields, values, strict=True)]

    def _read_field(self, field_id: int | str, value: Any) -> int | None:
        if isinstance(value, str):  # name of an NVML error
            self.note(_FIELDS, (field_id,), value)
            return None
        number = self._drop_impossible(format_question(_FIELDS, (field_id,)), value)
        return number if isinstance(number, int) else None


# The host -----------------------------------------------------------------------------------------------------------


def read(host: Host) -> GpuFacts:
    """Read all facts. Raises UnavailableError if the host has neither a driver nor an NVIDIA GPU."""
    bus = read_bus(host)
    addresses = None if bus is None else tuple(gpu.bus_id for gpu in bus.gpus)
    on_bus = None if addresses is None else len(addresses)
    unread: tuple[str, ...] = ()
    try:
        count = host.nvml("nvmlDeviceGetCount")  # the first call loads and initialises the library
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
        unread, count = (f"nvmlDeviceGetCount = {error.name}",), on_bus  # the GPUs may still answer
    if not isinstance(count, int) or not 0 <= count <= MAX_GPUS:
        raise ValueError(f"nvmlDeviceGetCount = {count!r}: not a number of GPUs between 0 and {MAX_GPUS}")
    xids = _read_xids(host)
    gpus = _read_gpus([NvmlCalls(host, GpuHandle(index)) for index in range(count)])
    if unread and all(gpu.error is not None for gpu in gpus):
        return unusable
    events, problems = _read_xid_events(host, count)
    gpus = tuple(
        replace(gpu, xids=_select_xids(xids, gpu.bus_id), xid_events=None if events is None else events.get(gpu.index))
        for gpu in gpus
    )
    if bus is not None:
        bus = replace(bus, gpus=tuple(replace(gpu, xids=_select_xids(xids, gpu.bus_id) or ()) for gpu in bus.gpus))
    confidential, secret = _read_confidential(host)
    driver, cuda = (_query_host(host, f"nvmlSystemGet{name}")[0] for name in ("DriverVersion", "CudaDriverVersion_v2"))
    return GpuFacts(
        driver_version=None if driver is None else str(driver),
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if isinstance(cuda, int) else None,
        gpus=_locate(gpus, addresses or (), xids),
        pairs=_read_pairs(host, [gpu.index for gpu in gpus if gpu.error is None]),
        pci_gpus=on_bus,
        bus=bus,
        xids_off_bus=_find_off_bus(host, xids or {}),
        switch_errors=_read_switch_errors(host),
        visible=host.environment().get("CUDA_VISIBLE_DEVICES"),
        granted=_read_slurm_gpus(host.environment()),
        confidential=confidential,
        unread=(*unread, *problems, *secret),
    )


def _read_confidential(host: Host) -> tuple[bool | None, tuple[str, ...]]:
    """Return (whether confidential computing is on, calls that failed)."""
    symbol = "nvmlSystemGetConfComputeState"
    answer, unread = _query_host(host, symbol)
    if answer is None:
        return None, unread
    state = answer["ccFeature"]
    return (bool(state), ()) if state in (0, 1) else (None, (f"{symbol} = {state!s:.24}, which is impossible",))


def _locate(gpus: tuple[Gpu, ...], addresses: tuple[str, ...], xids: dict[str, list[int]] | None) -> tuple[Gpu, ...]:
    """Assign addresses to lost GPUs, which do not report one: a single lost GPU has the one address that is left."""
    lost = [gpu for gpu in gpus if gpu.bus_id is None]
    left = set(addresses) - {gpu.bus_id for gpu in gpus}
    if len(lost) != 1 or len(left) != 1:
        return gpus
    bus_id = left.pop()
    located = replace(lost[0], bus_id=bus_id, xids=_select_xids(xids, bus_id))
    return tuple(located if gpu is lost[0] else gpu for gpu in gpus)


def _select_xids(xids: dict[str, list[int]] | None, bus_id: str | None) -> tuple[int, ...] | None:
    return None if xids is None or bus_id is None else tuple(xids.get(bus_id.partition(".")[0], ()))


def _read_slurm_gpus(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the number of GPUs of this node that Slurm allocated; None outside a job and in a prolog, which sees all.

    srun(1) and sbatch(1), output environment variables: a list of indices, or a number.
    """
    if "SLURM_SCRIPT_CONTEXT" in environment:
        return None
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if re.fullmatch(r"\d+(,\d+)*", value := environment.get(name, "")):
            return f"{name}={value}", value.count(",") + 1
    number = environment.get("SLURM_GPUS_ON_NODE", "")
    return (f"SLURM_GPUS_ON_NODE={number}", int(number)) if re.fullmatch(r"\d{1,4}", number) else None


def _find_off_bus(host: Host, xids: dict[str, list[int]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return Xids at addresses where sysfs shows no device of any driver; nothing if sysfs is not available."""
    listed = sysfs.attempt(host.list_dir, DEVICES) if xids else None
    present = {name.rpartition(".")[0].lower() for name in listed or ()}
    return tuple((place, tuple(numbers)) for place, numbers in xids.items() if present and place not in present)


def _query_host(host: Host, symbol: str, *arguments: int) -> tuple[Any, tuple[str, ...]]:
    """Return (answer, calls that failed)."""
    try:
        return host.nvml(symbol, *arguments), ()
    except NvmlError as error:
        return None, () if does_not_apply(error) else (f"{error.symbol} = {error.name}",)


def _read_xids(host: Host) -> dict[str, list[int]] | None:
    """Return Xids by bus id without function, in kernel log order; None if the log cannot be read."""
    lines = sysfs.attempt(host.kernel_log, "NVRM: Xid")
    if lines is None:
        return None
    xids: dict[str, list[int]] = {}
    for line in lines:
        if (parsed := parse_xid_line(line)) is not None:
            xids.setdefault(parsed[0], []).append(parsed[1])
    return xids


def _read_switch_errors(host: Host) -> tuple[tuple[str, str], ...]:
    """Return (bus id, number and text) of fatal errors of NVSwitches, each once. Source: fabric manager user guide."""
    found = map(_SWITCH_LINE.search, sysfs.attempt(host.kernel_log, "SXid") or ())
    return tuple(dict.fromkeys((match[1], f"{match[2]}: {match[3]}") for match in found if match))[:MAX_GPUS]


def _read_xid_events(host: Host, count: int) -> tuple[dict[int, tuple[int, ...]] | None, tuple[str, ...]]:
    """Return (Xids by GPU index since NVML events were first requested, or None if unsupported; calls that failed)."""
    answer, unread = _query_host(host, XIDS, count)
    if answer is None:
        return None, unread
    events: dict[int, tuple[int, ...]] = dict.fromkeys(answer["watched"], ())
    for index, number in answer["xids"]:
        events[index] = (*events.get(index, ()), number)
    return events, ()


def _read_gpus(calls: list[NvmlCalls]) -> tuple[Gpu, ...]:
    """Read every GPU. If the driver refuses access to a GPU, no further calls are made for it."""
    gpu_facts: list[_Found] = [_read_identity(nvml) for nvml in calls]
    readable = [(nvml, facts) for nvml, facts in zip(calls, gpu_facts, strict=True) if "error" not in facts]
    states: dict[int, LinkStates] = {}
    by_model: dict[Any, list[LinkStates]] = defaultdict(list)
    for nvml, facts in readable:
        facts.update(_read_faults(nvml))
        states[nvml.handle.index] = read_link_states(nvml)
        by_model[facts["name"]].append(states[nvml.handle.index])
    for twins in by_model.values():
        for link_states in twins:
            reconcile_links(link_states, twins)
    for nvml, facts in readable:
        links, bus_id = states[nvml.handle.index], facts["bus_id"]
        facts.update(nvlinks_known=links.known, nvlinks=read_nvlinks(nvml, links.states, facts["compute_capability"]))
        for stage in (_read_load, _read_fabric, _read_ecc, _read_rest):
            facts.update(stage(nvml))
        in_sysfs = _is_width_in_sysfs(nvml.host, bus_id)
        facts.update(numa_node=_read_numa(nvml, bus_id), link_in_sysfs=in_sysfs, error=nvml.lost)
    rows = zip(calls, gpu_facts, strict=True)
    return tuple(Gpu(index=nvml.handle.index, unread=tuple(nvml.unread), **facts) for nvml, facts in rows)


def _read_identity(nvml: NvmlCalls) -> _Found:
    """Read the identity of a GPU; "error" if the driver refuses access."""
    refused = None
    bus_id = None
    try:
        bus_id = sysfs_bus_id(nvml.host.nvml("nvmlDeviceGetPciInfo", nvml.handle)["busId"])
    except NvmlError as error:
        refused = f"{error.name} ({error.symbol})"
        if error.symbol == HANDLE or error.name in LOST:
            return {"bus_id": None, "error": refused}
        nvml.note("nvmlDeviceGetPciInfo", (), error.name)
    else:
        if bus_id is None:
            nvml.note("nvmlDeviceGetPciInfo", (), "no bus address")
    memory = nvml("nvmlDeviceGetMemoryInfo") or {}
    total, used = memory.get("total"), memory.get("used")
    if total is not None and used is not None and used > total:
        nvml.note("nvmlDeviceGetMemoryInfo", (), f"{used} of {total} bytes in use, which is impossible")
        used = None
    major, minor = nvml.numbers("nvmlDeviceGetCudaComputeCapability", 2)
    facts = {
        "bus_id": bus_id,
        "uuid": nvml("nvmlDeviceGetUUID"),
        "name": nvml("nvmlDeviceGetName"),
        "memory_bytes": total,
        "memory_used_bytes": used,
        "compute_capability": None if major is None or minor is None else (major, minor),
    }
    # Older recordings contain a refused handle only as the answer to the first call.
    if refused and facts["uuid"] is None and facts["name"] is None:
        return {"bus_id": None, "error": refused}
    return facts


def _read_faults(nvml: NvmlCalls) -> _Found:
    _, rows, waiting, failed = nvml.numbers("nvmlDeviceGetRemappedRows", 4)
    banks: dict[str, Any] = {}
    if rows is not None:  # the histogram never returns NOT_SUPPORTED
        banks = nvml("nvmlDeviceGetRowRemapperHistogram") or {}
    action, exhausted, pending, nvml.link_count = nvml.fields(_RECOVERY, _BANKS_EXHAUSTED, _BANK_PENDING, _LINK_COUNT)
    split, split_later = (to_bool(mode) for mode in nvml.numbers("nvmlDeviceGetMigMode", 2))
    # All drivers so far answer the older function, but it will be removed.
    mask = nvml.either(("nvmlDeviceGetCurrentClocksThrottleReasons",), ("nvmlDeviceGetCurrentClocksEventReasons",))
    bits = _NAMES["throttle_bit"].items()
    return {
        "recovery_action": None if action is None else translate("recovery_action", action) or f"action_{action}",
        "ecc_uncorrected": nvml("nvmlDeviceGetTotalEccErrors", 1, 0),
        "remapped_rows_uncorrectable": rows,
        "remapping_pending": to_bool(max((n for n in (waiting, pending) if n is not None), default=None)),
        "remapping_failed": to_bool(failed),
        "remap_banks_exhausted": max((n for n in (banks.get("none"), exhausted) if n is not None), default=None),
        "mig_enabled": split,
        "mig_pending": split_later,
        "throttle_reasons": None if mask is None else tuple(name for bit, name in bits if mask >> int(bit) & 1),
        # of the die (sensor 0); CUDA 14 removes the older function
        "temperature_celsius": nvml.either(("nvmlDeviceGetTemperature", 0), ("nvmlDeviceGetTemperatureV", 0)),
    }


def _read_stage(nvml: NvmlCalls, stage: str) -> _Found:
    """Read the facts of a stage in `facts.toml`."""
    facts: _Found = {}
    for fact, row in read_table(__file__, "facts.toml")[stage].items():
        answer = nvml(*row["ask"])
        if "field" in row:
            answer = (answer or {}).get(row["field"])
        if "as" in row:
            answer = to_bool(answer) if row["as"] == "flag" else translate(row["as"], answer)
        facts[fact] = answer * row["scale"] if "scale" in row and answer is not None else answer
    return facts


def _read_load(nvml: NvmlCalls) -> _Found:
    busy = (nvml("nvmlDeviceGetUtilizationRates") or {}).get("gpu")
    ratio = None if busy is None else busy / 100
    return {**_read_stage(nvml, "load"), "utilization_ratio": ratio, "processes": read_processes(nvml)}


def _read_fabric(nvml: NvmlCalls) -> _Found:
    fabric = nvml("nvmlDeviceGetGpuFabricInfoV") or nvml("nvmlDeviceGetGpuFabricInfo") or {}
    return {
        "fabric_state": translate("fabric_state", fabric.get("state")),
        "fabric_clique": decode_fabric_clique(fabric),
        "fabric_status": decode_fabric_status(fabric),
        "fabric_degraded": decode_fabric_degraded(fabric.get("healthMask")),
        "fabric_faults": decode_fabric_faults(fabric.get("healthMask")),
        "fabric_summary": translate("fabric_summary", fabric.get("healthSummary")),
    }


def _read_ecc(nvml: NvmlCalls) -> _Found:
    enabled, pending = nvml.numbers("nvmlDeviceGetEccMode", 2)
    default = None if enabled is None else nvml.numbers("nvmlDeviceGetDefaultEccMode", 1)[0]
    sram = nvml("nvmlDeviceGetSramEccErrorStatus") or {}
    return {
        "ecc_enabled": to_bool(enabled),
        "ecc_pending": to_bool(pending),
        "ecc_default": to_bool(default),
        "ecc_uncorrected_lifetime": nvml("nvmlDeviceGetTotalEccErrors", 1, 1),
        "sram_threshold_exceeded": to_bool(sram.get("bThresholdExceeded")),
        "sram_uncorrected": _add_fields(sram, "volatileUncParity", "volatileUncSecDed"),
        "sram_uncorrected_lifetime": _add_fields(sram, "aggregateUncParity", "aggregateUncSecDed"),
        "retired_pages": _count_retired_pages(nvml),
    }


def _add_fields(answer: dict[str, Any], *names: str) -> int | None:
    values = [answer.get(name) for name in names]
    return None if None in values else sum(cast("list[int]", values))


def _read_rest(nvml: NvmlCalls) -> _Found:
    numa = nvml("nvmlDeviceGetNumaNodeId")
    return {
        **_read_stage(nvml, "rest"),
        "c2c_links": nvml.fields(_C2C_LINK_COUNT)[0],
        "gpu_numa_node": None if numa == -1 else numa,
        "cpu_affinity": format_cpu_list(nvml("nvmlDeviceGetCpuAffinity", AFFINITY_WORDS)),
    }


def _read_pairs(host: Host, answering: list[int]) -> tuple[GpuPair, ...]:
    """Read the common ancestor of every pair of GPUs first, then the details of their P2P support."""
    calls = {(a, b): NvmlCalls(host, GpuHandle(a)) for a in answering for b in answering if a < b}
    answers: dict[tuple[int, int], list[Any]] = {pair: [] for pair in calls}
    for (_, b), nvml in calls.items():
        answers[nvml.handle.index, b].append(nvml("nvmlDeviceGetTopologyCommonAncestor", GpuHandle(b)))
    for capability in (2, 0):  # NVLink, read: nvmlGpuP2PCapsIndex_t
        for (a, b), nvml in calls.items():
            answers[a, b].append(nvml("nvmlDeviceGetP2PStatus", GpuHandle(b), capability))
    return tuple(
        GpuPair(
            a=a,
            b=b,
            ancestor=translate("ancestor", level),
            p2p_read=translate("p2p", read_),
            p2p_nvlink=translate("p2p", nvlink),
            unread=tuple(calls[a, b].unread),
        )
        for (a, b), (level, nvlink, read_) in answers.items()
    )


def _is_width_in_sysfs(host: Host, bus_id: str | None) -> bool:
    """Whether the pci probe can check this link. The file may exist without a valid width (0, 255 or "Unknown")."""
    folder = f"{DEVICES}/{bus_id}"
    widths = [sysfs.number(host, f"{folder}/{end}_link_width") for end in ("current", "max")] if bus_id else []
    return bool(widths) and all(width is not None and 0 < width <= 32 for width in widths)


def _read_numa(nvml: NvmlCalls, bus_id: str | None) -> int | None:
    """Prefer sysfs. If it has -1 (in a VM), use NVML's memory affinity mask if it names a single node."""
    node = sysfs.number(nvml.host, f"{DEVICES}/{bus_id}/numa_node")
    if node is not None and node >= 0:
        return node
    nodes = format_cpu_list(nvml("nvmlDeviceGetMemoryAffinity", 1, 0))
    return int(nodes) if nodes and nodes.isdecimal() else None


def _count_retired_pages(nvml: NvmlCalls) -> int | None:
    """Count pages retired for single-bit (cause 0) and double-bit (1) errors; Ampere and later remap rows instead."""
    by_cause = [nvml("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]
    if not all(isinstance(pages, list) for pages in by_cause):
        return None
    if any(not 0 <= address <= MAX_MEMORY for pages in by_cause for address in pages):
        nvml.note("nvmlDeviceGetRetiredPages", (), "a page beyond any memory, which is impossible")
        return None
    return sum(map(len, by_cause))


# NVLinks ------------------------------------------------------------------------------------------------------------

_ERRORS = ("replay", "recovery", "crc_flit", "crc_data")  # nvmlNvLinkErrorCounter_t 0 to 3


@dataclass(slots=True)
class LinkStates:
    """State of each link: up, down or unread (None). `known`: the driver reported links, or that there are none."""

    known: bool
    states: dict[int, bool | None] = field(default_factory=dict)
    absent: bool = False  # NOT_SUPPORTED: the board has no NVLink
    unlisted: set[int] = field(default_factory=set)  # INVALID_ARGUMENT: no such link


def read_link_states(nvml: NvmlCalls) -> LinkStates:
    """Query the state of every link that a board may have."""
    links = LinkStates(known=True)
    for link in range(MAX_LINKS):
        if nvml.link_count and len(links.states) >= nvml.link_count:
            break  # all links were found; a slow driver is not queried about links that do not exist
        try:
            state = nvml.query(_LINK_STATE, link)
        except NvmlError as error:
            if error.name == "NOT_SUPPORTED" and link == 0:
                return LinkStates(known=True, absent=True)
            if error.name in ("INVALID_ARGUMENT", "NOT_SUPPORTED"):
                links.unlisted.add(link)
            else:
                nvml.note(_LINK_STATE, (link,), error.name)
                links.states[link] = None
            continue
        links.states[link] = to_bool(state)
    links.known = links.states == {} or any(state is not None for state in links.states.values())
    return links


def reconcile_links(links: LinkStates, of_twins: Iterable[LinkStates]) -> None:
    """Correct the set of links with the GPUs of the same model: a link exists if any of them reported its state.

    A link whose state no GPU of the model reported is dropped, because it may not exist.
    """
    known_links = {link for twin in of_twins for link, state in twin.states.items() if state is not None}
    links.states = {link: state for link, state in links.states.items() if state is not None or link in known_links}
    if not links.absent:
        links.states |= dict.fromkeys(links.unlisted & known_links)
    links.states = dict(sorted(links.states.items()))
    links.known = links.known and (not known_links or bool(links.states) or links.absent)


def read_nvlinks(
    nvml: NvmlCalls, states: dict[int, bool | None], capability: tuple[int, int] | None
) -> tuple[NvLink, ...]:
    """Return the existing links. A link without a peer is inactive; a link whose state could not be read is None."""
    up = [link for link, active in states.items() if active]
    errors = _read_errors(nvml, up)
    version = translate("nvlink_generation", _query_link(nvml, "nvmlDeviceGetNvLinkVersion", up[0])) if up else None
    if version == 5 and capability is not None and capability[0] == 9:
        version = 4  # H100 reports 7 (5.0) for its fourth-generation NVLink
    return tuple(
        _read_active_link(nvml, link, version, errors.get(link)) if active else NvLink(link=link, active=active)
        for link, active in states.items()
    )


def _read_active_link(nvml: NvmlCalls, link: int, version: int | None, errors: dict[str, int] | None) -> NvLink:
    remote = _query_link(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", link)
    kind = _query_link(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", link)
    return NvLink(
        link=link,
        active=True,
        version=version,
        remote_kind=UNREAD if kind == UNREAD else translate("remote_kind", kind),
        remote_bus_id=UNREAD if remote == UNREAD else sysfs_bus_id(remote["busId"]) if remote else None,
        errors=errors,
    )


def _read_errors(nvml: NvmlCalls, links: list[int]) -> dict[int, dict[str, int]]:
    """Return error counters by link: in one call, or link by link for drivers that require it (before Hopper)."""
    counters_of: dict[int, dict[str, int]] = {}
    fields = _NAMES["nvlink_error_field"]
    if links:
        queries = [(number, link) for link in links for number in fields]
        values = nvml.fields(*(f"{number}:{link}" for number, link in queries))
        for (number, link), value in zip(queries, values, strict=True):
            if value is not None:
                counters_of.setdefault(link, {})[fields[number]] = value
    return counters_of or {link: counters for link in links if (counters := _read_old_errors(nvml, link))}


def _read_old_errors(nvml: NvmlCalls, link: int) -> dict[str, int]:
    counters = {name: _query_link(nvml, "nvmlDeviceGetNvLinkErrorCounter", link, i) for i, name in enumerate(_ERRORS)}
    return {name: value for name, value in counters.items() if isinstance(value, int)}


def _query_link(nvml: NvmlCalls, symbol: str, *arguments: int) -> Any:
    """Return the answer; None if a hypervisor or the board hides it, UNREAD if the driver failed to report it."""
    try:
        answer = nvml.query(symbol, *arguments)
        return UNREAD if answer is None else answer
    except NvmlError as error:
        if does_not_apply(error) or error.name == "INVALID_ARGUMENT":
            return None
        nvml.note(symbol, arguments, error.name)
        return UNREAD


# Enumerations and encodings -----------------------------------------------------------------------------------------


def format_cpu_list(masks: Any) -> str | None:
    """Format a bit mask of 64-bit words as "0-47,96-143"; None if it is empty."""
    if not masks:
        return None
    cpus = [64 * i + bit for i, word in enumerate(masks) if word for bit in range(64) if word >> bit & 1]
    return _format_runs(cpus) or None


def _format_runs(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def decode_fabric_clique(fabric: dict[str, Any]) -> str | None:
    """Return None for the all-zero cluster id of a single NVSwitch host: two such hosts share no domain.

    The status is valid only in state "completed", and a failed probe has no clique (NCCL: src/mnnvl.cc).
    """
    cluster = bytes(fabric.get("clusterUuid") or ())
    if fabric.get("state") != 3 or fabric.get("status") or not any(cluster):
        return None
    return f"{cluster.hex()}/{fabric['cliqueId']}"


def decode_fabric_status(fabric: dict[str, Any]) -> str | None:
    """Return the error with which the GPU's fabric probe completed; None if it succeeded or is still running."""
    status = fabric.get("status")
    if fabric.get("state") != 3 or not isinstance(status, int) or status == 0:
        return None
    return ERROR_NAMES.get(status, f"CODE_{status}")


def decode_fabric_degraded(mask: int | None) -> bool | None:
    """Decode bits 0 and 1 of the health mask: 1 degraded, 2 not degraded, 0 unknown."""
    return {1: True, 2: False}.get(mask & 3) if mask is not None else None


def decode_fabric_faults(mask: int | None) -> tuple[str, ...] | None:
    """Return the faults in the other fields of the health mask; None if the mask has no information.

    nvml.h: NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_* and _WIDTH_*. In a two-bit field, 1 is a fault and 2 is no fault, except
    for the partition and the fabric manager, where 1 is good. For the configuration, 1 is correct.
    """
    if not mask:
        return None
    faults = [name for name, (shift, bad) in _NAMES["fabric_fault"].items() if mask >> shift & 3 == bad]
    wrong = mask >> 8 & 0xF
    if wrong > 1:
        faults.append(translate("fabric_configuration", wrong) or f"incorrect_configuration_{wrong}")
    return tuple(faults)


def read_processes(nvml: NvmlCalls) -> tuple[GpuProcess, ...] | None:
    """Return the compute processes. For a process in another container the memory is unknown."""
    symbol = "nvmlDeviceGetComputeRunningProcesses"
    answer = nvml(symbol)
    if not isinstance(answer, list):
        return None
    if any(not 0 <= process["pid"] <= MAX_PIDS for process in answer):
        nvml.note(symbol, (), "a process id that is impossible")
        return None
    # NVML_VALUE_NOT_AVAILABLE is 2^64 - 1
    used = [p["usedGpuMemory"] if (p["usedGpuMemory"] or 0) <= MAX_MEMORY else None for p in answer]
    return tuple(GpuProcess(pid=p["pid"], memory_bytes=memory) for p, memory in zip(answer, used, strict=True))


def to_bool(value: Any) -> bool | None:
    """Convert NVML's 0 and 1 to bool."""
    return None if value is None else bool(value)


# "NVRM: Xid (PCI:0000:1b:00): 79, ..."; older drivers: "NVRM: Xid (0000:03:00): 14, ..."; MIG slice: "(PCI:0000:3b:00
# GPU-I:05)".
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-f:]{7,16})[^)]{0,40}\): (\d{1,4})\b", re.ASCII | re.IGNORECASE)
_SWITCH_LINE = re.compile(r"SXid \(PCI:([0-9a-fA-F:.]{7,20})\): (\d{1,6}), Fatal, ([\x20-\x7e]{1,80})")
_RECOVERED = re.compile(r"changed from .* to (?:0x0\b|.*\(None\))", re.IGNORECASE)


def parse_xid_line(line: str) -> tuple[str, int] | None:
    """Return (bus id without function, Xid) of a kernel log line; None if the line is not an error.

    Xid 154 reports a change of the recovery action. A change to "None" is not an error.
    """
    match = _LINE.search(line)
    if match is None or (match[2] == "154" and _RECOVERED.search(line)):
        return None
    domain, _, place = match[1].lower().partition(":")
    if place.count(":") != 1:
        return None
    return f"{int(domain, 16):04x}:{place}", int(match[2])

"""Health of one GPU: memory, heat, power and what the driver logged; part of `probes.gpu.check`.

Xid numbers, and whose error each is: NVIDIA, "Xid Errors", the Xid catalogue
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), by its columns of immediate and investigatory action,
and the older listing for boards before Ampere. A number that it answers with a reset, a restart of the host, a look at
links or a repair is of the GPU; one that it answers with a look at the program is of the program; the others name
neither. What the catalogue does not use has no cause that is known.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from contracts.finding import Finding, Status, by_loss
from hardware.gpus import clock_share
from probes.gpu.facts import Gpu, GpuFacts

Cause = Literal["gpu", "program", "driver"]
"""The GPU, its memory or its links; the program that ran; or an engine, firmware or driver, the cause being open."""


@cache
def _xid_table() -> dict[str, dict[str, str]]:
    """Cause -> Xid -> words of `xids.toml`: read with the first Xid."""
    return tomllib.loads(Path(__file__).with_name("xids.toml").read_text(encoding="utf-8"))


XID_CAUSES: tuple[Cause, ...] = ("gpu", "driver", "program")  # gravest first


def xid_cause(xid: int) -> Cause:
    """Whose error it is; a number of no catalogue is not the program's."""
    table = _xid_table()
    return "gpu" if str(xid) in table["gpu"] else "program" if str(xid) in table["program"] else "driver"


def named_xids(xids: Iterable[int], of: Cause) -> str:
    """Those of one cause in words: "Xid 74 (NVLink error, 2 times), Xid 79 (GPU has fallen off the bus, once)"."""
    counts = Counter(xid for xid in xids if xid_cause(xid) == of)
    return ", ".join(
        f"Xid {xid} ({_xid_words(xid)}, {'once' if count == 1 else f'{count} times'})" for xid, count in counts.items()
    )


def _xid_words(xid: int) -> str:
    return next((words[str(xid)] for words in _xid_table().values() if str(xid) in words), "no cause named")


HOT_CELSIUS = (
    84.0  # clocks begin to fall between 84 and 90 C: stas00/ml-engineering, compute/accelerator, "Temperature"
)
REMAPPED_ROWS_MAX = 512  # of one GPU: NVIDIA GPU Memory Error Management, "Row-remapping", RMA criteria
THERMAL = {"sw_thermal", "hw_thermal"}

BUSY_RATIO = 0.5
"""Utilisation from which a GPU counts as busy: below, its clocks and its PCIe link may rest between two kernels."""

# A busy GPU without any reason to slow down stays near its highest clock: it gives up a step of some 15 MHz for a few
# degrees. A quarter less is no such step; compute then takes a third longer. The power limit may hold a healthy board
# at six or seven tenths (H100 at 700 W in large GEMMs), not at less than half.
LOW_CLOCK_RATIO = 0.75
LOW_CLOCK_RATIO_CAPPED = 0.5

# What a driver keeps for itself: some 600 MiB on an H100, about as much for each 40 GiB of larger boards.
RESERVED_BYTES = 1 << 30
RESERVED_RATIO = 0.015
HELD_RATIO = 0.1  # of the memory, by others: a forecast of a layout is off by more than its own margin
FULL_RATIO = 0.9  # what is left holds no model that was meant for the board


def finding(code: str, status: Status, subject: str, message: str, evidence: str, remedy: str = "") -> Finding:
    """A finding with one piece of evidence."""
    return Finding(code=code, status=status, subject=subject, message=message, evidence=(evidence,), remedy=remedy)


def subject_of(gpus: Gpu | Iterable[Gpu]) -> str:
    """ "GPU3", or "GPU0, GPU1"."""
    return f"GPU{gpus.index}" if isinstance(gpus, Gpu) else ", ".join(f"GPU{gpu.index}" for gpu in gpus)


def _memory(gpu: Gpu) -> Iterator[Finding]:
    subject = subject_of(gpu)
    if gpu.ecc_uncorrected:
        yield finding(
            "gpu.ecc.uncorrected", Status.FAIL, subject,
            f"{gpu.ecc_uncorrected} uncorrectable memory error(s) since the driver was loaded",
            f"nvmlDeviceGetTotalEccErrors(uncorrected, volatile) = {gpu.ecc_uncorrected}",
            "Drain the node and reset the GPU; run the vendor's field diagnostic if it happens again.",
        )  # fmt: skip
    if gpu.remapping_failed or (gpu.remapped_rows_uncorrectable or 0) > REMAPPED_ROWS_MAX:
        yield finding(
            "gpu.memory.remap_failed", Status.FAIL, subject, "bad memory rows can no longer be remapped",
            f"nvmlDeviceGetRemappedRows: failed {gpu.remapping_failed}, rows {gpu.remapped_rows_uncorrectable}",
            "Replace the GPU.",
        )  # fmt: skip
    if gpu.remapping_pending:
        yield finding(
            "gpu.memory.remap_pending", Status.WARN, subject, "a bad memory row waits for a reset to be remapped",
            "nvmlDeviceGetRemappedRows: pending", "Drain the node and reset the GPU.",
        )  # fmt: skip
    if gpu.remap_banks_exhausted:
        yield finding(
            "gpu.memory.remap_exhausted", Status.WARN, subject,
            f"{gpu.remap_banks_exhausted} memory bank(s) have no spare row left: the next bad row there stays bad",
            f"nvmlDeviceGetRowRemapperHistogram or bank remapper: {gpu.remap_banks_exhausted} with none left",
            "Plan the replacement of the GPU.",
        )  # fmt: skip
    if gpu.retired_pages:
        yield finding(
            "gpu.memory.retired", Status.INFO, subject, f"{gpu.retired_pages} memory page(s) are retired",
            f"nvmlDeviceGetRetiredPages = {gpu.retired_pages}",
        )  # fmt: skip


def _ecc(gpu: Gpu) -> Iterator[Finding]:
    subject = subject_of(gpu)
    if gpu.sram_threshold_exceeded or gpu.sram_uncorrected:
        over = gpu.sram_threshold_exceeded
        yield finding(
            "gpu.ecc.sram", Status.FAIL, subject,
            "more uncorrectable errors in on-chip memory (SRAM) than the field diagnostic allows" if over
            else f"{gpu.sram_uncorrected} uncorrectable error(s) in on-chip memory (SRAM) since the driver was loaded",
            f"nvmlDeviceGetSramEccErrorStatus: threshold exceeded {over}, volatile {gpu.sram_uncorrected}, "
            f"aggregate {gpu.sram_uncorrected_lifetime}",
            "Replace the GPU." if over else "Drain the node and reset the GPU; have it checked if it happens again.",
        )  # fmt: skip
    if gpu.ecc_uncorrected_lifetime or gpu.sram_uncorrected_lifetime:
        counters = {"all memory": gpu.ecc_uncorrected_lifetime, "on-chip memory (SRAM)": gpu.sram_uncorrected_lifetime}
        counts = " and ".join(f"{count} by the counter of {of}" for of, count in counters.items() if count is not None)
        yield finding(
            "gpu.ecc.lifetime", Status.INFO, subject,
            f"{subject} has had uncorrectable memory errors in its life: {counts}.",
            f"nvmlDeviceGetTotalEccErrors(uncorrected, aggregate) = {gpu.ecc_uncorrected_lifetime}, "
            f"nvmlDeviceGetSramEccErrorStatus: aggregate {gpu.sram_uncorrected_lifetime}",
        )  # fmt: skip
    if gpu.ecc_enabled is False:
        delivered_off = gpu.ecc_default is False
        yield finding(
            "gpu.ecc.off", Status.INFO if delivered_off else Status.WARN, subject,
            "ECC is switched off: errors in memory go unnoticed into the results"
            + ("; the board is delivered so" if delivered_off else "")
            + (", until the next reset" if gpu.ecc_pending else ""),
            f"nvmlDeviceGetEccMode: now off, after a reset {'on' if gpu.ecc_pending else 'off'}",
            "" if delivered_off else f"nvidia-smi -i {gpu.index} -e 1, then reset the GPU.",
        )  # fmt: skip
    elif gpu.ecc_enabled and gpu.ecc_pending is False:
        yield finding(
            "gpu.ecc.off", Status.INFO, subject, "ECC will be off after the next reset of this GPU",
            "nvmlDeviceGetEccMode: now on, after a reset off",
        )  # fmt: skip


def _recovery(gpu: Gpu) -> Iterator[Finding]:
    action = gpu.recovery_action
    if action not in (None, "none"):
        yield finding(
            "gpu.device.recovery", Status.FAIL, subject_of(gpu),
            f"the driver wants this GPU recovered: {action.replace('_', ' ')}",
            f"NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: {action}", _RECOVERIES.get(action, "Drain the node."),
        )  # fmt: skip


_RECOVERIES = {
    "gpu_reset": "Drain the node and reset the GPU: nvidia-smi --gpu-reset.",
    "node_reboot": "Drain the node and reboot it.",
    "system_reboot": "Drain the node and reboot it.",
    "drain_p2p": "End the jobs that use P2P with this GPU.",
    "drain_and_reset": "End the jobs that use P2P with this GPU, then reset it: nvidia-smi --gpu-reset.",
    "recover_imex_domain": "Restart the IMEX domain of the rack (nvidia-imex on all its nodes).",
    "bus_reset": "Drain the node and reset the GPU's PCIe bus, or reboot the node.",
}


def held_bytes(gpu: Gpu) -> int | None:
    """Memory that others hold: used, without what a driver keeps for itself. None where NVML does not tell."""
    if not gpu.memory_bytes or gpu.memory_used_bytes is None:
        return None
    reserved = max(RESERVED_BYTES, int(RESERVED_RATIO * gpu.memory_bytes))
    return max(0, min(gpu.memory_used_bytes, gpu.memory_bytes) - reserved)


def _held(gpu: Gpu) -> Iterator[Finding]:
    """A job that runs holds its memory too: a note, as its processes are. What holds it and rests is in the way.

    For the job that a gate is about, memory that is full fails whoever holds it: `agent.checks.view.for_next_job`.
    """
    held, size = held_bytes(gpu), gpu.memory_bytes or 0
    if held is None or held < HELD_RATIO * size:
        return
    used = gpu.memory_used_bytes or 0
    status = Status.INFO if gpu.utilization_ratio else Status.FAIL if is_full(gpu) else Status.WARN
    whose = ", ".join(
        f"pid {p.pid}" + (f" ({p.memory_bytes / 2**30:.1f} GiB)" if p.memory_bytes else "")
        for p in (gpu.processes or ())[:8]
    )
    yield finding(
        "gpu.memory.held", status, subject_of(gpu),
        f"{subject_of(gpu)} has {used / 2**30:.1f} of {size / 2**30:.1f} GiB of memory in use ({used / size:.0%})"
        f"{' although the GPU is idle' if gpu.utilization_ratio == 0 else ''}. A new job gets only the rest.",
        f"nvmlDeviceGetMemoryInfo: used {used} of {size}; compute processes: {whose or 'none visible from here'}",
        "" if status is Status.INFO else FREE_MEMORY,
    )  # fmt: skip


FREE_MEMORY = "End the processes that hold it (fuser -v /dev/nvidia*), or wait until they end."


def is_full(gpu: Gpu) -> bool:
    """Whether so much of the memory is in use that no job fits that was meant for the board."""
    return bool(gpu.memory_bytes) and (gpu.memory_used_bytes or 0) >= FULL_RATIO * (gpu.memory_bytes or 0)


HW_SLOWDOWN_LOSS = 0.5
"""Of the clock, at least: nvml.h, the reasons HwSlowdown, HwThermalSlowdown and HwPowerBrakeSlowdown."""


FULL_CLOCK_RATIO = 0.9
"""Of the highest clock: what is above lies within the steps that a healthy GPU gives up for a few degrees."""


def _clock_loss(gpu: Gpu, least: float) -> float:
    """The share of its highest clock that a GPU has lost: `least` where its clock does not tell, as of one at rest."""
    if not gpu.sm_clock_hertz or not gpu.sm_clock_max_hertz or not gpu.utilization_ratio:
        return least
    return max(least, 1.0 - gpu.sm_clock_hertz / gpu.sm_clock_max_hertz)


def _slowed(gpu: Gpu, why: str) -> str:
    """What a reason to slow down does to this GPU now, as its clock and its load tell."""
    now, most, name = gpu.sm_clock_hertz, gpu.sm_clock_max_hertz, subject_of(gpu)
    clock = f" {now / 1e6:.0f}" + (f" of {most / 1e6:.0f}" if most else "") + " MHz" if now else ""
    if now and most and now >= FULL_CLOCK_RATIO * most:
        return f"{name} reports {why}, but runs at{clock}: it loses no speed now. Its clock may fall under load."
    if gpu.utilization_ratio == 0:
        at = f" at{clock}" if clock else ""
        return f"{name} reports {why} while it is idle{at}. Under load every rank would wait for it."
    to = f" to{clock}" if clock else ""
    return f"{name} is slowed down{to} by {why}. Every rank waits for this GPU."


_COOLING = "Check fans, air flow and inlet temperature; compare with the neighbours in the rack."


def _heat(gpu: Gpu) -> Iterator[Finding]:
    subject, reasons = subject_of(gpu), set(gpu.throttle_reasons or ())
    now, slowdown = gpu.temperature_celsius, gpu.temperature_slowdown_celsius
    limit = min(HOT_CELSIUS, slowdown or HOT_CELSIUS)
    evidence = f"nvmlDeviceGetCurrentClocksThrottleReasons: {', '.join(gpu.throttle_reasons or ())}"
    if now is not None and now >= limit:
        yield finding(
            "gpu.thermal.hot", Status.WARN, subject,
            f"{subject} has {now:.0f} C. Its clock falls from about {limit:.0f} C on"
            + (f", and is cut at {slowdown:.0f} C." if slowdown else "."),
            f"nvmlDeviceGetTemperature = {now:.0f}", "Check fans, air flow and inlet temperature.",
        )  # fmt: skip
    if "hw_slowdown" in reasons and not reasons & (THERMAL | {"hw_power_brake"}):
        # nvml.h: core clocks reduced by a factor of two or more, for heat, the power brake or too fast a rise of power.
        yield finding(
            "gpu.clocks.slowdown", by_loss(_clock_loss(gpu, HW_SLOWDOWN_LOSS)), subject,
            _slowed(gpu, "a hardware slowdown (heat, the power brake or a peak of power: the driver does not say)"),
            evidence, "Check temperature and air flow, the power cables and supplies; compare with the neighbours.",
        )  # fmt: skip
    if reasons & THERMAL:
        least = HW_SLOWDOWN_LOSS if "hw_thermal" in reasons else 0.0
        yield finding(
            "gpu.thermal.throttling", by_loss(_clock_loss(gpu, least)), subject,
            _slowed(gpu, f"heat ({', '.join(sorted(reasons & THERMAL))})"), evidence, _COOLING,
        )  # fmt: skip
    if "hw_power_brake" in reasons:
        yield finding(
            "gpu.power.brake", by_loss(_clock_loss(gpu, HW_SLOWDOWN_LOSS)), subject,
            _slowed(gpu, "the power brake of its supply (hw_power_brake)"), evidence,
            "Check the power supplies, their redundancy and the rack's power budget.",
        )  # fmt: skip


_NAMED_ELSEWHERE = THERMAL | {"hw_slowdown", "hw_power_brake"}  # each has a finding of its own


def _clocks(gpu: Gpu) -> Iterator[Finding]:
    """A busy GPU far below its highest clock, which nothing else explains."""
    now, most, busy = gpu.sm_clock_hertz, gpu.sm_clock_max_hertz, gpu.utilization_ratio
    reasons = set(gpu.throttle_reasons or ())
    if not now or not most or busy is None or busy < BUSY_RATIO or gpu.throttle_reasons is None:
        return
    if reasons & _NAMED_ELSEWHERE:
        return
    if now >= (LOW_CLOCK_RATIO_CAPPED if "sw_power_cap" in reasons else LOW_CLOCK_RATIO) * most:
        return
    why = f"The driver names {', '.join(sorted(reasons))}." if reasons else "The driver names no reason."
    yield finding(
        "gpu.clocks.low", Status.FAIL, subject_of(gpu),
        f"{subject_of(gpu)} runs at {now / 1e6:.0f} of {most / 1e6:.0f} MHz while it is {busy:.0%} busy. {why} "
        "Every rank waits for this GPU.",
        f"nvmlDeviceGetClockInfo(SM) = {now / 1e6:.0f}, nvmlDeviceGetMaxClockInfo(SM) = {most / 1e6:.0f}, "
        f"utilisation {busy:.0%}", _free_clocks(gpu, reasons),
    )  # fmt: skip


def _free_clocks(gpu: Gpu, reasons: set[str]) -> str:
    """What lifts the limit that the driver names; locked clocks are only one of them."""
    default = gpu.power_limit_default_watts
    if "sw_power_cap" in reasons:
        raised = f"nvidia-smi -i {gpu.index} -pl {default:.0f}" if default else f"nvidia-smi -i {gpu.index} -pl"
        return (
            f"The power limit holds the clock down: compare draw and limit (`nvidia-smi -i {gpu.index} -q -d POWER`), "
            f"restore the limit (`{raised}`), and look for a power cap of the chassis or the rack."
        )
    if "sync_boost" in reasons:
        return "Take the GPU out of its sync boost group: it follows the slowest GPU of the group."
    which = "-rac" if reasons & {"applications_clocks", "display_clocks"} else "-rgc"
    return f"Free the clocks (`nvidia-smi -i {gpu.index} {which}`), and reset the GPU if its clock stays low."


def _power(gpu: Gpu) -> Iterator[Finding]:
    subject, reasons = subject_of(gpu), set(gpu.throttle_reasons or ())
    if "sw_power_cap" in reasons:
        yield finding(
            "gpu.power.capped", Status.INFO, subject,
            f"clocks are held down by the power limit ({gpu.power_limit_watts or 0:.0f} W): usual under full load",
            "nvmlDeviceGetCurrentClocksThrottleReasons: sw_power_cap",
        )  # fmt: skip
    limit, default = gpu.power_limit_watts, gpu.power_limit_default_watts
    if limit and default and limit < default - 0.5:  # half a watt: both are rounded to milliwatts by the driver
        yield finding(
            "gpu.power.limit", by_loss(1.0 - clock_share(limit, default)), subject,
            f"the power limit is {limit:.0f} W, below the board's {default:.0f} W",
            f"nvmlDeviceGetEnforcedPowerLimit = {limit:.0f} W",
            f"If nobody chose this limit, restore it: nvidia-smi -i {gpu.index} -pl {default:.0f}.",
        )  # fmt: skip


def xids_of(gpu: Gpu) -> tuple[int, ...] | None:
    """Every Xid that is known, in the kernel's log and as NVML's events, where most of them stand in both."""
    if gpu.xids is None or gpu.xid_events is None:
        return gpu.xids if gpu.xid_events is None else gpu.xid_events
    return tuple((Counter(gpu.xids) | Counter(gpu.xid_events)).elements())


_XID_RULES = {  # cause -> code, status, what follows the numbers, remedy
    "gpu": (
        "gpu.xid.hardware", Status.WARN, "",
        "Look the numbers up in NVIDIA's Xid catalogue; reset the GPU, and have it checked if they come back.",
    ),
    "driver": ("gpu.xid.driver", Status.INFO, ": of an engine, the firmware or the driver, the cause is open", ""),
    "program": ("gpu.xid.application", Status.INFO, ": usually an error of the program that ran", ""),
}  # fmt: skip


def _xids(gpu: Gpu) -> Iterator[Finding]:
    known = xids_of(gpu) or ()
    sources = [name for name, found in (("kernel log, NVRM", gpu.xids), ("NVML events", gpu.xid_events)) if found]
    for cause in XID_CAUSES:
        what = named_xids(known, cause)
        if what:
            code, status, words, remedy = _XID_RULES[cause]
            yield finding(
                code, status, subject_of(gpu), f"the driver has reported {what}{words}",
                f"{' and '.join(sources)}: {what}", remedy,
            )  # fmt: skip


_LOG_UNREAD = (
    "the kernel's log is not readable here, and NVML tells only of Xids that come from the first scan on: whether one "
    "came before is not known"
)


def unjudged(facts: GpuFacts) -> dict[str, str]:
    """Code -> reason of the checks of Xids that nothing was raised by, where the kernel's log was not read."""
    answering = [gpu for gpu in facts.gpus if gpu.error is None]
    if all(gpu.xids is not None for gpu in answering):
        return {}
    raised = {found.code for gpu in answering for found in _xids(gpu)}
    return {code: _LOG_UNREAD for code, *_ in _XID_RULES.values() if code not in raised}


RULES: tuple[Callable[[Gpu], Iterator[Finding]], ...] = (
    _recovery, _memory, _ecc, _held, _heat, _clocks, _power, _xids,
)  # fmt: skip

"""Health of one GPU: memory, heat, power and what the driver logged; part of `probes.gpu_check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from probes.api import Finding, Severity
from probes.gpu_types import Gpu

HOT_CELSIUS = (
    84.0  # clocks begin to fall between 84 and 90 C: stas00/ml-engineering, compute/accelerator, "Temperature"
)
REMAPPED_ROWS_MAX = 512  # of one GPU: NVIDIA GPU Memory Error Management, "Row-remapping", RMA criteria
THERMAL = {"sw_thermal", "hw_thermal"}

# Xid numbers that speak of the GPU, its memory or its links (NVIDIA, "Xid Errors", Xid catalogue); the others, such as
# 13, 31, 43 and 45, come from the program that ran.
HARDWARE_XIDS = frozenset(
    {48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 110, 119, 120, 136, 140, 143, 144, 145, 149, 155, 156}
)


def finding(code: str, severity: Severity, subject: str, message: str, evidence: str, remedy: str = "") -> Finding:
    """A finding with one piece of evidence."""
    return Finding(code=code, severity=severity, subject=subject, message=message, evidence=(evidence,), remedy=remedy)


def subject_of(gpus: Gpu | Iterable[Gpu]) -> str:
    """ "GPU3", or "GPU0, GPU1"."""
    return f"GPU{gpus.index}" if isinstance(gpus, Gpu) else ", ".join(f"GPU{gpu.index}" for gpu in gpus)


def _memory(gpu: Gpu) -> Iterator[Finding]:
    subject = subject_of(gpu)
    if gpu.ecc_uncorrected:
        yield finding(
            "gpu.ecc.uncorrected", Severity.FAIL, subject,
            f"{gpu.ecc_uncorrected} uncorrectable memory error(s) since the driver was loaded",
            f"nvmlDeviceGetTotalEccErrors(uncorrected, volatile) = {gpu.ecc_uncorrected}",
            "Drain the node and reset the GPU; run the vendor's field diagnostic if it happens again.",
        )  # fmt: skip
    if gpu.remapping_failed or (gpu.remapped_rows_uncorrectable or 0) > REMAPPED_ROWS_MAX:
        yield finding(
            "gpu.memory.remap_failed", Severity.FAIL, subject, "bad memory rows can no longer be remapped",
            f"nvmlDeviceGetRemappedRows: failed {gpu.remapping_failed}, rows {gpu.remapped_rows_uncorrectable}",
            "Replace the GPU.",
        )  # fmt: skip
    if gpu.remapping_pending:
        yield finding(
            "gpu.memory.remap_pending", Severity.WARN, subject, "a bad memory row waits for a reset to be remapped",
            "nvmlDeviceGetRemappedRows: pending", "Drain the node and reset the GPU.",
        )  # fmt: skip
    if gpu.retired_pages:
        yield finding(
            "gpu.memory.retired", Severity.INFO, subject, f"{gpu.retired_pages} memory page(s) are retired",
            f"nvmlDeviceGetRetiredPages = {gpu.retired_pages}",
        )  # fmt: skip


def _heat(gpu: Gpu) -> Iterator[Finding]:
    subject, reasons = subject_of(gpu), set(gpu.throttle_reasons or ())
    now, slowdown = gpu.temperature_celsius, gpu.temperature_slowdown_celsius
    limit = min(HOT_CELSIUS, slowdown or HOT_CELSIUS)
    if now is not None and now >= limit:
        yield finding(
            "gpu.thermal.hot", Severity.WARN, subject,
            f"{now:.0f} C: clocks fall from about {limit:.0f} C on"
            + (f", and are cut at {slowdown:.0f} C" if slowdown else ""),
            f"nvmlDeviceGetTemperature = {now:.0f}", "Check fans, air flow and inlet temperature.",
        )  # fmt: skip
    if "hw_slowdown" in reasons and "hw_power_brake" not in reasons:  # the driver does not say why: heat, mostly
        reasons.add("hw_thermal")
    if reasons & THERMAL:
        clock = f" at {gpu.sm_clock_hertz / 1e6:.0f} MHz" if gpu.sm_clock_hertz else ""
        yield finding(
            "gpu.thermal.throttling", Severity.WARN, subject,
            f"clocks are held down{clock} by {', '.join(sorted(reasons & THERMAL))}; every rank waits for this GPU",
            f"nvmlDeviceGetCurrentClocksThrottleReasons: {', '.join(gpu.throttle_reasons or ())}",
            "Check fans, air flow and inlet temperature; compare with the neighbours in the rack.",
        )  # fmt: skip


def _power(gpu: Gpu) -> Iterator[Finding]:
    subject, reasons = subject_of(gpu), set(gpu.throttle_reasons or ())
    if "hw_power_brake" in reasons:
        yield finding(
            "gpu.power.brake", Severity.WARN, subject, "the power brake is pulled: the supply asks for slower clocks",
            "nvmlDeviceGetCurrentClocksThrottleReasons: hw_power_brake",
            "Check the power supplies, their redundancy and the rack's power budget.",
        )  # fmt: skip
    if "sw_power_cap" in reasons:
        yield finding(
            "gpu.power.capped", Severity.INFO, subject,
            f"clocks are held down by the power limit ({gpu.power_limit_watts or 0:.0f} W): usual under full load",
            "nvmlDeviceGetCurrentClocksThrottleReasons: sw_power_cap",
        )  # fmt: skip
    limit, default = gpu.power_limit_watts, gpu.power_limit_default_watts
    if limit and default and limit < default - 0.5:  # half a watt: both are rounded to milliwatts by the driver
        yield finding(
            "gpu.power.limit", Severity.WARN, subject,
            f"the power limit is {limit:.0f} W, below the board's {default:.0f} W",
            f"nvmlDeviceGetEnforcedPowerLimit = {limit:.0f} W",
            f"If nobody chose this limit, restore it: nvidia-smi -i {gpu.index} -pl {default:.0f}.",
        )  # fmt: skip


def _xids(gpu: Gpu) -> Iterator[Finding]:
    for hardware in (True, False):
        numbers = Counter(xid for xid in gpu.xids or () if (xid in HARDWARE_XIDS) is hardware)
        if not numbers:
            continue
        what = ", ".join(f"Xid {xid} ({count} times)" for xid, count in numbers.items())
        yield finding(
            "gpu.xid.hardware" if hardware else "gpu.xid.application",
            Severity.WARN if hardware else Severity.INFO, subject_of(gpu),
            f"the driver has logged {what} since the kernel's log began"
            + ("" if hardware else ": usually an error of the program that ran"),
            f"kernel log, NVRM: {what}",
            "Look the numbers up in NVIDIA's Xid catalogue; reset the GPU, and have it checked if they come back."
            if hardware else "",
        )  # fmt: skip


RULES: tuple[Callable[[Gpu], Iterator[Finding]], ...] = (_memory, _heat, _power, _xids)

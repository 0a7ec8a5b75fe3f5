"""Rules for one GPU: links, modes, memory, heat, power and errors logged by the driver; part of `probes.gpu.probe`.

Xid numbers and their causes: NVIDIA, "Xid Errors", the Xid catalogue
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), columns immediate and investigatory action, and the
older listing for boards before Ampere. If the action is a GPU reset, a restart of the host, a link check or a repair,
the cause is "gpu". If the action is to check the application, it is "program"; otherwise it is "driver". The cause of
an Xid that the catalogue does not use is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Literal

from contracts.finding import Finding, Status, by_loss
from contracts.tables import read_table
from hardware.gpus import compute_clock_share, find_gpu
from probes import api
from probes.gpu.facts import Gpu, GpuFacts

TEXTS = read_table(__file__, "findings.toml")
WORDS = read_table(__file__, "words.toml")

Cause = Literal["gpu", "program", "driver"]
""""gpu": the GPU, its memory or links; "program": the application; "driver": an engine, firmware or the driver."""


XID_CAUSES: tuple[Cause, ...] = ("gpu", "driver", "program")  # most serious first


def explain_xid(xid: int) -> Cause:
    """Return the cause of an Xid. An Xid that is in no catalogue is not attributed to the program."""
    table = read_table(__file__, "xids.toml")  # read only when an Xid was found
    return "gpu" if str(xid) in table["gpu"] else "program" if str(xid) in table["program"] else "driver"


def name_xids(xids: Iterable[int], of: Cause) -> str:
    """Describe the Xids of one cause: "Xid 74 (NVLink error, 2 times), Xid 79 (GPU has fallen off the bus, once)"."""
    counts = Counter(xid for xid in xids if explain_xid(xid) == of)
    causes = read_table(__file__, "xids.toml")[of] if counts else {}
    return ", ".join(
        f"Xid {xid} ({causes.get(str(xid), 'no cause named')}, {'once' if count == 1 else f'{count} times'})"
        for xid, count in counts.items()
    )


HOT_CELSIUS = (
    84.0  # clocks begin to fall between 84 and 90 C: stas00/ml-engineering, compute/accelerator, "Temperature"
)
MAX_REMAPPED_ROWS = 512  # per GPU: NVIDIA GPU Memory Error Management, "Row-remapping", RMA criteria
THERMAL = {"sw_thermal", "hw_thermal"}

BUSY_RATIO = 0.5
"""A GPU with at least this utilization is busy. Below it, clocks and PCIe link may be lowered between kernels."""

# A busy GPU without a reported throttle reason runs near its maximum clock and drops by steps of about 15 MHz as it
# warms up. A clock 25 % lower is not such a step, and compute then takes a third longer. The power limit may hold a
# healthy GPU at 60 to 70 % (H100 at 700 W in large GEMMs), but not below 50 %.
LOW_CLOCK_RATIO = 0.75
LOW_CLOCK_RATIO_CAPPED = 0.5

# Memory that the driver reserves: about 600 MiB on an H100, and about as much per 40 GiB on larger boards.
RESERVED_BYTES = 1 << 30
RESERVED_RATIO = 0.015
HELD_RATIO = 0.1  # fraction of memory in use by others at which a memory forecast is off by more than its margin
FULL_RATIO = 0.9  # above this, no model sized for the board fits


def name_subject(gpus: Gpu | Iterable[Gpu]) -> str:
    """Return "GPU3", or "GPU0, GPU1"."""
    return f"GPU{gpus.index}" if isinstance(gpus, Gpu) else ", ".join(f"GPU{gpu.index}" for gpu in gpus)


def finding(
    key: str, about: Gpu | str, status: Status | None = None, evidence: tuple[str, ...] = (), **values: object
) -> Finding:
    """Create a finding from `findings.toml`. If its subject is a GPU, the text may refer to the GPU's facts."""
    if isinstance(about, Gpu):
        return api.finding(TEXTS, key, status, name_subject(about), evidence, gpu=about, **values)
    return api.finding(TEXTS, key, status, about, evidence, **values)


Rule = Callable[[Gpu], Iterator[Finding]]


def _check_facts(gpu: Gpu) -> Iterator[Finding]:
    """Report what one fact decides: it is true or above zero, or it has one of the values in `words.toml`."""
    for key, row in WORDS["rule"].items():
        value = getattr(gpu, row["fact"])
        if value in row["values"] if "values" in row else value:
            yield finding(key, gpu)


# Links and modes ----------------------------------------------------------------------------------------------------


def _check_pcie(gpu: Gpu) -> Iterator[Finding]:
    width, largest = gpu.pcie_width, gpu.pcie_width_max
    # If sysfs shows this link, the pci probe checks its width, because it also knows the slot.
    if width and largest and width < largest and not gpu.link_in_sysfs:
        yield finding("gpu.pcie.width", gpu, share=width / largest)
    now, best = gpu.pcie_generation, gpu.pcie_generation_max
    # An idle GPU lowers its link speed, so only a busy GPU is checked.
    if now and best and now < best and (gpu.utilization_ratio or 0.0) >= BUSY_RATIO:
        yield finding("gpu.pcie.generation", gpu)


def _check_nvlink_errors(gpu: Gpu) -> Iterator[Finding]:
    bad = {link.link: {k: n for k, n in link.errors.items() if n} for link in gpu.nvlinks if link.errors}
    bad = {link: errors for link, errors in bad.items() if errors}
    if bad:
        listed = "; ".join(f"link {n}: " + ", ".join(f"{k} {v}" for k, v in e.items()) for n, e in bad.items())
        yield finding("gpu.nvlink.errors", gpu, count=len(bad), what=listed)


def _check_c2c(gpu: Gpu) -> Iterator[Finding]:
    model = find_gpu(gpu.name)
    if gpu.c2c_enabled is False and model and model.grace:
        yield finding("gpu.c2c.off", gpu)


def _check_fabric(gpu: Gpu) -> Iterator[Finding]:
    if gpu.fabric_state in ("not_started", "in_progress") or gpu.fabric_status:
        state = f"{gpu.fabric_state}, status {gpu.fabric_status}" if gpu.fabric_status else gpu.fabric_state
        key = "gpu.fabric.incomplete" + " in_progress" * (gpu.fabric_state == "in_progress")
        yield finding(key, gpu, state=state)
    faults = list(gpu.fabric_faults or ())
    texts = WORDS["fabric"]
    faults_in_words = [texts.get(fault, f"its configuration is wrong ({fault.replace('_', ' ')})") for fault in faults]
    if gpu.fabric_summary == "limited_capacity" or (gpu.fabric_summary == "unhealthy" and not gpu.fabric_degraded):
        faults.append(f"summary {gpu.fabric_summary}")
        faults_in_words = faults_in_words or [f"NVML sums its health up as {gpu.fabric_summary.replace('_', ' ')}"]
    if faults:
        # Learned routes remain without the manager, and reduced capacity is not caused by this GPU's links alone.
        mild = set(faults) <= {"fabric_manager_disconnected", "summary limited_capacity"}
        status = Status.WARN if mild else Status.FAIL
        yield finding("gpu.fabric.unhealthy", gpu, status, words="; ".join(faults_in_words), faults=", ".join(faults))


def _check_mig(gpu: Gpu) -> Iterator[Finding]:
    if gpu.mig_enabled:
        yield finding("gpu.mig.enabled" + " off_later" * (gpu.mig_pending is False), gpu)
    elif gpu.mig_enabled is False and gpu.mig_pending:
        yield finding("gpu.mig.enabled pending", gpu)


def _check_recovery(gpu: Gpu) -> Iterator[Finding]:
    action, remedies = gpu.recovery_action, WORDS["recovery"]
    if action not in (None, "none"):
        remedy = remedies.get(action, remedies["another"])
        yield finding("gpu.device.recovery", gpu, action=action.replace("_", " "), remedy=remedy)


# Memory -------------------------------------------------------------------------------------------------------------


def _check_ecc(gpu: Gpu) -> Iterator[Finding]:
    if gpu.remapping_failed or (gpu.remapped_rows_uncorrectable or 0) > MAX_REMAPPED_ROWS:
        yield finding("gpu.memory.remap_failed", gpu)
    if gpu.sram_threshold_exceeded or gpu.sram_uncorrected:
        yield finding("gpu.ecc.sram" + " threshold" * bool(gpu.sram_threshold_exceeded), gpu)
    if gpu.ecc_uncorrected_lifetime or gpu.sram_uncorrected_lifetime:
        counters = {"all memory": gpu.ecc_uncorrected_lifetime, "on-chip memory (SRAM)": gpu.sram_uncorrected_lifetime}
        counts = [f"{count} by the counter of {of}" for of, count in counters.items() if count is not None]
        yield finding("gpu.ecc.lifetime", gpu, counts=" and ".join(counts))
    if gpu.ecc_enabled is False:
        until, later = (", until the next reset", "on") if gpu.ecc_pending else ("", "off")
        yield finding("gpu.ecc.off" + " delivered" * (gpu.ecc_default is False), gpu, until=until, later=later)
    elif gpu.ecc_enabled and gpu.ecc_pending is False:
        yield finding("gpu.ecc.off pending", gpu)


def count_held_bytes(gpu: Gpu) -> int | None:
    """Return the memory that processes use, without the driver's reservation. None if NVML does not report it."""
    if not gpu.memory_bytes or gpu.memory_used_bytes is None:
        return None
    reserved = max(RESERVED_BYTES, int(RESERVED_RATIO * gpu.memory_bytes))
    return max(0, min(gpu.memory_used_bytes, gpu.memory_bytes) - reserved)


def _check_held_memory(gpu: Gpu) -> Iterator[Finding]:
    """Report memory in use. If the GPU is busy, a job is running: INFO. Memory held on an idle GPU blocks the next job.

    In the gate before a job, full memory fails even on a busy GPU: `fail_full_gpus`.
    """
    in_use, size = count_held_bytes(gpu), gpu.memory_bytes or 0
    if in_use is None or in_use < HELD_RATIO * size:
        return
    used = gpu.memory_used_bytes or 0
    status = Status.INFO if gpu.utilization_ratio else Status.FAIL if is_full(gpu) else Status.WARN
    whose = ", ".join(
        f"pid {p.pid}" + (f" ({p.memory_bytes / 2**30:.1f} GiB)" if p.memory_bytes else "")
        for p in (gpu.processes or ())[:8]
    )
    yield finding(
        "gpu.memory.in_use", gpu, status, used=used / 2**30, size=size / 2**30, share=used / size,
        idle=" although the GPU is idle" if gpu.utilization_ratio == 0 else "", whose=whose or "none visible from here",
        remedy="" if status is Status.INFO else FREE_MEMORY,
    )  # fmt: skip


FREE_MEMORY = "End the processes that hold it (fuser -v /dev/nvidia*), or wait until they end."


def is_full(gpu: Gpu) -> bool:
    """Whether so much memory is in use that no job sized for this board fits."""
    return bool(gpu.memory_bytes) and (gpu.memory_used_bytes or 0) >= FULL_RATIO * (gpu.memory_bytes or 0)


def fail_full_gpus(checks: Iterable[Finding], snapshots: Iterable[api.Snapshot]) -> tuple[Finding, ...]:
    """Fail GPUs whose memory is full: a job that starts now cannot use memory that another process holds."""
    facts = [(snapshot.hostname, gpus) for snapshot in snapshots if (gpus := snapshot.facts(GpuFacts)) is not None]
    full = {(node, name_subject(gpu)) for node, gpu_facts in facts for gpu in gpu_facts.gpus if is_full(gpu)}
    return tuple(
        replace(check, status=Status.FAIL, remedy=FREE_MEMORY)
        if check.code == "gpu.memory.in_use" and (check.node, check.subject) in full
        else check
        for check in checks
    )


# Heat, clocks and power ---------------------------------------------------------------------------------------------

HW_SLOWDOWN_LOSS = 0.5
"""Minimum fraction of the clock that is lost: nvml.h, HwSlowdown, HwThermalSlowdown and HwPowerBrakeSlowdown."""


FULL_CLOCK_RATIO = 0.9
"""At this fraction of the maximum clock or above, the drop is normal for a healthy GPU as it warms up."""


def _get_clock_loss(gpu: Gpu, minimum: float) -> float:
    """Return the lost fraction of the maximum clock; `minimum` if the clock does not show it, e.g. on an idle GPU."""
    if not gpu.sm_clock_hertz or not gpu.sm_clock_max_hertz or not gpu.utilization_ratio:
        return minimum
    return max(minimum, 1.0 - gpu.sm_clock_hertz / gpu.sm_clock_max_hertz)


def _describe_slow(gpu: Gpu, reason: str) -> str:
    """Describe the current effect of a throttle reason, based on the GPU's clock and utilization."""
    now, highest, name = gpu.sm_clock_hertz, gpu.sm_clock_max_hertz, name_subject(gpu)
    clock = f" {now / 1e6:.0f}" + (f" of {highest / 1e6:.0f}" if highest else "") + " MHz" if now else ""
    to = f" to{clock}" if clock else ""
    case = "idle" if gpu.utilization_ratio == 0 else "slowed"
    if now and highest and now >= FULL_CLOCK_RATIO * highest:
        case = "full"
    return str(WORDS["slow"][case]).format(name=name, why=reason, at=f" at{clock}" if clock else "", to=to)


def _check_heat(gpu: Gpu) -> Iterator[Finding]:
    reasons = set(gpu.throttle_reasons or ())
    now, slowdown = gpu.temperature_celsius, gpu.temperature_slowdown_celsius
    limit = min(HOT_CELSIUS, slowdown or HOT_CELSIUS)
    if now is not None and now >= limit:
        cut = f", and again at {slowdown:.0f} °C" if slowdown else ""
        yield finding("gpu.thermal.hot", gpu, limit=limit, cut=cut)
    slowdowns: list[tuple[str, float, str]] = []  # (code, minimum fraction of the clock that is lost, reason)
    if "hw_slowdown" in reasons and not reasons & (THERMAL | {"hw_power_brake"}):
        # nvml.h: core clocks are halved or lower due to heat, the power brake or a too fast increase in power draw.
        cause = "a hardware slowdown (heat, the power brake or a peak of power: the driver does not say)"
        slowdowns.append(("gpu.clocks.slowdown", HW_SLOWDOWN_LOSS, cause))
    if hot := sorted(reasons & THERMAL):
        loss = HW_SLOWDOWN_LOSS if "hw_thermal" in reasons else 0.0
        slowdowns.append(("gpu.thermal.throttling", loss, f"heat ({', '.join(hot)})"))
    if "hw_power_brake" in reasons:
        slowdowns.append(("gpu.power.brake", HW_SLOWDOWN_LOSS, "the power brake of its supply (hw_power_brake)"))
    listed = ", ".join(gpu.throttle_reasons or ())
    for code, loss, cause in slowdowns:
        yield finding(code, gpu, by_loss(_get_clock_loss(gpu, loss)), slowed=_describe_slow(gpu, cause), reasons=listed)


_NAMED_ELSEWHERE = THERMAL | {"hw_slowdown", "hw_power_brake"}  # each has its own finding


def _check_clocks(gpu: Gpu) -> Iterator[Finding]:
    """Report a busy GPU whose clock is far below maximum without a reason that another rule reports."""
    now, most, busy = gpu.sm_clock_hertz, gpu.sm_clock_max_hertz, gpu.utilization_ratio
    reasons = set(gpu.throttle_reasons or ())
    if not now or not most or busy is None or busy < BUSY_RATIO or gpu.throttle_reasons is None:
        return
    if reasons & _NAMED_ELSEWHERE:
        return
    if now >= (LOW_CLOCK_RATIO_CAPPED if "sw_power_cap" in reasons else LOW_CLOCK_RATIO) * most:
        return
    reason = f"The driver names {', '.join(sorted(reasons))}." if reasons else "The driver names no reason."
    yield finding("gpu.clocks.low", gpu, now=now / 1e6, most=most / 1e6, why=reason, remedy=_name_remedy(gpu, reasons))


def _name_remedy(gpu: Gpu, reasons: set[str]) -> str:
    """Return the command that removes the limit named by the driver; locked clocks are only one such limit."""
    default = f" {gpu.power_limit_default_watts:.0f}" if gpu.power_limit_default_watts else ""
    cause = next((name for name in ("sw_power_cap", "sync_boost") if name in reasons), "another")
    which = "-rac" if reasons & {"applications_clocks", "display_clocks"} else "-rgc"
    restore = f"nvidia-smi -i {gpu.index} -pl{default}"
    return str(WORDS["clocks"][cause]).format(index=gpu.index, restore=restore, which=which)


def _check_power(gpu: Gpu) -> Iterator[Finding]:
    limit, default = gpu.power_limit_watts, gpu.power_limit_default_watts
    if "sw_power_cap" in (gpu.throttle_reasons or ()):
        yield finding("gpu.power.capped", gpu, limit=limit or 0)
    if limit and default and limit < default - 0.5:  # the driver rounds both to milliwatts; 0.5 W is a safe margin
        yield finding("gpu.power.limit", gpu, by_loss(1.0 - compute_clock_share(limit, default)))


# Xids ---------------------------------------------------------------------------------------------------------------


def list_xids(gpu: Gpu) -> tuple[int, ...] | None:
    """Return every known Xid, from the kernel log and from NVML events; most Xids are in both."""
    if gpu.xids is None or gpu.xid_events is None:
        return gpu.xids if gpu.xid_events is None else gpu.xid_events
    return tuple((Counter(gpu.xids) | Counter(gpu.xid_events)).elements())


_XID_CODES = {"gpu": "gpu.xid.hardware", "driver": "gpu.xid.driver", "program": "gpu.xid.application"}


def _check_xids(gpu: Gpu) -> Iterator[Finding]:
    xids = list_xids(gpu) or ()
    sources = [name for name, entries in (("kernel log, NVRM", gpu.xids), ("NVML events", gpu.xid_events)) if entries]
    for cause in XID_CAUSES:
        if listed := name_xids(xids, cause):
            yield finding(_XID_CODES[cause], gpu, what=listed, sources=" and ".join(sources))


def unjudged(facts: GpuFacts) -> dict[str, str]:
    """Return code -> reason for the Xid checks that could not run because the kernel log could not be read."""
    answering = [gpu for gpu in facts.gpus if gpu.error is None]
    if all(gpu.xids is not None for gpu in answering):
        return {}
    raised = {finding.code for gpu in answering for finding in _check_xids(gpu)}
    return {code: WORDS["xids"]["unread"] for code in _XID_CODES.values() if code not in raised}


RULES: tuple[Rule, ...] = (
    _check_pcie, _check_nvlink_errors, _check_c2c, _check_fabric, _check_mig, _check_recovery, _check_facts,
    _check_ecc, _check_held_memory, _check_heat, _check_clocks, _check_power, _check_xids,
)  # fmt: skip

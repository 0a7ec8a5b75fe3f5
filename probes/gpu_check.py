"""What is wrong with the GPUs of one host; see `probes.gpu`.

Every figure stands beside its source. What was not read is not judged.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from probes.api import Finding, Severity
from probes.gpu_types import Gpu, GpuFacts

HOT_CELSIUS = (
    84.0  # clocks begin to fall between 84 and 90 C: stas00/ml-engineering, compute/accelerator, "Temperature"
)
REMAPPED_ROWS_MAX = 512  # of one GPU: NVIDIA GPU Memory Error Management, "Row-remapping", RMA criteria
THERMAL = {"sw_thermal", "hw_thermal"}

# Boards that exist only with NVLink in use: no link at all is a fault, not a choice. Names as NVML prints them.
_SOLDERED_LINKS = re.compile(r"SXM|H100 80GB HBM3|H200$|H20$|H800$|B200|B300|GB\d00")

CODES = (
    "gpu.driver.unusable", "gpu.device.lost", "gpu.device.mixed", "gpu.device.mode", "gpu.pcie.width",
    "gpu.pcie.generation", "gpu.nvlink.missing", "gpu.nvlink.none", "gpu.nvlink.errors", "gpu.fabric.incomplete",
    "gpu.fabric.degraded", "gpu.p2p.refused", "gpu.ecc.uncorrected", "gpu.memory.remap_failed",
    "gpu.memory.remap_pending", "gpu.memory.retired", "gpu.thermal.hot", "gpu.thermal.throttling", "gpu.power.brake",
    "gpu.power.capped", "gpu.power.limit", "gpu.mig.enabled", "gpu.bar1.small", "gpu.persistence.off",
    "gpu.process.running",
)  # fmt: skip


def check(facts: GpuFacts) -> Iterator[Finding]:
    """All findings, host-wide ones first."""
    if facts.driver_error:
        yield _driver(facts)
        return
    answering = [gpu for gpu in facts.gpus if gpu.error is None]
    for gpu in facts.gpus:
        yield from _lost(gpu)
    yield from _mixed(answering)
    yield from _nvlink_counts(answering)
    yield from _p2p(facts)
    for gpu in answering:
        for rule in _PER_GPU:
            yield from rule(gpu)
    yield from _notes(answering)


def _finding(code: str, severity: Severity, subject: str, message: str, evidence: str, remedy: str = "") -> Finding:
    return Finding(code=code, severity=severity, subject=subject, message=message, evidence=(evidence,), remedy=remedy)


def _subject(gpus: Gpu | Iterable[Gpu]) -> str:
    return f"GPU{gpus.index}" if isinstance(gpus, Gpu) else ", ".join(f"GPU{gpu.index}" for gpu in gpus)


def _driver(facts: GpuFacts) -> Finding:
    missing = facts.driver_error == "LIBRARY_NOT_FOUND"
    return _finding(
        "gpu.driver.unusable",
        Severity.UNKNOWN if missing else Severity.FAIL,
        "",
        f"the PCI bus has {facts.pci_gpus} NVIDIA GPU(s), but NVML cannot be used: {facts.driver_error}",
        f"nvmlInit = {facts.driver_error}",
        "Give this container the NVIDIA driver libraries (runtimeClassName nvidia, NVIDIA_DRIVER_CAPABILITIES=utility)."
        if missing
        else "Load or reinstall the NVIDIA driver (modprobe nvidia; look at dmesg), and reboot after an upgrade.",
    )


def _lost(gpu: Gpu) -> Iterator[Finding]:
    if gpu.error is not None:
        yield _finding(
            "gpu.device.lost", Severity.FAIL, _subject(gpu), f"the driver cannot reach this GPU: {gpu.error}",
            f"nvml {gpu.error}", "Drain the node, look for XID 79 in dmesg, and reset or power-cycle the host.",
        )  # fmt: skip


def _mixed(gpus: list[Gpu]) -> Iterator[Finding]:
    names = Counter(gpu.name for gpu in gpus if gpu.name)
    if len(names) > 1:
        what = ", ".join(f"{count} x {name}" for name, count in names.most_common())
        yield _finding(
            "gpu.device.mixed", Severity.WARN, "", f"GPUs of different models: {what}; the slowest sets the pace",
            f"nvmlDeviceGetName: {what}", "Choose GPUs of one model with CUDA_VISIBLE_DEVICES.",
        )  # fmt: skip


def active_links(gpu: Gpu) -> int:
    """NVLinks with a partner."""
    return sum(link.active is True for link in gpu.nvlinks)


def _nvlink_counts(gpus: list[Gpu]) -> Iterator[Finding]:
    """A GPU is compared with its twins on the same host: how many links a board has differs by product."""
    by_name: dict[str | None, list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        if gpu.nvlinks_known and not gpu.mig_enabled:  # MIG turns NVLink off
            by_name[gpu.name].append(gpu)
    for name, twins in by_name.items():
        most = max(active_links(gpu) for gpu in twins)
        if most == 0 and len(twins) > 1 and name and _SOLDERED_LINKS.search(name):
            yield _finding(
                "gpu.nvlink.none", Severity.FAIL, _subject(twins),
                f"no NVLink is active on {name}, a board that is built with them; all traffic goes over PCIe",
                "nvmlDeviceGetNvLinkState = 0 or not supported on every link",
                "Check that the fabric manager runs (systemctl status nvidia-fabricmanager) and matches the driver.",
            )  # fmt: skip
        for gpu in twins:
            if active_links(gpu) < most:
                down = [str(link.link) for link in gpu.nvlinks if link.active is False]
                yield _finding(
                    "gpu.nvlink.missing", Severity.FAIL, _subject(gpu),
                    f"{active_links(gpu)} of {most} NVLinks are active; its twins have {most}",
                    f"nvmlDeviceGetNvLinkState = 0 on links {', '.join(down) or '(not listed)'}",
                    "Reset the GPU and restart the fabric manager; if the links stay down, have the board checked.",
                )  # fmt: skip


def _p2p(facts: GpuFacts) -> Iterator[Finding]:
    """One finding per reason, not per pair. GPUs without P2P by design (GeForce) are a note."""
    refused: dict[str, list[str]] = defaultdict(list)
    for pair in facts.pairs:
        if pair.p2p_read not in (None, "ok", "unknown"):
            refused[str(pair.p2p_read)].append(f"GPU{pair.a}-GPU{pair.b}")
    for reason, pairs in refused.items():
        yield _finding(
            "gpu.p2p.refused", Severity.INFO if reason == "gpu_not_supported" else Severity.WARN, "",
            f"no P2P ({reason.replace('_', ' ')}) between {', '.join(pairs[:4])}"
            + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")
            + "; NCCL goes through host memory there",
            f"nvmlDeviceGetP2PStatus(read) = {reason} for {len(pairs)} pairs",
            "" if reason == "gpu_not_supported" else "Look for IOMMU, ACS and the NVreg P2P settings of the driver.",
        )  # fmt: skip


def _pcie(gpu: Gpu) -> Iterator[Finding]:
    width, most = gpu.pcie_width, gpu.pcie_width_max
    if width and most and width < most:
        yield _finding(
            "gpu.pcie.width", Severity.WARN, _subject(gpu),
            f"runs with {width} PCIe lanes where GPU and slot have {most}",
            f"nvmlDeviceGetCurrPcieLinkWidth = {width}, nvmlDeviceGetMaxPcieLinkWidth = {most}",
            "Reseat the card or riser; check the slot's bifurcation in the firmware setup.",
        )  # fmt: skip
    now, best = gpu.pcie_generation, gpu.pcie_generation_max
    if now and best and now < best and gpu.utilization_ratio:  # an idle GPU trains its link down: no finding
        yield _finding(
            "gpu.pcie.generation", Severity.WARN, _subject(gpu),
            f"the PCIe link runs at generation {now} of {best} although the GPU is busy",
            f"nvmlDeviceGetCurrPcieLinkGeneration = {now} at {gpu.utilization_ratio:.0%} utilisation",
            "Look for PCIe errors (AER) in dmesg, reseat the card, and check the slot's speed in the firmware setup.",
        )  # fmt: skip


def _nvlink_errors(gpu: Gpu) -> Iterator[Finding]:
    """Corrected errors happen on healthy links: a note, the rate is for the metric to show."""
    bad = {link.link: {k: n for k, n in link.errors.items() if n} for link in gpu.nvlinks if link.errors}
    bad = {link: errors for link, errors in bad.items() if errors}
    if bad:
        what = "; ".join(f"link {n}: " + ", ".join(f"{k} {v}" for k, v in e.items()) for n, e in bad.items())
        yield _finding(
            "gpu.nvlink.errors", Severity.INFO, _subject(gpu),
            f"NVLink errors since the driver was loaded on {len(bad)} link(s); watch their rate",
            f"nvmlDeviceGetNvLinkErrorCounter: {what}",
        )  # fmt: skip


def _fabric(gpu: Gpu) -> Iterator[Finding]:
    if gpu.fabric_state in ("not_started", "in_progress"):
        yield _finding(
            "gpu.fabric.incomplete", Severity.FAIL, _subject(gpu),
            f"the NVSwitch fabric has not taken this GPU in ({gpu.fabric_state}); CUDA will not start on it",
            f"nvmlDeviceGetGpuFabricInfoV: state {gpu.fabric_state}",
            "Start the fabric manager of the driver's own release (and IMEX on NVL72), then reset the GPU.",
        )  # fmt: skip
    if gpu.fabric_degraded:
        yield _finding(
            "gpu.fabric.degraded", Severity.WARN, _subject(gpu), "the NVSwitch fabric reports degraded bandwidth",
            "nvmlDeviceGetGpuFabricInfoV: healthMask says degraded", "Look at the fabric manager's log on this rack.",
        )  # fmt: skip


def _memory(gpu: Gpu) -> Iterator[Finding]:
    subject = _subject(gpu)
    if gpu.ecc_uncorrected:
        yield _finding(
            "gpu.ecc.uncorrected", Severity.FAIL, subject,
            f"{gpu.ecc_uncorrected} uncorrectable memory error(s) since the driver was loaded",
            f"nvmlDeviceGetTotalEccErrors(uncorrected, volatile) = {gpu.ecc_uncorrected}",
            "Drain the node and reset the GPU; run the vendor's field diagnostic if it happens again.",
        )  # fmt: skip
    if gpu.remapping_failed or (gpu.remapped_rows_uncorrectable or 0) > REMAPPED_ROWS_MAX:
        yield _finding(
            "gpu.memory.remap_failed", Severity.FAIL, subject, "bad memory rows can no longer be remapped",
            f"nvmlDeviceGetRemappedRows: failed {gpu.remapping_failed}, rows {gpu.remapped_rows_uncorrectable}",
            "Replace the GPU.",
        )  # fmt: skip
    if gpu.remapping_pending:
        yield _finding(
            "gpu.memory.remap_pending", Severity.WARN, subject, "a bad memory row waits for a reset to be remapped",
            "nvmlDeviceGetRemappedRows: pending", "Drain the node and reset the GPU.",
        )  # fmt: skip
    if gpu.retired_pages:
        yield _finding(
            "gpu.memory.retired", Severity.INFO, subject, f"{gpu.retired_pages} memory page(s) are retired",
            f"nvmlDeviceGetRetiredPages = {gpu.retired_pages}",
        )  # fmt: skip


def _heat(gpu: Gpu) -> Iterator[Finding]:
    subject, reasons = _subject(gpu), set(gpu.throttle_reasons or ())
    now, slowdown = gpu.temperature_celsius, gpu.temperature_slowdown_celsius
    limit = min(HOT_CELSIUS, slowdown or HOT_CELSIUS)
    if now is not None and now >= limit:
        yield _finding(
            "gpu.thermal.hot", Severity.WARN, subject,
            f"{now:.0f} C: clocks fall from about {limit:.0f} C on"
            + (f", and are cut at {slowdown:.0f} C" if slowdown else ""),
            f"nvmlDeviceGetTemperature = {now:.0f}", "Check fans, air flow and inlet temperature.",
        )  # fmt: skip
    if "hw_slowdown" in reasons and "hw_power_brake" not in reasons:  # the driver does not say why: heat, mostly
        reasons.add("hw_thermal")
    if reasons & THERMAL:
        clock = f" at {gpu.sm_clock_hertz / 1e6:.0f} MHz" if gpu.sm_clock_hertz else ""
        yield _finding(
            "gpu.thermal.throttling", Severity.WARN, subject,
            f"clocks are held down{clock} by {', '.join(sorted(reasons & THERMAL))}; every rank waits for this GPU",
            f"nvmlDeviceGetCurrentClocksThrottleReasons: {', '.join(gpu.throttle_reasons or ())}",
            "Check fans, air flow and inlet temperature; compare with the neighbours in the rack.",
        )  # fmt: skip


def _power(gpu: Gpu) -> Iterator[Finding]:
    subject, reasons = _subject(gpu), set(gpu.throttle_reasons or ())
    if "hw_power_brake" in reasons:
        yield _finding(
            "gpu.power.brake", Severity.WARN, subject, "the power brake is pulled: the supply asks for slower clocks",
            "nvmlDeviceGetCurrentClocksThrottleReasons: hw_power_brake",
            "Check the power supplies, their redundancy and the rack's power budget.",
        )  # fmt: skip
    if "sw_power_cap" in reasons:
        yield _finding(
            "gpu.power.capped", Severity.INFO, subject,
            f"clocks are held down by the power limit ({gpu.power_limit_watts or 0:.0f} W): usual under full load",
            "nvmlDeviceGetCurrentClocksThrottleReasons: sw_power_cap",
        )  # fmt: skip
    limit, default = gpu.power_limit_watts, gpu.power_limit_default_watts
    if limit and default and limit < default - 0.5:  # half a watt: both are rounded to milliwatts by the driver
        yield _finding(
            "gpu.power.limit", Severity.WARN, subject,
            f"the power limit is {limit:.0f} W, below the board's {default:.0f} W",
            f"nvmlDeviceGetEnforcedPowerLimit = {limit:.0f} W",
            f"If nobody chose it, restore it: nvidia-smi -i {gpu.index} -pl {default:.0f}.",
        )  # fmt: skip


def _modes(gpu: Gpu) -> Iterator[Finding]:
    if gpu.mig_enabled:
        yield _finding(
            "gpu.mig.enabled", Severity.WARN, _subject(gpu), "MIG is on: no NVLink and no P2P between its slices",
            "nvmlDeviceGetMigMode: enabled", "Turn MIG off for multi-GPU training: nvidia-smi -mig 0.",
        )  # fmt: skip
    if gpu.compute_mode in ("prohibited", "exclusive_process", "exclusive_thread"):
        never = gpu.compute_mode == "prohibited"
        yield _finding(
            "gpu.device.mode", Severity.FAIL if never else Severity.INFO, _subject(gpu),
            f"compute mode {gpu.compute_mode}: " + ("no process may use CUDA" if never else "one process at a time"),
            f"nvmlDeviceGetComputeMode = {gpu.compute_mode}",
            f"nvidia-smi -i {gpu.index} -c DEFAULT" if never else "",
        )  # fmt: skip


def _notes(gpus: list[Gpu]) -> Iterator[Finding]:
    """What is worth knowing once, for all GPUs it holds for."""
    small = [gpu for gpu in gpus if gpu.bar1_bytes and gpu.memory_bytes and gpu.bar1_bytes < gpu.memory_bytes]
    if small:
        yield _finding(
            "gpu.bar1.small", Severity.INFO, _subject(small),
            f"BAR1 is {(small[0].bar1_bytes or 0) >> 20} MiB, less than the memory: GPUDirect RDMA can map only that",
            f"nvmlDeviceGetBAR1MemoryInfo: bar1Total {small[0].bar1_bytes}",
        )  # fmt: skip
    if off := [gpu for gpu in gpus if gpu.persistence_mode is False]:
        yield _finding(
            "gpu.persistence.off", Severity.INFO, _subject(off),
            "persistence mode is off: the first CUDA call after a pause initialises the GPU again",
            "nvmlDeviceGetPersistenceMode = 0", "nvidia-smi -pm 1, or run nvidia-persistenced.",
        )  # fmt: skip
    for gpu in gpus:
        if gpu.processes:
            pids = ", ".join(str(process.pid) for process in gpu.processes[:8])
            yield _finding(
                "gpu.process.running", Severity.INFO, _subject(gpu),
                f"{len(gpu.processes)} compute process(es) are on this GPU: measurements share it",
                f"nvmlDeviceGetComputeRunningProcesses: pid {pids}",
            )  # fmt: skip


_PER_GPU: tuple[Callable[[Gpu], Iterator[Finding]], ...] = (
    _pcie, _nvlink_errors, _fabric, _memory, _heat, _power, _modes,
)  # fmt: skip

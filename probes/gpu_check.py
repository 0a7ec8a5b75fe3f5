"""What is wrong with the GPUs of one host; see `probes.gpu`.

Every figure stands beside its source. What was not read is not judged.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from probes import gpu_health
from probes.api import Finding, Severity
from probes.gpu_health import finding, subject_of
from probes.gpu_types import Gpu, GpuFacts

# Boards that exist only with NVLink in use: no link at all is a fault, not a choice. Names as NVML prints them.
_SOLDERED_LINKS = re.compile(r"SXM|H100 80GB HBM3|H200$|H20$|H800$|B200|B300|GB\d00")

CODES = (
    "gpu.driver.unusable", "gpu.device.lost", "gpu.device.mixed", "gpu.device.mode", "gpu.pcie.width",
    "gpu.pcie.generation", "gpu.nvlink.missing", "gpu.nvlink.none", "gpu.nvlink.errors", "gpu.fabric.incomplete",
    "gpu.fabric.degraded", "gpu.fabric.split", "gpu.p2p.refused", "gpu.ecc.uncorrected", "gpu.memory.remap_failed",
    "gpu.memory.remap_pending", "gpu.memory.retired", "gpu.thermal.hot", "gpu.thermal.throttling", "gpu.power.brake",
    "gpu.power.capped", "gpu.power.limit", "gpu.mig.enabled", "gpu.bar1.small", "gpu.persistence.off",
    "gpu.process.running", "gpu.xid.hardware", "gpu.xid.application", "gpu.xid.new",
    "gpu.counters.rising",
)  # fmt: skip


def check(facts: GpuFacts) -> Iterator[Finding]:
    """All findings, host-wide ones first."""
    if facts.driver_error:
        yield _driver(facts)
        return
    answering = [gpu for gpu in facts.gpus if gpu.error is None]
    for gpu in facts.gpus:
        if gpu.error is not None:
            yield _lost(gpu)
    yield from _mixed(answering)
    yield from _split(answering)
    yield from _nvlink_counts(answering)
    yield from _p2p(facts)
    for gpu in answering:
        for rule in (*_PER_GPU, *gpu_health.RULES):
            yield from rule(gpu)
    yield from _notes(answering)


def _driver(facts: GpuFacts) -> Finding:
    missing = facts.driver_error == "LIBRARY_NOT_FOUND"
    return finding(
        "gpu.driver.unusable",
        Severity.UNKNOWN if missing else Severity.FAIL,
        "",
        f"the PCI bus has {facts.pci_gpus or 'an unknown number of'} NVIDIA GPU(s), but NVML cannot be used: "
        f"{facts.driver_error}",
        f"nvmlInit = {facts.driver_error}",
        "Give this container the NVIDIA driver libraries (runtimeClassName nvidia, NVIDIA_DRIVER_CAPABILITIES=utility)."
        if missing
        else "Load or reinstall the NVIDIA driver (modprobe nvidia; look at dmesg), and reboot after an upgrade.",
    )


def _lost(gpu: Gpu) -> Finding:
    where = f" at {gpu.bus_id}" if gpu.bus_id else ""
    xids = f"; kernel log: Xid {', '.join(map(str, gpu.xids))}" if gpu.xids else ""
    return finding(
        "gpu.device.lost", Severity.FAIL, subject_of(gpu),
        f"the driver cannot reach this GPU{where}: {gpu.error}", f"nvml {gpu.error}{xids}",
        "Drain the node, look for Xid 79 in dmesg, and reset or power-cycle the host.",
    )  # fmt: skip


def _mixed(gpus: list[Gpu]) -> Iterator[Finding]:
    names = Counter(gpu.name for gpu in gpus if gpu.name)
    if len(names) > 1:
        what = ", ".join(f"{count} x {name}" for name, count in names.most_common())
        yield finding(
            "gpu.device.mixed", Severity.WARN, "", f"GPUs of different models: {what}; the slowest sets the pace",
            f"nvmlDeviceGetName: {what}", "Choose GPUs of one model with CUDA_VISIBLE_DEVICES.",
        )  # fmt: skip


def _split(gpus: list[Gpu]) -> Iterator[Finding]:
    """GPUs of one host that the fabric put into different NVLink domains, or left out of the one the others are in."""
    cliques = Counter(gpu.fabric_clique for gpu in gpus if gpu.fabric_state == "completed")
    if len(cliques) > 1:
        what = ", ".join(f"{count} in {clique or 'none'}" for clique, count in cliques.most_common())
        yield finding(
            "gpu.fabric.split", Severity.WARN, "",
            f"the GPUs of this host are not in one NVLink clique: {what}; NCCL joins only GPUs of one clique by NVLink",
            f"nvmlDeviceGetGpuFabricInfoV, cluster UUID and clique: {what}",
            "Look at the partitions of the fabric manager or of NMX-C, and take the GPUs into one.",
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
            yield finding(
                "gpu.nvlink.none", Severity.FAIL, subject_of(twins),
                f"no NVLink is active on {name}, a board that is built with them; all traffic goes over PCIe",
                "nvmlDeviceGetNvLinkState = 0 or not supported on every link",
                "Check that the fabric manager runs (systemctl status nvidia-fabricmanager) and matches the driver.",
            )  # fmt: skip
        for gpu in twins:
            if active_links(gpu) < most:
                down = [str(link.link) for link in gpu.nvlinks if link.active is False]
                yield finding(
                    "gpu.nvlink.missing", Severity.FAIL, subject_of(gpu),
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
        yield finding(
            "gpu.p2p.refused", Severity.INFO if reason == "gpu_not_supported" else Severity.WARN, "",
            f"no P2P ({reason.replace('_', ' ')}) between {', '.join(pairs[:4])}"
            + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")
            + "; NCCL goes through host memory there",
            f"nvmlDeviceGetP2PStatus(read) = {reason} for {len(pairs)} pairs",
            "" if reason == "gpu_not_supported" else "Look for IOMMU, ACS and the NVreg P2P settings of the driver.",
        )  # fmt: skip


def _pcie(gpu: Gpu) -> Iterator[Finding]:
    width, most = gpu.pcie_width, gpu.pcie_width_max
    # Where sysfs shows the link, the pci probe judges the same width, with the slot's side of it.
    if width and most and width < most and not gpu.link_in_sysfs:
        yield finding(
            "gpu.pcie.width", Severity.WARN, subject_of(gpu),
            f"runs with {width} PCIe lanes where GPU and slot have {most}",
            f"nvmlDeviceGetCurrPcieLinkWidth = {width}, nvmlDeviceGetMaxPcieLinkWidth = {most}",
            "Reseat the card or riser; check the slot's bifurcation in the firmware setup.",
        )  # fmt: skip
    now, best = gpu.pcie_generation, gpu.pcie_generation_max
    if now and best and now < best and gpu.utilization_ratio:  # an idle GPU trains its link down: no finding
        yield finding(
            "gpu.pcie.generation", Severity.WARN, subject_of(gpu),
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
        yield finding(
            "gpu.nvlink.errors", Severity.INFO, subject_of(gpu),
            f"NVLink errors since the driver was loaded on {len(bad)} link(s); watch their rate",
            f"nvmlDeviceGetNvLinkErrorCounter: {what}",
        )  # fmt: skip


def _fabric(gpu: Gpu) -> Iterator[Finding]:
    if gpu.fabric_state in ("not_started", "in_progress"):
        yield finding(
            "gpu.fabric.incomplete", Severity.FAIL, subject_of(gpu),
            f"the NVSwitch fabric has not taken this GPU in ({gpu.fabric_state}); CUDA will not start on it",
            f"nvmlDeviceGetGpuFabricInfoV: state {gpu.fabric_state}",
            "Start the fabric manager of the driver's own release (and IMEX on NVL72), then reset the GPU.",
        )  # fmt: skip
    if gpu.fabric_degraded:
        yield finding(
            "gpu.fabric.degraded", Severity.WARN, subject_of(gpu), "the NVSwitch fabric reports degraded bandwidth",
            "nvmlDeviceGetGpuFabricInfoV: healthMask says degraded", "Look at the fabric manager's log on this rack.",
        )  # fmt: skip


def _modes(gpu: Gpu) -> Iterator[Finding]:
    if gpu.mig_enabled:
        yield finding(
            "gpu.mig.enabled", Severity.WARN, subject_of(gpu), "MIG is on: no NVLink and no P2P between its slices",
            "nvmlDeviceGetMigMode: enabled", "Turn MIG off for multi-GPU training: nvidia-smi -mig 0.",
        )  # fmt: skip
    if gpu.compute_mode in ("prohibited", "exclusive_process", "exclusive_thread"):
        never = gpu.compute_mode == "prohibited"
        yield finding(
            "gpu.device.mode", Severity.FAIL if never else Severity.INFO, subject_of(gpu),
            f"compute mode {gpu.compute_mode}: " + ("no process may use CUDA" if never else "one process at a time"),
            f"nvmlDeviceGetComputeMode = {gpu.compute_mode}",
            f"nvidia-smi -i {gpu.index} -c DEFAULT" if never else "",
        )  # fmt: skip


def _notes(gpus: list[Gpu]) -> Iterator[Finding]:
    """What is worth knowing once, for all GPUs it holds for."""
    small = [gpu for gpu in gpus if gpu.bar1_bytes and gpu.memory_bytes and gpu.bar1_bytes < gpu.memory_bytes]
    if small:
        yield finding(
            "gpu.bar1.small", Severity.INFO, subject_of(small),
            f"BAR1 is {(small[0].bar1_bytes or 0) >> 20} MiB, less than the memory: GPUDirect RDMA can map only that",
            f"nvmlDeviceGetBAR1MemoryInfo: bar1Total {small[0].bar1_bytes}",
        )  # fmt: skip
    if off := [gpu for gpu in gpus if gpu.persistence_mode is False]:
        yield finding(
            "gpu.persistence.off", Severity.INFO, subject_of(off),
            "persistence mode is off: the first CUDA call after a pause initialises the GPU again",
            "nvmlDeviceGetPersistenceMode = 0", "nvidia-smi -pm 1, or run nvidia-persistenced.",
        )  # fmt: skip
    for gpu in gpus:
        if gpu.processes:
            pids = ", ".join(str(process.pid) for process in gpu.processes[:8])
            yield finding(
                "gpu.process.running", Severity.INFO, subject_of(gpu),
                f"{len(gpu.processes)} compute process(es) are on this GPU: measurements share it",
                f"nvmlDeviceGetComputeRunningProcesses: pid {pids}",
            )  # fmt: skip


_PER_GPU: tuple[Callable[[Gpu], Iterator[Finding]], ...] = (
    _pcie, _nvlink_errors, _fabric, _modes,
)  # fmt: skip

"""What is wrong with the GPUs of one host; see `probes.gpu.probe`.

Every figure stands beside its source. What was not read is not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from contracts.finding import Finding, Status
from hardware.gpus import on_grace
from probes.gpu import health as gpu_health
from probes.gpu import unread as gpu_unread
from probes.gpu.bus import PCI, check_bus
from probes.gpu.compare import compare
from probes.gpu.facts import Gpu, GpuFacts
from probes.gpu.health import BUSY_RATIO, finding, subject_of
from probes.host.nvml import NO_DEVICE_FILES
from probes.pci import probe as pci_probe

CODES = (
    "gpu.driver.unusable", "gpu.device.lost", "gpu.device.denied", "gpu.device.unread",
    "gpu.device.missing", "gpu.device.not_given", "gpu.device.hidden", "gpu.device.vgpu", "gpu.device.confidential",
    "gpu.device.recovery", "gpu.device.mixed", "gpu.device.mode", "gpu.pcie.width", "gpu.pcie.generation",
    "gpu.nvlink.missing", "gpu.nvlink.none", "gpu.nvlink.errors", "gpu.c2c.off", "gpu.fabric.incomplete",
    "gpu.fabric.unhealthy", "gpu.fabric.degraded", "gpu.fabric.split", "gpu.p2p.refused", "gpu.ecc.uncorrected",
    "gpu.ecc.sram", "gpu.ecc.lifetime", "gpu.ecc.off", "gpu.memory.remap_failed", "gpu.memory.remap_pending",
    "gpu.memory.remap_exhausted", "gpu.memory.retired", "gpu.memory.held", "gpu.thermal.hot", "gpu.thermal.throttling",
    "gpu.clocks.slowdown", "gpu.clocks.low", "gpu.power.brake", "gpu.power.capped", "gpu.power.limit",
    "gpu.mig.enabled", "gpu.bar1.small", "gpu.persistence.off", "gpu.process.running", "gpu.xid.hardware",
    "gpu.xid.driver", "gpu.xid.application", "gpu.xid.new", "gpu.counters.rising",
)  # fmt: skip


def check(facts: GpuFacts) -> Iterator[Finding]:
    """All findings, host-wide ones first."""
    if facts.driver_error:
        yield _driver(facts)
        return
    yield from check_bus(facts.bus, {gpu.bus_id for gpu in facts.gpus if gpu.bus_id}, len(facts.gpus))
    yield from _fallen(facts)
    answering = [gpu for gpu in facts.gpus if gpu.error is None]
    for gpu in facts.gpus:
        if gpu.error is not None:
            yield _refused(gpu)
    yield from compare(facts)
    for gpu in answering:
        for rule in (*_PER_GPU, *gpu_health.RULES):
            yield from rule(gpu)
    yield from _notes(answering)
    if facts.confidential:
        yield finding(
            "gpu.device.confidential", Status.WARN, subject_of(answering),
            "Confidential computing is on: copies between host and GPU are encrypted and pass a bounce buffer, and "
            "GPUDirect RDMA is not available. Steps over several nodes become slower.",
            "nvmlSystemGetConfComputeState: ccFeature 1",
            "Turn it off for training that does not need it (nvidia-smi conf-compute, and the firmware setup).",
        )  # fmt: skip
    yield from gpu_unread.findings(facts)


# What NVML's start says of the driver itself; any other error leaves open what is wrong with it.
_NO_DRIVER = ("DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH", "GPU_IS_LOST", "RESET_REQUIRED")


def _driver(facts: GpuFacts) -> Finding:
    error, symbol = facts.driver_error or "", facts.driver_error_symbol or "nvmlInit"
    if error == "LIBRARY_NOT_FOUND":
        remedy = (
            "Give this container the NVIDIA driver libraries (runtimeClassName nvidia, "
            "NVIDIA_DRIVER_CAPABILITIES=utility), or name their folder in TOPOFLIGHT_DRIVER_PATHS."
        )
    elif error == NO_DEVICE_FILES:
        remedy = (
            "The node has the driver loaded, and this container none of its device files: runtimeClassName nvidia "
            "where the cluster has it, else NVIDIA's runtime as the default one, or a privileged container."
        )
    elif error == "NO_PERMISSION":
        remedy = "Give this process /dev/nvidiactl and the GPUs' device files, or scan on the host."
    elif error == "LIB_RM_VERSION_MISMATCH":
        remedy = (
            "The loaded kernel module and libnvidia-ml are of different releases, as after an upgrade: reload the "
            "NVIDIA modules, or reboot the node."
        )
    elif error in _NO_DRIVER:
        remedy = "Load or reinstall the NVIDIA driver (modprobe nvidia; look at dmesg), and reboot after an upgrade."
    else:
        remedy = "Run nvidia-smi on the host, and look for NVRM lines in dmesg."
    return finding(
        "gpu.driver.unusable",
        Status.FAIL if error in _NO_DRIVER else Status.UNKNOWN,
        "",
        f"NVML cannot be used ({error}), so nothing is known of the {facts.pci_gpus or 'unknown number of'} "
        "NVIDIA GPU(s) on the PCI bus.",
        f"{symbol} = {error}",
        remedy,
    )


_BROKEN = {  # nvml.h, nvmlReturn_t and nvmlDeviceGetHandleByIndex -> what the driver says, what mends it
    "GPU_IS_LOST": (
        "the driver cannot reach it",
        "Drain the node, look for Xid 79 in dmesg, and reset or power-cycle the host."
    ),
    "RESET_REQUIRED": (
        "the driver wants it reset first", "Drain the node and reset the GPU: nvidia-smi --gpu-reset."
    ),
    "INSUFFICIENT_POWER": (
        "an external power cable is not attached properly",
        "Check the power cables of the GPU and its riser."
    ),
    "IRQ_ISSUE": (
        "the kernel has an interrupt problem with it",
        "Look for NVRM and IRQ lines in dmesg, and reboot the host."
    ),
    "CORRUPTED_INFOROM": ("its InfoROM is corrupted", "Have the InfoROM repaired, or replace the GPU."),
}  # fmt: skip


def _fallen(facts: GpuFacts) -> Iterator[Finding]:
    """GPUs that only the kernel's log still tells of: it reported a fault of them, and the bus has lost them since.

    NVML counts a lost GPU without its address for a while: as many of them are told of there.
    """
    gone = [(place, what) for place, xids in facts.xids_off_bus if (what := gpu_health.named_xids(xids, "gpu"))]
    if len(gone) <= sum(gpu.bus_id is None for gpu in facts.gpus):
        return
    for place, what in gone:
        yield finding(
            "gpu.device.missing", Status.FAIL, place,
            f"a GPU has gone from the PCI bus since the driver reported {what} of it; no job can use it",
            f"kernel log, NVRM: {what}; {PCI}: no device at {place}",
            "Drain the node and power-cycle the host; have the GPU and its seat checked if it is lost again.",
        )  # fmt: skip


def _refused(gpu: Gpu) -> Finding:
    """A GPU that NVML counts and does not give: broken, or refused for a reason that says nothing of it."""
    where = f" at {gpu.bus_id}" if gpu.bus_id else ""
    xids = f"; kernel log: Xid {', '.join(map(str, gpu.xids))}" if gpu.xids else ""
    evidence = f"nvml {gpu.error}{xids}"
    if gpu.broken:
        says, remedy = _BROKEN[gpu.refusal or ""]
        return finding(
            "gpu.device.lost", Status.FAIL, subject_of(gpu),
            f"{subject_of(gpu)}{where} cannot be used: {says} ({gpu.error}). Jobs on it fail, hang or do not start.",
            evidence, remedy,
        )  # fmt: skip
    if gpu.refusal == "NO_PERMISSION":
        return finding(
            "gpu.device.denied", Status.UNKNOWN, subject_of(gpu),
            f"{subject_of(gpu)}{where} was not judged: this process may not use it.", evidence,
            "Scan outside of the job or container that limits its devices, or ask for this GPU too.",
        )  # fmt: skip
    return finding(
        "gpu.device.unread", Status.UNKNOWN, subject_of(gpu),
        f"{subject_of(gpu)}{where} was not judged: the driver did not give it ({gpu.error}).", evidence,
        "Scan again, and look for NVRM lines in dmesg if it stays so.",
    )  # fmt: skip


def _pcie(gpu: Gpu) -> Iterator[Finding]:
    width, most = gpu.pcie_width, gpu.pcie_width_max
    # Where sysfs shows the link, the pci probe judges the same width, with the slot's side of it.
    if width and most and width < most and not gpu.link_in_sysfs:
        yield finding(
            "gpu.pcie.width", pci_probe.NARROW_GPU, subject_of(gpu),
            f"runs with {width} PCIe lanes where GPU and slot have {most}: {width / most:.0%} of the bandwidth",
            f"nvmlDeviceGetCurrPcieLinkWidth = {width}, nvmlDeviceGetMaxPcieLinkWidth = {most}",
            "Reseat the card or riser; check the slot's bifurcation in the firmware setup.",
        )  # fmt: skip
    now, best = gpu.pcie_generation, gpu.pcie_generation_max
    # A GPU that is not busy trains its link down: no finding.
    if now and best and now < best and (gpu.utilization_ratio or 0.0) >= BUSY_RATIO:
        yield finding(
            "gpu.pcie.generation", Status.FAIL, subject_of(gpu),
            f"the PCIe link runs at generation {now} of {best} although the GPU is {gpu.utilization_ratio:.0%} busy",
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
            "gpu.nvlink.errors", Status.INFO, subject_of(gpu),
            f"NVLink errors since the driver was loaded on {len(bad)} link(s); watch their rate",
            f"NVML's error counters of the links: {what}",
        )  # fmt: skip


# What each field of the fabric's health means; those that are not here are a wrong configuration, by its name.
_FABRIC_WORDS = {
    "route_recovery": "the recovery of NVLink routes is in progress",
    "route_unhealthy": "an NVLink route of this GPU is unhealthy",
    "access_timeout_recovery": "the recovery from a timed-out access over NVLink is in progress",
    "partition_not_assigned": "this GPU is assigned to no partition",
    "fabric_manager_disconnected": "the global fabric manager is disconnected",
}


def _fabric(gpu: Gpu) -> Iterator[Finding]:
    if gpu.fabric_state in ("not_started", "in_progress") or gpu.fabric_status:
        status = f", status {gpu.fabric_status}" if gpu.fabric_status else ""
        under_way = gpu.fabric_state == "in_progress"
        yield finding(
            "gpu.fabric.incomplete", Status.FAIL, subject_of(gpu),
            f"{subject_of(gpu)} is not yet part of the NVSwitch fabric ({gpu.fabric_state}{status}). CUDA does not "
            "start on it until it is.",
            f"nvmlDeviceGetGpuFabricInfoV: state {gpu.fabric_state}{status}",
            "Wait until `nvidia-smi -q` shows the state Completed under Fabric. If it does not within a few minutes, "
            "read the fabric manager's log." if under_way
            else "Start the fabric manager of the driver's own release (and IMEX on NVL72), then reset the GPU.",
        )  # fmt: skip
    yield from _fabric_health(gpu)
    if gpu.fabric_degraded:
        yield finding(
            "gpu.fabric.degraded", Status.FAIL, subject_of(gpu), "the NVSwitch fabric reports degraded bandwidth",
            "nvmlDeviceGetGpuFabricInfoV: healthMask says degraded", "Look at the fabric manager's log on this rack.",
        )  # fmt: skip


def _fabric_health(gpu: Gpu) -> Iterator[Finding]:
    faults = list(gpu.fabric_faults or ())
    words = [_FABRIC_WORDS.get(fault, f"its configuration is wrong ({fault.replace('_', ' ')})") for fault in faults]
    if gpu.fabric_summary == "limited_capacity" or (gpu.fabric_summary == "unhealthy" and not gpu.fabric_degraded):
        faults.append(f"summary {gpu.fabric_summary}")
        words = words or [f"NVML sums its health up as {gpu.fabric_summary.replace('_', ' ')}"]
    if faults:
        # Routes that were learnt stay without the manager, and less capacity is no fault of this GPU's links alone.
        mild = set(faults) <= {"fabric_manager_disconnected", "summary limited_capacity"}
        yield finding(
            "gpu.fabric.unhealthy", Status.WARN if mild else Status.FAIL, subject_of(gpu),
            f"the NVSwitch fabric is not well: {'; '.join(words)}",
            f"nvmlDeviceGetGpuFabricInfoV: healthMask says {', '.join(faults)}",
            "Read the fabric manager's log (on NVL72 NMX-C's); a recovery must end before a job starts here.",
        )  # fmt: skip


def _c2c(gpu: Gpu) -> Iterator[Finding]:
    if gpu.c2c_enabled is False and on_grace(gpu.name):
        yield finding(
            "gpu.c2c.off", Status.WARN, subject_of(gpu),
            "the C2C link between this GPU and its Grace CPU is off: both talk over PCIe",
            "nvmlDeviceGetC2cModeInfoV: isC2cEnabled 0",
            "Look for Xid 121 and C2C lines in dmesg, and for the C2C setting in the firmware setup.",
        )  # fmt: skip


def _modes(gpu: Gpu) -> Iterator[Finding]:
    if gpu.mig_enabled:
        kinds = Counter(one.profile or "an unknown profile" for one in gpu.mig_slices or ())
        cut = ", ".join(f"{count} of {profile}" for profile, count in kinds.items())
        listed = "; ".join(f"{one.uuid} {one.profile or ''} (GPU instance {one.gpu_instance}, compute instance "
                           f"{one.compute_instance})" for one in gpu.mig_slices or ())  # fmt: skip
        unread = "its slices were not read" if gpu.mig_slices is None else "no slice"
        off_later = gpu.mig_pending is False
        yield finding(
            "gpu.mig.enabled", Status.FAIL, subject_of(gpu),
            f"{subject_of(gpu)} has MIG on ({cut or unread}), so there is no NVLink and no P2P between its slices."
            + (" MIG is off after the next reset." if off_later else ""),
            f"nvmlDeviceGetMigMode: enabled; {listed or unread}",
            f"Reset the GPU (`nvidia-smi -r -i {gpu.index}`) for multi-GPU training." if off_later
            else f"Turn MIG off for multi-GPU training: `nvidia-smi -i {gpu.index} -mig 0`, then reset the GPU.",
        )  # fmt: skip
    elif gpu.mig_enabled is False and gpu.mig_pending:
        yield finding(
            "gpu.mig.enabled", Status.WARN, subject_of(gpu),
            f"{subject_of(gpu)} will have MIG on after its next reset. Multi-GPU jobs then lose its NVLink and P2P.",
            "nvmlDeviceGetMigMode: now off, pending on",
            f"If MIG is not wanted, run `nvidia-smi -i {gpu.index} -mig 0` before the next reset.",
        )  # fmt: skip
    if gpu.virtualization == "vgpu":
        yield finding(
            "gpu.device.vgpu", Status.INFO, subject_of(gpu),
            f"{subject_of(gpu)} is a vGPU: other machines may share its board, so rates measured here may change.",
            "nvmlDeviceGetVirtualizationMode = vgpu",
        )  # fmt: skip
    if gpu.compute_mode in ("prohibited", "exclusive_process", "exclusive_thread"):
        never = gpu.compute_mode == "prohibited"
        yield finding(
            "gpu.device.mode", Status.FAIL if never else Status.INFO, subject_of(gpu),
            f"compute mode {gpu.compute_mode}: " + ("no process may use CUDA" if never else "one process at a time"),
            f"nvmlDeviceGetComputeMode = {gpu.compute_mode}",
            f"nvidia-smi -i {gpu.index} -c DEFAULT" if never else "",
        )  # fmt: skip


def _notes(gpus: list[Gpu]) -> Iterator[Finding]:
    """What is worth knowing once, for all GPUs it holds for."""
    small = [gpu for gpu in gpus if gpu.bar1_bytes and gpu.memory_bytes and gpu.bar1_bytes < gpu.memory_bytes]
    if small:
        yield finding(
            "gpu.bar1.small", Status.INFO, subject_of(small),
            f"BAR1 is {(small[0].bar1_bytes or 0) >> 20} MiB, less than the memory: GPUDirect RDMA can map only that",
            f"nvmlDeviceGetBAR1MemoryInfo: bar1Total {small[0].bar1_bytes}",
        )  # fmt: skip
    if off := [gpu for gpu in gpus if gpu.persistence_mode is False]:
        yield finding(
            "gpu.persistence.off", Status.INFO, subject_of(off),
            "persistence mode is off: the first CUDA call after a pause initialises the GPU again",
            "nvmlDeviceGetPersistenceMode = 0", "nvidia-smi -pm 1, or run nvidia-persistenced.",
        )  # fmt: skip
    for gpu in gpus:
        if gpu.processes:
            pids = ", ".join(str(process.pid) for process in gpu.processes[:8])
            yield finding(
                "gpu.process.running", Status.INFO, subject_of(gpu),
                f"{len(gpu.processes)} compute process(es) are on this GPU: measurements share it",
                f"nvmlDeviceGetComputeRunningProcesses: pid {pids}",
            )  # fmt: skip


_PER_GPU: tuple[Callable[[Gpu], Iterator[Finding]], ...] = (
    _pcie, _nvlink_errors, _c2c, _fabric, _modes,
)  # fmt: skip

"""Probe of NVIDIA GPUs (NVML): links, health, and the connection of every pair of GPUs; also its exported metrics.

Metrics cover links, the GPU matrix and their limits; dcgm-exporter exports the rest. The labels gpu, UUID and
pci_bus_id have the same spelling as in dcgm-exporter, so that queries can join both.

Specification: NVML API reference; the module is `pynvml` of nvidia-ml-py. Every NVML call may be unsupported, which
leaves the fact None; a lost GPU stays in the facts with its error. A fact that was not read is not checked. The check
that needs it reports this under its own code, because a check without findings counts as passed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from contracts.finding import Finding, Status
from contracts.tables import read_table
from hardware.units import some
from probes.api import Sample, probe_of, sample_facts, sample_known
from probes.gpu.compare import check_bus, compare
from probes.gpu.facts import SOURCE, Gpu, GpuFacts, find_question
from probes.gpu.health import RULES, TEXTS, WORDS, finding, name_subject, name_xids, unjudged
from probes.pci.facts import DEVICES


def check(facts: GpuFacts) -> Iterator[Finding]:
    """Yield all findings; host-wide findings come first."""
    if facts.driver_error:
        yield _report_driver(facts, facts.driver_error)
        return
    granted = facts.granted[1] if facts.granted else None
    yield from check_bus(facts.bus, {gpu.bus_id for gpu in facts.gpus if gpu.bus_id}, len(facts.gpus), granted)
    yield from _report_fallen(facts)
    yield from (finding("gpu.xid.hardware switch", place, what=what) for place, what in facts.switch_errors)
    answering = [gpu for gpu in facts.gpus if gpu.error is None]
    for gpu in facts.gpus:
        if gpu.error is not None:
            yield _report_refused(gpu)
    yield from compare(facts)
    for gpu in answering:
        for rule in RULES:
            yield from rule(gpu)
    yield from _report_notes(answering)
    if facts.confidential:
        yield finding("gpu.device.confidential", name_subject(answering))
    yield from report_unread(facts)


# Errors of nvmlInit that describe the state of the driver. Any other error leaves the cause open.
_NO_DRIVER = ("DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH", "GPU_IS_LOST", "RESET_REQUIRED")


def _report_driver(facts: GpuFacts, error: str) -> Finding:
    remedies = WORDS["driver"]
    remedy = remedies.get(error, remedies["unusable" if error in _NO_DRIVER else "another"])
    status = Status.FAIL if error in _NO_DRIVER else Status.UNKNOWN
    symbol, count = facts.driver_error_symbol or "nvmlInit", facts.pci_gpus or "unknown number of"
    return finding("gpu.driver.unusable", "", status, error=error, symbol=symbol, count=count, remedy=remedy)


def _report_fallen(facts: GpuFacts) -> Iterator[Finding]:
    """Report GPUs that are no longer on the bus and that have a fault in the kernel log.

    NVML may still count a lost GPU for a while, without its address. `_report_refused` reports those GPUs.
    """
    gone = [(place, listed) for place, xids in facts.xids_off_bus if (listed := name_xids(xids, "gpu"))]
    if len(gone) > sum(gpu.bus_id is None for gpu in facts.gpus):
        for place, listed in gone:
            yield finding("gpu.device.missing gone", place, what=listed, bus=DEVICES)


def _report_refused(gpu: Gpu) -> Finding:
    """Report a GPU that NVML counts but does not open: it is broken, or access was denied for another reason."""
    place = f" at {gpu.bus_id}" if gpu.bus_id else ""
    xids = f"; kernel log: Xid {', '.join(map(str, gpu.xids))}" if gpu.xids else ""
    if gpu.broken:
        cause, remedy = WORDS["broken"][gpu.refusal or ""], WORDS["repair"][gpu.refusal or ""]
        return finding("gpu.device.lost", gpu, where=place, xids=xids, says=cause, remedy=remedy)
    code = "gpu.device.denied" if gpu.refusal == "NO_PERMISSION" else IDENTITY
    return finding(code, gpu, where=place, xids=xids)


def _report_notes(gpus: list[Gpu]) -> Iterator[Finding]:
    """Report notes, each once for all GPUs that it applies to."""
    small = [gpu for gpu in gpus if gpu.bar1_bytes and gpu.memory_bytes and gpu.bar1_bytes < gpu.memory_bytes]
    if small:
        yield finding("gpu.bar1.small", name_subject(small), gpu=small[0], size=(small[0].bar1_bytes or 0) >> 20)
    if off := [gpu for gpu in gpus if gpu.persistence_mode is False]:
        yield finding("gpu.persistence.off", name_subject(off))
    for gpu in gpus:
        if gpu.processes:
            pids = ", ".join(str(process.pid) for process in gpu.processes[:8])
            yield finding("gpu.process.running", gpu, count=len(gpu.processes), pids=pids)


# What was not read --------------------------------------------------------------------------------------------------

IDENTITY = "gpu.device.unread"
"""Finding code for facts that no other check needs: identity and location of the GPU, clocks, affinity."""

MAX_EVIDENCE = 16
_ROOT_ONLY = "nvmlDeviceGetSramEccErrorStatus"  # nvml.h: "Requires root/admin permissions"


def list_codes_of_question(question: str) -> tuple[str, ...]:
    """Return the codes of the checks that need the result of a failed NVML call."""
    return tuple(find_question(question).get("codes", ())) or (IDENTITY,)


def report_unread(facts: GpuFacts) -> Iterator[Finding]:
    """Yield one finding for each check that could not run, with every NVML call that failed."""
    unread = [("", facts.unread)]
    unread += [(name_subject(gpu), gpu.unread) for gpu in facts.gpus if gpu.error is None]
    unread += [(f"GPU{pair.a}", pair.unread) for pair in facts.pairs]
    by_code: dict[tuple[str, Status], dict[str, list[str]]] = {}
    for subject, questions in unread:
        for question in questions:
            root_only = question.startswith(_ROOT_ONLY) and question.endswith("= NO_PERMISSION")
            status = Status.INFO if root_only else Status.UNKNOWN
            for code in list_codes_of_question(question):
                by_code.setdefault((code, status), {}).setdefault(subject, []).append(question)
    for (code, status), subjects in by_code.items():
        yield _report_unread(code, status, subjects)


def _report_unread(code: str, status: Status, subjects: dict[str, list[str]]) -> Finding:
    questions = [f"{subject}: {q}" if subject else q for subject, queries in subjects.items() for q in queries]
    # "nvmlDeviceGetTemperature(0) = TIMEOUT" without the arguments
    reasons = list(dict.fromkeys(re.sub(r"\([^=]*\)", "", query) for queries in subjects.values() for query in queries))
    evidence, subjects_named = questions[:MAX_EVIDENCE], [subject for subject in subjects if subject]
    if len(questions) > MAX_EVIDENCE:
        evidence.append(f"and {len(questions) - MAX_EVIDENCE} more")
    return Finding(
        code=code,
        status=status,
        subject=", ".join(subjects_named),
        message=f"{code} could not be judged{some(subjects_named, ' for ', 1)}: {some(reasons, limit=2)}.",
        evidence=tuple(evidence),
        remedy="Scan as root, or in a container that is given the whole GPU."
        if any("NO_PERMISSION" in question for question in questions)
        else TEXTS[IDENTITY]["remedy"],
    )


# What is exported ---------------------------------------------------------------------------------------------------


def samples(facts: GpuFacts) -> Iterator[Sample]:
    """Yield samples of known values; an unknown value has no sample."""
    reasons = tuple(read_table(__file__, "names.toml")["throttle_bit"].values())
    for gpu in facts.gpus:
        labels = (str(gpu.index), gpu.uuid or "", format_nvml_bus_id(gpu.bus_id))
        yield from sample_facts(__file__, gpu, labels)
        yield from sample_known(_list_values(gpu), labels)
        yield Sample(metric="gpu_info", value=1.0, labels=(*labels, gpu.name or ""))
        yield from _sample_links(gpu, labels)
        for reason in reasons if gpu.throttle_reasons is not None else ():
            active = reason in (gpu.throttle_reasons or ())
            yield Sample(metric="gpu_throttling", value=float(active), labels=(*labels, reason))
    for pair in facts.pairs:
        if pair.p2p_read is not None:
            for first, other in ((pair.a, pair.b), (pair.b, pair.a)):
                yield Sample(metric="gpu_p2p_ok", value=float(pair.p2p_read == "ok"), labels=(str(first), str(other)))


def format_nvml_bus_id(sysfs_: str | None) -> str:
    """Return the bus id as NVML and dcgm-exporter write it: "00000000:1B:00.0"; empty if unknown."""
    if not sysfs_:
        return ""
    domain, _, place = sysfs_.partition(":")
    return f"{int(domain, 16):08X}:{place.upper()}"


def _list_values(gpu: Gpu) -> tuple[tuple[str, float | None], ...]:
    fabric = gpu.fabric_state not in (None, "not_supported")
    return (
        ("gpu_up", float(gpu.error is None) if gpu.error is None or gpu.broken else None),
        ("gpu_nvlinks_active", sum(link.active is True for link in gpu.nvlinks) if gpu.nvlinks_known else None),
        ("gpu_fabric_ready", float(gpu.fabric_state == "completed") if fabric else None),
        ("gpu_processes", None if gpu.processes is None else len(gpu.processes)),
    )


def _sample_links(gpu: Gpu, labels: tuple[str, ...]) -> Iterator[Sample]:
    for link in gpu.nvlinks:
        if link.active is not None:
            yield Sample(metric="gpu_nvlink_up", value=float(link.active), labels=(*labels, str(link.link)))
        for kind, count in (link.errors or {}).items():
            yield Sample(metric="gpu_nvlink_errors_total", value=count, labels=(*labels, str(link.link), kind))


PROBE = probe_of(__file__, SOURCE, check, samples=samples, unjudged=unjudged)

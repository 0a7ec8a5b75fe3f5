"""Checks of GPUs that could not be judged, because the driver did not answer the questions they rest on.

A check that raises nothing counts as passed, so what was not read must be said under the code of its own check.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from probes.api import Finding, Severity
from probes.gpu.facts import GpuFacts
from probes.host.nvml import CRASHED, HUNG, NOT_ASKED

IDENTITY = "gpu.device.unread"
"""What no other check rests on: who the GPU is and where, its clocks, its affinity."""

EVIDENCE_MAX = 16
_ROOT_ONLY = "nvmlDeviceGetSramEccErrorStatus"  # nvml.h: "Requires root/admin permissions"

_CODES: dict[str, tuple[str, ...]] = {
    "nvmlDeviceGetCount": ("gpu.driver.unusable",),
    "nvmlDeviceGetName": ("gpu.device.mixed",),
    "nvmlDeviceGetMemoryInfo": ("gpu.memory.held",),
    "nvmlDeviceGetTotalEccErrors(1, 0)": ("gpu.ecc.uncorrected",),
    "nvmlDeviceGetTotalEccErrors(1, 1)": ("gpu.ecc.lifetime",),
    "nvmlDeviceGetEccMode": ("gpu.ecc.off",),
    "nvmlDeviceGetDefaultEccMode": ("gpu.ecc.off",),
    _ROOT_ONLY: ("gpu.ecc.sram",),
    "nvmlDeviceGetRemappedRows": ("gpu.memory.remap_failed", "gpu.memory.remap_pending"),
    "nvmlDeviceGetRowRemapperHistogram": ("gpu.memory.remap_exhausted",),
    "nvmlDeviceGetRetiredPages": ("gpu.memory.retired",),
    "nvmlDeviceGetFieldValues(91)": (IDENTITY,),
    "nvmlDeviceGetFieldValues(230": ("gpu.device.recovery",),
    "nvmlDeviceGetFieldValues(306": ("gpu.memory.remap_exhausted",),
    "nvmlDeviceGetFieldValues(307": ("gpu.memory.remap_pending",),
    "nvmlDeviceGetFieldValues(170": ("gpu.c2c.off",),
    "nvmlDeviceGetFieldValues(": ("gpu.nvlink.errors",),  # of a link: the field, a colon and the link
    "nvmlDeviceGetC2cModeInfoV": ("gpu.c2c.off",),
    "nvmlDeviceGetTemperature": ("gpu.thermal.hot",),
    "nvmlDeviceGetCurrentClocks": (
        "gpu.thermal.throttling", "gpu.power.brake", "gpu.power.capped", "gpu.clocks.slowdown", "gpu.clocks.low",
    ),
    "nvmlDeviceGetClockInfo": ("gpu.clocks.low",),
    "nvmlDeviceGetMaxClockInfo": ("gpu.clocks.low",),
    "nvmlDeviceGetUtilizationRates": ("gpu.clocks.low", "gpu.pcie.generation"),
    "nvmlDeviceGetEnforcedPowerLimit": ("gpu.power.limit",),
    "nvmlDeviceGetPowerManagementDefaultLimit": ("gpu.power.limit",),
    "nvmlDeviceGetCurrPcieLinkWidth": ("gpu.pcie.width",),
    "nvmlDeviceGetMaxPcieLinkWidth": ("gpu.pcie.width",),
    "nvmlDeviceGetCurrPcieLinkGeneration": ("gpu.pcie.generation",),
    "nvmlDeviceGetMaxPcieLinkGeneration": ("gpu.pcie.generation",),
    "nvmlDeviceGetPcieReplayCounter": ("gpu.counters.rising",),
    "nvmlDeviceGetBAR1MemoryInfo": ("gpu.bar1.small",),
    "nvmlDeviceGetMigMode": ("gpu.mig.enabled",),
    "nvmlDeviceGetGpuFabricInfo": ("gpu.fabric.incomplete", "gpu.fabric.unhealthy", "gpu.fabric.degraded"),
    "nvmlDeviceGetNvLinkState": ("gpu.nvlink.missing",),
    "nvmlDeviceGetNvLinkErrorCounter": ("gpu.nvlink.errors",),
    "nvmlDeviceGetPersistenceMode": ("gpu.persistence.off",),
    "nvmlDeviceGetComputeMode": ("gpu.device.mode",),
    "nvmlDeviceGetComputeRunningProcesses": ("gpu.process.running",),
    "nvmlDeviceGetP2PStatus": ("gpu.p2p.refused",),
    "nvmlEventSet": ("gpu.xid.hardware",),
}  # fmt: skip
"""Beginning of a question -> the codes that rest on it; the longest beginning counts."""


def codes_of(question: str) -> tuple[str, ...]:
    """The codes of the checks that rest on a question of `unread`."""
    fits = [start for start in _CODES if question.startswith(start)]
    return _CODES[max(fits, key=len)] if fits else (IDENTITY,)


def findings(facts: GpuFacts) -> Iterator[Finding]:
    """One for each check that could not be judged, with every question that was not answered."""
    found: dict[tuple[str, Severity], dict[str, list[str]]] = {}
    for subject, questions in _unread(facts):
        for question in questions:
            known = question.startswith(_ROOT_ONLY) and question.endswith("= NO_PERMISSION")
            severity = Severity.INFO if known else Severity.UNKNOWN
            for code in codes_of(question):
                found.setdefault((code, severity), {}).setdefault(subject, []).append(question)
    for (code, severity), subjects in found.items():
        yield _finding(code, severity, subjects)


def _unread(facts: GpuFacts) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "", facts.unread
    for gpu in facts.gpus:
        if gpu.error is None:
            yield f"GPU{gpu.index}", gpu.unread
    for pair in facts.pairs:
        yield f"GPU{pair.a}", tuple(question for question in pair.unread)


def _finding(code: str, severity: Severity, subjects: dict[str, list[str]]) -> Finding:
    questions = [f"{subject}: {q}" if subject else q for subject, queries in subjects.items() for q in queries]
    reasons = list(dict.fromkeys(_reason(question) for queries in subjects.values() for question in queries))
    more = f" and {len(reasons) - 2} more" if len(reasons) > 2 else ""
    evidence = questions[:EVIDENCE_MAX]
    if len(questions) > EVIDENCE_MAX:
        evidence.append(f"and {len(questions) - EVIDENCE_MAX} more")
    return Finding(
        code=code,
        severity=severity,
        subject=", ".join(subject for subject in subjects if subject),
        message=f"could not be judged: {', '.join(reasons[:2])}{more}",
        evidence=tuple(evidence),
        remedy=_remedy(" ".join(questions)),
    )


def _reason(question: str) -> str:
    """ "nvmlDeviceGetTemperature = TIMEOUT", without the arguments."""
    symbol, _, why = re.sub(r"\([^=]*\)", "", question).partition(" = ")
    return f"{symbol} was not asked in time" if why == NOT_ASKED else f"{symbol} = {why}"


def _remedy(questions: str) -> str:
    if NOT_ASKED in questions:
        return "The driver is too slow to be asked everything in time: see gpu.driver.slow."
    if HUNG in questions or CRASHED in questions:
        return "Look for NVRM lines and Xids in dmesg; a driver that hangs or crashes needs the node rebooted."
    if "NO_PERMISSION" in questions:
        return "Scan as root, or in a container that is given the whole GPU."
    return "Scan again, and look for NVRM lines in dmesg if it stays so."

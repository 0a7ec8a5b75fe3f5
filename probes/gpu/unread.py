"""Checks of GPUs that could not be judged, because the driver did not answer the questions they rest on.

A check that raises nothing counts as passed, so what was not read must be said under the code of its own check.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from contracts.finding import Finding, Status
from probes.gpu.facts import GpuFacts
from probes.gpu.read import row_of

IDENTITY = "gpu.device.unread"
"""What no other check rests on: who the GPU is and where, its clocks, its affinity."""

EVIDENCE_MAX = 16
_ROOT_ONLY = "nvmlDeviceGetSramEccErrorStatus"  # nvml.h: "Requires root/admin permissions"


def codes_of(question: str) -> tuple[str, ...]:
    """The codes of the checks that rest on a question of `unread`."""
    return tuple(row_of(question).get("codes", ())) or (IDENTITY,)


def findings(facts: GpuFacts) -> Iterator[Finding]:
    """One for each check that could not be judged, with every question that was not answered."""
    found: dict[tuple[str, Status], dict[str, list[str]]] = {}
    for subject, questions in _unread(facts):
        for question in questions:
            known = question.startswith(_ROOT_ONLY) and question.endswith("= NO_PERMISSION")
            status = Status.INFO if known else Status.UNKNOWN
            for code in codes_of(question):
                found.setdefault((code, status), {}).setdefault(subject, []).append(question)
    for (code, status), subjects in found.items():
        yield _finding(code, status, subjects)


def _unread(facts: GpuFacts) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "", facts.unread
    for gpu in facts.gpus:
        if gpu.error is None:
            yield f"GPU{gpu.index}", gpu.unread
    for pair in facts.pairs:
        yield f"GPU{pair.a}", pair.unread


def _finding(code: str, status: Status, subjects: dict[str, list[str]]) -> Finding:
    questions = [f"{subject}: {q}" if subject else q for subject, queries in subjects.items() for q in queries]
    reasons = list(dict.fromkeys(_reason(question) for queries in subjects.values() for question in queries))
    more = f" and {len(reasons) - 2} more" if len(reasons) > 2 else ""
    evidence, named = questions[:EVIDENCE_MAX], [subject for subject in subjects if subject]
    on = f" for {named[0]}" + (f" and {len(named) - 1} more" if len(named) > 1 else "") if named else ""
    if len(questions) > EVIDENCE_MAX:
        evidence.append(f"and {len(questions) - EVIDENCE_MAX} more")
    return Finding(
        code=code,
        status=status,
        subject=", ".join(named),
        message=f"{code} could not be judged{on}: {', '.join(reasons[:2])}{more}.",
        evidence=tuple(evidence),
        remedy=_remedy(" ".join(questions)),
    )


def _reason(question: str) -> str:
    """ "nvmlDeviceGetTemperature = TIMEOUT", without the arguments."""
    symbol, _, why = re.sub(r"\([^=]*\)", "", question).partition(" = ")
    return f"{symbol} = {why}"


def _remedy(questions: str) -> str:
    if "NO_PERMISSION" in questions:
        return "Scan as root, or in a container that is given the whole GPU."
    return "Scan again, and look for NVRM lines in dmesg if it stays so."

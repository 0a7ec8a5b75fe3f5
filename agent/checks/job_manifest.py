"""What a manifest or script sets, in the verdict of `topoflight why`, judged as `topoflight lint-env` judges it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from agent.base.inputs import InputError
from agent.checks.lint import lint_text
from contracts import bounded
from contracts.yaml_text import YamlTextError
from planner.kubernetes.yaml_edit import documents
from planner.lint.documents import DocumentError, missing_sources
from planner.lint.sources import guess_kind
from planner.why import Cause, Unknown, Verdict


def with_manifest(verdict: Verdict, path: Path) -> Verdict:
    """The settings of the job's environment that `topoflight lint-env` warns of."""
    try:
        text = bounded.read(path, 16 << 20).decode("utf-8", errors="replace")
    except (OSError, bounded.TooLargeError) as error:
        raise InputError(f"--manifest {path}: {error}") from None
    try:
        linted = lint_text(text, "auto", nccl_version=None, machine=None, name=path.name)
        read, wrong = linted.read, [check for check in linted.checks if check.status in ("fail", "warn")]
    except InputError:
        if re.search(r"^[^#\n]*NCCL_[A-Z]", text, re.MULTILINE):
            raise
        read, wrong = "sets no variable of NCCL", []
    wrong.sort(key=lambda check: check.status != "fail")
    causes = tuple(
        Cause(code=one.code, message=f"{one.subject}: {one.message}" if one.subject else one.message,
              evidence=one.evidence[:2], action=one.remedy)
        for one in wrong[:8]
    )  # fmt: skip
    change = tuple(dict.fromkeys(f"{path.name}: {one.remedy}" for one in wrong[:8] if one.remedy))
    others = tuple(
        Unknown(what=f"what {name} sets, which {path.name} names and does not hold",
                command=f"kubectl get {name.lower()} -o yaml: into the same file, after ---")
        for name in _named_elsewhere(text, path.name)[:4]
    )  # fmt: skip
    if verdict.state == "fine" and any(c.status == "fail" or c.code == "env.debug.leftover" for c in wrong):
        verdict = replace(verdict, state="slow", line=f"slow by its manifest: {causes[0].message}")
    elif verdict.state == "fine" and causes:
        verdict = replace(verdict, line=f"fine but for its manifest: {causes[0].message}")
    if causes and not verdict.forecast:
        others = (*others, Unknown(what="the forecast after the change",
                                   command="topoflight recommend --model NAME --machine NAME --nodes N"))  # fmt: skip
    return replace(verdict, causes=(*verdict.causes, *causes), change=(*verdict.change, *change),
                   sources=(*verdict.sources, f"manifest: {read}"), unknown=(*verdict.unknown, *others))  # fmt: skip


def _named_elsewhere(text: str, file: str) -> list[str]:
    """Name what a manifest takes its environment from and does not hold: "ConfigMap nccl"."""
    if guess_kind(text, file) not in ("yaml", "json"):
        return []
    try:
        return missing_sources(documents(text))
    except (YamlTextError, DocumentError):
        return []

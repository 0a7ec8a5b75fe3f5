"""What `topoflight lint-env` and scans of nodes find, as causes in the verdict of `topoflight why`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agent.base.inputs import InputError
from agent.checks.lint import lint_text
from contracts import bounded
from contracts.finding import Finding
from contracts.yaml_text import YamlTextError
from planner.kubernetes.yaml_edit import documents
from planner.lint.documents import missing_sources
from planner.lint.script import EnvironmentTextError
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
    except (YamlTextError, EnvironmentTextError):
        return []


_NETWORK = ("link", "network")  # causes of which a NIC may be the reason
_OF_NIC, _OF_GPU = ("rdma.", "interfaces."), ("gpu.", "pci.")


def with_nodes(verdict: Verdict, checks: Sequence[Finding]) -> Verdict:
    """What is wrong on the nodes behind it, by scans: of a cause of the network its NICs, of others their GPUs.

    A finding explains a cause that was found without it; it accuses nobody by itself.
    """
    sources = (*verdict.sources, f"nodes: {len({check.node for check in checks})}")
    causes, nics, gpus = [], list(verdict.nics), list(verdict.gpus)
    for cause in verdict.causes:
        kinds, named = (_OF_NIC, nics) if cause.code.startswith(_NETWORK) else (_OF_GPU, gpus)
        found = [
            check for check in checks
            if check.node in cause.nodes and check.status in ("fail", "warn") and check.code.startswith(kinds)
        ]  # fmt: skip
        found.sort(key=lambda check: check.status != "fail")
        named += [
            subject for check in found[:8] if check.status == "fail" and check.subject
            and (subject := f"{check.node} {check.subject}") not in named
        ]  # fmt: skip
        said = tuple(f"{check.node}: {check.code} {check.subject}: {check.message}"[:300] for check in found[:4])
        action = found[0].remedy if found and found[0].remedy else cause.action
        causes.append(replace(cause, evidence=(*cause.evidence, *said), action=action))
    scanned = {check.node for check in checks}
    missing = tuple(
        Unknown(what=f"what is wrong on {node}", command=f"topoflight capture on {node}, then --host FILE")
        for node in verdict.nodes if node not in scanned
    )  # fmt: skip
    return replace(verdict, causes=tuple(causes), nics=tuple(nics), gpus=tuple(gpus), sources=sources,
                   unknown=(*verdict.unknown, *missing[:4]))  # fmt: skip

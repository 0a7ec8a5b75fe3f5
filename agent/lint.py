"""Lints an environment wherever it is written, and says so in the gate's words."""

from __future__ import annotations

from pathlib import Path

import click

from agent.advise import version
from agent.exits import EXIT_FAILED, EXIT_PASS
from agent.gate import Check
from collectives.evidence import read
from planner.lint import lint
from planner.lint_sources import EnvironmentTextError, NamedEnvironment, read_environment
from probes.api import Snapshot


def process_environment(pid: str) -> str:
    """The environment of a running process, as /proc gives it."""
    try:
        return Path(f"/proc/{int(pid)}/environ").read_bytes().decode("utf-8", errors="replace")
    except ValueError:
        raise click.UsageError(f"{pid}: must be a process id") from None
    except OSError as error:
        raise click.ClickException(f"process {pid}: {error.strerror}") from None


def lint_text(
    text: str, kind: str, *, nccl_version: str | None, snapshot: Snapshot | None
) -> tuple[tuple[Check, ...], int]:
    """Checks of every environment in `text`, and the exit code."""
    found_version = version(nccl_version)
    environments: tuple[NamedEnvironment, ...]
    if kind == "log" or (kind == "auto" and "NCCL INFO" in text):
        evidence = read(text.splitlines())
        environments = (NamedEnvironment(source="log", environment=evidence.environment),)
        if found_version is None and evidence.nccl_version:
            found_version = version(evidence.nccl_version.removeprefix("RCCL "))
    else:
        try:
            environments = read_environment(text, None if kind == "auto" else kind)
        except EnvironmentTextError as error:
            raise click.ClickException(str(error)) from None
    checks = []
    for named in environments:
        for finding in lint(named.environment, nccl_version=found_version, snapshot=snapshot, source=named.source):
            checks.append(
                Check(
                    id=finding.code, status=finding.severity.value, node=named.source, subject=finding.subject,
                    message=finding.message, evidence=finding.evidence, remedy=finding.remedy,
                )
            )  # fmt: skip
    failed = any(check.status == "fail" for check in checks)
    return tuple(checks), EXIT_FAILED if failed else EXIT_PASS

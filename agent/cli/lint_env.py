"""The verb lint-env: check the environments in a text of any form, and report the result as findings of the gate."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from agent.base import EXIT_FAILED, EXIT_PASS, EXIT_UNKNOWN, raise_as, units
from agent.base.options import InputError, command, parse_version, read_input, replay_recordings
from agent.base.output import console, print_text, render
from contracts.finding import Finding
from contracts.redaction import without_secrets
from planner.lint.environment import lint
from planner.lint.script import EnvironmentTextError
from planner.lint.sources import Reading, explain_nothing, list_lines, read_text

if TYPE_CHECKING:
    from planner.lint.machine import ProbedMachine

_LIMIT_BYTES = 16 << 20


@command("lint-env")
@click.argument("source", default="-", metavar="FILE|-|PID")
def lint_env(source: str, kind: str, nccl_version: str | None, hosts: tuple[Path, ...], form: str) -> None:
    """Read the environment, print the findings, and exit with the verdict's code."""
    if kind == "process" or (kind == "auto" and source.isdigit() and not os.path.exists(source)):
        text, kind = read_process_environment(source), "process"
    else:
        raw = read_input(source, _LIMIT_BYTES, hint="; give the lines that set the environment")
        text = raw.decode("utf-8", errors="replace")
    machine = None
    if hosts:
        from planner.lint.machine import machine_of
        from topology.build import SOURCES

        machine = machine_of(replay_recordings(hosts[:1], SOURCES)[0])
    name = "" if source == "-" or kind == "process" else source
    linted = lint_text(text, kind, nccl_version=nccl_version, machine=machine, name=name)
    if form == "table":
        _print_result(linted, has_machine=machine is not None)
    else:
        print_text("\n".join(filter(None, (linted.unread, linted.read))), err=True)
        print_text(render(list(linted.checks), form), nl=False)
    sys.exit(linted.exit_code)


def _print_result(linted: LintResult, *, has_machine: bool) -> None:
    """Print the verdict, what was read, and the findings."""
    from agent.terminal.findings import print_findings

    if linted.unread:
        console().print(f"! {linted.unread}", markup=False, highlight=False)
    elif linted.unreached and not linted.checks:
        count = units.count(linted.unreached, "setting")
        others = " No problems found in the others." if linted.names else ""
        print_text(f"! Not checked: {count} that no started program is known to get.{others}")
    elif not linted.checks:
        next_step = "no change needed" if has_machine else "add --host to check it against a machine"
        print_text(f"✓ no problems found in this environment → {next_step}")
    console().print(linted.read, markup=False, highlight=False)
    print_findings(console(), linted.checks, everything=True)


def read_process_environment(pid: str) -> str:
    """Return the environment of a running process from /proc."""
    if not pid.isdecimal():
        raise click.UsageError(f"{pid}: must be a process id")
    with raise_as(InputError, OSError, f"no file and no readable process is named {pid}: "):
        return Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", errors="replace")


class LintResult(NamedTuple):
    """What was read from a text, and the findings in it."""

    read: str  # text: how many variables, in which format
    checks: tuple[Finding, ...]
    unread: str = ""  # text: lines that were not understood; empty if all were
    unreached: int = 0  # number of settings that were not checked, because no program that is started gets them
    names: int = 0  # number of variables that were read

    @property
    def exit_code(self) -> int:
        """Return 3 if a setting is wrong, 5 if none is wrong but part of the text was not understood."""
        if any(check.status == "fail" for check in self.checks):
            return EXIT_FAILED
        return EXIT_UNKNOWN if self.unread else EXIT_PASS


def lint_text(
    text: str, kind: str, *, nccl_version: str | None, machine: ProbedMachine | None, name: str = ""
) -> LintResult:
    """Check every environment in `text`; `name` is the file name.

    Raises InputError if the text cannot be read or contains no variable: an environment that was not found was not
    checked.
    """
    found_version = parse_version(nccl_version)
    with raise_as(InputError, EnvironmentTextError, f"{name or 'the text'}: "):
        reading = read_text(text, None if kind == "auto" else kind, name)
    printed = re.search(r"\bNCCL version (\d+\.\d+\.\d+)", text) if reading.form == "NCCL log" else None
    found_version = found_version or (parse_version(printed[1]) if printed else None)
    if not reading.names() and not reading.unreached and reading.form != "process":
        hint = " Run the job with NCCL_DEBUG=INFO" if reading.form == "NCCL log" else ""
        raise InputError(str(without_secrets(f"{name or 'the text'}: {explain_nothing(text, reading)}{hint}")))
    checks = tuple(_list_findings(reading, found_version, machine))
    return LintResult(
        read=str(without_secrets(_describe_read(reading))), checks=checks, unread=_describe_unread(reading),
        unreached=len(reading.unreached), names=len(reading.names()),
    )  # fmt: skip


def _list_findings(
    reading: Reading, version_in_use: tuple[int, int, int] | None, machine: ProbedMachine | None
) -> Iterator[Finding]:
    """Return the findings of each environment; a finding in several places is returned once with all places."""
    listed: set[tuple[str, Finding]] = set()
    for environment in reading.environments:
        judged = lint(environment, nccl_version=version_in_use, machine=machine, nodes=reading.nodes, gpus=reading.gpus)
        for finding in (*environment.findings, *judged):
            if (environment.place, finding) in listed:
                continue
            listed.add((environment.place, finding))
            message, remedy, *evidence = without_secrets([finding.message, finding.remedy, *finding.evidence])
            evidence += [f"line {line}"] if (line := environment.lines.get(finding.subject, 0)) else []
            yield replace(finding, node=environment.source, message=message, evidence=tuple(evidence), remedy=remedy)


def _describe_unread(reading: Reading) -> str:
    """Describe the lines that were not understood, each reason once."""
    if not reading.unread:
        return ""
    lines = [each.line for each in reading.unread if each.line]
    lines_text = list_lines(lines) if lines else "part of the text"
    reasons = ", ".join(dict.fromkeys(each.why for each in reading.unread[:3]))
    return f"Not understood: {lines_text} ({reasons}). What is set there was not checked."


def _describe_read(reading: Reading) -> str:
    """Describe how many variables were read, in which format and where."""
    names = reading.names()
    reasons = [f"{each.name} ({f'line {each.line}: ' * bool(each.line)}{each.why})" for each in reading.unreached]
    unreached = units.some(reasons)
    if unreached and not names:
        return f"0 variables reach the job, format: {reading.form}; not checked: {unreached}"
    if not names:
        return f"0 variables of NCCL or its plugins read from a {reading.form}: everything is at its default"
    places = list(dict.fromkeys(each.place for each in reading.environments))
    elsewhere = {name: raw for each in reading.environments for name, raw in each.unresolved.items() if name in names}
    parts = [f"{units.count(len(names), 'variable')} read, format: {reading.form}"]
    if len(places) > 1:
        parts.append(f"{len(places)} places: {', '.join(places)}")
    if others := len(reading.environments) - len(places):
        parts.append(f"{others} more set only under a condition or for one command")
    if elsewhere:
        listed = units.some([f"{name}={raw}" for name, raw in sorted(elsewhere.items())])
        parts.append(f"{len(elsewhere)} with a value from elsewhere, of which only the name is checked: {listed}")
    if unreached:
        parts.append(f"not checked, as the job does not get it: {unreached}")
    if reading.files:
        parts.append(units.some(reading.files, "not read: "))
    return "; ".join(parts)

"""The verb lint-env."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from agent.base.options import command, read_input
from agent.base.output import console, print_text, render

_LIMIT_BYTES = 16 << 20


@command("lint-env")
@click.argument("source", default="-", metavar="FILE|-|PID")
def lint_env(source: str, kind: str, nccl_version: str | None, hosts: tuple[Path, ...], form: str) -> None:
    """Read the environment, print the findings, and exit with the verdict's code."""
    from agent.checks.lint import lint_text, process_environment

    if kind == "process" or (kind == "auto" and source.isdigit() and not os.path.exists(source)):
        text, kind = process_environment(source), "process"
    else:
        raw = read_input(source, _LIMIT_BYTES, hint="; give the lines that set the environment")
        text = raw.decode("utf-8", errors="replace")
    machine = None
    if hosts:
        from agent.base.options import replayed
        from planner.lint.machine import machine_of
        from topology.build import SOURCES

        machine = machine_of(replayed(hosts[:1], SOURCES)[0])
    name = "" if source == "-" or kind == "process" else source
    linted = lint_text(text, kind, nccl_version=nccl_version, machine=machine, name=name)
    if form != "table":
        print_text("\n".join(filter(None, (linted.unread, linted.read))), err=True)
        print_text(render(list(linted.checks), form), nl=False)
        sys.exit(linted.exit_code)
    from agent.terminal.findings import findings

    if linted.unread:
        console().print(f"! {linted.unread}", markup=False, highlight=False)
    elif not linted.checks:
        more = "no change needed" if hosts else "add --host to check it against a machine"
        print_text(f"✓ no problems found in this environment → {more}")
    console().print(linted.read, markup=False, highlight=False)
    findings(console(), linted.checks, everything=True)
    sys.exit(linted.exit_code)

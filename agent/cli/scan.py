"""The verbs scan, capture and explain."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agent.cli.hosts import host_option, root_option, snapshots
from agent.cli.output import console, emit, format_option, say, waiting


@click.command()
@host_option
@root_option
@format_option
@click.option("--timeout", default=30.0, show_default=True, help="Seconds for each probe.")
@click.option("--all", "everything", is_flag=True, help="List passed checks too.")
def scan(hosts: tuple[Path, ...], root: str, form: str, timeout: float, everything: bool) -> None:
    """Probe this host and print what was found: reads only, makes no load."""
    from agent.terminal.hosts import scan as show
    from agent.view import look

    found = snapshots(hosts, root=root, timeout_seconds=timeout)
    checks = look(found).checks
    value = [{"snapshot": snapshot, "checks": [c for c in checks if c.node == snapshot.hostname]} for snapshot in found]
    emit(value if len(found) > 1 else value[0], form, lambda out: show(out, found, checks, everything))


@click.command()
@root_option
@click.option("-f", "--file", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write here, not stdout.")
def capture(root: str, target: Path | None) -> None:
    """Record every answer this host gives to the probes.

    The recording replays the whole product with --host, without the hardware. It holds no environment variable
    outside NCCL's families, and no process names.
    """
    from agent.documents import write_atomic
    from probes.host.recording import dumps
    from probes.scanner import capture as record

    with waiting("capture: asking this host"):
        text = dumps(record(root))
    if target is None:
        sys.stdout.write(text)
        return
    try:
        write_atomic(target, text)
    except OSError as error:
        raise click.ClickException(f"{target}: {error.strerror}") from None
    say(f"{target}: {len(text)} bytes", err=True)


@click.command()
@click.argument("code")
def explain(code: str) -> None:
    """Explain a finding CODE or an alert: what it means, how to see it and what mends it."""
    from agent.gate.explain import UnknownCodeError, section
    from agent.terminal.tables import explanation

    try:
        explanation(console(), section(code))
    except UnknownCodeError as error:
        raise click.UsageError(str(error)) from None

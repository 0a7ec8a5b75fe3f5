"""The verb scan."""

from __future__ import annotations

from pathlib import Path

import click

from agent.base.hosts import snapshots
from agent.base.options import format_option, host_option, root_option, verbose_option
from agent.base.output import emit


@click.command()
@host_option
@root_option
@format_option
@click.option(
    "--timeout", default=30.0, show_default=True, type=click.FloatRange(0.1, 3600), help="Seconds for each probe."
)
@click.option("--all", "everything", is_flag=True, help="With -v: list passed checks too.")
@verbose_option
@click.argument("name", required=False)
def scan(
    hosts: tuple[Path, ...], root: str, form: str, timeout: float, everything: bool, verbose: bool, name: str | None
) -> None:
    """Probe this host and print what was found: reads only, makes no load. NAME: all of one node, device or code."""
    from agent.checks.view import UnknownNameError, look, named
    from agent.terminal.hosts import scan as show

    view = look(snapshots(hosts, root=root, timeout_seconds=timeout))
    try:
        view = named(view, name) if name else view
    except UnknownNameError as error:
        raise click.UsageError(str(error)) from None
    value = [{"snapshot": s, "checks": [c for c in view.checks if c.node == s.hostname]} for s in view.snapshots]
    verbose = verbose or everything or bool(name)
    emit(value if len(value) > 1 else value[0], form,
         lambda out: show(out, view, verbose=verbose, everything=everything or bool(name)))  # fmt: skip

"""The verbs scan and demo: a host as its probes see it, and a built one."""

from __future__ import annotations

from pathlib import Path

import click

from agent.base.hosts import snapshots
from agent.base.options import with_options
from agent.base.output import console, emit, print_text


@click.command()
@with_options("scan")
@click.argument("name", required=False)
def scan(
    hosts: tuple[Path, ...], root: str, form: str, timeout: float, everything: bool, verbose: bool, name: str | None
) -> None:
    """Inspect this host and print its devices and findings. Reads only. NAME selects one node, device or code."""
    from agent.checks.view import build_view, named
    from agent.terminal.hosts import scan as show
    from probes.registry import ALL

    view = build_view(snapshots(hosts, ALL, root=root, timeout_seconds=timeout))
    view = named(view, name) if name else view
    value = [{"snapshot": s, "checks": [c for c in view.checks if c.node == s.hostname]} for s in view.snapshots]
    verbose = verbose or everything or bool(name)
    emit(value if len(value) > 1 else value[0], form,
         lambda out: show(out, view, verbose=verbose, everything=everything or bool(name)))  # fmt: skip


DEMO = Path(__file__).parents[1] / "data" / "demo.json"


@click.command()
@with_options("demo")
@click.pass_context
def demo(context: click.Context, page: bool, port: int, verbose: bool) -> None:
    """Show the findings of a faulty node with eight GPUs. The machine is built in; nothing is measured."""
    from agent.checks.view import build_view
    from agent.terminal.hosts import scan as show
    from probes.registry import ALL

    print_text("This node is a built-in example with deliberate faults. It is not a real machine.")
    view = build_view(snapshots((DEMO,), ALL))
    show(console(), view, verbose=verbose, everything=False)
    print_text(f"Check your own node: topoflight preflight. Every command can read this one: --host {DEMO}")
    if page:
        root = context.find_root().command
        serve = root.get_command(context, "serve") if isinstance(root, click.Group) else None
        assert serve is not None  # noqa: S101 - a verb of the same program
        # no state folder: what a built machine shows is not kept with this host's own history
        options = {"folder": None, "hosts": (DEMO,), "root": "/", "address": "127.0.0.1", "port": port}
        context.invoke(serve, **options, interval=3600.0)

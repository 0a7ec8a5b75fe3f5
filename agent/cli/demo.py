"""The verb demo."""

from __future__ import annotations

from pathlib import Path

import click

from agent.base.hosts import snapshots
from agent.base.options import verbose_option
from agent.base.output import console, say

DEMO = Path(__file__).parents[1] / "data" / "demo.json"


@click.command()
@click.option("--serve", "page", is_flag=True, help="Serve its page too, on this host only.")
@click.option("--port", default=9402, show_default=True, type=click.IntRange(0, 65535), help="With --serve.")
@verbose_option
@click.pass_context
def demo(context: click.Context, page: bool, port: int, verbose: bool) -> None:
    """Show what a sick node of eight GPUs looks like. The machine is built: no real node, and nothing is measured."""
    from agent.checks.view import look
    from agent.terminal.hosts import scan as show

    say("A built machine that ships with this program, sick on purpose: it is no real node.")
    view = look(snapshots((DEMO,)))
    show(console(), view, verbose=verbose, everything=False)
    say(f"your own node: topoflight preflight; more of this one: topoflight recommend --host {DEMO}")
    if page:
        root = context.find_root().command
        serve = root.get_command(context, "serve") if isinstance(root, click.Group) else None
        assert serve is not None  # noqa: S101 - a verb of the same program
        # no state folder: what a built machine shows is not kept with this host's own history
        options = {"folder": None, "hosts": (DEMO,), "root": "/", "address": "127.0.0.1", "port": port}
        context.invoke(serve, **options, interval=3600.0)

"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from agent.base.inputs import OUTPUT_FILE
from agent.base.output import say

FORMATS = ("table", "json", "yaml")

format_option = click.option(
    "-o", "--output", "form", type=click.Choice(FORMATS), default="table", show_default=True, help="Format on stdout."
)

verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Everything, with its proof; ten lines on a healthy thing without."
)


save_option = click.option(
    "--save",
    type=OUTPUT_FILE,
    help="Also write the result here, as JSON, for --baseline.",
)


host_option = click.option(
    "--host",
    "hosts",
    multiple=True,
    type=click.Path(exists=True, dir_okay=True, path_type=Path),
    metavar="FILE...",
    help="Recordings (topoflight capture) or bundles in place of this host; a folder means all in it.",
)


def _list_machines(context: click.Context, _option: click.Parameter, name: str | None) -> str | None:
    """`--machine list` is a question, and its answer ends the verb."""
    if name == "list" and not context.resilient_parsing:
        from hardware.machines import catalogue

        for row in catalogue():
            say(f"{row.name:20} {row.gpus} x {row.gpu}, {row.nics} x {row.nic_gbps:g}G {row.nic_kind}")
        context.exit()
    return name


machine_option = click.option(
    "--machine", callback=_list_machines, help="A catalogue machine in place of a host: p5.48xlarge. `--machine list` "
    "names them.",
)  # fmt: skip
lengths_option = click.option(
    "--lengths", default=None, metavar="TOKENS:ROWS,...",
    help="How many tokens the rows of the data set have: 128:900,512:100. A micro-batch is padded to its longest row.",
)  # fmt: skip
rows_option = click.option(
    "--rows", default=None, type=click.IntRange(1), help="Rows of the data set, where it cannot be counted."
)
root_option = click.option(
    "--root", default="/", show_default=True, help="Where this host's /sys, /proc and /dev are mounted."
)


def refuse_two_sources(options: Mapping[str, Any]) -> None:
    """UsageError where recordings and a catalogue machine are both given: the advice can be for one of them."""
    if options["hosts"] and options["machine"]:
        named = f"--host {options['hosts'][0]} and --machine {options['machine']}"
        raise click.UsageError(f"{named}: give one of them; a machine stands in place of a host")

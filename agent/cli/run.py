"""The verb run: a training command of the user's own, with a monitor in each rank."""

from __future__ import annotations

import os
from pathlib import Path

import click

from agent.base.options import with_options


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", metavar="COMMAND...", nargs=-1, required=True)
@with_options("run")
def run(command: tuple[str, ...], folder: Path) -> None:
    """Run a training command, such as `torchrun train.py`, with a monitor inside each rank.

    The script needs no change. `topoflight why --run FOLDER` then diagnoses the run. The exit code is that of the
    command.
    """
    from agent.jobs.script import monitored

    try:
        os.execvpe(command[0], command, monitored(os.environ, folder))  # noqa: S606 - the user's own command
    except OSError as error:
        raise click.UsageError(f"{command[0]}: {error.strerror}") from None

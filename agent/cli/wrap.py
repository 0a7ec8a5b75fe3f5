"""The verbs run and wrap: a user's own training command, and a user's own job for a cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from agent.base import inputs
from agent.base.hosts import snapshots
from agent.base.options import with_options
from agent.base.output import print_text, write_result
from probes.api import Snapshot

_LIMIT_BYTES = 1 << 20


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


@click.command()
@click.argument("source", metavar="FILE|-")
@with_options("wrap")
def wrap(source: str, output: Path | None, in_place: bool, record: Path | None, **options: Any) -> None:
    """Add checks and environment to an sbatch script, or to the manifest of a PyTorchJob, TrainJob, JobSet or Job.

    Prints a diff; -o or --apply writes the file. Also adds a place for the NCCL log, and to a manifest devices,
    networks, and the forecast if the arguments of the command give the layout. Existing settings stay.
    """
    from agent.jobs.slurm import wrapped_script
    from agent.jobs.wrapped import wrapped
    from planner.slurm import is_batch_script
    from probes.registry import ALL

    if in_place and source == "-":
        raise click.UsageError("--apply writes over FILE and cannot be used with standard input.")
    raw = inputs.read(source, _LIMIT_BYTES, hint="; give the job's manifest alone")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise inputs.InputError(f"{inputs.name_of(source)}: not UTF-8: {error}") from None
    found = () if options["machine"] else snapshots(options["hosts"], ALL, root=options["root"])
    if record:
        _record(text, found, options, record)
        return
    made, notes = (wrapped_script if is_batch_script(text) else wrapped)(text, found, options)
    print_text(_difference(text, made, source, str(output or source)), nl=False)
    for line in notes:
        print_text(f"note: {line}", err=True)
    if made == text:
        print_text("nothing to add", err=True)
    for path in filter(None, (output, Path(source) if in_place and made != text else None)):
        write_result(path, made)


def _record(text: str, found: Sequence[Snapshot], options: dict[str, Any], folder: Path) -> None:
    from agent.base.result_store import store_run
    from agent.jobs.script import left_by

    try:
        made = left_by(text, found, options, folder)
    except OSError as error:
        raise click.ClickException(f"{folder}: {error.strerror}") from None
    store_run(made)
    print_text(f"{folder / 'run.json'}: {made.status}")
    for line in (*made.plan.notes, *made.notes):
        print_text(f"note: {line}", err=True)


def _difference(before: str, after: str, source: str, target: str) -> str:
    """As unified diff, which patch(1) and `git apply -p0` take; empty for the same text."""
    old, new = (re.findall(r"[^\n]*\n|[^\n]+\Z", text) for text in (before, after))
    import difflib

    rows = difflib.unified_diff(old, new, source, target)
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)

"""The verb why."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.base import EXIT_FAILED, EXIT_PASS, EXIT_UNKNOWN, EXIT_WARNED
from agent.base.options import command
from agent.base.output import emit, print_text
from contracts.host_list import compress_host_list, name_in_slurm

if TYPE_CHECKING:
    from rich.console import Console

    from agent.jobs.slurm import JobFiles
    from planner.why import Verdict

_COLOURS = {"stuck": "red", "failed": "red", "slow": "yellow", "fine": "green"}


@command("why")
@click.argument("logs", metavar="[LOG]...", nargs=-1)
def why(
    logs: tuple[str, ...], run: Path | None, ras: tuple[str, ...], recorder: Path | None, limit: float, watch: bool,
    form: str, job: str | None, metrics: Path | None,
) -> None:  # fmt: skip
    """Read the sources, print the verdict, and exit with its code."""
    from agent.why import diagnosis as gathered
    from agent.why.ranks import watch as watch_run

    if watch and logs:
        raise click.UsageError("--watch and LOG cannot be combined.")
    if run is None:  # the logs may include the folder of a run
        run = next((Path(word) for word in logs if (Path(word) / "ranks").is_dir()), None)
        logs = tuple(word for word in logs if Path(word) != run)
    again = None
    if job is not None:
        of_job = _find_job(job)
        run, logs, again = run or of_job.run, (*logs, *map(str, of_job.logs)), of_job.again
    with ExitStack() as stack:
        files = tuple(_open_log(word, stack) for word in logs)
        sources = gathered.WhySources(logs=files, run=run, ras=ras, recorder=recorder, limit=limit, again=again)
        if not any((logs, run, ras, recorder)):
            raise click.UsageError("give a LOG, --run, --job, --ras or --flight-recorder")
        if watch and run is not None:
            found = watch_run(
                run, lambda verdict: _print_change(verdict, form), lambda text: print_text(text, err=True), limit=limit,
                metrics=metrics,
            )  # fmt: skip
            if form == "table":
                emit(found, form, lambda out: show(out, found))
        else:
            found = gathered.answer(sources)
            _emit(found, form)
    sys.exit({"fine": EXIT_PASS, "unknown": EXIT_UNKNOWN, "slow": EXIT_WARNED}.get(found.state, EXIT_FAILED))


def _find_job(job: str) -> JobFiles:
    """Return the run folder and logs of a Slurm job; print to stderr where they were found."""
    from agent.jobs.slurm import find_job_files

    if not re.fullmatch(r"[1-9]\d{0,8}([_+]\d{1,9})?", job):
        raise click.UsageError(f"--job {job[:40]!r}: must be the id of a Slurm job, such as 1234 or 1234_5")
    files = find_job_files(job)
    print_text(files.where, err=True)
    return files


def _print_change(verdict: Verdict, form: str) -> None:
    """Print one line per change of the verdict, with its time; in other formats print a document."""
    if form == "table":
        line = verdict.line if verdict.line.startswith(verdict.state) else f"{verdict.state}: {verdict.line}"
        print_text(f"{time.strftime('%H:%M:%S')} {line}")
    else:
        _emit(verdict, form)


def _emit(verdict: Verdict, form: str) -> None:
    """Print a verdict; for Slurm, print the nodes of its causes as a host list, except those of a program's errors."""
    if form != "slurm":
        emit(verdict, form, lambda out: show(out, verdict))
    elif nodes := {node for cause in verdict.causes if not cause.of_program for node in cause.nodes}:
        print_text(compress_host_list(map(name_in_slurm, sorted(nodes))))


def _open_log(word: str, stack: ExitStack) -> str:
    """Return the name of a log; stdin is copied to a file, because it is read twice."""
    if word != "-":
        return word
    copy = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".log"))  # noqa: SIM115 - the stack closes it
    shutil.copyfileobj(sys.stdin.buffer, copy)
    copy.flush()
    return copy.name


def show(out: Console, verdict: Verdict) -> None:
    """Print the verdict, its causes with their evidence, and what is unknown."""
    from rich.markup import escape

    from agent.base.lines import print_indented

    colour = _COLOURS.get(verdict.state, "yellow")
    state, _, reason = verdict.line.partition(": ")
    todo = "" if verdict.causes or verdict.state != "fine" else " → nothing to change"
    out.print(f"[{colour} bold]{escape(state if reason else verdict.state)}[/]: {escape(reason or verdict.line)}{todo}")
    for name, row in (("nodes", verdict.nodes), ("GPUs", verdict.gpus)):
        if row:
            out.print(f"{name}: {escape(', '.join(row))}")
    for number, cause in enumerate(verdict.causes, 1):
        share = f", {cause.share:.0%} of the wait" if cause.share is not None else ""
        message = f": {escape(cause.message)}" if cause.message != reason else ""  # the first line has it already
        out.print(f"{number}. [bold]{escape(cause.code)}[/bold]{share}{message}")
        for line in cause.evidence:
            print_indented(out, f"[dim]{escape(line)}[/dim]")
        if cause.action:
            print_indented(out, f"[bold]→ {escape(cause.action)}[/bold]")
    for line in verdict.not_at_fault:
        out.print(f"waited for: {escape(line)}")
    for line in verdict.disagree:
        out.print(f"sources differ: {escape(line)}")
    for question in verdict.unknown:
        out.print(f"unknown: {escape(question.what)}. To see it: {escape(question.command)}")
    if verdict.sources:
        out.print(f"[dim]sources read: {escape('; '.join(verdict.sources))}[/dim]")

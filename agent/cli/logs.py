"""The verbs evidence and why: what NCCL's logs prove about transports, and why a run is stuck, slow or failed."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from agent.base import EXIT_FAILED, EXIT_PASS, EXIT_UNKNOWN, EXIT_WARNED, units
from agent.base.options import InputError, command
from agent.base.output import emit, print_text
from contracts import plain
from contracts.host_list import compress_host_list, list_names, name_in_slurm
from contracts.tables import read_table

if TYPE_CHECKING:
    from rich.console import Console

    from agent.jobs.slurm import JobFiles
    from collectives.nccl_log.transport import Evidence
    from planner.why import Verdict

_NVLINK_WORDS, _OUTCOMES = read_table(__file__, "logs.toml").values()
_COLOURS = {"stuck": "red", "failed": "red", "slow": "yellow", "fine": "green"}


@command("evidence")
@click.argument("source", metavar="[FILE|DIR|-]...", nargs=-1)
def evidence(
    source: tuple[str, ...], fail_on: Literal["fail", "warn"], require_gdrdma: bool, form: str, verbose: bool
) -> None:
    """Read the logs, print what they prove, and exit with the verdict's code."""
    from collectives.nccl_log import evidence as reader

    try:
        result = reader.read_files(source or ("-",))
    except OSError as error:
        raise InputError(f"{error.filename or ' '.join(source)}: {error.strerror}") from None
    document = {**plain.write(result), "exit_code": reader.exit_code(result)}
    emit(document, form, lambda out: print_evidence(out, result, verbose=verbose))
    sys.exit(reader.exit_code(result, fail_on=fail_on, require_gdrdma=require_gdrdma))


def _print_verdict(out: Console, result: Evidence) -> None:
    """Print what the log says about the transport, worst first, and the remedy."""
    from agent.base.lines import print_headline

    if result.problems:
        worst = result.problems[0]
        others = f" and {units.count(len(result.problems) - 1, 'more problem')}" if len(result.problems) > 1 else ""
        place = f" on {worst.place}" if worst.place else ""
        print_headline(out, worst.severity, worst.code + place + others, worst.action)
    elif result.send.total or result.receive.total or result.transports:
        joined = f"{result.inter_node_transport or 'no channel'} between nodes, GPUDirect RDMA {result.gdrdma}"
        print_headline(out, "pass", f"no problem in the log: {joined}", "Nothing to do.", "✓")
    elif result.ranks == 1:
        print_headline(out, "unknown", "one rank alone has no channel", "Run with two or more ranks.")
    else:
        print_headline(out, "unknown", "no channel in the log", "Run with NCCL_DEBUG=INFO.")


def print_evidence(out: Console, result: Evidence, *, verbose: bool = False) -> None:
    """Print the verdict on a log, the remedy, and the problems with their lines; `verbose` adds the proving lines."""
    from rich.markup import escape

    from agent.base.lines import print_indented, print_problem, print_properties

    _print_verdict(out, result)
    print_properties(out, _list_properties(result, verbose=verbose))
    for problem in result.problems:
        times = f" (x {problem.count})" if problem.count > 1 else ""
        place = f" on {problem.place}" if problem.place else ""
        proof = [f"{line.place}: {line.text}" for line in problem.lines]
        print_problem(out, problem.severity, problem.code, place + times, problem.message, proof, problem.action)
    if not verbose and result.proof:
        out.print(f"[dim]-v shows {units.count(len(result.proof), 'line')} of proof[/dim]")
    elif verbose and result.proof:
        out.print("[bold]Proof[/bold]")
    for line in result.proof[:8] if verbose else ():
        print_indented(out, f"[dim]{escape(f'{line.place}: {line.text}')}[/dim] · {escape(line.proves)}", 2)


def _list_properties(result: Evidence, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Return what the log says about the library, the transports and the end of the job: names and texts."""
    from collectives.nccl_log.transport import rank_words

    ways = (("send", result.send), ("receive", result.receive))
    directions = ", ".join(f"{name} {way.gdrdma}/{way.total}" for name, way in ways if way.total)
    hidden = "".join(f", {name} none seen" for name, way in ways if not way.total)
    noun = "channel" if max(result.send.total, result.receive.total) == 1 else "channels"
    counts = f"{directions} {noun}{hidden}" if directions else "no channel seen"
    yield "library", f"{result.library} {(result.nccl_version or 'version unknown').removeprefix('RCCL ')}"
    yield "between nodes", result.inter_node_transport or "none seen"
    yield "within a node", result.intra_node_transport or "none seen"
    yield "GPUDirect RDMA", f"{'no evidence' if result.gdrdma == 'none' else result.gdrdma}: {counts}"
    if result.missing_ranks:
        yield "ranks", f"{result.ranks}, no line of {rank_words(result.missing_ranks)}"
    if result.undirected.total:
        total = units.count(result.undirected.total, "channel")
        yield "", f"{result.undirected.gdrdma}/{total} of unnamed direction"
    if result.transports:
        yield "channels", ", ".join(f"{number} via {name}" for name, number in sorted(result.transports.items()))
    hosts: dict[str, list[str]] = {}  # grouped by what the log says about them
    for host, networks in result.by_host.items():
        for network, way in networks.items():
            rdma = "" if network == "Socket" else f", {way.gdrdma} with GPUDirect RDMA"
            family = "NET" if f"NET/{network}" in result.transports else "COLLNET"
            hosts.setdefault(f"{way.total} via {family}/{network}{rdma}", []).append(host)
    for text, names in hosts.items():
        yield "", f"{list_names(names)}: {text}{' each' * (len(names) > 1)}"
    yield "NVLS", _NVLINK_WORDS[result.nvls_use]
    if result.mnnvl_use not in ("unknown", "off"):
        clique = f", a clique of {result.mnnvl_clique} GPUs" if result.mnnvl_clique else ""
        yield "NVLink between nodes", _NVLINK_WORDS[result.mnnvl_use] + clique
    yield "end of the job", _OUTCOMES[result.outcome]
    for number, run in enumerate(result.runs, 1):
        joined = f"between nodes {run.inter_node_transport or 'none seen'}, GPUDirect RDMA {run.gdrdma}"
        yield f"run {number}", f"from {run.first.place}: {joined}, {_OUTCOMES[run.outcome]}"
    if result.torn_lines:
        yield "torn lines", f"{result.torn_lines}, counted as neither on nor off"
    if verbose:
        yield from (("GPU to NIC", path) for path in result.gdr_paths[:4])
        yield from (("note", f"{note.code}: {note.message}") for note in result.notes[:6])


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

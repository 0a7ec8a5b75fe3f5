"""The verb evidence: print what NCCL's logs prove about transports, and the problems in them with their remedies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import click

from agent.base import units
from agent.base.options import InputError, command
from agent.base.output import emit
from contracts import plain
from contracts.host_list import list_names
from contracts.tables import read_table

if TYPE_CHECKING:
    from rich.console import Console

    from collectives.nccl_log.transport import Evidence

_NVLINK_WORDS, _OUTCOMES = read_table(__file__, "evidence.toml").values()


@command("evidence")
@click.argument("source", metavar="[FILE|DIR|-]...", nargs=-1)
def evidence(
    source: tuple[str, ...], fail_on: Literal["fail", "warn"], require_gdrdma: bool, form: str, verbose: bool
) -> None:
    """Read the logs, print what they prove, and exit with the verdict's code."""
    from collectives.nccl_log import evidence as reader

    try:
        result = reader.read_files(source or ("-",), require_gdrdma=require_gdrdma)
    except OSError as error:
        raise InputError(f"{error.filename or ' '.join(source)}: {error.strerror}") from None
    code = reader.exit_code(result, fail_on=fail_on)
    emit({**plain.write(result), "exit_code": code}, form, lambda out: print_evidence(out, result, verbose=verbose))
    sys.exit(code)


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

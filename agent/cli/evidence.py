"""The verb evidence."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

import click

from agent.base import units
from agent.base.options import InputError, command
from agent.base.output import emit
from contracts.host_list import list_names
from contracts.tables import read_table

if TYPE_CHECKING:
    from rich.console import Console

    from collectives.nccl_log.transport import Evidence


@command("evidence")
@click.argument("source", metavar="[FILE|DIR|-]...", nargs=-1)
def evidence(
    source: tuple[str, ...],
    fail_on: Literal["fail", "warn"],
    require_gdrdma: bool,
    form: str,
    verbose: bool,
) -> None:
    """Read the logs, print what they prove, and exit with the verdict's code."""
    from collectives.nccl_log import evidence as reader

    try:
        found = reader.read_files(source or ("-",))
    except OSError as error:
        raise InputError(f"{error.filename or ' '.join(source)}: {error.strerror}") from None
    emit(reader.to_json(found), form, lambda out: print_evidence(out, found, verbose=verbose))
    sys.exit(reader.exit_code(found, fail_on=fail_on, require_gdrdma=require_gdrdma))


_NVLINK_WORDS, _OUTCOMES = read_table(__file__, "evidence.toml").values()


def _print_verdict(out: Console, found: Evidence) -> None:
    """Print what the log says about the transport, worst first, and the remedy."""
    from agent.base.lines import print_headline

    if found.problems:
        worst = found.problems[0]
        more = f" and {units.count(len(found.problems) - 1, 'more problem')}" if len(found.problems) > 1 else ""
        place = f" on {worst.place}" if worst.place else ""
        print_headline(out, worst.severity, worst.code + place + more, worst.action)
    elif found.send.total or found.receive.total or found.transports:
        joined = f"{found.inter_node_transport or 'no channel'} between nodes, GPUDirect RDMA {found.gdrdma}"
        print_headline(out, "pass", f"no problem in the log: {joined}", "Nothing to do.", "✓")
    elif found.ranks == 1:
        print_headline(out, "unknown", "one rank alone has no channel", "Run with two or more ranks.")
    else:
        print_headline(out, "unknown", "no channel in the log", "Run with NCCL_DEBUG=INFO.")


def print_evidence(out: Console, found: Evidence, *, verbose: bool = False) -> None:
    """Print the verdict on a log, the remedy, and the problems with their lines; `verbose` adds the proving lines."""
    from rich.markup import escape

    from agent.base.lines import print_indented, print_problem, print_properties
    from collectives.nccl_log.transport import rank_words

    _print_verdict(out, found)
    ways = (("send", found.send), ("receive", found.receive))
    shown = ", ".join(f"{name} {way.gdrdma}/{way.total}" for name, way in ways if way.total)
    hidden = "".join(f", {name} none seen" for name, way in ways if not way.total)
    noun = "channel" if max(found.send.total, found.receive.total) == 1 else "channels"
    counts = f"{shown} {noun}{hidden}" if shown else "no channel seen"
    word = {"none": "no evidence"}.get(found.gdrdma, found.gdrdma)
    rows = [
        ("library", f"{found.library} {(found.nccl_version or 'version unknown').removeprefix('RCCL ')}"),
        ("between nodes", found.inter_node_transport or "none seen"),
        ("within a node", found.intra_node_transport or "none seen"),
        ("GPUDirect RDMA", f"{word}: {counts}"),
    ]
    if found.missing_ranks:
        rows.append(("ranks", f"{found.ranks}, no line of {rank_words(found.missing_ranks)}"))
    if found.undirected.total:
        total = units.count(found.undirected.total, "channel")
        rows.append(("", f"{found.undirected.gdrdma}/{total} of unnamed direction"))
    if found.transports:
        each = ", ".join(f"{number} via {name}" for name, number in sorted(found.transports.items()))
        rows.append(("channels", each))
    hosts: dict[str, list[str]] = {}  # grouped by what the log says about them
    for host, networks in found.by_host.items():
        for network, way in networks.items():
            rdma = "" if network == "Socket" else f", {way.gdrdma} with GPUDirect RDMA"
            hosts.setdefault(f"{way.total} via {'COLL' * (network == 'SHARP')}NET/{network}{rdma}", []).append(host)
    rows += [("", f"{list_names(mine)}: {words}{' each' * (len(mine) > 1)}") for words, mine in hosts.items()]
    rows.append(("NVLS", _NVLINK_WORDS[found.nvls_use]))
    if found.mnnvl_use not in ("unknown", "off"):
        clique = f", a clique of {found.mnnvl_clique} GPUs" if found.mnnvl_clique else ""
        rows.append(("NVLink between nodes", _NVLINK_WORDS[found.mnnvl_use] + clique))
    rows.append(("end of the job", _OUTCOMES[found.outcome]))
    for number, run in enumerate(found.runs, 1):
        joined = f"between nodes {run.inter_node_transport or 'none seen'}, GPUDirect RDMA {run.gdrdma}"
        rows.append((f"run {number}", f"from {run.first.place}: {joined}, {_OUTCOMES[run.outcome]}"))
    if found.torn_lines:
        rows.append(("torn lines", f"{found.torn_lines}, counted as neither on nor off"))
    if verbose:
        rows += [("GPU to NIC", path) for path in found.gdr_paths[:4]]
        rows += [("note", f"{seen.code}: {seen.message}") for seen in found.notes[:6]]
    print_properties(out, rows)
    for problem in found.problems:
        times = f" (x {problem.count})" if problem.count > 1 else ""
        place = f" on {problem.place}" if problem.place else ""
        proof = [f"{line.place}: {line.text}" for line in problem.lines]
        print_problem(out, problem.severity, problem.code, place + times, problem.message, proof, problem.action)
    if not verbose and found.proof:
        out.print(f"[dim]-v shows {units.count(len(found.proof), 'line')} of proof[/dim]")
    elif verbose and found.proof:
        out.print("[bold]Proof[/bold]")
    for line in found.proof[:8] if verbose else ():
        print_indented(out, f"[dim]{escape(f'{line.place}: {line.text}')}[/dim] · {escape(line.proves)}", 2)

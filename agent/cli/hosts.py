"""The verbs scan, demo, capture, diff and topo, which read hosts, record, compare and draw them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.base import EXIT_UNKNOWN, raise_as
from agent.base.options import InputError, command, describe_source, read_input, read_snapshots
from agent.base.output import console, emit, print_text, write_result
from contracts import bounded
from contracts.host_list import name_in_slurm

if TYPE_CHECKING:
    from rich.console import Console

    from contracts.finding import Finding
    from probes.api import Snapshot
    from topology.graph import NodeTopology

DEMO = Path(__file__).parents[1] / "data" / "demo.json"
_TOPOLOGY_BYTES = 16 << 20  # a matrix of 64 GPUs is 30 KB; the largest NCCL XML known is below 1 MB


@command("scan")
def scan(hosts: tuple[Path, ...], root: str, form: str, timeout: float, everything: bool, verbose: bool) -> None:
    """Inspect this host and print its devices and findings. Reads only."""
    from agent.checks.view import build_view
    from agent.terminal.hosts import print_scan
    from probes.registry import ALL

    view = build_view(read_snapshots(hosts, ALL, root=root, timeout_seconds=timeout))
    value = [{"snapshot": s, "checks": [c for c in view.checks if c.node == s.hostname]} for s in view.snapshots]
    emit(value if len(value) > 1 else value[0], form,
         lambda out: print_scan(out, view, verbose=verbose or everything, everything=everything))  # fmt: skip


@command("demo")
def demo(verbose: bool) -> None:
    """Show the findings of a faulty node with eight GPUs. The machine is built in; nothing is measured."""
    from agent.checks.view import build_view
    from agent.terminal.hosts import print_scan
    from probes.registry import ALL

    print_text("This node is a built-in example with deliberate faults. It is not a real machine.")
    print_scan(console(), build_view(read_snapshots((DEMO,), ALL)), verbose=verbose, everything=False)
    print_text(f"Check your own node: topoflight preflight. Every command can read this one: --host {DEMO}")


@command("capture")
def capture(root: str, target: Path | None) -> None:
    """Scan this host and write the recording."""
    from probes.registry import ALL
    from probes.scanner import Scanner, dumps

    with Scanner(root, probes=ALL) as scanner:
        text = dumps(scanner.capture()[1])
    if target is None:
        print_text(text, nl=False)
        return
    write_result(target, text)
    print_text(f"{target}: {len(text)} bytes", err=True)


@command("diff")
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
def diff(files: tuple[Path, ...], fleet: Path | None, form: str) -> None:
    """Read the recordings and print the differences."""
    from probes.registry import ALL
    from topology import diff as differ

    if fleet is not None:
        if files:
            raise click.UsageError("--fleet takes a folder and no further files")
        view = differ.compare_fleet([((host.hostname,), host) for host in read_snapshots((fleet,), ALL)])
        emit(view, form, lambda out: out.print(differ.format_fleet(view), markup=False))
        return
    if len(files) != 2:
        raise click.UsageError(f"diff takes two recordings, {len(files)} were given")
    before, after = (_read_one(path) for path in files)
    names = [path.name for path in files]
    first, second = names if names[0] != names[1] else map(str, files)
    differences = differ.diff(before, after, (f"in {first}", f"in {second}"))
    emit(list(differences), form, lambda out: out.print(differ.format_diff(differences), markup=False))


def _read_one(path: Path) -> Snapshot:
    """Return the host of a recording, by its own name. Raises UsageError if the file contains several hosts."""
    from probes.registry import ALL

    snapshots = read_snapshots((path,), ALL)
    if len(snapshots) != 1:
        raise click.UsageError(f"{path}: holds {len(snapshots)} hosts; diff compares two, and --fleet a folder of many")
    return snapshots[0]


@command("topo")
def topo(hosts: tuple[Path, ...], root: str, source: str | None, form: str, verbose: bool) -> None:
    """Read the topology and print it in the requested format."""
    from topology.paths import with_expectations

    if form.startswith("slurm"):
        _print_slurm(hosts, root, form)
        return
    if source:
        nodes = [with_expectations(read_topology(source))]
    else:
        from topology.build import SOURCES, build  # not needed by --from

        nodes = [with_expectations(build(snapshot)) for snapshot in read_snapshots(hosts, SOURCES, root=root)]
    if form == "svg":
        from topology.svg import svg

        if len(nodes) != 1:
            raise click.UsageError(f"-o svg draws one node, {len(nodes)} were given")
        print_text(svg(nodes[0]), nl=False)
        return
    from topology.check import check
    from topology.render import json_document

    checked = [(node, check(node)) for node in nodes]
    documents = [json_document(node) | {"findings": list(map(asdict, findings))} for node, findings in checked]
    document = documents if len(documents) > 1 else documents[0]
    emit(document, form, lambda out: _print_nodes(out, checked, verbose=verbose))
    if any(node.lacking for node in nodes):
        sys.exit(EXIT_UNKNOWN)


def _print_nodes(out: Console, checked: Sequence[tuple[NodeTopology, Sequence[Finding]]], *, verbose: bool) -> None:
    """Print each node, its findings, and the checks that could not be decided."""
    from agent.base.lines import print_problem
    from agent.terminal import topology as topology_view

    for node, findings in checked:
        if verbose:
            topology_view.print_node(out, node)
        else:
            topology_view.print_brief(out, node, findings)
        wrong = [finding for finding in findings if finding.status in ("fail", "warn")]
        if wrong:
            from agent.terminal.findings import print_findings

            print_findings(out, wrong)
        for one in findings:
            if one.status == "unknown":
                print_problem(out, one.status, one.code, "", one.message, one.evidence[:3], one.remedy)


def _print_slurm(hosts: Sequence[Path], root: str, form: str) -> None:
    """Print topology.conf for the nodes."""
    from topology import slurm_conf as slurm
    from topology.build import SOURCES

    snapshots = sorted(read_snapshots(hosts, SOURCES, root=root), key=lambda snapshot: snapshot.taken_at_seconds)
    newest = {name_in_slurm(snapshot.hostname): snapshot for snapshot in snapshots}  # of two recordings of a node
    placements = [slurm.find_placement(snapshot) for snapshot in newest.values()]
    print_text(slurm.format_topology_conf(placements, has_blocks=form == "slurm-block"), nl=False)


def read_topology(source: str) -> NodeTopology:
    """Read a matrix or an XML file, plain or compressed with gzip; the format is detected from the content."""
    from topology.formats import TopologyFileError

    name, raw = describe_source(source), read_input(source, _TOPOLOGY_BYTES, hint=", more than any topology has")
    if raw[:2] == b"\x1f\x8b":
        raw = _decompress(raw, name)
    text = b"".join(bounded.utf8_chunks(BytesIO(raw))).decode("utf-8", errors="replace")
    # a matrix in HTML also begins with "<"
    if "<system" in text[:4096] or (text.lstrip().startswith("<") and "GPU0" not in text):
        from topology.formats.xml import parse
    else:
        from topology.formats.text import parse
    try:
        return parse(text, source=name)
    except TopologyFileError as error:
        hint = "; --host FILE reads a recording" if text.lstrip().startswith("{") else ""
        raise InputError(f"{name}: {error}{hint}") from None


def _decompress(raw: bytes, name: str) -> bytes:
    import gzip
    import zlib

    broken = EOFError, gzip.BadGzipFile, zlib.error, bounded.TooLargeError
    with raise_as(InputError, broken, f"{name}: not a whole gzip file of at most {_TOPOLOGY_BYTES >> 20} MiB: "):
        return bounded.rest(gzip.GzipFile(fileobj=BytesIO(raw)), _TOPOLOGY_BYTES)

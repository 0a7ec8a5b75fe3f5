"""The verb topo: read the topology of hosts, a matrix or NCCL's XML, and print, draw or export it."""

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
from agent.base.output import emit, print_text
from contracts import bounded
from contracts.host_list import name_in_slurm

if TYPE_CHECKING:
    from rich.console import Console

    from contracts.finding import Finding
    from topology.graph import NodeTopology

_LIMIT_BYTES = 16 << 20  # a matrix of 64 GPUs is 30 KB; the largest NCCL XML known is below 1 MB


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

    name, raw = describe_source(source), read_input(source, _LIMIT_BYTES, hint=", more than any topology has")
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
    with raise_as(InputError, broken, f"{name}: not a whole gzip file of at most {_LIMIT_BYTES >> 20} MiB: "):
        return bounded.rest(gzip.GzipFile(fileobj=BytesIO(raw)), _LIMIT_BYTES)

"""The verbs topo and diff."""

from __future__ import annotations

import gzip
import sys
import zlib
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from agent.base import inputs
from agent.base.exits import EXIT_UNKNOWN
from agent.base.hosts import snapshots
from agent.base.options import format_option, host_option, root_option, verbose_option
from agent.base.output import emit, say
from contracts import bounded

if TYPE_CHECKING:
    from probes.api import Snapshot
    from topology.graph import NodeTopology

_LIMIT_BYTES = 16 << 20  # a matrix of 64 GPUs is 30 KB; the largest NCCL XML known is below 1 MB


@click.command()
@host_option
@root_option
@click.option("--from", "source", type=click.Path(allow_dash=True, path_type=str), metavar="FILE|-",
              help="Read `nvidia-smi topo -m` text, NCCL XML or a recording in place of this host.")  # fmt: skip
@click.option(
    "-o", "--output", "form",
    type=click.Choice(["table", "json", "yaml", "svg"]), default="table", show_default=True,
)  # fmt: skip
@verbose_option
def topo(hosts: tuple[Path, ...], root: str, source: str | None, form: str, verbose: bool) -> None:
    """Say how GPUs and NICs are linked, on this host, a recording, or a file that people have; -v: the matrix.

    Exit code 5 where a matrix is cut, 0 otherwise.
    """
    if source and hosts:
        raise click.UsageError("--from and --host exclude each other")
    nodes = [read_topology(source)] if source else [build_node(s) for s in snapshots(hosts, root=root)]
    if form == "svg":
        from topology.render import svg

        if len(nodes) != 1:
            raise click.UsageError(f"-o svg draws one node, {len(nodes)} were given")
        say(svg(nodes[0]), nl=False)
        return
    from agent.terminal import findings as findings_view
    from agent.terminal import topology as topology_view
    from topology.check import check
    from topology.render import json_document

    found = [check(node) for node in nodes]
    documents = [
        json_document(node) | {"findings": [asdict(finding) for finding in findings]}
        for node, findings in zip(nodes, found, strict=True)
    ]

    def show(out: Console) -> None:
        for node, findings in zip(nodes, found, strict=True):
            if verbose:
                topology_view.node(out, node)
            else:
                topology_view.brief(out, node, findings)
            findings_view.finding_lines(out, findings)

    emit(documents if len(documents) > 1 else documents[0], form, show)
    if any(node.lacking for node in nodes):
        sys.exit(EXIT_UNKNOWN)


def build_node(snapshot: object) -> NodeTopology:
    """The topology of one scanned or replayed host."""
    from probes.api import Snapshot
    from topology.build import build

    assert isinstance(snapshot, Snapshot)  # noqa: S101 - typed late to keep `topo --from` light
    return build(snapshot)


def read_topology(source: str) -> NodeTopology:
    """A matrix, an XML file or a recording, told apart by content."""
    name, raw = inputs.name_of(source), inputs.read(source, _LIMIT_BYTES, hint=", which no topology is")
    from topology.formats.text import TopologyTextError, parse

    try:
        plain = bounded.rest(gzip.GzipFile(fileobj=BytesIO(raw)), _LIMIT_BYTES) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, gzip.BadGzipFile, zlib.error, bounded.TooLargeError):
        return _recording(source, raw)  # whose reader says what is wrong with the file
    if plain.lstrip()[:1] == b"{":
        return _recording(source, raw)
    text = b"".join(bounded.utf8_chunks(BytesIO(plain))).decode("utf-8", errors="replace")
    try:
        # A matrix in HTML begins with "<" too.
        if "<system" in text[:4096] or (text.lstrip().startswith("<") and "GPU0" not in text):
            return _parsed_xml(text, name)
        return parse(text, source=name)
    except TopologyTextError as error:
        raise inputs.InputError(f"{name}: {error}") from None


def _parsed_xml(text: str, name: str) -> NodeTopology:
    from topology.formats.xml import TopologyXmlError, parse

    try:
        return parse(text, source=name)
    except TopologyXmlError as error:
        raise inputs.InputError(f"{name}: {error}") from None


def _recording(source: str, raw: bytes) -> NodeTopology:
    if source != "-":
        return build_node(snapshots((Path(source),))[0])
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile(suffix=".json") as copy:
        copy.write(raw)
        copy.flush()
        return build_node(snapshots((Path(copy.name),))[0])


def _only(path: Path) -> Snapshot:
    """The host of a recording, by its own name. Raises UsageError where there are several."""
    found = snapshots((path,))
    if len(found) != 1:
        raise click.UsageError(f"{path}: holds {len(found)} hosts; diff compares two, and --fleet a folder of many")
    return found[0]


@click.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--fleet", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of recordings.")
@format_option
def diff(files: tuple[Path, ...], fleet: Path | None, form: str) -> None:
    """Say what differs between recordings A and B that matters for training, worst first.

    With --fleet DIR: the odd nodes out among many, the rest in groups.
    """
    from topology import diff as differ

    if fleet is not None:
        if files:
            raise click.UsageError("--fleet takes a folder and no further files")
        view = differ.fleet(snapshots((fleet,)))
        emit(view, form, lambda out: out.print(differ.fleet_text(view), markup=False))
        return
    if len(files) != 2:
        raise click.UsageError(f"diff takes two recordings, {len(files)} were given")
    before, after = (_only(path) for path in files)
    names = [path.name for path in files]
    first, second = names if names[0] != names[1] else map(str, files)
    differences = differ.diff(before, after, (f"in {first}", f"in {second}"))
    alike = "✓ nothing that matters for training differs → if one is slower, measure: topoflight bench"
    emit(list(differences), form, lambda out: out.print(differ.diff_text(differences) if differences else alike,
                                                        markup=False))  # fmt: skip

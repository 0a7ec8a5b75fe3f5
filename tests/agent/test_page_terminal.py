"""The terminal: 80 columns, the same finding once, plain in a pipe, the matrix whole where a tool reads it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agent import advise, terminal
from agent.gate import Check
from agent.view import View, grouped, look
from probes.recording import load
from probes.scan import scan
from topology.text import parse

MACHINES = sorted((Path(__file__).parent.parent / "machines").glob("*.json"))
BY_NAME = {path.stem: path for path in MACHINES}


def view_of(name: str) -> View:
    return look((scan(load(BY_NAME[name])),))


def console(**options: bool) -> Console:
    return Console(file=io.StringIO(), width=80, highlight=False, **options)


def text_of(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_machine_fits_80_columns(name: str) -> None:
    """Host, topology, findings, advice: no line is longer, and a pipe gets no escape code."""
    view, out = view_of(name), console()
    terminal.host(out, view.snapshots[0])
    terminal.node(out, view.topologies[0], brief=True)
    terminal.findings(out, view.checks)
    terminal.recommendation(out, advise.for_view(view, advise.Request(model="Llama-3.1-8B")))
    terminal.verdict(out, view.verdict, 1.0)
    text = text_of(out)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_ten_times_the_same_is_said_once() -> None:
    """Count, subjects, evidence of the first, one remedy; failures before warnings."""
    view, out = view_of("sick-h100-rdma-off"), console()
    terminal.findings(out, view.checks)
    text = text_of(out)
    assert text.count("pci.nic.no_rdma") == 1
    assert "(x 10)" in text
    assert "and 2 more" in text
    assert text.count("→ Load the driver") == 1
    assert text.index("FAIL") < text.index("warn")


def test_findings_that_say_different_things_stay_apart() -> None:
    """One code, two messages: both are read; another remedy makes another group."""
    made = [
        Check(id="a.b", status="warn", node="n", subject=subject, message=message, remedy=remedy)
        for subject, message, remedy in (("x", "one", "mend"), ("y", "two", "mend"), ("z", "three", "replace"))
    ]
    out = console()
    terminal.findings(out, made)
    assert all(word in text_of(out) for word in ("x: one", "y: two", "three", "mend", "replace"))
    assert [group.size for group in grouped(made)] == [2, 1]


def test_a_pipe_gets_the_matrix_that_other_tools_read() -> None:
    """`topoflight topo | topoflight topo --from -` gives the same pairs."""
    view, out = view_of("hgx-h100-8xH100-8hca"), console()
    terminal.matrix(out, view.topologies[0])
    again = parse(text_of(out))
    labels = {frozenset((p.a, p.b)): p.label for p in view.topologies[0].pairs}
    assert {frozenset((p.a, p.b)): p.label for p in again.pairs} == labels


def test_a_narrow_terminal_gets_blocks_that_fit() -> None:
    """18 devices: GPUs among themselves, then GPUs to NICs."""
    view, out = view_of("hgx-h100-8xH100-8hca"), console(force_terminal=True, no_color=True)
    terminal.matrix(out, view.topologies[0])
    lines = text_of(out).splitlines()
    assert sum(line.startswith("GPU7") for line in lines) == 2
    assert all(len(line) <= 80 for line in lines if "\x1b" not in line)


def test_topology_says_what_it_is_and_how_it_departs() -> None:
    """The reference row, the departure, and one expectation per scope rather than one per rail and op."""
    view, out = view_of("sick-h100-rdma-off"), console()
    terminal.node(out, view.topologies[0], brief=True)
    text = text_of(out)
    assert "recognised as: HGX H100/H200" in text
    assert "! departs from it: no RDMA device" in text
    assert text.count("expected all_gather") == 2
    assert "rail" not in text
    assert "GPU0 GPU1 GPU2 GPU3: nearest NIC eno1 (NODE)" in text

"""The verdict on a terminal."""

from __future__ import annotations

from rich.console import Console

from collectives import evidence
from collectives.evidence_table import table


def shown(*lines: str) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123 - rich owns it
    console.print(table(evidence.read(list(lines))))
    return console.export_text()


def test_the_table_says_what_the_verdict_says() -> None:
    """State, fraction by direction, code, action and the line that proves it."""
    text = shown(
        "noise",
        "n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 2[0] [send] via NET/IB/0",
        "n1:1:2 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [receive] via NET/IB/1/GDRDMA",
        "n1:1:2 [0] NCCL INFO Channel 01/0 : 2[0] -> 0[0] [receive] via NET/IB/1",
    )
    assert "partial (33% of channels: send 0 of 1, receive 1 of 2)" in text
    assert "gdr_partial" in text
    assert "without on devices IB/0, IB/1" in text
    assert "[send] via NET/IB/0" in text


def test_an_empty_log_is_no_evidence() -> None:
    """Nothing seen is said so."""
    text = shown()
    assert "no evidence" in text
    assert "NCCL_RUNTIME_CONNECT=0" in text


def test_markup_in_a_log_is_text() -> None:
    """A log cannot style the terminal."""
    assert "[red]x" in shown("[red]x NCCL WARN Cuda failure '[/]'")

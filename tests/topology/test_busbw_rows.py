"""Published bandwidths in people's words: what `make expect` reads, and what it says of rows it cannot place."""

from __future__ import annotations

from pathlib import Path

import expect as bench_expect
import pytest
import yaml
from busbw_rows import PlaceError, Row, place, read
from rigs.tables import each_row

GB, GIB = 1e9, 1 << 30
WORDS = yaml.safe_load(Path(__file__).with_name("busbw_rows.yaml").read_text(encoding="utf-8"))
HEADER = "machine,gpus_per_node,nodes,op,bytes,nccl,nvls,gdr,busbw_GBps,healthy,source,note,class\n"
ROWS = (
    "8xH100,8,1,all_gather,8589934592,2.27,n/a,,361,yes,a/b#1,,node\n"
    "8xH100,8,1,all_reduce,8589934592,2.27,off,,367,no,a/b#1,NVLS off,node\n"
    "8xH100 8x400 RoCE,8,2,all_reduce,8589934592,2.27,,,231,no,c/d#2,,2 nodes\n"
    "8xH100 8x400 RoCE,8,2,all_reduce,8589934592,2.27,,,100,unclear,c/d#2,,2 nodes\n"
    "a box with 8 accelerators,8,1,all_reduce,8589934592,,,,100,yes,e/f,,node\n"
)


def row(machine: str, gpus: int, nodes: int) -> Row:
    return Row(
        machine=machine, gpus_per_node=gpus, nodes=nodes, op="all_gather", bytes=GIB, busbw=GB, healthy="yes",
        source="", kind="", nccl="2.27", nvls="", gdr="",
    )  # fmt: skip


@each_row(("machine", "gpus", "nodes", "inside", "link", "between", "wire"), WORDS["placed"])
def test_a_machine_in_words_is_placed(
    machine: str, gpus: int, nodes: int, inside: str | None, link: float | None, between: str | None, wire: float | None
) -> None:
    found = place(row(machine, gpus, nodes))
    assert (found.inside, found.between) == (inside, between)
    assert (found.link.low / GB if found.link else None) == (pytest.approx(link) if link else None)
    assert (found.wire.low / GB if found.wire else None) == (pytest.approx(wire) if wire else None)


@each_row(("machine", "nodes"), WORDS["unplaced"])
def test_what_the_words_do_not_say_is_not_guessed(machine: str, nodes: int) -> None:
    with pytest.raises(PlaceError, match=machine):
        place(row(machine, 8, nodes))


ROWS_PLAIN = "8xH100,8,1,all_reduce,8589934592,476,yes,a\n"


def test_the_table_counts_alarms_misses_and_rows_without_a_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(HEADER + ROWS)
    assert len(read(path)) == 5
    assert bench_expect.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "Not placed: 1" in out and "a box with 8 accelerators" in out
    (whole,) = [line for line in out.splitlines() if line.startswith("| all |")]
    assert [cell.strip() for cell in whole.strip("|").split("|")][5:] == ["0", "2", "0", "1", "0"]


def test_one_bad_row_does_not_end_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU without a model, a cell without a number, a size of none: named, and all others are judged."""
    bad = ("8xMI300X,8,1,all_reduce,4294967296,312.91,yes,a\n8xH100,eight,1,all_reduce,4294967296,400,yes,a\n"
           "8xH100,8,1,all_reduce,0,400,yes,a\n8xH100,8,1,all_reduce\n")  # fmt: skip
    path = tmp_path / "rows.csv"
    path.write_text("machine,gpus_per_node,nodes,op,bytes,busbw_GBps,healthy,source\n" + bad + ROWS_PLAIN)
    assert bench_expect.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "Not placed: 4" in out and "MI300X" in out and "rows.csv:3" in out
    assert "| all | 1 |" in out


def test_factors_are_fitted_without_the_rows_own_source() -> None:
    """A source that is left out moves nothing; with it the fit follows it."""
    rows, _ = bench_expect.placed([row("8xH100", 8, 1), row("8xH100", 2, 1), row("8xH100", 4, 1)])
    assert bench_expect.fit([]) == bench_expect.PRIOR
    assert bench_expect.fit(rows).gather != bench_expect.PRIOR.gather

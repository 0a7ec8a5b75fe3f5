"""Scoring a file of published runs: any file with the corpus's columns, however empty they are."""

import csv
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import forecast
import pytest
import yaml
from rigs.tables import each_row
from rows import Row, read_row

TABLES: dict = yaml.safe_load(Path(__file__).with_name("published_rows.yaml").read_text(encoding="utf-8"))
BASE: dict[str, str] = TABLES["base"]


def score(folder: Path, rows: list[dict[str, str]]) -> str:
    """What the benchmark prints of these rows."""
    file = folder / "rows.csv"
    names = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, names)
        writer.writeheader()
        writer.writerows(rows)
    with redirect_stdout(io.StringIO()) as printed:
        assert forecast.main([str(file)]) == 0
    return printed.getvalue()


def cells(printed: str, title: str, source: str) -> list[str]:
    """The cells after a source's name in the table of this title."""
    table = printed.split(f"## {title}", 1)[1].split("\n## ", 1)[0]
    line = next(line for line in table.splitlines() if line.startswith(f"| {source}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def read(row: dict[str, str]) -> Row:
    """One row through the reader."""
    return read_row({**BASE, **row})


def test_one_row_is_scored(tmp_path: Path) -> None:
    """A row with a throughput gets an error, its interval is judged."""
    done = score(tmp_path, [BASE])
    assert cells(done, "Rows", "a table")[:3] == ["1", "0", "1"]
    assert cells(done, "Step time", "a table")[0] == "1"


def test_what_the_reader_cannot_place_is_counted_under_its_reason(tmp_path: Path) -> None:
    """Never skipped in silence: a separate column, and the reason of each."""
    done = score(tmp_path, [*({**BASE, **row} for row in TABLES["counted"]), {"row_id": "9"}])
    assert cells(done, "Rows", "all")[:2] == ["9", "7"]
    for word in ("is unknown", "does not divide", "seq is not given", "mixture of experts", "neither layers nor size",
                 "a hybrid of attention"):  # fmt: skip
        assert word in done, word


def test_memory_and_out_of_memory_rows(tmp_path: Path) -> None:
    """A row that ran out of memory and is forecast to fit would be counted as called safe."""
    rows = [
        {**BASE, "mem_gib": "60", "mem_kind": "GiB max_memory_reserved", "act_recompute": "none"},
        {**BASE, "mem_gib": "OOM", "mbs": "64", "gbs": "512", "act_recompute": "none", "tokens_s_gpu": ""},
    ]
    method, held, *_, oom, safe = cells(score(tmp_path, rows), "Memory", "a table")
    assert (method, held, oom, safe) == ("full", "1", "1", "0")


def test_a_time_beyond_the_gpu_is_an_error_of_ours(tmp_path: Path) -> None:
    """60,000 tokens/s of an 8B model on one H100 need four times its FLOP/s: a model or a rate was read wrong."""
    done = score(tmp_path, [{**BASE, "tokens_s_gpu": "60000"}])
    assert cells(done, "Rows", "a table")[2:4] == ["1", "0"]
    assert float(cells(done, "Step time", "a table")[2].rstrip("%")) > 100


def test_a_file_is_scored_by_what_ships(tmp_path: Path) -> None:
    """Nothing is fitted or learned on it: a source's figures are the same whatever other sources the file has."""
    rows = [{**BASE, "row_id": str(n), "tokens_s_gpu": str(6000 + 100 * n)} for n in range(12)]
    slow = [{**row, "source": "another table", "tokens_s_gpu": "2000"} for row in rows]
    alone, together = (cells(score(tmp_path, each), "Step time", "a table") for each in (rows, rows + slow))
    assert alone == together
    assert "as shipped" in score(tmp_path, rows)


# What a reader makes of the cells, by the table of published_rows.yaml.
READ: dict[str, Callable[[dict[str, str]], list]] = {
    "gpus": lambda row: [
        (found := read({**row, "gpus_per_node": "", "world": "64", "nodes": "", "dp": "", "gbs": ""})).gpu.name,
        found.links.ranks_per_node,
    ],
    "precisions": lambda row: [[*(found := read(row)).precisions], "precision" not in found.assumed],
    "checkpointing": lambda row: [read(row).checkpointing],
    "stacks": lambda row: [(stack := read(row).stack).engine.name, stack.known],
    "stored": lambda row: [read({**row, "framework": "in-house"}).stack.engine.states.weights],
}


@each_row(("table", "row", "wanted"), [(name, row, wanted) for name in READ for row, *wanted in TABLES[name]])
def test_cells_are_read_as_tables_write_them(table: str, row: dict[str, str], wanted: list) -> None:
    assert READ[table](row) == wanted


@each_row(("row", "link", "gbytes"), TABLES["networks"])
def test_networks(row: dict[str, str], link: str | None, gbytes: float) -> None:
    network = read({**row, "nodes": "2", "world": "16", "dp": "16", "gbs": "16"}).links.network
    assert network is not None and network.bytes_per_second / 1e9 == pytest.approx(gbytes, rel=0.02)
    assert link is None or network.link == link

"""The benchmarks of before: kept as lines, compared only where job and size are the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rigs.recorded import snapshot
from rigs.tables import each_row

from agent.advice.advise import for_view
from agent.advice.request import Request
from agent.base import result_store
from agent.base import result_store as keep
from agent.http.state import State
from agent.pages import charts
from agent.pages import render as pages
from collectives.bench.results import result_from_json

HERE = Path(__file__).parent
RESULT = result_from_json(json.loads((HERE.parent / "browser" / "measured" / "bench.json").read_text()))


def later(seconds: float, factor: float, **changed: object):  # type: ignore[no-untyped-def]
    measured = tuple(replace(m, busbw_bytes_per_second=m.busbw_bytes_per_second * factor) for m in RESULT.measurements)
    at = RESULT.started_at_seconds + seconds
    return replace(RESULT, measurements=measured, started_at_seconds=at, **changed)  # type: ignore[arg-type]


def test_each_benchmark_leaves_a_line_and_the_last_one_itself(tmp_path: Path) -> None:
    """Newest first, the same one once, no more than are kept."""
    for result in (RESULT, later(60, 0.5), later(60, 0.5)):
        keep.keep_bench(result, tmp_path)
    lines = result_store.bench_history(tmp_path)
    assert [line.started_at_seconds for line in lines] == [RESULT.started_at_seconds + 60, RESULT.started_at_seconds]
    best = {(m.op, m.bytes): m.busbw_bytes_per_second for m in RESULT.measurements}
    for one in lines[1].largest:
        assert one.size_bytes == max(size for op, size in best if op == one.op)
        assert one.busbw_bytes_per_second == best[one.op, one.size_bytes]
    for n in range(result_store.KEPT_BENCHES + 5):
        keep.keep_bench(later(100 + n, 1.0), tmp_path)
    assert len(result_store.bench_history(tmp_path)) == result_store.KEPT_BENCHES


def test_the_page_shows_whether_it_was_ever_better(tmp_path: Path) -> None:
    """Half the bandwidth of yesterday is half a bar, named with its factor; another job is not compared."""
    for result in (RESULT, later(60, 1.0, world_size=8), later(86400, 0.5)):
        keep.keep_bench(result, tmp_path)
    view = State(lambda: (snapshot("r760xa-2xA40-bf3"),), interval_seconds=60, folder=tmp_path).refresh()
    html = pages.node_page(view, for_view(view, Request()), "", trouble=None)
    figures = html.split("Earlier benchmarks")[1].split("</details>")[0]
    assert figures.count("<caption>") == 2  # all_gather, reduce_scatter
    assert figures.count("(0.50 x)") == 4  # as the bar's words and as text, for each of the two
    assert "8 gloo ranks" not in figures.split("<details")[0]
    assert "8 gloo ranks on 1 host" in figures


@each_row("text", ["", "{}", "[1, null, {}]", '[{"largest": 3}]', "[" * 2000, '[{"started_at_seconds": NaN}]', "\xff"])
def test_a_spoiled_history_spoils_no_page(tmp_path: Path, text: str) -> None:
    """What cannot be read is left out, and the next benchmark begins anew."""
    (tmp_path / result_store.HISTORY_FILE).write_text(text, encoding="latin-1")
    assert result_store.bench_history(tmp_path) == ()
    keep.keep_bench(RESULT, tmp_path)
    assert len(result_store.bench_history(tmp_path)) == 1


def test_one_benchmark_is_no_history() -> None:
    """Nothing to compare, nothing drawn."""
    line = result_store.line_of(RESULT)
    assert charts.bench_figures([line], lambda _seconds: "now") == ""
    assert charts.runs("x", []) == ""

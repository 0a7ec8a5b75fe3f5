"""Forecast the published studies of studies.toml, row by row: `python bench/studies.py [--write]`, or `make studies`.

Nothing is fitted to these rows. Printed for each row: the published and the forecast step time, the 80 % interval and
whether it contains the published time, the ratio of each time to that of the study's first row, and the largest part of
the forecast. `--write` writes docs/measurements/studies.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stacks import STACKS

from agent.advice.advise import advise_cluster
from agent.advice.request import Request
from contracts.tables import read_table
from planner.advice import Forecast
from planner.stacks import ENGINES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measurements" / "studies.md"
# The engine of studies from before TRL 1.16, which stores the logits of all tokens (bench/stacks.toml).
_OLDER = {"older trl": next(stack.engine for stack in STACKS if stack.engine.name == "trl")}
HEADER = """# Published studies

`make studies` forecasts these studies, row by row, and `python bench/studies.py --write` writes this page. Each row is
a question to `topoflight recommend` (`bench/studies.toml`). Nothing is fitted to these rows. Times are those of one
step, and the interval is the 80 % interval. The columns "x" have the ratio to the first row of the study, and "mostly"
has the largest part of the forecast. "not published" means that the study shows a chart without figures.
"""


def forecast_of(study: dict[str, Any], row: dict[str, Any]) -> Forecast | str:
    """Return the forecast of a row, or the reason why its layout cannot run."""
    layout = {name: row.get(name, value) for name, value in study["layout"].items()}
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in (study["question"] | row).items()}
    unknown = options.get("transport") == "unknown"  # TCP over a network whose rate is not published
    request = Request.of(**options | {"transport": None if unknown else options.get("transport")},
                         fixed_layout=tuple(layout.items()))  # fmt: skip
    if "micro_batch" in row:
        ranks = layout["dp_shard"]
        request = request.changed(global_batch=layout["micro_batch"] * layout["gradient_accumulation"] * ranks)
    cluster = request.cluster(())
    if unknown:
        nodes = tuple(replace(node, nics=(), nearest_nic=()) for node in cluster.nodes)
        cluster = replace(cluster, nodes=nodes, inter_node_bytes_per_second=None, inter_node_transport="tcp")
    with patch.dict(ENGINES, _OLDER):
        advice = advise_cluster(request, cluster, ())
    return advice.chosen.forecast if advice.chosen else advice.rejected[0].reason


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from HEADER.splitlines()
    for study in read_table(__file__, "studies.toml")["study"]:
        yield from ("", f"## {study['name']}", "", f"Source: {study['source']}.", "")
        yield "|case|published|forecast|interval|inside|published, x|forecast, x|mostly|"
        yield "|-|-|-|-|-|-|-|-|"
        first: tuple[float | None, float] | None = None
        for row in study["row"]:
            forecast = forecast_of(study, row)
            published = row.get("published")
            if isinstance(forecast, str):
                yield f"|{row['case']}|{published or 'not published'}|-|-|-|-|-|{forecast}|"
                continue
            step = forecast.step_seconds
            first = first or (published, step.mid)
            cells = [
                row["case"], f"{published:.3g} s" if published else "not published", f"{step.mid:.3g} s",
                f"{step.low:.3g}-{step.high:.3g}",
                "-" if published is None else "yes" if step.low <= published <= step.high else "no",
                f"{published / first[0]:.2f}" if published and first[0] else "-", f"{step.mid / first[1]:.2f}",
                forecast.dominant,
            ]  # fmt: skip
            yield f"|{'|'.join(cells)}|"


def main() -> int:
    """Print the page, and with --write write it to its file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/measurements/studies.md")
    write = parser.parse_args().write
    text = "\n".join(lines()) + "\n"
    print(text, end="")
    if write:
        PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

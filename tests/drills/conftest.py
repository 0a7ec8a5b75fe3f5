"""The drills' table: on the terminal after every run, in docs/measurements/drills.md after the long form."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from drill_register import DRILLS

HELD = Path(__file__).parents[2] / ".cache" / "drills.json"
PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "drills.md"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table; write the page where the long form ran whole."""
    rows = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            rows += [value for name, value in getattr(report, "user_properties", ()) if name == "drill"]
    if not rows:
        return
    table = "\n".join(_lines(rows))
    terminalreporter.write_sep("-", "drills")
    terminalreporter.write_line(table)
    for row in rows:
        for text, count in sorted(Counter(row["notes"]).items()):
            terminalreporter.write_line(f"{row['fault']}: {text} ({count})")
    if os.environ.get("TOPOFLIGHT_DRILLS") == "long":
        kept = _kept(rows)
        PAGE.write_text(_page("\n".join(_lines(kept)), kept), encoding="utf-8")
        terminalreporter.write_line(f"{PAGE} written")


def _kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last long run of every drill, in their order: the kills take most of an hour and may be run apart."""
    held = json.loads(HELD.read_text(encoding="utf-8")) if HELD.exists() else {}
    held |= {row["fault"]: row for row in rows}
    HELD.parent.mkdir(exist_ok=True)
    HELD.write_text(json.dumps(held, indent=1), encoding="utf-8")
    return [held[one.fault] for one in DRILLS if one.fault in held]


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        took, lost = row["seconds"], row["lost"]
        told = "" if not lost else f"; {len(lost)} lost: " + "; ".join(lost)[:300].replace("\n", " ")
        lines.append(f"- {row['fault']}: {len(took)}, {statistics.median(took):.1f}{told}")
    return lines


def _page(table: str, rows: list[dict[str, Any]]) -> str:
    from importlib.metadata import version

    times = sum(len(row["seconds"]) for row in rows)
    minutes = sum(sum(row["seconds"]) for row in rows) / 60
    clean = sum(not row["lost"] for row in rows)
    names = ("torch", "pyroute2", "nvidia-ml-py", "uvicorn", "urllib3")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"""# Drills

Each fault happens for real; only NVML, a file system, the API server and the clock are the tests' own. A drill passes
where nothing was lost: no process outlives its run, no trusted file is half written, what was kept is still there, and
the agent goes on or ends in order. `make drills` runs them all and writes this page.

{datetime.now(UTC):%Y-%m-%d}; {os.cpu_count()} virtual cores, shared and noisy, no GPU, Linux {platform.release()};
Python {platform.python_version()}, {versions}.
{len(rows)} drills, {times} runs, {minutes:.0f} minutes; in {clean} of them nothing was lost. Runs
and median seconds:

{table}

Not drilled: the loss of power; a process that a rank sends into the background with an emptied environment; a real GPU
driver and real RDMA hardware, which this machine has not.
"""

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
    lines = ["| Drill | Times | Seconds each (median, longest) | What was lost |", "| --- | ---: | ---: | --- |"]
    for row in rows:
        took, lost = row["seconds"], row["lost"]
        middle, longest = statistics.median(took), max(took)
        told = "nothing" if not lost else f"{len(lost)}: " + "; ".join(lost)[:300].replace("\n", " ").replace("|", "/")
        lines.append(f"| {row['fault']} | {len(took)} | {middle:.1f}, {longest:.1f} | {told} |")
    return lines


def _page(table: str, rows: list[dict[str, Any]]) -> str:
    from importlib.metadata import version

    times = sum(len(row["seconds"]) for row in rows)
    minutes = sum(sum(row["seconds"]) for row in rows) / 60
    noted = [f"- {row['fault']}: {_counted(row['notes'])}" for row in rows if row["notes"]]
    names = ("torch", "pyroute2", "nvidia-ml-py", "uvicorn", "urllib3")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"""# Drills

Each fault happens for real: to the processes, files, sockets and libraries that the agent and its benchmark use. What
stands in for hardware or a cluster is at the edge only: an NVML library, a file system, an API server of the tests'
own, and a library that shifts the clock of one process tree. A drill passes where nothing was lost: no process
outlives its run, the benchmark lock is free, no file that a reader would trust is half written, what was kept before
is still there, and the agent goes on or ends in order.

`make drills` runs them all and writes this page. The test suite runs most of them once or a few times, and shorter
tests of nine others; there a preflight that flies is killed in its first 16 s only, and the read-only disk is without
the report. Thousands of nodes are worked out in simulated time, from the function that makes an agent wait.

- Date: {datetime.now(UTC):%Y-%m-%d}
- Machine: {os.cpu_count()} virtual cores, shared and noisy, no GPU, Linux {platform.release()}, {platform.machine()}
- Versions: Python {platform.python_version()}, {versions}
- {len(rows)} drills, {times} runs, {minutes:.0f} minutes

{table}

What the drills noted:

{chr(10).join(noted)}

Not drilled: the loss of power, against which a file is synced before it takes its name and the folder is not; a process
that a rank sends into the background with an emptied environment, which nothing would find; a real GPU driver and real
RDMA hardware, which this machine has not.
"""


def _counted(notes: list[str]) -> str:
    """Equal notes once, with how often."""
    return ", ".join(f"{text} ({count})" for text, count in sorted(Counter(notes).items()))

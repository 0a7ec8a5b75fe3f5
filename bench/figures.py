"""Every bench in turn, onto one page: `python bench/figures.py [--page FILE] [--short]`.

Each bench is a process of its own; what it prints goes onto the page as it is, under the command that prints it, with
the machine, the versions and the date above. `--short` asks each for a fraction of the work: it shows that all of them
run, and its figures mean little.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORPUS = Path(os.environ.get("TOPOFLIGHT_CORPUS", ROOT.parent / "shared" / "corpus"))
NAMED = ("fastapi", "uvicorn", "pydantic", "prometheus-client", "nvidia-ml-py", "torch", "transformers")
LONGEST_SECONDS = 1200
LINE_LIMIT = 400  # lines of one bench on the page


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One bench, and what it is asked for."""

    title: str
    words: tuple[str, ...]
    short: tuple[str, ...]
    needs: str = ""  # a path without which it cannot run


BENCHES = (
    Bench(title="Footprint of the resident agent", words=("footprint.py",),
          short=("footprint.py", "--scans", "30", "--requests", "110", "--rest", "3")),
    Bench(title="Scrapes and load", words=("load.py",), short=("load.py", "--seconds", "1", "--scrapes", "100")),
    Bench(title="Scan", words=("scan.py", "--scans", "500"), short=("scan.py", "--scans", "20")),
    Bench(title="NCCL logs", words=("evidence.py", "--bytes", "50000000"), short=("evidence.py", "--bytes", "1000000")),
    Bench(title="Search for a layout", words=("search.py",), short=("search.py",)),
    Bench(title="Cluster view of 5,000 nodes", words=("cluster_view.py",), short=("cluster_view.py", "100")),
    Bench(title="Forecast against published runs", words=("forecast.py",), short=("forecast.py",),
          needs=str(CORPUS / "layouts" / "published.csv")),
    Bench(title="Fine-tune beside TRL", words=("finetune_vs_trl.py", "--rounds", "1", "--ranks", "1"), short=()),
)  # fmt: skip


def missing(needed: str) -> str:
    """Why a bench cannot run; empty where it can."""
    if not needed or Path(needed).exists():
        return ""
    return "needs data that this repository does not hold: set TOPOFLIGHT_CORPUS"


def machine() -> str:
    """Processor, cores, memory, GPUs."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"model name\s*:\s*(.+)", about)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    kind = "virtual " if "hypervisor" in about else ""
    return (
        f"{os.cpu_count()} {kind}cores ({model[1].strip() if model else platform.machine()}), {gib:.0f} GiB, "
        f"{gpus or 'no'} NVIDIA GPUs, Linux {platform.release()}"
    )


def versions() -> str:
    """Python and what the benches stand on."""
    found = [f"Python {platform.python_version()}"]
    for name in NAMED:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    exporter_version = ""
    try:
        done = subprocess.run(["prometheus-node-exporter", "--version"], capture_output=True, text=True, check=False)
        exporter_version = (re.search(r"version (\S+)", done.stdout + done.stderr) or ["", ""])[1].rstrip(",")
    except OSError:
        pass
    return ", ".join([*found, *([f"node_exporter {exporter_version}"] if exporter_version else [])])


def shape(text: str) -> str:
    """A bench's own tables stay tables; anything else is shown as it was printed."""
    blocks: list[str] = []
    table = False
    for line in text.strip().splitlines()[:LINE_LIMIT]:
        is_table = line.startswith("|")
        if not blocks or is_table != table:
            blocks.append("")
        table = is_table
        blocks[-1] += line.rstrip() + "\n"
    rows = (b.strip("\n") for b in blocks)
    return "\n\n".join(b if b.startswith("|") else f"```text\n{b}\n```" for b in rows if b.strip())


def run(words: Sequence[str]) -> tuple[str, int]:
    """What it prints, and its exit code."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / words[0]), *words[1:]], capture_output=True, text=True, check=False,
        timeout=LONGEST_SECONDS, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    if done.returncode and not done.stdout:
        return done.stderr[-1000:], done.returncode
    return done.stdout, done.returncode


def main() -> int:
    """Run, print and write. 1 where a bench says that it is out of its limits, or broke."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--page", type=Path, help="write the page there")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", action="append", help="first word of a bench's file name")
    arguments = parser.parse_args()
    began, load = datetime.now(UTC), os.getloadavg()[0]
    page = [
        "# Figures of one run\n",
        "All benches, in turn, on one machine: `make bench`. Compare within a run only.\n",
        f"- Date: {began:%Y-%m-%d %H:%M} UTC, load {load:.1f} when it began\n- Machine: {machine()}\n"
        f"- Versions: {versions()}\n",
    ]
    print("\n".join(page), flush=True)
    worst = 0
    for bench in BENCHES:
        words = bench.short if arguments.short else bench.words
        if not words or (arguments.only and not any(bench.words[0].startswith(word) for word in arguments.only)):
            continue
        start, why = time.monotonic(), missing(bench.needs)
        text, code = (f"Left out: {why}.", 0) if why else run(words)
        outcome = "" if code == 0 else f" It ended with {code}: a limit of its own is not held, or it broke."
        head = f"## {bench.title}\n\n`python bench/{' '.join(words)}`, {time.monotonic() - start:.0f} s.{outcome}\n"
        page.append(f"{head}\n{text if why else shape(text)}\n")
        print(page[-1], flush=True)
        worst = max(worst, int(code != 0))
    if arguments.page:
        arguments.page.parent.mkdir(parents=True, exist_ok=True)
        arguments.page.write_text("\n".join(page), encoding="utf-8")
    return worst


if __name__ == "__main__":
    sys.exit(main())

"""Scoring a file of published runs: any file with the corpus's columns, however empty they are."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE = {
    "row_id": "1", "source": "a table", "framework": "torchtitan", "model": "Llama-3.1-8B", "layers": "32",
    "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256", "seq": "8192",
    "gpu": "H100-80GB", "gpus_per_node": "8", "nodes": "1", "world": "8", "tp": "1", "pp": "1", "dp": "8",
    "mbs": "1", "gbs": "8", "precision": "bf16", "tokens_s_gpu": "6500",
}  # fmt: skip


def score(tmp_path: Path, rows: list[dict[str, str]]) -> subprocess.CompletedProcess[str]:
    """Run the benchmark on rows."""
    file = tmp_path / "rows.csv"
    names = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, names)
        writer.writeheader()
        writer.writerows(rows)
    command = [sys.executable, str(ROOT / "bench" / "forecast.py"), str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_one_row_is_scored(tmp_path: Path) -> None:
    """A row with a throughput gets an error, its interval is judged."""
    done = score(tmp_path, [BASE])
    assert done.returncode == 0, done.stderr
    assert "1 with a time to score" in done.stdout
    assert "| a table" in done.stdout


def test_empty_wrong_and_unknown_columns_are_counted_not_fatal(tmp_path: Path) -> None:
    """Each row that cannot be asked is counted under its reason; the others are scored."""
    rows = [
        BASE,
        {**BASE, "layers": ""},
        {**BASE, "gpu": "Cerebras WSE-3"},
        {**BASE, "pp": "41"},
        {**BASE, "tp": "sixteen", "mbs": "-3", "vpp": "2.5"},
        {**BASE, "seq": ""},
        {**BASE, "precision": "nvfp4"},
        {**BASE, "arch": "moe", "model": "Secret-MoE"},
        {"row_id": "9"},
    ]
    done = score(tmp_path, rows)
    assert done.returncode == 0, done.stderr
    assert "skipped 2: layers is not given" in done.stdout or "skipped 1: layers is not given" in done.stdout
    assert "in no table" in done.stdout
    assert "does not divide" in done.stdout
    assert "fp4" in done.stdout
    assert "experts" in done.stdout


def test_memory_and_out_of_memory_rows(tmp_path: Path) -> None:
    """A row that ran out of memory and is forecast to fit would be counted as called safe."""
    rows = [
        {**BASE, "mem_gib": "60", "mem_kind": "GiB max_memory_reserved", "act_recompute": "none"},
        {**BASE, "mem_gib": "OOM", "mbs": "64", "gbs": "512", "act_recompute": "none", "tokens_s_gpu": ""},
    ]
    done = score(tmp_path, rows)
    line = next(line for line in done.stdout.splitlines() if line.startswith("| all") and line.count("|") == 7)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == "1"
    assert cells[4:] == ["1", "0"]


def test_a_time_beyond_the_gpu_is_set_aside(tmp_path: Path) -> None:
    """60,000 tokens/s of an 8B model on one H100 would need four times its FLOP/s."""
    done = score(tmp_path, [{**BASE, "tokens_s_gpu": "60000"}])
    assert "0 with a time to score, 1 set aside" in done.stdout


def test_a_missing_file_is_a_usage_error() -> None:
    """Exit code 2, and the file's name."""
    command = [sys.executable, str(ROOT / "bench" / "forecast.py"), "/nowhere/rows.csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "/nowhere/rows.csv" in done.stderr

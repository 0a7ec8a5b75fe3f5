"""Modules of the current folder are not imported by what we start; a user's own script keeps the folder it lies in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from collectives.bench import processes

SHADOWED = ("torch", "numpy", "json")


def folder_with_modules(folder: Path) -> Path:
    """A folder to stand in, whose modules leave a marker in it when they are imported."""
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write({name!r})\n")
    return folder


def test_a_process_tree_does_not_import_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the Python that is started nor the one that it starts; the same Python without the tree does."""
    folder = folder_with_modules(tmp_path / "here")
    monkeypatch.chdir(folder)
    words = [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import numpy'])"]
    with (tmp_path / "log").open("wb") as log:
        tree = processes.Tree(words, os.environ, log)
        ended = tree.wait(time.monotonic() + 60, threading.Event())
    assert ended == "" and not (folder / "imported").exists(), (tmp_path / "log").read_text()
    subprocess.run(words, check=True)
    assert (folder / "imported").exists()


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_no_verb_imports_from_the_current_folder(tmp_path: Path) -> None:
    """Each verb that starts Python, from a folder of such modules; the script has a module of its own beside it."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "helper.py").write_text("WORD = 'of its own folder'\n")
    (tmp_path / "own" / "train.py").write_text("import helper, torch\nprint(helper.WORD, torch.__version__)\n")
    script = ["--script", str(tmp_path / "own" / "train.py"), "--output", "out"]
    job = ["--output", "out", "--set", "max_steps=1", "--set", "dataset_rows=8", "--set", "eval_strategy=no"]
    data = ["--dataset", str(tmp_path / "rows.jsonl"), "--tokenizer", "builtin:bytes", "--model", "tiny-llama"]
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    wrong = []
    for name, *words in (
        ("bench", "--quick", "--ranks", "1"),
        ("calibrate", "--model", "tiny-llama", "--budget", "60"),
        ("recommend", *data),
        ("launch", "--no-preflight", "--ranks", "1", *job),
        ("launch", "--no-preflight", "--ranks", "1", *script),
    ):
        folder = folder_with_modules(tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}")
        environment = {**os.environ, "TOPOFLIGHT_STATE": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-P", "-m", "agent.cli", name, *words], cwd=folder, env=environment,
                              capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
        log = folder / "out" / "job.log"
        own = script[1] not in words or "own folder" in log.read_text()
        if (folder / "imported").exists() or done.returncode or not own:
            wrong.append((name, words, done.returncode, done.stdout[-300:], done.stderr[-600:]))
    assert not wrong, wrong

"""Modules of the current folder are not imported by what we start; a user's own script keeps the folder it lies in."""

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
    """A current folder, whose modules leave a marker in it when they are imported."""
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write({name!r})\n")
    return folder


def test_a_process_tree_does_not_import_from_the_current_folder(tmp_path, monkeypatch):
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


JOB = ("--no-preflight", "--ranks", "1", "--output", "out")
ONE_STEP = ("--set", "max_steps=1", "--set", "dataset_rows=8", "--set", "eval_strategy=no")


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words",
    [
        ("launch", *JOB, "--script", "{0}/own/train.py"),
        *(
            pytest.param(words, marks=pytest.mark.nightly)
            for words in (
                ("bench", "--quick", "--ranks", "1"),  # by processes.Tree, as above
                ("calibrate", "--model", "tiny-llama", "--budget", "60"),  # in the child process that bench has
                ("recommend", "--config", "{0}/config.yaml"),
                ("launch", *JOB, *ONE_STEP),
            )
        ),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}".replace("/", ""),
)
def test_no_verb_imports_from_the_current_folder(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Each verb that starts Python, from a folder of such modules; the script has its own module in its folder."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "helper.py").write_text("WORD = 'of its own folder'\n")
    (tmp_path / "own" / "train.py").write_text("import helper, torch\nprint(helper.WORD, torch.__version__)\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "config.yaml").write_text(f"dataset_name: {tmp_path}/rows.jsonl\ntokenizer_name: builtin:bytes\n")
    folder = folder_with_modules(tmp_path / "here")
    environment = {**os.environ, "TOPOFLIGHT_STATE": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-P", "-m", "agent.cli", *(word.format(tmp_path) for word in words)]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder / "imported").exists()
    assert "--script" not in words or "own folder" in (folder / "out" / "job.log").read_text()

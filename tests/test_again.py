"""That a failure which repeats is a failure, and one that does not is named (docs/decisions/0008)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

AGAIN = Path(__file__).parent / "again.py"
# passes where its first run has left a mark
ONCE = """
from pathlib import Path
def test_{name}():
    mark = Path("{name}")
    seen = mark.exists()
    mark.touch()
    assert seen
"""


def run(folder: Path, ci: str) -> tuple[int, str]:
    """(exit code, output) of the tests in `folder`."""
    words = [sys.executable, str(AGAIN), "-q", "-p", "xdist", "."]
    environment = os.environ | {"CI": ci, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout


def test_what_fails_once_is_named_and_does_not_stop_ci(tmp_path: Path) -> None:
    """In CI alone."""
    (tmp_path / "test_one.py").write_text(ONCE.format(name="chance"))
    code, said = run(tmp_path, "true")
    assert code == 0, said
    assert "UNSTEADY, failed once: test_one.py::test_chance" in said
    (tmp_path / "chance").unlink()
    code, said = run(tmp_path, "")
    assert code == 1, said
    assert "UNSTEADY" not in said


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    """Beside one that fails once."""
    (tmp_path / "test_one.py").write_text(ONCE.format(name="chance") + "def test_fault():\n    assert False\n")
    code, said = run(tmp_path, "true")
    assert code == 1, said
    assert "FAILED TWICE: test_one.py::test_fault" in said
    assert "UNSTEADY, failed once: test_one.py::test_chance" in said


def test_many_failures_are_no_chance(tmp_path: Path) -> None:
    """Nor is a suite that cannot be read."""
    for name in range(6):
        (tmp_path / f"test_{name}.py").write_text(ONCE.format(name=f"test_{name}"))
    code, said = run(tmp_path, "true")
    assert code == 1, said
    assert "runs once more" not in said

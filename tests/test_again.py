"""That a failure which repeats is a failure, and one that does not is named (docs/decisions/0008)."""

import os
import subprocess
import sys
from pathlib import Path

AGAIN = Path(__file__).parent / "again.py"
# the first passes where its first run has left a mark
TESTS = """
from pathlib import Path
def test_chance():
    mark = Path("chance")
    seen = mark.exists()
    mark.touch()
    assert seen
def test_fault():
    assert False
"""


def test_what_fails_twice_fails_and_what_fails_once_is_named(tmp_path: Path) -> None:
    """In CI alone."""
    (tmp_path / "test_one.py").write_text(TESTS)
    words = [sys.executable, str(AGAIN), "-q", "-p", "xdist", "."]
    environment = os.environ | {"CI": "true", "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stdout
    assert "FAILED TWICE: test_one.py::test_fault" in done.stdout
    assert "UNSTEADY, failed once: test_one.py::test_chance" in done.stdout

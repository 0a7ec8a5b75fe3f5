"""A failure that repeats is a failure, one that does not is named (docs/decisions/0008); so is a row of `each_row`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.tables import each_row

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


def test_every_failing_row_is_reported_by_its_name() -> None:
    seen = []

    @each_row("number", [0, 1, pytest.param(2, id="named")])
    def test(number: int) -> None:
        seen.append(number)
        if number == 2:
            pytest.fail("as pytest says it")
        assert number == 1

    with pytest.raises(BaseExceptionGroup) as raised:
        test()
    notes = [" ".join(error.__notes__) for error in raised.value.exceptions]
    assert seen == [0, 1, 2], "the rows after a failing one run"
    assert len(notes) == 2 and "(0,)" in notes[0] and "named" in notes[1], notes

"""The fuzzer itself, for some inputs: every reader in one process, guided by what each input reaches."""

import os
import subprocess
import sys

import pytest
from rigs.tables import ROOT

RUNS = 3_000  # some 40 s of CPU


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_input_of_the_fuzzer_breaks_a_reader() -> None:
    """Only where atheris has a wheel. The same inputs in each run; `make fuzz` looks for others."""
    if sys.platform != "linux" or os.uname().machine != "x86_64" or sys.version_info >= (3, 14):
        pytest.skip("atheris has no wheel for this interpreter")
    words = [sys.executable, str(ROOT / "bench/fuzz.py"), "--runs", str(RUNS)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False, timeout=1100)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-4000:]
    assert int(done.stdout.split(" inputs")[0].split()[-1]) >= RUNS, done.stdout

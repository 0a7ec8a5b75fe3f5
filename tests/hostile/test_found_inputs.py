"""Inputs that once broke a reader, found by the fuzzer, at random or by reading the code; the fuzzer, for a while."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fuzz_targets
import pytest
import yaml
from click.testing import CliRunner
from fuzz_targets import _dumps as dumped, check, targets
from rigs.tables import ROOT, each_row

from agent.cli.main import cli
from contracts.job_config import read_file

ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
VALID: dict[str, Callable] = {
    "machine": fuzz_targets._machine, "bench_result": lambda: fuzz_targets.document_of("bench"), "outcome": dict,
    "run": lambda: fuzz_targets.document_of("run"), "recording": lambda: fuzz_targets._recording("titan-rtx-2x-nv2"),
}  # fmt: skip


def encoded(text: str) -> bytes:
    return re.sub(r'"?9\{(\d+)\}"?', lambda found: "9" * int(found[1]), text).encode()


def document(target: str, changes: dict) -> bytes:
    valid = VALID[target]()
    if target == "recording":
        return b"\1\0" + dumped({**valid, "answers": {**valid["answers"], **changes}})
    return b"\1" + encoded(dumped({**valid, **changes}).decode())


def aliases(first: str, form: str, behind: str) -> bytes:
    """YAML whose aliases expand to a billion times the first."""
    levels = (f"a{i + 1}: &a{i + 1} {form % ', '.join([f'*a{i}'] * 40)}\n" for i in range(8))
    return f"\1a0: &a0 {first}\n{''.join(levels)}{behind}".encode()


FOUND = {what: (target, encoded(text)) for what, (target, text) in ROWS["texts"].items()}
FOUND |= {what: (target, document(target, changes)) for what, (target, changes) in ROWS["documents"].items()}
FOUND |= {what: (target, aliases(*made)) for what, (target, *made) in ROWS["aliases"].items()}


@each_row("name", FOUND)
def test_an_input_that_once_broke_a_reader_is_read_or_refused(name: str) -> None:
    """A result, or the reader's own error; anything else comes out of here."""
    target, data = FOUND[name]
    check(targets()[target], data)


@each_row("name", sorted(targets()))
def test_every_reader_takes_what_the_fuzzer_starts_from(name: str) -> None:
    """The seeds themselves: a reader that refuses all of them is fuzzed at its first line only."""
    refused = 0
    for seed in targets()[name].seeds:
        try:
            targets()[name].run(seed)
        except targets()[name].errors:
            refused += 1
    assert refused < len(targets()[name].seeds)


@each_row("words", ROWS["too_long"])
def test_a_name_that_no_file_can_have_is_no_file(words: str) -> None:
    """pathlib raises OSError where a name is too long."""
    done = CliRunner().invoke(cli, words.format(name="x" * 300).split())
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception


def test_a_file_that_settings_name_may_have_no_possible_name(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"deepspeed: {'x' * 300}\n")
    assert read_file(tmp_path / "job.yaml") == {"deepspeed": "x" * 300}


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

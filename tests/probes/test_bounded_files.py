"""Files without an end, or larger than they say: refused at the bound, by every reader, with the file's name."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.tables import each_row

from agent.base.options import read_input
from agent.checks import baseline
from collectives.bench.results import read_result
from contracts import bounded, run_record
from planner.forecast.models import model_from_file
from probes.host.recording import load


def test_the_bound_is_the_last_size_that_is_read(tmp_path: Path) -> None:
    """One byte more is refused; the error says how much is read."""
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert bounded.read(path, 5) == b"12345"
    with pytest.raises(bounded.TooLargeError, match="larger than 4 bytes"):
        bounded.read(path, 4)
    assert bounded.rest(io.BytesIO(b"12345"), 5) == b"12345"
    path.write_text("\u00e9")
    assert bounded.read_text(path, 2) == "\u00e9"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Nobody writes into it: a reader that opened it would hang."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="only regular files are read"):
        bounded.read(pipe, 200_000)


READERS: dict[str, Callable[[Path], Any]] = {
    "kept result": read_result,
    "run": run_record.read,
    "baseline": baseline.read,
    "config.json": model_from_file,
    "recording": load,
    "verb": lambda path: read_input(str(path), 1000, hint=""),
}


@each_row("reader", READERS)
def test_a_file_without_an_end_is_refused(reader: str, tmp_path: Path) -> None:
    """By its own error, in one sentence that names it: a device, and a file that no memory would hold."""
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 1 << 40)  # sparse
    for path, words in ((Path("/dev/zero"), "only regular files are read"), (large, r"larger than \d+ bytes")):
        with pytest.raises(Exception, match=words) as refused:
            READERS[reader](path)
        assert not isinstance(refused.value, MemoryError)
        assert reader == "kept result" or str(path) in str(refused.value)

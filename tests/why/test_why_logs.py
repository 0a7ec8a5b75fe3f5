"""What logs alone prove, by why_logs.yaml; stacks of three tools; and RAS's answers that were saved."""

from pathlib import Path

import pytest
from rigs.command import topoflight
from rigs.tables import data_of, each_row

from agent.base.options import InputError
from agent.why import diagnosis
from collectives.traces.watchdog import StackReader

ROWS = data_of(__file__, "why_logs.yaml")


@each_row("row", ROWS, ids=lambda row: row["what"])
def test_a_log_accuses_whom_it_proves_and_nobody_else(tmp_path: Path, row: dict) -> None:
    text = row["text"]
    logs = []
    for number, each in enumerate(text if isinstance(text, list) else [text]):
        logs.append(tmp_path / f"node-{number}.log")
        logs[-1].write_text(each, encoding="utf-8")
    found = diagnosis.answer(diagnosis.WhySources(logs=tuple(map(str, logs))))
    state, ranks, codes, words = row["gives"]
    assert (found.state, [*found.ranks], [cause.code for cause in found.causes]) == (state, ranks, codes.split())
    assert words in found.line
    if "slurm" in row:
        assert topoflight("why", *logs, "-o", "slurm").stdout.split() == row["slurm"]
    proof, shown = row.get("proof"), found.causes[-1].evidence if found.causes else ()
    assert proof is None or (len(shown) == len(proof) and all(map(str.startswith, shown, proof))), shown


PY_SPY, DEBUG = (row["text"] for row in ROWS[-2:])


def stacks_of(text: str, rank: int | None = None) -> list[tuple]:
    """Return rank, process and frames of each main thread in a text."""
    reader = StackReader(rank)
    for line in text.splitlines():
        reader.line(line)
    reader.end_process()
    return [(*key, frames) for key, frames in reader.found.items()]


def test_stacks_of_three_tools_are_read() -> None:
    frames = ("train.py:31 load_batch", "train.py:90 <module>")
    assert stacks_of(PY_SPY) == [(None, 4711, frames)]
    fault = DEBUG.partition("===\n")[2].partition("=== Rank 1")[0]
    assert stacks_of(fault, rank=3) == [(3, None, frames)]
    assert stacks_of(DEBUG) == [(0, None, frames), (1, 4711, frames)]


def test_a_saved_answer_of_ras_needs_no_option(tmp_path: Path) -> None:
    """Given as a log it says the same as with --ras; a log with other lines stays a log, and diagnostics are no RAS."""
    table = "Communicators... (0.00s)\n    0         1         2         1         2         1   RUNNING  INCOMPLETE\n"
    text = (f"{table}INCOMPLETE\n  Missing communicator data from 1 job process\n"
            "  Process 60004 on node n2 managing GPU 0\n\n#0-0 (b33) INCOMPLETE\n  The missing rank: 1\n")  # fmt: skip
    path = tmp_path / "ras.txt"

    def verdict(text: str, kind: str):
        path.write_text(text, encoding="utf-8")
        return diagnosis.answer(diagnosis.WhySources(**{kind: (str(path),)}))

    asked = verdict(text, "ras")
    assert verdict(text, "logs") == asked and asked.unknown
    assert verdict(f"{text}n1:1:2 [0] NCCL INFO Using network Socket\n", "logs") != asked
    with pytest.raises(InputError, match="as LOG"):
        verdict("=== RAS Diagnostics ===\n[OK]   ECC: no uncorrected volatile errors across 8 ranks\n", "ras")

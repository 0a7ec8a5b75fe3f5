"""The readers of what jobs leave: PyTorch's flight recorder and watchdog, NCCL's RAS."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.tables import each_row, golden_rows

from collectives.traces import rank_files, ras, watchdog


def entry(number: int, **members) -> dict:
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": "nccl:all_reduce", "time_created_ns": number * 10**9,
        "input_sizes": [[8, 2]], "input_dtypes": ["Float"], "output_sizes": [[8, 2]], "output_dtypes": ["Float"],
        "state": "completed", "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "retired": True, "timeout_ms": 600000, "is_p2p": False,
        "frames": [{"name": "step", "filename": "/job/train.py", "line": 31}], **members,
    }  # fmt: skip


FORMS = {
    "pickle 2": lambda data: pickle.dumps(data, protocol=2),
    "pickle 4": lambda data: pickle.dumps(data, protocol=4),
    "json": lambda data: json.dumps(data).encode(),
}


@each_row("form", FORMS)
def test_a_dump_reads_alike_in_each_form(form: str) -> None:
    entries = [entry(1), entry(2, state="started", retired=False, profiling_name="nccl:broadcast")]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    raw = FORMS[form]({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries})
    found = rank_files.read(raw, rank=1)
    assert [(c.op, c.number, c.done) for c in found.calls] == [("all_reduce", 1, True), ("broadcast", 2, False)]
    assert found.groups == {"0": (0, 1, 2)}
    assert found.enqueued == {"0": 2}
    assert found.calls[0].words == "all_reduce of [8, 2] Float"
    assert found.calls[0].frames == ("train.py:31 step",)
    assert found.calls[1].created == 2.0


class Runs:
    """Touches a file where it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("/tmp/was-run"),))


@each_row("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_calls_something_is_refused_and_runs_nothing(protocol: int) -> None:
    with pytest.raises(rank_files.RankFileError, match=r"names a class|no dump|plain values"):
        rank_files.read(pickle.dumps({"version": "2.4", "entries": [Runs()]}, protocol=protocol), rank=0)
    assert not Path("/tmp/was-run").exists()


def test_plain_values_are_what_python_reads() -> None:
    value = {"a": [1, -1, 70000, 2**40, 1.5, None, True, False, "ü", (), (1,), (1, 2, 3, 4)], "b": {"c": []}}
    for protocol in (2, 3, 4, 5):
        assert rank_files.unpickle(pickle.dumps(value, protocol=protocol)) == value


@each_row(
    ("raw", "words"),
    [(b"", ""), (b"hello", ""), (b'{"communicators": 3}', ""), (b'{"communicators": [', ""),
     (b"n1:7 NCCL DIAG === RAS Diagnostics ===\n", "give the file as LOG"),
     (b'RAS Monitor Mode\n{"event": "PEER_DEAD", "peer": {}}', "as text")],
)  # fmt: skip
def test_what_is_no_answer_of_ras_is_refused(raw: bytes, words: str) -> None:
    """What it writes in addition to its answers is reported by name."""
    with pytest.raises(ras.RasError, match=words or None):
        ras.read(raw)


def of_ras(text: str):
    """The answer, and of each communicator who is behind."""
    report = ras.read(text.encode())
    return [report, *map(ras.find_laggards, report.comms)]


READERS: dict[str, Callable] = {
    "calls": lambda text: rank_files.read(text.encode(), rank=0), "ras": of_ras,
    "watchdog": lambda text: watchdog.read(text.splitlines()),
}  # fmt: skip


def test_golden_traces() -> None:
    """tests/golden/traces.jsonl: dumps of the flight recorder, answers of RAS and lines of the watchdog."""
    golden_rows("traces.jsonl", "read", lambda row: READERS[row["reader"]](row["text"]))

"""A log of any size is read in one pass, with flat memory and exact line numbers."""

import io
import json

import pytest
from hypothesis import given, settings, strategies as st
from rigs.command import python
from rigs.logs import read

from collectives.nccl_log import evidence
from collectives.nccl_log.reader import Reader, Unpacked

HEAD = "n1:1:2 [0] NCCL INFO "
ON = f"{HEAD}Channel 00/0 : 0[0] -> 2[0] [send] via NET/IB/0/GDRDMA"

CHILD = """
import io, json, sys
from collectives.nccl_log import evidence, ledger, reader

for module in (ledger, reader):  # all limits are reached by the shorter log
    for name in [name for name in vars(module) if name.startswith("MAX_")]:
        setattr(module, name, min(getattr(module, name), 1000))

class Endless(io.RawIOBase):
    def __init__(self, total):
        self.left, self.step, self.blocks = total, 0, 0
    def peek(self):
        return b""
    def read(self, size=-1):
        self.blocks = max(self.blocks, sys.getallocatedblocks())
        rows = []
        for index in range(self.step, self.step + 1000):
            host = f"node{index % 50000}:{index}:{index + 1} [0] NCCL "
            head = f"{host}INFO Channel 00/0 : {index} -> 2[0]"
            rows.append(f"{head} [send] via NET/Net{index % 5000}/{index}/GDRDMA")
            rows.append(f"{host}INFO NCCL_VAR_{index} set by environment to {index}")
            rows.append(f"{host}WARN something odd number {index}")
            rows.append(f"{host}INFO NET/IB : Using [0]mlx5_{index}:1/IB [RO]; OOB eth{index}:1<0>")
            rows.append("x" * (index % 300))
        self.step += 1000
        data = "\\n".join(rows).encode() + b"\\n" if self.left > 0 else b""
        self.left -= len(data)
        return data

blocks = []
for total in (1_800_000, 3_600_000):
    log = Endless(total)
    verdict = evidence.read_files([log])
    blocks.append(log.blocks)
print(json.dumps({"blocks": blocks, "lines": verdict.lines_read, "gdrdma": verdict.gdrdma}))
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_memory_is_flat() -> None:
    """Ever new hosts, variables, devices and warnings: twice the log takes hardly more memory."""
    seen = json.loads(python(CHILD).stdout)
    assert seen["gdrdma"] == "on"
    assert seen["lines"] > 20_000
    # Blocks of Python's allocator, because resident memory also depends on the system. The ratio is 1.31 (some tables
    # fill late), and 1.56 if the reader stores each line.
    once, twice = seen["blocks"]
    assert twice < 1.42 * once


def test_a_file_without_newlines() -> None:
    """Binary or one endless line: an answer, and nothing is stored."""
    assert evidence.read_files([io.BytesIO(b"\x00" * 5_000_000)]).gdrdma == "none"
    assert evidence.read_files([io.BytesIO(b"x" * 3_000_000 + b"\n" + ON.encode() + b"\n")]).gdrdma == "on"


@pytest.mark.timeout(10)
def test_a_json_object_of_many_members_takes_no_exponential_time() -> None:
    """Members of digits, none of which is the line of a collector."""
    line = "{" + ", ".join(f'"{number}": "{number}"' for number in range(400)) + "} exitcode: 1"
    assert evidence.read_files([io.BytesIO(line.encode())]).lines_read == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 400))
def test_line_numbers_are_exact(gaps: list[int], size: int) -> None:
    """The number in a proof is that of the file, wherever blocks end and whatever was skipped."""
    lines: list[str] = []
    for index, gap in enumerate(gaps):
        lines += ["noise"] * gap
        lines.append(f"{HEAD}NCCL_A{index} set by environment to 1" if index % 2 else f"{HEAD}Using network N{index}")
    want = [number for number, line in enumerate(lines, 1) if "Using network" in line]
    text = "".join(line + "\n" for line in lines).encode()
    reader = Reader()
    rest = b""
    for start in range(0, len(text), size * 7):
        block, newline, rest = (rest + text[start : start + size * 7]).rpartition(b"\n")
        if newline:
            reader.feed(block + newline)
    reader.finish()
    ledger = reader.ledger
    assert ledger.lines == len(lines)
    assert sorted(row.line for rows in ledger.proof.values() for row in rows) == want
    assert read(lines).lines_read == len(lines)


@pytest.mark.timeout(300)  # 3 s of CPU time; in the square of the number of hosts it was more than 600 s
def test_a_problem_of_thousands_of_hosts_names_them_all() -> None:
    lines = [f"n{host}:1:2 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1." for host in range(8000)]
    (problem,) = (one for one in read(lines).problems if one.code == "hand_tuned_env")
    assert len(problem.hosts) == 8000


def test_nccl_logs_every_connection_into_a_file_of_each_process() -> None:
    env = evidence.environment("/x")
    wanted = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/x/nccl.%h.%p.log", "NCCL_RUNTIME_CONNECT": "0"}
    assert wanted.items() <= env.items()
    assert {"INIT", "ENV", "NET", "P2P", "SHM"} <= set(env["NCCL_DEBUG_SUBSYS"].split(","))


def test_empty_lines_of_an_answer_of_loki_are_left_out() -> None:
    """One entry may be millions of lines, each of which would get the name of its pod."""
    stream = {"stream": {"pod": "p" * 1000}, "values": [["1", f"first{chr(10) * 100_000}last"]]}
    answer = {"status": "success", "data": {"resultType": "streams", "result": [stream]}}
    lines = Unpacked(io.BytesIO(json.dumps(answer).encode())).read().splitlines()
    assert lines == [b"[pod/%s/-] %s" % (b"p" * 253, text) for text in (b"first", b"last")]
    stream["values"] = [["1", "  a\n" * 100_000]]  # and with text: read in parts, because each gets the name
    first = Unpacked(io.BytesIO(json.dumps(answer).encode())).read()
    assert first.endswith(b"-]   a\n") and len(first) < 2_000_000

"""Who and where: problems name hosts and ranks, one worker's log is no proof, other programs' texts are answered."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterable
from pathlib import Path

from evidence_rows import rows
from rigs.logs import read
from rigs.tables import each_row

from collectives.nccl_log import evidence
from collectives.nccl_log.transport import rank_words


def node(name: str, first: int, *, gdrdma: bool, hcas: int) -> list[str]:
    """The log of a node with two ranks of four."""
    lines = []
    listed = " ".join(f"[{n}]mlx5_{n}:1/RoCE" for n in range(hcas))
    for local in (0, 1):
        head = f"{name}:{400 + local}:{500 + local} [{local}] NCCL INFO "
        lines += [
            f"{head}NET/IB : Using {listed} [RO]; OOB eth0:10.0.0.1<0>",
            f"{head}Using network IB",
            f"{head}comm 0x55 rank {first + local} nranks 4 cudaDev {local} nvmlDev {local} busId {local + 1}b000 "
            "commId 0x8f - Init START",
        ]
        if not gdrdma:
            lines.append(f"{head}NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'")
    tag = "/GDRDMA" if gdrdma else ""
    before, last, after = (first - 1) % 4, first + 1, (first + 2) % 4
    lines += [
        f"{name}:400:500 [0] NCCL INFO Channel 00/0 : {before}[1] -> {first}[0] [receive] via NET/IB/0{tag}",
        f"{name}:400:500 [0] NCCL INFO Channel 00/0 : {first}[0] -> {last}[1] via P2P/CUMEM",
        f"{name}:401:501 [1] NCCL INFO Channel 00/0 : {last}[1] -> {after}[0] [send] via NET/IB/0{tag}",
    ]
    return lines


def test_the_node_without_gdrdma_and_the_node_with_a_port_down_are_named(tmp_path: Path) -> None:
    """Two nodes' logs: every problem has its host and ranks, and is proven by lines of that host."""
    for name, first, good in (("node-a", 0, True), ("node-b", 2, False)):
        lines = node(name, first, gdrdma=good, hcas=2 if good else 1)
        (tmp_path / f"{name}.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    verdict = evidence.read_files([tmp_path])
    assert [(p.code, p.hosts, p.ranks) for p in verdict.problems] == [
        ("peermem_missing", ("node-b",), (2, 3)),
        ("gdr_partial", ("node-b",), (2, 3)),
        ("dead_port", ("node-b",), (2, 3)),
    ]
    assert {line.host for problem in verdict.problems for line in problem.lines} == {"node-b"}
    assert verdict.devices.keys() == {"node-a IB/0", "node-b IB/0"}
    assert verdict.problems[0].place == "node-b (ranks 2 to 3)"


@each_row(("lines", "code", "words"), rows("parts"))
def test_the_log_of_some_ranks_is_no_single_node(lines: list[str], code: int, words: str) -> None:
    verdict = read(lines)
    said = [p.message for p in verdict.problems if p.code == "ranks_missing"]
    assert evidence.exit_code(verdict) == code
    assert [words in each for each in said] == [True] * bool(words)


def test_ranks_in_words() -> None:
    assert rank_words([5, 0, 1, 2]) == "ranks 0 to 2, 5"


@each_row(("code", "line", "ranks"), rows("texts"))
def test_texts_of_runtimes_and_launchers(code: str, line: str, ranks: list[int]) -> None:
    problem = read([line]).problems[0]
    assert (problem.code, list(problem.ranks)) == (code, ranks)


def test_words_that_are_no_cause() -> None:
    """A library that one host needs not leaves the call that failed a failure; retries and sources are none."""
    lines = ["h:1:2 [0] NCCL INFO Failed to open libibverbs.so[.1]", "h:1:2 [0] NCCL INFO Using network Socket",
             "h: Test NCCL failure common.cu:1279 'unhandled cuda error / '"]  # fmt: skip
    assert read(lines).problems[0].code == "call_failed"
    quiet = ("INFO: retry on wait timeout after start", "def f(): raise ValueError('argument is NULL')", "hip replaced")
    assert [line for line in quiet if read([line]).problems[0].code != "no_transport_evidence"] == []


@each_row("pack", [bytes, gzip.compress])
@each_row(("name", "text", "code", "word", "hosts", "exit_code"), rows("other_texts"))
def test_other_texts_get_an_answer_of_their_own(
    pack: Callable[[bytes], bytes], name: str, text: str, code: str, word: str, hosts: list[str], exit_code: int
) -> None:
    """Saved RAS, ibstat, rdma link and kernel logs; none of them proves a channel."""
    verdict = evidence.read_files([io.BytesIO(pack(text.encode()))])
    first = verdict.problems[0]
    assert (first.code, list(first.hosts), evidence.exit_code(verdict)) == (code, hosts, exit_code), name
    assert word in first.message, name


def _logs_of(nodes: Iterable[int], ranks: int, torn: int = -1) -> list[str]:
    """Logs of nodes with eight ranks each, all channels over GPUDirect RDMA; the line of the rank `torn` is lost."""
    return [
        f"node{rank // 8}:40:41 [0] NCCL INFO {text}"
        for rank in (8 * node + gpu for node in nodes for gpu in range(8)) if rank != torn
        for text in (f"comm 0x5 rank {rank} nranks {ranks} cudaDev 0 nvmlDev 0 busId 1b000 commId 0x8 - Init START",
                     f"Channel 00/0 : {rank}[0] -> {(rank + 8) % ranks}[0] [send] via NET/IB/0/GDRDMA",
                     f"Channel 00/0 : {(rank - 8) % ranks}[0] -> {rank}[0] [receive] via NET/IB/0/GDRDMA")
    ]  # fmt: skip


@each_row(
    ("text", "missing"),
    [
        (_logs_of((0, 1, 2), 24), ""),
        (_logs_of((1, 2), 24), "ranks 0 to 7 are missing"),
        (_logs_of((0, 2), 24), "ranks 8 to 15 are missing"),
        (_logs_of((0, 1), 24), "ranks 16 to 23 are missing"),
        (_logs_of((0, 1, 2), 24, torn=11), ""),
        (_logs_of(range(520), 4160), ""),  # more ranks than are remembered
    ],
)
def test_nodes_without_a_log_are_missing(text: list[str], missing: str) -> None:
    """The first, the last and one between them; a rank whose line is torn is no node."""
    verdict = read(text)
    assert not verdict.missing_ranks or missing or len(verdict.missing_ranks) == 1, "the one whose line is torn"
    told = [each.message for each in verdict.problems if each.code == "ranks_missing"]
    assert [missing in each for each in told] == [True] * bool(missing)


def test_where_not_every_channel_is_remembered_no_rank_is_called_missing() -> None:
    """Most ranks wrote only channels, which are more than are kept."""
    lines = [line for line in _logs_of(range(200), 1600) if "Init START" not in line or "rank 7 " in line]
    assert read(lines[: len(lines) // 4]).missing_ranks[:1] == (400,)
    assert read(lines).missing_ranks == ()

"""Several runs, several files, packed files, texts of other programs: which of them a log is of, what is missing."""

import bz2
import gzip
import io
import lzma
import re
from collections.abc import Iterable

import pytest
from click.testing import CliRunner
from evidence_rows import rows
from rigs.command import topoflight
from rigs.logs import read
from rigs.tables import each_row

from agent.cli.evidence import evidence as verb
from collectives.nccl_log import evidence
from collectives.nccl_log.messages import gpus_before_ampere
from collectives.nccl_log.reader import BLOCK_BYTES, LogFileError


def test_generations_by_name() -> None:
    """Names as drivers print them; a name without a generation tells nothing."""
    newer, older = rows("gpus_from_ampere_on"), rows("gpus_before_ampere")
    assert [name for name in newer if gpus_before_ampere([name]) is not False] == []
    assert [name for name in older if gpus_before_ampere([name]) is not True] == []
    assert gpus_before_ampere([]) is None
    assert gpus_before_ampere(["V100-PCIE-16GB", "H100 PCIe"]) is False


FIRST, SECOND = rows("first_run"), rows("second_run")


def test_a_folder_is_one_verdict_with_places(tmp_path):
    """One rank per file, packed or not, with the name of the file behind each line; what is no text is left out."""
    (tmp_path / "rank0.log").write_text("\n".join(SECOND) + "\n")
    (tmp_path / "sub").mkdir()
    lines = "\n".join(
        line.replace("node-1", "node-2").replace("[send]", "[receive]").replace("/GDRDMA", "") for line in SECOND
    )
    (tmp_path / "sub" / "rank1.log.gz").write_bytes(gzip.compress(lines.encode() + b"\n"))
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04\0\0\0")
    verdict = evidence.read_files([tmp_path])
    assert (verdict.gdrdma, verdict.hosts, verdict.lines_read) == ("partial", 2, 8)
    shown = {row.file: row.line for problem in verdict.problems for row in problem.lines}
    assert shown == {str(tmp_path / "sub" / "rank1.log.gz"): 3}
    apart = evidence.read_files([str(tmp_path / "rank0.log"), tmp_path / "sub" / "rank1.log.gz"])
    assert apart == verdict
    with (tmp_path / "rank0.log").open("rb") as file:
        assert evidence.read_files([file]).gdrdma == evidence.read_files([tmp_path / "rank0.log"]).gdrdma == "on"
    done = topoflight("evidence", tmp_path / "rank0.log", tmp_path / "sub")
    assert done.exit_code == 3
    assert "line 3 of" in done.output and "no line of" not in done.output
    assert "2, no line of rank 1" in topoflight("evidence", tmp_path / "rank0.log").output


def test_folders_of_runs_are_distinguished_by_communicator(tmp_path):
    """Files of two runs lie in the order of their names: each goes to its own run."""
    for number, lines in enumerate((FIRST, SECOND)):
        for rank in (0, 1):
            text = "\n".join(lines).replace("rank 0", f"rank {rank}").replace("node-1", f"node-{rank}")
            (tmp_path / f"rank{rank}.{number}.log").write_text(text + "\n")
    verdict = evidence.read_files([tmp_path])
    assert [run.inter_node_transport for run in verdict.runs] == ["Socket", "IB"]


@each_row(("other", "expected"), rows("two_jobs"))
def test_logs_of_two_jobs_are_said_to_be_so_and_accuse_no_network(other, expected, tmp_path):
    """By hosts and sizes of communicators, in either order of the files, and in `why` too."""
    text = "\n".join(FIRST)
    for old, new in other.items():
        text = text.replace(old, new)
    files = [tmp_path / "good.log", tmp_path / "slow.log"]
    files[0].write_text("\n".join(SECOND) + "\n")
    files[1].write_text(text + "\n")
    for given in (files, files[::-1]):
        verdict = evidence.read_files(given)
        found = {problem.code: problem.message for problem in verdict.problems}
        assert found.keys() & {"several_jobs", "mixed_networks"} == {expected}
        assert (len(verdict.runs) == 2) == (expected == "several_jobs")
        assert all(file.name in found.get("several_jobs", "good.log slow.log") for file in files)
        assert re.search(rf"^\d+\. {expected}\b", topoflight("why", *given).output, re.M)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_log_is_read_as_it_is(pack, tmp_path):
    """By its first bytes, whatever its name; from standard input too; of several members; and cut short."""
    log = ("\n".join([*SECOND, *["x" * 400] * 12]) + "\n").encode() * 500
    packed = pack(log)
    assert len(log) > 2 * BLOCK_BYTES
    path = tmp_path / "nccl.log"
    path.write_bytes(packed)
    whole = evidence.read_files([path])
    assert (whole.gdrdma, whole.lines_read) == ("on", 8_000)
    assert evidence.read_files([io.BytesIO(packed + packed)]).lines_read == 16_000
    cut = evidence.read_files([io.BytesIO(packed[: len(packed) * 2 // 3])])
    assert cut.lines_read < 8_000
    done = CliRunner().invoke(verb, [], input=pack("\n".join([*SECOND, ""]).encode()))
    assert done.exit_code == 0, done.output


def test_what_cannot_be_unpacked_says_so(tmp_path):
    """A format that is not read, and a damaged file."""
    path = tmp_path / "nccl.log"
    damaged = bytearray(gzip.compress(bytes(range(256)) * 400))
    damaged[40:60] = b"\xff" * 20
    for raw, word in ((b"\x28\xb5\x2f\xfd rest", "zstd"), (bytes(damaged), "damaged")):
        path.write_bytes(raw)
        with pytest.raises(LogFileError, match=word):
            evidence.read_files([path])
        done = topoflight("evidence", path)
        assert done.exit_code != 0
        assert word in done.output
        assert str(path) in done.output
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(LogFileError, match="no text file"):
        evidence.read_files([empty])


@each_row("pack", [bytes, gzip.compress])
@each_row(("name", "text", "code", "word", "hosts", "exit_code"), rows("other_texts"))
def test_other_texts_prove_no_channel(pack, name, text, code, word, hosts, exit_code):
    """Saved RAS, ibstat and kernel logs; the faults in a kernel log are found."""
    verdict = evidence.read_files([io.BytesIO(pack(text.encode()))])
    first = verdict.problems[0]
    assert (first.code, list(first.hosts), evidence.exit_code(verdict)) == (code, hosts, exit_code), name
    assert word in first.message, name


def _logs_of(nodes: Iterable[int], ranks: int) -> list[str]:
    """Logs of nodes with eight ranks each, all channels over GPUDirect RDMA."""
    return [
        f"node{rank // 8}:40:41 [0] NCCL INFO {text}"
        for rank in (8 * node + gpu for node in nodes for gpu in range(8))
        for text in (f"comm 0x5 rank {rank} nranks {ranks} cudaDev 0 nvmlDev 0 busId 1b000 commId 0x8 - Init START",
                     f"Channel 00/0 : {rank}[0] -> {(rank + 8) % ranks}[0] [send] via NET/IB/0/GDRDMA",
                     f"Channel 00/0 : {(rank - 8) % ranks}[0] -> {rank}[0] [receive] via NET/IB/0/GDRDMA")
    ]  # fmt: skip


def test_where_not_every_channel_is_remembered_no_rank_is_called_missing() -> None:
    """Most ranks wrote only channels, which are more than are stored; or there are more ranks than are remembered."""
    lines = [line for line in _logs_of(range(200), 1600) if "Init START" not in line or "rank 7 " in line]
    assert read(lines[: len(lines) // 4]).missing_ranks[:1] == (400,)
    assert read(lines).missing_ranks == ()
    assert "ranks_missing" not in {problem.code for problem in read(_logs_of(range(520), 4160)).problems}

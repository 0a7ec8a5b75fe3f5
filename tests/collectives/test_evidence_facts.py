"""What a log says of its GPUs, hosts, providers and NVLink decides what its channel lines mean."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from pathlib import Path

import pytest
from click.testing import CliRunner
from evidence_rows import HEAD, INFO, codes, rows
from rigs.logs import read
from rigs.tables import each_row

from agent.cli.evidence import evidence as verb
from collectives.nccl_log import evidence
from collectives.nccl_log.messages import gpus_before_ampere
from collectives.nccl_log.reader import BLOCK_BYTES, WORDS, LogFileError

SEND = f"{INFO}Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0"
RECEIVE = f"{INFO}Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA"
P2P = f"{INFO}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"


def table(name: str, rank: int = 0, host: str = "node-1") -> str:
    """nccl-tests' list of ranks."""
    return f"#  Rank {rank:2} Group  0 Pid   40{rank} on {host:>10} device  {rank} [0000:1{rank}:00] {name}"


# --- sends without GPUDirect RDMA


@each_row("fact", rows("against_old_gpus"))
def test_the_rule_for_old_gpus_excuses_no_newer_one(fact: str) -> None:
    """Any fact of the log that speaks against such a GPU takes the excuse away, wherever it stands."""
    for lines in ([fact, SEND, RECEIVE], [SEND, RECEIVE, fact]):
        verdict = read(lines)
        assert [problem.code for problem in verdict.problems] == ["gdr_partial"]
        assert evidence.exit_code(verdict) == evidence.FAILED


@each_row("name", ["Tesla V100-PCIE-32GB", "Tesla T4", "NVIDIA TITAN RTX", "Quadro RTX 6000", "Tesla P100-PCIE-16GB"])
def test_the_rule_excuses_old_gpus(name: str) -> None:
    """Without NVLink, before compute capability 8.0: NCCL's default."""
    verdict = read([table(name), SEND, RECEIVE])
    assert [problem.code for problem in verdict.problems] == ["gdr_read_disabled_pre_ampere"]
    assert evidence.exit_code(verdict) == evidence.PASS


def test_generations_by_name() -> None:
    """Names as drivers print them; a name without a generation tells nothing."""
    newer, older = rows("gpus_from_ampere_on"), rows("gpus_before_ampere")
    assert [name for name in newer if gpus_before_ampere([name]) is not False] == []
    assert [name for name in older if gpus_before_ampere([name]) is not True] == []
    assert gpus_before_ampere([]) is None
    assert gpus_before_ampere(["V100-PCIE-16GB", "H100 PCIe"]) is False


@each_row("name", ["NVIDIA GB10", "NVIDIA GeForce RTX 4090", "GeForce RTX 3090"])
def test_gpus_without_gpudirect_rdma_by_design(name: str) -> None:
    """No advice to load a module that cannot help, and no failure."""
    verdict = read(
        [
            table(name),
            f"{INFO}NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
            SEND,
            RECEIVE.replace("/GDRDMA", ""),
        ]
    )
    assert (verdict.gdrdma, [p.code for p in verdict.problems]) == ("off", ["gdr_not_supported_by_gpu"])
    assert not any("peermem" in problem.action for problem in verdict.problems)
    assert evidence.exit_code(verdict) == evidence.PASS
    assert codes(table(name), table("NVIDIA H100 PCIe", 1), SEND) == ["ib_without_gdrdma"]


def test_a_spark_is_known_by_where_its_parts_sit() -> None:
    """vLLM prints no name of a GPU: the bus of GB10 and the ports of its NIC tell."""
    ports = f"{INFO}NET/IB : Using [0]rocep1s0f1:1/RoCE [1]roceP2p1s0f1:1/RoCE [RO]; OOB enp1s0f1np1:10.0.0.1<0>"
    spark = f"{INFO}ncclCommInitRank comm 0x1 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId f01000 commId 0xa - Init START"
    assert codes(ports, spark, SEND) == ["gdr_not_supported_by_gpu"]
    assert codes(ports, spark.replace("f01000", "1b000"), SEND) == ["ib_without_gdrdma"]


# --- how many nodes


def test_more_ranks_than_a_node_holds() -> None:
    """P2P lines of one host prove nothing of the others: ranks above its devices sit elsewhere."""
    start = f"{INFO}ncclCommInitRank comm 0x55 rank 33 nranks 64 cudaDev 1 busId 2a000 - Init START"
    for lines in (
        [
            start,
            f"{INFO}Channel 00/0 : 33[1] -> 34[2] via P2P/CUMEM",
            f"{INFO}Channel 00/0 : 39[7] -> 38[6] via P2P/CUMEM",
        ],
        [f"{INFO}Channel 00 : 33[1b000] -> 34[1c000] via P2P/IPC"],
        [f"{INFO}Channel 00/0 : 12[4] -> 13[5] via P2P/CUMEM"],
        [f"{INFO}comm 0x55 rank 3 nranks 16 cudaDev 3 busId 2a000 - Init COMPLETE", P2P],
    ):
        verdict = read(lines)
        assert [problem.code for problem in verdict.problems] == ["no_inter_node_evidence"]
        assert evidence.exit_code(verdict) == evidence.NO_EVIDENCE


def test_one_node_is_still_one() -> None:
    """Eight ranks on eight devices; sixteen on sixteen; and what NCCL says itself."""
    assert codes(P2P, f"{INFO}Channel 00/0 : 7[7] -> 0[0] via P2P/CUMEM") == []
    assert (
        codes(*(f"{INFO}Channel 00/0 : {r}[{r}] -> {(r + 1) % 16}[{(r + 1) % 16}] via P2P/CUMEM" for r in range(16)))
        == []
    )
    assert codes(f"{INFO}comm 0x55 rank 0 nRanks 20 nNodes 1 localRanks 20 localRank 0 MNNVL 0", P2P) == []


def start(rank: int, ranks: int, host: str = "node-1", bus: str = "") -> str:
    """A rank's first line."""
    place = f"cudaDev {rank} busId {bus or f'{rank + 1}b000'}"
    return f"{host}:{100 + rank}:200 [{rank}] NCCL INFO comm 0x55 rank {rank} nranks {ranks} {place} - Init START"


def test_sockets_of_one_host_are_no_fallback() -> None:
    """All ranks of the communicator on one host: nothing goes between nodes."""
    socket = f"{INFO}Using network Socket"
    assert codes(start(0, 2), start(1, 2), socket) == ["no_transport_evidence"]
    assert codes(start(0, 2), start(1, 2, host="node-2"), socket) == ["socket_fallback"]
    # Rank 1 is not in the log, or both name the same GPU, which two hosts of one name may do: not known.
    for lines in ([start(0, 2), socket], [start(0, 2), start(1, 2, bus="1b000"), socket]):
        verdict = read(lines)
        assert [(p.code, p.severity) for p in verdict.problems if p.code == "socket_fallback"] == [
            ("socket_fallback", "warn")
        ]
        assert (verdict.gdrdma, evidence.exit_code(verdict)) == ("none", evidence.NO_EVIDENCE)


def test_traffic_of_one_host_over_the_network_is_named() -> None:
    """P2P and shared memory are switched off: the channels of one host go over TCP."""
    net = [
        f"{INFO}Channel 00/0 : {a}[{a}] -> {b}[{b}] [{way}] via NET/Socket/0"
        for a, b, way in ((0, 1, "send"), (1, 0, "receive"))
    ]
    env = [f"{INFO}NCCL_P2P_LEVEL set by environment to LOC", f"{INFO}NCCL_SHM_DISABLE set by environment to 1."]
    for one_host in (
        [start(0, 2), start(1, 2)],
        [f"{INFO}comm 0x55 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0"],
    ):
        verdict = read([*one_host, *env, *net])
        assert verdict.inter_node_transport is None
        assert [p.code for p in verdict.problems] == ["net_only_within_node"]
        assert "NCCL_P2P_LEVEL=LOC, NCCL_SHM_DISABLE=1" in verdict.problems[0].message
        assert [row.line for row in verdict.problems[0].lines] == [
            len(one_host) + 1,
            len(one_host) + 2,
            len(one_host) + 3,
        ]
        assert evidence.exit_code(verdict) == evidence.FAILED
        assert codes(*one_host, *net, P2P) == ["net_within_node"]


# --- libfabric's providers


@each_row(("provider", "code", "word"), rows("provider_advice"))
def test_each_provider_has_its_own_advice(provider: str, code: str, word: str) -> None:
    """The same plugin drives EFA, Slingshot and TCP."""
    chosen = f"{INFO}NET/OFI Selected Provider is {provider} (found 4 nics)"
    verdict = read([chosen, SEND.replace("NET/IB", "NET/AWS Libfabric")])
    assert [problem.code for problem in verdict.problems] == [code]
    assert word in verdict.problems[0].action
    assert ("EFA" in verdict.problems[0].message) == provider.startswith("efa")


@each_row(("efa", "cxi", "line"), rows("providers"))
def test_a_failure_in_the_words_of_its_provider(line: str, efa: str, cxi: str) -> None:
    """EFA's advice helps nobody on Slingshot."""
    warning = f"{HEAD}ofi_process_cq:120 NCCL WARN {line}"
    assert codes(warning) == [efa]
    assert codes(f"{INFO}NET/OFI Selected Provider is cxi (found 4 nics)", warning) == [cxi]


# --- NVLink SHARP and NVLink between nodes


def test_multicast_is_hardware_and_a_communicator_is_use() -> None:
    """Two facts, each with its line."""
    available, made = (
        f"{INFO}NVLS multicast support is available on dev 0",
        f"{INFO}NVLS comm 0x55 headRank 0 nHeads 8 buffSize 1",
    )
    assert read([P2P]).nvls_use == "unknown"
    assert read([P2P, available]).nvls_use == "available"
    assert read([P2P, available.replace("is available", "is not available")]).nvls_use == "not available"
    used = read([P2P, available, made])
    assert (used.nvls, used.nvls_use) == (True, "used")
    assert [row.line for row in used.fabric if row.proves == "fabric: NVLS in use"] == [3]
    assert read([f"{INFO}Connected NVLS tree"]).nvls_use == "used"


def test_nvlink_between_nodes() -> None:
    """Hardware, a communicator that has it, and channels that use it."""
    fabric = f"{INFO}MNNVL busId 0x1b000 fabric UUID 5c2f7a3e.1d cliqueId 0x7ffe state 3 healthMask 0x0"
    off = f"{INFO}comm 0x55 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 0"
    clique = f"{INFO}MNNVL 1 cliqueId 7ffe cliqueSize 8 cliqueRank 0"
    channel = f"{INFO}Channel 00/0 : 0[0] -> 4[0] via P2P/MNNVL"
    assert read([P2P]).mnnvl_use == "unknown"
    assert read([off]).mnnvl_use == "off"
    assert read([fabric.replace("5c2f7a3e.1d", "0.0"), off]).mnnvl_use == "off"
    assert read([fabric, off]).mnnvl_use == "available"
    enabled = read([fabric, clique])
    assert (enabled.mnnvl_use, enabled.mnnvl_clique) == ("enabled", 8)
    assert read([clique, channel]).mnnvl_use == "used"


# --- NCCL's own diagnostics


@each_row(("code", "text"), rows("diagnostics"))
def test_lines_of_nccl_run_diagnostics(text: str, code: str) -> None:
    """What NCCL_RUN_DIAGNOSTICS and NCCL_RUN_RAS_DIAGNOSTICS report, on stdout and without NCCL's usual header."""
    for line in (f"node0:24563 NCCL DIAG {text}", f"NCCL DIAG {text}"):
        assert codes(P2P, line) == [code]


@each_row("text", rows("diagnostics_mention"))
def test_what_the_diagnostics_only_mention_is_no_problem(text: str) -> None:
    """Texts of libnccl.so.2 2.32.3 that accuse nothing."""
    assert codes(P2P, f"node0:24563 NCCL DIAG [INFO] {text}") == []


def test_attn_of_2_32_is_read_as_the_warning_that_it_was() -> None:
    """2.32 prints some of the former warnings as NCCL ATTN."""
    head = INFO.replace("NCCL INFO", "init.cc:712 NCCL ATTN")
    degraded = head + "MNNVL busId 0x1 NVLink fabric health reports DEGRADED_BANDWIDTH (healthMask 0x1)"
    assert codes(P2P, degraded) == ["nvlink_degraded"]
    assert codes(P2P, head + "Invalid value x for NCCL_BUFFSIZE, using default -2.") == ["invalid_env_value"]


def test_a_clean_diagnosis_is_no_problem() -> None:
    """[OK], the frame, and a rank that is faster than the median."""
    for text in (
        "=== NCCL Diagnostics ===",
        "[OK]   p2p: verified P2P access in both directions between every GPU pair (56 peer accesses)",
        "[OK] net bw: 376.1/391.5/398.2 Gbit/s min/median/max same-nic bw (across 8 ranks) in comm 0x7a3f",
        "[INFO] net bw: same-nic rank 3 (node0): 565.1 Gbit/s, >30% off median 391.5 Gbit/s in comm 0x7a3f",
        "NCCL diagnostics completed in 245.3 ms across 8 ranks",
    ):
        assert codes(P2P, f"node0:24563 NCCL DIAG {text}") == []


# --- several runs, several files, packed files

FIRST = [
    "node-1:100:100 [0] NCCL INFO Using network Socket",
    "node-1:100:120 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1b000 commId 0xaa - Init START",
    "node-1:100:120 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
]
SECOND = [
    "node-1:900:900 [0] NCCL INFO Using network IB",
    "node-1:900:920 [0] NCCL INFO comm 0x2 rank 0 nranks 2 cudaDev 0 busId 1b000 commId 0xbb - Init START",
    "node-1:900:920 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA",
    "node-1:900:920 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA",
]


def test_two_runs_in_one_file_are_judged_apart() -> None:
    """The GPU has another process: a later run, not ranks that chose different networks."""
    verdict = read([*FIRST, "loss 1.0", *SECOND])
    assert [(run.first.line, run.inter_node_transport, run.gdrdma) for run in verdict.runs] == [
        (1, "Socket", "off"),
        (5, "IB", "on"),
    ]
    assert [problem.code for problem in verdict.problems] == ["socket_fallback"]
    assert "several_runs" in [note.code for note in verdict.notes]
    assert evidence.exit_code(verdict) == evidence.FAILED
    again = read([*SECOND, *[line.replace(":900:", ":990:").replace("0xbb", "0xcc") for line in SECOND]])
    assert (len(again.runs), again.problems, evidence.exit_code(again)) == (2, (), evidence.PASS)


def test_a_run_without_evidence_beside_a_good_one_is_unknown() -> None:
    """The worse of both."""
    third = [line.replace(":900:", ":990:").replace("0xbb", "0xcc") for line in SECOND[:2]]
    assert evidence.exit_code(read([*SECOND, *third])) == evidence.NO_EVIDENCE


def test_ranks_of_one_run_stay_one() -> None:
    """Files of its ranks behind each other, a host that writes late, and a host of another network."""
    other_rank = [
        line.replace(":900:", ":901:")
        .replace("rank 0", "rank 1")
        .replace("1b000", "2b000")
        .replace("cudaDev 0", "cudaDev 1")
        for line in SECOND
    ]
    other_host = [line.replace("node-1", "node-2") for line in SECOND]
    for more in (other_rank, other_host):
        assert read([*SECOND, *more]).runs == ()
    mixed = [line.replace("node-1", "node-2") for line in FIRST]
    assert "mixed_networks" in codes(*SECOND, *mixed)


def test_two_hosts_of_one_name_are_one_run() -> None:
    """Both write on, so neither came after the other."""
    text = "ubuntu:{}:920 [{}] NCCL INFO Channel {:02}/0 : {}[1] -> {}[2] via SHM/direct"
    lines = [text.format(900 + host, gpu, step, 1 + 8 * host, 2 + 8 * host)
             for step in range(3) for gpu in (1, 2) for host in (0, 1)]  # fmt: skip
    verdict = read(lines)
    assert (verdict.runs, verdict.transports) == ((), {"SHM": 12})


def test_a_folder_is_one_verdict_with_places(tmp_path: Path) -> None:
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
    apart = evidence.read_files([tmp_path / "rank0.log", tmp_path / "sub" / "rank1.log.gz"])
    assert apart == verdict
    done = CliRunner().invoke(verb, [str(tmp_path / "rank0.log"), str(tmp_path / "sub")])
    assert done.exit_code == 3
    assert "line 3 of" in done.output


def test_folders_of_runs_are_told_apart_by_communicator(tmp_path: Path) -> None:
    """Files of two runs lie in the order of their names: each goes to its own run."""
    for number, lines in enumerate((FIRST, SECOND)):
        for rank in (0, 1):
            text = "\n".join(lines).replace("rank 0", f"rank {rank}").replace("node-1", f"node-{rank}")
            (tmp_path / f"rank{rank}.{number}.log").write_text(text + "\n")
    verdict = evidence.read_files([tmp_path])
    assert [run.inter_node_transport for run in verdict.runs] == ["Socket", "IB"]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_log_is_read_as_it_is(pack: object, tmp_path: Path) -> None:
    """By its first bytes, whatever its name; from standard input too; of several members; and cut short."""
    assert callable(pack)
    log = ("\n".join([*SECOND, *["x" * 400] * 12]) + "\n").encode() * 500
    packed = pack(log)
    assert len(log) > 2 * BLOCK_BYTES
    path = tmp_path / "nccl.log"
    path.write_bytes(packed)
    whole = evidence.read_file(path)
    assert (whole.gdrdma, whole.lines_read) == ("on", 8_000)
    assert evidence.read_file(io.BytesIO(packed + packed)).lines_read == 16_000
    cut = evidence.read_file(io.BytesIO(packed[: len(packed) * 2 // 3]))
    assert cut.lines_read < 8_000
    done = CliRunner().invoke(verb, [], input=pack("\n".join([*SECOND, ""]).encode()))
    assert done.exit_code == 0, done.output


def test_what_cannot_be_unpacked_says_so(tmp_path: Path) -> None:
    """A format that is not read, and a damaged file."""
    path = tmp_path / "nccl.log"
    damaged = bytearray(gzip.compress(bytes(range(256)) * 400))
    damaged[40:60] = b"\xff" * 20
    for raw, word in ((b"\x28\xb5\x2f\xfd rest", "zstd"), (bytes(damaged), "damaged")):
        path.write_bytes(raw)
        with pytest.raises(LogFileError, match=word):
            evidence.read_file(path)
        done = CliRunner().invoke(verb, [str(path)])
        assert done.exit_code != 0
        assert word in done.output
        assert str(path) in done.output
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(LogFileError, match="no text file"):
        evidence.read_file(empty)


def test_words_hold_no_digit() -> None:
    """Lines are told apart without their digits."""
    assert [word for word in WORDS if any(48 <= byte < 58 for byte in word)] == []


def test_one_gpu_to_a_node_has_no_excuse() -> None:
    """NCCL lets the NIC read the memory of a GPU that is alone on its node (ncclTopoCheckGdr)."""
    alone = f"{INFO}comm 0x55 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0"
    beside = f"{INFO}comm 0x66 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0"
    assert [p.code for p in read([alone, SEND, RECEIVE]).problems] == ["gdr_partial"]
    # Another communicator may have made the channels.
    both = read([alone, beside, SEND, RECEIVE])
    assert [p.code for p in both.problems] == ["gdr_read_disabled_pre_ampere"]


def test_without_the_name_of_a_gpu_the_excuse_is_a_warning() -> None:
    """The message says what it rests on; a named GPU makes it a note."""
    unnamed = read([SEND, RECEIVE]).problems[0]
    assert (unnamed.code, unnamed.severity) == ("gdr_read_disabled_pre_ampere", "warn")
    assert "names no GPU" in unnamed.message
    assert evidence.exit_code(read([SEND, RECEIVE]), fail_on="warn") == evidence.WARNED
    assert read([table("Tesla T4"), SEND, RECEIVE]).problems[0].severity == "info"


@each_row("name", ["NVIDIA A100-PCIE-40GB", "NVIDIA A40", "NVIDIA A10"])
def test_the_rule_held_for_every_gpu_before_2_19(name: str) -> None:
    """The compute capability came into it with 2.19; NVLink always took it away."""
    for version, code in (("2.18.5", "gdr_read_disabled_pre_ampere"), ("2.19.3", "gdr_partial")):
        lines = [f"{INFO}NCCL version {version}+cuda12.2", table(name), SEND, RECEIVE]
        assert [p.code for p in read(lines).problems] == [code]
    nvlink = [f"{INFO}NCCL version 2.18.5+cuda12.2", table("NVIDIA A100-SXM4-80GB"), SEND, RECEIVE]
    assert [p.code for p in read(nvlink).problems] == ["gdr_partial"]


@each_row("line", rows("rccl_lines"))
def test_rccl_is_known_without_its_version(line: str) -> None:
    """It prints NCCL's prefix; ROCm's libraries and the end of a channel line give it away."""
    assert read([line]).library == "rccl"
    assert read([SEND]).library == "nccl"


def test_the_provider_that_the_plugin_filters_by() -> None:
    """Without any line of the provider the plugin's name proves no EFA: Slingshot has it too."""
    channel = f"{INFO}Channel 00/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0/GDRDMA"
    assert read([channel]).inter_node_transport == "libfabric (Libfabric)"
    said = f"{INFO}NET/OFI Setting provider_filter to efa"
    assert read([said, channel]).inter_node_transport == "EFA (Libfabric)"

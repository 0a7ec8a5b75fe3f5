"""Failures in the forms that releases, plugins and PyTorch give them: none passes, and each is named for what it is."""

from __future__ import annotations

from evidence_rows import HEAD, INFO, codes, rows
from rigs.logs import read
from rigs.tables import each_row

from collectives.nccl_log import evidence

CHANNEL = f"{INFO}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"


@each_row(("code", "line"), rows("failures"))
def test_a_failure_beside_good_channels_fails(line: str, code: str) -> None:
    """Channels were made before it came: the log is failed, and the line is the proof."""
    verdict = read([CHANNEL, "loss 1.0", line])
    assert [problem.code for problem in verdict.problems] == [code]
    assert [row.line for row in verdict.problems[0].lines] == [3]
    assert evidence.exit_code(verdict) == evidence.FAILED


@each_row("line", rows("harmless"))
def test_what_is_tried_again_or_follows_is_no_failure(line: str) -> None:
    """Retries, NCCL's way on without SHARP, the shutdown, and variables set to their default."""
    verdict = read([CHANNEL, line])
    assert evidence.exit_code(verdict, fail_on="warn") == evidence.PASS
    assert [note.code for note in verdict.notes] == []


def test_a_failed_call_is_a_note_where_the_cause_is_known() -> None:
    """The trace of a failure is not one more failure."""
    trace = f"{INFO}group.cc:65 -> 2 [Async thread]"
    verdict = read([f"{HEAD}misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error 113", trace])
    assert [problem.code for problem in verdict.problems] == ["ib_modify_qp_failed"]
    assert "call_failed" in [note.code for note in verdict.notes]
    # TCP between the nodes is slow, and no reason to fail.
    assert codes(f"{INFO}Channel 00/0 : 0[0] -> 2[0] [send] via NET/Socket/0", trace) == [
        "call_failed",
        "socket_fallback",
    ]


def test_the_source_tells_what_a_cuda_failure_was_for() -> None:
    """src/transport/nvls.cc prints the CUDA error alone."""
    line = "transport/nvls.cc:254 NCCL WARN Cuda failure 1 'invalid argument'"
    assert codes(HEAD + line) == codes(line) == ["cuda_failure", "nvls_bind_failed"]
    assert codes(HEAD + line.replace("nvls", "p2p")) == ["cuda_failure"]


def test_the_cause_below_last_error() -> None:
    """PyTorch repeats NCCL's last warning without its prefix, and a launcher puts the rank before it."""
    front = [
        "10: RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled system error, NCCL version 2.18.5",
        "10: Last error:",
    ]
    assert codes(*front, "10: socketStartConnect: Connect to 127.0.0.1<45> failed : Connection refused") == [
        "socket_connect_failed"
    ]
    assert codes(*front, "Cuda failure 'out of memory'") == ["gpu_out_of_memory"]


def test_the_distance_is_named_before_there_are_channels() -> None:
    """NCCL prints it while it plans them; where one pair is near enough, nothing is said."""
    far = f"{INFO}GPU Direct RDMA Disabled for GPU ca000 / HCA 0 (distance 7 > 4)"
    near = f"{INFO}GPU Direct RDMA Enabled for GPU 1b000 / HCA 0 (distance 3 <= 4), read 0 mode Default"
    assert "gdr_distance_too_far" in codes(far)
    assert "gdr_distance_too_far" not in codes(far, near)
    assert "gdr_distance_too_far" not in codes(far, CHANNEL)


def test_sharp_that_cannot_start_is_a_note() -> None:
    """NCCL goes on without it: seen in runs whose every channel is right."""
    line = f"{HEAD}sharp_plugin.c:288 NCCL WARN NET/IB :SHARP coll init error: Cannot create SHArP job(-11)"
    verdict = read([CHANNEL, line])
    assert (verdict.problems, [note.code for note in verdict.notes]) == ((), ["sharp_init_failed"])


def test_a_socket_list_before_a_bare_line_is_no_rdma() -> None:
    """The version has no prefix: what comes before it is not one line with it."""
    lines = [f"{INFO}NET/Socket : Using [0]eth0:10.0.0.1<0>", "NCCL version 2.5.6+cuda10.0"]
    verdict = read(lines)
    assert verdict.inter_node_transport == "Socket"  # listed only where no RDMA device is found
    assert verdict.nccl_version == "2.5.6+cuda10.0"


def test_the_forms_of_2_3() -> None:
    """ "Network" with a capital, and the interface without a number."""
    verdict = read([f"{INFO}NET : Using interface ib0:10.0.0.1<0>", f"{INFO}Using internal Network Socket"])
    assert verdict.inter_node_transport == "Socket"
    assert verdict.socket_interface == "ib0"


def rank(number: int, host: str) -> str:
    return f"#  Rank {number:2} Group  0 Pid   40{number} on {host:>10} device  {number} [0x1a] NVIDIA H100"


def test_the_ranks_of_nccl_tests_tell_one_host_from_two() -> None:
    """TCP between nodes is a fault where there are nodes; a list that was cut tells nothing."""
    socket = f"{INFO}Using network Socket"
    assert codes(rank(0, "node-1"), rank(1, "node-1"), socket) == ["no_transport_evidence"]
    assert codes(rank(0, "node-1"), rank(1, "node-2"), socket) == ["socket_fallback"]
    unsure = ["no_transport_evidence", "socket_fallback"]
    assert codes(rank(1, "node-1"), socket) == unsure
    assert (
        codes(rank(0, "node-1"), rank(1, "node-1"), socket, f"{INFO}comm 0x1 rank 0 nranks 4 cudaDev 0 - Init START")
        == unsure
    )


def test_the_version_that_vllm_names() -> None:
    """It stands in for NCCL's own line."""
    line = "(Worker pid=1) INFO 09-12 23:40:47 pynccl.py:63] vLLM is using nccl==2.20.5"
    assert read([line]).nccl_version == "2.20.5"
    assert read([line, "NCCL version 2.20.5+cuda12.4"]).nccl_version == "2.20.5+cuda12.4"


@each_row("colour", ["ESC[32m", "\x1b[32m", "^[[32m", "\u241b[32m"])
def test_a_colour_behind_a_channel(colour: str) -> None:
    """Escapes that a pager or an editor wrote out are no part of the tags."""
    line = f"{INFO}Channel 00/0 : 0[0] -> 2[0] [send] via NET/IB/0{colour} [repeated 4x across cluster]"
    verdict = read([line])
    assert (verdict.send.total, verdict.send.gdrdma, verdict.torn_lines) == (1, 0, 0)


def test_the_loopback_interface_serves_one_node() -> None:
    """It is a fault only where another node must be reached."""
    line = f"{INFO}Bootstrap : Using lo:127.0.0.1<0>"
    assert "docker_interface_used" not in codes(line)
    assert "docker_interface_used" in codes(line, line.replace("node-1", "node-2"))


def test_what_the_environment_did_shows_its_line() -> None:
    """The line that told the variable, of the first process that told it."""
    told = f"{INFO}NCCL_IB_DISABLE set by environment to 1."
    verdict = read([told, told.replace("node-1", "node-2"), f"{INFO}Using network Socket"])
    lines = {problem.code: [row.line for row in problem.lines] for problem in (*verdict.problems, *verdict.notes)}
    assert lines == {"ib_disabled_by_env": [1], "socket_fallback": [3], "hand_tuned_env": [1]}


def test_a_line_that_follows_a_cut_one_is_shown_as_it_stands() -> None:
    """What it says alone is not said by the two together."""
    verdict = read([f"{INFO}comm 0x1 rank 0 nranks 2 - Abort COMPLETE", "RuntimeError: NCCL Error 2: unhandled"])
    assert [(row.line, row.text) for row in verdict.problems[0].lines] == [(2, "RuntimeError: NCCL Error 2: unhandled")]

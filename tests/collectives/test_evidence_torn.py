"""What launchers, terminals and interleaving writers do to a log does not change its verdict."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.logs import read

from collectives.nccl_log import evidence
from collectives.nccl_log.transport import ChannelCount, Evidence

IB_ON = [
    "NCCL version 2.21.5+cuda12.4",
    "n1:10:20 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5",
    "n1:10:20 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>",
    "n1:10:20 [0] NCCL INFO Using network IB",
    "n1:10:20 [0] NCCL INFO comm 0x55 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0",
    "n1:10:20 [0] NCCL INFO Channel 00/02 :    0   1   2   3",
    "n1:10:20 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/IB/0/GDRDMA",
    "n1:11:21 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1(0)/GDRDMA",
    "n1:10:20 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
    "n1:10:20 [0] NCCL INFO Connected all rings, use ring PXN 1 GDR 1",
    "n1:10:20 [0] NCCL INFO ncclCommInitRank comm 0x55 rank 0 nranks 4 cudaDev 0 busId 1b000 - Init COMPLETE",
]
IB_OFF = [line.replace("/GDRDMA", "") for line in IB_ON]
SOCKET = [
    line.replace("NET/IB/", "NET/Socket/").replace("/GDRDMA", "").replace("network IB", "network Socket")
    for line in IB_ON
]
SHM = [*IB_ON[:1], "n1:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"]
FAILED = [
    *IB_ON[:5],
    "n1:10:44 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<33> "
    "with error 12, opcode 0, len 0, vendor err 129 (Recv)",
]
LOGS = [IB_ON, IB_OFF, SOCKET, SHM, FAILED]


def essence(verdict: Evidence) -> Evidence:
    """The verdict without numbers and texts of lines."""
    bare = tuple(replace(problem, lines=()) for problem in verdict.problems)
    return replace(verdict, proof=(), problems=bare, notes=(), lines_read=0)


PREFIXES = st.sampled_from(
    ["", "0: ", "[1,3]<stdout>:", "[rank2]: ", "(Worker pid=3, ip=10.0.0.1) ", "2026-01-02T03:04:05.678Z ", "> ", "| "]
)
COLOURS = st.sampled_from(["{}", "\x1b[36m{}\x1b[0m", "\x1b[1;31m{}", "{}\x1b[0m", "[0m{}"])
ENDS = st.sampled_from(["\n", "\r\n"])
NOISE = st.sampled_from(
    ["", "loss 1.23 step 4", " 50%|#####     | 5/10", "Traceback (most recent call last):", "NCCL", "é\x00"]
)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(LOGS), PREFIXES, COLOURS, ENDS, st.lists(NOISE, max_size=5))
def test_prefixes_colours_and_line_ends(log: list[str], prefix: str, colour: str, end: str, noise: list[str]) -> None:
    """A log and the same log through a launcher and a terminal."""
    dressed = [colour.format(prefix + line) + end for line in log]
    for index, text in enumerate(noise):
        dressed.insert((index * 3) % len(dressed), text + end)
    assert essence(read(dressed)) == essence(read(log))


@settings(max_examples=33, deadline=None)
@given(st.sampled_from(LOGS), st.booleans(), st.sampled_from([1, 3, 40]))
def test_bytes_text_and_blocks_agree(log: list[str], as_bytes: bool, times: int) -> None:
    """Lines as text or bytes, with or without newline, few or many: the same."""
    many = log * times
    plain = read("\n".join(many).encode().splitlines(keepends=True)) if as_bytes else read(many)
    padded = [f"{line}\n" for line in many] + ["x" * 200 + "\n"] * 50 * times
    assert essence(plain) == essence(read(padded))
    assert plain.send.total == (times if plain.gdrdma != "none" else 0)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([IB_ON, SHM, FAILED]), st.integers(0, 10), st.booleans())
def test_glued_lines(log: list[str], at: int, through_json: bool) -> None:
    """Two writers in one line: both messages are read; "0/GDRDMA" is whole even with a neighbour behind it."""
    lines = list(log)
    index = at % (len(lines) - 1)
    if not lines[index].startswith("NCCL version"):
        lines[index : index + 2] = [lines[index] + ("\\n" if through_json else "") + lines[index + 1]]
    got, want = essence(read(lines)), essence(read(log))
    keys = ("inter_node_transport", "intra_node_transport", "gdrdma", "nodes", "send", "receive", "nccl_version")
    assert [getattr(got, key) for key in keys] == [getattr(want, key) for key in keys]


@given(st.integers(0, 7))
def test_a_line_torn_inside_its_tag_is_not_off(cut: int) -> None:
    """ "/GDRDMA" cut anywhere: on where enough is left, never off."""
    neighbour = "n2:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
    verdict = read(
        [f"n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 2[0] [send] via NET/IB/0{'/GDRDMA'[:cut]}{neighbour}\n"]
    )
    assert verdict.inter_node_transport == "IB"
    assert verdict.gdrdma == ("on" if cut >= 3 else "none")
    assert verdict.send == ChannelCount(total=int(cut >= 3), gdrdma=int(cut >= 3))
    assert verdict.torn_lines == int(cut < 3)
    if cut < 3:
        assert [problem.code for problem in verdict.problems] == ["torn_channel_lines"]
        assert evidence.exit_code(verdict) == evidence.NO_EVIDENCE


@given(st.integers(20, 75), st.sampled_from(["", "> ", "3: "]))
def test_a_wrapped_line_is_joined(cut: int, prefix: str) -> None:
    """A terminal or a mail that wraps at any column."""
    line = "n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 2[0] [send] via NET/IB/0/GDRDMA"
    head, tail = line[:cut], line[cut:]
    if "NCCL INFO Channel" not in head:
        return
    verdict = read([f"{prefix}{head}\n", f"{prefix}{tail}\n", "done\n"])
    assert verdict.gdrdma == "on"
    assert verdict.send.total + verdict.undirected.total == 1


def test_names_made_up_by_tearing_are_no_mix() -> None:
    """One torn line in hundreds does not make a second transport."""
    head = "n1:1:2 [0] NCCL INFO"
    lines = [f"{head} Using network IBext", f"{head} Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"]
    lines += [f"{head} Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read"] * 300
    lines += [f"{head} Channel 00/0 : 0[0] -> 2[0] [send] via NET/IBext/0/GDRDMA"] * 300
    lines += [f"{head} Channel 00/0 : 0[0] -> 2[0] [send] via NET/IB/0/GDRDMA"]
    verdict = read(lines)
    assert verdict.inter_node_transport == "IB (plugin IBext)"
    assert verdict.intra_node_transport == "P2P/IPC/read"
    few = read([*lines[:2], *lines[300:304], lines[-1]])
    assert few.inter_node_transport == "mixed IB (plugin IBext) + IB"
    assert few.intra_node_transport == "mixed P2P/IPC/read + P2P/IPC"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(max_size=300), st.sampled_from([line.encode() for line in IB_ON + FAILED])), max_size=20
    )
)
def test_any_bytes_give_a_verdict(lines: list[bytes]) -> None:
    """Whatever the file holds, the reader ends with an answer."""
    verdict = read(lines)
    assert verdict.gdrdma in ("on", "off", "partial", "none")
    assert evidence.exit_code(verdict) in (0, 3, 5)


@settings(max_examples=66, deadline=None)
@given(st.data())
def test_random_cuts_never_turn_on_into_off(data: st.DataObject) -> None:
    """Interleaved writers lose and swap pieces; a log whose every channel is on is never called off."""
    text = "\n".join(IB_ON * 3) + "\n"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    swapped = data.draw(st.permutations(pieces))
    verdict = read("".join(swapped).splitlines(keepends=True))
    assert verdict.gdrdma in ("on", "partial", "none")

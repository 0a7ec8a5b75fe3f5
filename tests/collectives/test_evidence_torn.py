"""What launchers, searches, terminals, collectors and interleaving writers do to a log does not change its verdict."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from evidence_rows import dressed, rows
from hypothesis import given, settings, strategies as st
from rigs.logs import read
from rigs.tables import each_row

from collectives.nccl_log import evidence
from collectives.nccl_log.reader import MAX_LINE_BYTES, Reader
from collectives.nccl_log.transport import ChannelCount, Evidence

IB_ON = Path(__file__).with_name("ib_on.log").read_text(encoding="utf-8").splitlines()
SHM = [*IB_ON[:1], "n1:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"]
FAILED = [
    *IB_ON[:5],
    "n1:10:44 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<33> "
    "with error 12, opcode 0, len 0, vendor err 129 (Recv)",
]


def essence(verdict: Evidence) -> Evidence:
    """The verdict without numbers and texts of lines."""
    bare = tuple(replace(problem, lines=()) for problem in verdict.problems)
    return replace(verdict, proof=(), problems=bare, notes=(), lines_read=0)


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


@given(st.integers(20, 76), st.sampled_from(["", "> ", "3: "]))
def test_a_wrapped_line_is_never_called_off(cut: int, prefix: str) -> None:
    """A terminal or a mail that wraps at any column: the tag on the next line belongs to the channel without one."""
    line = "n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 2[0] [send] via NET/IB/10/GDRDMA"
    verdict = read([f"{prefix}{line[:cut]}\n", f"{prefix}{line[cut:]}\n", "done\n"])
    assert verdict.gdrdma in ("on", "none")


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


HOSTS = ("gpu-a", "gpu-b", "10-0-0-7")
PER_HOST = 10
CRI = "2026-01-02T03:04:05.123456789Z"


def lines_of(host: str) -> list[str]:
    """One node's part of a run of three nodes."""
    return [
        "NCCL version 2.21.5+cuda12.4",
        f"{host}:10:20 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5",
        f"{host}:10:20 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>",
        f"{host}:10:20 [0] NCCL INFO Using network IB",
        f"{host}:10:20 [0] NCCL INFO comm 0x55 rank 0 nRanks 6 nNodes 3 localRanks 2 localRank 0 MNNVL 0",
        f"{host}:10:20 [0] NCCL INFO Channel 00/0 : 5[1] -> 0[0] [receive] via NET/IB/0/GDRDMA",
        f"{host}:11:21 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1(0)/GDRDMA",
        f"{host}:11:21 [1] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [send] via NET/IB/1",
        f"{host}:10:20 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
        f"{host}:11:21 [1] NCCL INFO Connected all rings, use ring PXN 1 GDR 1",
    ]


LOG = [line for host in HOSTS for line in lines_of(host)]


def mark(number: int) -> str:
    """What grep -C puts behind a name or a number: the search found every fourth line."""
    return ":" if number % 4 == 0 else "-"


def torn(line: str, *cuts: int) -> list[str]:
    """An entry in parts, as runtimes write what fills their buffer, with the other stream between them."""
    places = (0, *sorted(cuts), len(line))
    parts = [line[start:end] for start, end in pairwise(places)]
    noise = f"{CRI} stderr P loss 0.1"
    return [row for part in parts[:-1] for row in (f"{CRI} stdout P {part}", noise)] + [f"{CRI} stdout F {parts[-1]}"]


DRESSES: dict[str, Callable[[int, str], str]] = {
    **{name: lambda n, line, form=form: dressed(  # the files are one for each process
        form, n, line, host=HOSTS[n // PER_HOST], mark=mark(n), node=n // PER_HOST,
        file=f"nccl.{HOSTS[n // PER_HOST]}.{10 + n % 2}") for name, form in rows("dresses")},
    "grep -A1 with separators": lambda n, line: f"{n + 1}{':' if n % 2 else '-'}{line}" + "\n--" * (n % 2 == 0),
    "journalctl -o json-pretty": lambda _, line: json.dumps(  # systemd breaks an object over lines
        {"_PID": "1", "MESSAGE": line, "_HOSTNAME": "gpu-a"}, indent="\t", separators=(",", " : ")),
    "CRI, torn": lambda n, line: "\n".join(torn(line, 7 * n % len(line), 11 * n % len(line))),
}  # fmt: skip


def facts(verdict: Evidence) -> tuple[object, ...]:
    """What the log says, without the numbers and texts of its lines."""
    counts = (verdict.send, verdict.receive, verdict.undirected, verdict.transports, verdict.devices)
    said = (verdict.hosts, verdict.nodes, verdict.ranks, verdict.nccl_version, verdict.environment, verdict.hcas)
    return (*counts, *said, verdict.gdrdma, tuple(sorted(problem.code for problem in verdict.problems)))


@each_row("dress", DRESSES)
@each_row("order", [1, -1])
def test_the_same_channels_and_hosts(dress: str, order: int) -> None:
    """Whatever is before the lines, and whether the first is one the search was for."""
    numbered = list(enumerate(LOG))[::order]
    worn = [part + "\n" for n, line in numbered for part in DRESSES[dress](n, line).split("\n")]
    bare = facts(read([line + "\n" for _, line in numbered]))
    assert bare[5] == len(HOSTS)
    assert facts(read(worn)) == bare


def test_a_dash_and_a_number_in_a_hosts_name_are_kept() -> None:
    """Pods are numbered as a search numbers lines: without a line that matched they are hosts."""
    pods = [f"train-workers-{job}-{pod}" for job in range(4) for pod in range(4)]
    assert read([line for pod in pods for line in lines_of(pod)]).hosts == 16
    found = [f"{n}{mark(n)}{line}" for n, line in enumerate(line for pod in pods for line in lines_of(pod))]
    assert read(found).hosts == 16


@each_row("size", [64, 8192])
def test_a_runtime_that_cuts_wherever_its_buffer_ends(size: int) -> None:
    """Every buffer's last line is cut anywhere: in a name, in a tag, before the end of the line itself."""
    text = "".join(f"{line}\n" for _ in range(40) for line in LOG)
    rows = []
    for start in range(0, len(text), size):
        for part in text[start : start + size].splitlines(keepends=True):
            rows.append(f"{CRI} stdout {'F' if part.endswith(chr(10)) else 'P'} {part.rstrip(chr(10))}\n")
    assert facts(read(rows)) == facts(read(text.splitlines(keepends=True)))


def test_what_an_entry_without_its_end_holds_is_read() -> None:
    """The log was taken while a line was being written; a channel at its very end may still get its tag."""
    channel = "gpu-a:11:21 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1"
    rows = [f"{CRI} stdout P {part}\n" for part in (channel[:40], channel[40:])]
    cut = evidence.read_files([io.BytesIO(channel.encode())])
    assert facts(read(rows)) == facts(cut) != facts(read([channel, "the next line"]))
    assert read([*rows, f"{CRI} stdout F /GDRDMA\n"]).send.gdrdma == 1


def test_a_line_without_end_is_held_no_longer_than_it_is_read() -> None:
    """A progress bar of megabytes, cut by the runtime: messages before, within and behind it are all there."""
    channel = "gpu-a:11:21 [1] NCCL INFO Channel 0%d/0 : 1[1] -> 2[0] [send] via NET/IB/1/GDRDMA"
    bar = "".join(f"\r{n}%|{'#' * 90}|" for n in range(160))
    for line in (bar, "#" * 16384):
        rows = [f"{CRI} stdout P {channel % 1}\r{line}"]
        rows += [f"{CRI} stdout P {line}"] * 200
        rows += [f"{CRI} stdout P {line}\r{channel % 2}", f"{CRI} stdout F \r{channel % 3}"]
        reader = Reader()
        held = 0
        for row in rows:
            reader.feed(row.encode())
            held = max(held, sum(map(len, reader.held.values())))
        assert held <= MAX_LINE_BYTES
        assert read(f"{row}\n" for row in rows).send.gdrdma == 3


def test_proof_stands_in_the_line_that_completes_it() -> None:
    """Lines are counted as they are in the file."""
    rows = [f"{row}\n" for line in lines_of("gpu-a") for row in torn(line, 30)]
    numbers = {proof.line for proof in read(rows).proof}
    assert numbers
    assert all("stdout F" in rows[number - 1] for number in numbers)

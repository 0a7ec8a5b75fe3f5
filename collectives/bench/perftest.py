"""RDMA write bandwidth between two hosts, measured with perftest's `ib_write_bw`: no torch, no NCCL, host memory.

Each port of one host writes to the port at the same position in the other host's list, one after another, as the rails
of a cluster are connected. Surface: ib_write_bw(1) of Debian's package perftest; TCP connection from port 18515 on.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collectives.bench import processes
from collectives.bench.results import RdmaResult, RdmaWrite

PROGRAM = "ib_write_bw"
TCP_PORT = 18515  # perftest's default; each further port of a host uses the next number
MESSAGE_BYTES, DEPTH = 65536, 64
RUN_SECONDS, MARGIN_SECONDS = 6, 1  # writes count after the first margin and before the last one
OVERRUN_SECONDS = 30.0  # in addition to RUN_SECONDS, to connect, register memory and disconnect
WAIT_SECONDS = 120.0  # for the other side to start
LATER_SECONDS = 5.0  # for further ports of the other side, which listens on all of them at once
AGAIN_SECONDS = 0.5
_ROW = re.compile(rf"^\s*{MESSAGE_BYTES}\s+(\d+)\s", re.MULTILINE)
_MTU = re.compile(r"\bMtu\s*:\s*(\d+)\[B\]")
_NOT_YET = "Couldn't connect to"
_HEADER = re.compile(r"^[-*#\s]*$|\s:\s|address:|GID:|^\s*#bytes|BW Test|Waiting for client")


class MissingError(RuntimeError):
    """perftest is not installed on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One RDMA port of this host."""

    device: str  # "mlx5_0"
    port: int = 1
    gid_index: int | None = None  # for RoCE

    def __str__(self) -> str:
        return f"{self.device}:{self.port}"


def require_program() -> None:
    """Raise MissingError, which names the package, if perftest is not installed."""
    if shutil.which(PROGRAM) is None:
        raise MissingError(
            f"{PROGRAM} is not installed on {socket.gethostname()}: it comes with the package perftest "
            "(apt-get install perftest, dnf install perftest), which both hosts need"
        )


def build_command(port: Port, tcp_port: int, peer: str | None = None) -> list[str]:
    """Return the command of one side; the side with a `peer` writes.

    -Q 1: a completion for each write. The default counts a hundred at a time, which is coarse on a slow link. -u 18: a
    packet is retransmitted after 1 s, similar to NCCL. The default of 67 ms causes a storm if there is a queue on the
    path.
    """
    command = [PROGRAM, "-d", port.device, "-i", str(port.port), "-p", str(tcp_port), "-F"]
    command += f"-s {MESSAGE_BYTES} -t {DEPTH} -Q 1 -u 18 -D {RUN_SECONDS} -f {MARGIN_SECONDS}".split()
    return [*command, *(("-x", str(port.gid_index)) if port.gid_index is not None else ()), *((peer,) if peer else ())]


def write(ports: Sequence[Port], peer: str, *, wait_seconds: float, stop: threading.Event) -> RdmaResult:
    """Write from each port to the listening peer, and measure.

    The two sides can start in any order: the connection of the first port is retried until it succeeds.
    """
    began, clock = time.time(), time.monotonic()
    writes: list[RdmaWrite] = []
    problems: list[str] = []
    until = clock + wait_seconds
    with processes.run_folder() as folder:
        for place, port in enumerate(ports):
            if stop.is_set():
                problems.append(f"{port}: not measured: stopped")
                continue
            text, code = _run_until_connected(port, place, peer, folder / "output", until, stop)
            result = _parse_output(port, text) if code == 0 else None
            if result is not None:
                writes.append(result)
                until = time.monotonic() + LATER_SECONDS
            else:
                problems.append(f"{port} to {peer}:{TCP_PORT + place}: {_describe_output(text, code)}")
    return RdmaResult(
        host=socket.gethostname(), peer=peer, writes=tuple(writes), started_at_seconds=began,
        seconds=time.monotonic() - clock, problems=tuple(problems), stopped_by="its caller" if stop.is_set() else None,
    )  # fmt: skip


def listen(
    ports: Sequence[Port], *, wait_seconds: float, stop: threading.Event
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Serve as the target of one write per port; return the ports written to and the errors.

    Ends when every port has been written to, or when no host has connected for `wait_seconds`.
    """
    served: list[str] = []
    problems: list[str] = []
    until = time.monotonic() + wait_seconds
    with processes.run_folder() as folder:
        trees = [_start(build_command(port, TCP_PORT + place), folder / str(place)) for place, port in enumerate(ports)]
        try:
            for place, (port, tree) in enumerate(zip(ports, trees, strict=True)):  # in the order of the writes
                outcome = tree.wait(until, stop)
                if outcome == "stopped":
                    problems.append(f"{port}: stopped")
                elif outcome:
                    problems.append(f"{port}: no host wrote to it within {wait_seconds:g} s")
                elif code := tree.process.returncode:
                    output = (folder / str(place)).read_text(errors="replace")
                    problems.append(f"{port}: {_describe_output(output, code)}")
                else:
                    served.append(str(port))
                    until = time.monotonic() + wait_seconds
        finally:
            for tree in trees:
                tree.end()
    return tuple(served), tuple(problems)


def _start(command: Sequence[str], output: Path) -> processes.Tree:
    with output.open("wb") as stream:
        return processes.Tree(command, os.environ, stream)


def _run_until_connected(
    port: Port, place: int, peer: str, output: Path, until: float, stop: threading.Event
) -> tuple[str, int | None]:
    """Return the output of the run, and its exit code: None if it was terminated here."""
    while True:
        tree = _start(build_command(port, TCP_PORT + place, peer), output)
        try:
            outcome = tree.wait(time.monotonic() + RUN_SECONDS + OVERRUN_SECONDS, stop)
        finally:
            tree.end()
        code = None if outcome else tree.process.returncode
        text = output.read_text(errors="replace")
        if code in (0, None) or _NOT_YET not in text or time.monotonic() > until or stop.wait(AGAIN_SECONDS):
            return text, code


def _parse_output(port: Port, text: str) -> RdmaWrite | None:
    """Return the number of completed writes that perftest reports; None if there is none.

    Its MB/s are not used: they depend on an estimated CPU frequency, which is wrong on an emulated CPU under load.
    """
    row, mtu = _ROW.search(text), _MTU.search(text)
    if row is None:
        return None
    writes, seconds = int(row[1]), RUN_SECONDS - 2.0 * MARGIN_SECONDS
    return RdmaWrite(
        port=str(port), bytes=MESSAGE_BYTES, writes=writes, seconds=seconds,
        bytes_per_second=writes * MESSAGE_BYTES / seconds, mtu_bytes=int(mtu[1]) if mtu else None,
    )  # fmt: skip


def _describe_output(text: str, code: int | None) -> str:
    """Return the output of a run without its table."""
    if code is None:
        return f"{PROGRAM} did not end within {RUN_SECONDS + OVERRUN_SECONDS:g} s"
    lines = [line.strip() for line in text.splitlines() if not _HEADER.search(line)]
    return f"{'; '.join(lines[-3:]) or 'no word'} ({PROGRAM} ended with {code})"

"""Bandwidth of RDMA writes between two hosts, without torch and NCCL: does the RDMA network itself carry data?

    python -m collectives.bench.rdma_write --serve 0.0.0.0:18515
    python -m collectives.bench.rdma_write --connect node0:18515

The two sides agree over one TCP connection, one JSON object a line; data goes through an RC queue pair with `depth`
writes in flight, timed from the first post to the last completion, as perftest's ib_write_bw does. After every round
the target compares a digest of its memory with the source's fresh random content.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from collectives.bench.interval import spread_ratio
from collectives.bench.rdma_queue import Endpoint, Queue, RdmaError

PROTOCOL = 1
LINE_BYTES = 1 << 14
BUFFER_BYTES_MAX = 1 << 30
WRITES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is written, how often."""

    bytes: int = 65536  # of one write
    depth: int = 16  # writes in flight
    rounds: int = 10
    round_seconds: float = 0.5  # aimed at: the number of writes follows from a first, untimed round

    def __post_init__(self) -> None:
        limits = {"bytes": BUFFER_BYTES_MAX, "depth": 1024, "rounds": 1000, "round_seconds": 60}
        for name, most in limits.items():
            value = getattr(self, name)
            least, kinds = (0, (int, float)) if name == "round_seconds" else (1, (int,))
            if type(value) not in kinds or not least <= value <= most:
                raise ValueError(f"{name}={value!r} is not allowed; allowed: {least} to {most}")
        if self.bytes * self.depth > BUFFER_BYTES_MAX:
            raise ValueError(
                f"bytes={self.bytes} x depth={self.depth} is not allowed; allowed: up to {BUFFER_BYTES_MAX} together"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """Which way out of this host."""

    device: str | None = None  # the only one there is
    port: int = 1
    gid_index: int | None = None  # the first IPv4 entry of RoCE v2


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaWrite:
    """What a run measured at the source."""

    host: str
    peer: str
    device: str
    port: int
    gid_index: int
    gid: str
    mtu_bytes: int
    bytes: int
    depth: int
    writes: int  # in each round
    round_seconds: tuple[float, ...]
    bytes_per_second: float  # median round
    spread_ratio: float | None  # half width of the 95 % interval of the median over the median
    verified: bool  # the target held the source's content after every round
    schema_version: int = PROTOCOL

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


class Line:
    """JSON objects over a TCP connection, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")

    def say(self, **words: Any) -> None:
        """Send one object."""
        self._connection.sendall(json.dumps(words).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """The other side's next object; its error is raised here."""
        try:
            line = self._reader.readline(LINE_BYTES)
        except OSError as error:
            raise RdmaError(f"the other side does not answer: {error}") from error
        if not line.endswith(b"\n"):
            raise RdmaError("the other side ended the connection")
        try:
            words = json.loads(line)
        except ValueError as error:
            raise RdmaError("the other side speaks another protocol") from error
        if not isinstance(words, dict):
            raise RdmaError("the other side speaks another protocol")
        if "error" in words:
            raise RdmaError(f"the other side: {str(words['error'])[:2000]}")
        return words


def connect(
    host: str, tcp_port: int, plan: Plan | None = None, via: Port | None = None, *, timeout_seconds: float = 60.0
) -> RdmaWrite:
    """Write to the host that serves, and measure."""
    plan, via = plan or Plan(), via or Port()
    with _dial(host, tcp_port, timeout_seconds) as connection:
        line = Line(connection)
        with _Told(line), _queue(plan, via) as queue:
            line.say(protocol=PROTOCOL, bytes=plan.bytes, depth=plan.depth, endpoint=asdict(queue.here))
            there = _endpoint(line.hear())
            mtu_bytes = queue.connect(there)
            line.say(connected=True)
            line.hear()
            verified, seconds, writes = _rounds(queue, there, plan, line, timeout_seconds)
            line.say(end=True)
    middle = median(seconds)
    return RdmaWrite(
        host=socket.gethostname(),
        peer=host,
        device=queue.device,
        port=queue.port,
        gid_index=queue.gid_index,
        gid=queue.here.gid,
        mtu_bytes=mtu_bytes,
        bytes=plan.bytes,
        depth=plan.depth,
        writes=writes,
        round_seconds=seconds,
        bytes_per_second=writes * plan.bytes / middle,
        spread_ratio=spread_ratio(seconds),
        verified=verified,
    )


def _rounds(
    queue: Queue, there: Endpoint, plan: Plan, line: Line, timeout_seconds: float
) -> tuple[bool, tuple[float, ...], int]:
    requests = [queue.request(slot * plan.bytes, plan.bytes, there) for slot in range(plan.depth)]
    last = queue.request(0, plan.bytes, there, immediate=True)
    verified, seconds, writes = True, [], 2 * plan.depth
    for number in range(plan.rounds + 1):
        content = os.urandom(plan.bytes * plan.depth)
        queue.fill(content)
        spent = _write(queue, requests, writes, timeout_seconds)
        # Its completion at the target means that all earlier writes are in the target's memory.
        queue.post(last)
        queue.wait(1, timeout_seconds)
        line.say(digest=hashlib.sha256(content).hexdigest())
        verified &= line.hear().get("same") is True
        if number:
            seconds.append(spent)
        else:
            writes = min(WRITES_MAX, max(writes, round(writes * plan.round_seconds / spent)))
    return verified, tuple(seconds), writes


def _write(queue: Queue, requests: Sequence[Any], writes: int, timeout_seconds: float) -> float:
    """Seconds from the first post to the last completion."""
    depth = len(requests)
    begun = time.perf_counter()
    posted = done = 0
    progress = begun
    while done < writes:
        while posted < writes and posted - done < depth:
            queue.post(requests[posted % depth])
            posted += 1
        ended = queue.completed(depth)
        now = time.perf_counter()
        if ended:
            done, progress = done + ended, now
        elif now - progress > timeout_seconds:
            raise RdmaError(f"no write ended within {timeout_seconds:.0f} s, {writes - done} are left")
    return time.perf_counter() - begun


def serve(listener: socket.socket, via: Port | None = None, *, timeout_seconds: float = 60.0) -> int:
    """Be the target of one run; gives the number of rounds whose content was right."""
    listener.settimeout(timeout_seconds)
    try:
        connection, _ = listener.accept()
    except TimeoutError as error:
        raise RdmaError(f"nobody connected within {timeout_seconds:.0f} s") from error
    with connection:
        connection.settimeout(timeout_seconds)
        line = Line(connection)
        with _Told(line):
            asked = line.hear()
            if asked.get("protocol") != PROTOCOL:
                raise RdmaError(f"protocol {asked.get('protocol')!r} is not allowed; allowed: {PROTOCOL}")
            try:
                plan = Plan(bytes=asked["bytes"], depth=asked["depth"])
            except (KeyError, TypeError, ValueError) as error:
                raise RdmaError(f"the other side asks for what is not allowed: {error}") from error
            with _queue(plan, via or Port()) as queue:
                return _target(queue, _endpoint(asked), line, timeout_seconds)


def _target(queue: Queue, there: Endpoint, line: Line, timeout_seconds: float) -> int:
    queue.connect(there)
    queue.post_receive()
    line.say(endpoint=asdict(queue.here))
    line.hear()
    line.say(connected=True)
    right = 0
    while not (words := line.hear()).get("end"):
        queue.wait(1, timeout_seconds)
        queue.post_receive()
        same = hashlib.sha256(queue.content()).hexdigest() == words.get("digest")
        right += same
        line.say(same=same)
    return right


class _Told:
    """Lets the other side know of an error here before it is raised."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RdmaError):
            try:
                self._line.say(error=f"{socket.gethostname()}: {error}")
            except OSError:
                return  # it is gone: nobody to tell


def _queue(plan: Plan, via: Port) -> Queue:
    return Queue(
        device=via.device, port=via.port, gid_index=via.gid_index, length=plan.bytes * plan.depth, depth=plan.depth
    )


def _endpoint(words: dict[str, Any]) -> Endpoint:
    try:
        return Endpoint(**words["endpoint"])
    except (KeyError, TypeError, ValueError) as error:
        raise RdmaError(f"the other side's endpoint is not valid: {error}") from error


def _dial(host: str, tcp_port: int, timeout_seconds: float) -> socket.socket:
    """Both sides are started at about the same time: try until the time is over."""
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            connection = socket.create_connection((host, tcp_port), timeout=timeout_seconds)
        except OSError as error:
            if time.monotonic() > end:
                raise RdmaError(f"--connect {host}:{tcp_port}: {error}") from error
            time.sleep(0.1)
        else:
            return connection


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: HOST:PORT, port 1 to 65535")
    return host.strip("[]"), int(port)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m collectives.bench.rdma_write", description=str(__doc__).split("\n")[0]
    )
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--serve", type=_address, metavar="HOST:PORT", help="be the target of one run")
    role.add_argument("--connect", type=_address, metavar="HOST:PORT", help="write to the host that serves")
    parser.add_argument("--device", help="RDMA device (default: the only one there is)")
    parser.add_argument("--port", type=int, default=1, help="port of the device (default: %(default)s)")
    parser.add_argument("--gid-index", type=int, help="default: the first IPv4 entry of RoCE v2")
    parser.add_argument("--bytes", type=int, default=65536, help="of one write (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=16, help="writes in flight (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default: %(default)s)")
    parser.add_argument("--round-seconds", type=float, default=0.5, help="aimed at (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds without progress (default: %(default)s)")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run one side; the connecting side prints the result as a line of JSON."""
    asked = _arguments(words)
    via = Port(device=asked.device, port=asked.port, gid_index=asked.gid_index)
    try:
        if asked.serve:
            with socket.create_server(asked.serve) as listener:
                right = serve(listener, via, timeout_seconds=asked.timeout)
            sys.stdout.write(json.dumps({"rounds_verified": right}) + "\n")
            return 0
        plan = Plan(bytes=asked.bytes, depth=asked.depth, rounds=asked.rounds, round_seconds=asked.round_seconds)
        host, tcp_port = asked.connect
        result = connect(host, tcp_port, plan, via, timeout_seconds=asked.timeout)
    except (RdmaError, ValueError, OSError) as error:
        sys.stderr.write(f"rdma_write: {error}\n")
        return 1
    sys.stdout.write(result.to_json() + "\n")
    return 0 if result.verified else 1


if __name__ == "__main__":
    raise SystemExit(main())

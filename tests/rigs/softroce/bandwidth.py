"""Our RDMA write loop and ib_write_bw in turns, inside two guests: prints a JSON list of [ours, theirs] in bytes/s.

The guests are emulated on a machine that may have other work, so both are timed over stretches of the same length, one
after the other, until the interval of the ratio's median is tight or the time is over.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time

from collectives.bench.interval import spread_ratio
from collectives.bench.rdma_write import Plan, connect, serve

SIZE, DEPTH = 1 << 20, 4  # large, so that the emulated wire is the bound and not Python's share of a write
SECONDS, ROUNDS = 2, 4
PAIRS_LEAST, PAIRS_MOST = 6, 16
TIGHT = 0.06
BUDGET_SECONDS = 60.0
WAIT_SECONDS = 240.0
TCP_PORT = 18600
END, OURS, THEIRS = range(3)


def perftest() -> list[str]:
    """The command of one run, without the peer that makes it the source.

    -Q 1: a completion for each write, as ours; else it waits for a whole depth before it posts again.
    """
    return ["ib_write_bw", "-d", "rxe0", "-x", "1", "-F", *f"-s {SIZE} -t {DEPTH} -Q 1 -D {SECONDS}".split()]


def order(peer: str, what: int) -> None:
    """Tell the target what to be next."""
    for _ in range(int(WAIT_SECONDS / 0.2)):
        try:
            line = socket.create_connection((peer, TCP_PORT + 1), timeout=WAIT_SECONDS)
        except ConnectionRefusedError:
            time.sleep(0.2)
            continue
        with line:
            line.sendall(b"%d\n" % what)
            line.recv(1)
        return
    raise SystemExit("the target does not answer")


def ours(peer: str) -> float:
    """Bytes per second over all rounds, averaged as perftest does."""
    order(peer, OURS)
    plan = Plan(bytes=SIZE, depth=DEPTH, rounds=ROUNDS, round_seconds=SECONDS / ROUNDS)
    result = connect(peer, TCP_PORT, plan, timeout_seconds=WAIT_SECONDS)
    if not result.verified:
        raise SystemExit("the target did not hold what was written")
    return result.writes * SIZE * ROUNDS / sum(result.round_seconds)


def theirs(peer: str) -> float:
    """Writes that ib_write_bw completed in its time, as it reports them.

    Not its MB/s: those come from a CPU frequency that it estimates, far off (0 at times) on an emulated, busy CPU.
    """
    order(peer, THEIRS)
    for _ in range(100):
        ended = subprocess.run([*perftest(), peer], capture_output=True, text=True, check=False, timeout=WAIT_SECONDS)
        row = re.search(rf"^\s*{SIZE}\s+(\d+)\s", ended.stdout, re.MULTILINE)
        if row:
            return int(row[1]) * SIZE / SECONDS
        time.sleep(0.1)  # it does not wait for its target, and says so with an error
    raise SystemExit(f"ib_write_bw: {ended.stdout} {ended.stderr}")


def source(peer: str) -> list[tuple[float, float]]:
    """Pairs of bandwidths."""
    found: list[tuple[float, float]] = []
    end = time.monotonic() + BUDGET_SECONDS
    while len(found) < PAIRS_LEAST or (len(found) < PAIRS_MOST and time.monotonic() < end):
        found.append((ours(peer), theirs(peer)))
        spread = spread_ratio([a / b for a, b in found])
        if spread is not None and spread <= TIGHT:
            break
    order(peer, END)
    return found


def target() -> None:
    """The other half."""
    with socket.create_server(("", TCP_PORT)) as listener, socket.create_server(("", TCP_PORT + 1)) as orders:
        orders.settimeout(WAIT_SECONDS)
        while True:
            connection, _address = orders.accept()
            with connection:
                what = int(connection.makefile().readline())
                started = subprocess.Popen(perftest(), stdout=subprocess.DEVNULL) if what == THEIRS else None
                connection.sendall(b".")
            if started:
                started.wait(WAIT_SECONDS)
            elif what == OURS:
                serve(listener, timeout_seconds=WAIT_SECONDS)
            else:
                return


def main() -> None:
    """Each guest its half."""
    if os.environ["RANK"] == "0":
        target()
    else:
        print(json.dumps(source(os.environ["MANAGEMENT_PEER"])))


if __name__ == "__main__":
    main()

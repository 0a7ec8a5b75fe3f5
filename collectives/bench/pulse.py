"""A rank's sign of life: events as JSON lines in a file, and a beat that others can see in the job's store.

A rank whose beat stops is dead, stopped or cut off. A rank that beats and has not arrived where the others
wait is the one they wait for. The thread here tells both apart while the main thread sits in a collective.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import stat
import struct
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from collectives.bench.results import Carried

BEAT_SECONDS = 0.5
MISSED_BEATS = 6  # of a rank that gets no turn on a busy host; silence_seconds, not this, ends a run
CHECKS_PER_SECOND = 64  # of beats
CONNECT_SECONDS = 20.0  # torch also asks for names of addresses, which a silent name server makes slow


class Journal:
    """The file of a rank's events; lines are whole, also from two threads."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = (directory / f"rank-{rank}.jsonl").open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, event: str, **fields: object) -> None:
        """Append one event."""
        line = json.dumps({"event": event, "at_seconds": time.time(), **fields}) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()


class Pulse:
    """Beats in the background, and sees whose beat has stopped."""

    def __init__(self, journal: Journal, rank: int, world: int, host: str, reports: bool) -> None:
        self.arrived = 0  # meetings this rank has come to
        self.where = "joining"
        self._journal, self._rank, self._world, self._host = journal, rank, world, host
        self._reports = reports  # one rank of each host checks all others
        self._seen: dict[int, tuple[str, float]] = {}
        self._next_check = 0.0
        # One rank of each host reads the beats of all ranks; with many ranks less often, because one store serves all.
        self._check_seconds = 2 * BEAT_SECONDS * max(1.0, world / CHECKS_PER_SECOND)
        self._answered_at: float | None = None  # the store, last

    def start(self) -> None:
        """Start the threads; SIGTERM is blocked in all others, so that one can leave a last word."""
        threading.Thread(target=self._last_word, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        threading.Thread(target=self._show, daemon=True).start()

    def arrive(self, where: str) -> None:
        """Note that this rank has come to the next meeting."""
        self.where = where
        self.arrived += 1

    def _last_word(self) -> None:
        """Die of SIGTERM with a word: a rank that leaves none was killed, and is the one to name."""
        signal.sigwait({signal.SIGTERM})
        self._journal.write("terminated", arrived=self.arrived, where=self.where)
        os._exit(128 + signal.SIGTERM)

    def _beat(self) -> None:
        """Tell the parent, in the file, also when the store does not answer."""
        while True:
            silent = None if self._answered_at is None else round(time.monotonic() - self._answered_at, 1)
            self._journal.write("beat", arrived=self.arrived, where=self.where, store_silent_seconds=silent,
                                moved_bytes=sum(moved(store_port()).values()))  # fmt: skip
            time.sleep(BEAT_SECONDS)

    def _show(self) -> None:
        """Tell the other hosts, in the store; a store behind a cut link keeps this thread waiting."""
        store: Any = None
        while True:
            try:
                store = store or _connect()
                store.set(
                    f"topoflight/beat/{self._rank}", f"{time.monotonic()}|{self.arrived}|{self._host}|{self.where}"
                )
                if self._reports:
                    self._check_beats(store)
                else:
                    store.check([f"topoflight/beat/{self._rank}"])  # asked only to know that the store answers
                self._answered_at = time.monotonic()
            except Exception:  # noqa: BLE001 - torch raises its own kinds; _beat reports the silence
                store = None
            time.sleep(BEAT_SECONDS)

    def _check_beats(self, store: Any) -> None:
        """Journal which ranks have stopped beating and which are behind, if it is time for that."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + self._check_seconds
        view = [self._read_beat(store, other, now) for other in range(self._world)]
        came = [row["arrived"] for row in view]
        silent = [row for row in view if row["silent_seconds"] > max(MISSED_BEATS * BEAT_SECONDS, self._check_seconds)]
        behind = [row for row in view if row["arrived"] < max(came)]
        self._journal.write("view", silent=silent[:16], behind=behind[:16])

    def _read_beat(self, store: Any, other: int, now: float) -> dict[str, Any]:
        key = f"topoflight/beat/{other}"
        text = store.get(key).decode() if store.check([key]) else ""
        before, since = self._seen.get(other, ("", now))
        if text != before or other not in self._seen:
            since = now
        self._seen[other] = (text, since)
        _, arrived, host, where = text.split("|", 3) if text else ("", "-1", "", "joining")
        return {
            "rank": other,
            "host": host,
            "arrived": int(arrived),
            "where": where,
            "silent_seconds": round(now - since, 1),
        }


def store_port() -> int:
    """Where the job's store listens; 0 where no launcher said."""
    return int(os.environ.get("MASTER_PORT") or 0)


def block_sigterm() -> None:
    """Keep SIGTERM for the thread that waits for it; to be called before any other thread is started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _connect() -> Any:
    """Open a second connection to the launcher's store: the first one blocks while the job joins."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    long = timedelta(seconds=CONNECT_SECONDS)
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=long)
    store.set_timeout(timedelta(seconds=MISSED_BEATS * BEAT_SECONDS))
    return store


# What this process's TCP connections have moved, and over which interfaces: as the kernel counts it.
#
# Surface: getsockopt(2) TCP_INFO on the process's own sockets (struct tcp_info of include/uapi/linux/tcp.h), found in
# /proc/self/fd; the host's interfaces by psutil. No privilege, no other process's traffic.

_ACKED, _RECEIVED = 120, 128  # offsets of tcpi_bytes_acked and tcpi_bytes_received, both __u64, since Linux 4.1
_INFO_BYTES = 136


def moved(store_port: int) -> dict[str, int]:
    """Bytes by own address, of all connections but those of the job's store, which tells of life and not of work."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, no Path objects
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, no TCP, not connected
            number = int(name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                own, other = one.getsockname(), one.getpeername()
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if store_port in (own[1], other[1]) or len(info) < _INFO_BYTES:
                continue
            (acked,), (received,) = (struct.unpack_from("=Q", info, offset) for offset in (_ACKED, _RECEIVED))
            address = _plain(own[0])
            found[address] = found.get(address, 0) + acked + received
    return found


def carried(rank: int, store_port: int) -> list[Carried]:
    """What this rank moved, with the interfaces that have the addresses, most first."""
    import psutil

    named: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                named.setdefault(_plain(one.address), name)
    counts = sorted(moved(store_port).items(), key=lambda item: -item[1])
    return [
        Carried(rank=rank, interface=named.get(address, ""), address=address, bytes=count)
        for address, count in counts
        if count
    ]


def _plain(address: str) -> str:
    """Without a zone, and an IPv4 address as such where a socket of both kinds holds it."""
    read = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(read, "ipv4_mapped", None) or read)

"""A rank's sign of life: events as JSON lines in a file of its host, a beat among them.

A rank that beats and has not arrived where the others wait is the one they wait for. The thread here tells both apart
while the main thread sits in a collective.
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
from pathlib import Path

from collectives.bench.results import Carried

BEAT_SECONDS = 0.5


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
    """Beats in the background."""

    def __init__(self, journal: Journal) -> None:
        self.arrived = 0  # meetings this rank has come to
        self.where = "joining"
        self._journal = journal

    def start(self) -> None:
        """Start the threads; SIGTERM is blocked in all others, so that one can leave a last word."""
        threading.Thread(target=self._last_word, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

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
        """Tell the parent, in the file."""
        while True:
            bytes_moved = sum(moved(store_port()).values())
            self._journal.write("beat", arrived=self.arrived, where=self.where, moved_bytes=bytes_moved)
            time.sleep(BEAT_SECONDS)


def store_port() -> int:
    """Where the job's store listens; 0 where no launcher said."""
    return int(os.environ.get("MASTER_PORT") or 0)


def block_sigterm() -> None:
    """Keep SIGTERM for the thread that waits for it; to be called before any other thread is started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


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

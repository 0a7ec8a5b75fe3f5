"""A rank's heartbeat: events as JSON lines in a file on its host.

If a rank sends heartbeats but has not arrived at a synchronization point, the others wait for it. The thread in this
module reports both while the main thread is blocked in a collective.
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
    """The file of a rank's events; lines are written whole, also from two threads."""

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
    """Sends heartbeats in the background."""

    def __init__(self, journal: Journal) -> None:
        self.arrived = 0  # synchronization points that this rank has reached
        self.where = "joining"
        self._journal = journal

    def start(self) -> None:
        """Start the threads; SIGTERM is blocked in all others, so that one thread can write a last event."""
        threading.Thread(target=self._last_word, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def arrive(self, where: str) -> None:
        """Record that this rank has reached the next synchronization point."""
        self.where = where
        self.arrived += 1

    def _last_word(self) -> None:
        """Write an event and exit on SIGTERM; a rank without this event was killed and is the one to report."""
        signal.sigwait({signal.SIGTERM})
        self._journal.write("terminated", arrived=self.arrived, where=self.where)
        os._exit(128 + signal.SIGTERM)

    def _beat(self) -> None:
        """Write a heartbeat to the file that the parent reads."""
        while True:
            bytes_moved = sum(moved(store_port()).values())
            self._journal.write("beat", arrived=self.arrived, where=self.where, moved_bytes=bytes_moved)
            time.sleep(BEAT_SECONDS)


def store_port() -> int:
    """Return the port of the job's TCPStore; 0 if no launcher set it."""
    return int(os.environ.get("MASTER_PORT") or 0)


def block_sigterm() -> None:
    """Block SIGTERM in all threads except the one that waits for it; call before any other thread is started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


# Bytes moved by this process's TCP connections, and over which interfaces, as counted by the kernel.
#
# Surface: getsockopt(2) TCP_INFO on the process's own sockets (struct tcp_info of include/uapi/linux/tcp.h), found in
# /proc/self/fd; the host's interfaces through psutil. It needs no privileges and sees no traffic of other processes.

_ACKED, _RECEIVED = 120, 128  # offsets of tcpi_bytes_acked and tcpi_bytes_received, both __u64, since Linux 4.1
_INFO_BYTES = 136


def moved(store_port: int) -> dict[str, int]:
    """Return bytes by local address for all connections except those of the job's store, which carry heartbeats."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, no Path objects
        with contextlib.suppress(OSError, ValueError):  # closed in the meantime, not TCP, or not connected
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
    """Return what this rank moved, with the interfaces that have the addresses, largest first."""
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
    """Remove the zone, and convert an IPv4-mapped address of a dual-stack socket to IPv4."""
    read = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(read, "ipv4_mapped", None) or read)

"""A rank's heartbeat: events as JSON lines in a file on its host.

If a rank sends heartbeats but has not arrived at a synchronization point, the others wait for it. The thread in this
module reports both while the main thread is blocked in a collective. A rank that is stopped sends no heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import threading
import time
from pathlib import Path

BEAT_SECONDS = 0.5


class Journal:
    """The file of a rank's events; lines are written whole, also from two threads."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.arrived = 0  # synchronization points that this rank has reached
        self.where = "joining"
        self._file = (directory / f"rank-{rank}.jsonl").open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, event: str, **fields: object) -> None:
        """Append one event."""
        place = {"at_seconds": time.time(), "arrived": self.arrived, "where": self.where}
        line = json.dumps({"event": event, **place, **fields}) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def arrive(self, phase: str) -> None:
        """Record that this rank has reached the next synchronization point."""
        self.where = phase
        self.arrived += 1

    def beat(self) -> None:
        """Write heartbeats without end; runs in a separate thread."""
        store_port = int(os.environ.get("MASTER_PORT") or 0)
        while True:
            self.write("beat", moved_bytes=count_moved_bytes(store_port))
            time.sleep(BEAT_SECONDS)


# Bytes moved by this process's TCP connections, as counted by the kernel.
#
# Surface: getsockopt(2) TCP_INFO on the process's own sockets (struct tcp_info of include/uapi/linux/tcp.h), found in
# /proc/self/fd. It needs no privileges and sees no traffic of other processes.

_ACKED, _RECEIVED = 120, 128  # offsets of tcpi_bytes_acked and tcpi_bytes_received, both __u64, since Linux 4.1
_INFO_BYTES = 136


def count_moved_bytes(store_port: int) -> int:
    """Return the bytes of all connections except those to the job's store; `store_port` is 0 if there is none."""
    total = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, no Path objects
        with contextlib.suppress(OSError, ValueError):  # closed in the meantime, not TCP, or not connected
            number = int(name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ports = connection.getsockname()[1], connection.getpeername()[1]
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if store_port not in ports and len(info) >= _INFO_BYTES:
                total += sum(struct.unpack_from("=Q", info, offset)[0] for offset in (_ACKED, _RECEIVED))
    return total

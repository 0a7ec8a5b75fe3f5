"""What this process's TCP connections have moved, and over which interfaces: as the kernel counts it.

Surface: getsockopt(2) TCP_INFO on the process's own sockets (struct tcp_info of include/uapi/linux/tcp.h), found in
/proc/self/fd; the host's interfaces by psutil. No privilege, no other process's traffic.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
from typing import NamedTuple

_ACKED, _RECEIVED = 120, 128  # offsets of tcpi_bytes_acked and tcpi_bytes_received, both __u64, since Linux 4.1
_INFO_BYTES = 136


class Carried(NamedTuple):
    """Bytes over one own address: sent and acknowledged, and received."""

    address: str
    interface: str  # "" where no interface has the address now
    bytes: int


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


def carried(store_port: int) -> list[Carried]:
    """What was moved, with the interfaces that have the addresses, most first."""
    import psutil

    named: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                named.setdefault(_plain(one.address), name)
    rows = [Carried(address, named.get(address, ""), count) for address, count in moved(store_port).items() if count]
    return sorted(rows, key=lambda row: -row.bytes)


def _plain(address: str) -> str:
    """Without a zone, and an IPv4 address as such where a socket of both kinds holds it."""
    read = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(read, "ipv4_mapped", None) or read)

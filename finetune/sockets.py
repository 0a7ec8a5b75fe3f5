"""Which network the ranks' gloo connections really take: as the kernel has them, whatever was set.

Surface: this process's established TCP connections and the host's interfaces, by psutil (/proc/net/tcp, getifaddrs).
A connection is gloo's where two ranks hold its two ends; so does the store at MASTER_PORT, which is left out. Source
translation, which a pod network may do between nodes, shows the accepting rank another address than the connecting rank
has, while both see the same accepting end: one end that two ranks see is enough then. Where no end is seen twice, as
with the destination translated too, nothing is known, and that is said.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

End = tuple[str, int]


class Seen(NamedTuple):
    """What one rank sees of itself."""

    connections: tuple[tuple[End, End], ...]  # own end, the other's
    interfaces: Mapping[str, tuple[str, ...]]  # address -> the interfaces that have it


def look() -> Seen:
    """This rank's connections, and whose its addresses are; empty where they cannot be read."""
    try:
        found = psutil.Process().net_connections("tcp")
        named = psutil.net_if_addrs()
    except (psutil.Error, OSError):
        return Seen((), {})
    store = int(os.environ.get("MASTER_PORT") or 0)
    ends = [((_plain(c.laddr.ip), c.laddr.port), (_plain(c.raddr.ip), c.raddr.port))
            for c in found if c.status == psutil.CONN_ESTABLISHED and c.raddr]  # fmt: skip
    interfaces: dict[str, tuple[str, ...]] = {}
    for name, addresses in named.items():
        for one in addresses:
            if one.family.name in ("AF_INET", "AF_INET6"):
                address = _plain(one.address)
                interfaces[address] = (*interfaces.get(address, ()), name)
    return Seen(tuple(e for e in ends if store not in (e[0][1], e[1][1])), interfaces)


def _plain(address: str) -> str:
    """Without a zone, and an IPv4 address as such where a socket of both kinds holds it."""
    read = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(read, "ipv4_mapped", None) or read)


def taken(ranks: Sequence[Seen]) -> list[list[tuple[str, tuple[str, ...]]]]:
    """For each rank the addresses that its connections to other ranks start from, with their interfaces."""
    turned = {(other, own) for seen in ranks for own, other in seen.connections}
    found = []
    for rank, seen in enumerate(ranks):
        rest = [pair for other, theirs in enumerate(ranks) if other != rank for pair in theirs.connections]
        accepting, reached = {own for own, _ in rest}, {other for _, other in rest}
        mine = {
            own[0]
            for own, other in seen.connections
            if (own, other) in turned
            or (not _local(other[0]) and other in accepting)
            or (not _local(own[0]) and own in reached)
        }
        found.append([(address, seen.interfaces.get(address, ())) for address in sorted(mine)])
    return found


def transports(ranks: Sequence[Seen]) -> list[str]:
    """The transports of rank 0, or why they are not known; none where it is alone."""
    if len(ranks) < 2:  # a connection whose two ends are its own is somebody else's
        return []
    if taken(ranks)[0]:
        return [spell(*one) for one in taken(ranks)[0]]
    if not ranks[0].connections:
        return ["gloo: unknown: this rank's TCP connections cannot be read"]
    return ["gloo: unknown: no end of a connection is seen by two ranks, as behind address translation (NAT)"]


def _local(address: str) -> bool:
    """Of loopback: every host has it, so that the same end on two hosts says nothing."""
    return ipaddress.ip_address(address).is_loopback


def spell(address: str, interfaces: Sequence[str]) -> str:
    """`gloo: TCP over net1 (10.0.0.1)`."""
    return f"gloo: TCP over {'/'.join(interfaces) or 'an unknown interface'} ({address})"


def differences(ranks: Sequence[Seen], environment: Mapping[str, str]) -> list[str]:
    """Each rank whose connections take another interface than the plan's GLOO_SOCKET_IFNAME, in one sentence."""
    expected = environment.get("GLOO_SOCKET_IFNAME")
    if not expected:
        return []
    return [
        f"rank {rank}: GLOO_SOCKET_IFNAME={expected}: {spell(address, interfaces)}"
        for rank, addresses in enumerate(taken(ranks))
        for address, interfaces in addresses
        if interfaces and not set(expected.split(",")) & set(interfaces)
    ]

"""The GID table of a RoCE port: which entry carries RoCE v2, and which one NCCL would take.

Specification: InfiniBand Architecture, Annex A17 (RoCEv2); Linux Documentation/ABI/stable/sysfs-class-infiniband,
gids/ and gid_attrs/; NCCL src/transport/net_ib (choice of the GID index since 2.21).
"""

from __future__ import annotations

import ipaddress

from probes.host import sysfs
from probes.host.protocol import Host
from probes.rdma.probe import Gid, RdmaPort

TABLE_MAX = 1024  # the largest table drivers report
HOLE_MAX = 64  # the kernel puts a new entry into the first free slot, so a long run of empty ones is the end

ROCE_V2 = "RoCE v2"


def read_gids(host: Host, folder: str) -> tuple[tuple[Gid, ...], bool]:
    """Used entries of a port's table, and whether the table could be listed.

    The type of an empty entry answers EINVAL, so types are asked of used entries only.
    """
    try:
        listed = host.list_dir(f"{folder}/gids")
    except OSError:
        return (), False
    indices = sorted(int(name) for name in listed if name.isascii() and name.isdigit() and len(name) <= 4)
    gids: list[Gid] = []
    hole = 0
    for index in indices[:TABLE_MAX]:
        value = sysfs.text(host, f"{folder}/gids/{index}")
        if value is None or not value.strip("0:"):
            hole += 1
            if hole >= HOLE_MAX:
                break
            continue
        hole = 0
        gids.append(
            Gid(
                index=index,
                gid=value,
                type=sysfs.text(host, f"{folder}/gid_attrs/types/{index}"),
                netdev=sysfs.text(host, f"{folder}/gid_attrs/ndevs/{index}"),
            )
        )
    return tuple(gids), True


def ipv4_of(gid: Gid) -> str | None:
    """The IPv4 address a GID stands for (::ffff:a.b.c.d), None for any other."""
    try:
        mapped = ipaddress.IPv6Address(gid.gid).ipv4_mapped
    except ValueError:
        return None
    return str(mapped) if mapped else None


def nccl_gid_index(port: RdmaPort) -> int | None:
    """The index NCCL 2.21 and newer takes with nothing set: IPv4 before IPv6, then RoCE v2 before v1, else entry 0.

    None for InfiniBand, where the index has no such meaning, and where the table is unknown.
    """
    if port.link_layer != "Ethernet" or not port.gids_known or not port.gids:
        return None
    ipv4 = [gid for gid in port.gids if ipv4_of(gid)]
    best = [gid for gid in ipv4 if gid.type == ROCE_V2] or ipv4
    return best[0].index if best else 0


def rocev2_gid_index(port: RdmaPort) -> int | None:
    """The first RoCE v2 entry that can be routed: with IPv4, else a global IPv6, else link-local."""
    routed = [gid for gid in port.gids if gid.type == ROCE_V2]
    routed.sort(key=lambda gid: (ipv4_of(gid) is None, gid.gid.lower().startswith("fe80"), gid.index))
    return routed[0].index if routed else None

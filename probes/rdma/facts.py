"""What is known of RDMA devices and ports.

Specification: Linux Documentation/ABI/stable/sysfs-class-infiniband; InfiniBand Architecture, Annex A17 (RoCEv2).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from probes.api import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One used entry of a port's GID table."""

    index: int
    gid: str  # "fe80:0000:...": as sysfs prints it
    type: str | None = None  # "IB/RoCE v1", "RoCE v2"; None where the kernel answers EINVAL
    netdev: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of one device."""

    port: int
    state: str | None = None  # "ACTIVE", "DOWN", "INIT", "ARMED"
    physical_state: str | None = None  # "LinkUp", "Disabled", "Polling"
    link_layer: str | None = None  # "InfiniBand", "Ethernet"
    rate_bytes_per_second: float | None = None
    rate_text: str | None = None  # "400 Gb/sec (4X NDR)"
    netdev: str | None = None
    active_mtu_bytes: int | None = (
        None  # RoCE: what the kernel derives from the netdev's MTU; InfiniBand: from libibverbs, else unknown
    )
    netdev_mtu_bytes: int | None = None
    gids: tuple[Gid, ...] = ()
    gids_known: bool = False
    counters: dict[str, int] | None = None  # counters/ and hw_counters/ together
    pfc_priorities: tuple[int, ...] | None = None  # priorities with PFC on (DCB netlink); None where not answered
    trust: str | None = None  # how the port classifies packets: "dscp", "pcp"; None where neither file nor DCB tells
    dscp_priorities: tuple[tuple[int, int], ...] | None = (
        None  # the port's own map, (DSCP, priority), of DCB's app table
    )
    rate_max_bytes_per_second: float | None = None  # fastest mode the netdev's driver supports (ethtool netlink)
    ecn: bool | None = None
    traffic_class: int | None = None  # /sys/kernel/config or /sys/class/infiniband/*/tc where set


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """One device: an HCA, a VF, a bond, an EFA, a Soft-RoCE."""

    name: str  # "mlx5_0"
    kind: str  # "hca", "efa", "rxe", "siw", "other"
    bus_id: str | None = None
    numa_node: int | None = None
    board: str | None = None  # board_id
    model: str | None = None  # hca_type or the PCI id's name: "MT4129", "ConnectX-7"
    firmware: str | None = None
    is_vf: bool | None = None
    bond: str | None = None  # netdev of the bond this device stands for: "bond0"
    uverbs: str | None = None  # "/dev/infiniband/uverbs0"
    uverbs_usable: bool | None = None  # this user may open it
    driver: str | None = None  # "mlx5_core", "efa", "bnxt_en"
    ports: tuple[RdmaPort, ...] = ()
    role: str | None = None  # RAIL or OTHER where the topology decides it; `agent.checks.host_checks` sets it


@dataclass(frozen=True, slots=True, kw_only=True)
class MemlockProof:
    """The largest memory region that a real registration managed, and where it failed."""

    device: str
    registered_bytes: int
    failed_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaFacts:
    """All RDMA devices this process can see."""

    devices: tuple[RdmaDevice, ...]
    source: str  # "sysfs", "netlink", "verbs"
    netns_mode: str | None = None  # "shared", "exclusive"
    pyverbs: str | None = None  # version, or why it is not usable
    memlock_proof: MemlockProof | None = None


SOURCE = Source(name="rdma", facts=RdmaFacts, timeout_seconds=20.0)


ROCE_V2 = "RoCE v2"
RAIL, OTHER = "rail", "other"
"""Roles of a device: it carries the traffic of a GPU that is nearest to it, or serves storage or management."""


def ipv4_of(gid: Gid) -> str | None:
    """The IPv4 address a GID stands for (::ffff:a.b.c.d), None for any other."""
    try:
        mapped = ipaddress.IPv6Address(gid.gid).ipv4_mapped
    except ValueError:
        return None
    return str(mapped) if mapped else None


def is_link_local(gid: Gid) -> bool:
    """Whether no other subnet is reached by it, and NCCL does not choose it: fe80::/10."""
    return gid.gid.lower().startswith("fe80")

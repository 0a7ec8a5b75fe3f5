"""Facts about RDMA devices and ports.

Specification: Linux Documentation/ABI/stable/sysfs-class-infiniband; InfiniBand Architecture, Annex A17 (RoCEv2).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from hardware.nics import fastest
from probes.api import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One valid entry of a port's GID table."""

    index: int
    gid: str  # "fe80:0000:...", as printed by sysfs
    type: str | None = None  # "IB/RoCE v1", "RoCE v2"; None if the kernel returns EINVAL
    netdev: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device."""

    port: int
    state: str | None = None  # "ACTIVE", "DOWN", "INIT", "ARMED"
    physical_state: str | None = None  # "LinkUp", "Disabled", "Polling"
    link_layer: str | None = None  # "InfiniBand", "Ethernet"
    rate_bytes_per_second: float | None = None
    rate_text: str | None = None  # "400 Gb/sec (4X NDR)"
    netdev: str | None = None
    active_mtu_bytes: int | None = None  # RoCE: derived by the kernel from the netdev's MTU; InfiniBand: unknown
    netdev_mtu_bytes: int | None = None
    gids: tuple[Gid, ...] = ()
    gids_known: bool = False
    counters: dict[str, int] | None = None  # merged from counters/ and hw_counters/
    pfc_priorities: tuple[int, ...] | None = None  # priorities with PFC enabled (DCB netlink); None if not reported
    trust: str | None = None  # packet classification: "dscp" or "pcp"; None if neither file nor DCB reports it
    dscp_priorities: tuple[tuple[int, int], ...] | None = None  # the port's (DSCP, priority) map, from DCB's app table
    rate_max_bytes_per_second: float | None = None  # fastest link mode supported by the driver (ethtool netlink)
    ecn: bool | None = None
    traffic_class: int | None = None  # from /sys/kernel/config or /sys/class/infiniband/*/tc, if set


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """One device: HCA, virtual function, bond, EFA or Soft-RoCE."""

    name: str  # "mlx5_0"
    kind: str  # "hca", "efa", "rxe", "siw", "other"
    bus_id: str | None = None
    numa_node: int | None = None
    board: str | None = None  # board_id
    model: str | None = None  # hca_type, or the name for the PCI id: "MT4129", "ConnectX-7"
    firmware: str | None = None
    is_vf: bool | None = None
    bond: str | None = None  # bond whose traffic this device carries: "bond0"
    bond_members: tuple[tuple[str, str | None], ...] = ()  # (interface, operstate), if all members carry traffic
    uverbs: str | None = None  # "/dev/infiniband/uverbs0"
    uverbs_usable: bool | None = None  # whether this user may open it
    driver: str | None = None  # "mlx5_core", "efa", "bnxt_en"
    ports: tuple[RdmaPort, ...] = ()
    role: str | None = None  # RAIL or OTHER, if the topology shows it; set by `agent.checks.host_checks`

    @property
    def bytes_per_second(self) -> float:
        """Return the rate of all ACTIVE ports; without one, the rate of the model, or 0 if that is unknown."""
        rates = [port.rate_bytes_per_second or 0.0 for port in self.ports if port.state == "ACTIVE"]
        return sum(rates) if rates else fastest(self.model) or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemlockProof:
    """The largest memory region that could be registered, and the size at which registration failed."""

    device: str
    registered_bytes: int
    failed_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaFacts:
    """All RDMA devices that this process can see."""

    devices: tuple[RdmaDevice, ...]
    pyverbs: str | None = None  # version, or the reason that it cannot be used
    memlock_proof: MemlockProof | None = None
    in_container: bool = False  # of a job, not of the agent

    @property
    def accessible(self) -> tuple[RdmaDevice, ...]:
        """Return the devices that a container has a file of, because it sees others too; all if it has none."""
        with_file = tuple(device for device in self.devices if device.uverbs)
        return with_file if with_file and self.in_container else self.devices

    @property
    def in_reach(self) -> tuple[RdmaDevice, ...]:
        """Return the accessible devices without virtual functions that have no address, next to their physical one."""
        buses = {(device.bus_id or "")[:7] for device in self.accessible if not device.is_vf}
        functions = [device for device in self.accessible if device.is_vf and (device.bus_id or "")[:7] in buses]
        idle = {f.name for f in functions if all(p.gids_known and all(map(is_link_local, p.gids)) for p in f.ports)}
        return tuple(device for device in self.accessible if device.name not in idle)


SOURCE = Source(name="rdma", facts=RdmaFacts, timeout_seconds=20.0)


ROCE_V2 = "RoCE v2"
RAIL, OTHER = "rail", "other"
"""Roles of a device: RAIL carries GPU traffic, as the nearest device of a GPU; OTHER serves storage or management."""


def find_ipv4(gid: Gid) -> str | None:
    """Return the IPv4 address in a GID (::ffff:a.b.c.d), None for other GIDs."""
    try:
        mapped = ipaddress.IPv6Address(gid.gid).ipv4_mapped
    except ValueError:
        return None
    return str(mapped) if mapped else None


def is_link_local(gid: Gid) -> bool:
    """Whether the GID is link-local (fe80::/10): it reaches no other subnet, and NCCL does not select it."""
    return gid.gid.lower().startswith("fe80")

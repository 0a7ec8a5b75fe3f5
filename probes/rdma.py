"""RDMA devices and ports: sysfs first, NETLINK_RDMA where sysfs is not mounted, pyverbs where it is installed.

Specification: Linux Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    active_mtu_bytes: int | None = None
    max_mtu_bytes: int | None = None
    netdev_mtu_bytes: int | None = None
    gids: tuple[Gid, ...] = ()
    gids_known: bool = False
    counters: dict[str, int] | None = None  # counters/ and hw_counters/ together
    pfc_priorities: tuple[int, ...] | None = None  # priorities with PFC on, where readable
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
    node_guid: str | None = None
    is_vf: bool | None = None
    bond: str | None = None  # netdev of the bond this device stands for: "bond0"
    uverbs: str | None = None  # "/dev/infiniband/uverbs0"
    uverbs_usable: bool | None = None  # this user may open it
    ports: tuple[RdmaPort, ...] = ()


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

"""Network interfaces and their roles, as a training pod sees them.

Specification: rtnetlink(7) through pyroute2; the Multus annotation k8s.v1.cni.cncf.io/network-status.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface of this network namespace."""

    name: str
    role: str  # "loopback", "pod-default", "secondary", "host", "docker", "bridge", "virtual", "unknown"
    kind: str | None = None  # link info kind: "macvlan", "ipvlan", "vxlan", "veth", "bond", "bridge"; None physical
    up: bool | None = None
    running: bool | None = None  # IFF_RUNNING: NCCL takes only running interfaces
    addresses: tuple[str, ...] = ()  # "10.0.0.1/24", "fe80::1/64"
    mtu_bytes: int | None = None
    speed_bytes_per_second: float | None = None
    driver: str | None = None
    parent: str | None = None  # lower device of a macvlan, vlan, vxlan; master's slave list is derived
    master: str | None = None  # bond or bridge it is enslaved to
    bus_id: str | None = None
    numa_node: int | None = None
    mac: str | None = None
    rdma_device: str | None = None  # "mlx5_0" where an RDMA device belongs to it or to its parent
    multus_network: str | None = None  # "default/rdmashared-net"
    is_vf: bool | None = None
    errors: dict[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfacesFacts:
    """All interfaces, and the one NCCL (and gloo) would take unasked."""

    interfaces: tuple[Interface, ...]
    default_route: str | None = None  # interface of the default route
    nccl_choice: str | None = None  # what NCCL's own order picks with NCCL_SOCKET_IFNAME unset
    network_status_source: str | None = None  # file of the Multus annotation, None where there is none
    source: str = "netlink"  # "netlink" or "sysfs"

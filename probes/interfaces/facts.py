"""Facts about network interfaces, and the interface that NCCL selects by default.

Specification: rtnetlink(7); NCCL user guide, NCCL_SOCKET_IFNAME; NCCL src/misc/socket.cc (search order, running
interfaces only); getifaddrs(3) lists IPv4 before IPv6 addresses, ordered by interface index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from probes.api import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface of this network namespace."""

    name: str
    role: str  # "loopback", "pod-default", "secondary", "host", "docker", "bridge", "virtual", "unknown"
    kind: str | None = None  # "macvlan", "ipvlan", "vxlan", "veth", "bond", "bridge"; None: physical
    up: bool | None = None
    running: bool | None = None  # IFF_RUNNING: NCCL only uses running interfaces
    addresses: tuple[str, ...] = ()  # "10.0.0.1/24", "fe80::1/64"
    mtu_bytes: int | None = None
    speed_bytes_per_second: float | None = None
    driver: str | None = None
    parent: str | None = None  # lower device of a macvlan, vlan or vxlan
    master: str | None = None  # the bond or bridge that it is a port of
    bus_id: str | None = None
    numa_node: int | None = None
    rdma_device: str | None = None  # "mlx5_0", if an RDMA device belongs to it or to its parent
    multus_network: str | None = None  # "default/rdmashared-net"
    is_vf: bool | None = None
    parent_elsewhere: bool = False  # its lower device, or its veth peer, is in another network namespace
    multus_mtu_bytes: int | None = None  # "mtu" of its entry in the network-status annotation
    neighbour: str | None = None  # "leaf1 Ethernet1/5": connected switch port, from LLDP


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfacesFacts:
    """All interfaces, and the interface that NCCL or gloo would select by default."""

    interfaces: tuple[Interface, ...]
    default_route: str | None = None  # interface of the default route
    nccl_choice: str | None = None  # interface selected by NCCL if NCCL_SOCKET_IFNAME is not set
    network_status_source: str | None = None  # file with the Multus annotation, None if there is none
    socket_ifname: str | None = None  # NCCL_SOCKET_IFNAME of the probing process, None if not set
    network_status_error: str | None = None  # why the annotation could not be read
    gloo_ifname: str | None = None  # GLOO_SOCKET_IFNAME of the probing process, None if not set
    networks_missing: dict[str, str] = field(default_factory=dict)  # missing interface of the annotation -> network
    of_agent: bool = False  # in the container of the resident agent, whose manifest differs from a job's
    backend: str | None = None  # "gloo" on a host without GPUs: set by `agent.checks.host_checks`


SOURCE = Source(name="interfaces", facts=InterfacesFacts)


# Interface kinds without a physical link of their own.
ON_A_WIRE = {"macvlan", "ipvlan", "vlan", "bond", "ipoib", "team", "macvtap"}

_LAST = ("docker", "lo", "virbr")  # NCCL uses these last, in this order; virbr since 2.28


def is_usable_by_nccl(interface: Interface) -> bool:
    """Whether the interface is up and running and has an address."""
    return bool(interface.up and interface.running and interface.addresses)


def matches(name: str, setting: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME selects an interface: prefixes, "=" for exact names, "^" to exclude names.

    Both signs are at the start of the value and apply to the whole list.
    """
    exclude = setting.startswith("^")
    names = setting.removeprefix("^")
    exact = names.startswith("=")
    entries = [item.partition(":")[0] for item in names.removeprefix("=").split(",") if item]
    is_listed = any(name == item if exact else name.startswith(item) for item in entries)
    return is_listed is not exclude


def choose_for_nccl(interfaces: Iterable[Interface], setting: str | None = None) -> str | None:
    """Return the first interface that NCCL would select for this NCCL_SOCKET_IFNAME if NCCL_COMM_ID is not set."""
    usable = [interface for interface in interfaces if is_usable_by_nccl(interface)]
    usable.sort(key=lambda i: all(":" in address for address in i.addresses))  # stable sort: IPv4 first, then by index
    if setting and len(setting) > 1:  # NCCL ignores values of a single character
        return next((i.name for i in usable if matches(i.name, setting)), None)
    return next((interface.name for interface in select_preferred_by_nccl(usable)), None)


def select_preferred_by_nccl(usable: Sequence[Interface]) -> Sequence[Interface]:
    """Return the interfaces that NCCL uses if NCCL_SOCKET_IFNAME is not set, in the given order."""
    steps = [
        [i for i in usable if i.name.startswith("ib")],
        [i for i in usable if not i.name.startswith(_LAST)],
        *([i for i in usable if i.name.startswith(prefix)] for prefix in _LAST),
    ]
    return next((step for step in steps if step), [])

"""What is known of network interfaces, and which one NCCL takes by itself.

Specification: rtnetlink(7); NCCL user guide, NCCL_SOCKET_IFNAME; NCCL src/misc/socket.cc (order of the search, running
interfaces only); getifaddrs(3) lists IPv4 addresses before IPv6 ones, in the order of the interfaces' indices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from probes.api import Source


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
    rdma_device: str | None = None  # "mlx5_0" where an RDMA device belongs to it or to its parent
    multus_network: str | None = None  # "default/rdmashared-net"
    is_vf: bool | None = None
    parent_elsewhere: bool = False  # its lower device, or a veth's other end, is in another network namespace
    multus_mtu_bytes: int | None = None  # "mtu" of its network-status entry
    neighbour: str | None = None  # "leaf1 Ethernet1/5": the switch port that it is connected to, from LLDP


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfacesFacts:
    """All interfaces, and the one NCCL (and gloo) would take unasked."""

    interfaces: tuple[Interface, ...]
    default_route: str | None = None  # interface of the default route
    nccl_choice: str | None = None  # what NCCL's own order picks with NCCL_SOCKET_IFNAME unset
    network_status_source: str | None = None  # file of the Multus annotation, None where there is none
    socket_ifname: str | None = None  # NCCL_SOCKET_IFNAME of the process that read, None where unset
    network_status_error: str | None = None  # why the annotation could not be read
    gloo_ifname: str | None = None  # GLOO_SOCKET_IFNAME of the process that read, None where unset
    networks_missing: dict[str, str] = field(default_factory=dict)  # interface of the annotation, gone -> network
    of_agent: bool = False  # of the resident agent's own container, whose manifest is not a job's
    backend: str | None = None  # "gloo" on a host without GPU: set by `agent.checks.host_checks`


SOURCE = Source(name="interfaces", facts=InterfacesFacts)


# Kinds that stand for another interface's wire.
ON_A_WIRE = {"macvlan", "ipvlan", "vlan", "bond", "ipoib", "team", "macvtap"}

_LAST = ("docker", "lo", "virbr")  # NCCL takes these last, in this order; virbr since 2.28


def usable_by_nccl(interface: Interface) -> bool:
    """Up, running and with an address."""
    return bool(interface.up and interface.running and interface.addresses)


def matches(name: str, setting: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME takes an interface: prefixes, "=" for exact names, "^" for all but these.

    Both marks stand at the very start and hold for the whole list.
    """
    exclude = setting.startswith("^")
    rest = setting.removeprefix("^")
    exact = rest.startswith("=")
    wanted = [item.partition(":")[0] for item in rest.removeprefix("=").split(",") if item]
    found = any(name == item if exact else name.startswith(item) for item in wanted)
    return found is not exclude


def nccl_choice(interfaces: Iterable[Interface], setting: str | None = None) -> str | None:
    """The first interface of NCCL's search with this NCCL_SOCKET_IFNAME, and with NCCL_COMM_ID unset."""
    usable = [interface for interface in interfaces if usable_by_nccl(interface)]
    usable.sort(key=lambda i: all(":" in address for address in i.addresses))  # stable: IPv4 first, then by index
    if setting and len(setting) > 1:  # NCCL ignores a single character
        return next((i.name for i in usable if matches(i.name, setting)), None)
    steps = [
        [i for i in usable if i.name.startswith("ib")],
        [i for i in usable if not i.name.startswith(_LAST)],
        *([i for i in usable if i.name.startswith(prefix)] for prefix in _LAST),
    ]
    return next((step[0].name for step in steps if step), None)

"""Network interfaces and their roles, as a training pod sees them.

Specification: rtnetlink(7); the Multus annotation k8s.v1.cni.cncf.io/network-status.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from probes.api import Finding, Metric, Probe, Sample
from probes.host.protocol import Host


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
    parent_elsewhere: bool = False  # its lower device, or a veth's other end, is in another network namespace
    multus_mtu_bytes: int | None = None  # "mtu" of its network-status entry
    neighbour: str | None = None  # "leaf1 Ethernet1/5": the switch's port that it is wired to, where LLDP told


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfacesFacts:
    """All interfaces, and the one NCCL (and gloo) would take unasked."""

    interfaces: tuple[Interface, ...]
    default_route: str | None = None  # interface of the default route
    nccl_choice: str | None = None  # what NCCL's own order picks with NCCL_SOCKET_IFNAME unset
    network_status_source: str | None = None  # file of the Multus annotation, None where there is none
    source: str = "netlink"  # "netlink" or "sysfs"
    socket_ifname: str | None = None  # NCCL_SOCKET_IFNAME of the process that read, None where unset
    network_status_error: str | None = None  # why the annotation could not be read


def read(host: Host) -> InterfacesFacts:
    """All interfaces of this network namespace, with their roles."""
    from probes.interfaces import read as interfaces_read

    return interfaces_read.read(host)


def check(facts: InterfacesFacts) -> Iterator[Finding]:
    """Whether NCCL and gloo would talk over the right interface, and whether it is whole."""
    from probes.interfaces import check as interfaces_check

    return interfaces_check.check(facts)


def samples(facts: InterfacesFacts) -> Iterator[Sample]:
    """What node_exporter cannot know: the role, what it stands on, and NCCL's choice."""
    for interface in facts.interfaces:
        labels = (
            interface.name,
            interface.role,
            interface.kind or "",
            interface.parent or "",
            interface.rdma_device or "",
            interface.multus_network or "",
        )
        yield Sample(metric="interfaces_role_info", value=1, labels=labels)
    if facts.nccl_choice:
        yield Sample(metric="interfaces_nccl_choice_info", value=1, labels=(facts.nccl_choice,))


PROBE = Probe(
    name="interfaces",
    facts=InterfacesFacts,
    read=read,
    check=check,
    samples=samples,
    codes=(
        "interfaces.choice.wrong",
        "interfaces.choice.none",
        "interfaces.choice.setting",
        "interfaces.link.down",
        "interfaces.address.missing",
        "interfaces.mtu.mismatch",
        "interfaces.speed.low",
        "interfaces.network_status.invalid",
    ),
    metrics=(
        Metric(
            name="interfaces_role_info",
            help="Role of the network interface and what it stands on.",
            labels=("device", "role", "kind", "parent", "rdma_device", "network"),
            kind="info",
        ),
        Metric(
            name="interfaces_nccl_choice_info",
            help="Interface NCCL takes with NCCL_SOCKET_IFNAME unset.",
            labels=("device",),
            kind="info",
        ),
    ),
)

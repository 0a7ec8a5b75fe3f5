"""RDMA devices and ports: sysfs first, NETLINK_RDMA where sysfs is not mounted, pyverbs where it is installed.

Specification: Linux Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from probes.api import Finding, Metric, Probe, Sample
from probes.host.protocol import Host


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
    max_mtu_bytes: int | None = None
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
    node_guid: str | None = None
    is_vf: bool | None = None
    bond: str | None = None  # netdev of the bond this device stands for: "bond0"
    uverbs: str | None = None  # "/dev/infiniband/uverbs0"
    uverbs_usable: bool | None = None  # this user may open it
    driver: str | None = None  # "mlx5_core", "efa", "bnxt_en"
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


def read(host: Host) -> RdmaFacts:
    """List the devices, and register memory where pyverbs and a usable device allow it."""
    from probes.rdma import read as rdma_read

    return rdma_read.read(host)


def check(facts: RdmaFacts) -> Iterator[Finding]:
    """What keeps NCCL from these ports, or makes them slow."""
    from probes.rdma import check as rdma_check

    return rdma_check.check(facts)


def samples(facts: RdmaFacts) -> Iterator[Sample]:
    """What node_exporter's infiniband collector lacks, with its labels: GIDs, MTU, netdev, NUMA node, access."""
    from probes.rdma import gids as rdma_gids

    for device in facts.devices:
        known = (("rdma_device_numa_node", device.numa_node), ("rdma_device_usable", device.uverbs_usable))
        for metric, value in known:
            if value is not None:
                yield Sample(metric=metric, value=float(value), labels=(device.name,))
        for port in device.ports:
            labels = (device.name, str(port.port))
            yield Sample(
                metric="rdma_port_info",
                value=1,
                labels=(*labels, port.link_layer or "", port.netdev or "", device.kind),
            )
            numbers = (
                ("rdma_port_nccl_gid_index", rdma_gids.nccl_gid_index(port)),
                ("rdma_port_rocev2_gid_index", rdma_gids.rocev2_gid_index(port)),
                ("rdma_port_mtu_bytes", port.active_mtu_bytes),
                ("rdma_port_netdev_mtu_bytes", port.netdev_mtu_bytes),
            )
            for metric, number in numbers:
                if number is not None:
                    yield Sample(metric=metric, value=float(number), labels=labels)
    if facts.memlock_proof:
        proof = facts.memlock_proof
        yield Sample(metric="rdma_registered_bytes", value=float(proof.registered_bytes), labels=(proof.device,))


_PORT = ("device", "port")

PROBE = Probe(
    name="rdma",
    facts=RdmaFacts,
    read=read,
    check=check,
    samples=samples,
    codes=(
        "rdma.port.none_active",
        "rdma.port.down",
        "rdma.port.unknown",
        "rdma.port.rate",
        "rdma.port.below_max",
        "rdma.port.family_rate",
        "rdma.pfc.off",
        "rdma.pfc.mixed",
        "rdma.port.mixed_link_layer",
        "rdma.gid.missing_rocev2",
        "rdma.gid.choice",
        "rdma.gid.no_ipv4",
        "rdma.mtu.small",
        "rdma.mtu.mismatch",
        "rdma.uverbs.missing",
        "rdma.uverbs.permission",
        "rdma.memlock.registration",
        "rdma.firmware.mixed",
        "rdma.counters.rising",
        "rdma.netns.shared",
    ),
    metrics=(
        Metric(name="rdma_device_numa_node", help="NUMA node of the RDMA device.", labels=("device",)),
        Metric(name="rdma_device_usable", help="1 where the agent may open the device.", labels=("device",)),
        Metric(
            name="rdma_port_info",
            help="Netdev and link layer of the port.",
            labels=(*_PORT, "link_layer", "netdev", "kind"),
            kind="info",
        ),
        Metric(name="rdma_port_nccl_gid_index", help="GID index NCCL takes with nothing set.", labels=_PORT),
        Metric(name="rdma_port_rocev2_gid_index", help="First GID index that is RoCE v2.", labels=_PORT),
        Metric(name="rdma_port_mtu_bytes", help="Payload of a packet on the port.", labels=_PORT),
        Metric(name="rdma_port_netdev_mtu_bytes", help="MTU of the port's netdev.", labels=_PORT),
        Metric(name="rdma_registered_bytes", help="Largest memory region registered by the probe.", labels=("device",)),
    ),
    timeout_seconds=20.0,
)

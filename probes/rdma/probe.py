"""RDMA devices and ports: sysfs first, NETLINK_RDMA where sysfs is not mounted, pyverbs where it is installed.

Specification: Linux Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

from collections.abc import Iterator

from probes.api import Metric, Probe, Sample
from probes.rdma.check import TEXTS, check
from probes.rdma.facts import RdmaFacts, nccl_gid_index, rocev2_gid_index
from probes.rdma.read import read
from probes.texts import codes_of


def samples(facts: RdmaFacts) -> Iterator[Sample]:
    """What node_exporter's infiniband collector lacks, with its labels: GIDs, MTU, netdev, NUMA node, access."""

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
                ("rdma_port_nccl_gid_index", nccl_gid_index(port)),
                ("rdma_port_rocev2_gid_index", rocev2_gid_index(port)),
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
    codes=(*codes_of(TEXTS), "rdma.counters.rising"),
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

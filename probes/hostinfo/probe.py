"""The machine itself: CPU, NUMA, memory, kernel, virtualisation.

Specification: proc(5), sysfs-devices-node, DMI. The file is not called host.py because that is the Host a probe asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from probes.api import Finding, Metric, Probe, Sample, Severity
from probes.host.protocol import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node (/sys/devices/system/node/node*)."""

    node: int
    cpus: str  # "0-47,96-143"
    memory_bytes: int | None = None
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostinfoFacts:
    """What kind of machine this is."""

    hostname: str
    kernel: str | None = None
    os: str | None = None
    architecture: str | None = None  # "x86_64", "aarch64"
    cpu_vendor: str | None = None  # "GenuineIntel", "AuthenticAMD", "ARM"
    cpu_name: str | None = None
    cpu_family: int | None = None
    cpu_model: int | None = None  # NCCL's CPU-to-CPU bandwidth depends on it
    sockets: int | None = None
    cores: int | None = None
    threads: int | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    numa: tuple[NumaNode, ...] = ()
    virtual_machine: str | None = None  # hypervisor's name; None bare metal or unknown
    product: str | None = None  # DMI: "PowerEdge R760xa", "p4d.24xlarge"
    vendor: str | None = None
    chassis_asset_tag: str | None = None  # DMI: how OCI and Azure mark their machines, bare metal included
    cloud_id: str | None = None  # /run/cloud-init/cloud-id: "aws", "azure", "gce", "oracle"
    vendor_files: tuple[str, ...] = ()  # of `hostinfo_read.VENDOR_FILES` those that are on this disk
    storage_servers: tuple[str, ...] = ()  # addresses that network file systems are mounted from (/proc/self/mounts)
    boot_id: str | None = None
    load: float | None = None  # 1-minute load average
    nccl_environment: dict[str, str] | None = None  # NCCL_*, GLOO_*, TORCH_NCCL_*, FI_*, NVIDIA_VISIBLE_DEVICES
    nccl_conf: dict[str, str] | None = None  # /etc/nccl.conf, ~/.nccl.conf
    nccl_conf_files: tuple[str, ...] = ()  # the files nccl_conf came from, the winning one first
    numa_balancing: bool | None = None  # /proc/sys/kernel/numa_balancing


def read(host: Host) -> HostinfoFacts:
    """Ask the host what it is."""
    from probes.hostinfo import read as hostinfo_read

    return hostinfo_read.read(host)


def check(facts: HostinfoFacts) -> Iterator[Finding]:
    """What of the machine itself stands in the way of training or of measuring."""
    yield from _memoryless_nodes(facts)
    if facts.numa_balancing and len(facts.numa) > 1:
        # Linux Documentation/admin-guide/sysctl/kernel.rst, numa_balancing: to be disabled where the workload is
        # already bound to NUMA nodes; NCCL and the launcher bind each rank to its GPU's node.
        yield Finding(
            code="hostinfo.numa.balancing",
            severity=Severity.INFO,
            subject="",
            message=(
                "Automatic NUMA balancing is on: pages of ranks bound to a node are unmapped and scanned for nothing."
            ),
            evidence=("/proc/sys/kernel/numa_balancing: 1",),
            remedy="Set kernel.numa_balancing=0 where every rank is bound to its GPU's NUMA node.",
        )
    if facts.load is not None and facts.threads and facts.load > facts.threads:
        yield Finding(
            code="hostinfo.load.high",
            severity=Severity.INFO,
            subject="",
            message=(
                f"{facts.load:.1f} runnable tasks for {facts.threads} CPUs: timings taken now measure the others too."
            ),
            evidence=(f"load average (1 minute) = {facts.load:.2f}", f"logical CPUs = {facts.threads}"),
            remedy="Measure again when the host is quiet.",
        )
    if facts.nccl_conf:
        yield Finding(
            code="hostinfo.nccl.conf",
            severity=Severity.INFO,
            subject="",
            message="NCCL also takes settings from a file on this host: " + ", ".join(sorted(facts.nccl_conf)) + ".",
            evidence=tuple(f"{', '.join(facts.nccl_conf_files)}: {k}={v}" for k, v in sorted(facts.nccl_conf.items())),
        )


def _memoryless_nodes(facts: HostinfoFacts) -> Iterator[Finding]:
    for node in facts.numa:
        if node.cpus and node.memory_bytes == 0:
            yield Finding(
                code="hostinfo.numa.memoryless",
                severity=Severity.WARN,
                subject=f"NUMA{node.node}",
                message=f"NUMA node {node.node} has CPUs but no memory: every access of its ranks leaves the socket.",
                evidence=(f"/sys/devices/system/node/node{node.node}/meminfo: MemTotal 0 kB",),
                remedy="Populate the memory channels of this socket or bring its memory online.",
            )


def samples(facts: HostinfoFacts) -> Iterator[Sample]:
    """What node_exporter does not export of the machine: NUMA distances and the hypervisor."""
    if facts.virtual_machine:
        yield Sample(metric="hostinfo_virtual_machine_info", value=1, labels=(facts.virtual_machine,))
    for node in facts.numa:
        for peer, distance in zip(facts.numa, node.distances, strict=False):
            labels = (str(node.node), str(peer.node))
            yield Sample(metric="hostinfo_numa_distance_ratio", value=distance / 10, labels=labels)


PROBE = Probe(
    name="hostinfo",
    facts=HostinfoFacts,
    read=read,
    check=check,
    samples=samples,
    codes=("hostinfo.numa.memoryless", "hostinfo.numa.balancing", "hostinfo.load.high", "hostinfo.nccl.conf"),
    metrics=(
        Metric(
            name="hostinfo_virtual_machine_info",
            help="Hypervisor this host runs on.",
            labels=("hypervisor",),
            kind="info",
        ),
        Metric(
            name="hostinfo_numa_distance_ratio",
            help="Memory distance between NUMA nodes, 1 is local.",
            labels=("numa_node", "peer_numa_node"),
        ),
    ),
)

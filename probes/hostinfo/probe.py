"""The machine itself: CPU, NUMA, memory, kernel, virtualisation.

The probe is not called host, because a `Host` is what a probe reads from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from contracts.finding import Finding
from contracts.tables import read_table
from probes.api import Sample, Source, finding, probe_of

TEXTS = read_table(__file__, "findings.toml")

ROLE = "TOPOFLIGHT_ROLE"
"""A variable that is "agent" in the container of the resident agent, whose resources differ from those of a job."""


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
    numa: tuple[NumaNode, ...] = ()
    virtual_machine: str | None = None  # hypervisor's name; None bare metal or unknown
    product: str | None = None  # DMI: "PowerEdge R760xa", "p4d.24xlarge"
    vendor: str | None = None
    chassis_asset_tag: str | None = None  # DMI: how OCI and Azure mark their machines, bare metal included
    cloud_id: str | None = None  # /run/cloud-init/cloud-id: "aws", "azure", "gce", "oracle"
    vendor_files: tuple[str, ...] = ()  # of `names.toml` those that are on this disk
    storage_servers: tuple[str, ...] = ()  # addresses that network file systems are mounted from (/proc/self/mounts)
    boot_id: str | None = None
    load: float | None = None  # 1-minute load average
    nccl_environment: dict[str, str] | None = None  # NCCL_*, GLOO_*, TORCH_NCCL_*, FI_*, NVIDIA_VISIBLE_DEVICES
    nccl_conf: dict[str, str] | None = None  # /etc/nccl.conf, ~/.nccl.conf
    nccl_conf_files: tuple[str, ...] = ()  # the files nccl_conf came from, the winning one first
    numa_balancing: bool | None = None  # /proc/sys/kernel/numa_balancing

    @property
    def nccl_variables(self) -> dict[str, str]:
        """What NCCL of a job started here reads: its files, and over them the environment."""
        return {**(self.nccl_conf or {}), **(self.nccl_environment or {})}


def check(facts: HostinfoFacts) -> Iterator[Finding]:
    """Properties of the machine itself that hinder training or measuring."""
    for node in facts.numa:
        if node.cpus and node.memory_bytes == 0:
            yield finding(TEXTS, "hostinfo.numa.memoryless", subject=f"NUMA{node.node}", node=node.node)
    if facts.numa_balancing and len(facts.numa) > 1:
        # Linux Documentation/admin-guide/sysctl/kernel.rst, numa_balancing: to be disabled where the workload is
        # already bound to NUMA nodes; NCCL and the launcher bind each rank to its GPU's node.
        yield finding(TEXTS, "hostinfo.numa.balancing")
    if facts.load is not None and facts.threads and facts.load > facts.threads:
        yield finding(TEXTS, "hostinfo.load.high", facts=facts)
    if settings := sorted((facts.nccl_conf or {}).items()):
        files, names = ", ".join(facts.nccl_conf_files), ", ".join(name for name, _ in settings)
        lines = tuple(f"{files}: {name}={value}" for name, value in settings)
        yield finding(TEXTS, "hostinfo.nccl.conf", None, "", lines, names=names)


def samples(facts: HostinfoFacts) -> Iterator[Sample]:
    """What node_exporter does not export of the machine: NUMA distances and the hypervisor."""
    if facts.virtual_machine:
        yield Sample(metric="hostinfo_virtual_machine_info", value=1, labels=(facts.virtual_machine,))
    for node in facts.numa:
        for peer, distance in zip(facts.numa, node.distances, strict=False):
            labels = (str(node.node), str(peer.node))
            yield Sample(metric="hostinfo_numa_distance_ratio", value=distance / 10, labels=labels)


SOURCE = Source(name="hostinfo", facts=HostinfoFacts)
PROBE = probe_of(__file__, SOURCE, check, samples=samples)

"""Probe of the machine: CPU, NUMA, memory, kernel, virtualisation.

The probe is not called "host", because that is the name of the interface that probes read from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from contracts.finding import Finding
from contracts.tables import read_table
from probes.api import Source, finding, probe_of

TEXTS = read_table(__file__, "findings.toml")

ROLE = "TOPOFLIGHT_ROLE"
"""Variable set to "agent" in the container of the resident agent, whose resources differ from those of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node (/sys/devices/system/node/node*)."""

    node: int
    cpus: str  # "0-47,96-143"
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostinfoFacts:
    """Properties of the machine."""

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
    virtual_machine: str | None = None  # name of the hypervisor; None on bare metal or if unknown
    product: str | None = None  # DMI: "PowerEdge R760xa", "p4d.24xlarge"
    vendor: str | None = None
    chassis_asset_tag: str | None = None  # DMI: OCI and Azure mark their machines with it, including bare metal
    cloud_id: str | None = None  # /run/cloud-init/cloud-id: "aws", "azure", "gce", "oracle"
    vendor_files: tuple[str, ...] = ()  # the files listed in `names.toml` that exist on this host
    storage_servers: tuple[str, ...] = ()  # servers of mounted network file systems, from /proc/self/mounts
    boot_id: str | None = None
    load: float | None = None  # 1-minute load average
    nccl_environment: dict[str, str] | None = None  # NCCL_*, GLOO_*, TORCH_NCCL_*, FI_*, NVIDIA_VISIBLE_DEVICES
    nccl_conf: dict[str, str] | None = None  # settings in /etc/nccl.conf and ~/.nccl.conf
    nccl_conf_files: tuple[str, ...] = ()  # files that contributed to nccl_conf, highest priority first
    numa_balancing: bool | None = None  # /proc/sys/kernel/numa_balancing

    @property
    def nccl_variables(self) -> dict[str, str]:
        """Settings that NCCL would use in a job started here: configuration files, overridden by the environment."""
        return {**(self.nccl_conf or {}), **(self.nccl_environment or {})}


def check(facts: HostinfoFacts) -> Iterator[Finding]:
    """Report properties of the machine that reduce training performance or distort measurements."""
    for node in facts.numa:
        if node.cpus and node.memory_bytes == 0:
            yield finding(TEXTS, "hostinfo.numa.memoryless", subject=f"NUMA{node.node}", node=node.node)
    if facts.numa_balancing and len(facts.numa) > 1:
        # Linux Documentation/admin-guide/sysctl/kernel.rst, numa_balancing: disable it if the workload is already bound
        # to NUMA nodes. NCCL and the launcher bind each rank to the node of its GPU.
        yield finding(TEXTS, "hostinfo.numa.balancing")
    if facts.load is not None and facts.threads and facts.load > facts.threads:
        yield finding(TEXTS, "hostinfo.load.high", facts=facts)
    if settings := sorted((facts.nccl_conf or {}).items()):
        files, names = ", ".join(facts.nccl_conf_files), ", ".join(name for name, _ in settings)
        lines = tuple(f"{files}: {name}={value}" for name, value in settings)
        yield finding(TEXTS, "hostinfo.nccl.conf", None, "", lines, names=names)


SOURCE = Source(name="hostinfo", facts=HostinfoFacts)
PROBE = probe_of(__file__, SOURCE, check)

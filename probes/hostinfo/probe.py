"""The machine itself: CPU, NUMA, memory, kernel, virtualisation.

Specification: proc(5); DMI; Linux Documentation/ABI/stable/sysfs-devices-node; NCCL user guide, nccl.conf; cloud-init,
instance metadata (/run/cloud-init/cloud-id). The probe is not called host, because that is what a probe asks.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass

from contracts.finding import Finding
from contracts.tables import read_table
from probes.api import Sample
from probes.host import sysfs
from probes.host.protocol import Host
from probes.hostinfo.container import NAMES
from probes.texts import finding, probe_of

TEXTS = read_table(__file__, "findings.toml")


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
    """What of the machine itself stands in the way of training or of measuring."""
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


DMI = "/sys/class/dmi/id/"
NODES = "/sys/devices/system/node/"
_OF_THE_CONTAINER = ("container", "TOPOFLIGHT_ROLE")  # read by probes.hostinfo.container; no library reads them
NODES_MAX = 1024  # MAX_NUMNODES of the kernel's largest configuration

_SERVER = re.compile(r"(\d{1,3}(?:\.\d{1,3}){3})(?=[:@,]|$)", re.ASCII)
SERVERS_MAX = 64


def read(host: Host) -> HostinfoFacts:
    """Ask every question; whatever is not there stays None."""
    identity, cpu = host.identity(), host.cpu()
    cpuinfo = sysfs.text(host, "/proc/cpuinfo")
    first = _processor(cpuinfo)
    vendor, product = sysfs.text(host, DMI + "sys_vendor"), sysfs.text(host, DMI + "product_name")
    conf, conf_files = nccl_conf(host, str(identity.get("home") or ""))
    balancing = sysfs.number(host, "/proc/sys/kernel/numa_balancing")
    load = cpu.get("load_average")
    return HostinfoFacts(
        hostname=str(identity.get("hostname") or "unknown"),
        kernel=_text(identity.get("kernel")),
        os=sysfs.fields(sysfs.text(host, "/etc/os-release"), "=").get("PRETTY_NAME", "").strip("\"'") or None,
        architecture=_text(identity.get("architecture")),
        cpu_vendor=_cpu_vendor(first),
        cpu_name=first.get("model name") or first.get("cpu"),
        cpu_family=sysfs.parse_number(first.get("cpu family")),
        cpu_model=sysfs.parse_number(first.get("model")),
        sockets=len(set(re.findall(r"^physical id[ \t]*:[ \t]*(\d+)", cpuinfo or "", re.MULTILINE | re.ASCII))) or None,
        cores=cpu.get("physical"),
        threads=cpu.get("logical"),
        memory_bytes=cpu.get("memory_bytes"),
        numa=numa_nodes(host),
        virtual_machine=virtual_machine(host, first),
        product=product,
        vendor=vendor,
        chassis_asset_tag=sysfs.text(host, DMI + "chassis_asset_tag"),
        cloud_id=sysfs.text(host, "/run/cloud-init/cloud-id"),
        vendor_files=tuple(path for path in NAMES["vendor_files"] if host.exists(path)),
        storage_servers=storage_servers(sysfs.text(host, "/proc/self/mounts")),
        boot_id=sysfs.text(host, "/proc/sys/kernel/random/boot_id"),
        load=load[0] if load else None,
        nccl_environment={k: v for k, v in host.environment().items() if k not in _OF_THE_CONTAINER},
        nccl_conf=conf,
        nccl_conf_files=conf_files,
        numa_balancing=None if balancing is None else balancing != 0,  # 1 and 2 (memory tiering) both scan
    )


def virtual_machine(host: Host, processor: dict[str, str] | None = None) -> str | None:
    """The hypervisor's name; None on bare metal, or where nothing tells."""
    if processor is None:
        processor = _processor(sysfs.text(host, "/proc/cpuinfo"))
    vendor, product = sysfs.text(host, DMI + "sys_vendor") or "", sysfs.text(host, DMI + "product_name") or ""
    flags = processor.get("flags")
    if flags is not None and "hypervisor" not in flags.split():
        return None  # x86 without the CPUID bit, whatever DMI says: a cloud's bare-metal instance
    if flags is None and "metal" in product:
        return None
    named = next((name for mark, name in NAMES["hypervisors"].items() if mark in f"{vendor} {product}"), None)
    return named or sysfs.text(host, "/sys/hypervisor/type") or ("unknown hypervisor" if flags is not None else None)


def storage_servers(mounts: str | None) -> tuple[str, ...]:
    """IPv4 addresses that file systems are mounted from: "10.1.2.3:/data" of NFS, "10.1.2.3@o2ib:/fs" of Lustre."""
    found: dict[str, None] = {}
    for line in (mounts or "").splitlines():
        words = line.split()
        if len(words) < 3 or words[2] not in NAMES["network_file_systems"]:
            continue
        for text in _SERVER.findall(words[0]):
            try:
                found[str(ipaddress.IPv4Address(text))] = None
            except ValueError:
                continue
    return tuple(found)[:SERVERS_MAX]


def numa_nodes(host: Host) -> tuple[NumaNode, ...]:
    """The nodes in the order of their numbers, which may have gaps (POWER9: 0 and 8)."""
    numbers = sorted(int(name[4:]) for name in sysfs.names(host, NODES) if re.fullmatch(r"node\d{1,4}", name))
    nodes = []
    for number in numbers[:NODES_MAX]:
        folder = f"{NODES}node{number}/"
        memory = re.search(r"MemTotal:\s*(\d{1,18}) kB", sysfs.text(host, folder + "meminfo") or "", re.ASCII)
        distances = (sysfs.parse_number(part) for part in (sysfs.text(host, folder + "distance") or "").split())
        nodes.append(
            NumaNode(
                node=number,
                cpus=sysfs.text(host, folder + "cpulist") or "",
                memory_bytes=int(memory[1]) * 1024 if memory else None,
                distances=tuple(d for d in distances if d is not None),
            )
        )
    return tuple(nodes)


def nccl_conf(host: Host, home: str) -> tuple[dict[str, str] | None, tuple[str, ...]]:
    """Settings of the user's file ($NCCL_CONF_FILE, else ~/.nccl.conf), then of /etc/nccl.conf; the first one wins."""
    user = host.environment().get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home else "")
    settings: dict[str, str] = {}
    files = []
    for path in (user, "/etc/nccl.conf"):
        content = sysfs.text(host, path) if path.startswith("/") and "\0" not in path else None
        if content is None:
            continue
        files.append(path)
        for line in content.splitlines():
            key, equals, value = line.strip().partition("=")
            if equals and not key.startswith("#"):
                settings.setdefault(key.strip(), value.strip())
    return (settings if files else None), tuple(files)


def _processor(content: str | None) -> dict[str, str]:
    """The first block of /proc/cpuinfo."""
    return sysfs.fields(re.split(r"\n[ \t]*\n", (content or "").lstrip(), maxsplit=1)[0])


def _cpu_vendor(processor: dict[str, str]) -> str | None:
    if "vendor_id" in processor:
        return processor["vendor_id"]
    if processor.get("CPU implementer"):
        return "ARM"  # the architecture; the implementer's number names the maker
    return "IBM" if processor.get("cpu", "").startswith("POWER") else None


def _text(value: object) -> str | None:
    return str(value) if value else None


PROBE = probe_of(__file__, HostinfoFacts, read, check, samples=samples)

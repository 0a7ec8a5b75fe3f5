"""Reads the properties of the machine, and detects whether this process runs in a container.

Specification: proc(5); DMI; Linux Documentation/ABI/stable/sysfs-devices-node; NCCL user guide, nccl.conf; cloud-init,
instance metadata (/run/cloud-init/cloud-id). Of containers: systemd's container interface (the variable `container`,
/run/systemd/container, /run/host/container-manager); podman-run(1) (/run/.containerenv, hidden by the tmpfs that
--read-only puts on /run); cgroups(7), proc(5) mountinfo; the kubelet's /etc/hosts and termination log.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from contracts.tables import read_table
from probes.host import sysfs
from probes.host.protocol import Host
from probes.hostinfo.probe import ROLE, HostinfoFacts, NumaNode

NAMES: dict[str, Any] = read_table(__file__, "names.toml")
DMI = "/sys/class/dmi/id/"
NODES = "/sys/devices/system/node/"
_OF_THE_CONTAINER = ("container", ROLE)  # used below; not read by NCCL
MAX_NODES = 1024  # MAX_NUMNODES of the largest kernel configuration

_SERVER = re.compile(r"(\d{1,3}(?:\.\d{1,3}){3})(?=[:@,]|$)", re.ASCII)
MAX_SERVERS = 64


def read(host: Host) -> HostinfoFacts:
    """Read all facts; missing ones are None."""
    identity, cpu = host.identity(), host.cpu()
    cpuinfo = sysfs.text(host, "/proc/cpuinfo")
    first = _parse_processor(cpuinfo)
    vendor, product = sysfs.text(host, DMI + "sys_vendor"), sysfs.text(host, DMI + "product_name")
    conf, conf_files = read_nccl_conf(host, str(identity.get("home") or ""))
    balancing = sysfs.number(host, "/proc/sys/kernel/numa_balancing")
    load = cpu.get("load_average")
    return HostinfoFacts(
        hostname=str(identity.get("hostname") or "unknown"),
        kernel=_to_text(identity.get("kernel")),
        os=sysfs.fields(sysfs.text(host, "/etc/os-release"), "=").get("PRETTY_NAME", "").strip("\"'") or None,
        architecture=_to_text(identity.get("architecture")),
        cpu_vendor=_get_cpu_vendor(first),
        cpu_name=first.get("model name") or first.get("cpu"),
        cpu_family=sysfs.parse_number(first.get("cpu family")),
        cpu_model=sysfs.parse_number(first.get("model")),
        sockets=len(set(re.findall(r"^physical id[ \t]*:[ \t]*(\d+)", cpuinfo or "", re.MULTILINE | re.ASCII))) or None,
        cores=cpu.get("physical"),
        threads=cpu.get("logical"),
        memory_bytes=cpu.get("memory_bytes"),
        numa=read_numa_nodes(host),
        virtual_machine=read_virtual_machine(host, first),
        product=product,
        vendor=vendor,
        chassis_asset_tag=sysfs.text(host, DMI + "chassis_asset_tag"),
        cloud_id=sysfs.text(host, "/run/cloud-init/cloud-id"),
        vendor_files=tuple(path for path in NAMES["vendor_files"] if host.exists(path)),
        storage_servers=read_storage_servers(sysfs.text(host, "/proc/self/mounts")),
        boot_id=sysfs.text(host, "/proc/sys/kernel/random/boot_id"),
        load=load[0] if load else None,
        nccl_environment={
            k: v for k, v in host.environment().items() if k not in _OF_THE_CONTAINER and not k.startswith("SLURM")
        },
        nccl_conf=conf,
        nccl_conf_files=conf_files,
        numa_balancing=None if balancing is None else balancing != 0,  # 1 and 2 (memory tiering) both scan pages
    )


def read_virtual_machine(host: Host, processor: dict[str, str] | None = None) -> str | None:
    """Return the name of the hypervisor; None on bare metal or if there is no evidence of one."""
    if processor is None:
        processor = _parse_processor(sysfs.text(host, "/proc/cpuinfo"))
    vendor, product = sysfs.text(host, DMI + "sys_vendor") or "", sysfs.text(host, DMI + "product_name") or ""
    flags = processor.get("flags")
    if flags is not None and "hypervisor" not in flags.split():
        return None  # x86 without the CPUID hypervisor bit: a bare-metal cloud instance, whatever DMI contains
    if flags is None and "metal" in product:
        return None
    named = next((name for mark, name in NAMES["hypervisors"].items() if mark in f"{vendor} {product}"), None)
    return named or sysfs.text(host, "/sys/hypervisor/type") or ("unknown hypervisor" if flags is not None else None)


def read_storage_servers(mounts: str | None) -> tuple[str, ...]:
    """Return the IPv4 servers of network file systems: "10.1.2.3:/data" (NFS), "10.1.2.3@o2ib:/fs" (Lustre)."""
    servers: dict[str, None] = {}
    for line in (mounts or "").splitlines():
        columns = line.split()
        if len(columns) < 3 or columns[2] not in NAMES["network_file_systems"]:
            continue
        for text in _SERVER.findall(columns[0]):
            try:
                servers[str(ipaddress.IPv4Address(text))] = None
            except ValueError:
                continue
    return tuple(servers)[:MAX_SERVERS]


def read_numa_nodes(host: Host) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes by number. Numbers may have gaps (POWER9: 0 and 8)."""
    numbers = sorted(int(name[4:]) for name in sysfs.names(host, NODES) if re.fullmatch(r"node\d{1,4}", name))
    nodes = []
    for number in numbers[:MAX_NODES]:
        folder = f"{NODES}node{number}/"
        memory = re.search(r"MemTotal:\s*(\d{1,18}) kB", sysfs.text(host, folder + "meminfo") or "", re.ASCII)
        cpus, size = sysfs.text(host, folder + "cpulist") or "", int(memory[1]) * 1024 if memory else None
        nodes.append(NumaNode(node=number, cpus=cpus, memory_bytes=size))
    return tuple(nodes)


def read_nccl_conf(host: Host, home: str) -> tuple[dict[str, str] | None, tuple[str, ...]]:
    """Read the user's file ($NCCL_CONF_FILE, else ~/.nccl.conf), then /etc/nccl.conf; a name's first value is used."""
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


def _parse_processor(content: str | None) -> dict[str, str]:
    """Parse the first block of /proc/cpuinfo."""
    return sysfs.fields(re.split(r"\n[ \t]*\n", (content or "").lstrip(), maxsplit=1)[0])


def _get_cpu_vendor(processor: dict[str, str]) -> str | None:
    if "vendor_id" in processor:
        return processor["vendor_id"]
    if processor.get("CPU implementer"):
        return "ARM"  # the architecture; the implementer number would identify the vendor
    return "IBM" if processor.get("cpu", "").startswith("POWER") else None


def _to_text(value: object) -> str | None:
    return str(value) if value else None


# Containers -----------------------------------------------------------------------------------------------------------

_GROUPS = {kind: re.compile(pattern) for kind, pattern in NAMES["cgroups"].items()}
_POD_MOUNT = re.compile(r" (?:\S*/pods/[0-9a-f-]{36}/etc-hosts /etc/hosts|\S+ /dev/termination-log) ")


def detect_container(host: Host) -> str | None:
    """Return the kind of container of this process ("kubernetes", "podman", ...); None if there is no evidence of one.

    The most reliable evidence is checked first: evidence of a pod, which also shows evidence of its engine; files
    created by engines; cgroups; then mounts, container managers and the path of the root file system.
    """
    groups = "\n".join(sysfs.text(host, path) or "" for path in ("/proc/self/cgroup", "/proc/1/cgroup"))
    runtime = next((kind for kind, sign in _GROUPS.items() if sign.search(groups)), None)
    hosts = sysfs.text(host, "/etc/hosts") or ""
    if (
        runtime == "kubernetes"
        or host.exists("/var/run/secrets/kubernetes.io/serviceaccount")
        or hosts.startswith("# Kubernetes-managed hosts file")  # the kubelet writes this into every pod
    ):
        return "kubernetes"
    if host.exists("/run/.containerenv"):
        return "podman"
    if host.exists("/.dockerenv"):
        return "docker"
    return runtime or next(_find_candidates(host), None)


def _find_candidates(host: Host) -> Iterator[str]:
    """Yield container kinds from pod mounts, the container manager and the path of the root file system, in order."""
    mounts = (sysfs.text(host, "/proc/self/mountinfo") or "").splitlines()
    if any(_POD_MOUNT.search(line) for line in mounts):
        yield "kubernetes"
    candidates = (
        host.environment().get("container"),
        sysfs.text(host, "/run/systemd/container"),
        sysfs.text(host, "/run/host/container-manager"),
    )
    roots = [line for line in mounts if line.split(" ", 5)[4:5] == ["/"]]
    stores = [kind for line in roots for mark, kind in NAMES["stores"].items() if mark in line]
    kinds = [word for word in candidates if word is not None and word in NAMES["container_kinds"]]
    yield from (kind for kind in kinds if kind != "oci")
    yield from stores
    yield from kinds


def is_of_agent(host: Host) -> bool:
    """Whether this is the container of the resident agent, whose settings differ from those of a job's pod."""
    return host.environment().get(ROLE) == "agent" and detect_container(host) is not None

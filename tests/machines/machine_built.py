"""A machine that is described rather than found: its files, and answers for everything else."""

import errno
import os
from dataclasses import dataclass, field

from dicthost import DictHost, tree_of
from machine_nvml import NvmlAnswers
from machine_tree import Netdev, Tree

from probes.host.protocol import GpuHandle, Json

CONTAINER_CAPS = 0x00000000A80425FB  # the container engines' default set
ALL_CAPS = 0x000001FFFFFFFFFF
BUILT_AT = 1767225600.0  # a fixed time: rebuilding changes nothing


@dataclass(kw_only=True)
class Cpu:
    """Sockets, cores and their NUMA nodes; CPU numbers of a node as Linux lists them."""

    vendor: str
    name: str
    family: int
    model: int
    sockets: int
    threads: int
    nodes: dict[int, str]  # "0-55,112-167"
    memory_gib: int
    hypervisor: bool = False
    architecture: str = "x86_64"
    memory_only_nodes: tuple[int, ...] = ()  # Grace: GPU memory


@dataclass(kw_only=True)
class Machine:
    """Everything but the tree, with the usual values of a bare-metal node."""

    hostname: str
    source: str
    product: str
    vendor: str
    cpu: Cpu
    kernel: str = "5.15.0-113-generic"
    os: str = "Ubuntu 22.04.5 LTS"
    nvml: NvmlAnswers | None = None
    netdevs: tuple[Netdev, ...] = ()
    default_route: int | None = None
    memlock: tuple[int | None, int | None] = (None, None)
    capabilities: int = ALL_CAPS
    uid: int = 0
    shm: tuple[int, int] = (512 << 30, 512 << 30)
    peermem: str | None = "550.90.07"
    driver_proc: str | None = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07  Release Build"
    cmdline: str = "BOOT_IMAGE=/boot/vmlinuz root=/dev/sda2 ro iommu=pt"
    container: str | None = None  # "kubernetes"
    kernel_log: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    port_links: dict[str, dict[str, Json]] = field(default_factory=dict)  # interface -> what its driver answers


class BuiltHost(DictHost):
    """A bare host, on which nothing of NCCL is set and pyverbs is not installed, as on most."""

    def __init__(self, tree: Tree, machine: Machine) -> None:
        cpu, nets = machine.cpu, machine.netdevs
        addresses = [address_of(net, address) for net in nets for address in net.addresses]
        cores = cpu.threads // (1 if cpu.architecture == "aarch64" else 2)  # Grace has one thread a core
        super().__init__(
            tree.files, tree.links, shm=machine.shm,
            limits={"NPROC": (None, None), "NOFILE": (1048576, 1048576), "CORE": (0, None),  # systemd's defaults
                    "MEMLOCK": machine.memlock},
            netlink={"links": [link_of(net) for net in nets], "addresses": addresses,
                     "routes": routes_of(nets, machine.default_route)},
            port_links={net.name: machine.port_links.get(net.name, {"$errno": "ENOTSUP"}) for net in nets},
            cpu={"logical": cpu.threads, "physical": cores, "load_average": [0.5, 0.5, 0.5],
                 "memory_bytes": cpu.memory_gib << 30},
        )  # fmt: skip
        self.machine = machine

    def identity(self) -> dict[str, Json]:
        """In the order of a live host's answer, which the recordings have."""
        machine = self.machine
        return {
            "hostname": machine.hostname, "pid": 17, "uid": machine.uid, "kernel": machine.kernel,
            "architecture": machine.cpu.architecture, "time": BUILT_AT,
            "home": "/home/user" if machine.uid else "/root",
        }  # fmt: skip

    def nvml(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """The machine's GPUs."""
        return super().nvml(symbol) if self.machine.nvml is None else self.machine.nvml(symbol, *arguments)

    def kernel_log(self, word: str) -> tuple[str, ...]:
        """Root only."""
        if self.machine.uid:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), "kernel log")
        return tuple(line for line in self.machine.kernel_log if word in line)


def link_of(net: Netdev) -> dict[str, Json]:
    """An interface as pyroute2 spells it."""
    up = 0x1 | (0x40 | 0x10000 if net.up else 0)  # IFF_UP, IFF_RUNNING, IFF_LOWER_UP
    link: dict[str, Json] = {
        "family": 0, "ifi_type": net.type, "index": net.index,
        "flags": up | (0x8 if net.type == 772 else 0x1002), "state": "up",
        "IFLA_IFNAME": net.name, "IFLA_MTU": net.mtu, "IFLA_OPERSTATE": "UP" if net.up else "DOWN",
        "IFLA_ADDRESS": net.mac, "IFLA_CARRIER": int(net.up),
        "IFLA_STATS64": {"rx_errors": 0, "tx_errors": 0, "rx_dropped": 0, "tx_dropped": 0},
    }  # fmt: skip
    if net.link is not None:
        link["IFLA_LINK"] = net.link
    if net.master is not None:
        link["IFLA_MASTER"] = net.master
    if net.kind:
        link["IFLA_LINKINFO"] = {"IFLA_INFO_KIND": net.kind}
    return link


def address_of(net: Netdev, address: str) -> dict[str, Json]:
    """One of its addresses, "10.0.0.1/24"."""
    plain, _, prefix = address.partition("/")
    six = ":" in plain
    scope = 254 if net.type == 772 else 253 if plain.startswith("fe80") else 0
    answer: dict[str, Json] = {
        "family": 10 if six else 2, "prefixlen": int(prefix), "flags": 128, "scope": scope, "index": net.index,
        "IFA_ADDRESS": plain, "IFA_FLAGS": 128,
    }  # fmt: skip
    return answer if six else {**answer, "IFA_LOCAL": plain, "IFA_LABEL": net.name}


def routes_of(nets: tuple[Netdev, ...], default: int | None) -> list[dict[str, Json]]:
    """The default route, over the interface of this index."""
    head = {"family": 2, "src_len": 0, "tos": 0, "table": 254, "proto": 3, "scope": 0, "type": 1, "flags": 0}
    routes: list[dict[str, Json]] = []
    for net in nets:
        if net.index == default:
            gateway = net.addresses[0].rpartition(".")[0] + ".1"
            routes.append({**head, "dst_len": 0, "RTA_TABLE": 254, "RTA_GATEWAY": gateway, "RTA_OIF": net.index})
    return routes


def write_host(tree: Tree, machine: Machine) -> None:
    """/proc, DMI, NUMA nodes and modules."""
    cpu = machine.cpu
    tree.add("host", it=machine)
    flags = "fpu sse2 hypervisor" if cpu.hypervisor else "fpu sse2"
    texts = []
    for number in range(cpu.threads):
        socket = next(i for i, cpus in enumerate(_by_socket(cpu)) if number in cpus)
        files, _ = tree_of(f"cpu {cpu.architecture}", number=number, socket=socket, flags=flags, it=cpu)
        texts += files.values()
    tree.write("/proc/cpuinfo", "\n".join(texts))
    nodes = {**cpu.nodes, **dict.fromkeys(cpu.memory_only_nodes, "")}
    for node, cpus in nodes.items():
        distances = " ".join("10" if other == node else "21" for other in nodes)
        kib = cpu.memory_gib * 1048576 // len(cpu.nodes)
        tree.add("numa node", folder=f"/sys/devices/system/node/node{node}", node=node, cpus=cpus, kib=kib,
                 distances=distances)  # fmt: skip
    if machine.container:
        tree.add(f"pod of {machine.container}")
    if machine.driver_proc:
        tree.write("/proc/driver/nvidia/version", machine.driver_proc)
    if machine.peermem:
        tree.write("/sys/module/nvidia_peermem/version", machine.peermem)
    for path, content in machine.files.items():
        tree.write(path, content)


def _by_socket(cpu: Cpu) -> list[set[int]]:
    nodes = list(cpu.nodes.values())
    share = max(1, len(nodes) // cpu.sockets)
    return [set().union(*(cpus_of(n) for n in nodes[i * share : (i + 1) * share])) for i in range(cpu.sockets)]


def cpus_of(text: str) -> list[int]:
    """ "0-3,8" as numbers."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found

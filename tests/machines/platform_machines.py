"""Built machines of the platforms in planner/nccl_env/data/platforms.toml, in the shape that their makers publish.

Each is described in a few lines and built when a test asks for it: no file of it is stored. What matters here is what
the rules of the environment look at: DMI, GPUs, NICs with their GIDs, interfaces, files on the disk.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import build
import yaml
from build import CPUS, LOOPBACK, SPR, answers, guid, hca
from machine_built import CONTAINER_CAPS, Cpu, Machine
from machine_nvml import BOARDS, Board, NvmlGpu, fabric
from machine_tree import AMAZON, NVIDIA, Dev, Netdev, Rdma, Tree, switch
from scanned import scan

from probes.api import Snapshot

AMD, CRAY, GOOGLE = 0x1002, 0x17DB, 0x1AE0


@dataclass(kw_only=True)
class Nics:
    """The NICs of a node, all alike."""

    kind: str  # "ib", "roce", "efa", "cxi", "gvnic"
    count: int
    name: str = "mlx5_{}"  # of the RDMA device, or of the interface where there is none
    names: tuple[str, ...] = ()  # where they follow no count
    gbit: int = 400
    first: int = 0
    subnet: str | None = "10.1.{}.5/24"  # of the interface; None: it has no address
    six: bool = False  # the GIDs are of IPv6
    hca_type: str = "MT4129"
    device: int = 0x1021
    netdev: str = "rdma{}"
    pfc: dict[str, Any] | None = None
    vlan: int | None = None  # the address is on a VLAN of this number, on a bond of the port


@dataclass(kw_only=True)
class Node:
    """What differs from one platform to the next."""

    vendor: str
    product: str
    board: Board | None
    source: str
    gpus: int = 8
    nics: tuple[Nics, ...] = ()
    cpu: Cpu = field(default_factory=lambda: SPR)
    front: Netdev = field(
        default_factory=lambda: Netdev(name="eth0", index=2, speed=100000, addresses=("10.0.0.5/24",))
    )
    flat: bool = False  # a hypervisor gives every device its own root
    files: dict[str, str] = field(default_factory=dict)
    tag: str | None = None
    container: str | None = None
    clique: bool = False
    c2c: int | None = None
    amd: bool = False


def mapped(address: str) -> str:
    """An IPv4 address as sysfs prints its GID."""
    a, b, c, d = (int(part) for part in address.split("/")[0].split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def _nic(spec: Nics, number: int, index: int, bus_id: str) -> tuple[Dev, list[Netdev], dict[str, Any]]:
    """One NIC with the interfaces that belong to it, and what its driver says of the port."""
    name = spec.names[number] if spec.names else spec.name.format(spec.first + number)
    address = spec.subnet.format(number + 1) if spec.subnet else None
    speed = spec.gbit * 1000
    if spec.kind == "efa":
        card = Rdma(name=name, link_layer="Unspecified", rate=f"{spec.gbit} Gb/sec (4X)", hca_type=None, board=None,
                    guid=guid(number), counters={}, hw_counters={"rx_bytes": 0})  # fmt: skip
        return Dev(bus_id=bus_id, class_code=0x020000, vendor=AMAZON, device=0xEFA2, driver="efa", rdma=card,
                   config=False), [], {}  # fmt: skip
    if spec.kind in ("cxi", "gvnic"):
        vendor, device, driver = (CRAY, 0x0501, "cxi_ss1") if spec.kind == "cxi" else (GOOGLE, 0x0042, "gve")
        net = Netdev(name=name, index=index, speed=speed, addresses=(address,) if address else ())
        return Dev(bus_id=bus_id, class_code=0x020000, vendor=vendor, device=device, driver=driver, netdev=net,
                   config=False), [net], {}  # fmt: skip
    if spec.kind == "ib":
        card = Rdma(name=name, rate=f"{spec.gbit} Gb/sec (4X NDR)", guid=guid(number), hca_type=spec.hca_type)
        return hca(bus_id, card, device=spec.device), [], {}
    net = Netdev(name=spec.netdev.format(spec.first + number), index=index, speed=speed, mtu=9000,
                 addresses=(address,) if address and spec.vlan is None else ())  # fmt: skip
    nets = [net]
    if spec.vlan is not None:
        nets.append(Netdev(name=f"{net.name}.{spec.vlan}", index=index + 200, kind="vlan", link=index, speed=speed,
                           mtu=9000, addresses=(address,) if address else ()))  # fmt: skip
    local = f"fe80:0000:0000:0000:0000:00ff:fe00:{number + 1:04x}"
    own = mapped(address) if address and not spec.six else ""
    if spec.six:
        own = f"fd02:0000:0000:{number + 1:04x}:0000:0000:0000:0001"
    gids = [(local, "IB/RoCE v1", net.name), (local, "RoCE v2", net.name)]
    if own:
        gids += [(own, "IB/RoCE v1", nets[-1].name), (own, "RoCE v2", nets[-1].name)]
    card = Rdma(name=name, link_layer="Ethernet", rate=f"{spec.gbit} Gb/sec (4X NDR)", guid=guid(number),
                gids=tuple(gids), hca_type=spec.hca_type)  # fmt: skip
    return hca(bus_id, card, device=spec.device, net=net), nets, {net.name: spec.pfc} if spec.pfc else {}


def describe(spec: Node) -> Callable[[Tree], Machine]:
    """The machine of one node."""

    def built(tree: Tree) -> Machine:
        gpus: list[NvmlGpu] = []
        ports = {nics.netdev.format(nics.first) for nics in spec.nics if nics.kind == "roce"}
        nets: list[Netdev] = [LOOPBACK] if spec.front.name in ports else [LOOPBACK, spec.front]
        links: dict[str, Any] = {}
        below: list[list[Dev]] = [[] for _ in range(max(spec.gpus, 1))]
        for number in range(spec.gpus):
            bus_id = f"{number + 1:04x}:10:00.0"
            if spec.amd:
                below[number].append(
                    Dev(bus_id=bus_id, class_code=0x120000, vendor=AMD, device=0x74A1, driver="amdgpu")
                )
                continue
            below[number].append(Dev(bus_id=bus_id, class_code=0x030200, vendor=NVIDIA, device=0x2330, driver="nvidia",
                                     config=False))  # fmt: skip
            extra: dict[str, Any] = {}
            if spec.clique:
                extra["nvmlDeviceGetGpuFabricInfoV"] = fabric(3, bytes.fromhex("7d5c3a10f2e44b6a9c1b0a5f64d2e8b1"), 7)
            if spec.c2c:
                extra["c2c"] = spec.c2c
            gpus.append(NvmlGpu(board=spec.board, bus_id=bus_id, numa=int(number * 2 >= spec.gpus),
                                switches=("",) if spec.board.links else (), answers=extra))  # fmt: skip
        count = 0
        for nics in spec.nics:
            for number in range(nics.count):
                at = number * len(below) // nics.count if nics.count > len(below) else number % len(below)
                bus_id = f"{at + 1:04x}:{0x11 + len(below[at]):02x}:00.0"
                index = 2 if nics.netdev == spec.front.name else 10 + count
                device, found, said = _nic(nics, number, index, bus_id)
                below[at].append(device)
                nets += found
                links |= said
                count += 1
        for number, devices in enumerate(below):
            if spec.flat:
                for place, device in enumerate(devices):
                    tree.pci(f"pci{number + 1:04x}:{place:02x}", -1, device)
            else:
                above = switch(1, *devices, domain=number + 1)
                tree.pci(f"pci{number + 1:04x}:00", int(number * 2 >= len(below)), above)
        for net in nets[1:]:
            if f"/sys/class/net/{net.name}" not in tree.links:
                tree.netdev(net)
        files = dict(spec.files)
        if spec.tag:
            files["/sys/class/dmi/id/chassis_asset_tag"] = spec.tag
        return Machine(
            hostname=f"{spec.product.lower().replace(' ', '-')}-01", source=spec.source, product=spec.product,
            vendor=spec.vendor, cpu=spec.cpu, nvml=answers(gpus, spec.cpu) if gpus else None, netdevs=tuple(nets),
            default_route=2, files=files, container=spec.container, port_links=links,
            capabilities=CONTAINER_CAPS if spec.container else 0x000001FFFFFFFFFF, shm=(16 << 30, 16 << 30),
        )  # fmt: skip

    return built


def _node(row: dict[str, Any]) -> Node:
    """A row of platforms.yaml."""
    row["board"] = BOARDS.get(row.get("board", ""))
    row["nics"] = tuple(Nics(**{**nics, "names": tuple(nics.get("names", ()))}) for nics in row.get("nics", ()))
    if "cpu" in row:
        row["cpu"] = CPUS[row["cpu"]]
    if "front" in row:
        row["front"] = Netdev(**{**row["front"], "addresses": tuple(row["front"]["addresses"])})
    return Node(**row)


NODES: dict[str, Node] = {
    name: _node(row)
    for name, row in yaml.safe_load(Path(__file__).with_name("platforms.yaml").read_text("utf-8")).items()
}


MACHINES: dict[str, Callable[[Tree], Machine]] = {
    **{name: describe(node) for name, node in NODES.items()},
    "openshift-macvlan": build.MACHINES["r760xa-2xA40-bf3"],
    "openshift-ipvlan": build.MACHINES["r760xa-ipvlan"],
    **{name: build.MACHINES[name] for name in ("sriov-pod", "gb200-nvl72-tray")},
}


@cache
def snapshot(name: str) -> Snapshot:
    """The machine, built and scanned."""
    return snapshot_of(MACHINES[name])


def snapshot_of(made: Callable[[Tree], Machine]) -> Snapshot:
    """A machine of a test's own."""
    return scan(build.built(made))


__all__ = ["MACHINES", "NODES", "Nics", "Node", "describe", "snapshot", "snapshot_of"]

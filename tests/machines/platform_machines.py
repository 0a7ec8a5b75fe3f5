"""Built machines of the platforms in planner/nccl_env/data/platforms.toml, in the shape that their makers publish.

Each is described in a few lines and built when a test asks for it: no file is kept of it. What matters here is what
the rules of the environment look at: DMI, GPUs, NICs with their GIDs, interfaces, files on the disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import build
from build import GENOA, GRACE, LOOPBACK, SPR, answers, guid, hca
from machine_built import CONTAINER_CAPS, BuiltHost, Cpu, Machine, write_host
from machine_nvml import A100_40, GB200, H100, L40S, Board, NvmlGpu, fabric
from machine_tree import AMAZON, MELLANOX, NVIDIA, Dev, Netdev, Rdma, Tree, port, switch

from probes.api import Snapshot
from probes.host.protocol import Host
from probes.scan import scan

AMD, CRAY, GOOGLE = 0x1002, 0x17DB, 0x1AE0
H200 = replace(H100, name="NVIDIA H200", memory_bytes=143771 << 20)
H100_NVL = replace(H100, name="NVIDIA H100 NVL", links=12, memory_bytes=95830 << 20)
B200 = replace(GB200, name="NVIDIA B200", memory_bytes=183359 << 20)
B300 = replace(GB200, name="NVIDIA B300 SXM6 AC", capability=(10, 3), memory_bytes=275040 << 20)
GB300 = replace(GB200, name="NVIDIA GB300", capability=(10, 3))
A100_PCIE = replace(A100_40, name="NVIDIA A100 80GB PCIe")
GH200 = replace(H100, name="NVIDIA GH200 120GB")
SPR_VM = replace(SPR, hypervisor=True)
GENOA_VM = replace(GENOA, hypervisor=True)
GIB = "/usr/local/gib/scripts/set_nccl_env.sh"
TCPXO = "/usr/local/tcpxo/lib64/nccl-env-profile.sh"


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
    vf: bool = False
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
    flat: bool = False  # a hypervisor gives every device a root of its own
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
            assert spec.board is not None
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
            if not (tree.root / f"sys/class/net/{net.name}").exists():
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


# -- AWS: DMI's product is the instance type; EFA devices beside the GPUs -------------------------------------------
_EN = Netdev(name="ens5", index=2, speed=100000, addresses=("10.0.0.5/20",))


def _aws(product: str, board: Board, efas: int, gbit: int, gpus: int = 8, **more: Any) -> Node:
    nics = (Nics(kind="efa", count=efas, name="rdmap{}s0", gbit=gbit),) if efas else ()
    return Node(**{"vendor": "Amazon EC2", "product": product, "board": board, "gpus": gpus, "nics": nics,
                   "cpu": SPR_VM, "front": _EN, "source": "aws-ofi-nccl platform-aws.cpp", **more})  # fmt: skip


# -- OCI: bare metal, marked by the chassis' asset tag --------------------------------------------------------------
def _oci(board: Board | None, nics: tuple[Nics, ...], product: str, **more: Any) -> Node:
    return Node(**{"vendor": "Oracle Corporation", "product": product, "board": board, "nics": nics,
                   "tag": "OracleCloud.com", "source": "oci-hpc-oke manifests, shape pages", **more})  # fmt: skip


_OCI_FRONT = Nics(
    kind="roce", count=1, first=2, gbit=100, subnet="10.0.0.5/24", netdev="eth0", hca_type="MT4125", device=0x101D
)
_OCI_H100 = tuple(f"mlx5_{number}" for number in range(18) if number not in (2, 11))


def _oci_nics(count: int, gbit: int, names: tuple[str, ...] = ()) -> tuple[Nics, ...]:
    return (Nics(kind="roce", count=count, gbit=gbit, subnet="10.224.0.{}/12", names=names),)


def _gcp(board: Board, nics: tuple[Nics, ...], files: tuple[str, ...] = (), **more: Any) -> Node:
    return Node(
        **{
            "vendor": "Google",
            "product": "Google Compute Engine",
            "board": board,
            "nics": nics,
            "cpu": SPR_VM,
            "files": dict.fromkeys(files, "# environment\n"),
            "source": "cluster-toolkit examples",
            **more,
        }
    )


def _azure(board: Board, nics: tuple[Nics, ...], files: tuple[str, ...] = (), **more: Any) -> Node:
    return Node(**{"vendor": "Microsoft Corporation", "product": "Virtual Machine", "board": board, "nics": nics,
                   "cpu": SPR_VM, "flat": True, "files": dict.fromkeys(files, '<system version="1"/>'),
                   "tag": "7783-7084-3265-9085-8269-3286-77", "source": "Azure azhpc-images", **more})  # fmt: skip


_AZURE_IB = Nics(kind="ib", count=8, name="mlx5_ib{}", hca_type="MT4126", device=0x101E)
_GVNIC = {"kind": "gvnic", "name": "eth{}", "gbit": 200, "first": 1}
_TRAY = {"gpus": 4, "cpu": GRACE, "clique": True, "c2c": 14}
_SHARP = "/opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so"

NODES: dict[str, Node] = {
    "aws-p4de": _aws("p4de.24xlarge", replace(A100_40, name="NVIDIA A100-SXM4-80GB"), 4, 100),
    "aws-p5-4xlarge": _aws("p5.4xlarge", H100, 1, 100, 1),
    "aws-p5": _aws("p5.48xlarge", H100, 32, 100),
    "aws-p6-b200": _aws("p6-b200.48xlarge", B200, 8, 400),
    "aws-p6-b300": _aws("p6-b300.48xlarge", B300, 16, 400),
    "aws-p6e-gb200": _aws("p6e-gb200.36xlarge", GB200, 4, 400, **_TRAY),
    "aws-g6e": _aws("g6e.48xlarge", L40S, 4, 100, cpu=GENOA_VM),
    "azure-nd-a100": _azure(A100_40, (replace(_AZURE_IB, gbit=200),), ("/opt/microsoft/ndv4/topo.xml",)),
    "azure-nd-h200": _azure(H200, (_AZURE_IB,), ("/opt/microsoft/ndv5-topo.xml",)),
    "azure-nd-gb200": _azure(GB200, (replace(_AZURE_IB, count=4),), **_TRAY),
    "azure-nc-a100": _azure(A100_PCIE, (), ("/opt/microsoft/ncv4/topo.xml",), gpus=4),
    "azure-nc-h100": _azure(H100_NVL, (), gpus=2),
    "gcp-a3-high": _gcp(H100, (Nics(count=4, **_GVNIC),)),
    "gcp-a3-mega": _gcp(H100, (Nics(count=8, **_GVNIC),), (TCPXO,)),
    "gcp-a3-ultra": _gcp(H200, (Nics(kind="roce", count=8),), (GIB,)),
    "gcp-a4": _gcp(B200, (Nics(kind="roce", count=8),)),
    "gcp-a4x": _gcp(GB200, (Nics(kind="roce", count=4),), (GIB,), **_TRAY),
    "oci-a100": _oci(A100_40, _oci_nics(16, 100), "BM.GPU4.8", tag=None),
    "oci-h100": _oci(H100, (*_oci_nics(16, 200, _OCI_H100), _OCI_FRONT), "ORACLE SERVER X9-2c"),
    "oci-h200": _oci(H200, _oci_nics(8, 400), "ORACLE SERVER E5-2c"),
    "oci-b200": _oci(B200, _oci_nics(8, 400), "E5-2c", files={"/run/cloud-init/cloud-id": "oracle"}, tag=None),
    "oci-gb200": _oci(GB200, _oci_nics(4, 400), "GB200 NVL", **_TRAY),
    "oci-gb200-v3": _oci(GB200, _oci_nics(8, 400), "GB200 NVL", **_TRAY),
    "oci-mi300x": _oci(None, _oci_nics(8, 400), "ORACLE SERVER E5-2c", amd=True),
    "slingshot-gh200": Node(
        vendor="HPE", product="HPE Cray EX254n", board=GH200, gpus=4, cpu=GRACE, c2c=10,
        nics=(Nics(kind="cxi", count=4, name="hsn{}", gbit=200, subnet="172.28.0.{}/16"),),
        front=Netdev(name="nmn0", index=2, speed=1000, addresses=("10.100.0.5/22",)),
        files={"/opt/cray/libfabric/1.22.0/lib64/libfabric.so": ""}, source="CSCS Alps, documentation of the nodes",
    ),
    "slingshot-a100": Node(
        vendor="HPE", product="HPE Cray EX235n", board=A100_40, gpus=4, cpu=GENOA,
        nics=(Nics(kind="cxi", count=4, name="hsn{}", gbit=200, subnet="10.249.0.{}/16"),), source="NERSC Perlmutter",
    ),
    "slingshot-mi250": Node(
        vendor="HPE", product="HPE Cray EX235a", board=None, amd=True, cpu=GENOA,
        nics=(Nics(kind="cxi", count=4, name="hsn{}", gbit=200, subnet="10.253.0.{}/16"),), source="LUMI-G",
    ),
    "dgx-h200": Node(
        vendor="NVIDIA", product="DGXH200", board=H200, nics=(Nics(kind="ib", count=8),), files={_SHARP: ""},
        source="NVIDIA DGX H100/H200 user guide",
    ),
    "coreweave-h100": Node(
        vendor="Supermicro", product="SYS-821GE-TNHR", board=H100, source="coreweave/nccl-tests",
        nics=(Nics(kind="ib", count=8, name="ibp{}"),), container="kubernetes",
        front=Netdev(name="eth0", index=2, speed=100000, kind="veth", link=40, addresses=("10.240.0.5/24",)),
    ),
    "coreweave-gb300-roce": Node(
        vendor="Dell Inc.", product="PowerEdge XE9712", board=GB300, source="coreweave/nccl-tests (GB300, RoCE)",
        nics=(Nics(kind="roce", count=8, name="ibp{}", six=True, subnet="fd02:0:0:{}::1/64", netdev="ibs{}"),), **_TRAY,
    ),
    "lambda-h100-vm": Node(
        vendor="QEMU", product="Standard PC (Q35 + ICH9, 2009)", board=H100, cpu=SPR_VM, flat=True,
        nics=(Nics(kind="ib", count=8, hca_type="MT4126", device=0x101E),), source="flat KVM guest",
    ),
    "vlan-on-bond": Node(
        vendor="Dell Inc.", product="PowerEdge XE9680", board=H100, source="RoCE addresses on VLANs",
        nics=(Nics(kind="roce", count=8, vlan=200),),
    ),
    "spectrum-x": Node(
        vendor="Supermicro", product="SYS-A22GA-NBRT", board=B200, source="NVIDIA Spectrum-X: DSCP 26 in priority 3",
        nics=(Nics(kind="roce", count=8, pfc={"pfc_classes": 8, "pfc_mask": 8, "app_dscp": [8 * 26 + 3, 8 * 48 + 6]}),),
    ),
    "twin-storage": Node(
        vendor="Dell Inc.", product="PowerEdge XE9680", board=H100, source="a ninth port near GPU0 carries NFS",
        nics=(
            Nics(kind="roce", count=8),
            Nics(kind="roce", count=1, first=8, subnet="10.200.0.5/16", netdev="stor{}"),
        ),
        files={"/proc/self/mounts": "10.200.7.9:/data /data nfs4 rw 0 0"},
    ),
    "tcp-two-equal": Node(
        vendor="Supermicro", product="AS-4125GS-TNRT", board=L40S, gpus=4, cpu=GENOA, source="two equal 100G, no RDMA",
        nics=(Nics(kind="gvnic", count=2, name="enp{}s0", gbit=100),),
        front=Netdev(name="eno1", index=2, speed=1000, addresses=("10.0.0.5/24",)),
    ),
}  # fmt: skip


def _pod(tree: Tree, kind: str) -> Machine:
    """The pod of r760xa with a network of another kind."""
    machine = build.r760xa(tree)
    for net in machine.netdevs:
        if net.name == "net1":
            net.kind = kind
    return machine


def sriov_pod(tree: Tree) -> Machine:
    """A pod with eight virtual functions; the physical ones are on the bus, and belong to the host."""
    nets = [LOOPBACK, Netdev(name="eth0", index=2, mtu=1400, kind="veth", link=37, addresses=("10.128.2.17/23",))]
    gpus, entries = [], ['{"name":"ovn-kubernetes","interface":"eth0","ips":["10.128.2.17"],"default":true}']
    for i in range(8):
        bus = f"{0x10 + 8 * i:02x}"
        net = Netdev(name=f"net{i + 1}", index=3 + i, mtu=9000, speed=400000, addresses=(f"192.168.{i + 1}.5/24",))
        gids = (
            (mapped(f"192.168.{i + 1}.5"), "IB/RoCE v1", net.name),
            (mapped(f"192.168.{i + 1}.5"), "RoCE v2", net.name),
        )
        card = Rdma(name=f"mlx5_{10 + i}", link_layer="Ethernet", hca_type="MT4126", guid=guid(i), gids=gids)
        physical = Dev(
            bus_id=f"0000:{bus}:00.0", class_code=0x020000, vendor=MELLANOX, device=0x1021, driver="mlx5_core"
        )
        function = hca(f"0000:{bus}:00.2", card, device=0x101E, net=net)
        function.physfn = physical.bus_id
        gpu = Dev(bus_id=f"0000:{0x11 + 8 * i:02x}:00.0", class_code=0x030200, vendor=NVIDIA, device=0x2330,
                  driver="nvidia", config=False)  # fmt: skip
        tree.pci(
            f"pci0000:{0x0C + 8 * i:02x}", int(i >= 4), port(f"0000:{0x0D + 8 * i:02x}:00.0", physical, function, gpu)
        )
        gpus.append(NvmlGpu(board=H100, bus_id=gpu.bus_id, numa=int(i >= 4), switches=("",)))
        nets.append(net)
        entries.append(f'{{"name":"default/sriov-{i}","interface":"net{i + 1}","ips":["192.168.{i + 1}.5"]}}')
    tree.netdev(nets[1])
    status = "[" + ",".join(entries) + "]"
    return Machine(
        hostname="trainer-0", source="OpenShift SR-IOV network operator, one virtual function a network",
        product="PowerEdge XE9680", vendor="Dell Inc.", cpu=SPR, nvml=answers(gpus, SPR), netdevs=tuple(nets),
        default_route=2, container="kubernetes", capabilities=CONTAINER_CAPS, shm=(16 << 30, 16 << 30),
        files={"/etc/podinfo/network-status": status},
    )  # fmt: skip


MACHINES: dict[str, Callable[[Tree], Machine]] = {
    **{name: describe(node) for name, node in NODES.items()},
    "openshift-macvlan": build.r760xa,
    "openshift-ipvlan": lambda tree: _pod(tree, "ipvlan"),
    "sriov-pod": sriov_pod,
    "gb200-nvl72-tray": build.gb200,
}


@cache
def snapshot(name: str) -> Snapshot:
    """The machine, built and scanned."""
    return snapshot_of(MACHINES[name])


def snapshot_of(made: Callable[[Tree], Machine]) -> Snapshot:
    """A machine of a test's own."""
    memory = "/dev/shm"  # thousands of small files
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        tree = Tree(Path(folder))
        machine = made(tree)
        write_host(tree, machine)
        return scan(cast("Host", BuiltHost(Path(folder), machine)))


__all__ = ["MACHINES", "NODES", "Nics", "Node", "describe", "snapshot", "snapshot_of"]

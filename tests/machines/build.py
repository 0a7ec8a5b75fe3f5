"""Builds the recordings of this folder that no one could capture: `python tests/machines/build.py [--check]`.

Each machine is a function below: a PCI tree, GPUs, RDMA devices and interfaces, with the source of its shape in
`source`. The probes are run on it, and what they asked is the recording. `--check` writes nothing and fails where a
file differs from what would be written.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

from machine_built import CONTAINER_CAPS, BuiltHost, Cpu, Machine, cpus_of, write_host
from machine_nvml import A40, A100_40, GB200, H100, L40S, PARTS, TITAN_RTX, NvmlAnswers, NvmlGpu, fabric
from machine_tree import AMAZON, INTEL, MELLANOX, NVIDIA, ROCE_HW_COUNTERS, Dev, Netdev, Rdma, Tree, port, switch
from scanned import scan

from probes.host.protocol import Host, Json
from probes.host.recording import RecordingHost
from probes.wire import archive, dumps

FOLDER = Path(__file__).parent

CPUS = {
    name: Cpu(**{**row, "memory_only_nodes": tuple(row.get("memory_only_nodes", ()))})
    for name, row in PARTS["cpus"].items()
}
SPR, CASCADE_LAKE_VM, ICE_LAKE, GENOA, MILAN_NPS4, SKYLAKE_W, GRACE = (
    CPUS[name] for name in ("SPR", "CASCADE_LAKE_VM", "ICE_LAKE", "GENOA", "MILAN_NPS4", "SKYLAKE_W", "GRACE")
)
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07"
LOOPBACK = Netdev(name="lo", index=1, mtu=65536, mac="00:00:00:00:00:00", addresses=("127.0.0.1/8",), type=772)


def gpu(bus_id: str, device: int, *, generation: int = 5, width_now: int | None = None, config: bool = True) -> Dev:
    """An NVIDIA 3D controller."""
    return Dev(
        bus_id=bus_id, class_code=0x030200, vendor=NVIDIA, device=device, generation=generation, width_now=width_now,
        driver="nvidia", config=config,
    )  # fmt: skip


def hca(bus_id: str, rdma: Rdma | None, *, device: int = 0x1021, generation: int = 5, net: Netdev | None = None) -> Dev:
    """A ConnectX; InfiniBand unless it has an Ethernet interface."""
    ethernet = rdma is not None and rdma.link_layer == "Ethernet"
    return Dev(
        bus_id=bus_id, class_code=0x020000 if ethernet else 0x020700, vendor=MELLANOX, device=device,
        generation=generation, driver="mlx5_core", rdma=rdma, netdev=net, files={"sriov_numvfs": "0"},
    )  # fmt: skip


def nvswitch(bus_id: str, device: int = 0x22A3) -> Dev:
    """An NVSwitch on the PCI bus: bare metal only."""
    return Dev(
        bus_id=bus_id, class_code=0x068000, vendor=NVIDIA, device=device, generation=2, width=2,
        driver="nvidia-nvswitch",
    )  # fmt: skip


def answers(gpus: list[NvmlGpu], cpu: Cpu, driver: str = "550.90.07", cuda: int = 12040) -> NvmlAnswers:
    """NVML with each GPU's affinity to its node's CPUs."""
    return NvmlAnswers(gpus, {node: cpus_of(cpus) for node, cpus in cpu.nodes.items()}, driver, cuda)


def guid(number: int) -> str:
    """A node GUID in the documentation's style: none of a real card."""
    return f"a088:c203:00aa:{number:04x}"


# DGX and HGX H100 ------------------------------------------------------------------------------------------------

H100_GPUS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
H100_NICS = ("18", "40", "4f", "5e", "9a", "c0", "ce", "dc")
H100_ROOTS = ("15", "3d", "4c", "5b", "97", "bd", "cb", "d9")
HGX_SOURCE = (
    "Built. Shape: 8 GPUs with 18 NVLinks each into 4 NVSwitches, one 400 Gb/s HCA beside each GPU behind its own "
    "PCIe switch (PIX 1:1), as in Microsoft's ndv5-topo.xml and in published `nvidia-smi topo -m` of HGX H100 servers."
)


def hgx_h100(tree: Tree) -> Machine:
    """8 x H100 SXM, 8 compute HCAs, 2 storage HCAs; healthy."""
    return _hgx(tree, "hgx-h100-01", HGX_SOURCE)


def _hgx(
    tree: Tree, hostname: str, source: str, *, change: Callable[[list[NvmlGpu]], None] = lambda _g: None,
    dead_hca: int | None = None, peermem: bool = True, rdma: bool = True, width_now: dict[int, int] | None = None,
) -> Machine:  # fmt: skip
    for i, (root, gpu_bus, nic_bus) in enumerate(zip(H100_ROOTS, H100_GPUS, H100_NICS, strict=True)):
        card = Rdma(name=f"mlx5_{i if i < 4 else i + 2}", guid=guid(i))
        if i == dead_hca:
            card.state, card.physical, card.rate = "1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)"
            card.counters = {**card.counters, "link_downed": 7, "symbol_error": 41, "link_error_recovery": 3}
        slot = (width_now or {}).get(i)
        beside = hca(f"0000:{nic_bus}:00.0", card if rdma else None)
        above = switch(int(root, 16), gpu(f"0000:{gpu_bus}:00.0", 0x2330, width_now=slot), beside)
        tree.pci(f"pci0000:{root}", int(i >= 4), above)
    for i, bus in enumerate(("29", "aa")):
        storage = Rdma(name=f"mlx5_{4 + i}", guid=guid(16 + i), rate="200 Gb/sec (4X HDR)", board="MT_0000000223")
        storage.hca_type = "MT4123"
        tree.pci(
            f"pci0000:{bus}",
            i,
            port(f"0000:{bus}:02.0", hca(f"0000:{bus[0]}f:00.0", storage if rdma else None, device=0x101B)),
        )
    switches = tuple(f"0000:{n}:00.0" for n in ("07", "08", "09", "0a"))
    tree.pci("pci0000:00", 0, port("0000:00:02.0", *(nvswitch(bus) for bus in switches), generation=2, width=2))
    eth = Netdev(name="eno1", index=2, speed=25000, addresses=("10.10.4.11/22",), mac="b8:ce:f6:00:00:11")
    nic = Dev(bus_id="0000:6a:00.0", class_code=0x020000, vendor=INTEL, device=0x159B, generation=4, width=8,
              driver="ice", netdev=eth)  # fmt: skip
    tree.pci("pci0000:69", 0, port("0000:69:04.0", nic, generation=4, width=8))
    gpus = [
        NvmlGpu(board=H100, bus_id=f"0000:{bus}:00.0", numa=int(i >= 4), switches=switches,
                answers={"nvmlDeviceGetGpuFabricInfoV": fabric(3)})
        for i, bus in enumerate(H100_GPUS)
    ]  # fmt: skip
    change(gpus)
    return Machine(
        hostname=hostname, source=source, product="HGX H100 8-GPU", vendor="NVIDIA", cpu=SPR,
        nvml=answers(gpus, SPR), netdevs=(LOOPBACK, eth), default_route=2, peermem="550.90.07" if peermem else None,
    )  # fmt: skip


# AWS p4d ---------------------------------------------------------------------------------------------------------

P4D_BUSES = ("10", "20", "90", "a0")


def aws_p4d(tree: Tree) -> Machine:
    """8 x A100 40 GB with NVSwitch, 4 EFA, two GPUs and one EFA behind each switch."""
    efas, gpus = [], []
    for i, bus in enumerate(P4D_BUSES):
        net = Netdev(name=f"ens{32 * (i + 1)}", index=2 + i, mtu=9001, speed=100000, mac=f"0a:00:00:00:00:{i:02x}",
                     addresses=(f"10.0.{i}.17/20",) if i == 0 else ())  # fmt: skip
        card = Rdma(
            name=f"rdmap{int(bus, 16)}s27", link_layer="Unspecified", rate="100 Gb/sec (4X EDR)", hca_type=None,
            board=None, firmware="0.0.0.0", guid=guid(32 + i), counters={},
            hw_counters={"rx_bytes": 0, "tx_bytes": 0, "rx_drops": 0, "rdma_read_wr_err": 0},
        )  # fmt: skip
        efa = Dev(bus_id=f"0000:{bus}:1b.0", class_code=0x020000, vendor=AMAZON, device=0xEFA0, generation=3,
                  driver="efa", rdma=card, config=False)  # fmt: skip
        below = [gpu(f"0000:{bus}:{slot}.0", 0x20B0, generation=3, config=False) for slot in ("1c", "1d")]
        above = port(f"0000:{int(bus, 16) - 1:02x}:00.0", *below, efa, generation=3, vendor=AMAZON)
        tree.pci(f"pci0000:{int(bus, 16) - 1:02x}", int(i >= 2), above)
        ena = Dev(bus_id=f"0000:{bus}:19.0", class_code=0x020000, vendor=AMAZON, device=0xEC20, generation=None,
                  driver="ena", netdev=net, config=False)  # fmt: skip
        tree.pci(f"pci0000:{int(bus, 16) - 1:02x}", int(i >= 2), ena)
        efas.append(net)
        gpus += [
            NvmlGpu(board=A100_40, bus_id=f"0000:{bus}:{slot}.0", numa=int(i >= 2), switches=("",),
                    answers={"nvmlDeviceGetCurrPcieLinkGeneration": 3, "nvmlDeviceGetMaxPcieLinkGeneration": 3})
            for slot in ("1c", "1d")
        ]  # fmt: skip
    return Machine(
        hostname="ip-10-0-0-17",
        source="Built. Shape: aws-ofi-nccl topology/p4d-24xl-topo.xml (bus ids, switches, NUMA), and the EFA table of "
        "awsome-distributed-training; the switches of that file are drawn as bridges of the guest.",
        product="p4d.24xlarge", vendor="Amazon EC2", cpu=CASCADE_LAKE_VM, os="Amazon Linux 2023", peermem=None,
        kernel="6.1.119-129.201.amzn2023.x86_64", nvml=answers(gpus, CASCADE_LAKE_VM),
        netdevs=(LOOPBACK, *efas), default_route=2, cmdline="root=UUID=1 ro",
        files={"/opt/amazon/ofi-nccl/share/aws-ofi-nccl/xml/p4d-24xl-topo.xml": "<system version=\"1\"/>"},
    )  # fmt: skip


# Dell R760xa with BlueField-3 ------------------------------------------------------------------------------------


def r760xa(tree: Tree) -> Machine:
    """2 x A40 without bridge, one BlueField-3 with RoCE behind a macvlan of Multus; memlock unlimited."""
    return _r760xa(tree, memlock=None)


def r760xa_8mib(tree: Tree) -> Machine:
    """The same pod with the memlock limit that systemd gives and CRI-O passes on."""
    return _r760xa(tree, memlock=8 << 20)


def _r760xa(tree: Tree, memlock: int | None) -> Machine:
    status = (
        '[{"name":"ovn-kubernetes","interface":"eth0","ips":["10.128.2.17"],"mac":"0a:58:0a:80:02:11","default":true},'
        '{"name":"default/rdmashared-net","interface":"net1","ips":["192.168.2.5"],"mac":"7a:2e:05:00:00:05"}]'
    )
    mapped, link_local = "0000:0000:0000:0000:0000:ffff:c0a8:0205", "fe80:0000:0000:0000:782e:05ff:fe00:0005"
    gids = (
        (link_local, "IB/RoCE v1", "net1"), (link_local, "RoCE v2", "net1"),
        (mapped, "IB/RoCE v1", "net1"), (mapped, "RoCE v2", "net1"),
    )  # fmt: skip
    roce = {"link_layer": "Ethernet", "hca_type": "MT41692", "board": "MT_0000000884", "firmware": "32.41.1000"}
    cards = [
        Rdma(name="mlx5_0", guid=guid(64), rate="40 Gb/sec (4X QDR)", state="1: DOWN", physical="3: Disabled",
             gids=(("fe80:0000:0000:0000:a288:c2ff:fe03:0040", "IB/RoCE v1", ""),),
             hw_counters=ROCE_HW_COUNTERS, **roce),
        Rdma(name="mlx5_1", guid=guid(65), rate="200 Gb/sec (4X HDR)", gids=gids, hw_counters=ROCE_HW_COUNTERS, **roce),
    ]  # fmt: skip
    tree.pci("pci0000:37", 0, port("0000:37:01.0", gpu("0000:38:00.0", 0x2235, generation=4), generation=4))
    tree.pci("pci0000:a7", 1, port("0000:a7:01.0", gpu("0000:a8:00.0", 0x2235, generation=4), generation=4))
    functions = [hca(f"0000:9a:00.{i}", card, device=0xA2DC) for i, card in enumerate(cards)]
    tree.pci("pci0000:97", 1, port("0000:97:01.0", port("0000:98:00.0", port("0000:99:00.0", *functions))))
    eth0 = Netdev(name="eth0", index=2, mtu=1400, mac="0a:58:0a:80:02:11", kind="veth", link=37,
                  addresses=("10.128.2.17/23",), speed=10000)  # fmt: skip
    net1 = Netdev(name="net1", index=3, mtu=9000, mac="7a:2e:05:00:00:05", kind="macvlan", link=8,
                  addresses=("192.168.2.5/24", "fe80::782e:5ff:fe00:5/64"), speed=200000)  # fmt: skip
    for net in (eth0, net1):
        tree.netdev(net)
    gpus = [NvmlGpu(board=A40, bus_id=f"0000:{bus}:00.0", numa=numa) for bus, numa in (("38", 0), ("a8", 1))]
    return Machine(
        hostname="lora-worker-0",
        source="Built. Shape: a published OpenShift set-up of two Dell PowerEdge R760xa with 2 x A40 and one "
        "BlueField-3 SuperNIC each (RoCE, Multus macvlan net1, NCCL's log names mlx5_1 and net1); bus ids are chosen.",
        product="PowerEdge R760xa", vendor="Dell Inc.", cpu=ICE_LAKE, os="Ubuntu 22.04.4 LTS",
        kernel="5.14.0-427.40.1.el9_4.x86_64", nvml=answers(gpus, ICE_LAKE), netdevs=(LOOPBACK, eth0, net1),
        default_route=2, memlock=(memlock, memlock), capabilities=CONTAINER_CAPS | (0x4000 if memlock is None else 0),
        container="kubernetes", shm=(64 << 20, 64 << 20) if memlock else (16 << 30, 16 << 30),
        files={"/etc/podinfo/annotations": f"k8s.v1.cni.cncf.io/network-status={_quoted(status)}"},
    )  # fmt: skip


def _quoted(text: str) -> str:
    """As the downward API writes an annotation's value."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# PCIe servers ----------------------------------------------------------------------------------------------------


def l40s(tree: Tree) -> Machine:
    """4 x L40S without NVLink: two behind each socket's switch, one ConnectX-7 on socket 0."""
    return _l40s(tree, "l40s-01")


def _l40s(tree: Tree, hostname: str, width_now: dict[int, int] | None = None) -> Machine:
    buses = ("21", "22", "a1", "a2")
    narrow = width_now or {}
    cards = [gpu(f"0000:{b}:00.0", 0x26B9, generation=4, width_now=narrow.get(i)) for i, b in enumerate(buses)]
    net = Netdev(name="ens3f0np0", index=2, mtu=9000, speed=200000, mac="b8:3f:d2:00:00:02",
                 addresses=("10.20.0.11/24",))  # fmt: skip
    mapped = "0000:0000:0000:0000:0000:ffff:0a14:000b"
    card = Rdma(name="mlx5_0", link_layer="Ethernet", rate="200 Gb/sec (4X HDR)", guid=guid(80),
                gids=((mapped, "IB/RoCE v1", net.name), (mapped, "RoCE v2", net.name)),
                hw_counters=ROCE_HW_COUNTERS)  # fmt: skip
    tree.pci("pci0000:1e", 0, switch(0x1E, *cards[:2], hca("0000:23:00.0", card, net=net), generation=4))
    tree.pci("pci0000:9e", 1, switch(0x9E, *cards[2:], generation=4))
    gpus = []
    for i, bus in enumerate(buses):
        near = {i ^ 1: 10}
        extra = {"nvmlDeviceGetCurrPcieLinkWidth": narrow[i]} if i in narrow else {}
        gpus.append(
            NvmlGpu(board=L40S, bus_id=f"0000:{bus}:00.0", numa=int(i >= 2), answers={"ancestors": near, **extra})
        )
    return Machine(
        hostname=hostname,
        source="Built. Shape: a two-socket server with PCIe switches, 2 x L40S a switch and one 200 Gb/s RoCE NIC; the "
        "L40S has no NVLink (NVIDIA L40S data sheet).",
        product="PCIe GPU server 4x L40S", vendor="Supermicro", cpu=GENOA, nvml=answers(gpus, GENOA),
        netdevs=(LOOPBACK, net), default_route=2,
    )  # fmt: skip


def titan(tree: Tree) -> Machine:
    """2 x TITAN RTX with an NVLink bridge in a workstation, no RDMA."""
    for bus in ("17", "65"):
        card = gpu(f"0000:{int(bus, 16) + 1:02x}:00.0", 0x1E02, generation=3)
        card.class_code = 0x030000
        tree.pci(f"pci0000:{bus}", 0, port(f"0000:{bus}:00.0", card, generation=3))
    net = Netdev(name="enp0s31f6", index=2, speed=1000, mac="a8:a1:59:00:00:02", addresses=("192.168.1.20/24",))
    nic = Dev(bus_id="0000:00:1f.6", class_code=0x020000, vendor=INTEL, device=0x15B9, generation=None,
              driver="e1000e", netdev=net)  # fmt: skip
    tree.pci("pci0000:00", 0, nic)
    gpus = [
        NvmlGpu(board=TITAN_RTX, bus_id=bus, numa=0, peers={1 - i: 2},
                answers={"nvmlDeviceGetCurrPcieLinkGeneration": 1, "nvmlDeviceGetPersistenceMode": 0})
        for i, bus in enumerate(("0000:18:00.0", "0000:66:00.0"))
    ]  # fmt: skip
    return Machine(
        hostname="titan-ws", source="Built. Shape: published `nvidia-smi topo -m` output of two TITAN RTX with a "
        "bridge (NV2); idle links train down to generation 1.",
        product="Precision 5820", vendor="Dell Inc.", cpu=SKYLAKE_W, nvml=answers(gpus, SKYLAKE_W, "535.183.01", 12020),
        netdevs=(LOOPBACK, net), default_route=2, peermem=None, memlock=(8 << 20, 8 << 20), uid=1000, capabilities=0,
        driver_proc="NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01", cmdline="root=/dev/sda2 ro",
        shm=(128 << 30, 128 << 30),
    )  # fmt: skip


def polaris(tree: Tree) -> Machine:
    """4 x A100 joined directly, 4 links a pair; GPU order against the CPU order; two Slingshot-era NICs."""
    buses, nodes = ("07", "46", "85", "c7"), (3, 2, 1, 0)
    for i, (bus, node) in enumerate(zip(buses, nodes, strict=True)):
        below = [port(f"0000:{int(bus, 16) - 2:02x}:01.1", gpu(f"0000:{bus}:00.0", 0x20B0, generation=4), generation=4)]
        if i in (1, 3):
            card = Rdma(name=f"mlx5_{(3 - i) // 2}", rate="200 Gb/sec (4X HDR)", hca_type="MT4123", guid=guid(96 + i))
            nic = hca(f"0000:{int(bus, 16) + 2:02x}:00.0", card, device=0x101B, generation=4)
            below.append(port(f"0000:{int(bus, 16) - 2:02x}:03.1", nic, generation=4))
        tree.pci(f"pci0000:{int(bus, 16) - 2:02x}", node, *below)
    net = Netdev(name="bond0", index=2, kind="bond", speed=25000, addresses=("10.201.0.7/16",))
    tree.netdev(net)
    gpus = [
        NvmlGpu(board=A100_40, bus_id=f"0000:{bus}:00.0", numa=node, peers={p: 4 for p in range(4) if p != i},
                answers={"ancestors": {p: 50 for p in range(4) if p != i}})
        for i, (bus, node) in enumerate(zip(buses, nodes, strict=True))
    ]  # fmt: skip
    return Machine(
        hostname="x3001c0s7b0n0", source="Built. Shape: ALCF Polaris, `nvidia-smi topo -m` in "
        "argonne-lcf/GettingStarted (NV4, PHB to GPU1 and GPU3 only, CPU order reversed); bus ids are chosen.",
        product="HPE Cray EX235n", vendor="HPE", cpu=MILAN_NPS4, os="SUSE Linux Enterprise Server 15 SP5",
        nvml=answers(gpus, MILAN_NPS4, "535.154.05", 12020), netdevs=(LOOPBACK, net), default_route=2,
    )  # fmt: skip


def gb200(tree: Tree) -> Machine:
    """A compute tray of GB200 NVL72: 4 GPUs, 2 Grace, NVLink through the rack, one NIC a GPU."""
    cluster = bytes.fromhex("7d5c3a10f2e44b6a9c1b0a5f64d2e8b1")
    gpus = []
    for i in range(4):
        domain, node = (0x0008, 0x0009, 0x0018, 0x0019)[i], i // 2
        tree.pci(f"pci{domain:04x}:00", node, port(f"{domain:04x}:00:00.0", gpu(f"{domain:04x}:01:00.0", 0x2941)))
        nic_domain = (0x0000, 0x0002, 0x0010, 0x0012)[i]
        card = Rdma(name=f"mlx5_{i}", guid=guid(112 + i))
        tree.pci(f"pci{nic_domain:04x}:00", node,
                 port(f"{nic_domain:04x}:00:00.0", hca(f"{nic_domain:04x}:01:00.0", card)))  # fmt: skip
        gpus.append(
            NvmlGpu(board=GB200, bus_id=f"{domain:04x}:01:00.0", numa=node, switches=("",), answers={
                "nvmlDeviceGetGpuFabricInfoV": fabric(3, cluster, 32766), "c2c": 14,
                "nvmlDeviceGetNumaNodeId": (2, 10, 18, 26)[i],
                "nvmlDeviceGetNvLinkRemoteDeviceType": 2,
            })
        )  # fmt: skip
    net = Netdev(name="enP5p9s0", index=2, speed=25000, addresses=("10.30.1.21/24",))
    nic = Dev(bus_id="0005:09:00.0", class_code=0x020000, vendor=INTEL, device=0x1533, generation=None,
              driver="igb", netdev=net)  # fmt: skip
    tree.pci("pci0005:00", 0, nic)
    return Machine(
        hostname="nvl72-r1-t07", source="Built. Shape: NVIDIA GB200 NVL72 (18 NVLinks a GPU into the rack's switches, "
        "remote ends hidden, one NVLink domain by fabric clique); PCI domains as in published lspci output.",
        product="GB200 NVL", vendor="NVIDIA", cpu=GRACE, kernel="6.8.0-1021-nvidia-64k", os="Ubuntu 24.04.1 LTS",
        nvml=answers(gpus, GRACE, "570.124.06", 12080), netdevs=(LOOPBACK, net), default_route=2, peermem=None,
        driver_proc="NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.124.06  Release Build",
        files={
            "/proc/devices": "Character devices:\n195 nvidia\n511 nvidia-caps-imex-channels\n",
            "/dev/nvidia-caps-imex-channels/channel0": "",
            "/etc/nvidia-imex/nodes_config.cfg": "".join(f"10.30.1.{number}\n" for number in range(11, 29)),
        },
    )  # fmt: skip


# Sick ones -------------------------------------------------------------------------------------------------------


def sick_no_rdma(tree: Tree) -> Machine:
    """RDMA silently off: the HCAs are on the bus, but mlx5_ib and nvidia_peermem are not loaded."""
    machine = _hgx(tree, "hgx-h100-sick-rdma", HGX_SOURCE + " Sick: mlx5_ib and nvidia_peermem are not loaded.",
                   peermem=False, rdma=False)  # fmt: skip
    machine.driver_proc = PROPRIETARY
    return machine


def sick_no_peermem(tree: Tree) -> Machine:
    """GPUDirect RDMA silently off: healthy ports, but neither nvidia_peermem nor the open modules' DMA-BUF."""
    machine = _hgx(tree, "hgx-h100-sick-gdr", HGX_SOURCE + " Sick: nvidia_peermem is not loaded, no DMA-BUF.",
                   peermem=False)  # fmt: skip
    machine.driver_proc = PROPRIETARY
    return machine


def sick_dead_hca(tree: Tree) -> Machine:
    """One HCA of eight polls for a partner."""
    return _hgx(tree, "hgx-h100-sick-hca", HGX_SOURCE + " Sick: mlx5_3 is down (Polling).", dead_hca=3)


def sick_memlock(tree: Tree) -> Machine:
    """64 KiB of locked memory for a user without CAP_IPC_LOCK: the old default of login shells."""
    machine = _hgx(tree, "hgx-h100-sick-memlock", HGX_SOURCE + " Sick: memlock 64 KiB as uid 1000.")
    machine.memlock, machine.uid, machine.capabilities = (65536, 65536), 1000, 0
    return machine


def sick_x4(tree: Tree) -> Machine:
    """GPU2 sits in a x16 slot and runs x4."""
    machine = _l40s(tree, "l40s-sick-x4", {2: 4})
    machine.source += " Sick: GPU2 runs 4 of 16 PCIe lanes."
    return machine


def sick_gpu_lost(tree: Tree) -> Machine:
    """GPU5 has fallen off the bus."""

    def lose(gpus: list[NvmlGpu]) -> None:
        gpus[5].answers["*"] = "GPU_IS_LOST"

    machine = _hgx(tree, "hgx-h100-sick-lost", HGX_SOURCE + " Sick: GPU5 is lost.", change=lose)
    machine.kernel_log = ("[ 8123.1] NVRM: Xid (PCI:0000:c3:00): 79, pid='<unknown>', GPU has fallen off the bus.",)
    return machine


def sick_nvlink(tree: Tree) -> Machine:
    """GPU3 has two links less than its twins."""

    def cut(gpus: list[NvmlGpu]) -> None:
        gpus[3].links_down = (4, 11)

    return _hgx(tree, "hgx-h100-sick-nvlink", HGX_SOURCE + " Sick: GPU3 has 16 of 18 NVLinks.", change=cut)


def sick_thermal(tree: Tree) -> Machine:
    """GPU6 is hot and held down, GPU7's power brake is pulled."""

    def heat(gpus: list[NvmlGpu]) -> None:
        gpus[6].answers |= {
            "nvmlDeviceGetTemperature": 88, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x20 | 0x8 | 0x40,
            "nvmlDeviceGetUtilizationRates": {"gpu": 100, "memory": 40}, "nvmlDeviceGetClockInfo": 1050,
        }  # fmt: skip
        gpus[7].answers |= {
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x80 | 0x8, "nvmlDeviceGetEnforcedPowerLimit": 500000,
            "nvmlDeviceGetUtilizationRates": {"gpu": 100, "memory": 40},
        }  # fmt: skip

    return _hgx(tree, "hgx-h100-sick-thermal", HGX_SOURCE + " Sick: GPU6 throttles at 88 C, GPU7 is braked at 500 W.",
                change=heat)  # fmt: skip


def demo(tree: Tree) -> Machine:
    """What `topoflight demo` shows: three faults that one node seldom has together."""

    def hurt(gpus: list[NvmlGpu]) -> None:
        gpus[3].links_down = (4, 11)
        gpus[6].answers |= {
            "nvmlDeviceGetTemperature": 88, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x20 | 0x8 | 0x40,
            "nvmlDeviceGetUtilizationRates": {"gpu": 100, "memory": 40}, "nvmlDeviceGetClockInfo": 1050,
        }  # fmt: skip

    sick = " Sick: GPU3 has 16 of 18 NVLinks, GPU6 throttles at 88 C, mlx5_9 is down (Polling)."
    return _hgx(tree, "demo-built-h100", HGX_SOURCE + sick, change=hurt, dead_hca=7)


def azure_vm(tree: Tree) -> Machine:
    """A virtual machine that gives every device a root of its own: the tree says nothing of nearness."""
    gpus = []
    for i in range(8):
        domain = f"{i + 1:04x}"
        card = gpu(f"{domain}:00:00.0", 0x20B2, generation=4, config=False)
        tree.pci(f"pci{domain}:00", -1, card)
        rdma = Rdma(name=f"mlx5_ib{i}", rate="200 Gb/sec (4X HDR)", hca_type="MT4124", guid=guid(128 + i),
                    board="MT_0000000223", counters={})  # fmt: skip
        vf = hca(f"{0x101 + i:04x}:00:00.0", rdma, device=0x101C, generation=4)
        vf.config = False
        tree.pci(f"pci{0x101 + i:04x}:00", -1, vf)
        gpus.append(
            NvmlGpu(board=A100_40, bus_id=f"{domain}:00:00.0", numa=-1, switches=("",),
                    answers={"ancestors": dict.fromkeys(range(8), 50)})
        )  # fmt: skip
    net = Netdev(name="eth0", index=2, speed=50000, addresses=("10.1.0.4/24",))
    tree.netdev(net)
    cpu = Cpu(vendor="AuthenticAMD", name="AMD EPYC 7V12 64-Core Processor", family=23, model=49, sockets=2, threads=96,
              nodes={n: f"{24 * n}-{24 * n + 23}" for n in range(4)}, memory_gib=900, hypervisor=True)  # fmt: skip
    return Machine(
        hostname="nd-a100-000001",
        source="Built. Shape: Azure ND A100 v4 (8 x A100, 8 HDR virtual functions, one virtual PCI domain per device; "
        "Microsoft ships ndv4-topo.xml because the guest's tree is flat).",
        product="Virtual Machine", vendor="Microsoft Corporation", cpu=cpu,
        nvml=answers(gpus, cpu, "535.161.08", 12020),
        netdevs=(LOOPBACK, net), default_route=2, peermem="535.161.08", cmdline="root=/dev/sda1 ro",
        driver_proc="NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08",
        files={"/opt/microsoft/ndv4-topo.xml": "<system version=\"1\"/>"},
    )  # fmt: skip


MACHINES: dict[str, Callable[[Tree], Machine]] = {
    "hgx-h100-8xH100-8hca": hgx_h100,
    "aws-p4d-8xA100-4efa": aws_p4d,
    "r760xa-2xA40-bf3": r760xa,
    "r760xa-2xA40-bf3-memlock-8MiB": r760xa_8mib,
    "l40s-4x-pcie": l40s,
    "titan-rtx-2x-nv2": titan,
    "polaris-4xA100-nv4": polaris,
    "gb200-nvl72-tray": gb200,
    "azure-nd-a100-flat-vm": azure_vm,
    "sick-h100-rdma-off": sick_no_rdma,
    "sick-h100-no-peermem": sick_no_peermem,
    "sick-h100-dead-hca": sick_dead_hca,
    "sick-h100-memlock-64KiB": sick_memlock,
    "sick-l40s-x4": sick_x4,
    "sick-h100-gpu-lost": sick_gpu_lost,
    "sick-h100-nvlink-missing": sick_nvlink,
    "sick-h100-thermal": sick_thermal,
}


def record(describe: Callable[[Tree], Machine]) -> dict[str, Json]:
    """Build the machine in a folder, run the probes on it, and return what they were told."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        tree = Tree(Path(folder))
        machine = describe(tree)
        write_host(tree, machine)
        recorder = RecordingHost(cast("Host", BuiltHost(Path(folder), machine)))
        scan(cast("Host", recorder))
        return archive(recorder.answers["identity"][""], recorder.answers, machine.source)


def main(check: bool) -> int:
    """Write the recordings, or with `check` name those that differ."""
    stale = []
    shipped = FOLDER.parent.parent / "agent" / "data" / "demo.json"  # with the wheel, for `topoflight demo`
    for path, describe in {shipped: demo, **{FOLDER / f"{name}.json": each for name, each in MACHINES.items()}}.items():
        content = dumps(record(describe))
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            stale.append(path.name)
            if not check:
                path.write_text(content, encoding="utf-8")
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))

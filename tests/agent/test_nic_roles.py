"""Healthy NICs of many platforms pass the gate, and one real fault of one rail on the same machines fails it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import platform_machines
import pytest
from build import GRACE, LOOPBACK, SPR, answers, gpu, guid, hca
from machine_built import Machine
from machine_nvml import H100, NvmlGpu
from machine_tree import Netdev, Rdma, Tree, port, switch
from platform_machines import mapped, snapshot_of
from rigs import recorded
from rigs.tables import each_row
from scanned import scan

from agent.checks.verdict import build_view
from contracts.finding import Finding
from probes.api import Snapshot
from probes.host.recording import load
from probes.interfaces.facts import InterfacesFacts, nccl_choice
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts, RdmaPort

GB10 = replace(H100, name="NVIDIA GB10", links=0, capability=(12, 1), memory_bytes=119 << 30)


def _roce(name: str, netdev: str, index: int, address: str | None, **more) -> tuple[Rdma, Netdev]:
    """A RoCE port and its interface; without an address it has no cable."""
    mtu, gbit = more.pop("mtu", 9000), more.pop("gbit", 400)
    local = f"fe80:0000:0000:0000:0a00:00ff:fe00:{index:04x}"
    gids = [(local, "RoCE v2", netdev), *([(mapped(address), "RoCE v2", netdev)] if address else [])]
    down = {} if address else {"state": "1: DOWN", "physical": "3: Disabled", "rate": "40 Gb/sec (4X QDR)"}
    card = Rdma(name=name, link_layer="Ethernet", gids=tuple(gids), guid=guid(index),
                **{"rate": f"{gbit} Gb/sec (4X NDR)", **down, **more})  # fmt: skip
    net = Netdev(name=netdev, index=index, mtu=mtu, speed=gbit * 1000, up=address is not None,
                 addresses=(address,) if address else ())  # fmt: skip
    return card, net


def hgx_roce(tree: Tree, others: list[tuple[str, list[tuple[Rdma, Netdev]], int]]) -> Machine:
    """8 GPUs with a 400G rail each behind one switch; `others` are cards on root ports: bus, functions, device id."""
    gpus, nets = [], [LOOPBACK]
    for i in range(8):
        card, net = _roce(f"mlx5_{i}", f"ens{i}np0", 10 + i, f"10.{100 + i}.0.11/24")
        device = hca(f"0000:{0x13 + 16 * i:02x}:00.0", card, net=net)
        above = switch(0x10 + 16 * i, gpu(f"0000:{0x14 + 16 * i:02x}:00.0", 0x2330), device)
        tree.pci(f"pci0000:{0x10 + 16 * i:02x}", int(i >= 4), above)
        gpus.append(NvmlGpu(board=H100, bus_id=f"0000:{0x14 + 16 * i:02x}:00.0", numa=int(i >= 4), switches=("",)))
        nets.append(net)
    for bus, functions, device_id in others:
        below = [hca(f"0000:{bus}:00.{n}", card, net=net, device=device_id) for n, (card, net) in enumerate(functions)]
        tree.pci(f"pci0000:{bus[0]}8", 0, port(f"0000:{bus[0]}8:01.0", *below))
        nets += [net for _, net in functions]
    return Machine(hostname="hgx", source="Built.", product="HGX H100", vendor="Supermicro", cpu=SPR,
                   nvml=answers(gpus, SPR), netdevs=tuple(nets), default_route=10)  # fmt: skip


LX = {"hca_type": "MT4127", "board": "MT_0000000531"}
DX = {"hca_type": "MT4125", "board": "MT_0000000359"}


# Cards on root ports beside the rails.
OTHERS = {
    # a board's own 25G port, of another model and MTU
    "lom": [("0f", [_roce("mlx5_8", "eno1", 40, "10.10.4.11/22", mtu=1500, gbit=25, **LX)], 0x101F)],
    # a storage card of two ports, of which one has a cable
    "one-cable": [("0f", [_roce("mlx5_8", "ens20f0", 40, "10.60.0.11/24", gbit=100, **DX),
                          _roce("mlx5_9", "ens20f1", 41, None, **DX)], 0x101D)],
    # two more cards of the rails' own model carry storage, at half the rate and another MTU
    "same-cards": [(bus, [_roce(f"mlx5_{8 + n}", f"stor{n}", 40 + n, f"10.60.{n}.11/24", gbit=200, mtu=4200)], 0x1021)
                   for n, bus in enumerate(("0f", "1f"))],
}  # fmt: skip


def spark(tree: Tree) -> Machine:
    """DGX Spark with one cable: one card whose ports show in two PCI domains, on four lanes each."""
    nets = [LOOPBACK, Netdev(name="enP7s7", index=2, speed=10000, addresses=("10.0.0.21/24",))]
    for domain in (0, 2):
        functions = []
        for n in range(2):
            address = None if n else f"192.168.{100 + domain}.10/24"
            card, net = _roce(f"rocep{domain}f{n}", f"enp{domain}f{n}", 10 + domain + n, address, gbit=200)
            functions.append(hca(f"{domain:04x}:01:00.{n}", card, net=net))
            functions[-1].width = 4
            nets.append(net)
        above = port(f"{domain:04x}:00:00.0", *functions, width=4)
        tree.pci(f"pci{domain:04x}:00", 0, above)
    tree.pci("pci000f:00", 0, port("000f:00:00.0", gpu("000f:01:00.0", 0x2E12)))
    gpus = [NvmlGpu(board=GB10, bus_id="000f:01:00.0", numa=0)]
    tree.netdev(nets[1])
    return Machine(hostname="spark", source="Built.", product="NVIDIA_DGX_Spark", vendor="NVIDIA", cpu=GRACE,
                   nvml=answers(gpus, GRACE), netdevs=tuple(nets), default_route=2, peermem=None)  # fmt: skip


BUILT: dict[str, Callable[[Tree], Machine]] = {
    "spark": spark, **{name: partial(hgx_roce, others=others) for name, others in OTHERS.items()},
}  # fmt: skip
PLATFORMS = (
    "aws-p5", "aws-p6-b200", "aws-p6-b300", "aws-p6e-gb200", "gcp-a3-ultra", "gcp-a4", "gcp-a4x", "oci-a100",
    "oci-h100", "oci-h200", "oci-gb200-v3", "coreweave-h100", "vlan-on-bond", "spectrum-x", "twin-storage",
    "azure-nd-a100", "azure-nd-h200", "dgx-h200",
)  # fmt: skip
WITHOUT_RDMA = ("gcp-a3-mega", "slingshot-gh200", "slingshot-a100")
MACHINES = ("hgx-h100-8xH100-8hca", "aws-p4d-8xA100-4efa", "gb200-nvl72-tray", "polaris-4xA100-nv4")
HELD_TRUE = {  # warnings of a healthy node that are right
    "pci.tree.virtual", "topology.virtual",  # of a guest
    "topology.reference.mismatch",  # dgx-h200 is built without storage ports
}  # fmt: skip


@cache
def snapshot(name: str) -> Snapshot:
    if name in BUILT:
        return snapshot_of(BUILT[name])
    if name in MACHINES:
        return recorded.snapshot(name)
    return platform_machines.snapshot(name)


def bad(node: Snapshot) -> list[Finding]:
    families = ("rdma", "interfaces", "topology", "pci", "limits", "env")
    return [
        check
        for check in build_view((node,)).checks
        if check.status in ("fail", "warn") and check.code.partition(".")[0] in families and check.code not in HELD_TRUE
    ]


@each_row("name", [*BUILT, *PLATFORMS, *WITHOUT_RDMA, *MACHINES])
def test_a_healthy_node_passes(name: str) -> None:
    assert not [(check.status, check.code, check.subject, check.message) for check in bad(snapshot(name))]


@each_row("name", [*BUILT, *PLATFORMS, *MACHINES])
def test_one_fault_of_one_rail_fails(name: str) -> None:
    """Down, slower, with another MTU, or gone: each is a failure that the healthy node does not have."""
    node = snapshot(name)
    near = build_view((node,)).topologies[0].nearest_nic
    device = near[min(2, len(near) - 1)].nics[0]
    passed = []
    for fault in FAULTS:
        ports = [p for d in recorded.facts(RdmaFacts, node).devices if d.name == device for p in d.ports]
        roce = any(port.link_layer == "Ethernet" for port in ports)
        if (fault == "mtu" and not roce) or (name, fault) == ("spark", "mtu"):  # one of two is no majority
            continue
        found = bad(with_fault(node, device, fault))
        if not any(check.status == "fail" for check in found):
            passed.append((fault, [(check.status, check.code) for check in found]))
    assert not passed


def test_a_missing_hca_is_said_to_be_missing() -> None:
    """Not "put NIC and GPU behind one PCIe switch": seven of eight are there."""
    for name, device, subject in (("lom", "mlx5_3", "GPU3"), ("one-cable", "mlx5_0", "GPU0")):
        checks = [check for check in bad(with_fault(snapshot(name), device, "gone")) if check.status == "fail"]
        assert [(check.code, check.subject) for check in checks] == [("topology.nic.missing", subject)], name
        assert "7 other GPUs" in checks[0].message and "PCIe switch; where" not in checks[0].remedy
    (check,) = [c for c in bad(with_fault(snapshot("oci-h100"), "mlx5_5", "gone")) if c.status == "fail"]
    assert check.code == "topology.rail.uneven" and "an HCA is missing" in check.message


def test_what_serves_storage_costs_no_step() -> None:
    """A fault of a port that is no GPU's nearest is a warning, where something needs the port, else a note."""
    for name, device, fault, worst in (
        ("one-cable", "mlx5_8", "down", "warn"), ("same-cards", "mlx5_8", "slow", "warn"),
        ("lom", "mlx5_8", "slow", ""), ("same-cards", "mlx5_8", "down", "warn"),
    ):  # fmt: skip
        statuses = {check.status for check in bad(with_fault(snapshot(name), device, fault))}
        assert statuses == ({worst} if worst else set()), (name, device, fault)


@pytest.mark.corpus
def test_shared_recordings_of_healthy_nodes_pass(corpus):
    for name in ("lom_real", "dualport_onecable", "oci_h100"):
        assert not bad(scan(load(corpus / "defects" / "machines" / f"{name}.json.gz"))), name


FAULTS = ("down", "slow", "mtu", "gone")


def with_fault(snapshot: Snapshot, name: str, fault: str) -> Snapshot:
    """The node with this fault of the RDMA device `name`."""
    rdma, links, pci = (recorded.facts(kind, snapshot) for kind in (RdmaFacts, InterfacesFacts, PciFacts))
    (device,) = (each for each in rdma.devices if each.name == name)
    netdevs = {port.netdev for port in device.ports}
    changed = {"down": {"running": False, "speed_bytes_per_second": None}, "slow": {}, "mtu": {"mtu_bytes": 1500}}
    if fault == "gone":
        devices = tuple(each for each in rdma.devices if each is not device)
        interfaces = tuple(each for each in links.interfaces if each.name not in netdevs)
        pci = replace(pci, devices=tuple(each for each in pci.devices if each.bus_id != device.bus_id))
    else:
        ports = tuple(_port(port, fault) for port in device.ports)
        devices = tuple(replace(each, ports=ports) if each is device else each for each in rdma.devices)
        interfaces = tuple(
            replace(each, **changed[fault]) if each.name in netdevs else each for each in links.interfaces
        )
    choice = replace(links, interfaces=interfaces, nccl_choice=nccl_choice(interfaces))
    return recorded.with_facts(snapshot, rdma=replace(rdma, devices=devices), interfaces=choice, pci=pci)


def _port(port: RdmaPort, fault: str) -> RdmaPort:
    if fault == "down":
        return replace(port, state="DOWN", physical_state="Polling", rate_text="40 Gb/sec (4X QDR)",
                       rate_bytes_per_second=5e9)  # fmt: skip
    if fault == "slow":
        return replace(port, rate_bytes_per_second=(port.rate_bytes_per_second or 0.0) / 2)
    return replace(port, netdev_mtu_bytes=1500, active_mtu_bytes=1024)

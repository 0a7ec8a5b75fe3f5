"""RDMA devices and the PCIe tree: what sysfs, netlink and a registration say, and what is wrong with it.

Links, ACS, IOMMU, the ways to GPU memory, and trees that a hypervisor made up.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dicthost import DIRECTORY, Content, DictHost, corpus_tree, tree_of
from rigs.tables import data_of, each_row, rows_of

from contracts.finding import Finding, Status
from probes.api import UnavailableError
from probes.increases import find_rdma_increases
from probes.pci import probe as pci
from probes.pci.facts import PciDevice, PciFacts
from probes.pci.read import parse_config, read as read_pci
from probes.rdma import probe as rdma
from probes.rdma.facts import RdmaDevice, RdmaPort, find_ipv4
from probes.rdma.probe import find_nccl_gid_index, find_rocev2_gid_index
from probes.rdma.read import compute_roce_mtu, parse_rate, read as read_rdma

rows = rows_of(__file__)

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe77:0200"
IPV4 = "0000:0000:0000:0000:0000:ffff:c0a8:4d01"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"
ROCE_TABLE = [(LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV4, V1), (IPV4, V2)]


PFC_ON = {f"eth{number}": {"pfc_classes": 8, "pfc_mask": 0b1000} for number in range(16)}


class Devices:
    """Files and links of devices, which become a host."""

    def __init__(self) -> None:
        self.files: dict[str, Content] = {"/sys/module/x/y": "", "/sys/class/x/y": ""}
        self.links: dict[str, str] = {}

    def host(self, **more) -> DictHost:
        """The devices so far; every driver says that PFC is on for priority 3, where nothing else is given."""
        return DictHost(self.files | more.pop("files", {}), self.links, **{"port_links": PFC_ON, **more})


class Fabric(Devices):
    """RDMA devices."""

    def add(self, name: str, number: int, **given_) -> Fabric:
        """One mlx5-like device with one port."""
        want: dict = {
            "state": "4: ACTIVE", "phys": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "layer": "Ethernet", "mtu": 9000,
            "type": "MT4129", "gids": ROCE_TABLE, "firmware": "28.39.1002", "driver": "mlx5_core", **given_,
        }  # fmt: skip
        function = f"0000:{0x10 + number:02x}:00.0"
        pci, net = f"/sys/devices/pci0000:{0x10 + number:02x}/{function}", f"eth{number}"
        folder, port = f"{pci}/infiniband/{name}", f"{pci}/infiniband/{name}/ports/1"
        files, links = tree_of("rdma", name=name, number=number, pci=pci, net=net, folder=folder, **want)
        self.files |= files
        self.links |= links
        if "ecn" in want:
            enabled = f"{pci}/net/{net}/ecn/roce_np/enable"
            self.files |= {f"{enabled}/{priority}": f"{want['ecn']}\n" for priority in range(8)}
        if want.get("node", True):
            self.files[f"/dev/infiniband/uverbs{number}"] = ""
        for index in range(want.get("table", 8)):
            used = index < len(want["gids"])
            self.files[f"{port}/gids/{index}"] = want["gids"][index][0] if used else EMPTY
            self.files[f"{port}/gid_attrs/types/{index}"] = want["gids"][index][1] if used else errno.EINVAL
            self.files[f"{port}/gid_attrs/ndevs/{index}"] = net if used else errno.EINVAL
        return self


def findings(host: DictHost) -> list[Finding]:
    return list(rdma.check(read_rdma(host)))


def test_a_sound_roce_device() -> None:
    facts = read_rdma(Fabric().add("mlx5_0", 0).host())
    device, port = facts.devices[0], facts.devices[0].ports[0]
    assert (device.kind, device.bus_id, device.numa_node, device.model) == ("hca", "0000:10:00.0", 1, "ConnectX-7")
    assert (device.uverbs, device.uverbs_usable, device.is_vf) == ("/dev/infiniband/uverbs0", True, False)
    assert (port.state, port.physical_state, port.rate_bytes_per_second) == ("ACTIVE", "LinkUp", 50e9)
    assert (port.netdev, port.netdev_mtu_bytes, port.active_mtu_bytes) == ("eth0", 9000, 4096)
    assert port.counters == {"symbol_error": 3, "out_of_sequence": 0}, "an unreadable counter is left out, not zero"
    assert (find_nccl_gid_index(port), find_rocev2_gid_index(port)) == (3, 3)
    assert "not installed" in str(facts.pyverbs)
    assert not list(rdma.check(facts))


def test_no_rdma_is_absent_and_devices_are_in_the_order_of_their_numbers() -> None:
    with pytest.raises(UnavailableError, match="no RDMA device"):
        read_rdma(DictHost())
    fabric = Fabric()
    for number in (10, 2, 0):
        fabric.add(f"mlx5_{number}", number)
    assert [d.name for d in read_rdma(fabric.host()).devices] == ["mlx5_0", "mlx5_2", "mlx5_10"]


ROWS = data_of(__file__, "rdma_rows.yaml")
GIDS = {"link-local": LINK_LOCAL, "IPv4": IPV4, "IPv6": "fd00:0000:0000:0000:0000:0000:0000:0001"}
VERSIONS = {"v1": V1, "v2": V2, "unread": errno.EINVAL}


def answering(
    pfc: list[int | None] | None = None, unusable: list[str] | None = None, register_limit_bytes: int | None = None,
    environment: dict[str, str] | None = None, **more: int,
) -> dict:  # fmt: skip
    """What a host answers; of flow control what the drivers of eth0, eth1 ... say."""
    links = {f"eth{i}": {"pfc_classes": 8, "pfc_mask": mask, **more} for i, mask in enumerate(pfc or ())}
    told = {name: link for name, link in links.items() if link["pfc_mask"] is not None}
    said = {"unusable": tuple(unusable or ()), "register_limit_bytes": register_limit_bytes, "environment": environment}
    return said | ({} if pfc is None else {"port_links": told})


@each_row(("devices", "answers", "expected", "words"), ROWS)
def test_what_is_wrong_with_devices_and_ports(devices, answers, expected, words):
    fabric = Fabric()
    for number, device in enumerate(devices):
        gids = [(GIDS[gid], VERSIONS[version]) for gid, version in device.get("gids", ())]
        fabric.add(f"mlx5_{number}", number, **{**device, **({"gids": gids} if "gids" in device else {})})
    found = findings(fabric.host(**answering(**answers)))
    assert [[f.code, f.status, f.subject] for f in found] == expected
    assert not words or [f for f in found if words in f"{f.message} {f.remedy}"], [f.message for f in found]


def test_sizes_and_rates_are_read() -> None:
    assert [compute_roce_mtu(m) for m in (1500, 4200, 9000, 256, None)] == [1024, 4096, 4096, None, None]
    rates = ("2.5 Gb/sec (1X SDR)", "200 Gb/sec (4X HDR)", "fast", None)
    assert [parse_rate(r) for r in rates] == [312.5e6, 25e9, None, None]


def test_a_virtual_function_in_stock_is_no_lost_port() -> None:
    """Without an address, on the bus of its physical function; one that a pod uses has an address."""
    facts = read_rdma(Fabric().add("mlx5_0", 0).add("mlx5_1", 1, state="1: DOWN", phys="3: Disabled").host())
    whole, virtual = facts.devices

    def severity(*devices: RdmaDevice) -> list[Status]:
        found = rdma.check(replace(facts, devices=devices))
        return [f.status for f in found if f.code == "rdma.port.down" and f.subject == "mlx5_1:1"]

    place = f"{(whole.bus_id or '')[:-1]}1"
    unused = replace(virtual, bus_id=place, is_vf=True, ports=(replace(virtual.ports[0], gids=()),))
    other = tuple(replace(gid, gid=f"{gid.gid[:-1]}9") for gid in whole.ports[0].gids)
    used = replace(unused, ports=(replace(virtual.ports[0], gids=other),))
    assert severity(whole, unused) == []
    assert replace(facts, devices=(whole, unused)).in_reach == (whole,)
    assert replace(facts, devices=(unused,)).in_reach == (unused,), "in a pod"
    unread = replace(unused, ports=(replace(unused.ports[0], gids_known=False),))
    assert replace(facts, devices=(whole, unread)).in_reach == (whole, unread), "its addresses are unknown"
    assert severity(whole, used) == [Status.FAIL]
    assert severity(whole, virtual) == [Status.FAIL], "a physical port"
    down = replace(whole, ports=(replace(whole.ports[0], state="DOWN"),))
    assert Status.INFO not in severity(down, unused), "with its own card down it may be the one that was to be used"


def test_an_unreadable_state_is_unknown() -> None:
    fabric = Fabric().add("mlx5_0", 0)
    fabric.files = {path: content for path, content in fabric.files.items() if not path.endswith("/state")}
    found = {f.code: f.status for f in findings(fabric.host())}
    assert found["rdma.port.unknown"] is Status.UNKNOWN
    assert "rdma.port.none_active" not in found


def test_nccl_takes_the_first_ipv4_entry_of_version_two() -> None:
    host = Fabric().add("mlx5_0", 0, gids=[(LINK_LOCAL, V2), (IPV4, V1), (IPV4, V2), (IPV4, V2)]).host()
    port = read_rdma(host).devices[0].ports[0]
    assert find_nccl_gid_index(port) == 2
    assert find_ipv4(port.gids[1]) == "192.168.77.1"


def test_a_large_table_is_read_to_the_end_of_what_is_used() -> None:
    asked: list[str] = []

    class Counting(DictHost):
        def read_text(self, path: str) -> str:
            asked.append(path)
            return super().read_text(path)

    fabric = Fabric().add("mlx5_0", 0, table=1024)
    port = read_rdma(Counting(fabric.files, fabric.links)).devices[0].ports[0]
    assert len(port.gids) == 4
    assert sum("/gid_attrs/types/" in path for path in asked) == 4, "types of empty entries answer EINVAL"
    assert sum("/gids/" in path for path in asked) < 100


def test_congestion_marks_prove_ecn_and_a_bond_is_named() -> None:
    fabric = Fabric().add("mlx5_bond_0", 0)
    bare = read_rdma(fabric.host()).devices[0]
    assert (bare.ports[0].ecn, bare.bond) == (None, None)
    folder = "/sys/devices/pci0000:10/0000:10:00.0"
    fabric.files[f"{folder}/infiniband/mlx5_bond_0/ports/1/hw_counters/np_ecn_marked_roce_packets"] = "12\n"
    fabric.files[f"{folder}/infiniband/mlx5_bond_0/tc/1/traffic_class"] = "Global tclass=106\n"
    fabric.links[f"{folder}/net/eth0/master"] = "/sys/devices/virtual/net/bond0"
    fabric.files["/sys/devices/virtual/net/bond0/mtu"] = "9000"
    found = read_rdma(fabric.host()).devices[0]
    assert (found.ports[0].ecn, found.ports[0].traffic_class, found.bond) == (True, 106, "bond0")


@each_row(("mode", "down", "severities"), rows("members"))
def test_a_member_of_a_bond_that_is_down_takes_its_share_with_it(mode: str, down: int, severities: list[str]) -> None:
    fabric, bond = Fabric().add("mlx5_bond_0", 0), "/sys/devices/virtual/net/bond0"
    fabric.links |= {"/sys/devices/pci0000:10/0000:10:00.0/net/eth0/master": bond, "/sys/class/net/bond0": bond}
    fabric.files |= {f"{bond}/bonding/mode": mode, f"{bond}/bonding/slaves": "m0 m1\n"}
    fabric.files |= {f"/sys/class/net/m{n}/operstate": "down" if n < down else "up" for n in (0, 1)}
    found = [(f.code, f.status, f.subject) for f in findings(fabric.host())]
    assert found == [("rdma.port.rate", severity, "mlx5_bond_0:1") for severity in severities]


def counted(**counters: int) -> rdma.RdmaFacts:
    port = RdmaPort(port=1, counters=counters)
    return rdma.RdmaFacts(devices=(RdmaDevice(name="mlx5_0", kind="hca", ports=(port,)),))


@each_row(("before", "after", "seconds", "severity"), rows("rises"))
def test_errors_are_judged_by_their_rise(before, after, seconds: float, severity: Status | None) -> None:
    found = list(find_rdma_increases(counted(**before), counted(**after), seconds))
    assert [f.status for f in found] == ([severity] if severity else [])


@pytest.mark.corpus
def test_a_recorded_soft_roce_device(corpus: Path) -> None:
    files, links = corpus_tree(corpus / "sysfs" / "softroce_rxe0.txt")
    facts = read_rdma(DictHost(files, links))
    device, port = facts.devices[0], facts.devices[0].ports[0]
    assert (device.name, device.kind, device.bus_id) == ("rxe0", "rxe", None)
    assert (port.state, port.link_layer, port.netdev) == ("ACTIVE", "Ethernet", "net1")
    assert port.rate_text == "2.5 Gb/sec (1X SDR)"
    assert [gid.type for gid in port.gids] == [V2, V2]
    assert (find_nccl_gid_index(port), port.counters is not None) == (1, True)


@each_row(("answers", "file", "trust", "priorities"), rows("trust"))
def test_trust_state_of_the_port_is_read(answers, file, trust, priorities):
    """By the VLAN tag's priority or by DSCP: the file where it is, else DCB's table."""
    fabric = Fabric().add("mlx5_0", 0)
    if file is not None:
        fabric.files[f"{fabric.links['/sys/class/net/eth0']}/qos/trust"] = file
    facts = read_rdma(fabric.host(port_links={"eth0": answers}))
    (port,) = facts.devices[0].ports
    assert port.trust == trust
    assert port.dscp_priorities == (None if priorities is None else tuple(map(tuple, priorities)))


GPU, NIC, BRIDGE = ("0x030200", "0x10de", "0x2330"), ("0x020700", "0x15b3", "0x1021"), ("0x060400", "0x1000", "0xc030")
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"


def config(*, acs: int | None = None) -> bytes:
    """A configuration space, with this ACS control where asked for."""
    space = bytearray(4096)
    struct.pack_into("<HH", space, 0, 0x15B3, 0x1021)
    struct.pack_into("<IHH", space, 0x100, (0x0001 if acs is None else 0x000D) | 1 << 16, 0x1F, int(acs or 0))
    return bytes(space)


class Machine(Devices):
    """Devices of a PCIe tree."""

    def add(self, path: str, kind: tuple[str, str, str], *, width: int = 16, slot: int = 16, **more) -> str:
        """Add the last device of the path "pci0000:00/0000:00:01.0/..."."""
        folder, name = f"/sys/devices/{path}", path.rpartition("/")[2]
        words = {"speed": "32.0 GT/s PCIe", "node": 0} | {n: v for n, v in more.items() if n in ("speed", "node")}
        files, links = tree_of("pci", folder=folder, name=name, kind=kind, width=width, slot=slot, **words)
        self.files |= {**files, f"{folder}/config": more.get("config", config())}
        self.links |= links
        driver = more.get("driver", {GPU[1]: "nvidia", NIC[1]: "mlx5_core"}.get(kind[1]))
        if driver:
            self.links[f"{folder}/driver"] = f"/sys/bus/pci/drivers/{driver}"
            self.files[f"/sys/bus/pci/drivers/{driver}/bind"] = ""
        if kind == NIC:
            self.files[f"{folder}/infiniband/mlx5_{len(self.files)}/node_type"] = "1: CA"
        if "group" in more:
            group = more["group"]
            self.links[f"{folder}/iommu_group"] = f"/sys/kernel/iommu_groups/{group[0]}"
            self.files[f"/sys/kernel/iommu_groups/{group[0]}/type"] = group[1] + "\n"
        return name


def switch(acs: int | None = 0, **gpu) -> Machine:
    """Root port, switch with an uplink and two downlinks, a GPU and a NIC below."""
    machine, ports = Machine(), {"config": config(acs=acs)}
    root = "pci0000:15/0000:15:01.0"
    machine.add(root, BRIDGE)
    machine.add(f"{root}/0000:16:00.0", BRIDGE)
    machine.add(f"{root}/0000:16:00.0/0000:17:00.0", BRIDGE, **ports)
    machine.add(f"{root}/0000:16:00.0/0000:17:01.0", BRIDGE, **ports)
    machine.add(f"{root}/0000:16:00.0/0000:17:00.0/0000:18:00.0", GPU, **gpu)
    machine.add(f"{root}/0000:16:00.0/0000:17:01.0/0000:19:00.0", NIC)
    return machine


def virtual(paths: list[str]) -> Machine:
    machine = Machine()
    for index, path in enumerate(paths):
        machine.add(path, GPU if index % 2 == 0 else NIC)
    return machine


OWN_ROOTS = ["pci0001:00/0001:00:00.0", "pci0101:00/0101:00:00.0", "pci0002:00/0002:00:00.0"]
ONE_ROOT = ["pci0000:00/0000:00:04.0", "pci0000:00/0000:00:05.0", "pci0000:00/0000:00:06.0"]


def below_a_port(kind: tuple[str, str, str], *, lanes: int = 16, rdma: bool = True, **device) -> Machine:
    """One device below a root port of so many lanes."""
    machine = Machine()
    machine.add("pci0000:00/0000:00:01.0", BRIDGE, width=lanes, slot=lanes)
    machine.add("pci0000:00/0000:00:01.0/0000:01:00.0", kind, **device)
    if not rdma:
        machine.files = {path: content for path, content in machine.files.items() if "/infiniband/" not in path}
    return machine


def read_without_root(machine: Machine) -> Machine:
    for path, content in machine.files.items():
        if isinstance(content, bytes):
            machine.files[path] = content[:64]
    return machine


DRIVER = "/proc/driver/nvidia/version"
CONFIGS = {"lost": b"\xff" * 4096}
KINDS = {"GPU": GPU, "NIC": NIC, "ConnectX": ("0x020000", "0x15b3", "0x1021"), "EFA": ("0x020000", "0x1d0f", "0xefa2"),
         "Ethernet": ("0x020000", "0x8086", "0x1533")}  # fmt: skip
BUILDERS: dict[str, Callable[..., Machine]] = {
    "switch": switch, "below a port": below_a_port, "own roots": lambda: virtual(OWN_ROOTS),
    "switch without root": lambda **more: read_without_root(switch(**more)),
}  # fmt: skip


@each_row(("what", "builder", "made", "more", "expected"), rows("tree"))
def test_what_is_wrong_with_the_tree(what, builder, made, more, expected):
    named = {"config": CONFIGS, "kind": KINDS}
    given = {name: named[name][value] if name in named else value for name, value in made.items()}
    files = {DRIVER: OPEN_DRIVER, "/proc/cpuinfo": "flags\t: fpu\n", **more}
    identity = files.pop("identity", {"kernel": "6.1.0-13-amd64"})
    found = list(pci.check(read_pci(BUILDERS[builder](**given).host(files=files, identity=identity))))
    assert {f.code: [f.status, f.subject] for f in found} == expected, what


@each_row(("hypervisor", "cards", "status"), [(None, 1, "fail"), ("KVM", 1, "warn"), ("KVM", 2, "fail")])
def test_the_only_card_of_a_guest_may_have_no_rdma_by_design(hypervisor: str | None, cards: int, status: str) -> None:
    gpu = PciDevice(bus_id="0000:00:05.0", class_code=0x030200, vendor_id=0x10DE, device_id=0x2236, driver="nvidia")
    card = replace(gpu, class_code=0x020000, vendor_id=0x15B3, device_id=0x101E, driver="mlx5_core", rdma=False)
    nics = tuple(replace(card, bus_id=f"0000:00:0{number}.0") for number in range(cards))
    found = pci.check(PciFacts(devices=(gpu, *nics), hypervisor=hypervisor))
    assert [f.status for f in found if f.code == "pci.nic.no_rdma"] == [status] * cards


def test_no_pci_is_absent_and_no_sysfs_is_unread() -> None:
    with pytest.raises(UnavailableError):
        read_pci(DictHost({"/sys/bus/virtio/devices": DIRECTORY}))
    with pytest.raises(FileNotFoundError):
        read_pci(DictHost())


@each_row(("kind", "files", "mode"), rows("iommu"))
def test_iommu_mode(kind: str | None, files: dict[str, Content], mode: str | None) -> None:
    """By the device's group, else by the command line."""
    machine = switch(**({"group": ("7", kind)} if kind else {}))
    assert read_pci(machine.host(files=files)).iommu_mode == mode


@each_row("paths", [OWN_ROOTS, ONE_ROOT])
def test_a_virtual_tree_is_recognised_and_says_what_to_set(paths: list[str]) -> None:
    azure = rows("azure")()
    host = virtual(paths).host(files=azure)
    assert "Hyper-V" in str(read_pci(host).virtual_tree)
    (found,) = (f for f in pci.check(read_pci(host)) if f.code == "pci.tree.virtual")
    assert found.status is Status.WARN
    assert "NCCL_TOPO_FILE" in found.remedy
    assert "/opt/microsoft/ndv4-topo.xml" in found.remedy
    named = virtual(paths).host(files={**azure, "/etc/nccl.conf": "NCCL_TOPO_FILE=/opt/microsoft/ndv4-topo.xml"})
    assert [f.status for f in pci.check(read_pci(named)) if f.code == "pci.tree.virtual"] == [Status.INFO]
    assert read_pci(virtual(paths).host()).virtual_tree is None, "bare metal may look like this"
    one = virtual(paths[:1])
    one.add(paths[1], ("0x020000", "0x1af4", "0x1041"))
    (alone,) = (f for f in pci.check(read_pci(one.host(files=azure))) if f.code == "pci.tree.virtual")
    assert (alone.code, alone.status) == ("pci.tree.virtual", Status.INFO), "nothing to choose: one GPU, no RDMA"


def test_a_broken_chain_of_capabilities_ends() -> None:
    space = bytearray(config(acs=0x1D))
    struct.pack_into("<I", space, 0x100, 0x0001 | 0x100 << 20)  # points at itself
    assert parse_config(bytes(space))["acs_redirects"] is False

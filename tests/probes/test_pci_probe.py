"""The PCIe tree: links, ACS, IOMMU, the ways to GPU memory, and trees that a hypervisor made up."""

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from dicthost import DIRECTORY, Content, DictHost, tree_of
from rigs.tables import each_row, rows_of

from contracts.finding import Status
from probes.api import UnavailableError
from probes.pci import probe as pci
from probes.pci.facts import PciDevice, PciFacts
from probes.pci.probe import list_peer_ports
from probes.pci.read import parse_config, read as read_pci

rows = rows_of(__file__)

GPU, NIC, BRIDGE = ("0x030200", "0x10de", "0x2330"), ("0x020700", "0x15b3", "0x1021"), ("0x060400", "0x1000", "0xc030")
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"


def config(*, acs: bool | None = None) -> bytes:
    """A configuration space, with ACS where asked for."""
    space = bytearray(4096)
    struct.pack_into("<HH", space, 0, 0x15B3, 0x1021)
    struct.pack_into("<IHH", space, 0x100, (0x0001 if acs is None else 0x000D) | 1 << 16, 0x1F, int(acs or 0))
    return bytes(space)


class Machine:
    """Collects devices, then becomes a host."""

    def __init__(self) -> None:
        self.files: dict[str, Content] = {"/sys/module/x/y": "", "/sys/class/x/y": ""}
        self.links: dict[str, str] = {}

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

    def host(self, **more) -> DictHost:
        """The machine so far."""
        return DictHost(self.files | more.pop("files", {}), self.links, **more)


def switch(acs: bool | None = False, **gpu) -> Machine:
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


def test_the_tree() -> None:
    facts = read_pci(switch().host())
    gpu = next(d for d in facts.devices if d.vendor_id == 0x10DE)
    assert (gpu.parent, gpu.root, gpu.driver, gpu.numa_node) == ("0000:17:00.0", "pci0000:15", "nvidia", 0)
    assert (gpu.link_width, gpu.link_transfers_per_second) == (16, 32e9)
    assert list_peer_ports(facts) == {"0000:17:00.0", "0000:17:01.0"}


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
    assert read_pci(virtual(paths).host()).virtual_tree is None, "bare metal may look like this"
    one = virtual(paths[:1])
    one.add(paths[1], ("0x020000", "0x1af4", "0x1041"))
    (alone,) = (f for f in pci.check(read_pci(one.host(files=azure))) if f.code == "pci.tree.virtual")
    assert (alone.code, alone.status) == ("pci.tree.virtual", Status.INFO), "nothing to choose: one GPU, no RDMA"


def test_a_broken_chain_of_capabilities_ends() -> None:
    space = bytearray(config(acs=True))
    struct.pack_into("<I", space, 0x100, 0x0001 | 0x100 << 20)  # points at itself
    assert parse_config(bytes(space))["acs_source_validation"] is False

"""The PCIe tree: links, ACS, IOMMU, the ways to GPU memory, and trees that a hypervisor made up."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from dicthost import DIRECTORY, Content, DictHost
from hypothesis import given
from hypothesis import strategies as st
from rigs.tables import each_row

from contracts.finding import Finding, Status
from probes.api import UnavailableError
from probes.pci import probe as pci
from probes.pci.probe import peer_ports
from probes.pci.read import parse_config

GPU, NIC, BRIDGE = ("0x030200", "0x10de", "0x2330"), ("0x020700", "0x15b3", "0x1021"), ("0x060400", "0x1000", "0xc030")
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n"


def config(*, acs: bool | None = None, relaxed: bool = True, bar: tuple[int, int] | None = None) -> bytes:
    """A configuration space with a PCI Express capability, and ACS and resizable BAR where asked for."""
    space = bytearray(4096)
    struct.pack_into("<HHHH", space, 0, 0x15B3, 0x1021, 0, 0x10)
    space[0x34] = 0x60
    struct.pack_into("<BBHIH", space, 0x60, 0x10, 0, 2, 0, 0x10 if relaxed else 0)
    chain = []
    if acs is not None:
        chain.append((0x000D, struct.pack("<HH", 0x1F, int(acs))))
    if bar is not None:
        supported, current = bar
        chain.append((0x0015, struct.pack("<II", supported << 4, 1 << 5 | current << 8)))
    chain = chain or [(0x0001, b"")]
    for place, (kind, body) in enumerate(chain):
        offset = 0x100 + 0x40 * place
        following = offset + 0x40 if place + 1 < len(chain) else 0
        struct.pack_into("<I", space, offset, kind | 1 << 16 | following << 20)
        space[offset + 4 : offset + 4 + len(body)] = body
    return bytes(space)


class Machine:
    """Collects devices, then becomes a host."""

    def __init__(self) -> None:
        self.files: dict[str, Content] = {"/sys/module/x/y": "", "/sys/class/x/y": ""}
        self.links: dict[str, str] = {}

    def add(self, path: str, kind: tuple[str, str, str], *, width: int = 16, slot: int = 16, **more: Any) -> str:
        """Add the last device of the path "pci0000:00/0000:00:01.0/..."."""
        folder, name = f"/sys/devices/{path}", path.rpartition("/")[2]
        self.links[f"/sys/bus/pci/devices/{name}"] = folder
        speed = more.get("speed", "32.0 GT/s PCIe")
        self.files |= {
            f"{folder}/class": kind[0] + "\n",
            f"{folder}/vendor": kind[1] + "\n",
            f"{folder}/device": kind[2] + "\n",
            f"{folder}/numa_node": f"{more.get('node', 0)}\n",
            f"{folder}/current_link_width": f"{width}\n",
            f"{folder}/max_link_width": f"{slot}\n",
            f"{folder}/current_link_speed": f"{speed}\n",
            f"{folder}/max_link_speed": "32.0 GT/s PCIe\n",
            f"{folder}/config": more.get("config", config()),
        }
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

    def host(self, **more: Any) -> DictHost:
        """The machine so far."""
        return DictHost(self.files | more.pop("files", {}), self.links, **more)


def switch(acs: bool | None = False, **gpu: Any) -> Machine:
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


def findings(host: DictHost) -> dict[str, Finding]:
    return {finding.code: finding for finding in pci.check(pci.read(host))}


GOOD = {"files": {"/proc/driver/nvidia/version": OPEN_DRIVER, "/proc/cpuinfo": "flags\t: fpu\n"}}


def good(**more: Any) -> dict[str, Any]:
    return {"files": {**GOOD["files"], **more}}


def test_the_tree() -> None:
    facts = pci.read(switch().host())
    gpu = next(d for d in facts.devices if d.vendor_id == 0x10DE)
    assert (gpu.parent, gpu.root, gpu.driver, gpu.numa_node) == ("0000:17:00.0", "pci0000:15", "nvidia", 0)
    assert (gpu.link_width, gpu.link_transfers_per_second) == (16, 32e9)
    assert gpu.relaxed_ordering is True
    assert peer_ports(facts) == {"0000:17:00.0", "0000:17:01.0"}


def test_a_sound_machine_has_no_findings() -> None:
    assert findings(switch().host(**good())) == {}


def test_no_pci_is_absent_and_no_sysfs_is_unread() -> None:
    with pytest.raises(UnavailableError):
        pci.read(DictHost({"/sys/bus/virtio/devices": DIRECTORY}))
    with pytest.raises(FileNotFoundError):
        pci.read(DictHost())


def test_a_x16_gpu_at_x4_fails_and_an_idle_one_at_low_speed_does_not() -> None:
    narrow = findings(switch(width=4).host(**good()))
    assert narrow["pci.link.width"].status is Status.FAIL
    assert narrow["pci.link.width"].subject == "0000:18:00.0"
    assert findings(switch(speed="2.5 GT/s PCIe").host(**good())) == {}


def test_a_slot_with_eight_lanes_is_not_a_degraded_link() -> None:
    machine = Machine()
    machine.add("pci0000:00/0000:00:01.0", BRIDGE, width=8, slot=8)
    machine.add("pci0000:00/0000:00:01.0/0000:01:00.0", GPU, width=8, slot=16)
    assert "pci.link.width" not in findings(machine.host(**good()))


def test_a_nic_at_half_its_speed_warns() -> None:
    machine = Machine()
    machine.add("pci0000:00/0000:00:01.0", BRIDGE)
    machine.add("pci0000:00/0000:00:01.0/0000:01:00.0", NIC, speed="16.0 GT/s PCIe")
    found = findings(machine.host(**good()))
    assert found["pci.link.speed"].status is Status.WARN


def test_acs_between_gpu_and_nic() -> None:
    on = findings(switch(acs=True).host(**good()))["pci.acs.on"]
    assert on.status is Status.FAIL
    assert any("0000:17:00.0" in line for line in on.evidence)
    assert "pci.acs.on" not in findings(switch(acs=False).host(**good()))


def test_acs_of_a_non_root_user_is_unknown() -> None:
    machine = switch()
    for path, content in machine.files.items():
        if path.endswith("/config"):
            assert isinstance(content, bytes)
            machine.files[path] = content[:64]
    found = findings(machine.host(**good()))
    assert found["pci.acs.unknown"].status is Status.UNKNOWN
    assert "pci.acs.on" not in found


def test_acs_and_iommu_are_not_judged_in_a_virtual_machine() -> None:
    machine = switch(acs=True, group=("7", "DMA"))
    virtual = good(**{"/proc/cpuinfo": "flags\t: fpu hypervisor\n"})
    assert not {"pci.acs.on", "pci.iommu.translated"} & set(findings(machine.host(**virtual)))
    assert {"pci.acs.on", "pci.iommu.translated"} <= set(findings(machine.host(**good())))


@each_row(
    ("kind", "mode"), [("DMA", "translated"), ("DMA-FQ", "translated"), ("identity", "passthrough"), (None, "off")]
)
def test_iommu_mode(kind: str | None, mode: str) -> None:
    machine = switch(**({"group": ("7", kind)} if kind else {}))
    assert pci.read(machine.host()).iommu_mode == mode


def test_iommu_mode_by_the_command_line() -> None:
    files = {"/sys/class/iommu/dmar0/x": "", "/proc/cmdline": "quiet intel_iommu=on iommu=pt\n"}
    assert pci.read(switch().host(files=files)).iommu_mode == "passthrough"
    files["/proc/cmdline"] = "quiet\n"
    assert pci.read(switch().host(files=files)).iommu_mode is None


@each_row(
    ("files", "kernel", "code"),
    [
        ({"/proc/driver/nvidia/version": OPEN_DRIVER}, "6.1.0-13-amd64", None),
        ({"/proc/driver/nvidia/version": OPEN_DRIVER}, "5.4.0-150-generic", "pci.peermem.missing"),
        ({"/proc/driver/nvidia/version": PROPRIETARY}, "6.1.0", "pci.peermem.missing"),
        (
            {"/proc/driver/nvidia/version": PROPRIETARY, "/sys/module/nvidia_peermem/version": "550.54.15\n"},
            "6.1.0",
            None,
        ),
        (
            {"/proc/driver/nvidia/version": PROPRIETARY, "/sys/kernel/mm/memory_peers/nv_mem/version": "1.3\n"},
            "5.4.0",
            None,
        ),
        ({}, "6.1.0", "pci.peermem.unknown"),
    ],
)
def test_the_ways_to_gpu_memory(files: dict[str, Content], kernel: str, code: str | None) -> None:
    host = switch().host(files=files, identity={"kernel": kernel})
    assert {c for c in findings(host) if c.startswith("pci.peermem")} == ({code} if code else set())


def virtual(paths: list[str]) -> Machine:
    machine = Machine()
    for index, path in enumerate(paths):
        machine.add(path, GPU if index % 2 == 0 else NIC)
    return machine


OWN_ROOTS = ["pci0001:00/0001:00:00.0", "pci0101:00/0101:00:00.0", "pci0002:00/0002:00:00.0"]
ONE_ROOT = ["pci0000:00/0000:00:04.0", "pci0000:00/0000:00:05.0", "pci0000:00/0000:00:06.0"]


@each_row("paths", [OWN_ROOTS, ONE_ROOT])
def test_a_virtual_tree_is_recognised_and_says_what_to_set(paths: list[str]) -> None:
    azure = {
        "/proc/cpuinfo": "flags\t: hypervisor\n",
        "/sys/class/dmi/id/sys_vendor": "Microsoft Corporation\n",
        "/sys/class/dmi/id/product_name": "Virtual Machine\n",
        "/opt/microsoft/ndv4-topo.xml": "<system/>",
    }
    host = virtual(paths).host(files=azure)
    assert "Hyper-V" in str(pci.read(host).virtual_tree)
    found = findings(host)["pci.tree.virtual"]
    assert found.status is Status.WARN
    assert "NCCL_TOPO_FILE" in found.remedy
    assert "/opt/microsoft/ndv4-topo.xml" in found.remedy
    assert pci.read(virtual(paths).host()).virtual_tree is None, "bare metal may look like this"


def test_a_topology_file_that_nccl_reads_unasked_is_only_told() -> None:
    files = {"/proc/cpuinfo": "flags\t: hypervisor\n", "/var/run/nvidia-topologyd/virtualTopology.xml": "<system/>"}
    assert findings(virtual(OWN_ROOTS).host(files=files))["pci.tree.virtual"].status is Status.INFO


def test_a_lost_device_and_one_without_driver() -> None:
    found = findings(switch(config=b"\xff" * 4096, driver=None).host(**good()))
    assert found["pci.device.lost"].status is Status.FAIL
    assert found["pci.device.no_driver"].subject == "0000:18:00.0"


@each_row(
    ("kind", "files", "severity"),
    [
        (NIC, {}, Status.FAIL),
        (("0x020000", "0x15b3", "0x1021"), {}, Status.WARN),
        (("0x020000", "0x1d0f", "0xefa2"), {}, Status.FAIL),
        (NIC, {"/.dockerenv": ""}, Status.UNKNOWN),
        (("0x020000", "0x8086", "0x1533"), {}, None),
    ],
)
def test_a_nic_made_for_rdma_without_an_rdma_device(kind: Any, files: Any, severity: Status | None) -> None:
    machine = Machine()
    machine.add("pci0000:00/0000:00:02.0", kind)
    machine.files = {path: content for path, content in machine.files.items() if "/infiniband/" not in path}
    found = findings(machine.host(files=files)).get("pci.nic.no_rdma")
    assert (found.status if found else None) == severity


def test_resizable_bar() -> None:
    assert parse_config(config(bar=(0b1_0000_0000_0000, 12))).resizable_bar is True
    assert parse_config(config(bar=(0b1_0000_0000_0000, 8))).resizable_bar is False
    assert parse_config(config()).resizable_bar is False
    assert parse_config(config()[:64]).resizable_bar is None


@each_row(
    ("space", "expected"),
    [
        (config(bar=(0b1_0000_0000_0000, 12)), None),
        (config(bar=(0b1_0000_0000_0000, 8)), Status.INFO),
        (config(), None),
        (config()[:64], None),
    ],
    ids=["largest", "smaller", "no capability", "not root"],
)
def test_a_gpu_with_less_bar_than_it_offers_is_a_note(space: bytes, expected: Status | None) -> None:
    found = findings(switch(config=space).host(**good())).get("pci.rebar.off")
    assert (found.status if found else None) == expected


def test_a_broken_chain_of_capabilities_ends() -> None:
    space = bytearray(config(acs=True))
    struct.pack_into("<I", space, 0x100, 0x0001 | 0x100 << 20)  # points at itself
    assert parse_config(bytes(space)).acs_source_validation is False


@given(st.binary(max_size=4096))
def test_any_configuration_space_is_decoded(space: bytes) -> None:
    for tried in (space, config(acs=True)[:0x100] + space):
        parse_config(tried)

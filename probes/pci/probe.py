"""The PCIe tree from sysfs, and what decides whether a NIC may read GPU memory.

Specification: Linux Documentation/ABI/testing/sysfs-bus-pci; PCI Express Base Specification, ACS capability.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from probes.api import Finding, Metric, Probe, Sample
from probes.host.protocol import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A bridge, GPU, NIC or NVSwitch; other classes are left out."""

    bus_id: str  # "0000:1b:00.0"
    class_code: int  # 0x030200 3D controller, 0x0200xx/0x0207xx network, 0x060400 bridge, 0x068000 NVSwitch
    vendor_id: int
    device_id: int
    parent: str | None = None  # bus id of the bridge above; None directly under the root complex
    root: str | None = None  # host bridge: "pci0000:17"
    numa_node: int | None = None  # None where sysfs says -1
    driver: str | None = None
    link_transfers_per_second: float | None = None  # current_link_speed: 16 GT/s is 16e9
    link_transfers_per_second_max: float | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    acs_source_validation: bool | None = None  # config space, readable by root only
    relaxed_ordering: bool | None = None
    iommu_group: int | None = None
    physical_function: str | None = None  # bus id of the PF where this is an SR-IOV VF
    sriov_vfs: int | None = None
    sriov_vfs_max: int | None = None
    resizable_bar: bool | None = None  # True where every resizable BAR is as large as it can be
    bar_sizes_offered: bool | None = None  # the resizable BAR capability is there
    rdma: bool | None = None  # a NIC's infiniband/ folder; None for other classes
    lost: bool = False  # configuration space reads as ones


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFacts:
    """The tree, and the host-wide switches of GPUDirect RDMA."""

    devices: tuple[PciDevice, ...]
    iommu_mode: str | None = None  # "off", "passthrough", "translated"; None unknown
    peermem_version: str | None = None  # /sys/module/nvidia_peermem/version
    peermem_loaded: bool | None = None
    nvidia_open_module: bool | None = None  # open kernel modules export DMA-BUF
    dmabuf_possible: bool | None = None  # open module and kernel >= 5.12; possible, not proven
    virtual_tree: str | None = None  # why the tree cannot be trusted: "every device sits on its own root (hypervisor)"
    hypervisor: str | None = None  # None bare metal or unknown: ACS and IOMMU matter there only
    container: str | None = None  # "kubernetes", ...: in a pod, a NIC's RDMA device may be another namespace's
    topology_files: tuple[str, ...] = ()  # NCCL topology XML the provider put on this host


def is_bridge(class_code: int) -> bool:
    """PCI-to-PCI bridge (06 04) or NVSwitch (06 80)."""
    return class_code >> 8 in (0x0604, 0x0680)


def is_gpu(class_code: int) -> bool:
    """VGA or 3D controller (03 00, 03 02), display (03 80) or processing accelerator (12 00)."""
    return class_code >> 8 in (0x0300, 0x0302, 0x0380, 0x1200)


def is_network(class_code: int) -> bool:
    """Network controller: Ethernet (02 00), InfiniBand (02 07) and the others."""
    return class_code >> 16 == 0x02


def read(host: Host) -> PciFacts:
    """Read the tree and the switches."""
    from probes.pci import read as pci_read

    return pci_read.read(host)


def check(facts: PciFacts) -> Iterator[Finding]:
    """What of the tree keeps GPUs and NICs from their speed."""
    from probes.pci import check as pci_check

    return pci_check.check(facts)


def samples(facts: PciFacts) -> Iterator[Sample]:
    """The switches, and how much of its possible width each GPU and NIC has."""
    from probes.pci import check as pci_check

    known = (
        ("pci_peermem_loaded", facts.peermem_loaded),
        ("pci_dmabuf_possible", facts.dmabuf_possible),
    )
    for metric, value in known:
        if value is not None:
            yield Sample(metric=metric, value=float(value))
    if facts.iommu_mode:
        yield Sample(metric="pci_iommu_info", value=1, labels=(facts.iommu_mode,))
    acs = [d.acs_source_validation for d in facts.devices if d.acs_source_validation is not None]
    if acs:
        yield Sample(metric="pci_acs_source_validation_devices", value=float(sum(acs)))
    for device in facts.devices:
        width, possible = device.link_width, pci_check.possible_width(facts, device)
        if not is_bridge(device.class_code) and width and possible:
            yield Sample(metric="pci_link_width_ratio", value=width / possible, labels=(device.bus_id,))


PROBE = Probe(
    name="pci",
    facts=PciFacts,
    read=read,
    check=check,
    samples=samples,
    codes=(
        "pci.device.lost",
        "pci.gpu.unjudged",
        "pci.device.no_driver",
        "pci.device.passed_through",
        "pci.link.width",
        "pci.link.speed",
        "pci.acs.on",
        "pci.acs.unknown",
        "pci.iommu.translated",
        "pci.nic.no_rdma",
        "pci.peermem.missing",
        "pci.peermem.unknown",
        "pci.tree.virtual",
        "pci.relaxed_ordering.off",
        "pci.rebar.off",
    ),
    metrics=(
        Metric(name="pci_peermem_loaded", help="1 where nvidia_peermem or nv_peer_mem is loaded."),
        Metric(name="pci_dmabuf_possible", help="1 where driver and kernel could export GPU memory as DMA-BUF."),
        Metric(name="pci_iommu_info", help="IOMMU mode of GPUs and NICs.", labels=("mode",), kind="info"),
        Metric(name="pci_acs_source_validation_devices", help="PCIe ports that redirect peer traffic (ACS)."),
        Metric(
            name="pci_link_width_ratio",
            help="PCIe lanes in use over lanes that device and slot could use.",
            labels=("pci_bus_id",),
        ),
    ),
)

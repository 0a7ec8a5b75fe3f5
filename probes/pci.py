"""The PCIe tree from sysfs, and what decides whether a NIC may read GPU memory.

Specification: Linux Documentation/ABI/testing/sysfs-bus-pci; PCI Express Base Specification, ACS capability.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    resizable_bar: bool | None = None


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

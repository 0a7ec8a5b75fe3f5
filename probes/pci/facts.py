"""The PCIe tree, and which of its devices are GPUs and HCAs that this host itself is to use.

Specification: Linux Documentation/ABI/testing/sysfs-bus-pci; PCI Express Base Specification, ACS capability; PCI Code
and ID Assignment Specification (class codes); pci.ids (vendors, virtual functions); Linux
Documentation/driver-api/vfio.rst (a device that a VFIO driver holds belongs to a virtual machine).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hardware.gpus import NVIDIA
from probes.api import Source


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
    resizable_bar: bool | None = None  # True where every resizable BAR is as large as it can be
    bar_sizes_offered: bool | None = None  # the resizable BAR capability is there
    rdma: bool | None = None  # a NIC's infiniband/ folder; None for other classes
    lost: bool = False  # configuration space reads as ones


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFacts:
    """The tree, and the host-wide switches of GPUDirect RDMA."""

    devices: tuple[PciDevice, ...]
    iommu_mode: str | None = None  # "off", "passthrough", "translated"; None unknown
    peermem_loaded: bool | None = None
    nvidia_open_module: bool | None = None  # open kernel modules export DMA-BUF
    dmabuf_possible: bool | None = None  # open module and kernel >= 5.12; possible, not proven
    virtual_tree: str | None = None  # why the tree cannot be trusted: "every device sits on its own root (hypervisor)"
    hypervisor: str | None = None  # None bare metal or unknown: ACS and IOMMU matter there only
    container: str | None = None  # "kubernetes", ...: in a pod, a NIC's RDMA device may be another namespace's
    topology_files: tuple[str, ...] = ()  # NCCL topology XML the provider put on this host


SOURCE = Source(name="pci", facts=PciFacts)
DEVICES = "/sys/bus/pci/devices"
DEPTH_MAX = 64  # bridges; the 256 buses of the specification cannot nest deeper in practice


def ancestors(parents: Mapping[str, str | None], bus_id: str) -> list[str]:
    """The bus ids of the bridges above a device, the nearest first."""
    found: list[str] = []
    above = parents.get(bus_id)
    while above is not None and above not in found and len(found) < DEPTH_MAX:
        found.append(above)
        above = parents.get(above)
    return found


def is_bridge(class_code: int) -> bool:
    """PCI-to-PCI bridge (06 04) or NVSwitch (06 80)."""
    return class_code >> 8 in (0x0604, 0x0680)


def is_gpu(class_code: int) -> bool:
    """VGA or 3D controller (03 00, 03 02), display (03 80) or processing accelerator (12 00)."""
    return class_code >> 8 in (0x0300, 0x0302, 0x0380, 0x1200)


def is_network(class_code: int) -> bool:
    """Network controller: Ethernet (02 00), InfiniBand (02 07) and the others."""
    return class_code >> 16 == 0x02


AMD = 0x1002
CRAY = 0x17DB
_VGA = 0x0300
_STUBS = {"pci-stub", "pciback", "xen-pciback"}


def is_passed_through(driver: str | None) -> bool:
    """Whether a driver holds the device for a virtual machine: vfio-pci, nvgrace-gpu-vfio-pci, xen-pciback, ..."""
    return driver is not None and ("vfio" in driver or driver in _STUBS)


def nvidia_gpus(facts: PciFacts) -> list[PciDevice]:
    """NVIDIA GPUs of the bus, those that a virtual machine holds and virtual functions included."""
    # A display adapter of a management controller is class 03 00 too: only NVIDIA's count as GPUs here.
    return [d for d in facts.devices if is_gpu(d.class_code) and d.vendor_id == NVIDIA]


def amd_gpus(facts: PciFacts) -> tuple[PciDevice, ...]:
    """AMD's GPUs by class and vendor: accelerators (12 00), 3D and other display controllers (03 02, 03 80).

    A VGA controller (03 00) counts only where no NVIDIA GPU is there: beside one it is the CPU's own display.
    """
    nvidia = bool(nvidia_gpus(facts))
    return tuple(
        device
        for device in facts.devices
        if is_gpu(device.class_code)
        and device.vendor_id == AMD
        and not is_passed_through(device.driver)
        and (device.class_code >> 8 != _VGA or (not nvidia and device.driver == "amdgpu"))
    )


def is_cassini(device: PciDevice) -> bool:
    """A NIC of HPE Slingshot 11: Cray's vendor id, or the cxi driver."""
    if not is_network(device.class_code):
        return False
    return device.vendor_id == CRAY or (device.driver or "").startswith("cxi")

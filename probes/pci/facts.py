"""Facts about the PCIe tree, and which of its devices are GPUs and HCAs that this host itself uses.

Specification: Linux Documentation/ABI/testing/sysfs-bus-pci; PCI Express Base Specification, ACS capability; PCI Code
and ID Assignment Specification (class codes); pci.ids (vendors, virtual functions); Linux
Documentation/driver-api/vfio.rst (a device with a VFIO driver belongs to a virtual machine).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hardware.gpus import NVIDIA
from probes.api import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A bridge, GPU, NIC or NVSwitch. Devices of other classes are not included."""

    bus_id: str  # "0000:1b:00.0"
    class_code: int  # 0x030200 3D controller, 0x0200xx/0x0207xx network, 0x060400 bridge, 0x068000 NVSwitch
    vendor_id: int
    device_id: int
    parent: str | None = None  # bus id of the upstream bridge; None directly under the root complex
    root: str | None = None  # host bridge: "pci0000:17"
    numa_node: int | None = None  # None: sysfs has -1
    driver: str | None = None
    link_transfers_per_second: float | None = None  # current_link_speed; 16 GT/s is 16e9
    link_transfers_per_second_max: float | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    acs_redirects: bool | None = None  # peer-to-peer traffic; from configuration space, readable only by root
    iommu_group: int | None = None
    physical_function: str | None = None  # bus id of the physical function, if this is an SR-IOV VF
    rdma: bool | None = None  # whether a NIC has an infiniband/ folder; None for other classes
    lost: bool = False  # configuration space reads as all ones


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFacts:
    """The PCIe tree, and the host-wide settings that affect GPUDirect RDMA."""

    devices: tuple[PciDevice, ...]
    iommu_mode: str | None = None  # "off", "passthrough", "translated"; None unknown
    peermem_loaded: bool | None = None
    nvidia_open_module: bool | None = None  # the open kernel modules support DMA-BUF
    dmabuf_possible: bool | None = None  # open module and kernel >= 5.12: necessary, not sufficient
    virtual_tree: str | None = None  # reason not to trust the tree: "every device sits on its own root (hypervisor)"
    hypervisor: str | None = None  # None: bare metal or unknown; ACS and IOMMU matter only on bare metal
    container: str | None = None  # "kubernetes", ...; in a pod, a NIC's RDMA device may be in another namespace
    topology_files: tuple[str, ...] = ()  # NCCL topology XML files installed by the cloud provider
    topology_file: str | None = None  # the file that NCCL reads without a further setting


SOURCE = Source(name="pci", facts=PciFacts)
DEVICES = "/sys/bus/pci/devices"
MAX_DEPTH = 64  # bridges; the 256 buses of the specification are never nested deeper in practice


def ancestors(parents: Mapping[str, str | None], bus_id: str) -> list[str]:
    """Return the bus ids of all bridges above a device, nearest first."""
    bridges: list[str] = []
    above = parents.get(bus_id)
    while above is not None and above not in bridges and len(bridges) < MAX_DEPTH:
        bridges.append(above)
        above = parents.get(above)
    return bridges


def is_bridge(class_code: int) -> bool:
    """Whether the class is a PCI-to-PCI bridge (06 04) or NVSwitch (06 80)."""
    return class_code >> 8 in (0x0604, 0x0680)


def is_gpu(class_code: int) -> bool:
    """Whether the class is VGA or 3D controller (03 00, 03 02), display (03 80) or processing accelerator (12 00)."""
    return class_code >> 8 in (0x0300, 0x0302, 0x0380, 0x1200)


def is_network(class_code: int) -> bool:
    """Whether the class is a network controller: Ethernet (02 00), InfiniBand (02 07) or another."""
    return class_code >> 16 == 0x02


AMD, HABANA = 0x1002, 0x1DA3
UNSUPPORTED = {"rccl": "AMD GPUs", "hccl": "Gaudi accelerators"}  # by collective library
CRAY = 0x17DB
_VGA = 0x0300
_STUBS = {"pci-stub", "pciback", "xen-pciback"}


def is_passed_through(driver: str | None) -> bool:
    """Whether the driver passes the device to a virtual machine: vfio-pci, nvgrace-gpu-vfio-pci, xen-pciback, ..."""
    return driver is not None and ("vfio" in driver or driver in _STUBS)


def list_nvidia_gpus(facts: PciFacts) -> list[PciDevice]:
    """Return NVIDIA GPUs on the bus, including GPUs passed to virtual machines, and virtual functions."""
    # The display adapter of a management controller also has class 03 00, so only NVIDIA devices are counted.
    return [d for d in facts.devices if is_gpu(d.class_code) and d.vendor_id == NVIDIA]


def list_other_gpus(facts: PciFacts) -> tuple[PciDevice, ...]:
    """Return AMD GPUs and Gaudi, by class and vendor: accelerators (12 00), 3D and display controllers (03 02, 03 80).

    A VGA controller (03 00) counts only without NVIDIA GPUs: next to one, it is the CPU's integrated graphics.
    """
    nvidia = bool(list_nvidia_gpus(facts))
    return tuple(
        device
        for device in facts.devices
        if is_gpu(device.class_code)
        and device.vendor_id in (AMD, HABANA)
        and not is_passed_through(device.driver)
        and (device.class_code >> 8 != _VGA or (not nvidia and device.driver == "amdgpu"))
    )


def is_cassini(device: PciDevice) -> bool:
    """Whether the device is an HPE Slingshot 11 NIC: Cray's vendor id, or the cxi driver."""
    if not is_network(device.class_code):
        return False
    return device.vendor_id == CRAY or (device.driver or "").startswith("cxi")

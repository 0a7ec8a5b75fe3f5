"""Reads /sys/bus/pci, configuration space, and the host-wide settings that affect GPUDirect RDMA.

Specification: Linux Documentation/ABI/testing/sysfs-bus-pci, sysfs-kernel-iommu_groups; NCCL user guide,
Troubleshooting ("GPU Direct"); NCCL src/graph/topo.cc for the path of a virtual topology file; PCI Express Base
Specification, chapter 7 (capability structures), linux/pci_regs.h for their offsets; NVIDIA driver README, "Device
Minor" in /proc/driver/nvidia/gpus/*/information; Linux fs/namei.c, inode_permission: access(2) checks the device
cgroup. A process without CAP_SYS_ADMIN can read only the first 64 bytes of configuration space, so it cannot see
capabilities.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from contracts.tables import read_table
from hardware.gpus import NVIDIA
from probes.api import UnavailableError
from probes.gpu.facts import PROC, BusGpu, GpuBus
from probes.host import sysfs
from probes.host.protocol import Host
from probes.hostinfo.read import detect_container, read_nccl_conf, read_virtual_machine
from probes.pci.facts import DEVICES, PciDevice, PciFacts, ancestors, is_bridge, is_gpu, is_network, is_passed_through

NAMES = read_table(__file__, "names.toml")
GROUPS = "/sys/kernel/iommu_groups"
MAX_DEVICES = 4096
NVSWITCH = 0x0680
DMABUF_KERNEL = (5, 12)  # NCCL user guide, Troubleshooting: DMA-BUF needs Linux 5.12 and the open kernel modules
DEFAULT_TOPOLOGY = "/var/run/nvidia-topologyd/virtualTopology.xml"  # default of NCCL_TOPO_FILE
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def read(host: Host) -> PciFacts:
    """Read the PCIe tree and the host-wide settings."""
    try:
        names = host.list_dir(DEVICES)
    except FileNotFoundError as error:
        # If sysfs is not mounted, or if a recording has no such query, the devices are unknown, not absent. In a
        # recording older than the query for /sys/bus, network interfaces show that sysfs was mounted.
        if not host.exists("/sys/bus") and not sysfs.names(host, "/sys/class/net"):
            raise
        raise UnavailableError(f"no PCI bus is visible here ({DEVICES}: {error.strerror or error})") from error
    addresses = [name for name in names if sysfs.BUS_ID.fullmatch(name)][:MAX_DEVICES]
    devices = _with_config(host, [d for name in addresses if (d := read_device(host, name)) is not None])
    version = sysfs.text(host, "/proc/driver/nvidia/version")
    opened = None if version is None else "Open Kernel Module" in version
    hypervisor = read_virtual_machine(host)
    topology_files = tuple(
        f"{folder}/{name}"
        for folder in NAMES["topology_folders"]
        for name in sysfs.names(host, folder)
        if name.endswith(".xml")
    )
    return PciFacts(
        devices=devices,
        iommu_mode=_read_iommu_mode(host, devices),
        peermem_loaded=any(host.exists(path) for path in NAMES["peermem"]) if host.exists("/sys/module") else None,
        nvidia_open_module=opened,
        dmabuf_possible=_has_dmabuf(opened, str(host.identity().get("kernel") or "")),
        virtual_tree=explain_virtual_tree(devices, hypervisor),
        hypervisor=hypervisor,
        container=detect_container(host),
        topology_files=topology_files,
        topology_file=_find_topology_file(host, topology_files),
    )


def _find_topology_file(host: Host, files: tuple[str, ...]) -> str | None:
    """Return the topology file that NCCL reads here: the one that is named, NCCL's default, or the EFA plugin's."""
    settings = read_nccl_conf(host, str(host.identity().get("home") or ""))[0] or {}
    named = host.environment().get("NCCL_TOPO_FILE") or settings.get("NCCL_TOPO_FILE")
    if named:
        return named if "\0" not in named and host.exists(named) else None
    return next((path for path in files if path == DEFAULT_TOPOLOGY or "/aws-ofi-nccl/" in path), None)


def read_device(host: Host, address: str) -> PciDevice | None:
    """Read one device; None if its class is not relevant."""
    folder = f"{DEVICES}/{address}"
    code = sysfs.number(host, f"{folder}/class")
    if code is None or not (is_bridge(code) or is_gpu(code) or is_network(code)):
        return None
    vendor, device = sysfs.number(host, f"{folder}/vendor"), sysfs.number(host, f"{folder}/device")
    if vendor is None or device is None:
        return None
    if code >> 8 == NVSWITCH and vendor != NVIDIA:
        return None  # "other bridge" of a chipset
    path = (sysfs.attempt(host.resolve, folder) or "").split("/")
    ancestors = [part for part in path[:-1] if sysfs.BUS_ID.fullmatch(part)]
    roots = [part for part in path if _ROOT.fullmatch(part)]
    node = sysfs.number(host, f"{folder}/numa_node")
    group = sysfs.target_name(host, f"{folder}/iommu_group")
    return PciDevice(
        bus_id=address,
        class_code=code,
        vendor_id=vendor,
        device_id=device,
        parent=ancestors[-1] if ancestors else None,
        root=roots[-1] if roots else None,
        numa_node=node if node is not None and node >= 0 else None,
        driver=sysfs.target_name(host, f"{folder}/driver"),
        link_transfers_per_second=_parse_transfers(sysfs.text(host, f"{folder}/current_link_speed")),
        link_transfers_per_second_max=_parse_transfers(sysfs.text(host, f"{folder}/max_link_speed")),
        link_width=_parse_width(sysfs.number(host, f"{folder}/current_link_width")),
        link_width_max=_parse_width(sysfs.number(host, f"{folder}/max_link_width")),
        iommu_group=sysfs.parse_number(group),
        physical_function=None if is_bridge(code) else sysfs.target_name(host, f"{folder}/physfn"),
        rdma=bool(sysfs.names(host, f"{folder}/infiniband")) if is_network(code) else None,
    )


def _with_config(host: Host, devices: list[PciDevice]) -> tuple[PciDevice, ...]:
    """Read configuration space of GPUs, NICs and the bridges above them: each word takes microseconds on the device."""
    parents = {device.bus_id: device.parent for device in devices}
    needed = {device.bus_id for device in devices if not is_bridge(device.class_code)}
    for device in devices:
        if device.bus_id in needed:
            needed |= set(ancestors(parents, device.bus_id))
    places = [f"{DEVICES}/{device.bus_id}/config" if device.bus_id in needed else None for device in devices]
    configs = [sysfs.attempt(host.read_bytes, place, CONFIG_BYTES) if place else None for place in places]
    return tuple(replace(d, **parse_config(c)) if c is not None else d for d, c in zip(devices, configs, strict=True))


def _parse_transfers(value: str | None) -> float | None:
    """Parse "16.0 GT/s PCIe" as 16e9; "Unknown" becomes None."""
    match = re.match(r"(\d{1,4}(?:\.\d{1,3})?) GT/s", value or "", re.ASCII)
    return float(match[1]) * 1e9 if match else None


def _parse_width(value: int | None) -> int | None:
    """Return the number of lanes; the kernel prints 0 or 255 if there is no link."""
    return value if value is not None and 1 <= value <= 32 else None


def _has_dmabuf(opened: bool | None, kernel: str) -> bool | None:
    version = re.match(r"(\d{1,4})\.(\d{1,4})", kernel, re.ASCII)
    if opened is None or version is None:
        return None
    return opened and (int(version[1]), int(version[2])) >= DMABUF_KERNEL


def _read_iommu_mode(host: Host, devices: tuple[PciDevice, ...]) -> str | None:
    """Return the mode from the domain type of GPUs' and NICs' IOMMU groups, else from the kernel command line."""
    ends = [d for d in devices if not is_bridge(d.class_code)]
    groups = sorted({d.iommu_group for d in ends if d.iommu_group is not None})
    types = {kind for group in groups if (kind := sysfs.text(host, f"{GROUPS}/{group}/type"))}
    if any(kind.startswith("DMA") for kind in types):
        return "translated"
    if "identity" in types:
        return "passthrough"
    if not groups and not sysfs.names(host, "/sys/class/iommu"):
        return "off" if host.exists("/sys/class") else None
    options = (sysfs.text(host, "/proc/cmdline") or "").split()
    if {"iommu=off", "intel_iommu=off", "amd_iommu=off"} & set(options):
        return "off"
    return "passthrough" if {"iommu=pt", "iommu.passthrough=1"} & set(options) else None


def explain_virtual_tree(devices: tuple[PciDevice, ...], hypervisor: str | None) -> str | None:
    """Return the reason that the tree shows no distances: a hypervisor gave GPUs and NICs one root each, or all one."""
    ends = [d for d in devices if is_gpu(d.class_code) or is_network(d.class_code)]
    if hypervisor is None or len(ends) < 2 or any(d.root is None for d in ends):
        return None
    parents = {d.bus_id: d.parent for d in devices}
    roots, deepest = {d.root for d in ends}, max(len(ancestors(parents, d.bus_id)) for d in ends)
    if len(roots) == 1 and deepest == 0:
        return f"every device sits on the same root bus ({hypervisor})"
    if len(roots) == 1 and deepest == 1 and len({d.parent for d in ends}) == len(ends):
        return f"every device sits behind its own virtual root port ({hypervisor})"
    if len(roots) == len(ends) and deepest <= 1:
        return f"every device sits on its own root ({hypervisor})"
    return None


# GPUs of the bus, for the gpu probe -----------------------------------------------------------------------------------

MAX_NODES = 64  # same limit as in the gpu probe


def read_bus(host: Host) -> GpuBus | None:
    """Read the GPUs of the bus from sysfs, for the gpu probe; None without sysfs."""
    names = sysfs.attempt(host.list_dir, DEVICES)
    if names is None:
        return None
    addresses = [name for name in names if sysfs.BUS_ID.fullmatch(name)]
    gpus = tuple(gpu for address in addresses if (gpu := _read_gpu(host, address)) is not None)[:MAX_NODES]
    nodes = sum(sysfs.attempt(host.usable, f"/dev/nvidia{n}") or False for n in range(len(gpus)))
    visible = host.environment().get("NVIDIA_VISIBLE_DEVICES", "").strip()
    return GpuBus(
        gpus=gpus, container=detect_container(host) if gpus else None, nodes=nodes,
        requested=_count_requested(visible), all_requested=visible == "all",
    )  # fmt: skip


def _count_requested(visible: str) -> int | None:
    """Count the GPUs that the variable names by index or UUID. "void" and "none" mean a CDI device list, or no GPU."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not names or names[0] in ("all", "void", "none") or any("MIG" in name or ":" in name for name in names):
        return None
    return len(set(names))


def _read_gpu(host: Host, address: str) -> BusGpu | None:
    folder = f"{DEVICES}/{address}"
    if sysfs.number(host, f"{folder}/vendor") != NVIDIA or (sysfs.number(host, f"{folder}/class") or 0) >> 16 != 0x03:
        return None
    driver = sysfs.target_name(host, f"{folder}/driver")
    if is_passed_through(driver) or sysfs.target_name(host, f"{folder}/physfn") is not None:
        return None
    match = re.search(r"^Device Minor:\s*(\d{1,3})\s*$", sysfs.text(host, f"{PROC}/{address}/information") or "", re.M)
    minor = int(match[1]) if match else None
    there = None if minor is None else host.exists(f"/dev/nvidia{minor}")
    usable = bool(sysfs.attempt(host.usable, f"/dev/nvidia{minor}")) if there else None
    return BusGpu(bus_id=address, driver=driver, minor=minor, node_exists=there, node_usable=usable)


# Configuration space --------------------------------------------------------------------------------------------------

CONFIG_BYTES = 4096

_EXTENDED_START = 0x100
_MAX_EXTENDED = (CONFIG_BYTES - _EXTENDED_START) // 8  # maximum length of a valid chain; an invalid one may loop
_ACS, _ACS_CONTROL = 0x000D, 6
_REDIRECT = 1 << 2 | 1 << 3 | 1 << 5  # requests, completions, egress control: Linux drivers/pci/p2pdma.c


def parse_config(config: bytes) -> dict[str, Any]:
    """Parse facts of `PciDevice` from the readable part of the space; None means unknown."""
    if len(config) >= 64 and not config[:64].strip(b"\xff"):
        return {"lost": True}
    extended = dict(_walk_extended(config))
    readable = len(config) > _EXTENDED_START + 4
    # A port without the capability cannot redirect traffic: the value is off, not unknown.
    acs: bool | None = False if readable else None
    if _ACS in extended:
        control = _unpack("<H", config, extended[_ACS] + _ACS_CONTROL)
        acs = None if control is None else bool(control & _REDIRECT)
    return {"acs_redirects": acs}


def _walk_extended(config: bytes) -> Iterator[tuple[int, int]]:
    offset = _EXTENDED_START
    for _ in range(_MAX_EXTENDED):
        header = _unpack("<I", config, offset)
        if not header or header == 0xFFFFFFFF:
            return
        yield header & 0xFFFF, offset
        offset = header >> 20 & ~3
        if offset < _EXTENDED_START:
            return


def _unpack(form: str, config: bytes, offset: int) -> int | None:
    return int(struct.unpack_from(form, config, offset)[0]) if offset + struct.calcsize(form) <= len(config) else None

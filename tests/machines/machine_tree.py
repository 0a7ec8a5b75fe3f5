"""The parts of /sys, /proc and /dev that the probes read, of a machine that is described in a few lines."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from dicthost import Content, tree_of

GT = {1: "2.5 GT/s PCIe", 2: "5.0 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}
NVIDIA, MELLANOX, AMAZON, INTEL, BROADCOM = 0x10DE, 0x15B3, 0x1D0F, 0x8086, 0x1000


@dataclass(kw_only=True)
class Dev:
    """A PCI function with what is below it."""

    bus_id: str
    class_code: int
    vendor: int
    device: int
    generation: int | None = 5
    width: int | None = 16
    width_now: int | None = None  # where it differs from what device and slot can do
    driver: str | None = None
    acs: bool | None = None  # bridges: source validation
    config: bool = True  # extended configuration space is readable
    physfn: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    below: tuple[Dev, ...] = ()
    rdma: Rdma | None = None
    netdev: Netdev | None = None


@dataclass(kw_only=True)
class Rdma:
    """An RDMA device with one port."""

    name: str
    link_layer: str = "InfiniBand"
    rate: str = "400 Gb/sec (4X NDR)"
    state: str = "4: ACTIVE"
    physical: str = "5: LinkUp"
    hca_type: str | None = "MT4129"
    board: str | None = "MT_0000000838"
    firmware: str = "28.39.3560"
    guid: str = "a088:c203:00aa:0000"
    gids: tuple[tuple[str, str, str], ...] = ()  # gid, type, netdev
    counters: Mapping[str, int] = field(default_factory=lambda: {**IB_COUNTERS})
    hw_counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Netdev:
    """A network interface; `bus` hangs it below a PCI function."""

    name: str
    index: int
    mtu: int = 1500
    speed: int | None = None  # Mb/s
    mac: str = "02:00:00:00:00:01"
    kind: str | None = None  # macvlan, veth, bridge, ...
    link: int | None = None  # index of the lower device
    master: int | None = None
    addresses: tuple[str, ...] = ()
    up: bool = True
    type: int = 1  # ARPHRD_ETHER; 32 InfiniBand, 772 loopback


IB_COUNTERS = {
    "symbol_error": 0, "link_error_recovery": 0, "link_downed": 0, "port_rcv_errors": 0, "port_xmit_discards": 0,
    "local_link_integrity_errors": 0, "excessive_buffer_overrun_errors": 0, "port_xmit_wait": 0,
    "port_rcv_data": 81234567, "port_xmit_data": 81239871,
}  # fmt: skip
ROCE_HW_COUNTERS = {
    "out_of_sequence": 0, "packet_seq_err": 0, "local_ack_timeout_err": 0, "rnr_nak_retry_err": 0,
    "np_cnp_sent": 0, "rp_cnp_handled": 0, "rx_icrc_encapsulated": 0, "roce_slow_restart": 0,
}  # fmt: skip


class Tree:
    """Files and links of a machine, which grow as parts of sysfs.yaml are added."""

    def __init__(self) -> None:
        self.files: dict[str, Content] = {}
        self.links: dict[str, str] = {}
        self.paths: dict[str, str] = {}  # bus id -> /sys/devices/...
        self.uverbs = 0
        self.add("root")

    def add(self, part: str, **words: object) -> None:
        """A part of sysfs.yaml."""
        files, links = tree_of(part, **words)
        self.links |= links
        for path, content in files.items():
            self.write(path, content)

    def write(self, path: str, content: Content) -> None:
        """A file; text gets the newline that sysfs ends a value with."""
        self.files[path] = f"{content}\n" if isinstance(content, str) and not content.endswith("\n") else content

    def pci(self, root: str, numa: int, *devices: Dev) -> None:
        """A host bridge ("pci0000:17") and everything below it."""
        for device in devices:
            self._device(f"/sys/devices/{root}", numa, device)

    def _device(self, parent: str, numa: int, device: Dev) -> None:
        path = f"{parent}/{device.bus_id}"
        self.paths[device.bus_id] = path
        self.add("function", path=path, numa=numa, it=device)
        if device.generation is not None and device.width is not None:
            width = device.width_now or device.width
            self.add("slot", path=path, speed=GT[device.generation], width=width, it=device)
        for name, content in device.files.items():
            self.write(f"{path}/{name}", content)
        self.write(f"{path}/config", config_space(device))
        if device.driver:
            self.add("driver", path=path, it=device)
        if device.rdma:
            self._rdma(f"{path}/infiniband/{device.rdma.name}", path, device.rdma)
        if device.netdev:
            self.netdev(device.netdev, path)
        for child in device.below:
            self._device(path, numa, child)
        if device.physfn:
            self.links[f"{path}/physfn"] = self.paths[device.physfn]

    def _rdma(self, path: str, parent: str, rdma: Rdma) -> None:
        port = f"{path}/ports/1"
        self.add("adapter", path=path, parent=parent, number=self.uverbs, it=rdma)
        self.uverbs += 1
        if rdma.hca_type is not None:
            self.add("adapter type", path=path, it=rdma)
        gids = rdma.gids or ((f"fe80:0000:0000:0000:{rdma.guid}", "IB/RoCE v1", ""),)
        for index, (gid, kind, netdev) in enumerate(gids):
            self.add("gid", port=port, index=index, gid=gid, kind=kind)
            if netdev:
                self.write(f"{port}/gid_attrs/ndevs/{index}", netdev)
        self.write(f"{port}/gids/{len(gids)}", "0000:0000:0000:0000:0000:0000:0000:0000")
        for folder, counters in (("counters", rdma.counters), ("hw_counters", rdma.hw_counters)):
            for name, count in counters.items():
                self.write(f"{port}/{folder}/{name}", str(count))

    def netdev(self, net: Netdev, parent: str | None = None) -> None:
        """An interface in /sys/class/net, below its PCI function or virtual."""
        path = f"{parent}/net/{net.name}" if parent else f"/sys/devices/virtual/net/{net.name}"
        speed = net.speed if net.speed and net.up else -1
        self.add("interface", path=path, state="up" if net.up else "down", flags=0x1002 + net.up,
                 lower=net.link or net.index, speed=speed, it=net)  # fmt: skip
        if parent:
            self.links[f"{path}/device"] = parent


def config_space(device: Dev) -> bytes:
    """Configuration space with the capabilities the pci probe looks at; 64 bytes where a user may not read more."""
    space = bytearray(4096 if device.config else 64)
    struct.pack_into("<HH", space, 0, device.vendor, device.device)
    struct.pack_into("<H", space, 6, 0x10)
    space[0x34] = 0x40
    if not device.config:
        return bytes(space)
    space[0x40] = 0x10  # PCI Express capability, the last of its list
    struct.pack_into("<H", space, 0x48, 0x0010)  # relaxed ordering on, for lspci
    if device.acs is not None:
        struct.pack_into("<I", space, 0x100, 0x000D | 1 << 16)
        struct.pack_into("<H", space, 0x106, 0x1D if device.acs else 0)
    elif device.class_code >> 16 == 3:
        struct.pack_into("<I", space, 0x100, 0x0015 | 1 << 16)  # resizable BAR: one, 64 GiB of 64 GiB
        struct.pack_into("<II", space, 0x104, 1 << (16 + 4), 1 << 5 | 16 << 8)
    return bytes(space)


def port(bus_id: str, *below: Dev, acs: bool = False, generation: int = 5, width: int = 16, vendor: int = INTEL) -> Dev:
    """A bridge: a root port, or a port of a switch."""
    return Dev(
        bus_id=bus_id, class_code=0x060400, vendor=vendor, device=0x352A if vendor == INTEL else 0xC030,
        generation=generation, width=width, driver="pcieport", acs=acs, below=below,
    )  # fmt: skip


def switch(bus: int, *below: Dev, domain: int = 0, generation: int = 5, acs: bool = False) -> Dev:
    """A root port at BUS:01.0, a switch behind it, and one downstream port per device."""
    prefix = f"{domain:04x}:"
    downs = [
        port(f"{prefix}{bus + 2:02x}:{slot:02x}.0", device, acs=acs, generation=generation, vendor=BROADCOM)
        for slot, device in enumerate(below)
    ]
    upstream = port(f"{prefix}{bus + 1:02x}:00.0", *downs, acs=acs, generation=generation, vendor=BROADCOM)
    return port(f"{prefix}{bus:02x}:01.0", upstream, acs=acs, generation=generation)

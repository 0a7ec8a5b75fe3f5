"""Reads links, addresses and routes from rtnetlink, and their missing attributes from /sys/class/net; determines the
role of each interface in a training pod.

It also reads two files: the Multus annotation of the pod, mounted as a downward API volume (a fieldRef environment
variable is set before the networks are attached, so only a volume is reliable), and the switch port at the other end of
a link, as received by systemd-networkd over LLDP.

Specification: rtnetlink(7); Linux Documentation/ABI/testing/sysfs-class-net; NetworkAttachmentDefinition de facto
standard 1.3 (k8s.v1.cni.cncf.io/network-status); IEEE 802.1AB-2016 clause 8 (TLVs: type in 7 bits, length in 9);
systemd src/network/networkd-lldp-rx.c (/run/systemd/netif/lldp/<ifindex>: per neighbour the frame length, 64 bits
little-endian, and the Ethernet frame).
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from contracts.tables import read_table
from probes.api import UnavailableError
from probes.host import sysfs
from probes.host.protocol import Host, Json
from probes.hostinfo.read import detect_container, is_of_agent
from probes.interfaces.facts import ON_A_WIRE, Interface, InterfacesFacts, choose_for_nccl
from probes.pci.facts import DEVICES
from probes.rdma.facts import find_ipv4
from probes.rdma.read import read_gids

NAMES = read_table(__file__, "names.toml")
NET = "/sys/class/net"
MAX_LINKS = 4096
IFF_UP, IFF_RUNNING = 0x1, 0x40
POD_KINDS = {"veth", "netkit", "ipvlan", "macvlan"}

_DOCKER = re.compile(r"docker\d*$|docker_gwbridge$|br-[0-9a-f]{12}$|virbr\d|podman\d|lxcbr\d|lxdbr\d|cni-podman")
_MULTUS_DEFAULT_NAME = re.compile(r"net\d+$")  # Multus' default interface names: net1, net2, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One network that is attached to the pod."""

    network: str
    interface: str
    default: bool = False
    mtu_bytes: int | None = None
    bus_id: str | None = None
    rdma_device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStatus:
    """The network-status annotation, and the file that contains it."""

    source: str
    by_interface: dict[str, Entry] = field(default_factory=dict)
    error: str | None = None


def read(host: Host) -> InterfacesFacts:
    """Read all interfaces with their roles. Raises OSError if netlink is refused; NCCL and gloo then fail too."""
    try:
        links = host.netlink("links")
    except FileNotFoundError:  # a recording made before this query existed
        links = ()
    if not links:
        raise UnavailableError("rtnetlink lists no interface")
    names: dict[Any, str] = {
        link.get("index"): str(link.get("IFLA_IFNAME") or f"index{link.get('index')}") for link in links
    }
    addresses = _read_addresses(host)
    default = _read_proc_route(host)
    if default not in names.values():  # no default route, or /proc of another namespace
        default = _find_default_route(host, names)
    status = read_network_status(host)
    entries = status.by_interface if status else {}
    rdma = _map_rdma(host)
    facts = {names[link.get("index")]: _read_interface(host, link, names, addresses) for link in links[:MAX_LINKS]}
    cards = {index: name for index, name in names.items() if name in facts and facts[name].bus_id}
    wired = read_neighbours(host, cards)
    in_pod = status is not None or detect_container(host) == "kubernetes"
    # In a namespace without card and default route (`docker network create --internal`) the first veth counts.
    inner = [each for each in facts.values() if each.kind in POD_KINDS and each.parent_elsewhere and each.addresses]
    first = inner[0].name if inner and not cards else None
    finished = []
    for interface in facts.values():
        entry = entries.get(interface.name)
        finished.append(
            replace(
                interface,
                role=find_role(interface, entry, default=default or first, in_pod=in_pod),
                multus_network=entry.network if entry else None,
                multus_mtu_bytes=entry.mtu_bytes if entry else None,
                rdma_device=(entry.rdma_device if entry else None) or _find_rdma_device(interface, facts, rdma),
                neighbour=wired.get(interface.name),
            )
        )
    return InterfacesFacts(
        interfaces=tuple(finished),
        default_route=default,
        nccl_choice=choose_for_nccl(finished),
        socket_ifname=host.environment().get("NCCL_SOCKET_IFNAME") or None,
        gloo_ifname=host.environment().get("GLOO_SOCKET_IFNAME") or None,
        networks_missing={
            name: entry.network
            for name, entry in entries.items()
            if name not in facts and not entry.default and not _is_for_userspace(host, entry)
        },
        of_agent=is_of_agent(host),
        network_status_source=status.source if status else None,
        network_status_error=status.error if status else None,
    )


def find_role(interface: Interface, entry: Entry | None, *, default: str | None, in_pod: bool) -> str:
    """Return "loopback", "pod-default", "secondary", "host", "docker", "bridge" or "virtual"."""
    if interface.name == "lo":
        return "loopback"
    if entry is not None:
        return "pod-default" if entry.default else "secondary"
    if _DOCKER.match(interface.name):
        return "docker"
    if interface.kind in ("bridge", "openvswitch"):
        return "bridge"
    # In the host's own namespace, the default route uses a card or a bond; a veth leads out of a container.
    if interface.name == default and interface.kind in POD_KINDS:
        return "pod-default"
    in_container = in_pod or interface.parent_elsewhere
    if in_container and (_MULTUS_DEFAULT_NAME.match(interface.name) or interface.kind in ("macvlan", "ipvlan")):
        return "secondary"
    if in_pod and interface.is_vf and interface.name != default:
        return "secondary"
    if in_pod and interface.name == "eth0" and interface.kind in POD_KINDS:
        return "pod-default"
    if interface.bus_id or interface.driver or interface.kind in ON_A_WIRE:
        return "host"
    return "virtual" if interface.kind else "unknown"


def _is_for_userspace(host: Host, entry: Entry) -> bool:
    """Whether the network is a PCI function with a VFIO driver, which has no network interface by design."""
    driver = sysfs.target_name(host, f"{DEVICES}/{entry.bus_id}/driver") if entry.bus_id else None
    return "vfio" in (driver or "")


# One link ------------------------------------------------------------------------------------------------------


def _read_interface(
    host: Host, link: dict[str, Json], names: dict[Any, str], addresses: dict[Any, tuple[str, ...]]
) -> Interface:
    """Combine a netlink message and sysfs. A parent in another namespace has no index in this one."""
    name, mtu, flags = names[link.get("index")], link.get("IFLA_MTU"), link.get("flags")
    info = link.get("IFLA_LINKINFO")
    kind, data = (info.get("IFLA_INFO_KIND"), info.get("IFLA_INFO_DATA")) if isinstance(info, dict) else (None, None)
    lower = link.get("IFLA_LINK")
    if lower is None and isinstance(data, dict):
        lower = data.get("IFLA_VXLAN_LINK")
    foreign = link.get("IFLA_LINK_NETNSID") is not None
    # IFLA_LINK of a veth is its peer, not a lower device.
    parent = names.get(lower) if kind not in ("veth", "netkit") and not foreign else None
    flags = flags if isinstance(flags, int) else None
    folder = f"{NET}/{name}"
    readable = sysfs.NAME.fullmatch(name) is not None
    bus_id = sysfs.bus_id(host, f"{folder}/device") if readable else None
    node = sysfs.number(host, f"{DEVICES}/{bus_id}/numa_node") if bus_id else None
    speed = (
        sysfs.number(host, f"{folder}/speed") if readable and kind not in NAMES["speedless"] and name != "lo" else None
    )
    return Interface(
        name=name,
        role="unknown",
        kind=kind,
        up=bool(flags & IFF_UP) if flags is not None else None,
        running=_read_running(host, folder, flags, readable),
        addresses=addresses.get(link.get("index"), ()),
        mtu_bytes=mtu if isinstance(mtu, int) else None,
        speed_bytes_per_second=speed * 1e6 / 8 if speed is not None and 0 < speed < 1 << 31 else None,
        driver=sysfs.target_name(host, f"{folder}/device/driver") if readable else None,
        parent=parent if parent != name else None,
        parent_elsewhere=foreign,
        master=names.get(link.get("IFLA_MASTER")),
        bus_id=bus_id,
        numa_node=node if node is not None and node >= 0 else None,
        is_vf=host.exists(f"{folder}/device/physfn") if bus_id else None,
    )


def _read_running(host: Host, folder: str, flags: int | None, readable: bool) -> bool | None:
    """Return IFF_RUNNING as computed by netlink. sysfs has no such flag, but operstate is equivalent."""
    if flags is None:
        return None
    if flags & IFF_RUNNING:
        return True
    state = sysfs.text(host, f"{folder}/operstate") if readable else None
    return state in ("up", "unknown") and bool(flags & IFF_UP) if state else False


# Addresses and routes ------------------------------------------------------------------------------------------


def _read_addresses(host: Host) -> dict[Any, tuple[str, ...]]:
    by_index: dict[Any, list[str]] = {}
    for entry in host.netlink("addresses"):
        # On point-to-point links IFA_ADDRESS is the peer's address, IFA_LOCAL the own one; IPv6 only has IFA_ADDRESS.
        address = entry.get("IFA_LOCAL") or entry.get("IFA_ADDRESS")
        if address:
            by_index.setdefault(entry.get("index"), []).append(f"{address}/{entry.get('prefixlen')}")
    return {index: tuple(list_) for index, list_ in by_index.items()}


def _find_default_route(host: Host, names: dict[Any, str]) -> str | None:
    """Return the interface of the default route in the main table with the lowest metric, IPv4 before IPv6."""
    candidates = []
    for entry in host.netlink("routes"):
        main = entry.get("RTA_TABLE", entry.get("table")) == 254  # RT_TABLE_MAIN
        unicast = entry.get("type", 1) == 1
        if main and unicast and not entry.get("dst_len") and not entry.get("RTA_DST"):
            metric, index = entry.get("RTA_PRIORITY") or 0, entry.get("RTA_OIF")
            if index is None and isinstance(hops := entry.get("RTA_MULTIPATH"), list) and hops:
                index = hops[0].get("oif") if isinstance(hops[0], dict) else None
            if index in names and isinstance(metric, int):
                candidates.append((entry.get("family") != socket.AF_INET, metric, names[index]))
    return min(candidates)[2] if candidates else None


def _read_proc_route(host: Host) -> str | None:
    """Parse /proc/net/route (main table): Iface Destination Gateway Flags RefCnt Use Metric Mask, in hexadecimal.

    This takes a tenth of the time of a netlink dump, which would be part of every scan.
    """
    candidates = []
    for line in (sysfs.text(host, "/proc/net/route") or "").splitlines()[1:]:
        columns = line.split()
        if len(columns) >= 8 and columns[1] == "00000000" and columns[7] == "00000000" and columns[6].isdigit():
            candidates.append((int(columns[6]), columns[0]))
    return min(candidates)[1] if candidates else None


# RDMA ----------------------------------------------------------------------------------------------------------


def _map_rdma(host: Host) -> dict[str, str]:
    """Map netdev names, PCI addresses and IPv4 addresses to RDMA devices.

    A pod with a macvlan on an RDMA port does not see the port's netdev. However, the port's GID table contains the
    address of the macvlan, and the pod has that address.
    """
    devices: dict[str, str] = {}
    for device in sysfs.names(host, "/sys/class/infiniband"):
        folder = f"/sys/class/infiniband/{device}"
        address = sysfs.bus_id(host, f"{folder}/device")
        parent = sysfs.text(host, f"{folder}/parent")
        netdevs = sysfs.names(host, f"{folder}/device/net")
        for key in (*netdevs, *([parent] if parent else []), *([address] if address else [])):
            devices.setdefault(key, device)
        for port in sysfs.names(host, f"{folder}/ports"):
            for gid in read_gids(host, f"{folder}/ports/{port}")[0]:
                if ipv4 := find_ipv4(gid):
                    devices.setdefault(ipv4, device)
    return devices


def _find_rdma_device(interface: Interface, all_: dict[str, Interface], rdma: dict[str, str]) -> str | None:
    """Find the RDMA device by the interface's address, name or PCI function, else by its lower device or bond ports."""
    for address in interface.addresses:
        if device := rdma.get(address.partition("/")[0]):
            return device
    visited: set[str] = set()
    current: Interface | None = interface
    while current is not None and current.name not in visited:
        visited.add(current.name)
        if device := rdma.get(current.name) or rdma.get(current.bus_id or ""):
            return device
        if current.kind == "bond":
            members = [rdma.get(i.name) or rdma.get(i.bus_id or "") for i in all_.values() if i.master == current.name]
            return next((device for device in members if device), None)
        current = all_.get(current.parent or "") if current.kind in ("macvlan", "ipvlan", "vlan", "macvtap") else None
    return None


MAX_ENTRIES = 256


def read_network_status(host: Host) -> NetworkStatus | None:
    """Return the first file that contains the annotation; None if there is none."""
    configured = host.environment().get("TOPOFLIGHT_NETWORK_STATUS", "")
    first = [configured] if configured.startswith("/") and "\0" not in configured else []
    for path in (*first, *NAMES["status_files"]):
        content = sysfs.text(host, path)
        if content is None:
            continue
        if path.endswith("annotations"):
            content = find_annotation(content)
            if content is None:
                continue
        try:
            return NetworkStatus(source=path, by_interface=parse_network_status(content))
        except ValueError as error:
            return NetworkStatus(source=path, error=str(error))
    return None


def find_annotation(content: str) -> str | None:
    """Return the annotation's value in a downward API file of all annotations: one key="Go-quoted string" per line."""
    for line in content.splitlines():
        key, _, value = line.partition("=")
        if key in NAMES["status_keys"]:
            try:
                annotation = json.loads(value)  # JSON text quoted with Go's %q is a valid JSON string
            except (ValueError, RecursionError):
                return None
            return annotation if isinstance(annotation, str) else None
    return None


def parse_network_status(content: str) -> dict[str, Entry]:
    """Parse the entries by interface. Raises ValueError, which names the error."""
    try:
        listed = json.loads(content)
    except RecursionError as error:
        raise ValueError("network-status is nested too deeply") from error
    if not isinstance(listed, list):
        raise ValueError(f"network-status is a list of networks, not {type(listed).__name__}")
    entries = [_parse_entry(item) for item in listed[:MAX_ENTRIES] if isinstance(item, dict)]
    return {entry.interface: entry for entry in entries if entry.interface}


def _parse_entry(item: dict[str, Json]) -> Entry:
    info = item.get("device-info")
    pci = info.get("pci") if isinstance(info, dict) else None
    pci = pci if isinstance(pci, dict) else {}
    mtu = item.get("mtu")
    default = item.get("default") is True
    return Entry(
        network=str(item.get("name") or ""),
        interface=str(item.get("interface") or ("eth0" if default else "")),  # may be missing for the default network
        default=default,
        mtu_bytes=mtu if isinstance(mtu, int) and not isinstance(mtu, bool) else None,
        bus_id=_to_text(pci.get("pci-address")),
        rdma_device=_to_text(pci.get("rdma-device")),
    )


def _to_text(value: Json) -> str | None:
    return value if isinstance(value, str) and value else None


LLDP_FOLDER = "/run/systemd/netif/lldp"
_MAX_BYTES = 1 << 14
_FRAME_HEADER, _ETHERTYPE = 14, b"\x88\xcc"
_CHASSIS, _PORT, _SYSTEM_NAME = 1, 2, 5
_TEXT = {_CHASSIS: (6, 7), _PORT: (1, 5, 7)}  # subtypes with text: interface name or alias, or locally assigned
_MAX_NAME = 64


def read_neighbours(host: Host, indices: dict[int, str]) -> dict[str, str]:
    """Return the neighbour of each interface: "leaf1 Ethernet1/5". An interface without LLDP is left out."""
    there = set(sysfs.names(host, LLDP_FOLDER))
    neighbours = {}
    for index, name in indices.items():
        if str(index) in there:
            content = sysfs.attempt(host.read_bytes, f"{LLDP_FOLDER}/{index}", _MAX_BYTES) or b""
            names = list(dict.fromkeys(filter(None, map(parse_neighbour, split_frames(content)))))
            if len(names) == 1:  # several names: a hub or bridge is in between, so the neighbour is unknown
                neighbours[name] = names[0]
    return neighbours


def split_frames(content: bytes) -> Iterator[bytes]:
    """Yield the frames in one file; a truncated last frame is left out."""
    offset = 0
    while offset + 8 <= len(content):
        size = int.from_bytes(content[offset : offset + 8], "little")
        offset += 8 + size
        if not size or offset > len(content):
            return
        yield content[offset - size : offset]


def parse_neighbour(frame: bytes) -> str | None:
    """Return the system name and port, if they are text; None if the frame has no system name."""
    if frame[12:_FRAME_HEADER] != _ETHERTYPE:
        return None
    fields: dict[int, str] = {}
    for kind, value in _split_tlvs(frame[_FRAME_HEADER:]):
        if kind == _SYSTEM_NAME:
            fields.setdefault(kind, _decode_text(value))
        elif kind in _TEXT and value and value[0] in _TEXT[kind]:
            fields.setdefault(kind, _decode_text(value[1:]))
    system = fields.get(_SYSTEM_NAME) or fields.get(_CHASSIS)
    return " ".join(filter(None, (system, fields.get(_PORT)))) if system else None


def _split_tlvs(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 2 <= len(data):
        head = int.from_bytes(data[offset : offset + 2], "big")
        kind, size = head >> 9, head & 0x1FF
        if not kind or offset + 2 + size > len(data):
            return
        yield kind, data[offset + 2 : offset + 2 + size]
        offset += 2 + size


def _decode_text(value: bytes) -> str:
    return "".join(c for c in value.decode("ascii", "replace") if " " < c <= "~")[:_MAX_NAME]

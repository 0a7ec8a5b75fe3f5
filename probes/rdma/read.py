"""Reads RDMA devices from /sys/class/infiniband.

The memlock limit is tested by registering increasingly large memory regions: the kernel refuses pages beyond
RLIMIT_MEMLOCK with ENOMEM, unless the process has CAP_IPC_LOCK.

Specification: Linux Documentation/ABI/stable/sysfs-class-infiniband; include/rdma/ib_addr.h (iboe_get_mtu);
ibv_reg_mr(3); drivers/infiniband/core/umem.c.
"""

from __future__ import annotations

import re

from hardware.nics import models
from probes.api import UnavailableError
from probes.host import sysfs
from probes.host.protocol import Host, Json
from probes.hostinfo.read import detect_container, is_of_agent
from probes.rdma.facts import Gid, MemlockProof, RdmaDevice, RdmaFacts, RdmaPort

DEVICES = "/sys/class/infiniband"
VERBS = "/sys/class/infiniband_verbs"
NODES = "/dev/infiniband"
MAX_DEVICES = 1024
MAX_COUNTERS = 512

# iboe_get_mtu: the largest InfiniBand MTU that fits into the Ethernet MTU without headers (GRH 40, UDP 8, BTH 12, XRC
# 4, atomic 28, ICRC 4 bytes).
ROCE_HEADER_BYTES = 96
IB_MTUS = (4096, 2048, 1024, 512, 256)

MAX_TABLE = 1024  # the largest table that drivers report
MAX_HOLE = 64  # the kernel fills the first free slot, so a long gap is the end of the table


def read(host: Host) -> RdmaFacts:
    """Read every RDMA device that this process can see. Raises UnavailableError if there is none."""
    devices = _read_devices(host)
    if not devices:
        raise UnavailableError(f"no RDMA device in {DEVICES}")
    version, usable = _read_pyverbs(host)
    candidates = [device for device in devices if device.uverbs_usable]
    return RdmaFacts(
        devices=devices,
        pyverbs=version,
        memlock_proof=prove_memlock(host, candidates[0].name) if usable and candidates else None,
        in_container=detect_container(host) is not None and not is_of_agent(host),
    )


def _read_devices(host: Host) -> tuple[RdmaDevice, ...]:
    listed = ((sysfs.text(host, f"{VERBS}/{node}/ibdev"), node) for node in sysfs.names(host, VERBS))
    nodes = {device: node for device, node in listed if device}  # RDMA device -> name of its device node
    names = sorted(sysfs.names(host, DEVICES), key=make_sort_key)[:MAX_DEVICES]
    return tuple(_read_device(host, name, nodes) for name in names)


def _read_device(host: Host, name: str, nodes: dict[str, str]) -> RdmaDevice:
    folder = f"{DEVICES}/{name}"
    ports = tuple(
        read_port(host, folder, number)
        for number in sorted(int(p) for p in sysfs.names(host, f"{folder}/ports") if re.fullmatch(r"\d{1,3}", p))
    )
    address = sysfs.bus_id(host, f"{folder}/device")
    node = sysfs.number(host, f"{folder}/device/numa_node")
    driver = sysfs.target_name(host, f"{folder}/device/driver")
    hca_type = sysfs.text(host, f"{folder}/hca_type")
    bond = _find_bond(host, name, ports)
    uverbs = f"{NODES}/{nodes[name]}" if name in nodes and host.exists(f"{NODES}/{nodes[name]}") else None
    return RdmaDevice(
        name=name,
        kind=_classify(
            name, driver, sysfs.text(host, f"{folder}/node_desc"), physical=address is not None or hca_type in models()
        ),
        bus_id=address,
        numa_node=node if node is not None and node >= 0 else None,
        board=sysfs.text(host, f"{folder}/board_id"),
        model=models().get(hca_type or "", hca_type),
        firmware=sysfs.text(host, f"{folder}/fw_ver"),
        is_vf=host.exists(f"{folder}/device/physfn") if address else None,
        bond=bond,
        bond_members=_read_members(host, bond),
        uverbs=uverbs,
        uverbs_usable=sysfs.attempt(host.usable, uverbs) if uverbs else None,
        driver=driver,
        ports=ports,
    )


def _classify(name: str, driver: str | None, description: str | None, *, physical: bool) -> str:
    if driver == "efa" or re.match(r"efa_\d", name):
        return "efa"
    if not physical:
        for kind in ("rxe", "siw"):
            if name.startswith(kind) or description == kind:
                return kind
        return "other"
    return "hca"


def _find_bond(host: Host, name: str, ports: tuple[RdmaPort, ...]) -> str | None:
    """Return the bond that the device carries: RoCE LAG replaces the devices of two ports by one (mlx5_bond_0)."""
    for netdev in {p.netdev for p in ports if p.netdev} | {g.netdev for p in ports for g in p.gids if g.netdev}:
        if not sysfs.NAME.fullmatch(netdev):
            continue
        if host.exists(f"/sys/class/net/{netdev}/bonding"):
            return netdev
        master = sysfs.target_name(host, f"/sys/class/net/{netdev}/master")
        if "bond" in name and master:
            return master
    return None


def _read_members(host: Host, bond: str | None) -> tuple[tuple[str, str | None], ...]:
    """Return the members of a bond with their operstate; none in the mode in which all but one member wait."""
    folder = f"/sys/class/net/{bond}/bonding"
    if bond is None or (sysfs.text(host, f"{folder}/mode") or "").startswith("active-backup"):
        return ()
    names = filter(sysfs.NAME.fullmatch, (sysfs.text(host, f"{folder}/slaves") or "").split())
    return tuple((name, sysfs.text(host, f"/sys/class/net/{name}/operstate")) for name in names)


def read_port(host: Host, device_folder: str, number: int) -> RdmaPort:
    """Read one port; every attribute is optional."""
    folder = f"{device_folder}/ports/{number}"
    gids, all_read = read_gids(host, folder)
    netdev = _find_netdev(host, device_folder, number) or next((g.netdev for g in gids if g.netdev), None)
    mtu = sysfs.number(host, f"/sys/class/net/{netdev}/mtu") if netdev and sysfs.NAME.fullmatch(netdev) else None
    link_layer = sysfs.text(host, f"{folder}/link_layer")
    rate_text = sysfs.text(host, f"{folder}/rate")
    counters = _read_counters(host, folder)
    link_settings = (sysfs.attempt(host.port_link, netdev) if netdev and link_layer == "Ethernet" else None) or {}
    fastest, pfc = link_settings.get("speed_max_megabits"), link_settings.get("pfc_mask")
    return RdmaPort(
        port=number,
        state=_strip_code(sysfs.text(host, f"{folder}/state")),
        physical_state=_strip_code(sysfs.text(host, f"{folder}/phys_state")),
        link_layer=link_layer,
        rate_bytes_per_second=parse_rate(rate_text),
        rate_text=rate_text,
        netdev=netdev,
        active_mtu_bytes=compute_roce_mtu(mtu) if link_layer == "Ethernet" else None,
        netdev_mtu_bytes=mtu,
        gids=gids,
        gids_known=all_read,
        counters=counters,
        pfc_priorities=tuple(n for n in range(8) if pfc >> n & 1) if isinstance(pfc, int) else None,
        trust=_read_trust(host, device_folder, netdev, link_settings),
        dscp_priorities=_split_dscp(link_settings),
        rate_max_bytes_per_second=fastest * 1e6 / 8 if isinstance(fastest, int) and fastest > 0 else None,
        ecn=_read_ecn(host, netdev, counters),
        traffic_class=_read_traffic_class(host, device_folder, number),
    )


def _read_trust(host: Host, device_folder: str, netdev: str | None, link_settings: dict[str, Json]) -> str | None:
    """Read MLNX_OFED's file if it exists; else use DCB's app table, whose DSCP entries switch mlx5 to DSCP trust.

    Linux drivers/net/ethernet/mellanox/mlx5/core/en_dcbnl.c, mlx5e_dcbnl_ieee_setapp: the first DSCP entry sets the
    trust state to DSCP, and deleting the last one sets it back to PCP.
    """
    if netdev is None or not sysfs.NAME.fullmatch(netdev):
        return None
    written = sysfs.text(host, f"/sys/class/net/{netdev}/qos/trust")
    if written in ("dscp", "pcp"):
        return written
    if "app_dscp" not in link_settings:
        return None
    mellanox = sysfs.target_name(host, f"{device_folder}/device/driver") == "mlx5_core"
    return "dscp" if link_settings["app_dscp"] else "pcp" if mellanox else None


def _split_dscp(link_settings: dict[str, Json]) -> tuple[tuple[int, int], ...] | None:
    listed = link_settings.get("app_dscp")
    if not isinstance(listed, list | tuple):
        return None
    pairs = (divmod(entry, 8) for entry in listed if type(entry) is int and 0 <= entry < 512)
    return tuple(sorted(pairs))


def parse_rate(value: str | None) -> float | None:
    """Parse "400 Gb/sec (4X NDR)" into bytes per second."""
    match = re.match(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec", value or "", re.ASCII)
    return float(match[1]) * 1e9 / 8 if match else None


def compute_roce_mtu(netdev_mtu_bytes: int | None) -> int | None:
    """Return the MTU of a RoCE port for the MTU of its netdev: 1500 gives 1024, 4200 and more give 4096."""
    if netdev_mtu_bytes is None:
        return None
    return next((mtu for mtu in IB_MTUS if mtu <= netdev_mtu_bytes - ROCE_HEADER_BYTES), None)


def _strip_code(value: str | None) -> str | None:
    """Return the text after a colon: "4: ACTIVE" becomes "ACTIVE"."""
    return value.partition(":")[2].strip() or value if value else None


def _find_netdev(host: Host, device_folder: str, number: int) -> str | None:
    """Return the port's netdev: by dev_port below the PCI function, or the parent of a software device."""
    candidates = sysfs.names(host, f"{device_folder}/device/net")
    by_port = {sysfs.number(host, f"{device_folder}/device/net/{name}/dev_port"): name for name in candidates}
    if len(candidates) == 1:
        return candidates[0]
    return by_port.get(number - 1) or sysfs.text(host, f"{device_folder}/parent")


def _read_counters(host: Host, folder: str) -> dict[str, int] | None:
    counters: dict[str, int] = {}
    for group in ("counters", "hw_counters"):
        for name in sysfs.names(host, f"{folder}/{group}")[:MAX_COUNTERS]:
            value = sysfs.number(host, f"{folder}/{group}/{name}")
            if value is not None and name != "lifespan":  # refresh period of the other counters, in milliseconds
                counters[name] = value
    return counters or None


def _read_ecn(host: Host, netdev: str | None, counters: dict[str, int] | None) -> bool | None:
    """Return whether ECN is on: a received marked packet proves it; else from MLNX_OFED's per-priority files."""
    if any((counters or {}).get(name) for name in ("np_ecn_marked_roce_packets", "rp_cnp_handled")):
        return True
    if netdev is None or not sysfs.NAME.fullmatch(netdev):
        return None
    folder = f"/sys/class/net/{netdev}/ecn/roce_np/enable"
    values = [sysfs.number(host, f"{folder}/{priority}") for priority in range(8)]
    answers = [value for value in values if value is not None]
    return any(answers) if answers else None


def _read_traffic_class(host: Host, device_folder: str, number: int) -> int | None:
    """Return MLNX_OFED's "Global tclass=106", else rdma_cm's default for the port."""
    written = sysfs.text(host, f"{device_folder}/tc/{number}/traffic_class") or ""
    if match := re.search(r"tclass=(\d{1,3})\b", written, re.ASCII):
        return int(match[1])
    name = device_folder.rpartition("/")[2]
    return sysfs.number(host, f"/sys/kernel/config/rdma_cm/{name}/ports/{number}/default_roce_tos")


def _read_pyverbs(host: Host) -> tuple[str, bool]:
    """Return the version of pyverbs, or the reason that it cannot be used."""
    try:
        return f"installed, version {host.verbs('version')}", True
    except ImportError as error:
        return f"not installed: {error}", False
    except OSError as error:
        return f"not usable: {error}", False


def make_sort_key(name: str) -> tuple[str | int, ...]:
    """Return a sort key that puts mlx5_2 before mlx5_10."""
    parts = re.split(r"(\d{1,9})", name)
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts))


START_BYTES = 16 << 10  # four pages; a smaller region would only test the page size
LIMIT_BYTES = 64 << 20  # enough to show that the usual limits of 64 KiB and 8 MiB do not apply; released at once


def prove_memlock(host: Host, device: str) -> MemlockProof:
    """Register memory regions that grow by a factor of four up to LIMIT_BYTES, and record where it failed."""
    done, size = 0, START_BYTES
    while size <= LIMIT_BYTES:
        try:
            host.verbs("register", device, size)
        except OSError as error:
            reason = f"errno {error.errno}: {error.strerror or error}"
            return MemlockProof(device=device, registered_bytes=done, failed_bytes=size, error=reason)
        done, size = size, size * 4
    return MemlockProof(device=device, registered_bytes=done)


def read_gids(host: Host, folder: str) -> tuple[tuple[Gid, ...], bool]:
    """Return the valid entries of a port's GID table, and whether the table could be listed.

    Reading the type of an empty entry returns EINVAL, so only types of valid entries are read.
    """
    listed = sysfs.attempt(host.list_dir, f"{folder}/gids")
    if listed is None:
        return (), False
    indices = sorted(int(name) for name in listed if name.isascii() and name.isdigit() and len(name) <= 4)
    gids: list[Gid] = []
    used = -1
    for place, index in enumerate(indices[:MAX_TABLE]):
        value = sysfs.text(host, f"{folder}/gids/{index}")
        if value is not None and value.strip("0:"):
            attributes = {"type": f"gid_attrs/types/{index}", "netdev": f"gid_attrs/ndevs/{index}"}
            members = {name: sysfs.text(host, f"{folder}/{path}") for name, path in attributes.items()}
            gids.append(Gid(index=index, gid=value, **members))
            used = place
        elif place - used >= MAX_HOLE:
            break
    return tuple(gids), True

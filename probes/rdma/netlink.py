"""RDMA devices as NETLINK_RDMA lists them, without privileges and where /sys/class/infiniband is not mounted.

Specification: Linux include/uapi/rdma/rdma_netlink.h, include/rdma/ib_verbs.h (port states).
"""

from __future__ import annotations

import re

from probes.host.protocol import Host, Json
from probes.rdma.probe import RdmaDevice, RdmaPort

STATES = {0: "NOP", 1: "DOWN", 2: "INIT", 3: "ARMED", 4: "ACTIVE", 5: "ACTIVE_DEFER"}
PHYSICAL_STATES = {
    1: "Sleep",
    2: "Polling",
    3: "Disabled",
    4: "PortConfigurationTraining",
    5: "LinkUp",
    6: "LinkErrorRecovery",
    7: "Phy Test",
}


def natural(name: str) -> tuple[str | int, ...]:
    """A key that sorts mlx5_2 before mlx5_10."""
    parts = re.split(r"(\d{1,9})", name)
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts))


def _ask(host: Host, what: str) -> tuple[dict[str, Json], ...]:
    try:
        return host.rdma_netlink(what)
    except OSError:
        return ()


def from_netlink(host: Host) -> tuple[RdmaDevice, ...]:
    """Devices and ports with their states; GIDs, rates and counters are not part of the answer."""
    ports: dict[str, list[RdmaPort]] = {}
    for entry in _ask(host, "ports"):
        netdev = entry.get("netdev")
        number = entry.get("port")
        if isinstance(number, int):
            ports.setdefault(str(entry.get("name")), []).append(
                RdmaPort(
                    port=number,
                    state=STATES.get(entry.get("state", -1)),
                    physical_state=PHYSICAL_STATES.get(entry.get("physical_state", -1)),
                    netdev=str(netdev) if netdev else None,
                    link_layer="Ethernet" if netdev else None,
                )
            )
    found = []
    for entry in _ask(host, "devices"):
        name, guid = str(entry.get("name")), entry.get("node_guid")
        found.append(
            RdmaDevice(
                name=name,
                kind=_netlink_kind(name, entry),
                firmware=str(entry.get("firmware") or "") or None,
                node_guid=_guid(guid) if isinstance(guid, int) else None,
                ports=tuple(ports.get(name, ())),
            )
        )
    return tuple(sorted(found, key=lambda device: natural(device.name)))


def _netlink_kind(name: str, entry: dict[str, Json]) -> str:
    if entry.get("node_type") == 7 or name.startswith("efa_"):  # RDMA_NODE_UNSPECIFIED: EFA's node type
        return "efa"
    software = next((kind for kind in ("rxe", "siw") if name.startswith(kind)), None)
    return software or "other"  # netlink does not say what is below


def _guid(value: int) -> str:
    digits = f"{value & (1 << 64) - 1:016x}"
    return ":".join(digits[start : start + 4] for start in range(0, 16, 4))


def netns_mode(host: Host) -> str | None:
    """ "shared" or "exclusive": whether a network namespace sees every device or only its own."""
    for entry in _ask(host, "system"):
        mode = entry.get("netns_mode")
        if mode is not None:
            return "shared" if mode == 1 else "exclusive"
    return None

"""The Multus annotation of the pod, read from a file that the downward API writes.

Specification: k8s.v1.cni.cncf.io/network-status of the NetworkAttachmentDefinition de facto standard, version 1.3.
A fieldRef environment variable is fixed before the networks are attached, so a volume is the dependable way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from probes.host import sysfs
from probes.host.protocol import Host, Json

# The agent's own manifests mount the annotation at the first place; the others are what people do.
FILES = (
    "/etc/podinfo/network-status",
    "/etc/podnetinfo/network-status",
    "/etc/podnetinfo/annotations",  # what the SR-IOV network resources injector mounts
    "/etc/podinfo/annotations",
)
KEYS = ("k8s.v1.cni.cncf.io/network-status", "k8s.v1.cni.cncf.io/networks-status")  # the second is the old spelling
ENTRIES_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One attached network."""

    network: str
    interface: str
    default: bool = False
    mtu_bytes: int | None = None
    bus_id: str | None = None
    rdma_device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStatus:
    """The annotation, and the file it was found in."""

    source: str
    by_interface: dict[str, Entry] = field(default_factory=dict)
    error: str | None = None


def read_network_status(host: Host) -> NetworkStatus | None:
    """The first file that holds the annotation; None where none does."""
    configured = host.environment().get("TOPOFLIGHT_NETWORK_STATUS", "")
    for path in ((configured,) if configured.startswith("/") and "\0" not in configured else ()) + FILES:
        content = sysfs.text(host, path)
        if content is None:
            continue
        if path.endswith("annotations"):
            content = annotation(content)
            if content is None:
                continue
        try:
            return NetworkStatus(source=path, by_interface=parse_network_status(content))
        except ValueError as error:
            return NetworkStatus(source=path, error=str(error))
    return None


def annotation(content: str) -> str | None:
    """The value in a downward-API file of all annotations: one key="Go-quoted string" a line."""
    for line in content.splitlines():
        key, _, value = line.partition("=")
        if key in KEYS:
            try:
                found = json.loads(value)  # Go's %q of JSON text is a JSON string
            except (ValueError, RecursionError):
                return None
            return found if isinstance(found, str) else None
    return None


def parse_network_status(content: str) -> dict[str, Entry]:
    """Entries by interface; ValueError says what is wrong with the text."""
    try:
        listed = json.loads(content)
    except RecursionError as error:
        raise ValueError("network-status is nested too deeply") from error
    if not isinstance(listed, list):
        raise ValueError(f"network-status is a list of networks, not {type(listed).__name__}")
    entries = [_entry(item) for item in listed[:ENTRIES_MAX] if isinstance(item, dict)]
    return {entry.interface: entry for entry in entries if entry.interface}


def _entry(item: dict[str, Json]) -> Entry:
    info = item.get("device-info")
    pci = info.get("pci") if isinstance(info, dict) else None
    pci = pci if isinstance(pci, dict) else {}
    mtu = item.get("mtu")
    default = item.get("default") is True
    return Entry(
        network=str(item.get("name") or ""),
        interface=str(item.get("interface") or ("eth0" if default else "")),  # the default network may omit it
        default=default,
        mtu_bytes=mtu if isinstance(mtu, int) and not isinstance(mtu, bool) else None,
        bus_id=_text(pci.get("pci-address")),
        rdma_device=_text(pci.get("rdma-device")),
    )


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) and value else None

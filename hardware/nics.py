"""RDMA adapter families: PCI ids, and the rate of each family's fastest card (`nics.toml`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from contracts.tables import read_table
from hardware.units import GIGA

MELLANOX = 0x15B3
AMAZON = 0x1D0F


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One family of RDMA adapters."""

    name: str
    source: str
    vendor: int  # PCI vendor id
    devices: tuple[int, ...] = ()
    virtual: tuple[int, ...] = ()  # PCI device ids of SR-IOV virtual functions
    bytes_per_second: float | None = None  # per port of the fastest card; None: rates are not checked
    kind: str = "hca"


@cache
def nics() -> tuple[Nic, ...]:
    """Return every row."""
    rows = []
    for row in map(dict, read_table(__file__, "nics.toml")["nic"]):
        gbps = row.pop("gbps", None)
        devices, virtual = (tuple(row.pop(name, ())) for name in ("devices", "virtual"))
        rows.append(Nic(bytes_per_second=gbps * GIGA / 8 if gbps else None, devices=devices, virtual=virtual, **row))
    return tuple(rows)


@cache
def models() -> dict[str, str]:
    """Map a Mellanox device's hca_type to its model: "MT4129" is "ConnectX-7", "MT4116" is "ConnectX-4 VF"."""
    mellanox = [nic for nic in nics() if nic.vendor == MELLANOX]
    physical = {f"MT{number}": nic.name for nic in mellanox for number in nic.devices}
    return physical | {f"MT{number}": f"{nic.name} VF" for nic in mellanox for number in nic.virtual}


def fastest(model: str | None) -> float | None:
    """Return bytes/s per port of a family's fastest card, by family name; None if unknown or not checked."""
    return next((nic.bytes_per_second for nic in nics() if nic.name == model), None)


def is_efa(vendor_id: int | None, device_id: int | None) -> bool:
    """Whether a PCI function is an Elastic Fabric Adapter (AWS)."""
    return any(nic.kind == "efa" and nic.vendor == vendor_id and device_id in nic.devices for nic in nics())


def is_virtual(vendor_id: int | None, device_id: int | None) -> bool:
    """Whether the PCI ids are those of an SR-IOV virtual function."""
    return any(nic.vendor == vendor_id and device_id in nic.virtual for nic in nics())

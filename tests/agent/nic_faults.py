"""One real fault of one NIC, put into the facts of a healthy node: what a scan of the faulty node would have read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from probes.api import Ok, Snapshot
from probes.interfaces.facts import InterfacesFacts, nccl_choice
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts, RdmaPort

FAULTS = ("down", "slow", "mtu", "gone")


def with_fault(snapshot: Snapshot, name: str, fault: str) -> Snapshot:
    """The node with this fault of the RDMA device `name`."""
    rdma, links, pci = (snapshot.facts(kind) for kind in (RdmaFacts, InterfacesFacts, PciFacts))
    assert rdma and links and pci
    (device,) = (each for each in rdma.devices if each.name == name)
    netdevs = {port.netdev for port in device.ports}
    changed = {
        "down": {"running": False, "speed_bytes_per_second": None},
        "slow": {},
        "mtu": {"mtu_bytes": 1500},
    }
    if fault == "gone":
        devices = tuple(each for each in rdma.devices if each is not device)
        interfaces = tuple(each for each in links.interfaces if each.name not in netdevs)
        pci = replace(pci, devices=tuple(each for each in pci.devices if each.bus_id != device.bus_id))
    else:
        ports = tuple(_port(port, fault) for port in device.ports)
        devices = tuple(replace(each, ports=ports) if each is device else each for each in rdma.devices)
        interfaces = tuple(
            replace(each, **changed[fault]) if each.name in netdevs else each for each in links.interfaces
        )
    facts: dict[str, Any] = {
        "rdma": replace(rdma, devices=devices),
        "interfaces": replace(links, interfaces=interfaces, nccl_choice=nccl_choice(interfaces)),
        "pci": pci,
    }  # fmt: skip
    return replace(snapshot, outcomes={**snapshot.outcomes, **{name: Ok(facts=each) for name, each in facts.items()}})


def _port(port: RdmaPort, fault: str) -> RdmaPort:
    if fault == "down":
        return replace(port, state="DOWN", physical_state="Polling", rate_text="40 Gb/sec (4X QDR)",
                       rate_bytes_per_second=5e9)  # fmt: skip
    if fault == "slow":
        return replace(port, rate_bytes_per_second=(port.rate_bytes_per_second or 0.0) / 2)
    return replace(port, netdev_mtu_bytes=1500, active_mtu_bytes=1024)

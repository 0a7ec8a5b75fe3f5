"""Which RDMA devices of a node carry the training traffic of its GPUs, and which serve storage or management.

Specification: NCCL src/graph/search.cc, ncclTopoSelectNets: the nets of each GPU are tried by path type, nearest first,
so that where every GPU has a NIC near it, a NIC that is nearest to no GPU carries no collective.
"""

from __future__ import annotations

from dataclasses import replace

from hardware.nics import fastest
from probes.api import Absent, Ok, Snapshot
from probes.interfaces.facts import InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.pci.facts import PciFacts, amd_gpus, gpus
from probes.rdma.facts import OTHER, RAIL, RdmaDevice, RdmaFacts
from topology.graph import NodeTopology, Pairs, rank


def with_topology(snapshot: Snapshot, node: NodeTopology) -> Snapshot:
    """The snapshot with what its probes cannot know alone: roles of RDMA devices, the GPUs, and who makes collectives.

    A role is set where the node's topology decides it. Without a GPU, gloo makes the collectives, and NCCL none.
    """
    outcomes = dict(snapshot.outcomes)
    pci = snapshot.facts(PciFacts)
    on_bus = bool(gpus(pci) or amd_gpus(pci)) if pci else not isinstance(outcomes.get("pci"), Absent)
    without_gpu = not node.gpus and not on_bus
    for name, outcome in snapshot.outcomes.items():
        facts = outcome.facts if isinstance(outcome, Ok) else None
        if isinstance(outcome, Ok) and isinstance(facts, RdmaFacts):
            devices = tuple(replace(each, role=_role(node, each, facts.devices)) for each in facts.devices)
            outcomes[name] = replace(outcome, facts=replace(facts, devices=devices))
        elif isinstance(outcome, Ok) and isinstance(facts, InterfacesFacts) and without_gpu:
            outcomes[name] = replace(outcome, facts=replace(facts, backend="gloo"))
        elif isinstance(outcome, Ok) and isinstance(facts, LimitsFacts):
            outcomes[name] = replace(outcome, facts=replace(facts, gpus=len(node.gpus)))
    return replace(snapshot, outcomes=outcomes)


def _role(node: NodeTopology, device: RdmaDevice, devices: tuple[RdmaDevice, ...]) -> str | None:
    """RAIL where the device is nearest to a GPU, OTHER where each GPU has a nearer one, None where nothing decides.

    A device whose ports are down is judged by its place: the rail of its GPU does not move to another card.
    """
    known = Pairs(node.pairs)
    nearest = [near for near in node.nearest_nic if near.decidable and near.local]
    tied = [near for near in nearest if rank(known.label(near.gpu, device.name)) <= rank(near.label)]
    names = {name for near in tied or nearest for name in near.nics} - {device.name}
    others = [each for each in devices if each.name in names]
    best = max(map(_rate, others), default=0.0)
    if tied:
        # a board's own port beside the rails of a server without switches: as near, slower, and another model
        models = {each.model for each in others if _rate(each) == best}
        return OTHER if _rate(device) < best and device.model and models.isdisjoint((device.model, None)) else RAIL
    return OTHER if nearest and len(nearest) == len(node.nearest_nic) and _rate(device) <= best else None


def _rate(device: RdmaDevice) -> float:
    """Bytes/s of the ACTIVE ports together; of a device without one what its model can do, 0 where that is unknown."""
    rates = [port.rate_bytes_per_second or 0.0 for port in device.ports if port.state == "ACTIVE"]
    return sum(rates) if rates else fastest(device.model) or 0.0

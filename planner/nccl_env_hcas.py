"""Which RDMA ports a job should use, and why the others are left out.

Specification: NCCL src/transport/net_ib/init.cc (every ACTIVE port with link layer InfiniBand or Ethernet is taken).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planner.nccl_env_situation import NodeView, PortView, rdma_device_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PortChoice:
    """The ports to use on one node; `dropped` says of each other ACTIVE port why not."""

    keep: tuple[PortView, ...]
    dropped: dict[str, str] = field(default_factory=dict)  # "mlx5_4:1" -> why NCCL must be kept from it
    far: dict[str, str] = field(default_factory=dict)  # the same for ports NCCL passes over by itself
    secondary: dict[str, str] = field(default_factory=dict)  # device -> the pod's interface on it


def choose_ports(node: NodeView) -> PortChoice:
    """Start from what NCCL takes unasked and leave out what a job must not use."""
    keep = node.taken_ports()
    dropped: dict[str, str] = {}
    secondary = _secondary_devices(node)
    for rule in (_hardware, _of_this_pod(secondary), _one_link_layer):
        keep = _without(keep, unfit := rule(keep))
        dropped |= unfit
    keep = _without(keep, far := _near_a_gpu(node)(keep))
    keep = _without(keep, unfit := _not_management(node)(keep))
    return PortChoice(keep=keep, dropped=dropped | unfit, far=far, secondary=secondary)


def _without(ports: Sequence[PortView], unfit: dict[str, str]) -> tuple[PortView, ...]:
    return tuple(view for view in ports if view.name not in unfit)


def _secondary_devices(node: NodeView) -> dict[str, str]:
    """RoCE devices behind the pod's own networks. InfiniBand needs no network of the pod: its GIDs are the port's."""
    facts = node.interfaces()
    roce = [view for view in node.taken_ports() if view.port.link_layer == "Ethernet"]
    names = {view.device.name for view in roce}
    found: dict[str, str] = {}
    for interface in facts.interfaces if facts else ():
        device = rdma_device_of(interface, roce) if interface.role == "secondary" else None
        if device in names:
            found.setdefault(device, interface.name)
    return found


Rule = Callable[[Sequence[PortView]], dict[str, str]]


def _hardware(ports: Sequence[PortView]) -> dict[str, str]:
    """Soft-RoCE and soft-iWARP run on the CPU: not beside a real HCA."""
    software = ("rxe", "siw")
    if all(view.device.kind in software for view in ports):
        return {}
    return {view.name: "RDMA in software (rxe, siw)" for view in ports if view.device.kind in software}


def _of_this_pod(secondary: dict[str, str]) -> Rule:
    """RoCE needs a GID of this network namespace: only the devices behind the pod's own networks have one."""

    def unfit(ports: Sequence[PortView]) -> dict[str, str]:
        if not any(view.device.name in secondary for view in ports):
            return {}
        return {
            view.name: f"{view.port.link_layer}, and no network of this pod is on it"
            for view in ports
            if view.device.name not in secondary
        }

    return unfit


def _one_link_layer(ports: Sequence[PortView]) -> dict[str, str]:
    """An InfiniBand port cannot talk to an Ethernet port: keep the layer that carries more."""
    rates: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for view in ports:
        layer = view.port.link_layer or ""
        rates[layer] += view.port.rate_bytes_per_second or 0.0
        counts[layer] += 1
    if len(counts) < 2:
        return {}
    main = max(counts, key=lambda layer: (rates[layer], counts[layer], layer == "InfiniBand"))
    return {
        view.name: f"{view.port.link_layer}, while the training fabric is {main}"
        for view in ports
        if view.port.link_layer != main
    }


def _not_management(node: NodeView) -> Rule:
    """A slower port of another model, or the one the default route leaves by, serves storage or management."""
    facts = node.interfaces()
    default_route = facts.default_route if facts else None

    def unfit(ports: Sequence[PortView]) -> dict[str, str]:
        rates = [view.port.rate_bytes_per_second or 0.0 for view in ports]
        fastest = max(rates, default=0.0)
        models = {view.device.model for view, rate in zip(ports, rates, strict=True) if rate == fastest}
        found: dict[str, str] = {}
        for view, rate in zip(ports, rates, strict=True):
            if not 0.0 < rate < fastest:
                continue
            # A port of the same model that is slower has trained down: that is a fault to mend, not a port to hide.
            other_model = view.device.model is not None and None not in models and view.device.model not in models
            leads_out = view.port.netdev is not None and view.port.netdev == default_route
            if other_model or leads_out:
                text = f"{rate * 8 / 1e9:g} Gb/s against {fastest * 8 / 1e9:g} Gb/s of the others"
                found[view.name] = f"{text}, {'carries the default route' if leads_out else view.device.model}"
        return found

    return unfit


def _near_a_gpu(node: NodeView) -> Rule:
    """Where every GPU has a NIC near it, NCCL's search ends there and never reaches a NIC that is near none.

    NCCL src/graph/search.cc, ncclTopoSelectNets: the nets of each GPU by path type, nearest first.
    """
    topology = node.topology
    nearest = topology.nearest_nic if topology else ()
    decidable = bool(nearest) and all(entry.decidable and entry.local for entry in nearest)
    names = {nic for entry in nearest for nic in entry.nics}

    def unfit(ports: Sequence[PortView]) -> dict[str, str]:
        near = [view for view in ports if view.device.name in names]
        if not decidable or not near:
            return {}
        fastest = max(view.port.rate_bytes_per_second or 0.0 for view in near)
        return {
            view.name: "nearest to no GPU: each has a nearer port"
            for view in ports
            if view.device.name not in names and (view.port.rate_bytes_per_second or 0.0) <= fastest
        }

    return unfit


def missing_ports(node: NodeView) -> tuple[PortView, ...]:
    """Ports NCCL passes over in silence because they are not ACTIVE."""
    return tuple(view for view in node.verbs_ports() if view.port.state is not None and view.port.state != "ACTIVE")

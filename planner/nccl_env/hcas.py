"""Selects the RDMA ports for a job, with the reason for each port that is left out.

Specification: NCCL src/transport/net_ib/init.cc (uses every ACTIVE port with link layer InfiniBand or Ethernet).
"""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.finding import Status
from hardware.units import gigabits
from planner.nccl_env.situation import NodeView, PortView, gid_address, gid_addresses, port_subnet, rdma_device_of
from probes.rdma.facts import is_link_local


@dataclass(frozen=True, slots=True, kw_only=True)
class PortChoice:
    """The ports to use on one node, and the reason that each other ACTIVE port is not used."""

    chosen: tuple[PortView, ...]
    dropped: dict[str, str] = field(default_factory=dict)  # "mlx5_4:1" -> reason that NCCL must not use it
    far: dict[str, str] = field(default_factory=dict)  # the same, for ports that NCCL does not use anyway
    secondary: dict[str, str] = field(default_factory=dict)  # device -> interface of the pod on it


def choose_ports(node: NodeView) -> PortChoice:
    """Start with the ports that NCCL uses by default, and drop those that a job must not use."""
    chosen = node.default_ports()
    dropped: dict[str, str] = {}
    secondary = _find_secondary_devices(node)
    far: dict[str, str] = {}
    for rule in _RULES:
        unfit = rule(node, chosen)
        chosen = tuple(view for view in chosen if view.name not in unfit)
        (far if rule is _drop_far else dropped).update(unfit)
    return PortChoice(chosen=chosen, dropped=dropped, far=far, secondary=secondary)


def _find_secondary_devices(node: NodeView) -> dict[str, str]:
    """Return RoCE devices of the pod's networks. InfiniBand needs no pod network, because GIDs belong to the port."""
    roce = [view for view in node.default_ports() if view.port.link_layer == "Ethernet"]
    names = {view.device.name for view in roce}
    found: dict[str, str] = {}
    for interface in node.links:
        device = rdma_device_of(interface, roce) if interface.role == "secondary" else None
        if device in names:
            found.setdefault(device, interface.name)
    return found


def _drop_software(_node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop Soft-RoCE and soft-iWARP, which run on the CPU, if there is a real HCA."""
    if all(map(is_software, ports)):
        return {}
    return {view.name: "RDMA in software (rxe, siw)" for view in ports if is_software(view)}


def _drop_other_pods(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop RoCE devices without a GID in this network namespace; only devices of the pod's networks have one."""
    secondary = _find_secondary_devices(node)
    if not any(view.device.name in secondary for view in ports):
        return {}
    return {
        view.name: f"{view.port.link_layer}, and no network of this pod is on it"
        for view in ports
        if view.device.name not in secondary
    }


def _drop_minor_layer(_node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Keep one link layer, the one with the higher total rate: InfiniBand and Ethernet ports cannot communicate."""
    rates: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for view in ports:
        layer = view.port.link_layer or ""
        rates[layer] += view.port.rate_bytes_per_second or 0.0
        counts[layer] += 1
    if len(counts) < 2 or (len(set(counts.values())) == 1 and len(set(rates.values())) == 1):
        return {}  # one layer, or two fabrics of equal size: `undecided`
    main = max(counts, key=lambda layer: (rates[layer], counts[layer], layer == "InfiniBand"))
    return {
        view.name: f"{view.port.link_layer}, while the training fabric is {main}"
        for view in ports
        if view.port.link_layer != main
    }


def _drop_minor_subnet(_node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop InfiniBand ports with another subnet prefix: they have another subnet manager and cannot be reached.

    InfiniBand Architecture 4.1.1: the upper 64 bits of GID 0 are the subnet prefix, by default fe80::.
    """
    prefixes = {view.name: prefix for view in ports if (prefix := subnet_prefix(view))}
    counts = Counter(prefixes.values())
    if len(counts) < 2 or len(prefixes) < len(ports):
        return {}
    (main, most), (_, next_most) = counts.most_common(2)
    if most == next_most:
        return {}  # two fabrics of equal size, and no fact shows which one is for training
    return {
        name: f"InfiniBand subnet {prefix}, while {most} ports are in {main}"
        for name, prefix in prefixes.items()
        if prefix != main
    }


def subnet_prefix(view: PortView) -> str | None:
    """Return the InfiniBand subnet of a port; None for RoCE and if the GID table was not read."""
    if view.port.link_layer != "InfiniBand" or not view.port.gids:
        return None
    first = gid_address(min(view.port.gids, key=lambda gid: gid.index))
    return first.exploded[:19] if first is not None and first.version == 6 else None


def _drop_unaddressed(_node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop RoCE ports with only link-local GIDs: they reach no other node, but NCCL would use them."""
    bare = [view for view in ports if is_unaddressed(view)]
    if not bare or not any(gid_addresses(view) for view in ports):
        return {}
    return {view.name: "its GIDs are link-local only: its interface has no IP address" for view in bare}


def is_unaddressed(view: PortView) -> bool:
    """Whether a RoCE port's GID table was read and has only link-local entries."""
    return view.port.link_layer == "Ethernet" and view.port.gids_known and not gid_addresses(view, None)


def _drop_far(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop ports near no GPU, if every GPU has a near NIC: NCCL's search then never uses the others.

    NCCL src/graph/search.cc, ncclTopoSelectNets: NICs of each GPU by path type, nearest first.
    """
    nearest = node.topology.nearest_nic if node.topology else ()
    names = {nic for entry in nearest for nic in entry.nics}
    near = [view for view in ports if view.device.name in names]
    if not near or not all(entry.decidable and entry.local for entry in nearest):
        return {}
    fastest = max(view.port.rate_bytes_per_second or 0.0 for view in near)
    return {
        view.name: "nearest to no GPU: each has a nearer port"
        for view in ports
        if view.device.name not in names and (view.port.rate_bytes_per_second or 0.0) <= fastest
    }


def _drop_management(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop slower ports of another model, and the port of the default route: they are for storage or management."""
    facts = node.interfaces()
    default_route = facts.default_route if facts else None
    rates = [view.port.rate_bytes_per_second or 0.0 for view in ports]
    fastest = max(rates, default=0.0)
    models = {view.device.model for view, rate in zip(ports, rates, strict=True) if rate == fastest}
    found: dict[str, str] = {}
    for view, rate in zip(ports, rates, strict=True):
        if not 0.0 < rate < fastest:
            continue
        # A slow port of the same model has a degraded link, which must be repaired and not hidden.
        other_model = view.device.model is not None and None not in models and view.device.model not in models
        leads_out = view.port.netdev is not None and view.port.netdev == default_route
        if other_model or leads_out:
            text = f"{gigabits(rate)} against {gigabits(fastest)} of the others"
            found[view.name] = f"{text}, {'carries the default route' if leads_out else view.device.model}"
    return found


def _drop_storage(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop ports in the subnet of a file server, if every GPU has another port at the same distance."""
    info = node.hostinfo()
    servers = [ipaddress.ip_address(text) for text in info.storage_servers] if info else []
    near = [set(entry.nics) for entry in node.topology.nearest_nic if entry.decidable] if node.topology else []
    found: dict[str, str] = {}
    for view in ports:
        subnet = port_subnet(node, view) if servers else None
        server = next((each for each in servers if subnet is not None and each in subnet), None)
        if server is not None:
            found[view.name] = f"storage: a file system is mounted from {server} in its subnet {subnet}"
    left = {view.device.name for view in ports if view.name not in found}
    spared = near and all(nics & left for nics in near if nics & {view.device.name for view in ports})
    return found if found and spared else {}


# Applied in this order. NCCL itself ignores the ports that `_drop_far` drops.
_RULES = (
    _drop_software, _drop_other_pods, _drop_minor_layer, _drop_minor_subnet,
    _drop_unaddressed, _drop_far, _drop_management, _drop_storage,
)  # fmt: skip


def is_software(view: PortView) -> bool:
    """Whether the device is Soft-RoCE or soft-iWARP, in which the CPU moves the data."""
    return view.device.kind in ("rxe", "siw")


def is_virtual_function(view: PortView) -> bool:
    """Whether the device is an SR-IOV virtual function, whose name depends on the order in which functions appear."""
    return bool(view.device.is_vf) or (view.device.model or "").endswith(" VF")


def gid_index_problem(view: PortView, index: int) -> tuple[Status, str] | None:
    """Return the problem of a fixed NCCL_IB_GID_INDEX on a RoCE port, as a text that follows "entry N of mlx5_0:1".

    Link-local and RoCE v1 entries are not routable; they are wrong if the port also has a routable entry.
    """
    gid = next((gid for gid in view.port.gids if gid.index == index), None)
    if gid is None:
        return Status.FAIL, "is empty: connections fail with 'Invalid argument'"
    severity = Status.FAIL if gid_addresses(view) else Status.WARN
    if gid.type == "IB/RoCE v1":
        return severity, "is RoCE v1, which no router passes on: connections to another subnet fail"
    if is_link_local(gid):
        return severity, "is link-local, which no router passes on: connections to another subnet fail"
    return None

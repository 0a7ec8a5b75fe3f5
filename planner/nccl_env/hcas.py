"""Which RDMA ports a job should use, and why the others are left out.

Specification: NCCL src/transport/net_ib/init.cc (every ACTIVE port with link layer InfiniBand or Ethernet is taken).
"""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.finding import Status
from hardware.units import gigabits
from planner.nccl_env.nodes import NodeView, PortView, gid_address, gid_addresses, port_subnet, rdma_device_of
from probes.rdma.facts import is_link_local


@dataclass(frozen=True, slots=True, kw_only=True)
class PortChoice:
    """The ports to use on one node; `dropped` says of each other ACTIVE port why not."""

    chosen: tuple[PortView, ...]
    dropped: dict[str, str] = field(default_factory=dict)  # "mlx5_4:1" -> why NCCL must be kept from it
    far: dict[str, str] = field(default_factory=dict)  # the same for ports NCCL passes over by itself
    secondary: dict[str, str] = field(default_factory=dict)  # device -> the pod's interface on it


def choose_ports(node: NodeView) -> PortChoice:
    """Start from what NCCL takes unasked and leave out what a job must not use."""
    chosen = node.default_ports()
    dropped: dict[str, str] = {}
    secondary = _secondary_devices(node)
    far: dict[str, str] = {}
    for rule in _RULES:
        unfit = rule(node, chosen)
        chosen = tuple(view for view in chosen if view.name not in unfit)
        (far if rule is _near_a_gpu else dropped).update(unfit)
    return PortChoice(chosen=chosen, dropped=dropped, far=far, secondary=secondary)


def _secondary_devices(node: NodeView) -> dict[str, str]:
    """RoCE devices behind the pod's own networks. InfiniBand needs no network of the pod: its GIDs are the port's."""
    facts = node.interfaces()
    roce = [view for view in node.default_ports() if view.port.link_layer == "Ethernet"]
    names = {view.device.name for view in roce}
    found: dict[str, str] = {}
    for interface in facts.interfaces if facts else ():
        device = rdma_device_of(interface, roce) if interface.role == "secondary" else None
        if device in names:
            found.setdefault(device, interface.name)
    return found


def _hardware(_node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Soft-RoCE and soft-iWARP run on the CPU: not beside a real HCA."""
    if all(map(is_software, ports)):
        return {}
    return {view.name: "RDMA in software (rxe, siw)" for view in ports if is_software(view)}


def _of_this_pod(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """RoCE needs a GID of this network namespace: only the devices behind the pod's own networks have one."""
    secondary = _secondary_devices(node)
    if not any(view.device.name in secondary for view in ports):
        return {}
    return {
        view.name: f"{view.port.link_layer}, and no network of this pod is on it"
        for view in ports
        if view.device.name not in secondary
    }


def _one_link_layer(_node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """An InfiniBand port cannot talk to an Ethernet port: keep the layer that carries more."""
    rates: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for view in ports:
        layer = view.port.link_layer or ""
        rates[layer] += view.port.rate_bytes_per_second or 0.0
        counts[layer] += 1
    if len(counts) < 2 or (len(set(counts.values())) == 1 and len(set(rates.values())) == 1):
        return {}  # one layer, or two fabrics of one size: `undecided`
    main = max(counts, key=lambda layer: (rates[layer], counts[layer], layer == "InfiniBand"))
    return {
        view.name: f"{view.port.link_layer}, while the training fabric is {main}"
        for view in ports
        if view.port.link_layer != main
    }


def _one_subnet(_node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """InfiniBand ports of another subnet prefix hang on another subnet manager: no packet goes from one to the other.

    InfiniBand Architecture 4.1.1: the upper 64 bits of GID 0 are the subnet's prefix, fe80:: unless it was changed.
    """
    prefixes = {view.name: prefix for view in ports if (prefix := subnet_prefix(view))}
    counts = Counter(prefixes.values())
    if len(counts) < 2 or len(prefixes) < len(ports):
        return {}
    (main, most), (_, next_most) = counts.most_common(2)
    if most == next_most:
        return {}  # two fabrics of one size: which of them is for training, nothing here says
    return {
        name: f"InfiniBand subnet {prefix}, while {most} ports are in {main}"
        for name, prefix in prefixes.items()
        if prefix != main
    }


def subnet_prefix(view: PortView) -> str | None:
    """The InfiniBand subnet a port is in, None for RoCE and where the table was not read."""
    if view.port.link_layer != "InfiniBand" or not view.port.gids:
        return None
    first = gid_address(min(view.port.gids, key=lambda gid: gid.index))
    return first.exploded[:19] if first is not None and first.version == 6 else None


def _addressed(_node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """A RoCE port with nothing but link-local GIDs reaches no other node, and NCCL takes it all the same."""
    bare = [view for view in ports if is_unaddressed(view)]
    if not bare or not any(gid_addresses(view) for view in ports):
        return {}
    return {view.name: "its GIDs are link-local only: its interface has no IP address" for view in bare}


def is_unaddressed(view: PortView) -> bool:
    """Whether a RoCE port's table was read and holds link-local entries alone."""
    return view.port.link_layer == "Ethernet" and view.port.gids_known and not gid_addresses(view, None)


def _near_a_gpu(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Where every GPU has a NIC near it, NCCL's search ends there and never reaches a NIC that is near none.

    NCCL src/graph/search.cc, ncclTopoSelectNets: the nets of each GPU by path type, nearest first.
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


def _not_management(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """A slower port of another model, or the one the default route leaves by, serves storage or management."""
    facts = node.interfaces()
    default_route = facts.default_route if facts else None
    rates = [view.port.rate_bytes_per_second or 0.0 for view in ports]
    fastest = max(rates, default=0.0)
    models = {view.device.model for view, rate in zip(ports, rates, strict=True) if rate == fastest}
    found: dict[str, str] = {}
    for view, rate in zip(ports, rates, strict=True):
        if not 0.0 < rate < fastest:
            continue
        # A port of the same model that is slower has trained down: that is a fault to repair, not a port to hide.
        other_model = view.device.model is not None and None not in models and view.device.model not in models
        leads_out = view.port.netdev is not None and view.port.netdev == default_route
        if other_model or leads_out:
            text = f"{gigabits(rate)} against {gigabits(fastest)} of the others"
            found[view.name] = f"{text}, {'carries the default route' if leads_out else view.device.model}"
    return found


def _no_storage(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """A port in the subnet of a mounted file system's server carries storage, where every GPU has another as near."""
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


# In this order. NCCL itself does not use the ports of `_near_a_gpu`.
_RULES = (
    _hardware, _of_this_pod, _one_link_layer, _one_subnet, _addressed, _near_a_gpu, _not_management, _no_storage,
)  # fmt: skip


def is_software(view: PortView) -> bool:
    """Whether the device is soft-RoCE or soft-iWARP: the CPU moves its data."""
    return view.device.kind in ("rxe", "siw")


def is_virtual_function(view: PortView) -> bool:
    """Whether the device is an SR-IOV virtual function: its name is given in the order in which functions appear."""
    return bool(view.device.is_vf) or (view.device.model or "").endswith(" VF")


def gid_index_problem(view: PortView, index: int) -> tuple[Status, str] | None:
    """What is wrong with this fixed NCCL_IB_GID_INDEX on a RoCE port, in words that follow "entry N of mlx5_0:1".

    A link-local or RoCE v1 entry fails where the port has one that every subnet reaches: no router passes it on.
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

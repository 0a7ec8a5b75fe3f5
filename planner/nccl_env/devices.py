"""Selects the network interfaces and the RDMA ports of a job, with the reason for each port that is left out.

Interfaces: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, for bootstrap and, without RDMA, for data. Specification: NCCL
src/misc/socket.cc (search order), src/os/linux.cc (matching; running interfaces only), src/transport/net_ib/init.cc
(uses every ACTIVE port with link layer InfiniBand or Ethernet); PyTorch ProcessGroupGloo (GLOO_SOCKET_IFNAME).
"""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from contracts.finding import Status
from hardware.units import gigabits
from planner.nccl_env.situation import (
    NodeView,
    Note,
    PortView,
    Setting,
    Situation,
    by_host,
    gid_address,
    gid_addresses,
    networks,
    note,
    port_subnet,
    rdma_device_of,
    setting,
    some,
)
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import Interface, InterfacesFacts, select_preferred_by_nccl
from probes.rdma.facts import is_link_local

UNFIT_ROLES = ("loopback", "docker", "bridge", "virtual")
"""Roles of interfaces that do not lead to other nodes."""


def list_running(facts: InterfacesFacts) -> list[Interface]:
    """Return the interfaces among which NCCL selects: running interfaces with an address."""
    return [each for each in facts.interfaces if _is_running(each) and each.addresses]


def _is_running(interface: Interface) -> bool:
    """Whether the interface is up and has a carrier; unknown values count as yes."""
    return interface.running is not False and interface.up is not False


def _is_usable(interface: Interface) -> bool:
    """Whether the interface may lead to other nodes."""
    fit = interface.role not in UNFIT_ROLES and interface.master is None
    return fit and _is_running(interface) and bool(networks(interface))


def _rank_interface(node: NodeView, interface: Interface) -> tuple[float, ...]:
    """Return a sort key that puts the interfaces with the best connection to other nodes first."""
    facts, secondary = node.facts(InterfacesFacts), interface.role == "secondary"
    behind_hca = secondary and rdma_device_of(interface, node.default_ports()) is not None
    overlay = interface.role == "pod-default"
    speed = interface.speed_bytes_per_second or 0.0
    return (not behind_hca, not secondary, overlay, -speed, facts is None or interface.name != facts.default_route)


def choose_best_interface(node: NodeView) -> Interface | None:
    """Return the interface with the best connection to other nodes; None if there is none or if unknown."""
    usable = [each for each in node.links if _is_usable(each)]
    return min(usable, key=lambda each: _rank_interface(node, each), default=None)


def socket_ifname(case: Situation) -> Setting | Note | None:
    """NCCL_SOCKET_IFNAME, if NCCL would not select the right interface by default."""
    if case.cxi:
        return _name_slingshot(case)
    judged = [node for node in case.nodes if node.facts(InterfacesFacts) is not None]
    if not judged:
        return note("socket_ifname.unread", case.unread("interfaces"))
    defaults = {node.hostname: _get_default_choice(node) for node in judged}
    carries_data = not (case.efa or case.rdma_ports)
    choices = {node.hostname: _choose_interface(node, sockets_carry_data=carries_data) for node in judged}
    if not any(choices.values()):
        choices = _find_shared_subnet(judged)
    if not any(choices.values()):
        unread = case.unread_nodes(InterfacesFacts)
        picks = by_host((host, default or "none") for host, default in defaults.items())
        return note("socket_ifname.automatic", picks + (f"; not read on {some(unread)}" if unread else ""))
    names = {host: choice[0] if choice else tuple(filter(None, (defaults[host],))) for host, choice in choices.items()}
    value = _join_names(names, judged)
    if value is None:
        listed = by_host((host, ",".join(each)) for host, each in names.items())
        return note("socket_ifname.names_differ", listed=listed)
    host, (_, key, evidence, fields) = next((host, choice) for host, choice in choices.items() if choice is not None)
    return setting(key, value, f"{host}: {evidence}" if len(judged) > 1 else evidence, **fields)


def _name_slingshot(case: Situation) -> Setting | Note:
    """Return the common prefix of Slingshot interfaces: libfabric uses all of them, the bootstrap one."""
    nics = {node.hostname: node.cxi() for node in case.nodes if node.cxi()}
    links = {node.hostname: {each.name for each in node.links} for node in case.nodes}
    evidence = by_host((host, f"Cassini NICs {', '.join(names)}") for host, names in nics.items())
    stems = {name.rstrip("0123456789") for names in nics.values() for name in names}
    unseen = [host for host, names in nics.items() if not set(names) <= links.get(host, set())]
    if unseen or len(stems) != 1 or not (stem := stems.pop()):
        return note("socket_ifname.slingshot_unnamed", evidence)
    others = {name for host, names in links.items() for name in names - set(nics.get(host, ()))}
    value = "=" + ",".join(next(iter(nics.values()))) if any(name.startswith(stem) for name in others) else stem
    return setting("socket_ifname.slingshot", value, evidence)


def gloo_socket_ifname(case: Situation) -> Setting | Note | None:
    """GLOO_SOCKET_IFNAME on hosts without GPUs: by default, gloo uses the address of the host name."""
    if case.backend != "gloo":
        return None
    if case.one_node:
        return note("gloo.one_node")
    picks = {node.hostname: best for node in case.nodes if (best := choose_best_interface(node)) is not None}
    if unread := case.unread_nodes(InterfacesFacts):
        return note("gloo.unread", case.unread("interfaces"), hosts=some(unread))
    if without := [node.hostname for node in case.nodes if node.hostname not in picks]:
        return note("gloo.no_address", hosts=some(without))
    names = sorted({pick.name for pick in picks.values()})
    if len(names) > 1:
        return note("gloo.names_differ", listed=by_host((host, pick.name) for host, pick in picks.items()))
    pick = next(iter(picks.values()))
    evidence = f"{pick.name}: {pick.role}, {', '.join(pick.addresses)}"
    return setting("gloo.name_it", names[0], evidence)


def list_nccl_interfaces(facts: InterfacesFacts) -> tuple[str, ...]:
    """Return the interfaces that NCCL's sockets use by default, in NCCL's order."""
    return tuple(each.name for each in select_preferred_by_nccl(list_running(facts)))


def make_exact_list(names: Sequence[str], others: Iterable[str]) -> str:
    """Return a list for NCCL, which matches prefixes; with `=` if a prefix would also match one of `others`."""
    caught = [other for other in others if other not in names and other.startswith(tuple(names))]
    return ("=" if caught else "") + ",".join(names)


def _get_default_choice(node: NodeView) -> str | None:
    facts = node.facts(InterfacesFacts)
    return (facts.nccl_choice or next(iter(list_nccl_interfaces(facts)), None)) if facts else None


_Choice = tuple[tuple[str, ...], str, str, dict[str, str]]  # names, key of the text, evidence, fields of the text


def _choose_interface(node: NodeView, *, sockets_carry_data: bool) -> _Choice | None:
    """Return the interfaces to set, with reason; None if this node does not need the variable."""
    best, facts, unasked = choose_best_interface(node), node.facts(InterfacesFacts), _get_default_choice(node)
    if best is None or facts is None or unasked is None:
        return None
    by_name = {each.name: each for each in reversed(node.links)}
    current, mark = by_name.get(unasked), _rank_interface(node, best)[:-1]
    equals = [each for each in node.links if _is_usable(each) and _rank_interface(node, each)[:-1] == mark]
    names = tuple(each.name for each in equals) if sockets_carry_data else (best.name,)
    if best.role == "secondary" and (current is None or current.role != "secondary"):
        network = f" ({best.multus_network})" if best.multus_network else ""
        device = rdma_device_of(best, node.default_ports())
        behind = f", on RDMA device {device}" if device else ""
        suffix = f"; as good: {', '.join(name for name in names if name != best.name)}" if len(names) > 1 else ""
        evidence = f"{best.name}: secondary{network}{behind}, {', '.join(best.addresses)}{suffix}"
        return names, "socket_ifname.overlay", evidence, {"unasked": unasked}
    if current is not None and not _is_usable(current) and best.name != unasked:
        unfit = current.role in UNFIT_ROLES
        problem = f"a {current.role} interface" if unfit else "an interface with link-local addresses only"
        evidence = f"{best.name}: {best.role}, {', '.join(best.addresses)}"
        return names, "socket_ifname.unfit", evidence, {"unasked": unasked, "what": problem}
    defaults = list_nccl_interfaces(facts)
    others = [by_name[name] for name in defaults if name not in names]
    if sockets_carry_data and others and best.name in defaults:
        left = ", ".join(f"{each.name} ({each.role}{_format_speed(each)})" for each in others)
        evidence = f"{', '.join(names)}: {best.role}{_format_speed(best)}; NCCL would add {left}"
        return names, "socket_ifname.tcp", evidence, {}
    return None


def _format_speed(interface: Interface) -> str:
    rate = interface.speed_bytes_per_second
    return f", {gigabits(rate)}" if rate else ""


def _find_shared_subnet(judged: Sequence[NodeView]) -> dict[str, _Choice | None]:
    """Find interfaces with a subnet common to all nodes, if the nodes' own choices have none."""
    subnets = [_list_subnets(node, _get_default_choice(node)) for node in judged]
    common = set.intersection(*[_list_subnets(node, None) for node in judged])
    if len(judged) < 2 or set.intersection(*subnets) or not common:
        return {}
    subnet = min(common)
    choices: dict[str, _Choice | None] = {}
    for node in judged:
        name = next(each.name for each in node.links if subnet in _list_subnets(node, each.name))
        evidence = f"{name}: {subnet}; NCCL would take {_get_default_choice(node)}"
        choices[node.hostname] = ((name,), "socket_ifname.shared_subnet", evidence, {})
    return choices


def _list_subnets(node: NodeView, name: str | None) -> set[str]:
    """Return the subnets of one usable interface, or of all."""
    usable = [each for each in node.links if _is_usable(each) and name in (None, each.name)]
    return {str(network) for each in usable for network in networks(each)}


def _join_names(names: Mapping[str, tuple[str, ...]], judged: Sequence[NodeView]) -> str | None:
    """Return one list for all nodes; None if a name in it exists on another node that must not use it."""
    distinct = list(dict.fromkeys(name for each in sorted(names.values()) for name in each))
    present = {node.hostname: {each.name for each in node.links} for node in judged}
    if any(present[host] & set(distinct) != set(selected) for host, selected in names.items()):
        return None
    return make_exact_list(distinct, {name for there in present.values() for name in there})


# RDMA ports.


@dataclass(frozen=True, slots=True, kw_only=True)
class PortChoice:
    """The ports to use on one node, and the reason that each other ACTIVE port is not used."""

    chosen: tuple[PortView, ...]
    dropped: dict[str, str] = field(default_factory=dict)  # "mlx5_4:1" -> reason that NCCL must not use it
    far: dict[str, str] = field(default_factory=dict)  # the same, for ports that NCCL does not use anyway
    secondary: dict[str, str] = field(default_factory=dict)  # device -> interface of the pod on it


def choose_ports(node: NodeView) -> PortChoice:
    """Start with the ports that NCCL uses by default, and drop those that a job must not use."""
    ports = node.default_ports()
    dropped: dict[str, str] = {}
    far: dict[str, str] = {}
    for rule in _RULES:
        unfit = rule(node, ports)
        ports = tuple(view for view in ports if view.name not in unfit)
        (far if rule is _drop_far else dropped).update(unfit)
    return PortChoice(chosen=ports, dropped=dropped, far=far, secondary=_find_secondary_devices(node))


def _find_secondary_devices(node: NodeView) -> dict[str, str]:
    """Return RoCE devices of the pod's networks. InfiniBand needs no pod network, because GIDs belong to the port."""
    roce = [view for view in node.default_ports() if view.port.link_layer == "Ethernet"]
    names = {view.device.name for view in roce}
    devices: dict[str, str] = {}
    for interface in node.links:
        device = rdma_device_of(interface, roce) if interface.role == "secondary" else None
        if device in names:
            devices.setdefault(device, interface.name)
    return devices


def _drop_software(_node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop Soft-RoCE and soft-iWARP, which run on the CPU, if there is a real HCA."""
    if all(map(is_software, ports)):
        return {}
    return {view.name: "RDMA in software (rxe, siw)" for view in ports if is_software(view)}


def _drop_other_pods(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop RoCE devices without a GID in this network namespace; only devices of the pod's networks have one."""
    secondary = _find_secondary_devices(node)
    others = [view for view in ports if view.device.name not in secondary]
    if len(others) == len(ports):
        return {}
    return {view.name: f"{view.port.link_layer}, and no network of this pod is on it" for view in others}


def _drop_minor_layer(_node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Keep one link layer, the one with the higher total rate: InfiniBand and Ethernet ports cannot communicate."""
    rates: dict[str, list[float]] = defaultdict(list)
    for view in ports:
        rates[view.port.link_layer or ""].append(view.port.rate_bytes_per_second or 0.0)
    sizes = {layer: (sum(each), len(each)) for layer, each in rates.items()}
    if len(set(sizes.values())) < 2:
        return {}  # one layer, or two fabrics of equal size, which `ib_hca` reports
    main = max(sizes, key=lambda layer: (*sizes[layer], layer == "InfiniBand"))
    others = [view for view in ports if view.port.link_layer != main]
    return {view.name: f"{view.port.link_layer}, while the training fabric is {main}" for view in others}


def _drop_minor_subnet(_node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop InfiniBand ports with another subnet prefix: they have another subnet manager and cannot be reached.

    InfiniBand Architecture 4.1.1: the upper 64 bits of GID 0 are the subnet prefix, by default fe80::.
    """
    prefixes = {view.name: prefix for view in ports if (prefix := subnet_prefix(view))}
    counts = Counter(prefixes.values())
    if len(counts) < 2 or len(prefixes) < len(ports):
        return {}
    (main, largest), (_, next_most) = counts.most_common(2)
    if largest == next_most:
        return {}  # two fabrics of equal size, and no fact shows which one is for training
    others = {name: prefix for name, prefix in prefixes.items() if prefix != main}
    return {name: f"InfiniBand subnet {prefix}, while {largest} ports are in {main}" for name, prefix in others.items()}


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
    near = [view.port.rate_bytes_per_second or 0.0 for view in ports if view.device.name in names]
    if not near or not all(entry.decidable and entry.local for entry in nearest):
        return {}
    far = [view for view in ports if view.device.name not in names]
    slow = [view for view in far if (view.port.rate_bytes_per_second or 0.0) <= max(near)]
    return {view.name: "nearest to no GPU: each has a nearer port" for view in slow}


def _drop_management(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop slower ports of another model, and the port of the default route: they are for storage or management."""
    facts = node.facts(InterfacesFacts)
    default_route = facts.default_route if facts else None
    rates = [view.port.rate_bytes_per_second or 0.0 for view in ports]
    fastest = max(rates, default=0.0)
    models = {view.device.model for view, rate in zip(ports, rates, strict=True) if rate == fastest}
    dropped: dict[str, str] = {}
    for view, rate in zip(ports, rates, strict=True):
        if not 0.0 < rate < fastest:
            continue
        # A slow port of the same model has a degraded link, which must be repaired and not hidden.
        other_model = view.device.model is not None and None not in models and view.device.model not in models
        leads_out = view.port.netdev is not None and view.port.netdev == default_route
        if other_model or leads_out:
            text = f"{gigabits(rate)} against {gigabits(fastest)} of the others"
            dropped[view.name] = f"{text}, {'carries the default route' if leads_out else view.device.model}"
    return dropped


def _drop_storage(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    """Drop ports in the subnet of a file server, if every GPU has another port at the same distance."""
    info = node.facts(HostinfoFacts)
    servers = [ipaddress.ip_address(text) for text in info.storage_servers] if info else []
    near = [set(entry.nics) for entry in node.topology.nearest_nic if entry.decidable] if node.topology else []
    dropped: dict[str, str] = {}
    for view in ports:
        subnet = port_subnet(node, view) if servers else None
        server = next((each for each in servers if subnet is not None and each in subnet), None)
        if server is not None:
            dropped[view.name] = f"storage: a file system is mounted from {server} in its subnet {subnet}"
    left = {view.device.name for view in ports if view.name not in dropped}
    spared = near and all(nics & left for nics in near if nics & {view.device.name for view in ports})
    return dropped if dropped and spared else {}


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

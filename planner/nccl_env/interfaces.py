"""Selects the network interfaces of a job: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.

They carry the bootstrap and, without RDMA, the data. Specification: NCCL src/misc/socket.cc (search order),
src/os/linux.cc (matching; running interfaces only); PyTorch ProcessGroupGloo (GLOO_SOCKET_IFNAME).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hardware.units import gigabits
from planner.nccl_env.rdma import exact_if_needed
from planner.nccl_env.situation import (
    NodeView,
    Note,
    Setting,
    Situation,
    by_host,
    networks,
    note,
    rdma_device_of,
    setting,
    some,
)
from probes.interfaces.facts import Interface, InterfacesFacts, preferred_by_nccl

UNFIT_ROLES = ("loopback", "docker", "bridge", "virtual")
"""Roles of interfaces that do not lead to other nodes."""


def running_interfaces(facts: InterfacesFacts) -> list[Interface]:
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


def best_interface(node: NodeView) -> Interface | None:
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
    found = {node.hostname: node.cxi() for node in case.nodes if node.cxi()}
    known = {node.hostname: {each.name for each in node.links} for node in case.nodes}
    evidence = by_host((host, f"Cassini NICs {', '.join(names)}") for host, names in found.items())
    stems = {name.rstrip("0123456789") for names in found.values() for name in names}
    unseen = [host for host, names in found.items() if not set(names) <= known.get(host, set())]
    if unseen or len(stems) != 1 or not (stem := stems.pop()):
        return note("socket_ifname.slingshot_unnamed", evidence)
    others = {name for host, names in known.items() for name in names - set(found.get(host, ()))}
    value = "=" + ",".join(next(iter(found.values()))) if any(name.startswith(stem) for name in others) else stem
    return setting("socket_ifname.slingshot", value, evidence)


def gloo_socket_ifname(case: Situation) -> Setting | Note | None:
    """GLOO_SOCKET_IFNAME on hosts without GPUs: by default, gloo uses the address of the host name."""
    if case.backend != "gloo":
        return None
    if case.one_node:
        return note("gloo.one_node")
    picks = {node.hostname: best for node in case.nodes if (best := best_interface(node)) is not None}
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


def nccl_takes(facts: InterfacesFacts) -> tuple[str, ...]:
    """Return the interfaces that NCCL's sockets use by default, in NCCL's order."""
    return tuple(each.name for each in preferred_by_nccl(running_interfaces(facts)))


def _get_default_choice(node: NodeView) -> str | None:
    facts = node.facts(InterfacesFacts)
    return (facts.nccl_choice or next(iter(nccl_takes(facts)), None)) if facts else None


_Choice = tuple[tuple[str, ...], str, str, dict[str, str]]  # names, key of the text, evidence, fields of the text


def _choose_interface(node: NodeView, *, sockets_carry_data: bool) -> _Choice | None:
    """Return the interfaces to set, with reason; None if this node does not need the variable."""
    best, facts, unasked = best_interface(node), node.facts(InterfacesFacts), _get_default_choice(node)
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
        more = f"; as good: {', '.join(name for name in names if name != best.name)}" if len(names) > 1 else ""
        evidence = f"{best.name}: secondary{network}{behind}, {', '.join(best.addresses)}{more}"
        return names, "socket_ifname.overlay", evidence, {"unasked": unasked}
    if current is not None and not _is_usable(current) and best.name != unasked:
        unfit = current.role in UNFIT_ROLES
        what = f"a {current.role} interface" if unfit else "which has no address of its own beyond the link"
        evidence = f"{best.name}: {best.role}, {', '.join(best.addresses)}"
        return names, "socket_ifname.unfit", evidence, {"unasked": unasked, "what": what}
    defaults = nccl_takes(facts)
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
    chosen = [_list_subnets(node, _get_default_choice(node)) for node in judged]
    common = set.intersection(*[_list_subnets(node, None) for node in judged])
    if len(judged) < 2 or set.intersection(*chosen) or not common:
        return {}
    subnet = min(common)
    found: dict[str, _Choice | None] = {}
    for node in judged:
        name = next(each.name for each in node.links if subnet in _list_subnets(node, each.name))
        evidence = f"{name}: {subnet}; NCCL would take {_get_default_choice(node)}"
        found[node.hostname] = ((name,), "socket_ifname.shared_subnet", evidence, {})
    return found


def _list_subnets(node: NodeView, name: str | None) -> set[str]:
    """Return the subnets of one usable interface, or of all."""
    usable = [each for each in node.links if _is_usable(each) and name in (None, each.name)]
    return {str(network) for each in usable for network in networks(each)}


def _join_names(names: Mapping[str, tuple[str, ...]], judged: Sequence[NodeView]) -> str | None:
    """Return one list for all nodes; None if a name in it exists on another node that must not use it."""
    distinct = list(dict.fromkeys(name for each in sorted(names.values()) for name in each))
    present = {node.hostname: {each.name for each in node.links} for node in judged}
    if any(present[host] & set(distinct) != set(own) for host, own in names.items()):
        return None
    return exact_if_needed(distinct, {name for there in present.values() for name in there})

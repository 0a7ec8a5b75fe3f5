"""NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME: the interface for bootstrap and, without RDMA, for data.

Specification: NCCL src/misc/socket.cc (search order), src/os/linux.cc (matching; running interfaces only); PyTorch
ProcessGroupGloo (GLOO_SOCKET_IFNAME).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hardware.units import gigabits
from planner.nccl_env.nodes import (
    UNFIT_ROLES,
    NodeView,
    best_interface,
    is_usable,
    networks,
    rank_interface,
    rdma_device_of,
    running_interfaces,
)
from planner.nccl_env.situation import Note, Setting, Situation, by_host, note, setting, some
from probes.interfaces.facts import Interface, InterfacesFacts, preferred_by_nccl


def socket_ifname(case: Situation) -> Setting | Note | None:
    """NCCL_SOCKET_IFNAME, if NCCL would not select the right interface by default."""
    if case.cxi:
        return _name_slingshot(case)
    judged = [(node, facts) for node in case.nodes if (facts := node.interfaces()) is not None]
    if not judged:
        return note("socket_ifname.unread", case.unread("interfaces"))
    choices = {
        node.hostname: _choose_interface(node, facts, sockets_carry_data=not (case.efa or case.rdma_ports))
        for node, facts in judged
    }
    if not any(choices.values()):
        choices = _find_shared_subnet(judged)
    if not any(choices.values()):
        picks = by_host((node.hostname, _get_default_choice(facts) or "none") for node, facts in judged)
        unread = case.unread_nodes(NodeView.interfaces)
        return note("socket_ifname.automatic", picks + (f"; not read on {some(unread)}" if unread else ""))
    named = {host: choice for host, choice in choices.items() if choice is not None}
    fills = {node.hostname: tuple(filter(None, (_get_default_choice(facts),))) for node, facts in judged}
    names = {host: named[host][0] if host in named else fills[host] for host in choices}
    value = _join_names(names, judged)
    if value is None:
        listed = by_host((host, ",".join(each)) for host, each in names.items())
        return note("socket_ifname.names_differ", listed=listed)
    host, (_, key, evidence, fields) = next(iter(named.items()))
    if len(judged) > 1:
        evidence = f"{host}: {evidence}"
    return setting(key, value, evidence, **fields)


def _name_slingshot(case: Situation) -> Setting | Note:
    """Return the common prefix of Slingshot interfaces: libfabric uses all of them, the bootstrap one."""
    found = {node.hostname: node.cxi() for node in case.nodes if node.cxi()}
    known = {node.hostname: {each.name for each in facts.interfaces} for node in case.nodes if (
        facts := node.interfaces()
    )}  # fmt: skip
    evidence = by_host((host, f"Cassini NICs {', '.join(names)}") for host, names in found.items())
    stems = {name.rstrip("0123456789") for names in found.values() for name in names}
    unseen = [host for host, names in found.items() if not set(names) <= known.get(host, set())]
    if unseen or len(stems) != 1 or not (stem := stems.pop()):
        return note("socket_ifname.slingshot_unnamed", evidence)
    others = [
        name for host, names in known.items() for name in names - set(found.get(host, ())) if name.startswith(stem)
    ]
    value = "=" + ",".join(next(iter(found.values()))) if others else stem
    return setting("socket_ifname.slingshot", value, evidence)


def gloo_socket_ifname(case: Situation) -> Setting | Note | None:
    """GLOO_SOCKET_IFNAME on hosts without GPUs: by default, gloo uses the address of the host name."""
    if case.backend != "gloo":
        return None
    if case.one_node:
        return note("gloo.one_node")
    picks: dict[str, Interface] = {}
    for node in case.nodes:
        best = best_interface(node)
        if best is not None:
            picks[node.hostname] = best
    if unread := case.unread_nodes(NodeView.interfaces):
        return note("gloo.unread", case.unread("interfaces"), hosts=some(unread))
    if without := [node.hostname for node in case.nodes if node.hostname not in picks]:
        return note("gloo.no_address", hosts=some(without))
    names = sorted({pick.name for pick in picks.values()})
    if len(names) > 1:
        listed = by_host((host, pick.name) for host, pick in picks.items())
        return note("gloo.names_differ", listed=listed)
    pick = next(iter(picks.values()))
    evidence = f"{pick.name}: {pick.role}, {', '.join(pick.addresses)}"
    return setting("gloo.name_it", names[0], evidence)


def nccl_takes(facts: InterfacesFacts) -> tuple[str, ...]:
    """Return the interfaces that NCCL's sockets use by default, in NCCL's order."""
    return tuple(each.name for each in preferred_by_nccl(running_interfaces(facts)))


def exact_if_needed(names: Sequence[str], others: Iterable[str]) -> str:
    """Return a list for NCCL, which matches prefixes; with `=` if a prefix would also match one of `others`."""
    caught = [other for other in others if other not in names and other.startswith(tuple(names))]
    return ("=" if caught else "") + ",".join(names)


def _get_default_choice(facts: InterfacesFacts) -> str | None:
    return facts.nccl_choice or next(iter(nccl_takes(facts)), None)


_Choice = tuple[tuple[str, ...], str, str, dict[str, str]]  # names, key of the text, evidence, fields of the text


def _find_equals(node: NodeView, facts: InterfacesFacts, best: Interface) -> tuple[Interface, ...]:
    """Return the usable interfaces of the same kind and speed as the best one."""
    mark = rank_interface(node, facts, best)[:-1]
    return tuple(
        each for each in facts.interfaces if is_usable(each) and rank_interface(node, facts, each)[:-1] == mark
    )


def _choose_interface(node: NodeView, facts: InterfacesFacts, *, sockets_carry_data: bool) -> _Choice | None:
    """Return the interfaces to set, with reason; None if this node does not need the variable."""
    best = best_interface(node)
    unasked = _get_default_choice(facts)
    if best is None or unasked is None:
        return None
    current = _find_interface(node, unasked)
    equals = _find_equals(node, facts, best) if sockets_carry_data else (best,)
    names = tuple(each.name for each in equals)
    if best.role == "secondary" and (current is None or current.role != "secondary"):
        network = f" ({best.multus_network})" if best.multus_network else ""
        device = rdma_device_of(best, node.default_ports())
        behind = f", on RDMA device {device}" if device else ""
        more = f"; as good: {', '.join(name for name in names if name != best.name)}" if len(names) > 1 else ""
        evidence = f"{best.name}: secondary{network}{behind}, {', '.join(best.addresses)}{more}"
        return names, "socket_ifname.overlay", evidence, {"unasked": unasked}
    if current is not None and not is_usable(current) and best.name != unasked:
        unfit = current.role in UNFIT_ROLES
        what = f"a {current.role} interface" if unfit else "which has no address of its own beyond the link"
        evidence = f"{best.name}: {best.role}, {', '.join(best.addresses)}"
        return names, "socket_ifname.unfit", evidence, {"unasked": unasked, "what": what}
    defaults = nccl_takes(facts)
    others = [each for name in defaults if name not in names and (each := _find_interface(node, name)) is not None]
    if sockets_carry_data and others and best.name in defaults:
        left = ", ".join(f"{each.name} ({each.role}{_format_speed(each)})" for each in others)
        evidence = f"{', '.join(names)}: {best.role}{_format_speed(best)}; NCCL would add {left}"
        return names, "socket_ifname.tcp", evidence, {}
    return None


def _format_speed(interface: Interface) -> str:
    rate = interface.speed_bytes_per_second
    return f", {gigabits(rate)}" if rate else ""


def _find_shared_subnet(judged: Sequence[tuple[NodeView, InterfacesFacts]]) -> dict[str, _Choice | None]:
    """Find interfaces with a subnet common to all nodes, if the nodes' own choices have none."""
    chosen = [_list_subnets(facts, _get_default_choice(facts)) for _, facts in judged]
    common = set.intersection(*[_list_subnets(facts, None) for _, facts in judged])
    if len(judged) < 2 or set.intersection(*chosen) or not common:
        return {}
    subnet = min(common)
    found: dict[str, _Choice | None] = {}
    for node, facts in judged:
        name = next(each.name for each in facts.interfaces if subnet in _list_subnets(facts, each.name))
        evidence = f"{name}: {subnet}; NCCL would take {_get_default_choice(facts)}"
        found[node.hostname] = ((name,), "socket_ifname.shared_subnet", evidence, {})
    return found


def _list_subnets(facts: InterfacesFacts, name: str | None) -> set[str]:
    """Return the subnets of one usable interface, or of all."""
    return {
        str(network)
        for each in facts.interfaces
        if is_usable(each) and name in (None, each.name)
        for network in networks(each)
    }


def _join_names(names: Mapping[str, tuple[str, ...]], judged: Sequence[tuple[NodeView, InterfacesFacts]]) -> str | None:
    """Return one list for all nodes; None if a name in it exists on another node that must not use it."""
    distinct = list(dict.fromkeys(name for each in sorted(names.values()) for name in each))
    present = {node.hostname: {each.name for each in facts.interfaces} for node, facts in judged}
    if any(present[host] & set(distinct) != set(own) for host, own in names.items()):
        return None
    return exact_if_needed(distinct, {name for there in present.values() for name in there})


def _find_interface(node: NodeView, name: str) -> Interface | None:
    """Return the interface with this name."""
    facts = node.interfaces()
    return next((each for each in facts.interfaces if each.name == name), None) if facts else None

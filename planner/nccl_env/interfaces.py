"""NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME: the interface for bootstrap, and for data where there is no RDMA.

Specification: NCCL src/misc/socket.cc (order of choice), src/os/linux.cc (matching; only running interfaces);
PyTorch ProcessGroupGloo (GLOO_SOCKET_IFNAME).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from planner.advice import Note, Reason, Setting
from planner.nccl_env.situation import NodeView, Situation, by_host, networks, rdma_device_of, some
from probes.interfaces.facts import Interface, InterfacesFacts

_NCCL_ORDER = "NCCL src/misc/socket.cc, ncclFindInterfaces"
UNFIT_ROLES = ("loopback", "docker", "bridge", "virtual")
"""Roles of interfaces that lead to no other node."""


def socket_ifname(case: Situation) -> Setting | Note | None:
    """NCCL_SOCKET_IFNAME, where NCCL's own order of choice would miss the right interface."""
    topic = "NCCL_SOCKET_IFNAME"
    if case.backend != "nccl":
        return None
    if case.one_node:
        return None
    if case.cxi:
        return _slingshot(topic, case)
    judged = [(node, facts) for node in case.nodes if (facts := node.interfaces()) is not None]
    if not judged:
        text = "Unknown: no probe read the network interfaces."
        return Note(topic=topic, text=text, evidence=case.unread("interfaces"))
    wanted = {node.hostname: _wanted(node, facts, sockets_carry_data=not _fast_fabric(case)) for node, facts in judged}
    if not any(wanted.values()):
        wanted = _shared_subnet(judged)
    if not any(wanted.values()):
        return _left_alone(topic, judged, case.unread_nodes(NodeView.interfaces))
    named = {host: choice for host, choice in wanted.items() if choice is not None}
    fills = {node.hostname: tuple(filter(None, (_unasked(facts),))) for node, facts in judged}
    names = {host: named[host][0] if host in named else fills[host] for host in wanted}
    value = _joined(names, judged)
    if value is None:
        text = (
            "The right interface has another name on each node and one list would catch a wrong one: set it per node: "
        )
        return Note(topic=topic, text=text + by_host((host, ",".join(each)) for host, each in names.items()))
    host, (_, rule, evidence) = next(iter(named.items()))
    if len(judged) > 1:
        evidence = f"{host}: {evidence}"
    return Setting(name=topic, value=value, reason=Reason(rule=rule, evidence=evidence, source=_NCCL_ORDER))


def _slingshot(topic: str, case: Situation) -> Setting | Note:
    """The interfaces of Slingshot's NICs by their common prefix: libfabric uses all of them, the bootstrap one."""
    found = {node.hostname: node.cxi() for node in case.nodes if node.cxi()}
    known = {node.hostname: {each.name for each in facts.interfaces} for node in case.nodes if (
        facts := node.interfaces()
    )}  # fmt: skip
    evidence = by_host((host, f"Cassini NICs {', '.join(names)}") for host, names in found.items())
    stems = {name.rstrip("0123456789") for names in found.values() for name in names}
    unseen = [host for host, names in found.items() if not set(names) <= known.get(host, set())]
    if unseen or len(stems) != 1 or not (stem := stems.pop()):
        text = "Unknown: the interfaces of Slingshot's NICs have no common name here. Name all of them (hsn on HPE's)."
        return Note(topic=topic, text=text, evidence=evidence)
    others = [
        name for host, names in known.items() for name in names - set(found.get(host, ())) if name.startswith(stem)
    ]
    value = "=" + ",".join(next(iter(found.values()))) if others else stem
    rule = (
        "NCCL unasked may take the management network for its bootstrap; the interfaces of Slingshot's NICs all share "
        "this prefix"
    )
    source = "HewlettPackard/shs-ccl-docs 438fcce (2026-04-30), ccl_env.sh; the same of CSCS and Isambard"
    return Setting(name=topic, value=value, reason=Reason(rule=rule, evidence=evidence, source=source))


def gloo_socket_ifname(case: Situation) -> Setting | Note | None:
    """GLOO_SOCKET_IFNAME on hosts without GPUs: gloo otherwise takes whatever the host name resolves to."""
    topic = "GLOO_SOCKET_IFNAME"
    if case.backend != "gloo":
        return None
    if case.one_node:
        return Note(topic=topic, text="Set nothing: the job stays on one node.")
    picks: dict[str, Interface] = {}
    for node in case.nodes:
        best = best_interface(node)
        if best is not None:
            picks[node.hostname] = best
    if unread := case.unread_nodes(NodeView.interfaces):
        return Note(topic=topic, text=f"Unknown: the network interfaces of {some(unread)} were not read.",
                    evidence=case.unread("interfaces"))  # fmt: skip
    if without := [node.hostname for node in case.nodes if node.hostname not in picks]:
        text = f"Set nothing: {some(without)} has no interface with an address besides loopback."
        return Note(topic=topic, text=text)
    names = sorted({pick.name for pick in picks.values()})
    if len(names) > 1:
        listed = by_host((host, pick.name) for host, pick in picks.items())
        return Note(topic=topic, text=f"The interface has another name on each node: set it per node: {listed}")
    pick = next(iter(picks.values()))
    rule = (
        "gloo binds to the address the host name resolves to, which is a loopback address on many distributions and "
        "leaves other nodes unable to connect: name the interface"
    )
    evidence = f"{pick.name}: {pick.role}, {', '.join(pick.addresses)}"
    source = "PyTorch torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, createDefaultDevice"
    return Setting(name=topic, value=names[0], reason=Reason(rule=rule, evidence=evidence, source=source))


def running_interfaces(facts: InterfacesFacts) -> list[Interface]:
    """Return the interfaces among which NCCL chooses: those that run and have an address."""
    return [each for each in facts.interfaces if _runs(each) and each.addresses]


def nccl_takes(facts: InterfacesFacts) -> tuple[str, ...]:
    """The interfaces NCCL takes for its socket transport with NCCL_SOCKET_IFNAME unset, in its order."""
    names = [each.name for each in running_interfaces(facts)]
    groups = (
        [name for name in names if name.startswith("ib")],
        [name for name in names if not name.startswith(("docker", "lo", "virbr"))],
        [name for name in names if name.startswith("docker")],
        [name for name in names if name.startswith("lo")],
        names,
    )
    return tuple(next((group for group in groups if group), []))


def exact_if_needed(names: Sequence[str], others: Iterable[str]) -> str:
    """The list NCCL matches by prefix; with `=` where a prefix would also catch one of the others."""
    caught = [other for other in others if other not in names and other.startswith(tuple(names))]
    return ("=" if caught else "") + ",".join(names)


def _fast_fabric(case: Situation) -> bool:
    return case.efa or case.rdma_ports


def _runs(interface: Interface) -> bool:
    return interface.running is not False and interface.up is not False


def _usable(interface: Interface) -> bool:
    fit = interface.role not in UNFIT_ROLES and interface.master is None
    return fit and _runs(interface) and bool(networks(interface))


def _unasked(facts: InterfacesFacts) -> str | None:
    return facts.nccl_choice or next(iter(nccl_takes(facts)), None)


def _rank(node: NodeView, facts: InterfacesFacts, interface: Interface) -> tuple[float, ...]:
    secondary = interface.role == "secondary"
    behind_hca = secondary and rdma_device_of(interface, node.taken_ports()) is not None
    overlay = interface.role == "pod-default"
    speed = interface.speed_bytes_per_second or 0.0
    return (not behind_hca, not secondary, overlay, -speed, interface.name != facts.default_route)


def best_interface(node: NodeView) -> Interface | None:
    """Return the interface that reaches the other nodes best; None where none does or the interfaces are unknown."""
    facts = node.interfaces()
    usable = [each for each in facts.interfaces if _usable(each)] if facts else []
    return min(usable, key=lambda each: _rank(node, facts, each), default=None) if facts else None


_Wanted = tuple[tuple[str, ...], str, str]


def _equals(node: NodeView, facts: InterfacesFacts, best: Interface) -> tuple[Interface, ...]:
    """The usable interfaces that are as good as the best one: of its kind and its speed."""
    mark = _rank(node, facts, best)[:-1]
    return tuple(each for each in facts.interfaces if _usable(each) and _rank(node, facts, each)[:-1] == mark)


def _wanted(node: NodeView, facts: InterfacesFacts, *, sockets_carry_data: bool) -> _Wanted | None:
    """(names, rule, evidence) where this node needs the variable."""
    best = best_interface(node)
    unasked = _unasked(facts)
    if best is None or unasked is None:
        return None
    current = node.interface_of(unasked)
    equals = _equals(node, facts, best) if sockets_carry_data else (best,)
    names = tuple(each.name for each in equals)
    if best.role == "secondary" and (current is None or current.role != "secondary"):
        network = f" ({best.multus_network})" if best.multus_network else ""
        device = rdma_device_of(best, node.taken_ports())
        behind = f", on RDMA device {device}" if device else ""
        rule = (
            f"NCCL unasked takes {unasked}, the pod's default network: bootstrap and any fallback to TCP would cross "
            "the cluster overlay; the secondary network is the one laid for this traffic"
        )
        more = f"; as good: {', '.join(name for name in names if name != best.name)}" if len(names) > 1 else ""
        return names, rule, f"{best.name}: secondary{network}{behind}, {', '.join(best.addresses)}{more}"
    if current is not None and not _usable(current) and best.name != unasked:
        what = (
            f"a {current.role} interface"
            if current.role in UNFIT_ROLES
            else "which has no address of its own beyond the link"
        )
        rule = f"NCCL unasked takes {unasked}, {what}: other nodes cannot reach it"
        return names, rule, f"{best.name}: {best.role}, {', '.join(best.addresses)}"
    taken = nccl_takes(facts)
    others = [each for name in taken if name not in names and (each := node.interface_of(name)) is not None]
    if sockets_carry_data and others and best.name in taken:
        rule = (
            "There is no RDMA, so NCCL opens its sockets on every interface that it finds, and one that does not reach "
            "the other nodes hangs the job (slower ones its search leaves unused): name those that carry the data"
        )
        kept = ", ".join(names)
        left = ", ".join(f"{each.name} ({each.role}{_speed(each)})" for each in others)
        return names, rule, f"{kept}: {best.role}{_speed(best)}; NCCL would add {left}"
    return None


def _speed(interface: Interface) -> str:
    rate = interface.speed_bytes_per_second
    return f", {rate * 8 / 1e9:g} Gb/s" if rate else ""


def _shared_subnet(judged: Sequence[tuple[NodeView, InterfacesFacts]]) -> dict[str, _Wanted | None]:
    """Where the nodes' own choices share no subnet although other interfaces of all nodes do: those interfaces."""
    chosen = [_subnets(facts, _unasked(facts)) for _, facts in judged]
    common = set.intersection(*[_subnets(facts, None) for _, facts in judged])
    if len(judged) < 2 or set.intersection(*chosen) or not common:
        return {}
    subnet = min(common)
    rule = "NCCL unasked takes interfaces in different subnets on these nodes; this one all of them share"
    found: dict[str, _Wanted | None] = {}
    for node, facts in judged:
        name = next(each.name for each in facts.interfaces if subnet in _subnets(facts, each.name))
        found[node.hostname] = ((name,), rule, f"{name}: {subnet}; NCCL would take {_unasked(facts)}")
    return found


def _subnets(facts: InterfacesFacts, name: str | None) -> set[str]:
    """Subnets of one usable interface, or of all."""
    return {
        str(network)
        for each in facts.interfaces
        if _usable(each) and name in (None, each.name)
        for network in networks(each)
    }


def _joined(names: Mapping[str, tuple[str, ...]], judged: Sequence[tuple[NodeView, InterfacesFacts]]) -> str | None:
    """One list for all nodes, or None where a node has an interface of another node's name that it must not use."""
    distinct = list(dict.fromkeys(name for each in sorted(names.values()) for name in each))
    present = {node.hostname: {each.name for each in facts.interfaces} for node, facts in judged}
    if any(present[host] & set(distinct) != set(own) for host, own in names.items()):
        return None
    return exact_if_needed(distinct, {name for there in present.values() for name in there})


def _left_alone(topic: str, judged: Sequence[tuple[NodeView, InterfacesFacts]], unread: Sequence[str]) -> Note:
    picks = by_host((node.hostname, _unasked(facts) or "none") for node, facts in judged)
    more = f"; not read on {some(unread)}" if unread else ""
    return Note(
        topic=topic, text="Set nothing: NCCL's own order of choice ends at a fit interface.", evidence=picks + more
    )

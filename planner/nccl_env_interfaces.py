"""NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME: the interface for bootstrap, and for data where there is no RDMA.

Specification: NCCL src/misc/socket.cc (order of choice), src/os/linux.cc (matching; only running interfaces);
PyTorch ProcessGroupGloo (GLOO_SOCKET_IFNAME).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.advice import Note, Reason, Setting
from planner.nccl_env_situation import NodeView, Situation, by_host, networks, rdma_device_of
from probes.interfaces import Interface, InterfacesFacts

_NCCL_ORDER = "NCCL src/misc/socket.cc, ncclFindInterfaces"
_UNFIT = ("loopback", "docker", "bridge", "virtual")


def socket_ifname(case: Situation) -> Setting | Note | None:
    """NCCL_SOCKET_IFNAME, where NCCL's own order of choice would miss the right interface."""
    topic = "NCCL_SOCKET_IFNAME"
    if case.backend != "nccl":
        return None
    if case.one_node:
        return Note(topic=topic, text="Set nothing: the job stays on one node, and any interface serves the bootstrap.")
    judged = [(node, facts) for node in case.nodes if (facts := node.interfaces()) is not None]
    if not judged:
        return Note(topic=topic, text="Unknown: no probe read the network interfaces.")
    wanted = {node.hostname: _wanted(node, facts, sockets_carry_data=not _fast_fabric(case)) for node, facts in judged}
    if not any(wanted.values()):
        wanted = _shared_subnet(judged)
    if not any(wanted.values()):
        return _left_alone(topic, judged)
    named = {host: choice for host, choice in wanted.items() if choice is not None}
    fills = {node.hostname: _unasked(facts) for node, facts in judged}
    names = {host: named[host][0] if host in named else fills[host] for host in wanted}
    value = _joined([name for name in names.values() if name], judged)
    if value is None:
        text = (
            "The right interface has another name on each node and one list would catch a wrong one: set it per node: "
        )
        return Note(topic=topic, text=text + by_host((host, str(name)) for host, name in names.items()))
    host, (_, rule, evidence) = next(iter(named.items()))
    if len(judged) > 1:
        evidence = f"{host}: {evidence}"
    return Setting(name=topic, value=value, reason=Reason(rule=rule, evidence=evidence, source=_NCCL_ORDER))


def gloo_socket_ifname(case: Situation) -> Setting | Note | None:
    """GLOO_SOCKET_IFNAME on hosts without GPUs: gloo otherwise takes whatever the host name resolves to."""
    topic = "GLOO_SOCKET_IFNAME"
    if case.backend != "gloo":
        return None
    if case.one_node:
        return Note(topic=topic, text="Set nothing: the job stays on one node.")
    picks: dict[str, Interface] = {}
    for node in case.nodes:
        facts = node.interfaces()
        best = _best(node, facts) if facts else None
        if best is not None:
            picks[node.hostname] = best
    if not picks or len(picks) < len(case.nodes):
        return Note(topic=topic, text="Set nothing: no interface with an address besides loopback was found.")
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


def nccl_takes(facts: InterfacesFacts) -> tuple[str, ...]:
    """The interfaces NCCL takes for its socket transport with NCCL_SOCKET_IFNAME unset, in its order."""
    names = [each.name for each in facts.interfaces if _runs(each) and each.addresses]
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
    fit = interface.role not in _UNFIT and interface.master is None
    return fit and _runs(interface) and bool(networks(interface))


def _unasked(facts: InterfacesFacts) -> str | None:
    return facts.nccl_choice or next(iter(nccl_takes(facts)), None)


def _rank(node: NodeView, facts: InterfacesFacts, interface: Interface) -> tuple[float, ...]:
    secondary = interface.role == "secondary"
    behind_hca = secondary and rdma_device_of(interface, node.taken_ports()) is not None
    overlay = interface.role == "pod-default"
    speed = interface.speed_bytes_per_second or 0.0
    return (not behind_hca, not secondary, overlay, -speed, interface.name != facts.default_route)


def _best(node: NodeView, facts: InterfacesFacts) -> Interface | None:
    usable = [each for each in facts.interfaces if _usable(each)]
    return min(usable, key=lambda each: _rank(node, facts, each), default=None)


def _wanted(node: NodeView, facts: InterfacesFacts, *, sockets_carry_data: bool) -> tuple[str, str, str] | None:
    """(name, rule, evidence) where this node needs the variable."""
    best = _best(node, facts)
    unasked = _unasked(facts)
    if best is None or unasked is None:
        return None
    current = node.interface_of(unasked)
    if best.role == "secondary" and (current is None or current.role != "secondary"):
        network = f" ({best.multus_network})" if best.multus_network else ""
        device = rdma_device_of(best, node.taken_ports())
        behind = f", on RDMA device {device}" if device else ""
        rule = (
            f"NCCL unasked takes {unasked}, the pod's default network: bootstrap and any fallback to TCP would cross "
            "the cluster overlay; the secondary network is the one laid for this traffic"
        )
        return best.name, rule, f"{best.name}: secondary{network}{behind}, {', '.join(best.addresses)}"
    if current is not None and not _usable(current) and best.name != unasked:
        what = (
            f"a {current.role} interface"
            if current.role in _UNFIT
            else "which has no address of its own beyond the link"
        )
        rule = f"NCCL unasked takes {unasked}, {what}: other nodes cannot reach it"
        return best.name, rule, f"{best.name}: {best.role}, {', '.join(best.addresses)}"
    taken = nccl_takes(facts)
    if sockets_carry_data and len(taken) > 1 and best.name in taken:
        rule = (
            "There is no RDMA, so NCCL spreads its data over every interface it finds; the slowest sets the pace and "
            "one that does not reach the other nodes hangs the job: name the fastest"
        )
        speed = f", {best.speed_bytes_per_second * 8 / 1e9:g} Gb/s" if best.speed_bytes_per_second else ""
        others = ", ".join(name for name in taken if name != best.name)
        return best.name, rule, f"{best.name}: {best.role}{speed}; NCCL would add {others}"
    return None


def _shared_subnet(judged: Sequence[tuple[NodeView, InterfacesFacts]]) -> dict[str, tuple[str, str, str] | None]:
    """Where the nodes' own choices share no subnet although other interfaces of all nodes do: those interfaces."""
    chosen = [_subnets(facts, _unasked(facts)) for _, facts in judged]
    common = set.intersection(*[_subnets(facts, None) for _, facts in judged])
    if len(judged) < 2 or set.intersection(*chosen) or not common:
        return {}
    subnet = min(common)
    rule = "NCCL unasked takes interfaces in different subnets on these nodes; this one all of them share"
    found: dict[str, tuple[str, str, str] | None] = {}
    for node, facts in judged:
        name = next(each.name for each in facts.interfaces if subnet in _subnets(facts, each.name))
        found[node.hostname] = (name, rule, f"{name}: {subnet}; NCCL would take {_unasked(facts)}")
    return found


def _subnets(facts: InterfacesFacts, name: str | None) -> set[str]:
    """Subnets of one usable interface, or of all."""
    return {
        str(network)
        for each in facts.interfaces
        if _usable(each) and name in (None, each.name)
        for network in networks(each)
    }


def _joined(names: list[str], judged: Sequence[tuple[NodeView, InterfacesFacts]]) -> str | None:
    """One list for all nodes, or None where a node has an interface of another node's name that it must not use."""
    distinct = sorted(set(names))
    present = [{each.name for each in facts.interfaces} for _, facts in judged]
    if len(distinct) > 1 and any(len(there & set(distinct)) > 1 for there in present):
        return None
    return exact_if_needed(distinct, {name for there in present for name in there})


def _left_alone(topic: str, judged: Sequence[tuple[NodeView, InterfacesFacts]]) -> Note:
    picks = by_host((node.hostname, _unasked(facts) or "none") for node, facts in judged)
    return Note(topic=topic, text="Set nothing: NCCL's own order of choice ends at a fit interface.", evidence=picks)

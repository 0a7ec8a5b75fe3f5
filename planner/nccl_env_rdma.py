"""The RDMA devices: NCCL_IB_HCA, NCCL_CROSS_NIC, and NCCL_NET for EFA.

Specification: NCCL docs/userguide/source/env.rst, src/transport/net_ib/init.cc; aws-ofi-nccl.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.advice import Note, Reason, Setting
from planner.nccl_env_hcas import PortChoice, choose_ports, missing_ports
from planner.nccl_env_interfaces import exact_if_needed
from planner.nccl_env_situation import NodeView, PortView, Situation, by_host, networks, together
from topology.graph import NicNode

_ENV_RST = "NCCL docs/userguide/source/env.rst"
_INIT_CC = "NCCL src/transport/net_ib/init.cc"


def ib_hca(case: Situation) -> Setting | Note | None:
    """NCCL_IB_HCA, where NCCL unasked would also take a port that the job must not use."""
    topic = "NCCL_IB_HCA"
    if case.backend != "nccl":
        return None
    if not case.rdma_ports:
        return _no_hca(topic, case)
    if case.one_node:
        return Note(topic=topic, text="Set nothing: the job stays on one node and opens no HCA.")
    choices = {node.hostname: choose_ports(node) for node in case.nodes if node.taken_ports()}
    needed = [(host, choice) for host, choice in choices.items() if choice.dropped or choice.secondary]
    if not needed:
        return _found_by_itself(topic, case, choices)
    values = {host: hca_list(_view(case, host), choice) for host, choice in choices.items()}
    if len(set(values.values())) > 1:
        listed = by_host((host, value) for host, value in values.items())
        return Note(topic=topic, text=f"The HCAs have other names on each node: set it per node: {listed}")
    host, choice = needed[0]
    value = next(iter(values.values()))
    exact = " ('=' asks for exact names: a prefix would also take the others)" if value.startswith("=") else ""
    down = _returning(_view(case, host), choice)
    evidence = _hca_evidence(choice, down)
    reason = Reason(rule=_hca_rule(choice) + exact, evidence=evidence, source=f"{_INIT_CC}; {_ENV_RST}")
    return Setting(name=topic, value=value, reason=reason)


def _found_by_itself(topic: str, case: Situation, choices: dict[str, PortChoice]) -> Note:
    count = by_host((host, _names(choice.keep)) for host, choice in choices.items())
    far = {f"{name} ({why})": host for host, choice in choices.items() for name, why in choice.far.items()}
    if not far:
        text = "Set nothing: NCCL finds the HCAs by itself, and every one it finds belongs to the training fabric."
        return Note(topic=topic, text=text, evidence=count)
    host = next(iter(far.values()))
    text = (
        "Set nothing: NCCL takes for each GPU the HCA nearest to it and so leaves the storage and management ports "
        f"alone. To pin it all the same: {topic}={hca_list(_view(case, host), choices[host])}."
    )
    return Note(topic=topic, text=text, evidence=f"{count}; not used: {', '.join(far)}")


def _no_hca(topic: str, case: Situation) -> Note:
    if case.efa:
        text = "Set nothing: EFA is reached through the aws-ofi-nccl plugin, NCCL's own IB transport never opens it."
        return Note(topic=topic, text=text, evidence=_efa_devices(case))
    if failed := case.unread("rdma"):
        return Note(topic=topic, text="Unknown: the RDMA ports could not be read.", evidence=failed)
    nics = [(node.hostname, nic.name) for node in case.nodes if not node.snapshot for nic in _nics(node)]
    if nics:
        text = "Unknown: the topology names NICs, but nobody read their ports on the host."
        return Note(topic=topic, text=text, evidence=by_host(together(nics)))
    if all(node.rdma() is None for node in case.nodes):
        return Note(topic=topic, text="Set nothing: no RDMA device was found, so between nodes NCCL uses TCP sockets.")
    down = [(node.hostname, view.name) for node in case.nodes for view in missing_ports(node)]
    if down:
        text = "Set nothing: no RDMA port is ACTIVE, and naming one does not bring it up. NCCL will use TCP sockets."
        return Note(topic=topic, text=text, evidence=by_host(together(down)))
    return Note(topic=topic, text="Set nothing: no RDMA port NCCL could use was found; between nodes it uses TCP.")


def _efa_devices(case: Situation) -> str:
    return by_host((node.hostname, f"{node.efa_count()} EFA devices") for node in case.nodes)


def _nics(node: NodeView) -> Sequence[NicNode]:
    return node.topology.nics if node.topology else ()


def _hca_rule(choice: PortChoice) -> str:
    if choice.secondary:
        return (
            "The list of devices a pod sees may hold every HCA of the host, but only the one behind the pod's own "
            "network has a GID it can use: name it"
        )
    return "NCCL takes every ACTIVE port, also those outside the training fabric: name the ones that belong to it"


def _hca_evidence(choice: PortChoice, down: Sequence[PortView]) -> str:
    parts = [f"{interface} is on {device}" for device, interface in choice.secondary.items()]
    parts += [f"{_names(choice.keep)}: {_fabric(choice.keep)}"]
    parts += [f"left out {name}: {why}" for name, why in (choice.dropped | choice.far).items()]
    parts += [f"{view.name} is {view.port.state}: NCCL passes over it until it is mended" for view in down]
    return "; ".join(parts)


def _fabric(ports: Sequence[PortView]) -> str:
    layers = sorted({view.port.link_layer or "?" for view in ports})
    rates = sorted({f"{(view.port.rate_bytes_per_second or 0) * 8 / 1e9:g} Gb/s" for view in ports})
    return f"{'/'.join(layers)} {'/'.join(rates)}"


def _names(ports: Sequence[PortView]) -> str:
    return ", ".join(view.name for view in ports)


def _view(case: Situation, hostname: str) -> NodeView:
    return next(node for node in case.nodes if node.hostname == hostname)


def hca_list(node: NodeView, choice: PortChoice) -> str:
    """The value of NCCL_IB_HCA: device names, a port number only where another port of the device is left out.

    A port of the same kind that is down is named too: NCCL passes over it now and takes it again once it is mended.
    """
    ports = node.verbs_ports()
    keep = {view.name for view in (*choice.keep, *_returning(node, choice))}
    unwanted = {view.device.name for view in ports if view.name not in keep}
    entries: list[str] = []
    for view in ports:
        entry = view.name if view.device.name in unwanted else view.device.name
        if view.name in keep and entry not in entries:
            entries.append(entry)
    kept = [view.device.name for view in ports if view.name in keep]
    exact = exact_if_needed(kept, {view.device.name for view in ports}).startswith("=")
    return ("=" if exact else "") + ",".join(entries)


def _returning(node: NodeView, choice: PortChoice) -> list[PortView]:
    models = {view.device.model for view in choice.keep} - {None}
    if choice.secondary:
        return []
    return [view for view in missing_ports(node) if view.device.model in models]


def silent_ports(case: Situation) -> Note | None:
    """A port that is down costs a rail and no message: NCCL never lists it."""
    if case.backend != "nccl" or not case.rdma_ports:
        return None
    down = [(node.hostname, f"{view.name} {view.port.state}") for node in case.nodes for view in missing_ports(node)]
    if not down:
        return None
    text = "NCCL passes over ports that are not ACTIVE without a message; if a rail is missing, mend the port."
    return Note(topic="NCCL_IB_HCA", text=text, evidence=by_host(together(down)))


def cross_nic(case: Situation) -> Setting | Note | None:
    """NCCL_CROSS_NIC=0, where each rail is a network of its own."""
    topic = "NCCL_CROSS_NIC"
    if case.backend != "nccl" or case.one_node or not case.rdma_ports:
        return None
    for node in case.nodes:
        keep = choose_ports(node).keep
        subnets = _rail_subnets(node, keep)
        if len(keep) > 1 and len(subnets) == len(keep) and len(set(subnets.values())) == len(keep):
            rule = (
                "Each rail is an IP subnet of its own: a ring that changes rails between nodes would need routing "
                "between them, which no probe can see, and gains nothing where every GPU has its rail"
            )
            evidence = ", ".join(f"{name}: {subnet}" for name, subnet in subnets.items())
            return Setting(name=topic, value="0", reason=Reason(rule=rule, evidence=evidence, source=_ENV_RST))
    if max(len(choose_ports(node).keep) for node in case.nodes) > 1:
        text = (
            "Set nothing: the default 2 keeps each ring on its rail and crosses only where that is faster. Set 0 only "
            "on a rail-optimised fabric whose rails are not connected."
        )
        return Note(topic=topic, text=text)
    return None


def net_plugin(case: Situation) -> Setting | Note | None:
    """NCCL_NET, where NCCL would fall back, or has fallen back, to TCP in silence: above all on EFA."""
    topic = "NCCL_NET"
    fell_back = case.evidence is not None and case.evidence.inter_node_transport == "Socket"
    if case.backend != "nccl" or not (case.efa or (fell_back and case.rdma_ports)):
        return None
    if case.one_node:
        return Note(topic=topic, text="Set nothing: the job stays on one node and needs no network.")
    if not case.efa:
        rule = (
            "An earlier run went over TCP although RDMA ports are ACTIVE; naming the network makes the cause an error "
            "at start: libibverbs missing in the image, NCCL_IB_DISABLE, or an NCCL_IB_HCA that matches nothing"
        )
        ports = by_host((node.hostname, _names(node.taken_ports())) for node in case.nodes if node.taken_ports())
        reason = Reason(rule=rule, evidence=f"the log shows channels over Socket; {ports}", source=_ENV_RST)
        return Setting(name=topic, value="IB", reason=reason)
    if not (case.multi_node or fell_back):
        text = (
            "Set nothing: NCCL loads aws-ofi-nccl when it is in the image, and the plugin sets by itself what it needs "
            "(NCCL_BUFFSIZE, NCCL_P2P_NET_CHUNKSIZE, NCCL_TUNER_PLUGIN, NCCL_TOPO_FILE). Between nodes, "
            "NCCL_NET='AWS Libfabric' makes a missing plugin an error instead of a silent fall-back to TCP."
        )
        return Note(topic=topic, text=text)
    rule = (
        "EFA works only through the aws-ofi-nccl plugin; without it NCCL falls back to TCP in silence. Naming the "
        "network makes a missing plugin an error at start. Leave alone what the plugin sets by itself"
    )
    evidence = _efa_devices(case) + ("; the log shows channels over Socket" if fell_back else "")
    source = f"{_ENV_RST}; aws-ofi-nccl (accepts the name 'AWS Libfabric' in every version)"
    return Setting(name=topic, value="AWS Libfabric", reason=Reason(rule=rule, evidence=evidence, source=source))


def _rail_subnets(node: NodeView, ports: Sequence[PortView]) -> dict[str, str]:
    found: dict[str, str] = {}
    for view in ports:
        if view.port.link_layer != "Ethernet":
            continue
        interface = node.interface_of(view.port.netdev) if view.port.netdev else None
        subnets = networks(interface) if interface else ()
        if subnets:
            found[view.name] = str(subnets[0])
    return found

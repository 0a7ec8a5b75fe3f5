"""The RDMA devices: NCCL_IB_HCA, NCCL_CROSS_NIC, and NCCL_NET for EFA and Slingshot.

Specification: NCCL docs/userguide/source/env.rst, src/transport/net_ib/init.cc; aws-ofi-nccl.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.advice import Note, Reason, Setting
from planner.forecast.machines import machine
from planner.nccl_env.hcas import (
    PortChoice,
    choose_ports,
    is_software,
    is_virtual_function,
    missing_ports,
    subnet_prefix,
    undecided,
)
from planner.nccl_env.interfaces import exact_if_needed
from planner.nccl_env.platforms import recognise
from planner.nccl_env.situation import RDMA_KINDS, NodeView, PortView, Situation, by_host, port_subnet, together
from topology.graph import NicNode
from topology.reference import reference_of

_ENV_RST = "NCCL docs/userguide/source/env.rst"
_INIT_CC = "NCCL src/transport/net_ib/init.cc"


def ib_hca(case: Situation) -> Setting | Note | None:
    """NCCL_IB_HCA, where NCCL unasked would also take a port that the job must not use."""
    topic = "NCCL_IB_HCA"
    if case.backend != "nccl" or case.one_node:
        return None
    if not case.rdma_ports:
        return _no_hca(topic, case)
    choices = {node.hostname: choose_ports(node) for node in case.nodes if node.taken_ports()}
    if (unsure := _undecided(topic, choices)) is not None:
        return unsure
    needed = [(host, choice) for host, choice in choices.items() if choice.dropped or _not_of_this_pod(case, host)]
    if not needed:
        return _found_by_itself(topic, case, choices)
    values = {host: hca_value(_view(case, host), choice) for host, choice in choices.items()}
    host, choice = needed[0]
    if None in values.values():
        text = (
            "Unknown: a visible device must be left out, but the ones to use are virtual functions, whose names differ "
            "from pod to pod: a list made here would match nothing in the next pod, and NCCL would go over TCP in "
            "silence. Isolate the devices (rdma system set netns exclusive), or set it inside each pod."
        )
        return Note(topic=topic, text=text, evidence=_hca_evidence(choice, ()))
    if len(set(values.values())) > 1:
        listed = by_host((host, str(value)) for host, value in values.items())
        return Note(topic=topic, text=f"The HCAs have other names on each node: set it per node: {listed}")
    value = str(next(iter(values.values())))
    marks = (("^", "('^' leaves out the ones named: names of virtual functions differ from pod to pod)"),
             ("=", "('=' asks for exact names: a prefix would also take the others)"))  # fmt: skip
    exact = next((f" {meaning}" for mark, meaning in marks if value.startswith(mark)), "")
    evidence = _hca_evidence(choice, _returning(_view(case, host), choice))
    reason = Reason(rule=_hca_rule(choice) + exact, evidence=evidence, source=f"{_INIT_CC}; {_ENV_RST}")
    return Setting(name=topic, value=value, reason=reason)


def _undecided(topic: str, choices: dict[str, PortChoice]) -> Note | None:
    """Where the ports alone do not say which fabric is for training, or whether one is."""
    for host, choice in choices.items():
        if fabrics := undecided(choice.keep):
            text = (
                "Unknown: these ports are on fabrics of equal size that do not reach each other, and nothing here says "
                f"which of them is for training: name the ports of that one in {topic}. Where the job is to use all, "
                "the same rail must be on the same fabric on every node, and NCCL_CROSS_NIC=0 keeps each ring on it."
            )
            listed = "; ".join(f"{fabric}: {', '.join(names)}" for fabric, names in fabrics.items())
            return Note(topic=topic, text=text, evidence=by_host([(host, listed)]))
    software = [(host, _names(choice.keep)) for host, choice in choices.items() if all(map(is_software, choice.keep))]
    if software:
        text = (
            "Unknown whether it is wanted: the only RDMA is in software (rxe, siw). NCCL takes it in place of TCP, the "
            "CPU moves the data, and no NIC reaches GPU memory. NCCL_NET=Socket leaves it alone."
        )
        return Note(topic=topic, text=text, evidence=by_host(software))
    return None


def _not_of_this_pod(case: Situation, host: str) -> tuple[PortView, ...]:
    """Ports that are down and that no network of this pod is on: up again, NCCL would take them and fail."""
    node = _view(case, host)
    choice = choose_ports(node)
    if not choice.secondary or any(is_virtual_function(view) for view in choice.keep):
        return ()
    return tuple(view for view in missing_ports(node) if view.device.name not in choice.secondary)


def hca_value(node: NodeView, choice: PortChoice) -> str | None:
    """NCCL_IB_HCA for one node; None where the ports to use are virtual functions that no lasting name tells apart.

    Of virtual functions only a prefix is given, or the physical functions to leave out: both hold in every pod.
    """
    if not any(is_virtual_function(view) for view in choice.keep):
        return hca_list(node, choice)
    kept = {view.device.name for view in choice.keep}
    others = {view.device.name for view in node.verbs_ports()} - kept
    stems = {name.rstrip("0123456789") for name in kept}
    if len(stems) == 1 and (stem := stems.pop()) and not any(name.startswith(stem) for name in others):
        return stem
    unwanted = [view for view in node.verbs_ports() if view.name in choice.dropped]
    if any(is_virtual_function(view) or view.device.name in kept for view in unwanted):
        return None
    return "^=" + ",".join(dict.fromkeys(view.device.name for view in unwanted))


def _found_by_itself(topic: str, case: Situation, choices: dict[str, PortChoice]) -> Note:
    """Nothing needs leaving out; whether all ports lead to the training fabric one node cannot tell."""
    count = by_host((host, _names(choice.keep)) for host, choice in choices.items())
    far = {f"{name} ({why})": host for host, choice in choices.items() for name, why in choice.far.items()}
    host = next(iter(far.values()), next(iter(choices)))
    node, choice = _view(case, host), choices[host]
    if far:
        text = (
            "Set nothing: NCCL takes for each GPU the HCA nearest to it and so leaves alone the ports that are near "
            f"none. To pin it all the same: {topic}={hca_value(node, choice) or 'inside each pod'}."
        )
        return Note(topic=topic, text=text, evidence=f"{count}; not used: {', '.join(far)}")
    text = "Set nothing: NCCL finds these HCAs by itself, and nothing seen here sets one of them apart."
    if choice.secondary and any(map(is_virtual_function, choice.keep)):
        text += " Virtual functions have other names in another pod: a list would match nothing there."
    evidence = count
    if len(choice.keep) > 1 and not _fits_a_known_machine(node, choice):
        text += (
            " Whether all of them lead to the training fabric cannot be told from one node: ask which of them carry "
            "storage; if one does, name the others."
        )
        evidence += _setting_apart(node, choice)
    return Note(topic=topic, text=text, evidence=evidence)


def _fits_a_known_machine(node: NodeView, choice: PortChoice) -> bool:
    """A recognised machine with as many RDMA devices as its maker gives it for the training fabric."""
    count = len({view.device.name for view in choice.keep})
    row = reference_of(node.topology) if node.topology else None
    if row is not None and row.nics == count:
        return True
    platform = recognise(node)
    known = [machine(name) for name in platform.catalogue] if platform else []
    return any((each.nics, each.gpus) == (count, node.gpu_count()) for each in known)


def _setting_apart(node: NodeView, choice: PortChoice) -> str:
    """What may answer the question: ports that share a GPU, subnets, neighbours on the wire."""
    parts = []
    near: dict[tuple[str, ...], list[str]] = {}
    for entry in node.topology.nearest_nic if node.topology else ():
        near.setdefault(entry.nics, []).append(entry.gpu)
    crowded = [(nics, gpus) for nics, gpus in near.items() if len(nics) > len(gpus)]
    if crowded and len(crowded) < len(near):
        parts += [f"{' and '.join(nics)} are equally near to {', '.join(gpus)}" for nics, gpus in crowded[:4]]
    subnets = {view.device.name: str(subnet) for view in choice.keep if (subnet := port_subnet(node, view))}
    if len(set(subnets.values())) > 1:
        parts.append("subnets: " + ", ".join(f"{name} {subnet}" for name, subnet in subnets.items()))
    facts = node.interfaces()
    heard: dict[str | None, list[str]] = {}
    for each in facts.interfaces if facts else ():
        if each.neighbour:
            heard.setdefault(each.master or each.name, []).append(each.neighbour)  # a bond has its members' wires
    wires = [
        f"{view.device.name} {' and '.join(found)}" for view in choice.keep if (found := heard.get(view.port.netdev))
    ]
    if wires:
        parts.append("neighbours by LLDP: " + ", ".join(wires))
    return "".join(f"; {part}" for part in parts)


def _no_hca(topic: str, case: Situation) -> Note:
    if case.cxi:
        text = (
            "Set nothing: Slingshot's NICs are no verbs devices. They are reached through libfabric (provider cxi) and "
            "aws-ofi-nccl, which NCCL_NET names."
        )
        return Note(topic=topic, text=text, evidence=by_host((n.hostname, ", ".join(n.cxi())) for n in case.nodes))
    if case.efa:
        text = "Set nothing: EFA is reached through the aws-ofi-nccl plugin, NCCL's own IB transport never opens it."
        return Note(topic=topic, text=text, evidence=_efa_devices(case))
    if failed := case.unread("rdma"):
        return Note(topic=topic, text="Unknown: the RDMA ports could not be read.", evidence=failed)
    nics = [(node.hostname, nic.name) for node in case.nodes if not node.snapshot for nic in _nics(node)]
    if nics:
        text = "Unknown: the topology names NICs, but nobody read their ports on the host."
        return Note(topic=topic, text=text, evidence=by_host(together(nics)))
    if case.sockets:
        return Note(topic=topic, text="Set nothing: the job goes over TCP, whatever RDMA ports there are.")
    if case.cluster.inter_node_transport in ("rdma", "efa"):
        return Note(
            topic=topic, text="Unknown: RDMA between the nodes is assumed, and no RDMA device of theirs is known."
        )
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
        count = len(choice.secondary)
        behind = "the one behind the pod's own network has" if count == 1 else f"the {count} behind its networks have"
        return f"The list of devices that this pod sees holds others of the host, but only {behind} a GID it can use"
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
    if case.backend != "nccl" or case.one_node or not case.rdma_ports:
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
        subnets = {view.name: subnet for view in keep if (subnet := port_subnet(node, view))}
        prefixes = {view.name: prefix for view in keep if (prefix := subnet_prefix(view))}
        if len(keep) > 1 and len(set(prefixes.values())) == len(keep):
            rule = (
                "Each rail is an InfiniBand subnet of its own: a ring that changes rails between nodes would need a "
                "router between them, which no probe can see"
            )
            evidence = ", ".join(f"{name}: subnet prefix {prefix}" for name, prefix in prefixes.items())
            return Setting(name=topic, value="0", reason=Reason(rule=rule, evidence=evidence, source=_ENV_RST))
        if len(keep) > 1 and len(subnets) == len(keep) and len(set(subnets.values())) == len(keep):
            rule = (
                "Each rail is an IP subnet of its own: a ring that changes rails between nodes would need routing "
                "between them, which no probe can see"
            )
            if len(keep) >= node.gpu_count() > 0:
                rule += ", and gains nothing where every GPU has its rail"
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
    if case.backend != "nccl" or case.one_node:
        return None
    if case.sockets:
        rule = (
            "The job goes over TCP, and nodes have RDMA devices that NCCL, or its plugin, would take unasked: naming "
            "the network keeps every rank on sockets, as the forecast has it"
        )
        reason = Reason(rule=rule, evidence="network between the nodes: TCP", source=_ENV_RST)
        return Setting(name=topic, value="Socket", reason=reason)
    if case.cluster.inter_node_transport in ("rdma", "efa") and not (case.rdma_ports or _any_rdma_nic(case)):
        text = (
            "Unknown: the network between the nodes is taken for RDMA, and no RDMA device of theirs is known, so none "
            "can be named. Without one NCCL goes over TCP in silence; NCCL_NET=IB makes that an error at start."
        )
        return Note(topic=topic, text=text)
    if (unseen := _efa_unseen(topic, case)) is not None:
        return unseen
    if not (case.efa or case.cxi or (fell_back and case.rdma_ports)):
        return None
    if case.cxi:
        return _libfabric_on_slingshot(topic, case)
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


def _any_rdma_nic(case: Situation) -> bool:
    return case.efa or case.cxi or any(nic.kind in RDMA_KINDS for node in case.nodes for nic in _nics(node))


def _efa_unseen(topic: str, case: Situation) -> Note | None:
    """An instance type that has EFA, seen from where there is none: a pod that did not ask for the devices."""
    for node in case.nodes:
        row, info = recognise(node), node.hostinfo()
        if row is None or row.cloud != "aws" or info is None or node.efa_count() or case.unread("rdma"):
            continue
        text = (
            "Unknown: this instance type has EFA, and no EFA device is visible here: without it NCCL goes over TCP. "
            "Ask for them in the pod (vpc.amazonaws.com/efa), or attach them to the instance."
        )
        return Note(topic=topic, text=text, evidence=f"{node.hostname}: product {info.product}")
    return None


def _libfabric_on_slingshot(topic: str, case: Situation) -> Setting:
    rule = (
        "Slingshot is fast only through libfabric's cxi provider and the aws-ofi-nccl plugin; without it NCCL goes "
        "over TCP in silence. Naming the network makes a missing plugin an error at start. Not for jobs of one node"
    )
    evidence = by_host((node.hostname, f"Cassini NICs {', '.join(node.cxi())}") for node in case.nodes if node.cxi())
    source = "HewlettPackard/shs-ccl-docs 438fcce (2026-04-30), ccl_env.sh; the same of CSCS and Isambard"
    return Setting(name=topic, value="AWS Libfabric", reason=Reason(rule=rule, evidence=evidence, source=source))

"""Rules about RDMA devices: NCCL_IB_HCA, NCCL_CROSS_NIC, and NCCL_NET for EFA and Slingshot.

Specification: NCCL docs/userguide/source/env.rst, src/transport/net_ib/init.cc; aws-ofi-nccl.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hardware.units import gigabits
from planner.forecast.machines import machine
from planner.nccl_env.hcas import PortChoice, choose_ports, is_software, is_virtual_function, subnet_prefix
from planner.nccl_env.interfaces import exact_if_needed
from planner.nccl_env.nodes import RDMA_KINDS, NodeView, PortView, port_subnet
from planner.nccl_env.platforms import recognise
from planner.nccl_env.situation import Note, Setting, Situation, by_host, note, setting, together
from topology.derive import reference_of
from topology.graph import NicNode


def ib_hca(case: Situation) -> Setting | Note | None:
    """NCCL_IB_HCA, if NCCL would otherwise use a port that the job must not use."""
    if not case.rdma_ports:
        return _note_no_hca(case)
    choices = {node.hostname: choose_ports(node) for node in case.nodes if node.default_ports()}
    if (unsure := _note_undecided(choices)) is not None:
        return unsure
    needed = [(host, choice) for host, choice in choices.items() if choice.dropped or _list_other_pods(case, host)]
    if not needed:
        return _note_automatic(case, choices)
    values = {host: hca_value(_get_view(case, host), choice) for host, choice in choices.items()}
    host, choice = needed[0]
    if None in values.values():
        return note("hca.virtual_functions", _describe_choice(choice, ()))
    if len(set(values.values())) > 1:
        listed = by_host((host, str(value)) for host, value in values.items())
        return note("hca.names_differ", listed=listed)
    value = str(next(iter(values.values())))
    marks = {"^": ("hca.left_out",), "=": ("hca.exact",)}
    evidence = _describe_choice(choice, _list_returning(_get_view(case, host), choice))
    count = len(choice.secondary)
    key = "hca.every_port" if not count else "hca.of_the_pod" if count == 1 else "hca.of_the_pods_networks"
    return setting(key, value, evidence, *marks.get(value[:1], ()), count=count)


def _note_undecided(choices: dict[str, PortChoice]) -> Note | None:
    """Report ports that do not show which fabric is for training, or whether one is."""
    for host, choice in choices.items():
        if fabrics := _list_fabrics(choice.chosen):
            listed = "; ".join(f"{fabric}: {', '.join(names)}" for fabric, names in fabrics.items())
            return note("hca.two_fabrics", by_host([(host, listed)]))
    software = [
        (host, _join(choice.chosen)) for host, choice in choices.items() if all(map(is_software, choice.chosen))
    ]
    if software:
        return note("hca.software", by_host(software))
    return None


def _list_fabrics(ports: Sequence[PortView]) -> dict[str, list[str]]:
    """Return fabrics of equal size that cannot reach each other, with their ports; empty if there is one fabric.

    Ports that are each in their own InfiniBand or IP subnet are rails, not fabrics.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for view in ports:
        layer, prefix = view.port.link_layer or "?", subnet_prefix(view)
        found[f"{layer} subnet {prefix}" if prefix else layer].append(view.name)
    layers = {view.port.link_layer for view in ports}
    shared = any(len(names) > 1 for names in found.values())
    return dict(found) if len(layers) > 1 or (len(found) > 1 and shared) else {}


def _missing_ports(node: NodeView) -> tuple[PortView, ...]:
    """Return ports that NCCL ignores without a message because they are not ACTIVE."""
    return tuple(view for view in node.verbs_ports() if view.port.state is not None and view.port.state != "ACTIVE")


def _list_other_pods(case: Situation, host: str) -> tuple[PortView, ...]:
    """Return ports that are down and on no network of this pod: once up, NCCL would use them and fail."""
    node = _get_view(case, host)
    choice = choose_ports(node)
    if not choice.secondary or any(is_virtual_function(view) for view in choice.chosen):
        return ()
    return tuple(view for view in _missing_ports(node) if view.device.name not in choice.secondary)


def hca_value(node: NodeView, choice: PortChoice) -> str | None:
    """Return NCCL_IB_HCA for one node; None if it would have to name virtual functions, whose names are not stable.

    For virtual functions it is a prefix, or a list of excluded physical functions: both are valid in every pod.
    """
    if not any(is_virtual_function(view) for view in choice.chosen):
        return hca_list(node, choice)
    chosen_devices = {view.device.name for view in choice.chosen}
    others = {view.device.name for view in node.verbs_ports()} - chosen_devices
    stems = {name.rstrip("0123456789") for name in chosen_devices}
    if len(stems) == 1 and (stem := stems.pop()) and not any(name.startswith(stem) for name in others):
        return stem
    excluded = [view for view in node.verbs_ports() if view.name in choice.dropped]
    if any(is_virtual_function(view) or view.device.name in chosen_devices for view in excluded):
        return None
    return "^=" + ",".join(dict.fromkeys(view.device.name for view in excluded))


def _note_automatic(case: Situation, choices: dict[str, PortChoice]) -> Note:
    """Report that no port needs to be excluded. A single node cannot show whether all ports are on one fabric."""
    count = by_host((host, _join(choice.chosen)) for host, choice in choices.items())
    far = {f"{name} ({why})": host for host, choice in choices.items() for name, why in choice.far.items()}
    host = next(iter(far.values()), next(iter(choices)))
    node, choice = _get_view(case, host), choices[host]
    if far:
        return note(
            "hca.nearest", f"{count}; not used: {', '.join(far)}", pinned=hca_value(node, choice) or "inside each pod"
        )
    more = ["hca.other_names"] if choice.secondary and any(map(is_virtual_function, choice.chosen)) else []
    if len(choice.chosen) > 1 and not _is_known_machine(node, choice):
        more.append("hca.storage_unknown")
    return note("hca.automatic", count, *more)


def _is_known_machine(node: NodeView, choice: PortChoice) -> bool:
    """Whether this is a known machine with exactly the vendor's number of RDMA devices for training."""
    count = len({view.device.name for view in choice.chosen})
    row = reference_of(node.topology) if node.topology else None
    if row is not None and row.nics == count:
        return True
    platform = recognise(node)
    known = [machine(name) for name in platform.catalogue] if platform else []
    return any((each.nics, each.gpus) == (count, node.gpu_count()) for each in known)


def _note_no_hca(case: Situation) -> Note:
    if case.cxi:
        return note("hca.slingshot", by_host((n.hostname, ", ".join(n.cxi())) for n in case.nodes))
    if case.efa:
        return note("hca.efa", _describe_efa(case))
    if failed := case.unread("rdma"):
        return note("hca.unread", failed)
    nics = [(node.hostname, nic.name) for node in case.nodes if not node.snapshot for nic in _get_nics(node)]
    if nics:
        return note("hca.not_probed", by_host(together(nics)))
    if case.sockets:
        return note("hca.tcp_job")
    if case.cluster.inter_node_transport in ("rdma", "efa"):
        return note("hca.assumed")
    if all(node.rdma() is None for node in case.nodes):
        return note("hca.no_device")
    down = [(node.hostname, view.name) for node in case.nodes for view in _missing_ports(node)]
    if down:
        return note("hca.down", by_host(together(down)))
    return note("hca.no_port")


def _describe_efa(case: Situation) -> str:
    return by_host((node.hostname, f"{node.efa_count()} EFA devices") for node in case.nodes)


def _get_nics(node: NodeView) -> Sequence[NicNode]:
    return node.topology.nics if node.topology else ()


def _describe_choice(choice: PortChoice, down: Sequence[PortView]) -> str:
    parts = [f"{interface} is on {device}" for device, interface in choice.secondary.items()]
    parts += [f"{_join(choice.chosen)}: {_describe_fabric(choice.chosen)}"]
    parts += [f"left out {name}: {why}" for name, why in (choice.dropped | choice.far).items()]
    parts += [f"{view.name} is {view.port.state}: NCCL ignores it until it is repaired" for view in down]
    return "; ".join(parts)


def _describe_fabric(ports: Sequence[PortView]) -> str:
    layers = sorted({view.port.link_layer or "?" for view in ports})
    rates = sorted({gigabits(view.port.rate_bytes_per_second or 0) for view in ports})
    return f"{'/'.join(layers)} {'/'.join(rates)}"


def _join(ports: Sequence[PortView]) -> str:
    return ", ".join(view.name for view in ports)


def _get_view(case: Situation, hostname: str) -> NodeView:
    return next(node for node in case.nodes if node.hostname == hostname)


def hca_list(node: NodeView, choice: PortChoice) -> str:
    """Return the value of NCCL_IB_HCA: device names, with port numbers only if another port is excluded.

    Ports of the same kind that are down are included: NCCL ignores them now, and uses them once they are repaired.
    """
    ports = node.verbs_ports()
    chosen = {view.name for view in (*choice.chosen, *_list_returning(node, choice))}
    excluded = {view.device.name for view in ports if view.name not in chosen}
    entries: list[str] = []
    for view in ports:
        entry = view.name if view.device.name in excluded else view.device.name
        if view.name in chosen and entry not in entries:
            entries.append(entry)
    chosen_devices = [view.device.name for view in ports if view.name in chosen]
    exact = exact_if_needed(chosen_devices, {view.device.name for view in ports}).startswith("=")
    return ("=" if exact else "") + ",".join(entries)


def _list_returning(node: NodeView, choice: PortChoice) -> list[PortView]:
    models = {view.device.model for view in choice.chosen} - {None}
    if choice.secondary:
        return []
    return [view for view in _missing_ports(node) if view.device.model in models]


def silent_ports(case: Situation) -> Note | None:
    """Report a port that is down: NCCL loses a rail without a message."""
    if not case.rdma_ports:
        return None
    down = [(node.hostname, f"{view.name} {view.port.state}") for node in case.nodes for view in _missing_ports(node)]
    if not down:
        return None
    return note("hca.silent", by_host(together(down)))


def cross_nic(case: Situation) -> Setting | Note | None:
    """NCCL_CROSS_NIC=0, if every rail is a separate network."""
    if not case.rdma_ports:
        return None
    for node in case.nodes:
        chosen = choose_ports(node).chosen
        subnets = {view.name: subnet for view in chosen if (subnet := port_subnet(node, view))}
        prefixes = {view.name: prefix for view in chosen if (prefix := subnet_prefix(view))}
        if len(chosen) > 1 and len(set(prefixes.values())) == len(chosen):
            evidence = ", ".join(f"{name}: subnet prefix {prefix}" for name, prefix in prefixes.items())
            return setting("cross_nic.infiniband_rails", "0", evidence)
        if len(chosen) > 1 and len(subnets) == len(chosen) and len(set(subnets.values())) == len(chosen):
            more = ["cross_nic.gains_nothing"] if len(chosen) >= node.gpu_count() > 0 else []
            evidence = ", ".join(f"{name}: {subnet}" for name, subnet in subnets.items())
            return setting("cross_nic.ip_rails", "0", evidence, *more)
    if max(len(choose_ports(node).chosen) for node in case.nodes) > 1:
        return note("cross_nic.automatic")
    return None


def net_plugin(case: Situation) -> Setting | Note | None:
    """NCCL_NET, if NCCL would fall back to TCP without a message; mainly for EFA."""
    if case.sockets:
        return setting("net.tcp_job", "Socket", "network between the nodes: TCP")
    seen = case.rdma_ports or case.efa or case.cxi
    seen = seen or any(nic.kind in RDMA_KINDS for node in case.nodes for nic in _get_nics(node))
    if case.cluster.inter_node_transport in ("rdma", "efa") and not seen:
        return note("net.assumed")
    if (unseen := _note_unseen_efa(case)) is not None:
        return unseen
    if not (case.efa or case.cxi):
        return None
    if case.cxi:
        nics = by_host((node.hostname, f"Cassini NICs {', '.join(node.cxi())}") for node in case.nodes if node.cxi())
        return setting("net.slingshot", "AWS Libfabric", nics)
    return setting("net.efa", "AWS Libfabric", _describe_efa(case), *([] if case.multi_node else ["net.efa_nodes"]))


def _note_unseen_efa(case: Situation) -> Note | None:
    """Report an instance type with EFA but without visible EFA devices: the pod did not request them."""
    for node in case.nodes:
        row, info = recognise(node), node.hostinfo()
        if row is None or row.cloud != "aws" or info is None or node.efa_count() or case.unread("rdma"):
            continue
        return note("net.efa_unseen", f"{node.hostname}: product {info.product}")
    return None

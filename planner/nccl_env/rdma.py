"""Rules about RDMA devices: NCCL_IB_HCA, NCCL_CROSS_NIC, NCCL_NET for EFA and Slingshot; for RoCE, GID and class.

Specification: NCCL docs/userguide/source/env.rst, src/transport/net_ib/{init,connect}.cc (ncclIbGetGidIndex);
aws-ofi-nccl.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from hardware.machines import catalogue
from hardware.units import gigabits
from planner.nccl_env import version_text
from planner.nccl_env.devices import (
    PortChoice,
    choose_ports,
    is_software,
    is_unaddressed,
    is_virtual_function,
    make_exact_list,
    subnet_prefix,
)
from planner.nccl_env.situation import (
    RDMA_KINDS,
    NodeView,
    Note,
    PortView,
    Setting,
    Situation,
    by_host,
    gid_address,
    gid_addresses,
    list_published,
    networks,
    note,
    port_subnet,
    recognise,
    setting,
)
from probes.hostinfo.probe import HostinfoFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts
from topology.derive import find_reference


def ib_hca(case: Situation) -> Setting | Note | None:
    """NCCL_IB_HCA, if NCCL would otherwise use a port that the job must not use."""
    if not case.rdma_ports:
        return _note_no_hca(case)
    nodes = {node.hostname: node for node in case.nodes if node.default_ports()}
    choices = {host: choose_ports(node) for host, node in nodes.items()}
    if (unsure := _note_undecided(choices)) is not None:
        return unsure
    needed = [host for host, choice in choices.items() if choice.dropped or _list_other_pods(nodes[host], choice)]
    if not needed:
        return _note_automatic(nodes, choices)
    values = {host: hca_value(nodes[host], choice) for host, choice in choices.items()}
    choice = choices[needed[0]]
    if None in values.values():
        return note("hca.virtual_functions", _describe_choice(choice, ()))
    if len(set(values.values())) > 1:
        return note("hca.names_differ", listed=by_host((host, str(value)) for host, value in values.items()))
    value = str(next(iter(values.values())))
    marks = {"^": ("hca.left_out",), "=": ("hca.exact",)}
    evidence = _describe_choice(choice, _list_returning(nodes[needed[0]], choice))
    count = len(choice.secondary)
    key = "hca.every_port" if not count else "hca.of_the_pod" if count == 1 else "hca.of_the_pods_networks"
    return setting(key, value, evidence, *marks.get(value[:1], ()), count=count)


def _note_undecided(choices: dict[str, PortChoice]) -> Note | None:
    """Report ports that do not show which fabric is for training, or whether one is."""
    for host, choice in choices.items():
        if fabrics := _list_fabrics(choice.chosen):
            listed = "; ".join(f"{fabric}: {', '.join(names)}" for fabric, names in fabrics.items())
            return note("hca.two_fabrics", by_host([(host, listed)]))
    software = [(host, choice.chosen) for host, choice in choices.items() if all(map(is_software, choice.chosen))]
    return note("hca.software", by_host((host, _join(ports)) for host, ports in software)) if software else None


def _list_fabrics(ports: Sequence[PortView]) -> dict[str, list[str]]:
    """Return fabrics of equal size that cannot reach each other, with their ports; empty if there is one fabric.

    Ports that are each in their own InfiniBand or IP subnet are rails, not fabrics.
    """
    fabrics: dict[str, list[str]] = defaultdict(list)
    for view in ports:
        layer, prefix = view.port.link_layer or "?", subnet_prefix(view)
        fabrics[f"{layer} subnet {prefix}" if prefix else layer].append(view.name)
    layers = {view.port.link_layer for view in ports}
    shared = any(len(names) > 1 for names in fabrics.values())
    return dict(fabrics) if len(layers) > 1 or (len(fabrics) > 1 and shared) else {}


def _missing_ports(node: NodeView) -> tuple[PortView, ...]:
    """Return ports that NCCL ignores without a message because they are not ACTIVE."""
    return tuple(view for view in node.verbs_ports() if view.port.state is not None and view.port.state != "ACTIVE")


def _list_other_pods(node: NodeView, choice: PortChoice) -> tuple[PortView, ...]:
    """Return ports that are down and on no network of this pod: once up, NCCL would use them and fail."""
    if not choice.secondary or any(is_virtual_function(view) for view in choice.chosen):
        return ()
    return tuple(view for view in _missing_ports(node) if view.device.name not in choice.secondary)


def hca_value(node: NodeView, choice: PortChoice) -> str | None:
    """Return NCCL_IB_HCA for one node; None if it would have to name a pod's virtual functions, which are not stable.

    For those it is a prefix, or a list of excluded physical functions: both are valid in every pod. The virtual
    functions of a virtual machine have the same names in every machine of its type.
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
        pci = node.facts(PciFacts)
        is_guest = pci is not None and pci.hypervisor is not None and pci.container is None
        return hca_list(node, choice) if is_guest else None
    return "^=" + ",".join(dict.fromkeys(view.device.name for view in excluded))


def _note_automatic(nodes: dict[str, NodeView], choices: dict[str, PortChoice]) -> Note:
    """Report that no port needs to be excluded. A single node cannot show whether all ports are on one fabric."""
    count = by_host((host, _join(choice.chosen)) for host, choice in choices.items())
    far = {f"{name} ({reason})": host for host, choice in choices.items() for name, reason in choice.far.items()}
    host = next(iter(far.values()), next(iter(choices)))
    node, choice = nodes[host], choices[host]
    if far:
        pinned = hca_value(node, choice) or "inside each pod"
        return note("hca.nearest", f"{count}; not used: {', '.join(far)}", pinned=pinned)
    extra = ["hca.other_names"] if choice.secondary and any(map(is_virtual_function, choice.chosen)) else []
    if len(choice.chosen) > 1 and not _is_known_machine(node, choice):
        extra.append("hca.storage_unknown")
    return note("hca.automatic", count, *extra)


def _is_known_machine(node: NodeView, choice: PortChoice) -> bool:
    """Whether this is a known machine with exactly the vendor's number of RDMA devices for training."""
    count = len({view.device.name for view in choice.chosen})
    row = find_reference(node.topology) if node.topology else None
    if row is not None and row.nics == count:
        return True
    names = platform.catalogue if (platform := recognise(node)) else ()
    return any((each.nics, each.gpus) == (count, node.gpu_count()) for each in catalogue() if each.name in names)


def _note_no_hca(case: Situation) -> Note:
    if case.cxi:
        return note("hca.slingshot", by_host((n.hostname, ", ".join(n.cxi())) for n in case.nodes))
    if case.efa:
        return note("hca.efa", _describe_efa(case))
    if failed := case.unread("rdma"):
        return note("hca.unread", failed)
    if nics := [(node.hostname, nic.name) for node in case.nodes if not node.snapshot for nic in node.nics]:
        return note("hca.not_probed", by_host(nics))
    if case.sockets:
        return note("hca.tcp_job")
    if case.cluster.inter_node_transport in ("rdma", "efa"):
        return note("hca.assumed")
    if all(node.facts(RdmaFacts) is None for node in case.nodes):
        return note("hca.no_device")
    if down := [(node.hostname, view.name) for node in case.nodes for view in _missing_ports(node)]:
        return note("hca.down", by_host(down))
    return note("hca.no_port")


def _describe_efa(case: Situation) -> str:
    return by_host((node.hostname, f"{node.efa_count()} EFA devices") for node in case.nodes)


def _describe_choice(choice: PortChoice, down: Sequence[PortView]) -> str:
    parts = [f"{interface} is on {device}" for device, interface in choice.secondary.items()]
    layers = sorted({view.port.link_layer or "?" for view in choice.chosen})
    rates = sorted({gigabits(view.port.rate_bytes_per_second or 0) for view in choice.chosen})
    parts += [f"{_join(choice.chosen)}: {'/'.join(layers)} {'/'.join(rates)}"]
    parts += [f"left out {name}: {reason}" for name, reason in (choice.dropped | choice.far).items()]
    parts += [f"{view.name} is {view.port.state}: NCCL ignores it until it is repaired" for view in down]
    return "; ".join(parts)


def _join(ports: Sequence[PortView]) -> str:
    return ", ".join(view.name for view in ports)


def hca_list(node: NodeView, choice: PortChoice) -> str:
    """Return the value of NCCL_IB_HCA: device names, with port numbers only if another port is excluded.

    Ports of the same kind that are down are included: NCCL ignores them now, and uses them once they are repaired.
    """
    ports = node.verbs_ports()
    names = {view.name for view in (*choice.chosen, *_list_returning(node, choice))}
    excluded = {view.device.name for view in ports if view.name not in names}
    used = [view for view in ports if view.name in names]
    entries = dict.fromkeys(view.name if view.device.name in excluded else view.device.name for view in used)
    exact = make_exact_list([view.device.name for view in used], {view.device.name for view in ports}).startswith("=")
    return ("=" if exact else "") + ",".join(entries)


def _list_returning(node: NodeView, choice: PortChoice) -> list[PortView]:
    models = set() if choice.secondary else {view.device.model for view in choice.chosen} - {None}
    return [view for view in _missing_ports(node) if view.device.model in models]


def cross_nic(case: Situation) -> Setting | Note | None:
    """NCCL_CROSS_NIC=0, if every rail is a separate network."""
    if not case.rdma_ports:
        return None
    for node in case.nodes:
        ports = choose_ports(node).chosen
        subnets = {view.name: subnet for view in ports if (subnet := port_subnet(node, view))}
        prefixes = {view.name: prefix for view in ports if (prefix := subnet_prefix(view))}
        if len(ports) > 1 and len(set(prefixes.values())) == len(ports):
            evidence = ", ".join(f"{name}: subnet prefix {prefix}" for name, prefix in prefixes.items())
            return setting("cross_nic.infiniband_rails", "0", evidence)
        if len(ports) > 1 and len(subnets) == len(ports) and len(set(subnets.values())) == len(ports):
            extra = ["cross_nic.gains_nothing"] if len(ports) >= node.gpu_count() > 0 else []
            evidence = ", ".join(f"{name}: {subnet}" for name, subnet in subnets.items())
            return setting("cross_nic.ip_rails", "0", evidence, *extra)
    if max(len(choose_ports(node).chosen) for node in case.nodes) > 1:
        return note("cross_nic.automatic")
    return None


def net_plugin(case: Situation) -> Setting | Note | None:
    """NCCL_NET, if NCCL would fall back to TCP without a message; mainly for EFA."""
    if case.sockets:
        return setting("net.tcp_job", "Socket", "network between the nodes: TCP")
    has_rdma = case.rdma_ports or case.efa or case.cxi
    has_rdma = has_rdma or any(nic.kind in RDMA_KINDS for node in case.nodes for nic in node.nics)
    if case.cluster.inter_node_transport in ("rdma", "efa") and not has_rdma:
        return note("net.assumed")
    for node in case.nodes:  # an instance type with EFA but without EFA devices: the pod did not request them
        row, info = recognise(node), node.facts(HostinfoFacts)
        if row and row.cloud == "aws" and info and not node.efa_count() and not case.unread("rdma"):
            return note("net.efa_unseen", f"{node.hostname}: product {info.product}")
    if case.cxi:
        nics = by_host((node.hostname, f"Cassini NICs {', '.join(node.cxi())}") for node in case.nodes if node.cxi())
        return setting("net.slingshot", "AWS Libfabric", nics)
    if case.efa:
        extra = [] if case.multi_node else ["net.efa_nodes"]
        return setting("net.efa", "AWS Libfabric", _describe_efa(case), *extra)
    return None


# RoCE. InfiniBand needs none of these variables.

_DYNAMIC_GID = (2, 21, 0)  # env.rst: NCCL_IB_GID_INDEX is not needed since 2.21

# Default class of priority 3 in NVIDIA's RoCE configuration of cards and switches: DSCP 26, which is 106 in the traffic
# class field with the ECN bit. Other priorities have no default; each site chooses its code points.
_NVIDIA_PRIORITY, _NVIDIA_CLASS = 3, 106


def ib_gid_index(case: Situation) -> Setting | Note | None:
    """NCCL_IB_GID_INDEX: only needed before 2.21, where NCCL would use index 0."""
    roce = _list_roce_ports(case)
    if not roce:
        return None
    if bare := [view for view in roce if is_unaddressed(view)]:
        return note("gid_index.link_local", _list_ports(bare, lambda view: view.name))
    older = case.older_than(_DYNAMIC_GID)
    if several := _find_several_subnets(case):
        index, addresses = "NCCL_IB_GID_INDEX, the entry's index", "NCCL_IB_ADDR_RANGE, a range that covers it"
        return note("gid_index.several_subnets", by_host(several), lever=index if older is True else addresses)
    indices = set(map(_find_v2_ipv4_index, roce))
    all_known = None not in indices
    listed = _list_ports(roce, lambda view: f"{view.name} index {_find_v2_ipv4_index(view)}")
    if unread := [view for view in roce if not view.port.gids_known]:
        return note("gid_index.unread", _list_ports(unread, lambda view: view.name))
    version = version_text(case.nccl_version) if case.nccl_version else "version unknown"
    if older is not True:  # the address family or RoCE v1: handled by the rules below
        return note("gid_index.automatic", f"NCCL {version}; RoCE v2 IPv4 GID: {listed}") if all_known else None
    if not all_known:
        return note("gid_index.old_nccl_without_ipv4", _list_ports(roce, lambda view: f"{view.name} {_families(view)}"))
    if len(indices) != 1:
        return note("gid_index.differs", listed)
    return setting("gid_index.old_nccl", str(indices.pop()), listed, version=version)


def ib_addr_family(case: Situation) -> Setting | Note | None:
    """NCCL_IB_ADDR_FAMILY, if not every port has the IPv4 address that NCCL looks for, but the fabric has IPv6."""
    roce = [view for view in _list_roce_ports(case) if view.port.gids and not is_unaddressed(view)]
    without = [view for view in roce if not _has_family(view, 4)]
    if not without or case.older_than(_DYNAMIC_GID) is True:
        return None
    if not all(_has_family(view, 6) for view in roce):
        return note("addr_family.mixed", _list_ports(roce, _families))
    evidence = _list_ports(without, lambda view: f"{view.name} {len(view.port.gids)} GIDs, none IPv4 of RoCE v2")
    return setting("addr_family.ipv6", "AF_INET6", evidence, *([] if case.nccl_version else ["gid_index.read_since"]))


def ib_roce_version(case: Situation) -> Setting | None:
    """NCCL_IB_ROCE_VERSION_NUM, if the ports only support RoCE v1."""
    roce = [view for view in _list_roce_ports(case) if any(gid.type for gid in view.port.gids)]
    has_v2 = any(gid.type == "RoCE v2" for view in roce for gid in view.port.gids)
    if not roce or has_v2 or case.older_than(_DYNAMIC_GID) is True:
        return None
    evidence = _list_ports(roce, lambda view: view.name)
    return setting("roce_version.v1", "1", evidence, *([] if case.nccl_version else ["gid_index.read_since"]))


def ib_traffic_class(case: Situation) -> Setting | Note | None:
    """NCCL_IB_TC: data must use the traffic class that the fabric protects; the default is 0, best effort.

    The class depends on the fabric's configuration: use a published value, or that of the ports, or add a note.
    """
    roce = _list_roce_ports(case)
    if not roce:
        return None
    if (published := list_published(case).get("NCCL_IB_TC")) is not None:
        return published
    classes = {view.port.traffic_class for view in roce if view.port.traffic_class}
    lossless = {priority for view in roce for priority in view.port.pfc_priorities or ()}
    pfc_configs = {view.port.pfc_priorities for view in roce if view.port.pfc_priorities is not None}
    if _uses_pcp(roce):
        return None  # the class is not used: `ib_service_level`
    if len(classes) == 1:
        evidence = _list_ports(roce, lambda view: f"{view.name} traffic class {view.port.traffic_class}")
        (tclass,) = classes
        priority, extra = tclass >> 5, []  # DSCP >> 3
        if lossless and priority not in lossless:
            extra, evidence = ["traffic_class.unprotected"], f"{evidence}; {_list_ports(roce, _describe_protected)}"
        protected = _join_numbers(lossless)
        return setting("traffic_class.one", str(tclass), evidence, *extra, priority=priority, protected=protected)
    if len(pfc_configs) > 1 and not classes:
        return note("traffic_class.pfc_differs", _list_ports(roce, _describe_protected))
    if len(lossless) == 1 and not classes:
        return _choose_class(lossless.pop(), roce)
    if classes or lossless:
        evidence = f"traffic classes {sorted(classes)}, PFC priorities {sorted(lossless)}"
        return note("traffic_class.classes_differ", evidence)
    if all(view.port.pfc_priorities is None and view.port.traffic_class is None for view in roce):
        return note("traffic_class.unread")
    return note("traffic_class.lossy")


def _choose_class(priority: int, roce: Sequence[PortView]) -> Setting | Note:
    evidence = _list_ports(roce, _describe_protected)
    if priority == _NVIDIA_PRIORITY and all(_is_nvidia(view) for view in roce):
        return setting("traffic_class.nvidia", str(_NVIDIA_CLASS), evidence, priority=priority)
    mapped = sorted({code for view in roce for code, to in view.port.dscp_priorities or () if to == priority})
    if mapped:
        evidence += f"; the ports map DSCP {_join_numbers(mapped)} to priority {priority}"
    return note("traffic_class.dscp_unknown", evidence, priority=priority)


def ib_service_level(case: Situation) -> Setting | Note | None:
    """NCCL_IB_SL, if the ports classify by the priority bits of the VLAN tag instead of by DSCP."""
    roce = _list_roce_ports(case)
    lossless = {priority for view in roce for priority in view.port.pfc_priorities or ()}
    if not _uses_pcp(roce) or not lossless or "NCCL_IB_TC" in list_published(case):
        return None
    evidence = _list_ports(roce, lambda view: f"{_describe_protected(view)}, trust pcp")
    if len(lossless) > 1:
        return note("service_level.several", evidence)
    priority = lossless.pop()
    if not all(_is_tagged(node, view) for node in case.nodes for view in choose_ports(node).chosen):
        return note("service_level.no_vlan", evidence, priority=priority)
    return setting("service_level.of_priority", str(priority), evidence, priority=priority)


def _uses_pcp(roce: Sequence[PortView]) -> bool:
    return bool(roce) and all(view.port.trust == "pcp" for view in roce)


def _is_tagged(node: NodeView, view: PortView) -> bool:
    names = {gid.netdev for gid in view.port.gids if gid.netdev and gid.type == "RoCE v2"} | {view.port.netdev}
    return any(each.kind == "vlan" and (each.name in names or each.parent in names) for each in node.links)


def _is_nvidia(view: PortView) -> bool:
    model = view.device.model or ""
    return view.device.driver == "mlx5_core" or model.startswith(("ConnectX", "BlueField", "MT4"))


def _describe_protected(view: PortView) -> str:
    priorities = view.port.pfc_priorities
    if priorities is None:
        return f"{view.name} does not report its flow control"
    return f"{view.name} flow control on {f'priority {_join_numbers(priorities)}' if priorities else 'no priority'}"


def _join_numbers(priorities: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(priorities)))


def _list_roce_ports(case: Situation) -> list[PortView]:
    """Return the RoCE ports that the job will use."""
    return [view for node in case.nodes for view in choose_ports(node).chosen if view.port.link_layer == "Ethernet"]


def _list_ports(ports: Iterable[PortView], text: Callable[[PortView], str]) -> str:
    return by_host((view.hostname, text(view)) for view in ports)


def _families(view: PortView) -> str:
    versions = sorted({address.version for address in gid_addresses(view)})
    return f"{view.name} {' and '.join(f'IPv{version}' for version in versions) or 'none of RoCE v2'}"


def _find_v2_ipv4_index(view: PortView) -> int | None:
    v2 = [gid for gid in view.port.gids if gid.type == "RoCE v2"]
    return min((gid.index for gid in v2 if isinstance(gid_address(gid), ipaddress.IPv4Address)), default=None)


def _has_family(view: PortView, version: int) -> bool:
    """Whether NCCL finds an address of this IP version: for RoCE v2, or v1 if the port supports only v1."""
    v2 = any(gid.type == "RoCE v2" for gid in view.port.gids)
    return any(address.version == version for address in gid_addresses(view, "RoCE v2" if v2 else None))


def _find_several_subnets(case: Situation) -> list[tuple[str, str]]:
    """Return ports whose RoCE v2 IPv4 addresses are in several subnets of the host's interfaces."""
    ports = []
    for node in case.nodes:
        subnets = [subnet for each in node.links for subnet in networks(each)]
        for view in choose_ports(node).chosen:
            own = {a: s for a in gid_addresses(view) if a.version == 4 for s in subnets if a in s}
            if view.port.link_layer == "Ethernet" and len(set(own.values())) > 1:
                ports.append((node.hostname, f"{view.name} {' and '.join(f'{a} in {s}' for a, s in own.items())}"))
    return ports

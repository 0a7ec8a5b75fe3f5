"""The RDMA variables: NCCL_IB_HCA, GID selection, traffic class, NCCL_CROSS_NIC, and NCCL_NET for EFA.

Specification: NCCL docs/userguide/source/env.rst, src/transport/net_ib/{init,connect}.cc; aws-ofi-nccl.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from planner.advice import Note, Reason, Setting
from planner.nccl_env_hcas import PortChoice, choose_ports, missing_ports
from planner.nccl_env_interfaces import exact_if_needed
from planner.nccl_env_situation import NodeView, PortView, Situation, gid_address, networks
from planner.nccl_names import version_text
from topology.graph import NicNode

_ENV_RST = "NCCL docs/userguide/source/env.rst"
_INIT_CC = "NCCL src/transport/net_ib/init.cc"
_DYNAMIC_GID = (2, 21, 0)  # env.rst: NCCL_IB_GID_INDEX needs no setting since 2.21


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
    needed = [choice for choice in choices.values() if choice.dropped or choice.secondary]
    if not needed:
        count = ", ".join(f"{host}: {_names(choice.keep)}" for host, choice in choices.items())
        text = "Set nothing: NCCL finds the HCAs by itself, and every one it finds belongs to the training fabric."
        return Note(topic=topic, text=text, evidence=count)
    values = {host: hca_list(_view(case, host), choice) for host, choice in choices.items()}
    if len(set(values.values())) > 1:
        listed = "; ".join(f"{host} {value}" for host, value in values.items())
        return Note(topic=topic, text=f"The HCAs have other names on each node: set it per node: {listed}")
    choice = needed[0]
    value = next(iter(values.values()))
    exact = " ('=' asks for exact names: a prefix would also take the others)" if value.startswith("=") else ""
    reason = Reason(rule=_hca_rule(choice) + exact, evidence=_hca_evidence(choice), source=f"{_INIT_CC}; {_ENV_RST}")
    return Setting(name=topic, value=value, reason=reason)


def _no_hca(topic: str, case: Situation) -> Note:
    if case.efa:
        text = "Set nothing: EFA is reached through the aws-ofi-nccl plugin, NCCL's own IB transport never opens it."
        count = ", ".join(f"{node.hostname}: {node.efa_count()} EFA devices" for node in case.nodes)
        return Note(topic=topic, text=text, evidence=count)
    nics = [f"{node.hostname}: {nic.name}" for node in case.nodes if not node.snapshot for nic in _nics(node)]
    if nics:
        text = "Unknown: the topology names NICs, but nobody read their ports on the host."
        return Note(topic=topic, text=text, evidence=", ".join(nics))
    if all(node.rdma() is None for node in case.nodes):
        return Note(topic=topic, text="Set nothing: no RDMA device was found, so between nodes NCCL uses TCP sockets.")
    down = [view.name for node in case.nodes for view in missing_ports(node)]
    if down:
        text = "Set nothing: no RDMA port is ACTIVE, and naming one does not bring it up. NCCL will use TCP sockets."
        return Note(topic=topic, text=text, evidence=", ".join(down))
    return Note(topic=topic, text="Set nothing: no RDMA port NCCL could use was found; between nodes it uses TCP.")


def _nics(node: NodeView) -> Sequence[NicNode]:
    return node.topology.nics if node.topology else ()


def _hca_rule(choice: PortChoice) -> str:
    if choice.secondary:
        return (
            "The list of devices a pod sees may hold every HCA of the host, but only the one behind the pod's own "
            "network has a GID it can use: name it"
        )
    return "NCCL takes every ACTIVE port; these are the ports of the training fabric"


def _hca_evidence(choice: PortChoice) -> str:
    parts = [f"{interface} is on {device}" for device, interface in choice.secondary.items()]
    parts += [f"{_names(choice.keep)}: {_fabric(choice.keep)}"]
    parts += [f"left out {name}: {why}" for name, why in choice.dropped.items()]
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
    """The value of NCCL_IB_HCA: device names, a port number only where another port of the device is left out."""
    keep = {view.name for view in choice.keep}
    unwanted = {view.device.name for view in node.verbs_ports() if view.name not in keep}
    entries: list[str] = []
    for view in choice.keep:
        entry = view.name if view.device.name in unwanted else view.device.name
        if entry not in entries:
            entries.append(entry)
    kept = [view.device.name for view in choice.keep]
    others = {view.device.name for view in node.verbs_ports()} - set(kept)
    exact = exact_if_needed(kept, others).startswith("=")
    return ("=" if exact else "") + ",".join(entries)


def silent_ports(case: Situation) -> Note | None:
    """A port that is down costs a rail and no message: NCCL never lists it."""
    if case.backend != "nccl" or not case.rdma_ports:
        return None
    down = [f"{node.hostname}: {view.name} {view.port.state}" for node in case.nodes for view in missing_ports(node)]
    if not down:
        return None
    text = "NCCL passes over ports that are not ACTIVE without a message; if a rail is missing, mend the port."
    return Note(topic="NCCL_IB_HCA", text=text, evidence=", ".join(down))


def ib_gid_index(case: Situation) -> Setting | Note | None:
    """NCCL_IB_GID_INDEX: only before 2.21, where NCCL would take index 0."""
    topic = "NCCL_IB_GID_INDEX"
    roce = _roce(case)
    if not roce:
        return None
    older = case.older_than(_DYNAMIC_GID)
    if older is False:
        text = (
            "Set nothing: since 2.21 NCCL finds the RoCE v2 GID itself, and a fixed index breaks where tables differ."
        )
        return Note(topic=topic, text=text, evidence=f"NCCL {version_text(case.nccl_version or ())}")
    indices = {view.name: _v2_ipv4_index(view) for view in roce}
    known = {index for index in indices.values() if index is not None}
    listed = ", ".join(f"{name}: {index}" for name, index in indices.items())
    if older is None:
        text = "Set nothing with NCCL 2.21 or later, which finds the GID itself; an older NCCL takes index 0 (RoCE v1)."
        return Note(topic=topic, text=text, evidence=f"NCCL version unknown; RoCE v2 IPv4 index {listed}")
    if len(known) != 1 or None in indices.values():
        text = "The index of the RoCE v2 IPv4 GID is not the same on every port: set it per node, or use NCCL 2.21."
        return Note(topic=topic, text=text, evidence=listed)
    version = version_text(case.nccl_version or ())
    rule = f"NCCL {version} is older than 2.21 and takes GID index 0, which is RoCE v1: name the RoCE v2 IPv4 entry"
    return Setting(name=topic, value=str(known.pop()), reason=Reason(rule=rule, evidence=listed, source=_ENV_RST))


def ib_addr_family(case: Situation) -> Setting | None:
    """NCCL_IB_ADDR_FAMILY, where the fabric has IPv6 addresses only and NCCL looks for IPv4."""
    roce = [view for view in _roce(case) if view.port.gids]
    if not roce or case.older_than(_DYNAMIC_GID) is not False:
        return None
    if any(_v2_ipv4_index(view) is not None for view in roce) or not all(_v2_ipv6(view) for view in roce):
        return None
    rule = "NCCL looks for an IPv4 GID; the RoCE ports have IPv6 GIDs only"
    evidence = ", ".join(f"{view.name}: {len(view.port.gids)} GIDs, none IPv4" for view in roce)
    source = f"{_ENV_RST}; NCCL src/transport/net_ib/connect.cc, ncclIbGetGidIndex"
    return Setting(
        name="NCCL_IB_ADDR_FAMILY", value="AF_INET6", reason=Reason(rule=rule, evidence=evidence, source=source)
    )


def ib_roce_version(case: Situation) -> Setting | None:
    """NCCL_IB_ROCE_VERSION_NUM, where the ports know RoCE v1 only."""
    roce = [view for view in _roce(case) if any(gid.type for gid in view.port.gids)]
    if not roce or case.older_than(_DYNAMIC_GID) is not False:
        return None
    if any(gid.type == "RoCE v2" for view in roce for gid in view.port.gids):
        return None
    rule = "NCCL looks for RoCE v2; the ports have RoCE v1 GIDs only, which one layer-2 segment can use"
    evidence = ", ".join(view.name for view in roce)
    return Setting(
        name="NCCL_IB_ROCE_VERSION_NUM", value="1", reason=Reason(rule=rule, evidence=evidence, source=_ENV_RST)
    )


def ib_traffic_class(case: Situation) -> Setting | Note | None:
    """NCCL_IB_TC: data must ride in the class the fabric protects; unset it is 0, best effort."""
    topic = "NCCL_IB_TC"
    roce = _roce(case)
    if not roce:
        return None
    classes = {view.port.traffic_class for view in roce if view.port.traffic_class}
    lossless = {priority for view in roce for priority in view.port.pfc_priorities or ()}
    if len(classes) == 1:
        value = str(classes.pop())
        evidence = ", ".join(f"{view.name}: traffic class {view.port.traffic_class}" for view in roce)
        rule = "The ports are configured for one traffic class; NCCL unasked marks its packets 0, best effort"
        return Setting(name=topic, value=value, reason=Reason(rule=rule, evidence=evidence, source=_ENV_RST))
    if len(lossless) == 1 and not classes:
        priority = lossless.pop()
        # With DSCP trust a switch maps DSCP to priority DSCP >> 3; NVIDIA's RoCE configuration puts RoCE on DSCP 26
        # (priority 3), the third code point of its class. The class field is DSCP << 2 plus ECT(0) = 2.
        dscp = 8 * priority + 2
        evidence = f"flow control on priority {priority} of " + ", ".join(view.name for view in roce)
        rule = (
            f"PFC protects priority {priority} only; NCCL unasked sends as class 0 and would be dropped under load. "
            f"DSCP {dscp} lies in that priority under the default mapping: check it against the switches"
        )
        source = f"{_ENV_RST}; NVIDIA RoCE configuration (DSCP 26, priority 3)"
        return Setting(name=topic, value=str(dscp << 2 | 2), reason=Reason(rule=rule, evidence=evidence, source=source))
    if classes or lossless:
        text = "The ports are configured for different classes: agree on one for RoCE, then set NCCL_IB_TC to it."
        return Note(
            topic=topic, text=text, evidence=f"traffic classes {sorted(classes)}, PFC priorities {sorted(lossless)}"
        )
    if all(view.port.pfc_priorities is None and view.port.traffic_class is None for view in roce):
        text = (
            "Set nothing unless the fabric has a lossless class: PFC and traffic class could not be read on this host."
        )
        return Note(topic=topic, text=text)
    return Note(topic=topic, text="Set nothing: no lossless class is configured on the ports.")


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
    """NCCL_NET on EFA: without the plugin NCCL falls back to TCP in silence."""
    topic = "NCCL_NET"
    if case.backend != "nccl" or not case.efa:
        return None
    if case.one_node:
        return Note(topic=topic, text="Set nothing: the job stays on one node and needs no EFA.")
    fell_back = case.evidence is not None and case.evidence.inter_node_transport == "Socket"
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
    counts = ", ".join(f"{node.hostname}: {node.efa_count()} EFA devices" for node in case.nodes)
    evidence = counts + ("; the log shows channels over Socket" if fell_back else "")
    source = f"{_ENV_RST}; aws-ofi-nccl (accepts the name 'AWS Libfabric' in every version)"
    return Setting(name=topic, value="AWS Libfabric", reason=Reason(rule=rule, evidence=evidence, source=source))


def _roce(case: Situation) -> list[PortView]:
    """The RoCE ports the job will use."""
    if case.backend != "nccl" or case.one_node:
        return []
    ports = [view for node in case.nodes for view in choose_ports(node).keep]
    return [view for view in ports if view.port.link_layer == "Ethernet"]


def _v2_ipv4_index(view: PortView) -> int | None:
    found = [
        gid.index
        for gid in view.port.gids
        if gid.type == "RoCE v2" and isinstance(gid_address(gid), ipaddress.IPv4Address)
    ]
    return min(found, default=None)


def _v2_ipv6(view: PortView) -> bool:
    addresses = [gid_address(gid) for gid in view.port.gids if gid.type == "RoCE v2"]
    return any(isinstance(address, ipaddress.IPv6Address) and not address.is_link_local for address in addresses)


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

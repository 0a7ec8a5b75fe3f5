"""Rules about RoCE: GID, traffic class and service level. InfiniBand needs none of these variables.

Specification: NCCL docs/userguide/source/env.rst, src/transport/net_ib/connect.cc (ncclIbGetGidIndex).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence

from planner.nccl_env.hcas import choose_ports, is_unaddressed
from planner.nccl_env.names import version_text
from planner.nccl_env.nodes import NodeView, PortView, gid_address, gid_addresses, networks
from planner.nccl_env.platforms import published, which_platform
from planner.nccl_env.situation import Note, Setting, Situation, by_host, note, setting, together

_DYNAMIC_GID = (2, 21, 0)  # env.rst: NCCL_IB_GID_INDEX is not needed since 2.21

# Default class of priority 3 in NVIDIA's RoCE configuration of cards and switches: DSCP 26, which is 106 in the traffic
# class field with the ECN bit. Other priorities have no default; each site chooses its code points.
_NVIDIA_PRIORITY, _NVIDIA_CLASS = 3, 106


def ib_gid_index(case: Situation) -> Setting | Note | None:
    """NCCL_IB_GID_INDEX: only needed before 2.21, where NCCL would use index 0."""
    roce = _list_roce_ports(case)
    if not roce:
        return None
    bare = [(host, view) for host, view in roce if is_unaddressed(view)]
    if bare:
        return note("gid_index.link_local", _list_ports(bare, lambda view: view.name))
    older = case.older_than(_DYNAMIC_GID)
    if several := _find_several_subnets(case):
        lever = (
            "NCCL_IB_GID_INDEX, the entry's index" if older is True else "NCCL_IB_ADDR_RANGE, a range that covers it"
        )
        return note("gid_index.several_subnets", by_host(together(several)), lever=lever)
    known = {_find_v2_ipv4_index(view) for _, view in roce}
    found = None not in known
    listed = _list_ports(roce, lambda view: f"{view.name} index {_find_v2_ipv4_index(view)}")
    unread = [(host, view) for host, view in roce if not view.port.gids_known]
    if unread:
        return note("gid_index.unread", _list_ports(unread, lambda view: view.name))
    if older is False and found:
        return note("gid_index.automatic", f"NCCL {version_text(case.nccl_version or ())}")
    if not found and older is not True:
        return None  # the address family or RoCE v1: handled by the rules below
    if older is None:
        return note("gid_index.version_unknown", f"NCCL version unknown; RoCE v2 IPv4 GID: {listed}")
    if not found:
        return note("gid_index.old_nccl_without_ipv4", _list_ports(roce, lambda view: f"{view.name} {_families(view)}"))
    if len(known) != 1:
        return note("gid_index.differs", listed)
    version = version_text(case.nccl_version or ())
    return setting("gid_index.old_nccl", str(known.pop()), listed, version=version)


def ib_addr_family(case: Situation) -> Setting | Note | None:
    """NCCL_IB_ADDR_FAMILY, if not every port has the IPv4 address that NCCL looks for, but the fabric has IPv6."""
    roce = [(host, view) for host, view in _list_roce_ports(case) if view.port.gids and not is_unaddressed(view)]
    without = [(host, view) for host, view in roce if not _has_family(view, 4)]
    if not without or case.older_than(_DYNAMIC_GID) is True:
        return None
    if not all(_has_family(view, 6) for _, view in roce):
        return note("addr_family.mixed", _list_ports(roce, _families))
    evidence = _list_ports(without, lambda view: f"{view.name} {len(view.port.gids)} GIDs, none IPv4 of RoCE v2")
    return setting("addr_family.ipv6", "AF_INET6", evidence, *_needs_dynamic_gid(case))


def ib_roce_version(case: Situation) -> Setting | None:
    """NCCL_IB_ROCE_VERSION_NUM, if the ports only support RoCE v1."""
    roce = [(host, view) for host, view in _list_roce_ports(case) if any(gid.type for gid in view.port.gids)]
    if not roce or case.older_than(_DYNAMIC_GID) is True:
        return None
    if any(gid.type == "RoCE v2" for _, view in roce for gid in view.port.gids):
        return None
    return setting("roce_version.v1", "1", _list_ports(roce, lambda view: view.name), *_needs_dynamic_gid(case))


def _needs_dynamic_gid(case: Situation) -> tuple[str, ...]:
    """Return the text for an unknown NCCL release: the variable is read since `_DYNAMIC_GID`."""
    return ("gid_index.read_since",) if case.nccl_version is None else ()


def ib_traffic_class(case: Situation) -> Setting | Note | None:
    """NCCL_IB_TC: data must use the traffic class that the fabric protects; the default is 0, best effort.

    The class depends on the fabric's configuration: use a published value, or that of the ports, or add a note.
    """
    roce = _list_roce_ports(case)
    if not roce:
        return None
    if (known := published(case, "NCCL_IB_TC")) is not None:
        return known
    classes = {view.port.traffic_class for _, view in roce if view.port.traffic_class}
    lossless = {priority for _, view in roce for priority in view.port.pfc_priorities or ()}
    pfc_configs = {view.port.pfc_priorities for _, view in roce if view.port.pfc_priorities is not None}
    if _uses_pcp(roce):
        return None  # the class is not used: `ib_service_level`
    if len(classes) == 1:
        evidence = _list_ports(roce, lambda view: f"{view.name} traffic class {view.port.traffic_class}")
        (found,) = classes
        priority, more = found >> 5, []  # DSCP >> 3
        if lossless and priority not in lossless:
            more, evidence = ["traffic_class.unprotected"], f"{evidence}; {_list_ports(roce, _describe_protected)}"
        protected = _join_numbers(lossless)
        return setting("traffic_class.one", str(found), evidence, *more, priority=priority, protected=protected)
    if len(pfc_configs) > 1 and not classes:
        return note("traffic_class.pfc_differs", _list_ports(roce, _describe_protected))
    if len(lossless) == 1 and not classes:
        return _choose_class(case, lossless.pop(), roce)
    if classes or lossless:
        evidence = f"traffic classes {sorted(classes)}, PFC priorities {sorted(lossless)}"
        return note("traffic_class.classes_differ", evidence)
    if all(view.port.pfc_priorities is None and view.port.traffic_class is None for _, view in roce):
        return note("traffic_class.unread")
    return note("traffic_class.lossy")


def _choose_class(case: Situation, priority: int, roce: Sequence[tuple[str, PortView]]) -> Setting | Note:
    evidence = _list_ports(roce, _describe_protected)
    if priority == _NVIDIA_PRIORITY and all(_is_nvidia(view) for _, view in roce):
        return setting("traffic_class.nvidia", str(_NVIDIA_CLASS), evidence, priority=priority)
    mapped = sorted({code for _, view in roce for code, to in view.port.dscp_priorities or () if to == priority})
    if mapped:
        evidence += f"; the ports map DSCP {_join_numbers(mapped)} to priority {priority}"
    return note("traffic_class.dscp_unknown", evidence, priority=priority, platform=which_platform(case))


def ib_service_level(case: Situation) -> Setting | Note | None:
    """NCCL_IB_SL, if the ports classify by the priority bits of the VLAN tag instead of by DSCP."""
    roce = _list_roce_ports(case)
    lossless = {priority for _, view in roce for priority in view.port.pfc_priorities or ()}
    if not _uses_pcp(roce) or not lossless or published(case, "NCCL_IB_TC") is not None:
        return None
    evidence = _list_ports(roce, lambda view: f"{_describe_protected(view)}, trust pcp")
    if len(lossless) > 1:
        return note("service_level.several", evidence)
    priority = lossless.pop()
    tagged = all(_is_tagged(node, view) for node in case.nodes for view in choose_ports(node).chosen)
    if not tagged:
        return note("service_level.no_vlan", evidence, priority=priority)
    return setting("service_level.of_priority", str(priority), evidence, priority=priority)


def _uses_pcp(roce: Sequence[tuple[str, PortView]]) -> bool:
    return bool(roce) and all(view.port.trust == "pcp" for _, view in roce)


def _is_tagged(node: NodeView, view: PortView) -> bool:
    names = {gid.netdev for gid in view.port.gids if gid.netdev and gid.type == "RoCE v2"} | {view.port.netdev}
    facts = node.interfaces()
    links = facts.interfaces if facts else ()
    return any(each.kind == "vlan" and (each.name in names or each.parent in names) for each in links)


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


def _list_roce_ports(case: Situation) -> list[tuple[str, PortView]]:
    """Return the RoCE ports that the job will use, with their hosts."""
    return [
        (node.hostname, view)
        for node in case.nodes
        for view in choose_ports(node).chosen
        if view.port.link_layer == "Ethernet"
    ]


def _list_ports(ports: Sequence[tuple[str, PortView]], text: Callable[[PortView], str]) -> str:
    return by_host(together([(host, text(view)) for host, view in ports]))


def _families(view: PortView) -> str:
    versions = sorted({address.version for address in gid_addresses(view)})
    return f"{view.name} {' and '.join(f'IPv{version}' for version in versions) or 'none of RoCE v2'}"


def _find_v2_ipv4_index(view: PortView) -> int | None:
    found = [
        gid.index
        for gid in view.port.gids
        if gid.type == "RoCE v2" and isinstance(gid_address(gid), ipaddress.IPv4Address)
    ]
    return min(found, default=None)


def _has_family(view: PortView, version: int) -> bool:
    """Whether NCCL finds an address of this IP version: for RoCE v2, or v1 if the port supports only v1."""
    v2 = any(gid.type == "RoCE v2" for gid in view.port.gids)
    return any(address.version == version for address in gid_addresses(view, "RoCE v2" if v2 else None))


def _find_several_subnets(case: Situation) -> list[tuple[str, str]]:
    """Return ports whose RoCE v2 IPv4 addresses are in several subnets of the host's interfaces."""
    found = []
    for node in case.nodes:
        facts = node.interfaces()
        subnets = [subnet for each in facts.interfaces for subnet in networks(each)] if facts else []
        for view in choose_ports(node).chosen:
            own = {a: s for a in gid_addresses(view) if a.version == 4 for s in subnets if a in s}
            if view.port.link_layer == "Ethernet" and len(set(own.values())) > 1:
                found.append((node.hostname, f"{view.name} {' and '.join(f'{a} in {s}' for a, s in own.items())}"))
    return found

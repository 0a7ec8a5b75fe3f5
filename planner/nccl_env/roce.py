"""The variables of RoCE: which GID, which traffic class, which service level. InfiniBand needs none of them.

Specification: NCCL docs/userguide/source/env.rst, src/transport/net_ib/connect.cc (ncclIbGetGidIndex).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence

from contracts.finding import Status
from planner.advice import Note, Reason, Setting
from planner.nccl_env.hcas import choose_ports, is_unaddressed
from planner.nccl_env.names import version_text
from planner.nccl_env.platforms import published, which_platform
from planner.nccl_env.situation import (
    NodeView,
    PortView,
    Situation,
    by_host,
    gid_address,
    gid_addresses,
    networks,
    together,
)
from probes.rdma.facts import is_link_local

_ENV_RST = "NCCL docs/userguide/source/env.rst"
_CONNECT_CC = "NCCL src/transport/net_ib/connect.cc, ncclIbGetGidIndex"
_DYNAMIC_GID = (2, 21, 0)  # env.rst: NCCL_IB_GID_INDEX needs no setting since 2.21

# The class of priority 3 that NVIDIA's RoCE configuration of its cards and switches defaults to: DSCP 26, which is 106
# in the traffic class field with the ECN bit set. No other priority has a default: sites choose its code points.
_NVIDIA_PRIORITY, _NVIDIA_CLASS = 3, 106


def gid_index_problem(view: PortView, index: int) -> tuple[Status, str] | None:
    """What is wrong with this fixed NCCL_IB_GID_INDEX on a RoCE port, in words that follow "entry N of mlx5_0:1".

    A link-local or RoCE v1 entry fails where the port has one that every subnet reaches: no router passes it on.
    """
    gid = next((gid for gid in view.port.gids if gid.index == index), None)
    if gid is None:
        return Status.FAIL, "is empty: connections fail with 'Invalid argument'"
    severity = Status.FAIL if gid_addresses(view) else Status.WARN
    if gid.type == "IB/RoCE v1":
        return severity, "is RoCE v1, which no router passes on: connections to another subnet fail"
    if is_link_local(gid):
        return severity, "is link-local, which no router passes on: connections to another subnet fail"
    return None


def ib_gid_index(case: Situation) -> Setting | Note | None:
    """NCCL_IB_GID_INDEX: only before 2.21, where NCCL would take index 0."""
    topic = "NCCL_IB_GID_INDEX"
    roce = _roce(case)
    if not roce:
        return None
    bare = [(host, view) for host, view in roce if is_unaddressed(view)]
    if bare:
        text = (
            "Unknown: these ports have link-local GIDs only, which NCCL does not choose: it would stay on index 0, "
            "RoCE v1, and reach nothing beyond the link. No variable mends that: give the interface an IP address."
        )
        return Note(topic=topic, text=text, evidence=_say(bare, lambda view: view.name))
    older = case.older_than(_DYNAMIC_GID)
    if several := _in_several_subnets(case):
        lever = (
            "NCCL_IB_GID_INDEX, the entry's index" if older is True else "NCCL_IB_ADDR_RANGE, a range that covers it"
        )
        text = (
            "Unknown: ports have RoCE v2 IPv4 GIDs in several subnets (VLANs, or beside one), NCCL 2.21 and later "
            "takes the first of the table, and nothing here says which of them the training fabric is. Choose it with "
            f"{lever} on every port."
        )
        return Note(topic=topic, text=text, evidence=by_host(together(several)))
    known = {_v2_ipv4_index(view) for _, view in roce}
    found = None not in known
    listed = _say(roce, lambda view: f"{view.name} index {_v2_ipv4_index(view)}")
    unread = [(host, view) for host, view in roce if not view.port.gids_known]
    if unread:
        text = "Unknown: the GID tables could not be read. NCCL 2.21 or later looks for a RoCE v2 IPv4 GID by itself."
        return Note(topic=topic, text=text, evidence=_say(unread, lambda view: view.name))
    if older is False and found:
        text = (
            "Set nothing: since 2.21 NCCL finds the RoCE v2 GID itself, and a fixed index breaks where tables differ."
        )
        return Note(topic=topic, text=text, evidence=f"NCCL {version_text(case.nccl_version or ())}")
    if not found and older is not True:
        return None  # the address family, or RoCE v1: the rules below
    if older is None:
        text = "Set nothing with NCCL 2.21 or later, which finds the GID itself; an older NCCL takes index 0 (RoCE v1)."
        return Note(topic=topic, text=text, evidence=f"NCCL version unknown; RoCE v2 IPv4 GID: {listed}")
    if not found:
        text = (
            "Unknown: an NCCL older than 2.21 takes GID index 0, and not every port has a RoCE v2 IPv4 GID: set it to "
            "the entry with the address that the fabric uses, or use NCCL 2.21."
        )
        return Note(topic=topic, text=text, evidence=_say(roce, lambda view: f"{view.name} {_families(view)}"))
    if len(known) != 1:
        text = "The index of the RoCE v2 IPv4 GID is not the same on every port: set it per node, or use NCCL 2.21."
        return Note(topic=topic, text=text, evidence=listed)
    version = version_text(case.nccl_version or ())
    rule = f"NCCL {version} is older than 2.21 and takes GID index 0, which is RoCE v1: name the RoCE v2 IPv4 entry"
    return Setting(name=topic, value=str(known.pop()), reason=Reason(rule=rule, evidence=listed, source=_ENV_RST))


def ib_addr_family(case: Situation) -> Setting | Note | None:
    """NCCL_IB_ADDR_FAMILY, where the fabric has IPv6 addresses and not on every port IPv4, which NCCL looks for."""
    topic = "NCCL_IB_ADDR_FAMILY"
    roce = [(host, view) for host, view in _roce(case) if view.port.gids and not is_unaddressed(view)]
    without = [(host, view) for host, view in roce if not _has_family(view, 4)]
    if not without or case.older_than(_DYNAMIC_GID) is True:
        return None
    if not all(_has_family(view, 6) for _, view in roce):
        text = (
            "Unknown: some RoCE ports have IPv4 GIDs and others IPv6 ones only: no one address family fits all. "
            "Give every port an address of one family."
        )
        return Note(topic=topic, text=text, evidence=_say(roce, _families))
    rule = (
        "NCCL looks for an IPv4 GID of RoCE v2, and without one stays on index 0, which is RoCE v1 and link-local; "
        "these RoCE ports have IPv6 GIDs"
    )
    if case.nccl_version is None:
        rule += ". Read since NCCL 2.21; an older one needs NCCL_IB_GID_INDEX"
    evidence = _say(without, lambda view: f"{view.name} {len(view.port.gids)} GIDs, none IPv4 of RoCE v2")
    reason = Reason(rule=rule, evidence=evidence, source=f"{_ENV_RST}; {_CONNECT_CC}")
    return Setting(name=topic, value="AF_INET6", reason=reason)


def ib_roce_version(case: Situation) -> Setting | None:
    """NCCL_IB_ROCE_VERSION_NUM, where the ports know RoCE v1 only."""
    roce = [(host, view) for host, view in _roce(case) if any(gid.type for gid in view.port.gids)]
    if not roce or case.older_than(_DYNAMIC_GID) is True:
        return None
    if any(gid.type == "RoCE v2" for _, view in roce for gid in view.port.gids):
        return None
    rule = "NCCL looks for RoCE v2; the ports have RoCE v1 GIDs only, which work within one layer-2 segment"
    if case.nccl_version is None:
        rule += ". Read since NCCL 2.21; an older one needs NCCL_IB_GID_INDEX"
    reason = Reason(rule=rule, evidence=_say(roce, lambda view: view.name), source=_ENV_RST)
    return Setting(name="NCCL_IB_ROCE_VERSION_NUM", value="1", reason=reason)


def ib_traffic_class(case: Situation) -> Setting | Note | None:
    """NCCL_IB_TC: data must ride in the class that the fabric protects; unset it is 0, best effort.

    Which class that is only the fabric's configuration says: a published value, the ports' own, or a note.
    """
    topic = "NCCL_IB_TC"
    roce = _roce(case)
    if not roce:
        return None
    if (known := published(case, topic)) is not None:
        return known
    classes = {view.port.traffic_class for _, view in roce if view.port.traffic_class}
    lossless = {priority for _, view in roce for priority in view.port.pfc_priorities or ()}
    pfc_configs = {view.port.pfc_priorities for _, view in roce if view.port.pfc_priorities is not None}
    if _by_pcp(roce):
        return None  # the class is not looked at: `ib_service_level`
    if len(classes) == 1:
        evidence = _say(roce, lambda view: f"{view.name} traffic class {view.port.traffic_class}")
        rule = "The ports are configured for one traffic class; NCCL unasked marks its packets 0, best effort"
        priority = next(iter(classes)) >> 5  # DSCP >> 3
        if lossless and priority not in lossless:
            rule += (
                f". By default it is priority {priority}, and flow control protects {_numbers(lossless)}: "
                "check ports and switches"
            )
            evidence += "; " + _say(roce, _protected)
        reason = Reason(rule=rule, evidence=evidence, source=_ENV_RST)
        return Setting(name=topic, value=str(classes.pop()), reason=reason)
    if len(pfc_configs) > 1 and not classes:
        text = "Flow control protects other priorities on one port than on the next: agree on one, then set NCCL_IB_TC."
        return Note(topic=topic, text=text, evidence=_say(roce, _protected))
    if len(lossless) == 1 and not classes:
        return _class_of_priority(case, topic, lossless.pop(), roce)
    if classes or lossless:
        text = "The ports are configured for different classes: agree on one for RoCE, then set NCCL_IB_TC to it."
        found = f"traffic classes {sorted(classes)}, PFC priorities {sorted(lossless)}"
        return Note(topic=topic, text=text, evidence=found)
    if all(view.port.pfc_priorities is None and view.port.traffic_class is None for _, view in roce):
        text = (
            "Set nothing unless the fabric has a lossless class: PFC and traffic class could not be read on this host."
        )
        return Note(topic=topic, text=text)
    return Note(topic=topic, text="Set nothing: no lossless class is configured on the ports.")


def _class_of_priority(
    case: Situation, topic: str, priority: int, roce: Sequence[tuple[str, PortView]]
) -> Setting | Note:
    evidence = _say(roce, _protected)
    if priority == _NVIDIA_PRIORITY and all(_is_nvidia(view) for _, view in roce):
        rule = (
            f"PFC protects priority {priority} only; NCCL unasked sends as class 0 and would be dropped under load. "
            f"DSCP 26 is what NVIDIA's RoCE configuration puts in that priority: check it against the switches"
        )
        source = f"{_ENV_RST}; NVIDIA RoCE configuration (DSCP 26, priority 3)"
        reason = Reason(rule=rule, evidence=evidence, source=source)
        return Setting(name=topic, value=str(_NVIDIA_CLASS), reason=reason)
    mapped = sorted({code for _, view in roce for code, to in view.port.dscp_priorities or () if to == priority})
    if mapped:
        evidence += f"; the ports map DSCP {_numbers(mapped)} to priority {priority}"
    text = (
        f"Unknown: PFC protects priority {priority}, and which DSCP the switches put in it is the site's own choice: "
        f"no value is published for it ({which_platform(case)}). Ask for that DSCP, then set {topic} to 4 times it."
    )
    return Note(topic=topic, text=text, evidence=evidence)


def ib_service_level(case: Situation) -> Setting | Note | None:
    """NCCL_IB_SL, where the ports classify by the priority bits of the VLAN tag and not by DSCP."""
    topic = "NCCL_IB_SL"
    roce = _roce(case)
    lossless = {priority for _, view in roce for priority in view.port.pfc_priorities or ()}
    if not _by_pcp(roce) or not lossless or published(case, "NCCL_IB_TC") is not None:
        return None
    evidence = _say(roce, lambda view: f"{_protected(view)}, trust pcp")
    if len(lossless) > 1:
        text = "Flow control protects several priorities: agree on one for RoCE, then set NCCL_IB_SL to it."
        return Note(topic=topic, text=text, evidence=evidence)
    priority = lossless.pop()
    tagged = all(_tagged(node, view) for node in case.nodes for view in choose_ports(node).keep)
    if not tagged:
        text = (
            f"The ports classify by the VLAN tag's priority (trust pcp), where NCCL_IB_SL={priority} is the lever and "
            "NCCL_IB_TC has no effect; but their addresses are on no VLAN, and a packet without a tag is in no "
            "protected priority. Put the RoCE addresses on a VLAN, or let the ports trust DSCP."
        )
        return Note(topic=topic, text=text, evidence=evidence)
    rule = (
        f"The ports classify by the VLAN tag's priority and PFC protects {priority} only: NCCL unasked sends with "
        "service level 0, which becomes priority 0; NCCL_IB_TC would have no effect"
    )
    return Setting(name=topic, value=str(priority), reason=Reason(rule=rule, evidence=evidence, source=_ENV_RST))


def _by_pcp(roce: Sequence[tuple[str, PortView]]) -> bool:
    return bool(roce) and all(view.port.trust == "pcp" for _, view in roce)


def _tagged(node: NodeView, view: PortView) -> bool:
    names = {gid.netdev for gid in view.port.gids if gid.netdev and gid.type == "RoCE v2"} | {view.port.netdev}
    facts = node.interfaces()
    return (
        any(each.kind == "vlan" and (each.name in names or each.parent in names) for each in facts.interfaces)
        if (facts)
        else False
    )


def _is_nvidia(view: PortView) -> bool:
    model = view.device.model or ""
    return view.device.driver == "mlx5_core" or model.startswith(("ConnectX", "BlueField", "MT4"))


def _protected(view: PortView) -> str:
    priorities = view.port.pfc_priorities
    if priorities is None:
        return f"{view.name} does not tell its flow control"
    return f"{view.name} flow control on {f'priority {_numbers(priorities)}' if priorities else 'no priority'}"


def _numbers(priorities: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(priorities)))


def _roce(case: Situation) -> list[tuple[str, PortView]]:
    """The RoCE ports the job will use, with their hosts."""
    if case.backend != "nccl" or case.one_node:
        return []
    return [
        (node.hostname, view)
        for node in case.nodes
        for view in choose_ports(node).keep
        if view.port.link_layer == "Ethernet"
    ]


def _say(ports: Sequence[tuple[str, PortView]], text: Callable[[PortView], str]) -> str:
    return by_host(together([(host, text(view)) for host, view in ports]))


def _families(view: PortView) -> str:
    versions = sorted({address.version for address in gid_addresses(view)})
    return f"{view.name} {' and '.join(f'IPv{version}' for version in versions) or 'none of RoCE v2'}"


def _v2_ipv4_index(view: PortView) -> int | None:
    found = [
        gid.index
        for gid in view.port.gids
        if gid.type == "RoCE v2" and isinstance(gid_address(gid), ipaddress.IPv4Address)
    ]
    return min(found, default=None)


def _has_family(view: PortView, version: int) -> bool:
    """Whether NCCL finds an address of the IP version: of RoCE v2, or of v1 where the port knows no other."""
    v2 = any(gid.type == "RoCE v2" for gid in view.port.gids)
    return any(address.version == version for address in gid_addresses(view, "RoCE v2" if v2 else None))


def _in_several_subnets(case: Situation) -> list[tuple[str, str]]:
    """Ports whose RoCE v2 IPv4 addresses are in more than one subnet of the host's interfaces."""
    found = []
    for node in case.nodes:
        facts = node.interfaces()
        subnets = [subnet for each in facts.interfaces for subnet in networks(each)] if facts else []
        for view in choose_ports(node).keep:
            own = {a: s for a in gid_addresses(view) if a.version == 4 for s in subnets if a in s}
            if view.port.link_layer == "Ethernet" and len(set(own.values())) > 1:
                found.append((node.hostname, f"{view.name} {' and '.join(f'{a} in {s}' for a, s in own.items())}"))
    return found

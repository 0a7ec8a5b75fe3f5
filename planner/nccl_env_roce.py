"""The variables of RoCE: which GID, which traffic class. InfiniBand needs neither.

Specification: NCCL docs/userguide/source/env.rst, src/transport/net_ib/connect.cc (ncclIbGetGidIndex).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence

from planner.advice import Note, Reason, Setting
from planner.nccl_env_hcas import choose_ports
from planner.nccl_env_situation import PortView, Situation, by_host, gid_address, together
from planner.nccl_names import version_text

_ENV_RST = "NCCL docs/userguide/source/env.rst"
_DYNAMIC_GID = (2, 21, 0)  # env.rst: NCCL_IB_GID_INDEX needs no setting since 2.21


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
    known = {_v2_ipv4_index(view) for _, view in roce}
    listed = _say(roce, lambda view: f"{view.name} index {_v2_ipv4_index(view)}")
    if older is None:
        text = "Set nothing with NCCL 2.21 or later, which finds the GID itself; an older NCCL takes index 0 (RoCE v1)."
        return Note(topic=topic, text=text, evidence=f"NCCL version unknown; RoCE v2 IPv4 GID: {listed}")
    if len(known) != 1 or None in known:
        text = "The index of the RoCE v2 IPv4 GID is not the same on every port: set it per node, or use NCCL 2.21."
        return Note(topic=topic, text=text, evidence=listed)
    version = version_text(case.nccl_version or ())
    rule = f"NCCL {version} is older than 2.21 and takes GID index 0, which is RoCE v1: name the RoCE v2 IPv4 entry"
    return Setting(name=topic, value=str(known.pop()), reason=Reason(rule=rule, evidence=listed, source=_ENV_RST))


def ib_addr_family(case: Situation) -> Setting | None:
    """NCCL_IB_ADDR_FAMILY, where the fabric has IPv6 addresses only and NCCL looks for IPv4."""
    roce = [(host, view) for host, view in _roce(case) if view.port.gids]
    if not roce or case.older_than(_DYNAMIC_GID) is not False:
        return None
    if any(_v2_ipv4_index(view) is not None for _, view in roce) or not all(_v2_ipv6(view) for _, view in roce):
        return None
    rule = "NCCL looks for an IPv4 GID; the RoCE ports have IPv6 GIDs only"
    evidence = _say(roce, lambda view: f"{view.name} {len(view.port.gids)} GIDs, none IPv4")
    reason = Reason(
        rule=rule, evidence=evidence, source=f"{_ENV_RST}; NCCL src/transport/net_ib/connect.cc, ncclIbGetGidIndex"
    )
    return Setting(name="NCCL_IB_ADDR_FAMILY", value="AF_INET6", reason=reason)


def ib_roce_version(case: Situation) -> Setting | None:
    """NCCL_IB_ROCE_VERSION_NUM, where the ports know RoCE v1 only."""
    roce = [(host, view) for host, view in _roce(case) if any(gid.type for gid in view.port.gids)]
    if not roce or case.older_than(_DYNAMIC_GID) is not False:
        return None
    if any(gid.type == "RoCE v2" for _, view in roce for gid in view.port.gids):
        return None
    rule = "NCCL looks for RoCE v2; the ports have RoCE v1 GIDs only, which work within one layer-2 segment"
    reason = Reason(rule=rule, evidence=_say(roce, lambda view: view.name), source=_ENV_RST)
    return Setting(name="NCCL_IB_ROCE_VERSION_NUM", value="1", reason=reason)


def ib_traffic_class(case: Situation) -> Setting | Note | None:
    """NCCL_IB_TC: data must ride in the class the fabric protects; unset it is 0, best effort."""
    topic = "NCCL_IB_TC"
    roce = _roce(case)
    if not roce:
        return None
    classes = {view.port.traffic_class for _, view in roce if view.port.traffic_class}
    lossless = {priority for _, view in roce for priority in view.port.pfc_priorities or ()}
    told = {view.port.pfc_priorities for _, view in roce if view.port.pfc_priorities is not None}
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
    if len(told) > 1 and not classes:
        text = "Flow control protects other priorities on one port than on the next: agree on one, then set NCCL_IB_TC."
        return Note(topic=topic, text=text, evidence=_say(roce, _protected))
    if len(lossless) == 1 and not classes:
        return _class_of_priority(topic, lossless.pop(), roce)
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


def _class_of_priority(topic: str, priority: int, roce: Sequence[tuple[str, PortView]]) -> Setting:
    # With DSCP trust a switch maps DSCP to priority DSCP >> 3; NVIDIA's RoCE configuration puts RoCE on DSCP 26
    # (priority 3), the third code point of its class. The class field is DSCP << 2 plus ECT(0) = 2.
    dscp = 8 * priority + 2
    rule = (
        f"PFC protects priority {priority} only; NCCL unasked sends as class 0 and would be dropped under load. "
        f"DSCP {dscp} lies in that priority under the default mapping: check it against the switches"
    )
    evidence = _say(roce, _protected)
    source = f"{_ENV_RST}; NVIDIA RoCE configuration (DSCP 26, priority 3)"
    return Setting(name=topic, value=str(dscp << 2 | 2), reason=Reason(rule=rule, evidence=evidence, source=source))


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

"""What an environment says of RoCE against the ports that it would use: the GID, and the class packets travel in.

Specification: NCCL docs/userguide/source/env.rst (NCCL_IB_GID_INDEX, NCCL_IB_TC, NCCL_IB_SL); IEEE 802.1Qbb for
priority flow control. A switch takes a packet's priority from DSCP, the upper six bits of the traffic class (by default
priority = DSCP >> 3), or from the VLAN tag, where the service level stands; which one is not known on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.lint.finding import finding
from planner.lint.names import NameList
from planner.lint.values import strtoll
from planner.nccl_env.names import Version, version_text
from planner.nccl_env.situation import NodeView, PortView
from probes.api import Finding, Severity

ROCE_CODES = ("env.class.unprotected", "env.gid.absent")


def check_roce(environment: Mapping[str, str], node: NodeView, version: Version | None) -> Iterator[Finding]:
    """Every contradiction between the environment and the RoCE ports it would use."""
    yield from _gids(environment, node, version)
    yield from _class(environment, node)


def _gids(environment: Mapping[str, str], node: NodeView, version: Version | None) -> Iterator[Finding]:
    name = "NCCL_IB_GID_INDEX"
    value = environment.get(name, "")
    index, whole = strtoll(value)
    if not whole or index < 0:
        return
    for view in _roce(environment, node):
        if not view.port.gids_known:
            continue
        gid = next((gid for gid in view.port.gids if gid.index == index), None)
        if gid is not None and gid.type != "IB/RoCE v1":
            continue
        what = "is RoCE v1, which no router passes on" if gid else "is empty: connections fail with 'Invalid argument'"
        used = ", ".join(f"{each.index}: {each.type}" for each in view.port.gids) or "none"
        since = (
            f" NCCL {version_text(version)} finds the right one by itself." if version and version >= (2, 21) else ""
        )
        yield finding(
            "env.gid.absent", Severity.FAIL if gid is None else Severity.WARN, name, value,
            f"entry {index} of {view.name} {what}.{since}", f"Unset {name}.", (f"{view.name} GIDs: {used}",),
        )  # fmt: skip


def _class(environment: Mapping[str, str], node: NodeView) -> Iterator[Finding]:
    """A class that no flow control protects, where another is protected."""
    asked = {name: environment[name] for name in ("NCCL_IB_TC", "NCCL_IB_SL") if name in environment}
    numbers = {name: strtoll(value) for name, value in asked.items()}
    if not asked or not all(whole and 0 <= number <= 255 for number, whole in numbers.values()):
        return  # what cannot be right by itself has a finding of its own
    by_dscp, by_tag = numbers.get("NCCL_IB_TC", (0, True))[0] >> 5, numbers.get("NCCL_IB_SL", (0, True))[0]
    bare = [
        view
        for view in _roce(environment, node)
        # Where the driver is told a class of its own, that one stands in the packets.
        if view.port.pfc_priorities
        and not view.port.traffic_class
        and not {by_dscp, by_tag} & {*view.port.pfc_priorities}
    ]
    if not bare:
        return
    name, value = next(iter(asked.items()))
    meant = f"priority {by_dscp}" if by_dscp == by_tag else f"priority {by_dscp} by DSCP or {by_tag} by VLAN tag"
    yield finding(
        "env.class.unprotected", Severity.WARN, name, value,
        f"packets travel in {meant} where switches map by default, and flow control protects another one: under load "
        "they are dropped.",
        "Take the class of a protected priority, as `topoflight recommend` names it; check it against the switches.",
        (
            *(f"{other}={text}" for other, text in asked.items() if other != name),
            *(f"{view.name}: PFC on {', '.join(map(str, view.port.pfc_priorities or ()))}" for view in bare[:8]),
        ),
    )  # fmt: skip


def _roce(environment: Mapping[str, str], node: NodeView) -> Iterator[PortView]:
    """The RoCE ports that NCCL takes under NCCL_IB_HCA."""
    hcas = environment.get("NCCL_IB_HCA")
    wanted = NameList.parse(hcas) if hcas else None
    for view in node.taken_ports():
        named = wanted is None or wanted.takes(view.device.name, view.port.port)
        if named and view.port.link_layer == "Ethernet":
            yield view

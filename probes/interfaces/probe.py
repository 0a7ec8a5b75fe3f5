"""Judges interfaces: would NCCL and gloo talk over the right one, and is that one whole.

Sources: NCCL user guide, NCCL_SOCKET_IFNAME and Troubleshooting ("Networking issues"); gloo binds to the address that
the host's name resolves to unless GLOO_SOCKET_IFNAME is set.
"""

from __future__ import annotations

from collections.abc import Iterator

from probes.api import Finding, Metric, Probe, Sample, Severity, by_loss
from probes.interfaces.facts import ON_A_WIRE, Interface, InterfacesFacts, nccl_choice, usable_by_nccl
from probes.interfaces.read import read

NET = "/sys/class/net"


def check(facts: InterfacesFacts) -> Iterator[Finding]:
    """The choice first, then each interface."""
    if facts.network_status_error:
        yield Finding(
            code="interfaces.network_status.invalid",
            severity=Severity.UNKNOWN,
            subject="",
            message=f"The pod's network-status cannot be read: {facts.network_status_error}.",
            evidence=(str(facts.network_status_source),),
            remedy="Mount metadata.annotations['k8s.v1.cni.cncf.io/network-status'] as a downward-API volume.",
        )
    yield from _choice(facts)
    for interface in facts.interfaces:
        yield from _down(interface)
        yield from _address(facts, interface)
        yield from _mtu(facts, interface)
    yield from _siblings(facts)


def _fast(interface: Interface) -> tuple[bool, float]:
    return interface.rdma_device is not None, interface.speed_bytes_per_second or 0.0


def _choice(facts: InterfacesFacts) -> Iterator[Finding]:
    name = facts.nccl_choice
    if facts.socket_ifname and facts.source == "netlink":
        name = nccl_choice(facts.interfaces, facts.socket_ifname)
        if name is None and facts.nccl_choice is not None:
            yield _useless_setting(facts)
            return
    chosen = next((i for i in facts.interfaces if i.name == name), None)
    if chosen is None:
        if facts.source == "netlink":
            yield _nothing_usable(facts)
        return
    if chosen.role == "loopback" and (finding := _only_loopback(facts, chosen)):
        yield finding
        return
    others = [i for i in facts.interfaces if usable_by_nccl(i) and i is not chosen and i.role in ("secondary", "host")]
    better = max(others, key=_fast, default=None)
    if chosen.role in ("docker", "bridge", "virtual", "loopback") and better is not None:
        severity, why = Severity.FAIL, f"a {chosen.role} interface that other nodes do not reach"
    elif better is not None and _is_faster(better, chosen):
        # On a host whose fast card does RDMA, sockets carry the start-up only, and gloo.
        # So on Slingshot, where libfabric drives the fast card.
        fabric = better.rdma_device or (better.driver or "").startswith("cxi")
        started_only = chosen.role == "host" and fabric
        severity = Severity.INFO if started_only else by_loss(_loss(chosen, better))
        why = f"a {chosen.role} interface{_speed(chosen)}"
    else:
        return
    yield Finding(
        code="interfaces.choice.wrong",
        severity=severity,
        subject=chosen.name,
        message=(
            f"NCCL takes {chosen.name} {_how(facts)}, {why}, while {better.name} ({better.role}{_speed(better)}"
            f"{', ' + better.rdma_device if better.rdma_device else ''}) is there."
        ),
        evidence=tuple(f"{i.name}: {i.role}, {', '.join(i.addresses)}{_speed(i)}" for i in (chosen, better)),
        remedy=_named(chosen, better, others),
    )


def _nothing_usable(facts: InterfacesFacts) -> Finding:
    return Finding(
        code="interfaces.choice.none",
        severity=Severity.FAIL,
        subject="",
        message="No interface is up, running and has an address: NCCL and gloo cannot start.",
        evidence=tuple(
            f"{i.name}: up {i.up}, running {i.running}, {len(i.addresses)} addresses" for i in facts.interfaces[:16]
        ),
        remedy="Bring one interface up with an address that the other nodes reach.",
    )


def _named(chosen: Interface, better: Interface, others: list[Interface]) -> str:
    """Every interface as fast as the best one: pinned to one of them, data would lose the others."""
    alike = [i for i in others if _fast(i) == _fast(better) and (i.role, i.driver) == (better.role, better.driver)]
    names = ",".join(i.name for i in (alike if not better.rdma_device else [better]))
    prefixed = any(i.name.startswith(tuple(names.split(","))) for i in (chosen,))
    return f"Set NCCL_SOCKET_IFNAME={'=' if prefixed else ''}{names} and GLOO_SOCKET_IFNAME={better.name}."


def _only_loopback(facts: InterfacesFacts, chosen: Interface) -> Finding | None:
    """A network card is there, and no interface but loopback can be used: ranks of other nodes are not reached.

    A host or container without any card has no network to lose.
    """
    others = [i for i in facts.interfaces if i is not chosen]
    if any(usable_by_nccl(i) for i in others) or not any(i.bus_id for i in others):
        return None
    return Finding(
        code="interfaces.choice.none",
        severity=Severity.FAIL,
        subject="",
        message=f"No interface but {chosen.name} is up, running and has an address: no other node reaches this one.",
        evidence=tuple(f"{i.name}: up {i.up}, running {i.running}, {len(i.addresses)} addresses" for i in others[:16]),
        remedy="Bring one interface up with an address that the other nodes reach.",
    )


def _how(facts: InterfacesFacts) -> str:
    return f"by NCCL_SOCKET_IFNAME={facts.socket_ifname}" if facts.socket_ifname else "by itself"


def _useless_setting(facts: InterfacesFacts) -> Finding:
    return Finding(
        code="interfaces.choice.setting",
        severity=Severity.FAIL,
        subject="",
        message=f"NCCL_SOCKET_IFNAME={facts.socket_ifname} takes no running interface: NCCL cannot start.",
        evidence=tuple(f"{i.name}: {', '.join(i.addresses) or 'no address'}" for i in facts.interfaces[:16]),
        remedy=f"Unset it, or name an interface of this host, such as {facts.nccl_choice}.",
    )


def _is_faster(better: Interface, chosen: Interface) -> bool:
    """An overlay against a secondary network with a device of its own, or a slower wire against a faster one."""
    if chosen.rdma_device:
        return False
    if chosen.speed_bytes_per_second and better.speed_bytes_per_second:
        return better.speed_bytes_per_second > chosen.speed_bytes_per_second
    return chosen.role == "pod-default" and better.role == "secondary"


def _loss(chosen: Interface, better: Interface) -> float:
    """The share of the better interface's rate that is lost.

    An overlay beside a secondary network has no rate to read: there the same fine-tune took 5 h and 2 h 30 (README.md).
    """
    if chosen.speed_bytes_per_second and better.speed_bytes_per_second and chosen.role != "pod-default":
        return 1.0 - chosen.speed_bytes_per_second / better.speed_bytes_per_second
    return 0.5


def _speed(interface: Interface) -> str:
    rate = interface.speed_bytes_per_second
    return f", {rate * 8 / 1e9:g} Gb/s" if rate else ""


def _matters(interface: Interface) -> bool:
    return interface.role == "secondary" or interface.rdma_device is not None or interface.multus_network is not None


def _down(interface: Interface) -> Iterator[Finding]:
    if _matters(interface) and (interface.up is False or interface.running is False):
        yield Finding(
            code="interfaces.link.down",
            # a network that the pod was given: without it the job falls back to the pod network, half as fast or worse
            severity=Severity.FAIL if interface.role == "secondary" or interface.multus_network else Severity.WARN,
            subject=interface.name,
            message=(
                f"{interface.name} is {'down' if interface.up is False else 'up without a carrier'}: NCCL leaves it "
                "out."
            ),
            evidence=(f"rtnetlink: {interface.name} up {interface.up}, running {interface.running}",),
            remedy=f"Bring {interface.name} up and check what it is attached to.",
        )


def _address(facts: InterfacesFacts, interface: Interface) -> Iterator[Finding]:
    if interface.role == "secondary" and interface.running and not _ipv4(interface):
        # Without another secondary network the job falls back to the pod's own. InfiniBand needs no address for RDMA.
        others = any(i.role == "secondary" and i.running and _ipv4(i) for i in facts.interfaces)
        routable = any(":" in a and not a.lower().startswith("fe80") for a in interface.addresses)
        mild = others or routable or interface.kind in ("ipoib", "infiniband")
        yield Finding(
            code="interfaces.address.missing",
            severity=Severity.WARN if mild else Severity.FAIL,
            subject=interface.name,
            message=(
                f"{interface.name} has no IPv4 address: it gives a RoCE port no routable GID, and NCCL cannot name it."
            ),
            evidence=(f"rtnetlink: {interface.name}: {', '.join(interface.addresses) or 'no address'}",),
            remedy="Give the network attachment an ipam section (whereabouts, static) so that the pod gets an address.",
        )


def _ipv4(interface: Interface) -> list[str]:
    return [address for address in interface.addresses if ":" not in address]


def _mtu(facts: InterfacesFacts, interface: Interface) -> Iterator[Finding]:
    mtu = interface.mtu_bytes
    parent = next((i for i in facts.interfaces if i.name == interface.parent), None)
    expected = None
    if mtu and interface.multus_mtu_bytes and mtu != interface.multus_mtu_bytes:
        expected = (interface.multus_mtu_bytes, "network-status")
    elif (
        mtu
        and parent
        and parent.mtu_bytes
        and interface.kind in ("macvlan", "ipvlan", "vlan")
        and mtu < parent.mtu_bytes
    ):
        expected = (parent.mtu_bytes, f"its parent {parent.name}")
    if expected:
        yield Finding(
            code="interfaces.mtu.mismatch",
            severity=Severity.WARN,
            subject=interface.name,
            message=f"{interface.name} has an MTU of {mtu}, {expected[1]} one of {expected[0]}.",
            evidence=(f"rtnetlink: {interface.name} mtu {mtu}", f"{expected[1]}: mtu {expected[0]}"),
            remedy=f"Set mtu {expected[0]} in the network attachment of {interface.name}.",
        )


def _siblings(facts: InterfacesFacts) -> Iterator[Finding]:
    """Training interfaces of one host that differ in MTU, or in speed although one driver runs them."""
    members = [
        i for i in facts.interfaces if i.running and (i.role == "secondary" or (i.rdma_device and i.role == "host"))
    ]
    mtus = {i.mtu_bytes for i in members if i.mtu_bytes}
    if len(mtus) > 1:
        yield Finding(
            code="interfaces.mtu.mismatch",
            severity=Severity.WARN,
            subject="",
            message="The training interfaces differ in MTU: "
            + ", ".join(f"{i.name} {i.mtu_bytes}" for i in members)
            + ".",
            evidence=tuple(f"rtnetlink: {i.name} mtu {i.mtu_bytes}" for i in members[:16]),
            remedy="Set one MTU on all of them, and on the switches between the hosts.",
        )
    yield from _slower_than_siblings(facts, members)


def _slower_than_siblings(facts: InterfacesFacts, members: list[Interface]) -> Iterator[Finding]:
    drivers: dict[str, list[Interface]] = {}
    wired = [i for i in facts.interfaces if i.running and i.speed_bytes_per_second and i.kind not in ON_A_WIRE]
    for interface in wired:
        if interface.driver and (interface.master or interface in members):
            drivers.setdefault(interface.driver, []).append(interface)
    for group in drivers.values():
        best = max(group, key=lambda i: i.speed_bytes_per_second or 0.0)
        for interface in group:
            if (interface.speed_bytes_per_second or 0) < (best.speed_bytes_per_second or 0):
                yield Finding(
                    code="interfaces.speed.low",
                    severity=by_loss(
                        1.0 - (interface.speed_bytes_per_second or 0.0) / (best.speed_bytes_per_second or 1.0)
                    ),
                    subject=interface.name,
                    message=(
                        f"{interface.name} runs{_speed(interface)[1:]}, {best.name} of the same "
                        f"driver{_speed(best)[1:]}."
                    ),
                    evidence=tuple(
                        f"{NET}/{i.name}/speed: {(i.speed_bytes_per_second or 0) * 8 / 1e6:g}"
                        for i in (interface, best)
                    ),
                    remedy=f"Check cable, transceiver and switch port of {interface.name}.",
                )


def samples(facts: InterfacesFacts) -> Iterator[Sample]:
    """What node_exporter cannot know: the role, what it stands on, and NCCL's choice."""
    for interface in facts.interfaces:
        labels = (
            interface.name,
            interface.role,
            interface.kind or "",
            interface.parent or "",
            interface.rdma_device or "",
            interface.multus_network or "",
        )
        yield Sample(metric="interfaces_role_info", value=1, labels=labels)
    if facts.nccl_choice:
        yield Sample(metric="interfaces_nccl_choice_info", value=1, labels=(facts.nccl_choice,))


PROBE = Probe(
    name="interfaces",
    facts=InterfacesFacts,
    read=read,
    check=check,
    samples=samples,
    codes=(
        "interfaces.choice.wrong",
        "interfaces.choice.none",
        "interfaces.choice.setting",
        "interfaces.link.down",
        "interfaces.address.missing",
        "interfaces.mtu.mismatch",
        "interfaces.speed.low",
        "interfaces.network_status.invalid",
    ),
    metrics=(
        Metric(
            name="interfaces_role_info",
            help="Role of the network interface and what it stands on.",
            labels=("device", "role", "kind", "parent", "rdma_device", "network"),
            kind="info",
        ),
        Metric(
            name="interfaces_nccl_choice_info",
            help="Interface NCCL takes with NCCL_SOCKET_IFNAME unset.",
            labels=("device",),
            kind="info",
        ),
    ),
)

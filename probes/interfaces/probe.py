"""Checks of interfaces: would NCCL and gloo use the right interface, and does it work.

The rdma probe compares ports of RDMA devices, because it knows which ports are on the same card.

Sources: NCCL user guide, NCCL_SOCKET_IFNAME and Troubleshooting ("Networking issues"). Unless GLOO_SOCKET_IFNAME is
set, gloo binds to the address that the host name resolves to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from contracts.finding import Finding, Status, by_loss
from contracts.tables import read_table
from hardware.units import gigabits
from probes.api import Sample, finding, probe_of
from probes.interfaces.facts import ON_A_WIRE, SOURCE, Interface, InterfacesFacts, choose_for_nccl, is_usable_by_nccl

NET = "/sys/class/net"
TEXTS = read_table(__file__, "findings.toml")


def check(facts: InterfacesFacts) -> Iterator[Finding]:
    """Check the selected interface first, then every interface."""
    if facts.network_status_error:
        seen, error = (str(facts.network_status_source),), facts.network_status_error
        yield finding(TEXTS, "interfaces.network_status.invalid", Status.UNKNOWN, "", seen, error=error)
    if not unjudged(facts):
        yield from _check_choice(facts)
    for name, network in facts.networks_missing.items():
        evidence = (f"{facts.network_status_source}: {network} on {name}", f"rtnetlink: no {name}")
        values = {"name": name, "network": network}
        yield finding(TEXTS, "interfaces.network.missing", Status.FAIL, name, evidence, **values)
    for interface in facts.interfaces:
        yield from _check_down(facts, interface)
        yield from _check_address(facts, interface)
        yield from _check_mtu(facts, interface)
    yield from _compare_mtus(facts)
    yield from _compare_speeds(facts)


def unjudged(facts: InterfacesFacts) -> dict[str, str]:
    """Return the checks that the agent's pod cannot do: the manifest of a job's pod determines its interface."""
    if not facts.of_agent or all(interface.role != "pod-default" for interface in facts.interfaces):
        return {}
    reason = "not judged: this is the agent's own pod, and the manifest of a job's pod names the interface"
    return dict.fromkeys(("interfaces.choice.wrong", "interfaces.choice.setting"), reason)


def _fast(interface: Interface) -> tuple[bool, float]:
    return interface.rdma_device is not None, interface.speed_bytes_per_second or 0.0


def _find_default_interface(facts: InterfacesFacts) -> str | None:
    """Return the interface that this host's collective library (NCCL or gloo) would use."""
    if facts.backend == "gloo":
        usable = [i.name for i in facts.interfaces if is_usable_by_nccl(i)]
        if facts.gloo_ifname:
            return next((name for name in facts.gloo_ifname.split(",") if name in usable), None)
        return facts.default_route if facts.default_route in usable else facts.nccl_choice
    if facts.socket_ifname:
        return choose_for_nccl(facts.interfaces, facts.socket_ifname)
    return facts.nccl_choice


def _check_choice(facts: InterfacesFacts) -> Iterator[Finding]:
    gloo = facts.backend == "gloo"
    value = facts.gloo_ifname if gloo else facts.socket_ifname
    setting, library = f"{'GLOO' if gloo else 'NCCL'}_SOCKET_IFNAME={value}", "gloo" if gloo else "NCCL"
    name = _find_default_interface(facts)
    listed = [(i, ", ".join(i.addresses)) for i in facts.interfaces]
    if name is None and value and facts.nccl_choice is not None:
        evidence = tuple(f"{i.name}: {addresses or 'no address'}" for i, addresses in listed[:16])
        values = {"setting": setting, "library": library, "other": facts.nccl_choice}
        yield finding(TEXTS, "interfaces.choice.setting", Status.FAIL, "", evidence, **values)
        return
    current = next((i for i in facts.interfaces if i.name == name), None)
    others = [i for i in facts.interfaces if i is not current]
    # The host has a network card, but only loopback is usable, so other nodes cannot be reached. A host or container
    # without a network card is not checked.
    cut_off = any(i.bus_id for i in others) and not any(is_usable_by_nccl(i) for i in others)
    if current is None or (current.role == "loopback" and cut_off):
        evidence = tuple(f"{i.name}: up {i.up}, running {i.running}, {len(i.addresses)} addresses" for i in others[:16])
        key = "interfaces.choice.none" + " loopback" * (current is not None)
        yield finding(TEXTS, key, Status.FAIL, "", evidence, name=name)
        return
    others = [i for i in others if is_usable_by_nccl(i) and i.role in ("secondary", "host")]
    better = max(others, key=_fast, default=None)
    judged = _judge_choice(current, better) if better is not None else None
    if better is None or judged is None:
        return
    status, reason = judged
    device = f", {better.rdma_device}" if better.rdma_device else ""
    yield finding(
        TEXTS, "interfaces.choice.wrong", status, current.name,
        tuple(f"{i.name}: {i.role}, {', '.join(i.addresses)}{_speed(i)}" for i in (current, better)),
        library=library, chosen=current.name, how=f"because of {setting}" if value else "by default", why=reason,
        better=better.name, what=f"{better.role}{_speed(better)}{device}", remedy=_advise(current, better, others),
    )  # fmt: skip


def _judge_choice(current: Interface, better: Interface) -> tuple[Status, str] | None:
    """Return the severity of using an interface although there is a better one, and the reason; None if it is good."""
    if current.role in ("docker", "bridge", "virtual", "loopback"):
        return Status.FAIL, f"a {current.role} interface that other nodes cannot reach"
    if not _is_faster(better, current):
        return None
    kind = "an interface of unknown role" if current.role == "unknown" else f"a {current.role} interface"
    # If the fast card supports RDMA, sockets carry only the bootstrap, and gloo. The same holds for Slingshot, whose
    # fast card is used through libfabric.
    has_fabric = better.rdma_device or (better.driver or "").startswith("cxi")
    started_only = current.role in ("host", "unknown") and has_fabric
    return Status.INFO if started_only else by_loss(_compute_loss(current, better)), f"{kind}{_speed(current)}"


def _advise(current: Interface, better: Interface, others: list[Interface]) -> str:
    """Name every interface as fast as the best one, because NCCL does not use interfaces that are not named."""
    alike = [i for i in others if _fast(i) == _fast(better) and (i.role, i.driver) == (better.role, better.driver)]
    names = ",".join(i.name for i in (alike if not better.rdma_device else [better]))
    prefixed = current.name.startswith(tuple(names.split(",")))
    return f"Set NCCL_SOCKET_IFNAME={'=' if prefixed else ''}{names} and GLOO_SOCKET_IFNAME={better.name}."


def _is_faster(better: Interface, current: Interface) -> bool:
    """Whether `better` is faster: it has a higher link rate, or it is a secondary network and the other an overlay."""
    if current.rdma_device:
        return False
    if current.speed_bytes_per_second and better.speed_bytes_per_second:
        return better.speed_bytes_per_second > current.speed_bytes_per_second
    return current.role == "pod-default" and better.role == "secondary"


def _compute_loss(current: Interface, better: Interface) -> float:
    """Return the lost fraction of the better interface's rate.

    The rate of an overlay is unknown. In the README a fine-tune took 5 h on it, 2 h 30 on a secondary network.
    """
    if current.speed_bytes_per_second and better.speed_bytes_per_second and current.role != "pod-default":
        return 1.0 - current.speed_bytes_per_second / better.speed_bytes_per_second
    return 0.5


def _speed(interface: Interface) -> str:
    rate = interface.speed_bytes_per_second
    return f", {gigabits(rate)}" if rate else ""


def _check_down(facts: InterfacesFacts, interface: Interface) -> Iterator[Finding]:
    if interface.up is not False and interface.running is not False:
        return
    is_given = interface.role == "secondary" or interface.multus_network is not None
    # A host interface that is down, without address or bond, may intentionally have no cable.
    used = interface.rdma_device is not None and bool(_list_routable(interface) or interface.master)
    bond = next((i for i in facts.interfaces if i.name == interface.master and i.kind in ("bond", "team")), None)
    if is_given or used or bond:
        state = "down" if interface.up is False else "up without a carrier"
        # a network assigned to the pod; without it, the job uses the pod network at half the speed or less
        # the rdma probe judges members of a RoCE LAG by their share; a spare member costs nothing
        of_lag = bond is not None and bond.running and "bond" in (bond.rdma_device or "")
        status = Status.FAIL if is_given else Status.INFO if of_lag else Status.WARN
        key = "interfaces.link.down" + " member" * bool(bond and bond.running)
        yield finding(TEXTS, key, status, interface.name, interface=interface, state=state)


def _check_address(facts: InterfacesFacts, interface: Interface) -> Iterator[Finding]:
    if interface.role == "secondary" and interface.running and not _list_ipv4(interface):
        # With no other secondary network, the job uses the pod network. InfiniBand needs no IP address for RDMA.
        others = any(i.role == "secondary" and i.running and _list_ipv4(i) for i in facts.interfaces)
        mild = others or _list_routable(interface) or interface.kind in ("ipoib", "infiniband")
        status, name = Status.WARN if mild else Status.FAIL, interface.name
        evidence = f"rtnetlink: {name}: {', '.join(interface.addresses) or 'no address'}"
        yield finding(TEXTS, "interfaces.address.missing", status, name, (evidence,), name=name)


def _list_ipv4(interface: Interface) -> list[str]:
    return [address for address in interface.addresses if ":" not in address]


def _list_routable(interface: Interface) -> list[str]:
    return [address for address in interface.addresses if not address.lower().startswith("fe80")]


def _check_mtu(facts: InterfacesFacts, interface: Interface) -> Iterator[Finding]:
    mtu, name, expected = interface.mtu_bytes, interface.name, interface.multus_mtu_bytes
    parent = next((i for i in facts.interfaces if i.name == interface.parent), None)
    whose = "network-status"
    if not (mtu and expected and mtu != expected):
        smaller = interface.kind in ("macvlan", "ipvlan", "vlan") and mtu and parent and mtu < (parent.mtu_bytes or 0)
        expected, whose = (parent.mtu_bytes, f"its parent {parent.name}") if smaller and parent else (None, "")
    if expected:
        evidence = (f"rtnetlink: {name} mtu {mtu}", f"{whose}: mtu {expected}")
        values = {"name": name, "mtu": mtu, "whose": whose, "wanted": expected}
        yield finding(TEXTS, "interfaces.mtu.mismatch", Status.WARN, name, evidence, **values)


def _compare_mtus(facts: InterfacesFacts) -> Iterator[Finding]:
    """Report MTU differences between networks of one pod with the same kind, driver and speed."""
    groups: dict[tuple[object, ...], list[Interface]] = {}
    for i in facts.interfaces:
        if i.running and i.role == "secondary" and i.mtu_bytes:
            groups.setdefault((i.kind, i.driver, i.speed_bytes_per_second), []).append(i)
    for group in groups.values():
        counts = Counter(i.mtu_bytes for i in group)
        usual, count = counts.most_common(1)[0]
        if len(counts) > 1 and 2 * count <= len(group):
            evidence = tuple(f"rtnetlink: {i.name} mtu {i.mtu_bytes}" for i in group[:16])
            mtus = ", ".join(f"{i.name} {i.mtu_bytes}" for i in group)
            yield finding(TEXTS, "interfaces.mtu.mismatch mixed", Status.WARN, "", evidence, mtus=mtus)
            continue
        for odd in (i for i in group if i.mtu_bytes != usual):
            evidence, values = (f"rtnetlink: {odd.name} mtu {odd.mtu_bytes}",), {"name": odd.name, "mtu": odd.mtu_bytes}
            key, fail = "interfaces.mtu.mismatch odd", Status.FAIL
            yield finding(TEXTS, key, fail, odd.name, evidence, count=count, wanted=usual, **values)


def _compare_speeds(facts: InterfacesFacts) -> Iterator[Finding]:
    """Report speed differences between training interfaces without RDMA, or members of a bond, with the same driver."""
    drivers: dict[str, list[Interface]] = {}
    wired = [i for i in facts.interfaces if i.running and i.speed_bytes_per_second and i.kind not in ON_A_WIRE]
    for interface in wired:
        training = interface.role == "secondary" and interface.rdma_device is None
        if interface.driver and (interface.master or training):
            drivers.setdefault(interface.driver, []).append(interface)
    for group in drivers.values():
        best = max(group, key=lambda i: i.speed_bytes_per_second or 0.0)
        highest = best.speed_bytes_per_second or 1.0
        for interface in group:
            rate = interface.speed_bytes_per_second or 0.0
            if rate < highest:
                seen = [f"{NET}/{i.name}/speed: {(i.speed_bytes_per_second or 0) * 8e-6:g}" for i in (interface, best)]
                yield finding(
                    TEXTS, "interfaces.speed.low", by_loss(1.0 - rate / highest), interface.name, tuple(seen),
                    speed=_speed(interface)[2:], best=best.name, most=_speed(best)[2:],
                )  # fmt: skip


def samples(facts: InterfacesFacts) -> Iterator[Sample]:
    """Export what node_exporter does not: the interface's role, its lower device, and NCCL's choice."""
    for interface in facts.interfaces:
        about = (interface.kind, interface.parent, interface.rdma_device, interface.multus_network)
        labels = (interface.name, interface.role, *(value or "" for value in about))
        yield Sample(metric="interfaces_role_info", value=1, labels=labels)
    if facts.nccl_choice:
        yield Sample(metric="interfaces_nccl_choice_info", value=1, labels=(facts.nccl_choice,))


PROBE = probe_of(__file__, SOURCE, check, samples=samples, unjudged=unjudged)

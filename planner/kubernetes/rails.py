"""Rails: RoCE interfaces of a node that a job's pods get a network each for, and what the job must then be told.

As NVIDIA's operator documents several NICs (Network Operator documentation, Kubernetes Launch Kit: profile "MacVLAN
with RDMA Shared", `--multirail`): a MacvlanNetwork for each, and subnets counted up from a first one. In one subnet the
kernel would answer ARP for any rail on any other and send by one of them alone (Linux
Documentation/networking/ip-sysctl.rst: arp_ignore, rp_filter). In the pod Multus names them net1 to netN, in the
annotation's order.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner.advice import PodNeed, Reason, Recommendation, Setting
from planner.kubernetes.job import JobError
from planner.nccl_env.hcas import PortChoice, choose_ports
from planner.nccl_env.interfaces import exact_if_needed
from planner.nccl_env.rdma import hca_list
from planner.nccl_env.situation import NodeView, PortView
from planner.nccl_env.situation import networks as subnets
from probes.api import Snapshot
from probes.interfaces.facts import InterfacesFacts

# Addresses that are nobody's on the Internet: RFC 1918, RFC 6598, RFC 4193. Nobody chose the ranges after the first,
# so they must not run into addresses that belong to someone.
PRIVATE = tuple(
    ipaddress.ip_network(block)
    for block in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)

_MULTUS = "Multus annotation k8s.v1.cni.cncf.io/networks"


def ranges(given: str, gateway: str | None, count: int) -> list[tuple[str, str | None]]:
    """Range and gateway of each of `count` rails: networks of one size, from the given one on."""
    first = ipaddress.ip_network(given)
    home = next((block for block in PRIVATE if first[0] in block and first[-1] in block), None)
    if home is None or int(first[0]) + count * first.num_addresses - 1 > int(home[-1]):
        blocks = ", ".join(str(block) for block in PRIVATE)
        raise JobError(
            f"range={given!r}: {count} interfaces need {count} networks of its size, one after the other, and these "
            f"{f'leave {home}' if home else 'are not private'}; all of them must lie within one of {blocks}"
        )
    door = ipaddress.ip_address(gateway) if gateway else None
    if door and door not in first:
        raise JobError(f"gateway={gateway!r}: must be within range={given!r}: each of {count} interfaces has its own")
    steps = [index * first.num_addresses for index in range(count)]
    return [(f"{first[0] + step}/{first.prefixlen}", str(door + step) if door else None) for step in steps]


def fit(snapshot: Snapshot, names: Iterable[str]) -> set[str]:
    """Those of a node's RoCE interfaces that training is for, or all: a pod starts only if each network can be made.

    Left out are ports that the recommendation keeps NCCL from (management, software), and members of a bridge or of
    Open vSwitch, on which the kernel makes no macvlan (drivers/net/macvlan.c: EBUSY).
    """
    left = set(names)
    facts = snapshot.facts(InterfacesFacts)
    known = {link.name: link for link in facts.interfaces} if facts else {}
    masters = {name: known[name].master for name in left if name in known}
    routed = {link.name for link in known.values() if link.kind == "vrf"}  # takes no packets from its members
    free = {name for name in left if masters.get(name) is None or masters[name] in routed}
    for wanted in (free, {name for name, _ in _ports(snapshot)}):
        left = left & wanted or left
    return left


def in_use(networks: Sequence[str], snapshots: Sequence[Snapshot]) -> str:
    """The ranges that overlap a network these nodes are on, and which; empty: none does."""
    found = []
    for snapshot in snapshots:
        facts = snapshot.facts(InterfacesFacts)
        for link in facts.interfaces if facts else ():
            found += [
                f"{network} ({link.name} of {snapshot.hostname} has {there})"
                for network in networks
                for there in subnets(link)
                if ipaddress.ip_network(network).overlaps(there)
            ]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def attached(
    advice: Recommendation,
    snapshots: Sequence[Snapshot],
    *,
    networks: Sequence[str],
    interfaces: Sequence[str],
    resource: str | None,
) -> Recommendation:
    """The same recommendation for pods on these networks, which stand on these interfaces of the nodes, in order.

    As it would be from a record of such a pod: bootstrap by net1, all HCAs behind the networks, no ring across rails.
    `resource` is what the device plugin calls the HCAs, None where the user named them. Nodes that train over another
    fabric than these interfaces, InfiniBand, leave it as it is.
    """
    rails = [[view for name, view in _ports(snapshot) if name in interfaces] for snapshot in snapshots]
    if not all(rails):
        return advice
    seen = f"net1 to net{len(networks)}: {', '.join(interfaces)}"
    where = Reason(rule="A pod has GIDs of the rails alone that it has a network on", evidence=seen, source=_MULTUS)
    needs = [PodNeed(name="network", value=name, reason=where) for name in networks]
    if resource:
        needs.append(PodNeed(name="resource", value=f"{resource}: 1", reason=where))
    said = _settings(advice.backend, snapshots, rails, seen, len(networks))
    named = {setting.name for setting in said}
    return replace(
        advice,
        needs=(*advice.needs, *needs),
        settings=(*said, *(setting for setting in advice.settings if setting.name not in named)),
        notes=tuple(note for note in advice.notes if note.topic not in named),
    )


def _settings(
    backend: str, snapshots: Sequence[Snapshot], rails: Sequence[Sequence[PortView]], seen: str, count: int
) -> list[Setting]:
    first = Reason(rule="The first rail's network is every pod's net1", evidence=seen, source=_MULTUS)
    if backend != "nccl":
        return [Setting(name="GLOO_SOCKET_IFNAME", value="net1", reason=first)]
    name = exact_if_needed(["net1"], [f"net{number + 1}" for number in range(count)])  # net1 is a prefix of net10
    made = [Setting(name="NCCL_SOCKET_IFNAME", value=name, reason=first)]
    pairs = list(zip(snapshots, rails, strict=True))
    values = {_hcas(snapshot, ports) for snapshot, ports in pairs}
    # Several values: the HCAs have other names on each node, and no list fits all.
    if len(values) == 1 and any(_left_out(snapshot, ports) for snapshot, ports in pairs):
        rule = "A pod may see every HCA of the node, but only those behind its networks have a GID it can use"
        known = Reason(rule=rule, evidence=seen, source="NCCL src/transport/net_ib/init.cc")
        made.append(Setting(name="NCCL_IB_HCA", value=values.pop(), reason=known))
    rule = "Each rail is a subnet of its own, and nothing in the pod routes from one to another"
    apart = Reason(rule=rule, evidence=seen, source="NCCL docs/userguide/source/env.rst")
    return [*made, Setting(name="NCCL_CROSS_NIC", value="0", reason=apart)]


def _left_out(snapshot: Snapshot, ports: Sequence[PortView]) -> bool:
    """Whether NCCL would take a port besides the rails': only then a list of names is worth what it may break."""
    return bool({view.name for view in _node(snapshot).taken_ports()} - {view.name for view in ports})


def _hcas(snapshot: Snapshot, ports: Sequence[PortView]) -> str:
    choice = PortChoice(keep=tuple(ports), secondary={view.device.name: "net1" for view in ports})
    return hca_list(_node(snapshot), choice)


def _ports(snapshot: Snapshot) -> list[tuple[str, PortView]]:
    """The RoCE ports that are recommended to NCCL, by the interface that a macvlan can stand on."""
    kept = [view for view in choose_ports(_node(snapshot)).keep if view.port.link_layer == "Ethernet"]
    return [(name, view) for view in kept if (name := view.device.bond or view.port.netdev)]


def _node(snapshot: Snapshot) -> NodeView:
    return NodeView(hostname=snapshot.hostname, snapshot=snapshot, topology=None)

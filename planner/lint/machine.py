"""Check an environment against a probed machine: interfaces, HCAs, fabrics, GIDs and traffic classes of RoCE.

Specification: NCCL src/os/linux.cc (interfaces), src/transport/net_ib/init.cc (HCAs), src/misc/utils.cc
(parseStringList, matchIfList); docs/userguide/source/env.rst (NCCL_IB_GID_INDEX, NCCL_IB_TC, NCCL_IB_SL); IEEE 802.1Qbb
for priority flow control. A switch takes a packet's priority from DSCP, the upper six bits of the traffic class (by
default priority = DSCP >> 3), or from the VLAN tag, which has the service level. The host does not know
which of them the switch uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from contracts.finding import Finding
from planner.lint.findings import finding
from planner.lint.values import NameList, find_other_net, strtoll
from planner.nccl_env import Version, devices, version_text
from planner.nccl_env.situation import NodeView, PortView, p2p_level_effect
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.interfaces.facts import InterfacesFacts
from probes.rdma.facts import RdmaFacts
from topology.build import build
from topology.graph import NodeTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedMachine(NodeView):
    """A scanned machine, and checks of an environment against it."""

    def lacks_nvlink(self) -> bool:
        """Whether certainly no NVLink connects two GPUs."""
        known = self.topology if self.topology and self.topology.gpus and self.topology.nvlink_known else None
        return known is not None and all(len(island.gpus) == 1 for island in known.islands)

    def has_one_gpu(self) -> bool:
        """Whether the host has a single GPU, which NVLink does not connect to other hosts."""
        facts = self.facts(GpuFacts)
        return facts is not None and len(facts.gpus) == 1 and not facts.gpus[0].fabric_clique

    def check(self, environment: Mapping[str, str], version: Version | None) -> Iterator[Finding]:
        """Yield every contradiction between the environment and this machine."""
        for rule in (_check_interfaces, _check_gloo, _check_hcas, _check_fabric, _check_peers, _check_traffic_class):
            yield from rule(environment, self)
        yield from _check_gid_index(environment, self, version)


def machine_of(snapshot: Snapshot, topology: NodeTopology | None = None) -> ProbedMachine:
    """Return the machine of a snapshot; `topology` is its topology if it has already been built."""
    return ProbedMachine(hostname=snapshot.hostname, snapshot=snapshot, topology=topology or build(snapshot))


def _check_gid_index(environment: Mapping[str, str], node: NodeView, version: Version | None) -> Iterator[Finding]:
    name = "NCCL_IB_GID_INDEX"
    value = environment.get(name, "")
    index, is_integer = strtoll(value)
    if not is_integer or index < 0:
        return
    # Without NCCL_IB_HCA, NCCL does not use the ports that are near no GPU
    far = {} if environment.get("NCCL_IB_HCA") else devices.choose_ports(node).far
    for view in _roce(environment, node):
        if not view.port.gids_known or view.name in far:
            continue
        if (problem := devices.gid_index_problem(view, index)) is None:
            continue
        status, problem_text = problem
        used = ", ".join(f"{each.index}: {each.type} {each.gid}" for each in view.port.gids) or "none"
        able = version if version is not None and version >= (2, 21) else None  # it finds the index
        since = f" NCCL {version_text(able)} finds the right one by itself." if able else ""
        yield finding(
            "env.gid.absent", name, value, f"{view.name} GIDs: {used}", status=status,
            index=index, port=view.name, what=problem_text, since=since,
        )  # fmt: skip


def _check_traffic_class(environment: Mapping[str, str], node: NodeView) -> Iterator[Finding]:
    """Report a traffic class without flow control, if another class of the port has flow control."""
    variables = {name: environment[name] for name in ("NCCL_IB_TC", "NCCL_IB_SL") if name in environment}
    numbers = {name: strtoll(value) for name, value in variables.items()}
    if not variables or not all(is_integer and 0 <= number <= 255 for number, is_integer in numbers.values()):
        return  # invalid values have their own finding
    by_dscp, by_tag = numbers.get("NCCL_IB_TC", (0, True))[0] >> 5, numbers.get("NCCL_IB_SL", (0, True))[0]
    ports = [
        f"{view.name}: PFC on {', '.join(map(str, view.port.pfc_priorities))}" for view in _roce(environment, node)
        # A traffic class configured in the driver overrides the variables.
        if view.port.pfc_priorities and not view.port.traffic_class
        and not {by_dscp, by_tag} & {*view.port.pfc_priorities}
    ]  # fmt: skip
    if ports:
        (name, value), *further = variables.items()
        priority = f"priority {by_dscp}" if by_dscp == by_tag else f"priority {by_dscp} by DSCP or {by_tag} by VLAN tag"
        others = [f"{other}={text}" for other, text in further]
        yield finding("env.class.unprotected", name, value, *others, *ports[:8], priority=priority)


def _roce(environment: Mapping[str, str], node: NodeView) -> Iterator[PortView]:
    """Yield the RoCE ports that NCCL uses with this NCCL_IB_HCA."""
    name_list = NameList.parse(environment.get("NCCL_IB_HCA", ""))
    for view in node.default_ports():
        if name_list.takes(view.device.name, view.port.port) and view.port.link_layer == "Ethernet":
            yield view


def _check_interfaces(environment: Mapping[str, str], node: NodeView) -> Iterator[Finding]:
    name = "NCCL_SOCKET_IFNAME"
    value = environment.get(name, "")
    facts = node.facts(InterfacesFacts)
    if facts is None or len(value) <= 1:
        return
    name_list, running = NameList.parse(value), devices.list_running(facts)
    selected = [each for each in running if name_list.takes(each.name)]
    evidence = f"running interfaces: {', '.join(each.name for each in running) or 'none'}"
    if not selected:
        yield finding("env.interface.absent", name, value, evidence)
        return
    for entry, caught in name_list.matches([(each.name, None) for each in running]):
        if entry in caught and len(caught) > 1 and not name_list.exact and not name_list.negated:
            others = ", ".join(each for each in caught if each != entry)
            yield finding("env.interface.prefix", name, value, evidence, entry=entry, more=others)
    if unfit := [each for each in selected if each.role in devices.UNFIT_ROLES]:  # other nodes cannot reach them
        best, first = devices.choose_best_interface(node), selected[0] in unfit
        effect = "NCCL listens on it, and other nodes cannot reach it" if first else "NCCL also uses it for TCP traffic"
        yield finding(
            "env.interface.unfit", name, value, *(f"{each.name}: {each.role}" for each in unfit),
            names=", ".join(each.name for each in unfit), role=unfit[0].role, effect=effect,
            advice=f"Write {name}={best.name}, or unset it." if best else f"Unset {name}.",
        )  # fmt: skip
    secondary = [each.name for each in running if each.role == "secondary"]
    if secondary and selected[0].role == "pod-default":
        yield finding(
            "env.interface.overlay", name, value, f"{selected[0].name}: pod-default", f"{secondary[0]}: secondary",
            first=selected[0].name, secondary=", ".join(secondary), best=secondary[0],
        )  # fmt: skip


def _check_gloo(environment: Mapping[str, str], node: NodeView) -> Iterator[Finding]:
    name = "GLOO_SOCKET_IFNAME"
    value = environment.get(name)
    facts = node.facts(InterfacesFacts)
    if not value or facts is None:
        return
    names = {each.name for each in facts.interfaces}
    if absent := [entry for entry in value.split(",") if entry not in names]:
        signs = " '^' and '=' mean nothing to gloo." if value[:1] in "^=" else ""
        listed = f"interfaces: {', '.join(sorted(names))}"
        yield finding("env.gloo.interface", name, value, listed, absent=", ".join(absent), signs=signs)


def _check_hcas(environment: Mapping[str, str], node: NodeView) -> Iterator[Finding]:
    name = "NCCL_IB_HCA"
    value = environment.get(name)
    if not value:
        return
    ports = node.verbs_ports()
    if not ports and (fabric := _describe_libfabric(node)):
        yield finding("env.hca.efa", name, value, f"{fabric}, no HCA")
        return
    name_list = NameList.parse(value)
    listed = ", ".join(view.name for view in ports) or "none"
    evidence = f"RDMA ports: {listed}" + ("" if node.facts(RdmaFacts) is None else " (sysfs)")
    matched = [view for view in ports if name_list.takes(view.device.name, view.port.port)]
    if not matched:
        yield finding("env.hca.absent", name, value, evidence)
        return
    names = {entry[0] for entry in name_list.entries}
    for entry, caught in name_list.matches([(view.device.name, view.port.port) for view in ports]):
        further = [each for each in sorted(caught) if each not in names]
        if not caught and not name_list.negated:
            yield finding("env.hca.absent/entry", name, value, evidence, entry=entry)
        if not name_list.exact and entry in caught and further:
            verb, sign = ("leaves out", "^=") if name_list.negated else ("takes", "=")
            right, others = sign + value.lstrip("^="), ", ".join(further)
            yield finding("env.hca.prefix", name, value, evidence, entry=entry, verb=verb, more=others, right=right)
    active = [view for view in matched if view.port.state in (None, "ACTIVE")]
    down = [view for view in matched if view not in active]
    states = [f"{view.name}: {view.port.state}" for view in down]
    if not active:
        yield finding("env.hca.down", name, value, *states)
    elif down and not name_list.negated:
        yield finding("env.hca.down/some", name, value, *states, ports=", ".join(view.name for view in down))
    # A GPU whose nearest NICs are left out sends over the NIC of another GPU
    used, usable = ({view.device.name for view in views} for views in (active, devices.choose_ports(node).chosen))
    nearest = [each for each in (node.topology.nearest_nic if node.topology else ()) if each.decidable and each.local]
    lone = [each.gpu for each in nearest if used.isdisjoint(each.nics) and not usable.isdisjoint(each.nics)]
    if active and lone and "CUDA_VISIBLE_DEVICES" not in environment:
        yield finding("env.hca.partial", name, value, evidence, gpus=", ".join(lone))


def _check_fabric(environment: Mapping[str, str], node: NodeView) -> Iterator[Finding]:
    ports = node.default_ports()
    names = [view.name for view in ports]
    value = environment.get("NCCL_IB_DISABLE", "")
    if strtoll(value)[0] != 0 and ports and not find_other_net(environment):
        yield finding("env.rdma.disabled", "NCCL_IB_DISABLE", value, *names, count=len(ports))
    net = environment.get("NCCL_NET", "")
    fabric = _describe_libfabric(node)
    if net.lower() == "socket" and (ports or fabric):
        yield finding("env.rdma.tcp", "NCCL_NET", net, *(names or [fabric]))
    if net.lower() == "ib" and not ports:
        efa = f"; {fabric} need NCCL_NET='AWS Libfabric' or nothing" if fabric else ""
        yield finding("env.net.absent", "NCCL_NET", net, other=efa)
    provider, expected = environment.get("FI_PROVIDER", ""), "efa" if node.efa_count() else "cxi"
    if fabric and provider and expected not in re.split(r"[;,]", provider.lower()):
        yield finding("env.rdma.tcp/provider", "FI_PROVIDER", provider, fabric, provider=expected)


def _describe_libfabric(node: NodeView) -> str:
    """Describe the NICs that NCCL can only use through libfabric; empty if there are none."""
    if efa := node.efa_count():
        return f"{efa} EFA devices"
    return f"{len(node.cxi())} Slingshot NICs" if node.cxi() else ""


def _check_peers(environment: Mapping[str, str], node: NodeView) -> Iterator[Finding]:
    facts = node.facts(GpuFacts)
    gpus = facts.gpus if facts else ()
    linked = [gpu.index for gpu in gpus if any(link.active for link in gpu.nvlinks)]
    value = environment.get("NCCL_P2P_DISABLE", "")
    if strtoll(value)[0] == 1 and len(linked) > 1:
        proof = [f"GPU{index}: NVLink active" for index in linked[:8]]
        yield finding("env.p2p.nvlink", "NCCL_P2P_DISABLE", value, *proof, count=len(linked))
    level = environment.get("NCCL_P2P_LEVEL")
    if level is not None and gpus:
        effect = p2p_level_effect(level, node)
        yield finding("env.p2p.level", "NCCL_P2P_LEVEL", level, f"{len(gpus)} GPUs", effect=effect)

"""Slurm's topology.conf, generated from probed facts. LLDP shows which switch a port is connected to.

Specification: topology.conf(5) (tree: SwitchName, Nodes, Switches; block: BlockName, Nodes, BlockSizes, Slurm 23.11).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contracts.host_list import compress_host_list, name_in_slurm
from contracts.tables import read_texts
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.interfaces.facts import InterfacesFacts
from probes.rdma.facts import RdmaFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The position of a node: the leaf switches of its ports, and the NVLink domain of its GPUs."""

    node: str  # node name in Slurm
    leaves: frozenset[str] = frozenset()  # empty: unknown
    clique: str = ""  # NVLink fabric clique; empty: none or unknown


def find_placement(snapshot: Snapshot) -> Placement:
    """Return the position of a scanned node, by its RDMA ports, or by all ports if no RDMA port has a neighbour."""
    interfaces, rdma, gpu = snapshot.facts(InterfacesFacts), snapshot.facts(RdmaFacts), snapshot.facts(GpuFacts)
    wired = {link.name: link.neighbour.split(" ")[0] for link in (interfaces.interfaces if interfaces else ())
             if link.neighbour}  # fmt: skip
    names = {port.netdev for device in (rdma.devices if rdma else ()) for port in device.ports}
    cliques = {device.fabric_clique for device in (gpu.gpus if gpu else ()) if device.fabric_clique}
    return Placement(
        node=name_in_slurm(snapshot.hostname), clique=min(cliques, default=""),
        leaves=frozenset(wired[name] for name in names if name in wired) or frozenset(wired.values()),
    )  # fmt: skip


def group_placements(placements: Sequence[Placement]) -> dict[str, tuple[str, ...]]:
    """Group nodes by leaf switch. Leaves that share a node (rails of a pod) form one group, named after the first."""
    groups: list[tuple[set[str], set[str]]] = []
    for placement in placements:
        leaves, nodes = set(placement.leaves), {placement.node}
        for group in [group for group in groups if group[0] & leaves]:
            groups.remove(group)
            leaves |= group[0]
            nodes |= group[1]
        if leaves:
            groups.append((leaves, nodes))
    return {min(leaves): tuple(sorted(nodes)) for leaves, nodes in sorted(groups, key=lambda group: min(group[0]))}


_text = read_texts(__file__, "texts.toml")


def format_topology_conf(placements: Sequence[Placement], *, has_blocks: bool = False) -> str:
    """Format the file for the tree plugin, or for the block plugin with one block per NVLink domain."""
    groups: Mapping[str, Sequence[str]] = group_placements(placements)
    if has_blocks:
        cliques = {placement.clique for placement in placements if placement.clique}
        groups = {key: [placement.node for placement in placements if placement.clique == key] for key in cliques}
    lines = [_text("slurm_blocks" if has_blocks else "slurm_tree", nodes=len(placements))]
    for number, (name, nodes) in enumerate(sorted(groups.items()), 1):
        head = f"BlockName=block{number}" if has_blocks else f"SwitchName={_format_switch_name(name)}"
        lines.append(f"{head} Nodes={compress_host_list(nodes)}" + f" # {name}" * has_blocks)
    if has_blocks and groups:
        lines.append(f"BlockSizes={min(map(len, groups.values()))}")
    elif len(groups) > 1:
        lines.append(f"SwitchName=top Switches={compress_host_list(map(_format_switch_name, groups))}")
    placed = {node for nodes in groups.values() for node in nodes}
    if unknown := [placement.node for placement in placements if placement.node not in placed]:
        lines.append(f"# Unknown place, add them yourself: {compress_host_list(unknown)} (else no job runs there)")
    return "\n".join(lines) + "\n"


def _format_switch_name(name: str) -> str:
    """Return a name that Slurm parses as one word."""
    return re.sub(r"[^\w.-]", "-", name)

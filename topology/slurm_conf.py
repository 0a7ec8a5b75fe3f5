"""Slurm's topology.conf and gres.conf: generated from probed facts, or compared with them.

Specification: topology.conf(5) (tree: SwitchName, Nodes, Switches; block: BlockName, Nodes, BlockSizes, Slurm 23.11)
and gres.conf(5) (NodeName, Name, Count, File, AutoDetect). LLDP shows which switch a port is connected to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from contracts.host_list import HostListError, cluster_name, compress_host_list, expand_host_list, slurm_name
from probes.api import Absent, Snapshot
from probes.gpu.facts import SOURCE as GPU
from probes.gpu.facts import GpuFacts
from probes.interfaces.facts import InterfacesFacts
from probes.rdma.facts import RdmaFacts

MOST_FILES = 64  # files that include each other; Slurm has no limit


class SlurmConfError(ValueError):
    """The file cannot be read as a Slurm configuration; the message names the file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The position of a node: the leaf switches of its ports, and the NVLink domain of its GPUs."""

    node: str  # node name in Slurm
    leaves: frozenset[str] = frozenset()  # empty: unknown
    clique: str = ""  # NVLink fabric clique; empty: none or unknown
    gpus: int | None = None  # None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences between a Slurm file and the nodes, and parts that could not be compared; one sentence each."""

    differences: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def placement_of(snapshot: Snapshot) -> Placement:
    """Return the position of a scanned node, by its RDMA ports, or by all ports if no RDMA port has a neighbour."""
    interfaces, rdma, gpu = snapshot.facts(InterfacesFacts), snapshot.facts(RdmaFacts), snapshot.facts(GpuFacts)
    wired = {link.name: link.neighbour.split(" ")[0] for link in (interfaces.interfaces if interfaces else ())
             if link.neighbour}  # fmt: skip
    names = {port.netdev for device in (rdma.devices if rdma else ()) for port in device.ports}
    cliques = {one.fabric_clique for one in (gpu.gpus if gpu else ()) if one.fabric_clique}
    gpus = len(gpu.gpus) if gpu and (gpu.gpus or gpu.driver_error is None) else None
    if isinstance(snapshot.outcomes.get(GPU.name), Absent):  # there is neither a driver nor a GPU on the PCI bus
        gpus = 0
    return Placement(
        node=slurm_name(snapshot.hostname), clique=min(cliques, default=""), gpus=gpus,
        leaves=frozenset(wired[name] for name in names if name in wired) or frozenset(wired.values()),
    )  # fmt: skip


def groups_of(placements: Sequence[Placement]) -> dict[str, tuple[str, ...]]:
    """Group nodes by leaf switch. Leaves that share a node (rails of a pod) form one group, named after the first."""
    groups: list[tuple[set[str], set[str]]] = []
    for one in placements:
        leaves, nodes = set(one.leaves), {one.node}
        for group in [group for group in groups if group[0] & leaves]:
            groups.remove(group)
            leaves |= group[0]
            nodes |= group[1]
        if leaves:
            groups.append((leaves, nodes))
    return {min(leaves): tuple(sorted(nodes)) for leaves, nodes in sorted(groups, key=lambda group: min(group[0]))}


_HEAD = {
    False: "# For TopologyPlugin=topology/tree. LLDP names the switch at the other end of a wire, and nothing above:\n"
    "# one switch that joins all leaves is assumed. Leaves that share nodes (rails) are one line.",
    True: "# For TopologyPlugin=topology/block (Slurm 23.11 and newer). A block is an NVLink domain.",
}


def topology_conf(placements: Sequence[Placement], *, has_blocks: bool = False) -> str:
    """Format the file for the tree plugin, or for the block plugin with one block per NVLink domain."""
    groups: Mapping[str, Sequence[str]] = groups_of(placements)
    if has_blocks:
        cliques = {one.clique for one in placements if one.clique}
        groups = {key: [one.node for one in placements if one.clique == key] for key in cliques}
    lines = [
        f"# topology.conf, written by `topoflight topo` from {len(placements)} scanned node(s).",
        _HEAD[has_blocks],
    ]
    for number, (name, nodes) in enumerate(sorted(groups.items()), 1):
        head = f"BlockName=block{number}" if has_blocks else f"SwitchName={_format_switch_name(name)}"
        lines.append(f"{head} Nodes={compress_host_list(nodes)}" + f" # {name}" * has_blocks)
    if has_blocks and groups:
        lines.append(f"BlockSizes={min(map(len, groups.values()))}")
    elif len(groups) > 1:
        lines.append(f"SwitchName=top Switches={compress_host_list(map(_format_switch_name, groups))}")
    placed = {node for nodes in groups.values() for node in nodes}
    if unknown := [one.node for one in placements if one.node not in placed]:
        lines.append(f"# Unknown place, add them yourself: {compress_host_list(unknown)} (else no job runs there)")
    return "\n".join(lines) + "\n"


def _format_switch_name(name: str) -> str:
    """Return a name that Slurm parses as one word."""
    return re.sub(r"[^\w.-]", "-", name)


Read = Callable[[str], str]
"""Returns the text of a file. Its name is absolute, or relative to the folder of Slurm's configuration."""


def _read_lines(file: str, read: Read, names: list[str] | None = None) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (place, members by lower-case name) of each line ("topology.conf, line 3"), including included files.

    `names`: files read so far. Raises SlurmConfError.
    """
    names, number = [] if names is None else names, 1
    names.append(file)
    for line in read(file).replace("\\\n", "\0").split("\n"):
        place, words = f"{file}, line {number}", line.replace("\0", "").partition("#")[0].split()
        number += 1 + line.count("\0")  # lines joined by a trailing backslash
        if len(words) == 2 and words[0].lower() == "include":
            name = words[1]
            if "%c" in name:  # slurm.conf(5), INCLUDE MODIFIERS
                name = name.replace("%c", cluster_name(read("slurm.conf")))
            if name in names or len(names) == MOST_FILES:
                why = "it was read before" if name in names else f"at most {MOST_FILES} files are read"
                raise SlurmConfError(f"{place}: Include {name}: {why}")
            yield from _read_lines(name, read, names)
        elif any("=" not in word for word in words):
            raise SlurmConfError(f"{place}: {line.strip()[:80]!r} must consist of NAME=VALUE")
        elif words:
            yield place, {key.lower(): value for key, _, value in (word.partition("=") for word in words)}


def _expand_hosts(place: str, text: str) -> tuple[str, ...]:
    try:
        return expand_host_list(text)
    except HostListError as error:
        raise SlurmConfError(f"{place}: {error}") from None


def _report_not_scanned(file: str, nodes: Iterable[str], placements: Sequence[Placement]) -> list[str]:
    """Return a sentence about nodes in a file that were not scanned; empty if there are none."""
    absent = sorted(set(nodes) - {one.node for one in placements})
    what = f"{file}: no recording was given of {compress_host_list(absent)}. Add one with --host for each node."
    return [what] if absent else []


def compare_topology(read: Read, placements: Sequence[Placement]) -> Comparison:
    """Compare the groups of nodes in topology.conf with their network cables or NVLink domains."""
    wrong: list[str] = []
    rows = [(place, row) for place, row in _read_lines("topology.conf", read) if "nodes" in row]
    if not rows:
        return Comparison(unknown=("topology.conf: no line has Nodes=, so it places no node.",))
    wired = {node: leaf for leaf, nodes in groups_of(placements).items() for node in nodes}
    domains = {one.node: one.clique for one in placements if one.clique}
    placed: dict[str, str] = {}
    for place, row in rows:
        name = row.get("switchname") or row.get("blockname") or "?"
        what = "NVLink domain" if "blockname" in row else "switch"
        by_what = domains if what == "NVLink domain" else wired
        found: dict[str, list[str]] = {}
        for node in _expand_hosts(place, row["nodes"]):
            placed[node] = what
            if node in by_what:
                found.setdefault(by_what[node], []).append(node)
        if len(found) > 1:
            each = "; ".join(f"{what} {key}: {compress_host_list(nodes)}" for key, nodes in sorted(found.items()))
            wrong.append(f"{place}: {name} holds nodes of several: {each}")
    if missing := [one.node for one in placements if one.node not in placed]:
        wrong.append(f"topology.conf: {compress_host_list(missing)} in no line; Slurm starts no job across them")
    unknown = _report_not_scanned("topology.conf", placed, placements)
    scanned = [one.node for one in placements if one.node in placed]
    if unwired := [node for node in scanned if placed[node] == "switch" and node not in wired]:
        unknown.append(
            f"topology.conf: no LLDP facts of {compress_host_list(unwired)}, so their switches are unknown. "
            "Set LLDP=yes in systemd-networkd for the ports of the network adapters, and record these nodes again."
        )
    if outside := [node for node in scanned if placed[node] == "NVLink domain" and node not in domains]:
        unknown.append(f"topology.conf: no NVLink domain is known of {compress_host_list(outside)}.")
    return Comparison(differences=tuple(wrong), unknown=tuple(unknown))


def compare_gres(read: Read, placements: Sequence[Placement]) -> Comparison:
    """Compare the GPU counts in gres.conf with the GPUs that were found; counts set by AutoDetect are skipped."""
    counts: dict[str, int] = {}
    places: dict[str, str] = {}
    lines = list(_read_lines("gres.conf", read))
    detects = any(row.get("autodetect", "off").lower() != "off" for _, row in lines)
    for place, row in lines:
        if row.get("name", "").lower() != "gpu" or (detects and not ("file" in row or "count" in row)):
            continue
        files = re.sub(r"^/dev/", "", row.get("file", "")).replace("/", "_")
        count = row.get("count", "") or str(len(_expand_hosts(place, files)) or 1)  # gres.conf(5), Count
        if not re.fullmatch(r"\d{1,6}", count):
            raise SlurmConfError(f"{place}: Count={count[:20]}: must be a number")
        for node in _expand_hosts(place, row["nodename"]) if "nodename" in row else [one.node for one in placements]:
            counts[node] = counts.get(node, 0) + int(count)
            places[node] = place
    missing = [one.node for one in placements if one.gpus and one.node not in counts and not detects]
    none = f"gres.conf: no line is for the GPUs of {compress_host_list(missing)}, so Slurm gives none of them to jobs"
    differences = (none,) * bool(missing) + tuple(
        f"{places[one.node]}: {counts[one.node]} GPUs on {one.node}, and {one.gpus} were found"
        for one in placements
        if one.gpus is not None and one.node in counts and counts[one.node] != one.gpus
    )
    unknown = _report_not_scanned("gres.conf", counts, placements)
    if uncounted := [one.node for one in placements if one.gpus is None and (one.node in counts or not detects)]:
        unknown.append(
            f"gres.conf: the number of GPUs of {compress_host_list(uncounted)} is unknown. "
            "`topoflight scan` on the node shows what NVML answers."
        )
    return Comparison(differences=differences, unknown=tuple(unknown))

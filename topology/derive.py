"""Facts derived from devices and pairs of any source: the machine, NVLink islands, nearest NICs of each GPU, rails, and
signs of a virtual machine.

Specification: labels of `nvidia-smi topo -m`; NCCL src/graph/search.cc for the effect of the nearest NIC.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, pairwise

from contracts.tables import read_texts
from hardware.machines import Machine, machine_of_host
from topology.graph import (
    FARTHEST,
    UNKNOWN,
    GpuNode,
    Island,
    NearestNic,
    NicNode,
    NodeTopology,
    Pair,
    Pairs,
    PathClass,
    Rail,
    level,
    path_class,
    rank,
)


def complete(node: NodeTopology, *, is_physical: bool = False) -> NodeTopology:
    """Return the node with its machine, islands, nearest NICs and rails; `topology.paths` adds bandwidths.

    A given reason in `virtual` is kept. Otherwise, unless the host is known to be physical, the pairs themselves may
    show that a hypervisor hides the PCIe tree.
    """
    warnings, machine = node.warnings, find_reference(node)
    # NCCL XML has PHB for NODE as well, so PHB everywhere is normal for a single real socket, but not for a machine
    # that is built with switches.
    drawn = node.source == "NCCL XML" and (machine is None or machine.gpu_nic not in ("PIX", "PXB"))
    virtual = node.virtual or (None if drawn or is_physical else explain_virtual(node.gpus, node.nics, node.pairs))
    nearest = find_nearest_nics(node.gpus, node.nics, node.pairs, virtual)
    if virtual and virtual not in warnings:
        warnings = (*warnings, virtual)
    return replace(
        node,
        pairs=mark_through_neighbours(node.gpus, node.pairs),
        virtual=virtual,
        islands=find_islands(node.gpus, node.pairs),
        nearest_nic=nearest,
        rails=find_rails(nearest),
        expectations=(),
        sku=machine.called if machine else None,
        warnings=warnings,
    )


def find_reference(node: NodeTopology) -> Machine | None:
    """Return the machine row by GPU model, GPU count, NVLinks and product name; None if unknown or if none matches."""
    models = {gpu.model for gpu in node.gpus if gpu.model}
    links = max((pair.nvlinks for pair in node.pairs), default=0)
    return machine_of_host(models.pop(), len(node.gpus), node.product, links) if len(models) == 1 else None


_text = read_texts(__file__, "texts.toml")


def find_islands(gpus: tuple[GpuNode, ...], pairs: Iterable[Pair]) -> tuple[Island, ...]:
    """Return groups of GPUs connected by NVLink, in matrix order. GPUs without NVLink are in no group."""
    pair_of, names = Pairs(pairs), [gpu.name for gpu in gpus]
    result, visited = [], set[str]()
    for name in names:
        group, new = set[str](), {name} - visited
        while new:
            group |= new
            new = {b for a in new for b in names if pair_of.nvlinks(a, b)} - group
        visited |= group
        if len(group) > 1:
            members = tuple(gpu.name for gpu in gpus if gpu.name in group)
            counts = [pair_of.nvlinks(a, b) for a, b in combinations(members, 2)]
            labels = tuple(f"NV{count}" for count in sorted(set(counts)) if count)
            result.append(Island(gpus=members, all_to_all=all(counts), nvlinks_per_pair=labels))
    return tuple(result)


def mark_through_neighbours(gpus: tuple[GpuNode, ...], pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Mark pairs that NCCL connects by NVLink through one other GPU as NVB; their label remains nvidia-smi's.

    Specification: NCCL src/graph/paths.cc, ncclTopoSetPaths: at most one intermediate GPU.
    """
    links, names = Pairs(pairs), [gpu.name for gpu in gpus]
    return tuple(
        replace(pair, path=PathClass.NVB)
        if not pair.nvlinks
        and {pair.a, pair.b} <= set(names)
        and any(links.nvlinks(pair.a, via) and links.nvlinks(via, pair.b) for via in names)
        else pair
        for pair in pairs
    )


def explain_virtual(gpus: tuple[GpuNode, ...], nics: tuple[NicNode, ...], pairs: Iterable[Pair]) -> str | None:
    """Return why the PCIe labels of the matrix cannot be trusted; None if they match a physical machine.

    A hypervisor that hides the PCIe tree leaves the same label for all pairs without NVLink, such as PHB everywhere, or
    SYS between GPUs of one NUMA node. NODE everywhere is normal for a single physical socket.
    """
    labels = Pairs(pairs)
    across = [labels.label(gpu.name, nic.name) for gpu in gpus for nic in nics]
    among = [labels.label(a.name, b.name) for a, b in combinations(gpus, 2) if not labels.nvlinks(a.name, b.name)]
    levels = {level(label) for label in across + among} - {UNKNOWN}
    if len(levels) != 1 or len(gpus) < 2:
        return None
    (label,) = levels
    affinities = {gpu.numa_affinity for gpu in gpus if gpu.numa_affinity and gpu.numa_affinity != UNKNOWN}
    if label in ("PHB", "PHB/NODE") and len(gpus) > 2:
        span = f"NUMA affinity {', '.join(sorted(affinities))} for all" if affinities else "no NUMA affinity known"
        return _text("all_phb", span=span)
    # NICs closer to each other than SYS prove a tree on another socket than every GPU; without their rows nobody knows.
    tree_visible = {level(labels.label(a.name, b.name)) for a, b in combinations(nics, 2)} - {"SYS"}
    if label == "SYS" and len(nics) > 1 and not _is_coherent(gpus) and not tree_visible:
        return "every GPU is SYS from every NIC: a hypervisor or container hides the PCIe tree"
    for a, b in combinations(gpus, 2):
        same = a.numa_affinity == b.numa_affinity and (a.numa_affinity or "").isdigit()
        if label == "SYS" and same and level(labels.label(a.name, b.name)) == "SYS":
            return _text("sys_apart", a=a.name, b=b.name)
    return None


def find_nearest_nics(
    gpus: tuple[GpuNode, ...], nics: tuple[NicNode, ...], pairs: Iterable[Pair], virtual: str | None = None
) -> tuple[NearestNic, ...]:
    """Return the NICs with the best label for each GPU, including ties. NICs without an active port are excluded."""
    if not nics:
        return ()
    labels = Pairs(pairs)
    undecidable = _why_undecidable(gpus, nics, labels, virtual)
    return tuple(
        _nearest(gpu.name, nics, labels, undecidable if gpu.usable else f"{gpu.name} does not answer") for gpu in gpus
    )


def _why_undecidable(gpus: tuple[GpuNode, ...], nics: tuple[NicNode, ...], labels: Pairs, virtual: str | None) -> str:
    levels = {level(labels.label(gpu.name, nic.name)) for gpu in gpus if gpu.usable for nic in nics}
    if len(levels) > 1:
        return ""
    (label,) = levels or {UNKNOWN}
    if label == UNKNOWN:
        return "no path between GPUs and NICs is known"
    if virtual:
        return virtual
    if len(nics) > 1 and label == "SYS" and _is_coherent(gpus):
        return _text("coherent")
    between = {level(labels.label(a.name, b.name)) for a, b in combinations(nics, 2)}
    if label == "SYS" and between and between <= {"SYS", UNKNOWN}:  # else the NICs are on a socket without GPUs
        return "every GPU is SYS from every NIC, so no NIC is nearer than another"
    return ""


def _is_coherent(gpus: tuple[GpuNode, ...]) -> bool:
    """Whether the GPUs have NUMA nodes of their own, as on a Grace CPU (C2C): nvidia-smi shows SYS to every NIC."""
    return any((gpu.gpu_numa_id or "").isdigit() for gpu in gpus)


def _nearest(gpu: str, nics: tuple[NicNode, ...], pairs: Pairs, undecidable: str) -> NearestNic:
    usable = tuple(nic for nic in nics if nic.active is not False) or nics
    best = min(rank(pairs.label(gpu, nic.name)) for nic in usable)
    tied = tuple(nic.name for nic in usable if rank(pairs.label(gpu, nic.name)) == best)
    label = level(pairs.label(gpu, tied[0]))
    pair = pairs.get(gpu, tied[0])
    down = [nic.name for nic in nics if nic.active is False and rank(pairs.label(gpu, nic.name)) < best]
    reason = undecidable or (f"{', '.join(down)} would be nearer, but has no active port" if down else "")
    missing = [nic.name for nic in usable if pairs.get(gpu, nic.name) is None]
    if missing and rank("PIX") < best < FARTHEST:
        undecidable = reason = reason or f"{', '.join(missing[:4])} may be nearer: no path is known"
    if best == FARTHEST:
        tied, reason = (), reason or "no path to any NIC is known"
    return NearestNic(
        gpu=gpu,
        label=label,
        path=pair.path if pair else path_class(label),
        nics=tied,
        local=best < rank("SYS"),
        decidable=not undecidable and best < FARTHEST,
        why=reason,
    )


def find_rails(nearest: tuple[NearestNic, ...]) -> tuple[Rail, ...]:
    """Return one rail per NIC, or group of NICs, that GPUs use. If several GPUs tie for several NICs, split by order.

    GPUs without a local NIC are in no rail: NCCL sends their data through another GPU or across the CPU.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for entry in nearest:
        # `why` is set if the GPU's own NIC is down; the NIC it uses is another GPU's rail.
        if entry.local and entry.decidable and not entry.why:
            groups.setdefault(entry.nics, []).append(entry.gpu)
    members: dict[tuple[str, ...], list[str]] = {}
    for nics, gpus in groups.items():  # GPUs that tie for the same NICs get them in order, split as evenly as possible
        count = min(len(nics), len(gpus))
        cuts = [(i * len(nics) // count, i * len(gpus) // count) for i in range(count + 1)]
        for (nic, gpu), (nic_end, gpu_end) in pairwise(cuts):
            members.setdefault(nics[nic:nic_end], []).extend(gpus[gpu:gpu_end])
    return tuple(Rail(rail=i, nics=nics, gpus=tuple(gpus)) for i, (nics, gpus) in enumerate(members.items()))

"""Rules about GPUs and their links. Most variables have correct defaults, and a note says not to set them.

Specification: NCCL docs/userguide/source/env.rst, src/graph/{topo,paths}.cc, src/transport/nvls.cc, src/mnnvl.cc.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hardware.gpus import gpu_named
from hardware.machines import catalogue, machines
from planner.nccl_env.nodes import NodeView, all_nvlink, p2p_level_effect
from planner.nccl_env.situation import Note, Setting, Situation, note, setting
from topology.graph import PathClass


def unread(case: Situation) -> Note | None:
    """Report GPUs that could not be read, so the advice is based on fewer facts."""
    failed = case.unread("gpu")
    return note("gpu.unread", failed) if failed else None


def nvlink_between_nodes(case: Situation) -> str | None:
    """Return the evidence that NVLink connects nodes of this job (MNNVL); None if there is none."""
    if case.one_node:
        return None
    cliques: Counter[str] = Counter()
    for node in case.nodes:
        facts = node.gpu()
        cliques.update({gpu.fabric_clique for gpu in facts.gpus if gpu.fabric_clique} if facts else ())
    is_tray = all(0 < node.gpu_count() <= 4 for node in case.nodes)  # of an NVLink domain (GB200 NVL72); HGX has 8
    shared = [clique for clique, hosts in cliques.items() if hosts > 1 or is_tray]
    racks = [node.hostname for node in case.nodes if not node.snapshot and _is_of_rack(node)]
    if shared:
        return f"fabric clique {shared[0]} on {cliques[shared[0]]} host(s)"
    return f"{racks[0]}: catalogue" if racks else None


def mnnvl(case: Situation) -> Note | None:
    """NCCL_MNNVL_ENABLE: enabled automatically, but requires IMEX."""
    evidence = nvlink_between_nodes(case)
    if evidence is None:
        return None
    return note("mnnvl", evidence)


def _is_of_rack(node: NodeView) -> bool:
    """Whether a catalogue machine has an NVLink domain of several nodes."""
    sku = node.topology.sku if node.topology else None
    return any(row.name == sku and row.nvlink_nodes > 1 for row in catalogue())


def nvls(case: Situation) -> Note | None:
    """NCCL_NVLS_ENABLE: enabled automatically if the switches support reductions."""
    capable = [
        node.hostname
        for node, capability in _list_capabilities(case)
        if capability >= (9, 0) and node.gpu_count() > 2 and all_nvlink(node)
    ]
    if not capable:
        return None
    return note("nvls", f"{capable[0]}: NVSwitch, compute capability 9.0 or later")


def topo_file(case: Situation) -> Setting | Note | None:
    """NCCL_TOPO_FILE: a VM that hides the PCIe tree needs the file of its provider."""
    topic = "NCCL_TOPO_FILE"
    for node in case.nodes:
        pci = node.pci()
        why = (node.topology.virtual if node.topology else None) or (pci.virtual_tree if pci else None)
        if why is None or node.gpu_count() < 2:
            continue
        info = node.hostinfo()
        evidence = f"{node.hostname}: {why}"
        named = (info.nccl_conf or {}).get(topic) if info else None
        if named:
            return note("topo_file.nccl_conf", f"{evidence}; nccl.conf: {topic}={named}")
        if case.efa:
            return note("topo_file.efa", evidence)
        files = pci.topology_files if pci else ()
        path = _find_azure_file(node, files)
        if path is not None:
            return setting("topo_file.azure", path, f"{evidence}; {path} is there")
        if nvidia := [path for path in files if path.startswith("/var/run/nvidia-topologyd/")]:
            return note("topo_file.topologyd", f"{evidence}; {nvidia[0]}")
        return note("topo_file.absent", evidence)
    return None


def _find_azure_file(node: NodeView, files: Sequence[str]) -> str | None:
    """Return the existing file of this VM series; Azure's HPC images name it in /etc/nccl.conf."""
    models = [gpu_named(name) for name in node.gpu_names()]
    with_file = (row for row in machines() if row.topology_file)
    series = next((row.topology_file for row in with_file if gpu_named(row.gpu) in models), None)
    wanted = (f"/opt/microsoft/{series}/topo.xml", f"/opt/microsoft/{series}-topo.xml")
    return next((path for path in wanted if path in files), None)


def p2p_level(case: Situation) -> Note | None:
    """NCCL_P2P_LEVEL: never recommended; explained if the machine already has it set."""
    topic = "NCCL_P2P_LEVEL"
    for node in case.nodes:
        info = node.hostinfo()
        level = info.nccl_variables.get(topic) if info else None
        if level is not None:
            return Note(topic=topic, text=p2p_level_effect(level, node), evidence=f"{node.hostname}: {topic}={level}")
    return None


def _list_capabilities(case: Situation) -> Iterator[tuple[NodeView, tuple[int, int]]]:
    for node in case.nodes:
        gpus = node.topology.gpus if node.topology else ()
        known = [gpu.compute_capability for gpu in gpus if gpu.compute_capability]
        facts = node.gpu()
        if not known and facts:
            known = [gpu.compute_capability for gpu in facts.gpus if gpu.compute_capability]
        if known:
            yield node, min(known)


def _is_two_on_amd(node: NodeView) -> bool:
    """Whether the node has at most two GPUs and AMD CPUs, so that NCCL 2.23+ allows any P2P (ncclTopoCheckP2p)."""
    info = node.hostinfo()
    return info is not None and info.cpu_vendor == "AuthenticAMD" and node.gpu_count() <= 2


def pcie_pairs(case: Situation) -> Note | None:
    """Explain NCCL's default behaviour for GPUs connected by PCIe only."""
    if case.backend != "nccl":
        return None
    for node in case.nodes:
        if node.topology is None or node.gpu_count() < 2 or all_nvlink(node) or _is_two_on_amd(node):
            continue
        far = [p for p in node.topology.pairs if p.a.startswith("GPU") and p.b.startswith("GPU") and p.path]
        beyond = [pair for pair in far if pair.path and pair.path > PathClass.PXB]
        if beyond:
            pair = beyond[0]
            return note("p2p_level.pcie", f"{node.hostname}: {pair.a}-{pair.b} {pair.label}")
    return None

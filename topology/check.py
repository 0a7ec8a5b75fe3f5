"""Checks of a node's topology: findings with evidence and remedy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from contracts.finding import Finding, Status, by_loss
from contracts.tables import read_table, read_texts
from hardware.gpus import is_card, is_of, most_links, without_gdr
from hardware.machines import Machine
from hardware.units import gigabits, some
from probes.api import finding, list_codes
from probes.rdma.facts import OTHER, RAIL, RdmaDevice
from topology.derive import explain_virtual, find_reference
from topology.graph import UNKNOWN, NearestNic, NicNode, NodeTopology, Pair, Pairs, PathClass, rank
from topology.paths import RAW_OVER_PLAN, gigabytes, is_behind_own_switch

TEXTS = read_table(__file__, "findings.toml")
CODES = list_codes(TEXTS)

_RDMA = ("hca", "efa")
_NO_ADAPTER = ("ethernet", "rxe", "siw")  # TCP sockets, and RDMA in software
_GDR_NUMBERS = (PathClass.LOC, PathClass.PIX, PathClass.PXB, PathClass.PHB, PathClass.SYS)
_text = read_texts(__file__, "texts.toml")


def check(
    node: NodeTopology,
    *,
    gdr_level: str | None = None,
    gpus_on_bus: int | None = None,
    in_container: bool = True,
    of_job: bool = False,
) -> tuple[Finding, ...]:
    """Return every finding about a node; `gdr_level` is the job's NCCL_NET_GDR_LEVEL, None if not set.

    `gpus_on_bus`: number of GPUs on the PCI bus of the host (`probes.pci.probe.count_bare_metal_gpus`); None in a
    container or VM, or if not read. `in_container`: devices of the host may be hidden. `of_job`: the container is a
    job's, which may have requested some of the GPUs and their share of the RDMA devices.
    """
    findings = (
        _check_nvlink_missing(node), _check_nvlink_asymmetric(node), _check_nvlink_board(node),
        _check_gpu_nic(node, find_farthest_gdr(gdr_level)), _check_undecidable(node), _check_virtual(node),
        _check_gdr_refused(node), _check_rails(node), _check_nic_pcie(node), _check_gpu_pcie(node),
        _check_reference(node, gpus_on_bus, in_container, of_job),
    )  # fmt: skip
    return tuple(chain.from_iterable(findings))


def find_farthest_gdr(level: str | None) -> PathClass | None:
    """Return the longest path on which NCCL_NET_GDR_LEVEL allows GPUDirect RDMA; None if it is not set or invalid.

    Specification: NCCL user guide, NCCL_NET_GDR_LEVEL, and src/graph/paths.cc: names in capital letters, or the older
    numbers 0 (LOC) to 4 (SYS). NCCL ignores any other value.
    """
    text = level or ""
    if text.isdecimal() and len(text) < 4:
        return _GDR_NUMBERS[min(int(text), len(_GDR_NUMBERS) - 1)]
    return PathClass[text] if text in PathClass.__members__ and PathClass[text] <= PathClass.SYS else None


def uses_gdr(near: NearestNic, farthest: PathClass | None) -> bool:
    """Whether NCCL uses GPUDirect RDMA from this GPU to its nearest NIC, by default or because of the job's level."""
    return near.gdr_by_default if farthest is None else near.path is not None and near.path <= farthest


def find_role(node: NodeTopology, device: RdmaDevice, devices: tuple[RdmaDevice, ...]) -> str | None:
    """Return RAIL if the device is nearest to a GPU, OTHER if each GPU has a nearer device, None if undetermined.

    A device whose ports are down is classified by its position, because another card does not become the GPU's rail.
    """
    pairs = Pairs(node.pairs)
    nearest = [near for near in node.nearest_nic if near.decidable and near.local]
    tied = [near for near in nearest if rank(pairs.label(near.gpu, device.name)) <= rank(near.label)]
    names = {name for near in tied or nearest for name in near.nics} - {device.name}
    others = [each for each in devices if each.name in names]
    rate, best = device.bytes_per_second, max((each.bytes_per_second for each in others), default=0.0)
    if tied:
        # on servers without PCIe switches an onboard port is as near as the rails, but slower and of another model
        models = {each.model for each in others if each.bytes_per_second == best}
        return OTHER if rate < best and device.model and models.isdisjoint((device.model, None)) else RAIL
    return OTHER if nearest and len(nearest) == len(node.nearest_nic) and rate <= best else None


def _format_pairs(pairs: Iterable[Pair]) -> tuple[str, ...]:
    """Format pairs as evidence."""
    return tuple(f"{pair.a} to {pair.b}: {pair.label}" for pair in pairs)


def _count_switch_links(node: NodeTopology) -> int:
    """Return the NVLinks per GPU if the counts are only possible with an NVSwitch, else 0."""
    linked = [pair for pair in node.gpu_pairs() if pair.nvlinks]
    ends = max((gpu.count_nvlinks("nvswitch") for gpu in node.gpus), default=0)
    largest = max((ends, *(pair.nvlinks for pair in linked)))  # a pair has the lower count
    if not ends and len({name for pair in linked for name in (pair.a, pair.b)}) == 2 * len(linked):
        return 0  # bridges connect pairs of PCIe cards; a card without a bridge is normal
    return largest if ends or (largest * (len(node.gpus) - 1) > most_links() and len(node.gpus) > 2) else 0


def _check_nvlink_missing(node: NodeTopology) -> Iterator[Finding]:
    row = find_reference(node)
    pairs = [pair for pair in node.gpu_pairs() if pair.label != UNKNOWN]
    if not any(pair.nvlinks for pair in pairs) or not (_count_switch_links(node) or (row and row.all_to_all)):
        return
    for gpu in (gpu for gpu in node.gpus if gpu.usable):
        gpu_pairs = [pair for pair in pairs if gpu.name in (pair.a, pair.b)]
        if gpu_pairs and not any(pair.nvlinks for pair in gpu_pairs):
            yield finding(TEXTS, "topology.nvlink.missing", None, gpu.name, _format_pairs(gpu_pairs[:3]))


def _check_nvlink_asymmetric(node: NodeTopology) -> Iterator[Finding]:
    full, pairs = _count_switch_links(node), node.gpu_pairs()
    if not full:
        yield from _check_bridges([pair for pair in pairs if pair.nvlinks])
        return
    for gpu in node.gpus:
        gpu_pairs = [pair for pair in pairs if gpu.name in (pair.a, pair.b)]
        linked = [pair for pair in gpu_pairs if pair.nvlinks]
        count = max((pair.nvlinks + pair.nvlinks_unread for pair in linked), default=0)
        if linked and max(gpu.count_nvlinks("nvswitch"), count) < full:
            highest = max(pair.nvlinks for pair in linked)
            warnings = [warning for warning in node.warnings if gpu.name in warning.split()]
            evidence = (*_format_pairs(gpu_pairs[:2]), *warnings[:2])
            status = by_loss(1.0 - highest / full)
            yield finding(TEXTS, "topology.nvlink.asymmetric", status, gpu.name, evidence, most=highest, full=full)


def _check_bridges(linked: list[Pair]) -> Iterator[Finding]:
    """Report bridged pairs of PCIe cards of which one has fewer links than the others."""
    highest = max((pair.nvlinks for pair in linked), default=0)
    if len({name for pair in linked for name in (pair.a, pair.b)}) < 2 * len(linked):
        return  # a mesh, where link counts differ by design
    for pair in (pair for pair in linked if pair.nvlinks < highest):
        evidence = _format_pairs((pair, *(other for other in linked if other.label != pair.label)))
        yield finding(TEXTS, "topology.nvlink.asymmetric bridges", None, pair.a, evidence, pair=pair, most=highest)


def _check_nvlink_board(node: NodeTopology) -> Iterator[Finding]:
    """Report an NVLink board whose GPUs have no active NVLink. PCIe servers are not affected."""
    pairs = node.gpu_pairs()
    labels = {pair.label for pair in pairs}
    if not pairs or not node.nvlink_known or labels - {"SYS", "NODE", "PHB"}:
        return
    row = find_reference(node)
    sxm = [gpu.model for gpu in node.gpus if gpu.model and "SXM" in gpu.model]
    of_board = len(node.gpus) >= 8 and not all(is_card(gpu.model) for gpu in node.gpus)
    own_nic = of_board and all(near.label in ("PIX", "PXB") for near in node.nearest_nic)
    if sxm or (row and row.links_per_pair and row.all_to_all):
        status, reason = Status.FAIL, f"{sxm[0] if sxm else row.called if row else ''} is built with NVLink"
    elif own_nic and node.nearest_nic:
        status, reason = Status.WARN, f"{len(node.gpus)} GPUs with a NIC behind the same switch each are HGX-class"
    else:
        return
    fields = {"labels": ", ".join(sorted(labels)), "what": reason}
    yield finding(TEXTS, "topology.nvlink.down_hgx", status, "", _format_pairs(pairs[:2]), **fields)


def _list_rdma_nics(node: NodeTopology, near: NearestNic) -> list[NicNode]:
    return [nic for nic in node.nics if nic.name in near.nics and nic.kind in _RDMA]


def _check_gpu_nic(node: NodeTopology, farthest: PathClass | None) -> Iterator[Finding]:
    # A ring enters the node at the GPU nearest to the NIC. If that GPU uses GPUDirect RDMA, collectives are as fast
    # without it on the other GPUs. If no GPU does, all data of every step is copied through host memory.
    decided = [near for near in node.nearest_nic if near.decidable]
    direct = {nic for near in decided if uses_gdr(near, farthest) for nic in near.nics}
    by_c2c = _may_be_grace(node) and {near.label for near in decided} <= {"NODE", "PHB"}
    lone, no_gdr = _find_without_nic(node), {gpu.name for gpu in node.gpus if by_c2c or without_gdr(gpu.model or "")}
    hidden = _text("hidden_nics") * (_count_switch_links(node) > 0 and 2 * len(node.nics) < len(node.gpus))
    for near in decided:
        if near.why:
            evidence = tuple(f"{nic.name}: no active port" for nic in node.nics if nic.active is False)[:4]
            # of NICs at equal distance, slower ones are probably for storage
            rates = {nic.name: nic.rate_bytes_per_second or 0.0 for nic in node.nics if nic.name in near.nics}
            nics = ", ".join(name for name, rate in rates.items() if rate in (0, max(rates.values())))
            yield finding(TEXTS, "topology.gpu_nic.down", None, near.gpu, evidence, nics=nics, near=near)
        if near.why or not _list_rdma_nics(node, near):
            continue
        if near.gpu in lone:
            yield _report_no_nic(node, near, len(lone))
        elif not near.local:
            relay, sibling = _find_relay(node, near), _find_near_sibling(node, near)
            place = f"nearer than SYS, though {sibling} of its NUMA node has one" if sibling else "on its own NUMA node"
            yield finding(
                TEXTS, "topology.gpu_nic.far" + " relayed" * bool(relay),
                _judge_by_design(node, near) or (Status.WARN if relay or direct & set(near.nics) else Status.FAIL),
                near.gpu, (*_cite_pairs(node, near), *relay), where=place,
                nics=some(near.nics, limit=4), near=near, closed=_text("no_pxn") * node.nvlink_known + hidden,
            )  # fmt: skip
        elif near.path is not None and not uses_gdr(near, farthest) and near.gpu not in no_gdr:
            designed, relay = _judge_by_design(node, near), _find_relay(node, near) if _shares_nics(node) else ()
            yield finding(
                TEXTS, "topology.gdr.path" + (" designed" if designed else " relayed" if relay else ""),
                designed or (Status.INFO if relay else Status.WARN if direct & set(near.nics) else Status.FAIL),
                near.gpu, (*_cite_pairs(node, near), *relay), nics=some(near.nics, limit=4), near=near,
                beyond="PXB by default" if farthest is None else f"NCCL_NET_GDR_LEVEL, {farthest.name}",
                phb=_text("node_is_phb") * (near.label == "NODE") + _text("of_vm") * (node.source != "probes") + hidden,
            )  # fmt: skip


def _may_be_grace(node: NodeTopology) -> bool:
    """Whether unnamed GPUs may be those of a GB200 tray, GH200 or DGX Spark (C2C), or the GPU of a small VM (PHB)."""
    few = len(node.gpus) == 1 or (len(node.gpus) == 4 and _count_switch_links(node) == most_links())
    return few and not any(gpu.model for gpu in node.gpus)


def _shares_nics(node: NodeTopology) -> bool:
    """Whether there is a NIC for every two GPUs, as servers are sold, though HGX boards have room for one each."""
    return len(node.gpus) / 2 <= len(node.nics) < len(node.gpus)


def _judge_by_design(node: NodeTopology, near: NearestNic) -> Status | None:
    """Return INFO if the path is by design: on healthy machines of this type NICs are not nearer."""
    row = find_reference(node)
    farthest = (row.gpu_nic_farthest or row.gpu_nic) if row else None
    beyond_switches = farthest is not None and rank(farthest) > rank("PXB")
    return Status.INFO if beyond_switches and farthest and rank(near.label) <= rank(farthest) else None


def _find_without_nic(node: NodeTopology) -> set[str]:
    """Return GPUs without a NIC behind their PCIe switches, if most GPUs have one, and not all the same NIC."""
    near = [each for each in node.nearest_nic if each.decidable and not each.why]
    lone = {each.gpu for each in near if rank(each.label) > rank("PXB")}
    rails = {each.nics for each in near if each.gpu not in lone}
    return lone if len(rails) > 1 and 2 * len(lone) < len(near) else set()


def _report_no_nic(node: NodeTopology, near: NearestNic, missing: int) -> Finding:
    rails = {nic for rail in node.rails for nic in rail.nics if near.gpu not in rail.gpus}
    idle = {nic.name for nic in node.nics if nic.kind in _RDMA}.difference(*(each.nics for each in node.nearest_nic))
    evidence = (f"HCAs nearest to the other GPUs: {', '.join(sorted(rails))}", *_cite_pairs(node, near))
    evidence += (_text("idle_nics", nics=some(sorted(idle))),) * bool(idle)
    nics, others = ", ".join(near.nics[:4]), len(node.nearest_nic) - missing
    return finding(TEXTS, "topology.nic.missing", None, near.gpu, evidence, nics=nics, others=others, near=near)


def _find_near_sibling(node: NodeTopology, near: NearestNic) -> str:
    """Return a GPU on the same NUMA node that is near one of these NICs: they then belong to this node despite SYS."""
    numa = {gpu.name: gpu.numa_node for gpu in node.gpus}
    alike = (other for other in node.nearest_nic if numa[other.gpu] is not None and numa[other.gpu] == numa[near.gpu])
    return next((other.gpu for other in alike if other.local and set(other.nics) & set(near.nics)), "")


def _find_relay(node: NodeTopology, near: NearestNic) -> tuple[str, ...]:
    """Return evidence that NCCL can send through another GPU (PXN); empty if it cannot.

    Specification: NCCL src/graph/paths.cc, ncclTopoComputePaths: the intermediate GPU has a direct NVLink to this one,
    and its path to the NIC is at most PXB (P2C if the NIC is attached to a CPU with C2C).
    """
    pairs = Pairs(node.pairs)
    for other in node.nearest_nic:
        joined = pairs.get(near.gpu, other.gpu)
        near_enough = other.path is not None and other.path <= PathClass.P2C
        if joined and joined.nvlinks and near_enough and _list_rdma_nics(node, other):
            return f"{near.gpu} to {other.gpu}: {joined.label}", f"{other.gpu} to {other.nics[0]}: {other.label}"
    return ()


def _cite_pairs(node: NodeTopology, near: NearestNic) -> tuple[str, ...]:
    pairs = filter(None, (Pairs(node.pairs).get(near.gpu, nic) for nic in near.nics[:2]))
    plans = {pair: f", NCCL plans {gigabytes(pair.bytes_per_second)}" * bool(pair.bytes_per_second) for pair in pairs}
    return tuple(f"{pair.a} to {pair.b}: {pair.label} ({pair.evidence}){plan}" for pair, plan in plans.items())


def _check_undecidable(node: NodeTopology) -> Iterator[Finding]:
    lost = {gpu.name for gpu in node.gpus if not gpu.usable}
    undecided = [near for near in node.nearest_nic if not near.decidable and near.gpu not in lost]
    if undecided and len(node.nics) > 1:
        near, gpus = undecided[0], ", ".join(near.gpu for near in undecided)
        tray = " tray" * (near.label == "SYS" and _may_be_grace(node))
        case = " cut" if node.lacking else " grace" if near.why == _text("coherent") else tray
        yield finding(TEXTS, f"topology.gpu_nic.undecidable{case}", None, gpus, _cite_pairs(node, near), why=near.why)


def _check_virtual(node: NodeTopology) -> Iterator[Finding]:
    """Report a virtual machine; a note if probes.pci judges it, which knows NCCL's topology file."""
    if node.virtual and len(node.gpus) > 1:
        # a workstation with one host bridge has the same matrix, so the matrix alone is no proof
        is_not = "may not be" if ", or " in node.virtual else "is not"
        by_pairs = node.virtual == explain_virtual(node.gpus, node.nics, node.pairs)  # probes.pci saw nothing
        status = Status.INFO if node.source == "probes" and not by_pairs else None
        evidence = (f"product: {node.product}",) if node.product else ()
        yield finding(TEXTS, "topology.virtual", status, "", evidence, is_not=is_not, virtual=node.virtual)


def _check_rails(node: NodeTopology) -> Iterator[Finding]:
    """Report GPUs that share fewer NICs than others do, or, in NCCL's XML, slower ones (probes.rdma judges a scan's).

    GPUs that are equally near to the same NICs share them all.
    """
    rates = {nic.name: nic.rate_bytes_per_second or 0.0 for nic in node.nics if node.source == "NCCL XML"}
    used = {name: rates.get(name, 0.0) for rail in node.rails for name in rail.nics}
    best = max(used.values(), default=0.0)
    slow = [f"{name} has {gigabits(rate)} of {gigabits(best)}" for name, rate in used.items() if 0.0 < rate < best]
    shared = Counter(near.nics for near in node.nearest_nic if near.local and near.decidable and not near.why)
    loads = Counter[float]()
    for nics, gpus in shared.items():
        weight = sum((used.get(name) or best) / best for name in nics) if best else len(nics)
        loads[gpus / weight] += min(gpus, len(nics))
    # More NICs than most GPUs have cost nothing; fewer NICs slow every ring down to their rate.
    usual = min(loads, key=lambda load: (-loads[load], load), default=0.0)
    if lost := 1.0 - usual / max(loads, default=1.0) if loads else 0.0:
        rails = "; ".join(f"rail {rail.rail}: {', '.join(rail.nics)} for {', '.join(rail.gpus)}" for rail in node.rails)
        rails = some(slow) or rails + _describe_fewer_nics(node)
        yield finding(TEXTS, "topology.rail.uneven" + " slow" * bool(slow), by_loss(lost), "", rails=rails)


def _describe_fewer_nics(node: NodeTopology) -> str:
    """Report one rail with fewer NICs than the others although no NIC is down: an HCA is missing."""
    counts = Counter(len(rail.nics) for rail in node.rails)
    usual, often = counts.most_common(1)[0]
    short = [rail for rail in node.rails if len(rail.nics) < usual]
    if not short or 2 * often <= len(node.rails) or any(nic.active is False for nic in node.nics):
        return ""
    gpus = ", ".join(gpu for rail in short for gpu in rail.gpus)
    return f". {gpus} has {len(short[0].nics)} HCA where other GPUs have {usual}: an HCA is missing"


def _check_nic_pcie(node: NodeTopology) -> Iterator[Finding]:
    """Report RDMA NICs whose current PCIe link is slower than their port: link degraded, or slot too small."""
    soldered = bool((row := find_reference(node)) and row.nics_soldered)  # the vendor chose the number of lanes
    for nic in node.nics:
        rate, slot = nic.rate_bytes_per_second, nic.pcie_bytes_per_second
        carried = nic.pcie_running_bytes_per_second or slot
        if nic.kind in _RDMA and rate and slot and carried and rate > carried * RAW_OVER_PLAN:
            trained_down = carried < slot
            if (soldered or is_behind_own_switch(nic, node.gpus)) and not trained_down:
                continue
            subject = f"link, {nic.pcie_link}," if trained_down else "slot"
            case = " trained_down" if trained_down and rate <= slot * RAW_OVER_PLAN else ""
            status = by_loss(1.0 - carried * RAW_OVER_PLAN / rate)
            if not trained_down and rate <= carried * RAW_OVER_PLAN * (nic.ports or 1):
                case, status = " ports", Status.INFO  # the card is made for one port at its full rate
            yield finding(
                TEXTS, f"topology.nic.pcie_bound{case}", status, nic.name, what=subject, rate=gigabytes(rate),
                carried=gigabytes(carried * RAW_OVER_PLAN), slot=gigabytes(slot),
            )  # fmt: skip


def _check_gpu_pcie(node: NodeTopology) -> Iterator[Finding]:
    """Report GPUs in NCCL's XML whose link has fewer lanes than the bridge above it, or is slower than similar GPUs'.

    The file has the minimum of card and slot (NCCL src/graph/xml.cc), which NCCL uses. In a scan, probes.pci checks
    these links, because it can distinguish card and slot.
    """
    for gpu in node.gpus:
        lanes, slot = gpu.pcie_lanes, gpu.pcie_bytes_per_second
        if not lanes or not slot:
            continue
        alike = [other for other in node.gpus if other.model == gpu.model and other.pcie_bytes_per_second]
        best = max(alike, key=lambda other: other.pcie_bytes_per_second or 0.0)
        bridge, width = gpu.bridge_lanes or ("", 0)
        if lanes < width:
            share, than = lanes / width, f"{width} of the bridge above, {bridge}"
        elif best.pcie_bytes_per_second and slot < best.pcie_bytes_per_second:
            share = slot / best.pcie_bytes_per_second
            than = f"{best.name}'s {best.pcie_link}"
        else:
            continue
        nics = [nic for near in node.nearest_nic if near.gpu == gpu.name for nic in _list_rdma_nics(node, near)]
        rate = max((nic.rate_bytes_per_second or 0.0 for nic in nics), default=0.0)
        by_nvlink = any(link.count for link in gpu.nvlinks)  # only traffic to a NIC or the host uses this link
        lost = max(0.0, 1.0 - slot * RAW_OVER_PLAN / rate) if by_nvlink and rate else 0.0 if by_nvlink else 1.0 - share
        fields = {"than": than, "slot": gigabytes(slot), "share": share}
        yield finding(TEXTS, "topology.gpu.pcie_bound", by_loss(lost), gpu.name, (), gpu=gpu, **fields)


def _check_gdr_refused(node: NodeTopology) -> Iterator[Finding]:
    """Report NICs and GPUs without GPUDirect RDMA support in NCCL's XML: NCCL will not use it for them."""
    rdma = [nic for nic in node.nics if nic.kind in _RDMA]
    models = [gpu.model or "" for gpu in node.gpus]
    by_design = bool(models) and all(is_of("without GPUDirect RDMA", name) for name in models)
    # EFA next to other cards: normal on g5 and g6, possible on other machines.
    unsure = bool(models) and all(is_of("card", name) for name in models) and all(nic.kind == "efa" for nic in rdma)
    status = Status.INFO if by_design else Status.WARN if unsure else Status.FAIL
    for kind, devices in (("GPU", node.gpus if rdma else ()), ("NIC", rdma)):
        refused = [device for device in devices if device.gdr_refused]
        if refused:
            yield finding(
                TEXTS, "topology.gdr.refused" + " designed" * by_design, status,
                ", ".join(device.name for device in refused[:8]),
                tuple(device.gdr_refused for device in refused[:4]), count=len(refused), total=len(devices), kind=kind,
            )  # fmt: skip


def describe_departures(node: NodeTopology) -> tuple[str, ...]:
    """Describe each difference from the reference machine; empty if there is none, or no reference."""
    row = find_reference(node)
    return () if row is None else tuple(text for _, text in _find_departures(node, row))


def _find_departures(node: NodeTopology, row: Machine) -> Iterator[tuple[str, str]]:
    """Yield (what differs, description): "GPUs", "no NVLink", "fewer NVLinks", "devices", "no adapter", "far NIC"."""
    if len(node.gpus) != row.gpus:
        yield "GPUs", f"This node has {len(node.gpus)} GPUs, {row.called} has {row.gpus}"
    yield from _find_nvlink_departures(node, row)
    # An adapter of unknown kind is not reported as a different one.
    kinds = (row.nic_kind, "other", "unknown") if row.nic_kind else ("hca", "efa", "other", "unknown")
    nics = [nic for nic in node.nics if nic.kind in kinds]
    # Slingshot NICs have no verbs device; HPE's host software gives their interfaces known names. Of soldered NICs NCCL
    # lists those with a cable.
    drawn = node.source == "NCCL XML"
    slingshot = any(re.fullmatch(r"hsn\d+", nic.name) or (drawn and row.nics_soldered) for nic in node.nics)
    if row.devices is not None and len(nics) < row.devices and not slingshot:
        kind = row.nic_kind or "RDMA"
        yield "devices", f"This node has {len(nics)} {kind} devices, {row.called} has {row.devices}"
    elif (
        row.gpu_nic and node.source == "probes" and all(nic.kind in _NO_ADAPTER for nic in node.nics) and not slingshot
    ):
        yield "no adapter", f"This node has no RDMA device, unlike {row.called}"
    if row.gpu_nic and not node.virtual and nics:
        lost = {gpu.name for gpu in node.gpus if not gpu.usable}
        farthest = row.gpu_nic_farthest or row.gpu_nic
        shared = [each for each in node.nearest_nic if _shares_nics(node) and each.local and not each.why]
        relayed = {each.gpu for each in shared if _find_relay(node, each)}
        judged = [each for each in node.nearest_nic if each.decidable or not each.why]
        decided = [each for each in judged if each.gpu not in lost | relayed]
        far = [near.gpu for near in decided if rank(near.label.partition("/")[0]) > rank(farthest)]  # "PHB/NODE" in XML
        if far:
            yield "far NIC", _text("far_nic", gpus=", ".join(far), farthest=farthest, machine=row.called)


def _find_nvlink_departures(node: NodeTopology, row: Machine) -> Iterator[tuple[str, str]]:
    pairs = node.gpu_pairs(usable=True)
    if not row.links_per_pair or not pairs or not node.nvlink_known:
        return
    fewest = min(row.links_per_pair)
    pairs = [pair for pair in pairs if pair.label != UNKNOWN]  # what was not read is not missing
    without = [pair for pair in pairs if not pair.nvlinks]
    if row.all_to_all and without:
        have = f"{len(without)} of {len(pairs)} GPU pairs have no NVLink"
        yield "no NVLink", f"{have}. On {row.called} all pairs have NV{fewest}"
    if fewer := [pair for pair in pairs if 0 < pair.nvlinks < fewest - pair.nvlinks_unread]:
        text = f"GPU pairs have fewer NVLinks than the NV{fewest} of {row.called}"
        yield "fewer NVLinks", f"{text}: {some([f'{pair.a}-{pair.b} {pair.label}' for pair in fewer], limit=4)}"


def _check_reference(
    node: NodeTopology, gpus_on_bus: int | None, in_container: bool, of_job: bool
) -> Iterator[Finding]:
    """Report differences from the reference. If GPUs are on the board, too few on the bus are lost: a failure.

    Servers with PCIe cards may be built with fewer GPUs, and a container may get fewer RDMA devices than its host has.
    Missing NVLinks cost their share of every collective, even if all GPUs lack the same number.
    """
    row = find_reference(node)
    if row is None:
        return
    lost = bool(row.links_per_pair) and gpus_on_bus is not None and gpus_on_bus < row.gpus
    full = min(row.links_per_pair, default=0)
    fewest = min((pair.nvlinks + pair.nvlinks_unread for pair in node.pairs if pair.nvlinks), default=full)
    nics = sum(nic.kind in _RDMA for nic in node.nics)
    left = nics / (row.nics or 1)
    is_share = of_job and len(node.gpus) / row.gpus <= nics / (row.nics or row.gpus) < 1.0  # all NICs are no share
    evidence = (f"reference {row.called}: {row.seen or row.source} ({row.basis})",)
    for kind, departure in _find_departures(node, row):
        few_nics = kind == "devices" and not in_container and left < 1.0  # fewer NICs than GPU traffic needs
        share = left if few_nics else fewest / full if kind == "fewer NVLinks" else 1.0
        key = "topology.nic.missing reference" if few_nics else "topology.reference.mismatch"
        status = Status.FAIL if lost and kind == "GPUs" else by_loss(1.0 - share)
        status = Status.INFO if is_share and kind in ("GPUs", "devices") else status
        yield finding(TEXTS, key, status, "", evidence, departure=departure)

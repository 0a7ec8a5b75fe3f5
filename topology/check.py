"""Judge a node's topology: findings with what proves them and what mends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from contracts.finding import Finding, Status, by_loss
from hardware.gpus import without_gdr
from hardware.links import most_links
from hardware.series import is_of
from topology.graph import UNKNOWN, GpuNode, NearestNic, NicNode, NodeTopology, Pair, Pairs, PathClass, rank
from topology.plan import gigabytes
from topology.reference import departures, reference_of

CODES = (
    "topology.nvlink.missing",
    "topology.nvlink.asymmetric",
    "topology.nvlink.down_hgx",
    "topology.gpu_nic.far",
    "topology.gpu_nic.down",
    "topology.gpu_nic.undecidable",
    "topology.gdr.path",
    "topology.gdr.refused",
    "topology.virtual",
    "topology.rail.uneven",
    "topology.nic.pcie_bound",
    "topology.gpu.pcie_bound",
    "topology.nic.missing",
    "topology.reference.departs",
)

RAW_OVER_PLAN = 63.0 / 48.0  # PCIe 5.0 x16 carries 63 GB/s, NCCL plans 48; the ratio holds from generation 3 on
_RDMA = ("hca", "efa")
_GDR_WORDS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_GDR_NUMBERS = (PathClass.LOC, PathClass.PIX, PathClass.PXB, PathClass.PHB, PathClass.SYS)
_NODE_IS_PHB = (
    " NODE is nvidia-smi's word for a path between host bridges of one NUMA node; NCCL's level PHB covers it."
)


def check(
    node: NodeTopology, *, gdr_level: str | None = None, gpus_on_bus: int | None = None, in_container: bool = True
) -> tuple[Finding, ...]:
    """Every finding about this node; `gdr_level` is the job's NCCL_NET_GDR_LEVEL, None where it sets none.

    `gpus_on_bus` is what the PCI bus of a host shows (`probes.pci.facts.bare_metal_gpus`); None in a container or a
    guest, and where it was not read. `in_container` says that devices of the host may be hidden here.
    """
    farthest = farthest_gdr(gdr_level)
    return (
        *(finding for rule in _BEFORE for finding in rule(node)),
        *_gpu_nic(node, farthest),
        *(finding for rule in _AFTER for finding in rule(node)),
        *_reference(node, gpus_on_bus, in_container),
    )


def farthest_gdr(level: str | None) -> PathClass | None:
    """The farthest path over which NCCL_NET_GDR_LEVEL allows GPUDirect RDMA; None where it says nothing to go by.

    Specification: NCCL user guide, NCCL_NET_GDR_LEVEL, and src/graph/paths.cc: capital words, or in the older form 0
    (LOC) to 4 (SYS); anything else is ignored.
    """
    text = level or ""
    if text.isdecimal() and len(text) < 4:
        return _GDR_NUMBERS[min(int(text), len(_GDR_NUMBERS) - 1)]
    return PathClass[text] if text in _GDR_WORDS else None


def by_gdr(near: NearestNic, farthest: PathClass | None) -> bool:
    """Whether NCCL uses GPUDirect RDMA from this GPU to its nearest NIC, by itself or as the job's level says."""
    if farthest is None:
        return near.gdr_by_default
    return near.path is not None and near.path <= farthest


def _gpu_pairs(node: NodeTopology) -> list[Pair]:
    names = {gpu.name for gpu in node.gpus}
    return [pair for pair in node.pairs if pair.a in names and pair.b in names]


def _shown(pairs: Iterable[Pair]) -> tuple[str, ...]:
    """Pairs as evidence."""
    return tuple(f"{pair.a} to {pair.b}: {pair.label}" for pair in pairs)


def _switched(node: NodeTopology) -> int:
    """NVLinks per GPU where the counts can only come from an NVSwitch, else 0."""
    linked = [pair for pair in _gpu_pairs(node) if pair.nvlinks]
    most = max((0, *(pair.nvlinks for pair in linked), *map(_to_switches, node.gpus)))  # a pair shows the fewer of two
    ends = any(link.kind == "nvswitch" for gpu in node.gpus for link in gpu.nvlinks)
    if not ends and len({name for pair in linked for name in (pair.a, pair.b)}) == 2 * len(linked):
        return 0  # bridges between PCIe cards, none joined to another, which a card may well be without
    return most if ends or (most * (len(node.gpus) - 1) > most_links() and len(node.gpus) > 2) else 0


def _to_switches(gpu: GpuNode) -> int:
    return sum(link.count for link in gpu.nvlinks if link.kind == "nvswitch")


def _nvlink_missing(node: NodeTopology) -> Iterator[Finding]:
    row = reference_of(node)
    pairs = [pair for pair in _gpu_pairs(node) if pair.label != UNKNOWN]
    if not any(pair.nvlinks for pair in pairs) or not (_switched(node) or (row and row.all_to_all)):
        return
    for gpu in (gpu for gpu in node.gpus if gpu.usable):
        mine = [pair for pair in pairs if gpu.name in (pair.a, pair.b)]
        if mine and not any(pair.nvlinks for pair in mine):
            yield Finding(
                code="topology.nvlink.missing",
                status=Status.FAIL,
                subject=gpu.name,
                message=f"{gpu.name} reaches no other GPU over NVLink, while the others reach each other",
                evidence=_shown(mine[:3]),
                remedy="Drain the node, read `nvidia-smi nvlink -s` and the fabric manager's log, and reset the GPU.",
            )


def _nvlink_asymmetric(node: NodeTopology) -> Iterator[Finding]:
    full, pairs = _switched(node), _gpu_pairs(node)
    if not full:
        yield from _bridges_differ([pair for pair in pairs if pair.nvlinks])
        return
    for gpu in node.gpus:
        mine = [pair for pair in pairs if gpu.name in (pair.a, pair.b)]
        linked = [pair for pair in mine if pair.nvlinks]
        if linked and max(_to_switches(gpu), *(pair.nvlinks + pair.nvlinks_unread for pair in linked)) < full:
            most = max(pair.nvlinks for pair in linked)
            warnings = [warning for warning in node.warnings if gpu.name in warning.split()]
            yield Finding(
                code="topology.nvlink.asymmetric",
                status=Status.FAIL,
                subject=gpu.name,
                message=f"{gpu.name} has {most} NVLinks up, other GPUs of this node have {full}",
                evidence=(*_shown(mine[:2]), *warnings[:2]),
                remedy="Read `nvidia-smi nvlink -s` on this GPU; a link that stays down needs a reset or repair.",
            )


def _bridges_differ(linked: list[Pair]) -> Iterator[Finding]:
    """Pairs of cards with a bridge of their own, of which one has fewer links."""
    most = max((pair.nvlinks for pair in linked), default=0)
    if len({name for pair in linked for name in (pair.a, pair.b)}) < 2 * len(linked):
        return  # a mesh, which joins its GPUs by different numbers of links
    for pair in (pair for pair in linked if pair.nvlinks < most):
        yield Finding(
            code="topology.nvlink.asymmetric",
            status=Status.WARN,
            subject=pair.a,
            message=f"{pair.a} and {pair.b} are joined by {pair.nvlinks} NVLinks, another pair by {most}: a bridge is "
            "not fitted, or links are down",
            evidence=_shown((pair, *(other for other in linked if other.label != pair.label))),
            remedy="Read `nvidia-smi nvlink -s` on both; count and reseat the bridges.",
        )


def _nvlink_down_hgx(node: NodeTopology) -> Iterator[Finding]:
    """A board built for NVLink whose GPUs show none: a fault, and no PCIe server."""
    pairs = _gpu_pairs(node)
    labels = {pair.label for pair in pairs}
    if not pairs or not node.nvlink_known or labels - {"SYS", "NODE", "PHB"}:
        return
    row = reference_of(node)
    sxm = [gpu.model for gpu in node.gpus if gpu.model and "SXM" in gpu.model]
    own_nic = len(node.gpus) >= 8 and all(near.label in ("PIX", "PXB") for near in node.nearest_nic)
    if sxm or (row and row.links_per_pair and row.all_to_all):
        status, what = Status.FAIL, f"{sxm[0] if sxm else row.called if row else ''} is made to link by NVLink"
    elif own_nic and node.nearest_nic:
        status, what = Status.WARN, f"{len(node.gpus)} GPUs with a NIC behind the same switch each are HGX-class"
    else:
        return
    yield Finding(
        code="topology.nvlink.down_hgx",
        status=status,
        message=f"no GPU pair shows NVLink ({', '.join(sorted(labels))} only), yet {what}",
        evidence=_shown(pairs[:2]),
        remedy="Check that nvidia-fabricmanager runs in the driver's version and that no NVLink is disabled.",
    )


def _rdma_nics(node: NodeTopology, near: NearestNic) -> list[NicNode]:
    return [nic for nic in node.nics if nic.name in near.nics and nic.kind in _RDMA]


def _gpu_nic(node: NodeTopology, farthest: PathClass | None) -> Iterator[Finding]:
    # A ring enters the node at the GPU nearest the NIC. Where one reaches it by GPUDirect RDMA, the others lose nothing
    # of a collective; where none does, every byte of every step is copied through the host.
    direct = {nic for near in node.nearest_nic if near.decidable and by_gdr(near, farthest) for nic in near.nics}
    lone, no_gdr = _without_own_nic(node), {gpu.name for gpu in node.gpus if without_gdr(gpu.model or "")}
    for near in node.nearest_nic:
        if not near.decidable:
            continue
        if near.why:
            yield Finding(
                code="topology.gpu_nic.down",
                status=Status.FAIL,
                subject=near.gpu,
                message=f"{near.gpu} must use {', '.join(near.nics)} ({near.label}): {near.why}",
                evidence=tuple(f"{nic.name}: no active port" for nic in node.nics if nic.active is False)[:4],
                remedy="Bring the port up, or take the node out: one rail short slows every collective.",
            )
        if near.why or not _rdma_nics(node, near):
            continue
        if near.gpu in lone:
            yield _no_own_nic(node, near, len(lone))
        elif not near.local:
            relay, beside = _relay(node, near), _same_numa_but_near(node, near)
            where = f"nearer than SYS, though {beside} of its NUMA node has one" if beside else "on its own NUMA node"
            yield Finding(
                code="topology.gpu_nic.far",
                status=_by_design(node, near) or (Status.WARN if relay or direct & set(near.nics) else Status.FAIL),
                subject=near.gpu,
                message=f"{near.gpu} has no NIC {where}: {', '.join(near.nics[:4])} "
                f"{'is' if len(near.nics) == 1 else 'are'} {near.label}",
                evidence=(*_pair_evidence(node, near), *relay),
                remedy=_instead_of_far(node, relayed=bool(relay)),
            )
        elif near.path is not None and not by_gdr(near, farthest) and near.gpu not in no_gdr:
            designed = _by_design(node, near)
            yield Finding(
                code="topology.gdr.path",
                status=designed or (Status.WARN if direct & set(near.nics) else Status.FAIL),
                subject=near.gpu,
                message=f"{near.gpu} reaches its nearest NIC {', '.join(near.nics[:4])} over {near.label}: NCCL does "
                "not use GPUDirect RDMA "
                + ("beyond PXB by itself" if farthest is None else f"beyond NCCL_NET_GDR_LEVEL, {farthest.name}"),
                evidence=_pair_evidence(node, near),
                remedy=("" if designed else "Put NIC and GPU behind one PCIe switch; where that cannot be, measure ")
                + ("Measure " if designed else "")
                + "with NCCL_NET_GDR_LEVEL=PHB before keeping it."
                + _NODE_IS_PHB * (near.label == "NODE"),
            )


def _by_design(node: NodeTopology, near: NearestNic) -> Status | None:
    """INFO where the machine is built this way: its row says that a healthy one has its NICs no nearer."""
    row = reference_of(node)
    farthest = (row.gpu_nic_farthest or row.gpu_nic) if row else None
    beyond_switches = farthest is not None and rank(farthest) > rank("PXB")
    return Status.INFO if beyond_switches and farthest and rank(near.label) <= rank(farthest) else None


def _without_own_nic(node: NodeTopology) -> set[str]:
    """GPUs without a NIC behind their PCIe switches, where more than half of the node's GPUs have one."""
    near = [each for each in node.nearest_nic if each.decidable and not each.why]
    lone = {each.gpu for each in near if rank(each.label) > rank("PXB")}
    return lone if len(near) > 2 and 2 * len(lone) < len(near) else set()


def _no_own_nic(node: NodeTopology, near: NearestNic, missing: int) -> Finding:
    rails = {nic for rail in node.rails for nic in rail.nics if near.gpu not in rail.gpus}
    return Finding(
        code="topology.nic.missing",
        status=Status.FAIL,
        subject=near.gpu,
        message=f"{near.gpu} has no HCA behind its PCIe switch, {len(node.nearest_nic) - missing} other GPUs of this "
        f"node have one: an HCA is missing here, and {near.gpu} shares {', '.join(near.nics[:4])} ({near.label}), so "
        "every ring is held to what is left",
        evidence=(f"HCAs nearest to the other GPUs: {', '.join(sorted(rails))}", *_pair_evidence(node, near)),
        remedy="Compare `lspci` with a healthy node: reseat or replace the HCA if it is gone from the bus; load its "
        "driver, or give it to this host or pod, if it is there.",
    )


def _same_numa_but_near(node: NodeTopology, near: NearestNic) -> str:
    """A GPU of the same NUMA node that is near to one of these NICs: then they do stand on it, whatever SYS says."""
    numa = {gpu.name: gpu.numa_node for gpu in node.gpus}
    alike = (other for other in node.nearest_nic if numa[other.gpu] is not None and numa[other.gpu] == numa[near.gpu])
    return next((other.gpu for other in alike if other.local and set(other.nics) & set(near.nics)), "")


def _relay(node: NodeTopology, near: NearestNic) -> tuple[str, ...]:
    """What proves that NCCL can send through another GPU (PXN); empty where it cannot.

    Specification: NCCL src/graph/paths.cc, ncclTopoComputePaths: the GPU between is joined to this one by NVLink
    directly, and is PXB at most (P2C where the NIC hangs on a C2C CPU) from the NIC.
    """
    known = Pairs(node.pairs)
    for other in node.nearest_nic:
        joined = known.get(near.gpu, other.gpu)
        if (
            joined
            and joined.nvlinks
            and other.path is not None
            and other.path <= PathClass.P2C
            and _rdma_nics(node, other)
        ):
            return (
                f"{near.gpu} to {other.gpu}: {joined.label}",
                f"{other.gpu} to {other.nics[0]}: {other.label}",
            )
    return ()


def _instead_of_far(node: NodeTopology, *, relayed: bool) -> str:
    if relayed:
        return (
            "Place a NIC on each NUMA node of GPUs; until then NCCL sends over NVLink through a GPU beside a NIC (PXN)."
        )
    words = "Place a NIC on each NUMA node of GPUs, or run jobs over several nodes on the GPUs that have one nearby."
    if not node.nvlink_known:
        return words
    return f"{words} NCCL's way through another GPU (PXN) is closed: no NVLink to one with a NIC at PXB or nearer."


def _pair_evidence(node: NodeTopology, near: NearestNic) -> tuple[str, ...]:
    known = Pairs(node.pairs)
    pairs = [known.get(near.gpu, nic) for nic in near.nics[:2]]
    return tuple(f"{pair.a} to {pair.b}: {pair.label} ({pair.evidence})" for pair in pairs if pair)


def _undecidable(node: NodeTopology) -> Iterator[Finding]:
    lost = {gpu.name for gpu in node.gpus if not gpu.usable}
    undecided = [near for near in node.nearest_nic if not near.decidable and near.gpu not in lost]
    if undecided and len(node.nics) > 1:
        yield Finding(
            code="topology.gpu_nic.undecidable",
            status=Status.UNKNOWN,
            subject=", ".join(near.gpu for near in undecided),
            message=f"the nearest NIC cannot be told: {undecided[0].why}",
            evidence=_pair_evidence(node, undecided[0]),
            remedy="Name the provider's topology file with NCCL_TOPO_FILE, or take the host's own view.",
        )


def _virtual(node: NodeTopology) -> Iterator[Finding]:
    if node.virtual and len(node.gpus) > 1:
        yield Finding(
            code="topology.virtual",
            status=Status.WARN,
            # one host bridge, as a workstation's, gives the same matrix: then nothing but the matrix speaks for it
            message="the PCIe tree seen here "
            f"{'may not be' if ' or one ' in node.virtual else 'is not'} the machine's: {node.virtual}",
            evidence=(f"product: {node.product}",) if node.product else (),
            remedy=_topo_file_advice(node),
        )


def _topo_file_advice(node: NodeTopology) -> str:
    sku = node.sku or ""
    if node.topology_files and not any(nic.kind == "efa" for nic in node.nics):
        files = " or ".join(node.topology_files[:3])
        return f"Set NCCL_TOPO_FILE to the file that fits this machine: {files}."
    if sku.startswith("AWS") or any(nic.kind == "efa" for nic in node.nics):
        return "Load the aws-ofi-nccl plugin: it gives NCCL the topology file of this instance type by itself."
    if sku.startswith("Azure"):
        return "Set NCCL_TOPO_FILE to the VM size's file in /opt/microsoft (Azure HPC images ship it)."
    return (
        "Set NCCL_TOPO_FILE where the provider ships a topology file; NCCL reads "
        "/var/run/nvidia-topologyd/virtualTopology.xml without being told."
    )


def _rail_uneven(node: NodeTopology) -> Iterator[Finding]:
    sizes = {len(rail.gpus) for rail in node.rails}
    without = [near.gpu for near in node.nearest_nic if near.decidable and not near.local]
    if len(node.rails) > 1 and (len(sizes) > 1 or len({len(rail.nics) for rail in node.rails}) > 1):
        # A rail that has more NICs than most costs nothing; one that has fewer holds every ring to its rate.
        loads = Counter(len(rail.gpus) / len(rail.nics) for rail in node.rails if rail.nics)
        usual = min(loads, key=lambda load: (-loads[load], load))
        lost = 1.0 - usual / max(loads)
        if not lost:
            return
        yield Finding(
            code="topology.rail.uneven",
            status=by_loss(lost),
            message="rails are uneven: "
            + "; ".join(f"rail {rail.rail}: {', '.join(rail.nics)} for {', '.join(rail.gpus)}" for rail in node.rails)
            + _fewer_nics(node),
            evidence=(f"no local NIC: {', '.join(without)}",) if without else (),
            remedy="Give every GPU the same share of NICs: the slowest rail sets the pace.",
        )


def _fewer_nics(node: NodeTopology) -> str:
    """Where one rail has fewer NICs than the others and none is down: an HCA is not there."""
    counts = Counter(len(rail.nics) for rail in node.rails)
    usual, often = counts.most_common(1)[0]
    short = [rail for rail in node.rails if len(rail.nics) < usual]
    if not short or 2 * often <= len(node.rails) or any(nic.active is False for nic in node.nics):
        return ""
    gpus = ", ".join(gpu for rail in short for gpu in rail.gpus)
    return f". {gpus} has {len(short[0].nics)} HCA where other GPUs have {usual}: an HCA is missing"


def _pcie_bound(node: NodeTopology) -> Iterator[Finding]:
    """RDMA NICs whose PCIe link, as it runs, carries less than their port; trained down, or in a small slot."""
    row = reference_of(node)
    soldered = row is not None and row.nics_soldered  # its maker chose the lanes
    for nic in node.nics:
        rate, slot = nic.rate_bytes_per_second, nic.pcie_bytes_per_second
        carried = nic.pcie_running_bytes_per_second or slot
        if nic.kind in _RDMA and rate and slot and carried and rate > carried * RAW_OVER_PLAN:
            trained_down = carried < slot
            if soldered and not trained_down:
                continue
            what = f"link, {nic.pcie_link}," if trained_down else "slot"
            yield Finding(
                code="topology.nic.pcie_bound",
                status=by_loss(1.0 - carried * RAW_OVER_PLAN / rate),
                subject=nic.name,
                message=f"{nic.name} links at {gigabytes(rate)}, "
                f"its PCIe {what} carries {gigabytes(carried * RAW_OVER_PLAN)}",
                evidence=(f"NCCL plans {gigabytes(slot)} for this slot",),
                remedy="Reseat the NIC or its riser, and look at the slot's speed in the firmware setup."
                if trained_down and rate <= slot * RAW_OVER_PLAN
                else "Move the NIC to a slot with more lanes or a newer generation.",
            )


def _gpu_pcie_bound(node: NodeTopology) -> Iterator[Finding]:
    """GPUs of NCCL's XML whose link has fewer lanes than that of the bridge above, or is slower than their like's.

    The file has the lesser of card and slot (NCCL src/graph/xml.cc), by which NCCL plans. A scan tells the two apart:
    there probes.pci judges.
    """
    for gpu in node.gpus:
        lanes, slot = gpu.pcie_lanes, gpu.pcie_bytes_per_second
        if not lanes or not slot:
            continue
        alike = [other for other in node.gpus if other.model == gpu.model and other.pcie_bytes_per_second]
        best = max(alike, key=lambda other: other.pcie_bytes_per_second or 0.0)
        bridge, most = gpu.bridge_lanes or ("", 0)
        if lanes < most:
            share, than = lanes / most, f"{most} of the bridge above, {bridge}"
        elif best.pcie_bytes_per_second and slot < best.pcie_bytes_per_second:
            share = slot / best.pcie_bytes_per_second
            than = f"{best.name}'s {best.pcie_link}"
        else:
            continue
        nics = [nic for near in node.nearest_nic if near.gpu == gpu.name for nic in _rdma_nics(node, near)]
        rate = max((nic.rate_bytes_per_second or 0.0 for nic in nics), default=0.0)
        by_nvlink = any(link.count for link in gpu.nvlinks)  # then only what goes to a NIC or the host takes this link
        lost = max(0.0, 1.0 - slot * RAW_OVER_PLAN / rate) if by_nvlink and rate else 0.0 if by_nvlink else 1.0 - share
        yield Finding(
            code="topology.gpu.pcie_bound",
            status=by_loss(lost),
            subject=gpu.name,
            message=f"{gpu.name}'s PCIe link has x{lanes} ({gpu.pcie_link}), less than {than}: NCCL plans "
            f"{gigabytes(slot)} for it, {share:.0%}",
            evidence=(f'<pci busid="{gpu.bus_id}" link_width="{lanes}">',),
            remedy="Reseat the card or its riser, and look at the slot's lanes in the firmware setup.",
        )


def _gdr_refused(node: NodeTopology) -> Iterator[Finding]:
    """NICs, and GPUs, on which NCCL found no GPUDirect RDMA when it wrote the file: it then uses none there."""
    rdma = [nic for nic in node.nics if nic.kind in _RDMA]
    named = [gpu.model or "" for gpu in node.gpus]
    by_design = bool(named) and all(is_of("without GPUDirect RDMA", name) for name in named)
    # EFA beside cards: g5 and g6 have none, other machines may.
    unsure = bool(named) and all(is_of("card", name) for name in named) and all(nic.kind == "efa" for nic in rdma)
    status = Status.INFO if by_design else Status.WARN if unsure else Status.FAIL
    for kind, devices in (("GPU", node.gpus if rdma else ()), ("NIC", rdma)):
        refused = [device for device in devices if device.gdr_refused]
        if refused:
            yield Finding(
                code="topology.gdr.refused",
                status=status,
                subject=", ".join(device.name for device in refused[:8]),
                message=f"NCCL found no GPUDirect RDMA on {len(refused)} of {len(devices)} {kind}s: data between nodes "
                "is copied through host memory there" + (", as always with these GPUs" if by_design else ""),
                evidence=tuple(device.gdr_refused for device in refused[:4]),
                remedy=""
                if by_design
                else "Load nvidia_peermem, or use open kernel modules with Linux 5.12 or later "
                "(DMA-BUF); a topology file of one's own must not say gdr=0.",
            )


def _reference(node: NodeTopology, gpus_on_bus: int | None, in_container: bool) -> Iterator[Finding]:
    """A board whose GPUs are soldered to it has lost what its bus does not show; a server may be built with fewer.

    A container may be given fewer RDMA devices than its host has. NVLinks that are missing cost their share of every
    collective, also where all GPUs lack the same number.
    """
    row = reference_of(node)
    lost = row is not None and bool(row.links_per_pair) and gpus_on_bus is not None and gpus_on_bus < row.gpus
    whole = min(row.links_per_pair, default=0) if row else 0
    fewest = min((pair.nvlinks + pair.nvlinks_unread for pair in node.pairs if pair.nvlinks), default=whole)
    for departure in departures(node):
        gone = lost and departure.startswith(f"{len(node.gpus)} GPUs, ")
        left = sum(nic.kind in _RDMA for nic in node.nics) / (row.nics if row and row.nics else 1)
        few_nics = " devices, " in departure and not in_container and left < 1.0  # fewer than carry the GPUs' traffic
        few_links = "fewer NVLinks than" in departure
        share = left if few_nics else fewest / whole if few_links else 1.0
        yield Finding(
            code="topology.nic.missing" if few_nics else "topology.reference.departs",
            status=Status.FAIL if gone else by_loss(1.0 - share),
            message=departure + ": an HCA is missing" * few_nics,
            evidence=(f"reference {row.called}: {row.seen or row.source} ({row.basis})",) if row else (),
            remedy="Compare with a healthy node of this kind, then repair or take this one out.",
        )


_Rules = tuple[Callable[[NodeTopology], Iterator[Finding]], ...]
_BEFORE: _Rules = (_nvlink_missing, _nvlink_asymmetric, _nvlink_down_hgx)
_AFTER: _Rules = (_undecidable, _virtual, _gdr_refused, _rail_uneven, _pcie_bound, _gpu_pcie_bound)

"""Reference machines: what a healthy node of each kind looks like, as data with sources.

They only cross-check: bandwidth is derived from the links found, never looked up here. A row marked "seen" was taken
from real output of such a machine; "stated" rests on vendors' documents and is to be verified before it is relied on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from topology.graph import NodeTopology
from topology.labels import UNKNOWN, nvlinks

HYBRID_MESH = ("NV1", "NV2")
_AWS = "AWS EC2 accelerated computing instance types; aws-ofi-nccl topology files"
_HGX = "NVIDIA DGX/HGX user guides; public nvidia-smi topo -m output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One kind of machine."""

    sku: str
    gpus: int
    model: str  # regular expression that the GPU's name matches, from the beginning of a word: GB200 is no B200
    nvlinks: tuple[str, ...] = ()  # labels of GPU pairs with NVLink; empty: none expected
    all_to_all: bool = True  # every pair of the node has NVLink
    nics: int | None = None  # RDMA devices for GPU traffic; None: varies
    nic_kind: str | None = None  # "hca", "efa"; None: varies
    gpu_nic: str | None = None  # label of a GPU to its nearest NIC; None: varies
    gpu_nic_farthest: str | None = None  # the farthest such label of a healthy node, where makers of the board differ
    product: str | None = None  # regular expression the DMI product name matches; such a row counts only with it
    basis: str = "seen"  # "seen" or "stated"
    source: str = _HGX


def _aws(sku: str, model: str, count: str, nics: int, *, basis: str) -> Reference:
    return Reference(
        sku=f"AWS {sku}",
        gpus=8,
        model=model,
        nvlinks=(count,),
        nics=nics,
        nic_kind="efa",
        product=rf"^{re.escape(sku)}\.",
        basis=basis,
        source=_AWS,
    )


TABLE = (
    _aws("p4d", r"A100", "NV12", 4, basis="seen"),
    _aws("p4de", r"A100", "NV12", 4, basis="seen"),
    _aws("p5", r"H100", "NV18", 32, basis="seen"),
    _aws("p5e", r"H200", "NV18", 32, basis="stated"),
    _aws("p5en", r"H200", "NV18", 16, basis="stated"),
    _aws("p6-b200", r"B200", "NV18", 8, basis="stated"),
    _aws("p6-b300", r"B300", "NV18", 16, basis="stated"),
    Reference(sku="AWS g5.48xlarge", gpus=8, model=r"A10G", nics=1, nic_kind="efa", product=r"^g5\.48x", source=_AWS),
    Reference(
        sku="GCP a3-ultragpu-8g",
        gpus=8,
        model=r"H200",
        nvlinks=("NV18",),
        nics=8,
        nic_kind="hca",
        gpu_nic="PIX",
        product=r"Google|a3-ultra",
        source="google/dranet documentation, nvidia-smi topo -m of a3-ultragpu-8g",
    ),
    Reference(
        sku="Azure ND H100 v5",
        gpus=8,
        model=r"H100",
        nvlinks=("NV18",),
        nics=8,
        nic_kind="hca",
        product=r"^Virtual Machine$",
        source="Azure/azhpc-images topology/ndv5-topo.xml",
    ),
    Reference(
        sku="Azure ND A100 v4",
        gpus=8,
        model=r"A100",
        nvlinks=("NV12",),
        nics=8,
        nic_kind="hca",
        product=r"^Virtual Machine$",
        source="Azure/azhpc-images topology/ndv4-topo.xml",
    ),
    Reference(sku="DGX-2", gpus=16, model=r"V100", nvlinks=("NV6",), nics=10, nic_kind="hca", gpu_nic="PIX"),
    Reference(sku="DGX-1 (V100)", gpus=8, model=r"V100", nvlinks=HYBRID_MESH, all_to_all=False, nics=4, gpu_nic="PIX"),
    Reference(sku="DGX-1 (P100)", gpus=8, model=r"P100", nvlinks=("NV1",), all_to_all=False, nics=4, gpu_nic="PIX"),
    Reference(
        sku="DGX A100",
        gpus=8,
        model=r"A100",
        nvlinks=("NV12",),
        nics=10,
        nic_kind="hca",
        gpu_nic="PXB",
        product=r"DGX.?A100",
    ),
    Reference(
        sku="DGX H100/H200",
        gpus=8,
        model=r"H[12]00",
        nvlinks=("NV18",),
        nics=12,
        nic_kind="hca",
        gpu_nic="PXB",
        product=r"DGX.?H[12]00",
    ),
    Reference(
        sku="HGX H100/H200",
        gpus=8,
        model=r"H[12]00(?!.*(PCIe|NVL))",
        nvlinks=("NV18",),
        gpu_nic="PIX",
        gpu_nic_farthest="PXB",
    ),
    Reference(sku="HGX H800", gpus=8, model=r"H800(?!.*PCIe)", nvlinks=("NV8",)),
    Reference(sku="HGX A800", gpus=8, model=r"A800.*SXM", nvlinks=("NV8",)),
    Reference(sku="HGX A100", gpus=8, model=r"A100(?!.*PCI)", nvlinks=("NV12",)),
    Reference(sku="HGX A100 4-GPU", gpus=4, model=r"A100(?!.*PCI)", nvlinks=("NV4",)),
    Reference(
        sku="HGX B200",
        gpus=8,
        model=r"B[23]00",
        nvlinks=("NV18",),
        gpu_nic="PIX",
        gpu_nic_farthest="PXB",
        basis="stated",
    ),
    Reference(
        sku="GB200/GB300 NVL72 tray",
        gpus=4,
        model=r"GB[23]00",
        nvlinks=("NV18",),
        gpu_nic="NODE",
        gpu_nic_farthest="SYS",
        nics=4,
    ),
    Reference(sku="GH200", gpus=1, model=r"GH200", gpu_nic="NODE"),
    Reference(sku="DGX Spark", gpus=1, model=r"GB10", nics=4, nic_kind="hca", gpu_nic="NODE"),
    Reference(
        sku="IBM AC922",
        gpus=4,
        model=r"V100",
        nvlinks=("NV3",),
        all_to_all=False,
        gpu_nic="NODE",
        product=r"8335|AC922|Power",
    ),
    Reference(
        sku="Azure NC A100 v4", gpus=4, model=r"A100.*PCI", nvlinks=("NV12",), all_to_all=False, product=r"^Virtual"
    ),
)
"""First match wins: rows that a product name singles out stand before the general ones."""


def reference_of(node: NodeTopology) -> Reference | None:
    """The row a node belongs to by GPU model, count and product name, None where no model is known or none fits."""
    models = {gpu.model for gpu in node.gpus if gpu.model}
    if len(models) != 1:
        return None
    (model,) = models
    return next((row for row in TABLE if _fits(row, node, model)), None)


def _fits(row: Reference, node: NodeTopology, model: str) -> bool:
    if re.search(rf"\b(?:{row.model})", model) is None:
        return False
    if row.product is not None:
        return node.product is not None and re.search(row.product, node.product) is not None
    # A missing GPU must not turn a broken HGX into an unknown machine; one extra is a different machine.
    return row.gpus == len(node.gpus) or (row.gpus == 8 and 4 < len(node.gpus) < 8)


def candidates(node: NodeTopology) -> tuple[str, ...]:
    """Rows that fit by shape alone, for a source that names no model: GPU count, NVLinks, nearest NIC."""
    row = reference_of(node)
    if row is not None:
        return (row.sku,)
    if any(gpu.model for gpu in node.gpus) or not node.nvlink_known:
        return ()
    gpu_names = {gpu.name for gpu in node.gpus}
    pairs = [pair for pair in node.pairs if pair.a in gpu_names and pair.b in gpu_names]
    labels = {pair.label for pair in pairs if pair.nvlinks}
    most = max(labels, key=nvlinks, default="")
    near = {entry.label for entry in node.nearest_nic}
    return tuple(
        row.sku
        for row in TABLE
        if row.gpus == len(node.gpus)
        and row.nvlinks
        and max(row.nvlinks, key=nvlinks) == most
        and (not row.all_to_all or all(pair.nvlinks for pair in pairs))
        and (row.gpu_nic is None or not near or not near.isdisjoint((row.gpu_nic, row.gpu_nic_farthest)))
        and (row.nics is None or len(node.nics) in (0, row.nics))
    )


def recognise(node: NodeTopology) -> NodeTopology:
    """The node with `sku` set where the table knows it."""
    row = reference_of(node)
    return replace(node, sku=row.sku) if row else node


_NO_ADAPTER = ("ethernet", "rxe", "siw")  # sockets, and RDMA in software


def departures(node: NodeTopology) -> tuple[str, ...]:
    """What differs from the reference machine, in words; empty where nothing does or no row fits."""
    row = reference_of(node)
    if row is None:
        return ()
    found = []
    if len(node.gpus) != row.gpus:
        found.append(f"{len(node.gpus)} GPUs, {row.sku} has {row.gpus}")
    found += _nvlink_departures(node, row)
    # Of an adapter whose kind cannot be told it is not known that it is another one.
    kinds = (row.nic_kind, "other", "unknown") if row.nic_kind else ("hca", "efa", "other", "unknown")
    nics = [nic for nic in node.nics if nic.kind in kinds]
    if row.nics is not None and len(nics) < row.nics:
        found.append(f"{len(nics)} {row.nic_kind or 'RDMA'} devices, {row.sku} has {row.nics}")
    elif row.gpu_nic and node.source == "probes" and not any(nic.kind not in _NO_ADAPTER for nic in node.nics):
        found.append(f"no RDMA adapter, {row.sku} has them")
    if row.gpu_nic and not node.virtual and nics:
        lost = {gpu.name for gpu in node.gpus if not gpu.usable}
        decided = [near for near in node.nearest_nic if near.gpu not in lost]
        farthest = row.gpu_nic_farthest or row.gpu_nic
        far = [near.gpu for near in decided if not _at_least(near.label, farthest)]
        if far:
            found.append(f"nearest NIC of {', '.join(far)} is farther than {farthest}, which {row.sku} has")
    return tuple(found)


def _at_least(label: str, wanted: str) -> bool:
    order = ("PIX", "PXB", "PHB", "NODE", "SYS")
    label = label.partition("/")[0]  # "PHB/NODE" of NCCL XML
    return label in order and order.index(label) <= order.index(wanted)


def _nvlink_departures(node: NodeTopology, row: Reference) -> list[str]:
    gpu_names = {gpu.name for gpu in node.gpus if gpu.usable}
    pairs = [pair for pair in node.pairs if pair.a in gpu_names and pair.b in gpu_names]
    if not row.nvlinks or not pairs or not node.nvlink_known:
        return []
    fewest, found = min(map(nvlinks, row.nvlinks)), []
    pairs = [pair for pair in pairs if pair.label != UNKNOWN]  # what was not read is not missing
    without = [pair for pair in pairs if not pair.nvlinks]
    if row.all_to_all and without:
        found.append(f"{len(without)} of {len(pairs)} GPU pairs have no NVLink, {row.sku} has {row.nvlinks[0]} on all")
    fewer = [
        f"{pair.a}-{pair.b} {pair.label}"
        for pair in pairs
        if pair.nvlinks and pair.nvlinks + pair.nvlinks_unread < fewest
    ]
    if fewer:
        more = f" and {len(fewer) - 4} more" if len(fewer) > 4 else ""
        found.append(f"{', '.join(fewer[:4])}{more}: fewer NVLinks than {row.sku}'s {row.nvlinks[0]}")
    return found

"""How a node departs from a healthy machine of its kind (hardware/machines.toml).

Rows only cross-check: bandwidth is derived from the links found, never looked up here.
"""

from __future__ import annotations

import re

from hardware.machines import Machine, recognised
from topology.derive import reference_of
from topology.graph import UNKNOWN, NodeTopology, rank


def candidates(node: NodeTopology) -> tuple[str, ...]:
    """Rows that fit by shape alone, for a source that names no model: GPU count, NVLinks, nearest NIC."""
    row = reference_of(node)
    if row is not None:
        return (row.called,)
    if any(gpu.model for gpu in node.gpus) or not node.nvlink_known:
        return ()
    pairs = node.gpu_pairs()
    most = max((pair.nvlinks for pair in pairs), default=0)
    near = {entry.label for entry in node.nearest_nic}
    return tuple(
        row.called
        for row in recognised()
        if row.gpus == len(node.gpus)
        and row.links_per_pair
        and max(row.links_per_pair) == most
        and (not row.all_to_all or all(pair.nvlinks for pair in pairs))
        and (row.gpu_nic is None or not near or not near.isdisjoint((row.gpu_nic, row.gpu_nic_farthest)))
        and (row.devices is None or len(node.nics) in (0, row.devices))
    )


_NO_ADAPTER = ("ethernet", "rxe", "siw")  # sockets, and RDMA in software


def departures(node: NodeTopology) -> tuple[str, ...]:
    """What differs from the reference machine, in words; empty where nothing does or no row fits."""
    row = reference_of(node)
    if row is None:
        return ()
    found = []
    if len(node.gpus) != row.gpus:
        found.append(f"{len(node.gpus)} GPUs, {row.called} has {row.gpus}")
    found += _nvlink_departures(node, row)
    # An adapter of unknown kind is not known to be a different one.
    kinds = (row.nic_kind, "other", "unknown") if row.nic_kind else ("hca", "efa", "other", "unknown")
    nics = [nic for nic in node.nics if nic.kind in kinds]
    # Slingshot's NICs have no verbs device: by the names that HPE's host software gives their interfaces
    slingshot = any(re.fullmatch(r"hsn\d+", nic.name) for nic in node.nics)
    if row.devices is not None and len(nics) < row.devices and not slingshot:
        found.append(f"{len(nics)} {row.nic_kind or 'RDMA'} devices, {row.called} has {row.devices}")
    elif (
        row.gpu_nic and node.source == "probes" and all(nic.kind in _NO_ADAPTER for nic in node.nics) and not slingshot
    ):
        found.append(f"no RDMA adapter, {row.called} has them")
    if row.gpu_nic and not node.virtual and nics:
        lost = {gpu.name for gpu in node.gpus if not gpu.usable}
        decided = [near for near in node.nearest_nic if near.gpu not in lost]
        farthest = row.gpu_nic_farthest or row.gpu_nic
        far = [near.gpu for near in decided if rank(near.label.partition("/")[0]) > rank(farthest)]  # "PHB/NODE" of XML
        if far:
            found.append(f"nearest NIC of {', '.join(far)} is farther than {farthest}, which {row.called} has")
    return tuple(found)


def _nvlink_departures(node: NodeTopology, row: Machine) -> list[str]:
    pairs = node.gpu_pairs(usable=True)
    if not row.links_per_pair or not pairs or not node.nvlink_known:
        return []
    fewest, found = min(row.links_per_pair), []
    pairs = [pair for pair in pairs if pair.label != UNKNOWN]  # what was not read is not missing
    without = [pair for pair in pairs if not pair.nvlinks]
    if row.all_to_all and without:
        found.append(f"{len(without)} of {len(pairs)} GPU pairs have no NVLink, {row.called} has NV{fewest} on all")
    fewer = [
        f"{pair.a}-{pair.b} {pair.label}"
        for pair in pairs
        if pair.nvlinks and pair.nvlinks + pair.nvlinks_unread < fewest
    ]
    if fewer:
        more = f" and {len(fewer) - 4} more" if len(fewer) > 4 else ""
        found.append(f"{', '.join(fewer[:4])}{more}: fewer NVLinks than {row.called}'s NV{fewest}")
    return found

"""Latency of a collective by NCCL's own model: what small messages, which no wire bounds, are held against.

Source: NCCL 2.30.7 src/graph/tuning.cc, `ncclTunerConstantsDefaults` and `ncclTopoTuneModel`, protocol LL, which small
messages take. It leaves out the launch of the kernel and the framework's call, so it is a floor and no threshold.
"""

from __future__ import annotations

from math import log2

MICROSECOND = 1e-6
# baseLatencies and hwLatencies of LL, in microseconds.
RING_BASE, TREE_BASE = 6.6, 6.8
RING_STEP = {"NVLink": 0.6, "PCIe": 1.0}
RING_NETWORK, TREE_NETWORK = 2.7, 5.0
NETWORK_OVERHEAD = 1.0  # getNetOverhead: of each step where several nodes are; 2.0 on AMD CPUs

RING_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


def nccl_latency(op: str, *, ranks: int, nodes: int, link: str) -> tuple[float, str] | None:
    """Seconds, and how they come about; None for an op the model has no ring for, or one rank.

    `link` joins the GPUs of a node: "NVLink" or "PCIe". Every node has as many ranks.
    """
    passes = RING_PASSES.get(op)
    if passes is None or ranks < 2 or nodes < 1 or ranks % nodes:
        return None
    local = ranks // nodes
    between = passes * (nodes - 1) if nodes > 1 else 0
    within = passes * (ranks - 1) - between
    step = max(RING_STEP[link], NETWORK_OVERHEAD if nodes > 1 else 0.0)
    # With one rank on each node the network's latency is not hidden: NCCL takes the tree's.
    network = TREE_NETWORK if local == 1 else RING_NETWORK
    ring = RING_BASE + within * step + between * network
    words = f"ring {RING_BASE} us + {within} steps of {step} us by {link}"
    words += f" + {between} of {network} us by the network" if between else ""
    if op == "all_reduce":
        depth = int(log2(nodes))
        tree = TREE_BASE + 2 * ((local - 1) * RING_STEP[link] + depth * TREE_NETWORK)
        if tree < ring:
            ring = tree
            words = f"tree {TREE_BASE} us + 2 x ({local - 1} steps of {RING_STEP[link]} us by {link}"
            words += f" + {depth} of {TREE_NETWORK} us by the network)" if depth else ")"
    return ring * MICROSECOND, f"latency {ring:.1f} us: {words} (NCCL tuning.cc, LL); launch not counted"

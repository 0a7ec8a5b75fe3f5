"""The bandwidth that NCCL plans for a group of GPUs, computed from the found links and NCCL's planning constants.

Specification: NCCL src/graph/topo.h and search.cc. The ring algorithm moves (n-1)/n of the data over every link, so its
bus bandwidth is that of the slowest link (nccl-tests doc/PERFORMANCE.md). A plan is not a measurement: healthy rings
reach 0.88 to 0.98 of it with large messages; less than about 0.8 at 1 GiB is suspicious.
"""

from __future__ import annotations

from collections.abc import Iterable

from contracts.tables import read_texts
from hardware.gpus import most_links
from hardware.units import GIGA
from topology.graph import GpuNode, Island, NicNode, NodeTopology, Pair, Pairs, Rail, nvlink_bytes_per_second

_text = read_texts(__file__, "texts.toml")
Plan = tuple[float | None, tuple[str, ...]]  # (bytes per second per direction, derivation); None: not derivable
_LARGEST_RING = 16  # GPUs; limits the search for an NVLink ring, and no node on the market has more


def gigabytes(value: float | None) -> str:
    """Format a bandwidth: "370.8 GB/s"."""
    return "unknown" if value is None else f"{value / GIGA:.4g} GB/s"


def island_plan(node: NodeTopology, island: Island) -> Plan:
    """Return the bus bandwidth of a ring over an island's NVLinks."""
    members = [gpu for gpu in node.gpus if gpu.name in island.gpus]
    per_link = {nvlink_bytes_per_second(gpu.compute_capability) for gpu in members}
    if None in per_link or len(per_link) != 1:
        return None, ("no plan: the compute capability of the GPUs, and so the speed of one NVLink, is not known",)
    (link,) = per_link
    known = Pairs(node.pairs)
    if not island.all_to_all and not has_nvlink_ring(island.gpus, known):
        return None, ("no plan: no ring of NVLinks passes every GPU of the island once",)
    counts = {gpu.name: links_into(gpu, island, known) for gpu in members}
    slowest = min(counts, key=lambda name: counts[name][0])
    links, how = counts[slowest]
    value = links * (link or 0.0)
    capability = ".".join(map(str, members[0].compute_capability or ()))
    return value, (
        f"{slowest} has {links} NVLinks into the island ({how}), the fewest",
        f"one NVLink carries {gigabytes(link)} each way at compute capability {capability} (NCCL src/graph/topo.h)",
        f"{links} x {gigabytes(link)} = {gigabytes(value)} per GPU each way: upper bound of a ring",
    )


def links_into(gpu: GpuNode, island: Island, known: Pairs) -> tuple[int, str]:
    """Return the NVLinks of a GPU into its island, and how they are counted: to a switch once, direct ones summed."""
    peers = [known.get(gpu.name, other) for other in island.gpus if other != gpu.name]
    counts = [pair.nvlinks for pair in peers if pair]
    kinds = {link.kind for link in gpu.nvlinks}
    total = sum(link.count for link in gpu.nvlinks)
    if "nvswitch" in kinds:
        return max(counts, default=0), "through NVSwitch, the same links reach every peer"
    if "gpu" in kinds or len(counts) == 1:
        return sum(counts), "direct links, summed over its peers"
    if total:
        return min(total, sum(counts)), "far ends hidden, never more than the GPU has"
    # In a text matrix, all direct links of a GPU count.
    if len(set(counts)) == 1 and sum(counts) > most_links():
        return counts[0], f"more than {most_links()} in sum, so through NVSwitch"
    return sum(counts), "direct links, summed over its peers"


def has_nvlink_ring(gpus: tuple[str, ...], known: Pairs) -> bool:
    """Whether there is a ring through all GPUs that uses only NVLink."""
    if all(known.nvlinks(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :]):
        return True
    if len(gpus) > _LARGEST_RING:
        return False

    def walk(path: list[str], left: set[str]) -> bool:
        if not left:
            return known.nvlinks(path[-1], path[0]) > 0
        return any(walk([*path, name], left - {name}) for name in sorted(left) if known.nvlinks(path[-1], name))

    return walk([gpus[0]], set(gpus[1:]))


def node_plan(node: NodeTopology) -> Plan:
    """Return the bus bandwidth of a ring through all responding GPUs of the node, with its derivation."""
    names = tuple(gpu.name for gpu in node.gpus if gpu.usable)
    if len(names) < 2:
        return None, ("no plan: a single GPU sends nothing inside the node",)
    if not node.nvlink_known:
        return None, ("no plan: the source says nothing about NVLink",)
    whole = next((island for island in node.islands if set(island.gpus) == set(names)), None)
    if whole:
        return island_plan(node, whole)
    pair = _find_weakest_needed(names, Pairs(node.pairs))
    if pair is None:
        return None, ("no plan: the bandwidth of some pair that the ring must cross is not known",)
    slowed = [gpu for gpu in node.gpus if gpu.name in (pair.a, pair.b) and gpu.pcie_running_bytes_per_second]
    return _get_rate(pair), (
        _text("no_island", gpus=len(names)),
        _text("crossed", pair=pair, rate=gigabytes(_get_rate(pair))),
        *(_text("slowed", gpu=gpu) for gpu in slowed),
        _text("shared_uplink"),
    )


def _find_weakest_needed(names: tuple[str, ...], known: Pairs) -> Pair | None:
    """Return the slowest edge of the maximum spanning tree, which bounds every ring; None if a pair is unknown."""
    reached, taken = {names[0]}, []
    while len(reached) < len(names):
        edges = [known.get(a, b) for a in names if a in reached for b in names if b not in reached]
        best = max((pair for pair in edges if pair and _get_rate(pair)), key=_get_rate, default=None)
        if best is None:
            return None
        reached |= {best.a, best.b}
        taken.append(best)
    return min(taken, key=_get_rate)


def _get_rate(pair: Pair) -> float:
    return pair.running_bytes_per_second or pair.bytes_per_second or 0.0


_RATE_800G = 90 * GIGA  # ports of 800 Gb/s have at least this rate


def is_behind_own_switch(nic: NicNode, gpus: Iterable[GpuNode]) -> bool:
    """Whether the GPUs are attached to the NIC's own PCIe 6 switch, so data does not use the NIC's link to the host.

    This is the case on boards of compute capability 10.3 with 800 Gb/s ConnectX-8. Their link to the host is PCIe 5 and
    would halve the rate (NVIDIA HGX B300 and GB300 NVL72 data sheets, ConnectX-8 SuperNIC).
    """
    fast = (nic.rate_bytes_per_second or 0.0) >= _RATE_800G
    return fast and any((gpu.compute_capability or (0, 0)) >= (10, 3) for gpu in gpus)


def usable_rate(nic: NicNode, gpus: Iterable[GpuNode]) -> float | None:
    """Return the rate of a NIC for these GPUs: that of its ports, limited by its PCIe link. None if unknown."""
    if nic.active is False:
        return 0.0
    if nic.rate_bytes_per_second is None or is_behind_own_switch(nic, gpus):
        return nic.rate_bytes_per_second
    link = nic.pcie_running_bytes_per_second or nic.pcie_bytes_per_second
    return min(nic.rate_bytes_per_second, link or nic.rate_bytes_per_second)


def rail_plan(node: NodeTopology, rail: Rail) -> Plan:
    """Return the total rate of a rail's NICs from one node to the next."""
    rates = []
    steps = []
    for nic in (nic for nic in node.nics if nic.name in rail.nics):
        rate = usable_rate(nic, node.gpus)
        if rate is None:
            return None, (f"no plan: the rate of {nic.name} is not known",)
        rates.append(rate)
        slot = f"PCIe slot {gigabytes(nic.pcie_bytes_per_second)}"
        if nic.pcie_running_bytes_per_second:
            slot = f"PCIe link {gigabytes(nic.pcie_running_bytes_per_second)} ({nic.pcie_link})"
        steps.append(f"{nic.name}: active ports {gigabytes(nic.rate_bytes_per_second)}, {slot}: {gigabytes(rate)}")
    value = sum(rates)
    gpus = [gpu for gpu in node.gpus if gpu.name in rail.gpus]
    links = [gpu.pcie_running_bytes_per_second or gpu.pcie_bytes_per_second for gpu in gpus]
    reach = sum(link for link in links if link is not None)
    slowed = [gpu for gpu in gpus if gpu.pcie_running_bytes_per_second]
    if slowed and None not in links and reach < value:  # a healthy slot does not limit the plan: NCCL has its own rates
        steps += [f"{gpu.name} runs at {gpu.pcie_link}: {gigabytes(reach)} into the GPUs of the rail" for gpu in slowed]
        value = reach
    return value, (*steps, f"rail {rail.rail}: {gigabytes(value)} from one node to the next, each way")

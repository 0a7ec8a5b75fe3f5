"""The bandwidth between ranks on given hosts: what NCCL plans with, its current links, and those of a healthy node.

The bar CURRENT uses the links that were found. The bar HEALTHY uses the recognised machine (hardware/machines.toml),
else the best device of the same kind in the host, because a GPU or NIC with less than its peers has lost it. Ranks use
GPUs in order, one each, like torchrun's local ranks.

NCCL's plan is computed from the found links and NCCL's planning constants (NCCL src/graph/topo.h and search.cc). The
ring algorithm moves (n-1)/n of the data over every link, so its bus bandwidth is that of the slowest link (nccl-tests
doc/PERFORMANCE.md). A plan is not a measurement: healthy rings reach 0.88 to 0.98 of it with large messages; less than
about 0.8 at 1 GiB is suspicious.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, Literal

from contracts.finding import Interval
from contracts.tables import read_texts
from hardware.gpus import find_gpu, link_named, most_links, refuses_peers
from hardware.units import GIGA
from topology.derive import find_reference
from topology.expected import OPS, ExpectedBandwidth, Paths, exact_rate, expect_bandwidth, rate_between
from topology.graph import (
    UNKNOWN,
    Device,
    Expectation,
    GpuNode,
    Island,
    NicNode,
    NodeTopology,
    Pair,
    Pairs,
    Rail,
    nvlink_bytes_per_second,
    pcie_bytes_per_second,
)

_text = read_texts(__file__, "texts.toml")

BarName = Literal["with current links", "when healthy"]
CURRENT: Final = "with current links"
HEALTHY: Final = "when healthy"

# NCCL's plan

Plan = tuple[float | None, tuple[str, ...]]  # (bytes per second per direction, derivation); None: not derivable
RAW_OVER_PLAN = 63.0 / 48.0  # PCIe 5.0 x16 carries 63 GB/s, NCCL assumes 48; the ratio is the same from generation 3 on
_LARGEST_RING = 16  # GPUs; limits the search for an NVLink ring, and no node on the market has more


def gigabytes(value: float | None) -> str:
    """Format a bandwidth: "370.8 GB/s"."""
    return "unknown" if value is None else f"{value / GIGA:.4g} GB/s"


def _plan_island(node: NodeTopology, island: Island) -> Plan:
    """Return the bus bandwidth of a ring over an island's NVLinks."""
    members = [gpu for gpu in node.gpus if gpu.name in island.gpus]
    per_link = {nvlink_bytes_per_second(gpu.compute_capability) for gpu in members}
    if None in per_link or len(per_link) != 1:
        return None, ("the GPU model (compute capability), and so the speed of one NVLink, is not known",)
    (link,) = per_link
    pairs = Pairs(node.pairs)
    if not island.all_to_all and not _has_nvlink_ring(island.gpus, pairs):
        return None, ("no ring of NVLinks passes every GPU of the island once",)
    counts = {gpu.name: _count_links_into(gpu, island, pairs) for gpu in members}
    slowest = min(counts, key=lambda name: counts[name][0])
    links, how = counts[slowest]
    value = links * (link or 0.0)
    capability = ".".join(map(str, members[0].compute_capability or ()))
    return value, (
        f"{slowest} has {links} NVLinks into the island ({how}), the fewest",
        f"one NVLink carries {gigabytes(link)} each way at compute capability {capability} (NCCL src/graph/topo.h)",
        f"{links} x {gigabytes(link)} = {gigabytes(value)} per GPU each way: upper bound of a ring",
    )


def _count_links_into(gpu: GpuNode, island: Island, pairs: Pairs) -> tuple[int, str]:
    """Return the NVLinks of a GPU into its island, and how they are counted: to a switch once, direct ones summed."""
    peers = [pairs.get(gpu.name, other) for other in island.gpus if other != gpu.name]
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


def _has_nvlink_ring(gpus: tuple[str, ...], pairs: Pairs) -> bool:
    """Whether there is a ring through all GPUs that uses only NVLink."""
    if all(pairs.nvlinks(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :]):
        return True
    if len(gpus) > _LARGEST_RING:
        return False

    def walk(path: list[str], left: set[str]) -> bool:
        if not left:
            return pairs.nvlinks(path[-1], path[0]) > 0
        return any(walk([*path, name], left - {name}) for name in sorted(left) if pairs.nvlinks(path[-1], name))

    return walk([gpus[0]], set(gpus[1:]))


def plan_node(node: NodeTopology) -> Plan:
    """Return the bus bandwidth of a ring through all responding GPUs of the node, with its derivation."""
    names = tuple(gpu.name for gpu in node.gpus if gpu.usable)
    if len(names) < 2:
        return None, ("a single GPU sends nothing inside the node",)
    if not node.nvlink_known:
        return None, ("the source contains no data about NVLink",)
    joined_island = next((island for island in node.islands if set(island.gpus) == set(names)), None)
    if joined_island:
        return _plan_island(node, joined_island)
    pair = _find_weakest_needed(names, Pairs(node.pairs))
    if pair is None:
        return None, ("the bandwidth of some pair that the ring must cross is not known",)
    slowed = [gpu for gpu in node.gpus if gpu.name in (pair.a, pair.b) and gpu.pcie_running_bytes_per_second]
    return _get_rate(pair), (
        _text("no_island", gpus=len(names)),
        _text("crossed", pair=pair, rate=gigabytes(_get_rate(pair))),
        *(_text("slowed", gpu=gpu) for gpu in slowed),
        _text("shared_uplink"),
    )


def _find_weakest_needed(names: tuple[str, ...], pairs: Pairs) -> Pair | None:
    """Return the slowest edge of the maximum spanning tree, which bounds every ring; None if a pair is unknown."""
    reached, edges_used = {names[0]}, []
    while len(reached) < len(names):
        edges = [pairs.get(a, b) for a in names if a in reached for b in names if b not in reached]
        best = max((pair for pair in edges if pair and _get_rate(pair)), key=_get_rate, default=None)
        if best is None:
            return None
        reached |= {best.a, best.b}
        edges_used.append(best)
    return min(edges_used, key=_get_rate)


def _get_rate(pair: Pair) -> float:
    return pair.running_bytes_per_second or pair.bytes_per_second or 0.0


_RATE_800G = 90 * GIGA  # ports of 800 Gb/s have at least this rate


def is_behind_own_switch(nic: NicNode, gpus: Iterable[GpuNode]) -> bool:
    """Whether the GPUs are attached to the NIC's own PCIe 6 switch, so data does not use the NIC's link to the host.

    This is so for ConnectX-8 with 800 Gb/s on HGX B300, GB300 NVL72 and MGX PCIe switch boards (RTX PRO 6000). Their
    link to the host is PCIe 5 and would halve the rate (NVIDIA's data sheets; MGX PCIe Switch Board with ConnectX-8).
    """
    fast = (nic.rate_bytes_per_second or 0.0) >= _RATE_800G
    return fast and any((gpu.compute_capability or (0, 0)) >= (10, 3) for gpu in gpus)


def usable_rate(nic: NicNode, gpus: Iterable[GpuNode], bar: BarName = CURRENT) -> float | None:
    """Return the rate of a NIC for these GPUs: that of its ports, limited by its PCIe link. None if unknown."""
    if nic.active is False and bar == CURRENT:
        return 0.0
    if nic.rate_bytes_per_second is None or is_behind_own_switch(nic, gpus):
        return nic.rate_bytes_per_second
    return min(nic.rate_bytes_per_second, _find_link_rate(nic, bar))


def _find_link_rate(device: Device, bar: BarName = CURRENT) -> float:
    """Return the rate of a device's PCIe link in NCCL's plan, or of its slot when healthy; infinite if unknown."""
    running = device.pcie_running_bytes_per_second if bar == CURRENT else None
    return running or device.pcie_bytes_per_second or float("inf")


def plan_rail(node: NodeTopology, rail: Rail) -> Plan:
    """Return the total rate of a rail's NICs from one node to the next."""
    rates = []
    steps = []
    for nic in (nic for nic in node.nics if nic.name in rail.nics):
        rate = usable_rate(nic, node.gpus)
        if rate is None:
            return None, (f"the rate of {nic.name} is not known",)
        rates.append(rate)
        slot = f"PCIe slot {gigabytes(nic.pcie_bytes_per_second)}"
        if nic.pcie_running_bytes_per_second:
            slot = f"PCIe link {gigabytes(nic.pcie_running_bytes_per_second)} ({nic.pcie_link})"
        steps.append(f"{nic.name}: active ports {gigabytes(nic.rate_bytes_per_second)}, {slot}: {gigabytes(rate)}")
    value = sum(rates)
    gpus = [gpu for gpu in node.gpus if gpu.name in rail.gpus]
    reach = sum(map(_find_link_rate, gpus))
    slowed = [gpu for gpu in gpus if gpu.pcie_running_bytes_per_second]
    if slowed and reach < value:  # a healthy slot does not limit the plan: NCCL has its own rates
        steps += [f"{gpu.name} runs at {gpu.pcie_link}: {gigabytes(reach)} into the GPUs of the rail" for gpu in slowed]
        value = reach
    return value, (*steps, f"rail {rail.rail}: {gigabytes(value)} from one node to the next, each way")


# The links of ranks

_X16 = {gen: pcie_bytes_per_second(speed, 16) or 0.0 for gen, speed in ((3, 8e9), (4, 16e9), (5, 32e9))}
LinkRate = tuple[str | None, Interval | None, tuple[str, ...]]  # (kind of link, bytes/s per direction, sources)
_NETWORKS = (("RDMA", ("efa", "hca")), ("sockets", ("ethernet",)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredLinks:
    """Links that the owner of the host requires with --expect; None means no requirement."""

    nvlinks: int | None = None  # between each pair of GPUs
    wire: float | None = None  # total of its RDMA devices, bytes per second


def host_links(node: NodeTopology, places: Sequence[int], bar: BarName, required: RequiredLinks | None = None) -> Paths:
    """Return the links between the GPUs of these local ranks, and to other hosts.

    For HEALTHY, `required` takes precedence over the recognised machine.
    """
    required = required if required is not None and bar == HEALTHY else RequiredLinks()
    usable = [gpu for gpu in node.gpus if gpu.usable]
    gpus = tuple(usable[place] for place in places if place < len(usable))
    in_host: LinkRate = None, None, ()
    if len(gpus) < len(places) > 1:
        in_host = None, None, (_text("shared_gpu", ranks=len(places), gpus=len(gpus)),)
    elif len(places) > 1:
        in_host = _find_host_links(node, gpus, bar, required)
    inside, link, link_sources = in_host
    between, wire, wire_sources = _find_network(node, gpus, bar)
    if required.wire is not None:
        text = f"as requested with --expect: RDMA devices of {gigabytes(required.wire)} together"
        between, wire, wire_sources = "RDMA", exact_rate(required.wire), (text,)
    domains = {gpu.nvlink_domain for gpu in gpus}
    return Paths(
        inside=inside,
        link=link,
        capability=gpus[0].compute_capability if gpus else None,
        between=between,
        wire=wire,
        domain=domains.pop() if len(domains) == 1 else None,
        sources=(*link_sources, *wire_sources),
    )


def join_hosts(hosts: Sequence[Paths], ranks: int, *, nvls: bool | None) -> Paths:
    """Combine hosts for `ranks`: the slowest host sets the rates; hosts in one NVLink domain form one group."""
    weakest = min(hosts, key=lambda each: each.link.low if each.link else 0.0)
    switch = weakest.inside == "NVSwitch" and (weakest.capability or (0, 0)) >= (9, 0)
    domains = {each.domain for each in hosts}
    one_domain = len(hosts) > 1 and None not in domains and len(domains) == 1
    texts = tuple(dict.fromkeys(weakest.sources))
    paths = Paths(capability=weakest.capability, nvls=nvls if switch else False, sources=texts)
    if ranks > len(hosts) or one_domain:
        paths = replace(paths, inside=weakest.inside, link=weakest.link)
    if one_domain:
        return replace(paths, sources=(*texts, f"one NVLink domain holds all {len(hosts)} hosts"))
    if len(hosts) == 1:
        return paths
    paths = replace(paths, groups=len(hosts))
    if any(each.wire is None or each.between is None for each in hosts):
        return paths
    slowest = min(hosts, key=lambda each: each.wire.low if each.wire else 0.0)
    kinds = {each.between for each in hosts}
    between = next(kind for kind in ("sockets", "RDMA without GPUDirect", "RDMA") if kind in kinds)
    return replace(paths, between=between, wire=slowest.wire, sources=tuple(dict.fromkeys((*texts, *slowest.sources))))


_LARGE_BYTES = 1 << 30  # per rank; large enough to neglect latency


def with_expectations(node: NodeTopology) -> NodeTopology:
    """Add the expected bandwidth of every NVLink island, every rail, and all responding GPUs to a node.

    A node from truncated text gets none, because the bandwidth of the missing pairs is unknown; nor does a node with
    AMD GPUs, because there is no model of RCCL.
    """
    makers = {gpu.maker for each in node.gpus if (gpu := find_gpu(each.model))}
    if node.expectations or node.lacking or makers - {"NVIDIA"}:
        return node
    return replace(node, expectations=tuple(_list_expectations(node)))


def _list_expectations(node: NodeTopology) -> Iterator[Expectation]:
    usable = tuple(gpu.name for gpu in node.gpus if gpu.usable)
    for island in node.islands:
        paths = _join_gpus(node, usable, island.gpus) if set(island.gpus) <= set(usable) else None
        yield from _make_expectations("island", _plan_island(node, island), island.gpus, node, paths)
    if len(usable) > 1:
        yield from _make_expectations("node", plan_node(node), usable, node, _join_gpus(node, usable, usable))
    for rail in node.rails:
        yield from _make_expectations("rail", plan_rail(node, rail), (*rail.nics, *rail.gpus), node, None)


def _join_gpus(node: NodeTopology, usable: tuple[str, ...], members: tuple[str, ...]) -> Paths:
    places = [usable.index(name) for name in members]
    return join_hosts([host_links(node, places, CURRENT)], len(places), nvls=None)


def _make_expectations(
    scope: str, plan: Plan, members: tuple[str, ...], node: NodeTopology, paths: Paths | None
) -> Iterator[Expectation]:
    """Yield NCCL's plan for each operation, and the bandwidth expected of healthy members on these paths, if known."""
    (value, steps), ranks = plan, len(members)
    nvls = any((gpu.compute_capability or (0, 0)) >= (9, 0) and gpu.count_nvlinks("nvswitch") for gpu in node.gpus)
    for op in OPS:
        notes = [_text("small_sizes")] if value is not None else []
        if op == "all_reduce" and notes:
            notes += [_text("nvls")] * (nvls and scope in ("island", "node")) + [_text("two_nodes")] * (scope == "rail")
        result = expect_bandwidth(paths, op, _LARGE_BYTES * ranks, ranks) if paths else None
        interval = result.interval if isinstance(result, ExpectedBandwidth) else result and result.range
        yield Expectation(
            scope=scope,
            op=op,
            busbw_bytes_per_second=value,
            derivation=(*steps, *notes),
            members=members,
            least_bytes_per_second=interval.low if interval else None,
            usual_bytes_per_second=interval.mid if interval and isinstance(result, ExpectedBandwidth) else None,
            most_bytes_per_second=interval.high if interval else None,
        )


def _find_host_links(node: NodeTopology, gpus: tuple[GpuNode, ...], bar: BarName, required: RequiredLinks) -> LinkRate:
    row = find_reference(node) if bar == HEALTHY else None
    names = tuple(gpu.name for gpu in gpus)
    links, gpu_count, source = required.nvlinks, len(node.gpus), "as requested with --expect:"
    if links is None and row is not None and row.links_per_pair and row.all_to_all:
        links, gpu_count, source = max(row.links_per_pair), row.gpus, f"{row.called} has"
    if links is not None:
        switched = links * (gpu_count - 1) > most_links()
        count = links if switched else links * (len(names) - 1)
        return _describe_nvlink(gpus, count, switched=switched, text=f"{source} NV{links} on every pair")
    if not node.nvlink_known:
        return None, None, ("the source contains no data about NVLink",)
    pairs = Pairs(node.pairs)
    if _has_nvlink_ring(names, pairs):
        island = Island(gpus=names, all_to_all=True, nvlinks_per_pair=())
        counts = [_count_links_into(gpu, island, pairs) for gpu in gpus]
        count, how = max(counts) if bar == HEALTHY else min(counts)
        switched = any(gpu.count_nvlinks("nvswitch") for gpu in gpus) or "switch" in how
        which = "most" if bar == HEALTHY else "fewest"
        text = f"{count} NVLinks of a GPU into the ring, the {which}"
        return _describe_nvlink(gpus, count, switched=switched, text=text)
    return _describe_pcie(node, gpus, pairs, bar)


def _guess_nvlink_rates(count: int) -> tuple[float, float]:
    """Return the lowest and highest rate of one of a GPU's `count` NVLinks if its generation is unknown.

    Hopper and Blackwell have 18 links; up to 4 links may also be bridges of SM 8.6 (NVIDIA data sheets).
    """
    first, last = ("NVLink 4", "NVLink 5") if count >= 18 else ("NVLink 3", "NVLink 4")
    if count <= 4:
        first = "NVLink 3 bridge"
    low, high = (link_named(name).nccl_bytes_per_second or 0.0 for name in (first, last))
    return low, high


def _describe_nvlink(gpus: tuple[GpuNode, ...], count: int, *, switched: bool, text: str) -> LinkRate:
    capability = gpus[0].compute_capability
    value = nvlink_bytes_per_second(capability)
    kind = "NVSwitch" if switched else "NVLink"
    if value is not None:
        return kind, exact_rate(count * value), (text, f"one NVLink carries {gigabytes(value)} in NCCL's plan")
    low, high = _guess_nvlink_rates(count)
    assumption = f"the GPU's generation is not known: one NVLink carries {low / GIGA:g} to {high / GIGA:g} GB/s"
    return kind, rate_between(count * low, count * high), (text, assumption)


def _describe_pcie(node: NodeTopology, gpus: tuple[GpuNode, ...], pairs: Pairs, bar: BarName) -> LinkRate:
    rates = [_find_link_rate(gpu, bar) for gpu in gpus]
    peers = [pairs.get(a.name, b.name) for a, b in combinations(gpus, 2)]
    labels = sorted({pair.label if pair else UNKNOWN for pair in peers})
    texts = [f"no ring of NVLinks joins these GPUs: {', '.join(labels)}"]
    if float("inf") not in rates:
        link = exact_rate(min(rates))
        texts.append(f"the slowest PCIe link carries {min(rates) / GIGA:.3g} GB/s in NCCL's plan")
    else:
        oldest, newest = pcie_generations(gpus[0].compute_capability)
        link = rate_between(_X16[oldest], _X16[newest])
        texts.append(f"the speed of their PCIe links is not known: 16 lanes of generation {oldest} to {newest}")
    refused = any(pair is not None and pair.peer_access is False for pair in peers)
    if refused or any(refuses_peers(gpu.model or "") for gpu in gpus):
        return "shared memory", link, (*texts, "no peer access over PCIe: data goes through the host's memory")
    if peers and all(pair is not None and pair.peer_access for pair in peers) and not node.virtual:
        return "PCIe", link, tuple(texts)
    return "PCIe or shared memory", link, (*texts, "whether peers reach each other directly is not known")


def pcie_generations(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return the range of PCIe generations of a GPU in its usual slot: that on its data sheet, or one lower."""
    if capability is None:
        return 3, 5
    newest = 3 if capability < (8, 0) else 4 if capability < (9, 0) else 5
    return max(3, newest - 1), newest


def _find_network(node: NodeTopology, gpus: tuple[GpuNode, ...], bar: BarName) -> LinkRate:
    """Return the NICs nearest to these GPUs, or all NICs of the kind if distances are unknown."""
    for name, kinds in _NETWORKS:
        offered = [nic for nic in node.nics if nic.kind in kinds]
        if bar == CURRENT:
            offered = [nic for nic in offered if nic.active is not False]
        if offered:
            return _sum_nics(node, gpus, offered, bar, name)
        row = find_reference(node) if bar == HEALTHY else None
        if name == "RDMA" and row is not None and row.gpu_nic:
            return None, None, (f"{row.called} has RDMA NICs, and none shows here: their rate is not known",)
    return None, None, ()


def _sum_nics(node: NodeTopology, gpus: tuple[GpuNode, ...], nics: list[NicNode], bar: BarName, name: str) -> LinkRate:
    names = {gpu.name for gpu in gpus}
    nearest = [each for each in node.nearest_nic if each.decidable and each.gpu in names]
    # no GPU is nearest to a NIC that is down, although one should be; `why` marks a GPU that uses another NIC instead
    near = {nic for each in nearest if bar == CURRENT or not each.why for nic in each.nics}
    used = [nic for nic in nics if nic.name in near or nic.active is False] if near else nics
    rates = [usable_rate(nic, gpus) if bar == CURRENT else _find_best_rate(nic, nics, gpus) for nic in used]
    known_rates = [rate for rate in rates if rate is not None]
    if not known_rates or len(known_rates) < len(rates):
        return None, None, (f"the rate of the {nics[0].kind} devices is not known",)
    total, reach = sum(known_rates), sum(_find_link_rate(gpu, bar) for gpu in gpus)
    text = f"{len(used)} {used[0].kind} devices carry {gigabytes(total)} together"
    if name == "sockets":
        return name, rate_between(min(known_rates), total), (f"{text}; NCCL chooses which of them it takes",)
    by_links = not (node.virtual or any(gpu.c2c for gpu in gpus) or is_behind_own_switch(used[0], gpus))
    if by_links and 0 < reach * RAW_OVER_PLAN < total:  # a link carries more than NCCL plans with
        total, text = reach, f"{text}, and the PCIe links of these GPUs {gigabytes(reach)}"
    # one GPU with a far NIC sends through another GPU; if most NICs are far, the board was designed so
    far = 2 * sum(not each.gdr_by_default for each in nearest) > len(nearest)
    return (f"{name} without GPUDirect" if far else name), exact_rate(total), (text,)


def _find_best_rate(nic: NicNode, equals: list[NicNode], gpus: tuple[GpuNode, ...]) -> float | None:
    """Return the highest rate of this kind of NIC on the host, by port and slot; also for a port that is down."""
    return max(usable_rate(other, gpus, HEALTHY) or 0.0 for other in equals if other.kind == nic.kind) or None

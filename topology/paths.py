"""The links between ranks on given hosts: as found, and as they should be.

"As it is" uses the links that were found. "As it should be" uses the recognised machine (hardware/machines.toml), else
the best device of the same kind in the host, because a GPU or NIC with less than its peers has lost it. Ranks use GPUs
in order, one each, like torchrun's local ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from contracts.finding import Interval
from contracts.tables import read_texts
from hardware.gpus import gpu_named, link_named, most_links, refuses_peers
from hardware.units import GIGA
from topology.derive import reference_of
from topology.expected import OPS, Expected, Paths, Unknown, between, expected, span
from topology.graph import (
    UNKNOWN,
    Expectation,
    GpuNode,
    Island,
    NicNode,
    NodeTopology,
    Pairs,
    nvlink_bytes_per_second,
    pcie_bytes_per_second,
)
from topology.plan import (
    Plan,
    has_nvlink_ring,
    is_behind_own_switch,
    island_plan,
    links_into,
    node_plan,
    rail_plan,
    usable_rate,
)

_text = read_texts(__file__, "texts.toml")
Bar = Literal["as it is", "as it should be"]
_X16 = {gen: pcie_bytes_per_second(speed, 16) or 0.0 for gen, speed in ((3, 8e9), (4, 16e9), (5, 32e9))}
Carried = tuple[str | None, Interval | None, tuple[str, ...]]  # (kind of link, bytes per second per direction, reasons)
_KINDS = (("RDMA", ("efa", "hca")), ("sockets", ("ethernet",)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Requirements for the host, given by its owner; None means no requirement."""

    nvlinks: int | None = None  # between each pair of GPUs
    wire: float | None = None  # total of its RDMA devices, bytes per second


def host_links(node: NodeTopology, places: Sequence[int], bar: Bar, due: Due | None = None) -> Paths:
    """Return the links between the GPUs of these local ranks, and to other hosts.

    For "as it should be", `due` takes precedence over the recognised machine.
    """
    due = due if due is not None and bar == "as it should be" else Due()
    usable = [gpu for gpu in node.gpus if gpu.usable]
    gpus = tuple(usable[place] for place in places if place < len(usable))
    among: Carried = None, None, ()
    if len(gpus) < len(places) > 1:
        among = None, None, (_text("shared_gpu", ranks=len(places), gpus=len(gpus)),)
    elif len(places) > 1:
        among = _find_inside(node, gpus, bar, due)
    out = _find_network(node, gpus, bar)
    if due.wire is not None:
        out = "RDMA", span(due.wire), (f"asked for: RDMA devices of {due.wire / GIGA:.4g} GB/s together",)
    domains = {gpu.nvlink_domain for gpu in gpus}
    return Paths(
        inside=among[0],
        link=among[1],
        capability=gpus[0].compute_capability if gpus else None,
        between=out[0],
        wire=out[1],
        domain=domains.pop() if len(domains) == 1 else None,
        words=(*among[2], *out[2]),
    )


def joined(hosts: Sequence[Paths], ranks: int, *, nvls: bool | None) -> Paths:
    """Combine hosts for `ranks`: the slowest host sets the rates; hosts in one NVLink domain form one group."""
    weakest = min(hosts, key=lambda each: each.link.low if each.link else 0.0)
    switch = weakest.inside == "NVSwitch" and (weakest.capability or (0, 0)) >= (9, 0)
    domains = {each.domain for each in hosts}
    one_domain = len(hosts) > 1 and None not in domains and len(domains) == 1
    words = tuple(dict.fromkeys(weakest.words))
    paths = Paths(capability=weakest.capability, nvls=nvls if switch else False, words=words)
    if ranks > len(hosts) or one_domain:
        paths = replace(paths, inside=weakest.inside, link=weakest.link)
    if one_domain:
        return replace(paths, words=(*words, f"one NVLink domain holds all {len(hosts)} hosts"))
    if len(hosts) == 1:
        return paths
    paths = replace(paths, groups=len(hosts))
    if any(each.wire is None or each.between is None for each in hosts):
        return paths
    slowest = min(hosts, key=lambda each: each.wire.low if each.wire else 0.0)
    kinds = {each.between for each in hosts}
    between = next(kind for kind in ("sockets", "RDMA without GPUDirect", "RDMA") if kind in kinds)
    return replace(paths, between=between, wire=slowest.wire, words=tuple(dict.fromkeys((*words, *slowest.words))))


_LARGE_BYTES = 1 << 30  # per rank; large enough to neglect latency


def with_expectations(node: NodeTopology) -> NodeTopology:
    """Add the expected bandwidth of every NVLink island, every rail, and all responding GPUs to a node.

    A node from truncated text gets none, because the bandwidth of the missing pairs is unknown; nor does a node with
    AMD GPUs, because there is no model of RCCL.
    """
    makers = {gpu.maker for each in node.gpus if (gpu := gpu_named(each.model))}
    if node.expectations or node.lacking or makers - {"NVIDIA"}:
        return node
    return replace(node, expectations=_expect_node(node))


def _expect_node(node: NodeTopology) -> tuple[Expectation, ...]:
    usable = tuple(gpu.name for gpu in node.gpus if gpu.usable)
    made: list[Expectation] = []
    for island in node.islands:
        paths = _join_gpus(node, usable, island.gpus) if set(island.gpus) <= set(usable) else None
        made += _make_expectations("island", island_plan(node, island), island.gpus, node, paths, len(island.gpus))
    if len(usable) > 1:
        made += _make_expectations("node", node_plan(node), usable, node, _join_gpus(node, usable, usable), len(usable))
    for rail in node.rails:
        made += _make_expectations("rail", rail_plan(node, rail), (*rail.nics, *rail.gpus), node)
    return tuple(made)


def _join_gpus(node: NodeTopology, usable: tuple[str, ...], members: tuple[str, ...]) -> Paths:
    places = [usable.index(name) for name in members]
    return joined([host_links(node, places, "as it is")], len(places), nvls=None)


def _make_expectations(
    scope: str, plan: Plan, members: tuple[str, ...], node: NodeTopology, paths: Paths | None = None, ranks: int = 0
) -> Iterator[Expectation]:
    """Yield NCCL's plan for each operation, and the expected bandwidth of healthy machines on these paths."""
    value, steps = plan
    nvls = any((gpu.compute_capability or (0, 0)) >= (9, 0) and gpu.count_nvlinks("nvswitch") for gpu in node.gpus)
    for op in OPS:
        notes = [_text("small_sizes")] if value is not None else []
        if op == "all_reduce" and notes:
            notes += [_text("nvls")] * (nvls and scope in ("island", "node")) + [_text("two_nodes")] * (scope == "rail")
        found = expected(paths, op, _LARGE_BYTES * ranks, ranks) if paths else Unknown(why="")
        known = found.interval if isinstance(found, Expected) else found.range
        yield Expectation(
            scope=scope,
            op=op,
            busbw_bytes_per_second=value,
            derivation=(*steps, *notes),
            members=members,
            least_bytes_per_second=known.low if known else None,
            usual_bytes_per_second=known.mid if known and isinstance(found, Expected) else None,
            most_bytes_per_second=known.high if known else None,
        )


def _find_inside(node: NodeTopology, gpus: tuple[GpuNode, ...], bar: Bar, due: Due) -> Carried:
    row = reference_of(node) if bar == "as it should be" else None
    names = tuple(gpu.name for gpu in gpus)
    links, of, words = due.nvlinks, len(node.gpus), "asked for:"
    if links is None and row is not None and row.links_per_pair and row.all_to_all:
        links, of, words = max(row.links_per_pair), row.gpus, f"{row.called} has"
    if links is not None:
        switched = links * (of - 1) > most_links()
        count = links if switched else links * (len(names) - 1)
        return _nvlink(gpus, count, switched=switched, words=f"{words} NV{links} on every pair")
    if not node.nvlink_known:
        return None, None, ("the source says nothing about NVLink",)
    known = Pairs(node.pairs)
    if has_nvlink_ring(names, known):
        whole = Island(gpus=names, all_to_all=True, nvlinks_per_pair=())
        counts = [links_into(gpu, whole, known) for gpu in gpus]
        pick = max(counts) if bar == "as it should be" else min(counts)
        switched = any(gpu.count_nvlinks("nvswitch") for gpu in gpus) or "switch" in pick[1]
        which = "most" if bar == "as it should be" else "fewest"
        return _nvlink(gpus, pick[0], switched=switched, words=f"{pick[0]} NVLinks of a GPU into the ring, the {which}")
    return _describe_pcie(node, gpus, known, bar)


def _guess_nvlink_rates(count: int) -> tuple[float, float]:
    """Return the lowest and highest rate of one of a GPU's `count` NVLinks if its generation is unknown.

    Hopper and Blackwell have 18 links; up to 4 links may also be bridges of SM 8.6 (NVIDIA data sheets).
    """
    first, last = ("NVLink 4", "NVLink 5") if count >= 18 else ("NVLink 3", "NVLink 4")
    if count <= 4:
        first = "NVLink 3 bridge"
    low, high = (link_named(name).nccl_bytes_per_second or 0.0 for name in (first, last))
    return low, high


def _nvlink(gpus: tuple[GpuNode, ...], count: int, *, switched: bool, words: str) -> Carried:
    capability = gpus[0].compute_capability
    value = nvlink_bytes_per_second(capability)
    kind = "NVSwitch" if switched else "NVLink"
    if value is not None:
        return kind, span(count * value), (words, f"one NVLink carries {value / GIGA:g} GB/s in NCCL's plan")
    low, high = _guess_nvlink_rates(count)
    assumption = f"the GPU's generation is not known: one NVLink carries {low / GIGA:g} to {high / GIGA:g} GB/s"
    return kind, between(count * low, count * high), (words, assumption)


def _describe_pcie(node: NodeTopology, gpus: tuple[GpuNode, ...], known: Pairs, bar: Bar) -> Carried:
    running = [gpu.pcie_running_bytes_per_second or gpu.pcie_bytes_per_second for gpu in gpus]
    slots = [gpu.pcie_bytes_per_second for gpu in gpus]
    rates = [rate for rate in (slots if bar == "as it should be" else running) if rate is not None]
    peers = [known.get(a.name, b.name) for a, b in combinations(gpus, 2)]
    labels = sorted({pair.label if pair else UNKNOWN for pair in peers})
    words = [f"no ring of NVLinks joins these GPUs: {', '.join(labels)}"]
    if len(rates) == len(gpus):
        link = span(min(rates))
        words.append(f"the slowest PCIe link carries {min(rates) / GIGA:.3g} GB/s in NCCL's plan")
    else:
        least, most = pcie_generations(gpus[0].compute_capability)
        link = between(_X16[least], _X16[most])
        words.append(f"the speed of their PCIe links is not known: 16 lanes of generation {least} to {most}")
    refused = any(pair is not None and pair.peer_access is False for pair in peers)
    if refused or any(refuses_peers(gpu.model or "") for gpu in gpus):
        return "shared memory", link, (*words, "no peer access over PCIe: data goes through the host's memory")
    if peers and all(pair is not None and pair.peer_access for pair in peers) and not node.virtual:
        return "PCIe", link, tuple(words)
    return "PCIe or shared memory", link, (*words, "whether peers reach each other directly is not known")


def pcie_generations(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return the range of PCIe generations of a GPU in its usual slot: that on its data sheet, or one lower."""
    if capability is None:
        return 3, 5
    own = 3 if capability < (8, 0) else 4 if capability < (9, 0) else 5
    return max(3, own - 1), own


def _find_network(node: NodeTopology, gpus: tuple[GpuNode, ...], bar: Bar) -> Carried:
    """Return the NICs nearest to these GPUs, or all NICs of the kind if distances are unknown."""
    for name, kinds in _KINDS:
        offered = [nic for nic in node.nics if nic.kind in kinds]
        if bar == "as it is":
            offered = [nic for nic in offered if nic.active is not False]
        if offered:
            return _wire(node, gpus, offered, bar, name)
        row = reference_of(node) if bar == "as it should be" else None
        if name == "RDMA" and row is not None and row.gpu_nic:
            return None, None, (f"{row.called} has RDMA NICs, and none shows here: their rate is not known",)
    return None, None, ()


def _wire(node: NodeTopology, gpus: tuple[GpuNode, ...], offered: list[NicNode], bar: Bar, name: str) -> Carried:
    names = {gpu.name for gpu in gpus}
    nearest = [each for each in node.nearest_nic if each.decidable and each.gpu in names]
    # no GPU is nearest to a NIC that is down, although one should be; `why` marks a GPU that uses another NIC instead
    near = {nic for each in nearest if bar == "as it is" or not each.why for nic in each.nics}
    used = [nic for nic in offered if nic.name in near or nic.active is False] if near else offered
    asked = bar == "as it should be"
    rates = [_find_best_rate(nic, offered, gpus) if asked else usable_rate(nic, gpus) for nic in used]
    known = [rate for rate in rates if rate is not None]
    if not known or len(known) < len(rates):
        return None, None, (f"the rate of the {offered[0].kind} devices is not known",)
    words = f"{len(used)} {used[0].kind} devices carry {sum(known) / GIGA:.4g} GB/s together"
    if name == "sockets":
        return name, between(min(known), sum(known)), (f"{words}; NCCL chooses which of them it takes",)
    # one GPU with a far NIC sends through another GPU; if most NICs are far, the board was designed so
    far = 2 * sum(not each.gdr_by_default for each in nearest) > len(nearest)
    return (f"{name} without GPUDirect" if far else name), span(sum(known)), (words,)


def _find_best_rate(nic: NicNode, equals: list[NicNode], gpus: tuple[GpuNode, ...]) -> float | None:
    """Return the highest rate of this kind of NIC on the host, by port and slot; also for a port that is down."""
    found = [
        rate if is_behind_own_switch(other, gpus) else min(rate, other.pcie_bytes_per_second or rate)
        for other in equals
        if other.kind == nic.kind and (rate := other.rate_bytes_per_second)
    ]
    return max(found, default=None)

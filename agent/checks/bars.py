"""What a measurement is held against: the links of its ranks as they should be, and as they are.

The first bar is that of the recognised machine, of a baseline or of equal nodes; the second that of the links that are
left. Below the first alone names the missing links; below the second is a fault that no link shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

import cattrs

from collectives.bench.plan import Expect
from collectives.bench.results import Bar
from probes.api import Snapshot
from topology.build import build
from topology.expected import Expected
from topology.expected import expected as bandwidth
from topology.graph import NodeTopology
from topology.paths import Bar as BarName
from topology.paths import Due, HostLinks, host_links, joined

BARS: tuple[BarName, ...] = ("as it should be", "as it is")
JUDGED_BYTES_PER_RANK = 64 << 20
MOST_JUDGED_BYTES = 8 << 30  # S that is judged whatever each rank's part of it is: more has no room beside a job's
BASELINE_LEAST = 0.8  # of a baseline's own value; healthy links lie within 0.88 to 0.98 of each other (plan.SearchPlan)
_NVLS_SINCE = (2, 17)


def is_judged(op: str, size_bytes: int, ranks: int) -> bool:
    """Whether a result of this size says something of the links: smaller ones measure latency."""
    return op in JUDGED_OPS and (size_bytes >= JUDGED_BYTES_PER_RANK * ranks or size_bytes >= MOST_JUDGED_BYTES)


JUDGED_OPS = ("all_gather", "reduce_scatter", "all_reduce")


def judged_bytes(ranks: int) -> int:
    """S that `ranks` are judged by."""
    return min(JUDGED_BYTES_PER_RANK * ranks, MOST_JUDGED_BYTES)


def links_of(found: Sequence[Snapshot], ranks: int, due: Due | None = None) -> dict[str, Any]:
    """This host's links in plain values, for the ranks of other hosts; empty without a GPU."""
    if not found:
        return {}
    node = build(found[0])
    if not node.gpus:
        return {}
    links = {name: host_links(node, range(ranks), name, due) for name in BARS}
    plain: dict[str, Any] = {name: asdict(each) for name, each in links.items()}
    return plain | {"nvlink_domain": links["as it is"].domain}


def expected(found: Sequence[Snapshot], local_ranks: int) -> Expect | None:
    """The bars of each result of a run with `local_ranks` on each host; None where this host shows no GPU."""
    node = build(found[0]) if found else None
    if node is None or not node.gpus:
        return None

    def bars(op: str, size_bytes: int, ranks: tuple[int, ...], hello: Sequence[Mapping[str, Any]]) -> tuple[Bar, ...]:
        nccl = bool(hello) and "nccl" in (hello[0].get("versions") or {})  # gloo's speed is the processors'
        if op not in JUDGED_OPS or len(ranks) < 2 or not nccl:
            return ()
        return tuple(_bar(name, node, op, size_bytes, ranks, hello, local_ranks) for name in get_args(BarName)[::-1])

    return bars


def _bar(
    name: BarName, node: NodeTopology, op: str, size_bytes: int, ranks: tuple[int, ...],
    hello: Sequence[Mapping[str, Any]], local_ranks: int,
) -> Bar:  # fmt: skip
    rows = [hello[rank] for rank in ranks]
    by_host: dict[str, list[int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        by_host.setdefault(str(row["host"]), []).append(rank)
    nvls, words = nvls_of(rows[0])
    hosts = [_links(name, node, hello, mine, alone=len(by_host) == 1, local_ranks=local_ranks)
             for mine in by_host.values()]  # fmt: skip
    if any(each is None for each in hosts):
        return Bar(name=name, why=("the links of a host are not known: its ranks did not tell them",))
    paths = joined([each for each in hosts if each is not None], len(ranks), nvls=nvls)
    found = bandwidth(paths, op, size_bytes, len(ranks))
    if not isinstance(found, Expected):
        return Bar(name=name, why=tuple(dict.fromkeys((found.words(), *paths.words))))
    ring = bandwidth(paths, op, size_bytes, len(ranks), ring=True) if found.algorithm == "NVLS" else None
    other = ring.interval.high if isinstance(ring, Expected) else None
    known = found.interval
    return Bar(
        name=name, low=known.low, typical=known.mid, high=known.high, algorithm=found.algorithm, ring_high=other,
        why=(*words, *found.derivation),
    )  # fmt: skip


def _links(
    name: BarName, node: NodeTopology, hello: Sequence[Mapping[str, Any]], mine: Sequence[int], *, alone: bool,
    local_ranks: int,
) -> HostLinks | None:  # fmt: skip
    """What one host's ranks told of its links; of a part of one host's own ranks the links between just these."""
    if alone and len(mine) < local_ranks:
        first = min(rank for rank, row in enumerate(hello) if row["host"] == hello[mine[0]]["host"])
        return host_links(node, [rank - first for rank in mine], name)
    links = hello[mine[0]].get("links") or {}
    try:
        return cattrs.structure(links[name], HostLinks)
    except (cattrs.BaseValidationError, KeyError, TypeError, ValueError):
        return None


def nvls_of(row: Mapping[str, Any]) -> tuple[bool | None, tuple[str, ...]]:
    """Whether the ranks' library may reduce in the switch, and why not; None where its version is not known."""
    environment = row.get("environment") or {}
    if environment.get("NCCL_NVLS_ENABLE") == "0":
        return False, ("NCCL_NVLS_ENABLE=0 in the environment: NVLS is off by choice",)
    algorithms = environment.get("NCCL_ALGO")
    if algorithms and not _allows_nvls(algorithms):
        return False, (f"NCCL_ALGO={algorithms} in the environment: NVLS is off by choice",)
    version = re.match(r"(\d+)\.(\d+)", str((row.get("versions") or {}).get("nccl", "")))
    if version is None:
        return None, ()
    return (int(version[1]), int(version[2])) >= _NVLS_SINCE, ()


def _allows_nvls(text: str) -> bool:
    """NCCL's list: "ring,tree", "^nvls" for all but these, "allreduce:nvls;allgather:ring" by collective."""
    for part in text.lower().split(";"):
        collective, _, names = part.rpartition(":")
        if collective not in ("", "allreduce"):
            continue
        listed = {name.strip() for name in names.lstrip("^").split(",")}
        return ("nvls" in listed) is not names.strip().startswith("^")
    return True

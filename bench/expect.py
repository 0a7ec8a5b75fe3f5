"""Compare the expected bus bandwidths with published results: `make expect [ROWS=FILE.csv]`.

Prints for each class the number of rows, the median, minimum and maximum of measured over expected, the false alarms
(healthy rows below the interval), and how many faulty rows are caught and missed. Each source is compared with factors
that were fitted to the other sources. Without ROWS the rows of ../shared/corpus are read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from busbw_rows import MIB, PlaceError, Row, place, read

from agent.checks.measured import JUDGED_BYTES_PER_RANK, choose_bytes
from contracts.tables import read_table
from hardware.units import GIGA
from topology.expected import FACTORS, ExpectedBandwidth, Factors, Paths, UnknownBandwidth, expect_bandwidth, nvls_share

SHARED = Path(__file__).resolve().parents[2] / "shared" / "corpus"
CORPUS = Path(os.environ.get("TOPOFLIGHT_CORPUS", SHARED)) / "collectives"
FILES = ("published_busbw.csv", "collectives_intranode.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A row, and the links between its ranks."""

    row: Row
    paths: Paths

    @property
    def kind(self) -> str:
        """The class that the file gives the row; otherwise hosts, links and operation."""
        if self.row.kind:
            return self.row.kind
        hosts = "1 node" if self.row.nodes == 1 else "2 nodes" if self.row.nodes == 2 else "3+ nodes"
        return f"{hosts} {self.paths.inside or self.paths.between} {self.row.op}"


def efficiency(each: Placed, factors: Factors) -> float | None:
    """Return the share of the planned bandwidth that a result reached, without the usual latency; None if unknown."""
    paths, row = each.paths, each.row
    plan = paths.link if paths.groups == 1 else paths.wire
    passes = 2 if row.op == "all_reduce" else 1
    moved = row.bytes * passes * (each.row.ranks - 1) / each.row.ranks
    if plan is None or not moved:
        return None
    steps = passes * (each.row.ranks - 1)
    usual = factors.step_seconds if paths.groups == 1 else factors.step_seconds_between
    latency = factors.start_seconds[1] + steps * usual[1]
    if _by_nvls(each):
        latency = each.row.ranks * factors.nvls_rank_seconds[1]
        moved /= nvls_share(paths.ranks_per_group(each.row.ranks))
    left = moved / row.busbw - latency
    return moved / left / plan.mid if left > 0 and plan.mid > 0 else None


def _by_nvls(each: Placed) -> bool:
    result = expect_bandwidth(each.paths, each.row.op, each.row.bytes, each.row.ranks)
    return isinstance(result, ExpectedBandwidth) and result.algorithm == "NVLS"


def fit(rows: Sequence[Placed]) -> Factors:
    """Fit the factors to healthy rows. A factor without rows keeps its value of expect.toml."""
    healthy = [each for each in rows if each.row.healthy == "yes" and each.row.op != "all_to_all"]
    linked = [e for e in healthy if e.paths.groups == 1 and e.paths.inside in ("NVSwitch", "NVLink")]
    rings = [e for e in linked if not _by_nvls(e) and not (e.row.op == "all_reduce" and e.paths.nvls is None)]
    later = [e for e in rings if (e.paths.capability or (0, 0)) >= (7, 5)]
    gather = _line([e for e in later if e.row.op != "all_reduce"], PRIOR.gather)
    reduce = _line([e for e in later if e.row.op == "all_reduce"], PRIOR.reduce)
    factors = replace(PRIOR, gather=gather, reduce=reduce)
    volta = [e for e in rings if (7, 0) <= (e.paths.capability or (0, 0)) < (7, 5)]
    if volta:
        factors = replace(factors, volta=round(statistics.median(_against(volta, factors)), 2))
    against = _against(later, factors)
    if against:
        lowest, highest = min(against) * (1 - SLACK), max(against) * (1 + SLACK)
        factors = replace(factors, ring_margin=(round(min(0.85, lowest), 2), round(max(1.15, highest), 2)))
    switch = [e for e in linked if _by_nvls(e)]
    old = [e for e in switch if (e.paths.capability or (0, 0)) < (10, 0)]
    new = [e for e in switch if (e.paths.capability or (0, 0)) >= (10, 0)]
    slow = [e for e in healthy if e.paths.groups == 1 and e.paths.inside == "PCIe"]
    copied = [e for e in healthy if e.paths.groups == 1 and e.paths.inside == "shared memory"]
    wired = [e for e in healthy if e.paths.between == "RDMA" and _wire_bound(e)]
    return replace(
        factors,
        nvls_hopper=_three(old, PRIOR.nvls_hopper),
        nvls_blackwell=_three(new, PRIOR.nvls_blackwell),
        pcie=_three(slow, PRIOR.pcie, wide=True),
        shared_memory=_three(copied, PRIOR.shared_memory, wide=True),
        rdma=_three(wired, PRIOR.rdma, wide=True),
    )


SLACK = 0.03  # margin below the minimum and above the maximum of the rows, for machines that no row describes

PRIOR = replace(
    FACTORS,
    **{name: tuple(one) if isinstance(one, list) else one for name, one in read_table(__file__, "expect.toml").items()},
)


def _line(rows: Sequence[Placed], prior: tuple[float, float]) -> tuple[float, float]:
    """Fit a and b of 1 / efficiency = a + b / (n - 1) to the medians for each number n of ranks."""
    by_ranks: dict[int, list[float]] = {}
    for each in rows:
        share = efficiency(each, PRIOR)
        if share:
            by_ranks.setdefault(each.row.ranks, []).append(share)
    points = [(1 / (n - 1), 1 / statistics.median(values)) for n, values in by_ranks.items()]
    if len(points) < 3:  # two unknowns need a third point that could contradict them
        return prior
    slope, start = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return round(start, 2), round(max(0.0, slope), 2)


def _against(rows: Sequence[Placed], factors: Factors) -> list[float]:
    return [
        share / factors.ring(each.row.op, each.row.ranks)
        for each in rows
        if (share := efficiency(each, factors)) is not None
    ]


def _three(
    rows: Sequence[Placed], prior: tuple[float, float, float], *, wide: bool = False
) -> tuple[float, float, float]:
    """Return minimum, median and maximum of the sources' medians, so that each source counts once.

    With `wide` the interval is at least as wide as the prior, because machines of other vendors may differ more.
    """
    by_source: dict[str, list[float]] = {}
    for each in rows:
        value = efficiency(each, PRIOR)
        if value is not None:
            by_source.setdefault(each.row.source, []).append(value)
    if not by_source:
        return prior
    medians = [statistics.median(values) for values in by_source.values()]
    usual = statistics.median(medians)
    lowest = min(min(medians) * (1 - SLACK), usual * NARROWEST)
    highest = max(max(medians) * (1 + SLACK), usual * prior[2] / prior[1])
    if wide:
        lowest, highest = min(lowest, prior[0]), max(highest, prior[2])
    return round(lowest, 2), round(usual, 2), round(highest, 2)


NARROWEST = 0.885  # largest ratio of minimum to median; a single source does not show how much machines differ


def _wire_bound(each: Placed) -> bool:
    """Whether the network limits the bandwidth, not the links in the hosts. All-reduce of 2 groups may use a tree."""
    paths, row = each.paths, each.row
    inside = paths.link.low if paths.link and paths.inside in ("NVSwitch", "NVLink") else 0.0
    wide = paths.ranks_per_group(each.row.ranks) == 1 or (paths.wire is not None and inside > 1.05 * paths.wire.high)
    return wide and (row.op != "all_reduce" or paths.groups > 2) and row.bytes >= JUDGED_BYTES_PER_RANK * each.row.ranks


def main(arguments: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", nargs="*", type=Path, help="CSV files; default: those of ../shared/corpus/collectives")
    parser.add_argument(
        "--fit", action="store_true", help="print the factors fitted to all rows, for topology/factors.toml"
    )
    parser.add_argument("--each", action="store_true", help="print every false alarm and every missed row")
    options = parser.parse_args(arguments)
    corpus = [path for path in (CORPUS / name for name in FILES) if path.exists()]
    files = options.rows or corpus
    if not files:
        print(
            f"expect: {CORPUS} does not exist. Set TOPOFLIGHT_CORPUS or use make expect ROWS=FILE.csv", file=sys.stderr
        )
        return 2
    bad: list[str] = []
    rows, unplaced = placed([row for path in files for row in read(path, bad)])
    unplaced = [*bad, *unplaced]
    known, _ = placed([row for path in corpus for row in read(path)])
    if options.fit:
        print(fit(known or rows))
        return 0
    left_out = {source: fit([e for e in known if e.row.source != source]) for source in {e.row.source for e in rows}}
    report(rows, unplaced, left_out if known else {}, each=options.each)
    return 0


def placed(rows: Sequence[Row]) -> tuple[list[Placed], list[str]]:
    """Return the rows with known links, and the errors of the others. Small sizes on one host are left out."""
    rows_placed, unplaced = [], []
    for row in rows:
        is_small = row.nodes == 1 and row.bytes < JUDGED_BYTES_PER_RANK * row.gpus_per_node
        if is_small or row.op == "all_to_all":
            continue
        try:
            rows_placed.append(Placed(row=row, paths=place(row)))
        except PlaceError as error:
            unplaced.append(str(error))
    return rows_placed, unplaced


COUNTS = ("false alarms", "caught", "missed", "unclear", "unknown")


def report(rows: Sequence[Placed], unplaced: Sequence[str], factors: dict[str, Factors], *, each: bool) -> None:
    """Print the table, then the rows with unknown links, false alarms and missed faults."""
    ratios: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    wrong = []
    for each_row in rows:
        by = factors.get(each_row.row.source, FACTORS)
        result = expect_bandwidth(each_row.paths, each_row.row.op, each_row.row.bytes, each_row.row.ranks, factors=by)
        outcomes, message = classify(each_row, result)
        wrong += [message] if message else []
        for kind in (each_row.kind, "all"):
            counts[kind].update(["rows", *outcomes])
            if isinstance(result, ExpectedBandwidth) and each_row.row.healthy == "yes":
                ratios[kind].append(each_row.row.busbw / result.interval.mid)
    print(f"| class | rows | median | least | most | {' | '.join(COUNTS)} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kind in (*dict.fromkeys(item.kind for item in rows), "all"):
        of = ratios[kind]
        three = f"{statistics.median(of):.2f} | {min(of):.2f} | {max(of):.2f}" if of else " | | "
        print(
            f"| {kind} | {counts[kind]['rows']} | {three} | {' | '.join(str(counts[kind][name]) for name in COUNTS)} |"
        )
    print(f"\nThe ratios are measured over expected (mid value) of healthy rows. Rows not placed: {len(unplaced)}")
    for line in [*unplaced, *(wrong if each else wrong[:20])]:
        print(f"- {line}")
    used = "Factors: for each source those fitted to the other sources" if factors else "Factors: topology/factors.toml"
    print(f"\n{used}")


def classify(placed_row: Placed, result: ExpectedBandwidth | UnknownBandwidth) -> tuple[list[str], str]:
    """Return the columns of COUNTS in which a row counts, and a description if its result is wrong ("" if right)."""
    row = placed_row.row
    outcomes = [] if row.healthy in ("yes", "no") else ["unclear"]
    if not isinstance(result, ExpectedBandwidth):
        missed = ["missed"] if row.healthy == "no" else []
        return [*outcomes, "unknown", *missed], f"{row.machine}, {row.op}: {result.describe()}"
    is_low = row.busbw < result.interval.low
    if row.healthy == "no" and is_low:
        return ["caught"], ""
    if outcomes or (row.healthy == "yes" and not is_low):
        return outcomes, ""
    if row.healthy == "yes" and row.bytes < choose_bytes(row.ranks):  # preflight judges none
        return ["unclear"], ""
    outcome = "false alarms" if is_low else "missed"
    machine = f"{row.machine}, {row.nodes} x {row.gpus_per_node}, {row.op} of {row.bytes // MIB} MiB"
    expected = f"expected {result.describe()}, {result.algorithm}"
    return [outcome], f"{outcome.removesuffix('s')}: {machine}: {row.busbw / GIGA:.4g}, {expected} ({row.source})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

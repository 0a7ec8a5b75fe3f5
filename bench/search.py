"""The layout search: `python bench/search.py` prints CPU seconds and memory by world size.

`--pairs ROWS.csv...` prints how far two forecasts of one job are off against each other, on published runs that differ
in their layout only: what a gain must exceed before a less simple layout is chosen (planner/search.py, SIGMA_PAIR).
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from planner.forecast import machines
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import plan, search_planned
from planner.search import SIGMA_PAIR, SIGMA_PAIR_SAME, degrees_of

SIZES = (8, 64, 512, 2048, 4096, 16384)
SEQUENCES_PER_GPU = 1
REPEATS = 5
NORMAL_MEDIAN = 0.6745  # median of |x| over its standard deviation


def seconds_by_size() -> None:
    """The table of CPU time."""
    print("| GPUs | engine | layouts | seconds (median of 5, CPU time) |")
    print("|---|---|---|---|")
    for engine in ("torchtitan", "megatron", "topoflight"):
        for world in SIZES:
            train = TrainSpec(
                method="full", sequence_length=8192, engine=engine, global_batch=world * SEQUENCES_PER_GPU
            )
            cluster = machines.cluster("dgx-h100", world // 8)
            seconds = []
            for _ in range(REPEATS):
                start = time.process_time()
                found = search_planned(plan(cluster, (), model_named("Llama-3.1-405B"), train))
                seconds.append(time.process_time() - start)
            print(f"| {world} | {engine} | {found.tried} | {statistics.median(seconds):.3f} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\nPeak memory of this process: {peak:.0f} MiB")


def pairs(files: Sequence[Path]) -> None:
    """The table of errors in the difference."""
    import forecast

    groups = defaultdict(list)
    rows, _ = forecast.read_rows(files)
    for one in forecast.as_shipped(rows):
        if one.scored:
            groups[forecast.same_job(one.row)].append(one)
    errors: dict[bool, list[float]] = {False: [], True: []}
    jobs = dict.fromkeys(errors, 0)
    for members in groups.values():
        seen = set()
        for one, other in combinations(members, 2):
            if one.row.layout != other.row.layout:
                same = degrees_of(one.row.layout) == degrees_of(other.row.layout)
                errors[same].append(abs(math.log(one.ratio / other.ratio)))
                seen.add(same)
        for same in seen:
            jobs[same] += 1
    print("| layouts of one job that differ in | jobs | pairs | standard deviation, by the median | all | shipped |")
    print("|---|---|---|---|---|---|")
    for same, name, shipped in ((False, "degrees", SIGMA_PAIR), (True, "batch or recomputation", SIGMA_PAIR_SAME)):
        if found := errors[same]:
            spread = math.sqrt(statistics.mean(x * x for x in found))
            median = statistics.median(found) / NORMAL_MEDIAN
            print(f"| {name} | {jobs[same]} | {len(found)} | {median:.3f} | {spread:.3f} | {shipped} |")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", nargs="+", type=Path, metavar="ROWS.csv")
    options = parser.parse_args()
    pairs(options.pairs) if options.pairs else seconds_by_size()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""How the layout search grows with the cluster: `python bench/search.py` prints seconds and memory by world size."""

from __future__ import annotations

import resource
import statistics
import time

from planner.forecast import machines
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import plan, search_planned

SIZES = (8, 64, 512, 2048, 4096, 16384)
SEQUENCES_PER_GPU = 1
REPEATS = 5


def main() -> int:
    """Entry point."""
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
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Measure the layout search: `python bench/speed.py`.

Llama-3.1-405B for several engines and world sizes. CPU seconds are measured, which vary less with other load.
"""

from __future__ import annotations

import statistics
import time

from planner.forecast import machines
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import plan
from planner.search import search

WORLD_SIZES = (8, 64, 512, 2048, 4096, 16384)
REPEATS = 5


def main() -> None:
    """Print CPU seconds for each engine and world size: nodes of 8 H100, one sequence of 8,192 tokens per GPU."""
    print("| GPUs | engine | layouts | seconds (median of 5, CPU time) |\n|---|---|---|---|")
    for engine in ("torchtitan", "megatron", "topoflight"):
        for world in WORLD_SIZES:
            train = TrainSpec(method="full", sequence_length=8192, engine=engine, global_batch=world)
            cluster = machines.cluster("dgx-h100", world // 8)
            seconds = []
            for _ in range(REPEATS):
                start = time.process_time()
                result = search(plan(cluster, (), model_named("Llama-3.1-405B"), train))
                seconds.append(time.process_time() - start)
            print(f"| {world} | {engine} | {result.forecast_count} | {statistics.median(seconds):.3f} |", flush=True)


if __name__ == "__main__":
    main()

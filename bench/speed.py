"""Speed of the layout search: `python bench/speed.py`.

A model of 405B parameters by engine and world size. CPU seconds count, so that a busy machine does not.
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
    """Print CPU seconds by engine and world size: one sequence of 8,192 tokens per GPU of 8-GPU H100 nodes."""
    print("| GPUs | engine | layouts | seconds (median of 5, CPU time) |\n|---|---|---|---|")
    for engine in ("torchtitan", "megatron", "topoflight"):
        for world in WORLD_SIZES:
            train = TrainSpec(method="full", sequence_length=8192, engine=engine, global_batch=world)
            cluster = machines.cluster("dgx-h100", world // 8)
            seconds = []
            for _ in range(REPEATS):
                start = time.process_time()
                found = search(plan(cluster, (), model_named("Llama-3.1-405B"), train))
                seconds.append(time.process_time() - start)
            print(f"| {world} | {engine} | {found.tried} | {statistics.median(seconds):.3f} |", flush=True)


if __name__ == "__main__":
    main()

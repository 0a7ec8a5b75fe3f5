"""How long the fine-tune job takes to build a step's batches, and whether a thread that builds ahead would pay.

    python bench/batches.py

One rank's micro-batches of one step, from rows that are in tokens, as the step's own path builds them; best of 20.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from finetune.data import Loader, pack
from finetune.rows import Example

SHAPES = ((4, 1, 256), (32, 1, 512), (8, 2, 2048), (1, 16, 8192), (1, 1, 131072))  # sequences, micro-batches, tokens
RANKS = 8


def rows(count: int, length: int, *, packed: bool) -> list[Example]:
    """Rows of two thirds of the length on average; packed, of a sixteenth and together."""
    draw = np.random.default_rng(0)
    made = []
    for size in (
        draw.integers(length // 24, length // 12, 16 * count) if packed else draw.integers(length // 3, length, count)
    ):
        tokens = draw.integers(0, 32000, size)
        made.append(Example(tokens=tokens, labels=np.append(tokens[1:], -100), positions=np.arange(size)))
    return pack(made, length)[:count] if packed else made


def main() -> None:
    """Measure and print."""
    print("| sequences x tokens | micro-batches | rows | one step's batches, ms | ns a token |")
    print("|---|---|---|---|---|")
    for micro, times, length in SHAPES:
        for packed in (False, True):
            examples = rows(2 * micro * times * RANKS, length, packed=packed)
            loader = Loader(
                examples=examples, pad=2, micro_batch=micro, micro_batches=times, rank=0, ranks=RANKS,
            )  # fmt: skip
            best = float("inf")
            for _ in range(20):
                shares = loader.epoch(0)
                began = time.perf_counter()
                next(shares)
                best = min(best, time.perf_counter() - began)
            cells = [f"{micro} x {length}", times, "packed" if packed else "padded", f"{best * 1e3:.2f}"]
            print(f"| {' | '.join(map(str, cells))} | {best * 1e9 / (micro * times * length):.0f} |")


if __name__ == "__main__":
    main()

"""Communication in a step: a few steps under torch's profiler, how much of them is collectives, and how much is hidden.

Surface: `torch.profiler` events: `aten::*` and CUDA kernels compute, `gloo:*` and NCCL's kernels communicate. On a GPU
only what runs on the device counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from contracts.run_record import Communication


class Profiler:
    """torch's profiler over a few steps."""

    def __init__(self, steps: int, first: int) -> None:
        self.range = range(first, first + steps)
        self.result: Communication | None = None
        self._tool: Any = None
        self._wall = 0.0

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[bool]:
        """Enclose one step; yields whether it is profiled."""
        if step not in self.range:
            yield False
            return
        if self._tool is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its notices are not the job's
            self._tool = torch.profiler.profile()
            self._tool.start()
        began = time.perf_counter()
        yield True
        self._wall += time.perf_counter() - began
        if step == self.range[-1]:
            self.close()

    def close(self) -> None:
        """Stop, wherever the run ends: a process that leaves with the profiler running dies of SIGSEGV (torch 2.13)."""
        if self._tool is not None:
            tool, self._tool = self._tool, None
            tool.stop()
            self.result = measure_communication(tool.events(), self._wall)


def measure_communication(events: Iterable[Any], wall_seconds: float) -> Communication | None:
    """Return the shares of collectives in the profiled time; None if there were none.

    A collective is hidden while an operator or the optimizer runs.
    """
    found = list(events)
    if on_device := [e for e in found if "CUDA" in str(e.device_type)]:
        found = on_device
    collective = [e for e in found if e.name.startswith(("gloo:", "ncclDevKernel", "ncclKernel"))]
    if not collective or wall_seconds <= 0:
        return None
    seconds_by_kind: dict[str, float] = {}
    for event in collective:
        kind = event.name.split("(")[0].removeprefix("gloo:")
        start, end = _span(event)
        seconds_by_kind[kind] = seconds_by_kind.get(kind, 0.0) + end - start
    optimizer = [e for e in found if e.name.startswith("Optimizer.step")]
    workers = {e.thread for e in collective} - {e.thread for e in optimizer}  # their copies are part of the collective
    compute = [
        e
        for e in found
        if (e.name.startswith("aten::") and e.thread not in workers)
        or (on_device and e not in collective and not getattr(e, "is_user_annotation", False))
    ]  # fmt: skip
    busy, talking = [*map(_span, compute), *map(_span, optimizer)], [*map(_span, collective)]
    share = min(1.0, union(talking) / wall_seconds)
    alone = max(0.0, union([*busy, *talking]) - union(busy)) / wall_seconds
    return Communication(share=share, exposed_share=min(share, alone), seconds_by_kind=seconds_by_kind)


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that at least one span covers."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            covered += stop - max(start, end)
            end = stop
    return covered


def _span(event: Any) -> tuple[float, float]:
    return event.time_range.start / 1e6, event.time_range.end / 1e6

"""What a step's time goes to: a few steps under torch's profiler, divided into the parts that the planner forecasts.

Surface: `torch.profiler` events: `aten::*` and CUDA kernels compute, `gloo:*` and NCCL's kernels communicate,
`Optimizer.step*` is the optimizer. On a GPU only what runs on the device counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from contracts.job_plan import RunForecast
from contracts.layout import Layout
from contracts.run_record import Communication, RunPart

# Part -> the members of the forecast's time_parts that it is held against.
PARTS: dict[str, tuple[str, ...]] = {
    "compute": ("gemm", "attention", "elementwise", "dequantize", "recompute"),
    "gather": ("gather",),
    "reduce": ("reduce",),
    "tensor_parallel": ("tensor_parallel",),
    "context_parallel": ("context_parallel",),
    "pipeline": ("pipeline_send", "bubble"),  # a stage waits for its neighbour in a receive
    "optimizer": ("optimizer", "offload"),
    "idle": ("host",),  # Python, hooks, kernel starts: no operator runs
}
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Profiled:
    """What a few steps' time went to."""

    communication: Communication | None
    parts: list[RunPart]
    busy_seconds: float | None  # of a step, in which a GPU ran anything; None on a CPU


class Profiler:
    """torch's profiler over a few steps."""

    def __init__(self, steps: int, first: int, layout: Layout) -> None:
        self.range, self.layout = range(first, first + steps), layout
        self.result: Profiled | None = None
        self._tool: Any = None
        self._wall, self._taken = 0.0, 0

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[bool]:
        """Around one step; true where it is profiled."""
        if step not in self.range:
            yield False
            return
        if self._tool is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its notices are not the job's
            # shapes only where they decide (part_of): keeping them takes memory, which the job measures too
            shapes = self.layout.tp > 1 and self.layout.data_parallel > 1
            self._tool = torch.profiler.profile(record_shapes=shapes)
            self._tool.start()
        began = time.perf_counter()
        yield True
        self._wall, self._taken = self._wall + time.perf_counter() - began, self._taken + 1
        if step == self.range[-1]:
            self.close()

    def close(self) -> None:
        """Stop, wherever the run ends: a process that leaves with the profiler running dies of SIGSEGV (torch 2.13)."""
        if self._tool is None:
            return
        tool, self._tool = self._tool, None
        tool.stop()
        if self._taken:
            self.result = divide(tool.events(), self._wall, self._taken, self.layout)


def divide(events: Iterable[Any], wall_seconds: float, steps: int, layout: Layout) -> Profiled:
    """Profiled seconds by part; a collective is hidden where an operator or the optimizer runs at the same time."""
    found = list(events)
    if on_device := [e for e in found if "CUDA" in str(e.device_type)]:
        found = on_device
    main = {e.thread for e in found if e.name.startswith("Optimizer.step")}
    collective = [e for e in found if e.name.startswith(("gloo:", "ncclDevKernel", "ncclKernel"))]
    workers = {e.thread for e in collective} - main  # what these copy is part of the collective
    comm: dict[str, list[Span]] = {}
    kinds: dict[str, float] = {}
    for event in collective:
        kind = event.name.split("(")[0].removeprefix("gloo:")
        span = _span(event)
        comm.setdefault(part_of(kind, event.input_shapes, layout), []).append(span)
        kinds[kind] = kinds.get(kind, 0.0) + span[1] - span[0]
    optimizer = [_span(e) for e in found if e.name.startswith("Optimizer.step")]
    compute = [
        _span(e)
        for e in found
        if (e.name.startswith("aten::") and e.thread not in workers)
        or (on_device and e not in collective and not getattr(e, "is_user_annotation", False))
    ]  # fmt: skip
    busy, talking = [*compute, *optimizer], [span for spans in comm.values() for span in spans]
    active = union([*busy, *talking])
    exposed = {name: (union([*busy, *spans]) - union(busy)) / steps for name, spans in comm.items()}
    taken = {
        "compute": (union(busy) - union(optimizer)) / steps,
        **exposed,
        "optimizer": union(optimizer) / steps,
        "idle": max(0.0, wall_seconds - active) / steps,
    }
    parts = [
        RunPart(part=name, measured_seconds=taken[name], share=taken[name] * steps / wall_seconds)
        for name in PARTS
        if name in taken
    ]
    return Profiled(_communication(busy, talking, kinds, wall_seconds), parts, active / steps if on_device else None)


def without_profiler(found: Profiled, step_seconds: float) -> list[RunPart]:
    """Relate what was profiled on a GPU to a step that ran without the profiler.

    The profiler slows down the host, which starts the kernels later, but not the kernels: of one H100's step of 0.52 s
    the kernels took 0.47 s, and the profiled step 0.8 s. On a CPU it slows down every operator.
    """
    if found.busy_seconds is None:
        return found.parts
    idle, whole = max(0.0, step_seconds - found.busy_seconds), max(step_seconds, found.busy_seconds)
    parts = []
    for part in found.parts:
        seconds = idle if part.part == "idle" else part.measured_seconds
        parts.append(replace(part, measured_seconds=seconds, share=seconds / whole))
    return parts


def _communication(
    busy: Sequence[Span], talking: Sequence[Span], kinds: dict[str, float], wall_seconds: float
) -> Communication | None:
    if not talking or wall_seconds <= 0:
        return None
    alone = union([*busy, *talking]) - union(busy)
    share = min(1.0, union(talking) / wall_seconds)
    # where nothing hides it, rounding must not make more of the exposed than of the whole
    exposed = min(share, max(0.0, alone) / wall_seconds)
    return Communication(share=share, exposed_share=exposed, seconds_by_kind=kinds)


def part_of(kind: str, shapes: Sequence[Any] | None, layout: Layout) -> str:
    """Which part of the forecast a collective belongs to.

    Where tensor and data parallelism use the same kind, the shape decides: FSDP and DDP send flat buffers, tensor
    parallelism activations. NCCL's kernels show no shape: there it is tensor parallelism, the more frequent.
    """
    word = kind.lower().replace("_", "")
    if layout.cp > 1 and ("alltoall" in word or "send" in word or "recv" in word):  # NCCL sends them one by one
        return "context_parallel"
    if "send" in word or "recv" in word:
        return "pipeline"
    flat = len(shapes[0]) < 2 if shapes and shapes[0] else None
    gathers = "gather" in word
    # gloo's reduce-scatter is an all-reduce of the whole
    data = layout.dp_shard > 1 if gathers or "scatter" in word else layout.data_parallel > 1
    # without sequence parallelism it gathers the head's logits alone: never flat, and not worth a guess
    often = layout.sequence_parallel or "allreduce" in word
    if layout.tp > 1 and (not data or flat is False or (often and flat is None)):
        return "tensor_parallel"
    return "gather" if gathers else "reduce"


def with_forecast(parts: Sequence[RunPart], forecast: RunForecast) -> list[RunPart]:
    """The measured parts, each with the seconds that the forecast gives it; None where it names no parts."""
    predicted = {one.name: one.value for one in forecast.time_parts}
    if not predicted:
        return list(parts)
    return [replace(one, forecast_seconds=sum(predicted.get(name, 0.0) for name in PARTS[one.part])) for one in parts]


def union(spans: Iterable[Span]) -> float:
    """The time that at least one span covers."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            covered += stop - max(start, end)
            end = stop
    return covered


def _span(event: Any) -> Span:
    return event.time_range.start / 1e6, event.time_range.end / 1e6

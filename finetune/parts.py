"""What a step's time goes to: a few steps under torch's profiler, divided into the parts that the planner forecasts.

Surface: `torch.profiler` events: `aten::*` and CUDA kernels compute, `gloo:*` and NCCL's kernels communicate,
`Optimizer.step*` is the optimizer. On a GPU only what runs on the device counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from contracts.layout import Layout

# Part -> the members of the forecast's time_parts that it is held against, and its name in a sentence.
PARTS: dict[str, tuple[tuple[str, ...], str]] = {
    "compute": (("gemm", "attention", "elementwise", "recompute"), "compute"),
    "gather": (("gather",), "all-gather"),
    "reduce": (("reduce",), "gradient reduction"),
    "tensor_parallel": (("tensor_parallel",), "tensor parallelism"),
    "pipeline": (("pipeline_send", "bubble"), "pipeline sends"),  # a stage waits for its neighbour in a receive
    "optimizer": (("optimizer", "offload"), "optimizer"),
    "idle": (("host",), "between operators"),  # Python, hooks, kernel starts: no operator runs
}
COMMUNICATION = ("gather", "reduce", "tensor_parallel", "pipeline")
Span = tuple[float, float]


class Profiler:
    """torch's profiler over a few steps."""

    def __init__(self, steps: int, first: int, layout: Layout) -> None:
        self.range, self.layout = range(first, first + steps), layout
        self.result: dict[str, Any] | None = None
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
            # shapes only where they decide (part_of): keeping them takes memory, which the flight measures too
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


def divide(events: Iterable[Any], wall_seconds: float, steps: int, layout: Layout) -> dict[str, Any]:
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
    exposed = {name: (union([*busy, *spans]) - union(busy)) / steps for name, spans in comm.items()}
    taken = {
        "compute": (union(busy) - union(optimizer)) / steps,
        **exposed,
        "optimizer": union(optimizer) / steps,
        "idle": max(0.0, wall_seconds - union([*busy, *talking])) / steps,
    }
    communication = None
    if talking and wall_seconds > 0:
        alone = union([*busy, *talking]) - union(busy)
        share = min(1.0, union(talking) / wall_seconds)
        communication = {  # where nothing hides it, rounding must not make more of the exposed than of the whole
            "share": share, "exposed_share": min(share, max(0.0, alone) / wall_seconds),
            "seconds_by_kind": kinds, "profiled_seconds": wall_seconds,
        }  # fmt: skip
    return {
        "communication": communication,
        "parts": [
            {"part": name, "measured_seconds": taken[name], "share": taken[name] * steps / wall_seconds,
             "hidden_seconds": max(0.0, union(comm[name]) / steps - taken[name]) if name in comm else 0.0}
            for name in PARTS if name in taken
        ],
    }  # fmt: skip


def part_of(kind: str, shapes: Sequence[Any] | None, layout: Layout) -> str:
    """Which part of the forecast a collective belongs to.

    Where tensor and data parallelism use the same kind, the shape decides: FSDP and DDP send flat buffers, tensor
    parallelism activations. NCCL's kernels show no shape: there it is tensor parallelism, the more frequent.
    """
    word = kind.lower().replace("_", "")
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


def beside_forecast(parts: Sequence[Mapping[str, Any]], forecast: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measured parts, each with the seconds that the forecast gives it; None where it names no parts."""
    raw = forecast.get("time_parts")
    said = {
        str(one["name"]): float(one["value"])
        for one in (raw if isinstance(raw, list | tuple) else ())
        if isinstance(one, Mapping) and isinstance(one.get("value"), int | float) and "name" in one
    }
    lines = []
    for part in parts:
        members = PARTS[part["part"]][0]
        lines.append({**part, "forecast_seconds": sum(said.get(m, 0.0) for m in members) if said else None})
    return lines


def hold_against(
    forecast: Mapping[str, Any], now: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A line for each quantity that was both forecast and measured."""
    lines = []
    for name, unit, scale in (
        ("step_seconds", "s", 1.0),
        ("memory_bytes", "GiB", 2.0**30),
        ("tokens_per_second", "/s", 1.0),
    ):
        said, got = forecast.get(name), now.get(name)
        if not isinstance(said, Mapping) or got is None:
            continue
        if not all(isinstance(said.get(k), int | float) for k in ("low", "mid", "high")):
            continue
        low, mid, high = (float(said[k]) for k in ("low", "mid", "high"))
        text = (
            f"{name.replace('_', ' ')}: forecast {mid / scale:.3g} {unit} ({low / scale:.3g}-{high / scale:.3g}), "
            f"measured {got / scale:.3g} {unit}"
        )
        if name == "step_seconds":
            text += worst_in_words(parts)
        lines.append({"quantity": name, "forecast": {"low": low, "mid": mid, "high": high}, "measured": got,
                      "within": low <= got <= high, "line": text})  # fmt: skip
    return lines


def worst_in_words(parts: Sequence[Mapping[str, Any]]) -> str:
    """The communication that the step waits for longest: ", all-gather 31 % exposed"; empty where there is none."""
    talking = [one for one in parts if one["part"] in COMMUNICATION]
    if not talking:
        return ""
    worst = max(talking, key=lambda one: float(one["share"]))
    return f", {PARTS[worst['part']][1]} {100 * worst['share']:.0f} % exposed"


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

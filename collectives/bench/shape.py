"""A training step's communication as a list of parts, from degrees and bytes: what `replay` then runs.

Ranks lie as in a torch DeviceMesh of (pp, dp_replicate, dp_shard, cp, tp), the innermost last. FSDP gathers a layer
before its forward and again before its backward pass and scatters its gradients once (torch.distributed.fsdp.
fully_shard, reshard_after_forward=True); with context parallelism it shards over dp_shard x cp. Tensor parallelism
reduces two activations in each pass of a layer (Megatron-LM, arXiv:1909.08053, section 3). Pipeline neighbours send
in a ring, as interleaved schedules do: each stage sends and receives at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from collectives.bench.plan import Part, StepPlan

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What one step moves; bytes as nccl-tests counts S for the op."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    layers: int = 1  # of one pipeline stage
    fsdp_layer_bytes: int = 0  # gathered parameters of one layer on one rank (after TP), in the dtype of the gather
    fsdp_scatter_bytes: int | None = None  # gradients of one layer, in the dtype of the reduction; None: as gathered
    fsdp_gathers: int = 2  # of each layer in one step; 1 without resharding after the forward pass
    replica_reduce_bytes: int = 0  # gradients of one layer's shard, reduced over dp_replicate
    tp_activation_bytes: int = 0  # one activation of one micro-batch
    tp_reduces: int = 4  # of each layer in one micro-batch: two forward, two backward
    pp_activation_bytes: int = 0  # one activation of one micro-batch at a stage's border
    micro_batches: int = 1

    def __post_init__(self) -> None:
        """Check that all degrees and counts are possible."""
        for name in (*AXES, "layers", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; allowed: at least 1")
        for name in ("fsdp_layer_bytes", "replica_reduce_bytes", "tp_activation_bytes", "pp_activation_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; allowed: 0 or more")

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp


def groups(shape: StepShape, *axes: str) -> tuple[tuple[int, ...], ...]:
    """Give the process groups along one axis, or along several flattened ones."""
    degrees = [getattr(shape, axis) for axis in AXES]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*(range(degree) for degree in degrees))):
        across = tuple(at for axis, at in zip(AXES, place, strict=True) if axis not in axes)
        found.setdefault(across, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def parts(shape: StepShape) -> tuple[Part, ...]:
    """List what one step moves; an axis of one rank moves nothing."""
    shard, layers = groups(shape, "dp_shard", "cp"), shape.layers
    scatter = shape.fsdp_layer_bytes if shape.fsdp_scatter_bytes is None else shape.fsdp_scatter_bytes
    reduces = layers * shape.tp_reduces * shape.micro_batches
    wanted: Sequence[tuple[str, str, int, tuple[tuple[int, ...], ...], int]] = (
        ("fsdp_gather", "all_gather", shape.fsdp_layer_bytes, shard, layers * shape.fsdp_gathers),
        ("fsdp_scatter", "reduce_scatter", scatter, shard, layers),
        ("replica_reduce", "all_reduce", shape.replica_reduce_bytes, groups(shape, "dp_replicate"), layers),
        ("tp_reduce", "all_reduce", shape.tp_activation_bytes, groups(shape, "tp"), reduces),
        ("pp_send", "send_recv", shape.pp_activation_bytes, groups(shape, "pp"), shape.micro_batches),
    )
    return tuple(
        Part(name=name, op=op, bytes=size, groups=ranks, times=times)
        for name, op, size, ranks, times in wanted
        if size > 0 and times > 0 and len(ranks[0]) > 1
    )


def step_plan(shape: StepShape, iterations: int = 5, warmup: int = 1, budget_seconds: float = 30.0) -> StepPlan:
    """Give the plan that replays the step."""
    return StepPlan(parts=parts(shape), iterations=iterations, warmup=warmup, budget_seconds=budget_seconds)

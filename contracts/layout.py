"""The parallel layout of a training job, in the terms that the planner and the fine-tune job share.

Field names are those of torchtitan. This module imports no other project module.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Checkpointing = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved"]
Sharding = Literal["ddp", "zero1", "zero2", "zero3"]  # zero3 is FSDP; with dp_replicate > 1 it is HSDP
Precision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8"]
EIGHT_BITS: tuple[Precision, ...] = ("fp8", "mxfp8")  # mxfp8 has one scale per 32 values, fp8 one per tensor
Offload = Literal["none", "optimizer", "all"]

# The job can shard these `model_type`: one stack of layers, rotary embeddings, q/k/v/o and gate/up/down projections.
ROPE_TYPES: tuple[str, ...] = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
TRAINED: tuple[str, ...] = ("llama", "mistral", "qwen2", "qwen3")


class LayoutError(ValueError):
    """The layout is invalid; the message names the field, its value and the allowed values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel degrees, whose product is the world size, and settings that each rank uses.

    Ranks are ordered with tp innermost, then cp, dp_shard, dp_replicate, and pp outermost. Consecutive ranks are on the
    same node.
    """

    world_size: int
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1  # groups within the dp x cp ranks; not a factor of the world size
    sharding: Sharding = "zero3"  # what is sharded over the dp_shard ranks (with "ddp", dp_shard is 1)
    reshard_after_forward: bool = True
    sequence_parallel: bool = False  # requires tp > 1
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1  # model chunks per pipeline rank (interleaved schedule)
    stage_layers: tuple[int, ...] = ()  # layers of each pipeline stage; empty: equal stages
    micro_batch: int = 1  # sequences
    gradient_accumulation: int = 1  # micro-batches per optimizer step and data-parallel rank
    checkpointing: Checkpointing = "none"
    precision: Precision = "bf16"
    offload: Offload = "none"
    fused_cross_entropy: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise LayoutError(f"{name}={value!r}: must be a whole number of at least 1")
        product = self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp
        if product != self.world_size:
            dp_shard = self.world_size * self.dp_shard // product
            inside = f". ep is no factor, its groups lie inside dp_shard x cp x tp: name dp_shard={dp_shard}"
            raise LayoutError(
                f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} x cp {self.cp} x tp {self.tp} x "
                f"pp {self.pp} = {product}, but world_size is {self.world_size}{inside if self.ep > 1 else ''}"
            )
        if self.sharding == "ddp" and self.dp_shard != 1:
            raise LayoutError(f"sharding='ddp' with dp_shard={self.dp_shard}: DDP replicates; use dp_replicate")
        if self.virtual_stages > 1 and (self.schedule != "interleaved" or self.pp == 1):
            raise LayoutError(f"virtual_stages={self.virtual_stages}: needs pp > 1 and schedule='interleaved'")
        if self.stage_layers and len(self.stage_layers) != self.pp * self.virtual_stages:
            raise LayoutError(
                f"stage_layers has {len(self.stage_layers)} entries, needs pp x virtual_stages = "
                f"{self.pp * self.virtual_stages}"
            )

    @property
    def data_parallel(self) -> int:
        """Number of ranks that process different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch * self.gradient_accumulation * self.data_parallel

    @property
    def family(self) -> str:
        """Short name of the parallelism: "FSDP", "HSDP", "DDP", "TP8", "PP4 x FSDP"; not the model family."""
        degrees = {"PP": self.pp, "TP": self.tp, "CP": self.cp, "EP": self.ep}
        parts = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
        if self.dp_shard > 1:
            is_hybrid = self.dp_replicate > 1 and self.sharding == "zero3"
            parts.append("HSDP" if is_hybrid else {"zero1": "ZeRO-1", "zero2": "ZeRO-2"}.get(self.sharding, "FSDP"))
        elif self.dp_replicate > 1:
            parts.append("DDP")
        return " x ".join(parts) or "single"


_COUNTS = tuple(one.name for one in fields(Layout) if one.type == "int")

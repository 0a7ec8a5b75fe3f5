"""The parallel layout of a training job: the one word list that planner and fine-tune job share.

Names are torchtitan's. This module imports nothing of the project: `finetune` may import it, and only it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Checkpointing = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved"]
Sharding = Literal["ddp", "zero1", "zero2", "zero3"]  # zero3 is FSDP; with dp_replicate > 1 it is HSDP
Precision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8"]
EIGHT_BITS: tuple[Precision, ...] = ("fp8", "mxfp8")  # mxfp8: a scale for 32 values in a row, not one for the tensor
Offload = Literal["none", "optimizer", "all"]

# Models by `model_type` of their config.json.

# The job cuts and shards these: one stack of layers, rotary positions, q/k/v/o and gate/up/down projections.
MIXTURES: tuple[str, ...] = ("mixtral", "qwen3_moe")  # of them those with experts
ROPE_TYPES: tuple[str, ...] = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
WHOLE_ROPE: tuple[str, ...] = ("dynamic", "longrope")  # of these, whose angles follow from the sequence's length
TRAINED: tuple[str, ...] = ("llama", "mistral", "qwen2", "qwen3", *MIXTURES)

_NAMED_COUNTS = (
    "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "micro_batch", "gradient_accumulation", "virtual_stages",
)  # fmt: skip


class LayoutError(ValueError):
    """A layout that cannot exist; the message names the field, the value and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees that multiply to the world size, and how each rank runs its share.

    Ranks are laid out with tp innermost, then cp, dp_shard, dp_replicate, pp outermost: neighbours in rank
    order share a node.
    """

    world_size: int
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1  # of the dp x cp ranks; does not multiply
    sharding: Sharding = "zero3"  # what is sharded over dp_shard ("ddp": dp_shard is 1)
    reshard_after_forward: bool = True
    sequence_parallel: bool = False  # with tp > 1
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1  # model chunks per pipeline rank (interleaved)
    stage_layers: tuple[int, ...] = ()  # layers per stage where uneven; empty is even
    micro_batch: int = 1  # sequences
    gradient_accumulation: int = 1  # micro-batches per optimizer step and data-parallel rank
    checkpointing: Checkpointing = "none"
    precision: Precision = "bf16"
    offload: Offload = "none"
    fused_cross_entropy: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("world_size", *_NAMED_COUNTS):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise LayoutError(f"{name}={value!r}: must be a whole number of at least 1")
        product = self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp
        if product != self.world_size:
            raise LayoutError(
                f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} x cp {self.cp} x tp {self.tp} x "
                f"pp {self.pp} = {product}, but world_size is {self.world_size}"
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
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch * self.gradient_accumulation * self.data_parallel

    @property
    def family(self) -> str:
        """Short name: "FSDP", "HSDP", "DDP", "TP8", "PP4 x FSDP"; a model's family is another thing."""
        parts = []
        if self.pp > 1:
            parts.append(f"PP{self.pp}")
        if self.tp > 1:
            parts.append(f"TP{self.tp}")
        if self.cp > 1:
            parts.append(f"CP{self.cp}")
        if self.ep > 1:
            parts.append(f"EP{self.ep}")
        if self.dp_shard > 1:
            names = {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "FSDP", "ddp": "DDP"}
            name = names[self.sharding]
            parts.append("HSDP" if self.dp_replicate > 1 and self.sharding == "zero3" else name)
        elif self.dp_replicate > 1:
            parts.append("DDP")
        return " x ".join(parts) or "single"


_NAMED_WORDS: dict[str, tuple[str, ...]] = {
    "sharding": get_args(Sharding), "checkpointing": get_args(Checkpointing), "schedule": get_args(Schedule),
    "precision": get_args(Precision), "offload": get_args(Offload),
}  # fmt: skip


def values_of(text: str) -> dict[str, Any]:
    """ "dp_shard=4,tp=2,micro_batch=2" as fields of a layout; LayoutError names the word that is wrong."""
    values: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name in _NAMED_COUNTS and value.isdecimal() and len(value) < 7:
            values[name] = int(value)
        elif name in _NAMED_WORDS and value in _NAMED_WORDS[name]:
            values[name] = value
        elif name in _NAMED_WORDS:
            raise LayoutError(f"{word!r}: {name} must be one of {', '.join(_NAMED_WORDS[name])}")
        else:
            allowed = ", ".join((*_NAMED_COUNTS, *_NAMED_WORDS))
            raise LayoutError(f"{word!r}: must be NAME=VALUE with NAME one of {allowed}")
    return values


def most_ranks(wanted: int, *counts: int) -> int:
    """The largest number of ranks, of at most so many, that divides all of these."""
    return next(n for n in range(wanted, 0, -1) if not any(count % n for count in counts))

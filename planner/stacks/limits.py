"""What a training stack cannot run on any machine: features that it lacks, and sizes that a layout cannot divide.

The search applies these rules to each layout, and the fine-tune job to the layout that it was started with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from contracts.layout import EIGHT_BITS, Layout
from planner.forecast.engine import Engine
from planner.forecast.specs import ModelSpec, TrainSpec


class Violation(NamedTuple):
    """A rule that a layout violates."""

    rule: str  # its name: "heads-divide"
    reason: str  # "12 attention heads are not divisible by TP=8"


def list_limits(engine: Engine, model: ModelSpec, train: TrainSpec, layout: Layout) -> list[str]:
    """Return all reasons why an engine cannot run a layout of a model, on a GPU of any kind."""
    broken = [*check_split(engine, model, layout), *check_weights(engine, model, train)]
    reasons = [each.reason for each in (*broken, *check_stages(engine, model, layout))]
    lacks = explain_lack(engine, model, train, layout, has_gpu=True)
    return [lacks, *reasons] if lacks else reasons


def check_split(engine: Engine, model: ModelSpec, layout: Layout) -> Iterator[Violation]:
    """Tensor parallelism splits whole attention heads and the columns of the MLP evenly."""
    if model.heads % layout.tp:
        yield Violation("heads-divide", f"{model.heads} attention heads are not divisible by TP={layout.tp}")
    # Megatron replicates key and value heads if there are too few.
    if model.kv_heads % layout.tp and not (engine.copies_kv_heads and layout.tp % model.kv_heads == 0):
        yield Violation("kv-heads-divide", f"{model.kv_heads} key/value heads are not divisible by TP={layout.tp}")
    columns = [model.expert_ffn, model.shared_expert_ffn] if model.experts else [model.ffn]
    columns += [model.ffn] if model.dense_layers else []
    if uneven := next((width for width in columns if width % layout.tp), None):
        yield Violation("ffn-divides", f"MLP width {uneven} is not divisible by TP={layout.tp}")


def check_weights(engine: Engine, model: ModelSpec, train: TrainSpec) -> Iterator[Violation]:
    """Quantised weights have no gradient, and the fine-tune job cannot load them (finetune/model.py)."""
    if model.quantised and (train.method == "full" or not engine.loads_quantised):
        reason = f"the weights are quantised ({model.quantised}): name the model that they were made from"
        yield Violation("weights-can-train", reason)


def check_stages(engine: Engine, model: ModelSpec, at: Layout) -> Iterator[Violation]:
    """Each chunk of a pipeline has at least one layer, or the embedding or the head.

    With fewer micro-batches than stages a pipeline is never full, and torch's 1F1B schedule rejects it.
    """
    layers, times, chunks = model.layers, at.gradient_accumulation, at.pp * at.virtual_stages
    if chunks > (most_chunks(engine, model) if at.virtual_stages > 1 else layers):
        reason = f"PP={at.pp} x {at.virtual_stages} chunks need more layers than the model's {layers}"
        yield Violation("enough-layers", reason)
    if 0 in at.stage_layers and not engine.empty_ends:
        yield Violation("enough-layers", f"stage_layers {at.stage_layers}: each stage needs at least one layer")
    if at.stage_layers and sum(at.stage_layers) != layers:
        yield Violation("stages-sum", f"stage_layers add up to {sum(at.stage_layers)}, the model has {layers} layers")
    if at.pp > 1 and times < at.pp:
        reason = f"PP={at.pp} needs at least {at.pp} micro-batches, but there are {times}"
        yield Violation("enough-micro-batches", reason)
    elif at.schedule == "interleaved" and times % at.pp:
        reason = f"{times} micro-batches are not a multiple of PP={at.pp}, as interleaving needs"
        yield Violation("enough-micro-batches", reason)


def most_chunks(engine: Engine, model: ModelSpec) -> int:
    """Return how many chunks an interleaved pipeline may have."""
    return model.layers + (2 if engine.empty_ends else 0)


def explain_lack(engine: Engine, model: ModelSpec, train: TrainSpec, at: Layout, *, has_gpu: bool) -> str | None:
    """Return what the engine lacks to run a layout with this method."""
    name, can = engine.name, engine.can
    if not has_gpu and engine.without_gpu is not None:
        name, can = f"{name} on a CPU", engine.without_gpu
    if missing := next((_PARALLEL.get(word, word) for word in _list_parallelism(at) if word not in can), None):
        return f"{name} does not support {missing}"
    if model.mamba_layers and not ("mamba" in can and train.method == "full"):
        return f"layers with Mamba-2, as in {model.name}, are forecast for full fine-tuning with megatron only"
    return engine.refuses(model, train, at) or next(_list_missing_options(engine, name, train, at, has_gpu), None)


_PARALLEL = {"sp": "sequence parallelism", **{word: word.upper() for word in ("tp", "pp", "cp", "ep", "hsdp", "ddp")}}


def _list_parallelism(layout: Layout) -> Iterator[str]:
    """Yield what an engine must be able to do for a layout, as in `Engine.can`."""
    yield from (word for word in ("tp", "pp", "cp", "ep") if getattr(layout, word) > 1)
    sharded = layout.dp_shard > 1 and layout.sharding != "ddp"
    hybrid = sharded and layout.sharding == "zero3" and layout.dp_replicate > 1
    others = (("sp", layout.sequence_parallel), (layout.sharding, sharded), ("hsdp", hybrid),
              ("ddp", layout.data_parallel > 1 and not sharded))  # fmt: skip
    yield from (word for word, needed in others if needed)


def _list_missing_options(engine: Engine, name: str, train: TrainSpec, layout: Layout, has_gpu: bool) -> Iterator[str]:
    if layout.precision in EIGHT_BITS and layout.precision not in engine.eight_bits:
        yield f"{name} does not support {layout.precision}"
    if layout.checkpointing not in engine.checkpointing:
        yield f"{name} does not support {layout.checkpointing} checkpointing"
    if layout.offload not in ("none", *engine.offloads):
        yield f"{name} does not support offloading ({layout.offload})"
    if layout.offload != "none" and not has_gpu:
        yield "offloading needs a GPU: without one, everything is in host memory already"
    if layout.offload == "all" and not (engine.as_run(layout).sharding == "zero3" and layout.dp_shard > 1):
        yield "offload of the weights needs them sharded (FSDP or ZeRO-3)"
    if train.method not in engine.methods:
        yield f"{engine.name} does not support {train.method}; it trains {' and '.join(sorted(engine.methods))}"
    if train.method == "qlora" and not has_gpu:
        yield "QLoRA needs a GPU: the time that a CPU takes to unpack 4-bit weights cannot be forecast"
    if train.method == "qlora" and (layout.tp > 1 or layout.cp > 1):  # pipeline stages have whole layers
        yield "QLoRA's 4-bit blocks do not split over TP or CP"

"""Hard rules for layouts. Each rule has a name, and a reason if it forbids a layout.

A rule is arithmetic or a limit of an engine. Preferences are not rules; they follow from the forecast.
"""

from __future__ import annotations

from collections.abc import Iterator

from contracts.layout import EIGHT_BITS, Layout
from hardware.units import GIB, GIGA
from planner.forecast.engine import NF4_BYTES, Engine
from planner.forecast.specs import ModelSpec, TrainSpec, weights
from planner.forecast.step_time import Job

Broken = Iterator[tuple[str, str]]  # names of rules, and their reasons


def list_broken(job: Job, at: Layout, *, of_degrees: bool = False) -> Broken:
    """Yield name and reason of every rule that a layout violates.

    With `of_degrees`, rules about batches are left out. They need a whole layout; the others can already reject a
    degree.
    """
    yield from _check_tensors(job, at)
    yield from _check_parts(job, at)
    if not of_degrees:
        yield from _check_batch(job, at)
    yield from _check_model(job, at)
    # The engine supports the layout, and LoRA or QLoRA; 4-bit blocks need unsplit matrices, and a forecast a GPU.
    if lacks := engine_lacks(job.engine, job.model, job.train, at, has_gpu=job.has_gpu):
        yield "engine-runs", lacks
    if exceeds := _exceeds_host_memory(job, at):
        yield "host-memory-holds", exceeds


def first_broken(job: Job, layout: Layout, *, of_degrees: bool = False) -> tuple[str, str] | None:
    """Return name and reason of the first rule that a layout violates."""
    return next(list_broken(job, layout, of_degrees=of_degrees), None)


def _check_tensors(job: Job, at: Layout) -> Broken:
    """Tensor parallelism splits whole attention heads and the columns of the MLP evenly, within an NVLink island."""
    model = job.model
    if model.heads % at.tp:
        yield "heads-divide", f"{model.heads} attention heads are not divisible by TP={at.tp}"
    # Megatron replicates key and value heads if there are too few.
    if model.kv_heads % at.tp and not (job.engine.copies_kv_heads and at.tp % model.kv_heads == 0):
        yield "kv-heads-divide", f"{model.kv_heads} key/value heads are not divisible by TP={at.tp}"
    widths = [model.expert_ffn, model.shared_expert_ffn] if model.experts else [model.ffn]
    widths += [model.ffn] if model.dense_layers else []
    if uneven := next((width for width in widths if width % at.tp), None):
        yield "ffn-divides", f"MLP width {uneven} is not divisible by TP={at.tp}"
    if at.tp > job.links.island_size and (leaves := _leaves_island(job, at)):
        yield "tp-inside-island", leaves


def _leaves_island(job: Job, at: Layout) -> str | None:
    """Return why TP must not leave an NVLink island: it waits for its links several times per layer."""
    slow = job.links.crosses(at.tp, 1)
    if at.tp > job.links.ranks_per_node and job.links.network is not None:
        return f"TP={at.tp} would cross the {slow.bytes_per_second / GIGA:.3g} GB/s {slow.link} between nodes"
    if not job.has_gpu and at.tp <= job.links.ranks_per_node:
        return None  # host memory is the only link
    if job.links.island_size == 1:
        return f"TP={at.tp} would cross the {slow.bytes_per_second / GIGA:.3g} GB/s {slow.link} (no NVLink)"
    return f"TP={at.tp} needs more GPUs than the {job.links.island_size} that NVLink connects"


def most_chunks(job: Job) -> int:
    """Return how many chunks an interleaved pipeline may have."""
    return job.model.layers + (2 if job.engine.empty_ends else 0)


def _check_parts(job: Job, at: Layout) -> Broken:
    """Layers, sequences and experts are divided among stages and ranks.

    Each pipeline chunk has at least one layer, or the embedding or the head. Ring attention divides a sequence into
    2 x CP equal parts. Expert parallelism gives each rank whole experts, within one pipeline stage
    (docs/decisions/0022).
    """
    model, length, ranks = job.model, job.train.sequence_length, at.world_size // at.pp
    if at.pp * at.virtual_stages > (most_chunks(job) if at.virtual_stages > 1 else model.layers):
        reason = f"PP={at.pp} x {at.virtual_stages} chunks need more layers than the model's {model.layers}"
        yield "enough-layers", reason
    if at.stage_layers and sum(at.stage_layers) != model.layers:
        yield "stages-sum", f"stage_layers add up to {sum(at.stage_layers)}, the model has {model.layers} layers"
    if at.cp > 1 and length % (2 * at.cp):
        yield "sequence-divides", f"sequence length {length} does not divide by 2 x CP={at.cp}"
    if at.ep > 1 and not model.experts:
        yield "experts-divide", f"EP={at.ep}: {model.name} has no experts"
    elif model.experts % at.ep:
        yield "experts-divide", f"{model.experts} experts do not divide by EP={at.ep}"
    elif ranks % at.ep:
        yield "experts-divide", f"EP={at.ep} does not divide the {ranks} ranks of a pipeline stage"


def _check_batch(job: Job, at: Layout) -> Broken:
    """The global batch is divided evenly, and each pipeline stage has micro-batches.

    With fewer micro-batches than stages a pipeline is never full, and torch's 1F1B schedule rejects it.
    """
    times, wanted = at.gradient_accumulation, job.train.global_batch
    if at.pp > 1 and times < at.pp:
        yield "enough-micro-batches", f"PP={at.pp} needs at least {at.pp} micro-batches, but there are {times}"
    elif at.virtual_stages > 1 and times % at.pp:
        reason = f"{times} micro-batches are not a multiple of PP={at.pp}, as interleaving needs"
        yield "enough-micro-batches", reason
    if wanted is not None and at.global_batch != wanted:
        reason = f"{at.micro_batch} x {times} x {at.data_parallel} ranks is not the global batch {wanted}"
        yield "batch-divides", reason


def _check_model(job: Job, at: Layout) -> Broken:
    """The model can be trained with rows of this length, and the GPU supports the number format.

    A learned position table has a maximum length. Quantised weights have no gradient, and the fine-tune job cannot load
    them (finetune/model.py).
    """
    model, cc = job.model, job.compute_capability
    if model.family == "gpt2" and model.max_positions and job.train.sequence_length > model.max_positions:
        reason = f"sequence length {job.train.sequence_length} is beyond the model's {model.max_positions} positions"
        yield "positions-reach", reason
    if model.quantised and (job.train.method == "full" or not job.engine.loads_quantised):
        reason = f"the weights are quantised ({model.quantised}): name the model that they were made from"
        yield "weights-can-train", reason
    needed = {"fp8": (8, 9), "mxfp8": (10, 0)}.get(at.precision)
    if needed and cc is not None and cc < needed:
        reason = f"{at.precision} needs compute capability {needed[0]}.{needed[1]}, the GPU has {cc[0]}.{cc[1]}"
        yield "precision-exists", reason
    elif at.precision == "mxfp8" and cc is not None and cc >= (12, 0):
        yield "precision-exists", "mxfp8 needs compute capability 10.0 or 10.3 (Transformer Engine)"


def engine_lacks(engine: Engine, model: ModelSpec, train: TrainSpec, at: Layout, *, has_gpu: bool) -> str | None:
    """Return what the engine lacks to run a layout with this method."""
    name, can = engine.name, engine.can
    if not has_gpu and engine.without_gpu is not None:
        name, can = f"{name} on a CPU", engine.without_gpu
    if missing := next((_PARALLEL.get(word, word) for word in _list_parallelism(at) if word not in can), None):
        return f"{name} does not support {missing}"
    axes = [w for w, degree in (("tp", at.tp), ("pp", at.pp), ("dp", at.data_parallel)) if degree > 1]
    if len(axes) > 1 and "+".join(axes) not in engine.together:
        return f"{name} does not combine {' and '.join(a.upper() for a in axes)}"
    return engine.refuses(model, train, at) or next(_list_missing_options(engine, name, train, at, has_gpu), None)


_PARALLEL = {"sp": "sequence parallelism", **{word: word.upper() for word in ("tp", "pp", "cp", "ep", "hsdp", "ddp")}}


def _list_parallelism(at: Layout) -> Iterator[str]:
    """Yield what an engine must be able to do for a layout, as in `Engine.can`."""
    yield from (word for word in ("tp", "pp", "cp", "ep") if getattr(at, word) > 1)
    if at.sequence_parallel:
        yield "sp"
    sharded = at.dp_shard > 1 and at.sharding != "ddp"
    if sharded:
        yield at.sharding
    if sharded and at.sharding == "zero3" and at.dp_replicate > 1:
        yield "hsdp"
    if at.data_parallel > 1 and not sharded:
        yield "ddp"


def _list_missing_options(engine: Engine, name: str, train: TrainSpec, at: Layout, has_gpu: bool) -> Iterator[str]:
    if at.precision in EIGHT_BITS and at.precision not in engine.eight_bits:
        yield f"{name} does not support {at.precision}"
    if at.checkpointing not in engine.checkpointing:
        yield f"{name} does not support {at.checkpointing} checkpointing"
    if at.offload not in ("none", *engine.offloads):
        yield f"{name} does not support offloading ({at.offload})"
    if at.offload != "none" and not has_gpu:
        yield "offloading needs a GPU: without one, everything is in host memory already"
    if at.offload == "all" and not (engine.as_run(at).sharding == "zero3" and at.dp_shard > 1):
        yield "offload of the weights needs them sharded (FSDP or ZeRO-3)"
    if train.method not in engine.methods:
        yield f"{engine.name} does not support {train.method}; it trains {' and '.join(sorted(engine.methods))}"
    if train.method == "qlora" and not has_gpu:
        yield "QLoRA needs a GPU: the time that a CPU takes to unpack 4-bit weights cannot be forecast"
    if train.method == "qlora" and (at.tp > 1 or at.cp > 1):  # pipeline stages have whole layers
        yield "QLoRA's 4-bit blocks do not split over TP or CP"


def _exceeds_host_memory(job: Job, at: Layout) -> str | None:
    """Return why offloaded data, or loading the model, needs more than 80 % of the nodes' memory.

    If the host memory is unknown, offloading is rejected.
    """
    load = job.engine.host_load(2.0 * weights(job.model).total, at, min(at.world_size, job.links.ranks_per_node))
    if job.has_gpu and job.host_memory_bytes is not None and load > 0.8 * job.host_memory_bytes:
        usable = 0.8 * job.host_memory_bytes / GIB
        return f"loading needs {load / GIB:.0f} GiB of host memory per node, {usable:.0f} GiB are usable"
    if at.offload == "none":
        return None
    if job.host_memory_bytes is None:
        return "offloading needs host memory, and the memory of the nodes is unknown"
    frozen = NF4_BYTES if job.train.method == "qlora" else 2.0
    each = (12.0 if at.offload == "optimizer" else 16.0) if job.train.method == "full" else frozen
    needed = each * weights(job.model).total * at.dp_replicate / max(1, job.links.nodes)
    usable = 0.8 * job.host_memory_bytes
    if needed > usable:
        return f"offloading needs {needed / GIB:.0f} GiB of host memory per node, {usable / GIB:.0f} GiB are usable"
    return None

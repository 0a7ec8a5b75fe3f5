"""Hard rules for layouts. Each rule has a name and returns the reason that it forbids a layout, or None.

A rule is arithmetic or a limit of an engine. Preferences are not rules; they follow from the forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from contracts.layout import EIGHT_BITS, Layout
from hardware.units import GIB, GIGA
from planner.forecast.engine import NF4_BYTES, Engine
from planner.forecast.specs import ModelSpec, TrainSpec, weights
from planner.forecast.step_time import Job

Rule = Callable[[Job, Layout], str | None]


def heads_divide(job: Job, at: Layout) -> str | None:
    """With tensor parallelism, each rank has whole attention heads."""
    if job.model.heads % at.tp:
        return f"{job.model.heads} attention heads are not divisible by TP={at.tp}"
    return None


def kv_heads_divide(job: Job, at: Layout) -> str | None:
    """Key and value heads are split too; Megatron replicates them if there are too few."""
    if job.model.kv_heads % at.tp and not (job.engine.copies_kv_heads and at.tp % job.model.kv_heads == 0):
        return f"{job.model.kv_heads} key/value heads are not divisible by TP={at.tp}"
    return None


def ffn_divides(job: Job, at: Layout) -> str | None:
    """The columns of the MLP are split evenly."""
    widths = [job.model.expert_ffn, job.model.shared_expert_ffn] if job.model.experts else [job.model.ffn]
    widths += [job.model.ffn] if job.model.dense_layers else []
    for width in widths:
        if width % at.tp:
            return f"MLP width {width} is not divisible by TP={at.tp}"
    return None


def tp_inside_island(job: Job, at: Layout) -> str | None:
    """Tensor parallelism waits for its links several times per layer, so it must not leave an NVLink island."""
    if at.tp <= job.links.island_size:
        return None
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


def enough_layers(job: Job, at: Layout) -> str | None:
    """Each pipeline chunk has at least one layer, or the embedding or the head."""
    if at.pp * at.virtual_stages > (most_chunks(job) if at.virtual_stages > 1 else job.model.layers):
        return f"PP={at.pp} x {at.virtual_stages} chunks need more layers than the model's {job.model.layers}"
    return None


def enough_micro_batches(_job: Job, at: Layout) -> str | None:
    """With fewer micro-batches than stages a pipeline is never full, and torch's 1F1B schedule rejects it."""
    if at.pp > 1 and at.gradient_accumulation < at.pp:
        return f"PP={at.pp} needs at least {at.pp} micro-batches, but there are {at.gradient_accumulation}"
    if at.virtual_stages > 1 and at.gradient_accumulation % at.pp:
        return f"{at.gradient_accumulation} micro-batches are not a multiple of PP={at.pp}, as interleaving needs"
    return None


def stages_sum(job: Job, at: Layout) -> str | None:
    """Uneven stages contain every layer exactly once."""
    if at.stage_layers and sum(at.stage_layers) != job.model.layers:
        return f"stage_layers add up to {sum(at.stage_layers)}, the model has {job.model.layers} layers"
    return None


def sequence_divides(job: Job, at: Layout) -> str | None:
    """Ring attention divides the sequence into 2 x CP equal parts."""
    if at.cp > 1 and job.train.sequence_length % (2 * at.cp):
        return f"sequence length {job.train.sequence_length} does not divide by 2 x CP={at.cp}"
    return None


def experts_divide(job: Job, at: Layout) -> str | None:
    """Expert parallelism gives each rank whole experts, within one pipeline stage (docs/decisions/0022)."""
    if at.ep == 1:
        return None
    if not job.model.experts:
        return f"EP={at.ep}: {job.model.name} has no experts"
    if job.model.experts % at.ep:
        return f"{job.model.experts} experts do not divide by EP={at.ep}"
    ranks = at.world_size // at.pp
    if ranks % at.ep:
        return f"EP={at.ep} does not divide the {ranks} ranks of a pipeline stage"
    return None


def batch_divides(job: Job, at: Layout) -> str | None:
    """The global batch is divided evenly among the data-parallel ranks."""
    wanted = job.train.global_batch
    if wanted is not None and at.global_batch != wanted:
        return (
            f"{at.micro_batch} x {at.gradient_accumulation} x {at.data_parallel} ranks is not the global batch {wanted}"
        )
    return None


def positions_reach(job: Job, _at: Layout) -> str | None:
    """A learned position table has a maximum length."""
    if job.model.family == "gpt2" and job.model.max_positions and job.train.sequence_length > job.model.max_positions:
        return f"sequence length {job.train.sequence_length} is beyond the model's {job.model.max_positions} positions"
    return None


def weights_can_train(job: Job, _at: Layout) -> str | None:
    """Quantised weights have no gradient, and the fine-tune job cannot load them (finetune/model.py)."""
    if job.model.quantised and (job.train.method == "full" or not job.engine.loads_quantised):
        return f"the weights are quantised ({job.model.quantised}): name the model that they were made from"
    return None


def precision_exists(job: Job, at: Layout) -> str | None:
    """The GPU supports the number format."""
    cc = job.compute_capability
    needed = {"fp8": (8, 9), "mxfp8": (10, 0)}.get(at.precision)
    if needed and cc is not None and cc < needed:
        return f"{at.precision} needs compute capability {needed[0]}.{needed[1]}, the GPU has {cc[0]}.{cc[1]}"
    if at.precision == "mxfp8" and cc is not None and cc >= (12, 0):
        return "mxfp8 needs compute capability 10.0 or 10.3 (Transformer Engine)"
    return None


def engine_runs(job: Job, at: Layout) -> str | None:
    """The engine supports the layout, and LoRA or QLoRA; 4-bit blocks need unsplit matrices, and a forecast a GPU."""
    return engine_lacks(job.engine, job.model, job.train, at, has_gpu=job.has_gpu)


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


def host_memory_holds(job: Job, at: Layout) -> str | None:
    """Offloaded data and the memory for loading the model fit into 80 % of the nodes' memory.

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


_OF_BATCH = (enough_micro_batches, batch_divides)  # these need a whole layout; the others can already reject a degree
_RULES = (
    heads_divide, kv_heads_divide, ffn_divides, tp_inside_island, enough_layers, enough_micro_batches, stages_sum,
    sequence_divides, experts_divide, batch_divides, positions_reach, weights_can_train, precision_exists,
    engine_runs, host_memory_holds,
)  # fmt: skip
RULES: tuple[tuple[str, Rule], ...] = tuple((rule.__name__.replace("_", "-"), rule) for rule in _RULES)
RULES_OF_DEGREES = tuple((name, rule) for name, rule in RULES if rule not in _OF_BATCH)


def first_broken(job: Job, layout: Layout, rules: tuple[tuple[str, Rule], ...] = RULES) -> tuple[str, str] | None:
    """Return name and reason of the first rule that a layout violates."""
    for name, rule in rules:
        reason = rule(job, layout)
        if reason is not None:
            return name, reason
    return None

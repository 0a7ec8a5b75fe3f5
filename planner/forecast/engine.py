"""Engines: what each training stack supports, and the terms of memory and step time that depend on the stack.

`Engine` has the terms of plain PyTorch in half precision, `Fsdp` those of fully_shard. Each stack in `planner.stacks`
sets its traits, and overrides terms if its code differs. `memory` and `step_time` sum up the terms and are independent
of the stack. Traits describe the code and are never fitted to one published table. A stack's TOML file has those in
which it differs from the defaults.

Specification: 18 bytes of mixed-precision state per weight (arXiv 1910.02054); activations s b h (18 + 4 f/h) / t per
layer with flash attention and sequence parallelism (arXiv 2205.05198, Megatron-LM theoretical_memory_usage.py); NF4
with double quantisation: half a byte per weight, one byte per 64 weights for their scale, four bytes per 256 scales
(arXiv 2305.14314; defaults of bitsandbytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from contracts.layout import EIGHT_BITS, Layout, Offload, Precision
from hardware.units import GIB
from planner.forecast.specs import (
    ModelSpec,
    TrainSpec,
    expert_adapters,
    longest_row,
    lora_weights,
    mixer_columns,
    mlp_width,
    trained_weights,
    weights,
)

NF4_BYTES = 0.5  # per weight, in memory and in transfers
NF4_SCALES = 1 / 64 + 4 / (64 * 256)  # extra; not sharded, because FSDP does not shard bitsandbytes' state

AttentionKernel = Literal["unfused", "flash1", "flash2", "flash3"]


class Exchanges(NamedTuple):
    """How often a step gathers sharded weights, gathers them again, and reduces their gradients."""

    gathers: int
    regathers: int
    scatters: int


class StateBytes(NamedTuple):
    """Bytes per trained weight."""

    weights: float
    gradients: float
    optimizer: float
    copy: float = 0.0  # part of the optimizer bytes: its fp32 copy of half-precision weights


ZERO_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
IN_FP32 = StateBytes(4.0, 4.0, 8.0)
IN_HALF = StateBytes(2.0, 2.0, 4.0)


def fullest_stage(model: ModelSpec, layout: Layout) -> float:
    """Return the number of layers of the largest pipeline stage."""
    stages, pp = layout.stage_layers, layout.pp
    return float(max(sum(stages[i::pp]) for i in range(pp)) if stages else -(-model.layers // pp))


def uneven_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Give the last stage (with the head), then the first (with the embedding) fewer layers if possible; () if even.

    With one or two more stages than layers, these have no layer.
    """
    if layers % stages == 0:
        return ()
    largest = -(-layers // stages)
    missing = largest * stages - layers
    first, last = largest - missing // 2, largest - (missing + 1) // 2
    if min(first, last) >= (1 if stages <= layers else 0):
        return (first, *(largest,) * (stages - 2), last)
    low, extra = divmod(layers, stages)
    return tuple(low + (1 if i < extra else 0) for i in range(stages))


def last_stage(model: ModelSpec, layout: Layout) -> float:
    """Return the layers of the stage with the head; if not specified, at most one fewer than the others."""
    stages, missing = layout.stage_layers, -model.layers % (layout.pp * layout.virtual_stages)
    if not stages and missing in (1, 2):  # embedding and head each count as one layer
        stages = uneven_stages(model.layers, layout.pp * layout.virtual_stages)
    return float(sum(stages[layout.pp - 1 :: layout.pp])) if stages else fullest_stage(model, layout)


@dataclass(slots=True, kw_only=True)
class Share:
    """The fullest rank's share of a job, from which the memory terms are computed.

    Weights are counted before data parallelism shards them.
    """

    model: ModelSpec
    train: TrainSpec
    layout: Layout
    in_fp32: bool  # all values are four bytes wide: requested, or on a CPU
    element: float  # bytes per element in computations
    zero: int  # the ZeRO stage
    group: int  # ranks that shard together; those of CP hold the same weights (torchtitan's dp_shard_cp)
    tokens: float  # in the longest micro-batch, which sets the peak
    layers: float
    layer: float  # mean weights per layer after tensor and expert parallelism
    largest: float  # weights of the largest layer
    ends: float  # weights of the embedding, and of the head unless another stage has it
    local: float  # all weights on the rank
    trained: float  # weights with a gradient
    whole: float  # of these, with adapters, modules trained in the model's own type
    routed: float  # of the weights, experts after expert parallelism
    routed_trained: float

    @property
    def adapters(self) -> bool:
        """Whether the model's own weights are frozen."""
        return self.train.method != "full"

    @property
    def frozen_bytes(self) -> float:
        """Bytes of a layer's weight in memory and transfers: QLoRA's are 4-bit blocks."""
        return NF4_BYTES if self.train.method == "qlora" else self.element

    @property
    def sharded(self) -> bool:
        """Whether a rank holds only a part of the weights and gathers the others."""
        return self.layout.sharding == "zero3" and self.group > 1

    def part(self, count: float, routed: float, *, sharded: bool) -> float:
        """Return how many of `count` weights, including `routed` weights of experts, remain on this rank.

        The ranks with the same experts are some of those that shard together and of their tensor-parallel neighbours.
        """
        same = max(1.0, self.group * self.layout.tp / self.layout.ep) if self.layout.ep > 1 else self.group
        return (count - routed) / self.group + routed / same if sharded else count


@lru_cache(maxsize=1024)
def _count_weights(model: ModelSpec, train: TrainSpec, layers: float, tp: int, pp: int, ep: int) -> dict[str, float]:
    """Count the weights of a rank of the largest stage, which has `layers` layers; `Share` describes each count."""
    count, full = weights(model), train.method == "full"
    ends = float(count.embedding + count.head) / tp if pp == 1 else float(count.embedding) / tp
    # Expert parallelism does not split experts; its group includes the tensor-parallel ranks
    # (expert-tensor-parallel-size 1 in Megatron, etp 1 in torchtitan).
    cut = ep if ep > 1 else tp
    experts = count.routed_per_layer / cut  # per layer, on this rank
    mixtures = (count.layers - count.dense_layers) / count.layers if model.experts else 0.0
    largest = (count.layer - count.routed_per_layer) / tp + experts
    if count.dense_layers:
        largest = max(largest, (count.layer - count.mlp_per_layer + count.dense_mlp_per_layer) / tp)
    layer = (count.all_layers / count.layers - count.routed_per_layer * mixtures) / tp + experts * mixtures
    local = layers * layer + ends
    routed = expert_adapters(model, train)
    saved = (trained_weights(model, train) - lora_weights(model, train)) / tp
    saved_here = 0.0 if full else saved if pp == 1 else saved / max(1, len(train.saved_modules))  # first or last stage
    adapters = (lora_weights(model, train, tp) - routed // tp) / pp + saved_here + routed / (cut * pp)
    here = layers * mixtures * experts
    return {
        "layers": layers, "layer": layer, "largest": largest, "ends": ends, "local": local,
        "trained": local if full else adapters,
        "whole": saved_here,
        "routed": here if ep > 1 else 0.0,
        "routed_trained": (here if full else routed / (cut * pp)) if ep > 1 else 0.0,
    }  # fmt: skip


def share_of(model: ModelSpec, train: TrainSpec, layout: Layout, *, on_cpu: bool = False) -> Share:
    """Return the share of the fullest rank."""
    in_fp32 = on_cpu or layout.precision == "fp32"
    return Share(
        model=model, train=train, layout=layout, in_fp32=in_fp32, element=4.0 if in_fp32 else 2.0,
        zero=ZERO_STAGES[layout.sharding], group=layout.dp_shard * layout.cp,
        tokens=layout.micro_batch * float(longest_row(train)) / layout.cp,
        **_count_weights(model, train, fullest_stage(model, layout), layout.tp, layout.pp, layout.ep),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A training stack. The terms are those of plain PyTorch; weights are stored in the computation's precision."""

    name: str
    # supported features
    can: frozenset[str] = frozenset({"ddp", "zero3", "hsdp", "tp", "pp", "cp", "ep", "zero1", "zero2", "sp"})
    without_gpu: frozenset[str] | None = None  # features available without a GPU; None: all
    methods: frozenset[str] = frozenset({"full", "lora", "qlora"})
    checkpointing: tuple[str, ...] = ("none", "selective", "full")
    offloads: tuple[Offload, ...] = ()
    eight_bits: tuple[Precision, ...] = ()
    empty_ends: bool = False  # the first and the last chunk of an interleaved pipeline may have no layer
    fused_cross_entropy: bool = True
    compile: bool = False
    reshard: bool = True  # may keep the gathered weights between forward and backward
    loads_quantised: bool = False  # adapters on weights that were already quantised
    quantises_whole: bool = False  # each rank's GPU holds all 4-bit weights until the stack shards them
    copies_kv_heads: bool = False  # if there are fewer of them than tensor-parallel ranks
    # kernels
    fused: bool = False  # Transformer Engine: fused norms, activations, RoPE and bias; separate kernels per expert
    groups_experts: bool = False  # one kernel, torch's grouped_mm, multiplies all of a rank's experts
    weighs_in_fp32: bool = False  # multiplies experts' outputs by the router's weights in separate fp32 kernels
    expert_bytes: tuple[float, ...] = (0.0,) * 4  # in HBM, per element of outputs and first products; biased; compiled
    cuda_graph_arguments: tuple[str, ...] = ()  # with these, one CUDA graph replays a step of experts in mxfp8
    liger: bool = False  # if the loss is fused, so are norms, RoPE and gates: transformers' Liger patch
    attention: AttentionKernel = "flash2"
    # memory
    states: StateBytes = IN_HALF
    adapter_bytes: float = 4.0  # per adapter weight
    halves_adapters: bool = False  # adapters of a quantised model are bf16 unless FSDP shards them
    merges_expert_adapters: bool = False  # PEFT's ParamWrapper: experts plus adapters, created in each pass
    # HBM bytes per logit. Fused: bf16, read twice, written. Else torch's own: fp32 copies, log-softmax and gradients.
    loss_bytes: tuple[float, float] = (6.0, 44.0)
    chunks_loss: bool = False  # the loss is fused even if the layout does not say so
    loss_again: bool = False  # the fused loss recomputes each chunk and its projection in the backward pass
    logits_bytes: float = 12.0  # peak bytes per token and vocabulary entry around the loss
    splits_loss: bool = True  # a fused loss never has the logits of all tokens
    bucket_bytes: float = 0.0  # flat communication buffers, with data parallelism
    gradient_buffer: bool = False  # one buffer holds all gradients during the whole step
    adds_in_products: bool = False  # products accumulate gradients over micro-batches, without a separate pass
    ddp_bucket_copies: bool = False  # DDP's gradients are separate tensors, not views of its buckets
    ends_apart: bool = False  # FSDP2 with the embedding and the head as separate units
    # traffic
    gradient_bytes: int = 2  # per gradient that FSDP or ZeRO reduces
    replica_gradient_bytes: int = 2  # per gradient that DDP all-reduces: type of the stored weights
    sends_tokens_once: bool = False  # once per rank, or domain, with several of a token's experts (DeepEP, HybridEP)
    hidden_experts: float = 0.0  # fraction of experts' all-to-alls hidden by compute of other micro-batches
    overlaps_without_pipeline: bool = False  # the all-to-alls, not only in an interleaved pipeline
    sends_parts: bool = False  # tensor-parallel ranks with equal pipeline messages send one part each
    gathers_context: bool = False  # CP ranks gather all keys and values at once instead of using a ring
    tp_overlap: bool = False  # userbuffers or async-TP hide part of the tensor-parallel traffic
    dp_overlap: bool = True  # gradient reduction overlaps with the backward pass
    reduce_bucket: float = 25 * GIB / 1024  # bytes of gradients reduced at once: torch DDP's bucket_cap_mb
    reduce_bucket_per_rank: float = 0.0  # minimum bucket per rank that reduces it
    reduce_every_micro_batch: bool = False  # ZeRO-2, and FSDP over its replicas: no no_sync under accumulation
    sync_setting: str = ""  # reduces gradients in each micro-batch; otherwise each rank holds all until the last one
    hides_offload: bool = False  # compute hides the copies of offloaded weights and gradients
    hooks_one_rank: bool = False  # ZeRO-3's hooks before and after a module also run with one rank
    splits_documents: bool = False  # attention in packed rows stays within a sample, and costs no more
    selective_attention: bool = False  # selective recomputation repeats attention's core, not every second product
    repeats_experts: bool = False  # it repeats all products of experts, not every second one

    # What is run.

    def as_run(self, layout: Layout) -> Layout:
        """Return the layout that runs if this one is requested."""
        return layout

    def fuses(self, layout: Layout) -> bool:
        """Whether a few kernels cover the operations between a layer's products: compiled, or with Liger."""
        return layout.compile or (self.liger and layout.fused_cross_entropy)

    def uses_cuda_graph(self, model: ModelSpec, layout: Layout) -> bool:
        """Whether one CUDA graph replays all passes of a step with experts, whose all-to-alls overlap with compute.

        The host then starts no kernel. A graph needs buffers of a fixed size for routed tokens, so that one kernel
        multiplies a rank's experts, gates and casts the results.
        """
        able = bool(self.cuda_graph_arguments) and layout.precision == "mxfp8" and layout.offload == "none"
        return able and model.experts > 0 and not model.mamba_layers and self.overlaps_experts(layout)

    def overlaps_experts(self, layout: Layout) -> bool:
        """Whether experts' all-to-alls overlap with compute of another micro-batch."""
        others = layout.virtual_stages > 1 or (layout.pp == 1 and self.overlaps_without_pipeline)
        return others and layout.ep > 1 and layout.checkpointing != "full"

    def splits_sequence(self, train: TrainSpec) -> bool:
        """Whether tensor-parallel ranks also split the sequence."""
        return "sp" in self.can

    def refuses(self, model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
        """Return why it cannot run this layout, apart from `can`; None if it can."""
        return None

    # Memory, in bytes on the fullest rank.

    def state_bytes(self, share: Share) -> StateBytes:
        """Return the bytes per trained weight, which depend on the optimizer."""
        stored = IN_FP32 if share.in_fp32 else self.states
        if (name := share.train.optimizer) == "adamw":
            return stored
        # The states of paged_adamw8bit are in host memory.
        return stored._replace(optimizer=0.0 if "paged" in name else (2.0 if "8bit" in name else 0.0) + stored.copy)

    def loaded_bytes(self, share: Share) -> float:
        """Return the bytes per frozen weight that is not quantised to four bits."""
        return share.element

    def shards_gradients(self, share: Share) -> bool:
        """Whether a rank keeps only a part of the gradients; with FSDP in a pipeline, it has all until the end."""
        return share.zero >= 2 and not (share.sharded and share.layout.pp > 1)

    def in_units(self, share: Share) -> bool:
        """Whether weights are gathered, or cast, unit by unit."""
        return share.sharded

    def gathered(self, share: Share) -> float:
        """Return the bytes of the full weights of the active units, and of their gradients."""
        if not self.in_units(share):
            return 0.0
        wide, element = share.frozen_bytes, share.element
        unit = max(wide * share.largest, element * share.ends / 2.0)  # embedding and head are two units
        if not share.layout.reshard_after_forward or (share.sharded and share.layout.pp > 1):  # they stay
            kept_bytes = wide * share.layers * share.layer + element * share.ends
        else:  # the active and the prefetched unit; a layer is next to the head
            kept_bytes = unit + (wide * share.largest if self.ends_apart else unit)
        # A unit's full gradient, which FSDP2 also copies in the type that it sends, reordered by rank.
        copies = 1.0 + self.ends_apart * (1.0 if share.in_fp32 else self.gradient_bytes / 2.0)
        return kept_bytes + (0.0 if share.adapters else copies * unit)

    def casts(self, share: Share) -> float:
        """Return the bytes of autocast's half-precision copies of fp32 weights that no FSDP unit casts."""
        return 0.0

    def layer_activations(self, share: Share) -> float:
        """Return the bytes a layer keeps for the backward pass, without recomputation. Flash attention has no scores.

        Counted tensors: inputs (residual) and outputs of the norms (plus fp32 copies if not fused), q, k, v, the
        attention output, and the tensors inside the MLP. In fp32 they have twice the bytes, and there are no copies.
        """
        model, layout = share.model, share.layout
        h, columns = float(model.hidden), mixer_columns(model)
        hidden, inner = self.stored_tensors(share)
        split = layout.tp if layout.sequence_parallel else 1
        # An adapter of a column-parallel product keeps its gathered input (ParallelLinearAdapter of Megatron-Bridge).
        adapted = set(share.train.lora_targets if share.adapters else ())
        whole = bool(adapted & {"q_proj", "k_proj", "v_proj"}) + (not model.experts and "up_proj" in adapted)
        stored = ((hidden - whole) / split + whole) * h + (columns + inner * mlp_width(model)) / layout.tp
        # The input of each expert. Its output too, in two or four bytes, unless fused kernels weigh before it.
        mixtures = (model.layers - model.dense_layers) / model.layers
        copies = model.experts_per_token * (1.0 if self.fused else 2.0 + (self.weighs_in_fp32 and not layout.compile))
        stored += copies * mixtures * h / (layout.tp if layout.ep > 1 else split)
        if self.uses_cuda_graph(model, layout):  # pages of the stash: --moe-paged-stash-buffer-size-factor-cuda 1.2
            stored += 0.2 * mixtures * model.experts_per_token * (h + inner * model.expert_ffn) / layout.tp
        if self.fused and layout.precision in EIGHT_BITS:
            # Transformer Engine keeps the inputs of products in one byte: of two norms, and of the MLP.
            stored -= 0.5 * (2.0 * h / split + mlp_width(model) / layout.tp)
        merged = 0.0
        if self.merges_expert_adapters and share.adapters and expert_adapters(model, share.train):
            # kept for the gradients of the inputs
            merged = share.element * weights(model).routed_per_layer * mixtures / max(layout.tp, layout.ep)
        return share.tokens * share.element * stored + share.tokens * self.score_bytes(share) + merged

    def selective_activations(self, share: Share, boundary: float) -> float:
        """Return the bytes per layer with selective recomputation: its input (`boundary` bytes), half of the rest."""
        return (self.layer_activations(share) + boundary) / 2.0

    def stored_tensors(self, share: Share) -> tuple[float, float]:
        """Return how many hidden-sized and how many MLP-sized tensors a layer keeps."""
        train = share.train
        # Liger counts as eager: then stas00's 14 rows are 4 % above the measured memory; otherwise 8 % below.
        fused = self.fused or share.layout.compile
        hidden = 5.0 if self.fused else 4.0 if fused else 9.0
        if share.in_fp32 and not fused:
            # Tensors that transformers' Llama layer passes to torch.autograd.graph.saved_tensors_hooks: two residual
            # sums, the output of each norm and, if its weight is trained, the value that it is multiplied with.
            hidden = 4.0 if share.adapters else 6.0
        inner = 4.0 if share.model.gated_mlp else 3.0
        if fused:
            inner -= 1.0
        elif not share.model.gated_mlp and share.model.family != "gpt2" and not share.in_fp32:
            # torch's layer norm and GELU keep their input (GPT-2 in transformers has its own GELU). Dropout masks are
            # not counted; they are what Megatron's GPT has in addition to inputs and outputs of two norms.
            hidden, inner = 4.0, 2.0
        if train.method == "lora":  # a frozen product keeps its input only if an adapter needs it
            inner -= 0.0 if "down_proj" in train.lora_targets else 1.0
            hidden -= 0.0 if "up_proj" in train.lora_targets else 1.0
        return hidden, inner

    def score_bytes(self, share: Share) -> float:
        """Return the bytes per token of stored attention scores."""
        model, eager, repeated = share.model, share.train.attention == "eager", 0.0
        if not eager and (self.attention != "unfused" or share.layout.checkpointing == "selective"):
            return 0.0
        # Softmax output, its dropout output, and a mask of one byte.
        each = 9.0 if share.in_fp32 else 5.0
        if eager and model.gated_mlp:
            # transformers' `eager_attention_forward` has no dropout by default. It keeps the softmax output in fp32 and
            # its half-precision copy, and repeats keys and values for all heads.
            each = 4.0 if share.in_fp32 else 6.0
            repeated = 2.0 * share.element * (model.heads - model.kv_heads) * model.head_dim
        return (each * model.heads * longest_row(share.train) + repeated) / share.layout.tp

    def logits(self, share: Share) -> float:
        """Return the bytes of the loss's logits and their gradients."""
        columns = share.model.vocab / share.layout.tp
        if not (share.layout.fused_cross_entropy and self.splits_loss):
            return share.tokens * columns * self.logits_bytes
        return columns * min(2.0 * share.tokens, 1024.0 * self.logits_bytes)  # in chunks of 1024 tokens

    def host_load(self, file_bytes: float, layout: Layout, ranks: int) -> float:
        """Return the bytes of node memory that `ranks` ranks use while they load a model file, without page cache.

        Zero by default: each rank maps the file and reads only what it keeps.
        """
        return 0.0

    # Step time.

    def recomputed(self, checkpointing: str) -> tuple[float, float, float, float]:
        """Return the parts of experts' and other products, attention and passes that the backward pass repeats."""
        some = (0.0, 0.0, 1.0, 0.0) if self.selective_attention else (0.5 + 0.5 * self.repeats_experts, 0.5, 0.0, 1.0)
        return {"full": (1.0,) * 4, "selective": some}.get(checkpointing, (0.0,) * 4)

    def hides_tensor_parallel(self, layout: Layout) -> bool:
        """Whether part of the tensor-parallel traffic overlaps with adjacent products.

        A stack that compiles its layers does it only there: torchtitan's async TP is part of the compiler
        (benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md).
        """
        return self.tp_overlap and layout.sequence_parallel and (layout.compile or not self.compile)

    def step_bytes(self, share: Share) -> float:
        """Return the memory traffic of an optimizer step per weight: read and write states and weights, read gradients.

        Optimizer bytes beyond the two moments and the fp32 copy are a copy of the gradients.
        """
        each = self.state_bytes(share)
        return each.gradients + 2.0 * min(12.0, each.optimizer) + (1.0 if each.copy else 2.0) * each.weights

    def tensor_parallel_rounds(self, layout: Layout) -> float:
        """Return the all-reduces (or equivalent pairs) of hidden states per layer, forward and backward."""
        return 4.0 + (2.0 if layout.checkpointing == "full" else 0.0)

    def tensor_parallel_ends(self, train: TrainSpec, layout: Layout, *, last: bool) -> float:
        """Return the all-reduces outside the layers, on the first or the last pipeline stage.

        One follows the embedding; one is for the gradient of the head's input.
        """
        return 2.0 if layout.pp == 1 else 1.0

    def reduced_bytes(self, train: TrainSpec, layout: Layout) -> float:
        """Return the bytes per gradient in data-parallel reductions."""
        if layout.precision == "fp32":
            return 4.0
        return float(self.replica_gradient_bytes if layout.sharding == "ddp" else self.gradient_bytes)

    def count_exchanges(self, train: TrainSpec, layout: Layout) -> Exchanges:
        """A backward pass gathers again what the forward pass freed; else weights stay until it, or the step's end.

        With a pipeline all backward passes together gather once, and the last micro-batch reduces the gradients.
        """
        frees, times = layout.reshard_after_forward, layout.gradient_accumulation
        once = times if layout.pp == 1 else 1
        return Exchanges(gathers=times if frees else once, regathers=once if frees else 0, scatters=once)


@dataclass(frozen=True, kw_only=True)
class Fsdp(Engine):
    """PyTorch's fully_shard with mixed precision: fp32 weights, gathered and used in half precision.

    Gradients are reduced in `MixedPrecisionPolicy.reduce_dtype`: fp32 in torchtitan (`mixed_precision_reduce`) and in
    the fine-tune job (finetune/parallel.py). DDP reduces them in the type of the stored weights. In torch's pipelines,
    after a backward pass gathered a unit's weights, these and its unreduced fp32 gradients stay until the end of the
    schedule (torch.distributed.pipelining, stage.backward_maybe_with_nosync).
    """

    states: StateBytes = IN_FP32
    hides_offload: bool = True  # non-blocking copies of pinned memory in streams of their own (torch _fsdp_param.py)
    gradient_bytes: int = 4
    replica_gradient_bytes: int = 4

    def as_run(self, layout: Layout) -> Layout:
        """If ZeRO-2 is requested, shard the weights too, and keep them gathered until the backward pass."""
        if layout.sharding == "zero2" and layout.dp_shard > 1:
            return replace(layout, sharding="zero3", reshard_after_forward=False)
        return layout

    def casts(self, share: Share) -> float:
        """All weights: autocast's cache keeps a copy of each."""
        return 0.0 if share.adapters or share.in_fp32 or self.in_units(share) else 2.0 * share.local


_SETS = ("can", "without_gpu", "methods")


def make_engine(base: Engine, traits: Mapping[str, Any]) -> Engine:
    """Return an engine that differs from another in the traits of a TOML table."""
    members: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in traits.items()}
    members |= {name: frozenset(members[name]) for name in _SETS if name in members}
    if "states" in members:
        members["states"] = StateBytes(*members["states"])
    return replace(base, **members)

"""The engine of a forecast: what a training stack can run, and the terms of memory and step time that differ by stack.

`Engine` holds the terms of plain PyTorch in half precision, `Fsdp` those of fully_shard; each stack under
`planner.stacks` fills in its traits and replaces the terms where its code does otherwise. `memory` and `step_time` add
the terms up and know no stack. Traits are properties of the code, never fitted to one published table.

Specification: mixed-precision state of 18 bytes per weight (arXiv 1910.02054), activations s b h (18 + 4 f/h) / t per
layer with flash attention and sequence parallelism (arXiv 2205.05198 and Megatron-LM theoretical_memory_usage.py),
NF4 with double quantisation: half a byte per weight, a byte for the scale of 64 weights, four for that of 256 scales
(arXiv 2305.14314; bitsandbytes' defaults).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from contracts.layout import EIGHT_BITS, Layout, Offload, Precision
from hardware.units import GIB
from planner.forecast.links import Links
from planner.forecast.specs import (
    ModelSpec,
    TrainSpec,
    attention_columns,
    expert_adapters,
    longest_row,
    lora_weights,
    mlp_width,
    routed_weights,
    trained_weights,
    weights,
)

NF4_BYTES = 0.5  # per weight; as they lie and travel
NF4_SCALES = 1 / 64 + 4 / (64 * 256)  # beside them; whole on every rank, as FSDP takes no part of bitsandbytes' state

AttentionKernel = Literal["unfused", "flash1", "flash2", "flash3"]


class StateBytes(NamedTuple):
    """Bytes per trained weight."""

    weights: float
    gradients: float
    optimizer: float
    copy: float = 0.0  # of the optimizer's, its fp32 copy of half-precision weights


IN_FP32 = StateBytes(4.0, 4.0, 8.0)
IN_HALF = StateBytes(2.0, 2.0, 4.0)


def fullest_stage(model: ModelSpec, layout: Layout) -> float:
    """Layers of the pipeline stage that has most of them."""
    return _most_layers(layout.stage_layers, layout.pp) if layout.stage_layers else float(-(-model.layers // layout.pp))


def uneven_stages(layers: int, stages: int) -> tuple[int, ...]:
    """The last stage, with the head, and the first, with the embedding, go short of layers if they can; () if even."""
    if layers % stages == 0:
        return ()
    most = -(-layers // stages)
    missing = most * stages - layers
    first, last = most - missing // 2, most - (missing + 1) // 2
    if min(first, last) >= 1:
        return (first, *(most,) * (stages - 2), last)
    low, extra = divmod(layers, stages)
    return tuple(low + (1 if i < extra else 0) for i in range(stages))


def last_stage(model: ModelSpec, layout: Layout) -> float:
    """Layers of the pipeline stage that has the head; where they are not named, one fewer than others at the most."""
    stages, missing = layout.stage_layers, -model.layers % (layout.pp * layout.virtual_stages)
    if not stages and missing in (1, 2):  # the embedding and the head count as a layer each
        stages = uneven_stages(model.layers, layout.pp * layout.virtual_stages)
    return float(sum(stages[layout.pp - 1 :: layout.pp])) if stages else fullest_stage(model, layout)


@lru_cache(maxsize=1024)
def _most_layers(stage_layers: tuple[int, ...], pp: int) -> float:
    return float(max(sum(stage_layers[i::pp]) for i in range(pp)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What the fullest rank has of a job: the counts that the terms of memory start from.

    Weights are counted before data parallelism shards them.
    """

    model: ModelSpec
    train: TrainSpec
    layout: Layout
    in_fp32: bool  # everything is four bytes wide: requested, or on a CPU
    tokens: float  # of the longest micro-batch, which sets the peak
    layers: float
    layer: float  # weights of a layer, the mean, as tensor and expert parallelism cut it
    largest: float  # weights of the largest layer
    ends: float  # weights of the embedding, and of the head where no other stage has it
    local: float  # all its weights
    trained: float  # those that get a gradient
    whole: float  # of these, beside adapters, modules that train in the model's own type
    routed: float  # of the weights, those of experts that expert parallelism has divided
    routed_trained: float

    @property
    def adapters(self) -> bool:
        """Whether the weights of the model itself are frozen."""
        return self.train.method != "full"

    @property
    def element(self) -> float:
        """Bytes of what is computed with."""
        return 4.0 if self.in_fp32 else 2.0

    @property
    def frozen_bytes(self) -> float:
        """Bytes of a layer's weight as it lies and travels: QLoRA's are 4-bit blocks."""
        return NF4_BYTES if self.train.method == "qlora" else self.element

    @property
    def zero(self) -> int:
        """ZeRO's stage."""
        return {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[self.layout.sharding]

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a part of the weights only, and gathers them."""
        return self.layout.sharding == "zero3" and self.group > 1

    @property
    def group(self) -> int:
        """Ranks that shard together: those of context parallelism hold the same weights (torchtitan's dp_shard_cp)."""
        return self.layout.dp_shard * self.layout.cp

    @property
    def expert_group(self) -> float:
        """Ranks that hold the same experts, among those that shard together and their tensor-parallel neighbours."""
        return max(1.0, self.group * self.layout.tp / self.layout.ep) if self.layout.ep > 1 else float(self.group)

    def part(self, count: float, routed: float, *, sharded: bool) -> float:
        """Of so many weights, `routed` of them experts', those that stay on this rank."""
        return (count - routed) / self.group + routed / self.expert_group if sharded else count


@lru_cache(maxsize=1024)
def _counts(model: ModelSpec, train: TrainSpec, layers: float, tp: int, pp: int, ep: int) -> dict[str, float]:
    """Count the weights of a rank of the fullest stage, which has so many layers; `Share` says what each count is."""
    count, full = weights(model), train.method == "full"
    ends = float(count.embedding + count.head) / tp if pp == 1 else float(count.embedding) / tp
    # Expert parallelism leaves experts whole: its group takes the tensor-parallel ranks in (Megatron's
    # expert-tensor-parallel-size 1, torchtitan's etp 1).
    cut = ep if ep > 1 else tp
    experts = count.routed_per_layer / cut  # of a layer, on this rank
    mixtures = (count.layers - count.dense_layers) / count.layers if model.experts else 0.0
    largest = (count.layer - count.routed_per_layer) / tp + experts
    if count.dense_layers:
        largest = max(largest, (count.layer - count.mlp_per_layer + count.dense_mlp_per_layer) / tp)
    layer = (count.all_layers / count.layers - count.routed_per_layer * mixtures) / tp + experts * mixtures
    local = layers * layer + ends
    routed = routed_weights(model, train)[1]
    adapters = (trained_weights(model, train, tp) - routed // tp) / pp + routed / (cut * pp)
    here = layers * mixtures * experts
    return {
        "layers": layers, "layer": layer, "largest": largest, "ends": ends, "local": local,
        "trained": local if full else adapters,
        "whole": 0.0 if full else (trained_weights(model, train) - lora_weights(model, train)) / tp,
        "routed": here if ep > 1 else 0.0,
        "routed_trained": (here if full else routed / (cut * pp)) if ep > 1 else 0.0,
    }  # fmt: skip


def share_of(model: ModelSpec, train: TrainSpec, layout: Layout, *, on_cpu: bool = False) -> Share:
    """The fullest rank's share."""
    return Share(
        model=model, train=train, layout=layout, in_fp32=on_cpu or layout.precision == "fp32",
        tokens=layout.micro_batch * float(longest_row(train)) / layout.cp,
        **_counts(model, train, fullest_stage(model, layout), layout.tp, layout.pp, layout.ep),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One training stack. The terms below are those of plain PyTorch; weights are stored as they are computed with."""

    name: str
    # what it can run
    can: frozenset[str] = frozenset({"ddp", "zero3", "hsdp", "tp", "pp", "cp", "ep", "zero1", "zero2", "sp"})
    without_gpu: frozenset[str] | None = None  # what of it without a GPU; None: all
    together: frozenset[str] = frozenset({"tp+dp", "pp+dp", "tp+pp", "tp+pp+dp"})
    methods: frozenset[str] = frozenset({"full", "lora", "qlora"})
    checkpointing: tuple[str, ...] = ("none", "selective", "full")
    offloads: tuple[Offload, ...] = ()
    eight_bits: tuple[Precision, ...] = ()
    interleaved: bool = True
    fused_cross_entropy: bool = True
    compile: bool = False
    reshard: bool = True  # can keep the gathered weights between forward and backward
    loads_quantised: bool = False  # weights that were quantised before, with adapters beside them
    copies_kv_heads: bool = False  # where there are fewer of them than tensor-parallel ranks
    # its kernels
    fused: bool = False  # Transformer Engine's kernels: norms, activations, rope and bias fused, experts by themselves
    liger: bool = False  # where its loss is fused, norms, rotary positions and gates are: transformers' Liger patch
    attention: AttentionKernel = "flash2"
    # its memory
    states: StateBytes = IN_HALF
    adapter_bytes: float = 4.0  # of an adapter's weight
    merges_expert_adapters: bool = False  # PEFT's ParamWrapper: the experts plus their adapters, made for each pass
    # Through memory per logit: fused, bf16 read twice and written; else fp32 copies, softmax, gradient as well.
    loss_bytes: tuple[float, float] = (6.0, 16.0)
    loss_again: bool = False  # a fused loss is made in parts, each again in the backward pass, its projection included
    logits_bytes: float = 12.0  # live bytes per token and vocabulary entry around the loss
    bucket_bytes: float = 0.0  # flat communication buffers outside the parts, where there is data parallelism
    gradient_buffer: bool = False  # one buffer holds all gradients throughout the step
    adds_in_products: bool = False  # each gradient to those of the micro-batches before, without a pass by itself
    ddp_bucket_copies: bool = False  # DDP's gradients are tensors beside its buckets, not views of them
    splits_heads: bool = False  # context parallelism exchanges tokens for heads (Ulysses) in place of a ring
    ends_apart: bool = False  # FSDP2 with the embedding and the head as units by themselves
    # its traffic
    gradient_bytes: int = 2  # of what FSDP or ZeRO reduces
    replica_gradient_bytes: int = 2  # of what DDP all-reduces: the type that the weights are stored in
    sends_tokens_once: bool = False  # to a rank, or a domain, with several of a token's experts (DeepEP, HybridEP)
    hidden_experts: float = 0.0  # of experts' all-to-alls, under the compute of an interleaved pipeline's micro-batches
    sends_parts: bool = False  # a pipeline's messages are split over tensor-parallel ranks, whole as they are on each
    gathers_context: bool = False  # CP ranks gather all keys and values at once, in place of a ring
    tp_overlap: bool = False  # userbuffers or async-TP hide part of the tensor-parallel traffic
    dp_overlap: bool = True  # gradient reduction runs under the backward pass
    reduce_bucket: float = 25 * GIB / 1024  # bytes of gradients that are reduced at once: torch DDP's bucket_cap_mb
    reduce_bucket_per_rank: float = 0.0  # so many for each rank that reduces them, where that is more
    reduce_every_micro_batch: bool = False  # no no_sync under gradient accumulation
    hooks_one_rank: bool = False  # what ZeRO-3 does before and after a module, it does on one rank too
    splits_documents: bool = False  # attention in packed rows stays within each sample, and costs no more than that
    selective_attention: bool = False  # selective recomputation runs attention's core again, not every second product

    # What runs.

    def as_run(self, layout: Layout) -> Layout:
        """The layout that runs where this one is requested."""
        return layout

    def fuses(self, layout: Layout) -> bool:
        """Whether what lies between a layer's products runs in few kernels: compiled, or by Liger's."""
        return layout.compile or (self.liger and layout.fused_cross_entropy)

    def splits_sequence(self, train: TrainSpec) -> bool:
        """Whether tensor-parallel ranks split the sequence too."""
        return "sp" in self.can

    def refuses(self, model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
        """Why it cannot run this layout, beyond what `can` and `together` say."""
        return None

    # Memory, in bytes on the fullest rank.

    def state_bytes(self, share: Share) -> StateBytes:
        """Bytes per trained weight, by the optimizer."""
        stored = IN_FP32 if share.in_fp32 else self.states
        if share.train.optimizer == "paged_adamw8bit":  # states live in host memory
            return stored._replace(optimizer=0.0)
        if "8bit" in share.train.optimizer:
            return stored._replace(optimizer=2.0 + stored.copy)
        if share.train.optimizer in ("sgd", "adafactor"):
            return stored._replace(optimizer=stored.copy)
        return stored

    def loaded_bytes(self, share: Share) -> float:
        """Bytes of a frozen weight that is not packed in four bits."""
        return share.element

    def shards_gradients(self, share: Share) -> bool:
        """Whether a rank keeps a part of the gradients only."""
        return share.zero >= 2

    def in_units(self, share: Share) -> bool:
        """Whether weights are gathered, or cast, unit by unit."""
        return share.sharded

    def holds_gathered_weights(self, share: Share) -> bool:
        """Whether gathered weights stay whole between the forward and the backward pass."""
        return not share.layout.reshard_after_forward

    def gradient_copies(self, share: Share) -> float:
        """Copies, over its element, of a unit's whole gradient while it is put in the order of the ranks."""
        return 1.0 if self.ends_apart else 0.0

    def gathered(self, share: Share) -> float:
        """Full weights of the units in work, and their gradients."""
        if not self.in_units(share):
            return 0.0
        wide, element = share.frozen_bytes, share.element
        unit = max(wide * share.largest, element * share.ends / 2.0)  # the ends are two units
        if self.holds_gathered_weights(share):
            held = wide * share.layers * share.layer + element * share.ends
        else:  # this unit and the one prefetched; the head's neighbour is a layer
            held = unit + (wide * share.largest if self.ends_apart else unit)
        return held + (0.0 if share.adapters else (1.0 + self.gradient_copies(share)) * unit)

    def casts(self, share: Share) -> float:
        """Autocast's half-precision copies of fp32 weights that no FSDP unit casts."""
        return 0.0

    def layer_activations(self, share: Share) -> float:
        """What one layer keeps for the backward pass, without recomputation; flash attention stores no scores.

        Counted in tensors: residual inputs and outputs of the norms (fp32 copies where not fused), q, k, v and the
        attention's output, and the MLP's inner tensors. In fp32 they are twice the bytes, and there are no copies.
        """
        model, layout = share.model, share.layout
        h, columns = float(model.hidden), attention_columns(model)
        hidden, inner = self.stored_tensors(share)
        split = layout.tp if layout.sequence_parallel else 1
        stored = hidden * h / split + (columns + inner * mlp_width(model)) / layout.tp
        # Each expert's input, and its result before the results of a token are summed.
        mixtures = (model.layers - model.dense_layers) / model.layers
        stored += 2.0 * model.experts_per_token * mixtures * h / (layout.tp if layout.ep > 1 else split)
        if self.fused and layout.precision in EIGHT_BITS:
            # Transformer Engine keeps what a product needs of its input in a byte: of two norms, and of the MLP.
            stored -= 0.5 * (2.0 * h / split + mlp_width(model) / layout.tp)
        merged = 0.0
        if self.merges_expert_adapters and self.adapts_experts(share.train, model):  # saved for the inputs' gradients
            merged = share.element * weights(model).routed_per_layer * mixtures / max(layout.tp, layout.ep)
        return share.tokens * share.element * stored + share.tokens * self.score_bytes(share) + merged

    def adapts_experts(self, train: TrainSpec, model: ModelSpec) -> bool:
        """Whether routed experts have adapters."""
        return train.method != "full" and expert_adapters(model, train) > 0

    def selective_activations(self, share: Share, boundary: float) -> float:
        """What one layer keeps under selective recomputation: its input, `boundary` bytes, and half of the rest."""
        return (self.layer_activations(share) + boundary) / 2.0

    def stored_tensors(self, share: Share) -> tuple[float, float]:
        """How many hidden-sized and how many MLP-sized tensors a layer keeps."""
        train = share.train
        # Liger's count as eager here: so stas00's 14 rows are 4 % over the measured memory, else 8 % under.
        fused = self.fused or share.layout.compile
        hidden = 5.0 if fused else 9.0
        if share.in_fp32 and not fused:
            # What transformers' Llama layer hands to torch.autograd.graph.saved_tensors_hooks: two residual sums, and
            # of each norm its output and, where its weight trains, what that is multiplied with.
            hidden = 4.0 if share.adapters else 6.0
        inner = 4.0 if share.model.gated_mlp else 3.0
        if fused:
            inner -= 1.0
        elif not share.model.gated_mlp and share.model.family != "gpt2" and not share.in_fp32:
            # torch's own layer norm and GELU keep their input; transformers' GPT-2 spells its GELU out. No dropout: the
            # masks are what Megatron's GPT has beside two norms' inputs and outputs.
            hidden, inner = 4.0, 2.0
        if train.method == "lora":  # a frozen product keeps its input only where an adapter needs it
            inner -= 0.0 if "down_proj" in train.lora_targets else 1.0
            hidden -= 0.0 if "up_proj" in train.lora_targets else 1.0
        return hidden, inner

    def score_bytes(self, share: Share) -> float:
        """Bytes per token of stored attention scores."""
        unfused = self.attention == "unfused" and share.layout.checkpointing != "selective"
        if share.train.attention != "eager" and not unfused:
            return 0.0
        # Softmax's result, what dropout makes of it, and the mask of a byte.
        each = 9.0 if share.in_fp32 else 5.0
        return each * share.model.heads * longest_row(share.train) / share.layout.tp

    def logits(self, share: Share) -> float:
        """The loss's logits and their gradients."""
        vocab = share.model.vocab
        if not share.layout.fused_cross_entropy:
            return share.tokens * vocab / share.layout.tp * self.logits_bytes
        whole = share.tokens * vocab / share.layout.tp * 2.0
        return min(whole, 1024.0 * vocab / share.layout.tp * self.logits_bytes)  # in chunks of a thousand tokens

    def load(self, share: Share) -> float:
        """What lies beside the weights while a model is loaded, before the first step."""
        return 0.0

    def host_load(self, file_bytes: float, layout: Layout, ranks: int) -> float:
        """Bytes of a node's memory that `ranks` of it hold while a model of `file_bytes` comes in, beyond the cache.

        None: mapped files, of which each rank reads what it keeps.
        """
        return 0.0

    # Time of a step.

    def recomputed(self, checkpointing: str) -> tuple[float, float, float]:
        """Shares of a layer's multiplications, attention and element-wise passes that the backward pass runs again."""
        if checkpointing == "full":
            return 1.0, 1.0, 1.0
        if checkpointing == "selective":
            return (0.0, 1.0, 0.0) if self.selective_attention else (0.5, 0.0, 1.0)
        return 0.0, 0.0, 0.0

    def hides_tensor_parallel(self, layout: Layout) -> bool:
        """Whether part of the tensor-parallel traffic runs under the products around it."""
        return self.tp_overlap and layout.sequence_parallel

    def step_bytes(self, share: Share) -> float:
        """Memory traffic of an optimizer step per weight: states and weights are read and written, gradients read.

        Beyond the two moments and the fp32 copy, what counts as the optimizer's is a copy of the gradients.
        """
        each = self.state_bytes(share)
        return each.gradients + 2.0 * min(12.0, each.optimizer) + (1.0 if each.copy else 2.0) * each.weights

    def tensor_parallel_rounds(self, layout: Layout) -> float:
        """All-reduces (or pairs of their halves) of the hidden states in a layer, forward and backward."""
        return 4.0 + (2.0 if layout.checkpointing == "full" else 0.0)

    def tensor_parallel_ends(self, train: TrainSpec, layout: Layout, *, last: bool) -> float:
        """The same around the layers, on the first or the last pipeline stage.

        After the embedding, and of the head's gradient.
        """
        return 2.0 if layout.pp == 1 else 1.0

    def reduced_bytes(self, train: TrainSpec, layout: Layout) -> float:
        """Bytes of a gradient as data parallelism reduces it."""
        if layout.precision == "fp32":
            return 4.0
        return float(self.replica_gradient_bytes if layout.sharding == "ddp" else self.gradient_bytes)

    def gathers(self, layout: Layout) -> int:
        """How often one step gathers what it keeps gathered until the backward pass, or until the step is over."""
        return 1 if not layout.reshard_after_forward and layout.pp > 1 else layout.gradient_accumulation

    def gathers_again(self, layout: Layout) -> int:
        """How often one step gathers for a backward pass what the forward pass gave back."""
        return layout.gradient_accumulation if layout.reshard_after_forward else 0

    def scatters(self, train: TrainSpec, layout: Layout) -> int:
        """How often one step reduces sharded gradients."""
        return layout.gradient_accumulation if layout.reshard_after_forward or layout.pp == 1 else 1


@dataclass(frozen=True, kw_only=True)
class Fsdp(Engine):
    """PyTorch's fully_shard with mixed precision: fp32 weights, gathered and computed with in half precision.

    Gradients are reduced in `MixedPrecisionPolicy.reduce_dtype`: fp32 in torchtitan (`mixed_precision_reduce`) and in
    the fine-tune job (finetune/parallel.py). DDP reduces them as the weights are stored. In torch's pipelines a unit's
    weights, once a backward pass has gathered them, and its unreduced fp32 gradients stay whole until the schedule is
    over (torch.distributed.pipelining, stage.backward_maybe_with_nosync).
    """

    states: StateBytes = IN_FP32
    gradient_bytes: int = 4
    replica_gradient_bytes: int = 4

    def as_run(self, layout: Layout) -> Layout:
        """Asked for ZeRO-2, it shards the weights too, and keeps them gathered until the backward pass."""
        if layout.sharding == "zero2" and layout.dp_shard > 1:
            return replace(layout, sharding="zero3", reshard_after_forward=False)
        return layout

    def holds_gathered_weights(self, share: Share) -> bool:
        """A pipeline's, whatever the layout says."""
        return (share.sharded and share.layout.pp > 1) or super().holds_gathered_weights(share)

    def shards_gradients(self, share: Share) -> bool:
        """Not while a pipeline runs."""
        return not (share.sharded and share.layout.pp > 1) and super().shards_gradients(share)

    def gathers_again(self, layout: Layout) -> int:
        """A pipeline's backward passes gather once; of the forward passes between them each gives it back."""
        return 1 if layout.reshard_after_forward and layout.pp > 1 else super().gathers_again(layout)

    def scatters(self, train: TrainSpec, layout: Layout) -> int:
        """A pipeline's after the last micro-batch."""
        return 1 if layout.pp > 1 else super().scatters(train, layout)

    def gradient_copies(self, share: Share) -> float:
        """FSDP2's copy is in fp32, in which gradients are reduced."""
        return super().gradient_copies(share) * (1.0 if share.in_fp32 else 2.0)

    def casts(self, share: Share) -> float:
        """Whole: autocast's cache keeps each weight's copy."""
        if share.adapters or share.in_fp32 or self.in_units(share):
            return 0.0
        return 2.0 * share.local


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A run that a layout is wanted for: what rules look at, and what forecasts start from."""

    model: ModelSpec
    train: TrainSpec
    links: Links
    engine: Engine
    has_gpu: bool = True
    compute_capability: tuple[int, int] | None = None
    host_memory_bytes: float | None = None  # of one node; None unknown

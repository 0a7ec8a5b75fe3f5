"""Training stacks: supported features (one TOML file each), terms of the forecast, and engines by name."""

from __future__ import annotations

from dataclasses import replace

from contracts.layout import ROPE_TYPES, TRAINED, Layout
from contracts.tables import read_table
from planner.forecast.engine import IN_HALF, Engine, Exchanges, Fsdp, Share, StateBytes, make_engine
from planner.forecast.specs import ModelSpec, PlanError, TrainSpec, weights

LOSS_TOKENS = 1024.0  # whose logits exist at a time (finetune/model.py, LOSS_CHUNK)


class Topoflight(Fsdp):
    """The built-in fine-tune job: fully_shard, torch's tensor-parallel plans and torch.distributed.pipelining."""

    def splits_sequence(self, train: TrainSpec) -> bool:
        """Whether tensor-parallel ranks split the sequence; adapters and the mask of eager attention need it whole."""
        return train.method == "full" and train.attention != "eager"

    def refuses(self, model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
        """Return why a layout is unsupported: models it cannot train, or parts its plans and schedules cannot split."""
        if model.family not in TRAINED:
            return f"topoflight trains {', '.join(TRAINED)} models, not {model.family}"
        if model.towers:
            return f"topoflight trains language models, not models with a {' and '.join(model.towers)} tower"
        if train.optimizer != "adamw":
            return f"topoflight trains with adamw, not {train.optimizer}"
        if unknown := set(model.rope_types) - set(ROPE_TYPES):
            return f"topoflight supports rope_type {', '.join(ROPE_TYPES)}, not {min(unknown)!r}"
        if layout.pp > 1 and model.tied_embeddings:
            return "topoflight does not support PP with tied embeddings: two stages would each train a copy"
        if layout.sequence_parallel and not self.splits_sequence(train):
            return "topoflight does not support sequence parallelism with adapters or with eager attention"
        if layout.compile:
            return "topoflight does not support torch.compile"
        if train.attention != "eager" and model.sliding_window and model.sliding_window < train.sequence_length:
            return f"topoflight supports a sliding window ({model.sliding_window} tokens) only with eager attention"
        return "topoflight does not support fp16" if layout.precision == "fp16" else None

    def stored_tensors(self, share: Share) -> tuple[float, float]:
        """Count what transformers' Llama layer saves in bf16: two fp32 copies for the norms, and their outputs.

        A trained norm also saves the value that its weight multiplies. Under autocast the hidden states are fp32, and
        each product of a full model casts its own input. Counted with torch.autograd.graph.saved_tensors_hooks.
        """
        hidden, inner = super().stored_tensors(share)
        if share.in_fp32 or not share.model.gated_mlp:
            return hidden, inner
        return hidden - 3.0 if share.adapters else 8.0 if self.in_units(share) else 13.0, inner

    def logits(self, share: Share) -> float:
        """The loss of a part of the tokens needs the same memory however few micro-batches have."""
        if share.in_fp32 or not share.layout.fused_cross_entropy:
            return super().logits(share)
        return min(share.tokens, LOSS_TOKENS) * share.model.vocab / share.layout.tp * self.logits_bytes

    def shards_gradients(self, share: Share) -> bool:
        """Whether gradients are sharded; gradients of adapters are not during accumulation."""
        return not (share.adapters and share.layout.gradient_accumulation > 1) and super().shards_gradients(share)

    def in_units(self, share: Share) -> bool:
        """Whether weights are gathered by unit; with TP and PP, replicas are FSDP units over one rank."""
        return share.sharded or share.layout.tp * share.layout.pp > 1

    def casts(self, share: Share) -> float:
        """With full recomputation casts exist only for one layer, or for the head: autocast has no cache in the job.

        Without recomputation the graph keeps each cast weight. Measured on a CPU: 2.0 bytes per weight.
        """
        cast_bytes = super().casts(share)
        if cast_bytes and share.layout.checkpointing == "full":
            return 2.0 * max(share.largest, weights(share.model).head / share.layout.tp)
        return cast_bytes

    def tensor_parallel_rounds(self, layout: Layout) -> float:
        """Each column-split projection reduces its own input gradient; recomputation repeats its traffic."""
        again = layout.checkpointing != "none"
        if layout.sequence_parallel:
            return 5.5 if again else 4.0
        return 9.0 if again else 7.0

    def tensor_parallel_ends(self, train: TrainSpec, layout: Layout, *, last: bool) -> float:
        """The head gets the full sequence, so its gradient needs an all-reduce.

        With a frozen embedding, the three projections at the start of the first layer send no input gradient.
        """
        rounds = super().tensor_parallel_ends(train, layout, last=last)
        if layout.sequence_parallel and (last or layout.pp == 1):
            rounds += 0.5
        return rounds - (3.0 if train.method != "full" and not (last and layout.pp > 1) else 0.0)

    def count_exchanges(self, train: TrainSpec, layout: Layout) -> Exchanges:
        """Weights stay gathered until the end of the step; adapters are reduced after the last micro-batch."""
        exchanges = super().count_exchanges(train, layout)
        gathers = exchanges.gathers if layout.reshard_after_forward else 1
        return exchanges._replace(gathers=gathers, scatters=exchanges.scatters if train.method == "full" else 1)


def is_sharded(layout: Layout) -> bool:
    """Whether FSDP shards the weights under accelerate."""
    return layout.dp_shard > 1 and layout.sharding == "zero3"


def is_wrapped(layout: Layout) -> bool:
    """Whether accelerate wraps the model: FSDP, tensor or context parallelism."""
    return is_sharded(layout) or layout.tp > 1 or layout.cp > 1


def _is_loaded_in_half(train: TrainSpec, layout: Layout) -> bool:
    """Whether trained weights, gradients and AdamW's states use the two-byte type in which the model was loaded.

    FSDP converts trainable weights to fp32 (accelerate's fsdp2_prepare_model); nothing else changes their type. For
    fp16 the model must be loaded in fp32, because torch's GradScaler rejects fp16 gradients.
    """
    full = train.method == "full" and train.dtype != "float32"
    return full and layout.precision == "bf16" and not is_wrapped(layout)


TILE = (4096.0, 32768.0)  # tokens and vocabulary entries whose logits exist at a time (TRL 1.16, kernels and utils.py)


class Trl(Fsdp):
    """accelerate's FSDP with fsdp_cpu_ram_efficient_loading: one rank reads the model and sends it to the others.

    Without FSDP, weights keep the type in which they were loaded.
    """

    def refuses(self, model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
        """Accelerate refuses CP with sliding windows (_attach_context_parallel_hooks), and TP or CP with plain DDP."""
        if layout.tp * layout.cp > 1 and layout.dp_replicate > 1 and layout.dp_shard == 1:
            return f"{self.name} supports TP and CP with FSDP or HSDP, not with DDP"
        if layout.cp > 1 and model.sliding_window:
            return f"{self.name} does not support CP for a model with a sliding window"
        return super().refuses(model, train, layout)

    def state_bytes(self, share: Share) -> StateBytes:
        """Return the bytes of the loaded type, or those of FSDP."""
        half = not share.in_fp32 and _is_loaded_in_half(share.train, share.layout)
        return Fsdp.state_bytes(replace(self, states=IN_HALF) if half else self, share)

    def loaded_bytes(self, share: Share) -> float:
        """Frozen weights keep the loaded type, even with FSDP."""
        return 4.0 if share.train.dtype == "float32" else super().loaded_bytes(share)

    def casts(self, share: Share) -> float:
        """Half-precision weights need no casts; of frozen weights of layers, autocast keeps those a product saved."""
        if share.adapters and share.train.dtype == "float32" and not (share.in_fp32 or self.in_units(share)):
            return 2.0 * (share.largest if share.layout.checkpointing == "full" else share.local - share.ends)
        return 0.0 if _is_loaded_in_half(share.train, share.layout) else super().casts(share)

    def stored_tensors(self, share: Share) -> tuple[float, float]:
        """Each adapter keeps an own half-precision input and its dropout's mask; each norm keeps an fp32 input.

        Counted with torch.autograd.graph.saved_tensors_hooks (TRL's lora_dropout is 0.05; masks as on a GPU, one byte).
        """
        targets, model = share.train.lora_targets, share.model
        if not share.adapters or share.in_fp32 or share.layout.compile or model.experts or not model.gated_mlp:
            return super().stored_tensors(share)
        down = "down_proj" in targets
        return 4.0 + 1.5 * (len(targets) - down), 3.0 + 1.5 * down

    def logits(self, share: Share) -> float:
        """One tile of logits and its weights; fp32 gradients of the head and its input (kernels/chunked_logprob.py).

        On a CPU torch folds the tile, with 29 more bytes per logit (fp32 on a GPU is counted likewise).
        """
        if not self.chunks_loss:
            return super().logits(share)
        rows, columns, model = min(share.tokens, TILE[0]), min(float(share.model.vocab), TILE[1]), share.model
        tile = rows * (share.element * TILE[1] + (29.0 * columns if share.in_fp32 else 0.0))
        trained = 0.0 if share.adapters and not share.whole else 4.0 * model.vocab * model.hidden
        return tile + 2.0 * columns * model.hidden + trained + 8.0 * share.tokens * model.hidden

    def reduced_bytes(self, train: TrainSpec, layout: Layout) -> float:
        """DDP's gradients have the type of their weights."""
        return 2.0 if _is_loaded_in_half(train, layout) else super().reduced_bytes(train, layout)

    def host_load(self, file_bytes: float, layout: Layout, ranks: int) -> float:
        """The full model is in the memory of one rank; without FSDP, of every rank."""
        return file_bytes if is_sharded(layout) else file_bytes * ranks


# sub_group_size: ZeRO-3 updates this many weights at a time, each with an fp32 gradient (zero/config.py)
_SUB_GROUP = 1e9


class DeepSpeed(Engine):
    """In a step, ZeRO-1 and 2 cast all gradients of a rank to fp32, ZeRO-3 those of one group of weights."""

    def state_bytes(self, share: Share) -> StateBytes:
        """Add the optimizer's fp32 gradients, as many as exist at the same time."""
        stored = super().state_bytes(share)
        if share.zero < 3 or share.in_fp32 or share.train.optimizer != "adamw":
            return stored
        here = share.part(share.trained, share.routed_trained, sharded=True)
        return stored._replace(optimizer=12.0 + 4.0 * min(1.0, _SUB_GROUP / here))

    def host_load(self, file_bytes: float, layout: Layout, ranks: int) -> float:
        """Each rank reads the model; with zero.Init, one of its files at a time (transformers writes 5 GB each)."""
        return ranks * (min(file_bytes, 5e9) if layout.sharding == "zero3" else file_bytes)


class Torchtitan(Fsdp):
    """Its selective recomputation stores other outputs than plain PyTorch does, and its loss exists in parts."""

    def logits(self, share: Share) -> float:
        """Add the fp32 gradient of the head's input, which TP does not split (GradAccumulator, components/loss.py)."""
        return super().logits(share) + self.chunks_loss * 4.0 * share.tokens * share.model.hidden

    def selective_activations(self, share: Share, boundary: float) -> float:
        """Count the layer's input, outputs of q, v, attention, w1, w2; with experts, of all-to-alls and a saved w2."""
        model = share.model
        if model.kv_rank or not model.gated_mlp:
            return super().selective_activations(share, boundary)
        q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        routed = (2.0 * (share.layout.ep > 1) + (not self.repeats_experts)) * model.experts_per_token * model.hidden
        stored = 2.0 * q + kv + (routed if model.experts else model.ffn + model.hidden)
        return boundary + share.tokens * share.element * stored / share.layout.tp


_PLAIN = (
    Topoflight(name="topoflight"), Trl(name="trl"), DeepSpeed(name="deepspeed"), Torchtitan(name="torchtitan"),
    Engine(name="megatron"),
)  # fmt: skip
ENGINES: dict[str, Engine] = {
    each.name: make_engine(each, read_table(__file__, f"{each.name}.toml")) for each in _PLAIN
}
TOPOFLIGHT = ENGINES["topoflight"]
_OTHERS: str = read_table(__file__, "exports.toml")["other_trainers"]
ENGINES["automodel"] = make_engine(ENGINES["torchtitan"], read_table(__file__, "automodel.toml"))


def find_engine(name: str) -> Engine:
    """Return the engine for `TrainSpec.engine`; an unknown name raises an error with the known names."""
    if name not in ENGINES:
        raise PlanError(f"engine={name!r}: allowed are {', '.join(ENGINES)}. {_OTHERS}")
    return ENGINES[name]

"""The built-in fine-tune job: its traits and terms, and its YAML.

Surface: contracts.job_config (names in the YAML).
"""

from __future__ import annotations

import dataclasses

from contracts.layout import ROPE_TYPES, TRAINED, Layout
from contracts.tables import read_table
from planner.advice import ExportRequest, Formats, refuse, yaml_from_template
from planner.forecast.engine import Fsdp, Share, make_engine
from planner.forecast.models import hub_id
from planner.forecast.specs import ModelSpec, TrainSpec, attention_columns, mlp_width, weights
from planner.rules import engine_lacks

LOSS_TOKENS = 1024.0  # whose logits exist at a time (finetune/model.py, LOSS_CHUNK)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topoflight(Fsdp):
    """The built-in fine-tune job: fully_shard, torch's tensor-parallel plans and torch.distributed.pipelining."""

    def splits_sequence(self, train: TrainSpec) -> bool:
        """Whether tensor-parallel ranks split the sequence; adapters and the mask of eager attention need it whole."""
        return train.method == "full" and train.attention != "eager"

    def refuses(self, model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
        """Return why a layout is unsupported: models it cannot train, or parts its plans and schedules cannot split."""
        if model.family not in TRAINED:
            return f"topoflight trains {', '.join(TRAINED)} models, not {model.family}"
        if unknown := set(model.rope_types) - set(ROPE_TYPES):
            return f"topoflight supports rope_type {', '.join(ROPE_TYPES)}, not {min(unknown)!r}"
        if layout.pp > 1 and model.tied_embeddings:
            return "topoflight does not support PP with tied embeddings: two stages would each train a copy"
        if layout.sequence_parallel and not self.splits_sequence(train):
            return "topoflight does not support sequence parallelism with adapters or with eager attention"
        return "topoflight does not support fp16" if layout.precision == "fp16" else None

    def stored_tensors(self, share: Share) -> tuple[float, float]:
        """Count what transformers' Llama layer saves in bf16: two fp32 copies for the norms, and their outputs.

        A trained norm also saves the value that its weight multiplies. Under autocast the hidden states are fp32, and
        each product of a full model casts its own input. Counted with torch.autograd.graph.saved_tensors_hooks.
        """
        hidden, inner = super().stored_tensors(share)
        if share.in_fp32 or share.layout.compile or not share.model.gated_mlp:
            return hidden, inner
        if share.adapters:
            return hidden - 3.0, inner
        return (8.0 if self.in_units(share) else 13.0), inner

    def logits(self, share: Share) -> float:
        """The loss of a part of the tokens needs the same memory however few micro-batches have."""
        if share.in_fp32 or not share.layout.fused_cross_entropy:
            return super().logits(share)
        return min(share.tokens, LOSS_TOKENS) * share.model.vocab / share.layout.tp * self.logits_bytes

    def shards_gradients(self, share: Share) -> bool:
        """Whether gradients are sharded; gradients of adapters are not during accumulation."""
        accumulates = share.adapters and share.layout.gradient_accumulation > 1
        return not accumulates and super().shards_gradients(share)

    def in_units(self, share: Share) -> bool:
        """Whether weights are gathered by unit; with TP and PP, replicas are FSDP units over one rank."""
        return share.sharded or share.layout.tp * share.layout.pp > 1

    def casts(self, share: Share) -> float:
        """Full recomputation disables autocast's cache, so casts exist only for one layer, or for the head.

        Measured on a CPU: 2.0 bytes per weight less than with the cache.
        """
        whole = super().casts(share)
        if whole and share.layout.checkpointing == "full":
            return 2.0 * max(share.largest, weights(share.model).head / share.layout.tp)
        return whole

    def selective_activations(self, share: Share, boundary: float) -> float:
        """Count the layer's input, and the output of every product and of attention (finetune/parallel.py, KEPT)."""
        model = share.model
        products = attention_columns(model) + model.hidden + (2.0 if model.gated_mlp else 1.0) * mlp_width(model)
        stored = products + model.hidden
        return boundary + share.tokens * share.element * stored / share.layout.tp

    def recomputed(self, checkpointing: str) -> tuple[float, float, float]:
        """With selective checkpointing, recompute only what is between the kept products."""
        return (0.0, 0.0, 1.0) if checkpointing == "selective" else super().recomputed(checkpointing)

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

    def gathers(self, layout: Layout) -> int:
        """Weights that stay gathered remain so until the end of the step."""
        return layout.gradient_accumulation if layout.reshard_after_forward else 1

    def scatters(self, train: TrainSpec, layout: Layout) -> int:
        """Reduce a full model after each micro-batch; adapters, and pipelines, after the last one."""
        return 1 if train.method != "full" else super().scatters(train, layout)


ENGINE = make_engine(Topoflight(name="topoflight"), read_table(__file__, "topoflight.toml"))

_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Layout)}
# Have other names in the job's YAML, or follow from the number of started ranks.
_NAMED = ("micro_batch", "gradient_accumulation", "fused_cross_entropy", "compile", "world_size")


def finetune_yaml(request: ExportRequest) -> str:
    """Export the job's YAML; the user adds data set and output folder."""
    layout, train, name = request.layout, request.train, request.model.name
    broken = engine_lacks(ENGINE, request.model, train, layout, has_gpu=request.on_gpu)
    refuse("the fine-tune job", {broken: True} if broken else {})
    members = {n: v for n, v in dataclasses.asdict(layout).items() if n not in _NAMED and v != _DEFAULTS[n]}
    members |= {"precision": layout.precision, "sharding": layout.sharding, "dp_shard": layout.dp_shard}
    hub = "random:tiny-llama" if name == "tiny-llama" else hub_id(name) or name
    return yaml_from_template("finetune.yaml", request, model_name=hub, members=members)


FORMATS: Formats = {"finetune": finetune_yaml}

"""The fine-tune job that ships: its traits and terms, its YAML, the torchrun line, and a pod's environment.

Surface: contracts.job_config (names of the YAML), torchrun's options, Kubernetes' EnvVar and ResourceRequirements.
"""

from __future__ import annotations

import dataclasses
import shlex

from contracts.layout import ROPE_TYPES, TRAINED, WHOLE_ROPE, Layout, most_ranks
from planner.advice import ExportRequest, Formats, refuse, yaml_from_template
from planner.forecast.engine import Fsdp, Share
from planner.forecast.models import hub_id
from planner.forecast.specs import ModelSpec, TrainSpec, attention_columns, mlp_width, weights
from planner.rules import engine_lacks, method_lacks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topoflight(Fsdp):
    """The fine-tune job that ships: fully_shard, torch's tensor-parallel plans and torch.distributed.pipelining."""

    def splits_sequence(self, train: TrainSpec) -> bool:
        """Its adapters need whole sequences, and so does the mask of eager attention."""
        return train.method == "full" and train.attention != "eager"

    def refuses(self, model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
        """Models that it does not train, and what its plans and schedules do not split."""
        if model.family not in TRAINED:
            return f"topoflight trains {', '.join(TRAINED)} models, not {model.family}"
        if unknown := set(model.rope_types) - set(ROPE_TYPES):
            return f"topoflight supports rope_type {', '.join(ROPE_TYPES)}, not {min(unknown)!r}"
        if model.experts and (train.method == "qlora" or layout.tp > 1):
            what = "4-bit weights of" if train.method == "qlora" else "TP over"
            return f"topoflight does not support {what} experts, which are stacked in one tensor"
        if model.experts and len({"gate_proj", "up_proj"} & set(train.lora_targets)) == 1 and train.method != "full":
            return "topoflight adapts gate_proj and up_proj of experts only together"
        if layout.cp > 1 and (why := self._refuses_context(model, train, layout)):
            return why
        if layout.pp > 1 and model.tied_embeddings:
            return "topoflight does not support PP with tied embeddings: two stages would each train a copy"
        if layout.sequence_parallel and not self.splits_sequence(train):
            return "topoflight does not support sequence parallelism with adapters or with eager attention"
        return "topoflight does not support fp16" if layout.precision == "fp16" else None

    def _refuses_context(self, model: ModelSpec, train: TrainSpec, layout: Layout) -> str | None:
        """Why the sequence cannot be split, whose ranks split the heads for attention."""
        if layout.tp > 1 or layout.pp > 1:
            return "topoflight combines CP with data parallelism only, not with TP or PP"
        if model.heads % layout.cp or model.kv_heads % layout.cp:
            most = most_ranks(layout.cp, model.heads, model.kv_heads)
            return (
                f"{model.heads} heads and {model.kv_heads} key/value heads do not divide by CP={layout.cp}; "
                f"CP={most} is the nearest that runs"
            )
        if whole := set(model.rope_types) & set(WHOLE_ROPE):
            return (
                f"topoflight does not support CP with rope_type={min(whole)!r}, whose angles depend on the whole length"
            )
        if train.attention != "sdpa" or layout.compile:
            return "topoflight supports CP only with attn_implementation sdpa and without torch.compile"
        return None

    def layer_activations(self, share: Share) -> float:
        """Under CP the output projection's input is another tensor than attention's result."""
        more = share.model.heads * share.model.head_dim if share.layout.cp > 1 else 0
        return super().layer_activations(share) + share.tokens * share.element * more

    def shards_gradients(self, share: Share) -> bool:
        """Not an adapter's when it accumulates."""
        accumulates = share.adapters and share.layout.gradient_accumulation > 1
        return not accumulates and super().shards_gradients(share)

    def in_units(self, share: Share) -> bool:
        """Beside TP and PP it replicates by FSDP units over one rank."""
        return share.sharded or share.layout.tp * share.layout.pp > 1

    def casts(self, share: Share) -> float:
        """It recomputes without autocast's cache, and nothing else keeps them: what one layer, or the head, casts.

        Measured on a CPU: 2.0 bytes per weight less than with the cache.
        """
        whole = super().casts(share)
        if whole and share.layout.checkpointing == "full":
            return 2.0 * max(share.largest, weights(share.model).head / share.layout.tp)
        return whole

    def selective_activations(self, share: Share, boundary: float) -> float:
        """The layer's input and the result of every product and of attention (finetune/parallel.py, KEPT)."""
        model = share.model
        products = attention_columns(model) + model.hidden + (2.0 if model.gated_mlp else 1.0) * mlp_width(model)
        stored = products + model.hidden
        if model.experts:  # the results of a token's experts, before they are summed
            stored += (model.experts_per_token - 1.0) * model.hidden * (1.0 - model.dense_layers / model.layers)
        return boundary + share.tokens * share.element * stored / share.layout.tp

    def recomputed(self, checkpointing: str) -> tuple[float, float, float]:
        """Selectively: what lies between the products it keeps."""
        return (0.0, 0.0, 1.0) if checkpointing == "selective" else super().recomputed(checkpointing)

    def tensor_parallel_rounds(self, layout: Layout) -> float:
        """Each column-split projection sends its input's gradient by itself; what is made again is sent again."""
        again = layout.checkpointing != "none"
        if layout.sequence_parallel:
            return 5.5 if again else 4.0
        return 9.0 if again else 7.0

    def tensor_parallel_ends(self, train: TrainSpec, layout: Layout, *, last: bool) -> float:
        """The head takes the whole sequence, and gives its gradient back by an all-reduce.

        Beside a frozen embedding the first layer's three projections of it send no gradient.
        """
        rounds = super().tensor_parallel_ends(train, layout, last=last)
        if layout.sequence_parallel and (last or layout.pp == 1):
            rounds += 0.5
        return rounds - (3.0 if train.method != "full" and not (last and layout.pp > 1) else 0.0)

    def gathered(self, share: Share) -> float:
        """Beside them, in a layer that is made again, its experts with their adapters added."""
        made = self.adapts_experts(share.train, share.model) and share.layout.checkpointing == "selective"
        again = share.element * weights(share.model).routed_per_layer if made else 0.0
        return super().gathered(share) + again

    def gathers(self, layout: Layout) -> int:
        """What it keeps gathered, it keeps until the step is over."""
        return layout.gradient_accumulation if layout.reshard_after_forward else 1

    def scatters(self, train: TrainSpec, layout: Layout) -> int:
        """A whole model's after each micro-batch, adapters' and a pipeline's after the last."""
        return 1 if train.method != "full" else super().scatters(train, layout)


ENGINE = Topoflight(
    name="topoflight",
    splits_documents=True,
    can=frozenset({"ddp", "zero2", "zero3", "hsdp", "tp", "sp", "pp", "cp"}),
    offloads=("all",),
    ends_apart=True,
    merges_expert_adapters=True,
    splits_heads=True,
    # torch's own loss, as a TorchDispatchMode counts its bytes; Liger's kernel, where it is installed, moves fewer
    loss_bytes=(62.0, 44.0),
    loss_again=True,
)

_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Layout)}
# Written under other names in the YAML of the job, or given by the number of ranks that are started.
_NAMED = ("micro_batch", "gradient_accumulation", "fused_cross_entropy", "compile", "world_size")


def finetune_yaml(request: ExportRequest) -> str:
    """The job's YAML; data set and output folder are the user's to set."""
    layout, train, name = request.layout, request.train, request.model.name
    broken = (
        engine_lacks(ENGINE, request.model, train, layout, has_gpu=request.on_gpu),
        method_lacks(ENGINE, train, layout, has_gpu=request.on_gpu),
    )
    refuse("the fine-tune job", {reason: True for reason in broken if reason})
    members = {n: v for n, v in dataclasses.asdict(layout).items() if n not in _NAMED and v != _DEFAULTS[n]}
    members |= {"precision": layout.precision, "sharding": layout.sharding, "dp_shard": layout.dp_shard}
    hub = "random:tiny-llama" if name == "tiny-llama" else hub_id(name) or name
    return yaml_from_template("finetune.yaml", request, model_name=hub, members=members)


def torchrun_line(request: ExportRequest) -> str:
    """The command; with several nodes run it on each, MASTER_ADDR naming the first."""
    words = ["torchrun", f"--nproc-per-node={request.ranks_per_node}", f"--nnodes={request.nodes}"]
    if request.nodes > 1:
        tail = '--rdzv-backend=c10d --rdzv-endpoint="${MASTER_ADDR}:${MASTER_PORT:-29500}"'
    else:
        tail = "--standalone"
    return f"{shlex.join(words)} {tail} -m finetune.train --config finetune.yaml\n"


def pod_env(request: ExportRequest) -> str:
    """The container's part of a pod spec."""
    limits = {"nvidia.com/gpu": str(request.ranks_per_node)} if request.on_gpu else {}
    resources = (need.value.rpartition(": ") for need in request.needs if need.name == "resource")
    limits |= {name: count for name, _, count in resources if name and "*" not in name}  # the user replaces a wildcard
    return yaml_from_template("pod.yaml", request, limits=limits)


FORMATS: Formats = {
    "finetune": ("the YAML of the fine-tune job that ships", finetune_yaml),
    "torchrun": ("the torchrun line", torchrun_line),
    "pod": ("env and resources of a pod's container, and its volume, YAML", pod_env),
}

"""torchtitan: its traits, and a job configuration in TOML.

Surface: torchtitan's ParallelDims and config (sections training, parallelism, activation_checkpoint, compile).
"""

from __future__ import annotations

from contracts.layout import Layout
from contracts.tables import read_table
from planner.advice import ExportRequest, Formats, from_template, refuse
from planner.forecast.engine import Fsdp, Share, make_engine


class Torchtitan(Fsdp):
    """Selective checkpointing keeps every second product of a layer, and the attention output.

    Only the compiler's async TP hides tensor-parallel traffic (benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md).
    """

    def hides_tensor_parallel(self, layout: Layout) -> bool:
        """Whether the layout is compiled; the export then enables async TP."""
        return layout.compile and super().hides_tensor_parallel(layout)

    def selective_activations(self, share: Share, boundary: float) -> float:
        """Count the layer's input, and the outputs of the first, third, fifth and seventh of q, k, v, o, w1, w3, w2."""
        model = share.model
        if model.experts or model.kv_rank or not model.gated_mlp:
            return super().selective_activations(share, boundary)
        q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        stored = 2.0 * q + kv + model.ffn + model.hidden
        return boundary + share.tokens * share.element * stored / share.layout.tp


ENGINE = make_engine(Torchtitan(name="torchtitan"), read_table(__file__, "torchtitan.toml"))

_MODELS = {"llama": "llama3", "qwen3": "qwen3"}


def torchtitan_toml(request: ExportRequest) -> str:
    """Export the configuration; the user adds tokenizer, data set and checkpoints."""
    layout, train, model = request.layout, request.train, request.model
    refuse("torchtitan", {
        f"{layout.sharding}: its FSDP2 shards weights, gradients and optimizer":
            layout.sharding in ("zero1", "zero2") and layout.dp_shard > 1,
        f"{train.method}: its LoRA is a converter in code, not in the TOML": train.method != "full",
        "offload=optimizer: it offloads weights, gradients and optimizer together": layout.offload == "optimizer",
        "TP without sequence parallelism: its plans always shard the sequence":
            layout.tp > 1 and not layout.sequence_parallel,
        f"{model.family} models: the TOML names {', '.join(sorted(_MODELS.values()))} only":
            model.family not in _MODELS,
        f"stages of {layout.stage_layers}: it makes first and last stage lighter, no other":
            len(set(layout.stage_layers)) > 2,
    })  # fmt: skip
    return from_template("torchtitan.toml", request, names=_MODELS)


FORMATS: Formats = {"torchtitan": torchtitan_toml}

"""Megatron-LM: its traits, and the arguments of pretrain_gpt.py.

Surface: megatron/training/arguments.py.
"""

from __future__ import annotations

from contracts.tables import read_table
from planner.advice import ExportRequest, Formats, from_template, refuse
from planner.forecast.engine import Engine, make_engine

ENGINE = make_engine(Engine(name="megatron"), read_table(__file__, "megatron.toml"))


def megatron_arguments(request: ExportRequest) -> str:
    """Export one argument per line; the user adds data, tokenizer, learning rate and checkpoints."""
    layout, train, model = request.layout, request.train, request.model
    own_biases = ("gpt2", "qwen2", "qwen2_moe")
    refuse("Megatron-LM", {
        f"{train.method}: it has no adapters (Megatron-Bridge has)": train.method != "full",
        f"{layout.family}: the distributed optimizer shards optimizer states only (zero1)":
            layout.sharding in ("zero2", "zero3") and layout.dp_shard > 1,
        "ZeRO-1 over part of the data-parallel ranks is not exported":
            layout.sharding == "zero1" and layout.dp_shard > 1 and layout.dp_replicate > 1,
        "offload=all: weights stay on the GPU": layout.offload == "all",
        "GPipe: its schedules are 1F1B and interleaved 1F1B": layout.schedule == "gpipe" and layout.pp > 1,
        "gemma2: alternating windows and soft-capped logits are not arguments of pretrain_gpt.py":
            model.family == "gemma2",
        "gemma: its MLPs are GeGLU, and what is exported is SwiGLU": model.family == "gemma",
        "biases of single matrices: Megatron has them in all, in none, or in queries, keys and values":
            model.mlp_bias or (model.attention_bias and model.family not in own_biases),
        "a gated shared expert, or experts in some of the layers only, are not exported":
            model.shared_expert_ffn or model.dense_layers,
    })  # fmt: skip
    return from_template("megatron.txt", request, engine=ENGINE)


FORMATS: Formats = {"megatron": megatron_arguments}

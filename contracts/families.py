"""The models that are known by `model_type` of their config.json, and which of them the fine-tune job trains."""

from __future__ import annotations

# The planner counts and forecasts all of these.
FAMILIES: tuple[str, ...] = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2", "phi3", "mixtral", "qwen2_moe",
    "qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "llama4", "glm4_moe",
)  # fmt: skip
# The job cuts and shards these: one stack of layers, rotary positions, q/k/v/o and gate/up/down projections.
MIXTURES: tuple[str, ...] = ("mixtral", "qwen3_moe")  # of them those with experts
ROPE_TYPES: tuple[str, ...] = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
WHOLE_ROPE: tuple[str, ...] = ("dynamic", "longrope")  # of these, whose angles follow from the sequence's length
TRAINED: tuple[str, ...] = ("llama", "mistral", "qwen2", "qwen3", *MIXTURES)

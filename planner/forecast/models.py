"""Models: from a Hugging Face config.json or a known name to a `ModelSpec`.

Surface: the configuration keys of transformers' Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma2, Gemma3, GPT-2, Phi3,
Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, DeepSeek-V3, gpt-oss, Llama4 and GLM4-MoE classes (text models only).
Shapes of the known names are those of the config.json files on the Hugging Face hub.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from contracts import bounded
from contracts.layout import FAMILIES
from contracts.plain import loads as plain
from planner.forecast.specs import ModelSpec

_MAX_CONFIG_BYTES = 1 << 20
# What config.json calls a family otherwise: the text part of a multi-modal model, and Kimi K2, which is a DeepSeek-V3.
_OTHER_TYPES = {"gemma3_text": "gemma3", "llama4_text": "llama4", "kimi_k2": "deepseek_v3"}
_MOE = {"mixtral", "qwen3_moe", "qwen2_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "llama4", "glm4_moe"}
_SHARED = {"deepseek_v3", "glm4_moe"}  # n_shared_experts of the routed ones' width
# What transformers' classes (5.23) take where config.json does not name a key; a key that is null is another matter.
_QWEN_DEFAULTS: dict[str, int | bool] = {
    "intermediate_size": 22016, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, int | bool]] = {
    "llama": {"intermediate_size": 11008},
    "mistral": {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": {**_QWEN_DEFAULTS, "head_dim": 128},
    "qwen2_moe": {
        "intermediate_size": 5632,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3_moe": {
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "sliding_window": 4096,
    },
    "qwen3_next": {
        "intermediate_size": 5632,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 4,
    },
    "deepseek_v3": {
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "gpt_oss": {
        "intermediate_size": 2880,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
    },
    "llama4": {
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
    },
    "glm4_moe": {
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
    },
    "gemma3": {
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "vocab_size": 262208,
        "intermediate_size": 9216,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "phi3": {"intermediate_size": 8192},
    "gpt2": {"n_positions": 1024},
    "gemma": {"intermediate_size": 24576, "num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"intermediate_size": 9216, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
}
# Here, and not above: the key has two names.
_EXPERTS = {
    "mixtral": 8, "qwen2_moe": 60, "qwen3_moe": 128, "qwen3_next": 512, "deepseek_v3": 256, "gpt_oss": 128,
    "llama4": 16, "glm4_moe": 128,
}  # fmt: skip
# Keys that other families have and this one's class passes over.
_PASSED_OVER: dict[str, dict[str, None]] = {
    "gpt2": {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None},
    "mixtral": {"moe_intermediate_size": None},
    "gpt_oss": {"moe_intermediate_size": None},
    "llama4": {"moe_intermediate_size": None},
}
_BIASED, _UNBIASED = {"gpt2", "qwen2"}, {"mistral", "mixtral", "phi3"}  # whatever config.json says
_SLIDING = {"mistral", "mixtral", "gemma2", "gemma3", "gpt_oss", "phi3"}  # by sliding_window alone; Llama never does
_SLIDING_WHERE_ASKED = {"qwen2", "qwen3", "qwen2_moe", "qwen3_moe"}  # by use_sliding_window, which is off by default


class ModelError(ValueError):
    """A model that cannot be understood; the message names the key and what is allowed."""


def _row(
    name: str, family: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any
) -> ModelSpec:
    more.setdefault("head_dim", hidden // heads)
    return ModelSpec(
        name=name, family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab,
        **more,
    )  # fmt: skip


_QWEN2: dict[str, Any] = {"attention_bias": True, "max_positions": 32768}
_QWEN3: dict[str, Any] = {"head_dim": 128, "max_positions": 40960}
_GPT2: dict[str, Any] = {"tied_embeddings": True, "gated_mlp": False, "attention_bias": True, "max_positions": 1024}
_L31: dict[str, Any] = {"max_positions": 131072}
_MLA: dict[str, Any] = {
    "head_dim": 192, "rope_dim": 64, "value_dim": 128, "q_rank": 1536, "kv_rank": 512, "max_positions": 163840,
}  # fmt: skip
_OSS: dict[str, Any] = {
    "head_dim": 64, "experts_per_token": 4, "expert_ffn": 2880, "attention_bias": True, "sliding_window": 128,
    "max_positions": 131072,
}  # fmt: skip
_GEMMA3: dict[str, Any] = {"tied_embeddings": True, "sliding_window": 1024, "max_positions": 131072}
_LLAMA4: dict[str, Any] = {
    "experts_per_token": 1, "expert_ffn": 8192, "shared_expert_ffn": 8192, "sliding_window": 8192,
}  # fmt: skip
_GLM: dict[str, Any] = {
    "head_dim": 128, "experts_per_token": 8, "attention_bias": True, "max_positions": 131072,
}  # fmt: skip

KNOWN: tuple[ModelSpec, ...] = (
    # A Llama of 8 M weights that trains on a CPU in seconds: the shape the embedded fine-tune makes by itself.
    _row("tiny-llama", "llama", 4, 256, 8, 4, 688, 259, max_positions=2048),
    _row("Llama-2-7B", "llama", 32, 4096, 32, 32, 11008, 32000, max_positions=4096),
    _row("Llama-2-13B", "llama", 40, 5120, 40, 40, 13824, 32000, max_positions=4096),
    _row("Llama-2-70B", "llama", 80, 8192, 64, 8, 28672, 32000, max_positions=4096),
    _row("Llama-3-8B", "llama", 32, 4096, 32, 8, 14336, 128256, max_positions=8192),
    _row("Llama-3-70B", "llama", 80, 8192, 64, 8, 28672, 128256, max_positions=8192),
    _row("Llama-3.1-8B", "llama", 32, 4096, 32, 8, 14336, 128256, **_L31),
    _row("Llama-3.1-70B", "llama", 80, 8192, 64, 8, 28672, 128256, **_L31),
    _row("Llama-3.3-70B", "llama", 80, 8192, 64, 8, 28672, 128256, **_L31),
    _row("Llama-3.1-405B", "llama", 126, 16384, 128, 8, 53248, 128256, **_L31),
    _row("Llama-3.2-1B", "llama", 16, 2048, 32, 8, 8192, 128256, tied_embeddings=True, **_L31),
    _row("Llama-3.2-3B", "llama", 28, 3072, 24, 8, 8192, 128256, tied_embeddings=True, **_L31),
    _row("Mistral-7B", "mistral", 32, 4096, 32, 8, 14336, 32768, max_positions=32768),
    _row("Mistral-Nemo-12B", "mistral", 40, 5120, 32, 8, 14336, 131072, head_dim=128, max_positions=131072),
    _row("Qwen2.5-0.5B", "qwen2", 24, 896, 14, 2, 4864, 151936, tied_embeddings=True, **_QWEN2),
    _row("Qwen2.5-1.5B", "qwen2", 28, 1536, 12, 2, 8960, 151936, tied_embeddings=True, **_QWEN2),
    _row("Qwen2.5-3B", "qwen2", 36, 2048, 16, 2, 11008, 151936, tied_embeddings=True, **_QWEN2),
    _row("Qwen2.5-7B", "qwen2", 28, 3584, 28, 4, 18944, 152064, **_QWEN2),
    _row("Qwen2.5-14B", "qwen2", 48, 5120, 40, 8, 13824, 152064, **_QWEN2),
    _row("Qwen2.5-32B", "qwen2", 64, 5120, 40, 8, 27648, 152064, **_QWEN2),
    _row("Qwen2.5-72B", "qwen2", 80, 8192, 64, 8, 29568, 152064, **_QWEN2),
    _row("Qwen3-0.6B", "qwen3", 28, 1024, 16, 8, 3072, 151936, tied_embeddings=True, **_QWEN3),
    _row("Qwen3-1.7B", "qwen3", 28, 2048, 16, 8, 6144, 151936, tied_embeddings=True, **_QWEN3),
    _row("Qwen3-4B", "qwen3", 36, 2560, 32, 8, 9728, 151936, tied_embeddings=True, **_QWEN3),
    _row("Qwen3-8B", "qwen3", 36, 4096, 32, 8, 12288, 151936, **_QWEN3),
    _row("Qwen3-14B", "qwen3", 40, 5120, 40, 8, 17408, 151936, **_QWEN3),
    _row("Qwen3-32B", "qwen3", 64, 5120, 64, 8, 25600, 151936, **_QWEN3),
    _row("Qwen3-30B-A3B", "qwen3_moe", 48, 2048, 32, 4, 6144, 151936, experts=128, experts_per_token=8,
         expert_ffn=768, **_QWEN3),
    _row("Gemma-2-2B", "gemma2", 26, 2304, 8, 4, 9216, 256000, head_dim=256, tied_embeddings=True,
         sliding_window=4096, max_positions=8192),
    _row("Gemma-2-9B", "gemma2", 42, 3584, 16, 8, 14336, 256000, head_dim=256, tied_embeddings=True,
         sliding_window=4096, max_positions=8192),
    _row("Gemma-2-27B", "gemma2", 46, 4608, 32, 16, 36864, 256000, head_dim=128, tied_embeddings=True,
         sliding_window=4096, max_positions=8192),
    _row("GPT-2", "gpt2", 12, 768, 12, 12, 3072, 50257, **_GPT2),
    _row("GPT-2-medium", "gpt2", 24, 1024, 16, 16, 4096, 50257, **_GPT2),
    _row("GPT-2-large", "gpt2", 36, 1280, 20, 20, 5120, 50257, **_GPT2),
    _row("GPT-2-xl", "gpt2", 48, 1600, 25, 25, 6400, 50257, **_GPT2),
    _row("Mixtral-8x7B", "mixtral", 32, 4096, 32, 8, 14336, 32000, experts=8, experts_per_token=2, expert_ffn=14336,
         max_positions=32768),
    _row("Mixtral-8x22B", "mixtral", 56, 6144, 48, 8, 16384, 32768, experts=8, experts_per_token=2, expert_ffn=16384,
         max_positions=65536),
    _row("Qwen3-235B-A22B", "qwen3_moe", 94, 4096, 64, 4, 12288, 151936, experts=128, experts_per_token=8,
         expert_ffn=1536, **_QWEN3),
    _row("Qwen3-Next-80B-A3B", "qwen3_next", 48, 2048, 16, 2, 5120, 151936, head_dim=256, experts=512,
         experts_per_token=10, expert_ffn=512, shared_expert_ffn=512, linear_layers=36, linear_heads=32,
         linear_key_width=2048, linear_value_width=4096, max_positions=262144),
    _row("DeepSeek-V3", "deepseek_v3", 61, 7168, 128, 128, 18432, 129280, experts=256, experts_per_token=8,
         expert_ffn=2048, shared_expert_ffn=2048, dense_layers=3, **_MLA),
    _row("Kimi-K2", "deepseek_v3", 61, 7168, 64, 64, 18432, 163840, experts=384, experts_per_token=8,
         expert_ffn=2048, shared_expert_ffn=2048, dense_layers=1, **_MLA),
    _row("gpt-oss-20b", "gpt_oss", 24, 2880, 64, 8, 2880, 201088, experts=32, sliding_layers=12, **_OSS),
    _row("gpt-oss-120b", "gpt_oss", 36, 2880, 64, 8, 2880, 201088, experts=128, sliding_layers=18, **_OSS),
    _row("Gemma-3-1B", "gemma3", 26, 1152, 4, 1, 6912, 262144, head_dim=256, tied_embeddings=True, sliding_window=512,
         sliding_layers=22, max_positions=32768),
    _row("Gemma-3-4B", "gemma3", 34, 2560, 8, 4, 10240, 262208, head_dim=256, sliding_layers=29, **_GEMMA3),
    _row("Gemma-3-12B", "gemma3", 48, 3840, 16, 8, 15360, 262208, head_dim=256, sliding_layers=40, **_GEMMA3),
    _row("Gemma-3-27B", "gemma3", 62, 5376, 32, 16, 21504, 262208, head_dim=128, sliding_layers=52, **_GEMMA3),
    _row("Llama-4-Scout-17B-16E", "llama4", 48, 5120, 40, 8, 16384, 202048, experts=16, sliding_layers=36,
         max_positions=10485760, **_LLAMA4),
    _row("Llama-4-Maverick-17B-128E", "llama4", 48, 5120, 40, 8, 16384, 202048, experts=128, dense_layers=24,
         sliding_layers=36, max_positions=1048576, **_LLAMA4),
    _row("GLM-4.5", "glm4_moe", 92, 5120, 96, 8, 12288, 151552, experts=160, expert_ffn=1536, shared_expert_ffn=1536,
         dense_layers=3, qk_norm=True, **_GLM),
    _row("GLM-4.5-Air", "glm4_moe", 46, 4096, 96, 8, 10944, 151552, experts=128, expert_ffn=1408,
         shared_expert_ffn=1408, dense_layers=1, **_GLM),
)  # fmt: skip


# Where the weights of a known name are: the model pages of https://huggingface.co. The base model, where there is one.
_HUB_IDS = {
    "Llama-2-7B": "meta-llama/Llama-2-7b-hf", "Llama-2-13B": "meta-llama/Llama-2-13b-hf",
    "Llama-2-70B": "meta-llama/Llama-2-70b-hf", "Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "Llama-3-70B": "meta-llama/Meta-Llama-3-70B", "Llama-3.3-70B": "meta-llama/Llama-3.3-70B-Instruct",
    "Mistral-7B": "mistralai/Mistral-7B-v0.3", "Mistral-Nemo-12B": "mistralai/Mistral-Nemo-Base-2407",
    "Gemma-2-2B": "google/gemma-2-2b", "Gemma-2-9B": "google/gemma-2-9b", "Gemma-2-27B": "google/gemma-2-27b",
    "GPT-2": "openai-community/gpt2", "GPT-2-medium": "openai-community/gpt2-medium",
    "GPT-2-large": "openai-community/gpt2-large", "GPT-2-xl": "openai-community/gpt2-xl",
    "Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1", "Mixtral-8x22B": "mistralai/Mixtral-8x22B-v0.1",
    "DeepSeek-V3": "deepseek-ai/DeepSeek-V3-Base", "Kimi-K2": "moonshotai/Kimi-K2-Base",
    "gpt-oss-20b": "openai/gpt-oss-20b", "gpt-oss-120b": "openai/gpt-oss-120b",
    "Gemma-3-1B": "google/gemma-3-1b-pt", "Gemma-3-4B": "google/gemma-3-4b-pt",
    "Gemma-3-12B": "google/gemma-3-12b-pt", "Gemma-3-27B": "google/gemma-3-27b-pt",
    "Qwen3-Next-80B-A3B": "Qwen/Qwen3-Next-80B-A3B-Instruct",
}  # fmt: skip
_OWNERS = {
    "Llama-3.1-": "meta-llama", "Llama-3.2-": "meta-llama", "Llama-4-": "meta-llama", "Qwen2.5-": "Qwen",
    "Qwen3-": "Qwen", "GLM-4.5": "zai-org",
}  # fmt: skip
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def hub_id(name: str) -> str | None:
    """The Hugging Face id of a model's weights: of a known name, or the name itself where it is "owner/name"."""
    if _HUB_ID.fullmatch(name):
        return name
    owner = next((owner for prefix, owner in _OWNERS.items() if name.startswith(prefix) and name in known_names()), "")
    return _HUB_IDS.get(name) or (f"{owner}/{name}" if owner else None)


def _key(name: str) -> str:
    """Fold what people vary: the hub's owner, case, "Meta-", "-Instruct", "-hf", "-v0.3"."""
    text = name.strip().lower().rsplit("/", 1)[-1]
    text = re.sub(r"^meta-", "", text)
    text = re.sub(r"-(instruct|chat|it|hf|base|pt)\b", "", text)
    text = re.sub(r"-v0\.\d$", "", text)
    text = re.sub(r"^llama(\d)", r"llama-\1", text)
    return re.sub(r"[\s_-]+", "", text)


_BY_KEY = {_key(spec.name): spec for spec in KNOWN}
_BY_KEY.update({"tiny": _BY_KEY["tinyllama"], "mistralnemo": _BY_KEY["mistralnemo12b"]})
_BY_KEY.update(dict.fromkeys(("deepseekr1", "deepseekv30324", "deepseekv3.1"), _BY_KEY["deepseekv3"]))
_BY_KEY.update({"llama4scout": _BY_KEY["llama4scout17b16e"], "llama4maverick": _BY_KEY["llama4maverick17b128e"]})


def known_names() -> tuple[str, ...]:
    """Names that `model_named` answers for."""
    return tuple(spec.name for spec in KNOWN)


def model_named(name: str) -> ModelSpec:
    """The shape of a model by its usual name; one with the hub's owner keeps it, so that its very weights are used."""
    spec = _BY_KEY.get(_key(name))
    if spec is not None:
        return replace(spec, name=name.strip()) if _HUB_ID.fullmatch(name.strip()) else spec
    near = difflib.get_close_matches(_key(name), _BY_KEY, n=3, cutoff=0.5)
    hint = f"; nearest: {', '.join(_BY_KEY[k].name for k in near)}" if near else ""
    raise ModelError(f"model={name!r}: not a known name{hint}; give the path of its config.json instead")


def _whole(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None, *, least: int = 1) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(f"config.json: {name}={value!r}: must be a whole number of at least {least}")
        if value > 10**8:
            raise ModelError(f"config.json: {name}={value}: larger than any model has (100 million at most)")
        return value
    if default is None:
        raise ModelError(f"config.json: {names[0]} is missing" + (f" (also tried {', '.join(names[1:])})"
                                                                    if names[1:] else ""))  # fmt: skip
    return default


def model_from_config(config: Mapping[str, Any], name: str | None = None) -> ModelSpec:
    """The shape a Hugging Face config.json describes."""
    if not isinstance(config, Mapping):
        raise ModelError("config.json: must be a JSON object")
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and "hidden_size" not in config:  # multi-modal wrappers keep the language model here
        config = {"model_type": config.get("model_type", ""), **inner}
    kind = str(config.get("model_type", "")).lower()
    family = _OTHER_TYPES.get(kind, kind)
    if family not in FAMILIES:
        raise ModelError(f"config.json: model_type={kind!r}: known are {', '.join(sorted(FAMILIES))}")
    config = {**_DEFAULTS.get(family, {}), **config, **_PASSED_OVER.get(family, {})}
    layers = _whole(config, ("num_hidden_layers", "n_layer"))
    hidden, heads, head_dim, kv_heads = _heads(config, family)
    ffn = _whole(
        config, ("intermediate_size_mlp",) if family == "llama4" else ("intermediate_size", "n_inner"),
        default=4 * hidden if family == "gpt2" else None,
    )  # fmt: skip
    window, sliding = _window(config, family, layers)
    tied = config.get("tie_word_embeddings")
    return ModelSpec(
        name=name or str(config.get("_name_or_path") or kind),
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=_whole(config, ("vocab_size",)),
        tied_embeddings=bool(tied) if tied is not None else family in {"gpt2", "gemma", "gemma2", "gemma3"},
        gated_mlp=family != "gpt2",
        attention_bias=_attention_bias(config, family),
        qk_norm=family == "glm4_moe" and bool(config.get("use_qk_norm")),
        mlp_bias=family == "llama" and bool(config.get("mlp_bias")),
        max_positions=_positions(config),
        rope_types=_rope_types(config),
        sliding_window=window,
        sliding_layers=sliding,
        **_latent(config, family),
        **_linear(config, family, layers),
        **_mixture(config, family, layers, ffn),
    )


def _latent(config: Mapping[str, Any], family: str) -> dict[str, int]:
    """Multi-head latent attention's ranks and columns."""
    if family != "deepseek_v3":
        return {}
    return {
        "q_rank": _whole(config, ("q_lora_rank",), default=0),  # null: queries are full
        "kv_rank": _whole(config, ("kv_lora_rank",)),
        "rope_dim": _whole(config, ("qk_rope_head_dim",)),
        "value_dim": _whole(config, ("v_head_dim",)),
    }


def _linear(config: Mapping[str, Any], family: str, layers: int) -> dict[str, int]:
    """Qwen 3 Next's layers with linear attention: those that layer_types names, else all but every fourth."""
    if family != "qwen3_next":
        return {}
    if _whole(config, ("linear_conv_kernel_dim",), default=4) != 4:
        raise ModelError(f"config.json: linear_conv_kernel_dim={config['linear_conv_kernel_dim']!r}: must be 4")
    kinds = config.get("layer_types")
    linear = layers - layers // _whole(config, ("full_attention_interval",))
    if isinstance(kinds, list):
        linear = sum(kind == "linear_attention" for kind in kinds[:layers])
    heads = _whole(config, ("linear_num_value_heads",))
    keys = _whole(config, ("linear_num_key_heads",)) * _whole(config, ("linear_key_head_dim",))
    values = heads * _whole(config, ("linear_value_head_dim",))
    return {
        "linear_layers": linear, "linear_heads": heads, "linear_key_width": keys, "linear_value_width": values,
    }  # fmt: skip


def _mixture(config: Mapping[str, Any], family: str, layers: int, ffn: int) -> dict[str, int]:
    """Experts, where any layer has them."""
    dense = _dense_layers(config, family, layers) if family in _MOE else layers
    if dense >= layers:
        return {}
    width = _whole(config, ("moe_intermediate_size",), default=ffn)
    shared = 0
    if family in ("llama4", "gpt_oss"):
        width = _whole(config, ("intermediate_size",))
    if family in _SHARED:
        shared = width * _whole(config, ("n_shared_experts",), default=0)
    elif family in ("qwen2_moe", "qwen3_next"):
        shared = _whole(config, ("shared_expert_intermediate_size",))
    elif family == "llama4":
        shared = width
    return {
        "experts": _experts(config, family),
        "experts_per_token": _whole(config, ("num_experts_per_tok",), default=2),
        "expert_ffn": width,
        "shared_expert_ffn": shared,
        "dense_layers": dense,
    }


def _heads(config: Mapping[str, Any], family: str) -> tuple[int, int, int, int]:
    """Hidden size, attention heads, columns of a head, key and value heads."""
    hidden = _whole(config, ("hidden_size", "n_embd"))
    heads = _whole(config, ("num_attention_heads", "n_head"))
    if family == "deepseek_v3":  # each head has keys and values of its own, out of what all share
        return hidden, heads, _whole(config, ("qk_nope_head_dim",)) + _whole(config, ("qk_rope_head_dim",)), heads
    head_dim = _whole(config, ("head_dim",), default=max(1, hidden // heads))
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    kv_heads = _whole(config, ("num_key_value_heads",), default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return hidden, heads, head_dim, kv_heads


def _attention_bias(config: Mapping[str, Any], family: str) -> bool:
    if family in _BIASED or family in _UNBIASED:
        return family in _BIASED
    return bool(config.get("qkv_bias" if family == "qwen2_moe" else "attention_bias"))


def _positions(config: Mapping[str, Any]) -> int | None:
    names = ("max_position_embeddings", "n_positions")
    present = any(config.get(name) is not None for name in names)
    return _whole(config, names, default=1 << 20) if present else None


def _rope_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Of rope_parameters, before transformers 5 rope_scaling; a model with two kinds of layers has one for each."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(f"config.json: rope_parameters={parameters!r}: must be an object")
    each = [one for one in parameters.values() if isinstance(one, Mapping)] or [parameters]
    return tuple(sorted({str(one.get("rope_type") or one.get("type") or "default") for one in each}))


def _experts(config: Mapping[str, Any], family: str) -> int:
    names: tuple[str, ...] = ("num_local_experts", "num_experts")
    if family in _SHARED:
        names = ("n_routed_experts", "num_local_experts")
    elif family in ("qwen2_moe", "qwen3_next", "llama4"):
        names = ("num_local_experts",) if family == "llama4" else ("num_experts",)
    return _whole(config, names, default=_EXPERTS[family])


def _indices(config: Mapping[str, Any], name: str) -> list[int]:
    """A list of layers."""
    named = config.get(name) or []
    if not isinstance(named, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in named):
        raise ModelError(f"config.json: {name}={named!r:.80}: must be a list of whole numbers")
    return named


def _dense_layers(config: Mapping[str, Any], family: str, layers: int) -> int:
    """Layers of a mixture without experts: the first ones, or all but every n-th, or those that are named."""
    if family in _SHARED:
        return min(layers, _whole(config, ("first_k_dense_replace",), default=0, least=0))
    if family == "llama4":
        step = _whole(config, ("interleave_moe_layer_step",))
        named = _indices(config, "moe_layers") or range(step - 1, layers, step)
        return layers - len({i for i in named if 0 <= i < layers})
    if family not in ("qwen3_moe", "qwen2_moe", "qwen3_next"):
        return 0
    step = _whole(config, ("decoder_sparse_step",), default=1)
    only = _indices(config, "mlp_only_layers")
    return layers - layers // step + len({i for i in only if 0 <= i < layers and (i + 1) % step == 0})


def _window(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, int | None]:
    """The window, and how many layers slide where those are not all of them (or Gemma 2's half)."""
    if family == "llama4":
        return _chunked(config, layers)
    enabled = family in _SLIDING or (family in _SLIDING_WHERE_ASKED and bool(config.get("use_sliding_window")))
    window = config.get("sliding_window") if enabled else None
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        return None, None
    if family in ("mistral", "mixtral", "phi3", "qwen3_moe"):  # transformers passes over layer_types there
        return window, None
    kinds, first = config.get("layer_types"), config.get("max_window_layers")
    if isinstance(kinds, list):
        sliding = sum(kind == "sliding_attention" for kind in kinds[:layers])
    elif family == "gpt_oss":
        sliding = (layers + 1) // 2  # the first, and every other
    elif family == "gemma3":
        sliding = layers - layers // _whole(config, ("sliding_window_pattern",))
    elif family == "qwen2_moe" and isinstance(first, int):
        sliding = (min(first, layers) + 1) // 2  # of the first ones, every other
    elif family in _SLIDING_WHERE_ASKED and isinstance(first, int):
        sliding = max(0, layers - first)
    else:
        return window, None
    return (window, None if sliding == layers else sliding) if sliding else (None, None)


def _chunked(config: Mapping[str, Any], layers: int) -> tuple[int | None, int | None]:
    """Llama 4's chunks, and its layers that attend within one: those with rotary positions, three of four."""
    if config.get("attention_chunk_size") is None:
        return None, None
    chunk, kinds = _whole(config, ("attention_chunk_size",)), config.get("layer_types")
    if isinstance(kinds, list):
        chunked = sum(kind == "chunked_attention" for kind in kinds[:layers])
    elif _indices(config, "no_rope_layers"):
        chunked = sum(map(bool, _indices(config, "no_rope_layers")[:layers]))
    else:
        chunked = layers - layers // _whole(config, ("no_rope_layer_interval",))
    return (chunk, None if chunked == layers else chunked) if chunked else (None, None)


def load_model(name_or_path: str) -> ModelSpec:
    """A known name, a config.json, or a folder that holds one."""
    path = Path(name_or_path)
    return model_from_file(path) if bounded.exists(path) else model_named(name_or_path)


def model_from_file(path: Path) -> ModelSpec:
    """A config.json, or the folder that holds one. Raises ModelError that names the file."""
    path = path / "config.json" if bounded.is_folder(path) else path
    try:
        config = plain(bounded.read(path, _MAX_CONFIG_BYTES))
        return model_from_config(config, name=path.resolve().parent.name if path.name == "config.json" else path.stem)
    except bounded.TooLargeError as error:
        raise ModelError(f"{path}: {error}, which no config.json is") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None

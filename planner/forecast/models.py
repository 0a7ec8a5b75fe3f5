"""Models: from a Hugging Face config.json or a known name to a `ModelSpec`.

Surface: the configuration keys of transformers' Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma2, GPT-2, Phi3, Mixtral,
Qwen2-MoE and Qwen3-MoE classes.
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
from contracts.plain import loads as plain
from planner.forecast.specs import ModelSpec

_MAX_CONFIG_BYTES = 1 << 20
_FAMILIES = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma": "gemma",
    "gpt2": "gpt2", "mixtral": "mixtral", "qwen3_moe": "qwen3_moe", "qwen2_moe": "qwen2_moe", "phi3": "phi3",
}  # fmt: skip
_MOE = {"mixtral", "qwen3_moe", "qwen2_moe"}
_MIXED = {"qwen3_moe", "qwen2_moe"}  # some layers may be dense
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
        "num_experts": 60,
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
    "phi3": {"intermediate_size": 8192},
    "gpt2": {"n_positions": 1024},
    "gemma": {"intermediate_size": 24576, "num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"intermediate_size": 9216, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
}
# Keys that other families have and this one's class passes over.
_PASSED_OVER: dict[str, dict[str, None]] = {
    "gpt2": {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None},
    "mixtral": {"moe_intermediate_size": None},
}
_BIASED, _UNBIASED = {"gpt2", "qwen2"}, {"mistral", "mixtral", "phi3"}  # whatever config.json says
_SLIDING = {"mistral", "mixtral", "gemma2", "phi3"}  # by sliding_window alone; Llama never does
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
    "Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1",
}  # fmt: skip
_OWNERS = {"Llama-3.1-": "meta-llama", "Llama-3.2-": "meta-llama", "Qwen2.5-": "Qwen", "Qwen3-": "Qwen"}
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


def _whole(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {name}={value!r}: must be a whole number of at least 1")
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
    if isinstance(config.get("text_config"), Mapping) and "hidden_size" not in config:
        config = {**config["text_config"]}  # multi-modal wrappers keep the language model here
    kind = str(config.get("model_type", "")).lower()
    family = _FAMILIES.get(kind)
    if family is None:
        raise ModelError(f"config.json: model_type={kind!r}: known are {', '.join(sorted(_FAMILIES))}")
    config = {**_DEFAULTS.get(family, {}), **config, **_PASSED_OVER.get(family, {})}
    hidden, heads, head_dim, kv_heads = _heads(config)
    ffn = _whole(config, ("intermediate_size", "n_inner"), default=4 * hidden if family == "gpt2" else None)
    layers = _whole(config, ("num_hidden_layers", "n_layer"))
    dense = _dense_layers(config, layers) if family in _MIXED else 0
    experts = _experts(config, family) if family in _MOE and dense < layers else 0
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
        tied_embeddings=bool(tied) if tied is not None else family in {"gpt2", "gemma", "gemma2"},
        gated_mlp=family != "gpt2",
        attention_bias=_attention_bias(config, family),
        mlp_bias=family == "llama" and bool(config.get("mlp_bias")),
        experts=experts,
        experts_per_token=_whole(config, ("num_experts_per_tok",), default=2) if experts else 0,
        expert_ffn=_whole(config, ("moe_intermediate_size",), default=ffn) if experts else 0,
        shared_expert_ffn=_whole(config, ("shared_expert_intermediate_size",))
        if experts and family == "qwen2_moe"
        else 0,
        dense_layers=dense if experts else 0,
        max_positions=_positions(config),
        sliding_window=window,
        sliding_layers=sliding,
    )


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Hidden size, attention heads, columns of a head, key and value heads."""
    hidden = _whole(config, ("hidden_size", "n_embd"))
    heads = _whole(config, ("num_attention_heads", "n_head"))
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
    given = any(config.get(name) is not None for name in names)
    return _whole(config, names, default=1 << 20) if given else None


def _experts(config: Mapping[str, Any], family: str) -> int:
    names = ("num_experts",) if family == "qwen2_moe" else ("num_local_experts", "num_experts")
    return _whole(config, names, default=128 if family == "qwen3_moe" else 8)


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers without experts: all but every decoder_sparse_step-th, and those of mlp_only_layers."""
    step, named = _whole(config, ("decoder_sparse_step",), default=1), config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in named):
        raise ModelError(f"config.json: mlp_only_layers={named!r:.80}: must be a list of whole numbers")
    return layers - layers // step + len({i for i in named if 0 <= i < layers and (i + 1) % step == 0})


def _window(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, int | None]:
    """The window, and how many layers slide where those are not all of them (or Gemma 2's half)."""
    asked = family in _SLIDING or (family in _SLIDING_WHERE_ASKED and bool(config.get("use_sliding_window")))
    window = config.get("sliding_window") if asked else None
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        return None, None
    if family in ("mistral", "mixtral", "phi3", "qwen3_moe"):  # transformers passes over layer_types there
        return window, None
    kinds, first = config.get("layer_types"), config.get("max_window_layers")
    if isinstance(kinds, list):
        sliding = sum(kind == "sliding_attention" for kind in kinds[:layers])
    elif family == "qwen2_moe" and isinstance(first, int):
        sliding = (min(first, layers) + 1) // 2  # of the first ones, every other
    elif family in _SLIDING_WHERE_ASKED and isinstance(first, int):
        sliding = max(0, layers - first)
    else:
        return window, None
    return (window, None if sliding == layers else sliding) if sliding else (None, None)


def load_model(name_or_path: str) -> ModelSpec:
    """A known name, a config.json, or a folder that holds one."""
    path = Path(name_or_path)
    return model_from_file(path) if path.exists() else model_named(name_or_path)


def model_from_file(path: Path) -> ModelSpec:
    """A config.json, or the folder that holds one. Raises ModelError that names the file."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = plain(bounded.read(path, _MAX_CONFIG_BYTES))
        return model_from_config(config, name=path.resolve().parent.name if path.name == "config.json" else path.stem)
    except bounded.TooLargeError as error:
        raise ModelError(f"{path}: {error}, which no config.json is") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None

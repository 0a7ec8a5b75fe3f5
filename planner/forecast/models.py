"""Models: creates a `ModelSpec` from a Hugging Face config.json or a known name.

Surface: the configuration keys of transformers' Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma2, Gemma3, GPT-2, Phi3,
Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V3, gpt-oss, Llama4, GLM, GLM4, GLM4-MoE, Granite, MiniMax-M2, OLMo2,
OLMo3 and SmolLM3 classes (text parts only). models.toml has the shapes of known names and the defaults of the classes.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from contracts import bounded
from contracts.plain import loads as plain
from contracts.tables import read_table
from planner.forecast.specs import ModelSpec, PlanError

_MAX_CONFIG_BYTES = 1 << 20
_TABLES = read_table(__file__, "models.toml")
_FAMILIES: dict[str, list[str]] = _TABLES["families"]
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")  # keys that a class ignores: passed_over


class ModelError(PlanError):
    """The model is not supported; the message names the key and the allowed values."""


_SHAPES = {name: {k: v for k, v in row.items() if k not in ("hub", "also")} for name, row in _TABLES["known"].items()}
KNOWN: tuple[ModelSpec, ...] = tuple(
    ModelSpec(name=name, **{"head_dim": row["hidden"] // row["heads"], **row}) for name, row in _SHAPES.items()
)
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def hub_id(name: str) -> str | None:
    """Return the Hugging Face id of a model's weights: of a known name, or the name itself if it is "owner/name"."""
    if _HUB_ID.fullmatch(name):
        return name
    hub: str | None = _TABLES["known"].get(name, {}).get("hub")
    return hub


def _normalise_name(name: str) -> str:
    """Normalise variations of a name: the hub's owner, case, "Meta-", "-Instruct", "-hf"."""
    text = name.strip().lower().rsplit("/", 1)[-1]
    text = re.sub(r"^meta-", "", text)
    text = re.sub(r"-(instruct|chat|it|hf|base|pt)\b", "", text)
    text = re.sub(r"^llama(\d)", r"llama-\1", text)
    return re.sub(r"[\s_-]+", "", text)


_BY_KEY = {_normalise_name(spec.name): spec for spec in KNOWN}
_BY_KEY.update({other: spec for spec in KNOWN for other in _TABLES["known"][spec.name].get("also", ())})


def model_named(name: str) -> ModelSpec:
    """Return the shape of a model by name. A name with the hub's owner keeps it, to use exactly these weights."""
    key = _normalise_name(name)
    spec = _BY_KEY.get(key) or _BY_KEY.get(re.sub(r"v0\.\d$", "", key))
    if spec is not None:
        return replace(spec, name=name.strip()) if _HUB_ID.fullmatch(name.strip()) else spec
    near = dict.fromkeys(_BY_KEY[k].name for k in difflib.get_close_matches(key, _BY_KEY, n=3, cutoff=0.5))
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise ModelError(f"model={name!r}: not a known name{hint}. The command line also reads the path of its config.json")


def _whole(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None, *, minimum: int = 1) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(f"config.json: {name}={value!r}: must be a whole number of at least {minimum}")
        if value > 10**8:
            raise ModelError(f"config.json: {name}={value}: larger than any model has (100 million at most)")
        return value
    if default is None:
        raise ModelError(f"config.json: {names[0]} is missing" + (f" (also tried {', '.join(names[1:])})"
                                                                    if names[1:] else ""))  # fmt: skip
    return default


def read_model(config: Mapping[str, Any], name: str | None = None, *, any_type: bool = False) -> ModelSpec:
    """Return the shape that a Hugging Face config.json describes.

    `any_type`: for an unknown architecture, use the key names that most classes share. Biases and norms, which are some
    thousandths of the weights, may then be counted wrong.
    """
    if not isinstance(config, Mapping):
        raise ModelError("config.json: must be a JSON object")
    towers = tuple(name for name in ("vision", "audio") if config.get(f"{name}_config"))
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and "hidden_size" not in config:  # multi-modal models nest the language model here
        config = {**{name: config[name] for name in ("model_type", "tie_word_embeddings") if name in config}, **inner}
    kind = str(config.get("model_type", "")).lower()
    family = _TABLES["other_types"].get(kind, kind)
    if family in _FAMILIES["hybrids"]:
        raise ModelError(
            f"config.json: model_type={kind!r}: has state-space or linear-attention layers that are not forecast"
        )
    is_known = family in _TABLES["default"]
    if not is_known and any_type:
        config = _rename_sizes(config)
    elif not is_known:
        raise ModelError(f"config.json: model_type={kind!r}: known are {', '.join(sorted(_TABLES['default']))}")
    read = {name: value for name, value in config.items() if name not in _TABLES["passed_over"].get(family, ())}
    config = {**_TABLES["default"].get(family, {}), **read}
    layers = _whole(config, ("num_hidden_layers", "n_layer"))
    sizes = _read_heads(config, family)
    ffn = _whole(
        config, ("intermediate_size_mlp",) if family == "llama4" else ("intermediate_size", "n_inner"),
        default=4 * sizes["hidden"] if family == "gpt2" else None,
    )  # fmt: skip
    quantised = config.get("quantization_config")
    latent = _TABLES["latent"] if family == "deepseek_v3" else {}
    return ModelSpec(
        name=name or str(config.get("_name_or_path") or kind),
        family=family,
        layers=layers,
        ffn=ffn,
        vocab=_whole(config, ("vocab_size",)),
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        gated_mlp=family != "gpt2" if is_known else config["gated_mlp"],
        attention_bias=bool(config.get("qkv_bias" if family == "qwen2_moe" else "attention_bias")),
        qk_norm=family == "glm4_moe" and bool(config.get("use_qk_norm")),
        mlp_bias=family in ("llama", "granite") and bool(config.get("mlp_bias")),
        max_positions=_whole(config, ("max_position_embeddings", "n_positions"), default=0) or None,
        rope_types=_read_rope_types(config),
        quantised=str(quantised.get("quant_method") or "unknown method") if isinstance(quantised, Mapping) else "",
        towers=towers,
        **{name: _whole(config, (key,), default=0 if name == "q_rank" else None) for name, key in latent.items()},
        **sizes,
        **_read_window(config, family, layers),
        **_read_mixture(config, family, layers, ffn),
    )


def _rename_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of an unknown architecture under Llama's key names (models.toml, `usual_names`)."""
    renamed = dict(config)
    for usual, others in _TABLES["usual_names"].items():
        value = next((config[key] for key in (usual, *others) if config.get(key) is not None), None)
        if value is not None:
            renamed[usual] = value
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # Falcon and GPTBigCode
        renamed["num_key_value_heads"] = 1
    renamed["gated_mlp"] = renamed.get("hidden_act") in _TABLES["gated_activations"]
    renamed.setdefault("attention_bias", not renamed["gated_mlp"])
    if isinstance(hidden := renamed.get("hidden_size"), int):
        renamed.setdefault("intermediate_size", 4 * hidden)
    return renamed


def _read_mixture(config: Mapping[str, Any], family: str, layers: int, ffn: int) -> dict[str, Any]:
    """Return the properties of the experts, if any layer has experts."""
    dense = _count_dense_layers(config, family, layers) if family in _FAMILIES["moe"] else layers
    if dense >= layers:
        return {}
    width = _whole(config, ("intermediate_size" if family == "llama4" else "moe_intermediate_size",), default=ffn)
    shared = 0
    if family in _FAMILIES["shared"]:
        shared = width * _whole(config, ("n_shared_experts",), default=0)
    elif family == "qwen2_moe":
        shared = _whole(config, ("shared_expert_intermediate_size",))
    elif family == "llama4":
        shared = width
    return {
        "experts": _whole(config, _EXPERTS, default=_TABLES["experts"][family]),
        "experts_per_token": _whole(config, ("num_experts_per_tok",), default=2),
        "expert_ffn": width,
        "shared_expert_ffn": shared,
        "expert_groups": min(1.0, _whole(config, ("topk_group",), default=1) / _whole(config, ("n_group",), default=1)),
        "dense_layers": dense,
    }


def _read_heads(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return hidden size, attention heads, head dimension, key and value heads."""
    hidden = _whole(config, ("hidden_size", "n_embd"))
    heads = _whole(config, ("num_attention_heads", "n_head"))
    if family == "deepseek_v3":  # each head derives its own keys and values from shared ones
        head_dim = _whole(config, ("qk_nope_head_dim",)) + _whole(config, ("qk_rope_head_dim",))
        return {"hidden": hidden, "heads": heads, "head_dim": head_dim, "kv_heads": heads}
    head_dim = _whole(config, ("head_dim",), default=max(1, hidden // heads))
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    kv_heads = _whole(config, ("num_key_value_heads",), default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return {"hidden": hidden, "heads": heads, "head_dim": head_dim, "kv_heads": kv_heads}


def _read_rope_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types in rope_parameters (rope_scaling before transformers 5); a model may have one per layer kind."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(f"config.json: rope_parameters={parameters!r}: must be an object")
    each = [entry for entry in parameters.values() if isinstance(entry, Mapping)] or [parameters]
    return tuple(sorted({str(entry.get("rope_type") or entry.get("type") or "default") for entry in each}))


def _read_indices(config: Mapping[str, Any], name: str) -> list[int]:
    """Return a list of layer indices."""
    indices = config.get(name) or []
    if not isinstance(indices, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in indices):
        raise ModelError(f"config.json: {name}={indices!r:.80}: must be a list of whole numbers")
    return indices


def _count_dense_layers(config: Mapping[str, Any], family: str, layers: int) -> int:
    """Count the layers of a mixture without experts: the first, all except every n-th, or listed ones."""
    if family in _FAMILIES["shared"]:
        return min(layers, _whole(config, ("first_k_dense_replace",), default=0, minimum=0))
    if family == "llama4":
        step = _whole(config, ("interleave_moe_layer_step",))
        indices = _read_indices(config, "moe_layers") or range(step - 1, layers, step)
        return layers - len({i for i in indices if 0 <= i < layers})
    if family not in ("qwen3_moe", "qwen2_moe"):
        return 0
    step = _whole(config, ("decoder_sparse_step",), default=1)
    only = _read_indices(config, "mlp_only_layers")
    return layers - layers // step + len({i for i in only if 0 <= i < layers and (i + 1) % step == 0})


def _read_window(config: Mapping[str, Any], family: str, layers: int) -> dict[str, Any]:
    """Return the window, if any, and the number of sliding layers unless it is the default (all, or half in Gemma 2).

    Llama 4 divides the sequence into chunks, in the layers with rotary positions: three of four.
    """
    enabled = family in _FAMILIES["sliding"] or (
        family in _FAMILIES["sliding_where_asked"] and bool(config.get("use_sliding_window"))
    )
    name, word = ("sliding_window", "sliding_attention")
    if family == "llama4":
        name, word = ("attention_chunk_size", "chunked_attention")
    window = config.get(name) if enabled else None
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        return {}
    if family in _FAMILIES["sliding_everywhere"]:
        return {"sliding_window": window}
    kinds, first = config.get("layer_types"), config.get("max_window_layers")
    if isinstance(kinds, list):
        sliding = sum(kind == word for kind in kinds[:layers])
    elif family == "llama4" and (rotary := _read_indices(config, "no_rope_layers")):
        sliding = sum(map(bool, rotary[:layers]))
    elif family in _TABLES["full_attention"]:
        key, interval = _TABLES["full_attention"][family]
        sliding = layers - layers // _whole(config, (key,), default=interval)
    elif family == "gpt_oss":
        sliding = (layers + 1) // 2  # the first, and every other
    elif family == "qwen2_moe" and isinstance(first, int):
        sliding = (min(first, layers) + 1) // 2  # every other of the first ones
    elif family in _FAMILIES["sliding_where_asked"] and isinstance(first, int):
        sliding = max(0, layers - first)
    else:
        return {"sliding_window": window}
    return {"sliding_window": window, "sliding_layers": None if sliding == layers else sliding} if sliding else {}


def read_model_file(path: Path, *, any_type: bool = False) -> ModelSpec:
    """Read a config.json, or the folder with one; `any_type` as in read_model. Raises ModelError."""
    path = path / "config.json" if os.path.isdir(path) else path
    try:
        config = plain(bounded.read(path, _MAX_CONFIG_BYTES))
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return read_model(config, name=name, any_type=any_type)
    except bounded.TooLargeError as error:
        raise ModelError(f"{path}: {error}, so it is not a config.json") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None

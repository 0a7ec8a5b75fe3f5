"""The shape of a model in a published table, from its name, from the row's columns, or only from its size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

from planner.forecast.models import ModelError, model_named
from planner.forecast.specs import ModelSpec, weights

_GATED = re.compile(
    r"llama|mistral|mixtral|qwen|gemma|yi-|internlm|phi-?3|deepseek|olmo|granite|baichuan|smollm|glm|kimi|gpt.?oss",
    re.I,
)
_MIXTURE = re.compile(
    r"moe|mixture|mixtral|\d+x\d+b|(?<![a-z0-9])a\d+(\.\d+)?b|gpt.?oss|deepseek.?v[2-9]|kimi|grok|dbrx|arctic|nemotron.?v?3(?!\d)|minimax|"
    r"llama.?4|glm.?4\.[5-9]", re.I,
)  # fmt: skip


def is_mixture(raw: dict[str, str]) -> bool:
    """Whether a row has a mixture of experts, by its column `arch` or the name of its model."""
    return raw.get("arch") != "dense" and bool(_MIXTURE.search(f"{raw.get('arch') or ''} {raw.get('model') or ''}"))


# Hybrids of attention and state-space layers, whose shape does not follow from their size.
_HYBRID = re.compile(r"nemotron[-_ ]?(h|nano)\b|mamba|jamba|zamba|hymba|bamba|falcon[-_ ]?h1|granite[-_ ]?4|lfm2", re.I)


class ShapeError(Exception):
    """The shape of the model follows neither from its name nor from its row."""


def _named(name: str) -> ModelSpec | None:
    """Find a known model by its name, also without a note in parentheses such as "(w/o MTP)" or "(tokendrop)"."""
    bare = re.sub(r"\s*[(\[].*?[)\]]", "", name).strip()
    for text in (name, bare, re.sub(r"(?<=[a-z])(v?\d)", r"-\1", bare, flags=re.I), re.sub(r"[_ ]+", "-", bare)):
        try:
            return model_named(text)
        except ModelError:
            continue
    return None


def weights_by_name(name: str) -> float | None:
    """Return the number of weights that a name states: "Llama-like-1.34B", "30B_a3B"."""
    match = re.search(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", name, re.I)
    return float(match[1]) * (1e6 if match[2].lower() == "m" else 1e9) if match else None


def _of_size(name: str, total: float, vocab: int, layers: int | None, hidden: int | None) -> ModelSpec:
    """Return a dense model with this number of weights, heads of 128 and the usual ratio of width to depth (120)."""
    gated = bool(_GATED.search(name))
    per_square = 12.0  # 4 h^2 of attention and 8 h^2 of the MLP, gated or not
    if hidden is None:
        # Published models of 1B to 500B weights: hidden size over layers from 80 (7B: 128) to 170 (GPT-3), mean 120.
        depth = layers or (total / (per_square * 120.0**2)) ** (1 / 3)
        hidden = max(128, round(math.sqrt(total / (per_square * depth)) / 128.0) * 128)
    ends = vocab * hidden * (2 if gated else 1)
    layers = layers or max(1, round((total - ends) / (per_square * hidden**2)))
    heads = max(1, hidden // 128)
    ffn = round(8.0 * hidden / 3.0 / 64.0) * 64 if gated else 4 * hidden
    return ModelSpec(
        name=name, family="llama" if gated else "gpt", layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, ffn=ffn, vocab=vocab, tied_embeddings=not gated, gated_mlp=gated,
    )  # fmt: skip


def shape_of(raw: dict[str, str], number: Callable[[dict[str, str], str], float | None]) -> tuple[ModelSpec, bool]:
    """Return the shape of the row's model, and whether it is the real one (False: a model of the same size)."""

    def column(key: str) -> int | None:
        value = number(raw, key)
        return int(value) if value and value >= 1 else None

    name = raw.get("model") or ""
    layers, hidden, heads = column("layers"), column("hidden"), column("heads")
    model = _named(name)
    if model:
        sizes = (layers or model.layers, hidden or model.hidden, heads or model.heads)
        if sizes == (model.layers, model.hidden, model.heads):
            return model, True
        if sizes[1:] == (model.hidden, model.heads) and not model.dense_layers:  # cut down to fewer layers
            return replace(model, layers=sizes[0]), True
    if _HYBRID.search(name):
        raise ShapeError(f"model {name!r}: a hybrid of attention and state-space layers")
    billions = number(raw, "params_b")
    total = weights_by_name(name) if billions is None else billions * 1e9
    mixture = is_mixture(raw)
    few = re.search(r"(?<![a-z0-9])(\d+)x\d+b", name, re.I)
    if mixture and not (few and layers and hidden):
        raise ShapeError(f"model {name!r}: an unknown mixture of experts, and no column gives its experts")
    if not (layers and hidden and heads):
        if not total:
            raise ShapeError(f"model {name!r}: an unknown model, and neither layers nor size is given")
        return _of_size(name, total, column("vocab") or 50_000, layers, hidden), False
    return _of_columns(name, (layers, hidden, heads), int(few[1]) if few else 0, column), True


def _of_columns(name: str, sizes: tuple[int, int, int], experts: int, column: Callable[[str], int | None]) -> ModelSpec:
    layers, hidden, heads = sizes
    kv_heads = column("kv_heads") or heads
    ffn = column("ffn") or 4 * hidden
    head_dim = hidden // heads
    if re.search(r"qwen3|nemo-12b|gemma-?[23]-27b", name, re.I):
        head_dim = 128
    elif re.search(r"gemma", name, re.I):
        head_dim = 256
    llama = ModelSpec(
        name=name, family="llama", layers=layers, hidden=hidden, heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads, head_dim=head_dim, ffn=ffn,
        vocab=column("vocab") or 32000, tied_embeddings=False, gated_mlp=True, experts=experts,
        experts_per_token=2 if experts else 0, expert_ffn=ffn if experts else 0,
    )  # fmt: skip
    gpt = replace(llama, family="gpt", tied_embeddings=True, gated_mlp=False)
    if _GATED.search(name):
        return llama
    total = weights_by_name(name)
    if not re.search(r"gpt|mpt|opt|bloom|falcon|nemotron", name, re.I) and total and ffn != 4 * hidden:
        return min((llama, gpt), key=lambda shape: abs(weights(shape).total - total))
    return gpt

"""Models of published tables as shapes: by name, by the row's columns, or by their size alone."""

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
    r"moe|mixture|mixtral|\d+x\d+b|(?<![a-z0-9])a\d+(\.\d+)?b|gpt.?oss|deepseek.?v[2-9]|kimi|grok|dbrx|arctic|nemotron.?3|minimax|"
    r"llama.?4|glm.?4\.[5-9]", re.I,
)  # fmt: skip


def is_mixture(raw: dict[str, str]) -> bool:
    """Whether a row is of a mixture of experts, by its architecture or its model's name."""
    return raw.get("arch") != "dense" and bool(_MIXTURE.search(f"{raw.get('arch') or ''} {raw.get('model') or ''}"))


# Attention beside state-space layers: no dense model of its size.
_HYBRID = re.compile(r"nemotron[-_ ]?(h|nano)\b|mamba|jamba|zamba|hymba|bamba|falcon[-_ ]?h1|granite[-_ ]?4|lfm2", re.I)


class ShapeError(Exception):
    """A model whose shape neither its name nor its row gives."""


def _named(name: str) -> ModelSpec | None:
    """By the usual name: what stands in brackets ("(w/o MTP)", "(tokendrop)") is how it ran."""
    bare = re.sub(r"\s*[(\[].*?[)\]]", "", name).strip()
    for text in (name, bare, re.sub(r"(?<=[a-z])(v?\d)", r"-\1", bare, flags=re.I), re.sub(r"[_ ]+", "-", bare)):
        try:
            return model_named(text)
        except ModelError:
            continue
    return None


def weights_by_name(name: str) -> float | None:
    """All weights of a model by its name: "Llama-like-1.34B", "30B_a3B"."""
    named = re.search(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", name, re.I)
    return float(named[1]) * (1e6 if named[2].lower() == "m" else 1e9) if named else None


def _of_size(name: str, total: float, vocab: int, layers: int | None, hidden: int | None) -> ModelSpec:
    """A dense model of so many weights, of usual proportions: heads of 128, as wide as 100 times its depth at most."""
    gated = bool(_GATED.search(name))
    per_square = 12.0  # 4 h^2 of attention and 8 h^2 of the MLP, gated or not
    if hidden is None:
        # Published models of 1 to 500 thousand million weights: h / L from 80 (7B: 128) to 170 (GPT-3), mean 120.
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
    """The shape of the row's model, and whether it is known and not merely of the right size."""

    def column(key: str) -> int | None:
        value = number(raw, key)
        return int(value) if value and value >= 1 else None

    name = raw.get("model") or ""
    layers, hidden, heads = column("layers"), column("hidden"), column("heads")
    known = _named(name)
    if known:
        sizes = (layers or known.layers, hidden or known.hidden, heads or known.heads)
        if sizes == (known.layers, known.hidden, known.heads):
            return known, True
        if sizes[1:] == (known.hidden, known.heads) and not known.dense_layers:  # cut down to fewer layers
            return replace(known, layers=sizes[0]), True
    if _HYBRID.search(name):
        raise ShapeError(f"model {name!r}: a hybrid of attention and state-space layers")
    billions = number(raw, "params_b")
    total = weights_by_name(name) if billions is None else billions * 1e9
    mixture = is_mixture(raw)
    few = re.search(r"(?<![a-z0-9])(\d+)x\d+b", name, re.I)
    if mixture and not (few and layers and hidden):
        raise ShapeError(f"model {name!r}: a mixture of experts in no list, and no column gives its experts")
    if not (layers and hidden and heads):
        if not total:
            raise ShapeError(f"model {name!r}: no list has it, and neither layers nor size is given")
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
    made = ModelSpec(
        name=name, family="llama", layers=layers, hidden=hidden, heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads, head_dim=head_dim, ffn=ffn,
        vocab=column("vocab") or 32000, tied_embeddings=False, gated_mlp=True, experts=experts,
        experts_per_token=2 if experts else 0, expert_ffn=ffn if experts else 0,
    )  # fmt: skip
    plain = replace(made, family="gpt", tied_embeddings=True, gated_mlp=False)
    if _GATED.search(name):
        return made
    total = weights_by_name(name)
    if not re.search(r"gpt|mpt|opt|bloom|falcon|nemotron", name, re.I) and total and ffn != 4 * hidden:
        return min((made, plain), key=lambda shape: abs(weights(shape).total - total))
    return plain

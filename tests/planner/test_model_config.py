"""Models: known names, config.json files, and errors that say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rigs.tables import each_row

from planner.forecast.models import ModelError, known_names, model_from_config, model_from_file, model_named
from planner.forecast.specs import TrainSpec, lora_weights, weights

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


# Totals as the model cards on the Hugging Face hub state them.
@each_row(
    ("name", "total"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("openai-community/gpt2", 124_439_808),
        ("google/gemma-2-9b-it", 9_241_705_984),
    ],
)
def test_known_names_have_the_published_number_of_weights(name: str, total: int) -> None:
    """The count is exact, so FLOPs and bytes start from the truth."""
    assert weights(model_named(name)).total == total


def test_lora_counts_the_adapters_of_the_article() -> None:
    """Llama-3.1-8B with r=16 on all seven projections trains 41.9 M weights (PEFT prints 41,943,040)."""
    assert lora_weights(model_named("Llama-3.1-8B"), TrainSpec(lora_rank=16)) == 41_943_040


def test_config_json_gives_the_same_shape_as_the_name(tmp_path: Path) -> None:
    """A folder with a config.json answers like the known name."""
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    spec = model_from_file(folder)
    assert spec.name == "my-llama"
    assert weights(spec).total == weights(model_named("Llama-3.1-8B")).total


@each_row(
    ("change", "says"),
    [
        ({"model_type": "bert"}, "model_type='bert'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers='32'"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"hidden_size": 4095}, "4095"),
    ],
)
def test_broken_configs_name_the_key(change: dict[str, object], says: str) -> None:
    """The message names the key and its value."""
    with pytest.raises(ModelError, match=says):
        model_from_config({**LLAMA, **change})


def test_unknown_name_offers_the_nearest() -> None:
    """A typing mistake is answered with the nearest names."""
    with pytest.raises(ModelError, match=r"Llama-3\.1-8B"):
        model_named("Llama-3.1-8C")
    assert "Qwen3-8B" in known_names()


def test_a_folder_without_json_is_an_error(tmp_path: Path) -> None:
    """Garbage is refused with the file's name."""
    (tmp_path / "config.json").write_text("{nope")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        model_from_file(tmp_path)


SLIDE = ("mistral", "qwen2", "qwen3", "mixtral", "gemma2")  # Llama and the first Gemma have no window at all
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "gemma", "gemma2")
MINIMAL = {
    "hidden_size": 256, "num_attention_heads": 32, "num_hidden_layers": 4, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"num_key_value_heads": 4, "intermediate_size": 512, "head_dim": 16},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"tie_word_embeddings": False, "num_key_value_heads": 4},
        {"attention_bias": True, "num_key_value_heads": 4},
        {"sliding_window": None, "num_key_value_heads": 4},
        {"sliding_window": 64, "use_sliding_window": True, "num_key_value_heads": 4},
        {"use_sliding_window": True, "max_window_layers": 1, "num_key_value_heads": 4},
        {"use_sliding_window": True, "max_window_layers": 4, "num_key_value_heads": 4},
    ],
    ids=lambda said: " ".join(f"{k}={v}" for k, v in said.items()) or "minimal",
)
def test_what_config_json_leaves_out_is_what_transformers_takes(
    family: str, said: dict[str, object], tmp_path: Path
) -> None:
    """The planner's shape is AutoConfig's, and its count of weights that of the model which is built from it."""
    torch = pytest.importorskip("torch", reason="the fine-tune extra is not installed")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {"model_type": family, **MINIMAL, **said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, theirs = model_from_file(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert (spec.kv_heads, spec.ffn) == (theirs.num_key_value_heads, theirs.intermediate_size)
    assert spec.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert spec.tied_embeddings is theirs.tie_word_embeddings
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(theirs)
    assert weights(spec).total == sum(p.numel() for p in built.parameters())
    # Each layer of the built model says whether it slides; where the kind of a layer does, the config has a list.
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * spec.layers
    window = getattr(theirs, "sliding_window", None) if family in SLIDE else None
    sliding = kinds.count("sliding_attention") if window else 0
    assert spec.sliding_window == (window if sliding else None)
    told = spec.layers // 2 if family == "gemma2" and spec.sliding_layers is None else spec.sliding_layers
    assert sliding == 0 or (spec.layers if told is None else told) == sliding


@each_row(
    ("config", "words"),
    [
        ({"model_type": "nemotron_h"}, "state-space or linear-attention layers"),
        ({"model_type": "kimi_linear"}, "state-space or linear-attention layers"),
        ({"model_type": "nobody_knows"}, "model_type='nobody_knows': known are"),
    ],
)
def test_a_family_that_is_not_forecast_is_refused_by_name(config: dict[str, str], words: str) -> None:
    """Hybrids are no dense models of their size."""
    with pytest.raises(ModelError, match=words):
        model_from_config(config)


def test_quantised_weights_are_named() -> None:
    """By the method that config.json names; the model that they were made from has none."""
    shape = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 99,
    }
    quantised = {**shape, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert (model_from_config(quantised).quantised, model_from_config(shape).quantised) == ("gptq", "")

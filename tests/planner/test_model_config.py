"""Models: known names, config.json files, and errors that say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rigs.tables import each_row

from planner.forecast.models import ModelError, known_names, model_from_config, model_from_file, model_named
from planner.forecast.specs import TrainSpec, lora_weights, weights

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


def test_lora_counts_the_adapters_of_all_seven_projections() -> None:
    """As PEFT prints them of rank 16."""
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
        ({"model_type": "bert"}, "model_type='bert': known are"),
        ({"model_type": "nemotron_h"}, "state-space or linear-attention layers"),  # no dense model of its size
        ({"model_type": "kimi_linear"}, "state-space or linear-attention layers"),
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


def test_a_name_or_a_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    """A typing mistake is answered with the nearest names, garbage with the file's."""
    with pytest.raises(ModelError, match=r"Llama-3\.1-8B"):
        model_named("Llama-3.1-8C")
    assert "Qwen3-8B" in known_names()
    (tmp_path / "config.json").write_text("{nope")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        model_from_file(tmp_path)


def test_quantised_weights_are_named() -> None:
    """By the method that config.json names; the model that they were made from has none."""
    quantised = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert (model_from_config(quantised).quantised, model_from_config(LLAMA).quantised) == ("gptq", "")

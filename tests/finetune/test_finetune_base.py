"""What a rank reads of weights that are stored in other parts than the model has."""

import pytest
import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from contracts.job_config import ConfigError, JobConfig
from finetune.weights import Stored

pytestmark = pytest.mark.long


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
MIXTURES = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=8),
}


@pytest.mark.parametrize("family", MIXTURES)
def test_any_box_of_any_weight_is_that_of_the_model_that_transformers_loads(family, tmp_path):
    """Whole; the second half of the rows, as FSDP or TP cuts; a middle that lies across gate and up."""
    AutoModelForCausalLM.from_config(MIXTURES[family]).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert any(".experts.3." in name for name in file.keys())  # one by one  # noqa: SIM118
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with init_empty_weights(include_buffers=False):
        plain = AutoModelForCausalLM.from_config(loaded.config)
    source = Stored(JobConfig(model_name_or_path=str(tmp_path)), plain)
    fused = 0
    for name, p in loaded.named_parameters():
        fused += p.ndim == 3
        torch.testing.assert_close(source.read(name), p.detach(), rtol=0, atol=0)
        half = p.shape[0] // 2
        box = ([half, *[0] * (p.ndim - 1)], [p.shape[0] - half, *p.shape[1:]])
        torch.testing.assert_close(source.read(name, box), p.detach()[half:], rtol=0, atol=0)
        middle = ([n // 3 for n in p.shape], [n // 2 for n in p.shape])
        slices = tuple(slice(n // 3, n // 3 + n // 2) for n in p.shape)
        torch.testing.assert_close(source.read(name, middle), p.detach()[slices], rtol=0, atol=0)
    assert fused == 4


def test_a_weight_that_the_files_lack_is_named(tmp_path):
    """Never drawn at random in its place."""
    AutoModelForCausalLM.from_config(MIXTURES["mixtral"]).save_pretrained(tmp_path)
    more = MixtralConfig(**{**SHAPE, "num_hidden_layers": 3}, num_local_experts=4)
    with init_empty_weights(include_buffers=False):
        plain = AutoModelForCausalLM.from_config(more)
    source = Stored(JobConfig(model_name_or_path=str(tmp_path)), plain)
    with pytest.raises(ConfigError, match=r"hold no model\.layers\.2\.input_layernorm\.weight"):
        source.read("model.layers.2.input_layernorm.weight")

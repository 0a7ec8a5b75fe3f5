"""The weights that a checkpoint belongs to, by a fingerprint, and what a rank reads of weights in other parts."""

import json
import shutil

import pytest
import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from contracts.job_config import ConfigError, JobConfig
from finetune import train
from finetune.checkpoint import fingerprint
from finetune.weights import Stored

pytestmark = pytest.mark.long


@pytest.fixture
def base(tmp_path):
    """A model in a folder, in several files."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=259, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "base", max_shard_size="150KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    return tmp_path / "base"


def train_on(path, by):
    """The same tensors with other values, as further training leaves them."""
    tensors = {name: t + by for name, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def first(folder):
    """One of its weights files."""
    return min(folder.glob("*.safetensors"))


def test_a_fingerprint_is_of_the_weights_and_their_shape_alone(base, tmp_path):
    """A copy elsewhere has the same, whatever lies beside it."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(base, copy)
    (copy / "README.md").write_text("beside")
    assert fingerprint(copy) == fingerprint(base)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: train_on(first(folder), 1e-3),
        lambda folder: first(folder).unlink(),
        lambda folder: first(folder).rename(folder / "other.safetensors"),
        lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text().replace("10000", "5")),
        lambda folder: first(folder).write_bytes(b""),
    ],
    ids=["trained further", "a file less", "renamed", "config.json", "emptied"],
)
def test_other_weights_have_another_fingerprint(base, change):
    """Of the same names, sizes and shapes too."""
    before = fingerprint(base)
    change(base)
    assert fingerprint(base) != before


@pytest.mark.timeout(600)
def test_a_run_goes_on_with_the_weights_that_it_was_begun_with(base, tmp_path, capsys):
    """Other weights in the same folder are refused, naming both."""
    before = fingerprint(base)
    out = tmp_path / "out"
    job = {
        "model_name_or_path": str(base), "tokenizer_name": "builtin:bytes", "use_peft": True, "lora_r": 4,
        "dataset_rows": 16, "max_length": 48, "per_device_train_batch_size": 8, "profile_steps": 0,
        "output_dir": str(out),
    }  # fmt: skip

    def run(steps):
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps({**job, "max_steps": steps}))
        return train.main(["--config", str(path)]), json.loads((out / "run.json").read_text())

    assert run(2)[0] == 0
    shutil.copy(first(base), tmp_path / "before")
    train_on(first(base), 1e-3)
    capsys.readouterr()
    assert run(3)[0] == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert [word for word in (before, fingerprint(base), str(base), "checkpoint-2") if word not in said] == []
    shutil.copy(tmp_path / "before", first(base))
    code, record = run(3)
    assert (code, record["steps_done"]) == (0, 3)


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

"""QLoRA on the CPU: 4-bit base weights; adapters that load; what is refused. Ranks: test_finetune_equivalence."""

import importlib.util
import json

import pytest
import torch
from filled import filled_model
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig

from contracts.job_config import JobConfig
from finetune import train
from planner.forecast.engine import NF4_SCALES

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model in a folder, of whole 64-weight blocks."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=259, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("prefix", ["", "random:"])
def test_base_weights_are_4_bit_and_only_adapters_train(base, prefix):
    """Half a byte per weight of every projection, its scales, and a note that a CPU gains nothing."""
    notes = []
    config = JobConfig(
        model_name_or_path=f"{prefix}{base}", tokenizer_name="builtin:bytes", use_peft=True, load_in_4bit=True, lora_r=4
    )
    model = filled_model(config, "fp32", notes.append)
    packed = [p for p in model.parameters() if type(p).__name__ == "Params4bit"]
    count = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3)
    assert len(packed) == 3 * 7 and sum(p.numel() * p.element_size() for p in packed) == count // 2
    state = packed[0].quant_state  # of one byte for 64 weights, and of four for 256 of those: what the forecast counts
    each = (state.absmax.element_size() + state.state2.absmax.element_size() / state.state2.blocksize) / state.blocksize
    assert each == NF4_SCALES and state.absmax.numel() == state.shape.numel() / state.blocksize
    assert model.get_base_model().num_parameters() == count + sum(p.numel() for p in {*model.parameters()} - {*packed})
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    assert "without a GPU" in notes[0]


def job(base, out, **settings):
    """The command's words."""
    config = {
        "model_name_or_path": str(base), "tokenizer_name": "builtin:bytes", "use_peft": True, "lora_r": 8,
        "load_in_4bit": True, "dataset_rows": 64, "max_length": 48, "per_device_train_batch_size": 16,
        "learning_rate": 2e-2, "max_steps": 12, "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 6,
        "lr_scheduler_type": "constant", "profile_steps": 0, "lora_modules_to_save": ["lm_head"],
        "output_dir": str(out), **settings,
    }  # fmt: skip
    path = out.with_suffix(".yaml")
    path.write_text(json.dumps(config))
    return ["--config", str(path)]


def test_the_job_trains_saves_resumes_and_loads(base, tmp_path):
    """Loss falls; stopped half-way it ends at the same loss; adapter on 4-bit base and merged model load plainly."""
    whole = tmp_path / "whole"
    assert train.main(job(base, whole)) == 0
    record = json.loads((whole / "run.json").read_text())
    assert record["loss"]["last"] < 0.8 * record["loss"]["first"]
    assert any("load_in_4bit" in note for note in record["notes"])
    parts = tmp_path / "parts"
    assert train.main(job(base, parts, max_steps=6)) == 0
    assert train.main(job(base, parts, export_merged=True)) == 0
    resumed = json.loads((parts / "run.json").read_text())
    assert resumed["loss"]["last"] == pytest.approx(record["loss"]["last"], rel=1e-5)

    tokens = AutoTokenizer.from_pretrained(record["adapter"])("What is 7 + 5?", return_tensors="pt")["input_ids"]
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)

    def logits(adapter=None, **how):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **how).eval()
        with torch.no_grad():
            return (PeftModel.from_pretrained(model, adapter) if adapter else model)(tokens).logits.float()

    bare, adapted = logits(quantization_config=four), logits(record["adapter"], quantization_config=four)
    again, merged = logits(resumed["adapter"]), AutoModelForCausalLM.from_pretrained(resumed["merged"])
    assert (adapted - bare).abs().max() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits.float(), again, rtol=1e-3, atol=1e-3)
    assert not hasattr(merged.config, "quantization_config")  # merged into the weights as they came


def test_without_bitsandbytes_the_extra_is_named(base, tmp_path, monkeypatch, capsys):
    """It is looked for before anything imports it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "bitsandbytes" else find(name, *more)
    )
    assert train.main(job(base, tmp_path / "out")) == 2
    assert "pip install 'topoflight[qlora]'" in capsys.readouterr().err.splitlines()[-1]

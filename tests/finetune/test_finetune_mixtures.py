"""Mixtures of experts: the job's gradients are transformers' and PEFT's own, its exports load; what is refused.

Ranks: test_finetune_equivalence; what they read: test_finetune_loading.
"""

import json
from dataclasses import replace

import pytest
import torch
from filled import filled_model
from peft import PeftModel
from test_finetune_model import FAMILIES, batch_of, job, total
from transformers import AutoModelForCausalLM

from contracts.job_config import ConfigError
from contracts.layout import MIXTURES, Layout
from finetune import train
from finetune.loop import multiplied
from finetune.model import build_model, causal_lm, cut
from finetune.plan import refusals
from planner.forecast.models import model_from_config
from planner.forecast.specs import TrainSpec, active_weights, lora_weights, weights

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ALONE = {"per_device_train_batch_size": 8, "max_steps": 6, "learning_rate": 2e-2, "lr_scheduler_type": "constant",
         "profile_steps": 0, "lora_r": 4, "save_strategy": "no"}  # fmt: skip


@pytest.mark.parametrize("family", MIXTURES)
def test_gradients_are_those_of_transformers_and_peft(tmp_path, family):
    """Of every adapter, of experts too, with packed rows laid out one by one for transformers."""
    config = job(tmp_path, family, use_peft=True, lora_r=4)
    model = filled_model(config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    batch = batch_of(config, packed=False)
    logits = causal_lm(model)(batch.tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum").backward()
    theirs = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    assert sum(".experts." in name for name in theirs) == 4 * 4  # two factors of two stacks in four layers
    model.zero_grad()
    (chunk,) = cut(model, [(0, 4)], [0], fused_loss=True)
    total([chunk], batch).backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_planner_counts_the_weights_that_are_there(tmp_path, family):
    """Whole, multiplied with a token, and of PEFT's adapters."""
    full = build_model(job(tmp_path, family), "fp32")
    model = model_from_config(full.config.to_dict())
    assert sum(p.numel() for p in full.parameters()) == weights(model).total
    small = sum(p.numel() for p in full.parameters() if p.ndim == 1)
    assert multiplied(full)[0] == active_weights(model) - small - model.vocab * model.hidden
    lora = build_model(job(tmp_path, family, use_peft=True, lora_r=4), "fp32")
    trained = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    assert trained == lora_weights(model, TrainSpec(method="lora", lora_rank=4))


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_and_the_merged_model_load_plainly(tmp_path, family):
    """The loss falls; PEFT on the base and transformers with the merged weights say the same of a text."""
    torch.manual_seed(0)
    base, out = tmp_path / "base", tmp_path / "out"
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(base)
    told = {"model_name_or_path": str(base), "tokenizer_name": "builtin:bytes", "use_peft": True, "max_length": 48,
            "dataset_rows": 64, "export_merged": True, "output_dir": str(out), **ALONE}  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(told))
    assert train.main(["--config", str(tmp_path / "job.yaml")]) == 0
    record = json.loads((out / "run.json").read_text())
    assert record["loss"]["last"] < record["loss"]["first"]
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        before = bare(tokens).logits
        adapted = PeftModel.from_pretrained(bare, record["adapter"]).eval()(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(record["merged"], dtype=torch.float32).eval()(tokens).logits
    assert (adapted - before).abs().max() > 0.1
    torch.testing.assert_close(merged, adapted, rtol=1e-3, atol=1e-3)


def test_what_experts_do_not_do_is_refused(tmp_path):
    """With the reason: TP, expert parallelism, 4-bit experts, half of gate and up, a loss of the router."""
    shape = build_model(job(tmp_path, "mixtral"), "fp32").config
    assert "experts are stacked" in refusals(Layout(world_size=2, tp=2), shape, lora=True)[0]
    ep = refusals(Layout(world_size=2, dp_shard=2, ep=2), shape, lora=True)
    assert ep == ["ep=2: expert parallelism is not implemented; FSDP shards the experts' weights"]
    four = replace(job(tmp_path, "mixtral", use_peft=True), model_name_or_path=str(tmp_path), load_in_4bit=True)
    with pytest.raises(ConfigError, match="load_in_4bit"):
        build_model(four, "fp32")
    half = job(tmp_path, "mixtral", use_peft=True, lora_target_modules=("q_proj", "up_proj"))
    with pytest.raises(ConfigError, match="w3 without also targeting w1"):
        build_model(half, "fp32")
    FAMILIES["mixtral"].output_router_logits = True
    try:
        with pytest.raises(ConfigError, match="output_router_logits"):
            build_model(job(tmp_path, "mixtral"), "fp32")
    finally:
        FAMILIES["mixtral"].output_router_logits = False

"""Records of a run: what the agent makes of run.json, the job's own exit code, the FLOPs behind its MFU."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from filled import filled_model
from rigs.tables import each_row, rows_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from agent.pages import environment
from agent.terminal.measured import run_words
from contracts import run_record
from contracts.job_config import JobConfig
from contracts.run_record import compare, own_exit_code, record_of
from finetune import post
from finetune.loop import multiplied
from finetune.recorder import flops_per_token

rows = rows_of(__file__)

pytestmark = pytest.mark.long

INTERVAL = {"low": 1.6, "mid": 1.9, "high": 2.3}
RECORD = {
    "status": "complete", "measured": {"step_seconds": 2.0}, "communication": {"exposed_share": 0.31},
    "comparison": [{"quantity": "step_seconds", "forecast": INTERVAL, "measured": 2.0}],
    "plan": {"forecast": {"step_seconds": INTERVAL, "memory_bytes": {"low": 1, "mid": 2, "high": 3}}},
}  # fmt: skip


def test_measurements_are_compared_with_the_forecast():
    """What was not measured is unknown."""
    record = record_of(RECORD)
    step, memory = compare(record)
    assert (step.verdict, memory.verdict) == ("inside", "unknown")
    assert run_words(record) == "steps unknown, loss unknown, tokens/s unknown, communication 31% exposed"
    assert "step: 2 s" in environment().get_template("sections.html.j2").module.runs([record])


@each_row(("written", "torchrun", "began", "told"), rows("own_codes"))
def test_a_failure_keeps_the_job_s_own_code(tmp_path, written, torchrun, began, told):
    """Torchrun makes 1 of every failure; the record of this start says which, and one of an earlier start nothing."""
    path = tmp_path / "run.json"
    if written is not None:
        path.write_text(json.dumps(written))
    assert own_exit_code(path, torchrun, began) == told


def test_the_error_that_a_rank_printed_is_the_reason(tmp_path):
    """The last traceback's last line, not torchrun's own; and pod 0 leaves it where no record was written."""
    wrong = [(log, run_record.raised(log)) for log, reason in rows("raised")() if run_record.raised(log) != reason]
    assert not wrong, wrong
    said = "the ranks of pod 1 ended with exit code 1: OSError: x"
    post.write_termination_message(tmp_path / "run.json", tmp_path / "word", said)
    left = json.loads((tmp_path / "word").read_text())
    assert (left["status"], left["transports"]) == ("failed", []) and left["reason"].endswith("OSError: x")
    (tmp_path / "run.json").write_text(json.dumps({"status": "complete"}))
    # of an earlier start
    post.write_termination_message(tmp_path / "run.json", tmp_path / "word", "ended", time.time() + 60)
    assert json.loads((tmp_path / "word").read_text())["reason"] == "ended"


def model_flops(layers, hidden, ffn, kv, vocabulary, length, frozen):
    """One sequence through a decoder, product by product, 2 FLOPs for each multiply and add; tokens look back only."""
    projections = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden), (hidden, ffn), (hidden, ffn),
                   (ffn, hidden)]  # fmt: skip
    weights = [*projections * layers, (hidden, vocabulary)]
    forward = sum(2 * inputs * outputs for inputs, outputs in weights) * length
    backward = forward * (1 if frozen else 2)  # the gradient of the inputs, and of the weights where they train
    # scores and values, of all tokens up to this one: forward, and both factors' gradients backward
    attention = sum(2 * 2 * hidden * seen * layers * 3 for seen in range(1, length + 1))
    return forward + backward + attention, sum(inputs * outputs for inputs, outputs in weights)


@each_row("frozen", [False, True])
def test_flops_per_token_are_those_of_the_products_counted_by_hand(frozen):
    """All weights train, or none: two layers, grouped heads."""
    length = 512
    counted, weights = model_flops(2, 64, 160, 32, 96, length, frozen)
    shape = SimpleNamespace(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
    told = flops_per_token(weights, 0 if frozen else weights, shape, length)
    # a token sees half the length and half itself: 1/512 of the attention's share
    assert told == pytest.approx(counted / length, rel=1 / length)
    assert told < counted / length


@pytest.mark.parametrize(
    ("tied", "saved"),
    [(False, None), (True, None), (False, ()), (True, ()), (False, ("embed_tokens",)), (False, ("lm_head",))],
)
def test_what_a_token_is_multiplied_with_is_what_torch_counts(tied, saved, tmp_path):
    """In full (None), with LoRA, and with modules trained whole: torch's count of the products of a forward pass."""
    shape = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=259, tie_word_embeddings=tied,
    )  # fmt: skip
    shape.save_pretrained(tmp_path)
    config = JobConfig(
        model_name_or_path=f"random:{tmp_path}", use_peft=saved is not None, lora_modules_to_save=saved or (),
        attn_implementation="sdpa",
    )  # fmt: skip
    net = filled_model(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(input_ids=torch.zeros(1, 10, dtype=torch.long))
    done = counter.get_flop_counts()["Global"]
    products = sum(done.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    every, training = multiplied(net)
    assert products == 2 * 10 * every
    assert training == (
        every
        if saved is None
        else sum(p.numel() for name, p in net.named_parameters() if p.requires_grad and "embed_tokens" not in name)
    )

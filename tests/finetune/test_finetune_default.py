"""What the built-in job leaves: its log, an adapter that loads. That it learns is in tests/agent/test_train.py."""

import json

import pytest
import torch
from rigs.command import TORCHRUN, interpreter
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from contracts.job_config import read_config
from finetune import rows
from finetune.rows import IGNORED, load_tokenizer

ROWS = "dataset_rows=320"  # 20 steps of 16

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, forked_ranks):
    """FSDP over two gloo ranks: folder and run."""
    folder = tmp_path_factory.mktemp("built-in")
    layout = {"world_size": 2, "dp_shard": 2, "precision": "fp32", "micro_batch": 8}
    said = {"step_seconds": {"low": 0.0, "mid": 1.0, "high": 1e9}}
    (folder / "plan.json").write_text(json.dumps({"layout": layout, "forecast": said}))
    settings = [f"output_dir={folder / 'out'}", "max_steps=20", ROWS, "report_to=[tensorboard]"]
    argv = ["--nproc_per_node=2", "-m", "finetune.train", "--plan", folder / "plan.json", *settings]
    done = interpreter(*TORCHRUN, *argv, seconds=1100)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "out", json.loads((folder / "out" / "run.json").read_text())


def test_logged_steps_tell_memory_and_communication(trained):
    """In metrics.jsonl and in tensorboard; the share once the profiler has ended; no MFU: a CPU's peak is unknown."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, record = trained
    assert record["transports"] and all(one.startswith("gloo: TCP over ") for one in record["transports"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    assert all(line["memory_bytes"] > 0 and line["mfu"] is None for line in steps.values())
    assert 0 < record["communication"]["exposed_share"] <= record["communication"]["share"] <= 1
    assert steps[1]["communication_share"] is None
    assert steps[20]["communication_share"] == record["communication"]["share"]
    board = EventAccumulator(str(folder / "runs")).Reload()
    (shown, *_) = [one.value for one in board.Scalars("communication_share") if one.step == 20]
    assert shown == pytest.approx(record["communication"]["share"], rel=1e-5)
    assert [one.step for one in board.Scalars("memory_bytes")] == list(steps)


def test_the_adapter_in_plain_transformers_has_the_loss_of_the_trained_engine(trained):
    """Base and adapter, loaded without a line of this project: the test split's loss is the one that the ranks told."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _, record = trained
    config, _, _ = read_config(None, [ROWS])
    examples, _ = rows.prepare(config, config.dataset_test_split, load_tokenizer(config))

    def padded(rows, name, fill):  # on the right, where causal attention never looks
        return pad_sequence([torch.tensor(getattr(one, name)) for one in rows], batch_first=True, padding_value=fill)

    def loss(model, rows):
        total = counted = 0
        for first in range(0, len(rows), 32):
            part = rows[first : first + 32]
            labels = padded(part, "labels", IGNORED).flatten()  # of the next token already
            logits = model(padded(part, "tokens", 0)).logits.flatten(0, 1)
            total += float(cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
            counted += int((labels != IGNORED).sum())
        return total / counted

    told = record["eval_loss"][-1]
    assert told["step"] == record["steps_done"]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(record["base"]).eval()
        bare = loss(plain, examples[:32])
        adapted = loss(PeftModel.from_pretrained(plain, record["adapter"]).eval(), examples)
    assert adapted == pytest.approx(told["loss"], rel=1e-4)
    assert bare > 1.2 * told["loss"]

"""Memory: where it runs out the job says what it had and what would fit; what is measured is what was forecast."""

import json
import re

import pytest
import torch
from rigs.command import interpreter
from rigs.tables import each_row
from test_finetune_equivalence import HERE

from finetune.recorder import LIGHTER, is_out_of_memory

pytestmark = pytest.mark.long


@pytest.fixture
def job(tmp_path, forked_ranks):
    """A job of 128 rows of 512 tokens a step; called with settings, it runs under the limit."""
    rows = [{"text": "word " * 200} for _ in range(256)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shape = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048,
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(shape))

    def run(**more):
        settings = {
            "model_name_or_path": f"random:{tmp_path / 'model'}", "tokenizer_name": "builtin:bytes",
            "dataset_name": str(tmp_path / "train.jsonl"), "max_length": 512, "max_steps": 1, "profile_steps": 0,
            "per_device_train_batch_size": 128, "fused_cross_entropy": False,
            "output_dir": str(tmp_path / "out"), **more,
        }  # fmt: skip
        (tmp_path / "job.json").write_text(json.dumps(settings))
        done = interpreter(HERE / "limited_job.py", "--config", tmp_path / "job.json", seconds=500)
        return done, json.loads((tmp_path / "out/run.json").read_text())

    return run


@pytest.mark.timeout(600)
def test_memory_that_runs_out_is_an_end_of_its_own_and_the_settings_named_instead_run(job):
    """torch's allocator fails under a limit of the system: exit code, record, words; what is named fits."""
    done, record = job()
    assert done.returncode == 71, done.stderr[-3000:]
    assert (record["status"], record["exit_code"]) == ("out_of_memory", 71)
    reason = record["reason"]
    assert re.search(r"rank 0, step 1: .*can't allocate memory.*; [\d.]+ GiB resident besides the program;", reason)
    assert "no plan has a forecast of its memory" in reason
    assert done.stderr.splitlines()[-1] == f"finetune: out_of_memory: {reason}"
    assert reason.endswith(LIGHTER)
    lighter = {"gradient_checkpointing": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 32}
    done, record = job(**lighter)
    assert done.returncode == 0, done.stderr[-3000:]
    ran = record["plan"]["layout"]
    assert ran["micro_batch"] * ran["gradient_accumulation"] == 128


@each_row(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError(12, "Cannot allocate memory"), False),  # of a process or a map: the host's, no layout's
    ],
)
def test_other_errors_are_no_lack_of_memory(error, is_memory):
    """A fault of the program stays one."""
    assert is_out_of_memory(error) is is_memory

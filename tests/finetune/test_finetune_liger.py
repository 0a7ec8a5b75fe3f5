"""Liger's fused cross-entropy through Triton's interpreter: the loss and the gradients of the plain path."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from rigs.tables import ROOT

CODE = """
import json, sys, torch
from filled import filled_model

from contracts.job_config import JobConfig
from finetune.model import cut
from finetune.rows import collate, load_tokenizer, prepare

torch.set_num_threads(1)
told = []
for kind in ("fp32", "lora", "bf16", "autocast"):
    for fused in (False, True):
        config = JobConfig(
            model_name_or_path="random:micro-llama", dataset_rows=4, max_length=32, use_peft=kind == "lora", lora_r=4
        )
        rows, _ = prepare(config, "train", load_tokenizer(config))
        batch = collate(rows, 4, 32, 2)
        (chunk,) = cut(filled_model(config), [(0, 4)], [0], fused_loss=fused)
        if kind == "bf16":
            chunk = chunk.to(torch.bfloat16)
        if kind == "autocast":
            chunk.autocast = torch.bfloat16
        loss = chunk(batch.tokens, batch.positions, batch.labels).sum()
        loss.backward()
        grads = [p.grad.float().flatten() for p in chunk.parameters() if p.grad is not None]
        told.append((float(loss.detach()), torch.cat(grads)))
    (plain, left), (fused, right) = told[-2:]
    print("TOLD " + json.dumps([kind, plain, fused, float((left - right).norm() / left.norm())]))
print("USED " + json.dumps("liger_kernel.ops.fused_linear_cross_entropy" in sys.modules))
"""


@pytest.mark.triton
@pytest.mark.timeout(300)
def test_liger_s_loss_and_gradients_are_those_of_the_plain_path():
    """In fp32 to rounding; in bf16 within what its gradients of the head, rounded per chunk, allow."""
    absent = [name for name in ("triton", "liger_kernel") if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)} (pip install triton liger-kernel, 290 MB; no GPU needed)")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/finetune"), *sys.path[1:]])
    env = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT, env=env, timeout=280)
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert [kind for kind, *_ in lines] == ["fp32", "lora", "bf16", "autocast"], done.stderr[-3000:]
    assert "USED true" in done.stdout
    for kind, plain, fused, apart in lines:
        rounded = kind in ("bf16", "autocast")
        assert fused == pytest.approx(plain, rel=1e-2 if rounded else 1e-5), kind
        assert apart < (2e-2 if rounded else 1e-5), kind

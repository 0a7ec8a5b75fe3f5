"""The built-in job, as `make run` starts it: two ranks, a plan, FSDP, and a loss that falls."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARGIN = 0.5  # after 20 of its 40 steps the loss is below this share of the first


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_the_built_in_job_learns_under_the_plan(tmp_path):
    """FSDP over two gloo ranks: asked is got, each holds half, the loss falls, the adapter is saved."""
    layout = {"world_size": 2, "dp_shard": 2, "precision": "fp32", "micro_batch": 8}
    said = {"step_seconds": {"low": 0.0, "mid": 1.0, "high": 1e9}}
    (tmp_path / "plan.json").write_text(json.dumps({"layout": layout, "forecast": said}))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    job = ["--plan", str(tmp_path / "plan.json"), f"output_dir={tmp_path / 'out'}", "max_steps=20"]
    argv = [*launch, "-m", "finetune.train", *job]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    flight = json.loads((tmp_path / "out" / "flight.json").read_text())
    effective = flight["layout"]["effective"]
    assert flight["status"] == "complete"
    assert (effective["wrapper"], effective["dp_shard"], effective["backend"]) == ("FSDP", 2, "gloo")
    assert effective["local_parameter_bytes"] == pytest.approx(effective["parameter_bytes"] / 2, rel=0.01)
    assert flight["loss"]["last"] < MARGIN * flight["loss"]["first"]
    assert (Path(flight["adapter"]) / "adapter_model.safetensors").is_file()
    assert (Path(flight["checkpoint"]) / "trainer.json").is_file()
    assert 0 < flight["communication"]["exposed_share"] <= flight["communication"]["share"] <= 1
    assert flight["comparison"][0]["within"]

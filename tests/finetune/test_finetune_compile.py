"""torch.compile, each layer by itself, and without a compiler; under DDP and FSDP: layouts.yaml, nightly."""

import json

import pytest
import torch
from rigs.command import interpreter
from rigs.packages import apt_installed
from test_finetune_equivalence import SHAPE
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from finetune import train

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]
JOB = {
    "tokenizer_name": "builtin:bytes", "use_peft": True, "lora_r": 4,
    "learning_rate": 1e-2, "max_length": 48, "per_device_train_batch_size": 8, "max_steps": 3, "profile_steps": 0,
    "logging_steps": 1, "save_strategy": "no",
}  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A C++ compiler, and a folder for what it makes that all tests here share."""
    apt_installed("g++", "g++", "libc6-dev")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes that import torch to compile a few kernels
        patch.setattr(inductor, "compile_threads", 1)
        yield


def job(folder, compiled):
    """The command's words; the same length in every row."""
    rows, out, model = folder / "train.jsonl", folder / f"out-{compiled}", folder / "model"
    model.mkdir(exist_ok=True)  # each layer is compiled by itself: two show it
    (model / "config.json").write_text(json.dumps({**SHAPE, "model_type": "llama", "num_hidden_layers": 2}))
    rows.write_text("".join(json.dumps({"text": f"What is {a} + 10? It is {a + 10}."}) + "\n" for a in range(10, 58)))
    written = folder / f"{compiled}.yaml"
    more = {"model_name_or_path": f"random:{model}", "dataset_name": str(rows), "output_dir": str(out)}
    written.write_text(json.dumps({**JOB, **more, "compile": compiled}))
    return ["--config", str(written)], out / "run.json"


def test_the_job_alone_compiles(kernels, tmp_path):
    """The command: the same losses with and without."""
    losses = []
    for compiled in (False, True):
        before = counters["stats"]["unique_graphs"]
        argv, record = job(tmp_path, compiled)
        assert train.main(argv) == 0
        told = json.loads(record.read_text())
        losses.append(told["loss"])
        assert told["layout"]["effective"]["compiled_layers"] == (2 if compiled else 0)
        assert (counters["stats"]["unique_graphs"] > before) == compiled
    torch._dynamo.reset()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.usefixtures("forked_ranks")
def test_without_a_compiler_the_job_is_refused(tmp_path):
    """Before the first step, in one line that says what to install or to set."""
    argv, record = job(tmp_path, True)
    done = interpreter("-m", "finetune.train", *argv, seconds=900, without=("CXX",), PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "finetune: refused: compile=true: torch.compile needs a C++ compiler"
    )
    assert "Traceback" not in done.stderr
    assert json.loads(record.read_text())["status"] == "refused"

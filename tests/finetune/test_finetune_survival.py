"""The job in one process: it stops in order, goes on to the same curve, and what it saves is whole.

What the built-in job leaves: its log, an adapter that loads. That it learns is in tests/agent/test_train.py.
"""

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rigs.command import TORCHRUN, interpreter
from rigs.tables import ROOT, each_row, rows_of
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from contracts import run_record
from contracts.job_config import ConfigError, JobConfig, read_config, read_mapping
from finetune import loop, train
from finetune.checkpoint import STATE, SaveError, find_resume, identify_run, list_checkpoints
from finetune.rows import IGNORED, load_tokenizer, prepare
from finetune.verify import MismatchError

rows = rows_of(__file__)
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]  # ranks of one: each test is a whole run
JOB = Path(__file__).with_name("survival_job.yaml").read_text(encoding="utf-8")


def run_job(folder, *overrides, plan=None):
    """Run the job in this process; returns exit code and run."""
    folder.mkdir(exist_ok=True, parents=True)
    config = folder.parent / "job.yaml"
    config.write_text(JOB)
    argv = ["--config", str(config)]
    if plan is not None:
        (folder.parent / "plan.json").write_text(json.dumps({**plan, "config": read_mapping(config)}))
        argv = ["--plan", str(folder.parent / "plan.json")]
    code = train.main([*argv, f"output_dir={folder}", *overrides])
    record = folder / "run.json"
    return code, json.loads(record.read_text()) if record.exists() else None


def curve(folder):
    """Loss by step, as the last run of each step wrote it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of a plan: its folder, exit code and record, and what it said."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code, record = run_job(folder, "eval_strategy=epoch", plan=rows("plan")())
    return folder, code, record, said.getvalue()


def test_a_run_ends_with_everything_written(whole):
    """Loss fell, run complete, checkpoints limited, evaluation each epoch; forecast and measurement side by side.

    One line per quantity, with the interval and whether it held, in the log of rank 0 too. Whatever the plan says of
    NCCL, a job over gloo asks it nothing: of a lone rank there are no transports, and no log.
    """
    folder, code, record, said = whole
    assert code == 0
    assert (record["schema_version"], record["status"], record["exit_code"]) == (1, "complete", 0)
    assert record["loss"]["last"] < 0.8 * record["loss"]["first"]
    assert record["steps_done"] == 14
    assert len(record["step_seconds"]) == 14
    assert [p.name for p in list_checkpoints(folder)] == ["checkpoint-12", "checkpoint-14"]
    assert [one["step"] for one in record["eval_loss"]] == [6, 12, 14]
    assert not list(folder.glob(".checkpoint-*"))
    assert len(curve(folder)) == 14
    held = {one["quantity"]: one["within"] for one in record["comparison"]}
    assert held == {"step_seconds": True, "memory_bytes": False}
    assert "step time: forecast 1 s (1e-06-1e+06), measured " in said and "peak memory per rank: forecast " in said
    assert (record["transports"], record["nccl"]) == ([], None)
    assert not (folder / "nccl").exists()


def test_left_away_or_null_are_what_transformers_makes_of_them(tmp_path):
    """No limit keeps every checkpoint; an evaluation by steps without a number of them comes with the log."""
    few = ["max_steps=6", "save_steps=2", "save_total_limit=null", "eval_strategy=steps", "logging_steps=3"]
    code, record = run_job(tmp_path / "out", *few)
    assert code == 0
    assert [p.name for p in list_checkpoints(tmp_path / "out")] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert [one["step"] for one in record["eval_loss"]] == [3, 6]


class StopsAtStep6(io.StringIO):
    """Standard error; SIGTERM comes as the run tells of its sixth step, however fast it goes."""

    def write(self, text):
        """Take it, and stop the run where it is that step's."""
        if text.startswith("step 6/"):
            signal.raise_signal(signal.SIGTERM)
        return super().write(text)


def test_sigterm_saves_and_the_next_run_ends_on_the_same_curve(whole, tmp_path):
    """Exit code 75, a checkpoint of the very step, and no difference to the uninterrupted run (dropout is on)."""
    folder = tmp_path / "out"
    with contextlib.redirect_stderr(StopsAtStep6()):
        code, record = run_job(folder)
    assert code == loop.RESUMABLE == 75
    assert (record["status"], record["exit_code"]) == ("interrupted", 75)
    assert list_checkpoints(folder)[-1].name == "checkpoint-7", "the ranks agree on it in the step that comes then"
    code, record = run_job(folder)
    assert code == 0
    assert "resumed from checkpoint-7" in "".join(record["notes"])
    assert curve(folder) == pytest.approx(curve(whole[0]), rel=1e-6)


def test_a_diverged_loss_ends_the_run_and_keeps_the_last_good_checkpoint(whole, tmp_path):
    """Exit code 65; the checkpoint before still resumes."""
    folder = tmp_path / "out"
    assert run_job(folder, "max_steps=4")[0] == 0
    code, record = run_job(folder, "max_steps=12", "learning_rate=1e29", "save_steps=100")
    assert code == loop.DivergedError.code
    assert record["status"] == "failed"
    assert "nan" in record["reason"] or "inf" in record["reason"]
    assert [p.name for p in list_checkpoints(folder)] == ["checkpoint-4"]
    assert run_job(folder, "max_steps=6")[0] == 0
    expected = {step: loss for step, loss in curve(whole[0]).items() if step in (5, 6)}
    assert {s: v for s, v in curve(folder).items() if s in (5, 6)} == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("forked_ranks")
def test_a_run_that_ends_among_its_profiled_steps_ends_with_its_own_code(tmp_path):
    """A process that left with torch's profiler running would die of SIGSEGV."""
    config = tmp_path / "job.yaml"
    config.write_text(JOB)
    argv = [sys.executable, "-m", "finetune.train", "--config", str(config), f"output_dir={tmp_path / 'out'}",
            "max_steps=4", "profile_steps=9", "save_strategy=no"]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["exit_code"] == 0


def test_a_full_disk_ends_the_run_and_keeps_the_last_good_checkpoint(small_disk, tmp_path):
    """Exit code 74; no half checkpoint is left, the one before resumes once there is room."""
    disk = small_disk("3400k")
    whole_model = ("use_peft=false", "lora_modules_to_save=[]", "save_total_limit=1")
    code, record = run_job(disk / "out", *whole_model)
    assert code == SaveError.code
    assert f"the disk of {disk / 'out'} is full (" in record["reason"]
    ended = run_record.read(disk / "out" / "run.json")
    with contextlib.suppress(OSError), (disk / "filler").open("wb", 0) as file:
        while file.write(bytes(4096)):
            pass
    run_record.save(disk / "out" / "run.json", replace(ended, status="rewritten"))
    assert run_record.read(disk / "out" / "run.json").status == "rewritten" and not list(disk.rglob("*.draft"))
    (disk / "filler").unlink()
    assert [p.name for p in list_checkpoints(disk / "out")] == ["checkpoint-4"]
    assert not list((disk / "out").glob(".checkpoint-*"))
    shutil.copytree(disk / "out", tmp_path / "roomy")
    code, record = run_job(tmp_path / "roomy", *whole_model)
    assert code == 0
    assert (Path(record["saved_model"]) / "model.safetensors").is_file()
    assert record["model"]["trainable"] == record["model"]["parameters"]
    assert "resumed from checkpoint-4" in "".join(record["notes"])


def test_a_disk_that_the_export_fills_is_the_reason(small_disk, capsys):
    """The checkpoint takes 0.9 MB, the base model that belongs to the adapter 0.7 MB more."""
    out = small_disk("1200k") / "out"
    code, record = run_job(out, "max_steps=1")
    assert (code, record["status"]) == (SaveError.code, "failed")
    assert record["reason"].startswith(f"{out / 'base'}: ") and "No space left on device" in record["reason"]
    assert f"finetune: failed: {record['reason']}" in capsys.readouterr().err
    assert [p.name for p in list_checkpoints(out)] == ["checkpoint-1"] and not (out / "base").exists()


def test_what_the_plan_sets_and_the_process_lacks_stops_the_job(tmp_path, monkeypatch):
    """Exit code 76, before the first step, with the difference as its reason."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    code, record = run_job(tmp_path / "out", plan=rows("other_interface")())
    assert code == MismatchError.code
    assert record["status"] == "mismatch"
    assert "GLOO_SOCKET_IFNAME: asked net1, got None" in record["reason"]
    assert record["loss"]["first"] is None


@each_row(("overrides", "word"), rows("refused"))
def test_what_cannot_run_is_refused_with_its_reason(tmp_path, overrides, word):
    """Exit code 2 and the setting's name."""
    code, record = run_job(tmp_path / "out", *overrides)
    assert code == ConfigError.code
    assert word in record["reason"]


def test_a_second_run_does_not_mix_with_the_first(tmp_path):
    """Another model, or a fresh start, in a folder with checkpoints is refused."""
    folder = tmp_path / "out"
    assert run_job(folder, "max_steps=2")[0] == 0
    assert run_job(folder, "lora_r=8")[0] == ConfigError.code
    assert run_job(folder, "resume_from_checkpoint=false")[0] == ConfigError.code
    with pytest.raises(ConfigError, match="trainer='topoflight', this run has 'trl'"):
        find_resume(read_config(folder.parent / "job.yaml", [f"output_dir={folder}"]).config, "trl")


def test_a_checkpoint_fits_the_same_model_under_another_path(tmp_path, monkeypatch):
    """A relative path and a link lead to the model of the checkpoint, a copy in another folder may differ."""
    for name in ("model", "copy", "out/checkpoint-2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path)
    config = JobConfig(output_dir=str(tmp_path / "out"), model_name_or_path=str(tmp_path / "model"))
    about = {"step": 2, "identity": identify_run(config)}
    (tmp_path / "out" / "checkpoint-2" / STATE).write_text(json.dumps(about))
    for name in ("model", "link", str(tmp_path / "link")):
        assert find_resume(replace(config, model_name_or_path=name))[1] == about
    for other in ({"model_name_or_path": "copy"}, {"seed": 7}):
        with pytest.raises(ConfigError, match="same value"):
            find_resume(replace(config, **other))


ROWS = "dataset_rows=320"  # 20 steps of 16


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
    config, *_ = read_config(None, [ROWS])
    examples, _ = prepare(config, config.dataset_test_split, load_tokenizer(config))

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

"""A user's own file of TRL's through `launch` on this host: unchanged, with the stand-in hub's tiny weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from rigs.command import interpreter
from rigs.hub import Hub, parquet
from test_finetune_hub import model_at, sums
from transformers import LlamaConfig

from agent.cli.launch import launch
from contracts import job_config, run_record
from finetune.checkpoint import list_checkpoints

USERS = Path(__file__).with_name("jobs") / "llama_gsm8k_trl.yaml"  # the user's file, unchanged
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Tiny weights under the name that the file has, and sums in GSM8K's form."""
    folder = tmp_path_factory.mktemp("hub")
    made = Hub()
    made.add("models", "Meta-Llama/Meta-Llama-3.1-8B-Instruct", model_at(folder / "llama", LlamaConfig))
    for split, count in (("train", 64), ("test", 8)):
        parquet(folder / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet", sums(count))
    made.add("datasets", "openai/gsm8k", folder / "gsm8k")
    made.moved["datasets", "gsm8k"] = "openai/gsm8k"
    yield made
    made.close()


def test_the_users_own_file_runs_unchanged_on_two_ranks(hub: Hub, tmp_path: Path) -> None:
    """Ten epochs, FSDP, bf16, full recomputation; the record has the launcher's plan with the commits of the hub."""
    out = tmp_path / "out"
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "no_proxy": "*",
                   "TOPOFLIGHT_STATE": str(tmp_path / "state")}  # fmt: skip
    words = ("launch", "--config", USERS, "--ranks", "2", "--no-preflight", "--output", out)
    done = interpreter("-m", "agent.cli", *words, seconds=800, without=("HF_", "KUBE"), **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    record, plan = run_record.read(out / "run.json"), job_config.read_plan(out / "plan.json")
    assert (record.status, record.exit_code) == ("complete", 0)
    assert record.steps_done == 10  # 10 epochs of one step: 64 rows, 2 ranks x 32
    commits = {name: getattr(record.plan.config, name) for name in ("model_revision", "dataset_revision")}
    assert all(len(commit) == 40 for commit in commits.values())
    assert record.plan == replace(plan, config=replace(plan.config, **commits))
    layout = plan.layout
    assert (layout.family, layout.micro_batch, layout.gradient_accumulation) == ("FSDP", 32, 1)
    assert (layout.precision, layout.checkpointing, layout.fused_cross_entropy) == ("bf16", "full", True)
    assert record.layout.effective is not None and record.layout.effective.precision == "bf16"
    assert (plan.config.max_length, plan.config.num_train_epochs, plan.config.lora_r) == (4096, 10, 16)
    assert record.model.name == "Meta-Llama/Meta-Llama-3.1-8B-Instruct"
    assert record.loss.first is not None and record.loss.last is not None and record.loss.last < record.loss.first
    assert len(record.eval_loss) == 10
    assert record.layout.effective.checkpointed_layers == 2
    assert [path.name for path in list_checkpoints(out)] == ["checkpoint-10"]
    assert list((out / "runs").glob("events.*"))
    told = "\n".join(record.notes)
    assert "torch's own flash attention is used" in told and "max_seq_length is now max_length" in told
    assert "Liger's kernel is not here" in told
    written = yaml.safe_load(USERS.read_text())
    assert plan.config.learning_rate == written["learning_rate"] and plan.config.output_dir == str(out)


def planned(hub: Hub, home: Path, *words: str) -> Result:
    """What `--dry-run` says in this process, with the hub's tokenizer in a separate process."""
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "cache"), "no_proxy": "*", "HF_HUB_OFFLINE": None,
                   "KUBECONFIG": None}  # fmt: skip
    return CliRunner().invoke(launch, [*words, "--dry-run"], env=environment)


def test_a_model_that_no_table_knows_is_planned_by_its_own_shape(hub: Hub, tmp_path: Path) -> None:
    """Its config.json is the hub's; the folder is the file's, where --output names no other.

    A name that the hub does not have either is refused before anything starts.
    """
    hub.repositories["models", "own/small"] = hub.repositories["models", "Meta-Llama/Meta-Llama-3.1-8B-Instruct"]
    job = tmp_path / "job.yaml"
    told = "use_peft: true\ndataset_name: gsm8k\ndataset_config: main\noutput_dir: /mnt/shared/small\n"
    job.write_text(f"model_name_or_path: own/small\n{told}")
    done = planned(hub, tmp_path, "--config", str(job), "--ranks", "2")
    assert done.exit_code == 0 and "assumed" not in done.stderr, done.output
    config = yaml.safe_load(done.stdout)["config"]
    assert (config["model_name_or_path"], config["output_dir"]) == ("own/small", "/mnt/shared/small")
    assert done.stdout.splitlines()[-1].endswith("--plan /mnt/shared/small/plan.json")
    job.write_text("model_name_or_path: own/nothing\ndataset_name: gsm8k\n")
    done = planned(hub, tmp_path, "--config", str(job))
    assert done.exit_code == 2 and "own/nothing" in done.stderr and "Not Found" in done.stderr

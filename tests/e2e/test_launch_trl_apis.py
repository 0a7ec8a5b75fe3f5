"""A user's own file of TRL's through `launch --api`: unchanged, on each job API, through the stand-in API server."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from rigs.recorded import path_of
from rigs.tables import each_row

from agent.cli.launch import launch
from contracts.job_config import read_config, read_plan

USERS = Path(__file__).parents[1] / "finetune" / "jobs" / "llama_gsm8k_trl.yaml"  # the user's file, unchanged

ROWS = yaml.safe_load(Path(__file__).with_name("launches.yaml").read_text())


def launched(kind: str, *more: str, config: Path = USERS, host: tuple[str, ...] = ("--host", str(path_of()))) -> Result:
    words = [*host, "--nodes", "2", "--image", "registry.example/f:1", "--claim", "shared", "--config", str(config)]
    return CliRunner().invoke(launch, [*words, "--api", kind, "--name", "sft", *more])


@pytest.mark.parametrize(("kind", "created"), [("trainjob", "TrainJob"), ("pytorchjob", "PyTorchJob"), ("job", "Job")])
def test_the_user_s_file_is_launched_as_it_stands(kubeconfig, tmp_path, kind, created):
    """Admitted and created; the pods' one document says what the file says, and the plan is made around it."""
    dry = launched(kind, "--dry-run", "-o", "json")
    assert dry.exit_code == 0, dry.output
    done = launched(kind)
    assert done.exit_code == 0, done.output
    (job,), (files,) = kubeconfig.of_kind(created), kubeconfig.of_kind("ConfigMap")
    assert set(files["data"]) == {"plan.json"}
    printed = {each["kind"]: each for each in json.loads(dry.stdout)["items"]}
    assert printed["ConfigMap"]["data"]["plan.json"] == files["data"]["plan.json"]
    assert "--config" not in str(job) and "/etc/config/plan.json" in str(printed)
    (tmp_path / "plan.json").write_text(files["data"]["plan.json"])
    plan, (config, _, notes) = read_plan(tmp_path / "plan.json"), read_config(USERS)
    assert plan.config == config  # every setting, and nothing else
    assert plan.notes == tuple(notes) and all(f"note: {text}" in done.stderr for text in notes)
    layout = plan.layout
    assert layout is not None and layout.family == "FSDP"
    assert (layout.world_size, layout.dp_shard, layout.micro_batch, layout.global_batch) == (16, 16, 32, 512)
    assert (layout.precision, layout.checkpointing, layout.fused_cross_entropy) == ("bf16", "full", True)
    assert plan.forecast.memory_bytes is not None and plan.forecast.memory_bytes.mid < 80e9


A40 = ("--machine", "2xa40-roce")  # the machine that the user's file is published for


def test_the_user_s_file_is_taken_on_its_own_machine_without_a_hub(tmp_path, monkeypatch):
    """Nothing says how long the rows are: 4096 tokens are assumed and named, and refuse nothing."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    wrong, memory = [], []
    for kind in ("job", "local"):  # the other APIs: the test above
        words = ["--config", str(USERS), *A40, "--nodes", "2", "--api", kind, "--dry-run", "-o", "json"]
        pods = [] if kind == "local" else ["--image", "registry.example/f:1", "--claim", "shared"]
        for lengths, notes in (((), ("were not measured", "are assumed to have 4096 tokens", "at most 2")),
                               (("--lengths", "100:7000,249:473"), ())):  # fmt: skip
            done = CliRunner().invoke(launch, [*words, *pods, *lengths])
            text = done.stdout.replace('\\"', '"').replace(" ", "")  # the plan is text inside the ConfigMap
            right = done.exit_code == 0 and '"reshard_after_forward":true' in text and '"micro_batch":32' in text
            said = all(note in done.stderr for note in notes) and ("assumed" in done.stderr) == bool(notes)
            if not (right and said):
                wrong.append((kind, lengths, done.exit_code, done.stderr[-800:]))
    assert not wrong, wrong
    for batch in (8, 112):
        words = ["--lengths", "100:7000,249:473", "--set", f"per_device_train_batch_size={batch}", "-o", "json"]
        done = CliRunner().invoke(launch, ["--config", str(USERS), *A40, "--nodes", "2", "--dry-run", *words])
        memory.append(json.loads(done.stdout)["forecast"]["memory_bytes"]["mid"])
    assert memory == sorted(set(memory)) and memory[-1] < 48e9, memory


def test_what_cannot_run_is_refused_before_anything_starts(kubeconfig, tmp_path):
    """On 48 GB cards 32 rows of 4096 tokens do not fit: the largest batch that does is named, with accumulation."""
    there = (*A40, "--lengths", "4096:7473")
    done = launched("job", host=there)
    assert done.exit_code == 3, done.output
    told = " ".join(done.output.split())
    assert "bf16: true, gradient_checkpointing: true, per_device_train_batch_size: 32, fsdp: full_shard" in told
    assert "at max_length: 4096 does not fit" in told
    assert "what can: per_device_train_batch_size: 16, gradient_accumulation_steps: 2 (" in told
    assert kubeconfig.of_kind("ConfigMap") == kubeconfig.of_kind("Job") == []
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({**yaml.safe_load(USERS.read_text()), "per_device_train_batch_size": 16,
                                   "gradient_accumulation_steps": 2}))  # fmt: skip
    took = launched("job", config=job, host=there)
    assert took.exit_code == 0, took.output  # what was named does run
    large = launched("job", "--set", "model_name_or_path=Llama-3.1-405B", host=A40)  # not for the assumed length alone
    assert large.exit_code == 3 and "with rows of one token either" in large.output, large.output


@each_row(("changed", "words"), ROWS["trl"])
def test_other_words_of_such_a_file_are_what_is_planned(tmp_path, changed, words):
    """Each value of the layout that is printed is the file's."""
    job = tmp_path / "job.yaml"
    file = {**yaml.safe_load(USERS.read_text()), **changed}
    job.write_text(yaml.safe_dump({name: value for name, value in file.items() if value is not None}))
    done = launched("job", "--dry-run", "--lengths", "100:7000,249:473", config=job)
    assert done.exit_code == 0, done.output
    files = next(each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "ConfigMap")
    document = yaml.safe_dump(json.loads(files["data"]["plan.json"]))
    assert [word for word in words if word not in document] == [], document

"""TRL's trainer: which files and models it takes over, what it leaves behind, and that both trainers learn the same.

A user's own file of TRL's through `launch` on this host: unchanged, with the stand-in hub's tiny weights.
"""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner
from resident import free_port
from rigs.command import ROOT, interpreter
from rigs.hub import Hub, parquet
from rigs.tables import data_of, rows_of
from test_finetune_hub import model_at, sums as questions
from transformers import CONFIG_MAPPING, LlamaConfig

from agent.cli.launch import launch
from agent.cli.recommend import recommend
from contracts import job_config, run_record
from contracts.job_config import ConfigError, JobConfig, JobPlan, parse_layout, read_plan
from contracts.layout import Layout
from finetune.checkpoint import list_checkpoints
from finetune.rows import Loader

rows = rows_of(__file__)
HERE = Path(__file__).parent
RECIPES = data_of(__file__, "jobs/recipes.yaml")
OTHERS: dict[str, dict[str, int]] = rows("others")()
SIZES = {**OTHERS, "gemma": {"head_dim": 8}, "smollm3": {"pad_token_id": 1}}
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory):
    """Tiny weights of every architecture and of the user's file; sums as prompts with completions, talks, and GSM8K."""
    folder, made = tmp_path_factory.mktemp("hub"), Hub()
    for kind in (*OTHERS, "llama", *{row["model"] for row in RECIPES.values()}):
        made.add("models", f"own/{kind}", model_at(folder / kind, CONFIG_MAPPING[kind], **SIZES.get(kind, {})))
    sums = [{"prompt": f"What is {a} + 2?", "completion": f" {a} + 2 = {a + 2}"} for a in range(72)]
    talks = [{"messages": [{"role": "user", "content": row["prompt"]},
                           {"role": "assistant", "content": row["completion"]}]} for row in sums]  # fmt: skip
    for name, rows, splits in (("sums", sums, ("train", "test")), ("talks", talks, ("train_sft", "test_sft"))):
        parquet(folder / name / "data" / f"{splits[0]}-00000-of-00001.parquet", rows[:64])
        parquet(folder / name / "data" / f"{splits[1]}-00000-of-00001.parquet", rows[64:])
        made.add("datasets", f"own/{name}", folder / name)
    made.add("models", "Meta-Llama/Meta-Llama-3.1-8B-Instruct", model_at(folder / "users", LlamaConfig))
    for split, count in (("train", 64), ("test", 8)):
        parquet(folder / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet", questions(count))
    made.add("datasets", "openai/gsm8k", folder / "gsm8k")
    made.moved["datasets", "gsm8k"] = "openai/gsm8k"
    yield made
    made.close()


@pytest.fixture
def at_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """This process asks the hub too."""
    for name, value in (("HF_ENDPOINT", hub.url), ("HF_HOME", str(tmp_path / "cache")), ("no_proxy", "*")):
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_OFFLINE", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    return hub


def planned(folder: Path, settings: dict, *words: str) -> tuple:
    """plan.json by `launch --dry-run`, and what stderr says; the plan is None where it is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(settings))
    words = ("--config", str(folder / "job.yaml"), "--lengths", "32:64", "--output", str(folder / "out"), *words)
    done = CliRunner().invoke(launch, [*words, "--dry-run", "-o", "json"])
    if done.exit_code:
        return None, f"exit code {done.exit_code}: {' '.join(done.output.split())}"
    (folder / "plan.json").write_text(done.stdout)
    return read_plan(folder / "plan.json"), done.stderr


def run_ranks(hub: Hub, folder: Path, plans: list[tuple[Path, bool]]) -> list[int]:
    """The exit codes of these plans on two ranks, one after the other."""
    cases = [{"plan": str(plan), "port": free_port(), "stop": stop, "environment": read_plan(plan).environment}
             for plan, stop in plans]  # fmt: skip
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "cache"), "no_proxy": "*"}
    words = (HERE / "trl_ranks.py", folder / "cases.json", 2)
    done = interpreter(*words, seconds=800, without=("HF_", "KUBE"), **environment)
    line = next((one for one in done.stdout.splitlines() if one.startswith("CODES ")), None)
    assert line is not None, done.stderr[-4000:]
    return json.loads(line.removeprefix("CODES "))


def test_public_recipes_are_accepted(at_hub: Hub, tmp_path: Path) -> None:
    """Each is TRL's, with the reason; what the layout holds is not told twice."""
    wrong = []
    for name, row in RECIPES.items():
        plan, said = planned(tmp_path / name, row["settings"], "--machine", "p5.48xlarge")
        line = "trainer: TRL's SFTTrainer, because the built-in one refuses: "
        if plan is None or plan.trl is None or line not in said:
            wrong.append((name, said[-600:]))
            continue
        file = str(tmp_path / name / "job.yaml")
        words = ["--config", file, "--lengths", "32:64", "--machine", "p5.48xlarge", "-o", "json"]
        done = CliRunner().invoke(recommend, words)
        asked = parse_layout(json.loads(done.stdout)["chosen"]["layout"], "") if done.exit_code == 0 else None
        if line not in done.stderr or asked != plan.layout:
            wrong.append((name, "recommend", asked, done.output))
        if {"bf16", "per_device_train_batch_size", "gradient_checkpointing"} & set(plan.trl):
            wrong.append((name, plan.trl))
        if any("no effect" in note for note in plan.notes):  # in the built-in trainer; TRL's gets these settings
            wrong.append((name, plan.notes))
    assert not wrong, wrong


def test_what_neither_trainer_does_is_refused_at_once(at_hub: Hub, tmp_path: Path) -> None:
    """All refusals of a file in one answer; a layout that TRL's trainer lacks; what only the built-in one makes."""
    whole = {"model_name_or_path": "own/llama", "dataset_name": "own/sums", "use_peft": True}
    wrong = []
    for settings, words, told in rows("refused")():
        plan, said = planned(tmp_path, {**whole, **settings}, "--ranks", "2", *words)
        if plan is not None or any(word not in said for word in told):
            wrong.append((settings, said[-600:]))
    assert not wrong, wrong


def test_what_trl_cannot_read_is_refused_or_made_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an unknown kind or with a broken line, a mixture without data sets; ShareGPT, and rows with a prompt."""
    from finetune import trl_inputs

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    made, none = JobPlan(trl={}), SimpleNamespace(dataset_streaming=False, datasets=None)
    for name, text, word in rows("unreadable")():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=word):
            trl_inputs.load_data(made, JobConfig(dataset_name=str(tmp_path / name)), none, none, tested=False)
    for mixture in (3, {}, {"datasets": []}, {"datasets": [{"path": "own/sums"}]}):
        with pytest.raises(ConfigError, match="mappings with id"):
            trl_inputs.load_data(JobPlan(trl={"dataset_mixture": mixture}), JobConfig(), none, none, tested=False)
    forms = rows("forms")()
    for number, row in enumerate(forms):
        named = JobConfig(dataset_name=str(parquet(tmp_path / f"{number}.parquet", [row])))
        read, _ = trl_inputs.load_data(made, named, none, none, tested=False)
        assert list(read) == [{"messages": forms[-1]["messages"]}]
    mixture = {"datasets": [{"id": named.dataset_name, "columns": ["messages", "prompt"]}]}
    read, _ = trl_inputs.load_data(JobPlan(trl={"dataset_mixture": mixture}), JobConfig(), none, none, tested=False)
    assert list(read) == [{"messages": forms[-1]["messages"]}]
    (tmp_path / "sums.csv").write_text("prompt,completion\n1+1=,2\n7,NA\n")  # every cell is text
    read, _ = trl_inputs.load_data(made, JobConfig(dataset_name=str(tmp_path / "sums.csv")), none, none, tested=False)
    assert list(read) == [{"prompt": "1+1=", "completion": "2"}, {"prompt": "7", "completion": "NA"}]


def test_what_the_layout_decides_is_added_to_the_settings_of_a_file() -> None:
    """accelerate shards no 4-bit weights of another type, and holds whole gradients until the last micro-batch."""
    from finetune import trl_inputs

    sharded, single, config = Layout(world_size=2, dp_shard=2), Layout(world_size=1), JobConfig(output_dir="out")
    by_accelerate = {"even_batches": False, "gradient_accumulation_kwargs": {"adjust_scheduler": False}}
    file = {"bnb_4bit_quant_storage": "uint8", "load_in_4bit": True, "model_name_or_path": "own/llama"}
    for options in (by_accelerate, json.dumps(by_accelerate)):
        plan = JobPlan(trl={**file, "accelerator_config": options})
        for layout, storage in ((sharded, "bfloat16"), (single, "uint8")):
            _, settings, model, *_ = trl_inputs.parse(plan, config, layout, False, print)
            assert (model.bnb_4bit_quant_storage, model.use_bnb_nested_quant) == (storage, True)
            expected = {"adjust_scheduler": False} | ({"sync_each_batch": True} if layout.dp_shard > 1 else {})
            assert settings.accelerator_config.gradient_accumulation_kwargs == expected
            assert not settings.accelerator_config.even_batches, "the file's settings of accelerate stay"
    off = JobPlan(trl={"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": False}}})
    _, settings, *_ = trl_inputs.parse(off, config, sharded, False, print)
    assert settings.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": False}
    for layout in (sharded, single):
        with pytest.raises(ConfigError, match="gradient_accumulation_kwargs=5: must be a mapping"):
            wrong = JobPlan(trl={"accelerator_config": {"gradient_accumulation_kwargs": 5}})
            trl_inputs.parse(wrong, config, layout, False, print)


def test_both_trainers_on_two_ranks(at_hub: Hub, tmp_path: Path) -> None:
    """Architectures that only TRL's has, a recipe of each public family, a stop that resumes, and equal losses."""
    lora, full = rows("lora")(), rows("full")()
    jobs = {kind: {"model_name_or_path": f"own/{kind}", **lora} for kind in OTHERS}
    jobs["opt"] |= {"fsdp": "full_shard"}
    epochs = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 12}  # the third step has 16 rows
    jobs["gpt_neox"] |= epochs
    jobs |= {name: {**row["settings"], **row["ranks"]} for name, row in RECIPES.items() if "ranks" in row}
    plans, wrong = {}, []
    for name, settings in jobs.items():
        plan, said = planned(tmp_path / name, settings, "--ranks", "2")
        assert plan is not None and plan.trl is not None and plan.layout.family == "DDP", said
        assert name not in OTHERS or f"not {name}. Without a GPU it runs DDP" in said
        assert "attn_implementation" in settings or "attn_implementation" not in plan.trl  # transformers chooses
        plans[name] = tmp_path / name / "plan.json"
    for name in ("topoflight", "trl"):
        plan, said = planned(tmp_path / name, full, "--ranks", "2", "--trainer", name, "--set", "layout.dp_replicate=2",
                             "--set", "fsdp=false")  # fmt: skip
        assert plan is not None, said
        plans[name] = tmp_path / name / "plan.json"
    order = [("topoflight", False), ("falcon", True), *((name, False) for name in plans if name != "topoflight")]
    codes = run_ranks(at_hub, tmp_path, [(plans[name], stop) for name, stop in order])
    records = {name: run_record.read(tmp_path / name / "out" / "run.json") for name in plans}
    assert codes == [0, 75, *[0] * (len(plans) - 1)], [record.reason for record in records.values() if record.reason]
    for name, record in records.items():
        left = record.adapter or record.saved_model
        if record.status != "complete" or not left or not Path(left).is_dir() or not math.isfinite(record.loss.last):
            wrong.append((name, record))
        if not record.comparison or record.layout.effective.wrapper != "DDP" or record.measured.memory_bytes is None:
            wrong.append((name, record.comparison, record.layout))
        if not record.transports:
            wrong.append((name, "no transports"))
        if (tmp_path / name / "out" / "ranks" / "state_rank_1.json").exists() is False:
            wrong.append((name, "no monitor"))
    assert not wrong, wrong
    assert "resumed from checkpoint-3" in records["falcon"].notes and records["falcon"].steps_done == 4
    assert [one.step for one in records["phi"].eval_loss] == [4]
    loader = Loader(examples=[None] * 64, pad=0, micro_batch=12, micro_batches=1, rank=0, ranks=2)
    assert records["gpt_neox"].steps_done == 2 * loader.steps == 6
    ours, theirs = records["topoflight"].loss, records["trl"].loss
    assert (ours.first, ours.last) == pytest.approx((theirs.first, theirs.last), rel=1e-5)
    assert ours.last < 0.98 * ours.first


def test_every_default_that_differs_from_trls_is_in_the_table() -> None:
    """docs/reference/finetune-job.md, "What a file leaves out": each setting that both have, and only those."""
    import trl

    kinds = (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    theirs = {action.dest: action.default for action in trl.TrlParser(kinds)._actions}
    same = ((), None), ("sdpa", None), (None, -1), ((), "none")  # ours and theirs, which mean the same
    ours = {one.name: getattr(JobConfig(), one.name) for one in fields(JobConfig)}
    wrong = {name for name, value in ours.items()
             if name in theirs and value != theirs[name] and (value, theirs[name]) not in same}  # fmt: skip
    page = (ROOT / "docs" / "reference" / "finetune-job.md").read_text(encoding="utf-8")
    rows = page.partition("## What a file leaves out")[2].partition("## Two trainers")[0].splitlines()
    assert {row.split("`")[1] for row in rows if row.startswith("| `")} == wrong


USERS = Path(__file__).with_name("jobs") / "llama_gsm8k_trl.yaml"  # the user's file, unchanged


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


def test_a_model_that_no_table_knows_is_planned_by_its_own_shape(at_hub: Hub, tmp_path: Path) -> None:
    """Its config.json is the hub's; the folder is the file's, where --output names no other.

    A name that the hub does not have either is refused before anything starts.
    """
    at_hub.repositories["models", "own/small"] = at_hub.repositories["models", "Meta-Llama/Meta-Llama-3.1-8B-Instruct"]
    job = tmp_path / "job.yaml"
    told = "use_peft: true\ndataset_name: gsm8k\ndataset_config: main\noutput_dir: /mnt/shared/small\n"
    job.write_text(f"model_name_or_path: own/small\n{told}")
    done = CliRunner().invoke(launch, ["--config", str(job), "--ranks", "2", "--dry-run"])
    assert done.exit_code == 0 and "assumed" not in done.stderr, done.output
    config = yaml.safe_load(done.stdout)["config"]
    assert (config["model_name_or_path"], config["output_dir"]) == ("own/small", "/mnt/shared/small")
    assert done.stdout.splitlines()[-1].endswith("--plan /mnt/shared/small/plan.json")
    job.write_text("model_name_or_path: own/nothing\ndataset_name: gsm8k\n")
    done = CliRunner().invoke(launch, ["--config", str(job), "--dry-run"])
    assert done.exit_code == 2 and "own/nothing" in done.stderr and "Not Found" in done.stderr

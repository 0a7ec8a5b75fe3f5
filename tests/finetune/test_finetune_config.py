"""The job's settings: old names, unknown names, wrong values, plans that say something else; the names of TRL."""

import dataclasses
import json
import re
import tomllib
import typing
from collections import Counter
from pathlib import Path

import pytest
from rigs.tables import ROOT, data_of, each_row

from contracts import job_config, trl
from contracts.job_config import ConfigError, JobConfig, JobPlan, dump_plan, parse_config, read_config, read_plan
from contracts.layout import Layout
from planner.stacks.exports import settle_layout

JOBS = Path(__file__).with_name("jobs")
SEED = JOBS / "llama_gsm8k_trl.yaml"
SETTINGS = data_of(__file__, "jobs/settings.yaml")


def test_a_config_of_older_releases_reads_as_it_stands():
    """Each old name is taken, and a note says today's."""
    config, _, notes, *_ = read_config(SEED)
    assert config.max_length == 4096
    assert config.dtype == "bfloat16"
    assert config.layout == SETTINGS["older"]
    assert config.learning_rate == pytest.approx(2e-4)
    assert config.lr_scheduler_type == "inverse_sqrt"
    assert config.report_to == ("tensorboard",)
    assert config.dataset_config == "main"
    told = "\n".join(notes)
    for old, new in (("max_seq_length", "max_length"), ("torch_dtype", "dtype"), ("use_liger", "fused_cross_entropy")):
        assert f"{old} is now {new}" in told
    assert "fsdp: full_shard auto_wrap is fsdp: full_shard here" in told
    layout = settle_layout(JobPlan(config=config), 4, has_gpu=True)  # without a plan it shards over the world
    assert (layout.family, layout.dp_shard, layout.micro_batch) == ("FSDP", 4, 32)
    assert (layout.precision, layout.checkpointing, layout.fused_cross_entropy) == ("bf16", "full", True)


def test_trl_s_parser_gets_todays_names_and_nothing_that_the_layout_holds():
    """Liger's older name too; what the plan's layout says is left out."""
    raw = {"use_liger": True, "max_seq_length": 8, "bf16": True, "per_device_train_batch_size": 2, "warmup_ratio": 0.1}
    assert trl.make_trl_settings(raw, {}) == {"use_liger_kernel": True, "max_length": 8, "warmup_steps": 0.1}
    assert trl.make_trl_settings({"max_seq_length": 8, "max_length": None}, {}) == {"max_length": 8}


@each_row("order", [1, -1])
def test_a_name_without_a_value_does_not_hide_another_name(order):
    """A dump of two releases has both names of a setting, one of them null, in any order."""
    raw = {"max_length": None, "max_seq_length": 8, "dtype": None, "torch_dtype": "bfloat16"}
    config, _, notes, *_ = parse_config(dict([*raw.items()][::order]))
    assert (config.max_length, config.dtype) == (8, "bfloat16")
    assert [note for note in notes if "null" in note] == []


@each_row(("raw", "words"), [*SETTINGS["wrong"], *SETTINGS["trl_only"]])
def test_a_wrong_setting_is_named(raw, words):
    """The message names the setting, the value and what is allowed or close."""
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    for word in words:
        assert word in str(caught.value)


def test_overrides_win_and_reach_into_mappings(tmp_path):
    """key=value on the command line, with dots, in YAML's own types; a bare no, in YAML 1.1 false, is no."""
    path = tmp_path / "job.yaml"
    path.write_text("learning_rate: 1.0e-4\nmax_steps: 5\neval_strategy: no\n")
    config, *_ = read_config(path, ["learning_rate=2e-3", "layout.tp=2", "report_to=[tensorboard]"])
    assert (config.learning_rate, config.max_steps, config.layout) == (2e-3, 5, {"tp": 2})
    assert (config.report_to, config.eval_strategy) == (("tensorboard",), "no")


@each_row(("text", "overrides", "words"), SETTINGS["files"])
def test_a_file_or_an_override_that_is_no_mapping_is_refused(tmp_path, text, overrides, words):
    """Lists, broken YAML, nothing at all, and a key that occurs twice, of which the loader would take the last."""
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2,\n "stage": 3}}')
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(path, overrides)
    assert words in str(caught.value)


@each_row(("raw", "name"), SETTINGS["against_the_plan"])
def test_a_value_that_contradicts_the_plan_is_refused(raw, name):
    """The plan is not overruled silently, and neither is the config. Equal values in both are no contradiction."""
    plan = JobPlan(layout=Layout(world_size=2, dp_shard=2, precision="fp32", micro_batch=4))
    agreeing, *_ = parse_config({"per_device_train_batch_size": 4, "bf16": False, "fsdp": True})
    assert settle_layout(dataclasses.replace(plan, config=agreeing), 2, has_gpu=False) == plan.layout
    with pytest.raises(ConfigError, match=name):
        settle_layout(dataclasses.replace(plan, config=parse_config(raw)[0]), 2, has_gpu=False)


def test_a_plan_or_a_degree_for_other_ranks_is_refused():
    """Two ranks do not run a plan of four, and tp=3 does not divide four."""
    with pytest.raises(ConfigError, match=r"world_size is 4, 2 ranks"):
        settle_layout(JobPlan(layout=Layout(world_size=4, dp_shard=4)), 2, has_gpu=False)
    with pytest.raises(ConfigError, match=r"layout\.tp=3"):
        settle_layout(JobPlan(config=JobConfig(layout={"tp": 3})), 4, has_gpu=False)


def test_the_plan_is_one_document(tmp_path):
    """Settings, layout and the rest read back as they were written; settings over it are the job's own words."""
    config, _, notes, *_ = read_config(SEED)
    layout = Layout(world_size=2, dp_shard=2, micro_batch=32, checkpointing="full", fused_cross_entropy=True)
    plan = JobPlan(config=config, layout=layout, notes=tuple(notes),
                   environment={"NCCL_DEBUG": "INFO"}, transport={"network": "IB"})  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(plan))
    assert read_plan(path) == plan
    other = read_plan(path, ["max_length=512", "layout.micro_batch=4"])
    assert (other.config.max_length, other.config.layout["micro_batch"]) == (512, 4)
    with pytest.raises(ConfigError, match="per_device_train_batch_size: 4, the plan per_device_train_batch_size: 32"):
        settle_layout(other, 2, has_gpu=True)
    for odd, words in (({"job": {}}, "unknown 'job'"), ({"config": {"maximum": 7}}, "unknown setting 'maximum'"),
                       ({"config": 3}, "config: must be a mapping"), ({"schema_version": 9}, "reads 1")):  # fmt: skip
        path.write_text(json.dumps({**json.loads(dump_plan(plan)), **odd}))
        with pytest.raises(ConfigError, match=words):
            read_plan(path)
    path.write_text("[1]")
    for place, words in ((path, "must hold a mapping of .*layout"), (tmp_path / "absent.json", "plan .*absent.json")):
        with pytest.raises(ConfigError, match=words):
            read_plan(place)
    with pytest.raises(ConfigError, match=r"dp_shards.*dp_shard"):
        job_config.parse_layout({"world_size": 2, "dp_shards": 2}, "plan")


# The fields of TrainingArguments, SFTConfig, ModelConfig and ScriptArguments that no release below lacks a word for.
FIELDS = data_of(__file__, "jobs/trl_fields.json")
NULLABLE = {"max_length": 1024, "max_seq_length": 1024}  # null would mean rows of any length


@each_row("release", FIELDS)
def test_every_field_of_trl_s_parser_is_known(release):
    """Left at null, each is a setting, a note or nothing; none is an unknown name."""
    for name in FIELDS[release]:
        parse_config({name: NULLABLE.get(name)})


def test_every_field_with_a_strange_value_is_honoured_noted_or_refused_by_name():
    """Nothing of a file is passed over in silence: a value that no setting has is in a note or in the refusal."""
    for name in sorted({name for names in FIELDS.values() for name in names}):
        try:
            _, said, notes, *_ = parse_config({name: "strange"})
        except ConfigError as error:
            assert name in str(error), name
        else:
            assert any(name in note for note in notes) or {"strange", ("strange",)} & set(said.values()), name


@each_row(("raw", "layout"), SETTINGS["layout"])
def test_what_trl_says_of_the_layout(raw, layout):
    """Strings, lists, numbers and mappings of FSDP and DeepSpeed, in members of the layout."""
    found = dict(parse_config(raw)[0].layout)
    if "sharding" in layout:  # every rank is a data-parallel one
        assert [found.pop(degree) for degree in ("tp", "pp", "cp")] == [1, 1, 1]
        if layout["sharding"] == "zero3" and "dp_shard" not in layout:
            assert found.pop("dp_replicate") == 1
        if layout["sharding"] == "zero3":  # as accelerate and DeepSpeed do where the file is silent
            layout = {"reshard_after_forward": True, "offload": "none", **layout}
    assert found == layout


def test_all_wrong_settings_of_a_file_are_named_at_once():
    """One correction, not one a start; of a long value its beginning."""
    several = SETTINGS["several"]
    with pytest.raises(ConfigError) as caught:
        parse_config(several)
    text = str(caught.value)
    assert [name for name in several if f"{name}=" in text] == [name for name in several if name != "fp16"]
    with pytest.raises(ConfigError, match=r"unknown setting 'lora_rr' \(close: lora_r.*fp16=true.*report_to='wandb'"):
        parse_config({"lora_rr": 8, "fp16": True, "report_to": "wandb"})
    assert "org/name-0" in text and "org/name-9" not in text
    with pytest.raises(ConfigError, match=r"'x23' and 976 more$"):  # another kind of file
        parse_config({f"x{number}": 1 for number in range(1000)})


def test_a_dump_of_transformers_defaults_asks_for_nothing():
    """What TrainingArguments.to_dict() writes in addition to the settings: -1, empty lists, empty mappings."""
    config, said, notes, *_ = parse_config(SETTINGS["dump"])
    assert said == {"warmup_steps": 0.0, "save_total_limit": None}
    assert dataclasses.replace(config, save_total_limit=1) == JobConfig()
    assert not [note for note in notes if "taken" in note]
    for raw in ({"eval_steps": False}, {"eval_steps": 0.0}, {"max_steps": -1.0}, {"max_steps": "-1"}):
        assert parse_config(raw)[0] == JobConfig(), raw


def test_quoted_truths_and_numbers_are_read_as_argparse_reads_them():
    """TrlParser makes a file's values its parser's defaults: texts among them go through transformers' own readers."""
    config, *_ = parse_config(SETTINGS["quoted"])
    assert (config.packing, config.max_steps) == (True, 8)
    layout = {"precision": "bf16", "checkpointing": "none", "compile": True, "sharding": "zero3", "offload": "none",
              "reshard_after_forward": False, "micro_batch": 4}  # fmt: skip
    assert {name: config.layout[name] for name in layout} == layout
    assert parse_config({"max_steps": "-1"})[0].max_steps is None
    assert parse_config({"num_train_epochs": 0, "max_steps": 2})[0].max_steps == 2


def test_a_schedule_of_deepspeed_is_transformers_own():
    """Where it leaves its numbers to the file; a second one is refused, and so are its own numbers."""
    assert parse_config({"deepspeed": SETTINGS["decaying"]})[0].lr_scheduler_type == "linear"
    constant = {**SETTINGS["decaying"], "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    config = parse_config({"deepspeed": constant, "lr_scheduler_type": "constant_with_warmup"})[0]
    assert config.lr_scheduler_type == "constant_with_warmup"
    with pytest.raises(ConfigError, match=r"scheduler.type asks for .* constant_with_warmup, and the file .* cosine"):
        parse_config({"deepspeed": constant, "lr_scheduler_type": "cosine"})
    constant["scheduler"]["params"]["warmup_max_lr"] = 1e-4
    with pytest.raises(ConfigError, match=r"deepspeed.scheduler.params={'warmup_max_lr': 0.0001}: only 'auto'"):
        parse_config({"deepspeed": constant})


def test_a_file_that_the_file_names_is_part_of_it(tmp_path):
    """DeepSpeed's JSON and a chat template next to the settings; the launcher hands on one document."""
    (tmp_path / "zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}))
    (tmp_path / "talk.jinja").write_text("{{ messages }}")
    job = tmp_path / "job.yaml"
    job.write_text("deepspeed: zero2.json\nchat_template_path: talk.jinja\n")
    config, _, notes, *_ = read_config(job)
    assert (config.layout["reshard_after_forward"], config.max_grad_norm) == (False, 0.5)
    assert config.chat_template == "{{ messages }}"
    assert "deepspeed: ZeRO stage 2 is run by torch's fully_shard, without DeepSpeed" in notes


@each_row(("ranks", "node", "degrees"), [(16, 8, (2, 8)), (8, 8, (1, 8)), (4, 1, (4, 1)), (1, 1, (1, 1))])
def test_hybrid_shard_shards_within_a_node(ranks, node, degrees):
    """For any number of nodes, with a plan and without one."""
    config = parse_config({"fsdp": "hybrid_shard auto_wrap"})[0]
    asked = job_config.resolve_layout(config.layout, ranks, node)
    layout = settle_layout(JobPlan(config=config), ranks, has_gpu=True, ranks_per_node=node)
    assert (asked["dp_replicate"], asked["dp_shard"]) == (layout.dp_replicate, layout.dp_shard) == degrees
    assert layout.sharding == ("zero3" if ranks > 1 else "ddp")


def test_every_row_of_the_option_tables_is_sound():
    names = trl.option_names()
    of_command = tomllib.loads((ROOT / "agent/base/question.toml").read_text("utf-8")).keys()
    settings, members = ({one.name for one in dataclasses.fields(kind)} for kind in (JobConfig, Layout))
    schedules = typing.get_args(typing.get_type_hints(JobConfig)["lr_scheduler_type"])
    wrong = []
    checked = names["only"].keys() - names["values"].keys()  # the others are also translated
    tables = (names["renamed"], names["no_effect"], checked, names["in_layout"], settings)
    found = Counter(name for table in tables for name in table)
    wrong += [f"{name}: in {count} tables" for name, count in found.items() if count > 1]
    for name, here in (*names["renamed"].items(), *names["elsewhere"].items()):
        options = re.findall(r"--[a-z-]+", here)  # of the command
        if not (set(options) <= of_command if options else here in job_config.known_settings()):
            wrong.append(f"{name} = {here}: no setting of that name")
    for name, member in (
        *names["in_layout"].items(),
        *((option, member) for member, option in names["spelled"].items()),
        *((option, member) for member, row in names["switch"].items() for option in row["options"]),
        *((word, member) for word, sets in names["fsdp"].items() for member in sets),
    ):
        if member not in members:
            wrong.append(f"{name} = {member}: no member of the layout")
    wrong += [name for name in names["values"]["deepspeed.scheduler.type"].values() if name not in schedules]
    reasons = names["no_effect"] | {name: row["why"] for name, row in names["only"].items()}
    wrong += [f"{name}: no reason" for name, why in reasons.items() if len(why.split()) < 2]
    assert wrong == []


def test_every_option_of_the_tables_is_read():
    """An option without effect leaves a note, whatever its value; one of a few values takes each of these."""
    names, wrong = trl.option_names(), []
    rows = [(name, 5) for name in names["no_effect"]]
    rows += [(name, value) for name, row in names["only"].items() for value in [*row["allowed"], None]
             if name not in names["values"] and "offload_" not in name]  # fmt: skip
    for name, value in rows:
        _, explicit, notes, *_ = parse_config({name: value})
        is_noted = any(note.startswith(f"{name}: no effect, ") for note in notes) or name.startswith("deepspeed.")
        if explicit or not is_noted:
            wrong.append((name, value, explicit, notes))
    assert wrong == []

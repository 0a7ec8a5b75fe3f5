"""The job's settings: old names, unknown names, wrong values, and plans that say something else."""

import dataclasses
import json
from pathlib import Path

import pytest

from contracts.job_config import ConfigError, JobConfig, parse_config, read_config
from contracts.layout import Layout
from finetune.plan import Plan, as_planned, parse_layout, read_plan, settle_layout

SEED = Path(__file__).with_name("jobs") / "llama_gsm8k_trl.yaml"


def test_a_config_of_older_releases_reads_as_it_stands():
    """Each old name is taken, and a note says today's."""
    config, _, notes = read_config(SEED)
    assert config.max_length == 4096
    assert config.dtype == "bfloat16"
    assert config.fused_cross_entropy is True
    assert config.fsdp is True
    assert config.activation_checkpointing is True
    assert config.learning_rate == pytest.approx(2e-4)
    assert config.lr_scheduler_type == "inverse_sqrt"
    assert config.report_to == ("tensorboard",)
    assert config.dataset_config == "main"
    told = "\n".join(notes)
    for old, new in (("max_seq_length", "max_length"), ("torch_dtype", "dtype"), ("use_liger", "fused_cross_entropy")):
        assert f"{old} is now {new}" in told
    assert "fsdp: 'full_shard auto_wrap' is now fsdp: true" in told


def test_its_layout_is_fsdp_over_all_ranks():
    """fsdp without a plan shards over the world."""
    layout = settle_layout(read_config(SEED)[0], None, 4, has_gpu=True)
    assert (layout.family, layout.dp_shard, layout.micro_batch) == ("FSDP", 4, 32)
    assert (layout.precision, layout.checkpointing, layout.fused_cross_entropy) == ("bf16", "full", True)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"learning_rte": 1e-4}, ["learning_rte", "learning_rate"]),
        ({"max_seq_len": 7}, ["max_seq_len", "max_seq_length"]),
        ({"learning_rate": "fast"}, ["learning_rate", "fast", "a number"]),
        ({"packing": "yes please"}, ["packing", "true or false"]),
        ({"lr_scheduler_type": "exponential"}, ["lr_scheduler_type", "exponential", "inverse_sqrt"]),
        ({"max_length": 1024, "max_seq_length": 4096}, ["max_seq_length", "max_length", "both"]),
        ({"fsdp": "full_shrad"}, ["fsdp", "full_shrad", "full_shard"]),
        ({"fsdp_config": {"reshard_after_fwd": True}}, ["fsdp_config.reshard_after_fwd", "reshard_after_forward"]),
        ({"fp16": True}, ["fp16", "bf16"]),
        ({"trust_remote_code": True}, ["trust_remote_code"]),
        ({"lora_dropout": 1.5}, ["lora_dropout", "1.5"]),
        ({"max_steps": 0}, ["max_steps", "at least 1"]),
        ({"report_to": ["wandb"]}, ["wandb", "tensorboard"]),
        ({"load_in_4bit": True}, ["load_in_4bit", "use_peft"]),
        ({"lora_r": True}, ["lora_r", "a whole number"]),
        ({"eval_strategy": True}, ["eval_strategy", "epoch"]),
    ],
)
def test_a_wrong_setting_is_named(raw, words):
    """The message names the setting, the value and what is allowed or close."""
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    for word in words:
        assert word in str(caught.value)


def test_overrides_win_and_reach_into_mappings(tmp_path):
    """key=value on the command line, with dots, in YAML's own types."""
    path = tmp_path / "job.yaml"
    path.write_text("learning_rate: 1.0e-4\nmax_steps: 5\n")
    config, _, _ = read_config(path, ["learning_rate=2e-3", "layout.tp=2", "report_to=[tensorboard]"])
    assert (config.learning_rate, config.max_steps, config.layout) == (2e-3, 5, {"tp": 2})
    assert config.report_to == ("tensorboard",)


def test_a_bare_no_is_no(tmp_path):
    """YAML 1.1 reads it as false."""
    path = tmp_path / "job.yaml"
    path.write_text("eval_strategy: no\nsave_strategy: no\n")
    config, _, _ = read_config(path)
    assert (config.eval_strategy, config.save_strategy) == ("no", "no")


@pytest.mark.parametrize("text", ["learning_rate", "max_steps.x=1"])
def test_a_malformed_override_is_refused(tmp_path, text):
    """An override is key=value, into mappings only."""
    path = tmp_path / "job.yaml"
    path.write_text("max_steps: 5\n")
    with pytest.raises(ConfigError, match=text.split("=")[0].split(".")[0]):
        read_config(path, [text])


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [1\n", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, content):
    """Lists, broken YAML and nothing at all."""
    path = tmp_path / "job.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"job\.yaml"):
        read_config(path)


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ({"per_device_train_batch_size": 32}, "micro_batch"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation"),
        ({"bf16": True}, "precision"),
        ({"fsdp": False}, "fsdp"),
        ({"layout": {"tp": 2}}, "tp"),
        ({"activation_checkpointing": True}, "checkpointing"),
        ({"fsdp_config": {"cpu_offload": True}}, "offload"),
    ],
)
def test_a_value_that_contradicts_the_plan_is_refused(raw, name):
    """The plan is not overruled silently, and neither is the config."""
    plan = Plan(layout=Layout(world_size=2, dp_shard=2, precision="fp32", micro_batch=4))
    with pytest.raises(ConfigError, match=name):
        settle_layout(parse_config(raw)[0], plan, 2, has_gpu=False)


def test_a_config_that_agrees_with_the_plan_runs_the_plan():
    """Saying the same thing twice is no contradiction."""
    plan = Plan(layout=Layout(world_size=2, dp_shard=2, precision="fp32", micro_batch=4))
    config = JobConfig(per_device_train_batch_size=4, bf16=False, fsdp=True)
    assert settle_layout(config, plan, 2, has_gpu=False) == plan.layout


def test_a_plan_for_another_world_is_refused():
    """Two ranks do not run a plan of four."""
    plan = Plan(layout=Layout(world_size=4, dp_shard=4))
    with pytest.raises(ConfigError, match=r"world_size is 4, 2 ranks"):
        settle_layout(JobConfig(), plan, 2, has_gpu=False)


def test_a_degree_that_does_not_divide_is_refused():
    """tp=3 of 4 ranks."""
    with pytest.raises(ConfigError, match=r"layout\.tp=3"):
        settle_layout(JobConfig(layout={"tp": 3}), None, 4, has_gpu=False)


def test_plan_files(tmp_path):
    """A plan reads back; unknown layout members are named with close ones."""
    path = tmp_path / "plan.json"
    path.write_text(
        json.dumps({"layout": {"world_size": 2, "dp_shard": 2}, "environment": {"GLOO_SOCKET_IFNAME": "lo"}})
    )
    plan = read_plan(path)
    assert plan.layout.dp_shard == 2
    assert plan.environment == {"GLOO_SOCKET_IFNAME": "lo"}
    with pytest.raises(ConfigError, match=r"dp_shards.*dp_shard"):
        parse_layout({"world_size": 2, "dp_shards": 2}, "plan")
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="layout"):
        read_plan(path)
    with pytest.raises(ConfigError, match="plan"):
        read_plan(tmp_path / "absent.json")


def test_a_plan_fills_what_the_settings_leave_open_and_refuses_what_they_say_otherwise(tmp_path):
    """The forecast is for one job: rows of that length, those adapters."""
    plan = Plan(layout=Layout(world_size=1, precision="fp32"), job={"max_length": 2048, "use_peft": True, "lora_r": 32})
    job = tmp_path / "job.yaml"
    job.write_text("use_peft: true\n")
    config, said, _ = read_config(job)
    filled = as_planned(config, said, plan)
    assert (filled.max_length, filled.lora_r) == (2048, 32)
    for setting, says in (("max_length=512", "max_length: the config says 512, the plan says 2048"),
                          ("lora_r=8", "lora_r: the config says 8, the plan says 32")):  # fmt: skip
        config, said, _ = read_config(job, [setting])
        with pytest.raises(ConfigError, match=says):
            as_planned(config, said, plan)
    odd = dataclasses.replace(plan, job={"maximum": 7})
    with pytest.raises(ConfigError, match=r"job\.maximum: no such setting"):
        as_planned(config, said, odd)

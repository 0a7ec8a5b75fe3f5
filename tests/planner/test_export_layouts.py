"""Exports: what each framework is given is what was recommended, by its own reader where it is installed."""

import dataclasses
import json
import math
import re
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from rigs.tables import each_row, rows_of

from contracts.job_config import JobPlan, parse_config
from contracts.layout import EIGHT_BITS, Layout
from contracts.tables import read_table
from finetune.parallel import settle_layout
from planner.advice import ExportError, ExportRequest, request_of
from planner.forecast import machines
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import recommend
from planner.stacks import ENGINES, exports
from planner.stacks.exports import FORMATS, export

rows = rows_of(__file__)

LLAMA = model_named("Llama-3-8B")
FSDP = Layout(world_size=8, dp_shard=8, micro_batch=2, gradient_accumulation=4, checkpointing="full")
PIPELINE = Layout(
    world_size=16, tp=2, pp=4, dp_shard=2, sharding="zero1", sequence_parallel=True, schedule="interleaved",
    virtual_stages=2, gradient_accumulation=8,
)  # fmt: skip
NAMED = {"FSDP": FSDP, "PP": PIPELINE}


def request(layout: Layout, ranks_per_node: int = 8, **train) -> ExportRequest:
    """A request for Llama-3-8B."""
    spec = TrainSpec(**{"method": "full", "engine": "deepspeed", **train})
    return ExportRequest(layout=layout, model=LLAMA, train=spec, ranks_per_node=ranks_per_node)


# The configuration of a published run of Llama-3-8B with ZeRO-3 and CPU offload on p4d.24xlarge.
PUBLISHED = json.loads(Path(__file__).with_name("deepspeed_published.json").read_text(encoding="utf-8"))


def test_deepspeed_gives_the_published_configuration_back() -> None:
    """Same job, same JSON, key by key and in its order."""
    layout = Layout(world_size=4, dp_shard=4, gradient_accumulation=4, checkpointing="full", offload="all",
                    reshard_after_forward=True)  # fmt: skip
    text = export("deepspeed", request(layout, 4))
    assert json.loads(text) == PUBLISHED
    assert list(json.loads(text)["zero_optimization"]) == list(PUBLISHED["zero_optimization"])


def test_finetune_yaml_is_read_back_to_the_same_layout() -> None:
    """The job's own reader settles on exactly the recommended layout."""
    for machine, nodes, train in (
        ("dgx-h100", 2, TrainSpec(method="full", global_batch=64, sequence_length=4096)),
        ("2xa40-roce", 2, TrainSpec(method="lora", global_batch=128, sequence_length=1024)),
        ("p4d.24xlarge", 4, TrainSpec(method="lora", global_batch=64)),
    ):
        answer = recommend(machines.cluster(machine, nodes), (), model_named("Llama-3.1-8B"), train)
        wanted = request_of(answer, ranks_per_node=machines.machine(machine).gpus)
        settings, _, _ = parse_config(yaml.safe_load(export("finetune", wanted)))
        assert settle_layout(JobPlan(config=settings), answer.chosen.layout.world_size, True) == answer.chosen.layout


@pytest.mark.long
def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    """accelerate's own loader accepts it and sees FSDP2 with the degrees."""
    reader = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate is not installed")
    layout = Layout(world_size=16, dp_shard=8, dp_replicate=2, checkpointing="full")
    file = tmp_path / "accelerate.yaml"
    file.write_text(export("accelerate", request(layout)))
    loaded = reader.load_config_from_file(str(file))
    assert loaded.distributed_type == "FSDP"
    assert loaded.num_machines == 2
    assert loaded.num_processes == 16
    from accelerate.utils import FullyShardedDataParallelPlugin

    known = {f"fsdp_{field.name}" for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    known |= {"fsdp_version", "fsdp_offload_params", "fsdp_transformer_layer_cls_to_wrap"}
    assert set(loaded.fsdp_config) <= known
    assert loaded.parallelism_config["parallelism_config_dp_replicate_size"] == 2


@pytest.mark.long
def test_trl_names_are_those_of_training_arguments() -> None:
    """Every key that is not TRL's or the model's is a field of transformers' TrainingArguments."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    data = yaml.safe_load(export("trl", request(FSDP, method="lora")))
    assert data["use_liger_kernel"] is FSDP.fused_cross_entropy
    fused = yaml.safe_load(export("trl", request(dataclasses.replace(FSDP, fused_cross_entropy=True), method="lora")))
    assert fused["use_liger_kernel"], "the forecast has no logits of all tokens"
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    of_trl = {"model_name_or_path", "dtype", "attn_implementation", "max_length", "packing", "use_peft", "lora_r",
              "lora_target_modules", "load_in_4bit"}  # fmt: skip
    assert set(data) - known <= of_trl
    assert data["fsdp_config"]["activation_checkpointing"] is True
    assert data["gradient_checkpointing"] is False


@each_row(("layout", "train", "kernel"), rows("trl_attention"))
def test_trl_names_the_attention_that_runs_in_its_layout(layout: dict, train: dict, kernel: str) -> None:
    exported = export("trl", request(dataclasses.replace(FSDP, **layout), **train))
    assert yaml.safe_load(exported)["attn_implementation"] == kernel


@each_row(("precision", "train", "dtype"), rows("trl_type"))
def test_trl_loads_the_model_in_a_type_that_trains(precision, train: dict, dtype: str) -> None:
    layout = dataclasses.replace(FSDP, dp_shard=1, world_size=1, precision=precision)
    assert yaml.safe_load(export("trl", request(layout, **train)))["dtype"] == dtype


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_trains_weights_in_the_type_that_they_were_loaded_in(dtype: str, tmp_path: Path) -> None:
    """Without FSDP: gradients and AdamW's states too, bf16=True or not."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import torch

    small = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(small).to(getattr(torch, dtype))
    asked = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=1, bf16=True, use_cpu=True,
                                           report_to=[], disable_tqdm=True, save_strategy="no")  # fmt: skip
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    trainer, found = transformers.Trainer(model=model, args=asked, train_dataset=rows), set()
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda p: found.update({p.dtype, p.grad.dtype}))
    trainer.train()
    states = trainer.optimizer.optimizer.state.values()
    assert found | {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")} == {
        getattr(torch, dtype)
    }


def test_torchtitan_degrees_multiply_to_the_world_size() -> None:
    """The TOML parses, and its degrees are the layout's."""
    layout = Layout(world_size=64, tp=4, pp=2, dp_shard=8, sequence_parallel=True, gradient_accumulation=4,
                    checkpointing="selective")  # fmt: skip
    data = tomllib.loads(export("torchtitan", request(layout, engine="torchtitan")))
    names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel",
             "context_parallel")  # fmt: skip
    assert math.prod(data["parallelism"][f"{name}_degree"] for name in names) == 64
    assert data["parallelism"]["pipeline_parallel_schedule"] == "1F1B"
    assert data["training"]["local_batch_size"] == 4
    assert data["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}


def test_megatron_arguments() -> None:
    """Interleaving, sequence parallelism and the distributed optimizer, in its words."""
    words = export("megatron", request(PIPELINE, engine="megatron")).splitlines()
    assert set(words) >= set(rows("megatron")())
    uneven = dataclasses.replace(PIPELINE, stage_layers=(4, 5, 4, 4, 4, 4, 4, 3))
    words = export("megatron", request(uneven, engine="megatron")).splitlines()
    layout = "Etttt|ttttt|tttt|tttt|tttt|tttt|tttt|tttL"
    assert f"--pipeline-model-parallel-layout '{layout}'" in words
    assert not [word for word in words if word.startswith("--num-layers-per-virtual")]


@each_row(("precision", "degrees", "captured"), rows("captured"))
def test_megatron_is_told_what_the_forecast_of_experts_assumes(precision: str, degrees: dict, captured: bool) -> None:
    """All arguments of the CUDA graph, or none of them apart from the overlap, which does not need it."""
    data = 8 // degrees.get("pp", 1)
    layout = Layout(world_size=8, dp_shard=data, sharding="zero1", gradient_accumulation=8, precision=precision,
                    **degrees)  # fmt: skip
    asked = dataclasses.replace(request(layout, engine="megatron"), model=model_named("Qwen3-30B-A3B"))
    named, text = ENGINES["megatron"].cuda_graph_arguments, export("megatron", asked)
    assert {each in text for each in named if "--overlap" not in each} == {captured}
    assert not captured or "--overlap-moe-expert-parallel-comm" in text


@each_row(("form", "train", "steps", "has", "has_not"), rows("run_length"))
def test_an_export_has_the_steps_of_the_forecast(form, train, steps, has, has_not):
    """However the length of the run was given; where it was not given no number is made up."""
    spec = TrainSpec(method="full", engine=form if form in ENGINES else "topoflight", global_batch=64, **train)
    answer = recommend(machines.cluster("dgx-h100", 2), (), model_named("Llama-3.1-8B"), spec)
    text = export(form, request_of(dataclasses.replace(answer, total_steps=steps), ranks_per_node=8))
    assert re.search(has, text, re.MULTILINE), text
    assert str(has_not) not in text


@each_row(("name", "layout", "train", "reason"), rows("refused"))
def test_a_framework_that_cannot_is_refused_with_the_reason(name, layout, train, reason):
    """Never something else than what was asked for."""
    with pytest.raises(ExportError, match=reason):
        export(name, request(NAMED[layout] if isinstance(layout, str) else Layout(**layout), **train))


def test_every_refusal_names_a_format_and_attributes_of_the_request() -> None:
    """A list of precisions has all of eight bits."""
    for row in read_table(exports.__file__, "exports.toml")["refusal"]:
        assert {*row["formats"]} <= {*FORMATS} and {*row} <= {"formats", "when", "unless", "why"}
        for name, wanted in {**row.get("when", {}), **row.get("unless", {})}.items():
            attrgetter(name)(request(FSDP))
            assert name != "layout.precision" or {*wanted} == {*EIGHT_BITS}


def test_unknown_format_and_empty_recommendation_are_errors() -> None:
    """The message lists the formats, or says why there is nothing to export."""
    with pytest.raises(ExportError, match="format='docker': allowed are finetune"):
        export("docker", request(FSDP))
    train = TrainSpec(method="full", global_batch=8, sequence_length=4096)
    answer = recommend(machines.cluster("dgx-h100"), (), model_named("Llama-3.1-405B"), train)
    with pytest.raises(ExportError, match="GiB more"):
        request_of(answer, ranks_per_node=8)
    assert "deepspeed" in FORMATS

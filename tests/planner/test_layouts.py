"""Layouts: what each hard rule forbids, how two are compared, published recipes next to ours, and exports.

What each framework is given is what was recommended, by its own reader where it is installed.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, make_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from rigs.tables import data_of, each_row, rows_of

from contracts.job_config import JobPlan, parse_config
from contracts.layout import EIGHT_BITS, Layout, LayoutError
from contracts.tables import read_table
from planner.advice import ExportError, ExportRequest, request_of
from planner.forecast import machines
from planner.forecast.calibration import widths
from planner.forecast.compute import Job, cpu_rates
from planner.forecast.engine import uneven_stages
from planner.forecast.links import Links, Speed
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import compare, forecast_layout, forecast_named, frontier, plan, recommend
from planner.search import Candidate, list_broken, search
from planner.stacks import ENGINES, exports, find_engine
from planner.stacks.exports import FORMATS, export, settle_layout

rows = rows_of(__file__)

FAST = Speed(bytes_per_second=336e9, how="derived", link="NVLink")
EFA = Speed(bytes_per_second=50e9, how="derived", link="EFA")
LINKS = Links(ranks_per_node=8, nodes=4, island_size=8, island=FAST, node=FAST, network=EFA)


def job(
    engine: str = "megatron", model: str = "Llama-3.1-70B", *, has_gpu: bool = True, quantised: str = "",
    window: int | None = None, capability: Sequence[int] = (9, 0), **train,
) -> Job:  # fmt: skip
    """A job on four 8-GPU nodes."""
    named = model_named(model)
    return Job(
        model=replace(named, quantised=quantised or named.quantised, sliding_window=window or named.sliding_window),
        train=TrainSpec(**{"method": "full", "sequence_length": 8192, "engine": engine, **train}),
        links=LINKS, engine=find_engine(engine), rates=cpu_rates(8.0, None), has_gpu=has_gpu,
        compute_capability=tuple(capability),
    )  # fmt: skip


@each_row(("rule", "engine", "settings", "layout", "says"), rows("forbids"))
def test_each_rule_forbids_what_it_names(rule, engine, settings, layout, says):
    """The named rule is the one that answers, with the number in question."""
    reason = dict(list_broken(job(engine, **settings), Layout(**layout))).get(rule)
    assert says in reason


@each_row(("experts", "ranks"), [(2, 8), (4, 8), (16, 16), (32, 32)])
def test_every_degree_that_divides_the_experts_is_tried(experts: int, ranks: int) -> None:
    """Inside the fast domain or not: what is named is found."""
    train = TrainSpec(method="full", sequence_length=4096, global_batch=64, engine="megatron")
    planned = plan(machines.cluster("p5.48xlarge", ranks // 8), (), model_named("gpt-oss-20b"), train)
    assert search(planned, {"ep": experts}).best


@each_row(("model", "settings", "says"), rows("said_of_all"))
def test_what_no_degree_changes_is_said_of_every_layout(model: str, settings: dict, says: str) -> None:
    """One reason, and not the same one for each degree."""
    train = TrainSpec(**{"method": "full", **settings})
    found = search(plan(machines.cluster("p5.48xlarge", 2), (), model_named(model), train))
    assert ([row.what for row in found.rejected], found.best) == (["every layout"], [])
    assert says in found.rejected[0].reason


def test_no_reason_is_about_a_layout_that_the_settings_exclude() -> None:
    """Under DDP each rank would load 405B; with `sharding=zero3` that is no answer."""
    train = TrainSpec(method="lora", sequence_length=4096, engine="deepspeed", global_batch=64)
    planned = plan(machines.cluster("a2-highgpu-8g", 2), (), model_named("Llama-3.1-405B"), train)
    reasons = [{row.what for row in search(planned, named).rejected} for named in ({}, {"sharding": "zero3"})]
    assert ["DDP" in each for each in reasons] == [True, False]


DDP = {"world_size": 8, "dp_replicate": 8, "sharding": "ddp"}


@each_row(
    ("engine", "settings", "layout", "says"),
    lambda: [*rows("first")(), *((engine, {"model": "Llama-3.1-8B"}, DDP, ()) for engine in ENGINES)],
)
def test_the_first_rule_that_a_layout_breaks(engine, settings, layout, says):
    """Its name and reason; none where the layout is allowed."""
    broken = next(list_broken(job(engine, **settings), Layout(**layout)), None)
    assert bool(broken) == bool(says), broken
    assert [words for words in says if words not in ": ".join(broken or ())] == [], broken


@each_row(("layers", "pp"), [(126, 8), (126, 16), (62, 4), (30, 4), (7, 4), (80, 8)])
def test_uneven_stages_hold_every_layer_once(layers: int, pp: int) -> None:
    """No stage is empty, none is fuller than an even split needs, and all layers are there."""
    stages = uneven_stages(layers, pp)
    if layers % pp == 0:
        assert stages == ()
        return
    assert (len(stages), sum(stages), max(stages)) == (pp, layers, -(-layers // pp))
    assert min(stages) >= 1


def test_megatron_may_leave_the_first_and_the_last_chunk_without_layers() -> None:
    """Llama 3 405B (arXiv 2407.21783, 3.3.2): 126 layers in 16 x 8 chunks, one of them the embedding, one the head."""
    stages = uneven_stages(126, 128)
    assert stages == (0, *(1,) * 126, 0)
    given = job("megatron", "Llama-3.1-405B")
    layout = Layout(world_size=16, pp=16, virtual_stages=8, schedule="interleaved", stage_layers=stages,
                    gradient_accumulation=16)  # fmt: skip
    assert not any(list_broken(given, layout))
    assert next(list_broken(replace(given, engine=ENGINES["torchtitan"]), layout)) == (
        "enough-layers", "PP=16 x 8 chunks need more layers than the model's 126"
    )  # fmt: skip


def test_a_layout_that_cannot_exist_is_never_built() -> None:
    """Degrees that do not multiply to the world size are an error that names them."""
    with pytest.raises(LayoutError, match=r"world_size is 8$"):
        Layout(world_size=8, tp=3)
    with pytest.raises(LayoutError, match="ep is no factor, its groups lie inside dp_shard x cp x tp: name dp_shard=4"):
        Layout(world_size=8, tp=2, ep=8)


def test_offloading_needs_host_memory_that_is_known_and_enough() -> None:
    """A 70B full fine-tune on 8 GPUs goes to the host of a p5, and nowhere where the host is too small."""
    train = TrainSpec(method="full", sequence_length=2048, global_batch=8, engine="deepspeed")
    model = model_named("Llama-3.1-70B")
    large = recommend(machines.cluster("p5.48xlarge"), (), model, train)
    assert large.chosen.layout.offload != "none"
    assert any("OMP_NUM_THREADS" in text for text in large.helps_most)
    assert not any("recomputation" in text for text in large.helps_most), "no GPU has that much memory"
    assert recommend(machines.cluster("p4d.24xlarge"), (), model, train).chosen is None


TRAIN = TrainSpec(method="full", sequence_length=8192, global_batch=256, engine="torchtitan")


def test_compare_puts_two_layouts_side_by_side() -> None:
    """Every part of either, and the step last; a layout that breaks a rule says so."""
    planned = plan(machines.cluster("p5.48xlarge", 4), (), model_named("Llama-3.1-70B"), TRAIN)
    first = forecast_layout(planned, Layout(world_size=32, dp_shard=32, micro_batch=2, gradient_accumulation=4,
                                            checkpointing="full"))  # fmt: skip
    second = forecast_layout(planned, Layout(world_size=32, tp=8, pp=2, dp_shard=2, sequence_parallel=True,
                                             gradient_accumulation=128))  # fmt: skip
    rows = compare(first, second)
    assert rows[-1][0] == "step"
    parts = {name: (a, b) for name, a, b in rows}
    assert parts["recompute"][0] > 0
    assert parts["tensor_parallel"][0] == 0
    assert parts["tensor_parallel"][1] > 0
    broken = forecast_layout(planned, Layout(world_size=32, tp=16, dp_shard=2, gradient_accumulation=128))
    assert "breaks" in broken.why


def test_a_comparison_shows_the_layout_that_recommend_shows() -> None:
    """What is not named is chosen in the same way: same micro-batch, same memory, same step, same global batch.

    A batch that does not divide is refused with both numbers.
    """
    cluster, model = machines.cluster("2xa40-roce", 4), model_named("Llama-3.1-8B")
    chosen = recommend(cluster, (), model, TrainSpec()).chosen
    planned = plan(cluster, (), model, TrainSpec())
    shape = chosen.layout
    named = {"dp_replicate": shape.dp_replicate, "dp_shard": shape.dp_shard, "tp": shape.tp, "pp": shape.pp}
    again = forecast_named(planned, named)
    assert again.layout == shape
    assert again.forecast.memory_bytes == chosen.forecast.memory_bytes
    assert again.forecast.step_seconds == chosen.forecast.step_seconds
    other = forecast_named(planned, {"dp_shard": 8, "micro_batch": 2})
    assert (other.layout.micro_batch, other.layout.global_batch) == (2, shape.global_batch)
    with pytest.raises(LayoutError, match=r"global batch 64 .* micro_batch 3"):
        forecast_named(planned, {"dp_shard": 8, "micro_batch": 3})


def test_the_frontier_holds_what_nothing_beats_in_time_and_money() -> None:
    """Of the same tokens: a point that is beaten in both is not on it, and the fastest and the cheapest always are."""
    train = TrainSpec(method="full", sequence_length=2048, global_batch=512)
    prices = {"p5.48xlarge": 98.0, "p4d.24xlarge": 33.0}
    points = frontier(tuple(prices), (1, 4), (None,), model_named("Llama-3.1-8B"), train, tokens=1e9, prices=prices)
    assert [(p.machine, p.nodes) for p in points] == [(name, count) for name in prices for count in (1, 4)]
    for point in points:
        assert point.seconds.mid == pytest.approx(1e9 / point.tokens_per_second)
        assert point.cost.mid == pytest.approx(point.seconds.mid / 3600 * point.nodes * prices[point.machine])
        beaten = any(
            q.seconds and q.cost and q.seconds.mid < point.seconds.mid and q.cost.mid < point.cost.mid for q in points
        )
        assert point.best is not beaten
    fastest = min(points, key=lambda p: p.seconds.mid if p.seconds else 1e99)
    cheapest = min(points, key=lambda p: p.cost.mid if p.cost else 1e99)
    assert fastest.best and cheapest.best


def test_the_frontier_goes_over_networks_and_says_why_nothing_fits() -> None:
    """A slower network is never faster, one node has none, and a 70B model does not fit on one p5."""
    model = model_named("Llama-3.1-70B")
    points = frontier(("p5.48xlarge",), (1, 4, 8), (None, "100G"), model, TRAIN, tokens=1e9, transport="tcp")
    assert [p.network for p in points] == ["-", *["catalogue", "100G tcp"] * 2]
    assert points[0].seconds is None and "GiB more" in points[0].reason and not points[0].best
    fewer, _, own, over_tcp = points[1:]
    assert own.seconds.mid < min(fewer.seconds.mid, over_tcp.seconds.mid)
    assert own.best and not over_tcp.best and own.cost is None


# Published recipes as questions: the recipe's own layout, ours, and why they differ where they do. What explains a
# difference (`differs`: split, batch or recomputation) is this planner's own account of both layouts, and the test
# holds the claim to it. "slower": the recipe's is forecast slower. "even": as fast, within what two forecasts err
# against each other. "room": by this memory forecast the recipe's fits only with recomputation that its source does
# not name. No recipe may be forecast faster than ours by more than that error: the search would have missed it.
RECIPES: dict = data_of(__file__, "layout_recipes.yaml")


PARTS = {
    "split": ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "sharding"),
    "batch": ("micro_batch", "gradient_accumulation"), "recomputation": ("checkpointing", "offload"),
}  # fmt: skip


@each_row("name", RECIPES)
def test_every_difference_from_a_published_recipe_is_explained(name: str) -> None:
    """The recipe's layout exists here, ours is no slower, and what differs has a reason that the forecasts bear out."""
    recipe = RECIPES[name]
    machine, nodes, *gpus = recipe["on"]
    cluster = machines.cluster(machine, nodes, gpus_per_node=gpus[0] if gpus else None)
    planned = plan(cluster, (), model_named(recipe["model"]), TrainSpec(**recipe["train"]))
    found = search(planned).best
    assert found, "nothing fits"
    ours: Candidate = found[0]
    named = {name: tuple(value) if isinstance(value, list) else value for name, value in recipe["layout"].items()}
    schedule = {"schedule": "interleaved"} if "virtual_stages" in named else {}
    theirs = forecast_named(planned, {**named, **schedule})
    assert "breaks" not in theirs.why, theirs.why
    gain = math.log(theirs.forecast.step_seconds.mid / ours.seconds)
    assert gain > -widths().pair, f"the recipe is forecast {math.exp(-gain):.2f} times as fast as {ours.layout}"
    both = ours.layout, theirs.layout
    differ = {part for part, names in PARTS.items() if attrgetter(*names)(both[0]) != attrgetter(*names)(both[1])}
    assert differ <= recipe.get("differs", {}).keys(), both
    if recipe["claim"] == "slower":
        assert gain > 0
    elif recipe["claim"] == "even":
        assert abs(gain) <= widths().pair
    else:
        assert recipe["claim"] == "room"
        assert "checkpointing" not in named
        assert theirs.layout.checkpointing != "none"


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
PUBLISHED = data_of(__file__, "deepspeed_published.json")


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
        settings, *_ = parse_config(yaml.safe_load(export("finetune", wanted)))
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

    known = {f"fsdp_{field.name}" for field in fields(FullyShardedDataParallelPlugin)}
    known |= {"fsdp_version", "fsdp_offload_params", "fsdp_transformer_layer_cls_to_wrap"}
    assert set(loaded.fsdp_config) <= known
    assert loaded.parallelism_config["parallelism_config_dp_replicate_size"] == 2


@pytest.mark.long
def test_trl_names_are_those_of_training_arguments() -> None:
    """Every key that is not TRL's or the model's is a field of transformers' TrainingArguments."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    data = yaml.safe_load(export("trl", request(FSDP, method="qlora")))
    assert (data["bnb_4bit_quant_storage"], data["use_bnb_nested_quant"]) == ("bfloat16", True), "FSDP shards no bytes"
    assert data["use_liger_kernel"] is FSDP.fused_cross_entropy
    fused = yaml.safe_load(export("trl", request(replace(FSDP, fused_cross_entropy=True), method="lora")))
    assert fused["use_liger_kernel"], "the forecast has no logits of all tokens"
    known = {field.name for field in fields(transformers.TrainingArguments)}
    of_trl = {"model_name_or_path", "dtype", "attn_implementation", "max_length", "packing", "use_peft", "lora_r",
              "lora_target_modules", "load_in_4bit", "bnb_4bit_quant_storage", "use_bnb_nested_quant"}  # fmt: skip
    assert set(data) - known <= of_trl
    assert data["fsdp_config"]["activation_checkpointing"] is True
    assert data["gradient_checkpointing"] is False
    assert data["accelerator_config"]["gradient_accumulation_kwargs"]["sync_each_batch"], "or no gradient is sharded"


@each_row(("layout", "train", "key", "value"), rows("trl_values"))
def test_trl_has_the_attention_that_runs_and_a_type_that_trains(
    layout: dict, train: dict, key: str, value: str
) -> None:
    exported = yaml.safe_load(export("trl", request(replace(FSDP, **layout), **train)))
    assert exported.get(key) == value


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


@each_row(("fields", "batch"), rows("torchtitan"))
def test_torchtitan_module_sets_the_fields_that_its_version_has(fields, batch, monkeypatch) -> None:
    """Run the exported module with stand-ins for torchtitan's sections, which have no other fields."""
    sections = {name: make_dataclass(name, [(each, object, None) for each in listed], slots=True)()
                for name, listed in fields.items()}  # fmt: skip
    base = make_dataclass("Config", ["model_spec", "hf_assets_path", "activation_checkpoint", *sections], slots=True)
    for name in ("", ".models", ".models.llama3", ".models.llama3.config_registry", ".trainer", ".distributed",
                 ".distributed.activation_checkpoint"):  # fmt: skip
        monkeypatch.setitem(sys.modules, f"torchtitan{name}", MagicMock())
    sys.modules["torchtitan.models.llama3.config_registry"].llama3_8b = lambda: base(None, "", None, **sections)
    layout = Layout(world_size=64, tp=4, pp=2, dp_shard=8, sequence_parallel=True, gradient_accumulation=4,
                    stage_layers=(17, 15), checkpointing="selective")  # fmt: skip
    module: dict[str, Any] = {}
    exec(export("torchtitan", request(layout, engine="torchtitan", sequence_length=2048)), module)  # noqa: S102
    config = module["topoflight_job"]()
    names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel",
             "context_parallel")  # fmt: skip
    assert math.prod(getattr(config.parallelism, f"{name}_degree") for name in names) == 64
    assert config.parallelism.pipeline_parallel_schedule == "1F1B"
    assert [(len(part), part[0], part[-1]) for part in config.parallelism.module_fqns_per_model_part] == [
        (18, "tok_embeddings", "layers.16"), (17, "layers.17", "lm_head")]  # fmt: skip
    assert {name: attrgetter(name)(config) for name in batch} == batch
    assert config.training.disable_cuda_graphs, "torchtitan refuses CUDA graphs of a pipeline"
    module["model_registry"].assert_called_with("8B")
    module["SelectiveAC"].Config.assert_called_once()


@each_row(("name", "model", "degrees", "found"), rows("exported_models"))
def test_a_framework_is_given_the_models_that_it_has(name: str, model: str, degrees: dict, found: str) -> None:
    """The arguments or flavor of the model, or the reason why there are none."""
    asked = request(Layout(**{"world_size": 8, "dp_shard": 8, **degrees}), engine=name, sequence_length=8192)
    try:
        text = export(name, replace(asked, model=model_named(model)))
    except ExportError as error:
        text = str(error)
    assert found in text


def test_megatron_arguments() -> None:
    """Interleaving, sequence parallelism and the distributed optimizer, in its words."""
    words = export("megatron", request(PIPELINE, engine="megatron")).splitlines()
    assert set(words) >= set(rows("megatron")())
    offloaded = replace(PIPELINE, offload="optimizer")
    words = export("megatron", request(offloaded, engine="megatron")).splitlines()
    assert {"--optimizer-cpu-offload", "--use-precision-aware-optimizer"} <= set(words), "arguments.py wants both"
    uneven = replace(PIPELINE, stage_layers=(4, 5, 4, 4, 4, 4, 4, 3))
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
    asked = replace(request(layout, engine="megatron"), model=model_named("Qwen3-30B-A3B"))
    named, text = ENGINES["megatron"].cuda_graph_arguments, export("megatron", asked)
    assert {each in text for each in named if "--overlap" not in each} == {captured}
    assert not captured or "--overlap-moe-expert-parallel-comm" in text


@each_row(("form", "train", "steps", "has", "has_not"), rows("run_length"))
def test_an_export_has_the_steps_of_the_forecast(form, train, steps, has, has_not):
    """However the length of the run was given; where it was not given no number is made up."""
    spec = TrainSpec(method="full", engine=form if form in ENGINES else "topoflight", global_batch=64, **train)
    answer = recommend(machines.cluster("dgx-h100", 2), (), model_named("Llama-3.1-8B"), spec)
    text = export(form, request_of(replace(answer, total_steps=steps), ranks_per_node=8))
    assert re.search(has, text, re.MULTILINE), text
    assert str(has_not) not in text


@each_row(("name", "layout", "train", "reason"), rows("refused"))
def test_a_framework_that_cannot_is_refused_with_the_reason(name, layout, train, reason):
    """It exports the requested layout or none."""
    with pytest.raises(ExportError, match=reason):
        export(name, request(NAMED[layout] if isinstance(layout, str) else Layout(**layout), **train))


def test_every_refusal_names_a_format_and_attributes_of_the_request() -> None:
    """A list of precisions has all of eight bits that no stack of the formats has."""
    table = read_table(exports.__file__, "exports.toml")
    for row in table["refusal"]:
        assert {*row["formats"]} <= {*FORMATS} and {*row} <= {"formats", "when", "unless", "why"}
        for name, wanted in {**row.get("when", {}), **row.get("unless", {})}.items():
            attrgetter(name)(request(FSDP))
            able = {each for form in row["formats"] for each in ENGINES[table["format"][form]["stack"]].eight_bits}
            assert name != "layout.precision" or {*wanted} - {"fp16"} == {*EIGHT_BITS} - able


def test_unknown_format_and_empty_recommendation_are_errors() -> None:
    """The message lists the formats, or says why there is nothing to export."""
    with pytest.raises(ExportError, match="format='docker': allowed are finetune"):
        export("docker", request(FSDP))
    train = TrainSpec(method="full", global_batch=8, sequence_length=4096)
    answer = recommend(machines.cluster("dgx-h100"), (), model_named("Llama-3.1-405B"), train)
    with pytest.raises(ExportError, match="GiB more"):
        request_of(answer, ranks_per_node=8)
    assert "deepspeed" in FORMATS

"""The recommendation: one answer on catalogue and recorded machines, and honest about what it does not know."""

from dataclasses import replace
from typing import Any

import pytest
from rigs.recorded import changed, snapshot as host
from rigs.tables import each_row, rows_of

from contracts.layout import Layout
from hardware.machines import catalogue
from planner.advice import Recommendation
from planner.forecast import machines
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import forecast_named, plan, recommend
from planner.search import Planned, choose_simplest, list_broken, search
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts, GpuProcess
from topology.build import build
from topology.cluster import join
from topology.graph import ClusterTopology

rows = rows_of(__file__)


def planned(machine: str, nodes: int, model: str, **train: Any) -> Planned:
    """The plan for so many machines of the catalogue."""
    return plan(machines.cluster(machine, nodes), (), model_named(model), TrainSpec(**train))


def answer(machine: str, nodes: int, model: str, **train: Any) -> Recommendation:
    """The recommendation for them."""
    return recommend(machines.cluster(machine, nodes), (), model_named(model), TrainSpec(**train))


@each_row(("machine", "nodes"), [("p5.48xlarge", 4), ("2xa40-roce", 2), ("4xl40s", 1)])
def test_catalogue_machines_get_a_layout_and_every_rejection_a_reason(machine: str, nodes: int) -> None:
    """What-if answers name rule and reason for all that was turned down."""
    given = answer(machine, nodes, "Llama-3.1-8B", global_batch=128)
    assert given.chosen.forecast.memory_bytes.mid < (given.chosen.forecast.capacity_bytes or 0)
    assert given.rejected
    assert all(row.rule and row.reason for row in given.rejected)


def test_unknown_engine_and_precision_are_the_users_mistakes() -> None:
    """Errors name the setting, the value and what is allowed."""
    with pytest.raises(ValueError, match=r"engine=.keras.*topoflight"):
        answer("dgx-h100", 1, "GPT-2", engine="keras")
    with pytest.raises(ValueError, match="precision='int3'"):
        answer("dgx-h100", 1, "GPT-2", precision="int3")
    wrong = {"1xrtx4090": "4xrtx4090 .*only some", "V100": "p3.16xlarge", "4x A100": "p4d.24xlarge", "1xl40": "similar",
             "a40-48gb-pcie": r"GPU: 2xa40-roce \(", "h200-nvl": "GPU: p5e.48xlarge, p5en.48xlarge"}  # fmt: skip
    for name, says in wrong.items():
        with pytest.raises(machines.MachineError, match=says):
            machines.machine(name)
    written = ("DGX H100", "Standard_ND96isr_H100_v5")
    assert [machines.machine(name).name for name in written] == ["dgx-h100", "ND96isr_H100_v5"]
    with pytest.raises(machines.MachineError, match="p5"):
        machines.cluster("p5.48xlrge")


def test_experts_are_divided_without_a_global_batch() -> None:
    """Expert parallelism is among what is tried for an engine that has it, whatever sharding it has."""
    for engine in ("megatron", "torchtitan"):
        best = search(planned("dgx-h100", 8, "Mixtral-8x7B", method="full", sequence_length=4096, engine=engine)).best
        assert min(best, key=lambda candidate: candidate.seconds).layout.ep > 1, engine
        # for torchtitan the gain over a simpler layout is smaller than the error of comparing two forecasts
        assert engine == "torchtitan" or best[0].layout.ep > 1


def test_405b_on_576_gpus_is_as_fast_as_its_own_account_allows() -> None:
    """Context parallelism at 8k: 270 tokens/s per GPU in fp8 (326 published on 512 and 1,024), where 187 were said."""
    train = {"method": "full", "sequence_length": 8192, "engine": "megatron", "precision": "fp8", "global_batch": 576}
    best = search(planned("dgx-h100", 72, "Llama-3.1-405B", **train)).best
    assert any(c.layout.cp > 1 and 576 * 8192 / c.seconds / 576 > 260 for c in best[:5])


def test_embedding_and_head_count_as_layers_of_interleaved_chunks() -> None:
    """126 layers in 8 stages of 8 chunks: the first and the last hold one layer, all others two."""
    train = {"method": "full", "sequence_length": 8192, "engine": "megatron", "global_batch": 256}
    named = {"pp": 8, "tp": 8, "cp": 2, "virtual_stages": 8}
    best = search(planned("dgx-h100", 64, "Llama-3.1-405B", **train), named).best
    assert best[0].layout.stage_layers == (1, *(2,) * 62, 1)


@each_row(("model", "nodes", "method", "tokens"), rows("batches"))
def test_the_batch_that_nobody_named_is_what_such_runs_take(model: str, nodes: int, method: str, tokens: int) -> None:
    """16 M tokens for 405B on 16,384 GPUs, as Llama 3 was trained; 64 sequences for a fine-tune."""
    found = planned("dgx-h100", nodes, model, method=method, sequence_length=8192)
    assert found.global_batch * 8192 == tokens
    assert found.batch_is_assumed


def test_a_simple_layout_wins_unless_another_gains_more_than_the_error() -> None:
    """70B LoRA on two p5: sharding alone, though some with more kinds of parallelism are forecast faster."""
    found = answer("p5.48xlarge", 2, "Llama-3.1-70B", method="lora", sequence_length=4096)
    assert found.chosen.layout.family == "FSDP"
    assert found.chosen.forecast.memory_bytes.mid < 0.85 * (found.chosen.forecast.capacity_bytes or 0)
    faster = [r for r in found.runners_up if r.forecast.step_seconds.mid < found.chosen.forecast.step_seconds.mid]
    assert faster and all("faster by forecast" in r.why for r in faster)


def test_a_gain_beyond_the_error_is_taken() -> None:
    """The same rule on numbers: 5 % more speed for TP is left, 20 % is taken, and so is any for nothing more."""
    one = planned("dgx-h100", 1, "Llama-3.1-8B", method="lora", sequence_length=4096)
    job, best = one.job, search(one).best
    plain = next(c for c in best if not c.list_complications(job.links))
    split = next(c for c in best if c.list_complications(job.links) == ("TP",))
    for gain, chosen in ((0.05, plain), (0.20, split)):
        split.seconds = plain.seconds * (1 - gain)
        assert choose_simplest(job, [plain, split]) is chosen


def test_every_machine_to_plan_for_has_host_memory_to_offload_to() -> None:
    """8B in full on four L40S, whose 48 GB do not hold their share of states and activations by sharding alone.

    The memory of a GB10 is that of its host, so nothing can be offloaded. No source states the memory of the OCI shape.
    """
    assert [row.name for row in catalogue() if not row.host_gib] == ["BM.GPU.GB200-v3.4", "1xgb10"]
    best = search(planned("4xl40s", 1, "Llama-3.1-8B", method="full", sequence_length=2048)).best
    assert any(c.layout.offload == "all" for c in best)
    refused = answer("4xrtx4090", 1, "gpt-oss-20b", method="full", engine="trl").rejected
    assert "offloading needs 312 GiB of host memory" in {row.what: row.reason for row in refused}["offloading"]
    megatron = {"method": "full", "sequence_length": 8192, "global_batch": 16, "engine": "megatron"}
    assert answer("dgx-h100", 1, "Qwen2.5-72B", **megatron).chosen.layout.offload == "optimizer"
    at = Layout(world_size=1, sharding="zero3", offload="optimizer")
    job = replace(planned("1xgb10", 1, "Llama-3.1-8B", engine="deepspeed").job, host_memory_bytes=1e12)
    assert "share one memory" in dict(list_broken(job, at))["host-memory-holds"]


@each_row(("nodes", "precision", "says"), rows("experts"))
def test_experts_are_advised_with_what_their_forecast_assumes(nodes: int, precision: str, says: str) -> None:
    """Published on these racks: Qwen3-235B with EP32 or EP64, in MXFP8."""
    train = {"method": "full", "sequence_length": 4096, "global_batch": 2304, "engine": "megatron"}
    found = answer("gb300-nvl72", nodes, "Qwen3-235B-A22B", **train, precision=precision)
    assert found.chosen.layout.ep >= 8
    assert says in " ".join((*found.unknowns, *found.helps_most))


@each_row(("machine", "nodes", "network", "model", "train", "says"), rows("assumed"))
def test_an_answer_says_what_its_forecast_assumes(machine, nodes, network, model, train, says) -> None:
    """Balanced experts, transformers 5; and that no published step was as long as one over 1 Gb/s."""
    cluster = machines.cluster(machine, nodes)
    cluster = machines.over_network(cluster, network, "tcp") if network else cluster
    given = recommend(cluster, (), model_named(model), TrainSpec(**train))
    assert any(says in text for text in given.unknowns)


@each_row(
    ("engine", "batch", "named"), [("automodel", 256, 1), ("automodel", 8, 0), ("trl", 256, 1), ("topoflight", 256, 0)]
)
def test_the_setting_that_shards_gradients_while_they_add_up_is_named(engine: str, batch: int, named: int) -> None:
    """Four bytes per weight otherwise stay on each GPU (8.2 billion weights: 30.5 GiB), two with TRL."""
    train = {"method": "full", "sequence_length": 4096, "global_batch": batch, "engine": engine}
    unknowns = answer("p5.48xlarge", 1, "Qwen3-8B", **train).unknowns
    assert sum("requires the setting" in text and " GiB of them" in text for text in unknowns) == named


@each_row(("engine", "model", "said"), [("torchtitan", "Qwen3-8B", 0), ("torchtitan", "gpt-oss-20b", 1),
                                       ("megatron", "gpt-oss-20b", 1), ("trl", "gpt-oss-20b", 0)])  # fmt: skip
def test_a_forecast_of_a_layout_that_its_engines_export_refuses_says_so(engine: str, model: str, said: int) -> None:
    """The stack may run it, but the user has to write its configuration."""
    train = {"method": "full", "sequence_length": 4096, "global_batch": 256, "engine": engine}
    unknowns = answer("p5.48xlarge", 2, model, **train).unknowns
    assert sum(text.startswith(f"-o {engine} cannot write this layout: ") for text in unknowns) == said


def test_a_network_of_ones_own_joins_the_nodes() -> None:
    """8B sharded over two nodes of two A40: slower over 25 Gb/s than over 400, and sockets have a ceiling."""
    train = TrainSpec(method="lora", sequence_length=2048, global_batch=64)
    base = machines.cluster("2xa40-roce", 2)

    def seconds(network: str, transport: str | None = None) -> float:
        one = plan(machines.over_network(base, network, transport), (), model_named("Llama-3.1-8B"), train)
        return forecast_named(one, {"dp_shard": 4}).forecast.step_seconds.mid

    assert seconds("400G") < seconds("25G", "rdma") < seconds("800M")
    assert seconds("2x200G") == seconds("400G", "rdma") == seconds("0.4T")
    assert seconds("400G", "tcp") == seconds("100G", "tcp") > seconds("100G")
    for network, why in (("fast", "100G"), ("0G", "100G"), ("-1G", "100G")):
        with pytest.raises(machines.MachineError, match=why):
            machines.over_network(base, network)
    with pytest.raises(machines.MachineError, match="this is one"):
        machines.over_network(machines.cluster("2xa40-roce"), "100G")
    with pytest.raises(machines.MachineError, match="NVLink domain"):
        machines.over_network(machines.cluster("gb200-nvl72", 4), "100G")


@each_row(("model", "length", "requested", "reason"), rows("lacking"))
def test_what_the_built_in_trainer_lacks_is_named(model: str, length: int, requested: list, reason: str | None) -> None:
    found = answer("p5.48xlarge", 1, model, sequence_length=length, fixed_layout=(tuple(requested),))
    assert reason in found.rejected[0].reason if reason else found.chosen is not None


def test_trl_splits_no_sequences_of_a_model_with_a_sliding_window() -> None:
    """accelerate refuses such a model when the run has started."""
    asked = [planned("dgx-h100", 1, name, sequence_length=8192, packing=True, engine="trl")
             for name in ("Mistral-7B-v0.1", "Mistral-7B")]  # fmt: skip
    families = [{one.layout.cp for one in search(each).best} for each in asked]
    assert families[0] == {1} and families[1] > {1}


def test_memory_is_judged_by_its_interval() -> None:
    """A layout whose interval begins above the GPU is refused, one that ends below it fits, between them it may fit.

    Of the last the advice says that it may fail, and what the settings could be in its place.
    """
    asked = (("dp_shard", 8), ("sharding", "zero3"), ("checkpointing", "none"), ("gradient_accumulation", 1))
    words = {}
    for micro in range(1, 17):
        train = {"method": "full", "sequence_length": 4096, "packing": True}
        found = answer("p5.48xlarge", 1, "Llama-3.1-8B", **train, fixed_layout=(*asked, ("micro_batch", micro)))
        said = " ".join(found.unknowns)
        if found.chosen is None:
            words[micro] = "refused"
            continue
        needs, has = found.chosen.forecast.memory_bytes, found.chosen.forecast.capacity_bytes or 0.0
        words[micro] = "may fail" if "may run out of memory" in said else "fits"
        assert (needs.high > has) == (words[micro] == "may fail")
        assert needs.low <= has
    assert list(dict.fromkeys(words.values())) == ["fits", "may fail", "refused"]


def test_a_batch_of_the_planners_choice_grows_until_a_layout_has_it() -> None:
    """8B on 16,384 GPUs: 512 sequences leave most of them idle; a batch that the user named stays as it is."""
    found = answer("p5.48xlarge", 2048, "Llama-3.1-8B", method="full")
    batch = found.chosen.layout.global_batch
    assert batch > 512
    assert f"global batch not given: {batch} sequences assumed" in " ".join(found.unknowns)
    assert answer("p5.48xlarge", 2048, "Llama-3.1-8B", method="full", global_batch=512).chosen is None


def test_a_named_layout_gets_nothing_that_was_not_named() -> None:
    """No offloading for want of memory, and the sharding that the engine has."""
    for engine, sharding in (("topoflight", "zero3"), ("megatron", "zero1")):
        one = planned("p5.48xlarge", 2, "Llama-3.1-70B", method="full", engine=engine)
        named = forecast_named(one, {"dp_shard": 16})
        assert (named.layout.offload, named.layout.sharding) == ("none", sharding)
        assert named.why.startswith(("may run out of memory", "breaks memory-fits"))


def test_a_named_layout_that_does_not_fit_has_the_options_of_one_that_does() -> None:
    """70B by Megatron on 16 H100: sequence parallelism, which no layout names, does not leave with the memory."""
    one = planned("dgx-h100", 2, "Llama-2-70B", method="full", engine="megatron", sequence_length=4096)
    degrees = {"tp": 4, "pp": 4, "micro_batch": 1}
    fits, over = forecast_named(one, degrees), forecast_named(one, {**degrees, "checkpointing": "none"})
    assert over.why.startswith("breaks memory-fits") and not fits.why.startswith("breaks")
    assert over.layout.sequence_parallel and fits.layout.sequence_parallel
    assert over.layout.fused_cross_entropy == fits.layout.fused_cross_entropy


def test_what_a_question_says_in_vain_is_said_back() -> None:
    """Rows that are cut, and a release of NCCL that nobody knows."""
    train = TrainSpec(sequence_length=2048, length_histogram=((100, 10), (9000, 5)))
    model, later = model_named("Llama-3.1-8B"), (99, 99, 0)
    words = " ".join(recommend(machines.cluster("p5.48xlarge"), (), model, train, nccl_version=later).unknowns)
    assert "5 of 15 rows are longer than the sequence length of 2048 tokens" in words
    assert "NCCL 99.99.0 is newer than" in words


TRAIN = TrainSpec(method="lora", sequence_length=2048, global_batch=32)


def recommended(name: str, model: str = "Llama-3.1-8B", train: TrainSpec = TRAIN) -> Recommendation:
    """What is recommended on one recording."""
    found = host(name)
    node = build(found)
    ranks = None if node.gpus else 2
    return recommend(ClusterTopology(nodes=(node,)), (found,), model_named(model), train, ranks_per_node=ranks)


def test_limits_of_the_machine_are_refused_or_named() -> None:
    """Four L40S on PCIe: TP is refused by name and link. Turing has no bf16 tensor cores. A lost GPU is left out."""
    said = recommended("l40s-4x-pcie")
    assert said.chosen.layout.tp == 1
    assert any(row.rule == "tp-inside-island" and "PCIe" in row.reason for row in said.rejected)
    assert any("no bf16 tensor cores" in text for text in recommended("titan-rtx-2x-nv2").unknowns)
    lost = recommended("sick-h100-gpu-lost", train=TrainSpec(method="lora", sequence_length=2048))
    assert any("repair it first" in text for text in lost.unknowns)
    assert lost.chosen is None or lost.chosen.layout.world_size < 8


def test_the_cpu_machine_replicates_the_small_model_and_says_what_is_assumed() -> None:
    """No GPU: gloo, fp32, two ranks; gathers, which nothing hides there, only pay where memory asks for them."""
    said = recommended("cpu-only-vm", "tiny-llama", TrainSpec(global_batch=16, sequence_length=128))
    layout, seconds = said.chosen.layout, said.chosen.forecast.step_seconds
    assert (said.backend, layout.family, layout.precision) == ("gloo", "DDP", "fp32")
    assert (layout.world_size, layout.global_batch) == (2, 16)
    sharded = next(r for r in said.runners_up if r.layout.family == "FSDP")
    assert sharded.forecast.step_seconds.mid > seconds.mid > seconds.low
    assert seconds.high / seconds.low > 3  # nobody measured this CPU
    assert any("assumed" in line for line in said.chosen.forecast.inputs)
    assert any("no GPU" in line for line in said.unknowns)


MODEL = model_named("Llama-3.1-8B")
LORA = TrainSpec(method="lora")


def _held(ratio: float, gpu: int = 3) -> Snapshot:
    facts = host().facts(GpuFacts)
    gpus = list(facts.gpus)
    used = int(ratio * (gpus[gpu].memory_bytes or 0))
    gpus[gpu] = replace(gpus[gpu], memory_used_bytes=used, processes=(GpuProcess(pid=4711, memory_bytes=used),))
    return changed(host(), GpuFacts, gpus=tuple(gpus))


@each_row(("ratio", "fits"), [(0.2, True), (0.5, True), (0.98, False)])
def test_the_fullest_gpu_sets_what_a_rank_may_have(ratio: float, fits: bool) -> None:
    """And the forecast says who holds how much where; what the driver keeps for itself on an idle GPU is not held."""
    snapshot = _held(ratio)
    now = plan(join((build(snapshot),)), (snapshot,), MODEL, LORA)
    assert plan(join((build(host()),)), (host(),), MODEL, LORA).capacity == float(81559 << 20)
    assert bool(search(now).best) == fits
    size = 81559 << 20
    assert now.capacity == pytest.approx((1.0 - ratio) * size, abs=0.02 * size)
    said = [words for words in now.unknowns if "hold" in words]
    assert len(said) == 1
    assert "GPU3" in said[0] and "4711" in said[0]


def test_a_layout_that_probably_runs_out_of_memory_is_chosen_only_where_no_other_fits():
    """PP16 alone is simpler, and its forecast is beyond the memory; with TP a layout of nearly its speed fits."""
    train = {"method": "full", "sequence_length": 4096, "global_batch": 32, "engine": "megatron", "packing": True}
    chosen = answer("dgx-h100", 2, "Llama-2-70B", **train, precision="fp8").chosen
    assert chosen.forecast.memory_bytes.mid < (chosen.forecast.capacity_bytes or 0)


def test_offloading_needs_a_gain_beyond_the_error() -> None:
    """Eight rows at a time fit an RTX 3090 with weights on the host only, and gain less than two forecasts err."""
    one = planned("8xrtx3090", 1, "Llama-3.1-70B", method="qlora", sequence_length=1024, global_batch=64)
    assert search(one).best[0].layout.offload == "none"
    assert search(one, {"offload": "all", "dp_shard": 8}).best[0].layout.micro_batch == 8


def test_offloading_without_recomputation_is_planned_where_the_settings_ask_for_both() -> None:
    """What such a layout needs too much is a number of bytes."""
    train = {"method": "full", "packing": True, "fixed_layout": (("offload", "all"), ("checkpointing", "none"))}
    layout = answer("p4d.24xlarge", 1, "Llama-3.1-8B", **train, sequence_length=1024).chosen.layout
    assert (layout.offload, layout.checkpointing) == ("all", "none")
    long = answer("p4d.24xlarge", 1, "Llama-3.1-8B", **train, sequence_length=131_072)
    assert long.chosen is None and not any("inf" in row.reason for row in long.rejected)

"""Latent attention, Mamba-2, and mixtures of experts: weights, bytes and groups counted by hand."""

from dataclasses import replace

import pytest
from rigs.tables import each_row

from contracts.layout import Layout
from hardware.gpus import gpu_named
from planner.forecast.compute import Job, gpu_rates
from planner.forecast.engine import Engine, share_of
from planner.forecast.links import Links, Speed
from planner.forecast.memory import memory_parts
from planner.forecast.models import model_from_config, model_named
from planner.forecast.specs import ModelSpec, TrainSpec, weights
from planner.forecast.step_time import StepParts, step_parts
from planner.stacks import engine_named

DEEPSEEK_V3 = ModelSpec(
    name="DeepSeek-V3", family="deepseek_v3", layers=61, hidden=7168, heads=128, kv_heads=128, head_dim=192, ffn=18432,
    vocab=129280, q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128, experts=256, experts_per_token=8,
    expert_ffn=2048, shared_expert_ffn=2048, dense_layers=3,
)  # fmt: skip
GPT_OSS = ModelSpec(
    name="gpt-oss-120b", family="gpt_oss", layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880,
    vocab=201088, attention_bias=True, experts=128, experts_per_token=4, expert_ffn=2880,
)  # fmt: skip


def test_latent_attention_goes_through_its_ranks() -> None:
    """Down to 1536 and 512 + 64 columns, up to 128 heads of 192 and of 128 + 128, and out of 128 heads of 128."""
    by_hand = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert weights(DEEPSEEK_V3).mixer_per_layer == by_hand


@each_row(("gpu", "engine", "attention", "measured"), [
    ("NVIDIA B200", "trl", "flash", 346), ("NVIDIA B200", "trl", "sdpa", 960), ("NVIDIA H200", "trl", "flash", 356),
    ("NVIDIA H20", "trl", "flash", 83.7), ("NVIDIA H20", "megatron", "sdpa", 126),
    ("NVIDIA GeForce RTX 5090", "trl", "flash", 140),
])  # fmt: skip
def test_attention_runs_at_the_rate_of_its_kernel_on_this_gpu(gpu, engine, attention, measured) -> None:
    """TFLOP/s that kernels were measured with (constants.toml); an H20 multiplies at its best rate all the time."""
    rates = gpu_rates(gpu_named(gpu), replace(FULL, attention=attention), engine_named(engine), "bf16")
    assert rates.attention == pytest.approx(measured * 1e12, rel=0.01)
    assert (rates.gemm == gpu_named(gpu).matmul_bf16) == ("H20" in gpu.split())


FULL = TrainSpec(method="full", sequence_length=4096)
SLOW = Speed(bytes_per_second=1e9, how="measured", link="TCP")
ONE_NODE = Links(ranks_per_node=8, nodes=1, island_size=8, island=SLOW, node=SLOW, network=None)


def parts_on_a_slow_network(
    model: ModelSpec, layout: Layout, engine: str | Engine, train: TrainSpec = FULL
) -> StepParts:
    """One GPU per node, all traffic over 1 GB/s and nothing lost to starting it."""
    gpu, runs = gpu_named("NVIDIA H100 80GB HBM3"), engine_named(engine) if isinstance(engine, str) else engine
    links = Links(
        ranks_per_node=1, nodes=layout.world_size, island_size=1, island=SLOW, node=SLOW, network=SLOW,
        alpha_intra_seconds=0.0, alpha_inter_seconds=0.0,
    )  # fmt: skip
    rates = gpu_rates(gpu, train, runs, "bf16")
    return step_parts(Job(model=model, train=train, links=links, rates=rates, engine=runs), layout)


@each_row(("engine", "sent"), [("torchtitan", 8.0), ("topoflight", 8.0), ("trl", 6.0)])
def test_fsdp_sends_gradients_in_the_type_it_reduces(engine: str, sent: float) -> None:
    """Two gathers of 2 bytes; scatters of 4 (reduce_dtype=float32), of 2 where the policy says so (accelerate).

    On a network this slow the step is its traffic, but for the compute's share of an overlap and one unit at each end.
    """
    model = ModelSpec(name="8B", family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336,
                      vocab=128256)  # fmt: skip
    parts = parts_on_a_slow_network(model, Layout(world_size=8, dp_shard=8), engine)
    traffic = sent * weights(model).total * 7 / 8 / 1e9
    assert traffic == pytest.approx(parts.gather + parts.reduce, rel=0.06)


def test_ddp_reduces_gradients_as_the_weights_are_stored() -> None:
    """The job keeps them in fp32 under autocast: 2 x 4 bytes per weight and ring."""
    model = replace(GPT_OSS, layers=4, experts=0, family="llama", attention_bias=False)
    parts = parts_on_a_slow_network(model, Layout(world_size=8, dp_replicate=8, sharding="ddp"), "topoflight")
    assert parts.reduce == pytest.approx(8.0 * weights(model).total * 7 / 8 / 1e9, rel=0.02)


def test_experts_are_reduced_over_the_ranks_that_hold_them() -> None:
    """Of 16 ranks with EP=8 two hold each expert: their gradients ring over 2, everything else's over 16.

    In bf16, both ways; the backward pass of some 3 seconds hides its part.
    """
    model = replace(DEEPSEEK_V3, layers=4, dense_layers=0)
    layout = Layout(world_size=16, dp_replicate=16, ep=8, sharding="ddp", micro_batch=1)
    count = weights(model)
    routed = 4.0 * count.routed_per_layer
    by_hand = 2 * 2.0 * ((count.total - routed) * 15 / 16 + routed / 8 * 1 / 2) / 1e9
    assert parts_on_a_slow_network(model, layout, "megatron").reduce == pytest.approx(by_hand, rel=0.1)
    assert share_of(model, FULL, layout).local == pytest.approx(count.total - routed * 7 / 8)


def test_the_expert_group_takes_the_tensor_parallel_ranks_in() -> None:
    """TP=2 x DP=4 with EP=8: a rank holds 32 whole experts of 256, and half of everything else."""
    model = replace(DEEPSEEK_V3, layers=4, dense_layers=0)
    share = share_of(model, FULL, Layout(world_size=8, tp=2, dp_shard=4, ep=8, sharding="zero1"))
    count = weights(model)
    routed = 4.0 * count.routed_per_layer
    assert share.local == pytest.approx((count.total - routed) / 2 + routed / 8)
    assert share.part(share.local, share.routed, sharded=True) == pytest.approx((count.total - routed) / 8 + routed / 8)


def test_tokens_go_to_their_experts_and_back() -> None:
    """4096 tokens to 8 experts each, 7 of 8 away, 2 bytes per column, four times per layer and step."""
    model = replace(DEEPSEEK_V3, layers=4, dense_layers=1)
    layout = Layout(world_size=8, dp_replicate=8, ep=8, sharding="ddp")
    sent = 3 * 4 * 4096 * 8 * 7168 * 2.0 * 7 / 8 / 1e9
    engine = replace(engine_named("megatron"), sends_tokens_once=False)
    assert parts_on_a_slow_network(model, layout, engine).expert_parallel == pytest.approx(sent, rel=1e-3)
    dense = replace(model, experts=0, experts_per_token=0)
    assert parts_on_a_slow_network(dense, layout, "megatron").expert_parallel == 0.0


def test_a_token_goes_once_to_a_receiver_with_several_of_its_experts() -> None:
    """Eight experts at random on 8 ranks are on 8 (1 - (7/8)^8) = 5.25 of them; in half of the groups, on 3.6."""
    model = replace(DEEPSEEK_V3, layers=4, dense_layers=0)
    layout = Layout(world_size=8, dp_replicate=8, ep=8, sharding="ddp")
    engine = engine_named("megatron")
    once = parts_on_a_slow_network(model, layout, engine).expert_parallel
    every = parts_on_a_slow_network(model, layout, replace(engine, sends_tokens_once=False)).expert_parallel
    assert once == pytest.approx(every * (1 - (7 / 8) ** 8))
    half = parts_on_a_slow_network(replace(model, expert_groups=0.5), layout, engine).expert_parallel
    assert half == pytest.approx(every / 2 * (1 - (3 / 4) ** 8))


def test_a_captured_step_waits_for_no_kernel_launch_and_overlaps_all_to_alls_with_compute() -> None:
    """Of 8 micro-batches, one sends its tokens alone; the others lose what any overlap with a network loses."""
    model, engine = replace(DEEPSEEK_V3, layers=4, dense_layers=0), engine_named("megatron")
    layout = Layout(world_size=8, dp_shard=8, ep=8, sharding="zero1", precision="mxfp8", gradient_accumulation=8)
    fast = replace(SLOW, bytes_per_second=400e9)
    links = Links(ranks_per_node=4, nodes=2, island_size=4, island=fast, node=fast, network=fast)
    rates = gpu_rates(gpu_named("NVIDIA GB200"), FULL, engine, "mxfp8")
    job = Job(model=model, train=replace(FULL, sequence_length=512), links=links, rates=rates, engine=engine)
    older = replace(engine, cuda_graph_arguments=(), overlaps_without_pipeline=False)
    plain = step_parts(replace(job, engine=older), layout)
    captured = step_parts(job, layout)
    assert plain.host > 0.0 == captured.host
    assert captured.expert_parallel == pytest.approx(plain.expert_parallel * (1 + 7 * 0.3) / 8)
    assert captured.gemm == pytest.approx(plain.gemm)
    assert captured.elementwise < plain.elementwise


@each_row(("gpu", "speed"), [("NVIDIA GB300", 1.379), ("NVIDIA GB200", 1.0)])
def test_a_captured_step_computes_latent_attention_in_mxfp8_on_compute_capability_10_3(gpu, speed) -> None:
    """NVIDIA's recipes set fp8_dot_product_attention there, and only there; other heads are no faster in MXFP8."""
    layout = Layout(world_size=8, dp_shard=8, ep=8, sharding="zero1", precision="mxfp8", gradient_accumulation=8)
    engine = engine_named("megatron")
    rates = gpu_rates(gpu_named(gpu), FULL, engine, "mxfp8")
    for model, ratio in ((replace(DEEPSEEK_V3, dense_layers=0), speed), (GPT_OSS, 1.0)):
        job = Job(model=model, train=FULL, links=ONE_NODE, rates=rates, engine=engine)
        older = replace(job, engine=replace(engine, cuda_graph_arguments=()))
        assert step_parts(older, layout).attention == pytest.approx(ratio * step_parts(job, layout).attention)


def test_layers_with_mamba_2_count_as_their_share_of_all() -> None:
    """Nemotron 3 Nano: 23 of 29 mixers, and weights as transformers 5.23 builds it, without convolutions and biases."""
    nano, train = model_named("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"), replace(FULL, sequence_length=8192)
    assert weights(nano).total == pytest.approx(31_577_937_344, rel=5e-5)
    engine = engine_named("megatron")
    rates = gpu_rates(gpu_named("NVIDIA H200"), train, engine, "bf16")
    base = Job(model=nano, train=train, links=ONE_NODE, rates=rates, engine=engine)
    mixed, attention, mamba = (
        replace(base, model=replace(nano, mamba_layers=count)).layer(Layout(world_size=1), 8192.0)
        for count in (23, 0, 29)
    )
    assert mixed == pytest.approx([(6 * a + 23 * m) / 29 for a, m in zip(attention, mamba, strict=True)])
    assert mamba.attention == 0.0 and mamba.elementwise > attention.elementwise


def test_tokens_cross_the_network_and_then_the_node() -> None:
    """16 ranks on two nodes: half of the tokens leave the node, 7 of 16 parts go over NVLink, one after the other."""
    fast = replace(SLOW, bytes_per_second=4e9)
    two = Links(ranks_per_node=8, nodes=2, island_size=8, island=fast, node=fast, network=SLOW, alpha_inter_seconds=0.0)
    assert two.all_to_all_seconds(1e9, 16, 1) == pytest.approx(8 * 8 / 16 + 7 / 16 / 4)
    # What enters a node once goes on to each of its ranks that needs it: here to three, of which one in eight is the
    # rank that it entered by.
    assert two.all_to_all_seconds(1e9, 16, 1, spread=3.0) == pytest.approx(8 * 8 / 16 + 3 * 7 / 8 / 4)


def test_experts_of_a_token_lie_in_all_groups_at_most() -> None:
    """A config.json that names fewer groups than the default limit, or none, does not send a token to more ranks."""
    config = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
              "vocab_size": 129280}  # fmt: skip
    for groups, share in (({}, 0.5), ({"n_group": 1}, 1.0), ({"n_group": 8, "topk_group": 16}, 1.0)):
        assert model_from_config({**config, **groups}).expert_groups == share, groups


def test_fused_kernels_keep_no_output_of_the_experts() -> None:
    """Norms, attention, three MLP tensors and the input of the experts, of four copies of a token."""
    share = share_of(GPT_OSS, FULL, Layout(world_size=8, dp_shard=8, ep=8))
    by_hand = 5 * 2880 + (2 * 4096 + 2 * 512) + 3 * 4 * 2880 + 4 * 2880
    assert engine_named("automodel").layer_activations(share) == pytest.approx(4096 * 2 * by_hand)


def test_experts_merged_with_adapters_get_a_gradient_of_their_own() -> None:
    """PEFT's W + BA has a gradient as large as W's. Experts with biases move 40 and 56.1 bytes (`expert_bytes`)."""
    model, layout, engine = replace(GPT_OSS, layers=4), Layout(world_size=1), engine_named("trl")
    train = replace(FULL, method="lora", lora_rank=8, lora_targets=("q_proj", "gate_proj", "up_proj", "down_proj"))
    plain = replace(engine, merges_expert_adapters=False, expert_bytes=(0.0,) * 4)
    merged, apart = (parts_on_a_slow_network(model, layout, each, train) for each in (engine, plain))
    rows, rates = 4096.0 * 4 / 128, gpu_rates(gpu_named("NVIDIA H100 80GB HBM3"), train, engine, "bf16")
    flops = sum(2 * rows * n * 2880 * (1 + 180 / rows + 190 / n + 220 / 2880) for n in (2 * 2880, 2880))
    assert merged.gemm - apart.gemm == pytest.approx(4 * 128 * flops / rates.gemm)
    moved = 128 * rows * (40.0 * 2880 + 56.1 * 2 * 2880) + 3 * 2 * 2.0 * weights(model).routed_per_layer
    assert merged.elementwise - apart.elementwise == pytest.approx(4 * moved / rates.hbm)


def test_gathered_keys_and_values_hide_under_a_ranks_own_attention() -> None:
    """A ring has all of attention to hide under, one gather only what needs no other rank's keys."""
    train = replace(FULL, sequence_length=131072)
    model, layout = replace(GPT_OSS, layers=4, experts=0, experts_per_token=0), Layout(world_size=4, cp=4)
    engine = engine_named("torchtitan")
    gathered = parts_on_a_slow_network(model, layout, engine, train).context_parallel
    ring = parts_on_a_slow_network(model, layout, replace(engine, gathers_context=False), train).context_parallel
    assert gathered > ring > 0


def test_ranks_of_context_parallelism_shard_the_weights_too() -> None:
    """They hold the same ones: states over dp_shard x cp, as over so many data-parallel ranks."""
    train = replace(FULL, sequence_length=65536)
    model, engine = replace(GPT_OSS, experts=0, family="llama", attention_bias=False), engine_named("torchtitan")
    ring = memory_parts(model, train, Layout(world_size=16, dp_shard=4, cp=4), engine)
    flat = memory_parts(model, train, Layout(world_size=16, dp_shard=16), engine)
    for name in ("weights", "optimizer"):
        assert getattr(ring, name) == pytest.approx(getattr(flat, name))
    assert ring.activations == pytest.approx(flat.activations / 4, rel=0.01)

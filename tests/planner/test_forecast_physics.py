"""The forecast's physics: exact counts where the literature gives them, directions that must hold, counts by hand.

Of latent attention, Mamba-2 and mixtures of experts: weights, bytes and groups.
"""

from dataclasses import replace

import pytest
from rigs.tables import each_row

from contracts.layout import Layout
from hardware.gpus import find_gpu
from hardware.units import GIB
from planner.explain import link_of, sigmas_of_rates
from planner.forecast.calibration import SIGMAS
from planner.forecast.compute import Job, cpu_rates, gpu_rates
from planner.forecast.engine import Engine, StateBytes, share_of
from planner.forecast.links import Links, Speed
from planner.forecast.memory import memory_parts
from planner.forecast.models import model_named, read_model
from planner.forecast.specs import ModelSpec, TrainSpec, lora_weights, weights
from planner.forecast.step_time import COMMUNICATION, StepParts, forecast_step
from planner.stacks import find_engine

GB = 1e9
NVLINK = Speed(bytes_per_second=336 * GB, how="derived", link="NVLink")
RDMA = Speed(bytes_per_second=340 * GB, how="derived", link="RDMA")
FULL = TrainSpec(method="full", sequence_length=4096)
MODEL = model_named("Llama-3.1-8B")
OURS = find_engine("topoflight")


def links(nodes: int, network: float = 340 * GB) -> Links:
    """8-GPU NVSwitch nodes."""
    outside = replace(RDMA, bytes_per_second=network) if nodes > 1 else None
    return Links(ranks_per_node=8, nodes=nodes, island_size=8, island=NVLINK, node=NVLINK, network=outside)


def job(given: Links, train: TrainSpec = FULL, engine: str = "topoflight") -> Job:
    """The model on H100s."""
    gpu, runs = find_gpu("NVIDIA H100 80GB HBM3"), find_engine(engine)
    return Job(model=MODEL, train=train, links=given, rates=gpu_rates(gpu, train, runs, "bf16"), engine=runs)


def test_a_ring_takes_its_bytes_over_its_bandwidth() -> None:
    """S (n - 1) / n / B inside an island; across nodes every boundary carries the same, side by side groups share."""
    one = replace(links(1), alpha_intra_seconds=0.0)
    assert one.ring_seconds(336 * GB, 8, 1) == pytest.approx(7 / 8)
    assert one.all_reduce_seconds(336 * GB, 8, 1) == pytest.approx(14 / 8)
    two = replace(links(2, 10 * GB), alpha_intra_seconds=0.0, alpha_inter_seconds=0.0)
    assert two.ring_seconds(16 * GB, 16, 1) == pytest.approx(1.5)  # one ring through the node's 10 GB/s
    assert two.ring_seconds(16 * GB, 2, 8) == pytest.approx(8 * 0.8)  # eight rings side by side


def test_states_are_eighteen_bytes_per_weight_as_published() -> None:
    """GPT-3 175B on TP=8 PP=8: 45.56 GiB of weights and optimizer, 12.35 GiB of activations (arXiv 2205.05198)."""
    engine = Engine(name="megatron-2022", fused=True, attention="unfused", states=StateBytes(2.0, 4.0, 12.0, copy=4.0),
                   gradient_buffer=True, selective_attention=True)  # fmt: skip
    model = replace(
        model_named("GPT-2"), layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152, vocab=51200
    )
    layout = Layout(
        world_size=64, tp=8, pp=8, sequence_parallel=True, schedule="interleaved", virtual_stages=3, micro_batch=1,
        gradient_accumulation=64, checkpointing="selective", precision="fp16", sharding="ddp",
    )  # fmt: skip
    train = TrainSpec(method="full", sequence_length=2048, precision="fp16")
    parts = memory_parts(model, train, layout, engine)
    states = (parts.weights + parts.gradients + parts.optimizer) / GIB
    assert states == pytest.approx(45.56, rel=0.05)
    assert parts.activations / GIB == pytest.approx(12.35, rel=0.1)


def test_hsdp_keeps_the_gathers_inside_the_node() -> None:
    """On a slow network sharding within the node beats sharding over all of it."""
    given = job(links(4, 5 * GB))
    flat = forecast_step(given, Layout(world_size=32, dp_shard=32, micro_batch=2))
    hybrid = forecast_step(given, Layout(world_size=32, dp_shard=8, dp_replicate=4, micro_batch=2))
    assert hybrid.gather < 0.1 * flat.gather
    assert hybrid.total < flat.total


def test_replicas_reduce_in_each_micro_batch_where_no_trainer_defers_it() -> None:
    """Four times as long over four micro-batches; the built-in job defers it (set_requires_all_reduce)."""
    given = job(links(4, 5 * GB))
    layout = Layout(world_size=32, dp_shard=8, dp_replicate=4, gradient_accumulation=4)
    engines = (replace(given.engine, reduce_every_micro_batch=every) for every in (False, True))
    once, each = (forecast_step(replace(given, engine=engine), layout).reduce for engine in engines)
    assert 2 * once < each < 4 * once
    assert not find_engine("topoflight").reduce_every_micro_batch
    assert all(find_engine(name).reduce_every_micro_batch for name in ("torchtitan", "trl", "automodel"))


def test_more_micro_batches_shrink_the_bubble_as_p_minus_1_over_v_m() -> None:
    """(p - 1) / (v m) of the ideal time."""
    given = job(links(1), engine="megatron")

    def share(micro_batches: int, virtual: int) -> float:
        layout = Layout(
            world_size=8, pp=8, gradient_accumulation=micro_batches, virtual_stages=virtual,
            schedule="interleaved" if virtual > 1 else "1f1b", sharding="ddp",
        )  # fmt: skip
        return forecast_step(given, layout).bubble

    assert share(32, 1) == pytest.approx(share(64, 1))  # seconds, not share: the bubble does not grow with m
    assert share(32, 4) == pytest.approx(share(32, 1) / 4)


def test_a_step_is_not_shorter_than_the_sends_of_a_pipeline() -> None:
    """A stage between two others sends activations and gradients of each chunk over the network of its node."""
    given = job(links(4, 0.1 * GB), engine="megatron")
    for chunks in (1, 2, 4):
        layout = Layout(world_size=32, pp=4, tp=8, gradient_accumulation=64, virtual_stages=chunks, sharding="ddp",
                        schedule="interleaved" if chunks > 1 else "1f1b")  # fmt: skip
        assert forecast_step(given, layout).total > 64 * chunks * 2 * 2 * 4096 * 4096 / (0.1 * GB), chunks


def test_recomputation_costs_a_forward_pass_and_saves_activations() -> None:
    """Full checkpointing: a third more compute, a fraction of the memory."""
    given = job(links(1))
    none = Layout(world_size=8, dp_shard=8, micro_batch=2)
    full = replace(none, checkpointing="full")
    plain, again = forecast_step(given, none), forecast_step(given, full)
    assert again.recompute / (plain.gemm + plain.attention + plain.elementwise) == pytest.approx(1 / 3, abs=0.05)
    whole, recomputed = (memory_parts(MODEL, FULL, at, given.engine) for at in (none, full))
    assert recomputed.activations < 0.25 * whole.activations


def test_lora_computes_two_thirds_and_sends_no_gradients() -> None:
    """Frozen weights get no gradient: two products instead of three, gathers without the reduce-scatter."""
    layout = Layout(world_size=32, dp_shard=32, micro_batch=2)
    full = forecast_step(job(links(4, 5 * GB)), layout)
    lora = forecast_step(job(links(4, 5 * GB), replace(FULL, method="lora")), layout)
    assert lora.gemm / full.gemm == pytest.approx(2 / 3, abs=0.03)
    assert lora.gather < full.gather
    assert 0 < lora.reduce < 0.02 * full.reduce  # the adapters' gradients


def test_an_optimizer_step_reads_and_writes_what_the_stack_stores() -> None:
    """AdamW reads weight, gradient and two moments and writes all but the gradient."""
    for engine, train, each in (
        ("topoflight", FULL, 28.0), ("megatron", FULL, 28.0), ("deepspeed", FULL, 28.0), ("trl", FULL, 14.0),
        ("topoflight", replace(FULL, optimizer="sgd"), 12.0),
    ):  # fmt: skip
        share = share_of(MODEL, train, Layout(world_size=1))
        assert find_engine(engine).step_bytes(share) == each, engine


def test_a_link_that_nobody_measured_widens_the_interval_by_what_it_may_show() -> None:
    """Of traffic that compute hides at the assumed speed too; what was measured, or crosses no link, adds nothing."""
    pcie = Speed(bytes_per_second=100 * GB, how="assumed", link="PCIe")
    layout = Layout(world_size=8, dp_shard=8, micro_batch=4)
    sigmas = []
    for speed in (pcie, replace(pcie, link="xGMI"), replace(pcie, how="measured")):
        one = job(replace(links(1), island_size=1, island=speed, node=speed))
        sigmas.append(sigmas_of_rates(one, layout, forecast_step(one, layout))[1])
    alone = job(replace(links(1), island_size=1, island=pcie, node=pcie))
    shown = forecast_step(alone, layout)
    assert shown.communication < 0.25 * shown.total
    assert sigmas[0] > 2 * sigmas[1] > 0.05 and sigmas[2] == 0.0  # at a third of the speed little is hidden
    replicas = Layout(world_size=1, micro_batch=2)
    assert sigmas_of_rates(alone, replicas, forecast_step(alone, replicas)) == (0.0, 0.0)


def test_gradients_of_several_micro_batches_are_added_up_in_memory() -> None:
    """Of 4 micro-batches 3 add theirs: 4 bytes read twice and written once, of the shard where gradients are sharded.

    Megatron's products add to the buffer themselves (gradient_accumulation_fusion).
    """
    one = job(links(1))
    ddp = Layout(world_size=8, dp_replicate=8, sharding="ddp", gradient_accumulation=4)
    fsdp = Layout(world_size=8, dp_shard=8, gradient_accumulation=4)
    for layout, share in ((ddp, 1), (fsdp, 8)):
        took, fused = (
            forecast_step(replace(one, engine=replace(one.engine, adds_in_products=added)), layout).elementwise
            for added in (False, True)
        )
        by_hand = 3 * 3.0 * 4.0 * weights(MODEL).total / share / one.rates.hbm
        assert took - fused == pytest.approx(by_hand), layout.family
    assert find_engine("megatron").adds_in_products


def test_shards_that_cross_the_network_hide_less_well() -> None:
    """Gathers and reductions of a group on one node lose little, those between nodes twice as much; so do replicas'."""
    wide = Layout(world_size=16, dp_shard=16, micro_batch=2)
    for nodes, layout, slower in (
        (2, wide, True), (2, replace(wide, dp_shard=8, dp_replicate=2), True),
        (1, replace(wide, world_size=8, dp_shard=8), False),
    ):  # fmt: skip
        given = job(links(nodes))
        even = replace(given, constants={**given.constants, "overlap_loss_network": given.constants["overlap_loss"]})
        assert (forecast_step(given, layout).total > forecast_step(even, layout).total) == slower, layout


def test_the_link_named_for_a_component_is_the_one_that_slows_it() -> None:
    """On nodes of 8: EP with TP stays on a node; shards over context-parallel ranks alone cross the network."""
    experts = Layout(world_size=16, dp_shard=8, tp=2, ep=8, sharding="zero1", sequence_parallel=True)
    for model, engine, layout, crossing in (
        ("Qwen3-30B-A3B", "megatron", experts, {"reduce"}),
        ("Llama-3.1-8B", "topoflight", Layout(world_size=16, cp=16), {"context_parallel", "gather", "reduce"}),
    ):
        fast, slow = (replace(job(links(2, rate * GB), engine=engine), model=model_named(model)) for rate in (2.0, 1.0))
        once, later = forecast_step(fast, layout), forecast_step(slow, layout)
        assert {name for name, seconds in once._asdict().items() if getattr(later, name) > seconds} == crossing
        used = {name: link_of(fast.links, layout, name) for name in COMMUNICATION if getattr(once, name) > 0}
        assert {name for name, link in used.items() if link is fast.links.network} == crossing


def test_what_the_host_takes_is_not_known_before_it_is_measured() -> None:
    """A step that waits for launches may be much slower on a slow CPU; one that hides them is not."""
    layout = Layout(world_size=1, micro_batch=1)
    sigmas = []
    for length in (64, 8192):
        one = job(links(1), replace(FULL, method="lora", sequence_length=length))
        sigmas.append(sigmas_of_rates(one, layout, forecast_step(one, layout)))
    (faster, slower), hidden = sigmas
    assert (faster, slower) == pytest.approx((SIGMAS["launch"], SIGMAS["launch"]), rel=0.05)
    assert hidden == (0.0, 0.0)
    assert sigmas_of_rates(one, layout, forecast_step(one, layout), host_measured=True) == (0.0, 0.0)


def test_deepspeed_runs_its_hooks_on_one_rank_too() -> None:
    """One unit per layer, three passes of a recomputed one; without ZeRO-3 none."""
    one = Layout(world_size=1, checkpointing="full")
    short = replace(FULL, sequence_length=64)
    host = [forecast_step(job(links(1), short, "deepspeed"), at).host for at in (one, replace(one, sharding="ddp"))]
    given = job(links(1), short)
    hooks = 3 * 32 * given.constants["unit_kernels"] * given.rates.launch_seconds
    assert host[0] - host[1] == pytest.approx(hooks, rel=0.05)


def test_a_cpu_hides_nothing_and_moves_fp32() -> None:
    """fully_shard waits for gloo's collectives, and one thread starts operators and runs them."""
    inside = Speed(bytes_per_second=GB, how="measured", link="host memory")
    two = Links(ranks_per_node=2, nodes=1, island_size=2, island=inside, node=inside, network=None,
                alpha_intra_seconds=0.0)  # fmt: skip
    train = replace(FULL, method="lora", sequence_length=512)
    given = Job(model=MODEL, train=train, links=two, rates=cpu_rates(1.0, None), engine=find_engine("topoflight"))
    layout = Layout(world_size=2, dp_shard=2, precision="fp32")
    parts = forecast_step(given, layout)
    count = weights(MODEL)
    twice = 2 * (count.total + lora_weights(MODEL, train)) - count.head  # the head is still there for its backward pass
    assert parts.gather == pytest.approx(two.ring_seconds(4.0 * twice, 2, 1))
    kernels = given.constants["kernels_eager"] + given.constants["lora_kernels"] * 7
    hooks = (32 + 2) * 2 * given.constants["unit_kernels"]  # a unit for each layer, the embedding and the head
    assert parts.host == pytest.approx((32 * 2.7 * kernels + hooks) * given.rates.launch_seconds)
    half = replace(given, rates=replace(given.rates, element_bytes=2.0))
    assert forecast_step(half, layout).elementwise < parts.elementwise


def test_the_job_scatters_a_whole_models_gradients_each_time_and_adapters_once() -> None:
    """What it keeps unreduced it keeps whole: little for adapters, four bytes per weight for all."""
    once = Layout(world_size=32, dp_shard=32, micro_batch=2)
    thrice = replace(once, micro_batch=1, gradient_accumulation=3)
    slow = links(4, 5 * GB)
    lora = replace(FULL, method="lora")
    for train, times in ((FULL, 3), (lora, 1)):
        first, more = (forecast_step(job(slow, train), at).reduce for at in (once, thrice))
        assert more == pytest.approx(times * first, rel=0.1)
    gathered = replace(once, sharding="zero2"), replace(thrice, sharding="zero2")
    first, more = (forecast_step(job(slow, lora), at).gather for at in gathered)
    assert more == pytest.approx(first, rel=0.1)  # and what stays gathered is gathered once
    gradients = [memory_parts(MODEL, lora, at, OURS).gradients for at in (once, thrice)]
    assert gradients[1] == pytest.approx(32 * gradients[0])
    accumulating = replace(once, checkpointing="full"), replace(thrice, checkpointing="full")
    assert memory_parts(MODEL, FULL, accumulating[1], OURS).gradients < 2 * GIB


def test_a_pipeline_of_the_job_keeps_its_units_whole() -> None:
    """torch.distributed.pipelining gathers for good and reduces when the schedule is over."""
    layout = Layout(world_size=32, pp=2, dp_shard=16, micro_batch=1, gradient_accumulation=4)
    held = memory_parts(MODEL, FULL, layout, find_engine("topoflight"))
    stage = weights(MODEL).total / 2
    assert held.gradients == pytest.approx(4 * stage, rel=0.1)
    assert held.gathered > 2 * 0.9 * stage


def test_what_stays_gathered_of_four_bit_weights_is_four_bit_weights() -> None:
    """NF4 layers and two bytes per weight of embedding and head, which are not quantised."""
    layout = Layout(world_size=8, dp_shard=8, reshard_after_forward=False)
    count = weights(MODEL)
    gathered = memory_parts(MODEL, replace(FULL, method="qlora"), layout, OURS).gathered
    assert gathered == pytest.approx(0.5 * MODEL.layers * count.layer + 2.0 * (count.embedding + count.head))
    assert gathered < 0.5 * memory_parts(MODEL, replace(FULL, method="lora"), layout, OURS).gathered


def test_scales_of_four_bit_weights_are_whole_on_every_rank() -> None:
    """FSDP shares out the packed weights; their scales are a state of the module's, on the device where they lie."""
    layers = MODEL.layers * weights(MODEL).layer
    alone, shared, offloaded = (
        memory_parts(MODEL, replace(FULL, method="qlora"), layout, OURS).weights
        for layout in (Layout(world_size=1), Layout(world_size=64, dp_shard=64),
                       Layout(world_size=64, dp_shard=64, offload="all"))
    )  # fmt: skip
    scales = layers * (1 + 4 / 256) / 64
    assert offloaded == pytest.approx(scales)
    assert shared == pytest.approx((alone - scales) / 64 + scales)


def test_autocast_copies_fp32_weights_of_pipelines_and_replicas() -> None:
    """Full training in bf16 without sharding keeps 2 bytes per weight more than with FSDP; adapters do not."""
    alone = Layout(world_size=1, micro_batch=1)
    sharded = replace(alone, world_size=2, dp_shard=2)
    stored, cast = (memory_parts(MODEL, FULL, at, OURS) for at in (alone, sharded))
    weights_in_half = stored.weights / 2
    inputs = 5 * 2.0 * FULL.sequence_length * MODEL.hidden * MODEL.layers  # each product casts its own
    assert stored.activations - cast.activations == pytest.approx(weights_in_half + inputs, rel=0.01)
    saved, cast = (memory_parts(MODEL, FULL, replace(at, checkpointing="full"), OURS) for at in (alone, sharded))
    # Nothing keeps a copy beyond its layer.
    assert 0 <= saved.activations - cast.activations < 0.1 * weights_in_half
    lora = TrainSpec(sequence_length=4096)
    frozen = memory_parts(MODEL, lora, alone, OURS)
    assert frozen.activations == memory_parts(MODEL, lora, sharded, OURS).activations


def test_with_full_checkpointing_logits_and_a_remade_layer_never_meet() -> None:
    """The larger of the two counts, not their sum."""
    layout = Layout(world_size=1, checkpointing="full", micro_batch=4)
    train, engine = TrainSpec(sequence_length=4096), find_engine("torchtitan")
    parts = memory_parts(MODEL, train, layout, engine)
    saved = 2.0 * 4 * 4096 * MODEL.hidden * MODEL.layers
    layer = engine.layer_activations(share_of(MODEL, train, layout))
    assert 0 < layer < parts.logits
    assert parts.activations + parts.logits == pytest.approx(saved + parts.logits)


def test_an_optimizer_in_the_backward_pass_leaves_one_gradient() -> None:
    """The head's is the largest of them."""
    engine = Engine(name="torchtune", adapter_bytes=2.0, ends_apart=True)
    layout = Layout(world_size=1, checkpointing="full", fused_cross_entropy=True)
    parts = memory_parts(MODEL, replace(FULL, optimizer_in_backward=True), layout, engine)
    assert parts.gradients == pytest.approx(2.0 * MODEL.vocab * MODEL.hidden)


def test_ligers_kernels_shorten_what_lies_between_the_products_where_a_stack_runs_them() -> None:
    """TRL's and DeepSpeed's patch by transformers takes all of them, the fine-tune job the loss alone."""
    layout = Layout(world_size=8, dp_shard=8, micro_batch=4)

    def layers(engine: str, *, fused: bool) -> float:
        asked = job(links(1), engine=engine)
        return asked.layer(replace(layout, fused_cross_entropy=fused), 4 * 4096.0).elementwise

    for engine in ("trl", "deepspeed"):
        assert layers(engine, fused=True) < 0.8 * layers(engine, fused=False)
    assert layers("topoflight", fused=True) == layers("topoflight", fused=False)


def test_qlora_unpacks_its_weights_for_each_pass() -> None:
    """2.5 bytes and the scales per weight of the layers at 0.16 of 3.35 TB/s: in each pass, recomputed in three.

    Per micro-batch, whatever its tokens: 32 layers of 218 M weights in products.
    """
    layout = Layout(world_size=1, gradient_accumulation=4, checkpointing="full")
    plain, packed = (replace(FULL, method=method, lora_rank=8) for method in ("lora", "qlora"))
    weights_in_products = 32 * (4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 14336)
    by_hand = 4 * 3 * (2.5 + 1 / 64 + 1 / 4096) * weights_in_products / (0.16 * 3.35e12)
    assert forecast_step(job(links(1), packed), layout).dequantize == pytest.approx(by_hand)
    assert forecast_step(job(links(1), packed), replace(layout, micro_batch=8)).dequantize == pytest.approx(by_hand)
    assert forecast_step(job(links(1), plain), layout).dequantize == 0.0
    twice = forecast_step(job(links(1), packed), replace(layout, checkpointing="none")).dequantize
    assert twice == pytest.approx(by_hand * 2 / 3)


DEEPSEEK_V3 = ModelSpec(
    name="DeepSeek-V3", family="deepseek_v3", layers=61, hidden=7168, heads=128, kv_heads=128, head_dim=192, ffn=18432,
    vocab=129280, q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128, experts=256, experts_per_token=8,
    expert_ffn=2048, shared_expert_ffn=2048, dense_layers=3,
)  # fmt: skip
GPT_OSS = ModelSpec(
    name="gpt-oss-120b", family="gpt_oss", layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880,
    vocab=201088, attention_bias=True, experts=128, experts_per_token=4, expert_ffn=2880,
)  # fmt: skip
EXPERTS = replace(DEEPSEEK_V3, layers=4, dense_layers=0)


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
    rates = gpu_rates(find_gpu(gpu), replace(FULL, attention=attention), find_engine(engine), "bf16")
    assert rates.attention == pytest.approx(measured * 1e12, rel=0.01)
    assert (rates.gemm == find_gpu(gpu).matmul_bf16) == ("H20" in gpu.split())


SLOW = Speed(bytes_per_second=1e9, how="measured", link="TCP")
ONE_NODE = Links(ranks_per_node=8, nodes=1, island_size=8, island=SLOW, node=SLOW, network=None)


def parts_on_a_slow_network(
    model: ModelSpec, layout: Layout, engine: str | Engine, train: TrainSpec = FULL
) -> StepParts:
    """One GPU per node, all traffic over 1 GB/s and nothing lost to starting it."""
    gpu, runs = find_gpu("NVIDIA H100 80GB HBM3"), find_engine(engine) if isinstance(engine, str) else engine
    links = Links(
        ranks_per_node=1, nodes=layout.world_size, island_size=1, island=SLOW, node=SLOW, network=SLOW,
        alpha_intra_seconds=0.0, alpha_inter_seconds=0.0,
    )  # fmt: skip
    rates = gpu_rates(gpu, train, runs, "bf16")
    return forecast_step(Job(model=model, train=train, links=links, rates=rates, engine=runs), layout)


@each_row(("engine", "sent"), [("torchtitan", 8.0), ("topoflight", 8.0), ("trl", 6.0)])
def test_fsdp_sends_gradients_in_the_type_it_reduces(engine: str, sent: float) -> None:
    """Two gathers of 2 bytes; scatters of 4 (reduce_dtype=float32), of 2 where the policy says so (accelerate).

    On a network this slow the step is its traffic, but for the compute's share of an overlap and one unit at each end.
    """
    parts = parts_on_a_slow_network(MODEL, Layout(world_size=8, dp_shard=8), engine)
    traffic = sent * weights(MODEL).total * 7 / 8 / 1e9
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
    layout = Layout(world_size=16, dp_replicate=16, ep=8, sharding="ddp", micro_batch=1)
    count = weights(EXPERTS)
    routed = 4.0 * count.routed_per_layer
    by_hand = 2 * 2.0 * ((count.total - routed) * 15 / 16 + routed / 8 * 1 / 2) / 1e9
    assert parts_on_a_slow_network(EXPERTS, layout, "megatron").reduce == pytest.approx(by_hand, rel=0.1)
    assert share_of(EXPERTS, FULL, layout).local == pytest.approx(count.total - routed * 7 / 8)


def test_the_expert_group_takes_the_tensor_parallel_ranks_in() -> None:
    """TP=2 x DP=4 with EP=8: a rank holds 32 whole experts of 256, and half of everything else."""
    share = share_of(EXPERTS, FULL, Layout(world_size=8, tp=2, dp_shard=4, ep=8, sharding="zero1"))
    count = weights(EXPERTS)
    routed = 4.0 * count.routed_per_layer
    assert share.local == pytest.approx((count.total - routed) / 2 + routed / 8)
    assert share.part(share.local, share.routed, sharded=True) == pytest.approx((count.total - routed) / 8 + routed / 8)


def test_tokens_go_to_their_experts_and_back() -> None:
    """4096 tokens to 8 experts each, 7 of 8 away, 2 bytes per column, four times per layer and step."""
    model = replace(DEEPSEEK_V3, layers=4, dense_layers=1)
    layout = Layout(world_size=8, dp_replicate=8, ep=8, sharding="ddp")
    sent = 3 * 4 * 4096 * 8 * 7168 * 2.0 * 7 / 8 / 1e9
    engine = replace(find_engine("megatron"), sends_tokens_once=False)
    assert parts_on_a_slow_network(model, layout, engine).expert_parallel == pytest.approx(sent, rel=1e-3)
    dense = replace(model, experts=0, experts_per_token=0)
    assert parts_on_a_slow_network(dense, layout, "megatron").expert_parallel == 0.0


def test_a_token_goes_once_to_a_receiver_with_several_of_its_experts() -> None:
    """Eight experts at random on 8 ranks are on 8 (1 - (7/8)^8) = 5.25 of them; in half of the groups, on 3.6."""
    layout = Layout(world_size=8, dp_replicate=8, ep=8, sharding="ddp")
    engine = find_engine("megatron")
    once = parts_on_a_slow_network(EXPERTS, layout, engine).expert_parallel
    every = parts_on_a_slow_network(EXPERTS, layout, replace(engine, sends_tokens_once=False)).expert_parallel
    assert once == pytest.approx(every * (1 - (7 / 8) ** 8))
    half = parts_on_a_slow_network(replace(EXPERTS, expert_groups=0.5), layout, engine).expert_parallel
    assert half == pytest.approx(every / 2 * (1 - (3 / 4) ** 8))


def test_a_captured_step_waits_for_no_kernel_launch_and_overlaps_all_to_alls_with_compute() -> None:
    """Of 8 micro-batches, one sends its tokens alone; the others lose what any overlap with a network loses."""
    engine = find_engine("megatron")
    layout = Layout(world_size=8, dp_shard=8, ep=8, sharding="zero1", precision="mxfp8", gradient_accumulation=8)
    fast = replace(SLOW, bytes_per_second=400e9)
    links = Links(ranks_per_node=4, nodes=2, island_size=4, island=fast, node=fast, network=fast)
    rates = gpu_rates(find_gpu("NVIDIA GB200"), FULL, engine, "mxfp8")
    job = Job(model=EXPERTS, train=replace(FULL, sequence_length=512), links=links, rates=rates, engine=engine)
    older = replace(engine, cuda_graph_arguments=(), overlaps_without_pipeline=False)
    plain = forecast_step(replace(job, engine=older), layout)
    captured = forecast_step(job, layout)
    assert plain.host > 0.0 == captured.host
    assert captured.expert_parallel == pytest.approx(plain.expert_parallel * (1 + 7 * 0.3) / 8)
    assert captured.gemm == pytest.approx(plain.gemm)
    assert captured.elementwise < plain.elementwise


@each_row(("gpu", "speed"), [("NVIDIA GB300", 1.379), ("NVIDIA GB200", 1.0)])
def test_a_captured_step_computes_latent_attention_in_mxfp8_on_compute_capability_10_3(gpu, speed) -> None:
    """NVIDIA's recipes set fp8_dot_product_attention there, and only there; other heads are no faster in MXFP8."""
    layout = Layout(world_size=8, dp_shard=8, ep=8, sharding="zero1", precision="mxfp8", gradient_accumulation=8)
    engine = find_engine("megatron")
    rates = gpu_rates(find_gpu(gpu), FULL, engine, "mxfp8")
    for model, ratio in ((replace(DEEPSEEK_V3, dense_layers=0), speed), (GPT_OSS, 1.0)):
        job = Job(model=model, train=FULL, links=ONE_NODE, rates=rates, engine=engine)
        older = replace(job, engine=replace(engine, cuda_graph_arguments=()))
        assert forecast_step(older, layout).attention == pytest.approx(ratio * forecast_step(job, layout).attention)


@each_row(("gpu", "engine", "grouped", "latent"), [
    ("NVIDIA B200", "torchtitan", 0.77 / 0.51, 0.20 / 0.56), ("NVIDIA B200", "megatron", 1.0, 1.0),
    ("NVIDIA H200", "torchtitan", 1.0, 1.0),
])  # fmt: skip
def test_torchs_kernels_of_experts_and_latent_heads_are_slower_on_blackwell(gpu, engine, grouped, latent) -> None:
    """Its grouped_mm reaches 712 to 863 of 1,715 TFLOP/s; cuDNN attention takes up to 128 columns, here are 192."""
    model, runs = replace(DEEPSEEK_V3, dense_layers=0, shared_expert_ffn=0), find_engine(engine)
    rates = gpu_rates(find_gpu(gpu), FULL, runs, "bf16")
    given = Job(model=model, train=FULL, links=ONE_NODE, rates=rates, engine=runs)
    same = replace(given, rates=replace(rates, grouped=1.0, latent_speed=1.0))
    slow, usual = (each.layer(Layout(world_size=1), 4096.0) for each in (given, same))
    assert slow.attention == pytest.approx(usual.attention / latent)
    assert rates.grouped == pytest.approx(grouped)
    assert (grouped + 1) / 2 <= slow.gemm / usual.gemm <= grouped


def test_layers_with_mamba_2_count_as_their_share_of_all() -> None:
    """Nemotron 3 Nano: 23 of 29 mixers, and weights as transformers 5.23 builds it, without convolutions and biases."""
    nano, train = model_named("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"), replace(FULL, sequence_length=8192)
    assert weights(nano).total == pytest.approx(31_577_937_344, rel=5e-5)
    engine = find_engine("megatron")
    rates = gpu_rates(find_gpu("NVIDIA H200"), train, engine, "bf16")
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
    assert two.all_to_all_seconds(1e9, 1, 1) == 0.0
    # What enters a node once goes on to each of its ranks that needs it: here to three, of which one in eight is the
    # rank that it entered by.
    assert two.all_to_all_seconds(1e9, 16, 1, spread=3.0) == pytest.approx(8 * 8 / 16 + 3 * 7 / 8 / 4)


def test_experts_of_a_token_lie_in_all_groups_at_most() -> None:
    """A config.json that names fewer groups than the default limit, or none, does not send a token to more ranks."""
    config = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
              "vocab_size": 129280}  # fmt: skip
    for groups, share in (({}, 0.5), ({"n_group": 1}, 1.0), ({"n_group": 8, "topk_group": 16}, 1.0)):
        assert read_model({**config, **groups}).expert_groups == share, groups


def test_fused_kernels_keep_no_output_of_the_experts() -> None:
    """Norms, attention, three MLP tensors and the input of the experts, of four copies of a token."""
    share = share_of(GPT_OSS, FULL, Layout(world_size=8, dp_shard=8, ep=8))
    by_hand = 5 * 2880 + (2 * 4096 + 2 * 512) + 3 * 4 * 2880 + 4 * 2880
    assert find_engine("automodel").layer_activations(share) == pytest.approx(4096 * 2 * by_hand)


def test_experts_merged_with_adapters_get_a_gradient_of_their_own() -> None:
    """PEFT's W + BA has a gradient as large as W's. Experts with biases move 40 and 56.1 bytes (`expert_bytes`)."""
    model, layout, engine = replace(GPT_OSS, layers=4), Layout(world_size=1), find_engine("trl")
    train = replace(FULL, method="lora", lora_rank=8, lora_targets=("q_proj", "gate_proj", "up_proj", "down_proj"))
    plain = replace(engine, merges_expert_adapters=False, expert_bytes=(0.0,) * 4)
    merged, apart = (parts_on_a_slow_network(model, layout, each, train) for each in (engine, plain))
    rows, rates = 4096.0 * 4 / 128, gpu_rates(find_gpu("NVIDIA H100 80GB HBM3"), train, engine, "bf16")
    flops = sum(2 * rows * n * 2880 * (1 + 180 / rows + 190 / n + 220 / 2880) for n in (2 * 2880, 2880))
    assert merged.gemm - apart.gemm == pytest.approx(4 * 128 * flops / rates.gemm)
    moved = 128 * rows * (40.0 * 2880 + 56.1 * 2 * 2880) + 3 * 2 * 2.0 * weights(model).routed_per_layer
    assert merged.elementwise - apart.elementwise == pytest.approx(4 * moved / rates.hbm)


def test_gathered_keys_and_values_hide_under_a_ranks_own_attention() -> None:
    """A ring has all of attention to hide under, one gather only what needs no other rank's keys."""
    train = replace(FULL, sequence_length=131072)
    model, layout = replace(GPT_OSS, layers=4, experts=0, experts_per_token=0), Layout(world_size=4, cp=4)
    engine = find_engine("torchtitan")
    gathered = parts_on_a_slow_network(model, layout, engine, train).context_parallel
    ring = parts_on_a_slow_network(model, layout, replace(engine, gathers_context=False), train).context_parallel
    assert gathered > ring > 0


def test_ranks_of_context_parallelism_shard_the_weights_too() -> None:
    """They hold the same ones: states over dp_shard x cp, as over so many data-parallel ranks."""
    train = replace(FULL, sequence_length=65536)
    model, engine = replace(GPT_OSS, experts=0, family="llama", attention_bias=False), find_engine("torchtitan")
    ring = memory_parts(model, train, Layout(world_size=16, dp_shard=4, cp=4), engine)
    flat = memory_parts(model, train, Layout(world_size=16, dp_shard=16), engine)
    for name in ("weights", "optimizer"):
        assert getattr(ring, name) == pytest.approx(getattr(flat, name))
    assert ring.activations == pytest.approx(flat.activations / 4, rel=0.01)

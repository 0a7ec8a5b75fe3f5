"""The forecast's physics: exact counts where the literature gives them, and directions that must hold."""

from dataclasses import replace

import pytest

from contracts.layout import Layout
from hardware.gpus import gpu_named
from hardware.units import GIB
from planner.explain import link_of, sigmas_of_rates
from planner.forecast.calibration import SIGMAS
from planner.forecast.compute import Job, cpu_rates, gpu_rates
from planner.forecast.engine import Engine, StateBytes, share_of
from planner.forecast.links import Links, Speed
from planner.forecast.memory import memory_parts
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec, lora_weights, weights
from planner.forecast.step_time import COMMUNICATION, step_parts
from planner.stacks import engine_named

GB = 1e9
NVLINK = Speed(bytes_per_second=336 * GB, how="derived", link="NVLink")
RDMA = Speed(bytes_per_second=340 * GB, how="derived", link="RDMA")
FULL = TrainSpec(method="full", sequence_length=4096)
MODEL = model_named("Llama-3.1-8B")


def links(nodes: int, network: float = 340 * GB) -> Links:
    """8-GPU NVSwitch nodes."""
    outside = replace(RDMA, bytes_per_second=network) if nodes > 1 else None
    return Links(ranks_per_node=8, nodes=nodes, island_size=8, island=NVLINK, node=NVLINK, network=outside)


def job(given: Links, train: TrainSpec = FULL, engine: str = "topoflight") -> Job:
    """The model on H100s."""
    gpu, runs = gpu_named("NVIDIA H100 80GB HBM3"), engine_named(engine)
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


def test_a_slower_network_is_never_faster() -> None:
    """Step time falls or stays with every step up in bandwidth, down to the compute."""
    layout = Layout(world_size=32, dp_shard=32, micro_batch=1)
    seconds = [step_parts(job(links(4, rate * GB)), layout).total for rate in (1, 3, 10, 30, 100, 300)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 5 * seconds[-1]


def test_hsdp_keeps_the_gathers_inside_the_node() -> None:
    """On a slow network sharding within the node beats sharding over all of it."""
    given = job(links(4, 5 * GB))
    flat = step_parts(given, Layout(world_size=32, dp_shard=32, micro_batch=2))
    hybrid = step_parts(given, Layout(world_size=32, dp_shard=8, dp_replicate=4, micro_batch=2))
    assert hybrid.gather < 0.1 * flat.gather
    assert hybrid.total < flat.total


def test_more_micro_batches_shrink_the_bubble_as_p_minus_1_over_v_m() -> None:
    """(p - 1) / (v m) of the ideal time."""
    given = job(links(1), engine="megatron")

    def share(micro_batches: int, virtual: int) -> float:
        layout = Layout(
            world_size=8, pp=8, gradient_accumulation=micro_batches, virtual_stages=virtual,
            schedule="interleaved" if virtual > 1 else "1f1b", sharding="ddp",
        )  # fmt: skip
        return step_parts(given, layout).bubble

    assert share(32, 1) == pytest.approx(share(64, 1))  # seconds, not share: the bubble does not grow with m
    assert share(32, 4) == pytest.approx(share(32, 1) / 4)


def test_a_step_is_not_shorter_than_the_sends_of_a_pipeline() -> None:
    """A stage between two others sends activations and gradients of each chunk over the network of its node."""
    given = job(links(4, 0.1 * GB), engine="megatron")
    for chunks in (1, 2, 4):
        layout = Layout(world_size=32, pp=4, tp=8, gradient_accumulation=64, virtual_stages=chunks, sharding="ddp",
                        schedule="interleaved" if chunks > 1 else "1f1b")  # fmt: skip
        assert step_parts(given, layout).total > 64 * chunks * 2 * 2 * 4096 * 4096 / (0.1 * GB), chunks


def test_recomputation_costs_a_forward_pass_and_saves_activations() -> None:
    """Full checkpointing: a third more compute, a fraction of the memory."""
    given = job(links(1))
    none = Layout(world_size=8, dp_shard=8, micro_batch=2)
    full = replace(none, checkpointing="full")
    plain, again = step_parts(given, none), step_parts(given, full)
    assert again.recompute / (plain.gemm + plain.attention + plain.elementwise) == pytest.approx(1 / 3, abs=0.05)
    whole, recomputed = (memory_parts(MODEL, FULL, at, given.engine) for at in (none, full))
    assert recomputed.activations < 0.25 * whole.activations


def test_lora_computes_two_thirds_and_sends_no_gradients() -> None:
    """Frozen weights get no gradient: two products instead of three, gathers without the reduce-scatter."""
    layout = Layout(world_size=32, dp_shard=32, micro_batch=2)
    full = step_parts(job(links(4, 5 * GB)), layout)
    lora = step_parts(job(links(4, 5 * GB), replace(FULL, method="lora")), layout)
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
        assert engine_named(engine).step_bytes(share) == each, engine


def test_a_link_that_nobody_measured_widens_the_interval_by_what_it_may_show() -> None:
    """Of traffic that compute hides at the assumed speed too; what was measured, or crosses no link, adds nothing."""
    pcie = Speed(bytes_per_second=100 * GB, how="assumed", link="PCIe")
    layout = Layout(world_size=8, dp_shard=8, micro_batch=4)
    sigmas = []
    for speed in (pcie, replace(pcie, link="xGMI"), replace(pcie, how="measured")):
        one = job(replace(links(1), island_size=1, island=speed, node=speed))
        sigmas.append(sigmas_of_rates(one, layout, step_parts(one, layout))[1])
    shown = step_parts(job(replace(links(1), island_size=1, island=pcie, node=pcie)), layout)
    assert shown.communication < 0.25 * shown.total
    assert sigmas[0] > 2 * sigmas[1] > 0.05 and sigmas[2] == 0.0  # at a third of the speed little is hidden
    alone = job(replace(links(1), island_size=1, island=pcie, node=pcie))
    replicas = Layout(world_size=1, micro_batch=2)
    assert sigmas_of_rates(alone, replicas, step_parts(alone, replicas)) == (0.0, 0.0)


def test_gradients_of_several_micro_batches_are_added_up_in_memory() -> None:
    """Of 4 micro-batches 3 add theirs: 4 bytes read twice and written once, of the shard where gradients are sharded.

    Megatron's products add to the buffer themselves (gradient_accumulation_fusion).
    """
    one = job(links(1))
    ddp = Layout(world_size=8, dp_replicate=8, sharding="ddp", gradient_accumulation=4)
    fsdp = Layout(world_size=8, dp_shard=8, gradient_accumulation=4)
    for layout, share in ((ddp, 1), (fsdp, 8)):
        took, fused = (
            step_parts(replace(one, engine=replace(one.engine, adds_in_products=added)), layout).elementwise
            for added in (False, True)
        )
        by_hand = 3 * 3.0 * 4.0 * weights(MODEL).total / share / one.rates.hbm
        assert took - fused == pytest.approx(by_hand), layout.family
    assert engine_named("megatron").adds_in_products


def test_shards_that_cross_the_network_hide_less_well() -> None:
    """Gathers and reductions of a group on one node lose little, those between nodes twice as much; so do replicas'."""
    wide = Layout(world_size=16, dp_shard=16, micro_batch=2)
    for nodes, layout, slower in (
        (2, wide, True), (2, replace(wide, dp_shard=8, dp_replicate=2), True),
        (1, replace(wide, world_size=8, dp_shard=8), False),
    ):  # fmt: skip
        given = job(links(nodes))
        even = replace(given, constants={**given.constants, "overlap_loss_network": given.constants["overlap_loss"]})
        assert (step_parts(given, layout).total > step_parts(even, layout).total) == slower, layout


def test_the_link_named_for_a_component_is_the_one_that_slows_it() -> None:
    """On nodes of 8: EP with TP stays on a node; shards over context-parallel ranks alone cross the network."""
    experts = Layout(world_size=16, dp_shard=8, tp=2, ep=8, sharding="zero1", sequence_parallel=True)
    for model, engine, layout, crossing in (
        ("Qwen3-30B-A3B", "megatron", experts, {"reduce"}),
        ("Llama-3.1-8B", "topoflight", Layout(world_size=16, cp=16), {"context_parallel", "gather", "reduce"}),
    ):
        fast, slow = (replace(job(links(2, rate * GB), engine=engine), model=model_named(model)) for rate in (2.0, 1.0))
        once, later = step_parts(fast, layout), step_parts(slow, layout)
        assert {name for name, seconds in once._asdict().items() if getattr(later, name) > seconds} == crossing
        used = {name: link_of(fast.links, layout, name) for name in COMMUNICATION if getattr(once, name) > 0}
        assert {name for name, link in used.items() if link is fast.links.network} == crossing


def test_what_the_host_takes_is_not_known_before_it_is_measured() -> None:
    """A step that waits for launches may be much slower on a slow CPU; one that hides them is not."""
    layout = Layout(world_size=1, micro_batch=1)
    sigmas = []
    for length in (64, 8192):
        one = job(links(1), replace(FULL, method="lora", sequence_length=length))
        sigmas.append(sigmas_of_rates(one, layout, step_parts(one, layout)))
    (faster, slower), hidden = sigmas
    assert (faster, slower) == pytest.approx((SIGMAS["launch"], SIGMAS["launch"]), rel=0.05)
    assert hidden == (0.0, 0.0)
    assert sigmas_of_rates(one, layout, step_parts(one, layout), host_measured=True) == (0.0, 0.0)


def test_deepspeed_runs_its_hooks_on_one_rank_too() -> None:
    """One unit per layer, three passes of a recomputed one; without ZeRO-3 none."""
    one = Layout(world_size=1, checkpointing="full")
    short = replace(FULL, sequence_length=64)
    host = [step_parts(job(links(1), short, "deepspeed"), at).host for at in (one, replace(one, sharding="ddp"))]
    given = job(links(1), short)
    hooks = 3 * 32 * given.constants["unit_kernels"] * given.rates.launch_seconds
    assert host[0] - host[1] == pytest.approx(hooks, rel=0.05)


def test_a_cpu_hides_nothing_and_moves_fp32() -> None:
    """fully_shard waits for gloo's collectives, and one thread starts operators and runs them."""
    inside = Speed(bytes_per_second=GB, how="measured", link="host memory")
    two = Links(ranks_per_node=2, nodes=1, island_size=2, island=inside, node=inside, network=None,
                alpha_intra_seconds=0.0)  # fmt: skip
    train = replace(FULL, method="lora", sequence_length=512)
    given = Job(model=MODEL, train=train, links=two, rates=cpu_rates(1.0, None), engine=engine_named("topoflight"))
    layout = Layout(world_size=2, dp_shard=2, precision="fp32")
    parts = step_parts(given, layout)
    count = weights(MODEL)
    twice = 2 * (count.total + lora_weights(MODEL, train)) - count.head  # the head is still there for its backward pass
    assert parts.gather == pytest.approx(two.ring_seconds(4.0 * twice, 2, 1))
    kernels = given.constants["kernels_eager"] + given.constants["lora_kernels"] * 7
    hooks = (32 + 2) * 2 * given.constants["unit_kernels"]  # a unit for each layer, the embedding and the head
    assert parts.host == pytest.approx((32 * 2.7 * kernels + hooks) * given.rates.launch_seconds)
    half = replace(given, rates=replace(given.rates, element_bytes=2.0))
    assert step_parts(half, layout).elementwise < parts.elementwise


def test_the_job_scatters_a_whole_models_gradients_each_time_and_adapters_once() -> None:
    """What it keeps unreduced it keeps whole: little for adapters, four bytes per weight for all."""
    once = Layout(world_size=32, dp_shard=32, micro_batch=2)
    thrice = replace(once, micro_batch=1, gradient_accumulation=3)
    slow = links(4, 5 * GB)
    lora = replace(FULL, method="lora")
    for train, times in ((FULL, 3), (lora, 1)):
        first, more = (step_parts(job(slow, train), at).reduce for at in (once, thrice))
        assert more == pytest.approx(times * first, rel=0.1)
    gathered = replace(once, sharding="zero2"), replace(thrice, sharding="zero2")
    first, more = (step_parts(job(slow, lora), at).gather for at in gathered)
    assert more == pytest.approx(first, rel=0.1)  # and what stays gathered is gathered once
    engine = engine_named("topoflight")
    gradients = [memory_parts(MODEL, lora, at, engine).gradients for at in (once, thrice)]
    assert gradients[1] == pytest.approx(32 * gradients[0])
    accumulating = replace(once, checkpointing="full"), replace(thrice, checkpointing="full")
    assert memory_parts(MODEL, FULL, accumulating[1], engine).gradients < 2 * GIB


def test_a_pipeline_of_the_job_keeps_its_units_whole() -> None:
    """torch.distributed.pipelining gathers for good and reduces when the schedule is over."""
    layout = Layout(world_size=32, pp=2, dp_shard=16, micro_batch=1, gradient_accumulation=4)
    held = memory_parts(MODEL, FULL, layout, engine_named("topoflight"))
    stage = weights(MODEL).total / 2
    assert held.gradients == pytest.approx(4 * stage, rel=0.1)
    assert held.gathered > 2 * 0.9 * stage


def test_what_stays_gathered_of_four_bit_weights_is_four_bit_weights() -> None:
    """NF4 layers and two bytes per weight of embedding and head, which are not quantised."""
    layout = Layout(world_size=8, dp_shard=8, reshard_after_forward=False)
    engine, count = engine_named("topoflight"), weights(MODEL)
    gathered = memory_parts(MODEL, replace(FULL, method="qlora"), layout, engine).gathered
    assert gathered == pytest.approx(0.5 * MODEL.layers * count.layer + 2.0 * (count.embedding + count.head))
    assert gathered < 0.5 * memory_parts(MODEL, replace(FULL, method="lora"), layout, engine).gathered


def test_scales_of_four_bit_weights_are_whole_on_every_rank() -> None:
    """FSDP shares out the packed weights; their scales are a state of the module's, on the device where they lie."""
    engine, layers = engine_named("topoflight"), MODEL.layers * weights(MODEL).layer
    alone, shared, offloaded = (
        memory_parts(MODEL, replace(FULL, method="qlora"), layout, engine).weights
        for layout in (Layout(world_size=1), Layout(world_size=64, dp_shard=64),
                       Layout(world_size=64, dp_shard=64, offload="all"))
    )  # fmt: skip
    scales = layers * (1 + 4 / 256) / 64
    assert offloaded == pytest.approx(scales)
    assert shared == pytest.approx((alone - scales) / 64 + scales)


def test_autocast_copies_fp32_weights_of_pipelines_and_replicas() -> None:
    """Full training in bf16 without sharding keeps 2 bytes per weight more than with FSDP; adapters do not."""
    alone = Layout(world_size=1, micro_batch=1)
    engine = engine_named("topoflight")
    sharded = replace(alone, world_size=2, dp_shard=2)
    stored, cast = (memory_parts(MODEL, FULL, at, engine) for at in (alone, sharded))
    weights_in_half = stored.weights / 2
    inputs = 5 * 2.0 * FULL.sequence_length * MODEL.hidden * MODEL.layers  # each product casts its own
    assert stored.activations - cast.activations == pytest.approx(weights_in_half + inputs, rel=0.01)
    saved, cast = (memory_parts(MODEL, FULL, replace(at, checkpointing="full"), engine) for at in (alone, sharded))
    # Nothing keeps a copy beyond its layer.
    assert 0 <= saved.activations - cast.activations < 0.1 * weights_in_half
    lora = TrainSpec(sequence_length=4096)
    frozen = memory_parts(MODEL, lora, alone, engine)
    assert frozen.activations == memory_parts(MODEL, lora, sharded, engine).activations


def test_with_full_checkpointing_logits_and_a_remade_layer_never_meet() -> None:
    """The larger of the two counts, not their sum."""
    layout = Layout(world_size=1, checkpointing="full", micro_batch=4)
    train, engine = TrainSpec(sequence_length=4096), engine_named("torchtitan")
    parts = memory_parts(MODEL, train, layout, engine)
    saved = 2.0 * 4 * 4096 * MODEL.hidden * MODEL.layers
    layer = engine.layer_activations(share_of(MODEL, train, layout))
    assert 0 < layer < parts.logits
    assert parts.activations + parts.logits == pytest.approx(saved + parts.logits)


def test_adapters_are_sharded_like_the_weights() -> None:
    """FSDP divides adapters, their gradients and states by the shard group."""
    train = TrainSpec(sequence_length=512, lora_rank=256)
    engine = engine_named("topoflight")
    one = memory_parts(MODEL, train, Layout(world_size=1), engine)
    eight = memory_parts(MODEL, train, Layout(world_size=8, dp_shard=8), engine)
    assert eight.optimizer == pytest.approx(one.optimizer / 8)
    assert eight.gradients == pytest.approx(one.gradients / 8)
    assert eight.weights == pytest.approx(one.weights / 8)


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
    assert step_parts(job(links(1), packed), layout).dequantize == pytest.approx(by_hand)
    assert step_parts(job(links(1), packed), replace(layout, micro_batch=8)).dequantize == pytest.approx(by_hand)
    assert step_parts(job(links(1), plain), layout).dequantize == 0.0
    twice = step_parts(job(links(1), packed), replace(layout, checkpointing="none")).dequantize
    assert twice == pytest.approx(by_hand * 2 / 3)

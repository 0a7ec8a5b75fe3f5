"""Memory on a GPU by the width of what is computed with, and what DDP keeps of gradients."""

from dataclasses import replace

import pytest
from rigs.tables import each_row

from contracts.layout import Layout
from hardware.gpus import gpu_named
from planner.forecast.compute import Job, gpu_rates
from planner.forecast.engine import share_of
from planner.forecast.links import Links, Speed
from planner.forecast.memory import memory_parts
from planner.forecast.models import model_named
from planner.forecast.specs import Method, TrainSpec, trained_weights, weights
from planner.forecast.step_time import prepare_step, step_parts
from planner.stacks import engine_named

MODEL = model_named("Llama-3.2-1B")
FULL = TrainSpec(method="full", sequence_length=1024, fused_cross_entropy=False)
OURS = engine_named("topoflight")


def in_fp32(layout: Layout) -> Layout:
    """The same layout, computed in fp32."""
    return replace(layout, precision="fp32")


@each_row("method", ["full", "lora", "qlora"])
def test_in_fp32_a_gpu_holds_what_a_cpu_holds(method: Method) -> None:
    """The tensors are the same; what differs is the allocator and the context."""
    train = replace(FULL, method=method, precision="fp32")
    for layout in (
        Layout(world_size=2, dp_shard=2),
        Layout(world_size=2, dp_replicate=2, sharding="ddp"),
        Layout(world_size=2, tp=2, checkpointing="full"),
    ):
        gpu, cpu = (memory_parts(MODEL, train, in_fp32(layout), OURS, on_cpu=on_cpu) for on_cpu in (False, True))
        assert gpu._replace(fragmentation=0.0, reserved=0.0, context=0.0) == cpu._replace(context=0.0)
        assert cpu.context < 32 << 20  # libraries are loaded before memory is measured


def test_in_fp32_frozen_weights_activations_and_what_is_gathered_are_twice_as_wide() -> None:
    """Half-precision widths were 2 bytes; adapters and their optimizer are fp32 either way."""
    train = replace(FULL, method="lora")
    half = Layout(world_size=2, dp_shard=2, checkpointing="full", micro_batch=4)
    narrow, wide = (memory_parts(MODEL, train, at, OURS) for at in (half, in_fp32(half)))
    assert wide.gathered == 2.0 * narrow.gathered
    assert wide.weights - narrow.weights == pytest.approx(2.0 * weights(MODEL).total / 2)
    assert (wide.gradients, wide.optimizer) == (narrow.gradients, narrow.optimizer)
    fused = engine_named("megatron")  # nothing is copied to fp32 there in half precision either
    stored = [fused.layer_activations(share_of(MODEL, FULL, at)) for at in (half, in_fp32(half))]
    assert stored[1] == 2.0 * stored[0]


def test_eager_scores_are_kept_in_fp32_and_as_the_next_product_reads_them() -> None:
    """In fp32 one tensor serves both. GPT-2 has dropout: its output and a mask of one byte instead."""
    layout, tokens = Layout(world_size=1), float(FULL.sequence_length)
    flash, eager = (replace(FULL, attention=kind) for kind in ("sdpa", "eager"))
    repeated = 2 * (MODEL.heads - MODEL.kv_heads) * MODEL.head_dim  # keys and values
    for model, at, each in (
        (MODEL, layout, 6.0 * MODEL.heads * 1024 + 2.0 * repeated),
        (MODEL, in_fp32(layout), 4.0 * MODEL.heads * 1024 + 4.0 * repeated),
        (model_named("GPT-2"), layout, 5.0 * 12 * 1024), (model_named("GPT-2"), in_fp32(layout), 9.0 * 12 * 1024),
    ):  # fmt: skip
        without, stored = (OURS.layer_activations(share_of(model, train, at)) for train in (flash, eager))
        assert stored - without == each * tokens


@each_row("optimizer", ["sgd", "adamw_8bit"])
def test_in_fp32_no_optimizer_keeps_another_copy_of_the_weights(optimizer: str) -> None:
    """Megatron's and DeepSpeed's optimizers hold the fp32 copy of half-precision weights only."""
    train = replace(FULL, optimizer=optimizer)
    for engine in ("megatron", "deepspeed"):
        half = Layout(world_size=1)
        narrow, wide = (memory_parts(MODEL, train, at, engine_named(engine)) for at in (half, in_fp32(half)))
        assert narrow.optimizer - wide.optimizer == 4.0 * weights(MODEL).total


@each_row("precision", ["bf16", "fp32"])
def test_ddp_stores_all_gradients_in_addition_to_the_activations(precision):
    """One rank alone frees each gradient's activations before it has the next; two ranks hold them in buckets."""
    train = replace(FULL, precision=precision)
    alone = Layout(world_size=1, micro_batch=8, precision=precision)
    pair = replace(alone, world_size=2, dp_replicate=2, sharding="ddp")
    one, two = (memory_parts(MODEL, train, at, OURS) for at in (alone, pair))
    gradients = 4.0 * trained_weights(MODEL, train)
    assert two.gradients == gradients > one.gradients
    assert (two.activations, two.logits) == (one.activations, one.logits)
    other, train = engine_named("trl"), replace(train, dtype="float32")  # the same buckets, and separate gradients
    single, both = (memory_parts(MODEL, train, layout, other).gradients for layout in (alone, pair))
    assert both == gradients + single


def test_in_fp32_offload_and_tensor_parallelism_move_wider_words() -> None:
    """Half-precision weights go back to the GPU in two bytes each, fp32 ones in four."""
    node = Speed(bytes_per_second=3e11, how="derived", link="NVLink")
    given = Links(ranks_per_node=8, nodes=1, island_size=8, island=node, node=node, network=None)
    gpu, engine = gpu_named("NVIDIA H100 80GB HBM3"), engine_named("deepspeed")
    job = Job(model=MODEL, train=FULL, links=given, rates=gpu_rates(gpu, FULL, engine, "bf16"), engine=engine)
    half = Layout(world_size=8, dp_shard=8, sharding="zero2", offload="optimizer")
    tensor = Layout(world_size=8, tp=8)
    narrow, wide = (step_parts(job, at).offload for at in (half, in_fp32(half)))
    assert wide - narrow == pytest.approx(2.0 * weights(MODEL).total / 8 / given.host.bytes_per_second)
    sent = [prepare_step(job, at).hidden_bytes for at in (tensor, in_fp32(tensor))]
    assert sent[1] == 2.0 * sent[0] > 0.0


@pytest.mark.ranks
@pytest.mark.parametrize("views", [True, False])
def test_torch_keeps_ddp_buckets_from_step_to_step(views: bool) -> None:
    """Gradients that are views share a bucket, which is not free while there are none; else each is its own tensor."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        net = DistributedDataParallel(
            torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(3))),
            gradient_as_bucket_view=views, broadcast_buffers=False,
        )  # fmt: skip
        held: list[set[int]] = []
        for _ in range(4):  # buckets are made anew in the second step, in the order in which gradients came
            net(torch.ones(1, 256)).sum().backward()
            stores = [p.grad.untyped_storage() for p in net.parameters()]
            sizes = {store.data_ptr(): store.nbytes() for store in stores}
            assert len(sizes) == (1 if views else 3)
            assert sum(sizes.values()) == 4 * sum(p.numel() for p in net.parameters())
            held.append(set(sizes))
            del stores
            net.zero_grad(set_to_none=True)
            others = [torch.empty(size // 4) for size in sizes.values() for _ in range(8)]
            held[-1] -= {other.data_ptr() for other in others} if views else set()
        if views:
            assert held[2] == held[3] != set()
    finally:
        distributed.destroy_process_group()

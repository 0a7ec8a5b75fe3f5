"""Memory by stack: bytes counted by hand from what each stack's code keeps."""

from dataclasses import replace

import pytest
from rigs.tables import each_row, rows_of

from contracts.layout import Layout
from hardware.units import GIB
from planner.forecast.compute import Job, cpu_rates
from planner.forecast.engine import share_of
from planner.forecast.links import Links, Speed
from planner.forecast.memory import NCCL_BYTES, RESERVED_RANKS_BYTES, memory_parts
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec, lora_weights, weights
from planner.search import list_broken
from planner.stacks import engine_named

rows = rows_of(__file__)
MODEL = model_named("Llama-3.1-8B")  # 32 layers, h 4096, q 4096, kv 1024, f 14336
FULL = TrainSpec(method="full", sequence_length=8192)
TOKENS = 2 * 8192.0
HALF = 2.0


def test_torchtitan_keeps_every_second_product() -> None:
    """The layer's input, the results of wq, wv, w1 and w2, and attention's: 4096 x 4 + 1024 + 14336 columns."""
    layout = Layout(world_size=32, dp_shard=32, micro_batch=2, checkpointing="selective")
    parts = memory_parts(MODEL, FULL, layout, engine_named("torchtitan"))
    assert parts.activations == pytest.approx(32 * TOKENS * HALF * (4 * 4096 + 1024 + 14336))


def test_torchtitan_repeats_all_products_of_experts_and_no_all_to_all() -> None:
    """Qwen3-30B-A3B: q 4096, kv 512, h 2048, 8 experts a token. 141.8 GiB were measured in 8 B200, 126 are forecast."""
    engine, model = engine_named("torchtitan"), model_named("Qwen3-30B-A3B")
    one, eight = (Layout(world_size=8, dp_shard=8, micro_batch=2, checkpointing="selective", ep=ep) for ep in (1, 8))
    activations = [engine.selective_activations(share_of(model, FULL, layout), 0.0) for layout in (one, eight)]
    assert activations == [TOKENS * HALF * columns for columns in (2 * 4096 + 512, 2 * 4096 + 512 + 2 * 8 * 2048)]


def test_zero3_steps_a_group_of_weights_at_a_time() -> None:
    """Of 2 x 4.0 B weights: 2 + 2 + 12 bytes each, and fp32 gradients of 1e9 of them; ZeRO-2 casts all of its share."""
    engine, count = engine_named("deepspeed"), weights(MODEL).total / 2
    three = memory_parts(MODEL, FULL, Layout(world_size=2, dp_shard=2), engine)
    two = memory_parts(MODEL, FULL, Layout(world_size=2, dp_shard=2, sharding="zero2"), engine)
    assert three.weights + three.gradients + three.optimizer == pytest.approx(16.0 * count + 4e9)
    assert two.optimizer == pytest.approx(16.0 * count)


@each_row(("layout", "dtype", "each"), rows("without_fsdp"))
def test_without_fsdp_trl_keeps_weights_as_they_were_loaded(layout: dict, dtype: str, each: float) -> None:
    """2 bytes of weight, 2 of gradient, 4 of AdamW; accelerate's fsdp2_prepare_model makes what trains fp32."""
    train = replace(FULL, dtype=dtype)
    parts = memory_parts(MODEL, train, Layout(**layout, gradient_accumulation=2), engine_named("trl"))
    assert parts.weights + parts.gradients + parts.optimizer == pytest.approx(each * weights(MODEL).total)


def test_what_trl_freezes_in_fp32_takes_four_bytes_and_autocasts_copies() -> None:
    """`trl sft --use_peft` loads in fp32 by itself; each frozen product saves its weight's copy for the way back."""
    lora, engine = replace(FULL, method="lora"), engine_named("trl")
    wide, count = replace(lora, dtype="float32"), weights(MODEL).total

    def grown(layout: Layout) -> tuple[float, float]:
        narrow, more = (memory_parts(MODEL, train, layout, engine) for train in (lora, wide))
        return more.weights - narrow.weights, more.activations - narrow.activations

    alone, layer = Layout(world_size=1), 2.0 * weights(MODEL).layer
    assert grown(alone) == (pytest.approx(2.0 * count), pytest.approx(32 * layer))
    # Recomputed one at a time; between layers hidden states are fp32, as the embedding's weights.
    between = 32 * 8192.0 * 2.0 * 4096
    assert grown(replace(alone, checkpointing="full")) == (pytest.approx(2.0 * count), pytest.approx(layer + between))
    assert grown(Layout(world_size=2, dp_shard=2)) == (pytest.approx(count), 0.0)


def test_trl_has_the_logits_of_one_tile() -> None:
    """4,096 tokens x 32,768 entries and their weights, and fp32 gradients; before TRL 1.16 all logits at 14 bytes."""
    lora, engine, layout = replace(FULL, method="lora"), engine_named("trl"), Layout(world_size=1)
    tile = 2.0 * 4096 * 32768 + 2.0 * 32768 * 4096 + 8.0 * 8192 * 4096
    for train, head in (
        (lora, 0.0),
        (FULL, 4.0 * 128256 * 4096),
        (replace(lora, saved_modules=("lm_head",)), 4.0 * 128256 * 4096),
    ):
        assert engine.logits(share_of(MODEL, train, layout)) == tile + head
    older = replace(engine, chunks_loss=False, logits_bytes=14.0)
    assert older.logits(share_of(MODEL, lora, layout)) == 14.0 * 8192 * 128256


@pytest.mark.long
def test_trl_computes_the_logits_again_in_the_backward_pass() -> None:
    """One product of the head forward; backward one more, and the gradient of its input."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    kernels = pytest.importorskip("trl.kernels", reason="trl is not installed")
    python_dispatch = pytest.importorskip("torch.utils._python_dispatch")
    products = []

    class Products(python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined, unused-ignore]
        def __torch_dispatch__(self, op, _types, args=(), kwargs=None):  # type: ignore[no-untyped-def, unused-ignore]
            products.extend([op] if "mm" in op._schema.name else [])
            return op(*args, **(kwargs or {}))

    hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(32, 16)
    with Products():
        found = kernels.ChunkedLogProbFunction.apply(hidden, weight, None, torch.zeros(8, dtype=torch.long), 1.0, 32768)
        assert len(products) == 1
        found[0].sum().backward()
    assert len(products) == 3 and engine_named("trl").loss_again


@pytest.mark.long
@each_row("dtype", ["bfloat16", "float32"])
def test_autocast_saves_a_frozen_weight_in_two_bytes(dtype: str) -> None:
    """What the copies are: torch's Linear under autocast, whose weight does not train."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    plain = torch.nn.Linear(64, 32, bias=False, dtype=getattr(torch, dtype)).requires_grad_(False)
    row, saved = torch.ones(1, 64, requires_grad=True), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        plain(row)
    own = plain.weight.untyped_storage().data_ptr()
    apart = [t for t in saved if t.numel() == 2048 and t.untyped_storage().data_ptr() != own]
    assert [t.dtype for t in apart] == ([torch.bfloat16] if dtype == "float32" else [])


def test_modules_trained_whole_beside_adapters_stay_in_half_precision() -> None:
    """PEFT copies the embedding and the head in the model's type: 2 bytes of weight, 2 of gradient, 4 of AdamW."""
    lora = replace(FULL, method="lora")
    ends = replace(lora, saved_modules=("embed_tokens", "lm_head"))
    layout, engine = Layout(world_size=1, gradient_accumulation=8, checkpointing="full"), engine_named("trl")
    plain, more = (memory_parts(MODEL, train, layout, engine) for train in (lora, ends))
    held = [parts.weights + parts.gradients + parts.optimizer for parts in (plain, more)]
    assert held[1] - held[0] == pytest.approx(2 * 128256 * 4096 * 8.0)
    assert held[0] == pytest.approx(2.0 * weights(MODEL).total + 16.0 * lora_weights(MODEL, lora))


def test_one_gpu_alone_has_no_communication_buffers() -> None:
    """Neither NCCL's nor DeepSpeed's bucket of 5e8 half-precision values."""
    engine = engine_named("deepspeed")
    one, two = (
        memory_parts(MODEL, FULL, at, engine)
        for at in (Layout(world_size=1), Layout(world_size=2, dp_replicate=2, sharding="ddp"))
    )
    assert two.reserved - one.reserved == RESERVED_RANKS_BYTES + 1e9
    assert two.context - one.context == NCCL_BYTES > 0.3 * GIB


def test_transformer_engine_keeps_what_products_need_in_a_byte() -> None:
    """Of the two norms' outputs and of the MLP's inner tensor: 2 x 4096 + 14336 bytes less per token and layer."""
    layout, engine = Layout(world_size=8, dp_replicate=8, sharding="ddp"), engine_named("megatron")
    half, fp8 = (memory_parts(MODEL, FULL, at, engine).activations for at in (layout, replace(layout, precision="fp8")))
    assert half - fp8 == pytest.approx(32 * 8192.0 * (2 * 4096 + 14336))


def test_peft_keeps_the_experts_it_has_added_adapters_to() -> None:
    """ParamWrapper computes with experts plus adapters, 2 bytes per weight of each layer until its backward pass."""
    model, layout = model_named("Qwen3-30B-A3B"), Layout(world_size=1)
    engine = engine_named("trl")
    held = []
    for targets in (("q_proj", "v_proj"), ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")):
        train = TrainSpec(method="lora", sequence_length=512, lora_rank=8, lora_targets=targets)
        held.append(share_of(model, train, layout))
    attention, experts = (engine.layer_activations(share) for share in held)
    other = replace(engine, merges_expert_adapters=False)
    alone = [other.layer_activations(share) for share in held]
    assert experts - alone[1] == pytest.approx(2.0 * 128 * 3 * 2048 * 768)
    assert attention == alone[0]


def test_what_ranks_hold_as_the_model_comes_in_bounds_the_layout() -> None:
    """8B is 16 GB: on each of 8 ranks under DeepSpeed's ZeRO-2, one file of 5 GB on each under ZeRO-3, once in FSDP."""
    size = 2.0 * weights(MODEL).total
    two, three = Layout(world_size=8, dp_shard=8, sharding="zero2"), Layout(world_size=8, dp_shard=8)
    assert engine_named("deepspeed").host_load(size, two, 8) == 8 * size
    assert engine_named("deepspeed").host_load(size, three, 8) == 8 * 5e9
    assert engine_named("trl").host_load(size, three, 8) == size
    assert engine_named("topoflight").host_load(size, three, 8) == 0.0
    node = Speed(bytes_per_second=3e11, how="derived", link="NVLink")
    links = Links(ranks_per_node=8, nodes=1, island_size=8, island=node, node=node, network=None)
    small = Job(model=MODEL, train=FULL, links=links, engine=engine_named("deepspeed"), rates=cpu_rates(8.0, None),
                host_memory_bytes=128.0 * GIB)  # fmt: skip
    unknown, rule = replace(small, host_memory_bytes=None), "host-memory-holds"
    assert "loading needs 120 GiB" in dict(list_broken(small, two))[rule]
    assert not [job for job, at in ((small, three), (unknown, two)) if rule in dict(list_broken(job, at))]

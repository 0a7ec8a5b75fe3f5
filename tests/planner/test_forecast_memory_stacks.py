"""Memory by stack, counted by hand from what its code stores; by the width of numbers; what DDP stores of gradients."""

import weakref
from dataclasses import replace

import pytest
from rigs.tables import each_row, rows_of

from contracts.layout import Layout
from hardware.gpus import find_gpu
from hardware.units import GIB
from planner.forecast import machines
from planner.forecast.compute import Job, cpu_rates, gpu_rates
from planner.forecast.engine import share_of
from planner.forecast.links import Links, Speed
from planner.forecast.memory import NCCL_BYTES, RESERVED_RANKS_BYTES, memory_parts, micro_batches_held
from planner.forecast.models import model_named
from planner.forecast.specs import (
    Method,
    PlanError,
    TrainSpec,
    check_histogram,
    expected_longest,
    lora_weights,
    mean_length,
    trained_weights,
    weights,
)
from planner.forecast.step_time import forecast_step, prepare_step
from planner.recommend import plan, recommend
from planner.search import list_broken
from planner.stacks import find_engine

rows = rows_of(__file__)
MODEL = model_named("Llama-3.1-8B")  # 32 layers, h 4096, q 4096, kv 1024, f 14336
FULL = TrainSpec(method="full", sequence_length=8192)
TOKENS = 2 * 8192.0
HALF = 2.0
NODE = Speed(bytes_per_second=3e11, how="derived", link="NVLink")
LINKS = Links(ranks_per_node=8, nodes=1, island_size=8, island=NODE, node=NODE, network=None)


def test_torchtitan_keeps_every_second_product() -> None:
    """The layer's input, the results of wq, wv, w1 and w2, and attention's: 4096 x 4 + 1024 + 14336 columns.

    An eighth of the logits, and the fp32 gradient of the head's input.
    """
    layout = Layout(world_size=32, dp_shard=32, micro_batch=2, checkpointing="selective")
    parts = memory_parts(MODEL, FULL, layout, find_engine("torchtitan"))
    assert parts.activations + parts.logits == pytest.approx(
        32 * TOKENS * HALF * (4 * 4096 + 1024 + 14336) + TOKENS * (14.0 / 8 * 128256 + 4.0 * 4096)
    )


def test_torchtitan_repeats_all_products_of_experts_and_no_all_to_all() -> None:
    """Qwen3-30B-A3B: q 4096, kv 512, h 2048, 8 experts a token. 141.8 GiB were measured in 8 B200."""
    engine, model = find_engine("torchtitan"), model_named("Qwen3-30B-A3B")
    one, eight = (Layout(world_size=8, dp_shard=8, micro_batch=2, checkpointing="selective", ep=ep) for ep in (1, 8))
    assert engine.recomputed("selective") == (1.0, 0.5, 0.0, 1.0)
    cases = ((engine, one), (engine, eight), (find_engine("automodel"), one))  # the last one saves the second product
    activations = [each.selective_activations(share_of(model, FULL, layout), 0.0) for each, layout in cases]
    assert activations == [TOKENS * HALF * (2 * 4096 + 512 + times * 8 * 2048) for times in (0, 2, 1)]
    full, model = replace(eight, micro_batch=1, checkpointing="full"), replace(model, layers=12, vocab=64000)
    layer = engine.layer_activations(share_of(model, FULL, full))  # at the end of the backward pass
    routed = 8192.0 * 8 * 2048
    in_half = replace(engine, weighs_in_fp32=False).layer_activations(share_of(model, FULL, full))
    assert layer - in_half == HALF * routed  # experts' outputs in four bytes instead of two
    assert memory_parts(model, FULL, full, engine).activations == layer + 12.0 * routed
    # casts again: outputs in two bytes, and one pass at the start of the backward
    compiled = replace(full, compile=True)
    layer = engine.layer_activations(share_of(model, FULL, compiled))
    assert layer == replace(engine, weighs_in_fp32=False).layer_activations(share_of(model, FULL, compiled))
    assert memory_parts(model, FULL, compiled, engine).activations == layer + 4.0 * routed


@pytest.mark.long
def test_weights_of_experts_in_fp32_need_sixteen_bytes_of_each_output() -> None:
    """The operators of torchtitan's `combine`: four bytes are saved, and the backward pass adds twelve for a time."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    python_dispatch = pytest.importorskip("torch.utils._python_dispatch")
    held: dict[int, int] = {}
    peak = [0]

    class Storages(python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined, unused-ignore]
        def __torch_dispatch__(self, op, _types, args=(), kwargs=None):  # type: ignore[no-untyped-def, unused-ignore]
            result = op(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and (storage := result.untyped_storage())._cdata not in held:
                held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, held.pop, storage._cdata)
            peak[0] = max(peak[0], sum(held.values()))
            return result

    tokens, hidden, chosen = 64, 128, 8
    routed = torch.arange(tokens * chosen) // chosen
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(len(routed), 1, requires_grad=True)
    with Storages():
        found = torch.zeros_like(x).scatter_add(
            0, routed[:, None].expand(-1, hidden), (x[routed].float() * scores).to(torch.bfloat16)
        )
        saved = sum(held.values()) - found.nbytes
        peak[0] = 0
        found.backward(torch.ones_like(found))
    elements = len(routed) * hidden
    assert saved / elements == pytest.approx(4.0, abs=0.1)
    assert (peak[0] - found.nbytes - saved) / elements == pytest.approx(12.0, abs=0.5)


def test_megatrons_fused_loss_has_the_logits_of_all_tokens() -> None:
    """`--cross-entropy-loss-fusion` merges kernels; Liger's loss, in other stacks, never has all logits."""
    layout = Layout(world_size=4, tp=2, dp_shard=2, fused_cross_entropy=True)
    share = share_of(MODEL, FULL, layout)
    assert find_engine("megatron").logits(share) == 8.0 * 8192 * 128256 / 2
    assert find_engine("deepspeed").logits(share) < 2.0 * 8192 * 128256 / 2


def test_automodels_loss_is_in_fp32() -> None:
    """MaskedCrossEntropy: logits in two bytes; log-softmax, its gradient and that of the fp32 logits in four."""
    share = share_of(MODEL, FULL, Layout(world_size=8, dp_shard=8))
    assert find_engine("automodel").logits(share) == 14.0 * 8192 * 128256


@each_row(("targets", "inputs"), [(("o_proj", "down_proj"), 0), (("q_proj",), 1), (("k_proj", "up_proj"), 2)])
def test_adapters_keep_the_gathered_inputs_of_column_parallel_products(targets, inputs) -> None:
    """With sequence parallelism, LoRA's first product gathers the norm's output and saves it whole."""
    train = replace(FULL, method="lora", lora_targets=targets)
    engine = find_engine("megatron")
    split, alone = (
        engine.layer_activations(share_of(MODEL, train, Layout(world_size=tp, tp=tp, sequence_parallel=tp > 1)))
        for tp in (4, 1)
    )
    assert split == pytest.approx(alone / 4 + inputs * 0.75 * HALF * 8192 * 4096)


@each_row(("chunks", "first", "last"), [(1, 4.0, 1.0), (2, 5.5, 2.5), (4, 4.75, 3.25)])
def test_the_last_stage_starts_all_its_chunks_before_the_first_backward_pass(chunks, first, last) -> None:
    """Megatron's schedules.py: (v - 1) p + 1 passes of a chunk, and 2 (p - 1) more on the first stage."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    layout = Layout(world_size=4, pp=4, gradient_accumulation=8, virtual_stages=chunks, schedule=schedule)
    assert [micro_batches_held(layout, last=end) for end in (False, True)] == [first, last]


def test_zero3_steps_a_group_of_weights_at_a_time() -> None:
    """Of 2 x 4.0 B weights: 2 + 2 + 12 bytes each, and fp32 gradients of 1e9 of them; ZeRO-2 casts all of its share."""
    engine, count = find_engine("deepspeed"), weights(MODEL).total / 2
    three = memory_parts(MODEL, FULL, Layout(world_size=2, dp_shard=2), engine)
    two = memory_parts(MODEL, FULL, Layout(world_size=2, dp_shard=2, sharding="zero2"), engine)
    assert three.weights + three.gradients + three.optimizer == pytest.approx(16.0 * count + 4e9)
    assert two.optimizer == pytest.approx(16.0 * count)


@each_row(("layout", "dtype", "each"), rows("without_fsdp"))
def test_without_fsdp_trl_keeps_weights_as_they_were_loaded(layout: dict, dtype: str, each: float) -> None:
    """2 bytes of weight, 2 of gradient, 4 of AdamW; accelerate's fsdp2_prepare_model makes what trains fp32."""
    train = replace(FULL, dtype=dtype)
    parts = memory_parts(MODEL, train, Layout(**layout, gradient_accumulation=2), find_engine("trl"))
    assert parts.weights + parts.gradients + parts.optimizer == pytest.approx(each * weights(MODEL).total)


def test_what_trl_freezes_in_fp32_takes_four_bytes_and_autocasts_copies() -> None:
    """`trl sft --use_peft` loads in fp32 by itself; each frozen product saves its weight's copy for the way back."""
    lora, engine = replace(FULL, method="lora"), find_engine("trl")
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
    lora, engine, layout = replace(FULL, method="lora"), find_engine("trl"), Layout(world_size=1)
    tile = 2.0 * 4096 * 32768 + 2.0 * 32768 * 4096 + 8.0 * 8192 * 4096
    for train, trained in (lora, 0.0), (FULL, 1.0), (replace(lora, saved_modules=("lm_head",)), 1.0):
        assert engine.logits(share_of(MODEL, train, layout)) == tile + trained * 4.0 * 128256 * 4096
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
    assert len(products) == 3 and find_engine("trl").loss_again


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
    layout, engine = Layout(world_size=1, gradient_accumulation=8, checkpointing="full"), find_engine("trl")
    plain, more = (memory_parts(MODEL, train, layout, engine) for train in (lora, ends))
    held = [parts.weights + parts.gradients + parts.optimizer for parts in (plain, more)]
    assert held[1] - held[0] == pytest.approx(2 * 128256 * 4096 * 8.0)
    assert held[0] == pytest.approx(2.0 * weights(MODEL).total + 16.0 * lora_weights(MODEL, lora))


def test_trl_halves_adapters_of_a_quantised_model_that_fsdp_does_not_shard() -> None:
    """SFTTrainer converts them to bf16: gradient and AdamW take 6 bytes. accelerate makes FSDP's fp32 again: 12."""
    qlora, engine = replace(FULL, method="qlora"), find_engine("trl")
    alone, sharded = Layout(world_size=1), Layout(world_size=2, dp_shard=2, sharding="zero3")
    parts = (memory_parts(MODEL, qlora, replace(at, gradient_accumulation=8), engine) for at in (alone, sharded))
    held = [each.gradients + each.optimizer for each in parts]
    assert held == pytest.approx([6.0 * lora_weights(MODEL, qlora), 12.0 * lora_weights(MODEL, qlora) / 2])


def test_one_gpu_alone_has_no_communication_buffers() -> None:
    """Neither NCCL's nor DeepSpeed's bucket of 5e8 half-precision values."""
    engine = find_engine("deepspeed")
    one, two = (
        memory_parts(MODEL, FULL, at, engine)
        for at in (Layout(world_size=1), Layout(world_size=2, dp_replicate=2, sharding="ddp"))
    )
    assert two.reserved - one.reserved == RESERVED_RANKS_BYTES + 1e9
    assert two.context - one.context == NCCL_BYTES > 0.3 * GIB


def test_transformer_engine_keeps_what_products_need_in_a_byte() -> None:
    """Of the two norms' outputs and of the MLP's inner tensor: 2 x 4096 + 14336 bytes less per token and layer."""
    layout, engine = Layout(world_size=8, dp_replicate=8, sharding="ddp"), find_engine("megatron")
    half, fp8 = (memory_parts(MODEL, FULL, at, engine).activations for at in (layout, replace(layout, precision="fp8")))
    assert half - fp8 == pytest.approx(32 * 8192.0 * (2 * 4096 + 14336))


def test_peft_keeps_the_experts_it_has_added_adapters_to() -> None:
    """ParamWrapper computes with experts plus adapters, 2 bytes per weight of each layer until its backward pass."""
    model, layout = model_named("Qwen3-30B-A3B"), Layout(world_size=1)
    engine = find_engine("trl")
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
    assert find_engine("deepspeed").host_load(size, two, 8) == 8 * size
    assert find_engine("deepspeed").host_load(size, three, 8) == 8 * 5e9
    assert find_engine("trl").host_load(size, three, 8) == size
    assert find_engine("topoflight").host_load(size, three, 8) == 0.0
    small = Job(model=MODEL, train=FULL, links=LINKS, engine=find_engine("deepspeed"), rates=cpu_rates(8.0, None),
                host_memory_bytes=128.0 * GIB)  # fmt: skip
    unknown, rule = replace(small, host_memory_bytes=None), "host-memory-holds"
    assert "loading needs 120 GiB" in dict(list_broken(small, two))[rule]
    assert not [job for job, at in ((small, three), (unknown, two)) if rule in dict(list_broken(job, at))]


@each_row(("engine", "whole"), [("trl", True), ("deepspeed", True), ("topoflight", False)])
def test_transformers_loads_all_4_bit_weights_to_each_gpu_before_they_are_sharded(engine: str, whole: bool) -> None:
    """70B of NF4 with its embeddings is 38 GiB, of which 8 ranks keep an eighth; the files do not stay in the host."""
    large, layout = model_named("Llama-3.1-70B"), Layout(world_size=8, dp_shard=8, checkpointing="full")
    qlora = TrainSpec(method="qlora", sequence_length=1024)
    parts = memory_parts(large, qlora, layout, find_engine(engine))
    assert 36.0 < parts.total / GIB < 40.0 if whole else parts.total / GIB < 20.0
    assert (parts.loading > 0, parts.weights > 0) == (whole, not whole), "not this rank's share of the weights"
    assert memory_parts(large, replace(qlora, method="lora"), layout, find_engine(engine)).total / GIB < 33.0
    small = Job(model=large, train=qlora, links=LINKS, engine=find_engine(engine), rates=cpu_rates(8.0, None),
                host_memory_bytes=32.0 * GIB)  # fmt: skip
    assert "host-memory-holds" not in dict(list_broken(small, layout))


SMALL = model_named("Llama-3.2-1B")
SHORT = TrainSpec(method="full", sequence_length=1024, fused_cross_entropy=False)
OURS = find_engine("topoflight")


def in_fp32(layout: Layout) -> Layout:
    """The same layout, computed in fp32."""
    return replace(layout, precision="fp32")


@each_row("method", ["full", "lora", "qlora"])
def test_in_fp32_a_gpu_holds_what_a_cpu_holds(method: Method) -> None:
    """The tensors are the same; what differs is the allocator and the context."""
    train = replace(SHORT, method=method, precision="fp32")
    for layout in (
        Layout(world_size=2, dp_shard=2),
        Layout(world_size=2, dp_replicate=2, sharding="ddp"),
        Layout(world_size=2, tp=2, checkpointing="full"),
    ):
        gpu, cpu = (memory_parts(SMALL, train, in_fp32(layout), OURS, on_cpu=on_cpu) for on_cpu in (False, True))
        assert gpu._replace(fragmentation=0.0, reserved=0.0, context=0.0) == cpu._replace(context=0.0)
        assert cpu.context < 32 << 20  # libraries are loaded before memory is measured


def test_in_fp32_frozen_weights_activations_and_what_is_gathered_are_twice_as_wide() -> None:
    """Half-precision widths were 2 bytes; adapters and their optimizer are fp32 either way."""
    train = replace(SHORT, method="lora")
    half = Layout(world_size=2, dp_shard=2, checkpointing="full", micro_batch=4)
    narrow, wide = (memory_parts(SMALL, train, at, OURS) for at in (half, in_fp32(half)))
    assert wide.gathered == 2.0 * narrow.gathered
    assert wide.weights - narrow.weights == pytest.approx(2.0 * weights(SMALL).total / 2)
    assert (wide.gradients, wide.optimizer) == (narrow.gradients, narrow.optimizer)
    fused = find_engine("megatron")  # nothing is copied to fp32 there in half precision either
    stored = [fused.layer_activations(share_of(SMALL, SHORT, at)) for at in (half, in_fp32(half))]
    assert stored[1] == 2.0 * stored[0]


def test_eager_scores_are_kept_in_fp32_and_as_the_next_product_reads_them() -> None:
    """In fp32 one tensor serves both. GPT-2 has dropout: its output and a mask of one byte instead."""
    layout, tokens = Layout(world_size=1), float(SHORT.sequence_length)
    flash, eager = (replace(SHORT, attention=kind) for kind in ("sdpa", "eager"))
    repeated = 2 * (SMALL.heads - SMALL.kv_heads) * SMALL.head_dim  # keys and values
    for model, at, each in (
        (SMALL, layout, 6.0 * SMALL.heads * 1024 + 2.0 * repeated),
        (SMALL, in_fp32(layout), 4.0 * SMALL.heads * 1024 + 4.0 * repeated),
        (model_named("GPT-2"), layout, 5.0 * 12 * 1024), (model_named("GPT-2"), in_fp32(layout), 9.0 * 12 * 1024),
    ):  # fmt: skip
        without, stored = (OURS.layer_activations(share_of(model, train, at)) for train in (flash, eager))
        assert stored - without == each * tokens


@each_row("optimizer", ["sgd", "adamw_8bit"])
def test_in_fp32_no_optimizer_keeps_another_copy_of_the_weights(optimizer: str) -> None:
    """Megatron's and DeepSpeed's optimizers hold the fp32 copy of half-precision weights only."""
    train = replace(SHORT, optimizer=optimizer)
    for engine in ("megatron", "deepspeed"):
        half = Layout(world_size=1)
        narrow, wide = (memory_parts(SMALL, train, at, find_engine(engine)) for at in (half, in_fp32(half)))
        assert narrow.optimizer - wide.optimizer == 4.0 * weights(SMALL).total


@each_row("precision", ["bf16", "fp32"])
def test_ddp_stores_all_gradients_in_addition_to_the_activations(precision):
    """One rank alone frees each gradient's activations before it has the next; two ranks hold them in buckets."""
    train = replace(SHORT, precision=precision)
    alone = Layout(world_size=1, micro_batch=8, precision=precision)
    pair = replace(alone, world_size=2, dp_replicate=2, sharding="ddp")
    one, two = (memory_parts(SMALL, train, at, OURS) for at in (alone, pair))
    gradients = 4.0 * trained_weights(SMALL, train)
    assert two.gradients == gradients > one.gradients
    assert (two.activations, two.logits) == (one.activations, one.logits)
    other, train = find_engine("trl"), replace(train, dtype="float32")  # the same buckets, and separate gradients
    single, both = (memory_parts(SMALL, train, layout, other).gradients for layout in (alone, pair))
    assert both == gradients + single


def test_in_fp32_offload_and_tensor_parallelism_move_wider_words() -> None:
    """Half-precision weights go back to the GPU in two bytes each, fp32 ones in four."""
    gpu, engine = find_gpu("NVIDIA H100 80GB HBM3"), find_engine("deepspeed")
    job = Job(model=SMALL, train=SHORT, links=LINKS, rates=gpu_rates(gpu, SHORT, engine, "bf16"), engine=engine)
    half = Layout(world_size=8, dp_shard=8, sharding="zero2", offload="optimizer")
    tensor = Layout(world_size=8, tp=8)
    narrow, wide = (forecast_step(job, at).offload for at in (half, in_fp32(half)))
    assert wide - narrow == pytest.approx(2.0 * weights(SMALL).total / 8 / LINKS.host.bytes_per_second)
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


DIE = tuple((tokens, 1) for tokens in range(1, 7))


def test_expected_longest_is_that_of_dice() -> None:
    """One die 3.5, two dice 161/36, many dice nearly 6; cut at 4 never more."""
    assert mean_length(DIE, 100) == pytest.approx(3.5)
    assert expected_longest(DIE, 2, 100) == pytest.approx(161 / 36)
    assert expected_longest(DIE, 100, 100) == pytest.approx(6.0, abs=1e-6)
    assert expected_longest(DIE, 100, 4) == pytest.approx(4.0, abs=1e-6)


def test_padding_makes_a_large_micro_batch_dearer_and_packing_does_not() -> None:
    """A long tail of lengths: padded, 16 sequences compute far more than 16 times the mean."""
    tail = ((100, 900), (2000, 100))
    train = TrainSpec(method="full", sequence_length=2048, length_histogram=tail, global_batch=128)
    planned = plan(machines.cluster("dgx-h100"), (), model_named("Llama-3.1-8B"), train)
    small = planned.job.sequence(1)
    large = planned.job.sequence(16)
    assert small == pytest.approx(290.0)
    assert large > 1500
    few, many = (
        forecast_step(planned.job, Layout(world_size=8, dp_shard=8, micro_batch=b, gradient_accumulation=16 // b)).gemm
        for b in (1, 16)
    )
    assert many > 3 * few  # a single short sequence multiplies less efficiently, else it were five times
    packed = plan(machines.cluster("dgx-h100"), (), model_named("Llama-3.1-8B"), replace(train, packing=True))
    assert packed.job.sequence(16) == 2048


@each_row("engine", ["topoflight", "trl", "deepspeed", "torchtitan", "megatron"])
@each_row("attention", ["sdpa", "eager"])
def test_memory_follows_the_longest_row(engine: str, attention: str) -> None:
    """A micro-batch is padded to its longest row: what no row reaches is not held. Packed rows fill the sequence."""
    layout = Layout(world_size=4, dp_shard=4, micro_batch=32, checkpointing="full")

    def held(length: int = 4096, *rows: tuple[int, int], packing: bool = False) -> float:
        train = TrainSpec(sequence_length=length, attention=attention, length_histogram=rows, packing=packing)
        return memory_parts(MODEL, train, layout, find_engine(engine)).total

    tail = ((100, 900), (249, 100))
    assert held(4096, *tail) == held(249) < held()
    assert held() == held(4096, *tail, packing=True) == held(4096, (9000, 1)), "not known, full, and cut"


def test_attention_in_packed_rows_follows_the_samples() -> None:
    """900 rows of 100 tokens and 100 of 2000: a token's sample has (900 x 100^2 + 100 x 2000^2) / 290,000 tokens.

    Each meets half as many keys: 2 x 2 FLOPs per key and column of a head, 3.5 passes, at half the rate for 480 tokens.
    """
    tail = ((100, 900), (2000, 100))
    train = TrainSpec(method="full", sequence_length=4096, length_histogram=tail, packing=True, global_batch=8)
    job = plan(machines.cluster("dgx-h100"), (), model_named("Llama-3.1-8B"), train).job
    length = (900 * 100**2 + 100 * 2000**2) / 290_000
    assert job.attended(1) == pytest.approx(length) != job.sequence(1)
    by_hand = 32 * 3.5 * 4 * 4096 * (length + 480) / 2 * 4096 / job.rates.attention
    layout = Layout(world_size=8, dp_shard=8)
    assert forecast_step(job, layout).attention == pytest.approx(by_hand)
    whole = replace(job, engine=find_engine("torchtitan"))
    assert forecast_step(whole, layout).attention == pytest.approx(by_hand * (4096 + 480) / (length + 480))


def test_the_recommendation_takes_small_micro_batches_for_a_long_tail() -> None:
    """What padding wastes is part of the choice."""
    model, box = model_named("Llama-3.2-1B"), machines.cluster("dgx-h100")
    even = TrainSpec(method="full", sequence_length=2048, length_histogram=((290, 1000),), global_batch=256)
    tail = replace(even, length_histogram=((100, 900), (2000, 100)))
    of_even, of_tail = (recommend(box, (), model, train).chosen for train in (even, tail))
    assert of_tail.layout.micro_batch < of_even.layout.micro_batch


@each_row("broken", [((0, 1),), ((1, -1),), ((1, True),), ((1.5, 2),), ((1, 2, 3),)])
def test_broken_histograms_are_refused(broken: tuple[tuple[int, int], ...]) -> None:
    """The row in question is in the message."""
    with pytest.raises(PlanError, match="at least 1"):
        check_histogram(broken)

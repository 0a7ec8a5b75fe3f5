"""Every layout computes what one process alone computes: losses and gradients, with LoRA, QLoRA and in full."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]  # a busy machine runs 30 cases at its own pace
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# fp32 sums in another order: the largest seen is 7e-7; a wrong scale, a lost shard or a double count is above 1e-2.
TOLERANCE = 1e-5
# bf16 keeps 8 bits: each result is rounded by 2^-8 at most, half its epsilon. Independent roundings add up as their
# root: forward and backward through four layers round some 60 times in a row, sqrt(64) x 2^-8 = 3 %. One process alone
# differs from fp32 by 1.1 %; TP, whose sums are rounded on the way, by 1.4 %. In a mean over hundreds of tokens
# roundings cancel, to below a single one.
ROUNDING = 2.0**-8
LOW = 8 * ROUNDING


MODELS = {  # of four layers, beside micro-llama; the windows are shorter than the rows
    "mistral": {"model_type": "mistral", "sliding_window": 16},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen3": {"model_type": "qwen3"},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    # three experts, which two ranks do not divide, and four
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "norm_topk_prob": True},
}  # fmt: skip
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def case(name, method="lora", packing=False, save_head=False, model=None, counts=False, **layout):
    """One row of the list; the batch is 16 sequences per step in all of them."""
    told = {"name": name, "method": method, "packing": packing, "save_head": save_head, "counts": counts}
    return {**told, **({"model": model} if model else {}), "layout": layout}


def fused(name, method="lora", **more):
    """The same with fused cross-entropy, as the planner recommends it."""
    return case(name, method, fused_cross_entropy=True, **more)


TWICE = {"schedule": "interleaved", "virtual_stages": 2}
KEPT = {"reshard_after_forward": False}
TWO = [
    case("DDP", dp_replicate=2, sharding="ddp", micro_batch=8),
    fused("DDP full accumulating", "full", dp_replicate=2, sharding="ddp", micro_batch=2, gradient_accumulation=4,
          counts=True),
    fused("DDP full selective checkpointing", "full", dp_replicate=2, sharding="ddp", micro_batch=8,
          checkpointing="selective"),
    fused("DDP packed, checkpointing", packing=True, dp_replicate=2, sharding="ddp", micro_batch=8,
          checkpointing="full"),
    case("FSDP", dp_shard=2, micro_batch=8),
    fused("FSDP with saved head", dp_shard=2, micro_batch=8, save_head=True),
    fused("FSDP accumulating", dp_shard=2, micro_batch=2, gradient_accumulation=4, counts=True),
    case("FSDP full accumulating", "full", dp_shard=2, micro_batch=4, gradient_accumulation=2),
    fused("FSDP packed", packing=True, dp_shard=2, micro_batch=4, gradient_accumulation=2),
    fused("FSDP kept gathered", "full", dp_shard=2, micro_batch=8, **KEPT),
    fused("FSDP kept gathered over micro-batches", dp_shard=2, micro_batch=2, gradient_accumulation=4,
          sharding="zero2", counts=True),
    case("FSDP full kept gathered over micro-batches", "full", dp_shard=2, micro_batch=2, gradient_accumulation=4,
         sharding="zero2", counts=True),
    fused("FSDP checkpointing", dp_shard=2, micro_batch=8, checkpointing="full"),
    fused("FSDP selective checkpointing", "full", dp_shard=2, micro_batch=8, checkpointing="selective"),
    case("FSDP offload", dp_shard=2, micro_batch=8, offload="all"),
    fused("FSDP fused cross-entropy", "full", dp_shard=2, micro_batch=8),
    case("TP", tp=2, micro_batch=16),
    fused("TP full packed", "full", packing=True, tp=2, micro_batch=8, gradient_accumulation=2),
    case("TP full, sequence parallel", "full", tp=2, micro_batch=16, sequence_parallel=True),
    case("TP tied", tp=2, micro_batch=16, model="tied"),
    fused("TP full tied, sequence parallel, packed", "full", packing=True, tp=2, micro_batch=16, model="tied",
          sequence_parallel=True),
    fused("TP fused cross-entropy, checkpointing", tp=2, micro_batch=16, checkpointing="full"),
    fused("PP 1F1B", pp=2, micro_batch=8, gradient_accumulation=2),
    fused("PP 1F1B packed", packing=True, pp=2, micro_batch=4, gradient_accumulation=4),
    case("PP GPipe full", "full", pp=2, micro_batch=4, gradient_accumulation=4, schedule="gpipe"),
    fused("PP 1F1B uneven", "full", pp=2, micro_batch=4, gradient_accumulation=4, stage_layers=[1, 3]),
    fused("PP 1F1B checkpointing", pp=2, micro_batch=8, gradient_accumulation=2, checkpointing="full"),
    case("PP interleaved", pp=2, micro_batch=4, gradient_accumulation=4, **TWICE),
    fused("PP interleaved full, selective checkpointing", "full", pp=2, micro_batch=4, gradient_accumulation=4,
          checkpointing="selective", **TWICE),
    case("PP fused cross-entropy", pp=2, micro_batch=8, gradient_accumulation=2, fused_cross_entropy=True),
    case("Mistral FSDP", dp_shard=2, micro_batch=8, model="mistral"),
    fused("Mistral TP full packed, sequence parallel", "full", packing=True, tp=2, micro_batch=16, model="mistral",
          sequence_parallel=True),
    case("Qwen 2 PP interleaved full", "full", pp=2, micro_batch=4, gradient_accumulation=4, model="qwen2", **TWICE),
    case("Qwen 3 TP", tp=2, micro_batch=16, model="qwen3"),
    case("Qwen 3 TP full", "full", tp=2, micro_batch=16, model="qwen3"),
    fused("Qwen 3 TP full, sequence parallel", "full", tp=2, micro_batch=16, sequence_parallel=True, model="qwen3"),
    case("CP", cp=2, micro_batch=16),
    fused("CP packed, accumulating, checkpointing", packing=True, cp=2, micro_batch=8, gradient_accumulation=2,
          checkpointing="full"),
    fused("CP full packed, kept gathered, selective checkpointing", "full", packing=True, cp=2, micro_batch=16,
          checkpointing="selective", **KEPT),
    case("CP full over replicas", "full", cp=2, sharding="ddp", micro_batch=8, gradient_accumulation=2),
    fused("Mistral CP packed", packing=True, cp=2, micro_batch=16, model="mistral"),
    case("Qwen 3 MoE CP full", "full", cp=2, micro_batch=16, model="qwen3_moe"),
    fused("Mixtral FSDP", dp_shard=2, micro_batch=8, model="mixtral"),
    fused("Mixtral FSDP full packed, selective checkpointing", "full", packing=True, dp_shard=2, micro_batch=8,
          checkpointing="selective", model="mixtral"),
    case("Qwen 3 MoE FSDP accumulating, checkpointing", dp_shard=2, micro_batch=4, gradient_accumulation=2,
         checkpointing="full", model="qwen3_moe"),
    case("Qwen 3 MoE FSDP full kept gathered", "full", dp_shard=2, micro_batch=8, model="qwen3_moe", **KEPT),
    case("Qwen 3 MoE DDP", dp_replicate=2, sharding="ddp", micro_batch=8, model="qwen3_moe"),
    fused("Qwen 3 MoE PP full", "full", pp=2, micro_batch=8, gradient_accumulation=2, model="qwen3_moe"),
    fused("DDP QLoRA", "qlora", dp_replicate=2, sharding="ddp", micro_batch=8),
    fused("FSDP QLoRA packed", "qlora", packing=True, dp_shard=2, micro_batch=8),
    fused("FSDP QLoRA accumulating, checkpointing", "qlora", dp_shard=2, micro_batch=4, gradient_accumulation=2,
          checkpointing="full"),
    fused("PP QLoRA 1F1B", "qlora", pp=2, micro_batch=8, gradient_accumulation=2),
    fused("PP QLoRA interleaved", "qlora", pp=2, micro_batch=4, gradient_accumulation=4, **TWICE),
]  # fmt: skip
FOUR = [
    case("HSDP", dp_replicate=2, dp_shard=2, micro_batch=4),
    case("HSDP full accumulating", "full", dp_replicate=2, dp_shard=2, micro_batch=2, gradient_accumulation=2),
    fused("HSDP packed, offload, selective checkpointing", packing=True, dp_replicate=2, dp_shard=2, micro_batch=4,
          offload="all", checkpointing="selective"),
    fused("HSDP full kept gathered, checkpointing", "full", dp_replicate=2, dp_shard=2, micro_batch=4,
          checkpointing="full", **KEPT),
    case("TP x FSDP", tp=2, dp_shard=2, micro_batch=8),
    fused("TP x FSDP kept gathered, packed", packing=True, tp=2, dp_shard=2, micro_batch=8, **KEPT),
    fused("TP x FSDP full accumulating", "full", tp=2, dp_shard=2, micro_batch=2, gradient_accumulation=4),
    fused("TP x FSDP full, offload, checkpointing", "full", tp=2, dp_shard=2, micro_batch=8, offload="all",
          checkpointing="full"),
    fused("TP x FSDP full, sequence parallel, selective checkpointing", "full", tp=2, dp_shard=2, micro_batch=8,
          sequence_parallel=True, checkpointing="selective"),
    fused("TP x DDP packed, accumulating", packing=True, tp=2, dp_replicate=2, sharding="ddp", micro_batch=4,
          gradient_accumulation=2),
    fused("TP x DDP full, sequence parallel, selective checkpointing", "full", tp=2, dp_replicate=2, sharding="ddp",
          micro_batch=8, sequence_parallel=True, checkpointing="selective"),
    fused("CP x FSDP packed", packing=True, cp=2, dp_shard=2, micro_batch=8),
    fused("CP x FSDP full accumulating, kept gathered, selective checkpointing", "full", cp=2, dp_shard=2,
          micro_batch=4, gradient_accumulation=2, checkpointing="selective", **KEPT),
    fused("CP x FSDP offload, checkpointing", cp=2, dp_shard=2, micro_batch=8, offload="all", checkpointing="full"),
    fused("CP x DDP packed", packing=True, cp=2, dp_replicate=2, sharding="ddp", micro_batch=8),
    fused("CP x DDP full accumulating, checkpointing", "full", cp=2, dp_replicate=2, sharding="ddp", micro_batch=4,
          gradient_accumulation=2, checkpointing="full"),
    case("PP x FSDP", pp=2, dp_shard=2, micro_batch=4, gradient_accumulation=2),
    fused("PP x FSDP packed, offload, checkpointing", packing=True, pp=2, dp_shard=2, micro_batch=4,
          gradient_accumulation=2, offload="all", checkpointing="full"),
    fused("PP x FSDP full kept gathered", "full", pp=2, dp_shard=2, micro_batch=4, gradient_accumulation=2, **KEPT),
    case("PP x FSDP full GPipe", "full", pp=2, dp_shard=2, micro_batch=2, gradient_accumulation=4, schedule="gpipe"),
    case("PP x FSDP interleaved", pp=2, dp_shard=2, micro_batch=2, gradient_accumulation=4, **TWICE),
    fused("PP x FSDP full interleaved, selective checkpointing", "full", pp=2, dp_shard=2, micro_batch=2,
          gradient_accumulation=4, checkpointing="selective", **TWICE),
    fused("PP x DDP packed", packing=True, pp=2, dp_replicate=2, sharding="ddp", micro_batch=4,
          gradient_accumulation=2),
    fused("PP x DDP full, checkpointing", "full", pp=2, dp_replicate=2, sharding="ddp", micro_batch=4,
          gradient_accumulation=2, checkpointing="full"),
    fused("PP x DDP interleaved", pp=2, dp_replicate=2, sharding="ddp", micro_batch=2, gradient_accumulation=4,
          **TWICE),
    fused("PP x DDP full interleaved, selective checkpointing", "full", pp=2, dp_replicate=2, sharding="ddp",
          micro_batch=2, gradient_accumulation=4, checkpointing="selective", **TWICE),
    case("PP x TP", pp=2, tp=2, micro_batch=4, gradient_accumulation=4),
    case("PP x TP full, sequence parallel", "full", pp=2, tp=2, micro_batch=4, gradient_accumulation=4,
         sequence_parallel=True),
    fused("PP x TP full packed, checkpointing", "full", packing=True, pp=2, tp=2, micro_batch=4,
          gradient_accumulation=4, checkpointing="full"),
    fused("PP x TP interleaved", pp=2, tp=2, micro_batch=4, gradient_accumulation=4, **TWICE),
    fused("PP x TP full interleaved, sequence parallel, selective checkpointing", "full", pp=2, tp=2, micro_batch=4,
          gradient_accumulation=4, sequence_parallel=True, checkpointing="selective", **TWICE),
    fused("TP4", tp=4, micro_batch=16),
    fused("TP4 full, sequence parallel, selective checkpointing", "full", tp=4, micro_batch=16,
          sequence_parallel=True, checkpointing="selective"),
    fused("PP4", pp=4, micro_batch=4, gradient_accumulation=4),
    case("PP4 uneven is even", "full", pp=4, micro_batch=4, gradient_accumulation=4, stage_layers=[1, 1, 1, 1]),
    fused("HSDP QLoRA kept gathered", "qlora", dp_replicate=2, dp_shard=2, micro_batch=4, **KEPT),
    fused("PP x FSDP QLoRA, checkpointing", "qlora", pp=2, dp_shard=2, micro_batch=4, gradient_accumulation=2,
          checkpointing="full"),
    fused("PP x FSDP QLoRA interleaved, packed", "qlora", packing=True, pp=2, dp_shard=2, micro_batch=2,
          gradient_accumulation=4, **TWICE),
    fused("PP x DDP QLoRA", "qlora", pp=2, dp_replicate=2, sharding="ddp", micro_batch=4, gradient_accumulation=2),
    fused("PP x DDP QLoRA interleaved", "qlora", pp=2, dp_replicate=2, sharding="ddp", micro_batch=2,
          gradient_accumulation=4, **TWICE),
]  # fmt: skip

ALL3_DDP = {"pp": 2, "tp": 2, "dp_replicate": 2, "sharding": "ddp"}
ALL3_FSDP = {"pp": 2, "tp": 2, "dp_shard": 2}
PP_HSDP = {"pp": 2, "dp_replicate": 2, "dp_shard": 2}
TP_HSDP = {"tp": 2, "dp_replicate": 2, "dp_shard": 2}
SHORT = {"micro_batch": 4, "gradient_accumulation": 2}
EIGHT = [
    fused("PP x TP x DDP packed, checkpointing", packing=True, checkpointing="full", **ALL3_DDP, **SHORT),
    fused("PP x TP x DDP full, sequence parallel", "full", sequence_parallel=True, **ALL3_DDP, **SHORT),
    fused("PP x TP x DDP interleaved", **ALL3_DDP, **SHORT, **TWICE),
    fused("PP x TP x DDP full interleaved, selective checkpointing", "full", checkpointing="selective", **ALL3_DDP,
          **SHORT, **TWICE),
    case("PP x TP x FSDP", micro_batch=2, gradient_accumulation=4, **ALL3_FSDP),
    fused("PP x TP x FSDP full kept gathered, selective checkpointing", "full", checkpointing="selective",
          **ALL3_FSDP, **SHORT, **KEPT),
    fused("PP x TP x FSDP interleaved, packed, offload, checkpointing", packing=True, offload="all",
          checkpointing="full", **ALL3_FSDP, **SHORT, **TWICE),
    fused("PP x TP x FSDP full interleaved, sequence parallel", "full", sequence_parallel=True, **ALL3_FSDP, **SHORT,
          **TWICE),
    fused("TP x HSDP packed, accumulating, kept gathered, selective checkpointing", packing=True, micro_batch=2,
          gradient_accumulation=2, checkpointing="selective", **TP_HSDP, **KEPT),
    fused("TP x HSDP full, offload, checkpointing", "full", micro_batch=4, offload="all", checkpointing="full",
          **TP_HSDP),
    fused("TP x HSDP full, sequence parallel", "full", micro_batch=4, sequence_parallel=True, **TP_HSDP),
    fused("CP x HSDP packed", packing=True, cp=2, dp_replicate=2, dp_shard=2, micro_batch=4),
    fused("CP x HSDP full accumulating, kept gathered, selective checkpointing", "full", cp=2, dp_replicate=2,
          dp_shard=2, micro_batch=2, gradient_accumulation=2, checkpointing="selective", **KEPT),
    fused("CP x HSDP offload, checkpointing", cp=2, dp_replicate=2, dp_shard=2, micro_batch=4, offload="all",
          checkpointing="full"),
    fused("PP x HSDP packed", packing=True, micro_batch=2, gradient_accumulation=2, **PP_HSDP),
    fused("PP x HSDP interleaved, kept gathered", micro_batch=2, gradient_accumulation=2, **PP_HSDP, **KEPT, **TWICE),
    fused("PP x HSDP full interleaved, selective checkpointing", "full", micro_batch=2, gradient_accumulation=2,
          checkpointing="selective", **PP_HSDP, **TWICE),
    fused("PP x HSDP QLoRA", "qlora", micro_batch=2, gradient_accumulation=2, **PP_HSDP),
    fused("PP x HSDP QLoRA interleaved", "qlora", micro_batch=2, gradient_accumulation=2, **PP_HSDP, **TWICE),
]  # fmt: skip


def rounded(family, **layout):
    """The family in bf16, with adapters and in full: weights in 16 bits or cast by FSDP or autocast."""
    return [
        fused(f"{family} bf16", precision="bf16", **layout),
        case(f"{family} full bf16", "full", precision="bf16", **layout),
    ]


TWO_BF16 = [
    *rounded("DDP", dp_replicate=2, sharding="ddp", micro_batch=4, gradient_accumulation=2),
    *rounded("FSDP", dp_shard=2, micro_batch=4, gradient_accumulation=2),
    *rounded("CP", cp=2, micro_batch=16),
    *rounded("TP", tp=2, micro_batch=16),
    *rounded("PP", pp=2, micro_batch=8, gradient_accumulation=2),
]
FOUR_BF16 = [
    *rounded("HSDP", dp_replicate=2, dp_shard=2, micro_batch=4),
    *rounded("TP x FSDP", tp=2, dp_shard=2, micro_batch=8),
    *rounded("PP x FSDP", pp=2, dp_shard=2, micro_batch=4, gradient_accumulation=2),
]
# Three ways of cutting over replicas of shards: 75 s of CPU, which took 51 s on 2 cores beside other work.
ALL4 = {"pp": 2, "tp": 2, "dp_replicate": 2, "dp_shard": 2, "micro_batch": 2, "gradient_accumulation": 2}
SIXTEEN = [
    fused("PP x TP x HSDP packed, kept gathered", packing=True, **ALL4, **KEPT),
    fused("PP x TP x HSDP interleaved, offload, checkpointing", offload="all", checkpointing="full", **ALL4, **TWICE),
    fused("PP x TP x HSDP full interleaved, sequence parallel, selective checkpointing", "full",
          sequence_parallel=True, checkpointing="selective", **ALL4, **TWICE),
]  # fmt: skip


def run_ranks(world, cases, folder):
    """All cases of one world size in one start of the ranks; returns their lines by name."""
    for name, kind in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**SHAPE, **kind}))
    named = [{**c, "model": f"random:{folder / c['model']}"} if c.get("model") in MODELS else c for c in cases]
    listed = folder / "cases.json"
    listed.write_text(json.dumps(named))
    argv = [sys.executable, str(HERE / "equivalence_ranks.py"), str(listed), str(world)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env, timeout=1700)
    lines = [json.loads(x.split("CASE ", 1)[1]) for x in done.stdout.splitlines() if "CASE {" in x]
    return {one["name"]: one for one in lines}, done.stderr


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The results of two ranks."""
    return run_ranks(2, TWO + TWO_BF16, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The results of four ranks."""
    return run_ranks(4, FOUR + FOUR_BF16, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """The results of eight ranks."""
    return run_ranks(8, EIGHT, tmp_path_factory.mktemp("eight"))


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory):
    """The results of sixteen ranks."""
    return run_ranks(16, SIXTEEN, tmp_path_factory.mktemp("sixteen"))


def hold(results, name):
    """Losses, norms and gradients of a case equal the reference."""
    lines, stderr = results
    assert name in lines, stderr[-3000:]
    got = lines[name]
    assert got["losses"] == pytest.approx(got["reference"], rel=TOLERANCE)
    assert got["norms"] == pytest.approx(got["reference_norms"], rel=TOLERANCE)
    assert got["gradient_difference"] < TOLERANCE
    assert got["all_gradients"]
    assert not got["missing"]
    assert not got["mismatches"]
    assert not got["confused_with"]


def hold_rounded(results, name):
    """A case in bf16 equals one process in bf16 and in fp32 but for roundings, and those are there."""
    lines, stderr = results
    assert name in lines, stderr[-3000:]
    got = lines[name]
    for losses in (got["reference"], got["exact"]):
        assert got["losses"] == pytest.approx(losses, rel=ROUNDING)
    assert got["norms"] == pytest.approx(got["reference_norms"], rel=LOW)
    assert got["gradient_difference"] < LOW
    assert ROUNDING / 4 < got["exact_difference"] < LOW  # fp32 would be at 1e-6
    assert got["all_gradients"]
    assert not got["missing"]
    assert not got["mismatches"]
    assert not got["confused_with"]


@pytest.mark.parametrize("name", [one["name"] for one in TWO])
def test_two_ranks_equal_one(two, name):
    """Two ranks under this layout compute what one process alone computes."""
    hold(two, name)


@pytest.mark.parametrize("name", [one["name"] for one in FOUR])
def test_four_ranks_equal_one(four, name):
    """Four ranks under this layout compute what one process alone computes."""
    hold(four, name)


@pytest.mark.parametrize("name", [one["name"] for one in EIGHT])
def test_eight_ranks_equal_one(eight, name):
    """Eight ranks under this layout compute what one process alone computes."""
    hold(eight, name)


@pytest.mark.parametrize("name", [one["name"] for one in TWO_BF16])
def test_two_ranks_in_bf16_equal_one_but_for_roundings(two, name):
    """Two ranks under this layout in bf16, against one process in bf16 and in fp32."""
    hold_rounded(two, name)


@pytest.mark.parametrize("name", [one["name"] for one in FOUR_BF16])
def test_four_ranks_in_bf16_equal_one_but_for_roundings(four, name):
    """Four ranks under this layout in bf16, against one process in bf16 and in fp32."""
    hold_rounded(four, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [one["name"] for one in SIXTEEN])
def test_sixteen_ranks_equal_one(sixteen, name):
    """Sixteen ranks, in all three ways at once over replicas of shards, compute what one process alone computes."""
    hold(sixteen, name)


UNITS = 6  # embedding, four layers, and the rest with the head


@pytest.mark.parametrize(
    ("name", "gathers", "reductions"),  # gathers None: what is sharded again is gathered for every micro-batch
    [
        ("DDP full accumulating", 0, 1),  # all gradients in one bucket, after the last micro-batch
        ("FSDP accumulating", None, UNITS - 2),  # adapters are in the layers alone
        ("FSDP kept gathered over micro-batches", UNITS, UNITS - 2),
        ("FSDP full kept gathered over micro-batches", UNITS, 4 * UNITS),  # scattered after each micro-batch
    ],
)
def test_collectives_of_a_step_of_four_micro_batches(two, name, gathers, reductions):
    """What travels once per step travels once, and nothing travels beside it; gloo scatters by an all-reduce."""
    lines, stderr = two
    assert name in lines, stderr[-3000:]
    got = dict(lines[name]["collectives"])
    assert got.pop("all_reduce") == reductions
    gathered = got.pop("all_gather", 0)
    assert gathered >= 4 * UNITS if gathers is None else gathered == gathers
    assert got == {}

"""Every layout computes what one process alone computes: losses and gradients, with LoRA and in full."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]  # a busy machine runs 22 cases at its own pace
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# fp32 sums in another order: the largest seen is 7e-7; a wrong scale, a lost shard or a double count is above 1e-2.
TOLERANCE = 1e-5


def case(name, method="lora", packing=False, save_head=False, **layout):
    """One row of the list; the batch is 16 sequences per step in all of them."""
    return {"name": name, "method": method, "packing": packing, "save_head": save_head, "layout": layout}


TWO = [
    case("DDP", dp_replicate=2, sharding="ddp", micro_batch=8),
    case("DDP full accumulating", "full", dp_replicate=2, sharding="ddp", micro_batch=2, gradient_accumulation=4),
    case("FSDP", dp_shard=2, micro_batch=8),
    case("FSDP with saved head", dp_shard=2, micro_batch=8, save_head=True),
    case("FSDP full accumulating", "full", dp_shard=2, micro_batch=4, gradient_accumulation=2),
    case("FSDP packed", packing=True, dp_shard=2, micro_batch=4, gradient_accumulation=2),
    case("FSDP kept gathered", "full", dp_shard=2, micro_batch=8, sharding="zero2"),
    case("FSDP checkpointing", dp_shard=2, micro_batch=8, checkpointing="full"),
    case("FSDP selective checkpointing", "full", dp_shard=2, micro_batch=8, checkpointing="selective"),
    case("FSDP offload", dp_shard=2, micro_batch=8, offload="all"),
    case("FSDP fused cross-entropy", "full", dp_shard=2, micro_batch=8, fused_cross_entropy=True),
    case("TP", tp=2, micro_batch=16),
    case("TP full packed", "full", packing=True, tp=2, micro_batch=8, gradient_accumulation=2),
    case("TP full, sequence parallel", "full", tp=2, micro_batch=16, sequence_parallel=True),
    case("TP fused cross-entropy, checkpointing", tp=2, micro_batch=16, fused_cross_entropy=True, checkpointing="full"),
    case("PP 1F1B", pp=2, micro_batch=8, gradient_accumulation=2),
    case("PP 1F1B packed", packing=True, pp=2, micro_batch=4, gradient_accumulation=4),
    case("PP GPipe full", "full", pp=2, micro_batch=4, gradient_accumulation=4, schedule="gpipe"),
    case("PP 1F1B uneven", "full", pp=2, micro_batch=4, gradient_accumulation=4, stage_layers=[1, 3]),
    case("PP 1F1B checkpointing", pp=2, micro_batch=8, gradient_accumulation=2, checkpointing="full"),
    case("PP interleaved", pp=2, micro_batch=4, gradient_accumulation=4, schedule="interleaved", virtual_stages=2),
    case("PP fused cross-entropy", pp=2, micro_batch=8, gradient_accumulation=2, fused_cross_entropy=True),
]
FOUR = [
    case("HSDP", dp_replicate=2, dp_shard=2, micro_batch=4),
    case("HSDP full accumulating", "full", dp_replicate=2, dp_shard=2, micro_batch=2, gradient_accumulation=2),
    case("TP x FSDP", tp=2, dp_shard=2, micro_batch=8),
    case("TP x FSDP full accumulating", "full", tp=2, dp_shard=2, micro_batch=2, gradient_accumulation=4),
    case("TP x FSDP full, sequence parallel", "full", tp=2, dp_shard=2, micro_batch=8, sequence_parallel=True),
    case("TP x DDP", tp=2, dp_replicate=2, sharding="ddp", micro_batch=8),
    case("PP x FSDP", pp=2, dp_shard=2, micro_batch=4, gradient_accumulation=2),
    case("PP x FSDP full GPipe", "full", pp=2, dp_shard=2, micro_batch=2, gradient_accumulation=4, schedule="gpipe"),
    case("PP x FSDP interleaved", pp=2, dp_shard=2, micro_batch=2, gradient_accumulation=4,
         schedule="interleaved", virtual_stages=2),
    case("PP x DDP", pp=2, dp_replicate=2, sharding="ddp", micro_batch=4, gradient_accumulation=2),
    case("PP x TP", pp=2, tp=2, micro_batch=4, gradient_accumulation=4),
    case("PP x TP full, sequence parallel", "full", pp=2, tp=2, micro_batch=4, gradient_accumulation=4,
         sequence_parallel=True),
    case("PP4 uneven is even", "full", pp=4, micro_batch=4, gradient_accumulation=4, stage_layers=[1, 1, 1, 1]),
]  # fmt: skip

EIGHT = [
    case("PP x TP x FSDP", pp=2, tp=2, dp_shard=2, micro_batch=2, gradient_accumulation=4),
    case("TP x HSDP full", "full", tp=2, dp_replicate=2, dp_shard=2, micro_batch=4),
    case("PP x HSDP packed", packing=True, pp=2, dp_replicate=2, dp_shard=2, micro_batch=2, gradient_accumulation=2),
]


def run_ranks(world, cases, folder):
    """All cases of one world size in one start of the ranks; returns their lines by name."""
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world),
            str(HERE / "equivalence_ranks.py"), str(listed)]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env, timeout=800)
    lines = [json.loads(x.split("CASE ", 1)[1]) for x in done.stdout.splitlines() if "CASE {" in x]
    return {one["name"]: one for one in lines}, done.stderr


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The results of two ranks."""
    return run_ranks(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The results of four ranks."""
    return run_ranks(4, FOUR, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """The results of eight ranks."""
    return run_ranks(8, EIGHT, tmp_path_factory.mktemp("eight"))


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

"""Every layout computes what one process alone computes: losses and gradients, with LoRA, QLoRA and in full."""

import json
from functools import cache
from pathlib import Path

import pytest
from rigs.command import interpreter
from rigs.tables import data_of, each_row

from contracts.layout import Layout

# a busy machine runs 30 cases at its own pace
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800), pytest.mark.usefixtures("forked_ranks")]
HERE = Path(__file__).parent
LAYOUTS = data_of(__file__, "layouts.yaml")
SHAPE, MODELS = map(data_of(__file__, "models.yaml").get, ("shape", "models"))
# fp32 sums in another order: the largest seen is 7e-7; a wrong scale, a lost shard or a double count is above 1e-2.
TOLERANCE = 1e-5
# bf16 keeps 8 bits: each result is rounded by 2^-8 at most, half its epsilon. Independent roundings add up as their
# root: forward and backward through four layers round some 60 times in a row, sqrt(64) x 2^-8 = 3 %. One process alone
# differs from fp32 by 1.1 %; TP, whose sums are rounded on the way, by 1.4 %. In a mean over hundreds of tokens
# roundings cancel, to below a single one.
ROUNDING = 2.0**-8
LOW = 8 * ROUNDING


def case(name, method="lora", packing=False, save_head=False, model=None, counts=False, **layout):
    """One row of the list, its layout in fp32 unless it says otherwise."""
    row = {"name": name, "method": method, "packing": packing, "save_head": save_head, "counts": counts}
    return {**row, **({"model": model} if model else {}), "layout": layout}


def cases_of(world, tier):
    """The rows of layouts.yaml for so many ranks; 16 sequences a step in all of them."""
    made = []
    for row in LAYOUTS[tier].get(world, ()):
        one = case(**{"fused_cross_entropy": True, **row})
        layout = Layout(world_size=world, **one["layout"])
        one["layout"]["micro_batch"] = 16 // (layout.gradient_accumulation * layout.data_parallel)
        made.append(one)
    return made


def run_ranks(world, cases, folder):
    """All cases of one world size in one start of the ranks; returns their lines by name."""
    for name, kind in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**SHAPE, **kind}))
    named = [{**c, "model": f"random:{folder / c['model']}"} if c.get("model") in MODELS else c for c in cases]
    return run_script("equivalence_ranks.py", named, folder / "cases.json", world, seconds=1700)


def run_script(script, cases, listed, *words, **how):
    """Run a script over these cases; return its lines by their names, and its stderr."""
    listed.write_text(json.dumps(cases))
    done = interpreter(HERE / script, listed, *words, **how)
    lines = [json.loads(x.split("CASE ", 1)[1]) for x in done.stdout.splitlines() if "CASE {" in x]
    return {one["name"]: one for one in lines}, done.stderr


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results by number of ranks and tier: one start of the ranks for all cases of both."""

    @cache
    def get(world, tier):
        return run_ranks(world, cases_of(world, tier), tmp_path_factory.mktemp(f"{tier}-{world}"))

    return get


def hold(results, name):
    """Losses, norms and gradients of a case equal the reference; in bf16 but for roundings, and those are there."""
    lines, stderr = results
    assert name in lines, stderr[-3000:]
    got = lines[name]
    rounded = got["precision"] == "bf16"
    for losses in (got["reference"], got["exact"]):  # of one process under this precision and in fp32
        assert got["losses"] == pytest.approx(losses, rel=ROUNDING if rounded else TOLERANCE)
    assert got["norms"] == pytest.approx(got["reference_norms"], rel=LOW if rounded else TOLERANCE)
    assert got["gradient_difference"] < (LOW if rounded else TOLERANCE)
    assert not rounded or ROUNDING / 4 < got["exact_difference"] < LOW  # fp32 would be at 1e-6
    assert got["all_gradients"]
    assert not got["missing"]
    assert not got["mismatches"]
    assert not got["confused_with"]


def rows_of(tier):
    """Numbers of ranks, each with the names of its cases."""
    return [(world, one["name"]) for world in LAYOUTS[tier] for one in cases_of(world, tier)]


@each_row(("world", "name"), rows_of("ci"))
def test_ranks_equal_one(results, world, name):
    """So many ranks under this layout compute what one process alone computes."""
    hold(results(world, "ci"), name)


@pytest.mark.nightly
@each_row(("world", "name"), rows_of("nightly"))
def test_ranks_equal_one_under_all_other_layouts(results, world, name):
    """The other combinations that the planner recommends; eight and sixteen ranks in two and three ways at once."""
    hold(results(world, "nightly"), name)


UNITS = 6  # embedding, four layers, and the rest with the head


@each_row(
    ("name", "gathers", "reductions"),  # gathers None: what is sharded again is gathered for every micro-batch
    [
        ("DDP full accumulating", 0, 1),  # all gradients in one bucket, after the last micro-batch
        ("FSDP accumulating", None, UNITS - 2),  # adapters are in the layers alone
        ("FSDP no reshard between micro-batches", UNITS, UNITS - 2),
        ("FSDP full no reshard between micro-batches", UNITS, 4 * UNITS),  # scattered after each micro-batch
    ],
)
def test_collectives_of_a_step_of_four_micro_batches(results, name, gathers, reductions):
    """What travels once per step travels once, and nothing else travels; gloo scatters by an all-reduce."""
    lines, stderr = results(2, "ci")
    assert name in lines, stderr[-3000:]
    got = dict(lines[name]["collectives"])
    assert got.pop("all_reduce") == reductions
    gathered = got.pop("all_gather", 0)
    assert gathered >= 4 * UNITS if gathers is None else gathered == gathers
    assert got == {}

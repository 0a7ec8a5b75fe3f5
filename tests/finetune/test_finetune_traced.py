"""The layouts that the planner may recommend, built and traced at their real size without a GPU.

One full optimizer step of Llama 3.1 8B, 70B and 405B over 8, 16, 64 and 512 ranks, by one rank of the first pipeline
stage and one of the last, of some by one between them (`fake_ranks.py`): that the job takes the layout, that what it
builds is what was asked for, and that a rank's weights and the bytes of each kind of collective are those that the
forecast counts. Widths, degrees and sequence are the real ones. Of layers, which are all alike, and of micro-batches
there are a few: the forecast is asked about the same few.
"""

import json
import os
import re
from collections import Counter
from dataclasses import asdict, replace
from functools import cache
from itertools import product

import pytest
from rigs.tables import data_of
from test_finetune_equivalence import run_script

from contracts.layout import Layout
from planner.forecast import machines
from planner.forecast.memory import memory_parts
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec, lora_weights
from planner.forecast.step_time import prepare_step
from planner.recommend import plan
from planner.search import search
from planner.stacks import TOPOFLIGHT as ENGINE

WHOLE = os.environ.get("TOPOFLIGHT_TRACE") == "all"
LIMIT = 14400 if WHOLE else 1800
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(LIMIT), pytest.mark.usefixtures("forked_ranks")]
MODELS = ("Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B")
WORLDS = (8, 16, 64, 512)
METHODS = ("full", "lora", "qlora")
LENGTH, RANK = 2048, 16
# The forecast divides norms, a ten-thousandth of a layer, by the tensor-parallel ranks, and counts the final one with
# the embedding; the job leaves them whole, and has it with the head.
NORMS = 2e-4


def planned(model, method, world):
    """The planner's numbers of a run on machines of eight H100s."""
    train = TrainSpec(method=method, sequence_length=LENGTH, global_batch=max(64, 2 * world), engine="topoflight")
    return plan(machines.cluster("p5.48xlarge", world // 8), (), model, train)


def kind_of(layout):
    """What makes two layouts different code: one of each kind is traced per model, method and world."""
    axes = [name for name in ("dp_replicate", "dp_shard", "tp", "pp") if getattr(layout, name) > 1]
    unresharded = layout.dp_shard > 1 and not layout.reshard_after_forward
    chunks = layout.pp > 1 and layout.virtual_stages > 1
    return (*axes, unresharded, chunks, layout.sequence_parallel, layout.checkpointing, layout.offload)


@cache
def recommended(name, method, world):
    """Of each kind the fastest; fewer layers, chunks and micro-batches, all else as recommended."""
    found, kinds = [], set()
    for one in search(planned(model_named(name), method, world)).best:
        if kind_of(one.layout) in kinds:
            continue
        kinds.add(kind_of(one.layout))
        found.append(shortened(one.layout))
    return found


def shortened(layout):
    """Two chunks of one layer where there are more, and no more micro-batches than the pipeline needs, or two."""
    micro = layout.pp if layout.pp > 1 else min(2, layout.gradient_accumulation)
    return replace(
        layout, virtual_stages=min(2, layout.virtual_stages), stage_layers=(), gradient_accumulation=micro,
    )  # fmt: skip


def layers_of(layout):
    """Of the substitute model: two for each rank of the pipeline."""
    return layout.pp * 2


def stages(layout):
    """The pipeline stages that differ: the first has the embedding, the last the head, and nightly one has neither."""
    return sorted({0, layout.pp // 2 if WHOLE and layout.pp > 2 else 0, layout.pp - 1})


def case_of(folder, name, method, layout, layers=None, stage=0):
    """A case for the tracer."""
    model, layers = model_named(name), layers or layers_of(layout)
    home = folder / f"{name}-{layers}"
    if not home.exists():
        home.mkdir()
        (home / "config.json").write_text(json.dumps({
            "model_type": "llama", "hidden_size": model.hidden,
            "intermediate_size": model.ffn, "num_hidden_layers": layers, "num_attention_heads": model.heads,
            "head_dim": model.head_dim, "num_key_value_heads": model.kv_heads, "vocab_size": model.vocab,
            "tie_word_embeddings": False, "max_position_embeddings": model.max_positions,
        }))  # fmt: skip
    return {"name": f"{name} {method} {stage} {layout}", "method": method, "length": LENGTH, "stage": stage,
            "model": f"{'' if method == 'qlora' else 'random:'}{home}", "layout": asdict(layout)}  # fmt: skip


def traced(folder, cases):
    """What the tracer says of each case, by name."""
    listed = folder / f"{len(list(folder.iterdir()))}.json"
    found, errors = run_script("fake_ranks.py", cases, listed, seconds=LIMIT - 100)
    assert len(found) == len(cases), errors[-3000:]
    return found


def counted(job, layout, last):
    """The bytes of a step's collectives by mesh dimension and kind, on a rank of the first or of the last stage.

    Each counts with its larger side; a tensor-parallel all-gather or reduce-scatter is half an all-reduce.
    """
    step, engine = prepare_step(job, ENGINE.as_run(layout)), ENGINE
    layout, share, micro = step.layout, step.share, step.layout.gradient_accumulation
    found, reduced = {}, engine.reduced_bytes(job.train, layout)
    if share.sharded:
        gathers, again, scatters = engine.count_exchanges(job.train, layout)
        stored = again * step.stored_bytes
        if last and layout.pp > 1:  # the last unit stays gathered after the first forward pass
            stored = (gathers + again - 1) * step.head_bytes
        found["dp_shard", "all_gather"] = (gathers + again) * step.gathered_bytes - stored
        found["dp_shard", "reduce_scatter"] = scatters * reduced * share.trained
    if layout.dp_replicate > 1 or (layout.data_parallel > 1 and not share.sharded):
        found["dp_replicate", "all_reduce"] = reduced * share.part(share.trained, 0.0, sharded=share.sharded)
    if layout.tp > 1:
        rounds = share.layers * engine.tensor_parallel_rounds(layout)
        rounds += engine.tensor_parallel_ends(job.train, layout, last=last)
        found["tp", "all_reduce"] = micro * rounds * step.hidden_bytes
    if layout.pp > 1:
        found["pp", "send"] = (2 * layout.virtual_stages - 1) * micro * step.message_bytes
    return found


def hold(got, name, method, layout, layers=None, stage=0):
    """One traced stage of a layout against the forecast's bytes."""
    assert got["mismatches"] == [], got["name"]
    model = replace(model_named(name), layers=layers or layers_of(layout))
    job = planned(model, method, layout.world_size).job
    due, heard = counted(job, layout, last=stage > 0), Counter()
    between = 0 < stage < layout.pp - 1
    if between:  # hands on in both directions
        due["pp", "send"] *= 2 * layout.virtual_stages / (2 * layout.virtual_stages - 1)
    # Left out is what is narrow: a number per token of the loss, an adapter's inner side, gradients of norms. The
    # head's gradient comes in parts of 1,024 tokens where the loss is fused.
    least = 1024 * model.hidden * 2
    for axis, kind, size, times in got["sent"]:
        if axis == "tp":
            heard["tp", "all_reduce" if size >= least else "small"] += (
                (1 if kind == "all_reduce" else 0.5) * size * times
            )
        else:
            heard[axis, kind] += size * times
    small = heard.pop(("tp", "small"), 0)
    assert small < 0.01 * heard["tp", "all_reduce"] or not small
    pairs = {f"{axis} {kind}": (heard[axis, kind], due.get((axis, kind))) for axis, kind in {*heard, *due}}
    assert heard.keys() == due.keys(), (got["name"], pairs)
    # what is offloaded is in the memory of the host, in the same parts
    held = memory_parts(model, job.train, replace(layout, offload="none"), ENGINE).weights
    if method == "qlora":  # as a state of bitsandbytes', which no parameter counts
        held -= memory_parts(model, job.train, replace(layout, offload="all"), ENGINE).weights
    rows = model.vocab // layout.tp
    most = held * (1 + NORMS + (-rows % layout.dp_shard) / rows)
    if method != "full" and layout.dp_shard > RANK:  # the first ranks have a row each of an adapter's factors
        most += 4 * lora_weights(model, job.train) / layout.pp / RANK
    # Of a stage between the ends the forecast bounds what it holds and sends.
    floor = 0.0 if between else 1 - NORMS
    assert held * floor <= got["local_bytes"] <= most, (got["name"], held, got["local_bytes"])
    for key, size in due.items():
        more = NORMS + (padding(model, method, layout, due, key) if key[0] in ("dp_shard", "dp_replicate") else 0.0)
        assert size * (1 - NORMS if key[0] == "pp" else floor) <= heard[key] <= size * (1 + more), (got["name"], pairs)


def hold_all(folder, found):
    """Each layout's ends, traced and held."""
    cases = [(case_of(folder, *one, stage=stage), one, stage) for one in found for stage in stages(one[2])]
    got = traced(folder, [case for case, *_ in cases])
    for case, one, stage in cases:
        hold(got[case["name"]], *one, stage=stage)


def padding(model, method, layout, due, key):
    """The share by which FSDP's rows, a whole number of them on each rank, exceed what the forecast counts.

    A factor of an adapter has `RANK` rows: over more ranks than that most of what is sent of it is padding.
    """
    rows, ranks = model.vocab // layout.tp, layout.dp_shard
    head = (-rows % ranks) / rows
    if method == "full" or ranks <= RANK:
        return head
    more = ranks / RANK
    if key[1] != "all_gather":  # gradients of adapters alone, reduced over the shards and between their replicas
        return more
    # Gradients are in fp32, what is gathered in 16 bits; twice for each micro-batch at most.
    adapters = due["dp_shard", "reduce_scatter"] / 2 * 2 * layout.gradient_accumulation
    return head + more * adapters / due[key]


def every():
    """Model, method and layout: every fifth family, of each model in turn, the largest world first.

    TOPOFLIGHT_TRACE=all: each layout of each model and world.
    """
    kinds = {}
    for world, method, name in product(reversed(WORLDS), METHODS, MODELS):
        for layout in recommended(name, method, world):
            if WHOLE or layout.pp <= 16:
                models = kinds.setdefault((method, layout if WHOLE else re.sub(r"\d+", "", layout.family)), {})
                models.setdefault(name, (name, method, layout))
    found = [list(models.values()) for models in kinds.values()]
    return [one for of in found for one in of] if WHOLE else [of[at % len(of)] for at, of in enumerate(found[::5])]


MADE_AGAIN = data_of(__file__, "traced_layouts.yaml")


def test_what_is_made_again_and_gathered_again_is_counted(tmp_path):
    """Recomputation sends again; what was given back after the forward pass travels again."""
    rows = MADE_AGAIN if WHOLE else MADE_AGAIN[1:8:2]
    made = [("Llama-3.1-8B", method, Layout(world_size=8, **more)) for method, more in rows]
    hold_all(tmp_path, made)


@pytest.mark.nightly
def test_recommended_layouts_send_what_the_forecast_counts(tmp_path):
    """Each is accepted, built as asked, and sends those bytes."""
    found = every()
    assert len(found) > 5 and {name for name, *_ in found} == {*MODELS}
    hold_all(tmp_path, found)

"""Memory that other processes hold on a GPU is none that a job may have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rigs.recorded import changed
from rigs.recorded import snapshot as host
from rigs.tables import each_row

from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import plan, recommend
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts, GpuProcess
from topology.build import build
from topology.cluster import join

MODEL = model_named("Llama-3.1-8B")
TRAIN = TrainSpec(method="lora")


def _held(ratio: float, gpu: int = 3) -> Snapshot:
    facts = host().facts(GpuFacts)
    gpus = list(facts.gpus)
    used = int(ratio * (gpus[gpu].memory_bytes or 0))
    gpus[gpu] = replace(gpus[gpu], memory_used_bytes=used, processes=(GpuProcess(pid=4711, memory_bytes=used),))
    return changed(host(), GpuFacts, gpus=tuple(gpus))


@each_row("ratio", [0.2, 0.5, 0.98])
def test_the_fullest_gpu_sets_what_a_rank_may_have(ratio: float) -> None:
    """And the forecast says who holds how much where."""
    snapshot = _held(ratio)
    planned = plan(join((build(snapshot),)), (snapshot,), MODEL, TRAIN)
    size = 81559 << 20
    assert planned.capacity == pytest.approx((1.0 - ratio) * size, abs=0.02 * size)
    said = [words for words in planned.unknowns if "hold" in words]
    assert len(said) == 1
    assert "GPU3" in said[0] and "4711" in said[0]


def test_a_full_gpu_leaves_no_layout() -> None:
    """98 % held by others: nothing of an 8B model fits into the rest."""
    snapshot = _held(0.98)
    found = recommend(join((build(snapshot),)), (snapshot,), MODEL, TRAIN)
    assert recommend(join((build(host()),)), (host(),), MODEL, TRAIN).chosen is not None
    assert found.chosen is None


def test_what_the_driver_keeps_for_itself_is_not_held() -> None:
    """600 MiB on an idle H100."""
    assert plan(join((build(host()),)), (host(),), MODEL, TRAIN).capacity == float(81559 << 20)

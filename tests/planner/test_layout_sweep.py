"""Sweeps and comparisons: several clusters and several layouts side by side."""

import pytest

from contracts.layout import Layout, LayoutError
from planner.advice import RankedLayout
from planner.forecast import machines
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import compare, forecast_layout, forecast_named, frontier, plan, recommend
from planner.search import Planned

TRAIN = TrainSpec(method="full", sequence_length=8192, global_batch=256, engine="torchtitan")


def test_compare_puts_two_layouts_side_by_side() -> None:
    """Every part of either, and the step last; a layout that breaks a rule says so."""
    planned = plan(machines.cluster("p5.48xlarge", 4), (), model_named("Llama-3.1-70B"), TRAIN)
    first = forecast_layout(planned, Layout(world_size=32, dp_shard=32, micro_batch=2, gradient_accumulation=4,
                                            checkpointing="full"))  # fmt: skip
    second = forecast_layout(planned, Layout(world_size=32, tp=8, pp=2, dp_shard=2, sequence_parallel=True,
                                             gradient_accumulation=128))  # fmt: skip
    rows = compare(first, second)
    assert rows[-1][0] == "step"
    parts = {name: (a, b) for name, a, b in rows}
    assert parts["recompute"][0] > 0
    assert parts["tensor_parallel"][0] == 0
    assert parts["tensor_parallel"][1] > 0
    broken = forecast_layout(planned, Layout(world_size=32, tp=16, dp_shard=2, gradient_accumulation=128))
    assert "breaks" in broken.why


def a40() -> tuple[Planned, RankedLayout]:
    """Four nodes of two A40: the numbers, and what is recommended."""
    cluster, model = machines.cluster("2xa40-roce", 4), model_named("Llama-3.1-8B")
    chosen = recommend(cluster, (), model, TrainSpec()).chosen
    return plan(cluster, (), model, TrainSpec()), chosen


def test_a_comparison_shows_the_layout_that_recommend_shows() -> None:
    """What is not named is chosen in the same way: same micro-batch, same memory, same step, same global batch."""
    planned, chosen = a40()
    shape = chosen.layout
    named = {"dp_replicate": shape.dp_replicate, "dp_shard": shape.dp_shard, "tp": shape.tp, "pp": shape.pp}
    again = forecast_named(planned, named)
    assert again.layout == shape
    assert again.forecast.memory_bytes == chosen.forecast.memory_bytes
    assert again.forecast.step_seconds == chosen.forecast.step_seconds
    other = forecast_named(planned, {"dp_shard": 8, "micro_batch": 2})
    assert (other.layout.micro_batch, other.layout.global_batch) == (2, shape.global_batch)


def test_a_comparison_refuses_a_batch_that_does_not_divide() -> None:
    """And names both numbers."""
    planned, _ = a40()
    with pytest.raises(LayoutError, match=r"global batch 64 .* micro_batch 3"):
        forecast_named(planned, {"dp_shard": 8, "micro_batch": 3})


def test_the_frontier_holds_what_nothing_beats_in_time_and_money() -> None:
    """Of the same tokens: a point that is beaten in both is not on it, and the fastest and the cheapest always are."""
    train = TrainSpec(method="full", sequence_length=2048, global_batch=512)
    prices = {"p5.48xlarge": 98.0, "p4d.24xlarge": 33.0}
    points = frontier(tuple(prices), (1, 4), (None,), model_named("Llama-3.1-8B"), train, tokens=1e9, prices=prices)
    assert [(p.machine, p.nodes) for p in points] == [(name, count) for name in prices for count in (1, 4)]
    for point in points:
        assert point.seconds.mid == pytest.approx(1e9 / point.tokens_per_second)
        assert point.cost.mid == pytest.approx(point.seconds.mid / 3600 * point.nodes * prices[point.machine])
        beaten = any(
            q.seconds and q.cost and q.seconds.mid < point.seconds.mid and q.cost.mid < point.cost.mid for q in points
        )
        assert point.best is not beaten
    fastest = min(points, key=lambda p: p.seconds.mid if p.seconds else 1e99)
    cheapest = min(points, key=lambda p: p.cost.mid if p.cost else 1e99)
    assert fastest.best and cheapest.best


def test_the_frontier_goes_over_networks_and_says_why_nothing_fits() -> None:
    """A slower network is never faster, one node has none, and a 70B model does not fit on one p5."""
    model = model_named("Llama-3.1-70B")
    points = frontier(("p5.48xlarge",), (1, 4, 8), (None, "100G"), model, TRAIN, tokens=1e9, transport="tcp")
    assert [p.network for p in points] == ["-", *["catalogue", "100G tcp"] * 2]
    assert points[0].seconds is None and "GiB more" in points[0].reason and not points[0].best
    fewer, _, own, over_tcp = points[1:]
    assert own.seconds.mid < min(fewer.seconds.mid, over_tcp.seconds.mid)
    assert own.best and not over_tcp.best and own.cost is None

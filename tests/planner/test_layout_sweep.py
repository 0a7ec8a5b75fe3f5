"""Sweeps and comparisons: several clusters and several layouts side by side."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from planner import machines
from planner.layout import Layout
from planner.models import model_named
from planner.recommend import forecast_layout, plan
from planner.specs import TrainSpec
from planner.sweep import compare, sweep, sweep_svg

TRAIN = TrainSpec(method="full", sequence_length=8192, global_batch=256, engine="torchtitan")


def test_sweep_says_what_fits_and_how_it_scales() -> None:
    """One node is too small for a 70B full fine-tune; more nodes never take longer for the same batch."""
    points = sweep("p5.48xlarge", [1, 4, 8, 16], model_named("Llama-3.1-70B"), TRAIN)
    assert points[0].step_seconds is None
    assert "GiB over" in points[0].reason
    seconds = [p.step_seconds for p in points[1:]]
    assert all(s is not None for s in seconds)
    assert seconds == sorted(seconds, key=lambda s: -(s or 0.0))
    assert points[1].efficiency == pytest.approx(1.0)


def test_the_plot_is_well_formed_and_escapes_its_title() -> None:
    """Self-contained SVG that any reader parses."""
    points = sweep("p5.48xlarge", [4, 8], model_named("Llama-3.1-70B"), TRAIN)
    root = ElementTree.fromstring(sweep_svg(points, "70B <on> p5 & more"))  # noqa: S314 - our own text
    assert root.tag.endswith("svg")
    assert "70B <on> p5 & more" in "".join(root.itertext())
    ElementTree.fromstring(sweep_svg((), "nothing"))  # noqa: S314 - our own text


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

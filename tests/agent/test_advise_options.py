"""What a run is changes its forecast: precision, padding, optimizer, budget; wrong values are named."""

from __future__ import annotations

from typing import Any

import pytest

from agent.advise import Request, RequestError, answer, histogram_of
from planner.advice import Recommendation


def advice(**more: Any) -> Recommendation:
    given = {"machine": "p5.48xlarge", "model": "Llama-3.1-8B", "method": "full", "global_batch": 64, **more}
    return answer(Request(**given), ())


def step(**more: Any) -> float:
    chosen = advice(**more).chosen
    assert chosen is not None
    return chosen.forecast.step_seconds.mid


def test_fp8_is_faster_than_bf16_and_bf16_than_fp32() -> None:
    """On a GPU that has them, with an engine that has them."""
    assert step(precision="bf16") < step(precision="fp32")
    assert step(precision="fp8", engine="megatron") < step(precision="bf16", engine="megatron")


def test_short_rows_cost_less_than_full_ones_unless_packed() -> None:
    """Padding to the longest of a micro-batch follows the histogram; packing fills the sequence."""
    short = "128:1000"
    assert step(lengths=short) < 0.5 * step()


def test_an_8bit_optimizer_needs_less_memory() -> None:
    """By the states it keeps."""

    def optimizer_bytes(name: str) -> float:
        chosen = advice(optimizer=name).chosen
        assert chosen is not None
        return sum(p.value for p in chosen.forecast.memory_parts if p.name == "optimizer")

    assert optimizer_bytes("adamw8bit") < optimizer_bytes("adamw")


def test_a_budget_gives_the_length_of_the_whole_run() -> None:
    """In steps, or in tokens, which are as many steps as they need."""
    by_steps = advice(steps=1000)
    assert by_steps.total_steps == 1000
    assert by_steps.total_seconds is not None and by_steps.chosen is not None
    assert by_steps.total_seconds.mid == pytest.approx(1000 * by_steps.chosen.forecast.step_seconds.mid)
    by_tokens = advice(tokens=64 * 2048 * 10)
    assert by_tokens.total_steps == 10
    assert advice().total_seconds is None


def test_a_budget_of_time_gives_the_steps_that_fit() -> None:
    """As many whole steps as the forecast has room for, and one budget only."""
    found = advice(hours=2.0)
    assert found.chosen is not None and found.total_steps is not None
    step_seconds = found.chosen.forecast.step_seconds.mid
    assert found.total_steps * step_seconds <= 7200 < (found.total_steps + 1) * step_seconds
    with pytest.raises(RequestError, match="steps and hours"):
        advice(steps=10, hours=2.0)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"precision": "int3"}, "int3"),
        ({"lengths": "long"}, "long"),
        ({"lengths": "0:5"}, "0"),
        ({"model": "nothing-7B"}, "nothing-7B"),
        ({"machine": "p99"}, "p99"),
    ],
)
def test_wrong_values_are_named(given: dict[str, Any], names: str) -> None:
    """No stack trace, no guess."""
    with pytest.raises(RequestError, match=names):
        advice(**given)


def test_histogram_is_sorted() -> None:
    """As the planner reads it."""
    assert histogram_of("512:1,64:9") == ((64, 9), (512, 1))

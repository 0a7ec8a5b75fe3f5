"""Lengths of a data set decide what padding costs: the longer the micro-batch, the longer its longest sample."""

from dataclasses import replace

import pytest
from rigs.tables import each_row

from contracts.layout import Layout
from planner.forecast import machines
from planner.forecast.memory import memory_parts
from planner.forecast.models import model_named
from planner.forecast.specs import PlanError, TrainSpec, check_histogram, expected_longest, mean_length
from planner.forecast.step_time import forecast_step
from planner.recommend import plan, recommend
from planner.stacks import find_engine

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


def test_memory_follows_the_longest_row_and_grows_with_batch_and_length() -> None:
    """A micro-batch is padded to its longest row: what no row reaches is not held, and the longest row bounds it."""
    model, rows = model_named("Llama-3.1-8B"), ((100, 900), (249, 100))
    wrong = []
    for engine in ("topoflight", "trl", "deepspeed", "torchtitan", "megatron"):
        for attention in ("sdpa", "eager"):
            train = TrainSpec(sequence_length=4096, engine=engine, attention=attention)

            def held(train: TrainSpec, batch: int) -> float:
                layout = Layout(world_size=4, dp_shard=4, micro_batch=batch, checkpointing="full")
                return memory_parts(model, train, layout, find_engine(train.engine)).total

            cases = {
                "rows": held(replace(train, length_histogram=rows), 32),
                "cut at the longest": held(replace(train, sequence_length=249), 32),
                "packed": held(replace(train, length_histogram=rows, packing=True), 32),
                "assumed": held(train, 32),
                "longer than the cut": held(replace(train, length_histogram=((9000, 1),)), 32),
            }
            if cases["rows"] != cases["cut at the longest"] or len({*list(cases.values())[2:]}) != 1:
                wrong.append((engine, attention, cases))
            grown = [held(replace(train, length_histogram=((tokens, 9),)), batch)
                     for batch in (1, 8, 64) for tokens in (64, 500, 4096)]  # fmt: skip
            if any(sorted(each) != each for each in (grown[:3], grown[3:6], grown[6:], grown[::3], grown[2::3])):
                wrong.append((engine, attention, grown))
    assert not wrong, wrong


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

"""Rows, epochs and money: a data set's own lengths decide the forecast, and the whole run's hours and cost follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rigs.tables import each_row

from agent.advice.advise import answer
from agent.advice.request import Request, dataset_settings, prices_of, with_rows
from agent.base.inputs import InputError, RequestError
from agent.cli.launch import launch
from planner.advice import Recommendation
from planner.forecast.specs import mean_length


def ask(**more: Any) -> Recommendation:
    given = {"machine": "p5.48xlarge", "nodes": 2, "model": "Llama-3.1-8B", "method": "full", "global_batch": 64}
    return answer(Request.of(**{**given, **more}), ())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5,000 rows: four short ones to each long one."""
    path: Path = tmp_path_factory.mktemp("data") / "train.jsonl"
    text = [{"question": "q" * (200 if i % 5 == 0 else 20), "answer": "a"} for i in range(5000)]
    path.write_text("\n".join(map(json.dumps, text)), encoding="utf-8")
    return path


def test_the_rows_of_a_file_are_counted_and_measured_with_the_tokenizer(rows: Path) -> None:
    """By the job's own reader and template: 180 characters more are 180 bytes more, in a fifth of the rows."""
    request = with_rows(Request.of(model="Llama-3.1-8B"), dataset_settings(str(rows), "builtin:bytes", "Llama-3.1-8B"))
    assert request.rows == 5000 and request.unmeasured == ""
    (short, many), (long, few) = request.train.length_histogram
    assert (many, few) == (4000, 1000) and long - short == 180
    lengths = ",".join(f"{tokens}:{count}" for tokens, count in request.train.length_histogram)
    forecast, blind = (ask(epochs=2, lengths=told, rows=5000) for told in (lengths, None))
    assert forecast.total_steps == blind.total_steps == 2 * (5000 // 64)
    assert forecast.total_seconds is not None and blind.total_seconds is not None
    assert forecast.total_seconds.mid < 0.3 * blind.total_seconds.mid
    mean = mean_length(request.train.length_histogram, 2048)
    chosen = forecast.chosen
    assert chosen is not None
    assert chosen.forecast.tokens_per_second * chosen.forecast.step_seconds.mid == pytest.approx(64 * mean)


def test_packed_rows_take_as_many_steps_as_their_tokens_fill() -> None:
    packed = ask(epochs=1, lengths="512:64000", packing=True)
    assert packed.total_steps == 64000 * 512 // 2048 // 64


def test_what_cannot_be_measured_is_unknown_and_said(tmp_path: Path) -> None:
    """A tokenizer that nobody knows, or a folder that a pod has: the advice says so and counts no epochs."""
    for name, tokenizer in ((str(tmp_path / "none"), "builtin:bytes"), ("some/data", None)):
        request = with_rows(
            Request.of(model="tiny-llama", machine="p5.48xlarge", epochs=3), dataset_settings(name, tokenizer, None)
        )
        advice = answer(request, ())
        assert request.rows is None and advice.total_seconds is None
        assert any("were not measured" in line for line in advice.unknowns), advice.unknowns


@pytest.mark.long
@each_row("held", [None, "", '{"question": "q", "answer": "a"}\n{oops\n'])
def test_a_file_that_is_not_there_or_holds_no_rows_is_an_error_that_names_it(tmp_path: Path, held: str | None) -> None:
    file = tmp_path / "rows.jsonl"
    if held is not None:
        file.write_text(held, encoding="utf-8")
    with pytest.raises(InputError, match="row"):
        with_rows(Request.of(model="tiny-llama"), dataset_settings(str(file), "builtin:bytes", None))


@pytest.mark.long
def test_rows_of_a_file_are_counted_without_a_tokenizer(rows: Path, tmp_path: Path) -> None:
    asked = dataset_settings(str(rows), str(tmp_path / "no-tokenizer"), None)
    request = with_rows(Request.of(model="tiny-llama", machine="p5.48xlarge", epochs=2, global_batch=64), asked)
    assert request.rows == 5000 and "were not measured" in request.unmeasured
    assert answer(request, ()).total_steps == 2 * (5000 // 64)


def test_tokens_beyond_a_models_positions_are_said() -> None:
    assert any("beyond Llama-3.1-8B's 131072 positions" in line for line in ask(sequence_length=200_000).unknowns)
    assert not any("positions" in line for line in ask(sequence_length=131_072).unknowns)


def test_a_part_of_a_data_set_is_named_after_a_colon() -> None:
    assert dataset_settings("openai/gsm8k:main", None, "Llama-3.1-8B") == {
        "dataset_name": "openai/gsm8k", "dataset_config": "main",
    }  # fmt: skip
    assert dataset_settings("openai/gsm8k", "a/b", None) == {"dataset_name": "openai/gsm8k", "tokenizer_name": "a/b"}


def test_epochs_of_nobody_knows_how_many_rows_are_refused() -> None:
    with pytest.raises(RequestError, match="epochs: how many rows"):
        ask(epochs=3)
    assert ask(epochs=3, rows=6400).total_steps == 300


def test_money_is_node_hours_times_the_users_price(tmp_path: Path) -> None:
    advice = ask(steps=1000, price="90")
    assert advice.total_cost is not None and advice.total_seconds is not None
    for end in ("low", "mid", "high"):
        assert getattr(advice.total_cost, end) == pytest.approx(getattr(advice.total_seconds, end) / 3600 * 2 * 90)
    file = tmp_path / "prices.yaml"
    file.write_text("p5: 90\np4d.24xlarge: 30.5\n", encoding="utf-8")
    assert prices_of(str(file), files=True) == {"p5.48xlarge": 90.0, "p4d.24xlarge": 30.5}
    assert ask(steps=1000, price=str(file)).total_cost == advice.total_cost
    assert ask(steps=1000).total_cost is None, "no price is shipped"


@each_row(
    ("text", "said"),
    [("-1", "must be from 0"), ("nan", "must be from 0"), ("none.yaml", "no such file"),
     ("p5: cheap\n", "must be a number"), ("p5s: 3\n", "not in the catalogue")],
)  # fmt: skip
def test_a_wrong_price_is_named(text: str, said: str, tmp_path: Path) -> None:
    if "\n" in text:
        (tmp_path / "prices.yaml").write_text(text, encoding="utf-8")
        text = str(tmp_path / "prices.yaml")
    with pytest.raises(RequestError, match=said):
        prices_of(text, files=True)
    with pytest.raises(RequestError):
        prices_of("/etc/hostname", files=False)


def test_mfu_and_tokens_per_gpu_follow_from_the_step() -> None:
    """Dense attention's share included; full training of 8 billion weights is 6 FLOPs each but for the embedding."""
    chosen = ask().chosen
    assert chosen is not None and chosen.forecast.mfu is not None
    each = chosen.forecast.tokens_per_second_per_rank
    assert each == pytest.approx(chosen.forecast.tokens_per_second / 16)
    multiplied = 8.03e9 - 128256 * 4096
    flops = 6 * multiplied + 6 * 32 * 4096 * 2048
    assert chosen.forecast.mfu == pytest.approx(flops * each / 989.5e12, rel=0.01)
    assert 0.2 < chosen.forecast.mfu < 0.6


@pytest.mark.long
def test_launch_plans_with_the_rows_of_the_jobs_own_data(rows: Path, tmp_path: Path) -> None:
    """A long and a short data set under the same settings: other steps, seconds and hours, before anything starts."""
    config = tmp_path / "job.yaml"
    config.write_text(
        f"model_name_or_path: meta-llama/Llama-3.1-8B\ntokenizer_name: 'builtin:bytes'\ndataset_name: {rows}\n"
        "num_train_epochs: 2\n",
        encoding="utf-8",
    )
    asked = ["--machine", "p5.48xlarge", "--config", str(config), "--global-batch", "50", "--dry-run", "-o", "json"]
    done = CliRunner().invoke(launch, asked)
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert "for 200 steps" in done.stderr, done.stderr
    whole = CliRunner().invoke(launch, [*asked, "--set", f"dataset_name={tmp_path / 'none.jsonl'}"])
    assert "were not measured (not on this host)" in whole.stderr
    step, full = (each["forecast"]["step_seconds"]["mid"] for each in (plan, json.loads(whole.stdout)))
    assert step < 0.5 * full

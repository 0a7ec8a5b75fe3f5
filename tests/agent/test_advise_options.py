"""What a run is changes its forecast: precision, padding, optimizer, budget; wrong values are named."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from rigs.recorded import H100, snapshot
from rigs.tables import each_row

from agent.advice.advise import answer, of_cluster
from agent.advice.request import Request, cluster_of
from agent.base.inputs import RequestError
from agent.cli.recommend import recommend
from contracts import question
from planner.advice import Recommendation
from planner.forecast.specs import TrainSpec
from topology.build import build


def advice(**more: Any) -> Recommendation:
    given = {"machine": "p5.48xlarge", "model": "Llama-3.1-8B", "method": "full", "global_batch": 64, **more}
    return answer(Request.of(**given), ())


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


def test_a_measured_step_is_compared_as_it_took() -> None:
    """The layout that was measured takes what it took, and the other as many times as long as by their forecasts."""
    words = ["--machine", "p5.48xlarge", "--model", "Llama-3.1-8B", "--global-batch", "64", "-o", "json"]
    both = ["--compare", "dp_shard=8,micro_batch=2", "dp_shard=4,tp=2,micro_batch=2"]

    def steps(*more: str) -> list[float]:
        done = CliRunner().invoke(recommend, [*words, *both, *more])
        assert done.exit_code == 0, done.output
        return [one["forecast"]["step_seconds"]["mid"] for one in json.loads(done.output)["layouts"]]

    before, after = steps(), steps("--measured-step", "dp_shard=8,micro_batch=2", "12.5")
    assert after[0] == pytest.approx(12.5)
    assert after[1] / after[0] == pytest.approx(before[1] / before[0])


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
    """As many whole steps as the forecast has room for."""
    found = advice(hours=2.0)
    assert found.chosen is not None and found.total_steps is not None
    step_seconds = found.chosen.forecast.step_seconds.mid
    assert found.total_steps * step_seconds <= 7200 < (found.total_steps + 1) * step_seconds


def test_ranks_per_node_use_so_many_gpus_of_each_node() -> None:
    """Four nodes with one rank each are four ranks, over the one NIC that is nearest to the GPU that computes."""
    whole, part = advice(machine="p4d.24xlarge", nodes=4), advice(machine="p4d.24xlarge", nodes=4, ranks_per_node=1)
    assert whole.chosen is not None and part.chosen is not None
    assert (whole.chosen.layout.world_size, part.chosen.layout.world_size) == (32, 4)
    assert cluster_of(Request.of(machine="p4d.24xlarge", nodes=4), (), 1).inter_node_bytes_per_second == 100e9 / 8


@each_row("name", [H100, "titan-rtx-2x-nv2", "sick-h100-gpu-lost", "cpu-only-vm"])
def test_ranks_per_node_hold_on_machines_with_any_number_of_gpus(name: str) -> None:
    """One, half of the usable GPUs and all are answered for so many ranks; one more is refused with what is allowed."""
    found = snapshot(name)
    usable = sum(gpu.usable for gpu in build(found).gpus)
    for ranks in sorted({1, usable // 2, usable} - {0}) if usable else ():
        advised = answer(Request.of(model="tiny", nodes=2, ranks_per_node=ranks), (found,))
        assert advised.chosen is not None and advised.chosen.layout.world_size == 2 * ranks
    if usable:
        with pytest.raises(RequestError, match=f"must be from 1 to {usable}"):
            answer(Request.of(model="tiny", ranks_per_node=usable + 1), (found,))


@each_row(("nodes", "networked"), [(1, False), (None, True), (2, True)])
def test_one_node_that_was_requested_gets_no_network_settings(nodes: int | None, networked: bool) -> None:
    """`--nodes 1` says that the job stays there; without the option it may come to span more."""
    efa = [snapshot("aws-p4d-8xA100-4efa")]
    request = Request.of(nodes=nodes)
    found = of_cluster(request, cluster_of(request, efa), efa)
    topics = {each.topic for each in found.notes} | {each.name for each in found.settings}
    assert ("NCCL_IB_HCA" in topics) is networked
    assert ("NCCL_NET" in topics) is networked


def test_a_sweep_goes_over_a_network_of_ones_own() -> None:
    """Several nodes over 10 Gb/s of TCP take longer than over what the machine has; one node has no network."""
    asked = ["--machine", "p5.48xlarge", "--model", "Llama-3.1-8B", "--sweep", "nodes=1,2", "-o", "json"]
    found = json.loads(CliRunner().invoke(recommend, [*asked, "--network", "10G", "--tcp"]).output)
    assert [(one["nodes"], one["network"]) for one in found] == [(1, "-"), (2, "catalogue"), (2, "10G tcp")]
    _, own, slow = (one["seconds"]["mid"] for one in found)
    assert slow > 1.05 * own
    half = json.loads(CliRunner().invoke(recommend, [*asked, "--ranks-per-node", "4"]).output)
    assert [one["ranks"] for one in half] == [4, 8]


def test_a_sweep_over_machines_as_a_table_as_json_and_as_a_picture(tmp_path: Path) -> None:
    """From the shell: machines by name or by their prices; a budget decides how many tokens."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("p5.48xlarge: 98\n2xa40-roce: 4\n", encoding="utf-8")
    asked = ["--model", "Llama-3.1-8B", "--sweep", "nodes=1,4", "--price", str(prices)]
    drawn = tmp_path / "sweep.svg"
    shown = CliRunner().invoke(recommend, [*asked, "--plot", str(drawn)])
    assert shown.exit_code == 0, shown.output
    assert "✓" in shown.output and "cost" in shown.output and drawn.read_text(encoding="utf-8").startswith("<svg")
    said = json.loads(CliRunner().invoke(recommend, [*asked, "-o", "json", "--tokens", "2000000000"]).output)
    assert [(p["machine"], p["nodes"]) for p in said] == [(m, n) for m in ("p5.48xlarge", "2xa40-roce") for n in (1, 4)]
    assert said[0]["seconds"]["mid"] * said[0]["tokens_per_second"] == pytest.approx(2e9)


def test_the_question_is_declared_once() -> None:
    """Each row of question.toml is a member of the question, an option of the verb and a field of HTTP's model."""
    members = {one.name for kind in (Request, TrainSpec) for one in fields(kind)} | {"lengths"}
    assert not question.fields().keys() - members
    options = recommend.make_context("recommend", []).params
    assert not question.fields().keys() - options.keys()
    asked = question.model()()
    differ = {name for name in question.fields() if getattr(asked, name) != options[name]}
    assert not differ, "the defaults of HTTP are those of the command line"
    assert Request.of(**dict(asked)) == Request()
    for wrong in ({"modle": "x"}, {"nodes": 0}, {"method": "magic"}, {"hours": 0}, {"model": "x" * 201}):
        with pytest.raises(ValidationError):
            question.model()(**wrong)

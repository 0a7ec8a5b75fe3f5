"""Advice on a run: what changes its forecast, length and cost, the rows of its data, and offers where nothing fits."""

import json
import math
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError
from rigs.command import topoflight
from rigs.recorded import H100, path_of, snapshot
from rigs.tables import each_row, rows_of

from agent.advice.advise import advise, advise_cluster
from agent.advice.job_plan import with_rows
from agent.advice.request import Request, read_prices
from agent.base import options as base_options
from agent.base.options import InputError, RequestError
from agent.cli.recommend import recommend
from planner.advice import Recommendation
from planner.forecast.specs import TrainSpec, mean_length
from topology.build import build


def ask(**more) -> Recommendation:
    given = {"machine": "p5.48xlarge", "model": "Llama-3.1-8B", "method": "full", "global_batch": 64}
    return advise(Request.of(**{**given, **more}), ())


def step(**more) -> float:
    return ask(**more).chosen.forecast.step_seconds.mid


def shown(*words: object, code: int = 0):
    """The document that `recommend` prints as JSON."""
    done = topoflight("recommend", *words, "-o", "json")
    assert done.exit_code == code, done.output
    return json.JSONDecoder().raw_decode(done.stdout)[0]


def test_lora_in_fp8_is_forecast_as_nemo_runs_it() -> None:
    """The engine that has fp8 also has adapters; another engine's refusal names it, and its arguments have none."""
    lora = {"engine": "megatron", "method": "lora"}
    assert step(precision="fp8", **lora) < step(precision="bf16", **lora)
    assert step(precision="fp8", **lora) < step(precision="fp8", engine="megatron", method="full")
    words = ("recommend", "--machine", "p5.48xlarge", "--model", "Llama-3.1-8B", "--precision", "fp8")
    refused = topoflight(*words)
    assert refused.exit_code == 3 and "With --engine megatron a layout fits" in refused.stdout
    exported = topoflight(*words, "--engine", "megatron", "-o", "megatron")
    assert exported.exit_code == 2 and "lora: it has no adapters (Megatron-Bridge has)" in exported.stderr
    other = topoflight(*words[:-2], "-o", "megatron")  # the layout of another engine: what makes one that is exported
    assert other.exit_code == 2 and "Add --engine megatron --method full to get" in other.stderr


def test_a_measured_step_is_compared_as_it_took() -> None:
    """The layout that was measured takes what it took, and the other as many times as long as by their forecasts."""
    words = "--machine p5.48xlarge --model Llama-3.1-8B --global-batch 64 --compare dp_shard=8,micro_batch=2"

    def steps(*more: str) -> list[float]:
        found = shown(*words.split(), "dp_shard=4,tp=2,micro_batch=2", *more)
        return [one["forecast"]["step_seconds"]["mid"] for one in found["layouts"]]

    before, after = steps(), steps("--measured-step", "dp_shard=8,micro_batch=2", "12.5")
    assert after[0] == pytest.approx(12.5)
    assert after[1] / after[0] == pytest.approx(before[1] / before[0])


def test_two_layouts_are_compared_by_their_intervals() -> None:
    """Both ends of each step's interval; steps that differ by less than the error of their ratio are alike.

    That error is smaller than the intervals, because errors that both forecasts have in common cancel.
    """
    words = ("recommend", "--machine", "p5.48xlarge", "--model", "Llama-3.1-8B", "--global-batch", "64", "--compare")
    rows = (("tp=8", False, False), ("dp_shard=4,tp=2,micro_batch=2", True, False), ("dp_replicate=8", True, True))
    for second, overlap, alike in rows:
        found = shown(*words[1:], "dp_shard=8,micro_batch=2", second)
        ends = [one["forecast"]["step_seconds"] for one in found["layouts"]]
        assert (max(one["low"] for one in ends) <= min(one["high"] for one in ends)) is overlap, second
        text = topoflight(*words, "dp_shard=8,micro_batch=2", second).stdout
        row = next(line for line in text.splitlines() if line.startswith("step "))
        assert row.count(" to ") == 2 and ("? not distinguishable" in text) is alike, text


def test_an_8bit_optimizer_needs_less_memory(tmp_path: Path) -> None:
    """By the states it keeps; a file of settings names it as transformers does."""
    file, sizes = tmp_path / "job.yaml", []
    for name in ("adamw_bnb_8bit", "adamw_torch", "[adamw_bnb_8bit]"):
        file.write_text(f"{{model_name_or_path: meta-llama/Llama-3.1-8B, optim: {name}}}")
        found = shown("--config", file, "--engine", "trl", "--machine", "p5.48xlarge")
        sizes += [part["value"] for part in found["chosen"]["forecast"]["memory_parts"] if part["name"] == "optimizer"]
    assert sizes[0] < sizes[1] == sizes[2], "what is no name of an optimizer is forecast as AdamW"


def test_a_budget_gives_the_length_of_the_whole_run() -> None:
    """In steps; in tokens, which are as many steps as they need; in hours: as many whole steps as have room."""
    by_steps = ask(steps=1000)
    assert by_steps.total_steps == 1000
    step_seconds = by_steps.chosen.forecast.step_seconds.mid
    assert by_steps.total_seconds.mid == pytest.approx(1000 * step_seconds)
    assert [ask(tokens=64 * 2048 * steps).total_steps for steps in (3, 7, 10)] == [3, 7, 10]
    assert ask().total_seconds is None
    steps = ask(hours=2.0).total_steps
    assert steps is not None and steps * step_seconds <= 7200 < (steps + 1) * step_seconds


@each_row("name", [H100, "titan-rtx-2x-nv2", "sick-h100-gpu-lost", "cpu-only-vm"])
def test_ranks_per_node_hold_on_machines_with_any_number_of_gpus(name: str) -> None:
    """One, half of the usable GPUs and all are answered for so many ranks; one more is refused with what is allowed."""
    found = snapshot(name)
    usable = sum(gpu.usable for gpu in build(found).gpus)
    for ranks in sorted({1, usable // 2, usable} - {0}) if usable else ():
        advised = advise(Request.of(model="tiny", nodes=2, ranks_per_node=ranks), (found,))
        assert advised.chosen.layout.world_size == 2 * ranks
    if usable:
        with pytest.raises(RequestError, match=f"must be from 1 to {usable}"):
            advise(Request.of(model="tiny", ranks_per_node=usable + 1), (found,))
    one = Request.of(machine="p4d.24xlarge", nodes=4, ranks_per_node=1).cluster(())
    assert one.inter_node_bytes_per_second == 100e9 / 8, "the one NIC that is nearest to the GPU that computes"


@each_row(("nodes", "networked"), [(1, False), (None, True), (2, True)])
def test_one_node_that_was_requested_gets_no_network_settings(nodes: int | None, networked: bool) -> None:
    """`--nodes 1` says that the job stays there; without the option it may come to span more."""
    efa = [snapshot("aws-p4d-8xA100-4efa")]
    request = Request.of(nodes=nodes)
    found = advise_cluster(request, request.cluster(efa), efa)
    topics = {each.topic for each in found.notes} | {each.name for each in found.settings}
    assert ("NCCL_IB_HCA" in topics) is networked
    assert ("NCCL_NET" in topics) is networked


def test_a_sweep_goes_over_a_network_of_the_user() -> None:
    """Several nodes over 10 Gb/s of TCP take longer than over what the machine has; one node has no network."""
    asked = ["--machine", "p5.48xlarge", "--model", "Llama-3.1-8B", "--sweep", "nodes=1,2"]
    found = shown(*asked, "--network", "10G", "--tcp")
    assert [(one["nodes"], one["network"]) for one in found] == [(1, "-"), (2, "catalogue"), (2, "10G tcp")]
    _, own, slow = (one["seconds"]["mid"] for one in found)
    assert slow > 1.05 * own
    half = shown(*asked, "--ranks-per-node", "4")
    assert [one["ranks"] for one in half] == [4, 8]


def test_a_sweep_over_machines_as_a_table_and_as_json(tmp_path: Path) -> None:
    """From the shell: machines by name or by their prices; a budget decides how many tokens."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("p5.48xlarge: 98\n2xa40-roce: 4\n", encoding="utf-8")
    asked = ("--model", "Llama-3.1-8B", "--sweep", "nodes=1,4", "--price", prices)
    table = topoflight("recommend", *asked)
    heads = "machine nodes layout tokens/s time interval GPU-hours cost"
    assert table.exit_code == 0 and heads in " ".join(table.output.split()), "80 columns hold a table"
    said = shown(*asked, "--tokens", "2B")
    assert [(p["machine"], p["nodes"]) for p in said] == [(m, n) for m in ("p5.48xlarge", "2xa40-roce") for n in (1, 4)]
    assert said[0]["seconds"]["mid"] * said[0]["tokens_per_second"] == pytest.approx(2e9)


def test_the_question_is_declared_once() -> None:
    """Each row of question.toml is a member of the question, an option of the verb and a field of HTTP's model."""
    members = {one.name for kind in (Request, TrainSpec) for one in fields(kind)} | {"lengths"}
    unused = base_options.FIELDS.keys() - members
    assert not unused, f"{unused}: add a member to Request (agent/advice/request.py) or to TrainSpec"
    options = recommend.make_context("recommend", []).params | {"transport": None}  # by --rdma and --tcp
    missing = base_options.FIELDS.keys() - options.keys()
    assert not missing, f"{missing}: add a table to agent/base/verbs/recommend.toml"
    asked = base_options.question_model()()
    differ = {name for name in base_options.FIELDS if getattr(asked, name) != options[name]}
    assert not differ, "the defaults of HTTP are those of the command line"
    assert Request.of(**dict(asked)) == Request()
    for wrong in ({"modle": "x"}, {"nodes": 0}, {"method": "magic"}, {"hours": 0}, {"model": "x" * 201}):
        with pytest.raises(ValidationError):
            base_options.question_model()(**wrong)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5,000 rows: four short ones to each long one."""
    path: Path = tmp_path_factory.mktemp("data") / "train.jsonl"
    text = [{"question": "q" * (200 if i % 5 == 0 else 20), "answer": "a"} for i in range(5000)]
    path.write_text("\n".join(map(json.dumps, text)), encoding="utf-8")
    return path


def of_rows(data: object, tokenizer: object, model: str = "tiny-llama", **more) -> Request:
    """A request with what is known of a data set's rows."""
    found = {"dataset_name": str(data), **({"tokenizer_name": str(tokenizer)} if tokenizer else {})}
    return with_rows(Request.of(model=model, **more), found)


@pytest.mark.long
def test_the_rows_of_a_file_are_counted_and_measured_with_the_tokenizer(rows: Path) -> None:
    """By the job's own reader and template: 180 characters more are 180 bytes more, in a fifth of the rows."""
    request = of_rows(rows, "builtin:bytes", model="Llama-3.1-8B")
    assert request.rows == 5000 and request.unmeasured == ""
    (short, many), (long, few) = request.train.length_histogram
    assert (many, few) == (2000, 500) and long - short == 180
    lengths = ",".join(f"{tokens}:{count}" for tokens, count in request.train.length_histogram)
    forecast, blind = (ask(nodes=2, epochs=2, lengths=told, rows=5000) for told in (lengths, None))
    assert forecast.total_steps == blind.total_steps == 2 * math.ceil(5000 / 64)
    assumed = [any("Each row is assumed to have 2048 tokens" in one for one in of.unknowns) for of in (forecast, blind)]
    assert assumed == [False, True]
    assert forecast.total_seconds.mid < 0.3 * blind.total_seconds.mid
    mean = mean_length(request.train.length_histogram, 2048)
    chosen = forecast.chosen.forecast
    assert chosen.tokens_per_second * chosen.step_seconds.mid == pytest.approx(64 * mean)


def test_packed_rows_take_as_many_steps_as_their_tokens_fill() -> None:
    packed = ask(nodes=2, epochs=1, lengths="512:64000", packing=True)
    assert packed.total_steps == 64000 * 512 // 2048 // 64
    assert ask(nodes=2, epochs=3, rows=6400).total_steps == 300


def test_what_cannot_be_measured_is_unknown_and_said(tmp_path: Path) -> None:
    """A tokenizer that nobody knows, or a folder that a pod has: the advice says so and counts no epochs."""
    for name, tokenizer in ((str(tmp_path / "none"), "builtin:bytes"), ("some/data", None)):
        request = of_rows(name, tokenizer, machine="p5.48xlarge", epochs=3)
        advice = advise(request, ())
        assert request.rows is None and advice.total_seconds is None
        assert any("were not measured" in line for line in advice.unknowns), advice.unknowns


@pytest.mark.long
@each_row("held", ["", '{"question": "q", "answer": "a"}\n{oops\n'])
def test_a_file_that_holds_no_rows_is_an_error_that_names_it(tmp_path: Path, held: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(held, encoding="utf-8")
    with pytest.raises(InputError, match="row"):
        of_rows(file, "builtin:bytes")


@pytest.mark.long
def test_rows_of_a_file_are_counted_without_a_tokenizer(rows: Path, tmp_path: Path) -> None:
    request = of_rows(rows, tmp_path / "no-tokenizer", machine="p5.48xlarge", epochs=2, global_batch=64)
    assert request.rows == 5000 and "were not measured" in request.unmeasured
    assert advise(request, ()).total_steps == 2 * math.ceil(5000 / 64)


def test_tokens_beyond_a_models_positions_are_said() -> None:
    beyond = ask(nodes=2, sequence_length=200_000).unknowns
    assert any("beyond Llama-3.1-8B's 131072 positions" in line for line in beyond)
    assert not any("positions" in line for line in ask(nodes=2, sequence_length=131_072).unknowns)


def test_money_is_node_hours_times_the_users_price(tmp_path: Path) -> None:
    advice = ask(nodes=2, steps=1000, price="90")
    for end in ("low", "mid", "high"):
        assert getattr(advice.total_cost, end) == pytest.approx(getattr(advice.total_seconds, end) / 3600 * 2 * 90)
    file = tmp_path / "prices.yaml"
    file.write_text("p5: 90\np4d.24xlarge: 30.5\n", encoding="utf-8")
    assert read_prices(str(file), files=True) == {"p5.48xlarge": 90.0, "p4d.24xlarge": 30.5}
    assert ask(nodes=2, steps=1000, price=str(file)).total_cost == advice.total_cost
    assert ask(nodes=2, steps=1000).total_cost is None, "no price is shipped"
    with pytest.raises(RequestError):
        read_prices("/etc/hostname", files=False)


def test_mfu_and_tokens_per_gpu_follow_from_the_step() -> None:
    """Dense attention's share included; full training of 8 billion weights is 6 FLOPs each but for the embedding."""
    chosen = ask(nodes=2).chosen.forecast
    each = chosen.tokens_per_second_per_rank
    assert each == pytest.approx(chosen.tokens_per_second / 16) and chosen.mfu is not None
    multiplied = 8.03e9 - 128256 * 4096
    flops = 6 * multiplied + 6 * 32 * 4096 * 2048
    assert chosen.mfu == pytest.approx(flops * each / 989.5e12, rel=0.01)
    assert 0.2 < chosen.mfu < 0.6


@pytest.mark.long
def test_launch_plans_with_the_rows_of_the_jobs_own_data(rows: Path, tmp_path: Path) -> None:
    """A long and a short data set under the same settings: other steps, seconds and hours, before anything starts."""
    config = tmp_path / "job.yaml"
    own = {"tokenizer_name": "builtin:bytes", "dataset_name": str(rows), "num_train_epochs": 2}
    config.write_text(json.dumps({"model_name_or_path": "meta-llama/Llama-3.1-8B", **own}))
    asked = f"launch --machine p5.48xlarge --config {config} --global-batch 50 --dry-run -o json".split()
    done = topoflight(*asked)
    assert done.exit_code == 0 and "for 200 steps" in done.stderr, done.output
    whole = topoflight(*asked, "--set", f"dataset_name={tmp_path / 'none.jsonl'}")
    assert "were not measured (not on this host)" in whole.stderr
    step, full = (json.loads(each.stdout)["forecast"]["step_seconds"]["mid"] for each in (done, whole))
    assert step < 0.5 * full


@each_row("words", lambda: [words.format(A40=path_of("r760xa-2xA40-bf3")) for words in rows_of(__file__)("misfits")()])
def test_what_is_offered_fits(words: str) -> None:
    """The command with the changes of an offer exits with 0."""
    document = shown(*shlex.split(words), code=3)
    assert document["chosen"] is None
    offers = document["helps_most"]
    assert offers
    for offer in offers:
        more = offer.partition(" a layout fits (")[0].removeprefix("With ")
        assert shown(*shlex.split(f"{words} {more}"))["chosen"] is not None, offer


def test_a_model_that_the_job_does_not_train_is_offered_an_engine_that_does() -> None:
    """No shorter sequence and no other method would help."""
    advice = advise(Request.of(machine="dgx-h100", model="gpt-oss-20b"), ())
    assert advice.chosen is None
    assert [line.split(" a layout")[0] for line in advice.helps_most] == ["With --engine trl"]


def test_what_is_set_can_be_pasted_and_a_long_step_is_written_out() -> None:
    """A value with a blank is quoted; 3,063 s are no 3.06e+03."""
    asked = "--machine p4d.24xlarge --nodes 2 --model Llama-3.1-70B --sequence-length 8192 --global-batch=2048"
    said = topoflight("recommend", *asked.split(), COLUMNS="100").output
    assert "NCCL_NET='AWS Libfabric'" in said
    assert "e+0" not in said


def test_gpus_that_are_not_judged_are_no_misfit() -> None:
    """Nothing was forecast of them, so nothing did not fit."""
    result = topoflight("recommend", "--machine", "mi300x", "--model", "Llama-3.1-8B")
    assert result.exit_code == 3 and result.stdout.startswith("? No layout: AMD GPUs are not supported\n")
    assert "every layout   MI300X" in result.stdout and "is forecast" in result.stderr and "fits" not in result.output


def test_no_network_is_offered_that_nobody_sells() -> None:
    """Four times 60 Mb/s is none."""
    words = "--machine 2xa40-roce --nodes 2 --network 60M --model Llama-3.1-8B --sequence-length 1024 --global-batch 64"
    document = shown(*words.split())
    assert any("a network of 1.25 GB/s per node" in line for line in document["helps_most"])


@each_row(("model", "words"), rows_of(__file__)("split_sequences"))
def test_auto_takes_trl_s_trainer_where_only_split_sequences_fit(tmp_path: Path, model: str, words: list[str]) -> None:
    """Long rows on two GPUs: TRL's trainer has context parallelism, and the built-in one has not."""
    file = tmp_path / "job.yaml"
    job = {"dataset_name": "own/x", "use_peft": True, "max_length": 131072, "max_steps": 10}
    file.write_text(json.dumps({"model_name_or_path": model, **job}))
    done = topoflight("recommend", "--config", str(file), "--lengths", "131072:64", "--machine", "2xa40-roce")
    assert [word for word in words if word not in done.stdout + done.stderr] == []

"""A job on this host: the gate before it, its plan, and the record of a job that failed or was killed."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rigs.command import topoflight
from rigs.forking import forking_environment
from rigs.recorded import path_of, snapshot, view
from rigs.results import RUN
from rigs.serving import Asked, answering
from rigs.tables import each_row, rows_of

from agent.advice.advise import EMBEDDED_MODEL, advise
from agent.advice.job_plan import build_job_plan, build_job_request, explain_gdrdma, explain_untrainable
from agent.advice.request import Request
from agent.base.options import RequestError
from agent.checks.baseline import Baseline
from agent.checks.view import build_view
from agent.cli.launch import _require_pass
from agent.http.server import read_record
from agent.jobs.launch import FinishedJob, finish_record
from agent.jobs.preflight import name_blocking_failures
from contracts import run_record
from contracts.job_config import dump_plan, read_config, read_plan
from contracts.run_record import RunRecord
from finetune import channels
from planner.forecast.specs import TrainSpec
from topology.build import build

rows = rows_of(__file__)

SICK = "sick-h100-dead-hca"
DATA = ("dataset_name=openai/gsm8k",)


def test_a_failed_check_stops_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3, what failed, and the option that launches in spite of it."""
    with pytest.raises(SystemExit) as ended:
        _require_pass(build_view((snapshot(SICK),)).checks, ())
    errors = capsys.readouterr().err
    assert ended.value.code == 3
    assert "fail topology.gpu_nic.down" in errors and "not launched: " in errors and "--no-preflight" in errors


def test_a_required_check_that_is_unknown_stops_it_and_others_do_not(tmp_path: Path) -> None:
    """This host has no RDMA device; nothing is started, so nothing is written."""
    words = ["--require", "rdma.port.down", "--output", tmp_path / "out"]
    done = topoflight("launch", *words)
    if list(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this host has RDMA devices, so the check is not unknown")
    assert done.exit_code == 5, done.output
    assert "unknown rdma.port.down" in done.stderr and not (tmp_path / "out").exists()


def test_preflight_trains_only_where_no_check_before_failed() -> None:
    """What failed before the run stops it; --skip of that check and --force do not, nor does what is unknown."""
    checks, options = view(SICK).checks, {"skip": (), "force": False}
    failed = {check.code for check in checks if check.status == "fail"}
    assert failed
    assert all(code in name_blocking_failures(checks, Baseline(), **options) for code in failed)
    assert name_blocking_failures(checks, Baseline(), skip=(), force=True) == ""
    assert name_blocking_failures(checks, Baseline(), skip=tuple(failed), force=False) == ""
    everywhere_the_same = {(check.code, check.node, check.subject): check.status for check in checks}
    assert name_blocking_failures(checks, Baseline(statuses=everywhere_the_same), **options) == ""


def launched(folder: Path, code: int, log: str = "") -> FinishedJob:
    """A job that has ended with this code and these last lines."""
    return FinishedJob(exit_code=code, output=folder / "job.log", last_lines=tuple(log.splitlines()))


@each_row(("written", "expected"), rows("failed_job"))
def test_a_failed_job_has_the_record_of_this_start(tmp_path, written, expected):
    """The record of an earlier start does not count. The launcher completes the record of a job that was killed."""
    path = tmp_path / "run.json"
    code = written["exit_code"] or -9
    assert isinstance(code, int)
    done = launched(tmp_path, code)
    assert finish_record(path, run_record.read_since(path, 0.0), done) is None
    path.write_text(json.dumps({"schema_version": 1, **written}))
    assert finish_record(path, run_record.read_since(path, path.stat().st_mtime + 1), done) is None
    record = finish_record(path, run_record.read_since(path, 0.0), done)
    assert record is not None and {name: getattr(record, name) for name in expected} == expected


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_a_launch_that_fails_leaves_its_run_to_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is not finite ends with 65 for the job and 3 for the verb; the agent reads this folder."""
    monkeypatch.setenv("TOPOFLIGHT_STATE", str(tmp_path))
    monkeypatch.setattr(sys, "executable", forking_environment())
    words = ["--no-preflight", "--set", "learning_rate=1e29", "--set", "max_steps=5", "--set", "max_grad_norm=0"]
    done = topoflight("launch", "--output", tmp_path / "out", *words)
    assert done.exit_code == 3, done.output
    (stored,) = (tmp_path / "runs").glob("*.json")
    record = json.loads(stored.read_text())
    assert (record["exit_code"], record["status"]) == (65, "failed"), record["reason"]


@pytest.mark.ranks
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_with_measure_the_gate_measures_and_a_failed_measurement_stops_the_launch(tmp_path, monkeypatch):
    """Real ranks, of which one dies in a way that no scan can see."""
    monkeypatch.setenv("TOPOFLIGHT_STATE", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ.get('RANK') == '1' and os._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = topoflight("launch", "--measure", "--output", tmp_path / "out")
    assert done.exit_code == 3, done.output
    assert "fail bench.run.incomplete" in done.stderr and "not launched: " in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_job_trains_the_model_that_was_named() -> None:
    """Its weights, its data set and its adapters are in the job's YAML; the embedded job has its settings itself."""
    asked = Request.of(machine="dgx-h100", model="Llama-3.1-8B", global_batch=64)
    advice = advise(asked, ())
    config = build_job_plan(advice, Request(overrides=DATA)).config
    assert config.model_name_or_path == "meta-llama/Llama-3.1-8B"
    assert (config.max_length, config.lora_r) == (asked.train.sequence_length, asked.train.lora_rank)
    made_up = replace(advice, model=replace(advice.model, name="house-model"))
    assert explain_untrainable(advice, {}).startswith("dataset_name: no data set is named")
    assert explain_untrainable(made_up, {"dataset_name": "x"}).startswith("model house-model: no source of its weights")
    assert explain_untrainable(made_up, {"dataset_name": "x", "model_name_or_path": "/models/house"}) == ""
    assert explain_untrainable(advice, {"dataset_name": "x"}) == ""
    assert explain_untrainable(replace(advice, model=replace(advice.model, name=EMBEDDED_MODEL)), {}) == ""
    assert explain_untrainable(replace(advice, model=None), {}) == ""
    with pytest.raises(RequestError, match="dataset_name: no data set is named"):
        build_job_plan(advice, Request())
    advice = advise(Request.of(model="tiny-llama", machine="dgx-h100", global_batch=16), ())
    assert build_job_plan(advice, Request()).config == read_config(None)[0]


def test_the_settings_name_the_model_that_is_planned(tmp_path: Path) -> None:
    """--config and --set decide what is trained; a model of the request replaces theirs, nothing else is guessed."""
    job = tmp_path / "job.yaml"
    job.write_text("model_name_or_path: meta-llama/Llama-3.1-8B\nuse_peft: true\nlora_r: 32\nmax_seq_length: 1024\n")
    asked = build_job_request(Request.of(config=job).with_settings("packing=true", "load_in_4bit=true"))
    train = asked.train
    assert (asked.model, train.method, train.lora_rank) == ("meta-llama/Llama-3.1-8B", "qlora", 32)
    assert (train.sequence_length, train.packing) == (1024, True)
    assert build_job_request(Request.of(config=job).with_settings("use_peft=false")).train.method == "full"
    named = build_job_request(Request.of(model="GPT-2", config=job))
    assert (named.model, named.train.lora_rank, named.train.sequence_length) == ("GPT-2", 32, 1024)
    assert build_job_request(Request.of(model="GPT-2", sequence_length=512)).train.sequence_length == 512
    assert build_job_request(Request().with_settings("max_steps=4")).model == EMBEDDED_MODEL
    silent = tmp_path / "silent.yaml"
    silent.write_text("model_name_or_path: meta-llama/Llama-3.1-8B\n")
    assert build_job_request(Request.of(config=silent)).train.sequence_length == 1024  # as TRL and the job have it
    assert build_job_request(Request.of(sequence_length=512, config=silent)).train.sequence_length == 512
    assert build_job_request(Request().with_settings("model_name_or_path=random:shapes")).model == "shapes"
    advice = advise(replace(asked, machine="dgx-h100"), ())
    assert advice.train is not None and (advice.train.method, advice.train.sequence_length) == ("qlora", 1024)
    job.write_text("- a list")
    with pytest.raises(RequestError, match="must hold a mapping, holds list"):
        build_job_request(Request.of(config=job))


def test_what_a_file_leaves_out_is_planned_as_the_trainer_does_it(tmp_path: Path) -> None:
    """TRL 1.16 loads in fp32, PEFT adapts two projections of a Llama, and Liger's kernels are used only on request."""
    job = tmp_path / "job.yaml"
    job.write_text("model_name_or_path: meta-llama/Llama-3.2-1B\nuse_peft: true\ngradient_accumulation_steps: 2\n")
    ours = build_job_request(Request.of(model="Llama-3.2-1B", config=job)).train
    assert (ours.dtype, ours.lora_targets, ours.fused_cross_entropy) == ("auto", TrainSpec().lora_targets, None)
    trl = Request.of(model="Llama-3.2-1B", engine="trl", machine="dgx-h200", config=job)
    silent = build_job_request(trl)
    assert (silent.train.dtype, silent.train.lora_targets) == ("float32", ("q_proj", "v_proj"))
    assert build_job_request(trl.with_settings("dtype=bfloat16")).train.dtype == "bfloat16"
    assert build_job_request(trl.with_settings("load_in_4bit=true")).train.dtype == "auto"
    assert build_job_request(trl.with_settings("lora_target_modules=[q_proj]")).train.lora_targets == ("q_proj",)
    for request, fused in ((silent, False), (build_job_request(trl.with_settings("use_liger_kernel=false")), False),
                           (build_job_request(trl.with_settings("use_liger_kernel=true")), True)):  # fmt: skip
        chosen = advise(request, ()).chosen
        assert chosen is not None and chosen.layout.fused_cross_entropy is fused


def test_set_replaces_a_wrong_setting_of_the_file(tmp_path: Path) -> None:
    """--set replaces the file, under an older name too; what is left to fix is named with its source."""
    job = tmp_path / "job.yaml"
    job.write_text("push_to_hub: true\nmax_seq_length: 2048\n")
    request = Request.of(config=job)
    with pytest.raises(RequestError, match=r"^--config \S*job.yaml with --set: push_to_hub=True"):
        build_job_request(request.with_settings("max_length=512"))
    right = request.with_settings("push_to_hub=false", "max_length=512")
    assert build_job_request(right).train.sequence_length == 512
    with pytest.raises(RequestError, match=r"job.yaml with --set: lora_r='x'"):
        build_job_request(request.with_settings("push_to_hub=false", "lora_r=x"))


RECORD: dict = {**RUN, "status": "running", "exit_code": None, "ended_at": None}
# What torchrun (torch 2.13.0) writes where rank 1 of 2 was killed, from its last twelve lines.
TORCHRUN_LOG = Path(__file__).with_name("torchrun_killed.log").read_text(encoding="utf-8")
ENDING = "rank 1 was ended by SIGKILL; run the same command again to resume from the last checkpoint, if one was saved"


@pytest.fixture
def posted(monkeypatch):
    """What an agent is sent."""
    with answering((201, {}, b"{}")) as (url, found):
        monkeypatch.setenv("TOPOFLIGHT_AGENT", url)
        monkeypatch.delenv("TOPOFLIGHT_AGENT_TOKEN_FILE", raising=False)
        yield found


def ended(folder: Path, code: int = 1, **changed) -> RunRecord:
    """The record after torchrun has ended because a rank was struck."""
    path = folder / "run.json"
    path.write_text(json.dumps({**RECORD, **changed}))
    done = launched(folder, code, TORCHRUN_LOG)
    record = finish_record(path, run_record.read_since(path, 0.0), done)
    assert record is not None
    return record


def test_the_launcher_reports_the_end_of_a_killed_job(tmp_path: Path, posted: list[Asked]) -> None:
    """In run.json and to the agent, which accepts it; the record still has its last step."""
    record = ended(tmp_path)
    expected = {**RECORD, "status": "failed", "exit_code": 1, "reason": ENDING, "ended_at": record.ended_at}
    assert record == run_record.record_of(expected)
    assert record.ended_at
    assert run_record.read(tmp_path / "run.json") == record
    (sent,) = posted
    assert (sent.path, read_record(sent.body)) == ("/runs", record)


@each_row("status", ["complete", "failed"])
def test_the_launcher_posts_no_end_that_the_job_posted_itself(tmp_path: Path, posted: list[Asked], status: str) -> None:
    """The agent has it from the job: another record of the same start would be refused."""
    assert ended(tmp_path, status=status).status == "failed"
    assert json.loads((tmp_path / "run.json").read_text())["status"] == status
    assert posted == []


def test_an_agent_that_is_away_costs_a_line(tmp_path, monkeypatch, capfd):
    """The record is written nevertheless."""
    monkeypatch.setenv("TOPOFLIGHT_AGENT", "file:///etc/passwd")
    assert ended(tmp_path) == run_record.read(tmp_path / "run.json")
    assert "does not have this run's record: TOPOFLIGHT_AGENT must be http" in capfd.readouterr().err


def test_a_signal_of_torchrun_is_the_exit_code_that_a_shell_gives(tmp_path: Path) -> None:
    """The agent takes 0 to 255."""
    record = ended(tmp_path, -9)
    assert record.exit_code == 137 and read_record((tmp_path / "run.json").read_bytes()) == record


@each_row(("machine", "network", "evidence", "near"), rows("plan"))
def test_the_job_reads_from_the_plan_what_the_hosts_have(tmp_path, machine, network, evidence, near):
    """With the evidence; a host without RDMA, or without a GPU, promises nothing."""
    found = [snapshot(machine)]
    advice = advise(Request.of(hosts=(path_of(machine),), model="Llama-3.1-8B", nodes=2), found)
    written = build_job_plan(advice, Request(overrides=DATA), found)
    (tmp_path / "plan.json").write_text(dump_plan(written))
    plan = read_plan(tmp_path / "plan.json")
    assert plan == written
    assert plan.transport.get("network") == network
    assert evidence in plan.transport.get("evidence", "")
    assert bool(plan.transport) is (network is not None)
    planned = channels.planned_channels(plan.transport)
    assert planned.meets("Socket") is (network is None)
    assert (near is None) is (plan.transport.get("gdrdma") is None) is not bool(planned.gdrdma)
    assert near is None or near in plan.transport["gdrdma"]


def test_a_machine_that_was_not_probed_promises_no_gpudirect() -> None:
    """A catalogue's machine: whether its modules are loaded is not known."""
    advice = advise(Request.of(machine="p5.48xlarge", model="Llama-3.1-8B", nodes=2), ())
    assert "gdrdma" not in build_job_plan(advice, Request(overrides=DATA)).transport


def test_a_nearest_nic_that_is_left_out_promises_no_gpudirect() -> None:
    """By NCCL_IB_HCA, for storage say: the next one may be too far."""
    found = [snapshot()]
    all_of_them = explain_gdrdma(found)
    names = [nic for near in build(found[0]).nearest_nic for nic in near.nics]
    assert all_of_them
    assert explain_gdrdma(found, "=" + ",".join(f"{name}:1" for name in names)) == all_of_them
    assert explain_gdrdma(found, "=" + ",".join(names[1:])) == ""
    assert explain_gdrdma(found, f"^{names[0]}") == ""

"""The gate before a job on this host, and the record that stays of a job which failed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rigs.command import topoflight
from rigs.recorded import snapshot, view
from rigs.tables import each_row

from agent.advice.advise import advise
from agent.advice.job_settings import EMBEDDED_MODEL, job_request, untrainable
from agent.advice.request import Request
from agent.base.inputs import RequestError
from agent.checks.baseline import Baseline
from agent.cli.launch import _gate, launch
from agent.jobs.launch import Launched, job_plan, record_of, train
from agent.jobs.preflight import Options, _stopping
from contracts.job_config import read_config

SICK = "sick-h100-dead-hca"


def test_a_failed_check_stops_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3, what failed, and the option that launches all the same."""
    with pytest.raises(SystemExit) as ended:
        _gate([snapshot(SICK)], {"hosts": (), "require": (), "root": "/"}, {})
    told = capsys.readouterr().err
    assert ended.value.code == 3
    assert "fail topology.gpu_nic.down" in told and "not launched: " in told and "--no-preflight" in told


def test_a_required_check_that_is_unknown_stops_it_and_others_do_not(tmp_path: Path) -> None:
    """This host has no RDMA device; nothing is started, so nothing is written."""
    words = ["--require", "rdma.port.down", "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(launch, words)
    if list(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this host has RDMA devices, so the check is not unknown")
    assert done.exit_code == 5, done.output
    assert "unknown rdma.port.down" in done.stderr and not (tmp_path / "out").exists()


def test_preflight_flies_only_what_it_found_sound() -> None:
    """What failed before the run stops it; --skip of that check and --force do not, nor does what is unknown."""
    checks = view(SICK).checks
    failed = {check.code for check in checks if check.status == "fail"}
    assert failed
    assert all(code in _stopping(Options(train=True), checks, Baseline()) for code in failed)
    assert _stopping(Options(train=True, force=True), checks, Baseline()) == ""
    assert _stopping(Options(train=True, skip=tuple(failed)), checks, Baseline()) == ""
    everywhere_the_same = {(check.code, check.node, check.subject): check.status for check in checks}
    assert _stopping(Options(train=True), checks, Baseline(statuses=everywhere_the_same)) == ""


@each_row(
    ("written", "kept"),
    [
        ({"status": "mismatch", "exit_code": 76, "reason": "ddp"},
         {"status": "mismatch", "exit_code": 76, "reason": "ddp"}),
        ({"status": "running", "exit_code": None, "reason": ""},
         {"status": "failed", "exit_code": 137, "reason": "the job ended with exit code -9"}),
    ],
)  # fmt: skip
def test_the_record_of_a_failed_job_is_its_own(
    tmp_path: Path, written: dict[str, object], kept: dict[str, object]
) -> None:
    """Of this start only; the end of a job that was killed is told by what was seen."""
    path = tmp_path / "run.json"
    code = written["exit_code"] or -9
    assert isinstance(code, int)
    done = Launched(exit_code=code, seconds=1.0, output=tmp_path / "job.log", last_lines=())
    assert record_of(path, done, 0.0) is None
    path.write_text(json.dumps({"schema_version": 1, **written}))
    assert record_of(path, done, path.stat().st_mtime + 1) is None
    record = record_of(path, done, path.stat().st_mtime)
    assert record is not None and {name: getattr(record, name) for name in kept} == kept


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_a_launch_that_fails_leaves_its_run_to_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is not finite ends with 65 for the job and 3 for the verb; /runs serves what the folder holds."""
    monkeypatch.setenv("TOPOFLIGHT_STATE", str(tmp_path))
    words = ["--output", str(tmp_path / "out"), "--no-preflight", "--set", "learning_rate=1e29", "--set", "max_steps=5"]
    done = CliRunner().invoke(launch, [*words, "--set", "max_grad_norm=0"])
    assert done.exit_code == 3, done.output
    (kept,) = (tmp_path / "runs").glob("*.json")
    record = json.loads(kept.read_text())
    assert (record["exit_code"], record["status"]) == (65, "failed"), record["reason"]


@pytest.mark.ranks
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_the_gate_measures_where_it_is_told_to_and_a_failed_measurement_stops_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real ranks, of which one dies in a way that no scan can see."""
    monkeypatch.setenv("TOPOFLIGHT_STATE", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ.get('RANK') == '1' and os._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = CliRunner().invoke(launch, ["--measure", "--output", str(tmp_path / "out")])
    assert done.exit_code == 3, done.output
    assert "fail bench.run.incomplete" in done.stderr and "not launched: " in done.stderr
    assert not (tmp_path / "out").exists()
    refused = CliRunner().invoke(launch, ["--measure", "--no-preflight"])
    assert refused.exit_code == 2 and "--measure and --no-preflight cannot be combined." in refused.output


def test_a_named_model_is_the_one_that_flies(tmp_path: Path) -> None:
    """Its weights, its data set and its adapters are in the job's YAML."""
    asked = Request.of(machine="dgx-h100", model="Llama-3.1-8B", global_batch=64)
    advice = advise(asked, tuple)
    config = job_plan(advice, overrides=["dataset_name=openai/gsm8k"]).config
    assert config is not None
    assert config.model_name_or_path == "meta-llama/Llama-3.1-8B"
    assert (config.max_length, config.lora_r) == (asked.train.sequence_length, asked.train.lora_rank)
    assert advice.model is not None
    made_up = replace(advice, model=replace(advice.model, name="house-model"))
    assert untrainable(advice, {}).startswith("dataset_name: no data set is named")
    assert untrainable(made_up, {"dataset_name": "x"}).startswith("model house-model: where its weights are")
    assert untrainable(made_up, {"dataset_name": "x", "model_name_or_path": "/models/house"}) == ""
    assert untrainable(advice, {"dataset_name": "x"}) == ""
    assert untrainable(replace(advice, model=replace(advice.model, name=EMBEDDED_MODEL)), {}) == ""
    assert untrainable(replace(advice, model=None), {}) == ""
    with pytest.raises(RequestError, match="dataset_name: no data set is named"):
        train(advice, tmp_path / "out", timeout_seconds=1)
    assert not (tmp_path / "out").exists()


@each_row("where", [["--api", "job", "--image", "r.example/f:1"], ["--output", "out"]])
def test_a_launch_here_and_on_a_cluster_is_refused_in_the_same_words(where: list[str]) -> None:
    """Usage; a word of --set that is none is named too."""
    words = ["launch", "--machine", "dgx-h100", "--dry-run", "--model", "Llama-3.1-8B", *where]
    for more, told in (((), "a hub id such as openai/gsm8k"),
                       (("--set", "dataset_name"), "--set 'dataset_name': must be NAME=VALUE")):  # fmt: skip
        done = topoflight(*words, *more)
        assert done.exit_code == 2 and told in done.output


def test_the_embedded_job_needs_no_yaml() -> None:
    """The job has its settings itself."""
    advice = advise(Request.of(model="tiny-llama", machine="dgx-h100", global_batch=16), tuple)
    assert job_plan(advice).config == read_config(None)[0]


def test_the_settings_name_the_model_that_is_planned(tmp_path: Path) -> None:
    """--config and --set say what is trained; a model that is named beside them stands, and nothing else is guessed."""
    job = tmp_path / "job.yaml"
    job.write_text("model_name_or_path: meta-llama/Llama-3.1-8B\nuse_peft: true\nlora_r: 32\nmax_seq_length: 1024\n")
    asked = job_request(Request(), job, ["packing=true", "load_in_4bit=true"])
    train = asked.train
    assert (asked.model, train.method, train.lora_rank) == ("meta-llama/Llama-3.1-8B", "qlora", 32)
    assert (train.sequence_length, train.packing) == (1024, True)
    assert job_request(Request(), job, ["use_peft=false"]).train.method == "full"
    named = job_request(Request.of(model="GPT-2"), job, [])
    assert (named.model, named.train.lora_rank, named.train.sequence_length) == ("GPT-2", 32, 1024)
    assert job_request(Request.of(model="GPT-2", sequence_length=512), None, []).train.sequence_length == 512
    assert job_request(Request(), None, ["max_steps=4"]).model == EMBEDDED_MODEL
    silent = tmp_path / "silent.yaml"
    silent.write_text("model_name_or_path: meta-llama/Llama-3.1-8B\n")
    assert job_request(Request(), silent, []).train.sequence_length == 1024  # as TRL and the job have it
    assert job_request(Request.of(sequence_length=512), silent, []).train.sequence_length == 512
    assert job_request(Request(), None, ["model_name_or_path=random:shapes"]).model == "shapes"
    advice = advise(replace(asked, machine="dgx-h100"), tuple)
    assert advice.train is not None and (advice.train.method, advice.train.sequence_length) == ("qlora", 1024)
    job.write_text("- a list")
    with pytest.raises(RequestError, match="must hold a mapping, holds list"):
        job_request(Request(), job, [])


@each_row(
    ("text", "words", "error"),
    [
        ("", ["num_train_epoch=3"], "--set unknown setting 'num_train_epoch'; close: num_train_epochs"),
        ("num_train_epoch: 3\n", [], "job.yaml: unknown setting 'num_train_epoch'"),
        ("dataset_nam: a\nbeta: 0.1\n", [], "'dataset_nam'; close: dataset_name"),
        ("dataset_nam: a\nbeta: 0.1\n", [], "; also unknown: 'beta'"),
        ("", ["lora_r=many"], "--set lora_r='many': must be a whole number"),
        ("", ["fsdp_config.reshard=true"], "unknown setting 'fsdp_config.reshard'"),
    ],
)
def test_a_setting_that_the_job_does_not_have_is_refused_before_anything_starts(
    tmp_path: Path, text: str, words: list[str], error: str
) -> None:
    """By the launcher already, in the job's own words."""
    job = tmp_path / "job.yaml"
    job.write_text(text)
    with pytest.raises(RequestError, match=re.escape(error)):
        job_request(Request(), job if text else None, words)


def test_what_a_file_says_and_cannot_be_is_mended_by_set(tmp_path: Path) -> None:
    """The last word is the command's, under an older name too; what is left to fix is named with where it stands."""
    job = tmp_path / "job.yaml"
    job.write_text("push_to_hub: true\nmax_seq_length: 2048\n")
    with pytest.raises(RequestError, match=r"^--config \S*job.yaml: push_to_hub=True"):
        job_request(Request(), job, ["max_length=512"])
    assert job_request(Request(), job, ["push_to_hub=false", "max_length=512"]).train.sequence_length == 512
    with pytest.raises(RequestError, match=r"job.yaml with --set: lora_r='x'"):
        job_request(Request(), job, ["push_to_hub=false", "lora_r=x"])


def test_a_number_that_no_rank_would_read_is_refused_before_any_starts(tmp_path: Path) -> None:
    """plan.json is read within bounds; a launch that writes what they refuse would fail on every pod."""
    done = CliRunner().invoke(launch, ["--output", str(tmp_path / "out"), "--set", "learning_rate=1e30"])
    assert done.exit_code == 2 and "1e+30 is out of bounds" in done.output
    assert not (tmp_path / "out").exists()

"""Why a job would train something else than was planned: one answer for a launch here and one on a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.advice.advise import advise
from agent.advice.job_settings import EMBEDDED_MODEL, untrainable
from agent.advice.request import Request
from agent.cli.launch import launch

MACHINE = ["--machine", "dgx-h100", "--dry-run"]


def test_what_the_jobs_defaults_would_train_instead() -> None:
    """A data set always; weights where the name is no hub's. The embedded job trains what it is planned for."""
    advice = advise(Request.of(machine="dgx-h100", model="Llama-3.1-8B", global_batch=64), tuple)
    assert advice.model is not None
    made_up = replace(advice, model=replace(advice.model, name="house-model"))
    assert untrainable(advice, {}).startswith("dataset_name: no data set is named")
    assert untrainable(made_up, {"dataset_name": "x"}).startswith("model house-model: where its weights are")
    assert untrainable(made_up, {"dataset_name": "x", "model_name_or_path": "/models/house"}) == ""
    assert untrainable(advice, {"dataset_name": "x"}) == ""
    assert untrainable(replace(advice, model=replace(advice.model, name=EMBEDDED_MODEL)), {}) == ""
    assert untrainable(replace(advice, model=None), {}) == ""


@pytest.mark.parametrize("where", [[], ["--api", "job", "--image", "r.example/f:1"]])
def test_here_and_there_are_told_the_same(where: list[str], tmp_path: Path) -> None:
    """Usage; a word of --set that is none is named too."""
    words = [*MACHINE, "--model", "Llama-3.1-8B", *(where or ["--output", str(tmp_path)])]
    done = CliRunner().invoke(launch, words)
    assert done.exit_code == 2 and "a hub id such as openai/gsm8k" in done.output
    odd = CliRunner().invoke(launch, [*words, "--set", "dataset_name"])
    assert odd.exit_code == 2 and "--set 'dataset_name': must be NAME=VALUE" in odd.output

"""Where nothing fits, what is offered in its place fits, as the very command that is printed."""

from __future__ import annotations

import json
import shlex

from rigs.command import topoflight
from rigs.recorded import path_of
from rigs.tables import each_row

from agent.advice.advise import advise
from agent.advice.request import Request

ASKED = [
    "--machine dgx-h100 --model Llama-3.1-405B --method full --sequence-length 4096",
    "--machine 4xrtx4090 --model Llama-3.1-8B --method full --packing --global-batch 16",
    "--machine 4xrtx4090 --nodes 2 --network 10G --tcp --model Llama-3.1-405B",
    f"--host {path_of('r760xa-2xA40-bf3')} --model Llama-3.1-70B --method full",
    "--machine g5.12xlarge --model gpt2 --method full",  # both: the engine, and a table of 1,024 positions
    "--machine dgx-h100 --model Llama-3.1-8B --method full --precision mxfp8 --engine megatron",
    "--machine dgx-h100 --nodes 256 --model Llama-3.1-8B --method full --global-batch 64",  # fewer sequences than ranks
]


def run(words: str) -> tuple[int, dict[str, object]]:
    """Exit code and document of the verb."""
    result = topoflight("recommend", *shlex.split(words), "-o", "json")
    return result.exit_code, json.JSONDecoder().raw_decode(result.stdout)[0]


@each_row("asked", ASKED)
def test_what_is_offered_fits_as_the_command_says(asked: str) -> None:
    """Each offer is a command of its own, which exits with 0 and differs in what it says."""
    code, document = run(asked)
    assert code == 3
    assert document["chosen"] is None
    offers = document["helps_most"]
    assert isinstance(offers, list)
    assert offers
    for offer in offers:
        said, _, command = offer.partition("): topoflight recommend ")
        code, other = run(command)
        assert code == 0, offer
        assert other["chosen"] is not None, offer
        assert said.split()[0] in ("global", "method", "sequence", "optimizer", "precision", "nodes", "engine")


def test_a_model_that_the_job_does_not_train_is_offered_an_engine_that_does() -> None:
    """No shorter sequence and no other method would help."""
    advice = advise(Request.of(machine="dgx-h100", model="gpt-oss-20b"), tuple)
    assert advice.chosen is None
    assert [line.split(" fits")[0] for line in advice.helps_most] == ["engine trl"]


def test_what_is_set_can_be_pasted_and_a_long_step_is_written_out() -> None:
    """A value with a blank is quoted; 3,030 s are no 3.03e+03."""
    asked = "recommend --machine p4d.24xlarge --nodes 2 --model Llama-3.1-70B --method lora --sequence-length 131072"
    said = topoflight(*asked.split(), COLUMNS="100").output
    assert "NCCL_NET='AWS Libfabric'" in said
    assert "e+0" not in said


def test_gpus_that_are_not_judged_are_no_misfit() -> None:
    """Nothing was forecast of them, so nothing did not fit."""
    result = topoflight("recommend", "--machine", "mi300x", "--model", "Llama-3.1-8B")
    assert result.exit_code == 3 and result.stdout.startswith("? No layout is judged\n")
    assert "is judged (every layout: MI300X" in result.stderr and "fits" not in result.output


def test_no_network_is_offered_that_nobody_sells() -> None:
    """Four times 60 Mb/s is none."""
    words = "--machine 2xa40-roce --nodes 2 --network 60M --model Llama-3.1-8B --sequence-length 1024 --global-batch 64"
    _, document = run(words)
    assert any("a network of 1.25 GB/s per node" in line for line in document["helps_most"])  # type: ignore[attr-defined]

"""Inputs that once broke a reader, each as it was found: by the fuzzer, by a random run, or by reading the code."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import fuzz_targets
from click.testing import CliRunner
from fuzz_targets import _dumps as dumped
from fuzz_targets import check, targets
from rigs.tables import each_row

from agent.cli.main import cli
from contracts.job_config import read_file


def plain(document: Any) -> bytes:
    return b"\1" + dumped(document)


def machine(**more: Any) -> bytes:
    return plain({**fuzz_targets._machine(), **more})


def bench(**more: Any) -> bytes:
    return plain({**fuzz_targets.document_of("bench"), **more})


def recording(**answers: Any) -> bytes:
    made = copy.deepcopy(fuzz_targets._recording("titan-rtx-2x-nv2"))
    made["answers"].update(answers)
    return b"\1\0" + dumped(made)


def laughs(first: bytes = b"[x]", form: bytes = b"[%s]") -> bytes:
    """YAML whose aliases stand for a billion times the first."""
    levels = (b"a%d: &a%d %s\n" % (i + 1, i + 1, form % b", ".join([b"*a%d" % i] * 40)) for i in range(8))
    return b"\1a0: &a0 %s\n" % first + b"".join(levels)


FOUND: dict[str, tuple[str, bytes]] = {
    "a matrix whose rows all come before their GPU": (
        "topo_text", b"\tGPU0\tGPU1\tNIC0\tCPU Affinity\tGP8\t X \tNODE\nNIC0\tPIX\tNONIC Legend:\n\n  NIC0: mlx,5_0\n",
    ),
    "fsdp that is a number": ("job_config", b"\1fsdp: 7"),
    "fsdp that is a list of numbers": ("job_config", b"\1fsdp: [1]"),
    "a rate of 400 digits": ("job_config", b"\1learning_rate: " + b"9" * 400),
    **{f"{text} with @ of 5000 digits": ("environment", b"\2set -- a\n" + text.encode().replace(b"@", b"9" * 5000))
       for text in (
        "export NCCL_IB_TC=@", "export NCCL_BUFFSIZE=0x@", "export NCCL_BUFFSIZE=@M", "export NCCL_SOCKET_IFNAME=lo:@",
        "export NCCL_NET=IB NNODES=@", "export NCCL_SOCKET_IFNAME=lo WORLD_SIZE=@", "export NCCL_NET=${@}",
        "a=(1)\nexport NCCL_NET=${a[@]}", "shift @", "[ @ -eq 2 ]", "torchrun --nnodes=@",
    )},
    "YAML's empty integer": ("job_config", b'\1seed: !!int ""'),
    "YAML's wrong truth": ("job_config", b"\1bf16: !!bool x"),
    "YAML's wrong time": ("manifest", b"\1spec: !!timestamp x"),
    "YAML's long integer": ("job_config", b"\1seed: " + b"9" * 5000),
    "YAML merged a billion times": ("manifest", laughs(b"{k: v}", b"{<<: [%s]}")),
    "YAML in a value, a billion times": ("manifest", laughs() + b"env: [{name: NCCL_DEBUG, value: *a8}]\n"),
    "YAML in an error's words, a billion times": ("job_config", laughs() + b"learning_rate: *a8\n"),
    "one PCI function that is GPU and NIC": (
        "topo_xml",
        b'<system version="1"><cpu numaid="0"><pci busid="0000:1b:00.0" class="0x030200" vendor="0x10de" '
        b'device="0x2330"><nic><net name="mlx5_0" dev="0"/></nic></pci></cpu></system>',
    ),
    "a probe's duration in words": (
        "outcome", plain({"gpu": {"status": "absent", "seconds": "x"}})
    ),
    "a machine of one GPU index twice": ("machine", machine(gpu={"gpus": [{"indices": "0 0"}]})),
    "a machine whose parts are lists": ("machine", machine(gpu=[], pci=[1], rdma=[{}])),
    "a machine with more bus ids than GPUs": ("machine", machine(gpu={"gpus": [{"indices": "0", "busIds": "a b"}]})),
    "a machine whose link is not a number": ("machine", machine(pci={"devices": [{"below": [
        {"busId": "a", "class": "030200", "id": "10de:2330", "link": "nan GT/s x16"}]}]})),
    "a machine of bridges in a circle": ("machine", machine(pci={"devices": [{"below": [
        {"busId": a, "class": "060400", "id": "10de:2330", "parent": b} for a, b in ("ab", "ba")]}]})),
    "a benchmark of 10^30 bytes": ("bench_result", bench(world_size=10**30)),
    "a benchmark that took NaN": ("bench_result", bench(seconds="nan")),
    "a loss that is NaN": (
        "run", plain({**fuzz_targets.document_of("run"), "loss": {"first": float("nan"), "last": 1e400}})
    ),
    "steps without end": ("run", b'\1{"steps_done": 1e999, "status": "\\ud800"}'),
    "a memory limit in words": ("recording", recording(limit={"memlock": ["x", "y"], "nofile": "z"})),
    "half a surrogate in a file": ("recording", b'\1\0{"kind": "topoflight-recording", "hostname": "\\ud800"}'),
    "a host that is a list": ("recording", recording(identity={"": {"hostname": ["x"], "time": 1}})),
    "an identity that is text": ("recording", recording(identity={"": "x"})),
    "a release in superscripts": ("words", "\x012.27¹".encode()),
    "a world of 400 digits of ranks": ("bench_result", bench(world_size=10**400)),
    "a layout in superscripts": ("words", "\0tp=²".encode()),
    "a histogram in superscripts": ("words", "\x02²:²".encode()),
    "NUMA affinity in superscripts": (
        "topo_text",
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t0-1\t²\nGPU1\tSYS\t X \t2-3\t¹\n".encode(),
    ),
}  # fmt: skip


@each_row("name", FOUND)
def test_an_input_that_once_broke_a_reader_is_read_or_refused(name: str) -> None:
    """A result, or the reader's own error; anything else comes out of here."""
    target, data = FOUND[name]
    check(targets()[target], data)


@each_row("name", sorted(targets()))
def test_every_reader_takes_what_the_fuzzer_starts_from(name: str) -> None:
    """The seeds themselves: a reader that refuses all of them is fuzzed at its first line only."""
    refused = 0
    for seed in targets()[name].seeds:
        try:
            targets()[name].run(seed)
        except targets()[name].errors:
            refused += 1
    assert refused < len(targets()[name].seeds)


@each_row(
    "words",
    [
        ["recommend", "--machine", "dgx-h100", "--model", "x" * 300],
        ["recommend", "--machine", "dgx-h100", "--model", "Llama-3.1-8B", "--dataset", "./" + "x" * 300],
        ["recommend", "--machine", "dgx-h100", "--model", "Llama-3.1-8B", "--tokenizer", "x" * 300, "--dataset", "a/b"],
        ["launch", "--dry-run", "--set", f"deepspeed={'x' * 300}"],
        ["launch", "--dry-run", "--set", f"model_name_or_path={'x' * 300}"],
        ["why", "--ras", "x" * 300],
    ],
)
def test_a_name_that_no_file_can_have_is_no_file(words: list[str]) -> None:
    """pathlib raises OSError where a name is too long."""
    done = CliRunner().invoke(cli, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception


def test_a_file_that_settings_name_may_have_no_possible_name(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"deepspeed: {'x' * 300}\n")
    assert read_file(tmp_path / "job.yaml") == {"deepspeed": "x" * 300}

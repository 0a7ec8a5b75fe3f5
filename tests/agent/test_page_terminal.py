"""The terminal: 80 columns, the same finding once, plain in a pipe, the matrix whole where a tool reads it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rigs.command import topoflight
from rigs.recorded import NAMES, path_of, view
from rigs.tables import each_row

from agent.advice import advise
from agent.advice.request import Request
from agent.checks.groups import grouped
from agent.terminal import advice as advice_view
from agent.terminal import findings as findings_view
from agent.terminal import hosts, topology
from contracts.finding import Finding, Status
from topology.formats.text import parse


def console(**options: bool) -> Console:
    return Console(file=io.StringIO(), width=80, highlight=False, **options)


def text_of(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@each_row("name", NAMES)
def test_every_machine_fits_80_columns(name: str) -> None:
    """Host, topology, findings, advice: no line is longer but commands, and a pipe gets no escape code."""
    seen, out = view(name), console()
    hosts.host(out, seen.snapshots[0])
    topology.node(out, seen.topologies[0], brief=True)
    findings_view.findings(out, seen.checks)
    advice_view.recommendation(out, advise.for_view(seen, Request.of(model="Llama-3.1-8B")))
    findings_view.verdict(out, seen.verdict, 1.0)
    text = text_of(out)
    assert max(len(line) for line in text.splitlines() if not line.startswith("  topoflight ")) <= 80
    assert "\x1b" not in text
    if not seen.topologies[0].gpus:
        assert "per GPU" not in text, "memory is told per rank where there is no GPU"


def test_ten_times_the_same_is_said_once() -> None:
    """Count, subjects, evidence of the first, one remedy; failures before warnings."""
    seen, out = view("sick-h100-rdma-off"), console()
    findings_view.findings(out, seen.checks)
    text = text_of(out)
    assert text.count("pci.nic.no_rdma") == 1
    assert "pci.nic.no_rdma on 10 devices" in text
    assert "and 2 more" in text
    assert text.count("→ Load the driver") == 1
    assert text.index("FAIL") < text.index("warn")


def test_what_is_unknown_is_named_and_what_passed_is_counted() -> None:
    """The verdict of a healthy machine says which checks were not measured."""
    seen, out = view(), console()
    findings_view.findings(out, seen.checks)
    findings_view.verdict(out, seen.verdict, 1.0)
    text = " ".join(text_of(out).split())
    unknown = {check.code for check in seen.checks if check.status == "unknown"}
    assert unknown and all(code in text for code in unknown)
    assert f"{len(unknown)} checks could not run; {seen.verdict.by_check['pass']} passed" in text


def test_a_node_whose_required_check_could_not_run_is_not_among_the_healthy_ones() -> None:
    """Unknown is no pass, neither beside a failed node nor beside a good one."""
    out = console()
    checks = [
        Finding(code="a.b", node="n2", status=Status.UNKNOWN, required=True, message="silent"),
        Finding(code="a.c", node="n3", status=Status.UNKNOWN, message="not measured"),
        Finding(code="a.b", node="n4", status=Status.FAIL, message="lost"),
    ]
    hosts.sound_nodes(out, [(f"n{n}", "8 x H100; RDMA 8/8 active") for n in range(1, 5)], checks)
    assert "2 nodes, 8 x H100; RDMA 8/8 active: n1, n3" in text_of(out)


def test_a_topology_names_its_machine_what_departs_from_it_and_what_to_expect() -> None:
    """One expectation for each scope, not one for each rail and operation."""
    out = console()
    topology.node(out, view("sick-h100-rdma-off").topologies[0], brief=True)
    text = text_of(out)
    for words in ("recognised as: HGX H100/H200", "! differs from the reference: no RDMA adapter",
                  "GPU0 GPU1 GPU2 GPU3: nearest NIC eno1 (NODE)", "expected all_gather within node: "):  # fmt: skip
        assert words in text, words
    assert text.count("expected ") == 2 and "rail" not in text


def test_a_remedy_that_names_each_gpu_by_its_number_is_said_once() -> None:
    """Eight GPUs of one limit are one thing to do; another limit is another, and one GPU keeps its number."""
    made = [
        Finding(code="gpu.power.limit", status=Status.FAIL, node="a", subject=f"GPU{n}", message="the limit is low",
              remedy=f"Restore it: nvidia-smi -i {n} -pl {watts}.")
        for n, watts in [(0, 700), (1, 700), (11, 700), (2, 400)]
    ]  # fmt: skip
    assert [(group.subjects, group.remedy) for group in grouped(made)] == [
        (("GPU0", "GPU1", "GPU11"), "Restore it: nvidia-smi -i N -pl 700."),
        (("GPU2",), "Restore it: nvidia-smi -i 2 -pl 400."),
    ]


def test_what_was_required_and_not_measured_says_what_to_do(tmp_path: Path) -> None:
    """A driver that does not answer: the first line says what to look at, not to measure again."""
    content = json.loads(path_of().read_text(encoding="utf-8"))
    content["answers"]["nvml"] = {"nvmlDeviceGetCount": {"": {"$nvml": "TIMEOUT"}}}
    hung = tmp_path / "hung.json"
    hung.write_text(json.dumps(content), encoding="utf-8")
    said = topoflight("scan", "--host", hung).stdout
    first = " ".join(said[: said.index("\n  GPUs")].split())
    assert first.startswith("? unknown") and first.endswith(
        "Run nvidia-smi on the host, and look for NVRM lines in dmesg."
    )
    assert " ".join(said.split()).count("look for NVRM lines") == 2, said


def test_findings_that_say_different_things_stay_apart() -> None:
    """One code, two messages: both are read; another remedy makes another group."""
    made = [
        Finding(code="a.b", status=Status.WARN, node="n", subject=subject, message=message, remedy=remedy)
        for subject, message, remedy in (("x", "one", "fix"), ("y", "two", "fix"), ("z", "three", "replace"))
    ]
    out = console()
    findings_view.findings(out, made)
    assert all(word in text_of(out) for word in ("x: one", "y: two", "three", "fix", "replace"))
    assert [group.size for group in grouped(made)] == [2, 1]


def test_one_trouble_of_many_devices_is_one_group_and_a_lone_reading_stays_itself() -> None:
    """A rack whose fans stopped is one thing to read; a GPU with one reading only is that finding."""

    def hot(node: str, gpu: str, *codes: str) -> list[Finding]:
        return [
            Finding(code=code, status=Status.WARN, node=node, subject=gpu, message=f"{code} of {gpu}", remedy="fans")
            for code in codes
        ]

    both = ("gpu.thermal.hot", "gpu.thermal.throttling")
    found = grouped([*hot("a", "GPU0", *both), *hot("b", "GPU0", *both), *hot("b", "GPU1", both[0])])
    assert [(group.codes, group.size, group.trouble, group.places) for group in found] == [
        (both, 4, "too hot", "on 2 nodes"),
        (both[:1], 1, "", ""),
    ]
    assert [(check.node, check.code) for check in found[0].checks] == [(n, code) for n in ("a", "b") for code in both]


def test_the_answer_comes_before_the_environment() -> None:
    """recommend: layout, forecast, then the long environment; the same without a model, where only that is asked."""
    seen = view()
    for model, order in (("Llama-3.1-8B", ["Layout for", "step ", "Environment"]), (None, ["Environment"])):
        out = console()
        advice_view.recommendation(out, advise.for_view(seen, Request.of(model=model)), explain=True)
        text = text_of(out)
        places = [text.index(word) for word in order]
        assert places == sorted(places)
        assert ("Layout for" in text) == (model is not None)


def test_a_pipe_gets_the_matrix_that_other_tools_read() -> None:
    """`topoflight topo | topoflight topo --from -` gives the same pairs."""
    seen, out = view(), console()
    topology.matrix(out, seen.topologies[0])
    again = parse(text_of(out))
    labels = {frozenset((p.a, p.b)): p.label for p in seen.topologies[0].pairs}
    assert {frozenset((p.a, p.b)): p.label for p in again.pairs} == labels


def test_a_narrow_terminal_gets_blocks_that_fit() -> None:
    """18 devices: GPUs among themselves, then GPUs to NICs."""
    seen, out = view(), console(force_terminal=True, no_color=True)
    topology.matrix(out, seen.topologies[0])
    lines = text_of(out).splitlines()
    among_gpus, to_nics = (line for line in lines if line.startswith("GPU7"))
    assert "NV18" in among_gpus and "PIX" in to_nics
    assert all(len(line) <= 80 for line in lines if "\x1b" not in line)


def test_the_classes_of_a_matrix_are_explained_below_it() -> None:
    """Those that it shows, and no others."""
    seen, out = view(), console()
    topology.node(out, seen.topologies[0], brief=True)
    text = " ".join(text_of(out).split())
    for words in (
        "NVLink;",
        "PIX: one PCIe switch;",
        "NODE: host bridges of one NUMA node (PHB to NCCL);",
        "SYS: between CPUs",
    ):
        assert words in text, words
    assert "PXB:" not in text and "PHB:" not in text


ENVIRONMENT, LOG = "job.env", "nccl.log"  # written by the test
LOG_LINES = [
    "gpu-a:100:130 [0] NCCL INFO NCCL version 2.27.7+cuda12.9",
    "gpu-a:100:130 [0] NCCL INFO GPU Direct RDMA Disabled for HCA 0 'mlx5_1'",
    "gpu-a:100:130 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0",
    "gpu-a:100:130 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0",
]
SICK, POD = path_of("sick-h100-dead-hca"), path_of("r760xa-2xA40-bf3")
VERBS = (
    ("scan", "--host", SICK),
    ("scan", "--all", "--host", POD),
    ("preflight", "-q", "--host", SICK, "--model", "Llama-3.1-8B"),
    ("recommend", "--host", POD, "--model", "Llama-3.1-8B", "--explain"),
    ("recommend", "--machine", "p5.48xlarge", "--model", "Llama-3.1-8B", "--sweep", "nodes=1,2"),
    ("recommend", "--machine", "p5.48xlarge", "--model", "Llama-3.1-8B", "--compare", "dp_shard=8", "tp=8"),
    ("diff", path_of(), SICK),
    ("diff", "--fleet", SICK.parent),
    ("lint-env", "--host", POD, ENVIRONMENT),
    ("evidence", LOG),
    ("explain", "limits.memlock.low"),
    ("explain", "TopoflightMemlockTooSmall"),
)


@each_row("words", VERBS)
def test_every_verb_is_plain_and_fits_a_pipe(words: tuple[object, ...], tmp_path: Path) -> None:
    """Lines of 80 characters at most, no blanks at their ends, no escape codes, and counts that agree with nouns."""
    (tmp_path / ENVIRONMENT).write_text("NCCL_IB_HCA=mlx5_9\nNCCL_SOCKET_IFNAME=eth0\nNCCL_IB_DISABLE=1\n")
    (tmp_path / LOG).write_text("\n".join(LOG_LINES))
    result = topoflight(*(tmp_path / word if word in (ENVIRONMENT, LOG) else word for word in words))
    assert result.exit_code in (0, 3), result.output
    lines = result.output.splitlines()
    assert lines and max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    assert "\x1b" not in result.output
    assert not re.search(r"\b1 (warnings|sockets|PCI devices|checks|nodes with|others|ports|channels)\b", result.output)


def test_a_line_of_a_log_is_quoted_to_the_letter(tmp_path: Path) -> None:
    """Host, process and thread are `gpu-a:100:130`: no picture takes the place of `:100:`, no bracket is markup."""
    (tmp_path / LOG).write_text("\n".join(LOG_LINES))
    result = topoflight("evidence", "-v", tmp_path / LOG, COLUMNS="120")
    for line in LOG_LINES:
        assert line in result.output.replace("\n  ", ""), line
    assert result.output.index("✗ FAIL") < result.output.index("Proof")


def on_a_terminal(*words: str, **environment: str) -> str:
    """What a person sees on a terminal of 80 columns."""
    child, terminal_file = pty.fork()
    if child == 0:
        here = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color", **environment}
        for name in {"CI", "NO_COLOR", "FORCE_COLOR"} - set(environment):  # of whoever runs the tests
            here.pop(name, None)
        os.execve(sys.executable, [sys.executable, "-m", "agent.cli", *words], here)  # noqa: S606
    seen = b""
    with contextlib.suppress(OSError):  # Linux says EIO when the other end is closed
        while chunk := os.read(terminal_file, 65536):
            seen += chunk
    os.close(terminal_file)
    os.waitpid(child, 0)
    return seen.decode()


def test_a_terminal_has_colours_and_sees_that_work_is_under_way() -> None:
    """A live line while layouts are forecast; with NO_COLOR the same words and no colour."""
    live = on_a_terminal("recommend", "--machine", "p5.48xlarge", "--model", "Llama-3.1-8B", "--sweep", "nodes=1,2")
    assert "forecasting layouts" in live
    sick = ("scan", "--host", str(SICK))
    coloured, plain = on_a_terminal(*sick), on_a_terminal(*sick, NO_COLOR="1")
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    assert colour.search(coloured)
    assert not colour.search(plain)
    assert "✗ FAIL" in plain

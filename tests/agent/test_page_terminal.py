"""The terminal: what is read first, 80 columns, plain in a pipe; reports: whole or absent, safe against hostile texts.

The same finding is told once, and the matrix is whole for tools; each report names the node of each finding.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient
from junitparser import JUnitXml
from rigs.command import drawn, on_a_terminal, topoflight
from rigs.recorded import H100, NAMES, path_of, view
from rigs.results import benchmark, measurement
from rigs.tables import each_row, rows_of

from agent.advice import advise
from agent.advice.request import Request
from agent.base.output import write_atomic
from agent.checks.findings import group_findings
from agent.checks.verdict import judge
from agent.cli.bench import show_networks
from agent.http.server import create
from agent.http.state import State
from agent.jobs.networks import NetworkBar, NetworkBars
from agent.jobs.preflight import Report, render_junit
from agent.pages import render_report
from agent.terminal import advice as advice_view, findings as findings_view, hosts, topology
from agent.terminal.measured import print_benchmark
from contracts.finding import Finding, Status
from contracts.host_list import expand_host_list
from contracts.run_record import RunRecord
from probes.api import Absent, Snapshot


@each_row("name", NAMES)
def test_every_machine_fits_80_columns(name: str) -> None:
    """Host, topology, findings, advice: no line is longer but commands, and a pipe gets no escape code."""
    seen = view(name)
    advice = advise.advise_view(seen, Request.of(model="Llama-3.1-8B"))
    text = drawn(hosts.print_host, seen.snapshots[0]) + drawn(topology.print_brief, seen.topologies[0], ())
    text += drawn(findings_view.print_findings, seen.checks) + drawn(advice_view.print_recommendation, advice)
    assert max(len(line) for line in text.splitlines() if not line.startswith("  topoflight ")) <= 80
    assert "\x1b" not in text
    if not seen.topologies[0].gpus:
        assert "per GPU" not in text, "memory is told per rank where there is no GPU"


def test_a_node_whose_required_check_could_not_run_is_not_among_the_healthy_ones() -> None:
    """Unknown is no pass, neither next to a failed node nor next to a good one."""
    checks = [
        Finding(code="a.b", node="n2", status=Status.UNKNOWN, required=True, message="silent"),
        Finding(code="a.c", node="n3", status=Status.UNKNOWN, message="not measured"),
        Finding(code="a.b", node="n4", status=Status.FAIL, message="lost"),
    ]
    text = drawn(hosts.print_healthy_nodes, [(f"n{n}", "8 x H100; RDMA 8/8 active") for n in range(1, 5)], checks)
    assert "2 nodes, 8 x H100; RDMA 8/8 active: n1, n3" in text


def test_a_topology_names_its_machine_what_departs_from_it_and_what_to_expect() -> None:
    """One expectation for each scope, not one for each rail and operation."""
    text = drawn(topology.print_node, view("sick-h100-rdma-off").topologies[0])
    for words in ("recognised as: HGX H100/H200", "! differs from the reference: This node has no RDMA device",
                  "NODE: GPU0, GPU1, GPU2, GPU3 to eno1", "expected all_gather within island: "):  # fmt: skip
        assert words in text, words
    assert text.count("expected ") == 2 and "rail" not in text


def test_hosts_are_listed_by_nvlink_domain_if_two_share_one() -> None:
    """Otherwise each may be the domain of a host's own board, which is no difference between healthy hosts."""
    tray = view("gb200-nvl72-tray")
    (node,) = tray.topologies
    other = replace(node, gpus=tuple(replace(gpu, nvlink_domain="rack/2") for gpu in node.gpus))
    for nodes, shown in (((node, node), True), ((node, other), False), ((node, node, other), True)):
        text = drawn(hosts.print_hosts_brief, tray.snapshots * len(nodes), nodes, ())
        assert ("NVLink domain" in text, "rack/2" in text) == (shown, shown and other in nodes), text


def test_a_remedy_that_names_each_gpu_by_its_number_is_said_once() -> None:
    """Eight GPUs of one limit are one thing to do; another limit is another, and one GPU keeps its number."""
    made = [
        Finding(code="gpu.power.limit", status=Status.FAIL, node="a", subject=f"GPU{n}", message="the limit is low",
              remedy=f"Restore it: nvidia-smi -i {n} -pl {watts}.")
        for n, watts in [(0, 700), (1, 700), (11, 700), (2, 400)]
    ]  # fmt: skip
    assert [(group.subjects, group.remedy) for group in group_findings(made)] == [
        (("GPU0", "GPU1", "GPU11"), "Restore it: nvidia-smi -i N -pl 700."),
        (("GPU2",), "Restore it: nvidia-smi -i 2 -pl 400."),
    ]


def test_findings_that_say_different_things_stay_apart() -> None:
    """One code, two messages: both are read; another remedy makes another group."""
    made = [
        Finding(code="a.b", status=Status.WARN, node="n", subject=subject, message=message, remedy=remedy)
        for subject, message, remedy in (("x", "one", "fix"), ("y", "two", "fix"), ("z", "three", "replace"))
    ]
    text = " ".join(drawn(findings_view.print_findings, made).split())
    assert all(words in text for words in ("a.b for x, y one x two y → fix", "a.b for z three → replace"))
    assert [len(group.checks) for group in group_findings(made)] == [2, 1]


tables = rows_of(__file__)
LOG = "nccl.log"  # written by the test
LOG_LINES = tables("staged_log")()
SICK = path_of("sick-h100-dead-hca")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the commands name, in the current folder: files, and recordings by their names."""
    monkeypatch.chdir(tmp_path)
    Path("machines").symlink_to(SICK.parent)
    Path("job.env").write_text("NCCL_IB_HCA=mlx5_9\nNCCL_SOCKET_IFNAME=eth0\nNCCL_IB_DISABLE=1\n")
    Path("good.env").write_text("NCCL_DEBUG=INFO\n")
    Path("nccl.log").write_text("\n".join(LOG_LINES))
    Path("good.log").write_text(tables("good_log")())


def printed(words: str) -> str:
    """What a command prints, held to 80 columns, no blanks at line ends, no escape codes, counts that fit nouns."""
    result = topoflight(*words.split())
    assert result.exit_code in (0, 3), result.output
    lines = result.output.splitlines()
    assert lines and max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    assert "\x1b" not in result.output
    assert not re.search(r"\b1 (warnings|sockets|PCI devices|checks|nodes with|others|ports|channels)\b", result.output)
    return result.output


@each_row("words", tables("shown"))
def test_every_verb_is_plain_and_fits_a_pipe(words: str, folder: None) -> None:
    assert printed(words)


def test_golden_texts(folder, golden):
    """The verdict comes first; ten times the same is said once; a line of a log is quoted to the letter."""
    texts = [f"$ topoflight {words}\n{printed(words)}" for words in tables("golden")()]
    golden("terminal.txt", "\n".join(texts))


def test_channels_are_counted_for_each_host_of_several(tmp_path: Path) -> None:
    """Hosts with as many share a line; the counts add up to those of all, and one host alone has no separate line."""
    two = [line.replace("gpu-a", "gpu-b") for line in LOG_LINES[2:]]
    rows = {
        "gpu-a, gpu-b: 2 via NET/IB, 0 with GPUDirect RDMA each": two,
        "gpu-b: 2 via NET/IB, 1 with GPUDirect RDMA": [two[0], f"{two[1]}/GDRDMA"],
        "gpu-b: 1 via NET/Socket": [two[0].replace("IB", "Socket")],
        "gpu-b: 1 via NET/AWS Libfabric, 1 with GPUDirect RDMA": [two[0].replace("IB/0", "AWS Libfabric/0/GDRDMA")],
    }
    for words, more in rows.items():
        (tmp_path / LOG).write_text("\n".join([*LOG_LINES, *more, ""]))
        lines = [line.strip() for line in lines_of("evidence", tmp_path / LOG, columns=120)]
        assert words in lines, (words, lines)
    (tmp_path / LOG).write_text("\n".join([*LOG_LINES, ""]))
    assert not any(line.strip().startswith("gpu-a:") for line in lines_of("evidence", tmp_path / LOG, columns=120))


def test_a_terminal_has_colours_unless_they_are_switched_off() -> None:
    """With NO_COLOR the same words and no colour."""
    sick = ("scan", "--host", str(SICK))
    (_, coloured), (_, plain) = on_a_terminal(*sick), on_a_terminal(*sick, NO_COLOR="1")
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    assert colour.search(coloured)
    assert not colour.search(plain)
    assert "✗ FAIL" in plain


DATA = Path(__file__).parents[2] / "agent/data/completions"
SOUND = (H100, "aws-p4d-8xA100-4efa", "gb200-nvl72-tray", "titan-rtx-2x-nv2", "cpu-only-vm")


def lines_of(*words: object, columns: int = 80) -> list[str]:
    done = topoflight(*words, COLUMNS=str(columns))
    assert done.exit_code in (0, 3), done.output
    return done.stdout.rstrip("\n").splitlines()


@each_row("name", SOUND)
@each_row(
    "words", ["scan", "preflight -q", "topo", "recommend", "recommend --model Qwen2.5-0.5B --steps 100 --price 98"]
)
def test_twelve_lines_on_a_healthy_thing_and_the_answer_on_the_first(name: str, words: str) -> None:
    verb, *options = words.split()
    lines = lines_of(verb, "--host", path_of(name), *options)
    assert len(lines) <= 12, "\n".join(lines)
    assert max(map(len, lines)) <= 80
    if verb != "recommend":
        assert re.match(r"(✓ pass|\? unknown) .*→ ", " ".join(lines[:3])), lines[0]
    elif options:
        assert lines[0].startswith("Layout for Qwen2.5-0.5B (method lora, sequence length 2,048): ✓ ")
        labels = [line.split()[0] for line in lines[1:] if re.match(r"  \w", line)]  # a long line goes on further right
        assert labels[:4] == ["speed", "time", "cost", "memory"]
    else:
        assert re.match(r"Environment: ✓ (set \d+ variable|nothing to set).* → add --model for a layout", lines[0])


def test_what_time_and_cost_still_need_is_named_and_what_was_given_is_not() -> None:
    """Of the forecast of a whole run."""
    length = "--steps, --tokens, --epochs or --hours"
    for given, missing in ((), f"--price and {length}"), (("--price", "98"), length), (("--steps", "100"), "--price"):
        lines = lines_of("recommend", "--machine", "p5.48xlarge", "--model", "Qwen2.5-0.5B", *given)
        assert f"  cost   not estimated. Add {missing}." in lines, "\n".join(lines)


def test_a_measurement_and_a_comparison_of_networks_open_with_the_verdict() -> None:
    """As the verbs print them: every result verified, every network run and proven."""
    sizes = [(op, size) for op in ("all_gather", "reduce_scatter", "all_reduce") for size in (1 << 16, 1 << 20)]
    result = benchmark(*(measurement(op, bytes=size) for op, size in sizes))
    bars = tuple(NetworkBar(network=name, status="measured", step_seconds=step, proof=("gloo",), description="shaped")
                 for name, step in (("eth0", 0.5), ("net1", 0.25)))  # fmt: skip
    found = NetworkBars(title="One fine-tune of a tiny Llama, by network", where="two namespaces of this host", nodes=2,
                        steps=10, node_hour_price=None, bars=bars)  # fmt: skip
    for draw, what, first in (
        (print_benchmark, result, "✓ Measured: every result verified → save a baseline with --save FILE"),
        (show_networks, found, "✓ net1 is the fastest (eth0 2 x as long) → "),
    ):
        lines = drawn(draw, what).rstrip("\n").splitlines()
        assert " ".join(lines[:2]).startswith(first) and len(lines) <= 10, "\n".join(lines)
    failed = replace(found, bars=(bars[0], replace(bars[1], status="failed", step_seconds=None, why="no route")))
    assert drawn(show_networks, failed).startswith("✗ not every network was measured: net1 failed →")


def expanded(text: str) -> set[str]:
    """The nodes that are named, also in lists of Slurm's form."""
    return {name for part in re.findall(r"gpu-(?:\d{3}|\[[\d,-]+\])", text) for name in expand_host_list(part)}


def test_a_fleet_is_told_by_fault_with_every_node_named(tmp_path: Path) -> None:
    """One fault on ten nodes, another on one: the lines do not grow with the nodes, and none is left out."""
    faults = {"sick-h100-dead-hca": [*range(1, 11)], "sick-h100-memlock-64KiB": [11]}
    kinds, names = {number: kind for kind, numbers in faults.items() for number in numbers}, []
    for number in range(12):
        content = json.loads(path_of(kinds.get(number, H100)).read_text())
        names.append(f"gpu-{number:03d}")
        content["hostname"] = content["answers"]["identity"][""]["hostname"] = names[-1]
        (tmp_path / f"{names[-1]}.json").write_text(json.dumps(content))
    lines = lines_of("preflight", "-q", "--host", tmp_path, columns=60)
    text = "\n".join(lines)
    assert lines[0].startswith("✗ FAIL ") and len(lines) < 50
    assert max(map(len, lines)) <= 60
    unfolded = re.sub(r"\s+", " ", text)
    down = unfolded[unfolded.rindex("FAIL rdma.port.down on 10 nodes") :]
    assert expanded(down[: down.index("→")]) == {f"gpu-{number:03d}" for number in faults["sick-h100-dead-hca"]}
    assert "gpu-011" in unfolded[unfolded.index("✗ FAIL limits.memlock.low") :]
    assert expanded(unfolded) == set(names)


@each_row(("shell", "shipped"), [("bash", "topoflight.bash"), ("zsh", "_topoflight"), ("fish", "topoflight.fish")])
def test_the_wheel_has_a_completion_file_for_each_shell(shell: str, shipped: str) -> None:
    """It asks the command for click's own script, which a shell that is here can read."""
    assert f"_TOPOFLIGHT_COMPLETE={shell}_source topoflight" in (DATA / shipped).read_text()
    env = {"PATH": str(Path(sys.executable).parent) + ":/usr/bin:/bin", "_TOPOFLIGHT_COMPLETE": f"{shell}_source"}
    script = subprocess.run(["topoflight"], env=env, capture_output=True, text=True, check=True).stdout
    assert f"{shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_a_layout_whose_memory_may_not_fit_has_no_check_mark(tmp_path: Path) -> None:
    job = tmp_path / "config.yaml"  # its rows have any length up to 4,096 tokens
    job.write_text("use_peft: true\nper_device_train_batch_size: 32\nmax_length: 4096\ngradient_checkpointing: true\n")
    for words, glyph in (("--lengths 100:900", "✓"), (f"--config {job}", "?")):
        asked = ("recommend", "--machine", "p4d.24xlarge", "--model", "Llama-3.1-8B", *words.split())
        lines = topoflight(*asked).stdout.splitlines()
        assert any(
            line.startswith("Layout for Llama-3.1-8B (method lora, ") and f": {glyph} " in line for line in lines
        ), lines


HOSTILE = "<script>alert(1)</script> ]]> \x00\x1b[31m & \"quotes\" 'and' | pipes `ticks`\ud800".encode(
    "utf-8", "replace"
).decode()


def report(*checks: Finding) -> Report:
    absent = {"gpu": Absent(why="no GPU")}
    snapshot = Snapshot(hostname="node-a", taken_at_seconds=0.0, outcomes=absent)
    return Report(snapshots=(snapshot,), checks=checks, verdict=judge(checks))


CHECKS = (
    Finding(code="a.fails", status=Status.FAIL, node="node-a", subject="GPU0", message=HOSTILE, evidence=(HOSTILE,),
            remedy=HOSTILE),
    Finding(code="a.warns", status=Status.WARN, node="node-a", message="slow"),
    Finding(code="a.unknown", status=Status.UNKNOWN, node="node-a", message="not measured"),
    Finding(code="a.required", status=Status.UNKNOWN, node="node-a", message="not measured", required=True),
    Finding(code="a.passes", status=Status.PASS, node="node-b"),
)  # fmt: skip


def test_junit_counts_what_ci_will_count(tmp_path: Path) -> None:
    """Failure, error (a required unknown) and skip (an unknown) as JUnit's own reader sees them."""
    path = tmp_path / "junit.xml"
    path.write_text(render_junit(report(*CHECKS)), encoding="utf-8")
    suites = {suite.name: suite for suite in JUnitXml.fromfile(str(path))}
    a = suites["node-a"]
    assert (a.tests, a.failures, a.errors, a.skipped) == (4, 1, 1, 1)
    assert suites["node-b"].tests == 1


def test_hostile_text_stays_text() -> None:
    """A log line quoted as evidence can neither break the XML nor run in the page."""
    whole = report(*CHECKS)
    ElementTree.fromstring(render_junit(whole))  # noqa: S314 - our own output
    html = render_report(replace(whole, run=RunRecord(status="failed", reason=HOSTILE)))
    assert "<script>alert" not in html
    assert "&lt;script&gt;" in html
    for word in ("http://", "https://", "src=", "@import", "url("):
        assert word not in html.replace("data:,", ""), "one file, which fetches nothing"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or absent: a reader never sees half a report."""
    target = tmp_path / "report.json"
    write_atomic(target, "old")

    def full(_descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for text, error in (("\ud800", UnicodeEncodeError), ("new", OSError)):
        with pytest.raises(error):
            write_atomic(target, text)
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


LOST, CUT, WELL = "hgx-h100-sick-lost", "hgx-h100-sick-nvlink", "hgx-h100-01"


def test_junit_and_github_name_the_node_of_every_finding(tmp_path: Path) -> None:
    """The suite, its host and the message itself, which viewers show alone; of three nodes one is healthy."""
    for name in ("hgx-h100-8xH100-8hca", "sick-h100-gpu-lost", "sick-h100-nvlink-missing"):
        shutil.copy(path_of(name), tmp_path)
    words = ("preflight", "-q", "--host", tmp_path, "-o")
    junit, github = (topoflight(*words, form).stdout for form in ("junit", "github"))
    root = ElementTree.fromstring(junit)  # noqa: S314 - our own text
    failures = [(suite, case) for suite in root for case in suite if case.find("failure") is not None]
    assert failures
    for suite, case in failures:
        failure = case.find("failure")
        assert suite.get("hostname") == suite.get("name")
        assert failure.get("message").startswith(f"{suite.get('name')}: ")
    lines = github.splitlines()
    assert lines
    assert all(re.match(rf"::\w+ title=\S+( \S+)* on ({LOST}|{CUT}|{WELL})::", line) for line in lines), lines


@each_row("door", ["/cluster", "/nodes"])
def test_before_the_first_scan_the_cluster_is_503_like_readyz(door: str) -> None:
    """Nothing is known of any node yet: no green page over none."""
    state = State(tuple, interval_seconds=3600)
    client = TestClient(create(state), raise_server_exceptions=False)  # without its life: nothing is scanned
    ready, answer = client.get("/readyz"), client.get(door)
    assert (ready.status_code, answer.status_code) == (503, 503)
    assert answer.headers["retry-after"] == ready.headers["retry-after"]
    assert answer.json()["detail"] == ready.json()["detail"] == "the first scan is not done yet"


STEERING = "\x1b]0;owned\x07\x1b[2J\x9b31m\x00\r::error::\u202egnp.exe\u2066 a\x7fb"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def recording(tmp_path: Path) -> str:
    """A sick machine whose names and words are hostile: hostname, product, board, driver and the kernel's log."""
    content: dict = json.loads(path_of("sick-h100-gpu-lost").read_text(encoding="utf-8"))
    answers = content["answers"]
    content["hostname"] = answers["identity"][""]["hostname"] = f"node{STEERING}"
    for path in answers["read_text"]:
        if path.endswith(("/product_name", "/board_id", "/fw_ver")):
            answers["read_text"][path] += STEERING
    answers["nvml"]["nvmlSystemGetDriverVersion"][""] = f"550{STEERING}"
    answers["nvml"]["nvmlDeviceGetName"]["gpu0"] = f"NVIDIA H100 80GB HBM3{STEERING}"  # so that models are mixed
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


@each_row(
    "words",
    [
        ("scan", "--all"), ("topo",), ("diff", path_of()), ("preflight", "-o", "table"), ("preflight", "-o", "junit"),
        ("preflight", "-o", "github"),
    ],
)  # fmt: skip
def test_control_characters_are_printed_by_no_verb(words: tuple[str, ...], recording: str, tmp_path: Path) -> None:
    verb, *options = words
    place = [recording] if verb == "diff" else ["--host", recording]
    made = topoflight(verb, *options, *place, TOPOFLIGHT_STATE=str(tmp_path))
    assert "owned" in made.output, made.output
    assert not STEERS.search(made.output), repr(STEERS.search(made.output))
    assert not any(line.startswith("::error::") for line in made.output.splitlines())
    if "junit" in words:
        ElementTree.fromstring(made.stdout)  # noqa: S314 - our own

"""What an engineer on call reads first: ten lines on a healthy thing, the verdict and what to do on the first."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from rigs.command import topoflight
from rigs.recorded import H100, path_of
from rigs.tables import each_row

from agent.base.units import hostlist
from agent.cli import networks
from agent.cli.main import VERBS
from agent.jobs.networks import Bar, NetworkBars
from agent.terminal.measured import bench
from collectives.bench.results import BenchResult, Measurement

DATA = Path(__file__).parents[2] / "agent/data/completions"
SOUND = (H100, "aws-p4d-8xA100-4efa", "gb200-nvl72-tray", "titan-rtx-2x-nv2", "cpu-only-vm")
LOG = """\
n1:10:20 [0] NCCL INFO NCCL version 2.27.7+cuda12.9
n1:10:20 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [receive] via NET/IB/0/GDRDMA
n1:10:20 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
n1:10:20 [0] NCCL INFO comm 0x1 rank 0 nranks 16 - Destroy COMPLETE
"""


def told(*words: object, columns: int = 80) -> list[str]:
    done = topoflight(*words, COLUMNS=str(columns))
    assert done.exit_code in (0, 3), done.output
    return done.stdout.rstrip("\n").splitlines()


@each_row("name", SOUND)
@each_row(
    "words", ["scan", "preflight -q", "topo", "recommend", "recommend --model Qwen2.5-0.5B --steps 100 --price 98"]
)
def test_ten_lines_on_a_healthy_thing_and_the_answer_on_the_first(name: str, words: str) -> None:
    verb, *options = words.split()
    lines = told(verb, "--host", path_of(name), *options)
    assert len(lines) <= 10, "\n".join(lines)
    assert max(map(len, lines)) <= 80
    if verb != "recommend":
        assert re.match(r"(✓ pass|\? unknown) .*→ ", " ".join(lines[:3])), lines[0]
    elif options:
        assert lines[0].startswith("Layout for Qwen2.5-0.5B: ✓ ")
        assert [line.split()[0] for line in lines[1:5]] == ["speed", "time", "cost", "memory"]
    else:
        assert re.match(r"Environment: ✓ (set \d+ variable|nothing to set).* → add --model for a layout", lines[0])


def test_what_time_and_cost_still_need_is_named_and_what_was_given_is_not() -> None:
    """Of the forecast of a whole run."""
    length = "--steps, --tokens, --epochs or --hours"
    for given, missing in ((), f"--price and {length}"), (("--price", "98"), length), (("--steps", "100"), "--price"):
        lines = told("recommend", "--machine", "p5.48xlarge", "--model", "Qwen2.5-0.5B", *given)
        assert f"  cost   not estimated. Add {missing}." in lines, "\n".join(lines)


def test_other_verbs_on_a_healthy_thing(tmp_path: Path) -> None:
    """Two equal recordings, an environment and a log without a fault: the verdict and what to do come first."""
    machine = path_of()
    (tmp_path / "nccl.log").write_text(LOG)
    (tmp_path / "job.env").write_text("NCCL_DEBUG=INFO\n")
    for words, first in (
        (("diff", machine, machine), "✓ nothing that matters for training differs → "),
        (("lint-env", tmp_path / "job.env", "--host", machine), "✓ no problems found in this environment → "),
        (("why", tmp_path / "nccl.log"), "fine: no fault found in what was read → "),
        (("evidence", tmp_path / "nccl.log"), "✓ no problem in the log"),
    ):
        lines = told(*words)
        assert lines[0].startswith(first) and len(lines) <= 10, "\n".join(lines)
        assert max(map(len, lines)) <= 80


def test_a_measurement_and_a_comparison_of_networks_open_with_the_verdict() -> None:
    """As the verbs print them: every result verified, every network run and proven."""
    measured = tuple(
        Measurement(op=op, backend="gloo", ranks=(0, 1), hosts=("n1", "n1"), bytes=size, iteration_seconds=(0.001,) * 9,
                    median_seconds=0.001, spread_ratio=0.04, algbw_bytes_per_second=1e9, busbw_bytes_per_second=1e9,
                    verified=True)
        for op in ("all_gather", "reduce_scatter", "all_reduce") for size in (1 << 16, 1 << 20)
    )  # fmt: skip
    result = BenchResult(measurements=measured, world_size=2, backend="gloo", hosts=("n1", "n1"), environment={},
                         versions={}, started_at_seconds=0.0, seconds=6.0)  # fmt: skip
    bars = tuple(
        Bar(network=name, status="measured", step_seconds=step, proof=(f"gloo: TCP over {name}",), carries="shaped")
        for name, step in (("eth0", 0.5), ("net1", 0.25))
    )
    found = NetworkBars(title="One fine-tune of a tiny Llama, by network", where="two namespaces of this host", nodes=2,
                        steps=10, node_hour_price=None, bars=bars)  # fmt: skip
    for draw, first in (
        (lambda out: bench(out, result), "✓ Measured: every result verified → save a baseline with --save FILE"),
        (lambda out: networks.show(out, found), "✓ net1 is the fastest (eth0 2 x as long) → "),
    ):
        out = Console(width=80, file=io.StringIO(), color_system=None)
        draw(out)
        lines = out.file.getvalue().rstrip("\n").splitlines()  # type: ignore[attr-defined]
        assert " ".join(lines[:2]).startswith(first) and len(lines) <= 10, "\n".join(lines)
    failed = replace(found, bars=(bars[0], replace(bars[1], status="failed", step_seconds=None, why="no route")))
    out = Console(width=80, file=io.StringIO(), color_system=None)
    networks.show(out, failed)
    assert out.file.getvalue().startswith("✗ not every network was measured: net1 failed →")  # type: ignore[attr-defined]


def test_a_dry_run_at_a_terminal_is_told_in_ten_lines_and_in_a_pipe_is_the_document(tmp_path: Path) -> None:
    words = ["launch", "--dry-run", "--host", str(path_of()), "--global-batch", "64", "--set",
             "max_steps=100", "--set", f"output_dir={tmp_path}"]  # fmt: skip
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "agent.cli", *words]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "80"}) as done:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal is EIO
            while part := os.read(ours, 65536):
                shown += part
        assert done.stderr is not None
        complaint = done.stderr.read().decode()
    os.close(ours)
    lines = shown.decode().rstrip().splitlines()
    assert done.returncode == 0, complaint
    assert lines[0].startswith("✓ Dry run succeeded. → ") and len(lines) <= 10, shown.decode()
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert yaml.safe_load(piped.stdout)["layout"]["world_size"] == 8


def fleet(folder: Path, faults: dict[str, list[int]], total: int) -> list[str]:
    """Recordings of nodes by number: those of `faults` are the built sick machines, the rest healthy."""
    kinds = {number: kind for kind, numbers in faults.items() for number in numbers}
    names = []
    for number in range(total):
        content = json.loads(path_of(kinds.get(number, H100)).read_text())
        name = f"gpu-{number:03d}"
        content["hostname"] = content["answers"]["identity"][""]["hostname"] = name
        (folder / f"{name}.json").write_text(json.dumps(content))
        names.append(name)
    return names


def expanded(text: str) -> set[str]:
    """The nodes that a list in Slurm's form stands for."""
    found = set(re.findall(r"gpu-\d{3}", text))
    for ranges in re.findall(r"gpu-\[([\d,-]+)\]", text):
        for first, last in (part.split("-") if "-" in part else (part, part) for part in ranges.split(",")):
            found |= {f"gpu-{number:03d}" for number in range(int(first), int(last) + 1)}
    return found


def test_a_fleet_is_told_by_fault_with_every_node_named(tmp_path: Path) -> None:
    """One fault on ten nodes, another on one: the lines do not grow with the nodes, and none is left out."""
    faults = {"sick-h100-dead-hca": [*range(1, 11)], "sick-h100-memlock-64KiB": [11]}
    names = fleet(tmp_path, faults, 12)
    lines = told("preflight", "-q", "--host", tmp_path, columns=60)
    text = "\n".join(lines)
    assert lines[0].startswith("✗ FAIL ") and len(lines) < 50
    assert max(map(len, lines)) <= 60
    unfolded = re.sub(r"\s+", " ", text)
    down = unfolded[unfolded.rindex("FAIL rdma.port.down on 10 nodes") :]
    assert expanded(down[: down.index("→")]) == {f"gpu-{number:03d}" for number in faults["sick-h100-dead-hca"]}
    assert "gpu-011" in unfolded[unfolded.index("✗ FAIL limits.memlock.low") :]
    assert expanded(unfolded) == set(names)


def test_a_name_shows_all_of_one_node_device_or_code(tmp_path: Path) -> None:
    fleet(tmp_path, {"sick-h100-dead-hca": [1]}, 2)
    node = "\n".join(told("scan", "--host", tmp_path, "gpu-001"))
    assert "rdma.port.down" in node and "gpu-000" not in node and "probe " in node
    assert "mlx5_3:1" in "\n".join(told("scan", "--host", tmp_path, "mlx5_3:1"))
    wrong = topoflight("scan", "--host", tmp_path, "gpu-009")
    assert wrong.exit_code == 2 and "gpu-009" in wrong.output and "gpu-000" in wrong.output


def test_hosts_as_slurm_writes_them() -> None:
    assert hostlist(["b", "a"]) == "b, a"
    assert hostlist([f"n{i:02d}" for i in range(1, 12)]) == "n[01-11]"
    assert hostlist(["n9", "n10", "n12"], plain=0) == "n[9,10,12]"
    assert hostlist(["login", "n1-ib", "n2-ib"], plain=0) == "login, n[1-2]-ib"


def test_the_demo_names_its_faults_and_says_that_it_is_built() -> None:
    text = "\n".join(told("demo"))
    assert "built-in example" in text
    for code in ("gpu.nvlink.missing", "gpu.thermal.throttling", "rdma.port.down"):
        assert code in text, code


def complete(shell: str, line: str) -> list[str]:
    words = line.split(" ")
    env = {"PATH": str(Path(sys.executable).parent), "_TOPOFLIGHT_COMPLETE": f"{shell}_complete", "COMP_WORDS": line,
           "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1)}  # fmt: skip
    return subprocess.run(["topoflight"], env=env, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.long
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_verbs_options_and_choices(shell: str) -> None:
    """By click's own protocol, as the script that it prints asks."""
    assert {verb for verb in VERBS if any(verb in each for each in complete(shell, "topoflight "))} == set(VERBS)
    assert any("--baseline" in each for each in complete(shell, "topoflight preflight --bas"))
    assert any("qlora" in each for each in complete(shell, "topoflight recommend --method q"))


@each_row(("shell", "shipped"), [("bash", "topoflight.bash"), ("zsh", "_topoflight"), ("fish", "topoflight.fish")])
def test_the_script_for_a_shell_is_one_that_it_can_read(shell: str, shipped: str) -> None:
    """And the file that the wheel carries asks the command for it."""
    assert f"_TOPOFLIGHT_COMPLETE={shell}_source topoflight" in (DATA / shipped).read_text()
    env = {"PATH": str(Path(sys.executable).parent) + ":/usr/bin:/bin", "_TOPOFLIGHT_COMPLETE": f"{shell}_source"}
    script = subprocess.run(["topoflight"], env=env, capture_output=True, text=True, check=True).stdout
    assert f"{shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
    if shell == "bash":  # and it works in one
        asks = "COMP_WORDS=(topoflight pre); COMP_CWORD=1; _topoflight_completion topoflight pre; echo ${COMPREPLY[@]}"
        del env["_TOPOFLIGHT_COMPLETE"]
        done = subprocess.run(["bash", "-c", f"{script}\n{asks}"], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["preflight"]


@each_row("columns", [40, 60, 80, 100, 140])
def test_a_table_breaks_lines_between_words_and_stacks_its_rows_where_they_do_not_fit(columns: int) -> None:
    """No heading and no name of a machine is cut, however narrow the terminal."""
    asked = ("recommend", "--machine", "p5.48xlarge,p4d.24xlarge", "--model", "Llama-3.1-8B")
    lines = told(*asked, "--sweep", "nodes=1,2", "--price", "98", columns=columns)
    words = {word for line in lines for word in line.split()}
    assert {"machine", "network", "tokens/s", "GPU-hours", "cost", "p5.48xlarge", "p4d.24xlarge"} <= words
    assert max(len(line) for line in lines) <= columns
    stacked = sum(line.startswith("machine") for line in lines)
    assert stacked == (4 if columns < 80 else 0)

"""What surrounds a user: pipes that close, terminals of any encoding and width, files that refuse, Ctrl-C; exit codes.

docs/reference/exit-codes.md names every verb, and every code of it is run here or in the test named.
"""

import gzip
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from api_server import write_kubeconfig
from click.testing import Result
from resident import free_port
from rigs.benchmarks import OWN_LOCK, require_own_lock
from rigs.command import MODULE, drawn, interpreter, process, topoflight
from rigs.forking import forking_environment
from rigs.recorded import path_of
from rigs.results import benchmark, measurement
from rigs.tables import ROOT, data_of, each_row
from rigs.waiting import eventually

from agent.base import EXIT_CLOSED_PIPE, units
from agent.base.output import explain_unwritable, write_atomic
from agent.cli.bench import _choose_exit_code
from agent.cli.main import VERBS, cli
from agent.cluster.client import connect
from agent.jobs.networks import DEFAULT_NETWORKS
from agent.terminal import measured
from collectives.bench.results import Bar
from planner.kubernetes.manifests import DEVICE_CLASSES, RESTARTS
from planner.lint.sources import KINDS

SICK = str(path_of("sick-h100-dead-hca"))
BAD_LOG = "n1:10:20 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n" * 20


def run(words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of bash in which `topoflight` is this checkout's."""
    line = f'topoflight() {{ "{sys.executable}" -m agent.cli "$@"; }}; {words}'
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, timeout=250, env=os.environ | environment, check=False
    )


@pytest.mark.long
@each_row(
    ("words", "reader", "code"),
    [(f"preflight -q --host {SICK} -v --report r", "true", 3), ("evidence log -o json", "true", 3),
     (f"scan --host {SICK} -o json", "head -c 1", 0)],
)  # fmt: skip
def test_a_closed_pipe_keeps_the_verdict(tmp_path: Path, words: str, reader: str, code: int) -> None:
    """The verdict's own code, or the shell's for a closed pipe, never 0; a report is written all the same."""
    (tmp_path / "log").write_text(BAD_LOG)
    done = run(f"cd {tmp_path}; topoflight {words} | {reader} > /dev/null; exit ${{PIPESTATUS[0]}}")
    assert done.returncode in (code, EXIT_CLOSED_PIPE), done.stderr
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr
    assert "--report" not in words or (tmp_path / "r" / "report.json").exists()


def test_a_source_tree_that_is_not_installed_has_a_version() -> None:
    """An interpreter without site-packages (-S) finds no metadata of the package."""
    done = interpreter("-S", "-c", "from agent.base import version; print(version())")
    assert done.stdout == "0+unknown\n", done.stderr


@each_row(
    ("encoding", "words", "code", "shown"),
    [("ascii", f"scan --host {SICK}", 0, b"? FAIL "), ("koi8-r", "explain gpu.pcie.width", 0, b"Meaning: "),
     ("cp437", "x-\u0394", 2, b"'x-?'")],
)  # fmt: skip
def test_terminals_that_are_not_utf_8(encoding: str, words: str, code: int, shown: bytes) -> None:
    """A letter that the encoding lacks becomes a question mark, and ends nothing."""
    done = run(f"topoflight {words}", PYTHONIOENCODING=encoding)
    assert done.returncode == code and shown in done.stdout + done.stderr, done


def test_why_a_path_cannot_be_written(tmp_path: Path) -> None:
    """Files, folders, what is neither, and what exists not yet."""
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_text("")
    os.mkfifo(pipe)
    rows = [
        (tmp_path / "new", False, ""), (file, False, ""), (Path("/dev/null"), False, ""), (tmp_path, False, "a folder"),
        (tmp_path / "a" / "b", False, "does not exist"), (file / "b", False, "is not a folder"),
        (tmp_path / "a" / "b", True, ""), (file / "b", True, "is not a folder"), (file, True, "is not a folder"),
        (Path("/proc/nothing/x"), True, "cannot be written to"),
    ]  # fmt: skip
    wrong = [(path, why) for path, folder, part in rows
             if (part not in (why := explain_unwritable(path, folder=folder))) or (not part and why)]  # fmt: skip
    assert not wrong or (os.geteuid() == 0 and [path for path, _ in wrong] == [Path("/proc/nothing/x")])
    write_atomic(Path("/dev/null"), "x")
    assert Path("/dev/null").is_char_device(), "a device is written to and never replaced"


@pytest.mark.long
def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    """While modules are imported, while an API server is waited for, and while requests could be answered."""
    # a background job of a shell ignores it, and so would its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = free_port()
        config = write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        deaf.settimeout(120)

        def is_importing(process: subprocess.Popen[bytes]) -> bool:
            return "_pydantic_core" in Path(f"/proc/{process.pid}/maps").read_text()

        def is_served(_: object) -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        serve = ["serve", "--host", SICK, "--port", str(port)]
        rows = [
            (serve, is_importing), (["preflight", "-q", "--nodes", "a"], lambda _: deaf.accept()), (serve, is_served),
        ]  # fmt: skip
        wrong = []
        for words, ready in rows:
            with subprocess.Popen([sys.executable, *MODULE, *words], env=os.environ | {"KUBECONFIG": str(config)},
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:  # fmt: skip
                try:
                    eventually(lambda ready=ready, process=process: ready(process), words[0])
                    process.send_signal(signal.SIGINT)
                    _, errors = process.communicate(timeout=250)
                finally:
                    process.kill()
            if process.returncode != 130 or b"Traceback" in errors:
                wrong.append((words, process.returncode, errors))
    assert not wrong


ONE = measurement(
    "reduce_scatter", 1.784e11, 8, backend="nccl", bytes=268435456, median_seconds=0.00123, spread_ratio=0.123,
    bars=(Bar(name="when healthy", low=2.78e11, typical=3.32e11, high=4.24e11),),
    expected_busbw_bytes_per_second=3.32e11,
)  # fmt: skip
RESULT = benchmark(ONE)


def test_no_value_is_parted_from_its_unit_or_cut() -> None:
    """From 80 columns on; in a narrower terminal a value may be broken, and no character of it is lost."""
    values = ("256.0 MiB", "1.23 ms", "12.3 %", "178 GB/s")
    shown = {width: drawn(measured.print_benchmark, RESULT, width=width, verbose=True) for width in range(40, 161)}
    assert not [
        (width, value) for width, text in shown.items() for value in values if width >= 80 and value not in text
    ]
    assert len({"".join(sorted(re.sub(r"[\s─]", "", text))) for text in shown.values()}) == 1
    lines = shown[80].splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 12, "80 columns, the default in pipes, hold a table"


def test_a_benchmark_that_was_interrupted_is_no_failure_and_no_pass() -> None:
    """The first line and the exit code, of Ctrl-C, SIGTERM and a run that ended by itself."""
    rows = [("SIGINT", 130, "? unknown Measured: stopped by SIGINT"), ("SIGTERM", 3, "? unknown Measured: stopped by"),
            (None, 3, "✗ FAIL Measured: the run ended early; 1 result verified")]  # fmt: skip
    for stopped, code, first in rows:
        cut = replace(RESULT, complete=False, stopped_by=stopped, problems=("ended",))
        assert drawn(measured.print_benchmark, cut, width=120, verbose=True).startswith(first)
        assert _choose_exit_code(cut, well=True) == code


@pytest.mark.long
def test_an_api_server_that_hangs_is_given_up_soon(tmp_path: Path) -> None:
    """It takes connections and never answers: as many as are tried, each at the limit, stay below 15 s together."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{server.getsockname()[1]}")
        client = connect(None, {"KUBECONFIG": str(config)}).brief()
        assert client._tries * 2 * client._timeout + 0.75 * (client._tries - 1) < 12  # half a second, spread by half
        done = run("topoflight preflight -q --nodes a", KUBECONFIG=str(config))
    assert done.returncode == 1 and b"cannot be reached" in done.stderr and b"Traceback" not in done.stderr


def test_sizes_as_people_write_them() -> None:
    """IEC and SI, with and without a B, any case; what is no size is None."""
    none = ("", "G", "-1", "1e3", "16XB", "1 2")
    rows = {"16G": 16 * 10**9, "16Gi": 2**34, "16GiB": 2**34, "16 GB": 16 * 10**9, "1.5k": 1500, "65536": 65536, "0": 0,
            "8mib": 2**23, "2T": 2 * 10**12, **dict.fromkeys(none)}  # fmt: skip
    assert {text: units.parse_size(text) for text in rows} == rows
    assert all(re.fullmatch(r"[KMGT]?i?B?", unit) for unit in units.SIZES)


MATRIX = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\r\nGPU0\t X \tNV4\t0-31\t0\r\nGPU1\tNV4\t X \t32-63\t1\r\n"
XML = """<system version="1"><cpu numaid="0" arch="x86_64">
<pci busid="0000:01:00.0" class="0x030200"/><pci busid="0000:02:00.0" class="0x030200"/></cpu></system>
"""
SHAPES = {
    "UTF-8": lambda text: text.encode(),
    "UTF-8 with a mark": lambda text: text.encode("utf-8-sig"),
    "UTF-16 with a mark": lambda text: text.encode("utf-16"),
    "UTF-16 little-endian": lambda text: text.encode("utf-16-le"),
    "UTF-16 big-endian": lambda text: text.encode("utf-16-be"),
    "gzip": lambda text: gzip.compress(text.encode()),
    "gzip of UTF-16": lambda text: gzip.compress(text.encode("utf-16")),
}


def topology_from(raw: bytes, tmp_path: Path) -> Result:
    given = tmp_path / "given"
    given.write_bytes(raw)
    return topoflight("topo", "--from", given, "-o", "json")


@each_row("shape", SHAPES)
@each_row(("text", "labels"), [(MATRIX, ["NV4"]), (XML, ["PHB"])], ids=["matrix", "XML"])
def test_the_same_text_in_other_bytes_says_the_same(shape: str, text: str, labels: list[str], tmp_path: Path) -> None:
    result = topology_from(SHAPES[shape](text), tmp_path)
    assert result.exit_code == 0, result.output
    assert [pair["label"] for pair in json.loads(result.output)["pairs"]] == labels


def test_a_matrix_in_html_is_no_xml(tmp_path: Path) -> None:
    result = topology_from(f"<details><summary>Topology</summary>\n<pre>\n{MATRIX}</pre>\n".encode(), tmp_path)
    assert [pair["label"] for pair in json.loads(result.output)["pairs"]] == ["NV4"]


@each_row(
    ("raw", "told"),
    [
        (gzip.compress(MATRIX.encode())[:40], "not a whole gzip file"),
        (b'<graphs version="1"><graph id="0" pattern="4"/></graphs>', "NCCL_GRAPH_DUMP_FILE"),
    ],
)
def test_what_is_no_topology_is_named(raw: bytes, told: str, tmp_path: Path) -> None:
    result = topology_from(raw, tmp_path)
    assert result.exit_code == 2 and told in result.output


TABLE = data_of(__file__, "exit_codes.toml")
CASES = {(row["verb"], row["code"]): row for row in TABLE["cases"]}
MACHINES = {"SOUND": path_of(), "SICK": path_of("sick-h100-dead-hca"), "L40S": path_of("l40s-4x-pcie"),
            "VM": path_of("cpu-only-vm")}  # fmt: skip
SOUND = MACHINES["SOUND"]
RANKS = {(row["verb"], row["code"]): row for row in TABLE["ranks"]}
ELSEWHERE = {(row["verb"], row["code"]): row["test"] for row in TABLE["elsewhere"]}
AS_PROCESSES = (("evidence", 0), ("evidence", 2), ("evidence", 3))  # the quickest verb; the others run in this process


def filled(row: dict, **places: Path) -> tuple[list[str], str]:
    """The words of a row, and what is on its standard input."""
    words = shlex.split(row.get("words", ""))
    for name, place in {**MACHINES, **places}.items():
        words = [
            word if word.startswith("--") and "=" not in word else word.replace(name, str(place)) for word in words
        ]
    given = row.get("given", "")
    return words, TABLE.get(given, given)


def test_the_page_names_every_verb_and_each_cell_has_its_proof() -> None:
    """A verb or a code that is added without its line and its case is found here."""
    cells: set[tuple[str, int]] = set()  # of each verb those that the page lists, and 2
    for line in (ROOT / "docs/reference/exit-codes.md").read_text().splitlines():
        if found := re.match(r"\| `([a-z-]+)` \| (.*) \|$", line):
            cells |= {(found[1], int(code)) for code in re.findall(r"\*\*(\d+)\*\* \w", found[2])}
            cells.add((found[1], 2))
    assert {verb for verb, _ in cells} == set(VERBS)
    assert cells == {*CASES, *RANKS, *ELSEWHERE}
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), place


@each_row(("verb", "code"), sorted(CASES))
def test_a_verb_ends_as_the_table_says(verb: str, code: int) -> None:
    """Bad input is named on standard error, and no result is printed."""
    words, given = filled(CASES[verb, code])
    done = topoflight(verb, *words, given=given)
    assert done.exit_code == code, done.output
    if code == 2:
        assert done.stdout == "" and any(word.partition("=")[0] in done.stderr for word in words)


@each_row("row", TABLE["mistakes"])
def test_a_mistake_of_the_user_is_said_before_anything_is_done(row: dict, tmp_path: Path) -> None:
    """Exit code 2 and what is wrong, by the option's or the file's name."""
    places = {"FILE": tmp_path / "file", "FOLDER": tmp_path, "MISSING": tmp_path / "none" / "x.json"}
    places["FILE"].write_text(row.get("file", ""), encoding="latin-1")
    words, given = filled(row, **places)
    done = topoflight(*words, given=given)
    says = " ".join(str(places.get(word, word)) for word in row["says"].split(" "))
    assert done.exit_code == 2 and says in " ".join(done.stderr.split()), done.output
    assert done.stdout == "" and "-- measure" not in done.stderr and row.get("lacks", "\0") not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@each_row(("verb", "code"), AS_PROCESSES)
def test_a_process_ends_as_the_verb_does_in_this_one(verb: str, code: int) -> None:
    words, given = filled(CASES[verb, code])
    done, here = process(verb, *words, given=given), topoflight(verb, *words, given=given)
    assert (done.returncode, done.stderr) == (code, here.stderr), "and no traceback"
    assert done.stdout.split() == here.stdout.split()


@pytest.mark.ranks
@pytest.mark.netns
@pytest.mark.parametrize(("verb", "code"), sorted(RANKS))
def test_a_verb_that_makes_load_ends_as_the_table_says(verb: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured for real, or ended because the ranks do not meet."""
    require_own_lock()
    monkeypatch.setattr(sys, "executable", forking_environment())
    absent = {"GLOO_SOCKET_IFNAME": "nosuch0"} if code else {}
    row = RANKS[verb, code]
    done = process(verb, *row["words"].split(), before=OWN_LOCK, **absent)
    assert done.returncode == code and row.get("says", "") in " ".join(done.stdout.split()), done.stdout + done.stderr


def test_machine_list_is_an_answer() -> None:
    """Of every verb that takes a machine."""
    for verb in ("recommend", "launch"):
        done = topoflight(verb, "--machine", "list")
        assert done.exit_code == 0 and "p5.48xlarge" in done.stdout and "(also p5)" in done.stdout, done.stderr


@each_row("form", ["json", "env", "finetune"])
def test_a_layout_that_does_not_fit_is_the_same_in_every_form(form: str) -> None:
    """What needs no layout is printed; the code says that there is none."""
    done = topoflight("recommend", *filled(CASES["recommend", 3])[0], "-o", form)
    assert done.exit_code == 3 and "no layout of Llama-3.1-70B fits" in done.stderr
    if form == "json":
        assert json.loads(done.stdout)["chosen"] is None
    table = topoflight("recommend", "--host", MACHINES["VM"], "--model", "Llama-3.1-70B")
    assert table.exit_code == 3 and "memory per rank" in table.stdout and "memory per rank" not in table.stderr
    assert "no GPU was found" in table.stdout


def test_a_port_in_use_is_no_verdict() -> None:
    """1, with uvicorn's own words."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = process("serve", "--host", SOUND, "--port", taken.getsockname()[1])
    assert done.returncode == 1 and "in use" in done.stderr


def test_run_passes_on_what_its_command_has_as_options(tmp_path: Path) -> None:
    """Also options of the command that `run` itself has, without `--` before the command."""
    shown = (sys.executable, "-c", "import os, sys; print(sys.argv[1:], os.environ['TOPOFLIGHT_RUN'])")
    for separator in ((), ("--",)):
        done = process("run", "--folder", tmp_path, *separator, *shown, "--folder", "data", "-h", "--", "x")
        expected = f"['--folder', 'data', '-h', '--', 'x'] {tmp_path}"
        assert done.stdout.strip() == expected, (separator, done.stdout, done.stderr)


@each_row(
    ("verb", "option", "said"),
    [
        ("launch", "restarts", str(RESTARTS)),
        ("launch", "dra", f"gpu={DEVICE_CLASSES[0]} and nic={DEVICE_CLASSES[1]}"),
        ("compare-networks", "networks", " and ".join(DEFAULT_NETWORKS)),
        ("lint-env", "kind", f"auto|{'|'.join(KINDS)}"),
    ],
)
def test_options_say_what_the_code_does(verb: str, option: str, said: str) -> None:
    """Defaults and choices that the tables of options repeat are those of the code."""
    command = cli.get_command(click.Context(cli), verb)
    (one,) = [each for each in command.params if each.name == option]
    assert said in " ".join(one.get_help_record(click.Context(command)) or ())

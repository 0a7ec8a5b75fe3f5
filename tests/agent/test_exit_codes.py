"""docs/reference/exit-codes.md: every verb in it, and every code run here or in the test named."""

import json
import re
import shlex
import socket
import sys
import tomllib
from pathlib import Path

import click
import pytest
from rigs.benchmarks import OWN_LOCK, require_own_lock
from rigs.command import process, topoflight
from rigs.forking import forking_environment
from rigs.recorded import path_of
from rigs.tables import ROOT, each_row

from agent.cli.main import VERBS, cli
from agent.jobs.networks import DEFAULT_NETWORKS
from planner.kubernetes.manifests import DEVICE_CLASSES, RESTARTS
from planner.lint.sources import KINDS

TABLE = tomllib.loads(Path(__file__).with_name("exit_codes.toml").read_text(encoding="utf-8"))
CASES = {(row["verb"], row["code"]): row for row in TABLE["cases"]}
MACHINES = {"SOUND": path_of(), "SICK": path_of("sick-h100-dead-hca"), "L40S": path_of("l40s-4x-pcie"),
            "VM": path_of("cpu-only-vm")}  # fmt: skip
SOUND = MACHINES["SOUND"]
RANKS = {(row["verb"], row["code"]): row["words"].split() for row in TABLE["ranks"]}
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
    assert done.stdout == "" and "-- measure" not in done.stderr
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
    done = process(verb, *RANKS[verb, code], before=OWN_LOCK, **absent)
    assert done.returncode == code, done.stderr


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

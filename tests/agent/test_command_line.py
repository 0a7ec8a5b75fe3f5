"""Every verb answers for help and for bad input: exit code 2 or 1, one line that names what is wrong, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
from rigs.tables import each_row

from agent.cli.main import VERBS, cli, expand_hosts
from agent.cli.networks import DEFAULT_NETWORKS
from planner.kubernetes.job import DEVICE_CLASSES, RESTARTS
from planner.lint.sources import KINDS

MACHINES = sorted((Path(__file__).parent.parent / "machines").glob("*.json"))


def topoflight(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agent.cli", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@each_row("verb", VERBS)
def test_every_verb_is_wired_and_has_help(verb: str) -> None:
    """The table of verbs names commands that exist."""
    command = cli.get_command(None, verb)  # type: ignore[arg-type]
    assert command is not None
    assert command.name == verb
    assert command.help


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
    command = cli.get_command(None, verb)  # type: ignore[arg-type]
    assert command is not None
    (one,) = [each for each in command.params if each.name == option]
    assert said in " ".join(one.get_help_record(click.Context(command)) or ())


BAD = [
    (("nonsense",), 2, "nonsense"),
    (("scan", "--host", "missing.json"), 2, "missing.json"),
    (("scan", "-o", "xml"), 2, "xml"),
    (("recommend", "--model", "no-such-model"), 2, "no-such-model"),
    (("recommend", "--machine", "p99"), 2, "p99"),
    (("recommend", "-o", "toml"), 2, "toml"),
    (("recommend", "--nccl", "two"), 2, "two"),
    (("preflight", "--require", "no.such"), 2, "no.such"),
    (("preflight", "-o", "pdf"), 2, "pdf"),
    (("explain", "rdma.port.dwon"), 2, "rdma.port.down"),
    (("diff", "a.json"), 2, "a.json"),
    (("bench", "--precision", "tight"), 2, "tight"),
    (("bench", "--op", "all_to_none"), 2, "all_to_none"),
    (("evidence", "missing.log"), 2, "missing.log"),
    (("topo", "--from", "missing.txt"), 2, "missing.txt"),
    (("lint-env", "missing.env"), 2, "missing.env"),
]


@each_row(("words", "code", "names"), BAD, ids=[" ".join(words) for words, _, _ in BAD])
def test_bad_input_is_named_without_a_traceback(words: tuple[str, ...], code: int, names: str) -> None:
    """Exit 2 for usage and for an input that cannot be read; stdout stays empty."""
    done = topoflight(*words)
    assert done.returncode == code, done.stderr
    assert names in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_results_are_on_stdout_alone() -> None:
    """A document that can be piped into jq."""
    done = topoflight("scan", "--host", str(MACHINES[0]), "-o", "json")
    assert json.loads(done.stdout)["snapshot"]["hostname"]


def test_a_closed_pipe_is_no_error() -> None:
    """`topoflight scan | head -1`."""
    words = f"{sys.executable} -m agent.cli scan --host {MACHINES[0]} -o json"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{words} | head -1"], capture_output=True, text=True, timeout=250
    )
    assert done.stdout.startswith("{")
    assert "Traceback" not in done.stderr


def test_a_wildcard_after_host_means_every_file(tmp_path: Path) -> None:
    """The shell expands `--host *.json` to several words."""
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    for path in (a, b):
        path.write_text("{}")
    words = ["diff", str(a), str(b), "--host", str(a), str(b), "-o", "json"]
    assert expand_hosts(words) == ["diff", str(a), str(b), "--host", str(a), "--host", str(b), "-o", "json"]


def test_corrupt_recording_is_refused_by_name(tmp_path: Path) -> None:
    """Half a file, or a newer schema: said, not guessed."""
    whole = MACHINES[0].read_text()
    for name, text in (
        ("half.json", whole[: len(whole) // 2]),
        ("newer.json", whole.replace('"schema_version": 1', '"schema_version": 99', 1)),
    ):
        path = tmp_path / name
        path.write_text(text)
        done = topoflight("scan", "--host", str(path))
        assert done.returncode == 2
        assert name in done.stderr
        assert "Traceback" not in done.stderr


def test_help_pays_for_no_library() -> None:
    """`--help` lists the verbs without importing what they need."""
    code = (
        "import sys; from agent.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = ('rich', 'fastapi', 'torch', 'pynvml', 'pyroute2', 'jinja2', 'cattrs')\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert done.stderr.strip() == "[]"

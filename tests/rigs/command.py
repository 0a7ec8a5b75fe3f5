"""`topoflight` as a user runs it: in this process (a second of CPU less), in a separate one, or on a terminal."""

import contextlib
import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result
from rigs.tables import ROOT

from agent.cli.main import _run, cli

MODULE = ("-m", "agent.cli")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


class _Whole:
    """What click's runner takes for a command: errors turned into codes as in a process."""

    name = "topoflight"

    def main(self, args: list[str], **_: Any) -> None:
        """Ends with the exit code."""
        sys.exit(_run(list(args)))


def topoflight(*words: object, given: str = "", **environment: str | None) -> Result:
    """Exit code, stdout and stderr of one command in a terminal of 80 columns; raises what would be a traceback."""
    done = CliRunner().invoke(
        _Whole(),
        [str(word) for word in words],
        input=given,
        env={"COLUMNS": "80", **environment},  # type: ignore[arg-type]
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def process(*words: object, given: str = "", cwd: Path = ROOT, before: Iterable[str] = (), seconds: float = 600,
            **environment: str) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """The command in a separate process, which the words of `before` start; its output is captured."""
    return _process([*before, sys.executable, *MODULE, *map(str, words)], given, cwd, seconds, environment)


def python(code: str, *words: object, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A script in a fresh interpreter at the top of the repository; a failure raises with its output."""
    done = _process([sys.executable, "-c", code, *map(str, words)], given, ROOT, 600, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def interpreter(
    *words: object, seconds: float = 600, cwd: Path = ROOT, without: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with these words and one thread; without variables that begin with one of `without`."""
    usual = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return _process([sys.executable, *map(str, words)], "", cwd, seconds, usual | environment, without)


def _process(command: list[str], given: str, cwd: Path, seconds: float, environment: dict[str, str],
             without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    return subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=seconds, check=False, cwd=cwd,
        env=inherited | {"COLUMNS": "80"} | environment,
    )  # fmt: skip


def on_a_terminal(*words: str, **environment: str) -> tuple[int, str]:
    """Exit code, and what a person sees on a terminal of 80 columns."""
    child, terminal = pty.fork()
    if child == 0:
        here = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color", **environment}
        for name in {"CI", "NO_COLOR", "FORCE_COLOR"} - set(environment):  # of the shell that runs the tests
            here.pop(name, None)
        os.execve(sys.executable, [sys.executable, *MODULE, *words], here)  # noqa: S606
    seen = b""
    with contextlib.suppress(OSError):  # Linux says EIO when the other end is closed
        while chunk := os.read(terminal, 65536):
            seen += chunk
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), seen.decode()


def drawn(draw: Callable[..., None], *what: object, width: int = 80, **options: bool) -> str:
    """What a function of agent/terminal draws of a thing in a pipe of this width."""
    from rich.console import Console

    out = Console(file=io.StringIO(), width=width, highlight=False, emoji=False)
    draw(out, *what, **options)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def parse(words: list[str]) -> click.Command:
    """The verb of a command line, whose options exist and take these values; it is not run."""
    verb, *rest = words
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None, f"no verb {verb}"
    command.make_parser(click.Context(command)).parse_args(rest)
    return command

"""`topoflight` in this process, as its entry point runs it: a second of CPU less than a process of its own."""

from __future__ import annotations

import sys
from typing import Any

from click.testing import CliRunner, Result

from agent.cli.main import _run, expand_hosts


class _Whole:
    """What click's runner takes for a command: words expanded and errors turned into codes as in a process."""

    name = "topoflight"

    def main(self, args: list[str], **_: Any) -> None:
        """Ends with the exit code."""
        sys.exit(_run(expand_hosts(list(args))))


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

"""What every part of the agent shares: errors, exit codes, units, files and terminal output.

docs/reference/exit-codes.md explains the exit codes, which are those of all verbs.
"""

from __future__ import annotations

from functools import cache

EXIT_PASS = 0
EXIT_TOOL_ERROR = 1
EXIT_USAGE = 2
EXIT_FAILED = 3
EXIT_WARNED = 4
EXIT_UNKNOWN = 5
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: ended from outside before it was done
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports Ctrl-C
EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE, as a shell reports a program whose reader has left


@cache
def version() -> str:
    """Return the version of the installed package: it is written in one place, pyproject.toml."""
    from importlib import metadata  # imports as much as all else that --help needs

    try:
        return metadata.version("topoflight")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"

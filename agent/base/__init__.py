"""Code shared by all parts of the agent: errors, exit codes, units, files and terminal output.

docs/reference/exit-codes.md describes the exit codes, which are the same for all verbs.
"""

from __future__ import annotations

import sys
from functools import cache

EXIT_PASS = 0
EXIT_TOOL_ERROR = 1
EXIT_USAGE = 2
EXIT_FAILED = 3
EXIT_WARNED = 4
EXIT_UNKNOWN = 5
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: stopped by a signal before completion
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports Ctrl-C
EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE, as a shell reports a program whose reader closed the pipe


@cache
def version() -> str:
    """Return the version of the installed package, which is defined only in pyproject.toml.

    It is in the name of the package's folder: importlib.metadata would take 0.1 s of CPU time.
    """
    from pathlib import Path  # --help does not need it

    folders = (found.name for path in sys.path for found in Path(path).glob("topoflight-*.dist-info"))
    name = next(folders, "topoflight-0+unknown")  # run from a source tree without installation
    return name.removeprefix("topoflight-").removesuffix(".dist-info")

"""Code shared by all parts of the agent; this module has the exit codes, the version, and the output streams.

docs/reference/exit-codes.md describes the exit codes, which are the same for all verbs. Only the standard library is
imported, because every verb runs this code before it loads anything else.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
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

    folders = (folder.name for path in sys.path for folder in Path(path).glob("topoflight-*.dist-info"))
    name = next(folders, "topoflight-0+unknown")  # run from a source tree without installation
    return name.removeprefix("topoflight-").removesuffix(".dist-info")


def prepare_streams() -> None:
    """Prevent tracebacks caused by characters that cannot be encoded or by streams that were closed at start."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `topoflight scan >&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for the whole process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def log_to_stderr(verbose: int = 0) -> None:
    """Write the log to stderr with secrets redacted: warnings, from `verbose` 1 information, from 2 debug messages."""
    import logging  # takes a tenth of the time of --help, which logs nothing

    class RedactedFormatter(logging.Formatter):
        """Redact secrets in whole log lines: message, arguments and traceback."""

        def format(self, record: logging.LogRecord) -> str:
            """Format the record, then redact it. The patterns are loaded on first use: few verbs log anything."""
            from contracts.redaction import redact

            return redact(super().format(record))

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactedFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=(logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)], handlers=[handler])


def discard_output() -> None:
    """Redirect stdout to /dev/null after its reader closed the pipe, so that the verb can finish its work."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def flush_output() -> None:
    """Flush buffered output. Raises OSError if a disk is full; a closed pipe is not an error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


@contextlib.contextmanager
def raise_as(
    make_error: Callable[[str], Exception], caught: type[Exception] | tuple[type[Exception], ...], prefix: str = ""
) -> Iterator[None]:
    """Convert errors of these classes; the message is `prefix`, which names the file or option, and the reason."""
    try:
        yield
    except caught as error:
        reason = getattr(error, "strerror", None) if prefix else None  # without the path, which the prefix has
        raise make_error(f"{prefix}{reason or error}") from None

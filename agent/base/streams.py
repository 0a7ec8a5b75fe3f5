"""Write to stdout and stderr even if they are closed, have no reader, or use an encoding that lacks characters.

Only the standard library is imported, because every verb runs this code before it loads anything else.
"""

from __future__ import annotations

import contextlib
import os
import sys


def prepare() -> None:
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


def flush() -> None:
    """Flush buffered output. Raises OSError if a disk is full; a closed pipe is not an error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()

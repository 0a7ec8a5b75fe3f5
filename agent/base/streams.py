"""Write to stdout and stderr even if they are closed, have no reader, or use an encoding that lacks characters.

Only the standard library is imported, because every verb runs this code before it loads anything else.
"""

from __future__ import annotations

import contextlib
import logging
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


class _RedactedFormatter(logging.Formatter):
    """Redact secrets in whole log lines: message, arguments and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record, then redact it. The patterns are loaded on first use, because few verbs log anything."""
        from contracts.redaction import redact

        return redact(super().format(record))


def log_to_stderr(level: int) -> None:
    """Write the log to stderr, with secrets redacted."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RedactedFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


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

"""Write to standard output and error as they are: closed, without a reader, or in an encoding that lacks characters.

Only the standard library is imported, because every verb passes through here before it knows what it needs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys


def prepare() -> None:
    """Let no character and no stream that is closed from the start end a verb with a traceback."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `topoflight scan >&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for the whole process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


class _RedactedFormatter(logging.Formatter):
    """Leaves secrets out of whole lines of a log: message, arguments and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Format as usual, then redact; few verbs log anything, and the patterns take a while to load."""
        from contracts.redaction import redact

        return redact(super().format(record))


def log_to_stderr(level: int) -> None:
    """Write the log to standard error, without secrets."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RedactedFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def discard_output() -> None:
    """Send standard output to nowhere: its reader has left, and the verb goes on to its verdict and its files."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def flush() -> None:
    """Write what is still held back. Raises OSError where a disk is full; a closed pipe is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()

"""Write to standard output and error as they are: closed, without a reader, or in an encoding that lacks characters.

Only the standard library is imported, because every verb passes through here before it knows what it needs.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import sys
import unicodedata

UNENCODABLE = "topoflight"  # the error handler below
# What the tables draw and the sentences use, in ASCII. A pass and a failure must not both become "?".
_ASCII = {
    "✓": "+", "✗": "x", "→": "->", "←": "<-", "·": "-", "…": "...", "±": "+-", "µ": "u", "─": "-", "━": "-", "│": "|",
    "█": "#", "–": "-", "—": "-", "×": "x", "≥": ">=", "≤": "<=", "“": '"', "”": '"', "’": "'",
}  # fmt: skip


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """A codec's error handler: the nearest ASCII text of what the encoding lacks, "?" where there is none."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    near = (unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() for letter in letters)
    return "".join(_ASCII.get(letter, text or "?") for letter, text in zip(letters, near, strict=True)), error.end


codecs.register_error(UNENCODABLE, _in_ascii)


def prepare() -> None:
    """Let no character and no stream that is closed from the start end a verb with a traceback."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `topoflight scan >&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for the whole process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=UNENCODABLE)


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


def printable_in(text: str, encoding: str | None) -> str:
    """`text` with the ASCII form of each character that `encoding` lacks."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, UNENCODABLE).decode(encoding)


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

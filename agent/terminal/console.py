"""Where tables go: a terminal, or a pipe without padding."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from contracts.plain import printable


class _Plain:
    """A pipe without the blanks that tables pad their lines with."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Lines come whole from rich: what is blank before a line's end is padding."""
        self._stream.write(re.sub(r"[ \t]+(?=\n)", "", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Console(Console):
    """A console that leaves a closed pipe to `agent.cli.main`, which ends quietly."""

    def render_str(self, text: str, **options: Any) -> Text:
        """All text comes this way, that of records and recordings too; rich lets escape sequences pass."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error: let it go on."""
        raise BrokenPipeError


def console() -> Console:
    """Where tables go: colours on a terminal, plain lines of at most the terminal's width in a pipe.

    Without rich's emoji: `gpu-a:100:130` of a log is evidence, and no picture stands for its middle.
    """
    if sys.stdout.isatty():
        return _Console(file=sys.stdout, highlight=False, soft_wrap=False, emoji=False)
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() and int(columns) > 0 else 80
    plain: Any = _Plain(sys.stdout)
    return _Console(file=plain, width=width, highlight=False, soft_wrap=False, emoji=False)

"""Write the man page from the help texts of the verbs: `python bench/man_page.py > agent/data/topoflight.1`.

Specification: man-pages(7), groff_man(7).
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from agent.cli.main import VERBS, cli


def escaped(text: str) -> str:
    """Escape a text for roff, with its paragraphs wrapped."""
    literal = text.replace("\\", "\\e").replace("-", "\\-")
    lines = [line for part in literal.split("\n\n") for line in [*textwrap.wrap(" ".join(part.split()), 110), ".PP"]]
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") and line != ".PP" else line for line in lines[:-1])


def options(command: click.Command) -> Iterator[str]:
    """Yield the options and arguments of a verb as --help shows them."""
    context = click.Context(command, max_content_width=10_000, terminal_width=10_000)
    for parameter in command.params:
        if (record := parameter.get_help_record(context)) is not None:
            yield f".TP\n\\fB{escaped(record[0])}\\fR\n{escaped(record[1]) or 'Argument, described above.'}"


def page() -> str:
    """Return the man page. It has no date and no version, so that it changes only with the verbs."""
    parts = [
        '.TH TOPOFLIGHT 1 "" "Topoflight" "User Commands"',
        ".SH NAME\ntopoflight \\- topology\\-aware preflight for GPU training",
        ".SH SYNOPSIS\n\\fBtopoflight\\fR [\\-v] \\fIVERB\\fR [\\fIOPTION\\fR]...",
        f".SH DESCRIPTION\n{escaped(inspect.cleandoc(cli.help or ''))}",
        ".SH VERBS",
    ]
    for verb in VERBS:
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None  # noqa: S101 - a verb of the table
        text = escaped(inspect.cleandoc(command.help or "").partition("\f")[0])
        parts.append(f".SS {escaped(verb)}\n{text}")
        parts += options(command)
    parts += [
        ".SH EXIT STATUS",
        *(f".TP\n{code}\n{escaped(text)}" for code, text in (
            ("0", "Pass."), ("1", "The tool failed."), ("2", "Wrong usage or input."), ("3", "A failed check."),
            ("4", "Warnings, with --fail-on warn."), ("5", "Unknown: a required check was not measured."),
        )),
        ".SH SEE ALSO\n\\fBtopoflight\\fR \\fIVERB\\fR \\fB\\-\\-help\\fR; "
        "\\fBtopoflight explain\\fR \\fICODE\\fR for each finding.",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())

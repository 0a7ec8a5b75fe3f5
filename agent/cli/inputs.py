"""What a person gives to a verb: a file, or "-" for standard input."""

from __future__ import annotations

import sys

import click

from agent.cli.exits import EXIT_FAILED, EXIT_USAGE
from contracts import bounded


class InputError(click.ClickException):
    """A file, a name or a value that cannot be used as it stands; the message says which, and what is allowed."""

    exit_code = EXIT_USAGE


class NothingFitsError(click.ClickException):
    """No layout of the job that was described fits the machines that were described."""

    exit_code = EXIT_FAILED


def name_of(source: str) -> str:
    """The source in words."""
    return "standard input" if source == "-" else source


def read(source: str, limit_bytes: int, *, hint: str) -> bytes:
    """All of it; `hint` ends the sentence that refuses one that is too large. Raises InputError."""
    try:
        return bounded.rest(sys.stdin.buffer, limit_bytes) if source == "-" else bounded.read(source, limit_bytes)
    except OSError as error:
        raise InputError(f"{name_of(source)}: {error.strerror or error}") from None
    except bounded.TooLargeError as error:
        raise InputError(f"{name_of(source)}: {error}{hint}") from None

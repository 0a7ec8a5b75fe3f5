"""What a person gives to a verb: a file, or "-" for standard input."""

from __future__ import annotations

import sys

import click

from agent.base.exits import EXIT_FAILED, EXIT_USAGE
from contracts import bounded


class InputError(click.ClickException):
    """A file, a name or a value that cannot be used as it stands; the message says which, and what is allowed."""

    exit_code = EXIT_USAGE


class RequestError(InputError):
    """A question that cannot be answered as it stands; names the setting, the value and what is allowed."""


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


def parse_version(text: str | None) -> tuple[int, int, int] | None:
    """ "2.27.7" or "2.27.7+cuda12.9" as numbers."""
    if text is None:
        return None
    parts = text.split("+")[0].split("-")[0].split(".")
    if not 2 <= len(parts) <= 3 or not all(part.isdecimal() and len(part) < 6 for part in parts):
        raise RequestError(f"nccl={text!r}: must look like 2.27.7")
    major, minor, patch = (*(int(part) for part in parts), 0)[:3]
    return major, minor, patch

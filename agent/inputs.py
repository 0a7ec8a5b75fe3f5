"""What a person gives to a verb: a file, or "-" for standard input."""

from __future__ import annotations

import sys

import click

from probes import bounded


def name_of(source: str) -> str:
    """The source in words."""
    return "standard input" if source == "-" else source


def read(source: str, limit_bytes: int, *, hint: str) -> bytes:
    """All of it; `hint` ends the sentence that refuses one that is too large. Raises click.ClickException."""
    try:
        return bounded.rest(sys.stdin.buffer, limit_bytes) if source == "-" else bounded.read(source, limit_bytes)
    except OSError as error:
        raise click.ClickException(f"{name_of(source)}: {error.strerror or error}") from None
    except bounded.TooLargeError as error:
        raise click.ClickException(f"{name_of(source)}: {error}{hint}") from None

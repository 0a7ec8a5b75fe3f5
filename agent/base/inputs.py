"""What a person gives to a verb: a file, or "-" for standard input; and where its result is to be written."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from agent.base import EXIT_FAILED, EXIT_USAGE
from agent.base.output import unwritable
from agent.base.units import SIZE_WORDS, parse_size
from contracts import bounded


class InputError(click.ClickException):
    """A file, a name or a value that cannot be used; the message says which, and what is allowed."""

    exit_code = EXIT_USAGE


class RequestError(InputError):
    """A question that cannot be answered; names the setting, the value and what is allowed."""


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


def require_writable(option: str, path: Path, *, folder: bool = False) -> None:
    """Refuse an output that cannot be written, before anything is scanned or any load is made. Raises InputError."""
    if why := unwritable(path, folder=folder):
        raise InputError(f"{option} {path}: {why}")


class _Output(click.Path):
    """The path of an option that a verb writes to, checked when the option is read."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises InputError where nothing can be written there."""
        path = os.fsdecode(super().convert(value, param, ctx))
        if str(path) != "-":
            require_writable(param.opts[-1] if param else "output", Path(path), folder=not self.file_okay)
        return self.coerce_path_result(path)


class _Size(click.ParamType[int]):
    """Bytes, at least 1, with or without a unit: 65536, 64MiB, 1G."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes. Raises BadParameter that says what is allowed."""
        size = value if isinstance(value, int) else parse_size(value)
        if not size:
            self.fail(f"{value!r}: must be {SIZE_WORDS}", param, ctx)
        return size


SIZE = _Size()
OUTPUT_FILE = _Output(dir_okay=False, path_type=Path)
OUTPUT_FOLDER = _Output(file_okay=False, path_type=Path)
OUTPUT_FILE_OR_STDOUT = _Output(dir_okay=False, allow_dash=True)

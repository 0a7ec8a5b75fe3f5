"""Output of a verb: JSON and YAML documents, atomically written files, and progress."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agent.base import discard_output, raise_as
from contracts import plain

if TYPE_CHECKING:
    from rich.console import Console


def to_document(value: Any) -> Any:
    """Convert a record of the project to plain JSON values."""
    return json.loads(json.dumps(plain.write(value), default=str, allow_nan=False))


def render(value: Any, form: str) -> str:
    """Render `value` as a JSON or YAML document that ends with a newline."""
    document = to_document(value)
    if form == "json":
        return json.dumps(document, indent=1) + "\n"
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110))


def render_template(module: str, name: str, **values: Any) -> str:
    """Render a template in the folder of a module (its `__file__`); values are escaped for XML."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(module).parent)
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return templates.get_template(name).render(**values) + "\n"


def explain_unwritable(path: Path, *, folder: bool = False) -> str:
    """Return why no file can be written at `path`, or in it if `folder` is set (it may be missing); "" if one can.

    Called before a verb generates load, so that no run is lost because its result cannot be stored. Writes nothing.
    """
    place = path if folder else path.parent
    if not folder and os.path.isdir(path):
        return "is a folder"
    if not folder and os.path.exists(path) and not os.path.isfile(path):
        return "" if os.access(path, os.W_OK) else "cannot be written: permission denied"
    while folder and not os.path.exists(place) and place != place.parent:
        place = place.parent
    if not os.path.isdir(place):
        return f"{place} is not a folder" if os.path.exists(place) else f"the folder {place} does not exist"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"the folder {place} cannot be written to"
    disk = os.statvfs(place)
    return f"the disk of {place} is full" if disk.f_blocks and not disk.f_bavail else ""


def write_atomic(path: Path, content: str | bytes, mode: int = 0o644) -> Path:
    """Write a file atomically: a reader sees either the old or the new content.

    If the path is not a regular file (/dev/null, a pipe), it is written to and never replaced.
    """
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return path
    import tempfile  # also imports shutil and random, which a verb that writes no file does not need

    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


# Print results and progress of a verb.


def console() -> Console:
    """Return the console for tables; rich is imported on first use."""
    from agent.base.lines import console as made

    return made()


def print_text(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print a line or a whole result without terminal control characters; CRLF line ends are allowed."""
    printable = "\r\n".join(map(plain.printable, text.split("\r\n")))
    try:
        click.echo(printable, nl=nl, err=err)
    except BrokenPipeError:
        if not err:
            discard_output()


def print_notes(notes: Iterable[str], word: str = "note") -> None:
    """Print each note as a line on stderr, after `word`; empty ones are omitted."""
    for note in filter(None, notes):
        print_text(f"{word}: {note}", err=True)


def emit(value: Any, form: str, table: Callable[[Console], None]) -> None:
    """Print `value` as JSON or YAML, or call `table` to print it."""
    if form == "table":
        table(console())
        return
    print_text(render(value, form), nl=False)


def write_result(path: Path, content: str | bytes, mode: int = 0o644, *, label: str = "") -> None:
    """Write a file that the user requested, atomically. ClickException gives `label` or the path, and the reason."""
    with raise_as(click.ClickException, OSError, f"{label or path}: "):
        write_atomic(path, content, mode)


def save_document(path: Path | None, value: Any) -> None:
    """Write the JSON file of --save, if given. Raises ClickException with the reason if it cannot be written."""
    if path is not None:
        write_result(path, render(value, "json"), label=f"--save {path}")


class Progress:
    """Report the stages of a verb and the events within them as lines on stderr; nothing if quiet."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def step(self, text: str) -> None:
        """Report the start of a stage."""
        self._print(f"-- {text}")

    def note(self, text: str) -> None:
        """Report an event within the stage."""
        self._print(f"   {text}")

    def _print(self, line: str) -> None:
        if not self._quiet:
            print_text(line, err=True)

"""Records as JSON or YAML documents, and files that are never seen half written."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

from contracts import plain


def document(value: Any) -> Any:
    """Any of the project's records as plain JSON values."""
    return json.loads(json.dumps(plain.write(value), default=str, allow_nan=False))


def render(value: Any, form: str) -> str:
    """`value` as a JSON or YAML document, newline at the end."""
    made = document(value)
    if form == "json":
        return json.dumps(made, indent=1) + "\n"
    import yaml

    return str(yaml.safe_dump(made, sort_keys=False, allow_unicode=True, width=110))


def difference(before: str, after: str, source: str, target: str) -> str:
    """As unified diff, which patch(1) and `git apply -p0` take; empty for the same text."""
    old, new = (re.findall(r"[^\n]*\n|[^\n]+\Z", text) for text in (before, after))
    rows = difflib.unified_diff(old, new, source, target)
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)


def unwritable(path: Path, *, folder: bool = False) -> str:
    """Why no file can be written at `path`, or below it where it is a `folder` that may yet be made; "" where one can.

    Asked before a verb makes load: a result that cannot be stored costs no run then. Nothing is written.
    """
    place = path if folder else path.parent
    if not folder and os.path.isdir(path):  # noqa: PTH112 - pathlib raises where a parent cannot be read
        return "is a folder"
    if not folder and os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 - /dev/stdout
        return "" if os.access(path, os.W_OK) else "cannot be written: permission denied"
    while folder and not os.path.exists(place) and place != place.parent:  # noqa: PTH110 - as above
        place = place.parent
    if not os.path.isdir(place):  # noqa: PTH112 - as above
        return f"{place} is no folder" if os.path.exists(place) else f"the folder {place} does not exist"  # noqa: PTH110
    if not os.access(place, os.W_OK | os.X_OK):
        return f"the folder {place} cannot be written to"
    disk = os.statvfs(place)
    return f"the disk of {place} is full" if disk.f_blocks and not disk.f_bavail else ""


def write_atomic(path: Path, text: str) -> Path:
    """Write a file so that a reader sees the old content or the new, never half of it."""
    return write_atomic_bytes(path, text.encode())


def write_atomic_bytes(path: Path, content: bytes, mode: int = 0o644) -> Path:
    """As `write_atomic`; what is no regular file (/dev/null, a pipe) is written to and never replaced."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return path
    import tempfile  # and with it shutil and random, for which a verb that writes no file does not wait

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

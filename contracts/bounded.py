"""Files of strangers, read to a bound.

What stat(2) tells of a size is not asked: a pipe, a device or a file of /proc tells zero, and a file may grow.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Stream(Protocol):
    """What can be read from: an open file, or one that is unpacked on the way."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes, fewer at the end only."""
        ...


class TooLargeError(ValueError):
    """There is more than is read; the message says how much that is."""


def read(path: str | Path, limit_bytes: int) -> bytes:
    """A whole file. Raises TooLargeError, and OSError as the kernel says it."""
    with Path(path).open("rb") as stream:
        return rest(stream, limit_bytes)


def read_text(path: str | Path, limit_bytes: int) -> str:
    """As `read`, of a text in UTF-8. Raises UnicodeDecodeError, a ValueError, too."""
    return read(path, limit_bytes).decode("utf-8")


def rest(stream: Stream, limit_bytes: int) -> bytes:
    """All that an open, buffered stream still holds. Raises TooLargeError."""
    raw = stream.read(limit_bytes + 1)
    if len(raw) > limit_bytes:
        raise TooLargeError(f"larger than {limit_bytes} bytes")
    return raw


def exists(path: str | Path) -> bool:
    """Whether something of this name is there; for names that somebody wrote. One that no file can have is not there.

    pathlib raises OSError for a name that is too long, as os.path does not.
    """
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: str | Path) -> bool:
    """As `exists`, for a file."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """As `exists`, for a folder."""
    return os.path.isdir(path)  # noqa: PTH112

"""Files of strangers, read to a bound.

What stat(2) tells of a size is not asked: a pipe, a device or a file of /proc tells zero, and a file may grow.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_BLOCK_BYTES = 1 << 20


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


def utf8_chunks(file: Stream) -> Iterator[bytes]:
    """The file in pieces of about 1 MiB; UTF-16, with or without byte order mark, becomes UTF-8."""
    chunk = file.read(_BLOCK_BYTES)
    encoding = utf16(chunk[:4096])
    if encoding is None:
        while chunk:
            yield chunk
            chunk = file.read(_BLOCK_BYTES)
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    while chunk:
        yield decoder.decode(chunk).encode("utf-8", "replace")
        chunk = file.read(_BLOCK_BYTES)


def utf16(start: bytes) -> str | None:
    """UTF-16's name for Python, if a text that starts so is in it."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # Text in Latin letters has a zero in every second byte, and a log in UTF-8 has none.
    for encoding, zeros in (("utf-16-le", start[1::2]), ("utf-16-be", start[::2])):
        if len(start) >= 64 and zeros.count(0) * 4 > len(zeros) * 3 and start.count(0) < len(start) * 3 // 4:
            return encoding
    return None

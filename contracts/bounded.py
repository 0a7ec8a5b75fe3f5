"""Read files of unknown origin, up to a bound.

Only regular files are read: opening a pipe waits for a writer, and a device may never end. The size that stat(2)
reports is not used, because files of /proc report zero and a file may grow.
"""

from __future__ import annotations

import codecs
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

_BLOCK_BYTES = 1 << 20
_TAR_BLOCK_BYTES = 512  # POSIX.1-1988 (ustar)
_MOST_TAR_HEADER_BYTES = 1 << 16  # of one long name or PAX header; a path of Linux has at most 4096 bytes


class Stream(Protocol):
    """What can be read from: an open file, or one that is unpacked on the way."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes, fewer at the end only."""
        ...


class NotRegularError(OSError):
    """A path names a pipe, a socket or a device."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class TooLargeError(ValueError):
    """There is more than is read; the message says how much that is."""


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, without waiting. Raises OSError, EINVAL for a pipe, a socket or a device."""
    _require_regular(os.stat(path).st_mode, path)  # noqa: PTH116 - before open(2), which alone starts some devices
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor).st_mode, path)  # it may have been replaced since
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _require_regular(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise NotRegularError(errno.EINVAL, "a pipe, a socket or a device; only regular files are read", str(path))


def read(path: str | Path, limit_bytes: int) -> bytes:
    """Read a whole regular file. Raises TooLargeError, and OSError as `open_regular` does."""
    with open_regular(path) as stream:
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


def tar_files(
    stream: Stream, limit_bytes: int, file_limit_bytes: int, wanted: Callable[[str], object]
) -> Iterator[tuple[str, bytes]]:
    """Read the regular files of a tar archive whose names are wanted: (name, content), in the order of the archive.

    Python's tarfile holds headers of any size in memory (PAX, long names of GNU tar, maps of sparse files), so only the
    fixed header is parsed by it. Other kinds of entries are skipped.

    Args:
        stream: The unpacked archive.
        limit_bytes: Most bytes of the archive, headers included.
        file_limit_bytes: Most bytes of one file that is wanted.
        wanted: Which names are read into memory.

    Raises:
        TooLargeError: The archive, one of its headers or a wanted file is too large.
        tarfile.TarError: It is no archive, or ends too early.
    """
    import tarfile  # only readers of archives wait for it

    left = limit_bytes

    def take(size: int) -> bytes:
        nonlocal left
        padded = -(-size // _TAR_BLOCK_BYTES) * _TAR_BLOCK_BYTES
        if padded > left:
            raise TooLargeError(f"larger than {limit_bytes >> 20} MiB")
        left -= padded
        raw = stream.read(padded)
        if len(raw) < padded:
            raise tarfile.ReadError("the archive ends too early")
        return raw[:size]

    long_name = ""
    while any(block := take(_TAR_BLOCK_BYTES)):
        entry = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if entry.size < 0:
            raise tarfile.ReadError("an entry of negative size")
        if entry.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            if entry.size > _MOST_TAR_HEADER_BYTES:
                raise TooLargeError(f"a header of more than {_MOST_TAR_HEADER_BYTES >> 10} KiB")
            header = take(entry.size)
            pax = entry.type == tarfile.XHDTYPE
            long_name = _pax_path(header) or long_name if pax else header.rstrip(b"\0").decode(errors="replace")
            continue
        name, long_name = long_name or entry.name, ""
        if entry.type in tarfile.REGULAR_TYPES[:2] and wanted(name):
            if entry.size > file_limit_bytes:
                raise TooLargeError(f"{name[:256]} is larger than {file_limit_bytes >> 20} MiB")
            yield name, take(entry.size)
            continue
        while entry.size > 0:
            entry.size -= len(take(min(entry.size, _BLOCK_BYTES)))


def _pax_path(header: bytes) -> str:
    """Return the path of a PAX header, whose records are "LENGTH KEY=VALUE\\n"; empty where it has none."""
    import tarfile

    while header:
        length, _, _ = header.partition(b" ")
        if not length.isdigit() or not 0 < int(length[:9]) <= len(header):
            raise tarfile.ReadError("a PAX header that is none")
        record, header = header[: int(length)], header[int(length) :]
        key, _, value = record.partition(b" ")[2].partition(b"=")
        if key == b"path":
            return value.rstrip(b"\n").decode(errors="replace")
    return ""


def exists(path: str | Path) -> bool:
    """Whether a file of this name exists; for names from users. A name that no file can have does not exist.

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

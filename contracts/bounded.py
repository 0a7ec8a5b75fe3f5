"""Read files from untrusted sources, up to a size limit.

Only regular files are read, because opening a pipe waits for a writer and a device may never end. The size that stat(2)
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
_MOST_TAR_HEADER_BYTES = 1 << 16  # of one long name or PAX header; a Linux path has at most 4096 bytes


class Stream(Protocol):
    """A readable source: an open file, or a stream that decompresses a file."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the stream."""
        ...


class NotRegularError(OSError):
    """A path names a pipe, a socket or a device."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class TooLargeError(ValueError):
    """The file is larger than the limit; the message contains the limit."""


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, without waiting. Raises OSError, EINVAL for a pipe, a socket or a device."""
    _require_regular(os.stat(path).st_mode, path)  # noqa: PTH116 - before open(2): opening alone starts some devices
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor).st_mode, path)  # the path may have been replaced in the meantime
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
    """Read a UTF-8 text as `read` does. Also raises UnicodeDecodeError, which is a ValueError."""
    return read(path, limit_bytes).decode("utf-8")


def rest(stream: Stream, limit_bytes: int) -> bytes:
    """Return the remaining bytes of an open, buffered stream. Raises TooLargeError."""
    raw = stream.read(limit_bytes + 1)
    if len(raw) > limit_bytes:
        raise TooLargeError(f"larger than {limit_bytes} bytes")
    return raw


def tar_files(
    stream: Stream, limit_bytes: int, file_limit_bytes: int, wanted: Callable[[str], object]
) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of each regular file in a tar archive whose name is wanted, in archive order.

    Python's tarfile keeps headers of any size in memory (PAX, GNU tar long names, sparse file maps), so it parses only
    the fixed-size header here. Other kinds of entries are skipped.

    Args:
        stream: The decompressed archive.
        limit_bytes: Size limit of the archive, headers included.
        file_limit_bytes: Size limit of one wanted file.
        wanted: Called with a name; a true result reads that file into memory.

    Raises:
        TooLargeError: The archive, one of its headers or a wanted file exceeds its limit.
        tarfile.TarError: The stream is not a tar archive, or it is truncated.
    """
    import tarfile  # imported here, because only readers of archives need it

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
            long_name = _read_pax_path(header) or long_name if pax else header.rstrip(b"\0").decode(errors="replace")
            continue
        name, long_name = long_name or entry.name, ""
        if entry.type in tarfile.REGULAR_TYPES[:2] and wanted(name):
            if entry.size > file_limit_bytes:
                raise TooLargeError(f"{name[:256]} is larger than {file_limit_bytes >> 20} MiB")
            yield name, take(entry.size)
            continue
        while entry.size > 0:
            entry.size -= len(take(min(entry.size, _BLOCK_BYTES)))


def _read_pax_path(header: bytes) -> str:
    """Return the path in a PAX header, whose records are "LENGTH KEY=VALUE\\n"; empty if it has no path."""
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
    """Whether the file exists; for names that a user typed. A name that no file can have does not exist.

    For a name that is too long pathlib raises OSError; os.path does not.
    """
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: str | Path) -> bool:
    """Whether the path is an existing file, as `exists`."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """Whether the path is an existing folder, as `exists`."""
    return os.path.isdir(path)  # noqa: PTH112


def utf8_chunks(file: Stream) -> Iterator[bytes]:
    """Yield the file in chunks of about 1 MiB. UTF-16 text, with or without byte order mark, is converted to UTF-8."""
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
    """Return Python's codec name for UTF-16 if a text with these first bytes is UTF-16, else None."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # In UTF-16, Latin text has a zero in every second byte; a UTF-8 log has no zero bytes.
    for encoding, zeros in (("utf-16-le", start[1::2]), ("utf-16-be", start[::2])):
        if len(start) >= 64 and zeros.count(0) * 4 > len(zeros) * 3 and start.count(0) < len(start) * 3 // 4:
            return encoding
    return None

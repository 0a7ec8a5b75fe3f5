"""Read files from untrusted sources, up to a size limit.

Only regular files are read, because opening a pipe waits for a writer and a device may never end. The size that stat(2)
reports is not used, because files of /proc report zero and a file may grow.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from _typeshed import SupportsRead

_BLOCK_BYTES = 1 << 20
_ZIP_ENTRY = b"PK\1\2"  # begins each entry of the central directory (APPNOTE.TXT 4.3.12)
_MAX_ZIP_ENTRIES = 1 << 16


class NotRegularError(OSError):
    """A path names a pipe, a socket or a device. Its text begins with the path, not with `[Errno N]`."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class TooLargeError(ValueError):
    """The file is larger than the limit; the message contains the limit."""


class ArchiveError(ValueError):
    """The bytes are no archive that can be read."""


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


def rest(stream: SupportsRead[bytes], limit_bytes: int) -> bytes:
    """Return the remaining bytes of an open, buffered stream. Raises TooLargeError."""
    raw = stream.read(limit_bytes + 1)
    if len(raw) > limit_bytes:
        raise TooLargeError(f"larger than {limit_bytes} bytes")
    return raw


def zip_files(
    raw: bytes, limit_bytes: int, file_limit_bytes: int, is_wanted: Callable[[str], object]
) -> Iterator[tuple[str, bytes]]:
    """Read the files of a zip archive whose names are wanted: (name, content), in the order of the archive.

    Args:
        raw: The archive.
        limit_bytes: Most bytes of all files together, unpacked.
        file_limit_bytes: Most bytes of one file, unpacked.
        is_wanted: Whether the file of this name is read into memory.

    Raises:
        TooLargeError: There are too many files, or one or all of them are too large.
        ArchiveError: It is no archive, or a damaged one.
    """
    import zipfile  # only readers of archives wait for it
    import zlib

    if raw.count(_ZIP_ENTRY) > _MAX_ZIP_ENTRIES:  # before zipfile makes an object of each
        raise TooLargeError(f"more than {_MAX_ZIP_ENTRIES} files")
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            for entry in archive.infolist():
                if not is_wanted(entry.filename):
                    continue
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others may take any memory
                    raise ArchiveError(f"{entry.filename[:256]} is packed in a way that is not read")
                with archive.open(entry) as stream:
                    content = rest(stream, min(limit_bytes, file_limit_bytes))
                limit_bytes -= len(content)
                yield entry.filename, content
    except (ArchiveError, TooLargeError):
        raise
    except (zipfile.BadZipFile, zlib.error, ValueError, RuntimeError, EOFError, OSError) as error:
        raise ArchiveError(str(error)) from None


def utf8_chunks(file: SupportsRead[bytes]) -> Iterator[bytes]:
    """Yield the file in chunks of about 1 MiB. UTF-16 text, with or without byte order mark, is converted to UTF-8."""
    chunk = file.read(_BLOCK_BYTES)
    encoding = utf16(chunk[:4096])
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace") if encoding else None
    while chunk:
        yield decoder.decode(chunk).encode("utf-8", "replace") if decoder else chunk
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

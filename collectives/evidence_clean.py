"""What launchers, terminals and pagers do to a log line, undone.

Surface: physical lines of any training log, as bytes. Undone here: colours (ECMA-48 SGR), HTML and JSON escapes,
progress bars that share a line by carriage return, many messages in one JSON string, UTF-16 as PowerShell writes it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import BinaryIO, Final

BLOCK_BYTES: Final = 1 << 20

# A line longer than this is cut: no NCCL message is near it, and memory must stay flat on a file without newlines.
MAX_LINE_BYTES = 16_384

# The escape character itself, as caret notation, as JSON and Python write it, or lost altogether.
_COLOUR = re.compile(
    rb"(?:\x1b|ESC|\xe2\x90\x9b|\^\[|\\u001[bB]|\\x1[bB]|\\033|\\e)?\[(?:[0-9]{1,3}(?:;[0-9]{1,3})*)?m"
)
_COLOUR_MARKS = (b"[0m", b"ESC[", b"\xe2\x90\x9b[", b"^[[", b"\\u001", b"\\x1", b"\\033")
_OTHER_ESCAPE = re.compile(rb"\x1b(?:\[[0-9;?]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")

# A block without any of these needs no cleaning.
NEEDS_CLEANING = (b"\x1b", b"\r", b"&", b"\\", b"\x00", b"[0m", b"^[[", b"ESC[", b"\xe2\x90\x9b[")

# One of these stands in every line that can matter, also in lines that lost their prefix.
MARKERS = (
    b"NCCL",
    b"via ",
    b"NET/",
    b"/GDR",
    b"RCCL version",
    b"Using network",
    b"GPU Direct",
    b"ibv_",
    b"IBV_WC",
    b"Duplicate GPU",
    b"/dev/shm/nccl",
    b"P2P is disabled",
    b"nNodes",
    b"fi_getinfo",
    b"no socket interface",
    # Causes that PyTorch repeats below "Last error:", where nothing of NCCL's stands before them.
    b"Cuda failure",
    b"ocketStartConnect",
    b"ocketPollConnect",
    b"ocketProgress",
    b"Call to connect",
    b"is neither AF_INET",
    b"MNNVL",
    b"system not yet initialized",
    b"NVRM: Xid",
    b" Pid ",
    b"nccl==",
)


def utf8_chunks(file: BinaryIO) -> Iterator[bytes]:
    """The file in pieces of about 1 MiB; UTF-16, with or without byte order mark, becomes UTF-8."""
    chunk = file.read(BLOCK_BYTES)
    encoding = _utf16(chunk[:4096])
    if encoding is None:
        while chunk:
            yield chunk
            chunk = file.read(BLOCK_BYTES)
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    while chunk:
        yield decoder.decode(chunk).encode("utf-8", "replace")
        chunk = file.read(BLOCK_BYTES)


def _utf16(start: bytes) -> str | None:
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # Text in Latin letters has a zero in every second byte, and a log in UTF-8 has none.
    for encoding, zeros in (("utf-16-le", start[1::2]), ("utf-16-be", start[::2])):
        if len(start) >= 64 and zeros.count(0) * 4 > len(zeros) * 3 and start.count(0) < len(start) * 3 // 4:
            return encoding
    return None


def pieces(line: bytes) -> list[bytes]:
    """A physical line, cut to a length that no message reaches; a longer one at its inner ends first."""
    if len(line) <= MAX_LINE_BYTES:
        return [line]
    return [piece[:MAX_LINE_BYTES] for piece in re.split(rb"\r|\\n", line)]


def clean(line: bytes) -> list[bytes]:
    """The logical lines of one physical line, without colours and escapes."""
    if b"\x1b" in line:
        line = _OTHER_ESCAPE.sub(b"", _COLOUR.sub(b"", line))
    elif any(mark in line for mark in _COLOUR_MARKS):
        line = _COLOUR.sub(b"", line)
    if b"&" in line:
        line = line.replace(b"&gt;", b">").replace(b"&lt;", b"<").replace(b"&quot;", b'"').replace(b"&amp;", b"&")
    if b"\\" in line:
        line = line.replace(b"\\u003e", b">").replace(b"\\u003c", b"<").replace(b"\\r", b"").replace(b"\\n", b"\n")
    if b"\x00" in line:
        line = line.replace(b"\x00", b"")
    line = line.rstrip(b"\r\n")
    if b"\r" in line or b"\n" in line:
        return [part for part in re.split(rb"[\r\n]+", line) if part]
    return [line]

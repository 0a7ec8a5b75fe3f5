"""Logs in the tests of their reader."""

import io
from collections.abc import Iterable

from collectives.nccl_log import evidence
from collectives.nccl_log.transport import Evidence


def read(lines: Iterable[str] | Iterable[bytes], *, require_gdrdma: bool = True) -> Evidence:
    """Verdict over the lines; those without a newline get one, but for the last of lines that have theirs."""
    rows = [line if isinstance(line, bytes) else line.encode("utf-8", "surrogateescape") for line in lines]
    if len(rows) < 2 or not all(row.endswith(b"\n") for row in rows[:-1]):
        rows = [row.rstrip(b"\r\n") + b"\n" for row in rows]
    return evidence.read_files([io.BytesIO(b"".join(rows))], require_gdrdma=require_gdrdma)

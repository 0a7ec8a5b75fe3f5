"""Evidence: what a training log proves about the wire.

``read`` takes the lines of anybody's log and gives the verdict; ``read_file`` and ``read_files`` open files (``-``
is standard input); ``environment`` is what a run must be started with to leave evidence behind; ``exit_code``
turns a verdict into a gate. Formats and codes: docs/evidence.md.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import cattrs

from collectives.nccl_log.clean import BLOCK_BYTES, LogFileError, Unpacked, looks_like_text, utf8_chunks
from collectives.nccl_log.codes import CODES
from collectives.nccl_log.reader import Reader, blocks
from collectives.nccl_log.runs import Runs
from collectives.nccl_log.transport import Evidence
from collectives.nccl_log.verdict import judge_runs, proven

PASS, FAILED, WARNED, NO_EVIDENCE = 0, 3, 4, 5

# Subsystems that print channel lines, network selection, variables and the distance of GPU and NIC.
SUBSYSTEMS = ("INIT", "ENV", "NET", "GRAPH", "P2P", "SHM")


def read(lines: Iterable[str] | Iterable[bytes], *, ports: Collection[str] | None = None) -> Evidence:
    """Verdict over the lines, in one pass with flat memory.

    ``ports`` names the RDMA ports that should be in use ("mlx5_0:1" or "mlx5_0"): one that NCCL does not list is
    dead, for it lists active ports only.
    """
    runs = Runs()
    reader = Reader(runs)
    block = b"\n"
    several = False
    for block in blocks(lines):
        several = several or b"\n" in block
        reader.feed(block)
    reader.finish(cut=several and not block.endswith(b"\n"))
    return judge_runs(runs, ports=ports)


def read_file(path: str | Path | BinaryIO, *, ports: Collection[str] | None = None) -> Evidence:
    """Verdict over one file, "-" for standard input, a folder, or an open binary file."""
    return read_files([path], ports=ports)


def read_files(paths: Iterable[str | Path | BinaryIO], *, ports: Collection[str] | None = None) -> Evidence:
    """One verdict over several files: the logs of a run's processes, or folders of them.

    Files packed with gzip, bzip2 or xz are read as they are. Raises ``LogFileError`` where one cannot be unpacked.
    """
    runs = Runs()
    found = list(_files(paths))
    for file in found:
        name = str(file) if len(found) > 1 and isinstance(file, str | Path) else ""
        try:
            if not isinstance(file, str | Path):
                _take(runs, file, name)
            elif str(file) == "-":
                _take(runs, sys.stdin.buffer, "standard input" if name else "")
            else:
                with Path(file).open("rb") as opened:
                    _take(runs, opened, name)
        except LogFileError as error:
            raise LogFileError(f"{file if isinstance(file, str | Path) else 'the file'}: {error}") from None
    return judge_runs(runs, ports=ports)


def _files(paths: Iterable[str | Path | BinaryIO]) -> Iterator[str | Path | BinaryIO]:
    """The files meant: of a folder, and of those in it, every file that holds text, in the order of their names."""
    for path in paths:
        if isinstance(path, str | Path) and str(path) != "-" and Path(path).is_dir():
            inside = sorted(file for file in Path(path).rglob("*") if file.is_file() and _holds_text(file))
            if not inside:
                raise LogFileError(f"{path}: no text file in this folder: expected the logs of a run")
            yield from inside
        else:
            yield path


def _holds_text(file: Path) -> bool:
    with file.open("rb") as opened:
        return looks_like_text(opened.read(4096))


def _take(runs: Runs, file: BinaryIO, name: str) -> None:
    reader = Reader(runs, file=name)
    rest = b""
    for chunk in utf8_chunks(Unpacked(file)):
        block, newline, rest = (rest + chunk).rpartition(b"\n")
        if newline:
            reader.feed(block + newline)
        elif len(rest) >= BLOCK_BYTES:
            # A progress bar, or a whole log in one JSON string: read what is whole, as part of the same line.
            whole, end, tail = rest.rpartition(b"\r" if b"\r" in rest else b"\\n")
            if end:
                reader.feed(whole)
                reader.ledger.lines -= 1
            # Without any end for so long it is no log: what is kept of it must not grow.
            rest = tail[:BLOCK_BYTES]
    if rest:
        reader.feed(rest)
    reader.finish(cut=bool(rest) and not rest.endswith(b"\r"))


def environment(debug_dir: str | Path) -> dict[str, str]:
    """Variables with which NCCL leaves evidence: one file per process under ``debug_dir``, read by ``read_files``."""
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": ",".join(SUBSYSTEMS),
        "NCCL_DEBUG_FILE": str(Path(debug_dir) / "nccl.%h.%p.log"),
        # From 2.22 on connections are made, and printed, at the first collective unless this is 0.
        "NCCL_RUNTIME_CONNECT": "0",
    }


def to_json(evidence: Evidence) -> dict[str, Any]:
    """The verdict as plain data."""
    data: dict[str, Any] = cattrs.unstructure(evidence)
    data["exit_code"] = exit_code(evidence)
    return data


def exit_code(evidence: Evidence, *, fail_on: str = "fail", require_gdrdma: bool = True) -> int:
    """What a gate should answer.

    0: the wire is proven (GPUDirect RDMA on every network channel, or a single node or NVLink domain with channel
    lines) and no problem fails it. 3: a problem of severity "fail", which includes GPUDirect RDMA off or partial
    between nodes unless ``require_gdrdma`` is false. 4: with ``fail_on="warn"``, a problem of severity "warn".
    5: no evidence.
    """
    if fail_on not in ("fail", "warn"):
        raise ValueError(f"fail_on is {fail_on!r}: allowed are 'fail' and 'warn'")
    failing = [
        problem
        for problem in evidence.problems
        if problem.severity == "fail" and (require_gdrdma or not CODES[problem.code].gdr)
    ]
    if failing:
        return FAILED
    if not proven(evidence):
        return NO_EVIDENCE
    if fail_on == "warn" and any(problem.severity == "warn" for problem in evidence.problems):
        return WARNED
    return PASS

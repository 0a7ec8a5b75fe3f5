"""Evidence: what a training log proves about the wire.

``read`` takes the lines of anybody's log and gives the verdict; ``read_file`` and ``read_files`` open files (``-``
is standard input); ``environment`` is what a run must be started with to leave evidence behind; ``exit_code``
turns a verdict into a gate. Formats and codes: docs/evidence.md.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import cattrs

from collectives.evidence_clean import BLOCK_BYTES, utf8_chunks
from collectives.evidence_codes import CODES
from collectives.evidence_ledger import Ledger
from collectives.evidence_reader import Reader, blocks
from collectives.evidence_verdict import judge
from collectives.transport import Evidence

PASS, FAILED, WARNED, NO_EVIDENCE = 0, 3, 4, 5

# Subsystems that print channel lines, network selection, variables and the distance of GPU and NIC.
SUBSYSTEMS = ("INIT", "ENV", "NET", "GRAPH", "P2P", "SHM")


def read(lines: Iterable[str] | Iterable[bytes], *, ports: Collection[str] | None = None) -> Evidence:
    """Verdict over the lines, in one pass with flat memory.

    ``ports`` names the RDMA ports that should be in use ("mlx5_0:1" or "mlx5_0"): one that NCCL does not list is
    dead, for it lists active ports only.
    """
    reader = Reader(Ledger())
    block = b"\n"
    several = False
    for block in blocks(lines):
        several = several or b"\n" in block
        reader.feed(block)
    return judge(reader.finish(cut=several and not block.endswith(b"\n")), ports=ports)


def read_file(path: str | Path | BinaryIO, *, ports: Collection[str] | None = None) -> Evidence:
    """Verdict over one file, "-" for standard input, or an open binary file."""
    return read_files([path], ports=ports)


def read_files(paths: Iterable[str | Path | BinaryIO], *, ports: Collection[str] | None = None) -> Evidence:
    """One verdict over several files: the per-process logs of one run."""
    ledger = Ledger()
    for path in paths:
        if not isinstance(path, str | Path):
            _take(ledger, path)
        elif str(path) == "-":
            _take(ledger, sys.stdin.buffer)
        else:
            with Path(path).open("rb") as file:
                _take(ledger, file)
    return judge(ledger, ports=ports)


def _take(ledger: Ledger, file: BinaryIO) -> None:
    reader = Reader(ledger)
    rest = b""
    for chunk in utf8_chunks(file):
        block, newline, rest = (rest + chunk).rpartition(b"\n")
        if newline:
            reader.feed(block + newline)
        elif len(rest) >= BLOCK_BYTES:
            # A progress bar, or a whole log in one JSON string: read what is whole, as part of the same line.
            whole, end, tail = rest.rpartition(b"\r" if b"\r" in rest else b"\\n")
            if end:
                reader.feed(whole)
                ledger.lines -= 1
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


def proven(evidence: Evidence) -> bool:
    """Whether the log shows the channels it should: between nodes where there are several, else within the node."""
    if evidence.gdrdma != "none":
        return True
    return bool(evidence.transports) and evidence.inter_node_transport in (None, "NVLink (MNNVL)")

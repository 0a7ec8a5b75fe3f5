"""How fast the log reader is, and how much memory it takes: ``python bench/evidence.py [--bytes 1000000000]``.

Logs generated while read: a training log with NCCL lines in between, one of channel lines only, one of calls, one of
prose that never repeats, and the first three mixed 8 to 1 to 2. ``--against DIR`` reads the same with another checkout,
in turns, and prints the ratio of CPU seconds: on a machine with other work the ratio counts, not the seconds.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

sys.path.insert(0, os.environ.get("TOPOFLIGHT_BENCH_ROOT") or str(Path(__file__).resolve().parent.parent))

from collectives.nccl_log import evidence
from collectives.nccl_log.transport import Evidence


def channel_block(step: int) -> bytes:
    """About 64 KiB of channel lines of 16 hosts, as stdout of mpirun shows them."""
    rows = []
    for index in range(560):
        rank = (step * 560 + index) % 128
        host, peer = f"node{rank // 8:03}", (rank + 8) % 128
        head = (
            f"[1,{rank}]<stdout>:{host}:{4000 + rank}:{4100 + rank} [{rank % 8}] NCCL INFO Channel {index % 32:02}/0 :"
        )
        if index % 3:
            rows.append(f"{head} {rank}[{rank % 8}] -> {peer}[{peer % 8}] [send] via NET/IB/{rank % 8}/GDRDMA\n")
        else:
            rows.append(f"{head} {rank}[{rank % 8}] -> {rank ^ 1}[{(rank ^ 1) % 8}] via P2P/CUMEM\n")
    return "".join(rows).encode()


def training_block(step: int) -> bytes:
    """About 64 KiB of what a training script prints, with a few NCCL lines."""
    row = "{'loss': 1.2345, 'grad_norm': 0.4321, 'learning_rate': 1.9e-05, 'epoch': 0.12} step %d  tokens/s 12345.6\n"
    return "".join(row % (step * 640 + index) for index in range(640)).encode() + channel_block(step)[:1200] + b"\n"


def operation_block(step: int) -> bytes:
    """About 64 KiB of what NCCL_DEBUG_SUBSYS=COLL prints for every call, behind kubectl's time stamps."""
    rows = []
    for index in range(300):
        number = step * 300 + index
        stamp = f"2026-01-02T03:04:05.{number % 1_000_000:06}Z"
        head = f"{stamp} worker-0:77:{100 + index % 8} [{index % 8}] NCCL INFO AllReduce:"
        rows.append(
            f"{head} opCount {number:x} sendbuff 0x7f{number:010x} recvbuff 0x7f{number:010x} count {index * 1024} "
            f"datatype 9 op 0 root 0 comm 0x5581{index % 8:06x} [nranks=16] stream 0x5582{index % 8:06x}\n"
        )
    return "".join(rows).encode() + channel_block(step)[:1200] + b"\n"


@cache
def vocabulary() -> tuple[tuple[str, ...], tuple[float, ...]]:
    """8,000 words as often as their rank tells (Zipf), some of which the reader looks for."""
    chance = random.Random(0)
    common_words = [
        "the",
        "model",
        "of",
        "a",
        "memory",
        "error",
        "time",
        "was",
        "and",
        "request",
        "completion",
        "to",
        "rank",
    ]
    made = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(3, 9))) for _ in range(8000)]
    return tuple(common_words + made), tuple(1 / (rank + 1) for rank in range(len(common_words) + len(made)))


def prose_block(step: int) -> bytes:
    """About 64 KiB of sentences that never repeat, as a run prints that shows its samples."""
    chance = random.Random(step)
    words, weights = vocabulary()
    rows = (" ".join(chance.choices(words, weights, k=chance.randint(8, 30))) for _ in range(560))
    return ("\n".join(rows) + "\n").encode()


def mixed_block(step: int) -> bytes:
    """Blocks of 64 KiB: 8 of training, 2 of calls, 1 of channels."""
    training = b"".join(training_block(8 * step + index) for index in range(8))
    calls = b"".join(operation_block(2 * step + index) for index in range(2))
    return training + calls + channel_block(step)


BLOCKS: dict[str, Callable[[int], bytes]] = {
    "training": training_block,
    "channels": channel_block,
    "calls": operation_block,
    "prose": prose_block,
    "mixed": mixed_block,
}


class Repeated(io.RawIOBase):
    """A file that holds the block over and over, and takes no memory for it."""

    def __init__(self, block: bytes, total_bytes: int) -> None:
        self._block = memoryview(block)
        self._left = total_bytes
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        piece = bytes(self._block[self._at : self._at + min(size, self._left)])
        self._left -= len(piece)
        self._at = (self._at + len(piece)) % len(self._block)
        return piece


def timed(name: str, size: int) -> tuple[float, float, float, Evidence]:
    """CPU seconds, wall seconds, MiB that peak memory grew by, and the verdict."""
    block = b"".join(BLOCKS[name](step) for step in range(64 if name == "prose" else 16 if name != "mixed" else 2))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, used = time.perf_counter(), time.process_time()
    verdict = evidence.read_file(Repeated(block, size))
    used, seconds = time.process_time() - used, time.perf_counter() - started
    return used, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, verdict


def elsewhere(checkout: Path, name: str, size: int) -> float:
    """CPU seconds of the other checkout's reader on the same bytes, in a process of its own."""
    code = (
        f"import sys; sys.path.insert(0, {str(checkout)!r}); import importlib.util as u\n"
        f"s = u.spec_from_file_location('here', {str(Path(__file__).resolve())!r}); m = u.module_from_spec(s)\n"
        f"s.loader.exec_module(m); print(m.timed({name!r}, {size})[0])"
    )
    environment = os.environ | {"PYTHONPATH": str(checkout), "TOPOFLIGHT_BENCH_ROOT": str(checkout)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Print one line per kind of log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=100_000_000)
    parser.add_argument("--kind", choices=BLOCKS, action="append", help="Default: all.")
    parser.add_argument("--against", type=Path, help="Another checkout, read in turns with this one.")
    options = parser.parse_args()
    size = options.bytes
    for name in options.kind or BLOCKS:
        used, seconds, grown, verdict = timed(name, size)
        line = (
            f"{name:9} {size / 1e6:7.0f} MB in {seconds:6.2f} s: {size / seconds / 1e6:6.1f} MB/s "
            f"({size / used / 1e6:.1f} MB per CPU second), "
            f"{verdict.lines_read / seconds / 1e3:6.0f} k lines/s, peak memory grew by {grown:.1f} MiB; "
            f"verdict {verdict.inter_node_transport}, GDRDMA {verdict.gdrdma}"
        )
        if options.against:
            turns = [(timed(name, size)[0], elsewhere(options.against, name, size)) for _ in range(3)]
            ratios = sorted(other / here for here, other in turns)
            others = sorted(other for _, other in turns)
            line += f"; the other {size / others[1] / 1e6:.1f} MB per CPU second, "
            line += f"ratios {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
        print(line)


if __name__ == "__main__":
    main()

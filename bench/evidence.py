"""How fast the log reader is, and how much memory it takes: ``python bench/evidence.py [--bytes 1000000000]``.

Logs generated while read: a training log with NCCL lines in between, one of channel lines only, and one of calls.
"""

from __future__ import annotations

import argparse
import io
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collectives import evidence


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


def main() -> None:
    """Print one line per kind of log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=100_000_000)
    size = parser.parse_args().bytes
    for name, block in (("training", training_block(1)), ("channels", channel_block(1)), ("calls", operation_block(1))):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started, used = time.perf_counter(), time.process_time()
        verdict = evidence.read_file(Repeated(block * 16, size))
        seconds, used = time.perf_counter() - started, time.process_time() - used
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(
            f"{name:9} {size / 1e6:7.0f} MB in {seconds:6.2f} s: {size / seconds / 1e6:6.1f} MB/s "
            f"({size / used / 1e6:.1f} MB per CPU second), "
            f"{verdict.lines_read / seconds / 1e3:6.0f} k lines/s, peak memory grew by {grown / 1024:.1f} MiB; "
            f"verdict {verdict.inter_node_transport}, GDRDMA {verdict.gdrdma}"
        )


if __name__ == "__main__":
    main()

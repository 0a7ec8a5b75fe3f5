"""Speed of a scan, of the NCCL log reader and of the layout search: `python bench/speed.py [scan] [logs] [search]`.

scan: two scans of the same 8-GPU, 8-HCA machine: its recording in this process, and the fake NVML with the real pynvml
in the child process that a live scan uses. logs: texts that are generated while they are read. search: a model of 405B
parameters by world size. CPU seconds count (user and system, of every process that takes part), so that a busy machine
does not. Ends with 1 where a scan costs more than its limit or its memory grows.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
import resident

from probes.api import Ok
from probes.gpu.facts import GpuFacts
from probes.host.recording import load
from probes.registry import ALL
from probes.scanner import Scanner
from probes.worker import scan

SCAN_LIMIT_MS = 50.0
SCAN_GROWTH_MIB = 2.0  # allowed between the second tenth of the scans and the last
WORLD_SIZES = (8, 64, 512, 2048, 4096, 16384)
REPEATS = 5

# --- scan

OneScan = tuple[str, Callable[[], object], psutil.Process]  # what is scanned how, one scan, the process that asks


@contextmanager
def recorded_scan() -> Iterator[OneScan]:
    """All probes on the recording, in this process."""
    host = load(resident.ROOT / "tests" / "machines" / f"{resident.MACHINE}.json")

    def scan_once() -> None:
        assert isinstance(scan(host, ALL).outcomes["gpu"], Ok)  # noqa: S101 - a bench of failures measures nothing

    yield "recording, all probes", scan_once, psutil.Process()


@contextmanager
def faked_scan() -> Iterator[OneScan]:
    """All probes through the child; the GPUs through the fake NVML."""
    with tempfile.TemporaryDirectory() as folder:
        root, environment = resident.restore(Path(folder))
        os.environ |= environment
        with Scanner(root, probes=ALL) as scanner:
            facts = scanner.scan().facts(GpuFacts)
            assert facts is not None and len(facts.gpus) == 8  # noqa: S101
            yield "fake NVML through the child, all probes", scanner.scan, psutil.Process(scanner.child_pid or 0)


def measure_scans(one: OneScan, scans: int) -> bool:
    """Scan once cold, then `scans` times; print CPU and memory. True where both hold."""
    name, scan_once, process = one
    clocks = {(~pid << 3) | 2 for pid in (os.getpid(), process.pid)}  # clock_getcpuclockid(3), CPUCLOCK_SCHED

    def milliseconds(rounds: int) -> float:
        start = sum(map(time.clock_gettime, clocks))
        for _ in range(rounds):
            scan_once()
        return (sum(map(time.clock_gettime, clocks)) - start) * 1e3 / rounds

    block = max(1, scans // 100)
    first, spent, mib = milliseconds(1), [], []
    for number in range(max(1, scans // block)):
        spent.append(milliseconds(block))
        if number % max(1, scans // block // 10) == 0:
            mib.append(process.memory_info().rss / resident.MIB)
    median, grown = statistics.median(spent), mib[-1] - mib[min(1, len(mib) - 1)]
    held = median <= SCAN_LIMIT_MS and grown <= SCAN_GROWTH_MIB
    print(f"{name}: {scans} scans, CPU per scan: first {first:.1f} ms, then {median:.1f} ms (slowest hundredth "
          f"{max(spent):.1f} ms), limit {SCAN_LIMIT_MS:.0f} ms; resident MiB {' '.join(f'{one:.1f}' for one in mib)}, "
          f"grown {grown:+.1f}; {'within the limits' if held else 'NOT within the limits'}", flush=True)  # fmt: skip
    return held


# --- logs


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
    common = ["the", "model", "of", "a", "memory", "error", "time", "was", "and", "request", "completion", "to", "rank"]
    made = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(3, 9))) for _ in range(8000)]
    return tuple(common + made), tuple(1 / (rank + 1) for rank in range(len(common) + len(made)))


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


def measure_logs(size: int) -> None:
    """Print one line per kind of log."""
    from collectives.nccl_log import evidence  # not at the top: the memory of a scan is measured first

    for make, blocks in (
        (training_block, 16), (channel_block, 16), (operation_block, 16), (prose_block, 64), (mixed_block, 2),
    ):  # fmt: skip
        block = b"".join(make(step) for step in range(blocks))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        used = time.process_time()
        verdict = evidence.read_files([Repeated(block, size)])
        used = time.process_time() - used
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"{make.__name__.removesuffix('_block'):9} {size / 1e6:.0f} MB: {size / used / 1e6:.1f} MB per CPU "
              f"second, {verdict.lines_read / used / 1e3:.0f} k lines/s, peak memory grew by {grown:.1f} MiB; verdict "
              f"{verdict.inter_node_transport}, GDRDMA {verdict.gdrdma}", flush=True)  # fmt: skip


# --- search


def measure_search() -> None:
    """Print CPU seconds by engine and world size: one sequence of 8,192 tokens per GPU of 8-GPU H100 nodes."""
    from planner.forecast import machines
    from planner.forecast.models import model_named
    from planner.forecast.specs import TrainSpec
    from planner.recommend import plan, search_planned

    print("| GPUs | engine | layouts | seconds (median of 5, CPU time) |\n|---|---|---|---|")
    for engine in ("torchtitan", "megatron", "topoflight"):
        for world in WORLD_SIZES:
            train = TrainSpec(method="full", sequence_length=8192, engine=engine, global_batch=world)
            cluster = machines.cluster("dgx-h100", world // 8)
            seconds = []
            for _ in range(REPEATS):
                start = time.process_time()
                found = search_planned(plan(cluster, (), model_named("Llama-3.1-405B"), train))
                seconds.append(time.process_time() - start)
            print(f"| {world} | {engine} | {found.tried} | {statistics.median(seconds):.3f} |", flush=True)


def main() -> int:
    """Measure what is named, or all three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=("scan", "logs", "search", []), metavar="PART")
    parser.add_argument("--scans", type=int, default=500)
    parser.add_argument("--bytes", type=int, default=50_000_000, help="of each log")
    options = parser.parse_args()
    parts, held = options.parts or ["scan", "logs", "search"], True
    if "scan" in parts:
        for one in (faked_scan, recorded_scan):
            with one() as what:
                held = measure_scans(what, options.scans) and held
    if "logs" in parts:
        measure_logs(options.bytes)
    if "search" in parts:
        measure_search()
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())

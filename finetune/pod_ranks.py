"""The ranks of one pod under torchrun, or the benchmark with ranks of its own: how they start, print and end.

What they print goes to the pod's log, and whole lines of NCCL's logs too.
No torch in this process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from collectives.bench import processes
from contracts import run_record

RESTARTS = 3
WAIT_SECONDS = 3600.0  # for the other pods: as long as an image may take to be pulled
LOST_GRACE_SECONDS = 25.0  # for ranks whose peers are gone: most end by themselves and upload their record (20 s)
SAVE_SECONDS = 100.0  # for a checkpoint after SIGTERM; the pod's terminationGracePeriodSeconds must be more
ENDED_HERE = -1000  # in place of an exit code: ranks that this pod ended do not say why the job failed
_TAIL_BYTES = 65536  # of torchrun's output: its report of the failure is at the end
_MOST_NCCL_BYTES = 16 << 20  # of each rank's log in the pod's: channels are at the beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One pod's part of the job."""

    index: int
    nodes: int
    ranks: int
    meet: tuple[str, int]
    words: tuple[str, ...]  # for torchrun: "-m", "finetune.train", ...
    output: Path | None = None
    restarts: int = RESTARTS
    wait_seconds: float = WAIT_SECONDS
    save_seconds: float = SAVE_SECONDS
    measure: bool = False  # before each start of the ranks, the pods are measured together
    once: bool = False  # an operator restarts the pods


class Ranks:
    """This pod's ranks under torchrun, or the benchmark with ranks of its own, and what they print."""

    def __init__(
        self, settings: Settings, address: str, port: int, *, restarts: int | None = None, measuring: bool = False
    ) -> None:  # fmt: skip
        self.measuring = measuring
        self._save_seconds = settings.save_seconds
        self._save_by = self._end_by = 0.0  # when these ranks are ended; 0.0: not decided
        self._tail = b""
        words = measurement(settings, address, port) if measuring else [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={settings.nodes}",
            f"--node-rank={settings.index}", f"--nproc-per-node={settings.ranks}", f"--master-addr={address}",
            f"--master-port={port}", f"--rdzv-conf=timeout={settings.wait_seconds:.0f}", *settings.words,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if restarts is not None:  # else an operator's count is in the environment already
            environment["TOPOFLIGHT_RESTARTS"] = str(restarts)
        earlier = frozenset(_nccl_logs(settings.output))
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as stream:
            self._tree = processes.Tree(words, environment, stream)
        self._over = threading.Event()
        # threads apart from the loop that answers the other pods: the folder's file server may not answer
        self._threads = [
            threading.Thread(target=self._copy, args=(reading,), name="the ranks' output", daemon=True),
            threading.Thread(target=self._copy_nccl, args=(settings.output, earlier), name="NCCL's log", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _copy(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as stream:
            while raw := stream.read1(65536):
                self._tail = (self._tail + raw)[-_TAIL_BYTES:]
                self._write(raw)

    def _copy_nccl(self, output: Path | None, earlier: frozenset[Path]) -> None:
        """Copy whole lines of this pod's NCCL logs, one file a rank, which the pod's log would not hold otherwise."""
        read: dict[Path, int] = {}
        over = False
        while not over:
            over = self._over.wait(1.0)
            for path in _nccl_logs(output):
                at = read.get(path, 0)
                if path in earlier or at > _MOST_NCCL_BYTES:
                    continue
                with contextlib.suppress(OSError), path.open("rb") as stream:
                    stream.seek(at)
                    whole = stream.read(1 << 20).rpartition(b"\n")
                    read[path] = at + len(whole[0] + whole[1])
                    self._write(whole[0] + whole[1])

    def _write(self, raw: bytes) -> None:
        with contextlib.suppress(OSError):
            sys.stdout.buffer.write(raw)
            sys.stdout.buffer.flush()

    def poll(self, *, terminating: bool, troubled: bool) -> int | None:
        """Return the code that these ranks ended with; None while they run.

        Ranks of a pod that is terminating are asked to save and have `save_seconds` for it; ranks whose peers are in
        trouble have LOST_GRACE_SECONDS. Then they are ended.
        """
        code, now = self._tree.process.poll(), time.monotonic()
        if code is not None:
            self._threads[0].join(5.0)
            if self.measuring:  # a measurement that was ended early has no result
                return run_record.RESUMABLE if terminating else code
            first = run_record.first_failed_rank(self._tail.decode(errors="replace")) if code else None
            return first.exit_code if first else code
        if terminating and not self._save_by:
            self._save_by = now + self._save_seconds
            self._tree.terminate()  # the ranks, not torchrun
        if troubled and not self._end_by:
            self._end_by = now + LOST_GRACE_SECONDS
        if any(by and now > by for by in (self._save_by, self._end_by)):
            self.end()
            return run_record.RESUMABLE if terminating else ENDED_HERE
        return None

    def last_error(self) -> str:
        """Return the error that a rank of this pod printed last; "" where none did."""
        return run_record.raised(self._tail.decode(errors="replace"))

    def end(self) -> None:
        """End every process of these ranks."""
        self._tree.end(1.0)
        self._over.set()
        for thread in self._threads:
            thread.join(5.0)


def _nccl_logs(output: Path | None) -> list[Path]:
    """Return the log files of NCCL that the ranks of this host have written into the output folder."""
    try:
        return sorted((output / "nccl").glob(f"nccl.{os.uname().nodename.partition('.')[0]}.*.log")) if output else []
    except OSError:
        return []


def measurement(settings: Settings, address: str, port: int) -> list[str]:
    """The benchmark that all pods run together, by the command of the same image: 3 for a failed result.

    With the environment as the job has it, and on the ranks that it will have.
    """
    words = [sys.executable, "-m", "agent.cli", "bench", "--quick", "--no-advice", f"--ranks={settings.ranks}"]
    if settings.nodes == 1:
        return words
    return [*words, f"--nodes={settings.nodes}", f"--node-rank={settings.index}", f"--rendezvous={address}:{port}"]

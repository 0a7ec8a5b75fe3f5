"""Records the run: what was requested, what ran, what the forecast said; `<output_dir>/run.json`.

Surface: a `contracts.run_record.RunRecord`, replaced as a whole at every write; `metrics.jsonl`, one line per
logged step; tensorboard where requested.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction

from contracts import run_record
from contracts.job_config import EndedError, JobPlan
from contracts.layout import Layout
from contracts.run_record import Communication, Loss, Measured, RunLayout, RunRecord, timestamp
from hardware.units import GIB

WARM_UP = 2  # first steps allocate and, in a pipeline, agree on shapes: not part of the median
# Memory is measured of these on a CPU: AdamW has its states after the first, DDP its last buckets in the third.
MEMORY_STEPS = 3
# Options of mallopt (glibc malloc.h), and two sizes for them: glibc's own threshold at the start, and the highest that
# its adjusting reaches on 64 bits (DEFAULT_MMAP_THRESHOLD_MIN and _MAX, malloc.c).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
EXACT_BYTES, FAST_BYTES = 128 << 10, 32 << 20
MAX_STEPS = 4096  # steps whose times are kept


def rss_bytes(name: str = "VmRSS") -> int:
    """Resident memory of this process now, or "VmHWM": the most since the start or the last reset (proc(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def forget_highest_rss() -> None:
    """Return freed memory and reset the peak, so that memory of earlier work does not count for a step."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def return_freed(threshold: int) -> None:
    """From now on blocks of so many bytes leave the process when they are freed; no effect without glibc.

    By itself glibc keeps what was freed, and its aligned allocations, which all tensors are, seldom fit into it
    (sourceware.org bug 14581): a step that needs 350 MiB of tensors has grown the process by 650 (glibc 2.36), more
    from step to step. With each tensor in a mapping of its own, resident memory is what the tensors need, as CUDA's
    peak is of what was allocated, not of what the allocator holds. New pages cost time, so few steps run so.
    """
    variables = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    if any(name in os.environ for name in variables):  # the user has decided
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, threshold)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * threshold)


# Out of memory: how it is recognised, and what it reports.

# Texts of errors by torch and NCCL that are not an OutOfMemoryError.
FAILURES = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "Cuda failure 2 'out of memory'")
# The settings that take less memory with the same global batch, first what costs a step the least time.
LIGHTER = (
    "Set gradient_checkpointing: true, or halve per_device_train_batch_size and double gradient_accumulation_steps. "
    "`topoflight recommend --config FILE` names layouts that fit."
)


class MemoryRanOutError(EndedError):
    """A rank needed more memory than there is, and would again after a restart."""

    code, status = 71, "out_of_memory"  # EX_OSERR


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error means that an allocation failed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in FAILURES)


# Communication in a step, by torch's profiler: `aten::*` and CUDA kernels compute, `gloo:*` and NCCL's kernels
# communicate. On a GPU only what runs on the device counts.


def measure_communication(events: Iterable[Any], wall_seconds: float) -> Communication | None:
    """Return the shares of collectives in the profiled time; None if there were none.

    A collective is hidden while an operator or the optimizer runs.
    """
    counted = list(events)
    if on_device := [e for e in counted if "CUDA" in str(e.device_type)]:
        counted = on_device
    collective = [e for e in counted if e.name.startswith(("gloo:", "ncclDevKernel", "ncclKernel"))]
    if not collective or wall_seconds <= 0:
        return None
    seconds_by_kind: dict[str, float] = {}
    for event in collective:
        kind, (start, end) = event.name.split("(")[0].removeprefix("gloo:"), _span(event)
        seconds_by_kind[kind] = seconds_by_kind.get(kind, 0.0) + end - start
    optimizer = [e for e in counted if e.name.startswith("Optimizer.step")]
    workers = {e.thread for e in collective} - {e.thread for e in optimizer}  # their copies are part of the collective
    if on_device:
        compute = [e for e in counted if e not in collective and not getattr(e, "is_user_annotation", False)]
    else:
        compute = [e for e in counted if e.name.startswith("aten::") and e.thread not in workers]
    busy, talking = [*map(_span, [*compute, *optimizer])], [*map(_span, collective)]
    share = min(1.0, union_seconds(talking) / wall_seconds)
    alone = max(0.0, union_seconds([*busy, *talking]) - union_seconds(busy)) / wall_seconds
    return Communication(share=share, exposed_share=min(share, alone), seconds_by_kind=seconds_by_kind)


def union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that at least one span covers."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            covered += stop - max(start, end)
            end = stop
    return covered


def _span(event: Any) -> tuple[float, float]:
    return event.time_range.start / 1e6, event.time_range.end / 1e6


class Recorder:
    """Collects the run; every rank has one, rank 0 writes."""

    def __init__(self, folder: Path, plan: JobPlan, layout: Layout, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.writes = int(os.environ.get("RANK", "0")) == 0
        self.baseline_rss = rss_bytes()
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.tokens = 0
        self.profiled = range(0)  # steps since the start
        self.record = RunRecord(
            status="running", started_at=timestamp(), host=os.uname().nodename,
            restarts=int(os.environ.get("TOPOFLIGHT_RESTARTS") or 0), steps_done=0,
            plan=plan, layout=RunLayout(family=layout.family), notes=list(plan.notes),
        )  # fmt: skip
        self.rss_peak = 0  # bytes, while loading; ru_maxrss would include the launcher's
        self.peak = 0  # of the first steps, on a CPU
        self.fullest = 0  # peak of the fullest rank, once the ranks have exchanged theirs
        self._board: Any = None
        if self.writes and plan.trl is None and plan.config and "tensorboard" in plan.config.report_to:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "runs"))

    def note(self, text: str) -> None:
        """Add a remark for the reader of the record."""
        if text not in self.record.notes:
            self.record.notes.append(text)

    def profile(self, steps: int) -> torch.profiler.profile:
        """Return torch's profiler for a few steps after the warm-up; call its `step` at the end of each step.

        Its context ends it wherever the run ends: a process that leaves with it running dies of SIGSEGV (torch 2.13).
        """
        self.profiled = range(WARM_UP + 1, WARM_UP + 1 + steps)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its notices are not the job's

        def choose(step: int) -> ProfilerAction:
            if step not in self.profiled:
                return ProfilerAction.NONE
            return ProfilerAction.RECORD_AND_SAVE if step == self.profiled[-1] else ProfilerAction.RECORD

        def measure(tool: torch.profiler.profile) -> None:
            seconds = sum(self.seconds[self.profiled.start : self.profiled.stop])
            self.record.communication = measure_communication(tool.events(), seconds)

        return torch.profiler.profile(schedule=choose, on_trace_ready=measure)

    def step(self, number: int, seconds: float, loss: float, tokens: int) -> None:
        """Record an optimizer step that has ended; its number is from 1, over all starts of the run."""
        self.record.steps_done = number
        if self.device.type != "cuda" and len(self.seconds) < MEMORY_STEPS:
            self.peak = max(self.peak, rss_bytes("VmHWM") - self.baseline_rss)
            if len(self.seconds) == MEMORY_STEPS - 1:
                return_freed(FAST_BYTES)
        if self.device.type == "cuda" and len(self.losses) == WARM_UP - 1:
            torch.cuda.empty_cache()  # what loading has left reserved is not what a step needs
            torch.cuda.reset_peak_memory_stats(self.device)
        if len(self.seconds) < MAX_STEPS:
            self.seconds.append(seconds)
        self.losses.append(loss)
        self.tokens += tokens

    def watch_memory(self) -> None:
        """Count memory from the next step on: loading has ended."""
        if self.device.type != "cuda":
            self.rss_peak = rss_bytes("VmHWM")
            return_freed(EXACT_BYTES)
            forget_highest_rss()

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write one line of metrics."""
        if self.writes:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)

    def counted_steps(self) -> list[float]:
        """Return the seconds of each step, without warm-up, steps whose memory was measured, and profiled steps."""
        first = WARM_UP if self.device.type == "cuda" else MEMORY_STEPS
        return [s for i, s in enumerate(self.seconds) if i >= first and i not in self.profiled]

    def peak_memory(self) -> int:
        """Return this rank's peak in bytes, on a GPU after the warm-up.

        On a GPU the peak has all that the forecast has: what the allocator reserved, and what is used outside of it.
        """
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            other_bytes = max(0, total - free - torch.cuda.memory_reserved(self.device))  # context, NCCL, others
            return int(torch.cuda.max_memory_reserved(self.device) + other_bytes)
        return max(0, self.peak or rss_bytes("VmHWM") - self.baseline_rss)

    def find_fullest_rank(self) -> None:
        """Exchange the peaks of all ranks, which call it together."""
        peak = torch.tensor(self.peak_memory(), device=self.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        self.fullest = int(peak)

    def describe_memory(self, error: str) -> str:
        """Describe the memory when an allocation failed, its forecast, and what to change."""
        moment = f"step {len(self.losses) + 1}" if self.record.model.name else "loading"
        plan, forecast = self.record.plan.forecast.memory_bytes, "no plan has a forecast of its memory"
        if plan is not None:
            forecast = f"the plan's forecast is {plan.mid / GIB:.2f} GiB ({plan.low / GIB:.2f}-{plan.high / GIB:.2f})"
        in_use = f"{(rss_bytes() - self.baseline_rss) / GIB:.2f} GiB resident besides the program"
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
            in_use = (
                f"{allocated / GIB:.2f} GiB allocated, {reserved / GIB:.2f} GiB reserved, {free / GIB:.2f} GiB free of "
                f"{total / GIB:.2f} GiB"
            )
        rank = os.environ.get("RANK", "0")
        return f"rank {rank}, {moment}: {error.splitlines()[0][:200]}; {in_use}; {forecast}. {LIGHTER}"

    def measured(self) -> Measured:
        """Return the measurements, with which a forecast is compared."""
        counted, plan = self.counted_steps(), self.record.plan.forecast
        typical = statistics.median(counted or self.seconds) if self.seconds else None
        rate = self.tokens / len(self.losses) / typical if typical else None
        mfu = plan.mfu * rate / plan.tokens_per_second if rate and plan.mfu and plan.tokens_per_second else None
        return Measured(
            step_seconds=typical, counted_steps=len(counted), tokens_per_second=rate, mfu=mfu,
            memory_bytes=max(self.peak_memory(), self.fullest),
            rss_peak_bytes=max(self.rss_peak, rss_bytes("VmHWM")),
        )  # fmt: skip

    def write(self) -> None:
        """Replace run.json."""
        if not self.writes:
            return
        record = self.record
        record.measured = self.measured()
        record.step_seconds = [round(s, 6) for s in self.seconds]
        record.loss = Loss(first=self.losses[0], last=self.losses[-1]) if self.losses else Loss()
        record.comparison = [comparison for comparison in run_record.compare(record) if comparison.within is not None]
        if line := run_record.watched(self.folder):
            self.note(line)
        run_record.save(self.folder / "run.json", record)

    def end(self, status: str, exit_code: int, reason: str | None = None) -> None:
        """Write the record for the last time, and print the comparison with the forecast."""
        record = self.record
        record.status, record.exit_code, record.reason, record.ended_at = status, exit_code, reason, timestamp()
        self.write()
        for comparison in record.comparison:  # for a reader of the log who has no access to run.json
            scale, unit = (1.0, "s") if comparison.unit == "s" else (GIB, "GiB")
            if comparison.forecast and comparison.measured is not None:
                expected, measured = comparison.forecast.scaled(1 / scale), comparison.measured / scale
                forecast = f"forecast {expected.mid:.3g} {unit} ({expected.low:.3g}-{expected.high:.3g})"
                print_once(f"{comparison.title}: {forecast}, measured {measured:.3g} {unit}: {comparison.verdict}")
        exposed = record.communication.exposed_share if record.communication else None
        if exposed is not None and exposed >= 0.005:
            print_once(f"communication {100 * exposed:.0f} % exposed")
        if self._board is not None:
            self._board.close()


def print_once(text: str) -> None:
    """Print a line on stderr, from rank 0 only."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)  # noqa: T201  progress for a person or a pod log

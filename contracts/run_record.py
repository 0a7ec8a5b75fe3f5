"""The record of a training run, run.json: what the job writes, its launcher ends and the agent shows.

Specification: run.json in docs/reference/finetune-job.md. What started the ranks, `topoflight launch` on one host
or `finetune.pod` in a pod, adds what it saw where the job could not write its own end: killed ranks, a killed launcher,
a lost node; what the job has reported stays valid.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from contracts import bounded, plain
from contracts.finding import Interval
from contracts.job_plan import JobPlan, RunForecast
from contracts.redaction import redact, without_secrets

RECORD_VERSION = 1
WHY = "why.json"  # in the same folder: the verdict of the process that watches the run
RESUMABLE = 75  # EX_TEMPFAIL: the job saved and ended; started again it goes on
KILLED = 128  # plus a signal's number, as a shell tells it
MOST_RECORD_BYTES = 16 << 20  # a run of 100 000 steps takes 2 MB
_TAIL_BYTES = 65536  # of metrics.jsonl, whose lines take some 300
_UNCOUNTED = 5  # steps of a record that names no counted_steps: three of warm-up and memory, two profiled
COMMUNICATION = ("gather", "reduce", "tensor_parallel", "context_parallel", "pipeline")
PART_WORDS = {"gather": "all-gather", "reduce": "gradient reduction", "tensor_parallel": "tensor parallelism",
              "context_parallel": "context parallelism", "pipeline": "pipeline sends",
              "idle": "between operators"}  # fmt: skip
# One rank in torchrun's report of a failure (torch/distributed/elastic/multiprocessing/errors/__init__.py)
_FAILED_RANK = re.compile(r"^.*?rank +: (\d{1,7}) [^\n]*\n.*?exitcode +: (-?\d{1,7}) ", re.MULTILINE)
# The last line of a Python traceback, as a rank prints it; torchrun's own error only says that a rank failed.
_RAISED = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w+(?:Error|Exception)\b(?<!ChildFailedError).*)$", re.MULTILINE)


class RecordError(ValueError):
    """The record of a run is missing or cannot be read."""


@dataclass(slots=True, kw_only=True)
class EffectiveLayout:
    """What the job found itself with, read from the built objects; None is "not reported"."""

    world_size: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    schedule: str | None = None
    stage_layers: list[int] = field(default_factory=list)
    wrapper: str | None = None  # "FSDP", "DDP+TP"
    device: str | None = None  # "cuda:0", "cpu"
    backend: str | None = None  # "nccl", "gloo"
    precision: str | None = None
    reshard_after_forward: bool | None = None
    checkpointed_layers: int | None = None
    compiled_layers: int | None = None
    placements: dict[str, int] = field(default_factory=dict)  # "dp_shard:S(0)" -> parameters placed so
    unsharded_parameters: int | None = None
    split_projections: list[int] = field(default_factory=list)  # split over tp, of how many
    parameter_bytes: int | None = None
    local_parameter_bytes: int | None = None
    transports: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RunLayout:
    """The layout that ran; the plan has the one that was requested."""

    family: str | None = None
    effective: EffectiveLayout | None = None


_ROUNDING = 0.01  # of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """What was trained."""

    name: str | None = None
    parameters: int | None = None
    trainable: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the forecast is held against; None is "not measured"."""

    step_seconds: float | None = None  # median
    counted_steps: int | None = None  # that it is the median of: without warm-up, memory's and profiled steps
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_bytes: float | None = None  # peak of the fullest rank
    memory_counts: str | None = None  # what memory_bytes counts
    memory_allocated_bytes: float | None = None  # of it, by tensors; of a GPU
    rss_peak_bytes: int | None = None
    rss_growth_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Of the first and the last step."""

    first: float | None = None
    last: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalLoss:
    """Of the test split after a step."""

    step: int
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Of the profiled steps: shares of the step, seconds of each kind of collective."""

    share: float | None = None
    exposed_share: float | None = None
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    profiled_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """One part of a step, from the profiler: what nothing else hides."""

    part: str  # "compute", "gather", "reduce", "tensor_parallel", "context_parallel", "pipeline", ...
    measured_seconds: float
    share: float  # of the profiled step
    hidden_seconds: float | None = None
    forecast_seconds: float | None = None

    @property
    def words(self) -> str:
        """The name in a sentence."""
        return PART_WORDS.get(self.part, self.part)


_TITLES = {"step_seconds": "step time", "memory_bytes": "peak memory per rank"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity of a run: its forecast, its measurement, and whether the forecast's interval holds it."""

    quantity: str  # "step_seconds", "memory_bytes", "memory_allocated_bytes", "tokens_per_second"
    forecast: Interval | None = None
    measured: float | None = None
    within: bool | None = None  # None: not forecast or not measured
    line: str = ""

    @property
    def title(self) -> str:
        """The quantity in words: "step time"."""
        return _TITLES.get(self.quantity, self.quantity.rsplit("_", 1)[0].replace("_", " "))

    @property
    def unit(self) -> str:
        """ "s", "B", or "/s"."""
        return "s" if self.quantity.endswith("_seconds") else "B" if self.quantity.endswith("_bytes") else "/s"

    @property
    def verdict(self) -> str:
        """ "inside", "above" or "below" the interval, or "unknown"."""
        if self.within is None or self.forecast is None or self.measured is None:
            return "unknown"
        if self.within:
            return "inside"
        return "above" if self.measured > self.forecast.high else "below"


def comparison_of(quantity: str, forecast: Interval | None, measured: float | None, line: str = "") -> Comparison:
    """Compare one measured quantity with its forecast, in the same unit."""
    within = None if forecast is None or measured is None else forecast.low <= measured <= forecast.high
    return Comparison(quantity=quantity, forecast=forecast, measured=measured, within=within, line=line)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclChannels:
    """What NCCL's own log showed of the job's channels (finetune.channels)."""

    verdict: str = "unknown"
    planned: str | None = None
    hosts: int | None = None
    channels: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    interfaces: list[str] = field(default_factory=list)
    ranks_unknown: int | None = None
    log: str | None = None


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """run.json. None and empty mean "not reported"."""

    schema_version: int = RECORD_VERSION
    status: str = "unknown"  # "running", "complete", "mismatch", "out_of_memory", ...
    reason: str | None = None
    exit_code: int | None = None
    host: str | None = None
    started_at: str | None = None  # UTC, RFC 3339
    ended_at: str | None = None
    restarts: int = 0
    plan: JobPlan = field(default_factory=JobPlan)  # what was to run
    layout: RunLayout = field(default_factory=RunLayout)
    model: RunModel = field(default_factory=RunModel)
    data: dict[str, Any] = field(default_factory=dict)  # name, rows, lengths, as the job counted them
    transports: list[str] = field(default_factory=list)
    nccl: NcclChannels | None = None
    communication: Communication | None = None
    parts: list[RunPart] = field(default_factory=list)
    measured: Measured = field(default_factory=Measured)
    loss: Loss = field(default_factory=Loss)
    comparison: list[Comparison] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    steps_done: int | None = None
    eval_loss: list[EvalLoss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checkpoint: str | None = None
    adapter: str | None = None
    base: str | None = None
    merged: str | None = None
    saved_model: str | None = None
    posted_by: str | None = None  # the service account, if the record came over HTTP

    @property
    def forecast(self) -> RunForecast:
        """The plan's."""
        return self.plan.forecast

    @property
    def counted_steps(self) -> int | None:
        """Steps that the median is of; of a record from before the member was written, at least so many."""
        if self.measured.counted_steps is not None:
            return self.measured.counted_steps
        return max(0, len(self.step_seconds) - _UNCOUNTED) if self.step_seconds else None

    def seconds_of(self, part: RunPart) -> float:
        """A part's share of the step that was measured without the profiler: the profiler makes steps longer."""
        step = self.measured.step_seconds
        return part.share * step if step else part.measured_seconds

    @property
    def parts_overlap(self) -> bool:
        """Whether parts ran at the same time, so that they are more than the step together."""
        return sum(part.share for part in self.parts) > 1.0 + _ROUNDING

    @property
    def worst(self) -> str:
        """The communication that the step waits for longest: "all-gather 31 % exposed"; empty without any."""
        talking = [part for part in self.parts if part.part in COMMUNICATION]
        if not talking:
            return ""
        most = max(talking, key=lambda part: part.share)
        return f"{most.words} {100 * most.share:.0f} % exposed"

    @property
    def placements(self) -> str:
        """The effective layout in words: "FSDP on 2 x cpu (gloo): dp_shard:S(0) x 97"."""
        found = self.layout.effective
        if not found:
            return "unknown"
        placed = ", ".join(f"{where} x {count}" for where, count in found.placements.items())
        size = "?" if found.world_size is None else found.world_size
        where = f"{size} x {found.device or '?'} ({found.backend or '?'})"
        return f"{found.wrapper or self.layout.family} on {where}: {placed or 'nothing sharded'}"


def compare(record: RunRecord) -> tuple[Comparison, ...]:
    """Step time and memory of a run beside the forecast in its plan, whether known or not."""
    due, measured = record.forecast, record.measured
    return (
        comparison_of("step_seconds", due.step_seconds, measured.step_seconds),
        comparison_of("memory_bytes", due.memory_bytes, measured.memory_bytes),
    )


def record_of(data: dict[str, Any]) -> RunRecord:
    """The members of a document that are there and of the right kind, without secrets.

    Older and other jobs write records too. A reason or a note quotes what a program printed, and a record is shown to
    every reader of the agent and of a report.
    """
    return plain.pick(without_secrets(data), RunRecord)


def dumps(record: RunRecord) -> str:
    """The document."""
    return json.dumps(plain.write(record), indent=1)


def read(path: Path) -> RunRecord:
    """The record in this file; RecordError names the file and what is wrong with it."""
    try:
        data = plain.loads(bounded.read_text(path, MOST_RECORD_BYTES), unknown_numbers=True)  # a loss may be NaN
    except FileNotFoundError:
        raise RecordError(f"{path}: the job left no record of its run") from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise RecordError(f"{path}: must hold one JSON object")
    version = data.get("schema_version", RECORD_VERSION)
    if version != RECORD_VERSION:
        raise RecordError(f"{path}: schema_version is {version!r}; this release reads {RECORD_VERSION}")
    return record_of(data)


class FailedRank(NamedTuple):
    """A rank in torchrun's report of a failure."""

    rank: int
    exit_code: int  # negative for a signal

    @property
    def signal(self) -> str:
        """ "SIGKILL"; "" where no signal ended the rank."""
        return signal.Signals(-self.exit_code).name if -self.exit_code in set(signal.Signals) else ""


def failed_ranks(log: str) -> list[FailedRank]:
    """The ranks that torchrun's report at the end of its log names."""
    return [FailedRank(int(rank), int(code)) for rank, code in _FAILED_RANK.findall(log)]


def first_failed_rank(log: str) -> FailedRank | None:
    """The rank that torchrun saw fail first; None if its log does not show it."""
    return next(iter(failed_ranks(log.partition("Root Cause")[2])), None)


def raised(log: str) -> str:
    """Return the last line of the last traceback that a rank printed, without secrets; "" where there is none."""
    found = _RAISED.findall(log)
    return redact(found[-1])[:300] if found else ""


def of_start(path: Path, began: float) -> RunRecord | None:
    """run.json, unless it cannot be read or an earlier start left it."""
    try:
        return read(path) if path.stat().st_mtime >= began else None
    except (OSError, RecordError):
        return None


def own_exit_code(path: Path, exit_code: int, began: float, *, cut_short: bool = False) -> int:
    """The job's own code where torchrun, which makes 1 of every failure, hides it; 75 is "start again to go on".

    `cut_short` says that torchrun was asked to end: the job may have been done by then.
    """
    if exit_code == 0:
        return 0
    record = of_start(path, began)
    own = record.exit_code if record else None
    return own if own is not None and (0 if cut_short else 1) <= own < 256 else exit_code


def ended(path: Path, *, status: str, exit_code: int, reason: str, began: float) -> RunRecord | None:
    """The record of this start as it ended, None where it left none; one that still says "running" is written anew.

    The last step is that of metrics.jsonl, which is newer than the record's.
    """
    record = of_start(path, began)
    if record is None or exit_code == 0 or record.status not in ("running", "complete"):
        return record
    updated = replace(
        record, status=status, exit_code=exit_code if exit_code >= 0 else KILLED - exit_code, reason=reason
    )
    if record.status == "running":  # otherwise it has reported its end, and the agent has the report
        updated.ended_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        updated.steps_done = _logged_step(path.with_name("metrics.jsonl"), began) or record.steps_done or 0
        with contextlib.suppress(OSError):  # the disk may be what ended the job
            save(path, updated)
    return updated


def watched(folder: Path) -> str:
    """The verdict that `why --watch` left beside the record, as a note; empty where nothing was found."""
    try:
        found = plain.loads(bounded.read_text(folder / WHY, 1 << 20))
        state, line = str(found["state"]), str(found["line"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"why: {line}"[:500] if state not in ("", "fine") else ""


def save(path: Path, record: RunRecord) -> None:
    """Replace run.json as a whole."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(dumps(record))
    draft.replace(path)


def _logged_step(metrics: Path, began: float) -> int:
    """The last step that this start logged; 0 where it logged none."""
    try:
        if metrics.stat().st_mtime < began:
            return 0
        with bounded.open_regular(metrics) as stream:
            stream.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
            lines = stream.read(_TAIL_BYTES).splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # the job was killed as it wrote this line
            return int(json.loads(line)["step"])
    return 0

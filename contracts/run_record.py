"""The record of a training run, run.json: the job writes it, the launcher completes it, the agent shows it.

Specification: run.json in docs/reference/finetune-job.md. The process that started the ranks (`topoflight launch` on
one host, `finetune.pod` in a pod) records the end if the job could not: ranks or the launcher were killed, or a node
was lost. Values that the job reported are kept.
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
from contracts.job_config import JobPlan
from contracts.redaction import redact, without_secrets

RECORD_VERSION = 1
WHY = "why.json"  # in the same folder: verdict of the process that watches the run
RESUMABLE = 75  # EX_TEMPFAIL: the job saved a checkpoint and ended; starting it again resumes it
KILLED = 128  # plus the signal number, as in a shell
MAX_RECORD_BYTES = 16 << 20  # a run of 100 000 steps takes 2 MB
# Matches one rank in torchrun's failure report (torch/distributed/elastic/multiprocessing/errors/__init__.py)
_FAILED_RANK = re.compile(
    r"(?m)^(?:.*?time +: (\d{4}-\S{1,20})\n)?(?:.*?host +: (\S{1,253})\n)?.{0,400}?rank +: (\d{1,7}) [^\n]*+"
    r"(?:\n.*?exitcode +: (-?\d{1,7}) (?:\(pid: (\d{1,9})\))?.*+((?:\n(?!.*(?:time|rank) +: |.*====).*+)*+)|\s*\Z)"
)
# The last line of a rank's Python traceback, which torchrun indents. Its own error only says that a rank failed.
_RAISED = re.compile(r"(?m)^(?:\[[^\]\n]{1,200}\]:? ?)? {0,2}([\w.]+(?:Error|Exception)\b(?<!ChildFailedError).*)$")


class RecordError(ValueError):
    """run.json is missing or cannot be read."""


@dataclass(slots=True, kw_only=True)
class EffectiveLayout:
    """The layout that the job actually used, read from its PyTorch objects. None means not reported."""

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
    placements: dict[str, int] = field(default_factory=dict)  # "dp_shard:S(0)" -> parameters with this placement
    unsharded_parameters: int | None = None
    split_projections: list[int] = field(default_factory=list)  # projections split over tp, and the total
    parameter_bytes: int | None = None
    local_parameter_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class RunLayout:
    """The effective layout. The plan has the requested layout."""

    family: str | None = None
    effective: EffectiveLayout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """The trained model."""

    name: str | None = None
    parameters: int | None = None
    trainable: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements that are compared with the forecast. None means not measured."""

    step_seconds: float | None = None  # median
    counted_steps: int | None = None  # steps in the median; 0: it is of warm-up or profiled steps alone
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_bytes: float | None = None  # peak of the rank with the highest use
    rss_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Training loss of the first and the last step."""

    first: float | None = None
    last: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalLoss:
    """Loss on the test split after a training step."""

    step: int
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Communication in the profiled steps: fractions of the step, and seconds by kind of collective."""

    share: float | None = None
    exposed_share: float | None = None
    seconds_by_kind: dict[str, float] = field(default_factory=dict)


_TITLES = {"step_seconds": "step time", "memory_bytes": "peak memory per rank"}  # the quantities that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Forecast and measurement of one quantity, and whether the measurement is inside the forecast interval."""

    quantity: str  # "step_seconds" or "memory_bytes"
    forecast: Interval | None = None
    measured: float | None = None
    within: bool | None = None  # None: no forecast or no measurement

    @property
    def title(self) -> str:
        """Name of the quantity for a report: "step time"."""
        return _TITLES[self.quantity]

    @property
    def unit(self) -> str:
        """Unit of the quantity: "s" or "B"."""
        return "s" if self.quantity.endswith("_seconds") else "B"

    @property
    def verdict(self) -> str:
        """Position of the measurement: "inside", "above" or "below" the interval, or "unknown", with a known reason."""
        if self.within is None or self.forecast is None or self.measured is None:
            return "unknown" if self.forecast is None or self.measured is None else "unknown (warm-up steps alone)"
        return "inside" if self.within else "above" if self.measured > self.forecast.high else "below"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclChannels:
    """Channels of the job, as reported in NCCL's log (finetune.channels)."""

    verdict: str = "unknown"
    planned: str | None = None
    hosts: int | None = None
    channels: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    interfaces: list[str] = field(default_factory=list)
    log: str | None = None


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """The content of run.json. None and empty mean "not reported"."""

    schema_version: int = RECORD_VERSION
    status: str = "unknown"  # "running", "complete", "mismatch", "out_of_memory", ...
    reason: str | None = None
    exit_code: int | None = None
    host: str | None = None
    started_at: str | None = None  # UTC, RFC 3339
    ended_at: str | None = None
    restarts: int = 0
    plan: JobPlan = field(default_factory=JobPlan)  # the requested plan
    layout: RunLayout = field(default_factory=RunLayout)
    model: RunModel = field(default_factory=RunModel)
    data: dict[str, Any] = field(default_factory=dict)  # name, rows and lengths of the data set, counted by the job
    transports: list[str] = field(default_factory=list)
    nccl: NcclChannels | None = None
    communication: Communication | None = None
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
    def placements(self) -> str:
        """Describe the effective layout: "FSDP on 2 x cpu (gloo): 97 parameters with placement dp_shard:S(0)"."""
        layout = self.layout.effective
        if not layout:
            return "unknown"
        placed = ", ".join(f"{count} parameters with placement {name}" for name, count in layout.placements.items())
        ranks = f"{layout.world_size or '?'} x {layout.device or '?'} ({layout.backend or '?'})"
        return f"{layout.wrapper or self.layout.family} on {ranks}: {placed or 'nothing sharded'}"


def compare(record: RunRecord) -> tuple[Comparison, ...]:
    """Compare step time and memory of a run with the forecast in its plan; unknown values are included."""
    comparisons = []
    for name in _TITLES:
        forecast, measured = getattr(record.plan.forecast, name), getattr(record.measured, name)
        warm_up = name == "step_seconds" and record.measured.counted_steps == 0  # no step counts
        within = None if forecast is None or measured is None or warm_up else forecast.low <= measured <= forecast.high
        comparisons.append(Comparison(quantity=name, forecast=forecast, measured=measured, within=within))
    return tuple(comparisons)


def record_of(data: dict[str, Any]) -> RunRecord:
    """Return the record without secrets. Raises plain.MisfitError for a member of the wrong type.

    A reason or a note may quote the output of a program, and every user of the agent and every reader of a report sees
    the record.
    """
    return plain.read(without_secrets(data), RunRecord)


def dumps(record: RunRecord) -> str:
    """Serialize the record."""
    return json.dumps(plain.write(record), indent=1)


def read(path: Path) -> RunRecord:
    """Read the record from a file. Raises RecordError, which names the file and the error."""
    try:
        data = plain.loads(bounded.read_text(path, MAX_RECORD_BYTES), unknown_numbers=True)  # a loss may be NaN
        if not isinstance(data, dict):
            raise RecordError("must hold one JSON object")
        if (version := data.get("schema_version", RECORD_VERSION)) != RECORD_VERSION:
            raise RecordError(f"schema_version is {version!r}; this release reads {RECORD_VERSION}")
        return record_of(data)
    except FileNotFoundError:
        raise RecordError(f"{path}: the job left no record of its run") from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: {error}") from None


class FailedRank(NamedTuple):
    """One rank in torchrun's failure report."""

    rank: int
    exit_code: int | None  # negative: killed by this signal; None: the report is cut before it
    at: str = ""  # when torchrun noticed it, by its clock, in whole seconds
    host: str = ""
    pid: int | None = None
    error: str = ""  # last line of its traceback, where the program is decorated with torchrun's `record`

    @property
    def signal(self) -> str:
        """Name of the signal that killed the rank, such as "SIGKILL"; "" if it was not killed."""
        return signal.Signals(-self.exit_code).name if self.exit_code and -self.exit_code in set(signal.Signals) else ""

    @property
    def is_own(self) -> bool:
        """Whether it ended by itself: NCCL's watchdog aborts waiting ranks, and launchers terminate the others."""
        return self.exit_code not in (-signal.SIGABRT, -signal.SIGTERM)


def failed_ranks(log: str) -> list[FailedRank]:
    """Return the ranks listed in torchrun's failure report at the end of its log."""
    return [FailedRank(int(rank), int(code) if code else None, moment, host, int(pid) if pid else None, raised(below))
            for moment, host, rank, code, pid, below in _FAILED_RANK.findall(log)]  # fmt: skip


def find_first_failed(log: str) -> FailedRank | None:
    """Return the rank that torchrun reports as the first to fail; None if its log does not name it.

    A log of several nodes has a report of each; the earliest failure is the first.
    """
    firsts = (ranks[0] for report in log.split("Root Cause")[1:] if (ranks := failed_ranks(report)))
    return min(firsts, key=lambda rank: rank.at, default=None)


def raised(log: str) -> str:
    """Return the last line of a rank's last traceback, with secrets removed; "" if there is no traceback."""
    return redact("".join(_RAISED.findall(log)[-1:]))[:300]


def read_since(path: Path, began: float) -> RunRecord | None:
    """Read run.json; None if it cannot be read or if an earlier start of the job wrote it."""
    try:
        return read(path) if path.stat().st_mtime >= began else None
    except (OSError, RecordError):
        return None


def choose_exit_code(record: RunRecord | None, exit_code: int, *, cut_short: bool = False) -> int:
    """Return the job's own exit code, since torchrun replaces any failure by 1. Code 75 means "start again to resume".

    `cut_short`: torchrun was asked to end; the job may have completed before that.
    """
    recorded = record.exit_code if record and exit_code else None
    return recorded if recorded is not None and (0 if cut_short else 1) <= recorded < 256 else exit_code


def end(path: Path, record: RunRecord | None, status: str, code: int, reason: str) -> tuple[RunRecord | None, bool]:
    """Return the record of this start with its end, None if there is no record, and whether this call added the end.

    If the job wrote the end itself, it has also sent the record to the agent.
    """
    if record is None or code == 0 or record.status not in ("running", "complete"):
        return record, False
    is_ended = record.status == "running"  # by this call
    code, ended_at = code if code >= 0 else KILLED - code, record.ended_at or timestamp()
    record = replace(record, status=status, exit_code=code, reason=reason, ended_at=ended_at)
    if is_ended:
        with contextlib.suppress(OSError):  # a full disk may have ended the job
            save(path, record)
    return record, is_ended


def watched(folder: Path) -> str:
    """Return the verdict that `why --watch` wrote next to the record, as a note; empty if it found nothing."""
    try:
        verdict = plain.loads(bounded.read_text(folder / WHY, 1 << 20))
        state, line = str(verdict["state"]), str(verdict["line"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"why: {line}"[:500] if state not in ("", "fine") else ""


def timestamp(seconds: float | None = None) -> str:
    """Return a Unix time, by default the current one, in UTC as RFC 3339."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def save(path: Path, record: RunRecord) -> None:
    """Write run.json atomically. On a full disk, the space of the file that is there is used, if that is enough."""
    draft, raw = path.with_name(f".{path.name}.draft"), dumps(record).encode()
    try:
        draft.write_bytes(raw)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        if not path.is_file() or len(raw) > 512 * path.stat().st_blocks:  # stat(2)
            raise
        with path.open("r+b") as file:
            file.write(raw.ljust(path.stat().st_size))

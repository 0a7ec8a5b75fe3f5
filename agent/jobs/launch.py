"""Launches the fine-tune job on this host through torchrun, with the recommendation inside.

The job learns everything from plan.json and leaves run.json (docs/reference/finetune-job.md). It ends with this
process, and ends within its time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agent.advice.job_settings import EMBEDDED_MODEL, left_open, settings, untrainable
from agent.base import units
from agent.base.documents import document, write_atomic
from agent.base.inputs import RequestError
from agent.checks.host_checks import gdrdma_possible
from collectives.bench import processes
from contracts import plain, run_record
from contracts.job_config import DEFAULT_CONFIG
from contracts.job_plan import JobPlan, RunForecast, dumps
from contracts.redaction import redact
from contracts.run_record import RunRecord
from hardware.gpus import without_gdr
from hardware.units import rate
from planner.advice import Recommendation
from planner.forecast.memory import STORAGE_BYTES_PER_SECOND, checkpoint_bytes, save_seconds
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from topology.build import build

RESUMABLE = run_record.RESUMABLE
GRACE_SECONDS = 20  # for a checkpoint after SIGTERM, at least
_TAIL_BYTES = 65536  # of the job's log: torchrun's report and the tracebacks before it
_LAST_SECONDS = 1.0  # for what did not end when it was asked to, or outlived torchrun
_AGAIN = "the same command goes on from its last checkpoint, if it had saved one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A job that ended."""

    exit_code: int  # the job's own (docs/reference/finetune-job.md) where it could write it, else torchrun's
    seconds: float
    output: Path
    last_lines: tuple[str, ...]  # of its output, without secrets: a report quotes them
    cut_short: str = ""  # why the job was asked to end before it was done; empty: it ended by itself
    killed: bool = False  # it did not end when it was asked to
    grace_seconds: int = GRACE_SECONDS  # that it had to end
    raised: str = ""  # the last error that a rank printed
    after_end: str = ""  # how a rank ended that had done all its work, where it ended by a signal
    record: RunRecord | None = None  # run.json of this start, where the job came to write it

    @property
    def wrote_its_end(self) -> bool:
        """Whether the job itself wrote how it ended; else `record_of` has told it, by `fate`."""
        return self.record is not None and self.record.reason != self.fate

    @property
    def fate(self) -> str:
        """What became of the job, in one sentence."""
        if self.exit_code == RESUMABLE:
            ending = "the job saved and ended; the same command goes on from there"
        elif self.killed:
            ending = f"the job did not end within {self.grace_seconds} s of SIGTERM and was killed; " + _AGAIN
        elif self.cut_short and self.exit_code == 0:
            ending = "the job was done by then"
        elif self.cut_short:
            ending = f"the job ended without saving (exit code {self.exit_code}); " + _AGAIN
        elif self.after_end:
            ending = self.after_end
        elif (failed := run_record.first_failed_rank("\n".join(self.last_lines))) and failed.signal:
            ending = f"rank {failed.rank} was ended by {failed.signal}; " + _AGAIN
        else:
            ending = f"the job ended with exit code {self.exit_code}" + (f": {self.raised}" if self.raised else "")
        return f"{self.cut_short}: {ending}" if self.cut_short else ending


def job_plan(
    advice: Recommendation, config: Path | None = None, overrides: Sequence[str] = (), found: Sequence[Snapshot] = ()
) -> JobPlan:
    """The document of a job with the chosen layout: the settings of the file, and over them the plan's of what it
    leaves open; `found` are the hosts that it is for. RequestError where there is nothing to train, or nowhere.
    """
    if advice.chosen is None:
        raise RequestError("there is no layout to launch: " + "; ".join(r.reason for r in advice.rejected[:3]))
    embedded = advice.model is None or advice.model.name == EMBEDDED_MODEL
    job_config, explicit, notes = settings(DEFAULT_CONFIG if embedded and config is None else config, overrides)
    if why := untrainable(advice, explicit):
        raise RequestError(why)
    if not embedded:
        job_config = replace(job_config, **left_open(advice, explicit))
    return JobPlan(
        config=job_config, layout=advice.chosen.layout, notes=tuple(notes),
        forecast=run_forecast(advice),
        environment={setting.name: setting.value for setting in advice.settings}, transport=transport(advice, found),
    )  # fmt: skip


def run_forecast(advice: Recommendation) -> RunForecast:
    """The forecast of the chosen layout as a plan holds it; an empty one without a layout."""
    return plain.pick(document(advice.chosen.forecast), RunForecast) if advice.chosen else RunForecast()


def transport(advice: Recommendation, found: Sequence[Snapshot] = ()) -> dict[str, str]:
    """The network that NCCL is to take between hosts, and whether by GPUDirect RDMA; empty: unknown.

    It is plan.json's `transport`, held against NCCL's own log. Only what the hosts were seen to have is promised.
    Locked memory is needed for RDMA alone, the resource of EFA's name for EFA alone (planner/nccl_env/environment.py).
    """
    resources = [need.value for need in advice.needs if need.name == "resource"]
    pinned = any(need.name == "memlock" for need in advice.needs)
    if advice.backend != "nccl" or not pinned:
        return {}
    seen = [s.reason.evidence for s in advice.settings if s.name == "NCCL_IB_HCA"]
    seen += [note.evidence for note in advice.notes if note.topic == "NCCL_IB_HCA"]
    efa = any(value.startswith("vpc.amazonaws.com/efa: ") for value in resources)
    planned = {"network": "AWS Libfabric" if efa else "IB", "evidence": next(filter(None, seen), "")}
    chosen = next((s.value for s in advice.settings if s.name == "NCCL_IB_HCA"), "")
    if not efa and (why := gdrdma(found, chosen)):
        planned["gdrdma"] = why
    return planned


def gdrdma(found: Sequence[Snapshot], chosen: str = "") -> str:
    """Why every GPU of these hosts is to use GPUDirect RDMA; empty where one does not, or where it is not known.

    `chosen` is NCCL_IB_HCA: a GPU whose nearest NICs it leaves out takes one that is farther.
    """
    names = {word.partition(":")[0] for word in chosen.lstrip("=").split(",")}
    if not gdrdma_possible(found) or chosen.startswith("^"):
        return ""
    sentences = []
    for snapshot in found:
        gpus, node = snapshot.facts(GpuFacts), build(snapshot)
        models = [gpu.name for gpu in gpus.gpus] if gpus else [None]
        able = all(model and not without_gdr(model) for model in models)
        if not able or len(node.nearest_nic) != len(node.gpus) or not node.nearest_nic:
            return ""
        for near in node.nearest_nic:
            taken = not chosen or not names.isdisjoint(near.nics)
            if not (taken and near.decidable and near.gdr_by_default and not near.why):
                return ""
        labels = sorted({near.label for near in node.nearest_nic})
        sentences.append(f"{snapshot.hostname}: each GPU is {' or '.join(labels)} from its NIC")
    return "; ".join(sentences[:2]) + (f"; and {len(sentences) - 2} more hosts alike" if len(sentences) > 2 else "")


def command(plan: Path, ranks: int) -> list[str]:
    """The torchrun line of one host."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    job = [sys.executable, "-m", "finetune.train", "--plan", str(plan)]
    # torchrun's ranks outlive it when it is killed: each is tied to it
    return [*words, "--no-python", *processes.tethered(job, parent=0)]


def train(
    advice: Recommendation,
    output: Path,
    *,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    timeout_seconds: float,
    bytes_per_second: float | None = None,
    on_line: Callable[[str], None] = lambda _line: None,
    stop: threading.Event | None = None,
) -> Launched:
    """Run the job to its end on this host; raises RequestError where there is nothing to start.

    `stop` is set where SIGTERM ended it, and may be set before: the job is then asked to end. `bytes_per_second` is
    what storage takes of its checkpoint, None where that is unknown.
    """
    made = job_plan(advice, config, (*overrides, f"output_dir={output}"))
    assert made.layout is not None  # noqa: S101 - job_plan has refused otherwise
    output.mkdir(parents=True, exist_ok=True)
    words = command(write_atomic(output / "plan.json", dumps(made)), made.layout.world_size)
    began = time.time()
    variables = environment(made.environment, made.layout.world_size)
    grace_seconds = grace(advice, bytes_per_second)
    ended = run(words, variables, output, timeout_seconds, on_line, stop, grace_seconds=grace_seconds)
    own = run_record.own_exit_code(output / "run.json", ended.exit_code, began, cut_short=bool(ended.cut_short))
    ended = replace(ended, exit_code=own)
    return replace(ended, record=record_of(output / "run.json", ended, began))


def record_of(path: Path, ended: Launched, began: float) -> RunRecord | None:
    """The job's record of this start; the end of one that could not write it (SIGKILL) is told by what was seen."""
    before = run_record.of_start(path, began)
    closed = run_record.ended(path, status="failed", exit_code=ended.exit_code, reason=ended.fate, began=began)
    if before is not None and closed is not None and before.status == "running" != closed.status:
        # says on stderr what went wrong
        subprocess.run([sys.executable, "-P", "-m", "finetune.post", str(path)], check=False)
    return closed


def to_save(advice: Recommendation) -> tuple[float, float]:
    """Bytes of a checkpoint, and seconds of the step that may have to end first; of nothing known, 0."""
    if advice.chosen is None or advice.model is None or advice.train is None:
        return 0.0, 0.0
    in_fp32 = advice.backend != "nccl" or advice.chosen.layout.precision == "fp32"
    due = advice.chosen.forecast.step_seconds.high
    return checkpoint_bytes(advice.model, advice.train, in_fp32=in_fp32), due


def grace(advice: Recommendation, bytes_per_second: float | None) -> int:
    """Seconds that a job on this host may take to save after SIGTERM."""
    return save_seconds(*to_save(advice), bytes_per_second, least=GRACE_SECONDS)


def grace_notice(advice: Recommendation, who: str, seconds: int, least: int, bytes_per_second: float | None) -> str:
    """How long they may take to save, where that goes by a rate of storage that nobody has told; else nothing."""
    if seconds == least or bytes_per_second is not None:
        return ""
    return (
        f"a checkpoint is {units.size(to_save(advice)[0])}: {who} have {seconds} s for it after SIGTERM, at the "
        f"{rate(STORAGE_BYTES_PER_SECOND)} of a common volume: --storage-rate says what yours takes"
    )


def environment(settings: Mapping[str, str], ranks: int) -> dict[str, str]:
    """This process's environment with these settings on top, for so many ranks of this host."""
    # torchrun would set the same 1 for each of several ranks and print a banner about it; a rank alone has all cores.
    # A user's or the advice's value comes before.
    threads = {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    return {**threads, **os.environ, "PYTHONUNBUFFERED": "1", **settings}


def run(
    words: Sequence[str],
    variables: Mapping[str, str],
    output: Path,
    timeout_seconds: float,
    on_line: Callable[[str], None],
    stop: threading.Event | None = None,
    *,
    grace_seconds: int = GRACE_SECONDS,
) -> Launched:
    """Run one command line, its output to a log and line by line to `on_line`; end its whole tree whatever happens."""
    started = time.monotonic()
    log = output / "job.log"
    with log.open("wb") as stream, sigterm(stop) as stopping, processes.run_folder() as temporary:
        # torchrun leaves files in TMPDIR when it is killed
        tree = processes.Tree(words, {**variables, "TMPDIR": str(temporary)}, stream)
        last: deque[str] = deque(maxlen=12)
        with _followed(log, last, on_line):
            try:
                late = {"": "", "stopped": "stopped by SIGTERM", "late": f"not done within {timeout_seconds:.0f} s"}
                cut_short = late[tree.wait(time.monotonic() + timeout_seconds, stopping)]
            finally:
                killed = not tree.ask(grace_seconds) and tree.members()
                tree.end(_LAST_SECONDS)
    code = tree.process.poll()
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        raised = run_record.raised(stream.read(_TAIL_BYTES).decode(errors="replace")) if code else ""
    return Launched(
        exit_code=-signal.SIGKILL if code is None else code, seconds=time.monotonic() - started, output=log,
        last_lines=tuple(map(redact, last)), raised=raised, cut_short=cut_short, killed=bool(killed),
        grace_seconds=grace_seconds,
    )  # fmt: skip


@contextlib.contextmanager
def sigterm(stop: threading.Event | None = None) -> Iterator[threading.Event]:
    """Note SIGTERM in place of dying of it: the job is then asked to end, which saves a checkpoint."""
    stop = stop or threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, former)


@contextlib.contextmanager
def _followed(log: Path, last: deque[str], on_line: Callable[[str], None]) -> Iterator[None]:
    """Hand every line of a growing file to `on_line` until the block is left."""
    ended = threading.Event()

    def follow() -> None:
        with log.open(encoding="utf-8", errors="replace") as stream:
            while True:
                line = stream.readline()
                if line:
                    last.append(line.rstrip())
                    on_line(line.rstrip())
                elif ended.wait(0.2):
                    for rest in stream:
                        last.append(rest.rstrip())
                    return

    thread = threading.Thread(target=follow, name="job log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=5)

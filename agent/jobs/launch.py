"""Launch the fine-tune job on this host through torchrun, with the recommendation.

The job reads everything from plan.json and writes run.json (docs/reference/finetune-job.md). It ends with this process,
and within its time limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from agent.advice.job_plan import GRACE_SECONDS
from agent.advice.request import Request
from agent.base.output import write_atomic
from agent.jobs.benchmark import stop_on_signals
from collectives.bench import processes
from contracts import run_record
from contracts.job_config import JobPlan, dump_plan
from contracts.redaction import redact

_TAIL_BYTES = 65536  # of the job's log: contains torchrun's report and the tracebacks before it
_LAST_SECONDS = 1.0  # for processes that ignored SIGTERM or outlived torchrun
_AGAIN = "run the same command again to resume from the last checkpoint, if one was saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbOptions:
    """Options of a verb. One that is not given and has no default is None, empty or False. Help: agent/base/verbs."""

    request: Request  # hosts or machine, model, run, and the settings of the job
    require: tuple[str, ...] = ()
    measure: bool = False
    timeout: float
    folder: Path | None = None

    @classmethod
    def of(cls, ranks: int | None, **options: Any) -> Self:
        """Create the record from the options of a verb. Those that are no field here belong to the request."""
        own = {field.name: options.pop(field.name) for field in fields(cls) if field.name in options}
        return cls(request=Request.of(**options, ranks_per_node=ranks), **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(VerbOptions):
    """Where and how launch and compare-networks run a job."""

    api: str = "local"
    context: str | None = None
    image: str | None = None
    name: str
    namespace: str
    nodes: int | None = None
    resources: tuple[str, ...] = ()
    node_selector: tuple[str, ...] = ()
    tolerate: tuple[str, ...] = ()
    claim: str | None = None
    storage_class: str | None = None
    storage_size: str
    token_secret: str | None = None
    queue: str | None = None
    topology: str | None = None
    service_account: str | None = None
    preflight_image: str | None = None
    no_preflight: bool = False
    agent: str | None = None
    dra: tuple[str, ...] = ()
    no_compute_domain: bool = False
    with_network: bool = False
    host_mofed: bool | None = None
    restarts: int | None = None
    storage_rate: int | None = None
    partition: str | None = None  # Slurm, up to sbatch
    exclude: str | None = None
    over: str | None = None
    time_limit: str | None = None
    sbatch: tuple[str, ...] = ()
    dry_run: bool = False
    form: str = "yaml"  # of --dry-run
    networks: tuple[str, ...] = ()  # compare-networks --over
    steps: int | None = None
    price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJob:
    """A job that has ended."""

    exit_code: int  # of the job (docs/reference/finetune-job.md) if it could write it, else of torchrun
    output: Path
    last_lines: tuple[str, ...]  # of its output, without secrets, because a report quotes them
    cut_short: str = ""  # why the job got SIGTERM early; empty: it ended by itself
    killed: bool = False  # whether it ignored SIGTERM
    grace_seconds: int = GRACE_SECONDS  # time that it had to end
    raised: str = ""  # the reason in the job's record, or the last error that a rank printed
    record: run_record.RunRecord | None = None  # run.json of this start, if the job wrote it

    @property
    def ending(self) -> str:
        """Describe in one sentence how the job ended."""
        if self.exit_code == run_record.RESUMABLE:
            ending = "the job saved and ended; run the same command again to resume"
        elif self.killed:
            ending = f"the job did not end within {self.grace_seconds} s of SIGTERM and was killed; " + _AGAIN
        elif self.cut_short and self.exit_code == 0:
            ending = "the job was done by then"
        elif self.cut_short:
            ending = f"the job ended without saving (exit code {self.exit_code}); " + _AGAIN
        elif (failed := run_record.find_first_failed("\n".join(self.last_lines))) and failed.signal:
            ending = f"rank {failed.rank} was ended by {failed.signal}; " + _AGAIN
        else:
            ending = f"the job ended with exit code {self.exit_code}" + (f": {self.raised}" if self.raised else "")
        return f"{self.cut_short}: {ending}" if self.cut_short else ending


def build_command(plan: Path, ranks: int, nodes: int = 1) -> list[str]:
    """Return the torchrun command of a host; for several nodes HOST is a placeholder for the address of one of them."""
    return build_torchrun_command([sys.executable, "-m", "finetune.train", "--plan", str(plan)], ranks, nodes=nodes)


def build_torchrun_command(job: Sequence[str], ranks: int, python: str = sys.executable, nodes: int = 1) -> list[str]:
    """Return the command that runs the ranks of a job on this host, or this host's share of them."""
    meet = [f"--nnodes={nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29400"] if nodes > 1 else ["--standalone"]
    command = [python, "-m", "torch.distributed.run", *meet, f"--nproc-per-node={ranks // nodes}"]
    # ranks survive if torchrun is killed, so each is set to end with torchrun
    return [*command, "--no-python", *processes.tie_to_parent(job, parent=0)]


def train(
    plan: JobPlan, output: Path, *, timeout_seconds: float, grace_seconds: int,
    on_line: Callable[[str], None] = lambda _line: None, stop: threading.Event | None = None,
) -> FinishedJob:  # fmt: skip
    """Run the job of a plan to its end on this host; plan.json, job.log and run.json are in `output`.

    `stop` is set when SIGTERM arrives, and may already be set: the job then gets SIGTERM too.
    """
    assert plan.layout is not None  # noqa: S101 - a plan that is launched has one
    output.mkdir(parents=True, exist_ok=True)
    write_atomic(output / "plan.json", dump_plan(plan))
    began, ranks = time.time(), plan.layout.world_size
    command, variables = build_command(output / "plan.json", ranks), build_environment(plan.environment, ranks)
    ended = run(command, variables, output, timeout_seconds, on_line, stop, grace_seconds=grace_seconds)
    record = run_record.read_since(output / "run.json", began)  # a rank may print last that it lost the one that failed
    exit_code = run_record.choose_exit_code(record, ended.exit_code, cut_short=bool(ended.cut_short))
    ended = replace(ended, exit_code=exit_code, raised=(record and record.reason) or ended.raised)
    return replace(ended, record=finish_record(output / "run.json", record, ended))


def finish_record(path: Path, record: run_record.RunRecord | None, ended: FinishedJob) -> run_record.RunRecord | None:
    """Return the record of this start. If the job could not write its end (SIGKILL), it is added from the exit code."""
    record, is_ours = run_record.end(path, record, "failed", ended.exit_code, ended.ending)
    if is_ours:  # prints errors to stderr
        subprocess.run([sys.executable, "-P", "-m", "finetune.post", str(path)], check=False)
    return record


def build_environment(settings: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return this process's environment with these settings added, for the given number of ranks on this host."""
    # With several ranks torchrun would also set 1, and print a banner about it; a single rank uses all cores. A value
    # of the user or the advice has priority.
    threads = {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    return {**threads, **os.environ, "PYTHONUNBUFFERED": "1", **settings}


def run(
    command: Sequence[str], variables: Mapping[str, str], output: Path, timeout_seconds: float,
    on_line: Callable[[str], None], stop: threading.Event | None = None, *, grace_seconds: int = GRACE_SECONDS,
) -> FinishedJob:  # fmt: skip
    """Run a command, write its output to a log and pass each line to `on_line`; always end its whole process tree."""
    log = output / "job.log"
    signals = stop_on_signals(signal.SIGTERM, stop=stop)
    with log.open("wb") as stream, signals as (stopping, _), processes.run_folder() as temporary:
        # torchrun leaves files in TMPDIR when it is killed
        tree = processes.Tree(command, {**variables, "TMPDIR": str(temporary)}, stream)
        with _follow_log(log, on_line):
            try:
                reasons = {"": "", "stopped": "stopped by SIGTERM", "late": f"not done within {timeout_seconds:.0f} s"}
                cut_short = reasons[tree.wait(time.monotonic() + timeout_seconds, stopping)]
            finally:
                tree.terminate()
                killed = tree.wait(time.monotonic() + grace_seconds, threading.Event()) and tree.members()
                tree.end(_LAST_SECONDS)
    code = tree.process.poll()
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        tail = stream.read(_TAIL_BYTES).decode(errors="replace")
    return FinishedJob(
        exit_code=-signal.SIGKILL if code is None else code, output=log, cut_short=cut_short, killed=bool(killed),
        last_lines=tuple(redact(line.rstrip()) for line in tail.splitlines()[-12:]),
        raised=run_record.raised(tail) if code else "", grace_seconds=grace_seconds,
    )  # fmt: skip


@contextlib.contextmanager
def _follow_log(log: Path, on_line: Callable[[str], None]) -> Iterator[None]:
    """Pass the lines of a growing file to `on_line` until the block is left."""
    ended = threading.Event()

    def follow() -> None:
        with log.open(encoding="utf-8", errors="replace") as stream:
            while not ended.wait(0.2):
                for line in stream:
                    on_line(line.rstrip())

    thread = threading.Thread(target=follow, name="job log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=5)

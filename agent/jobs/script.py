"""A trainer of the user: run it on this host, or add missing settings to its manifest with `wrap`.

On this host: torchrun, the recommended environment, NCCL's log, and the run record. Each rank measures its steps and
memory (agent/jobs/autostart). For a manifest: the machine that its jobs request, and their forecast.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.advice.advise import adapt_to_pods, advise
from agent.advice.job_plan import add_job_settings, estimate_grace, look_up_shape, run_forecast
from agent.advice.request import Request
from agent.base import units
from agent.base.options import InputError, RequestError, split_pair
from agent.checks.host_checks import ALL_CODES
from agent.checks.verdict import GateError, select
from agent.jobs.autostart.sitecustomize import REPORT
from agent.jobs.benchmark import count_default_ranks
from agent.jobs.launch import FinishedJob, LaunchOptions, build_environment, build_torchrun_command, run
from collectives.nccl_log import evidence
from collectives.traces.rank_files import RANKS_FOLDER
from contracts import bounded, run_record
from contracts.job_config import MAX_FILE_BYTES, ConfigError, JobPlan, parse_config
from contracts.plain import loads as plain
from contracts.redaction import redact
from contracts.run_record import FailedRank, Measured, NcclChannels, RunLayout, RunRecord
from contracts.yaml_text import YamlTextError
from planner.advice import Recommendation
from planner.forecast.models import ModelError
from planner.kubernetes.manifests import JobError, check_limit
from planner.kubernetes.wrap import Additions, Job, WrapError, asks_for_gpus, find_jobs, note_others, wrap
from planner.kubernetes.yaml_edit import EditError, documents
from planner.stacks.arguments import CommandSettings, add_defaults, read_command
from probes.api import Snapshot

AUTOSTART = str(Path(__file__).with_name("autostart"))  # the folder of the file that starts the monitor
_LIMIT_BYTES = 1 << 20  # of a file named by the arguments
_WARM_UP = 2  # first steps, which allocate and compile
_RENDERED = "; a template is wrapped as it is rendered: helm template CHART | topoflight wrap -"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPlan:
    """The process to run."""

    words: list[str]
    ranks: int
    document: JobPlan
    environment: dict[str, str]  # complete environment of the processes
    notes: tuple[str, ...]
    grace_seconds: int  # time to save after SIGTERM


def build_plan(
    script: Path, arguments: Sequence[str], snapshots: Sequence[Snapshot], options: LaunchOptions, folder: Path
) -> ScriptPlan:
    """Return the torchrun command for this host, and the forecast if the arguments contain the layout."""
    ranks = options.request.ranks_per_node or count_default_ranks(snapshots)
    command = read_command(["torchrun", str(script), *arguments], _read_text)
    request = replace(options.request, nodes=1, ranks_per_node=ranks)
    advice, lines = forecast_command(command, request, snapshots)
    set_already = [f"{s.name}={os.environ[s.name]} is set and stays; recommended is {s.value}: {s.reason.rule}"
                   for s in advice.settings if os.environ.get(s.name, s.value) != s.value]  # fmt: skip
    settings = {s.name: s.value for s in advice.settings if s.name not in os.environ}
    if advice.backend == "nccl":
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder.absolute() / "nccl" / "nccl.%h.%p.log")}
        settings |= {name: value for name, value in log.items() if name not in os.environ}
    python = _choose_python()
    # The script's folder stays on its path, as under plain torchrun; PYTHONSAFEPATH of the user is respected.
    unsafe = [] if "PYTHONSAFEPATH" in os.environ else ["env", "-u", "PYTHONSAFEPATH"]
    job = [*unsafe, python, str(script), *arguments]
    return ScriptPlan(
        words=build_torchrun_command(job, ranks, python), ranks=ranks,
        environment={**build_environment(settings, ranks), "TOPOFLIGHT_SCRIPT": str(script)},
        document=JobPlan(
            layout=advice.chosen.layout if advice.chosen else None, environment=settings,
            forecast=run_forecast(advice), notes=tuple(lines),
        ),
        notes=(*set_already, *lines, *([f"the ranks run {python}"] if python != sys.executable else [])),
        grace_seconds=estimate_grace(advice, options.storage_rate),
    )  # fmt: skip


def add_monitor(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment in which each rank's Python starts the monitor by itself (agent/jobs/autostart).

    The folder is made, so that `topoflight why` recognises it before the ranks have met.
    """
    with contextlib.suppress(OSError):
        (folder / RANKS_FOLDER).mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (AUTOSTART, environment.get("PYTHONPATH"))))
    return {**environment, "TOPOFLIGHT_RUN": str(folder.absolute()), "PYTHONPATH": path}


def _choose_python() -> str:
    """Return the interpreter with the trainer's packages: of the first environment on PATH, else this one.

    An environment is a folder with pyvenv.cfg or conda-meta, or one with torchrun. Raises InputError without torch.
    """
    python, torchrun = shutil.which("python") or shutil.which("python3"), shutil.which("torchrun")
    sibling = Path(torchrun).with_name("python") if torchrun else None
    if python and any((Path(python).parent.parent / mark).exists() for mark in ("pyvenv.cfg", "conda-meta")):
        choice = python
    else:
        choice = str(sibling) if sibling and sibling.exists() else sys.executable
    seek = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if choice != sys.executable and subprocess.run([choice, "-c", seek], check=False, capture_output=True).returncode:
        raise InputError(
            f"--script: {choice}, the first Python on PATH, has no torch, so it cannot start ranks. Install torch "
            "there, or put the environment of the script first on PATH."
        )
    return choice


def _read_text(name: str) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return bounded.read_text(Path(name), _LIMIT_BYTES)
    return None


def train(
    plan: ScriptPlan, folder: Path, timeout_seconds: float, on_line: Callable[[str], None] = lambda _line: None
) -> FinishedJob:
    """Run it to its end; its record is run.json in `folder`."""
    (folder / "nccl").mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    began = time.time()
    layout = plan.document.layout
    record = RunRecord(status="running", host=os.uname().nodename, started_at=run_record.timestamp(),
                       plan=plan.document, layout=RunLayout(family=layout.family if layout else None))  # fmt: skip
    run_record.save(path, record)
    for old in folder.glob(f"{REPORT}*"):
        old.unlink()
    done = run(
        plan.words, add_monitor(plan.environment, folder), folder, timeout_seconds, on_line,
        grace_seconds=plan.grace_seconds,
    )  # fmt: skip
    failed = run_record.find_first_failed("\n".join(done.last_lines))
    reports = _read_reports(folder)
    record.status, record.exit_code = "complete" if done.exit_code == 0 else "failed", done.exit_code
    if done.exit_code and (error := _find_first_error(reports, failed)) and not done.cut_short:
        done = replace(done, raised=error)
    record.reason = None if done.exit_code == 0 else done.ending
    record.ended_at = run_record.timestamp()
    log = plan.environment.get("NCCL_DEBUG_FILE")
    record.nccl = _read_channels(Path(log).parent if log else folder / "nccl", began)
    _add_reports(record, reports)
    run_record.save(path, record)
    return replace(done, record=record)


def _read_reports(folder: Path) -> dict[int, dict[str, Any]]:
    """Read the reports of the ranks, by rank."""
    reports = {}
    for each in folder.glob(f"{REPORT}*"):
        with contextlib.suppress(OSError, ValueError):
            value = plain(bounded.read(each, _LIMIT_BYTES))
            reports[int(each.name.removeprefix(REPORT))] = value if isinstance(value, dict) else {}
    return dict(sorted(reports.items()))


def _find_first_error(reports: Mapping[int, Mapping[str, Any]], failed: FailedRank | None) -> str:
    """Return the error of the rank that failed first, else of the lowest with an error: "rank 1: ValueError: ..."."""
    errors = {rank: str(report["error"]) for rank, report in reports.items() if report.get("error")}
    if failed and failed.rank not in errors and (failed.exit_code or 0) > 1:  # what others raise is a consequence
        return f"rank {failed.rank} ended with exit code {failed.exit_code} and reported no error"
    rank = failed.rank if failed and failed.rank in errors else next(iter(errors), None)
    text = "" if rank is None else redact(f"rank {rank}: {' '.join(errors[rank].split())}")
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"  # a list of errors has the cause at its end


def _add_reports(record: RunRecord, reports: Mapping[int, Mapping[str, Any]]) -> None:
    """Add step times and memory measured by the ranks."""
    if not reports:
        return
    steps: list[float] = max((report.get("seconds") or [] for report in reports.values()), key=len)
    counted = steps[_WARM_UP:] or steps
    record.step_seconds = [round(seconds, 6) for seconds in steps]
    record.steps_done = max(int(report.get("steps") or 0) for report in reports.values()) or None
    record.measured = Measured(
        step_seconds=statistics.median(counted) if counted else None, counted_steps=len(steps[_WARM_UP:]),
        memory_bytes=max(float(report.get("memory_bytes") or 0) for report in reports.values()) or None,
        rss_peak_bytes=max(int(report.get("rss_peak_bytes") or 0) for report in reports.values()) or None,
    )  # fmt: skip
    measured = f"the median between the ends of the optimizer's steps on the ranks, without the first {_WARM_UP}"
    record.notes.append(f"step time: {measured if counted else 'unknown: no optimizer of PyTorch ran two steps'}")


def _read_channels(folder: Path, began: float) -> NcclChannels | None:
    """Return what NCCL's log of this start shows; None if no rank wrote one."""
    logs = [each for each in sorted(folder.glob("*.log")) if each.stat().st_mtime >= began] if folder.is_dir() else []
    if not logs:
        return None
    log = evidence.read_files(logs, require_gdrdma=False)
    verdict = {0: "proven", 3: "fault"}.get(evidence.exit_code(log), "unknown")
    return NcclChannels(verdict=verdict, channels=dict(log.transports), log=str(folder))


# A job by its manifest.


def wrap_manifest(
    text: str, snapshots: Sequence[Snapshot], request: Request, *, preflight_image: str | None,
    require: tuple[str, ...], resources: tuple[str, ...], monitor: bool,
) -> tuple[str, list[str]]:  # fmt: skip
    """Add what the manifest's jobs lack on these hosts; return it with notes. Raises InputError."""
    for name, value in (("monitor", monitor), ("require", require)):
        if value and not preflight_image:
            raise InputError(f"--{name} requires --preflight-image for a manifest: that image has the program")
    try:
        counts = dict(split_pair("--resource", word) for word in resources)
        for name, count in counts.items():
            check_limit(name, count)
        select((), require=require, codes=ALL_CODES)
        requested = Additions(resources=counts, require=require, gate_image=preflight_image, monitor=monitor)
        manifest, notes = documents(text), list[str]()
        additions: list[Additions | None] = []
        for job in find_jobs(manifest):
            addition, of_job = _complete_additions(requested, job, snapshots, request)
            additions.append(addition)
            notes += of_job
        wrapped, wrap_notes = wrap(text, additions)
        notes += note_others(manifest)
    except (WrapError, EditError, YamlTextError, JobError, GateError) as error:
        template = isinstance(error, YamlTextError) and "{{" in text
        raise InputError(f"{error}{_RENDERED if template else ''}") from None
    except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
        # a user's manifest can have any YAML type in place of the type of the API
        raise InputError(f"the manifest does not have the structure of its kind: {type(error).__name__}: {error}; "
                         "`kubectl apply --dry-run=server` names the member") from None  # fmt: skip
    return wrapped, list(dict.fromkeys([*notes, *wrap_notes]))


def _complete_additions(
    requested: Additions, job: Job, snapshots: Sequence[Snapshot], request: Request
) -> tuple[Additions | None, list[str]]:
    """Complete what the user requested for each job by the advice for this job; None if the job is not changed."""
    name = f"{job.kind}/{job.name}"
    if job.without_gpus and not asks_for_gpus(requested.resources):
        return None, [f"{name}: not changed, as its pods request no GPU: --resource NAME=COUNT"]
    advice, lines = advise_job(job, snapshots, request)
    advice, left_out = adapt_to_pods(advice, snapshots, here=not (request.hosts or request.machine))
    completed = replace(
        requested, settings=advice.settings, needs=advice.needs, log=advice.backend == "nccl",
        annotations=format_forecast(advice),
    )  # fmt: skip
    return completed, [*left_out, *(f"{name}: {line}" for line in lines)]


def advise_job(job: Job, snapshots: Sequence[Snapshot], request: Request) -> tuple[Recommendation, list[str]]:
    """Return the advice for the job's nodes, and what was read from its command or is unknown."""

    def file(name: str) -> str | None:
        if name in job.files:
            return job.files[name]
        here = request.config
        return bounded.read_text(here, MAX_FILE_BYTES) if here is not None and here.name == Path(name).name else None

    parsed = read_command(job.command, file)
    nodes, ranks = max(job.nodes or 0, parsed.nodes or 0) or None, parsed.ranks_per_node or job.ranks_per_node
    gpus = None if job.kind.endswith("Runtime") else job.parts[0].gpus  # a TrainJob may replace those of its runtime
    fewest = min((part.gpus for part in job.parts if part.gpus), default=0)
    if gpus and ranks and ranks > fewest:
        parsed.notes.append(f"starts {ranks} ranks in a pod of {fewest} GPUs. NCCL refuses two ranks on one GPU: "
                            f"request {ranks} GPUs, or start fewer ranks")  # fmt: skip
        ranks = min(ranks, gpus)
    request = replace(request, nodes=nodes, ranks_per_node=ranks)
    if nodes is None or ranks is None:
        parsed.unknown.append("number of ranks: not in replicas, nprocPerNode, GPUs or the launcher's options"
                              + "; the settings are those of several nodes" * (nodes is None))  # fmt: skip
    advice, lines = forecast_command(parsed, request, snapshots)
    if gpus and gpus != ranks:  # a pod gets the devices next to its GPUs, however few ranks it starts
        with contextlib.suppress(RequestError):  # the pod has more GPUs than the machine
            other = advise(request.changed(ranks_per_node=gpus), snapshots)
            devices = (need for need in other.needs if need.name == "resource")
            advice = replace(advice, needs=(*(need for need in advice.needs if need.name != "resource"), *devices))
    return advice, lines


def forecast_command(
    command: CommandSettings, request: Request, snapshots: Sequence[Snapshot]
) -> tuple[Recommendation, list[str]]:
    """Return the advice with the forecast of the command's own layout, if it is known, and lines about it."""
    advice, unknown = None, [f"forecast: unknown: {text}" for text in command.unknown]
    if not unknown and "model_name_or_path" not in command.settings:
        unknown = ["forecast: unknown: the arguments of the command name no model (model_name_or_path)"]
    if not unknown:
        try:
            settings = parse_config(add_defaults(command))
            name = str(settings.explicit["model_name_or_path"])
            shape = look_up_shape(name, settings.config.model_revision)
            with_model = request.changed(model=name, engine="trl", shape=shape)
            advice = advise(add_job_settings(with_model, settings), snapshots)
            if advice.chosen is None:
                reason = advice.rejected[0].reason if advice.rejected else "no layout is allowed"
                unknown = [f"the layout of its arguments does not run: {reason}"]
        except (ConfigError, ModelError, RequestError) as error:
            unknown = [f"forecast: unknown: {error}"]
    alone = advice or advise(request, snapshots)
    lines = [f"forecast {line}" for line in format_forecast(alone).values()]
    lines += [f"forecast: {text}" for text in alone.unknowns if alone.chosen]
    lines += [note.text.split(". ")[0] for note in alone.notes if note.topic in ("platform", "RCCL")]
    return alone, [*unknown, *lines, *command.notes]


def format_forecast(advice: Recommendation) -> dict[str, str]:
    """Return annotations with the forecast that the run will be compared with."""
    if advice.chosen is None:
        return {}
    forecast = advice.chosen.forecast
    return {
        "forecast-layout": advice.chosen.layout.family,
        "forecast-step": f"step {units.interval(forecast.step_seconds, 's')}",
        "forecast-memory": f"memory {units.interval(forecast.memory_bytes, 'B')} per rank",
    }

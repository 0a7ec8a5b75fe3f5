"""Slurm jobs: submit a fine-tune, add missing settings to a user's script, and find the files of a job.

Surface: sbatch(1), squeue(1), scontrol(1) `show job` of Slurm 22.05.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from agent.advice.advise import advise
from agent.advice.job_plan import build_job_plan, describe_grace, estimate_grace, require_layout
from agent.advice.request import Request
from agent.base import units
from agent.base.options import InputError, read_input
from agent.base.output import write_atomic
from agent.checks.host_checks import ALL_CODES
from agent.checks.verdict import select
from agent.jobs.launch import LaunchOptions
from contracts.host_list import compress_host_list, expand_host_list
from contracts.job_config import RunForecast, dump_plan
from contracts.tables import read_table
from planner.advice import Recommendation
from planner.kubernetes.manifests import RESTARTS, SAVE_SECONDS
from planner.slurm import ScriptError, check_options, check_word, parse_size, render_script, wrap_script
from probes.api import Snapshot

ANSWER_SECONDS = 30.0  # Slurm's clients retry an unavailable controller for minutes
LIKE_THIS_HOST = "this host was scanned instead of the nodes; give a recording of a node with --host FILE"
_AGAIN = read_table(__file__, "slurm.toml")["again"]
_LIST_BYTES = 1 << 20  # of a file with host names


class SlurmError(RuntimeError):
    """A Slurm command was refused or did not answer."""


def run_slurm(*command: str) -> str:
    """Run one command of Slurm and return its output. Raises SlurmError."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS, check=False
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]}: not found on this host; run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]}: the Slurm controller did not answer within {ANSWER_SECONDS:.0f} s; "
                         "`scontrol ping` shows its state") from None  # fmt: skip
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise SlurmError(f"{command[0]}: {said.removeprefix(f'{command[0]}: error: ')}")
    return done.stdout


def build_script(
    advice: Recommendation, snapshots: Sequence[Snapshot], folder: Path, options: LaunchOptions
) -> tuple[str, list[str]]:
    """Return the batch script of the job described by the options, and notes. Raises InputError or ValueError."""
    select((), require=options.require, codes=ALL_CODES)
    nodes, notes = options.nodes or 1, list[str]()
    if not (options.request.hosts or options.request.machine):
        notes.append(LIKE_THIS_HOST)
    if options.over:
        advice, about = _use_interface(advice, snapshots, options.over, is_recorded=bool(options.request.hosts))
        notes += about
    plan = build_job_plan(advice, options.request.with_settings(f"output_dir={folder}"), snapshots)
    if options.over:  # the rate of this network is unknown
        plan = replace(plan, forecast=RunForecast())
    exclude = options.exclude or ""
    if "/" in exclude or os.path.isfile(exclude):
        exclude = read_input(exclude, _LIST_BYTES, hint="").decode(errors="replace")
    named = dict(word.partition("=")[::2] for word in options.sbatch)
    if options.partition:
        check_word("--partition", options.partition)
        named["partition"] = options.partition
    world = require_layout(advice).layout.world_size
    if world % nodes:
        raise ScriptError(f"--nodes {nodes}: does not divide the layout's {world} ranks")
    seconds = estimate_grace(advice, options.storage_rate, SAVE_SECONDS)
    script = render_script(
        name=options.name, nodes=nodes, ranks_per_node=world // nodes, plan=dump_plan(plan), output=folder,
        python=sys.executable, gpus_per_node=world // nodes if advice.backend != "gloo" else 0,
        settings=advice.settings, exclude=compress_host_list(expand_host_list(exclude)), time_limit=options.time_limit,
        options=named, gate=not options.no_preflight, require=options.require, measure=options.measure,
        ipc_lock=any(need.name == "memlock" for need in advice.needs), save_seconds=seconds,
        restarts=RESTARTS if options.restarts is None else options.restarts,
    )  # fmt: skip
    notice = describe_grace(advice, "the ranks", seconds, SAVE_SECONDS, options.storage_rate)
    return script, [*notes, *plan.notes, *filter(None, [notice])]


def _use_interface(
    advice: Recommendation, snapshots: Sequence[Snapshot], interface: str, *, is_recorded: bool
) -> tuple[Recommendation, list[str]]:
    """Return the advice for TCP on this interface, and a note if this host, which is not a node, lacks it."""
    from agent.jobs.networks import explain_no_interface
    from planner.kubernetes.networks import use_tcp

    check_word("--over", interface)
    wrong = explain_no_interface(interface, snapshots)
    if wrong and is_recorded:
        raise InputError(f"--over {interface}: {wrong}")
    return use_tcp(advice, interface), [f"--over {interface}: {wrong}"] if wrong else []


def submit(script: str, folder: Path) -> str:
    """Write the script to the output folder and submit it; return the job id. Raises SlurmError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.sbatch"
    rows = run_slurm("squeue", "--me", "-h", "-o", "%A %o").splitlines()
    queued = [row.split()[0] for row in rows if row.endswith(f" {path}")]
    if queued and "#SBATCH --dependency" not in script:
        raise SlurmError(f"--output {folder}: job {queued[0]} writes there. Cancel it, choose another folder, or start "
                         f"after it with --sbatch dependency=afterany:{queued[0]}")  # fmt: skip
    write_atomic(path, script)
    try:
        return run_slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]
    except SlurmError as error:
        raise SlurmError(f"{error}. Nothing was submitted; the options are at the top of {path}") from None


def add_to_script(
    text: str, snapshots: Sequence[Snapshot], request: Request, *, preflight_image: str | None,
    require: tuple[str, ...], resources: tuple[str, ...],
) -> tuple[str, list[str]]:  # fmt: skip
    """Add missing settings to the script; return it with notes. Raises ScriptError that names the line."""
    from agent.jobs.script import AUTOSTART

    if resources or preflight_image:
        raise InputError("--resource and --preflight-image are for manifests; in a batch script use #SBATCH")
    select((), require=require, codes=ALL_CODES)
    check_options(text)
    nodes, gpus = parse_size(text)
    advice = advise(replace(request, nodes=nodes, ranks_per_node=gpus), snapshots)
    wrapped, notes = wrap_script(
        text, advice.settings, python=sys.executable, monitor=AUTOSTART, has_log=advice.backend == "nccl",
        require=require,
    )  # fmt: skip
    notes += [note.text.split(". ")[0] for note in advice.notes if note.topic in ("platform", "RCCL")]
    if nodes is None:
        notes.append("the script has no #SBATCH --nodes, so the environment is that of several nodes")
    return wrapped, notes


class JobFiles(NamedTuple):
    """The files of a Slurm job, and its state in Slurm."""

    run: Path | None  # the run's folder; None if the job has none
    logs: tuple[Path, ...]
    where: str  # text: where they were found
    again: str  # text: what a requeued job does now; empty: it was not requeued, or it has ended for good


def find_job_files(job_id: str) -> JobFiles:
    """Return the run's folder of a job, its logs, and where they were found. Raises SlurmError.

    `launch` writes the log into the run's folder, which also contains the script. A script changed by `wrap` has NCCL's
    logs and the ranks' states in topoflight-ID below the folder from which the job was submitted.
    """
    fields = _read_job(job_id)
    details, again = _describe_state(fields)
    work = Path(fields.get("WorkDir") or Path.cwd())
    script = work / fields.get("Command", "")
    named = [work, *([script.parent] if os.path.isfile(script) else [])] if fields else []
    folders = dict.fromkeys([*named, Path.cwd()])
    own_id = fields.get("JobId", "").partition(" ")[0] or job_id  # 1239 for 1234_5: SLURM_JOB_ID of an array task
    for folder in folders:
        names = (fields.get("StdOut", ""), f"slurm-{job_id}.log", f"slurm-{job_id}.out")
        log = next((path for name in names if (path := folder / name).is_file()), None)
        own = folder / f"topoflight-{own_id}"
        logs = (*((log,) if log else ()), *sorted(own.glob("*.log")))
        if not logs and not own.is_dir():
            continue
        run = _find_run(own, log, is_launched=bool(logs) and logs[0].parent / "job.sbatch" == script)
        whose = "which the controller names" if folder in named else "the current folder"
        if log and run == log.parent and (later := _find_later_job(log, own_id)):
            run, whose = None, f"{whose}; run.json and the ranks' files are of job {later}, which ran there later"
        summary = f"job {job_id}{f' ({details})' if details else ''}: {units.count(len(logs), 'log')}"
        return JobFiles(run, logs, f"{summary} in {logs[0].parent if logs else own}, {whose}", again)
    if details.startswith("PENDING"):
        raise SlurmError(f"job {job_id} has not started ({details}), so there is nothing to diagnose yet")
    searched = ", ".join(map(str, folders))
    knows = "" if fields else "; the controller does not know the job, or no longer"
    raise SlurmError(f"job {job_id}: no file of it was found in {searched}{knows}; give its logs, or --run FOLDER")


def _describe_state(fields: Mapping[str, str]) -> tuple[str, str]:
    """Return state, reason and restarts of a job; and what it does since Slurm queued it again, empty if it did not."""
    state = fields.get("JobState", "").partition(" ")[0]
    details = ", ".join(filter(None, (state, fields.get("Reason"), fields.get("Restarts"))))
    does = _AGAIN.get(fields.get("Reason", ""), _AGAIN.get(state)) if fields.get("Restarts") else ""
    return details, f"{does} ({details})" if does else ""


def _find_run(own: Path, log: Path | None, *, is_launched: bool) -> Path | None:
    """Return the folder of the ranks' files: one that has them, else the one in which the ranks will write."""
    places = (own, log.parent, own.parent) if log else (own,)
    if run := next((path for path in places if (path / "ranks").is_dir()), None):
        return run
    if own.is_dir():  # a wrapped script creates it before it starts the ranks
        return own
    return log.parent if log and is_launched else None  # `launch` has its script next to its log


def _find_later_job(log: Path, job_id: str) -> int | None:
    """Return the newest job that has a log in the same folder, if it is newer than the job of this log."""
    names = (path.stem.removeprefix("slurm-") for path in log.parent.glob("slurm-*.log") if path != log)
    newest = max((int(name) for name in names if name.isdecimal()), default=0)
    return newest if job_id.isdecimal() and newest > int(job_id) else None


def _read_job(job_id: str) -> dict[str, str]:
    """Return what the controller shows of a job, by field; empty if it does not know the job, as minutes after its end.

    Raises SlurmError for the id of an array or a heterogeneous job, which are several jobs.
    """
    try:
        output = run_slurm("scontrol", "show", "job", job_id)
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise SlurmError(f"{error}. Give the job's logs, or --run FOLDER") from None
        return {}
    if (count := len(re.findall(r"^JobId=", output, re.MULTILINE))) > 1:
        raise SlurmError(f"job {job_id} is {count} jobs: give the id of one, as `squeue` and `scontrol` show them")
    fields = dict(line.strip().partition("=")[::2] for line in output.splitlines())
    for name, nothing, prefix in (("Reason", "None", ""), ("Restarts", "0", "restart ")):
        value = re.search(rf"\s{name}=(\S+)", output)
        fields[name] = prefix + value[1] if value and value[1] != nothing else ""
    return fields

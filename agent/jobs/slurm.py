"""Jobs of Slurm: a fine-tune that is submitted, a user's own script that gets what it lacks, and the files of a job.

Surface: sbatch(1), scontrol(1) `show job`, sacct(1) of Slurm 22.05.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.advice.advise import advise
from agent.advice.job_settings import grace, grace_notice, job_plan
from agent.advice.request import Request
from agent.base import units
from agent.base.options import InputError
from agent.base.output import write_atomic
from agent.checks.measured import ALL_CODES
from agent.checks.verdict import select
from contracts import bounded
from contracts.host_list import expand_host_list
from contracts.job_plan import RunForecast, dumps
from planner.advice import Recommendation
from planner.kubernetes.job import RESTARTS, SAVE_SECONDS, storage_rate
from planner.slurm import (
    ScriptError,
    SlurmJob,
    SlurmJobError,
    batch_script,
    check_options,
    check_word,
    nodes_of,
    wrap_script,
)
from probes.api import Snapshot

ANSWER_SECONDS = 30.0  # Slurm's clients ask an absent controller again for minutes
SYNTAX_SECONDS = 10.0  # bash reads a script of 1 MiB in a fraction of a second
_LIST_BYTES = 1 << 20  # of a file with hosts


class SlurmError(RuntimeError):
    """What a Slurm command refused, or that it did not answer."""


def slurm(*words: str) -> str:
    """Run one command of Slurm and return its output. Raises SlurmError."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS, check=False
        )
    except FileNotFoundError:
        raise SlurmError(f"{words[0]}: not found on this host; run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]}: the Slurm controller did not answer within {ANSWER_SECONDS:.0f} s; "
                         "`scontrol ping` shows its state") from None  # fmt: skip
    if done.returncode:
        raise SlurmError(f"{words[0]}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def job_of(
    advice: Recommendation, found: Sequence[Snapshot], folder: Path, options: Mapping[str, Any]
) -> tuple[SlurmJob, list[str]]:
    """The job that the options describe, with the recommendation inside, and notes. Raises InputError or ValueError."""
    select((), require=options["require"], known=ALL_CODES)
    folder, nodes = folder.absolute(), options["nodes"] or 1
    if options["over"]:
        from agent.jobs.networks import over_tcp

        check_word("--over", options["over"])
        advice = over_tcp(advice, options["over"])
    plan = job_plan(advice, options["config"], (*options["overrides"], f"output_dir={folder}"), found)
    if options["over"]:  # the rate of this network is unknown
        plan = replace(plan, forecast=RunForecast())
    assert plan.layout is not None  # noqa: S101 - job_plan has refused otherwise
    ranks, left = divmod(plan.layout.world_size, nodes)
    if left:
        raise SlurmJobError(f"--nodes {nodes}: does not divide the layout's {plan.layout.world_size} ranks")
    rate = storage_rate(options["storage_rate"])
    seconds = grace(advice, rate, SAVE_SECONDS)
    more = dict(word.partition("=")[::2] for word in options["sbatch"])
    if options["partition"]:
        check_word("--partition", options["partition"])
        more["partition"] = options["partition"]
    job = SlurmJob(
        name=options["name"], nodes=nodes, ranks_per_node=ranks, plan=dumps(plan), output=folder,
        python=sys.executable, gpus_per_node=ranks if advice.backend != "gloo" else 0, settings=advice.settings,
        exclude=_hosts(options["exclude"]), time_limit=options["time_limit"], options=more,
        gate=not options["no_preflight"], require=tuple(options["require"]), measure=options["measure"],
        ipc_lock=any(need.name == "memlock" for need in advice.needs),
        restarts=RESTARTS if options["restarts"] is None else options["restarts"], save_seconds=seconds,
    )  # fmt: skip
    return job, [*plan.notes, *filter(None, [grace_notice(advice, "the ranks", seconds, SAVE_SECONDS, rate)])]


def _hosts(word: str | None) -> tuple[str, ...]:
    """The hosts of --exclude: a list, or a file with lists."""
    if word and ("/" in word or os.path.isfile(word)):  # noqa: PTH113 - Path.is_file raises OSError for a long list
        try:
            word = bounded.read(word, _LIST_BYTES).decode(errors="replace")
        except OSError as error:
            raise InputError(f"--exclude {word}: {error.strerror}") from None
    return expand_host_list(word or "")


def submit(job: SlurmJob) -> str:
    """Write the script to the output folder and submit it; returns the id of the job. Raises SlurmError."""
    job.output.mkdir(parents=True, exist_ok=True)
    path = write_atomic(job.output / "job.sbatch", batch_script(job))
    return slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]


def wrapped_script(text: str, found: Sequence[Snapshot], options: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The script with what it lacks, and notes. Raises InputError that names the line."""
    from agent.jobs.script import AUTOSTART

    if options["resources"] or options["preflight_image"]:
        raise InputError("--resource and --preflight-image are for manifests; a batch script asks with #SBATCH")
    try:
        check_options(text)
        unchecked = _check_syntax(text)
        nodes = nodes_of(text)
        request = Request(hosts=options["hosts"], root=options["root"], machine=options["machine"], nodes=nodes)
        advice = advise(request, lambda: found)
        made, notes = wrap_script(
            text, advice.settings, python=sys.executable, monitor=AUTOSTART, has_log=advice.backend == "nccl"
        )
    except ScriptError as error:
        raise InputError(str(error)) from None
    notes += unchecked
    if nodes is None:
        notes.append("unknown how many nodes the job has: no #SBATCH --nodes says; the environment is for one node")
    return made, notes


def _check_syntax(text: str) -> list[str]:
    """Notes if the syntax is not checked. Raises ScriptError for a script that bash, which only parses it, refuses."""
    if shell := re.match(r"#!.*\b([kz]sh)\b", text):
        return [f"the script is for {shell[1]}, whose syntax is not checked"]
    try:
        done = subprocess.run(
            ["bash", "-n"], input=text, capture_output=True, text=True, errors="replace", timeout=SYNTAX_SECONDS,
            check=False, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
    except FileNotFoundError:
        return ["this host has no bash, so the syntax of the script is not checked"]
    except subprocess.TimeoutExpired:
        raise ScriptError(f"line 1: bash did not read the script within {SYNTAX_SECONDS:.0f} s") from None
    if found := re.search(r"line (\d+): (.*)", done.stderr):
        raise ScriptError(f"line {found[1]}: {found[2]}")
    return []


def job_files(job_id: str) -> tuple[Path | None, tuple[Path, ...], str]:
    """The run's folder of a job, None where it has none, its logs, and where they were found. Raises SlurmError.

    `launch` writes the log into the run's folder, in which the script is, too. A script that `wrap` has changed has
    NCCL's logs and the ranks' states in topoflight-ID below the folder that the job was submitted from. The controller
    forgets a job some minutes after its end; the accounting still knows it then.
    """
    try:
        rows = (line.strip().partition("=") for line in slurm("scontrol", "show", "job", job_id).splitlines())
        fields, knows = {name: value for name, _, value in rows}, "the controller"
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        fields, knows = _accounted(job_id), "the accounting (sacct)"
    work = Path(fields.get("WorkDir") or Path.cwd())
    scripts = [path for word in fields.get("SubmitLine", "").split() if bounded.is_file(path := work / word)]
    named = [work, *(path.parent for path in scripts)] if fields else []
    own_id = fields.get("JobId", "").partition(" ")[0] or job_id  # 1239 for 1234_5: SLURM_JOB_ID of an array's task
    names = (fields.get("StdOut", ""), f"slurm-{job_id}.log", f"slurm-{job_id}.out")
    folders = tuple(dict.fromkeys([*named, Path.cwd()]))
    for folder in folders:
        log = next((path for name in names if (path := folder / name).is_file()), None)
        own = folder / f"topoflight-{own_id}"
        logs = (*((log,) if log else ()), *sorted(own.glob("*.log")))
        if logs:
            places = (own, log.parent, folder) if log else (own,)
            run = next((path for path in places if (path / "ranks").is_dir()), None)
            whose = f"which {knows} names" if folder in named else "the current folder"
            state = fields.get("JobState", "").partition(" ")[0]
            what = f"job {job_id}{f' ({state})' if state else ''}: {units.count(len(logs), 'log')}"
            return run, logs, f"{what} in {logs[0].parent}, {whose}"
    known = f"{knows} knows the job" if fields else "neither the controller nor the accounting (sacct) knows the job"
    where = ", ".join(map(str, folders))
    raise SlurmError(f"job {job_id}: no file of it was found in {where}; {known}; give its logs, or --run FOLDER")


def _accounted(job_id: str) -> dict[str, str]:
    """JobId, WorkDir and SubmitLine of a job by Slurm's accounting; empty if the accounting does not know the job."""
    try:
        row = slurm("sacct", "-j", job_id, "-n", "-P", "-X", "-o", "JobIDRaw,WorkDir,SubmitLine").partition("\n")[0]
    except SlurmError:
        return {}
    return dict(zip(("JobId", "WorkDir", "SubmitLine"), row.split("|", 2), strict=True)) if "|" in row else {}

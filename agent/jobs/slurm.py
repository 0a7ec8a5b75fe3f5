"""A fine-tune job for Slurm: what the command line asks for, as the planner's batch script, and its submission."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.advice.job_settings import job_plan, to_save
from agent.base.inputs import InputError
from agent.base.output import write_atomic
from agent.checks.measured import ALL_CODES
from agent.checks.verdict import select
from agent.jobs.slurm_commands import slurm
from contracts import bounded
from contracts.host_list import expand_host_list
from contracts.job_plan import dumps
from planner.advice import Recommendation
from planner.forecast.memory import save_seconds
from planner.kubernetes.job import storage_rate
from planner.slurm.job import SAVE_SECONDS, SlurmJob, SlurmJobError, batch_script
from probes.api import Snapshot

_LIST_BYTES = 1 << 20  # of a file with hosts


def job_of(advice: Recommendation, found: Sequence[Snapshot], folder: Path, options: Mapping[str, Any]) -> SlurmJob:
    """The job that the options describe, with the recommendation inside. Raises InputError or a ValueError of ours."""
    select((), require=options["require"], known=ALL_CODES)
    folder, nodes = folder.absolute(), options["nodes"] or 1
    plan = job_plan(advice, options["config"], (*options["overrides"], f"output_dir={folder}"), found)
    assert plan.layout is not None  # noqa: S101 - job_plan has refused otherwise
    ranks, left = divmod(plan.layout.world_size, nodes)
    if left:
        raise SlurmJobError(f"--nodes {nodes}: does not divide the layout's {plan.layout.world_size} ranks")
    more = dict(word.partition("=")[::2] for word in options["sbatch"])
    if options["partition"]:
        more["partition"] = options["partition"]
    return SlurmJob(
        name=options["name"], nodes=nodes, ranks_per_node=ranks, plan=dumps(plan), output=folder,
        python=sys.executable, gpus_per_node=ranks if advice.backend != "gloo" else 0, settings=advice.settings,
        exclude=_hosts(options["exclude"]), time_limit=options["time_limit"], options=more,
        gate=not options["no_preflight"], require=tuple(options["require"]), measure=options["measure"],
        ipc_lock=any(need.name == "memlock" for need in advice.needs),
        restarts=3 if options["restarts"] is None else options["restarts"],
        save_seconds=save_seconds(*to_save(advice), storage_rate(options["storage_rate"]), SAVE_SECONDS),
    )  # fmt: skip


def _hosts(word: str | None) -> tuple[str, ...]:
    """The hosts of --exclude: a list, or a file with lists."""
    if word and ("/" in word or Path(word).is_file()):
        try:
            word = bounded.read_text(Path(word), _LIST_BYTES)
        except OSError as error:
            raise InputError(f"--exclude {word}: {error.strerror}") from None
    return expand_host_list(word or "")


def submit(job: SlurmJob) -> str:
    """Write the script to the output folder and submit it; returns the id of the job. Raises SlurmError."""
    job.output.mkdir(parents=True, exist_ok=True)
    path = write_atomic(job.output / "job.sbatch", batch_script(job))
    return slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]

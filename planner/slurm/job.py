"""A fine-tune job as a batch script of Slurm: #SBATCH options, the recommended environment, the gate and the ranks.

Specification: sbatch(1), srun(1), scontrol(1) of Slurm 22.05; torchrun's TORCH_ELASTIC_SHUTDOWN_TIMEOUT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from contracts.host_list import compress_host_list
from contracts.run_record import RESUMABLE
from planner.advice import render
from planner.nccl_env.texts import Setting

SIGNAL_SECONDS = 120  # before the time limit, at least
END_SECONDS = 20  # from the checkpoint to the end of the script
SAVE_SECONDS = SIGNAL_SECONDS - END_SECONDS  # for the checkpoint, at least
_KEY = re.compile(r"[a-z][a-z0-9-]{0,40}")
_TIME = re.compile(r"\d{1,9}(:\d{2}){0,2}|\d{1,5}-\d{1,2}(:\d{2}){0,2}|UNLIMITED")  # sbatch(1), --time
_OPTION_OF_TEMPLATE = frozenset({
    "nodes", "ntasks-per-node", "gres", "exclude", "time", "signal", "requeue", "open-mode", "output", "job-name",
})  # fmt: skip


class SlurmJobError(ValueError):
    """A job that cannot be written as a batch script; names the option, its value and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What a batch script starts, and what it asks Slurm for."""

    name: str
    nodes: int
    ranks_per_node: int
    plan: str  # plan.json as text
    output: Path  # absolute, on a file system that all nodes share
    python: str  # interpreter on the nodes that has this package
    gpus_per_node: int = 0
    settings: tuple[Setting, ...] = ()
    exclude: tuple[str, ...] = ()  # nodes that the job must not use
    time_limit: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)  # more options of sbatch
    gate: bool = True
    require: tuple[str, ...] = ()  # checks of the gate that must be known
    measure: bool = False
    ipc_lock: bool = False  # ranks lock memory for RDMA
    restarts: int = 3
    save_seconds: int = SAVE_SECONDS  # that ranks have for a checkpoint after SIGTERM

    def __post_init__(self) -> None:
        if self.time_limit is not None and not _TIME.fullmatch(self.time_limit):
            raise SlurmJobError(f"--time-limit {self.time_limit!r}: must be MINUTES, HH:MM:SS or DAYS-HH:MM:SS")
        for key, value in self.options.items():
            if not _KEY.fullmatch(key) or key in _OPTION_OF_TEMPLATE:
                own = "the script sets this option itself" if key in _OPTION_OF_TEMPLATE else "no option of sbatch"
                raise SlurmJobError(f"--sbatch {key}: {own}")
            _check_word(f"--sbatch {key}", value)
        _check_word("--output", str(self.output))
        _check_word("--name", self.name)


def _check_word(what: str, value: str) -> None:
    """SlurmJobError for a value that would end or split a line of #SBATCH."""
    if re.search(r"[\s\"'#\\]|[^\x20-\x7e]", value):
        raise SlurmJobError(f"{what} {value[:80]!r}: must have no blanks, quotes, # or letters beyond ASCII")


def batch_script(job: SlurmJob) -> str:
    """The whole script; sbatch takes it as a file or from standard input."""
    return render(
        "job.sbatch", job=job, exclude=compress_host_list(job.exclude), resumable=RESUMABLE,
        signal_seconds=max(SIGNAL_SECONDS, job.save_seconds + END_SECONDS),
    )  # fmt: skip

"""Commands of Slurm, each bounded: a controller that does not answer is an error that says so.

Surface: sbatch(1), scontrol(1) `show job`, sacct(1) of Slurm 22.05.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ANSWER_SECONDS = 30.0  # Slurm's clients ask an absent controller again for minutes


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


def job_files(job_id: str) -> tuple[Path | None, tuple[Path, ...]]:
    """The run's folder of a job, None where it has none, and its logs. Raises SlurmError where nothing is found.

    `launch` writes the log into the run's folder; a script that `wrap` has changed has NCCL's logs in topoflight-ID
    below the folder that the job was submitted from. A job that ended some minutes ago only accounting knows.
    """
    try:
        rows = (line.strip().partition("=") for line in slurm("scontrol", "show", "job", job_id).splitlines())
        fields = {name: value for name, _, value in rows}
        log, work = Path(fields.get("StdOut", "")), Path(fields.get("WorkDir", "."))
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        log, work = Path(), Path(_accounted(job_id) or ".")
    candidates = (log, *(work / name.format(job_id) for name in ("slurm-{}.log", "slurm-{}.out")))
    log = next((path for path in candidates if path.is_file()), Path())
    logs = (*((log,) if log.is_file() else ()), *sorted((work / f"topoflight-{job_id}").glob("*.log")))
    run = next((path for path in (log.parent, work) if log.name and (path / "ranks").is_dir()), None)
    if not logs:
        raise SlurmError(f"job {job_id}: no file of it was found in {work.absolute()}; give its logs, or --run FOLDER")
    return run, logs


def _accounted(job_id: str) -> str:
    """The folder that a job was submitted from, by Slurm's accounting; empty where that does not know it."""
    try:
        return slurm("sacct", "-j", job_id, "-n", "-P", "-X", "-o", "WorkDir").strip().partition("\n")[0]
    except SlurmError:
        return ""

"""One environment with a name: what every reader gives, and the rules take."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.finding import Finding

NODES = ("NNODES", "NUM_NODES", "PET_NNODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "OMPI_MCA_orte_num_nodes")
JOB_SIZE = (*NODES, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables that say how large a job is; kept beside those that are judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEnvironment:
    """One environment and where it stands."""

    source: str  # "env file", "nccl.conf", "TrainJob/sft trainer", "shell script, if [ ... ]", "log"
    environment: dict[str, str]
    form: str = ""
    unresolved: dict[str, str] = field(default_factory=dict)  # set from elsewhere: name to how it is written
    unexported: dict[str, str] = field(default_factory=dict)  # shell variables that no program sees
    used: frozenset[str] = frozenset()  # names that the script itself reads
    lines: dict[str, int] = field(default_factory=dict)  # where each name is set last
    base: NamedEnvironment | None = None  # what holds where this environment's condition does not
    names: tuple[str, ...] = ()  # those that this one sets itself
    findings: tuple[Finding, ...] = ()  # about the text itself, whatever NCCL makes of its values

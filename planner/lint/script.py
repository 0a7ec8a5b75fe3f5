"""What any reader of planner.lint finds in a text, and the environments that follow from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from contracts.finding import Finding

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
NAMED = re.compile(r"\b(?:TORCH_)?NCCL_[A-Z0-9_]{2,}|\b(?:FI|OFI|GLOO|RCCL|UCX)_[A-Z][A-Z0-9_]*")
"""A name that lint judges, wherever it stands."""
SETS = re.compile(r"(?<![\w$.{])(?:TORCH_)?NCCL_[A-Z0-9_]{2,}[\"']?\]?\s*(?:=(?!=)|:\s|,\s*[\"'\w])")
"""A place that looks like a setting, in whatever language."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """One variable as a text sets it."""

    name: str
    value: str | None  # None: comes from elsewhere; `raw` shows from where
    raw: str
    line: int
    scope: str = ""  # "" for all that follows; else the condition or command that it belongs to
    exported: bool = True
    unset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """Text of another form inside: a here-document, what echo writes into a file, JSON in an option."""

    text: str
    target: str  # the file it is written to, or the program that reads it
    line: int  # of its first row; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Unread:
    """A line that the reader could not understand, or a setting that no started program gets."""

    line: int  # 0: unknown
    why: str
    name: str = ""  # of the setting


@dataclass(slots=True, kw_only=True)
class Script:
    """What was read of a text."""

    assigned: list[Assigned] = field(default_factory=list)
    inner: list[Inner] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # variables that are expanded somewhere
    files: list[str] = field(default_factory=list)  # files named with --env-file and the like
    findings: list[Finding] = field(default_factory=list)  # about the text itself
    unread: list[Unread] = field(default_factory=list)
    unreached: list[Unread] = field(default_factory=list)  # settings that no started program gets
    commands: int = 0  # programs that it starts or settings of the shell; 0: nothing but assignments

    def add(self, other: Script) -> None:
        """Take in what was read of another part of the same text."""
        self.assigned += other.assigned
        self.inner += other.inner
        self.used |= other.used
        self.files += other.files
        self.findings += other.findings
        self.unread += other.unread
        self.unreached += other.unreached

    def export_all(self) -> Script:
        """Treat a text that holds nothing but assignments as a list of variables, whether it says export or not."""
        if self.commands == 0:
            self.assigned[:] = [replace(each, exported=True) for each in self.assigned]
        return self


NODES = ("NNODES", "NUM_NODES", "PET_NNODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "OMPI_MCA_orte_num_nodes")
JOB_SIZE = (*NODES, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables that say how large a job is; read in addition to those that are judged."""


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

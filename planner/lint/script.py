"""What any reader of planner.lint finds in a text, and the environments that follow from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from contracts.finding import Finding
from contracts.tables import read_table

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
NAMED = re.compile(r"\b(?:TORCH_)?NCCL_[A-Z0-9_]{2,}|\b(?:FI|OFI|GLOO|RCCL|UCX)_[A-Z][A-Z0-9_]*")
"""A name that lint judges, in any place."""
SETS = re.compile(r"(?<![\w$.{])(?:TORCH_)?NCCL_[A-Z0-9_]{2,}[\"']?\]?\s*(?:=(?!=)|:\s|,\s*[\"'\w])")
"""A place that looks like a setting, in whatever language."""
OPEN = "\ue000"
"""Replaces each unknown part of a value: the output of a program, an argument, a template's value."""

NODES = ("NNODES", "NUM_NODES", "PET_NNODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "OMPI_MCA_orte_num_nodes")
JOB_SIZE = (*NODES, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables that say how large a job is; read in addition to those that are judged."""
# What lint judges, misspelt names included; everything else of an environment (tokens, keys) is not even kept.
_JUDGED = re.compile(
    r"[ \t]*(?:export\s+)?(?:TORCH_)?NCCL_|(?:TORCH|GLOO|PYTORCH|FI|OFI|RDMAV|PET|CUDA|OMP|RCCL|UCX)_", re.IGNORECASE
)


class EnvironmentTextError(ValueError):
    """A text that cannot be read as the kind it was said to be, or that is not the document it looks like."""


@cache
def words() -> Mapping[str, Mapping[str, frozenset[str]]]:
    """Words of commands and documents: data/words.toml as written."""
    table = read_table(__file__, "data/words.toml")
    return {part: {name: frozenset(members) for name, members in rows.items()} for part, rows in table.items()}


@cache
def pattern(name: str) -> re.Pattern[str]:
    """A pattern of data/forms.toml."""
    return re.compile(read_table(__file__, "data/forms.toml")["patterns"][name])


def whole_number(text: str) -> int | None:
    """The number of up to 18 digits; None for any other text. Python raises ValueError for thousands of digits."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


@cache
def is_judged(name: str) -> bool:
    """Whether a variable concerns communication."""
    return _JUDGED.match(name) is not None


class Word(NamedTuple):
    """One word of a command after expansion."""

    text: str  # OPEN replaces each unknown part
    raw: str  # as it is written, without its quotes
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """One variable as a text sets it."""

    name: str
    value: str = ""  # OPEN in it: it comes from elsewhere; `raw` shows from where
    raw: str = ""
    line: int = 0
    exported: bool = True
    unset: bool = False
    items: tuple[Word, ...] | None = None  # of a shell's array; `value` is then the first of them


Settings = dict[str, Assigned]
"""Variables by name."""


class Inner(NamedTuple):
    """Text of another form inside: a here-document, what echo writes into a file, JSON in an option."""

    text: str
    target: str  # the file it is written to, or the program that reads it
    line: int  # of its first row; 0: unknown


class Unread(NamedTuple):
    """A line that the reader could not understand, or a setting that no started program gets."""

    line: int  # 0: unknown
    why: str
    name: str = ""  # of the setting


@dataclass(slots=True, kw_only=True)
class Script:
    """What was read of a text."""

    always: Settings = field(default_factory=dict)
    ways: list[tuple[str, Settings]] = field(default_factory=list)  # a launch or condition, and what it changes
    loose: Settings = field(default_factory=dict)  # variables of the shell that no program gets
    inner: list[Inner] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # files named with --env-file and the like
    findings: list[Finding] = field(default_factory=list)  # about the text itself
    unread: list[Unread] = field(default_factory=list)

    def set(self, given: Assigned) -> None:
        """Set a variable for every launch; `A=$A` changes nothing if the value of A is unknown."""
        itself = given.raw.strip("\"'") in (f"${given.name}", f"${{{given.name}}}")
        if not (itself and given.value == OPEN and given.name in self.always):
            self.always[given.name] = given

    def settings(self) -> Iterator[Settings]:
        """Every group of settings."""
        yield from (self.always, self.loose, *(way for _, way in self.ways))

    def add(self, other: Script) -> None:
        """Take in what was read of another part of the same text."""
        for each in other.always.values():
            self.set(each)
        self.ways += other.ways
        self.loose |= other.loose
        self.inner += other.inner
        self.files += other.files
        self.findings += other.findings
        self.unread += other.unread


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEnvironment:
    """One environment and where it was found."""

    source: str  # "env file", "nccl.conf", "TrainJob/sft trainer", "shell script, if [ ... ]", "log"
    environment: dict[str, str]
    unresolved: dict[str, str] = field(default_factory=dict)  # set from elsewhere: name to how it is written
    unexported: dict[str, str] = field(default_factory=dict)  # shell variables that no program sees
    used: frozenset[str] = frozenset()  # names that the script itself reads
    lines: dict[str, int] = field(default_factory=dict)  # where each name is set last
    place: str = ""  # its source without the launch and the condition
    also_set: frozenset[str] = frozenset()  # every name that the same text sets, under other conditions too
    findings: tuple[Finding, ...] = ()  # about the text itself, whatever NCCL makes of its values

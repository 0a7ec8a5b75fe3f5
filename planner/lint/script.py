"""Types shared by all readers of planner.lint: the variables found in a text, and the resulting environments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from contracts.finding import Finding
from contracts.tables import read_table
from planner.nccl_env import with_right_prefix

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
NAMED = re.compile(r"\b(?:(?:TORCH_)?NCCL_[A-Z0-9_]{2,}|(?:FI|OFI|GLOO|RCCL|UCX)_[A-Z][A-Z0-9_]*)")
"""Matches the name of a checked variable anywhere in a text."""
SETS = re.compile(r"(?<![\w$.{])(?:TORCH_)?NCCL_[A-Z0-9_]{2,}[\"']?\]?\s*(?:=(?!=)|:\s|,\s*[\"'\w])")
"""Matches text that looks like an assignment of an NCCL variable, in any language."""
OPEN = "\ue000"
"""Placeholder for an unknown part of a value: output of a program, an argument, the value of a template."""

NODES = ("NNODES", "NUM_NODES", "PET_NNODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "OMPI_MCA_orte_num_nodes")
JOB_SIZE = (*NODES, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables with the size of the job; they are read but not checked."""


class EnvironmentTextError(ValueError):
    """The text is not valid in its stated or recognised format, or exceeds a limit."""


WORDS: Mapping[str, Mapping[str, frozenset[str]]] = {
    part: {name: frozenset(members) for name, members in rows.items()}
    for part, rows in read_table(__file__, "data/words.toml").items()
}
"""Words of commands and documents."""


@cache
def pattern(name: str) -> re.Pattern[str]:
    """Return a compiled pattern of data/forms.toml, section [patterns]."""
    return re.compile(read_table(__file__, "data/forms.toml")["patterns"][name])


def whole_number(text: str) -> int | None:
    """Return the number of up to 18 digits; None for other texts (int() raises ValueError for thousands of digits)."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


@cache
def is_judged(name: str) -> bool:
    """Whether lint checks variables with this name, because they concern communication. Others may be secret."""
    return pattern("judged_name").match(name) is not None or with_right_prefix(name) != ""


class Word(NamedTuple):
    """One word of a command after expansion."""

    text: str  # OPEN replaces each unknown part
    raw: str  # source text without quotes
    line: int = 0


class Assigned(NamedTuple):
    """One assignment of a variable."""

    name: str
    value: str = ""  # contains OPEN if a part is unknown
    raw: str = ""
    line: int = 0
    exported: bool = True
    unset: bool = False


Settings = dict[str, Assigned]
"""Variables by name."""


class Inner(NamedTuple):
    """A text in another format inside a text: a here-document, the output of echo into a file, JSON in an option."""

    text: str
    target: str  # the file it is written to, or the program that reads it
    line: int  # number of its first line; 0: unknown


class Unread(NamedTuple):
    """A line that could not be parsed, or a setting that no started program gets."""

    line: int  # 0: unknown
    why: str
    name: str = ""  # variable of the setting


@dataclass(slots=True, kw_only=True)
class Script:
    """The result of reading a text."""

    always: Settings = field(default_factory=dict)
    ways: list[tuple[str, Settings]] = field(default_factory=list)  # label of a launch or condition, and its settings
    loose: Settings = field(default_factory=dict)  # shell variables that are never exported
    inner: list[Inner] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # lines of programs that start ranks
    files: list[str] = field(default_factory=list)  # files named with --env-file and the like
    findings: list[Finding] = field(default_factory=list)  # about the text itself
    removed: dict[str, str] = field(default_factory=dict)  # variable -> the command that does not pass it on
    unread: list[Unread] = field(default_factory=list)

    def set(self, assigned: Assigned) -> None:
        """Set a variable for every launch. `A=$A` with an unknown A keeps the earlier value."""
        itself = assigned.raw.strip("\"'") in (f"${assigned.name}", f"${{{assigned.name}}}")
        if not (itself and assigned.value == OPEN and assigned.name in self.always):
            self.always[assigned.name] = assigned

    def settings(self) -> Iterator[Settings]:
        """Yield every group of settings."""
        yield from (self.always, self.loose, *(way for _, way in self.ways))

    def add(self, other: Script) -> None:
        """Merge the result of another part of the same text."""
        for each in other.always.values():
            self.set(each)
        self.loose |= other.loose
        for name in ("ways", "inner", "starts", "files", "findings", "unread"):
            getattr(self, name).extend(getattr(other, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEnvironment:
    """One environment, and where in the text it was found."""

    source: str = ""  # "env file", "nccl.conf", "TrainJob/sft trainer", "shell script, if [ ... ]", "log"
    environment: dict[str, str]
    unresolved: dict[str, str] = field(default_factory=dict)  # name -> source text of an unknown value
    unexported: dict[str, str] = field(default_factory=dict)  # shell variables that are not exported
    used: frozenset[str] = frozenset()  # names that the script itself reads
    lines: dict[str, int] = field(default_factory=dict)  # line of the last assignment of each name
    place: str = ""  # source without launch and condition
    also_set: frozenset[str] = frozenset()  # all names that the text sets under any condition
    findings: tuple[Finding, ...] = ()  # about the format of the text, independent of NCCL
    only_all_reduce: bool = False  # the text runs all_reduce_perf of nccl-tests, and no other collective

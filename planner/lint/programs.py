"""Recognise programs in the words of a command, and collect the settings of each program start.

Specification: mpirun(1), srun(1), env(1), sudo(8), docker-run(1), apptainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from contracts.tables import read_table
from planner.lint.script import JOB_SIZE, Assigned, Script, Settings, Word, is_judged, pattern, words

MOST_OPTIONS = 1 << 12  # characters of a command that are searched for variables and options
_MOST_LAUNCHES = 1000  # launches or execution paths with different settings
_NAMES = words()["shell"]
# Label of the environment at the end of a script. It counts if the script starts nothing that may train.
END = "the end"


def name_of(word: Word) -> str:
    """Return the name of a program without its folder; "python" for every release of Python."""
    name = word.text.rsplit("/", 1)[-1]
    return re.sub(r"\Apython[\d.]+\Z", "python", name) if name.startswith("python") else name


def program_behind(words: Sequence[Word]) -> int:
    """Return the index of the program after wrappers such as sudo: the first word that is no option or number."""
    names = [name_of(each) for each in words]
    if names[0] not in _NAMES["wrappers"] or (names[0] == "command" and "-v" in names[1:2]):
        return 0
    after = (at for at, name in enumerate(names) if name not in _NAMES["wrappers"])
    return next((at for at in after if not re.match(r"-|\d|[A-Za-z_]\w*=", words[at].text)), len(words))


def starts_ranks(words: Iterable[str]) -> bool:
    """Whether a launcher starts ranks."""
    return any(map(pattern("starts_ranks").fullmatch, words))


def is_launcher(words: Sequence[Word]) -> bool:
    """Whether a command starts ranks or a training program, also behind a wrapper; not `python -m pip`."""
    at = next((at for at, word in enumerate(words) if name_of(word) in _NAMES["launchers"]), None)
    if at is None:
        return False
    rest = [word.text for word in words[at + 1 : at + 3]]
    is_chore = rest[:1] == ["-m"] and _NAMES["modules"].intersection(rest[1:])
    return name_of(words[at]) != "python" or not (is_chore or _NAMES["chores"].intersection(rest[:1]))


def is_idle(words: Sequence[Word]) -> bool:
    """Whether a program does not use NCCL, and starts no other one (`docker run`)."""
    program = name_of(words[0])
    starts = program in _NAMES["runs"] and any(word.text in _NAMES["starts"] for word in words[1:])
    return program in _NAMES["utilities"] and not starts


def script_of(words: Sequence[Word]) -> int:
    """Return the index of the training script after its launcher; the following words are its arguments."""
    starts = next((at for at, each in enumerate(words) if name_of(each) in _NAMES["takes_script"]), len(words))
    after = range(starts + 1, len(words))
    return next((at for at in after if re.fullmatch(r"[^-:=][^:=]*\.(?:py|sh)", words[at].text)), len(words))


def runner_of(words: Sequence[Word], at: int) -> str:
    """Return the program that runs this word as a command (option -c); empty if there is none."""
    if at == 0 or not re.fullmatch(r"-\w*c", words[at - 1].text):
        return ""
    program = name_of(words[0])
    near = next((name_of(each) for each in reversed(words[max(0, at - 8) : at]) if each.text[:1] != "-"), program)
    own, shells = _NAMES["own_c"], _NAMES["shells"]
    if "python" in (program, near):
        return "python"
    is_text = re.search(r"\s", words[at].text) is not None
    return "" if near in own or (near not in shells and (program in own or not is_text)) else near


def removed_names(words: Sequence[Word], names: Iterable[str]) -> list[str]:
    """Return the variables that a command does not pass on: env(1) -i and -u, sudo(8) without -E, srun(1) --export."""
    command = " ".join(word.text for word in words)[:MOST_OPTIONS] + " "
    removed = read_table(__file__, "data/forms.toml")["removed"]
    named, everything = set(re.findall(removed["names"], command)), re.match(removed["all"], command) is not None
    return [name for name in names if name in named or (everything and name not in command)]


class Launch(NamedTuple):
    """A program start, with its settings on one way through the script."""

    label: str  # "the launch of line 3"
    sure: bool  # the program is a launcher; False: it may be one
    settings: Settings
    way: tuple[str, ...]  # unlikely outcomes that lead to it


class Launches:
    """The program starts of a script."""

    def __init__(self) -> None:
        self._found: dict[object, Launch] = {}

    @property
    def has_launcher(self) -> bool:
        """Whether a program is certainly a launcher."""
        return any(each.sure for each in self._found.values())

    def add(self, label: str, variables: Iterable[Assigned], way: tuple[str, ...], *, sure: bool) -> int | None:
        """Add a start with its checked exported variables. Returns their number; None if there are too many starts."""
        settings = {
            each.name: each for each in variables
            if each.exported and not each.unset and each.items is None
            and (is_judged(each.name) or each.name in JOB_SIZE)
        }  # fmt: skip
        if len(self._found) >= _MOST_LAUNCHES:
            return None
        self._found[label, sure, _content(settings), way] = Launch(label, sure, settings, way)
        return len(settings)

    def merge_into(self, script: Script) -> None:
        """Store the settings of each launch and way. A launch with a subset of another launch's settings is dropped.

        A variable that no launcher gets counts if a program gets it that may be a launcher.
        """
        some = self.has_launcher
        named = {name for each in self._found.values() if each.sure for name in each.settings}
        ways: dict[tuple[str, ...], dict[frozenset[tuple[str, str]], Launch]] = {}
        for each in sorted(self._found.values(), key=lambda launch: not launch.sure):
            settings = {name: one for name, one in each.settings.items() if each.sure or name not in named}
            if not (some and each.label == END):
                ways.setdefault(each.way, {}).setdefault(_content(settings), each._replace(settings=settings))
        found: dict[frozenset[tuple[str, str]], Launch] = {}
        for _, launches in sorted(ways.items(), key=lambda way: len(way[0])):
            for contents, each in launches.items():
                if not any(contents < other for other in launches):
                    found.setdefault(contents, each)
        several = len([each for each in found.values() if not each.way]) > 1
        for each in found.values():
            label = "; ".join(filter(None, [each.label if several else "", *each.way]))
            script.ways.append((label, each.settings))
        if len(found) == 1:
            script.always = script.ways.pop()[1]


def _content(settings: Settings) -> frozenset[tuple[str, str]]:
    """Return the pairs of name and value."""
    return frozenset((name, each.value) for name, each in settings.items())

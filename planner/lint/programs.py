"""Follow the simple commands of a shell script: variables they set, and the environment of programs they start.

Specification: POSIX shell (XCU 2.14 special built-ins), bash(1); fish set; mpirun(1) -x, Hydra -genv, srun(1) and
sbatch(1) --export, docker-run(1) -e, apptainer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from tree_sitter import Node

from contracts.tables import read_table
from planner.lint.expansion import MOST_VALUE, WORK_OF_WORD, Expander, Shell
from planner.lint.script import (
    JOB_SIZE,
    NAME,
    NAMED,
    OPEN,
    Assigned,
    Inner,
    Settings,
    Unread,
    Word,
    is_judged,
    pattern,
    words,
)

_MOST_LAUNCHES = 1000  # launches or execution paths with different settings
_MOST_OPTIONS = 1 << 12  # characters of a command that are searched for variables and options

_SETTER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_SETTING = re.compile(r"\b(?:TORCH_)?NCCL_[A-Z0-9_]+=|\b(?:FI|OFI|GLOO|RCCL|UCX)_[A-Z0-9_]+=")
_NAMES = words()["shell"]


END = "the end"
"""Label of the environment at the end of a script; it counts if the script starts nothing that may train."""


TEXT = "a text"
"""Name of the text that a command substitution returns."""


class Outcome(NamedTuple):
    """Whether a command succeeds."""

    success: bool = True
    known: bool = True  # False: only a run decides, and `success` is the likely outcome


SUCCESS = Outcome()
LIKELY, UNLIKELY = Outcome(known=False), Outcome(success=False, known=False)


class Launch(NamedTuple):
    """A program start, with its settings on one way through the script."""

    label: str  # "the launch of line 3"
    sure: bool  # the program is a launcher; False: it may be one
    settings: Settings
    way: tuple[str, ...]  # unlikely outcomes that lead to it


class Call(NamedTuple):
    """A call of a built-in: its arguments, and the text on its standard input."""

    program: str
    words: list[Word]
    line: int
    given: Inner | None


class Programs(Expander):
    """Follows simple commands. Module `shell` follows the compound statements."""

    nested: Callable[..., None]  # follows a script run by another shell

    def __init__(self, known: Mapping[str, str], before: Sequence[Assigned]) -> None:
        given = [Assigned(name=name, value=value, raw=value, exported=False) for name, value in known.items()]
        super().__init__(Shell({each.name: each for each in (*given, *before)}))
        self.active: list[str] = []  # names of the functions on the call stack
        self.local: list[set[str]] = []  # local variables of each function on the call stack
        self.input: Inner | None = None
        self.target = ""  # the file or program that gets the output; empty: none that is known
        self.rows = False  # the last text that was passed on is one of echo or printf
        self.launches: dict[object, Launch] = {}
        self.labels: tuple[str, ...] = ()  # unlikely outcomes of the way that is followed
        self.ahead: set[str] = set()  # its conditions that are not met yet; launches before them are known
        self.exported = {each.name for each in before}  # names exported anywhere
        self.loose: dict[str, Assigned] = {}  # set but not exported
        self.runs_unknown = False  # a program with unknown name, which may be a function
        self.started = 0  # number of started programs, repetitions included
        self._sets = 0  # number of settings in the words of commands

    # -- reports

    def unread(self, line: int, why: str) -> None:
        """Report a line that cannot be followed."""
        if not any(each.why == why and why.startswith("too") for each in self.script.unread):
            self.script.unread.append(Unread(line=line, why=why))

    # -- variables

    def evaluate(self, node: Node) -> Assigned:
        """Evaluate `NAME=value`, `NAME+=value` or `NAME=(array)`. `NAME[i]=value` makes the variable unknown."""
        target, given = node.child_by_field_name("name") or node, node.child_by_field_name("value")
        name, line, adds = self.text(target).partition("[")[0], self.line(node), node.children[1].type == "+="
        items = None
        if target.type != "variable_name":
            list(map(self.value, node.named_children))
            value = OPEN
        elif given is not None and given.type == "array":
            before = self.items(name) if adds else ()
            more = tuple(word for each in given.named_children for word in self.words(each))
            indexed = any(re.match(r"\[[^]]*\]\+?=", self.text(each)) for each in given.named_children)
            before = (Word(OPEN, ""),) if before is None else before  # unknown number of items
            items = None if indexed else (*before, *more)[: MOST_VALUE >> 4]
            value = OPEN if items is None else items[0].text if items else ""
        else:
            value = self.value(given) if given else ""
            value = ((self.parameter(name) + value) if adds else value)[:MOST_VALUE]
        raw = self.raw(given) if given else ""
        return Assigned(name=name, value=value, raw=raw, line=line, items=items)

    def assign(self, name: str, value: str, raw: str, line: int) -> None:
        """Set a variable. It is exported if it was before, or if `set -a` is active."""
        self.set(Assigned(name=name, value=value, raw=raw, line=line))

    def set(self, given: Assigned, *, exported: bool | None = None) -> None:
        """Set a variable. If `exported` is None, it is exported if it was before, or if `set -a` is active."""
        if not NAME.match(given.name):
            return
        inside = re.sub(r"^(?:SINGULARITY|APPTAINER)ENV_", "", given.name)  # the name that the container gets
        given = given if inside == given.name else replace(given, name=inside)
        self.spend(WORK_OF_WORD)
        before = self.shell.variables.get(given.name)
        if exported is None:
            exported = self.shell.exports_all or (before is not None and before.exported)
        self._put(replace(given, exported=exported))

    def _put(self, given: Assigned) -> None:
        """Store a variable."""
        self.shell.variables[given.name] = given
        if given.items is None and not given.unset:
            if given.exported:
                self.exported.add(given.name)
            else:
                self.loose[given.name] = given

    def export(self, name: str, line: int) -> None:
        """Follow `export NAME`. An unknown variable gets its value from the environment, so the value is OPEN."""
        if NAME.match(name):
            outside = Assigned(name=name, value=OPEN, raw=f"${name}", line=line)  # value of the outer environment
            self._put(replace(self.shell.variables.get(name, outside), exported=True))

    def declare(self, keyword: str, given: Sequence[Assigned | Word], line: int) -> None:
        """Follow export, declare, typeset, local, readonly or unset, with names and evaluated assignments."""
        words = [each for each in given if isinstance(each, Word)]
        options = " ".join(each.text for each in words if each.text[:1] in ("-", "+"))
        if keyword == "unset" and "-f" not in options:
            self._unset(words, line)
        if keyword == "unset" or "-f" in options or (keyword == "local" and not self.active):
            return
        if re.search(r"-\w*n|\+\w*x", options):  # `export -n` and name references are not supported
            self.unread(line, f"{keyword} {options}")
        exports = keyword == "export" or re.search(r"-\w*x", options) is not None
        own = keyword not in ("export", "readonly") and "g" not in options and bool(self.active)
        for each in given:
            if isinstance(each, Word):
                name, equals, value = each.text.partition("=")
                if OPEN in name and re.fullmatch(rf"[\w{OPEN}]+", name):
                    self.unread(line, f"the names of the variables that {keyword} gets are unknown")
                if not NAME.match(name):
                    continue
                setting = Assigned(name=name, value=value, raw=value, line=line)
            else:
                name, equals, setting = each.name, "=", each
            if own:  # exported if the hidden outer variable is
                self.local[-1].add(name)
                if not equals and (before := self.shell.variables.get(name)):
                    self.shell.variables[name] = replace(before, unset=True, value="", items=None)
            if equals:
                self.set(setting, exported=True if exports else None)
            elif exports:
                self.export(name, line)

    def _unset(self, words: Iterable[Word], line: int) -> None:
        for word in words:
            if OPEN in word.text:  # it may be any variable
                self.unread(line, "the names of the variables that unset gets are unknown")
            elif word.text[:1] != "-":
                gone = Assigned(name=word.text, line=line, exported=False, unset=True)
                self.shell.variables[word.text] = gone

    # -- launches

    def launch(self, label: str, *, sure: bool) -> None:
        """Record a program start with the checked variables of its environment."""
        self.started += 1
        shell = self.shell
        settings = {
            name: each for name, each in shell.variables.items()
            if each.exported and not each.unset and each.items is None and (is_judged(name) or name in JOB_SIZE)
        }  # fmt: skip
        self.spend(WORK_OF_WORD * len(settings))
        if len(self.launches) >= _MOST_LAUNCHES:
            self.unread(0, "too many commands that start programs")
        elif not self.ahead:
            key = label, sure, content(settings), self.labels
            self.launches[key] = Launch(label, sure, settings, self.labels)

    def may_be_sourced(self) -> bool:
        """Whether another script may call the functions of this one."""
        return self.runs_unknown or not any(each.sure for each in self.launches.values())

    def merge_launches(self) -> None:
        """Store the settings of each launch and path. A launch with a subset of another launch's settings is dropped.

        A variable that no launcher gets counts if a program gets it that may be a launcher.
        """
        some = any(each.sure for each in self.launches.values())
        named = {name for each in self.launches.values() if each.sure for name in each.settings}
        ways: dict[tuple[str, ...], dict[frozenset[tuple[str, str]], Launch]] = {}
        for each in sorted(self.launches.values(), key=lambda launch: not launch.sure):
            settings = {name: one for name, one in each.settings.items() if each.sure or name not in named}
            if not (some and each.label == END):
                ways.setdefault(each.way, {}).setdefault(content(settings), each._replace(settings=settings))
        found: dict[frozenset[tuple[str, str]], Launch] = {}
        for _, launches in sorted(ways.items(), key=lambda way: len(way[0])):
            for contents, each in launches.items():
                if not any(contents < other for other in launches):
                    found.setdefault(contents, each)
        several = len([each for each in found.values() if not each.way]) > 1
        for each in found.values():
            label = "; ".join(filter(None, [each.label if several else "", *each.way]))
            self.script.ways.append((label, each.settings))
        if len(found) == 1:
            self.script.always = self.script.ways.pop()[1]
        self.script.loose = {name: each for name, each in self.loose.items() if name not in self.exported}
        self.script.inner = list(dict.fromkeys(self.script.inner))

    def run_program(self, words: list[Word], line: int, given: Inner | None, outer: Shell) -> None:
        """Start a program. It gets the exported variables, changed by the words of its command."""
        before, program = self.started, name_of(words[0])
        self.remove(words)
        sets = self._options(words, line, outer)
        if given:
            self.pass_on(given._replace(target=program))
        self.runs_unknown = self.runs_unknown or OPEN in words[0].text
        starts = program in _NAMES["runs"] and any(word.text in _NAMES["starts"] for word in words[1:])
        idle = program in _NAMES["utilities"] and not starts
        sure = not idle and _is_launcher(words)
        if sure and _starts_ranks(words):
            self.script.starts.append(line)
        if self.started == before and (sets or not idle):
            self.launch(f"the launch of line {line}" if line else "a launch", sure=sure)

    def remove(self, words: Sequence[Word]) -> None:
        """Unset variables that a command does not pass on: env(1) -i and -u, sudo(8) without -E, srun(1) --export."""
        command = " ".join(word.text for word in words)[:_MOST_OPTIONS] + " "
        removed = read_table(__file__, "data/forms.toml")["removed"]
        names = set(re.findall(removed["names"], command))
        everything = re.match(removed["all"], command) is not None
        for name in list(self.shell.variables):
            if name in names or (everything and name not in command):
                del self.shell.variables[name]

    # -- texts that are written and read

    def pass_on(self, given: Inner) -> None:
        """Follow a text that is written into a file, or read by a program: a shell, Python, kubectl, ssh."""
        target = {"kubectl": "manifest.yaml", "oc": "manifest.yaml"}.get(given.target, given.target)
        if not given.text.strip(OPEN + "\n") or target in _NAMES["idle"] or target.startswith("/dev/"):
            return
        if target in _NAMES["shells"]:
            self.nested(given.text, given.line)
        else:
            self.script.inner.append(given._replace(target=target.replace(OPEN, "...")))

    def _write_rows(self, text: str, line: int) -> None:
        """Pass on the output of echo or printf. What several of them write into the same file is one text."""
        last = self.script.inner[-1:] if self.rows else []
        if self.target in ("", TEXT) or not text.strip():
            return
        if last and last[0].target == self.target:
            self.script.inner[-1] = last[0]._replace(text=last[0].text + text)
        else:
            self.pass_on(Inner(text=text, target=self.target, line=line))
        self.rows = True

    # -- the words of a program

    def _options(self, words: list[Word], line: int, outer: Shell) -> bool:
        """Follow the words of a command: launcher options, `env A=1`, scripts. Returns whether they set variables."""
        before, at, end = self._sets, 0, _own_script(words)
        settings = False
        passes = end < len(words) and words[end].text.endswith(".sh")  # such as vLLM's run_cluster.sh, to docker
        while at < len(words):
            word = words[at]
            taken: int | None = 0
            passed = (
                passes and word.text in ("-e", "--env") and any(_SETTING.match(w.text) for w in words[at + 1 : at + 2])
            )
            if (at <= end or passed or pattern("dotted").match(word.text)) and (
                taken := self._launcher_option(words, at, line, outer)
            ) is None:
                self._plain_word(words, at, line, settings=settings)
                unset = at > 0 and words[at - 1].text in ("-u", "-C")
                more = unset or re.match(r"-|[A-Za-z_]\w*=", word.text)
                settings = name_of(word) == "env" or (settings and bool(more))
            at += 1 + (taken or 0)
        return self._sets > before

    def _plain_word(self, words: list[Word], at: int, line: int, *, settings: bool) -> None:
        word, text = words[at], words[at].text
        program, before, inside = name_of(words[0]), words[at - 1].text if at else "", word.line or line
        runs = _runner(words, at)
        if runs == "python":
            self.script.inner.append(Inner(text=text, target="python", line=inside))
        elif runs or (settings and before in ("-S", "--split-string")):
            self.nested(text if runs else f"env {text}", inside, surely=program not in _NAMES["own_c"])
        elif dotted := pattern("dotted").match(text):  # key path of Hydra or Helm: env_vars.NAME=VALUE
            self._pair(dotted[1], text[dotted.end() :].strip("\"'"), word.raw, line)
        elif _SETTER.match(text) and (settings or (before[:1] == "-" and _SETTING.match(text))):
            self.set_for_program(word, line, self.shell)
        elif at and program in _NAMES["remote"] and re.search(r"\s", text):
            self.nested(text, inside)
        elif at:
            self._text_in_word(text, inside)

    def _launcher_option(self, words: list[Word], at: int, line: int, outer: Shell) -> int | None:
        """Follow a launcher option that sets variables. Returns the number of its arguments; None if it is none."""
        text, after = words[at].text, words[at + 1] if at + 1 < len(words) else Word("", "")
        option, equals, tail = text.partition("=")
        rest = Word(tail, words[at].raw.partition("=")[2], line) if equals else after
        if text in _NAMES["takes_pair"] or (text == "-env" and "=" not in after.text and at + 2 < len(words)):
            if at + 2 < len(words):
                self._pair(after.text, words[at + 2].text, words[at + 2].raw, line)
            return 2
        if pattern("takes_setting").fullmatch(option):
            self.set_for_program(rest, line, outer)
        elif option in _NAMES["takes_list"]:
            for name, sign, value in (part.partition("=") for part in rest.text.split(",")):  # values end at commas
                if sign:
                    self._pair(name, value, value, line)
        elif option in _NAMES["takes_file"]:
            self.script.files.append(rest.text)
        else:
            return None
        return 0 if equals else 1

    def set_for_program(self, word: Word, line: int, outer: Shell) -> None:
        """Set variables for the program: comma-separated NAME=VALUE, or NAME with the exported value of `outer`."""
        for part in re.split(r",(?=[A-Z_][A-Z0-9_]*=)", word.text):
            name, equals, tail = part.partition("=")
            if equals:
                self._pair(name, tail, word.raw.partition("=")[2] if OPEN in tail else tail, line)
            elif (before := outer.variables.get(name)) and before.exported:
                self.shell.variables[name] = before

    def _pair(self, name: str, value: str, raw: str, line: int) -> None:
        """Set a variable for the program that is being started."""
        self._sets += is_judged(name)
        self.set(Assigned(name=name, value=value, raw=raw, line=line), exported=True)

    def _text_in_word(self, text: str, line: int) -> None:
        """Follow a script, JSON or options inside one word."""
        if not NAMED.search(text):
            return
        inside = text.split("=", 1)[1] if re.match(r"--?[\w.-]+=", text) else text
        if inside.lstrip().startswith(("{", "[")) and '"' in inside:
            self.script.inner.append(Inner(text=inside, target="option.json", line=line))
        elif "os.environ" in inside:
            self.script.inner.append(Inner(text=inside, target="python", line=line))
        elif pattern("commands").search(inside):
            self.nested(inside, line, surely=False)

    # -- built-ins

    def echo(self, call: Call) -> None:
        """Write the output of echo. It may contain Hydra overrides for a launcher."""
        texts = [each.text for each in call.words]
        text = " ".join(each for each in texts if each not in ("-e", "-n", "-E"))
        self._write_rows(text.replace("\\n", "\n") + "\n" * (texts[:1] != ["-n"]), call.line)
        for row in text.splitlines():
            if dotted := pattern("dotted").match(row):
                shell, self.shell = self.shell, self.shell.copy()
                self._pair(dotted[1], row[dotted.end() :], row[dotted.end() :], call.line)
                self.launch(f"the command of line {call.line}", sure=False)
                self.shell = shell

    def printf(self, call: Call) -> None:
        """Write the output of printf; formatted values are unknown."""
        text = call.words[0].text if call.words else ""
        if text == "-v":
            self.assign_unknown(call)
        else:
            self._write_rows(OPEN if "%" in text else text.replace("\\n", "\n"), call.line)

    def cat(self, call: Call) -> Outcome:
        """Pass on the input of cat or tee; the content of files is unknown."""
        names = [each.text for each in call.words if each.text[:1] != "-"]
        target = names[0] if names and call.program == "tee" else self.target
        if call.given and target and (not names or call.program == "tee"):
            self.pass_on(call.given._replace(target=target))
        return LIKELY if names else SUCCESS

    def assign_unknown(self, call: Call) -> Outcome:
        """Set the variables of read, mapfile, let or printf -v to unknown values."""
        for word in call.words:
            self.assign(re.split(r"\W", word.text)[0], OPEN, f"(set by {call.program})", call.line)
        return LIKELY

    def commands_in_words(self, call: Call) -> Outcome:
        """Report the commands of eval and trap, which are not followed."""
        text = " ".join(each.text for each in call.words)
        if len(text) > _MOST_OPTIONS or NAMED.search(text):
            self.unread(call.line, f"the commands of {call.program}")
        if call.program == "eval":
            self.script.files.append(f"the commands that eval gets in line {call.line}")
            words = [Word(each, each) for each in text[:_MOST_OPTIONS].split()]
            if _starts_ranks(words):
                self.script.starts.append(call.line)
            self.launch(f"the command of line {call.line}", sure=False)
        return LIKELY if call.program == "eval" else SUCCESS

    def options_of_shell(self, call: Call) -> None:
        """Follow `set -a`, and fish's `set -x NAME value`."""
        texts = [word.text for word in call.words]
        named = [word for word in call.words if word.text[:1] != "-"]
        if _NAMES["fish"] & {*texts[:2]} and len(named) > 1:
            value, raw = " ".join(each.text for each in named[1:]), " ".join(each.raw for each in named[1:])
            self.set(Assigned(name=named[0].text, value=value, raw=raw, line=call.line), exported=True)
            return
        for text, after in pairwise([*texts, ""]):
            if re.fullmatch(r"[-+][a-z]*a[a-z]*", text) or (text in ("-o", "+o") and after == "allexport"):
                self.shell.exports_all = text[0] == "-"
        if "--" in texts and any(NAMED.search(text) for text in texts):
            self.unread(call.line, "the arguments that set gives")


def content(settings: Settings) -> frozenset[tuple[str, str]]:
    """Return the pairs of name and value."""
    return frozenset((name, each.value) for name, each in settings.items())


def _starts_ranks(words: Sequence[Word]) -> bool:
    """Whether a launcher starts ranks."""
    return any(pattern("starts_ranks").fullmatch(word.text) for word in words)


def program_behind(words: Sequence[Word]) -> int:
    """Return the index of the program after wrappers such as sudo: the first word that is no option or number."""
    names = [name_of(each) for each in words]
    if names[0] not in _NAMES["wrappers"] or (names[0] == "command" and "-v" in names[1:2]):
        return 0
    after = (at for at, name in enumerate(names) if name not in _NAMES["wrappers"])
    return next((at for at in after if not re.match(r"-|\d|[A-Za-z_]\w*=", words[at].text)), len(words))


def name_of(word: Word) -> str:
    """Return the name of a program without its folder; "python" for every release of Python."""
    name = word.text.rsplit("/", 1)[-1]
    return re.sub(r"\Apython[\d.]+\Z", "python", name) if name.startswith("python") else name


def _own_script(words: Sequence[Word]) -> int:
    """Return the index of the training script after its launcher; the following words are its arguments."""
    starts = next((at for at, each in enumerate(words) if name_of(each) in _NAMES["takes_script"]), len(words))
    after = range(starts + 1, len(words))
    return next((at for at in after if re.fullmatch(r"[^-:=][^:=]*\.(?:py|sh)", words[at].text)), len(words))


def _runner(words: Sequence[Word], at: int) -> str:
    """Return the program that runs this word as a command (option -c); empty if there is none."""
    if at == 0 or not re.fullmatch(r"-\w*c", words[at - 1].text):
        return ""
    program = name_of(words[0])
    near = next((name_of(each) for each in reversed(words[max(0, at - 8) : at]) if each.text[:1] != "-"), program)
    own, shells = _NAMES["own_c"], _NAMES["shells"]
    if "python" in (program, near):
        return "python"
    if near in own or (near not in shells and (program in own or not re.search(r"\s", words[at].text))):
        return ""
    return near


def _is_launcher(words: Sequence[Word]) -> bool:
    """Whether a command starts ranks or a training program, also behind a wrapper; not `python -m pip`."""
    at = next((at for at, word in enumerate(words) if name_of(word) in _NAMES["launchers"]), None)
    if at is None:
        return False
    rest = [word.text for word in words[at + 1 : at + 3]]
    return name_of(words[at]) != "python" or not (
        _NAMES["chores"].intersection(rest[:1]) or (rest[:1] == ["-m"] and _NAMES["modules"].intersection(rest[1:]))
    )

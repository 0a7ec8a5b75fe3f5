"""What each launch of a shell script gets: the exported variables at that place, and the options of launchers.

A script is followed in the order in which bash would run it, and never run. Where a branch is decided only at run time,
both ways are followed, and a variable has from then on several values, each with its condition. OPEN replaces text that
comes from a program, an argument or the environment outside. Specification: POSIX shell (XCU 2.9 commands, 2.14 special
built-ins), bash(1); fish set; mpirun(1) -x, Hydra -genv, srun(1) and sbatch(1) --export, docker-run(1) -e, apptainer.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice
from typing import NamedTuple

from tree_sitter import Node

from planner.lint.expansion import (
    MOST_LEVELS,
    MOST_VALUE,
    USED,
    WORK_OF_WORD,
    Expander,
    Shell,
    Word,
    descend,
    join,
    parse_lines,
)
from planner.lint.script import JOB_SIZE, NAME, NAMED, OPEN, Assigned, Inner, Script, Unread, is_judged
from planner.lint.tables import forms, words

_MOST_SCRIPTS = 6  # scripts in quotes in scripts
_MOST_COMMANDS = 50_000  # that are followed, loops and calls of functions counted each time
_MOST_ROUNDS = 64  # of one loop over words
_MOST_VIEWS = 8  # values of the variables of one command, for each of which it is followed
_MOST_LAUNCHES = 200  # that get different settings
_MOST_OPTIONS = 1 << 12  # characters of a command in which what it does not hand on is looked for

_DOTTED = re.compile(r"(?:--?[\w-]+=)?\+{0,2}(?:[\w\[\]-]+\.)+((?:TORCH_)?NCCL_[A-Z0-9_]+)=")
_SETTER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_SETTING = re.compile(r"\b(?:TORCH_)?NCCL_[A-Z0-9_]+=|\b(?:FI|OFI|GLOO|RCCL|UCX)_[A-Z0-9_]+=")
_COMMANDS = re.compile(r"\bexport\s|(?:^|\s)(?:-x|-e|--env)[\s=]|\benv\s+\w+=|&&|;|\n")  # in a text: not prose
_TAKES_SETTING = re.compile(r"-x|-e|-env|--(?:[\w-]+-)?env(?:s|ironment)?(?:[-_]vars?)?")
# What arithmetic changes
_CHANGED = re.compile(r"\b([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)([A-Za-z_]\w*)")
_BRACES = re.compile(r"([\w./:-]*)\{(?:(0|[1-9]\d?)\.\.(0|[1-9]\d?)|([\w./:-]+(?:,[\w./:-]+)+))\}([\w./:-]*)")
_QUOTED = re.compile(r"""'[^']*'|"[^"]*"|\\.|\$\{[^}]*\}|\$\(.*\)""", re.DOTALL)
_NAMES = words()["shell"]
_WRAPPERS = words()["wrappers"]
_COMPARISONS = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")  # of numbers, as module operator names them
_SIMPLE = ("command", "redirected_statement", "variable_assignment", "variable_assignments", "declaration_command",
           "unset_command", "test_command")  # fmt: skip
_BLOCKS = ("program", "compound_statement", "do_group", "else_clause", "case_item")

Settings = Mapping[str, tuple[Assigned, ...]]
_Hidden = dict[str, tuple[Assigned, ...] | None]


class Launch(NamedTuple):
    """A program that is started, with the settings that it gets."""

    label: str  # "the launch of line 3"
    sure: bool  # it is a launcher; else any program, which may be one
    settings: Settings

    def key(self) -> frozenset[tuple[str, str, str, bool]]:
        """The settings, whatever their lines are."""
        return frozenset((n, a.value, a.scope, a.unset) for n, found in self.settings.items() for a in found)


class _Input(NamedTuple):
    """What a command reads."""

    text: str = ""
    line: int = 0  # of its first row


class _Call(NamedTuple):
    """A built-in with its words."""

    program: str
    words: list[Word]
    line: int
    given: _Input

    def number(self) -> int:
        """The number that follows it; 1 where none does."""
        return int(self.words[0].text) if self.words and self.words[0].text.isdecimal() else 1


def read_shell(
    text: str, *, known: Mapping[str, str] | None = None, line: int = 1, before: Sequence[Assigned] = ()
) -> Script:
    """Read what the launches of a script get.

    `known` are variables of the shell, `before` those that it exports; `line` is the number of its first line.
    """
    reader = _Reader(known or {}, before)
    reader.follow_text(text, line)
    return reader.finish()


def read_words(words: Sequence[str], line: int = 1, before: Sequence[Assigned] = ()) -> Script:
    """Read a command given as a list of words, as `command:` and `args:` of a manifest are."""
    reader = _Reader({}, before)
    reader.run([Word(word, word, line) for word in words], line)
    return reader.finish()


def read_assignment(text: str, known: Mapping[str, str], line: int) -> list[Assigned]:
    """The variables that `NAME=value` sets, whatever their names are."""
    reader = _Reader(known)
    reader.follow_text(f"export {text}", line)
    return [found[-1] for name, found in reader.shell.variables.items() if found[-1].exported]


def expand(text: str) -> str:
    """Fill in a value with `${NAME:-default}` in it (compose, envsubst)."""
    reader = _Reader({})
    reader.source, root = parse_lines(('"' + text.replace('"', '\\"') + '"').encode("utf-8", "replace"))
    name = next(descend(root, "string"), None)
    return OPEN if name is None or name.end_byte != len(reader.source) else reader.value(name)


class _Reader(Expander):
    """Follows the statements of a script, and notes what each program gets that it starts."""

    def __init__(self, known: Mapping[str, str], before: Sequence[Assigned] = ()) -> None:
        given = [Assigned(name=name, value=value, raw=value, line=0, exported=False) for name, value in known.items()]
        super().__init__(Shell({each.name: (each,) for each in (*given, *before)}))
        self._depth = 0
        self._functions: dict[str, tuple[Node, bytes, int]] = {}  # with the text and its first line
        self._called: set[str] = set()
        self._active: list[str] = []  # functions that are followed at this moment
        self._locals: list[_Hidden] = []  # what a function's own variables hide
        self._passing: list[_Hidden] = []  # what settings of one command hide
        self._returns: list[list[Shell]] = []
        self._loops: list[tuple[list[Shell], list[Shell]]] = []  # what `continue` and `break` go on with
        self._written: dict[str, str] = {}  # files that the script itself writes
        self._input = _Input()
        self._output_line = 0
        self._scope = ""
        self._view = ""  # the condition under which the command that is followed has these words
        self._status: bool | None = None  # how the last command ended; None: unknown
        self._ended = ""  # why nothing more runs here
        self._launches: list[Launch] = []
        self._seen: set[tuple[frozenset[tuple[str, str, str, bool]], bool]] = set()
        self._set = {(each.name, each.line): each for each in before}  # every setting that was exported somewhere
        self._loose: dict[str, Assigned] = {}  # set and not exported
        self._only_assigns = True
        self._runs_unknown = False  # a program whose name is not known, which may be a function
        self._started = 0  # programs, those included that get what one before them gets
        self._sets = 0  # settings in the words of commands
        self._commands = 0
        self._blocks = 0

    # -- the whole text

    def follow_text(self, text: str, line: int) -> None:
        """Follow a text in this shell."""
        if self._depth > _MOST_SCRIPTS:
            self._unread(line, "scripts in quotes nested too deeply")
            return
        self._depth += 1
        kept = self.source, self.first
        self.first = line
        self.source, root = parse_lines(text.encode("utf-8", "replace"))
        if root is None:
            self._unread(line, "the script is nested or broken beyond what is read")
        else:
            self._all(root.children)
        self.source, self.first = kept
        self._depth -= 1

    def finish(self) -> Script:
        """Give each launch's settings, each with its launch where these differ; name those that no launch gets."""
        if self._only_assigns:  # a list of variables, whether it says export or not
            for name in self.shell.variables:
                self._export(name, 0)
        if not any(each.sure for each in self._launches) and "exit" not in self._ended:
            self._launches.append(Launch("the end", sure=False, settings=self._exported()))
        self._follow_functions()
        launched = _merge_launches(self._launches)
        found = {(each.name, each.line) for each in launched}
        self.script.assigned += launched
        why = "no program that is started gets it"
        gone = [each for place, each in self._set.items() if place not in found and is_judged(each.name)]
        self.script.unreached += [Unread(name=each.name, line=each.line, why=why) for each in gone]
        exported = {name for name, _ in self._set}
        self.script.assigned += [each for name, each in self._loose.items() if name not in exported]
        return self.script

    def _follow_functions(self) -> None:
        """Follow functions that a script which sources this one may call; name the settings of uncalled ones."""
        closed = any(each.sure for each in self._launches) and not self._runs_unknown
        end = self.shell.copy()
        for name in [name for name in self._functions if name not in self._called]:
            body, self.source, self.first = self._functions[name]
            self.shell, self._ended, before = end.copy(), "", self._started
            if closed:
                self._skip(body, f"the function {name} is not called")
            elif name not in self._called:
                self._branch(self.shell, f"function {name}", [body])
                if self._started == before:
                    self._launch(f"function {name}", sure=False)

    # -- launches

    def _exported(self) -> Settings:
        """What a program gets that is started here, of the names that lint judges."""
        found: dict[str, tuple[Assigned, ...]] = {}
        for name, values in self.shell.variables.items():
            if not (is_judged(name) or name in JOB_SIZE) or not any(e.exported and not e.unset for e in values):
                continue
            given = [each if each.exported else replace(each, unset=True) for each in values]
            sure = len(given) == 1 and not (self._view and given[0].scope.startswith(self._view))
            held = [each for each in given if each.scope or not each.unset]
            found[name] = tuple(replace(each, scope="") if sure and each.scope else each for each in held)
        return found

    def _launch(self, label: str, *, sure: bool) -> None:
        self._started += 1
        if len(self._launches) >= _MOST_LAUNCHES:
            self._unread(0, "too many commands that start programs")
            return
        launch = Launch(label, sure, self._exported())
        self.spend(WORK_OF_WORD * len(launch.settings))
        if (key := (launch.key(), sure)) not in self._seen:
            self._seen.add(key)
            self._launches.append(launch)

    # -- what is said of the text

    def _unread(self, line: int, why: str) -> None:
        if not any(each.why == why and why.startswith("too") for each in self.script.unread):
            self.script.unread.append(Unread(line=line, why=why))

    def _skip(self, node: Node, why: str) -> None:
        """Name the settings of a part of the text that never runs."""
        self._skip_text(self.text(node), self.line(node), why)

    def _skip_text(self, text: str, line: int, why: str) -> None:
        for number, row in enumerate(text.splitlines() if self.spend(4 * len(text)) else ()):
            for match in _SETTING.finditer(row) if not row.lstrip().startswith("#") else ():
                self.spend(4 * WORK_OF_WORD)
                self.script.unreached.append(Unread(name=match[0][:-1], line=line and line + number, why=why))

    def _not_understood(self, node: Node) -> None:
        """Name the lines of what fits nowhere, where settings are near; statements inside are followed."""
        near = NAMED.search(self.text(node)) is not None
        plain = _NAMES["expansions"] | {"word", "number", "variable_name"}
        for child in node.children or [node]:
            if child.is_named and child != node and child.type not in plain:
                self._visit(child)
            elif near and not re.fullmatch(r"[\s<>&|;()\\]*", self.text(child)):
                self._unread(self.line(child), "no shell syntax that is known")

    # -- ways through the script

    def _all(self, nodes: Sequence[Node]) -> None:
        """Follow statements one after another; what runs in the background changes nothing here."""
        for at, node in enumerate(nodes):
            if at + 1 < len(nodes) and nodes[at + 1].type == "&":
                self._apart([node])
            else:
                self._visit(node)

    @contextmanager
    def _inside(self, shell: Shell) -> Iterator[None]:
        """Follow commands in another shell. Only its output is left when it ends."""
        outer, ended, loops, returns = self.shell, self._ended, self._loops, self._returns
        self.shell, self._loops, self._returns = shell, [], []
        yield
        outer.output = self.shell.output
        self.shell, self._ended, self._loops, self._returns = outer, ended, loops, returns

    def _apart(self, nodes: Sequence[Node]) -> None:
        """Follow statements in a subshell, whose changes end with it."""
        with self._inside(self.shell.copy()):
            self._all(nodes)

    def capture(self, nodes: Sequence[Node]) -> str:
        """What the commands of a substitution write."""
        kept, self.shell.output = self.shell.output, ""
        self._apart(nodes)
        found, self.shell.output = self.shell.output or "", kept
        return found

    def _end(self, word: str, goes_on: list[Shell] | None = None) -> None:
        """Nothing more runs here; the shell goes on elsewhere, or not at all."""
        if goes_on is not None:
            goes_on.append(self.shell)
        self._ended = f"it comes after {word}"

    def _resume(self, *shells: Shell | None) -> None:
        """Go on with what holds where each of the shells may be the one; nothing runs where there is none."""
        joined = join(*shells)
        if joined is None:
            self._ended = self._ended or "it comes after exit"
        else:
            self.shell, self._ended = joined, ""

    def _branch(self, start: Shell | None, label: str, nodes: Sequence[Node]) -> Shell | None:
        """Follow statements under a condition. Returns the shell at their end, None where it does not come there."""
        if start is None:
            for node in nodes:
                self._skip(node, "its condition never holds")
            return None
        self.shell, self._ended = start, ""
        with self._under(label):
            self._all(nodes)
        return self._now()

    @contextmanager
    def _under(self, label: str) -> Iterator[None]:
        """Let what is set now hold under one more condition."""
        outer, self._scope = self._scope, _both(self._scope, label)
        yield
        self._scope = outer

    def _holds(self, node: Node) -> tuple[Shell | None, Shell | None]:
        """Follow a statement as a condition. Returns the shells where it succeeds and where it fails."""
        if node.type == "negated_command":
            yes, no = self._holds(node.children[-1])
            return no, yes
        if node.type == "list":
            return self._chain(node)
        found: list[tuple[Shell | None, Shell | None]] = []
        for _ in self._views(node):
            self._visit(node, split=False)
            yes = None if self._ended or self._status is False else self.shell
            no = None if self._ended or self._status is True else self.shell.copy()
            found.append((yes, no))
        return join(*(yes for yes, _ in found)), join(*(no for _, no in found))

    def _chain(self, node: Node) -> tuple[Shell | None, Shell | None]:
        """`a && b || c`: the grammar nests it to the left, as deep as it is long."""
        chain: list[tuple[Node, str]] = []
        while node.type == "list":
            chain.append((node.children[-1], node.children[1].type))
            node = node.children[0]
        yes, no = self._holds(node)
        for each, sign in reversed(chain):
            start, other = (yes, no) if sign == "&&" else (no, yes)
            if start is None:
                self._skip(each, self._ended or "its condition never holds")
                continue
            self.shell, self._ended = start, ""
            with self._under(f"after {sign}" if other is not None else ""):
                ran, failed = self._holds(each)
            yes, no = (ran, join(no, failed)) if sign == "&&" else (join(yes, ran), failed)
        return yes, no

    def _views(self, node: Node) -> Iterator[None]:
        """Enter each condition under which the variables of a statement have one value, one after another."""
        variables = self.shell.variables
        names = {name for name in USED.findall(self.text(node)) if len(variables.get(name, ())) > 1}
        scopes = list(dict.fromkeys(each.scope for name in names for each in variables[name]))
        if len(scopes) < 2 or len(scopes) > _MOST_VIEWS:
            yield
            return
        start, outer, view, ends = self.shell, self._scope, self._view, list[Shell | None]()
        for scope in scopes:
            self.shell, self._ended = start.copy(), ""
            for name in names:
                found = [each for each in variables[name] if each.scope == scope]
                found = found or [each for each in variables[name] if not each.scope]
                self.shell.variables[name] = tuple(found)[-1:] or variables[name][-1:]
            self._scope = scope if scope.startswith(outer) else _both(outer, scope)
            self._view = scope and self._scope
            yield
            ends.append(None if self._ended else self.shell.copy())
        self._scope, self._view = outer, view
        self._resume(*ends)

    def _visit(self, node: Node, *, split: bool = True) -> None:
        """Follow one statement, once for each value that its variables may have."""
        if split and node.type in _SIMPLE and not self._ended and self.spend(0):
            for _ in self._views(node):
                self._visit(node, split=False)
            return
        self._blocks += 1
        self._commands += 1 + len(self.shell.variables) // 32
        if self._blocks > MOST_LEVELS or self._commands > _MOST_COMMANDS or not self.spend(0):
            self._unread(self.line(node), "too many or too deeply nested commands")
        elif self._ended:
            self._skip(node, self._ended)
        elif node.is_missing or node.type == "ERROR" or (node.type == "test_command" and node.has_error):
            self._not_understood(node)
        elif follow := _FOLLOW.get(node.type):
            self._only_assigns = self._only_assigns and node.type in ("program", *_SIMPLE[2:4])
            follow(self, node)
        elif node.type == "file_redirect":  # `$(< FILE)`
            self._write(OPEN, self.line(node))
        self._blocks -= 1

    def _block(self, node: Node) -> None:
        if node.children and node.children[0].type == "((":
            self._calculate(self.text(node), self.line(node))
        else:
            self._all(node.children)

    def _define(self, node: Node) -> None:
        name = node.child_by_field_name("name") or node
        body = node.child_by_field_name("body") or node.named_children[-1]
        self._functions[self.text(name)] = body, self.source, self.first

    def _title(self, nodes: Sequence[Node]) -> str:
        text = " ".join(self.text(node)[:400] for node in nodes[:80])
        return re.sub(r"\s+", " ", re.sub(r"[\"']", "", text)).strip()[:80]

    def _if(self, node: Node) -> None:
        """Each branch under its own condition; what a condition itself runs is followed too."""
        rest, ends, title, open_ = self._now(), list[Shell | None](), "", ""
        for clause in (node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))):
            children = [each for each in clause.children if each.type not in ("elif_clause", "else_clause")]
            then = next((at for at, each in enumerate(children) if each.type == "then"), None)
            if then is None:
                ends.append(self._branch(rest, open_ and f"else of {open_}", children))
                rest = None
                continue
            condition = [each for each in children[1:then] if each.is_named]
            title, yes, no = f"if {self._title(condition)}", None, None
            if rest is not None:
                self.shell, self._ended = rest, ""
                self._all(condition[:-1])
                yes, no = self._holds(condition[-1]) if condition and not self._ended else (None, None)
            open_ = title if no is not None and (yes is not None or open_) else open_
            ends.append(self._branch(yes, title if no is not None or open_ else "", children[then + 1 :]))
            rest = no
        self._status = None
        self._resume(*ends, rest)

    def _now(self) -> Shell | None:
        return None if self._ended else self.shell

    def _case(self, node: Node) -> None:
        of = node.child_by_field_name("value") or node
        self.assumed = False
        value = self.value(of)
        known = OPEN not in value and not self.assumed
        rest, ends, through = self._now(), list[Shell | None](), None
        sure = True  # no item before may have been taken
        for item in [each for each in node.children if each.type == "case_item"]:
            patterns = item.children_by_field_name("value")
            fits = [self._fits(value if known else None, each) for each in patterns]
            taken, never = True in fits, not {True, None}.intersection(fits)
            start = join(through, None if never or rest is None else rest if taken else rest.copy())
            label = f"case {self._title([of])} in {self._title(patterns)}"[:80]
            label = "" if sure and (taken or never) else label
            ran = self._branch(start, label, [each for each in item.children if each not in patterns])
            on = any(each.type in (";&", ";;&") for each in item.children)
            through, sure = ran.copy() if on and ran else None, sure and (taken or never)
            ends += [] if on else [ran]
            rest = None if taken and not any(each.type == ";;&" for each in item.children) else rest
        self._status = None
        self._resume(*ends, through, rest)

    def _fits(self, value: str | None, node: Node) -> bool | None:
        """Whether a pattern matches a value; None where that, or the value itself, is unknown.

        fnmatch knows neither bash's character classes and extended patterns nor a quoted `*`.
        """
        pattern = self.value(node)
        quoted = re.search(r"[\"'\\]", self.text(node)) is not None and re.search(r"[*?[]", pattern)
        if quoted or re.search(r"\[\^|\[:|[?*+@!]\(", pattern):
            return None
        if pattern == "*":
            return True
        if value is None or OPEN in pattern or len(value) + len(pattern) > _MOST_OPTIONS:
            return None
        return fnmatchcase(value, pattern)

    def _for(self, node: Node) -> None:
        """Follow the body once for each known word; else as a loop whose rounds are not known."""
        name = self.text(node.child_by_field_name("variable") or node)
        body = node.child_by_field_name("body")
        given = node.children_by_field_name("value")
        words = list(islice((word for each in given for word in self._items(each)), _MOST_ROUNDS + 1))
        if not given and not any(child.type == "in" for child in node.children):
            words = list(self.shell.arrays.get("@", (Word(OPEN, "$@"),)))
        line, unknown = self.line(node), node.children[0].type == "select" or len(words) > _MOST_ROUNDS
        if body is None or unknown or any(OPEN in word.text for word in words):
            raw = " ".join(word.raw for word in words)
            self._repeat(lambda: self.assign(name, OPEN, raw, line), None, body, line)
            return
        breaks: list[Shell] = []
        for word in words:
            if self._ended:
                break
            self.assumed = word.assumed
            self.assign(name, word.text, word.raw, line)
            self._resume(*self._round(body, breaks))
        self._resume(self._now(), *breaks)
        self._status = None

    def _items(self, node: Node) -> list[Word]:
        """The words of a `for`: `{0..7}` and `{a,b}` become several words; the files that `*` matches are unknown."""
        text, line = self.text(node), self.line(node)
        if match := _BRACES.fullmatch(text):
            first, last = int(match[2] or 0), int(match[3] or 0)
            numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
            inside = match[4].split(",") if match[4] else map(str, numbers)
            return [Word(match[1] + each + match[5], text, line) for each in inside]
        if node.type != "string" and re.search(r"[*?[]|\{.*(?:,|\.\.)", _QUOTED.sub("", text)):
            return [Word(OPEN, text, line)]
        return self.words(node)

    def _round(self, body: Node, breaks: list[Shell]) -> list[Shell | None]:
        """Follow a loop's body once: the shells that start the next round."""
        self._loops.append(([], breaks))
        self._visit(body)
        return [self._now(), *self._loops.pop()[0]]

    def _while(self, node: Node) -> None:
        body = node.child_by_field_name("body")
        condition = [child for child in node.named_children if child != body and child.type != "comment"]
        if node.type == "c_style_for_statement":
            head = self.source[node.start_byte : body.start_byte if body else node.end_byte].decode("utf-8", "replace")
            for match in _CHANGED.finditer(head):
                self.assign(match[1] or match[2], OPEN, "a count", self.line(node))
            condition = []
        self._repeat(None, (condition, node.children[0].type == "until"), body, self.line(node))

    def _repeat(
        self, begin: Callable[[], None] | None, condition: tuple[Sequence[Node], bool] | None, body: Node | None,
        line: int,
    ) -> None:  # fmt: skip
        """Follow a loop for as many rounds as its condition surely holds, and for two whose condition is unknown.

        The second of these begins with what the first may have left. After _MOST_ROUNDS rounds, what each round changes
        becomes unknown, and with it the condition.
        """
        nodes, until = condition or ((), False)
        ends, breaks, rest, no = list[Shell | None](), list[Shell](), self._now(), None
        for number in range(_MOST_ROUNDS + 3):
            if rest is None or body is None or len(ends) - ends.count(None) > 1:
                break
            before = rest.copy()
            self.shell, self._ended = rest, ""
            if begin:
                begin()
            self._all(nodes[:-1])
            yes, no = self._holds(nodes[-1]) if nodes else (self.shell, self.shell.copy())
            yes, no = (no, yes) if until else (yes, no)
            ends.append(no)
            if yes is None:
                if number == 0:
                    self._skip(body, "its condition never holds")
                rest = None
                break
            self.shell, self._ended = yes, ""
            with self._under(f"the loop of line {line}" if no is not None else ""):
                rest = join(*self._round(body, breaks))
            if rest == before:
                break
            if rest is not None and number >= _MOST_ROUNDS:
                _forget(rest, before)
        self._status, self._ended = None, ""
        self._resume(*ends, *breaks, rest if no is not None else None)
        if not any(ends) and not breaks and no is None:
            self._ended = "it comes after a loop without end"

    def _list(self, node: Node) -> None:
        yes, no = self._holds(node)
        self._status = None if yes is not None and no is not None else yes is not None
        self._resume(yes, no)

    def _pipeline(self, node: Node) -> None:
        """Each part runs in a shell of its own and reads what the part before it writes."""
        parts, output = [child for child in node.children if child.is_named], self.shell.output
        for number, part in enumerate(parts):
            self.shell.output = "" if number < len(parts) - 1 else output
            self._apart([part])
            self._input = _Input(self.shell.output or "", self._output_line) if number < len(parts) - 1 else _Input()
        self._status = None

    def _redirected(self, node: Node) -> None:
        """A statement with the file that it writes to and the document that it reads."""
        body = node.child_by_field_name("body")
        document = self._document(node)
        self._input = document if document.text else self._input
        target, follow = "", list[Node]()
        for redirect in _redirects(node):
            if redirect.type == "file_redirect" and self.text(redirect).lstrip("&0123456789")[:1] == ">":
                destination = redirect.child_by_field_name("destination")
                found = self.words(destination)[:1] if destination is not None else []
                if redirect.children[0].type != "file_descriptor" and found and not found[0].text.isdigit():
                    target = found[0].text
            elif redirect.type == "file_redirect":
                list(map(self.value, redirect.named_children))
            elif redirect.type in ("pipeline", "list"):
                follow += [child for child in redirect.children if child.is_named]
            elif redirect.type in ("&&", "||"):
                follow.append(redirect)
            elif redirect.type == "ERROR":
                self._not_understood(redirect)
        kept = self.shell.output
        self.shell.output = "" if target or follow else kept
        if body is not None:
            self._visit(body, split=False)
        if self._input.text and document.text:
            self._read("", self._input, target)
        self._input = _Input()
        written = self.shell.output
        if target or follow:
            self.shell.output = kept
        if target and written and not target.startswith("/dev/"):
            self._keep(target, written, document.line or self._output_line)
        for each in follow:
            self._input = _Input(written or "", document.line or self._output_line)
            self._apart([each])

    def _document(self, node: Node) -> _Input:
        """The here-document or here-string of a statement, known variables filled in, and its first line."""
        for redirect in node.children:
            if redirect.type == "herestring_redirect":
                return _Input(self.value(redirect.children[-1]), self.line(redirect))
            if redirect.type != "heredoc_redirect":
                continue
            body, start = (next(descend(redirect, kind), None) for kind in ("heredoc_body", "heredoc_start"))
            if body is None or start is None:
                continue
            text = self.text(body)
            if redirect.children[0].type == "<<-":
                text = re.sub(r"^\t+", "", text, flags=re.MULTILINE)
            self.spend(4 * len(text))
            return _Input(text if self.text(start)[:1] in "'\"\\" else self._filled(text), self.line(body))
        return _Input()

    def _filled(self, text: str) -> str:
        """A here-document with the known variables put in. The grammar loses expansions there after an escaped `$`."""

        def put(match: re.Match[str]) -> str:
            value = self._parameter(match[1] or match[2])
            if match[3] and (value == OPEN or (not value and match[3] == ":-")):
                value = match[4]
            return match.group() if value == OPEN or len(value) > MOST_VALUE >> 4 else value

        found = re.sub(r"(?<!\\)\$(?:([A-Za-z_]\w*|\d)|\{([A-Za-z_]\w*|\d+)(?:(:?-)([^{}$]*))?\})", put, text)
        return found.replace("\\$", "$")[: 1 << 20]

    def _test(self, node: Node) -> None:
        inside = [child for child in node.named_children if child.type != "comment"]
        self._status = self._decided(inside[0], glob=node.children[0].type == "[[") if len(inside) == 1 else None

    def _decided(self, node: Node, *, glob: bool) -> bool | None:
        """How a test ends that is the same in every run; None for all others."""
        if node.type == "parenthesized_expression":
            return self._decided(node.named_children[0], glob=glob) if node.named_children else None
        if node.type == "unary_expression" and len(node.children) == 2:
            sign = self.text(node.children[0])
            if sign == "!":
                found = self._decided(node.children[1], glob=glob)
                return None if found is None else not found
            value = self._known(node.children[1])
            return None if value is None or sign not in ("-n", "-z") else (value != "") == (sign == "-n")
        if node.type != "binary_expression" or len(node.children) != 3:
            value = self._known(node)
            return None if value is None else value != ""
        left, middle, right = node.children
        sign = {"-a": "&&", "-o": "||", "=": "=="}.get(self.text(middle), self.text(middle))
        if sign in ("&&", "||"):
            both = [self._decided(each, glob=glob) for each in (left, right)]
            return (sign == "||") if (sign == "||") in both else None if None in both else sign == "&&"
        one, other = self._known(left), self._known(right)
        if one is None or other is None:
            return None
        if sign in ("==", "!="):
            same = self._fits(one, right) if glob and right.type not in ("string", "raw_string") else one == other
            return None if same is None else same == (sign == "==")
        numbers = sign in _COMPARISONS and re.fullmatch(r"-?\d+ -?\d+", f"{one} {other}")
        return bool(getattr(operator, sign[1:])(int(one), int(other))) if numbers else None

    def _known(self, node: Node) -> str | None:
        """The value of a word that is the same in every run. The grammar takes `1 -lt 2 && a` for one side of a `=`."""
        if node.type.endswith("_expression"):
            return None
        self.assumed = False
        value = self.value(node)
        return None if OPEN in value or self.assumed else value

    # -- variables

    def _assignments(self, node: Node) -> None:
        for each in [node] if node.type == "variable_assignment" else node.named_children:
            self._assign(each)
        self._status = None if "$(" in self.text(node) or "`" in self.text(node) else True

    def _assign(self, node: Node, *, exported: bool | None = None, before: Shell | None = None) -> str:
        """`NAME=value`, `NAME+=value`, `NAME=(an array)`, with the variables of `before`; returns the name."""
        name_node, value_node = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name_node is None or name_node.type != "variable_name":
            list(map(self.value, node.named_children))
            self.shell.arrays.pop(self.text(name_node or node).partition("[")[0], None)  # one of its items is set
            return ""
        name, adds = self.text(name_node), node.children[1].type == "+="
        if value_node is not None and value_node.type == "array":
            items = tuple(word for each in value_node.named_children for word in self.words(each))
            kept = self.shell.arrays.get(name, ()) if adds else ()
            self.shell.arrays[name] = (*kept, *items)[: MOST_VALUE >> 4]
            if any(re.match(r"\[[^]]*\]\+?=", self.text(each)) for each in value_node.named_children):
                del self.shell.arrays[name]  # its items name their own index
            self.shell.variables.pop(name, None)
            return name
        self.assumed, used, here = False, name in self.script.used, self.shell
        self.shell = before or here
        value = self.value(value_node) if value_node else ""
        self.shell = here
        if not used:
            self.script.used.discard(name)  # to hand on one's own value is no use of it
        value = ((self._parameter(name) + value) if adds else value)[:MOST_VALUE]
        self.assign(name, value, self.raw(value_node) if value_node else "", self.line(node), exported=exported)
        return name

    def assign(self, name: str, value: str, raw: str, line: int, *, exported: bool | None = None) -> None:
        """Give a variable a value. `exported` None: as it was before, or as set -a says."""
        if not NAME.match(name):
            return
        for outer in ("SINGULARITYENV_", "APPTAINERENV_"):  # apptainer hands these in without the prefix
            name = name.removeprefix(outer)
        self.spend(WORK_OF_WORD)
        self.shell.arrays.pop(name, None)
        before = self.shell.variables.get(name, ())
        marks = {each.exported: each.scope for each in before} if exported is None else {exported: self._scope}
        if self.shell.exports_all or not marks:
            marks = {self.shell.exports_all: self._scope}
        assumed = self.assumed
        self._put(name, [
            Assigned(name=name, value=value, raw=raw, line=line, exported=mark, assumed=assumed,
                     scope=scope if len(marks) > 1 else self._scope)
            for mark, scope in marks.items()
        ])  # fmt: skip

    def _put(self, name: str, values: Iterable[Assigned]) -> None:
        """Note what a variable may be from here on."""
        self.shell.variables[name] = tuple(values)
        for each in self.shell.variables[name]:
            if each.exported and not each.unset:
                self._set.setdefault((name, each.line), each)
            elif not each.unset:
                self._loose[name] = each

    def _export(self, name: str, line: int, *, ends: bool = False) -> None:
        """`export NAME`, `export -n NAME`: programs get the variable from here on, or no longer."""
        if not NAME.match(name):
            return
        before = self.shell.variables.get(name, ())
        if not before and ends:
            return
        outside = Assigned(name=name, value=OPEN, raw=f"${name}", line=line)  # what the environment has
        self._put(name, [
            replace(each if each.name else outside, exported=not ends, scope=each.scope if before[1:] else self._scope)
            for each in before or (outside,)
        ])  # fmt: skip

    def _declare(self, node: Node) -> None:
        """export, declare, typeset, local, readonly, unset: of names and of assignments."""
        self._declared(self.text(node.children[0]), node.children[1:], self.line(node))

    def _declared(self, keyword: str, nodes: Sequence[Node | Word], line: int) -> None:
        words: list[Word | Node] = []
        for node in nodes:
            if isinstance(node, Word) or node.type == "variable_assignment":
                words.append(node)
            elif node.is_named and node.type != "comment":
                words += self.words(node)
        options = " ".join(each.text for each in words if isinstance(each, Word) and each.text[:1] in ("-", "+"))
        self._status = True
        if keyword == "local" and not self._active:
            return
        if keyword == "unset":
            self._unset([each for each in words if isinstance(each, Word)], line, functions="-f" in options)
            return
        ends = re.search(r"-\w*n" if keyword == "export" else r"\+\w*x", options) is not None
        exports = not ends and (keyword == "export" or re.search(r"-\w*x", options) is not None)
        exported = True if exports else False if ends else None
        own = keyword not in ("export", "readonly") and "g" not in options and bool(self._active)
        before = self.shell.copy() if own or len(words) > 1 else None  # bash expands all words, then assigns
        for each in words if "-f" not in options else ():
            name = self.text(each.children[0]) if isinstance(each, Node) else each.text.partition("=")[0]
            for kept in self._passing if exports and not own else ():  # `N=1 export N` sets it for all that follows
                kept.pop(name, None)
            if isinstance(each, Node):
                self._hide(name, own)
                self._assign(each, exported=exported, before=before)
                continue
            equals, value = each.text.partition("=")[1:]
            if OPEN in name and each.text[:1] != "-":
                self._unread(line, f"the names of the variables that {keyword} gets are unknown")
            elif NAME.match(name):
                self._hide(name, own)
                self.assumed = each.assumed
                if equals:
                    self.assign(name, value, value, line, exported=exported)
                elif exported is not None:
                    self._export(name, line, ends=ends)

    def _hide(self, name: str, own: bool) -> None:
        """Keep what a function's own variable hides until the function ends. It is exported if the hidden one was."""
        if own and name not in self._locals[-1]:
            before = self._locals[-1][name] = self.shell.variables.get(name)
            self.shell.arrays.pop(name, None)
            if before:
                self.shell.variables[name] = (replace(before[-1], unset=True, value=""),)

    def _unset(self, words: Iterable[Word], line: int, *, functions: bool) -> None:
        for word in words:
            if functions:
                self._functions.pop(word.text, None)
            elif OPEN in word.text:  # it may be any
                self._unread(line, "the names of the variables that unset gets are unknown")
                why = f"unless line {line} unsets it"
                for name, values in self.shell.variables.items():
                    kept = [
                        each if "unless line" in each.scope else replace(each, scope=_both(each.scope, why))
                        for each in values
                        if not each.unset
                    ]
                    gone = replace(values[-1], value="", exported=False, unset=True, scope="")
                    self.shell.variables[name] = (*kept, gone) if is_judged(name) else values
            elif word.text[:1] != "-":
                gone = Assigned(
                    name=word.text, value="", raw="", line=line, scope=self._scope, exported=False, unset=True
                )
                self.shell.variables[word.text] = (gone,)
                self.shell.arrays.pop(word.text, None)

    def _calculate(self, text: str, line: int) -> None:
        """`((...))` and let: what it changes is known where it is a plain assignment of a number."""
        found = self.arithmetic(text)
        self._status = None if found is None or self.assumed else found != 0
        changed = list(_CHANGED.finditer(text))
        plain = re.fullmatch(r"\s*(?:\(\()?\s*\w+\s*=([^=].*?)(?:\)\))?\s*", text) if len(changed) == 1 else None
        value = self.arithmetic(plain[1]) if plain else None
        for match in changed:
            self.assign(match[1] or match[2], OPEN if value is None else str(value), text, line)
            self._status = None

    # -- commands

    def _command(self, node: Node) -> None:
        line = self.line(node)
        before = [child for child in node.children if child.type == "variable_assignment"]
        words: list[Word] = []
        for child in node.children:
            if child.type == "command_name":
                words += self.words(child.children[0]) if child.children else []
            elif child.is_named and not child.type.endswith(("_redirect", "assignment")) and child.type != "comment":
                words += self.words(child)
            if child.has_error and child.type not in _NAMES["expansions"]:
                for error in descend(child, "ERROR"):
                    self._not_understood(error)
            if child.type == "herestring_redirect":
                self._input = _Input(self.value(child.children[-1]), line)
        kept: _Hidden = {}
        for each in before:
            if words:
                kept.setdefault(self.text(each.children[0]), self.shell.variables.get(self.text(each.children[0])))
            self._assign(each, exported=True if words else None)
        self._passing.append(kept)
        if words:
            self.run(words, line)
        self._restore(self._passing.pop())

    def _restore(self, hidden: _Hidden) -> None:
        """Bring back what variables were that only a command or a function had."""
        for name, values in hidden.items():
            self.shell.variables.pop(name, None)
            self.shell.arrays.pop(name, None)
            if values is not None:
                self.shell.variables[name] = values

    def run(self, words: list[Word], line: int) -> None:
        """Run one simple command: a built-in, a function, or a program that gets what is exported here."""
        given, self._input, self._status = self._input, _Input(), None
        self.spend(WORK_OF_WORD * len(words))
        self._only_assigns = False
        shell, ends = self.shell, False
        at, first = 0, ""
        if _name(words[0]) in _NAMES["wrappers"]:
            self.shell = shell.copy()
            self._remove(words)
            at, ends = self._after_wrappers(words, line)
            first = _name(words[at - 1])
        program = _name(words[at]) if at < len(words) else ""
        written = program in ("cat", "tee", "echo", "printf")  # programs as well
        if builtin := _BUILTINS.get(program) if written or first in _NAMES["of_shell"] else None:
            self.shell = shell
            builtin(self, _Call(program, words[at + 1 :], line, given))
        elif program in self._functions and program not in self._active and not first:
            self._call(program, words[at + 1 :])
        elif program:
            self.shell = shell.copy() if self.shell is shell else self.shell
            self._program(words[at:], program, line, given, shell)
            shell.output = self.shell.output
            self.shell = shell
        if ends and program and not self._ended:
            self._end("exec")

    def _program(self, words: list[Word], program: str, line: int, given: _Input, outer: Shell) -> None:
        """A program gets the exported variables, what its words set, and what they do not remove."""
        before = self._started
        self._remove(words)
        sets = self._options(words, line, outer)
        self._read(program, given, "")
        if program not in ("cat", "tee"):
            self._write(OPEN, line)
        self._runs_unknown = self._runs_unknown or OPEN in words[0].text
        idle = program in _NAMES["utilities"] and not _starts(words)
        if self._started == before and (sets or not idle):
            self._launch(f"the launch of line {line}" if line else "a launch", sure=not idle and _is_launcher(words))

    def _remove(self, words: Sequence[Word]) -> None:
        """Remove variables that a command does not pass on: env(1) -i and -u, sudo(8) without -E, srun(1) --export."""
        command = " ".join(word.text for word in words)[:_MOST_OPTIONS] + " "
        names = set(re.findall(forms()["removed"]["names"], command))
        everything = re.match(forms()["removed"]["all"], command) is not None
        for name in list(self.shell.variables):
            if name in names or (everything and name not in command):
                del self.shell.variables[name]

    def _after_wrappers(self, words: Sequence[Word], line: int) -> tuple[int, bool]:
        """Find the program behind sudo, timeout and the like: its place, and whether the script ends with it (exec)."""
        at, ends = 0, False
        while at < len(words) and (first := _name(words[at])) in _NAMES["wrappers"]:
            ends, at = ends or first == "exec", at + 1
            options = _WRAPPERS.get(first, frozenset())
            while at < len(words) and first != "command":  # `command -v` starts nothing
                text = words[at].text
                if first == "sudo" and _SETTER.match(text):
                    self._setting(words[at], line, self.shell)
                elif text[:1] != "-":
                    break
                at += 2 if text in options else 1
            at += first in _NAMES["takes_operand"]
        return at, ends

    def _call(self, name: str, rest: Sequence[Word]) -> None:
        """Call a function: with its own arguments, and with variables of its own that end with it."""
        kept = self._loops, self.source, self.first, self.shell.arrays.get("@")
        body, self.source, self.first = self._functions[name]
        self._loops = []
        self.shell.arrays["@"] = tuple(rest)
        self._called.add(name)
        self._active.append(name)  # a function that calls itself ends here
        self._locals.append({})
        self._returns.append([])
        self._visit(body)
        returned = self._returns.pop()
        self._status = None if len(returned) + (not self._ended) > 1 else self._status
        self._resume(self._now(), *returned)
        self._restore(self._locals.pop())
        self._active.pop()
        self._loops, self.source, self.first, given = kept
        self.shell.arrays.pop("@", None)
        self.shell.arrays |= {} if given is None else {"@": given}

    def _write(self, text: str, line: int) -> None:
        """Note what a command writes, where something reads it."""
        if self.shell.output is not None and self.spend(len(text)):
            self._output_line = self._output_line if self.shell.output else line
            self.shell.output = (self.shell.output + text)[:MOST_VALUE]

    def _keep(self, target: str, text: str, line: int) -> None:
        """Note what a file is given, and read it as a text of its own."""
        self._written[_path(target)] = (self._written.get(_path(target), "") + text.rstrip("\n") + "\n")[-MOST_VALUE:]
        self.script.inner.append(Inner(text=text, target=target.replace(OPEN, "..."), line=line))

    def _read(self, program: str, given: _Input, target: str) -> None:
        """Text that a program reads from its standard input: a shell, Python, kubectl, ssh."""
        if not given.text.strip(OPEN + "\n") or program in ("cat", "tee"):
            return
        if program in _NAMES["idle"]:
            self._skip_text(given.text, given.line, "no program reads its here-document")
        elif program in _NAMES["shells"]:
            self._nested(given.text, given.line)
        else:
            name = target or ("manifest.yaml" if program in ("kubectl", "oc") else program)
            self.script.inner.append(Inner(text=given.text, target=name, line=given.line))

    def _options(self, words: list[Word], line: int, outer: Shell) -> bool:
        """Take what the words of a program set, and say whether they do: options of launchers, `env A=1`, scripts."""
        before, at = self._sets, 0
        settings = [word.text for word in words[:3]] == ["kubectl", "set", "env"]
        starts = next((at for at, each in enumerate(words) if _name(each) in _NAMES["takes_script"]), len(words))
        after = range(starts + 1, len(words))
        end = next((at for at in after if re.fullmatch(r"[^-:=][^:=]*\.(?:py|sh)", words[at].text)), len(words))
        for number, each in enumerate(words):
            run = number == 0 or _name(words[number - 1]) in _NAMES["shells"]
            if _path(each.text) in self._written and (run or (each.text.endswith(".sh") and _is_launcher(words))):
                self._nested(self._written[_path(each.text)], 0, words[number + 1 :])
                break
        while at < len(words):
            word = words[at]
            if at > end and not _DOTTED.match(word.text):
                self._skip_text(word.text, line, f"it is an argument of {words[end].text}")
                at += 1
                continue
            taken = self._launcher_option(words, at, line, outer)
            if taken is None:
                self._plain_word(words, at, line, settings=settings)
                unset = at > 0 and words[at - 1].text in ("-u", "-C")
                more = unset or re.match(r"-|[A-Za-z_]\w*=|(?:kubectl|set)\Z", word.text)
                settings = _name(word) == "env" or (settings and bool(more))
            at += 1 + (taken or 0)
        return self._sets > before

    def _plain_word(self, words: list[Word], at: int, line: int, *, settings: bool) -> None:
        word, text = words[at], words[at].text
        program, before = _name(words[0]), words[at - 1].text if at else ""
        runs = _runner(words, at)
        if runs == "python":
            self.script.inner.append(Inner(text=text, target="python", line=word.line or line))
        elif runs or (settings and before in ("-S", "--split-string")):
            surely = program not in _NAMES["own_c"]
            self._nested(text if runs else f"env {text}", word.line or line, words[at + 2 :], surely=surely)
        elif dotted := _DOTTED.match(text):  # Hydra's and Helm's way to a key: env_vars.NAME=VALUE
            self._pair(dotted[1], text[dotted.end() :].strip("\"'"), word.raw, line)
        elif _SETTER.match(text) and (settings or (before[:1] == "-" and _SETTING.match(text))):
            self._setting(word, line, self.shell)
        elif at and program in _NAMES["remote"] and re.search(r"\s", text):
            self._nested(text, word.line or line)
        elif at:
            self._text_in_word(text, word.line or line)

    def _launcher_option(self, words: list[Word], at: int, line: int, outer: Shell) -> int | None:
        """Take a launcher's option that sets variables: how many words after it belong to it, None if it is none."""
        word, after = words[at], words[at + 1] if at + 1 < len(words) else Word("", "")
        text = word.text
        option, equals, tail = text.partition("=")
        rest = Word(tail if equals else after.text, word.raw.partition("=")[2] if equals else after.raw, line)
        if text in _NAMES["takes_pair"] or (text == "-env" and "=" not in after.text and at + 2 < len(words)):
            if at + 2 < len(words):
                self._pair(after.text, words[at + 2].text, words[at + 2].raw, line)
            return 2
        if _TAKES_SETTING.fullmatch(option):
            self._setting(rest, line, outer)
        elif text.startswith(("-xNCCL_", "-eNCCL_")):
            self._setting(Word(text[2:], word.raw[2:], line), line, outer)
            return 0
        elif option in _NAMES["takes_list"]:
            for part in rest.text.split(","):  # a comma ends a value: a list is cut
                name, sign, value = part.partition("=")
                if sign:
                    self._pair(name, value, value, line)
        elif option in _NAMES["takes_file"]:
            self.script.files.append(rest.text)
        else:
            return None
        return 0 if equals else 1

    def _setting(self, word: Word, line: int, outer: Shell) -> None:
        """NAME=VALUE, several with commas between them (apptainer), or NAME alone, which hands on what `outer` has."""
        for part in re.split(r",(?=[A-Z_][A-Z0-9_]*=)", word.text):
            name, equals, tail = part.partition("=")
            if equals:
                self._pair(name, tail, word.raw.partition("=")[2] if OPEN in tail else tail, line)
            elif any(each.exported for each in outer.variables.get(name, ())):
                self.script.used.add(name)
                self.shell.variables[name] = tuple(e for e in outer.variables[name] if e.exported or e.unset)
                self._export(name, line)

    def _pair(self, name: str, value: str, raw: str, line: int) -> None:
        """A setting for the program that is started now."""
        self._sets += is_judged(name)
        self.assumed = False
        self.assign(name, value, raw, line, exported=True)
        if _SETTING.search(value) and not name.startswith("NCCL_"):
            self._text_in_word(value, line)

    def _text_in_word(self, text: str, line: int) -> None:
        """A script, JSON or options inside one word."""
        if not NAMED.search(text):
            return
        inside = text.split("=", 1)[1] if re.match(r"--?[\w.-]+=", text) else text
        if inside.lstrip().startswith(("{", "[")) and '"' in inside:
            self.script.inner.append(Inner(text=inside, target="option.json", line=line))
        elif "os.environ" in inside:
            self.script.inner.append(Inner(text=inside, target="python", line=line))
        elif _COMMANDS.search(inside):
            self._nested(inside, line, surely=False)

    def _nested(self, text: str, line: int, rest: Sequence[Word] | None = None, *, surely: bool = True) -> None:
        """A script that another shell runs: `bash -c`, ssh, a here-document; not `surely` where it may be prose.

        `rest` are its arguments, None where they are not known.
        """
        started, unread, variables = self._started, len(self.script.unread), self.shell.variables
        given = {name: found for name, found in variables.items() if any(each.exported for each in found)}
        arguments = {} if rest is None else {"@": tuple(rest)}
        with self._inside(Shell(given, arguments, output=self.shell.output)):
            self.follow_text(text, line)
            if not surely:
                del self.script.unread[unread:]
                if self._started == started:
                    self._launch(f"the command of line {line}", sure=False)

    # -- built-ins

    def _echo(self, call: _Call) -> None:
        text = " ".join(each.text for each in call.words if each.raw not in ("-e", "-n", "-E")).replace("\\n", "\n")
        self._status = True
        for row in text.splitlines() if self.shell.output is None else ():
            if dotted := _DOTTED.match(row):  # for a launcher that reads the script's output
                shell, self.shell = self.shell, self.shell.copy()
                self._pair(dotted[1], row[dotted.end() :], row[dotted.end() :], call.line)
                self._launch(f"the command of line {call.line}", sure=False)
                self.shell = shell
        self._write(text + ("" if call.words and call.words[0].raw == "-n" else "\n"), call.line)

    def _printf(self, call: _Call) -> None:
        name = call.words[1].text if len(call.words) > 2 and call.words[0].text == "-v" else ""
        texts = [word.text for word in call.words[2 if name else 0 :]] or [""]
        pattern, rest = texts[0].replace("\\n", "\n"), texts[1:]
        count, text = pattern.count("%s"), ""
        for at in range(0, max(len(rest), 1), count or len(rest) or 1):
            filled = iter([*rest[at : at + count], *[""] * count])
            text += re.sub("%s", lambda _, filled=filled: next(filled), pattern)  # type: ignore[misc]
            if not self.spend(len(pattern)) or len(text) > MOST_VALUE:
                break
        text = OPEN if "%" in pattern.replace("%s", "") else text
        self._status = True
        if name:
            self.assign(name, text, text, call.line)
        else:
            self._write(text, call.line)

    def _cat(self, call: _Call) -> None:
        names = [word.text for word in call.words if word.text[:1] != "-"]
        text = "".join(self._written.get(_path(name), OPEN) for name in names[:_MOST_ROUNDS])
        text = text if names else call.given.text or OPEN
        self._write(text, call.line if names else call.given.line)

    def _tee(self, call: _Call) -> None:
        for target in [word.text for word in call.words if word.text[:1] != "-"][:1] if call.given.text else ():
            self._keep(target, call.given.text, call.given.line or call.line)
        self._write(call.given.text or OPEN, call.line)

    def _return(self, call: _Call) -> None:
        if call.words:
            self._status = {"0": True}.get(call.words[0].text, False if call.words[0].text.isdecimal() else None)
        if self._returns:
            self._end("return", self._returns[-1])

    def _break(self, call: _Call) -> None:
        """break and continue: which loop goes on, and how."""
        if self._loops:
            place = self._loops[-min(max(call.number(), 1), len(self._loops))]
            self._end(call.program, place[call.program == "break"])

    def _eval(self, call: _Call) -> None:
        text = " ".join(word.text for word in call.words)
        if text.strip(OPEN + " "):
            self.follow_text(text, call.line)
        else:
            self.script.files.append(f"the commands that eval gets in line {call.line}")

    def _source(self, call: _Call) -> None:
        path = _path(call.words[0].text) if call.words else ""
        if path in self._written:
            self.follow_text(self._written[path], 0)
        elif path and path != "/dev/null":
            self.script.files.append(f"{call.words[0].raw} (line {call.line})")

    def _let(self, call: _Call) -> None:
        for word in call.words:
            self._calculate(word.text, call.line)

    def _shift(self, call: _Call) -> None:
        if "@" in self.shell.arrays:
            self.shell.arrays["@"] = self.shell.arrays["@"][call.number() :]

    def _gets(self, call: _Call) -> None:
        self.assumed = False
        for word in call.words:
            self.assign(word.text, OPEN, f"what {call.program} gets", call.line)

    def _options_of_shell(self, call: _Call) -> None:
        """`set -a`, `set -- A B`, fish's `set -x NAME value`."""
        texts = [word.text for word in call.words]
        named = [word for word in call.words if word.text[:1] != "-"]
        if _NAMES["fish"] & {*texts[:2]} and len(named) > 1:
            value, raw = " ".join(each.text for each in named[1:]), " ".join(each.raw for each in named[1:])
            self.assign(named[0].text, value, raw, call.line, exported=True)
            return
        for number, text in enumerate(texts):
            everything = text in ("-o", "+o") and texts[number + 1 : number + 2] == ["allexport"]
            if everything or re.fullmatch(r"[-+][a-z]*a[a-z]*", text):
                self.shell.exports_all = text[0] == "-"
            if text == "--":
                self.shell.arrays["@"] = tuple(call.words[number + 1 :])
                break

    def _truth(self, call: _Call) -> None:
        self._read(":", call.given, "")
        self._status = call.program != "false"


def _merge_launches(launches: Sequence[Launch]) -> list[Assigned]:
    """The settings of all launches; those of which the launches get different ones, each with its launch.

    A name that no launcher gets is kept where a program gets it that may be one. A launch whose settings
    are a part of another's is left out.
    """
    sure = [each for each in launches if each.sure]
    named = {name for each in sure for name in each.settings}
    others = [
        each._replace(settings={name: found for name, found in each.settings.items() if name not in named})
        for each in launches
        if not each.sure
    ]
    different = {each.key(): each for each in reversed([*sure, *others])}
    keys = [key for key in different if not any(key < other for other in different)]
    groups = [different[key] for key in reversed(keys)]
    ways = {
        name: {frozenset((v.value, v.scope, v.unset) for v in each.settings.get(name, ())) for each in groups}
        for name in {name for each in groups for name in each.settings}
    }
    found, labels = list[Assigned](), Counter[str]()
    for number, each in enumerate(groups):
        labels[each.label] += 1
        label = each.label + (f", time {labels[each.label]}" if labels[each.label] > 1 else "")
        for name, values in each.settings.items():
            if len(ways[name]) == 1:
                found += values if number == 0 else ()
            else:
                found += [replace(v, scope=_both(label, v.scope)) for v in values]
    return found


def _forget(shell: Shell, before: Shell) -> None:
    """Mark every variable and array that changed since `before` as unknown."""
    for name, values in shell.variables.items():
        if values != before.variables.get(name):
            shell.variables[name] = tuple(replace(each, value=OPEN) for each in values)
    for name in [name for name, items in shell.arrays.items() if items != before.arrays.get(name)]:
        del shell.arrays[name]


def _both(*conditions: str) -> str:
    return "; ".join(filter(None, conditions))


def _name(word: Word) -> str:
    """A program's name, without its folder, and Python's without its release."""
    name = word.text.rsplit("/", 1)[-1]
    return re.sub(r"\Apython[\d.]+\Z", "python", name) if name.startswith("python") else name


def _path(text: str) -> str:
    return text.removeprefix("./")


def _runner(words: Sequence[Word], at: int) -> str:
    """The program that takes a word as a command after its option -c; empty where none does."""
    if at == 0 or not re.fullmatch(r"-\w*c", words[at - 1].text):
        return ""
    program = _name(words[0])
    near = next((_name(each) for each in reversed(words[max(0, at - 8) : at]) if each.text[:1] != "-"), program)
    own, shells = _NAMES["own_c"], _NAMES["shells"]
    if "python" in (program, near):
        return "python"
    if near in own or (near not in shells and (program in own or not re.search(r"\s", words[at].text))):
        return ""
    return near


def _starts(words: Sequence[Word]) -> bool:
    """Whether a utility starts the program that its words name: `conda run`, `docker exec`, `find -exec`."""
    return _name(words[0]) in _NAMES["runs"] and any(word.text in _NAMES["starts"] for word in words[1:])


def _is_launcher(words: Sequence[Word]) -> bool:
    """Whether a command starts ranks or a training program, itself or behind another one; not Python's own chores."""
    at = next((at for at, word in enumerate(words) if _name(word) in _NAMES["launchers"]), None)
    if at is None:
        return False
    rest = [word.text for word in words[at + 1 : at + 3]]
    return _name(words[at]) != "python" or not (
        _NAMES["chores"].intersection(rest[:1]) or (rest[:1] == ["-m"] and _NAMES["modules"].intersection(rest[1:]))
    )


def _redirects(node: Node) -> Iterator[Node]:
    """Redirections of a statement, and what the grammar puts inside a here-document's line after its start."""
    for child in node.children:
        yield child
        if child.type == "heredoc_redirect":
            yield from (
                e for e in child.children if e.type in ("file_redirect", "pipeline", "list", "&&", "||", "ERROR")
            )


def directives(text: str) -> Iterator[tuple[int, str]]:
    """`#SBATCH --export=...` and the same of other schedulers: the line's number and its words."""
    for number, row in enumerate(text.splitlines(), start=1):
        match = re.match(r"\s*#(?:SBATCH|PBS|BSUB|FLUX:|\$)\s+(.*)", row)
        if match and "=" in match[1]:
            yield number, match[1].split(" #")[0]


_FOLLOW: Mapping[str, Callable[[_Reader, Node], None]] = {
    **dict.fromkeys(_BLOCKS, _Reader._block),
    "command": _Reader._command, "redirected_statement": _Reader._redirected, "list": _Reader._list,
    "negated_command": _Reader._list, "pipeline": _Reader._pipeline, "if_statement": _Reader._if,
    "case_statement": _Reader._case, "for_statement": _Reader._for, "while_statement": _Reader._while,
    "c_style_for_statement": _Reader._while, "test_command": _Reader._test, "function_definition": _Reader._define,
    "variable_assignment": _Reader._assignments, "variable_assignments": _Reader._assignments,
    "declaration_command": _Reader._declare, "unset_command": _Reader._declare,
    "subshell": lambda reader, node: reader._apart(node.children),
}  # fmt: skip


_BUILTINS: Mapping[str, Callable[[_Reader, _Call], None]] = {
    "echo": _Reader._echo, "printf": _Reader._printf, "cat": _Reader._cat, "tee": _Reader._tee,
    "return": _Reader._return, "eval": _Reader._eval, ".": _Reader._source, "source": _Reader._source,
    "let": _Reader._let, "shift": _Reader._shift, "set": _Reader._options_of_shell, "break": _Reader._break,
    "continue": _Reader._break, "exit": lambda reader, call: reader._end(call.program),
    "setenv": lambda reader, call: reader._unread(call.line, "setenv is of the C shell, whose scripts are not read"),
    **dict.fromkeys((":", "true", "false"), _Reader._truth),
    **dict.fromkeys(("read", "getopts", "mapfile", "readarray"), _Reader._gets),
    **dict.fromkeys(_NAMES["declares"], lambda reader, call: reader._declared(call.program, call.words, call.line)),
}  # fmt: skip

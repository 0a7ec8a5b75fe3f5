"""Follow a shell script and return the environment of each program start: exported variables and launcher options.

The script is never run; its statements are followed in the order in which bash would execute them, first on the likely
way. Then the script is followed again for each condition that only a run decides, with the other outcome of it. OPEN
replaces text that comes from a program, an argument or the outer environment.
Specification: POSIX shell (XCU 2.9 commands, 2.14 special built-ins), bash(1); fish set; mpirun(1) -x, Hydra -genv,
srun(1) and sbatch(1) --export, docker-run(1) -e. docs/decisions/0039 lists what is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tree_sitter import Node

from planner.lint.expansion import MOST_LEVELS, WORK_OF_WORD, Expander, Function, Shell, parse, walk
from planner.lint.programs import (
    MOST_OPTIONS,
    is_idle,
    is_launcher,
    name_of,
    parts_of,
    program_behind,
    removed_names,
    starts_ranks,
)
from planner.lint.script import (
    JOB_SIZE,
    NAME,
    NAMED,
    OPEN,
    Assigned,
    Inner,
    Script,
    Settings,
    Unread,
    Word,
    is_judged,
    pattern,
    words,
)

_MOST_COMMANDS = 20_000  # limit of followed commands; each loop iteration, way and function call counts
_MOST_ROUNDS = 64  # iterations of one loop
_TEXT = "a text"  # name of the text that a command substitution returns
_MOST_LAUNCHES = 1000  # launches or ways with different settings
_END = "the end"  # label of the environment at the end of a script

# A variable that an arithmetic expression changes
_CHANGED = re.compile(r"\b([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)([A-Za-z_]\w*)")
_DIRECTIVE = re.compile(r"\s*#(?:SBATCH|PBS|BSUB|FLUX:|\$)\s+(.*)")  # of a scheduler
_USED = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")
_LITERAL = re.compile(r"[\w./:-]+")
_IN_DOCUMENT = re.compile(r"(?<!\\)\$(?:\w+|\{[^{}\n]*\})")
_ENDS_LINE = re.compile(rb"(?:[ \t]|\\\n)*[#\n]")
_LEAVES = re.compile(r"\b(?:exit|return)\b")  # such a branch is unlikely
_IN_CONTAINER = re.compile(r"^(?:SINGULARITY|APPTAINER)ENV_")  # Apptainer's container gets the name without it
_NAMES = words()["shell"]
# Node types of a list of variables, and of a script that only defines functions
_LIST = {"program", "variable_assignment", "variable_assignments"}
_LIBRARY = {"function_definition", "declaration_command", *_LIST}
_PARTS = ("pipeline", "list", "&&", "||")  # nodes that the grammar puts inside a here-document redirection


class Outcome(NamedTuple):
    """Whether a command succeeds."""

    success: bool = True
    known: bool = True  # False: only a run decides, and `success` is the likely outcome


SUCCESS = Outcome()
LIKELY, UNLIKELY = Outcome(known=False), Outcome(success=False, known=False)


class _Way(NamedTuple):
    """One way through the script: it differs from the likely way in the outcome of some conditions."""

    choices: Mapping[str, bool] = {}  # condition -> outcome
    labels: tuple[str, ...] = ()
    function: str = ""  # of a library, which other scripts call


class _Launch(NamedTuple):
    """A program start, with its settings on one way through the script."""

    label: str  # "the launch of line 3"
    sure: bool  # the program is a launcher; False: it may be one
    way: tuple[str, ...]  # unlikely outcomes that lead to it
    settings: Settings


class _Call(NamedTuple):
    """A call of a built-in: its arguments, and the text on its standard input."""

    program: str
    words: list[Word]
    line: int
    given: Inner | None

    @property
    def texts(self) -> list[str]:
        """The arguments after expansion."""
        return [each.text for each in self.words]


def read_shell(text: str, *, line: int = 1, before: Iterable[Assigned] = ()) -> Script:
    """Return the environment of each program start in a script.

    `before` are variables that are set before it; `line` is the number of the first line, or 0.
    """
    known, files = list(before), list[str]()
    for number, row in enumerate(text.splitlines()):
        if (match := _DIRECTIVE.match(row)) and "=" in match[1]:  # such as `#SBATCH --export=...`
            options = read_shell("sbatch " + match[1].split(" #")[0], line=line and line + number)
            known += [each for settings in options.settings() for each in settings.values()]
            files += options.files
    reader = _Reader(known)
    reader.script.files = files
    reader.follow_ways(text, line)
    return reader.script


def read_assignment(text: str, before: Iterable[Assigned], line: int) -> list[Assigned]:
    """Return the variables that `NAME=value` sets, including names that lint does not check."""
    reader = _Reader(before)
    reader.follow_text(f"export {text}", line)
    return [each for each in reader.scope.variables.values() if each.exported]


def expand(text: str) -> str:
    """Expand a value with references such as `${NAME:-default}` (Compose, envsubst); unknown parts become OPEN."""
    reader = _Reader()
    reader.source = ('"' + text.replace('"', '\\"') + '"').encode("utf-8", "replace")
    name = next(walk(parse(reader.source), "string"), None)
    return OPEN if name is None or name.end_byte != len(reader.source) else reader.value(name)


class _Reader(Expander):
    """Follows the statements of a script, and records the environment of each program that it starts."""

    def __init__(self, before: Iterable[Assigned] = ()) -> None:
        super().__init__(Shell({each.name: each for each in before}))
        self._exported = {name for name, each in self.scope.variables.items() if each.exported}  # anywhere
        self._loose: dict[str, Assigned] = {}  # set but not exported
        self._types: set[str] = set()  # types of the statements
        # Ways
        self._ways, self._way = [_Way()], _Way()
        self._met: set[str] = set()  # conditions, on all ways
        self._blocks = self._commands = 0
        self._left = ""  # how this block was left: exit, return, break or continue
        self._texts: dict[tuple[str, int], tuple[bytes, Node | None]] = {}
        self._active: dict[str, set[str]] = {}  # functions on the call stack, and the local variables of each
        # Texts that commands write and read
        self._input: Inner | None = None
        self._target = ""  # the file or program that gets the output; empty: none that is known
        self._first_text = 0  # index of the first text of this way
        # Program starts
        self._launches: dict[object, _Launch] = {}
        self._started = 0  # their number, repetitions included

    # -- the whole text

    def follow_ways(self, text: str, line: int) -> None:
        """Follow every way through a script. Store the settings of its launches, and those that no launch gets."""
        first = end = self.scope
        for way in self._ways:  # conditions that are met add ways
            self._way, self._first_text = way, len(self.script.inner)
            if self._commands > _MOST_COMMANDS or not self.spend(0):
                break
            self.scope, self._left = (end if way.function else first).copy(), ""
            if way.function:
                self._call([Word(way.function, way.function)], 0)
                continue
            self.follow_text(text, line)
            for name in list(self.scope.variables) if self._types <= _LIST else ():
                self._export(name, 0)  # a list of variables is meant to be exported
            if not self._left:
                self._launch(_END, sure=False)
            if self._types <= _LIBRARY:
                end = self.scope
                self._ways += [_Way(function=name) for name in end.functions]
        self._merge_launches()
        self.script.loose = {name: each for name, each in self._loose.items() if name not in self._exported}
        self.script.inner = list(dict.fromkeys(self.script.inner))

    def _merge_launches(self) -> None:
        """Store the settings of each launch and way. A launch with a subset of another launch's settings is dropped.

        A variable that no launcher gets counts if a program gets it that may be a launcher.
        """
        named = {name for each in self._launches.values() if each.sure for name in each.settings}
        has_launcher = any(each.sure for each in self._launches.values())
        found: dict[frozenset[tuple[str, str]], _Launch] = {}
        for each in sorted(self._launches.values(), key=lambda each: (len(each.way), not each.sure)):
            settings = {name: one for name, one in each.settings.items() if each.sure or name not in named}
            if not (has_launcher and each.label == _END):
                found.setdefault(_content(settings), each._replace(settings=settings))
        ways = {
            contents: each for contents, each in found.items()
            if not any(contents < other and theirs.way == each.way for other, theirs in found.items())
        }  # fmt: skip
        several = len([each for each in ways.values() if not each.way]) > 1
        for each in ways.values():
            label = "; ".join(filter(None, [each.label if several else "", *each.way]))
            self.script.ways.append((label, each.settings))
        if len(ways) == 1:
            self.script.always = self.script.ways.pop()[1]

    def follow_text(self, text: str, line: int) -> Outcome:
        """Follow a text in the current shell."""
        if (text, line) not in self._texts:
            source = text.encode("utf-8", "replace")
            self._texts[text, line] = source, parse(source)
        source, root = self._texts[text, line]
        if root is None:
            self._report(line, "the script is nested or broken beyond what is read")
            return SUCCESS
        with self.during(source=source, first=line):
            return self._follow(root.children)

    def _report(self, line: int, why: str) -> None:
        """Report a line that cannot be followed."""
        if not any(each.why == why and why.startswith("too") for each in self.script.unread):
            self.script.unread.append(Unread(line=line, why=why))

    def _not_understood(self, node: Node) -> None:
        """Report lines with invalid syntax near settings; statements inside are followed."""
        near = NAMED.search(self.text(node)) is not None
        plain = _NAMES["expansions"] | {"word", "number", "variable_name"}
        for child in node.children or [node]:
            if child.is_named and child != node and child.type not in plain:
                self._visit(child)
            elif near and not re.fullmatch(r"[\s<>&|;()\\]*", self.text(child)):
                self._report(self.line(child), "unknown shell syntax")

    # -- control flow

    def _follow(self, nodes: Sequence[Node]) -> Outcome:
        """Follow statements in sequence."""
        outcome = SUCCESS
        for node, after in zip(nodes, [*nodes[1:], None], strict=False):
            if node.is_named and node.type != "comment" and not self._left:
                in_background = after is not None and after.type == "&"
                outcome = self._follow_apart([node]) if in_background else self._visit(node)
        return outcome

    def _visit(self, node: Node) -> Outcome:
        """Follow one statement."""
        self._commands += 1
        self._blocks += 1
        try:
            if self._blocks > MOST_LEVELS or self._commands > _MOST_COMMANDS or not self.spend(0):
                self._report(self.line(node), "too many or too deeply nested commands")
                self._left = "exit"
                return LIKELY
            if node.is_missing or node.type == "ERROR" or (node.type == "test_command" and node.has_error):
                self._not_understood(node)
                return LIKELY
            self._types.add(node.type)
            follow = _FOLLOW.get(node.type)
            return follow(self, node) if follow else SUCCESS
        finally:
            self._blocks -= 1

    def _follow_apart(self, nodes: Sequence[Node]) -> Outcome:
        """Follow statements in a subshell."""
        with self.during(scope=self.scope.copy(), _left=""):
            return self._follow(nodes)

    def _decide(self, outcome: Outcome, node: Node, label: str, condition: str = "") -> bool:
        """Return the outcome of a condition on this way, which stays the same as long as it reads the same values.

        A condition that is met for the first time adds a way.
        """
        if outcome.known:
            return outcome.success
        # The command that decides; of a list it is the last one, which may also be a statement elsewhere
        condition = condition or self.text(node.children[-1] if node.type == "list" else node)
        key = "\0".join([condition, *map(self.parameter, dict.fromkeys(_USED.findall(condition)))])
        if key not in self._met:
            self._met.add(key)
            labels = (*self._way.labels, f"else of {label}" if outcome.success else label)
            self._ways.append(
                self._way._replace(choices={**self._way.choices, key: not outcome.success}, labels=labels)
            )
        return self._way.choices.get(key, outcome.success)

    def _list(self, node: Node) -> Outcome:
        """Follow `a && b || c`. The grammar nests such lists to the left, so a loop replaces deep recursion."""
        chain: list[tuple[str, Node]] = []
        while node.type == "list":
            chain.append((node.children[1].type, node.children[-1]))
            self._commands += 1
            node = node.children[0]
        outcome = self._visit(node)
        for sign, each in reversed(chain):
            if self._left:
                break
            if node.type == "test_command" and not outcome.known:
                outcome = Outcome(success=sign == "||", known=False)
            success = self._decide(outcome, node, f"if {self._title([node])}")
            outcome = self._visit(each) if success == (sign == "&&") else Outcome(success=success)
            node = each
        return outcome

    def _negated(self, node: Node) -> Outcome:
        outcome = self._follow(node.children[-1:])
        return outcome._replace(success=not outcome.success)

    def _block(self, node: Node) -> Outcome:
        """Follow a block of statements, or an arithmetic command `((...))`, which the grammar parses as a block."""
        if not node.children or node.children[0].type != "((":
            return self._follow(node.children)
        text = self.text(node)
        for match in _CHANGED.finditer(text):
            self.set(Assigned(match[1] or match[2], OPEN, text, self.line(node)))
        return UNLIKELY

    def _define(self, node: Node) -> Outcome:
        name = node.child_by_field_name("name") or node
        body = node.child_by_field_name("body") or node.named_children[-1]
        self.scope.functions[self.text(name)] = Function(body, self.source, self.first)
        return SUCCESS

    def _title(self, nodes: Sequence[Node]) -> str:
        text = " ".join(self.text(node)[:400] for node in nodes[:80])
        return re.sub(r"\s+", " ", re.sub(r"[\"']", "", text)).strip()[:80]

    def _if(self, node: Node) -> Outcome:
        """Follow the conditions of `if` up to the branch that is taken."""
        clauses = [node, *(each for each in node.children if each.type in ("elif_clause", "else_clause"))]
        for clause in clauses:
            children = [each for each in clause.children if each not in clauses]
            then = next((at for at, each in enumerate(children) if each.type == "then"), 0)
            condition = [each for each in children[1:then] if each.is_named]
            branch, outcome = children[then + 1 :], self._follow(condition)
            if not outcome.known and any(_LEAVES.search(self.text(each)) for each in branch):
                outcome = UNLIKELY
            if not condition or self._decide(outcome, condition[-1], f"if {self._title(condition)}"):
                return self._follow(branch)
        return SUCCESS

    def _case(self, node: Node) -> Outcome:
        """Follow each item of `case` on a way of its own. The value is not compared with the patterns."""
        of, items = node.named_children[0], [each for each in node.children if each.type == "case_item"]
        self.value(of)
        last = next((each for each in reversed(items) if not _LEAVES.search(self.text(each))), None)
        for item in items:
            patterns = item.children_by_field_name("value")
            if item.children[-1].type in (";&", ";;&"):
                self._report(self.line(item), "an item of case that falls through to the next one")
            label = f"case {self._title([of])} in {self._title(patterns)}"[:80]
            matches = SUCCESS if "*" in map(self.text, patterns) else Outcome(success=item == last, known=False)
            if self._decide(matches, item, label, label):
                return self._follow([each for each in item.children if each not in patterns])
        return SUCCESS

    def _loop(self, node: Node) -> Outcome:
        """Follow the body of a loop: once for each literal word of a `for`, else once with an unknown variable."""
        body, outcome = node.child_by_field_name("body") or node, SUCCESS
        given, name = node.children_by_field_name("value"), node.child_by_field_name("variable")
        head = self.source[node.start_byte : body.start_byte].decode("utf-8", "replace")
        list(map(self.value, given))
        if node.type == "while_statement":
            self._follow([each for each in node.named_children if each != body and each.type != "comment"])
        literal = 0 < len(given) <= _MOST_ROUNDS and all(_LITERAL.fullmatch(self.text(word)) for word in given)
        for word in map(self.text, given) if literal else (OPEN,):
            raw = word if literal else head.partition(" in ")[2].split(";")[0].strip()
            for changed in [self.text(name)] if name else {m[1] or m[2] for m in _CHANGED.finditer(head)}:
                self.set(Assigned(changed, word, raw, self.line(node)))
            with self.during(loops=self.loops + 1):
                outcome = self._visit(body)
            is_over = self._left not in ("", "continue")
            self._left = "" if self._left in ("break", "continue") else self._left
            if is_over:
                break
        return outcome

    # -- texts that commands write and read

    def _pipeline(self, node: Node) -> Outcome:
        """Follow the commands of a pipeline, each in a subshell. What they write is for the last one."""
        parts = [child for child in node.children if child.is_named]
        with self.during(_target=self._reader_of(parts[-1])):
            for part in parts[:-1]:
                self._follow_apart([part])
        return self._follow_apart(parts[-1:])

    def _reader_of(self, node: Node) -> str:
        """Return the program that a pipeline ends with, or the file that it writes."""
        words = [Word(each, each) for each in self.text(node)[:1000].split()]
        program = program_behind(words) if words else 0
        if program >= len(words):
            return ""
        files = [each.text for each in words[program + 1 :] if each.text[:1] not in ("-", ">")]
        return files[0] if files and name_of(words[program]) == "tee" else name_of(words[program])

    def _redirected(self, node: Node) -> Outcome:
        """Follow a statement with its output file and its here-document."""
        body, target = node.child_by_field_name("body"), ""
        behind: list[Node] = []  # `| b` and `&& b` behind `a <<E`, which the grammar puts inside the redirection
        for each in _redirects(node):
            to = each.child_by_field_name("destination")
            if each.type == "file_redirect" and to is not None:
                found = self.words(to)[:1]  # this follows commands inside, too
                writes = re.match(r"&?>", self.text(each)) is not None
                target = found[0].text if writes and found and not found[0].text.isdigit() else target
            elif each.type in _PARTS:
                behind += [child for child in each.children if child.is_named] or [each]
                target = target or (self._reader_of(behind[-1]) if each.type == "pipeline" else "")
            elif each.type == "ERROR":
                self._not_understood(each)
        with self.during(_input=self._document(node) or self._input, _target=target or self._target):
            outcome = self._visit(body) if body is not None else SUCCESS
            document = self._input
        if document is not None and document != self._input:  # no command of a compound statement took it
            self._pass_on(document._replace(target=target))
        for each in behind:
            self._follow_apart([each])
        return outcome

    def _document(self, node: Node) -> Inner | None:
        """Return the here-document or here-string of a statement. Variables in a here-document are unknown."""
        for redirect in node.children:
            if redirect.type == "herestring_redirect":
                return Inner(self.value(redirect.children[-1]), "", self.line(redirect))
            body, start = (next(walk(redirect, kind), None) for kind in ("heredoc_body", "heredoc_start"))
            if redirect.type != "heredoc_redirect" or body is None or start is None:
                continue
            text = self.text(body)
            if redirect.children[0].type == "<<-":
                text = re.sub(r"^\t+", "", text, flags=re.MULTILINE)
            self.spend(4 * len(text))
            if self.text(start)[:1] not in "'\"\\":  # the grammar misses expansions after an escaped `$`
                text = _IN_DOCUMENT.sub(OPEN, text).replace("\\$", "$")
            return Inner(text, "", self.line(body))
        return None

    def capture(self, nodes: Sequence[Node]) -> None:
        """Follow a command substitution."""
        with self.during(_target=_TEXT):
            self._follow_apart(nodes)

    def _pass_on(self, given: Inner) -> None:
        """Follow a text that is written into a file, or read by a program: a shell, Python, kubectl, ssh."""
        target = {"kubectl": "manifest.yaml", "oc": "manifest.yaml"}.get(given.target, given.target)
        if not given.text.strip(OPEN + "\n") or target in _NAMES["idle"] or target.startswith("/dev/"):
            return
        if target in _NAMES["shells"]:
            self._follow_nested(given.text, given.line)
        else:
            self.script.inner.append(given._replace(target=target.replace(OPEN, "...")))

    def _write_rows(self, text: str, line: int) -> None:
        """Pass on the output of echo or printf. What several of them write into the same file is one text."""
        texts = self.script.inner
        if self._target in ("", _TEXT) or not text.strip():
            return
        if len(texts) > self._first_text and texts[-1].target == self._target:
            texts[-1] = texts[-1]._replace(text=texts[-1].text + text)
        else:
            self._pass_on(Inner(text, self._target, line))

    def _follow_nested(self, text: str, line: int, *, surely: bool = True) -> None:
        """Follow a script run by another shell: `bash -c`, ssh, a here-document. `surely` False: it may be prose."""
        started, unread = self._started, len(self.script.unread)
        inherited = {name: each for name, each in self.scope.variables.items() if each.exported}
        with self.during(scope=Shell(inherited), _left=""):
            self.follow_text(text, line)
        if not surely:
            del self.script.unread[unread:]
            if self._started == started:
                self._launch(f"the command of line {line}", sure=False)

    # -- variables

    def set(self, given: Assigned, *, exported: bool | None = None) -> None:
        """Set a variable. If `exported` is None, it is exported if it was before, or if `set -a` is active."""
        if not NAME.match(given.name):
            return
        self.spend(WORK_OF_WORD)
        before = self.scope.variables.get(given.name)
        if exported is None:
            exported = self.scope.exports_all or (before is not None and before.exported)
        self.scope.variables[given.name] = given = given._replace(exported=exported)
        if given.items is None and not given.unset:
            name = _IN_CONTAINER.sub("", given.name)
            if exported:
                self._exported.add(name)
            else:
                self._loose[name] = given._replace(name=name)

    def _export(self, name: str, line: int) -> None:
        """Follow `export NAME`. An unknown variable gets its value from the environment, so the value is OPEN."""
        self.set(self.scope.variables.get(name, Assigned(name, OPEN, f"${name}", line)), exported=True)

    def _declare(self, keyword: str, given: Sequence[Assigned | Word], line: int) -> None:
        """Follow export, declare, typeset, local, readonly or unset, with names and evaluated assignments."""
        options = " ".join(each.text for each in given if isinstance(each, Word) and each.text[:1] in ("-", "+"))
        if "-f" in options or (keyword == "local" and not self._active):
            return
        if keyword != "unset" and re.search(r"-\w*n|\+\w*x", options):  # `export -n` and name references
            self._report(line, f"{keyword} {options}")
        exports = keyword == "export" or re.search(r"-\w*x", options) is not None
        is_local = keyword not in ("export", "readonly", "unset") and "g" not in options and bool(self._active)
        for each in given:
            if isinstance(each, Word):
                name, equals, value = each.text.partition("=")
                if OPEN in name and re.fullmatch(rf"[\w{OPEN}]+", name):
                    self._report(line, f"the names of the variables that {keyword} gets are unknown")
                if not NAME.match(name):
                    continue
                each = Assigned(name, value, value, line, exported=False, unset=not equals)
            if is_local:  # exported if the hidden outer variable is
                self._active[[*self._active][-1]].add(each.name)
                if each.unset and (before := self.scope.variables.get(each.name)):
                    self.scope.variables[each.name] = before._replace(unset=True, value="", items=None)
            if keyword == "unset":
                self.scope.variables[each.name] = each
            elif not each.unset:
                self.set(each, exported=True if exports else None)
            elif exports:
                self._export(each.name, line)

    # -- simple commands

    def _test(self, node: Node) -> Outcome:
        """Follow the operands of `[ ]` or `[[ ]]`; the result is unknown."""
        list(map(self.value, node.named_children))
        return UNLIKELY

    def _assignments(self, node: Node) -> Outcome:
        if node.type == "variable_assignment":
            self.set(self.evaluate(node))
        else:
            self._follow(node.named_children)  # invalid syntax among them, too
        return LIKELY if "$(" in self.text(node) or "`" in self.text(node) else SUCCESS

    def _declaration(self, node: Node) -> Outcome:
        """Follow export, declare, typeset, local, readonly or unset. bash expands all words before it assigns."""
        given: list[Assigned | Word] = []
        for each in node.children[1:]:
            if each.type == "variable_assignment":
                given.append(self.evaluate(each))
            elif each.is_named and each.type != "comment":
                given += self.words(each)
        self._declare(self.text(node.children[0]), given, self.line(node))
        return SUCCESS

    def _words(self, node: Node) -> list[Word]:
        """Return the expanded words of a simple command."""
        words: list[Word] = []
        for child in node.children:
            if child.type == "command_name":
                words += self.words(child.children[0]) if child.children else []
            elif child.type == "subshell":  # `time ( ... )`
                self._visit(child)
            elif child.is_named and not child.type.endswith(("_redirect", "assignment")) and child.type != "comment":
                words += self.words(child)
        return words

    def _command(self, node: Node) -> Outcome:
        words, line = self._words(node), self.line(node)
        for child in node.children:
            if child.has_error and child.type not in _NAMES["expansions"]:
                for error in walk(child, "ERROR"):
                    self._not_understood(error)
        self._input = self._document(node) or self._input
        assignments = [each for each in node.children if each.type == "variable_assignment"]
        ends_line = any(_ENDS_LINE.match(self.source, each.end_byte) for each in assignments)
        for_command = bool(words) and not ends_line  # else the grammar takes the next line for their command
        hidden: dict[str, Assigned | None] = {}
        for given in map(self.evaluate, assignments):
            if for_command:
                hidden.setdefault(given.name, self.scope.variables.get(given.name))
            self.set(given, exported=True if for_command else None)
            if is_judged(given.name) and ends_line and words:
                self._report(line, "several assignments at the end of a line")
        if not words:
            return SUCCESS
        if any(map(is_judged, hidden)) and _NAMES["declares"].intersection(word.text for word in words[:2]):
            self._report(line, "an assignment before export or another declaration")
        try:
            return self._run(words, line)
        finally:
            self.scope.restore(hidden)

    def _run(self, words: list[Word], line: int) -> Outcome:
        """Follow one simple command: a built-in, a function, or a program."""
        given, self._input = self._input, None
        self.spend(WORK_OF_WORD * len(words))
        at = program_behind(words)
        wrappers, program = [name_of(each) for each in words[:at]], name_of(words[at]) if at < len(words) else ""
        of_shell = _NAMES["of_shell"].issuperset(wrappers)
        builtin = _BUILTINS.get(program)
        if builtin and (of_shell or program in ("cat", "tee")):
            return builtin(self, _Call(program, words[at + 1 :], line, given)) or SUCCESS
        function = words[at].text if program else ""
        if of_shell and function in self.scope.functions and function not in self._active:
            return self._call(words[at:], line)
        if program:
            with self.during(scope=self.scope.copy()):
                self._start(words, at, line, given)
            self._left = "exit" if "exec" in wrappers else self._left
        return LIKELY

    def _call(self, words: list[Word], line: int) -> Outcome:
        """Follow the call of a function. Its arguments may be a command that it runs."""
        shell, name = self.scope, words[0].text
        if any(NAMED.search(word.text) for word in words[1:]):
            with self.during(scope=shell.copy()):
                self._start([Word("env", "env"), *words[1:]], 0, line, None)
        before = dict(shell.variables)
        body, source, first = shell.functions[name]
        self._active[name] = set()  # recursive calls are not followed
        with self.during(source=source, first=first, loops=0):
            outcome = self._visit(body)
        self._left = "" if self._left == "return" else self._left
        shell.restore({each: before.get(each) for each in self._active.pop(name)})
        return outcome

    # -- programs and their words

    def _start(self, words: list[Word], at: int, line: int, given: Inner | None) -> None:
        """Start the program `words[at]`. It gets the exported variables, changed by the words of its command."""
        before, program = self._started, words[at:]
        for name in {*removed_names(words, self.scope.variables), *removed_names(program, self.scope.variables)}:
            del self.scope.variables[name]
        sets = False
        for part in parts_of(words):
            where = part.line or line
            match part.does:
                case "set":
                    sets = sets or is_judged(part.name)
                    self.set(Assigned(part.name, part.text, part.raw, line), exported=True)
                case "run" | "prose":
                    self._follow_nested(part.text, where, surely=part.does == "run")
                case "file":
                    self.script.files.append(part.text)
                case "python" | "option.json":
                    self.script.inner.append(Inner(part.text, part.does, where))
        if given:
            self._pass_on(given._replace(target=name_of(program[0])))
        idle = is_idle(program)
        sure = not idle and is_launcher(program)
        if sure and starts_ranks(word.text for word in program):
            self.script.starts.append(line)
        if self._started == before and (sets or not idle):
            self._launch(f"the launch of line {line}" if line else "a launch", sure=sure)

    def _launch(self, label: str, *, sure: bool) -> None:
        """Record a program start with the checked variables of its environment."""
        self._started += 1
        settings: Settings = {}
        for each in self.scope.variables.values():
            name = _IN_CONTAINER.sub("", each.name)
            if each.exported and not each.unset and each.items is None and (is_judged(name) or name in JOB_SIZE):
                settings[name] = each._replace(name=name)
        self.spend(WORK_OF_WORD * len(settings))
        if len(self._launches) >= _MOST_LAUNCHES:
            self._report(0, "too many commands that start programs")
            return
        # On a way that takes another branch behind it, the launch is the same.
        launch = _Launch(label, sure, self._way.labels, settings)
        self._launches.setdefault((label, sure, _content(settings)), launch)

    # -- built-ins

    def _leave(self, call: _Call) -> Outcome:
        """Follow exit, return, break or continue."""
        if call.program in ("break", "continue") and call.texts not in ([], ["1"]):
            self._report(call.line, f"{call.program} of several loops")
        if {"exit": 1, "return": len(self._active)}.get(call.program, self.loops):
            self._left = call.program
        return LIKELY

    def _source(self, call: _Call) -> Outcome:
        path = call.words[0].text if call.words else ""
        if path and path != "/dev/null":
            self.script.files.append(call.words[0].raw + f" (line {call.line})" * bool(call.line))
        return LIKELY

    def _echo(self, call: _Call) -> None:
        """Write the output of echo. It may contain Hydra overrides for a launcher."""
        text = " ".join(each for each in call.texts if each not in ("-e", "-n", "-E")).replace("\\n", "\n")
        self._write_rows(text + "\n" * (call.texts[:1] != ["-n"]), call.line)
        if overrides := [Word(row, row) for row in text.splitlines() if pattern("dotted").match(row)]:
            with self.during(scope=self.scope.copy()):
                self._start([Word("hydra", "hydra"), *overrides], 0, call.line, None)

    def _printf(self, call: _Call) -> Outcome | None:
        """Write the output of printf; formatted values are unknown."""
        text = "".join(call.texts[:1])
        if text == "-v":
            return self._assign_unknown(call)
        self._write_rows(OPEN if "%" in text else text.replace("\\n", "\n"), call.line)
        return None

    def _cat(self, call: _Call) -> Outcome:
        """Pass on the input of cat or tee; the content of files is unknown."""
        names = [each for each in call.texts if each[:1] != "-"]
        target = names[0] if names and call.program == "tee" else self._target
        if call.given and target and (not names or call.program == "tee"):
            self._pass_on(call.given._replace(target=target))
        return LIKELY if names else SUCCESS

    def _assign_unknown(self, call: _Call) -> Outcome:
        """Set the variables of read, mapfile, let or printf -v to unknown values."""
        for word in call.words:
            self.set(Assigned(re.split(r"\W", word.text)[0], OPEN, f"(set by {call.program})", call.line))
        return LIKELY

    def _commands_in_words(self, call: _Call) -> Outcome:
        """Report the commands of eval and trap, which are not followed."""
        text = " ".join(call.texts)
        if len(text) > MOST_OPTIONS or NAMED.search(text):
            self._report(call.line, f"the commands of {call.program}")
        if call.program == "trap":
            return SUCCESS
        self.script.files.append(f"the commands that eval gets in line {call.line}")
        if starts_ranks(text[:MOST_OPTIONS].split()):
            self.script.starts.append(call.line)
        self._launch(f"the command of line {call.line}", sure=False)
        return LIKELY

    def _options_of_shell(self, call: _Call) -> None:
        """Follow `set -a`, and fish's `set -x NAME value`."""
        texts, named = call.texts, [word for word in call.words if word.text[:1] != "-"]
        if _NAMES["fish"] & {*texts[:2]} and len(named) > 1:
            value, raw = (" ".join(parts) for parts in zip(*((each.text, each.raw) for each in named[1:]), strict=True))
            self.set(Assigned(named[0].text, value, raw, call.line), exported=True)
            return
        for text, after in pairwise([*texts, ""]):
            if re.fullmatch(r"[-+][a-z]*a[a-z]*", text) or (text in ("-o", "+o") and after == "allexport"):
                self.scope.exports_all = text[0] == "-"
        if "--" in texts and any(map(NAMED.search, texts)):
            self._report(call.line, "the arguments that set gives")


def _content(settings: Settings) -> frozenset[tuple[str, str]]:
    """Return the pairs of name and value."""
    return frozenset((name, each.value) for name, each in settings.items())


def _redirects(node: Node) -> Iterator[Node]:
    """Yield the redirections of a statement, and nodes that the grammar puts inside a here-document redirection."""
    for child in node.children:
        yield child
        for each in child.children if child.type == "heredoc_redirect" else ():
            if each.type in (*_PARTS, "file_redirect", "ERROR"):
                yield each


_FOLLOW: Mapping[str, Callable[[_Reader, Node], Outcome]] = {
    **dict.fromkeys(("program", "compound_statement", "do_group", "else_clause", "case_item"), _Reader._block),
    "list": _Reader._list, "negated_command": _Reader._negated, "if_statement": _Reader._if,
    "case_statement": _Reader._case, "redirected_statement": _Reader._redirected, "pipeline": _Reader._pipeline,
    **dict.fromkeys(("for_statement", "while_statement", "c_style_for_statement"), _Reader._loop),
    "subshell": lambda reader, node: reader._follow_apart(node.children),
    "test_command": _Reader._test, "function_definition": _Reader._define,
    **dict.fromkeys(("variable_assignment", "variable_assignments"), _Reader._assignments),
    **dict.fromkeys(("declaration_command", "unset_command"), _Reader._declaration), "command": _Reader._command,
}  # fmt: skip

_BUILTINS: Mapping[str, Callable[[_Reader, _Call], Outcome | None]] = {
    "echo": _Reader._echo, "printf": _Reader._printf, "cat": _Reader._cat, "tee": _Reader._cat,
    **dict.fromkeys((".", "source"), _Reader._source), "set": _Reader._options_of_shell,
    **dict.fromkeys(("exit", "return", "break", "continue"), _Reader._leave),
    "setenv": lambda reader, call: reader._report(call.line, "setenv belongs to the C shell, which is not supported"),
    **dict.fromkeys((":", "true", "false"), lambda _reader, call: Outcome(success=call.program != "false")),
    **dict.fromkeys(("read", "getopts", "mapfile", "readarray", "let"), _Reader._assign_unknown),
    **dict.fromkeys(("eval", "trap"), _Reader._commands_in_words),
    **dict.fromkeys(_NAMES["declares"], lambda reader, call: reader._declare(call.program, call.words, call.line)),
}  # fmt: skip

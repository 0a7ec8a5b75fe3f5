"""Follow a shell script and return the environment of each program start: exported variables and launcher options.

The script is never run; its statements are followed in the order in which bash would execute them, first on the likely
way. Then the script is followed again for each condition that only a run decides, with the other outcome of it. OPEN
replaces text that comes from a program, an argument or the outer environment.
Specification: POSIX shell (XCU 2.9 commands, 2.14 special built-ins), bash(1); fish set; mpirun(1) -x, Hydra -genv,
srun(1) and sbatch(1) --export, docker-run(1) -e. docs/decisions/0039 lists what is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from tree_sitter import Node

from planner.lint.expansion import MOST_LEVELS, WORK_OF_WORD, Expander, Function, Shell, parse, walk
from planner.lint.programs import (
    END,
    MOST_OPTIONS,
    Launches,
    is_idle,
    is_launcher,
    name_of,
    program_behind,
    removed_names,
    runner_of,
    script_of,
    starts_ranks,
)
from planner.lint.script import NAME, NAMED, OPEN, Assigned, Inner, Script, Unread, Word, is_judged, pattern, words

_MOST_COMMANDS = 20_000  # limit of followed commands; each loop iteration, way and function call counts
_MOST_ROUNDS = 64  # iterations of one loop
_TEXT = "a text"  # name of the text that a command substitution returns

# A variable that an arithmetic expression changes
_CHANGED = re.compile(r"\b([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)([A-Za-z_]\w*)")
_USED = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")
_LITERAL = re.compile(r"[\w./:-]+")
_IN_DOCUMENT = re.compile(r"(?<!\\)\$(?:\w+|\{[^{}\n]*\})")
_SETTING = re.compile(r"\b(?:TORCH_)?NCCL_[A-Z0-9_]+=|\b(?:FI|OFI|GLOO|RCCL|UCX)_[A-Z0-9_]+=")
_LEAVES = re.compile(r"(?:^|[;{\s])(?:exit|return)\b[^\n;]*[;}\s]*\Z")  # it ends the script or function
_NAMES = words()["shell"]
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
    function: str = ""  # a function that the script does not call, followed at its end


class _Call(NamedTuple):
    """A call of a built-in: its arguments, and the text on its standard input."""

    program: str
    words: list[Word]
    line: int
    given: Inner | None


class _LeftError(Exception):
    """The script left a block with exit, return, break or continue."""

    def __init__(self, how: str, outcome: Outcome = SUCCESS) -> None:
        super().__init__(how)
        self.how, self.outcome = how, outcome


def read_shell(
    text: str, *, known: Mapping[str, str] | None = None, line: int = 1, before: Sequence[Assigned] = ()
) -> Script:
    """Return the environment of each program start in a script.

    `known` are variables that are set but not exported, `before` are exported variables. `line` is the number of the
    first line.
    """
    reader = _Reader(known or {}, before)
    return reader.follow_ways(lambda: reader.follow_text(text, line))


def read_assignment(text: str, known: Mapping[str, str], line: int) -> list[Assigned]:
    """Return the variables that `NAME=value` sets, including names that lint does not check."""
    reader = _Reader(known, ())
    reader.follow_text(f"export {text}", line)
    return [each for each in reader.scope.variables.values() if each.exported]


def expand(text: str) -> str:
    """Expand a value with references such as `${NAME:-default}` (Compose, envsubst); unknown parts become OPEN."""
    reader = _Reader({}, ())
    reader.source = ('"' + text.replace('"', '\\"') + '"').encode("utf-8", "replace")
    name = next(walk(parse(reader.source), "string"), None)
    return OPEN if name is None or name.end_byte != len(reader.source) else reader.value(name)


class _Reader(Expander):
    """Follows the statements of a script, and records the environment of each program that it starts."""

    def __init__(self, known: Mapping[str, str], before: Sequence[Assigned]) -> None:
        super().__init__(Shell({name: Assigned(name, value, value, exported=False) for name, value in known.items()}))
        self.scope.variables |= {each.name: each for each in before}
        self._exported = {each.name for each in before}  # names exported anywhere
        self._loose: dict[str, Assigned] = {}  # set but not exported
        # Ways
        self._ways, self._way = [_Way()], _Way()
        self._choices: dict[str, bool] = {}  # outcome of each condition on this way
        self._ahead: set[str] = set()  # conditions of this way that are not met yet; launches before them are known
        self._met: set[tuple[str, str]] = set()  # conditions, and outcomes at a node, by function
        self._blocks = self._commands = 0
        self._only_assigns = True
        # Functions
        self._texts: dict[tuple[str, int], tuple[bytes, Node | None]] = {}
        self._called: set[int] = set()  # ids of the bodies of called functions
        self._active: list[str] = []  # names of the functions on the call stack
        self._local: list[set[str]] = []  # local variables of each function on the call stack
        # Texts that commands write and read
        self._input: Inner | None = None
        self._target = ""  # the file or program that gets the output; empty: none that is known
        self._rows = False  # the last text that was passed on is one of echo or printf
        # Programs
        self._launches = Launches()
        self._started = 0  # number of started programs, repetitions included
        self._sets = 0  # number of settings in the words of commands
        self._runs_unknown = False  # a program with unknown name, which may be a function

    # -- the whole text

    def follow_ways(self, start: Callable[[], object]) -> Script:
        """Follow every way through the script. Return the settings of its launches, and those that no launch gets."""
        first, end = self.scope, self.scope
        for number, way in enumerate(self._ways):  # conditions that are met add ways
            self._way, self._choices = way, dict(way.choices)
            self._ahead, self._rows = set(way.choices), False
            if self._commands > _MOST_COMMANDS or not self.spend(0):
                break
            self.scope = (end if way.function else first).copy()
            with suppress(_LeftError):
                if way.function:
                    body, self.source, self.first = end.functions[way.function]
                    self._visit(body)
                else:
                    start()
                for name in list(self.scope.variables) if self._only_assigns else ():
                    self._export(name, 0)  # a list of variables is meant to be exported
                self._launch(END, sure=False)
            end = end if number else self.scope
            may_be_sourced = self._runs_unknown or not self._launches.has_launcher
            if number + 1 == len(self._ways) and not way.function and may_be_sourced:
                names = [name for name, function in end.functions.items() if function.body.id not in self._called]
                self._ways += [_Way({}, (f"function {name}",), name) for name in names]
        self._launches.merge_into(self.script)
        self.script.loose = {name: each for name, each in self._loose.items() if name not in self._exported}
        self.script.inner = list(dict.fromkeys(self.script.inner))
        return self.script

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
            if node.is_named and node.type != "comment":
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
                raise _LeftError("exit")
            if node.is_missing or node.type == "ERROR" or (node.type == "test_command" and node.has_error):
                self._not_understood(node)
                return LIKELY
            if node.type not in ("program", "variable_assignment", "variable_assignments"):
                self._only_assigns = False
            follow = _FOLLOW.get(node.type)
            return follow(self, node) if follow else SUCCESS
        finally:
            self._blocks -= 1

    def _follow_apart(self, nodes: Sequence[Node]) -> Outcome:
        """Follow statements in a subshell."""
        with self.during(scope=self.scope.copy()):
            try:
                return self._follow(nodes)
            except _LeftError as left:
                return left.outcome

    def _decide(self, outcome: Outcome, node: Node, label: str, condition: str = "") -> bool:
        """Return the outcome of a condition on this way, which stays the same as long as it reads the same values.

        A condition that is met for the first time, or at a node where it has not had its other outcome, adds a way.
        """
        if outcome.known:
            return outcome.success
        # The command that decides; of a list it is the last one, which may stand alone elsewhere
        condition = condition or self.text(node.children[-1] if node.type == "list" else node)
        key = "\0".join([condition, *map(self.parameter, dict.fromkeys(_USED.findall(condition)))])
        self._ahead.discard(key)
        success = self._choices.setdefault(key, outcome.success)
        met = {(self._way.function, key), (self._way.function, f"{node.id} {not success}")}
        if not met <= self._met and key not in self._way.choices:
            labels = (*self._way.labels, f"else of {label}" if success else label)
            choices = {**self._way.choices, key: not success}
            self._ways.append(self._way._replace(choices=choices, labels=labels))
        self._met |= {*met, (self._way.function, f"{node.id} {success}")}
        return success

    def _list(self, node: Node) -> Outcome:
        """Follow `a && b || c`. The grammar nests such lists to the left, so a loop replaces deep recursion."""
        chain: list[tuple[str, Node]] = []
        while node.type == "list":
            chain.append((node.children[1].type, node.children[-1]))
            self._commands += 1
            node = node.children[0]
        outcome = self._visit(node)
        for sign, each in reversed(chain):
            if self._leaves([each]) and not outcome.known:
                outcome = LIKELY if sign == "||" else UNLIKELY
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

    def _leaves(self, nodes: Sequence[Node]) -> bool:
        """Whether statements end the script or function. Such a branch is taken to be unlikely."""
        last = [each for each in nodes if each.is_named and each.type != "comment"][-1:]
        return any(_LEAVES.search(self.text(each)) for each in last)

    def _title(self, nodes: Sequence[Node]) -> str:
        text = " ".join(self.text(node)[:400] for node in nodes[:80])
        return re.sub(r"\s+", " ", re.sub(r"[\"']", "", text)).strip()[:80]

    def _if(self, node: Node) -> Outcome:
        """Follow the conditions of `if` up to the branch that is taken."""
        clauses = [node, *(each for each in node.children if each.type in ("elif_clause", "else_clause"))]
        for clause, after in zip(clauses, [*clauses[1:], None], strict=True):
            children = [each for each in clause.children if each.type not in ("elif_clause", "else_clause")]
            then = next((at for at, each in enumerate(children) if each.type == "then"), 0)
            condition = [each for each in children[1:then] if each.is_named]
            success = True
            if condition:
                outcome = self._follow(condition)
                otherwise = after is not None and after.type == "else_clause" and self._leaves(after.children)
                if not outcome.known and (otherwise or self._leaves(children)):
                    outcome = LIKELY if otherwise else UNLIKELY
                success = self._decide(outcome, condition[-1], f"if {self._title(condition)}")
            if success:
                return self._follow(children[then + 1 :])
        return SUCCESS

    def _case(self, node: Node) -> Outcome:
        """Follow each item of `case` on a way of its own. The value is not compared with the patterns."""
        of = node.child_by_field_name("value") or node
        self.value(of)
        items = [each for each in node.children if each.type == "case_item"]
        last = next((each for each in reversed(items) if not self._leaves(each.children)), None)
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
            try:
                with self.during(loops=self.loops + 1):
                    outcome = self._visit(body)
            except _LeftError as left:
                if left.how == "break":
                    break
                if left.how != "continue":
                    raise
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
        redirects = list(_redirects(node))
        body, target = node.child_by_field_name("body"), self._file_written(redirects)
        after = [each for each in redirects if each.type in _PARTS]
        rest = [child for each in after for child in ([e for e in each.children if e.is_named] or [each])]
        if after and after[0].type == "pipeline" and not target:
            target = self._reader_of(rest[-1])
        with self.during(_input=self._document(node) or self._input, _target=target or self._target):
            outcome = self._visit(body) if body is not None else SUCCESS
            document = self._input
        if document is not None and document != self._input:  # no command of a compound statement took it
            self._pass_on(document._replace(target=target))
        for each in redirects:
            if each.type == "ERROR":
                self._not_understood(each)
        for each in rest:
            self._follow_apart([each])
        return outcome

    def _file_written(self, redirects: Sequence[Node]) -> str:
        """Return the output file of a statement, or ""; commands inside other redirections are followed."""
        target = ""
        for redirect in redirects:
            to = redirect.child_by_field_name("destination")
            if redirect.type == "file_redirect" and to is not None:
                found = self.words(to)[:1]
                writes = re.match(r"&?>", self.text(redirect)) is not None
                target = found[0].text if writes and found and not found[0].text.isdigit() else target
        return target

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
        last = self.script.inner[-1:] if self._rows else []
        if self._target in ("", _TEXT) or not text.strip():
            return
        if last and last[0].target == self._target:
            self.script.inner[-1] = last[0]._replace(text=last[0].text + text)
        else:
            self._pass_on(Inner(text, self._target, line))
        self._rows = True

    def _follow_nested(self, text: str, line: int, *, surely: bool = True) -> None:
        """Follow a script run by another shell: `bash -c`, ssh, a here-document. `surely` False: it may be prose."""
        started, unread = self._started, len(self.script.unread)
        inherited = {name: each for name, each in self.scope.variables.items() if each.exported}
        with self.during(scope=Shell(inherited)), suppress(_LeftError):
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
        name = _name_in_container(given.name)
        before = self.scope.variables.get(name)
        if exported is None:
            exported = self.scope.exports_all or (before is not None and before.exported)
        self.scope.variables[name] = given = given._replace(name=name, exported=exported)
        if given.items is None and not given.unset:
            if exported:
                self._exported.add(name)
            else:
                self._loose[name] = given

    def _export(self, name: str, line: int) -> None:
        """Follow `export NAME`. An unknown variable gets its value from the environment, so the value is OPEN."""
        outside = Assigned(name, OPEN, f"${name}", line)
        self.set(self.scope.variables.get(_name_in_container(name), outside), exported=True)

    def _declare(self, keyword: str, given: Sequence[Assigned | Word], line: int) -> None:
        """Follow export, declare, typeset, local, readonly or unset, with names and evaluated assignments."""
        words = [each for each in given if isinstance(each, Word)]
        options = " ".join(each.text for each in words if each.text[:1] in ("-", "+"))
        if keyword == "unset" and "-f" not in options:
            self._unset(words, line)
        if keyword == "unset" or "-f" in options or (keyword == "local" and not self._active):
            return
        if re.search(r"-\w*n|\+\w*x", options):  # `export -n` and name references are not supported
            self._report(line, f"{keyword} {options}")
        exports = keyword == "export" or re.search(r"-\w*x", options) is not None
        own = keyword not in ("export", "readonly") and "g" not in options and bool(self._active)
        for each in given:
            if isinstance(each, Word):
                name, equals, value = each.text.partition("=")
                if OPEN in name and re.fullmatch(rf"[\w{OPEN}]+", name):
                    self._report(line, f"the names of the variables that {keyword} gets are unknown")
                if not NAME.match(name):
                    continue
                each = Assigned(name, value, value, line) if equals else Assigned(name, unset=True)
            if own:  # exported if the hidden outer variable is
                self._local[-1].add(each.name)
                if each.unset and (before := self.scope.variables.get(each.name)):
                    self.scope.variables[each.name] = before._replace(unset=True, value="", items=None)
            if not each.unset:
                self.set(each, exported=True if exports else None)
            elif exports:
                self._export(each.name, line)

    def _unset(self, words: Sequence[Word], line: int) -> None:
        for word in words:
            if OPEN in word.text:  # it may be any variable
                self._report(line, "the names of the variables that unset gets are unknown")
            elif word.text[:1] != "-":
                name = _name_in_container(word.text)
                self.scope.variables[name] = Assigned(name, line=line, exported=False, unset=True)

    # -- simple commands

    def _test(self, node: Node) -> Outcome:
        """Follow the operands of `[ ]` or `[[ ]]`; the result is unknown."""
        list(map(self.value, node.named_children))
        return UNLIKELY

    def _assignments(self, node: Node) -> Outcome:
        for each in [node] if node.type == "variable_assignment" else node.named_children:
            self.set(self.evaluate(each))
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
        gaps = [
            self.source[each.end_byte : after.start_byte].replace(b"\\\n", b"") + b"\n" * (after.type == "comment")
            for each, after in pairwise(node.children) if each.type == "variable_assignment"
        ]  # fmt: skip
        ends_line = any(b"\n" in gap for gap in gaps)  # the grammar takes the next line for their command
        for_command = bool(words) and not ends_line
        hidden: dict[str, Assigned | None] = {}
        for child in [each for each in node.children if each.type == "variable_assignment"]:
            given = self.evaluate(child)
            if for_command:
                name = _name_in_container(given.name)
                hidden.setdefault(name, self.scope.variables.get(name))
            self.set(given, exported=True if for_command else None)
            if is_judged(given.name) and ends_line:
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
        self._only_assigns = False
        at = program_behind(words)
        wrappers, program = [name_of(each) for each in words[:at]], name_of(words[at]) if at < len(words) else ""
        of_shell = _NAMES["of_shell"].issuperset(wrappers)
        builtin = _BUILTINS.get(program)
        if builtin and (of_shell or program in ("cat", "tee")):
            return builtin(self, _Call(program, words[at + 1 :], line, given)) or SUCCESS
        if of_shell and program in self.scope.functions and program not in self._active:
            return self._call(words[at:], line)
        if program:
            outer = self.scope
            with self.during(scope=outer.copy()):
                self._remove(words)
                for word in words[:at]:  # sudo accepts NAME=VALUE before the program
                    self._set_for_program(word, line, outer)
                self._start(words[at:], line, given, outer)
            if "exec" in wrappers:
                raise _LeftError("exit", LIKELY)
        return LIKELY

    def _call(self, words: list[Word], line: int) -> Outcome:
        """Follow the call of a function. Its arguments may be a command that it runs."""
        shell, name = self.scope, name_of(words[0])
        if any(NAMED.search(word.text) for word in words[1:]):
            with self.during(scope=shell.copy()):
                self._start([Word("env", "env"), *words[1:]], line, None, shell)
        before = dict(shell.variables)
        body, source, first = shell.functions[name]
        self._called.add(body.id)
        self._active.append(name)  # recursive calls are not followed
        self._local.append(set())
        try:
            with self.during(source=source, first=first, loops=0):
                return self._visit(body)
        except _LeftError as left:
            if left.how != "return":
                raise
            return left.outcome
        finally:
            shell.restore({each: before.get(each) for each in self._local.pop()})
            self._active.pop()

    # -- programs and their words

    def _start(self, words: list[Word], line: int, given: Inner | None, outer: Shell) -> None:
        """Start a program. It gets the exported variables, changed by the words of its command."""
        before, idle = self._started, is_idle(words)
        self._remove(words)
        sets = self._take_options(words, line, outer)
        if given:
            self._pass_on(given._replace(target=name_of(words[0])))
        self._runs_unknown = self._runs_unknown or OPEN in words[0].text
        sure = not idle and is_launcher(words)
        if sure and starts_ranks(word.text for word in words):
            self.script.starts.append(line)
        if self._started == before and (sets or not idle):
            self._launch(f"the launch of line {line}" if line else "a launch", sure=sure)

    def _launch(self, label: str, *, sure: bool) -> None:
        """Record a program start with the checked variables of its environment."""
        self._started += 1
        if self._ahead:
            return
        count = self._launches.add(label, self.scope.variables.values(), self._way.labels, sure=sure)
        self.spend(WORK_OF_WORD * (count or 0))
        if count is None:
            self._report(0, "too many commands that start programs")

    def _remove(self, words: Sequence[Word]) -> None:
        """Unset variables that a command does not pass on."""
        for name in removed_names(words, self.scope.variables):
            del self.scope.variables[name]

    def _take_options(self, words: list[Word], line: int, outer: Shell) -> bool:
        """Follow the words of a command: launcher options, `env A=1`, scripts. Returns whether they set variables."""
        before, at, end = self._sets, 0, script_of(words)
        settings = False
        passes = end < len(words) and words[end].text.endswith(".sh")  # such as vLLM's run_cluster.sh, to docker
        while at < len(words):
            word, after = words[at], words[at + 1 : at + 2]
            passed = passes and word.text in ("-e", "--env") and any(_SETTING.match(each.text) for each in after)
            taken: int | None = 0
            if at <= end or passed or pattern("dotted").match(word.text):
                taken = self._take_option(words, at, line, outer)
            if taken is None:
                self._take_word(words, at, line, settings=settings)
                unset = at > 0 and words[at - 1].text in ("-u", "-C")
                more = unset or re.match(r"-|[A-Za-z_]\w*=", word.text)
                settings = name_of(word) == "env" or (settings and bool(more))
            at += 1 + (taken or 0)
        return self._sets > before

    def _take_option(self, words: list[Word], at: int, line: int, outer: Shell) -> int | None:
        """Follow a launcher option that sets variables. Returns the number of its arguments; None if it is none."""
        text, after = words[at].text, words[at + 1] if at + 1 < len(words) else Word("", "")
        option, equals, tail = text.partition("=")
        rest = Word(tail, words[at].raw.partition("=")[2], line) if equals else after
        if text in _NAMES["takes_pair"] or (text == "-env" and "=" not in after.text and at + 2 < len(words)):
            if at + 2 < len(words):
                self._set_pair(after.text, words[at + 2].text, words[at + 2].raw, line)
            return 2
        if pattern("takes_setting").fullmatch(option):
            self._set_for_program(rest, line, outer)
        elif option in _NAMES["takes_list"]:
            for name, sign, value in (part.partition("=") for part in rest.text.split(",")):  # values end at commas
                if sign:
                    self._set_pair(name, value, value, line)
        elif option in _NAMES["takes_file"]:
            self.script.files.append(rest.text)
        else:
            return None
        return 0 if equals else 1

    def _take_word(self, words: list[Word], at: int, line: int, *, settings: bool) -> None:
        """Follow a word that is no launcher option. `settings`: it may be NAME=VALUE of env(1)."""
        word, text = words[at], words[at].text
        program, before, inside = name_of(words[0]), words[at - 1].text if at else "", word.line or line
        runs = runner_of(words, at)
        if runs == "python":
            self.script.inner.append(Inner(text, "python", inside))
        elif runs or (settings and before in ("-S", "--split-string")):
            self._follow_nested(text if runs else f"env {text}", inside, surely=program not in _NAMES["own_c"])
        elif dotted := pattern("dotted").match(text):  # key path of Hydra or Helm: env_vars.NAME=VALUE
            self._set_pair(dotted[1], text[dotted.end() :].strip("\"'"), word.raw, line)
        elif re.match(r"[A-Za-z_]\w*=", text, re.ASCII) and (settings or (before[:1] == "-" and _SETTING.match(text))):
            self._set_for_program(word, line, self.scope)
        elif at and program in _NAMES["remote"] and re.search(r"\s", text):
            self._follow_nested(text, inside)
        elif at and NAMED.search(text):
            text = text.split("=", 1)[1] if re.match(r"--?[\w.-]+=", text) else text
            if text.lstrip().startswith(("{", "[")) and '"' in text:
                self.script.inner.append(Inner(text, "option.json", inside))
            elif "os.environ" in text:
                self.script.inner.append(Inner(text, "python", inside))
            elif pattern("commands").search(text):
                self._follow_nested(text, inside, surely=False)

    def _set_for_program(self, word: Word, line: int, outer: Shell) -> None:
        """Set variables for the program: comma-separated NAME=VALUE, or NAME with the exported value of `outer`."""
        for part in re.split(r",(?=[A-Z_][A-Z0-9_]*=)", word.text):
            name, equals, tail = part.partition("=")
            if equals:
                self._set_pair(name, tail, word.raw.partition("=")[2] if OPEN in tail else tail, line)
            elif (before := outer.variables.get(name)) and before.exported:
                self.scope.variables[name] = before

    def _set_pair(self, name: str, value: str, raw: str, line: int) -> None:
        """Set a variable for the program that is being started."""
        self._sets += is_judged(name)
        self.set(Assigned(name, value, raw, line), exported=True)

    # -- built-ins

    def _end_block(self, call: _Call) -> Outcome:
        """Follow exit, return, break or continue."""
        outcome = SUCCESS
        if call.program in ("exit", "return") and call.words:
            status = call.words[0].text
            outcome = Outcome(success=status == "0") if status.isdecimal() else LIKELY
        elif call.words and call.words[0].text != "1":
            self._report(call.line, f"{call.program} of several loops")
        if {"exit": 1, "return": len(self._active)}.get(call.program, self.loops):
            raise _LeftError(call.program, outcome)
        return outcome

    def _source(self, call: _Call) -> Outcome:
        path = call.words[0].text if call.words else ""
        if path and path != "/dev/null":
            self.script.files.append(call.words[0].raw + f" (line {call.line})" * bool(call.line))
        return LIKELY

    def _echo(self, call: _Call) -> None:
        """Write the output of echo. It may contain Hydra overrides for a launcher."""
        texts = [each.text for each in call.words]
        text = " ".join(each for each in texts if each not in ("-e", "-n", "-E"))
        self._write_rows(text.replace("\\n", "\n") + "\n" * (texts[:1] != ["-n"]), call.line)
        for row in text.splitlines():
            if dotted := pattern("dotted").match(row):
                with self.during(scope=self.scope.copy()):
                    self._set_pair(dotted[1], row[dotted.end() :], row[dotted.end() :], call.line)
                    self._launch(f"the command of line {call.line}", sure=False)

    def _printf(self, call: _Call) -> None:
        """Write the output of printf; formatted values are unknown."""
        text = call.words[0].text if call.words else ""
        if text == "-v":
            self._assign_unknown(call)
        else:
            self._write_rows(OPEN if "%" in text else text.replace("\\n", "\n"), call.line)

    def _cat(self, call: _Call) -> Outcome:
        """Pass on the input of cat or tee; the content of files is unknown."""
        names = [each.text for each in call.words if each.text[:1] != "-"]
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
        text = " ".join(each.text for each in call.words)
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
        texts = [word.text for word in call.words]
        named = [word for word in call.words if word.text[:1] != "-"]
        if _NAMES["fish"] & {*texts[:2]} and len(named) > 1:
            value, raw = (" ".join(parts) for parts in zip(*((each.text, each.raw) for each in named[1:]), strict=True))
            self.set(Assigned(named[0].text, value, raw, call.line), exported=True)
            return
        for text, after in pairwise([*texts, ""]):
            if re.fullmatch(r"[-+][a-z]*a[a-z]*", text) or (text in ("-o", "+o") and after == "allexport"):
                self.scope.exports_all = text[0] == "-"
        if "--" in texts and any(NAMED.search(text) for text in texts):
            self._report(call.line, "the arguments that set gives")


def _name_in_container(name: str) -> str:
    """Return the name by which a container of Apptainer gets a variable: APPTAINERENV_NAME is NAME inside."""
    return re.sub(r"^(?:SINGULARITY|APPTAINER)ENV_", "", name)


def _redirects(node: Node) -> Iterator[Node]:
    """Yield the redirections of a statement, and nodes that the grammar puts inside a here-document redirection."""
    for child in node.children:
        yield child
        for each in child.children if child.type == "heredoc_redirect" else ():
            if each.type in (*_PARTS, "file_redirect", "ERROR"):
                yield each


def directives(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and options of scheduler directives with a `=`, such as `#SBATCH --export=...`."""
    for number, row in enumerate(text.splitlines(), start=1):
        match = re.match(r"\s*#(?:SBATCH|PBS|BSUB|FLUX:|\$)\s+(.*)", row)
        if match and "=" in match[1]:
            yield number, match[1].split(" #")[0]


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
    **dict.fromkeys(("exit", "return", "break", "continue"), _Reader._end_block),
    "setenv": lambda reader, call: reader._report(call.line, "setenv belongs to the C shell, which is not supported"),
    **dict.fromkeys((":", "true", "false"), lambda _reader, call: Outcome(success=call.program != "false")),
    **dict.fromkeys(("read", "getopts", "mapfile", "readarray", "let"), _Reader._assign_unknown),
    **dict.fromkeys(("eval", "trap"), _Reader._commands_in_words),
    **dict.fromkeys(_NAMES["declares"], lambda reader, call: reader._declare(call.program, call.words, call.line)),
}  # fmt: skip

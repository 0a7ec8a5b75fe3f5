"""Follow a shell script and return the environment of each program start: exported variables and launcher options.

The script is never run; its statements are followed in the order in which bash would execute them, first on the likely
way. Then the script is followed again for each condition that only a run decides, with the other outcome of it. OPEN
replaces text that comes from a program, an argument or the outer environment.
Specification: POSIX shell (XCU 2.9 commands), bash(1). docs/decisions/0039 lists what is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tree_sitter import Node

from planner.lint.expansion import MOST_LEVELS, WORK_OF_WORD, Function, Shell, parse, walk
from planner.lint.programs import (
    END,
    LIKELY,
    SUCCESS,
    TEXT,
    UNLIKELY,
    Call,
    Outcome,
    Programs,
    name_of,
    program_behind,
)
from planner.lint.script import NAMED, OPEN, Assigned, Inner, Script, Word, is_judged, words

_MOST_COMMANDS = 20_000  # limit of followed commands; each loop iteration, way and function call counts
_MOST_ROUNDS = 64  # iterations of one loop

# A variable that an arithmetic expression changes
_CHANGED = re.compile(r"\b([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)([A-Za-z_]\w*)")
_USED = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")
_LITERAL = re.compile(r"[\w./:-]+")
_IN_DOCUMENT = re.compile(r"(?<!\\)\$(?:\w+|\{[^{}\n]*\})")
_NAMES = words()["shell"]
# A statement that ends the script or function
_LEAVES = re.compile(r"(?:^|[;{\s])(?:exit|return)\b[^\n;]*[;}\s]*\Z")
_PARTS = ("pipeline", "list", "&&", "||")  # nodes that the grammar puts inside a here-document redirection


class _Way(NamedTuple):
    """One way through the script: it differs from the likely way in the outcome of some conditions."""

    choices: Mapping[str, bool] = {}  # condition -> outcome
    labels: tuple[str, ...] = ()
    function: str = ""  # a function that the script does not call, followed at its end


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
    return [each for each in reader.shell.variables.values() if each.exported]


def expand(text: str) -> str:
    """Expand a value with references such as `${NAME:-default}` (Compose, envsubst); unknown parts become OPEN."""
    reader = _Reader({}, ())
    reader.source = ('"' + text.replace('"', '\\"') + '"').encode("utf-8", "replace")
    name = next(walk(parse(reader.source), "string"), None)
    return OPEN if name is None or name.end_byte != len(reader.source) else reader.value(name)


class _Reader(Programs):
    """Follows the statements of a script, and records the environment of each program that it starts."""

    def __init__(self, known: Mapping[str, str], before: Sequence[Assigned]) -> None:
        super().__init__(known, before)
        self._texts: dict[tuple[str, int], tuple[bytes, Node | None]] = {}
        self._called: set[int] = set()  # ids of the bodies of called functions
        self._blocks = self._commands = 0
        self._ways, self._way = [_Way()], _Way()
        self._choices: dict[str, bool] = {}  # outcome of each condition on this way
        self._met: set[tuple[str, str]] = set()  # conditions, and outcomes at a node, by function
        self._only_assigns = True

    # -- the whole text

    def follow_ways(self, start: Callable[[], object]) -> Script:
        """Follow every way through the script. Return the settings of its launches, and those that no launch gets."""
        first, end = self.shell, self.shell
        for number, way in enumerate(self._ways):  # conditions that are met add ways
            self._way, self._choices, self.labels = way, dict(way.choices), way.labels
            self.ahead, self.rows = set(way.choices), False
            if self._commands > _MOST_COMMANDS or not self.spend(0):
                break
            self.shell = (end if way.function else first).copy()
            try:
                if way.function:
                    body, self.source, self.first = end.functions[way.function]
                    self._visit(body)
                else:
                    start()
            except _LeftError:
                pass
            else:
                self._finish_way()
            end = end if number else self.shell
            if number + 1 == len(self._ways) and not way.function and self.may_be_sourced():
                names = [name for name, function in end.functions.items() if function.body.id not in self._called]
                self._ways += [_Way({}, (f"function {name}",), name) for name in names]
        self.merge_launches()
        return self.script

    def _finish_way(self) -> None:
        if self._only_assigns:  # a list of variables is meant to be exported
            for name in list(self.shell.variables):
                self.export(name, 0)
        self.launch(END, sure=False)

    def follow_text(self, text: str, line: int) -> Outcome:
        """Follow a text in the current shell."""
        saved = (self.source, self.first)
        if (text, line) not in self._texts:
            source = text.encode("utf-8", "replace")
            self._texts[text, line] = source, parse(source)
        (self.source, root), self.first = self._texts[text, line], line
        try:
            if root is not None:
                return self._follow(root.children)
        finally:
            self.source, self.first = saved
        self.unread(line, "the script is nested or broken beyond what is read")
        return SUCCESS

    def _not_understood(self, node: Node) -> None:
        """Report lines with invalid syntax near settings; statements inside are followed."""
        near = NAMED.search(self.text(node)) is not None
        plain = _NAMES["expansions"] | {"word", "number", "variable_name"}
        for child in node.children or [node]:
            if child.is_named and child != node and child.type not in plain:
                self._visit(child)
            elif near and not re.fullmatch(r"[\s<>&|;()\\]*", self.text(child)):
                self.unread(self.line(child), "unknown shell syntax")

    # -- control flow

    def _follow(self, nodes: Sequence[Node]) -> Outcome:
        """Follow statements in sequence."""
        outcome = SUCCESS
        for at, node in enumerate(nodes):
            if not node.is_named or node.type == "comment":
                continue
            in_background = at + 1 < len(nodes) and nodes[at + 1].type == "&"
            outcome = self.follow_apart([node]) if in_background else self._visit(node)
        return outcome

    def _visit(self, node: Node) -> Outcome:
        """Follow one statement."""
        self._blocks += 1
        self._commands += 1
        try:
            if self._blocks > MOST_LEVELS or self._commands > _MOST_COMMANDS or not self.spend(0):
                self.unread(self.line(node), "too many or too deeply nested commands")
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

    def follow_apart(self, nodes: Sequence[Node]) -> Outcome:
        """Follow statements in a subshell."""
        outside, self.shell = self.shell, self.shell.copy()
        try:
            return self._follow(nodes)
        except _LeftError as left:
            return left.outcome
        finally:
            self.shell = outside

    def _decide(self, outcome: Outcome, node: Node, label: str, condition: str = "") -> bool:
        """Return the outcome of a condition on this way, which stays the same as long as it reads the same values.

        A condition that is met for the first time, or at a node where it has not had its other outcome, adds a way.
        """
        if outcome.known:
            return outcome.success
        # The command that decides; of a list it is the last one, which may stand alone elsewhere
        condition = condition or self.text(node.children[-1] if node.type == "list" else node)
        key = "\0".join([condition, *map(self.parameter, dict.fromkeys(_USED.findall(condition)))])
        self.ahead.discard(key)
        success = self._choices.setdefault(key, outcome.success)
        met = {(self._way.function, key), (self._way.function, f"{node.id} {not success}")}
        if not met <= self._met and key not in self._way.choices:
            labels = (*self.labels, f"else of {label}" if success else label)
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
        text, line = self.text(node), self.line(node)
        for match in _CHANGED.finditer(text):
            self.assign(match[1] or match[2], OPEN, text, line)
        return UNLIKELY

    def _subshell(self, node: Node) -> Outcome:
        return self.follow_apart(node.children)

    def _define(self, node: Node) -> Outcome:
        name = node.child_by_field_name("name") or node
        body = node.child_by_field_name("body") or node.named_children[-1]
        self.shell.functions[self.text(name)] = Function(body, self.source, self.first)
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
                self.unread(self.line(item), "an item of case that goes on to the next one")
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
                self.assign(changed, word, raw, self.line(node))
            self._loops += 1
            try:
                outcome = self._visit(body)
            except _LeftError as left:
                if left.how == "break":
                    break
                if left.how != "continue":
                    raise
            finally:
                self._loops -= 1
        return outcome

    # -- texts that commands write and read

    def _pipeline(self, node: Node) -> Outcome:
        """Follow the commands of a pipeline, each in a subshell. What they write is for the last one."""
        parts = [child for child in node.children if child.is_named]
        saved, self.target = self.target, self._reader_of(parts[-1])
        for part in parts[:-1]:
            self.follow_apart([part])
        self.target = saved
        return self.follow_apart(parts[-1:])

    def _reader_of(self, node: Node) -> str:
        """Return the program that a pipeline ends with, or the file that it writes."""
        words = [Word(each, each) for each in self.text(node)[:1000].split()]
        program = program_behind(words) if words else 0
        rest = [each.text for each in words[program + 1 :] if each.text[:1] not in ("-", ">")]
        tee = name_of(words[program]) == "tee" if program < len(words) else False
        return rest[0] if tee and rest else name_of(words[program]) if program < len(words) else ""

    def _redirected(self, node: Node) -> Outcome:
        """Follow a statement with its output file and its here-document."""
        body, target = node.child_by_field_name("body"), self._target(node)
        after = [each for each in _redirects(node) if each.type in _PARTS]
        rest = [child for each in after for child in ([e for e in each.children if e.is_named] or [each])]
        if after and after[0].type == "pipeline" and not target:
            target = self._reader_of(rest[-1])
        saved = self.input, self.target
        self.input, self.target = self._document(node) or self.input, target or self.target
        try:
            outcome = self._visit(body) if body is not None else SUCCESS
        finally:
            document = self.input
            self.input, self.target = saved
        if document is not None and document != self.input:  # no command of a compound statement took it
            self.pass_on(document._replace(target=target))
        for each in _redirects(node):
            if each.type == "ERROR":
                self._not_understood(each)
        for each in rest:
            self.follow_apart([each])
        return outcome

    def _target(self, node: Node) -> str:
        """Return the output file of a statement, or ""; commands inside other redirections are followed."""
        target = ""
        for redirect in _redirects(node):
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
        saved, self.target = self.target, TEXT
        self.follow_apart(nodes)
        self.target = saved

    # -- simple commands

    def _test(self, node: Node) -> Outcome:
        """Follow the operands of `[ ]` or `[[ ]]`; the result is unknown."""
        for child in node.named_children:
            self.value(child)
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
        self.declare(self.text(node.children[0]), given, self.line(node))
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
        words = self._words(node)
        for child in node.children:
            if child.has_error and child.type not in _NAMES["expansions"]:
                for error in walk(child, "ERROR"):
                    self._not_understood(error)
        self.input = self._document(node) or self.input
        gaps = [
            self.source[each.end_byte : after.start_byte].replace(b"\\\n", b"") + b"\n" * (after.type == "comment")
            for each, after in pairwise(node.children) if each.type == "variable_assignment"
        ]  # fmt: skip
        ends_line = any(b"\n" in gap for gap in gaps)  # the grammar takes the next line for their command
        hidden: dict[str, Assigned | None] = {}
        for child in [each for each in node.children if each.type == "variable_assignment"]:
            given = self.evaluate(child)
            if words and not ends_line:
                hidden.setdefault(given.name, self.shell.variables.get(given.name))
            self.set(given, exported=True if words and not ends_line else None)
            if is_judged(given.name) and ends_line:
                self.unread(self.line(node), "several assignments at the end of a line")
        if not words:
            return SUCCESS
        if any(map(is_judged, hidden)) and _NAMES["declares"].intersection(word.text for word in words[:2]):
            self.unread(self.line(node), "an assignment before export or another declaration")
        try:
            return self.run(words, self.line(node))
        finally:
            self.shell.restore(hidden)

    def run(self, words: list[Word], line: int) -> Outcome:
        """Follow one simple command: a built-in, a function, or a program."""
        given, self.input = self.input, None
        self.spend(WORK_OF_WORD * len(words))
        self._only_assigns = False
        at = program_behind(words)
        wrappers, program = [name_of(each) for each in words[:at]], name_of(words[at]) if at < len(words) else ""
        of_shell = _NAMES["of_shell"].issuperset(wrappers)
        builtin = _BUILTINS.get(program)
        if builtin and (of_shell or program in ("cat", "tee")):
            return builtin(self, Call(program, words[at + 1 :], line, given)) or SUCCESS
        if of_shell and program in self.shell.functions and program not in self.active:
            return self._call(words[at:], line)
        if program:
            outer, self.shell = self.shell, self.shell.copy()
            try:
                self.remove(words)
                for word in words[:at]:  # sudo accepts NAME=VALUE before the program
                    self.set_for_program(word, line, outer)
                self.run_program(words[at:], line, given, outer)
            finally:
                self.shell = outer
        if program and "exec" in wrappers:
            raise _LeftError("exit", LIKELY)
        return LIKELY

    def _call(self, words: list[Word], line: int) -> Outcome:
        """Follow the call of a function. Its arguments may be a command that it runs."""
        name, shell = name_of(words[0]), self.shell
        if any(NAMED.search(word.text) for word in words[1:]):
            self.shell = shell.copy()
            self.run_program([Word("env", "env"), *words[1:]], line, None, shell)
            self.shell = shell
        saved, before = (self.source, self.first, self._loops), dict(shell.variables)
        (body, self.source, self.first), self._loops = shell.functions[name], 0
        self._called.add(body.id)
        self.active.append(name)  # recursive calls are not followed
        self.local.append(set())
        try:
            return self._visit(body)
        except _LeftError as left:
            if left.how != "return":
                raise
            return left.outcome
        finally:
            shell.restore({each: before.get(each) for each in self.local.pop()})
            self.active.pop()
            self.source, self.first, self._loops = saved

    def nested(self, text: str, line: int, *, surely: bool = True) -> None:
        """Follow a script run by another shell: `bash -c`, ssh, a here-document. `surely` False: it may be prose."""
        started, unread, shell = self.started, len(self.script.unread), self.shell
        self.shell = Shell({name: each for name, each in shell.variables.items() if each.exported})
        try:
            self.follow_text(text, line)
        except _LeftError:
            pass
        finally:
            self.shell = shell
        if not surely:
            del self.script.unread[unread:]
            if self.started == started:
                self.launch(f"the command of line {line}", sure=False)

    # -- built-ins that change the control flow

    def _end_block(self, call: Call) -> Outcome:
        """Follow exit, return, break or continue."""
        outcome = SUCCESS
        if call.program in ("exit", "return") and call.words:
            status = call.words[0].text
            outcome = Outcome(success=status == "0") if status.isdecimal() else LIKELY
        elif call.words and call.words[0].text != "1":
            self.unread(call.line, f"{call.program} of several loops")
        if {"exit": 1, "return": len(self.active)}.get(call.program, self._loops):
            raise _LeftError(call.program, outcome)
        return outcome

    def _source(self, call: Call) -> Outcome:
        path = call.words[0].text if call.words else ""
        if path and path != "/dev/null":
            self.script.files.append(call.words[0].raw + f" (line {call.line})" * bool(call.line))
        return LIKELY


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
    "subshell": _Reader._subshell, "test_command": _Reader._test, "function_definition": _Reader._define,
    **dict.fromkeys(("variable_assignment", "variable_assignments"), _Reader._assignments),
    **dict.fromkeys(("declaration_command", "unset_command"), _Reader._declaration), "command": _Reader._command,
}  # fmt: skip

_BUILTINS: Mapping[str, Callable[[_Reader, Call], Outcome | None]] = {
    "echo": _Reader.echo, "printf": _Reader.printf, "cat": _Reader.cat, "tee": _Reader.cat,
    **dict.fromkeys((".", "source"), _Reader._source), "set": _Reader.options_of_shell,
    **dict.fromkeys(("exit", "return", "break", "continue"), _Reader._end_block),
    "setenv": lambda reader, call: reader.unread(call.line, "setenv belongs to the C shell, which is not supported"),
    **dict.fromkeys((":", "true", "false"), lambda _reader, call: Outcome(success=call.program != "false")),
    **dict.fromkeys(("read", "getopts", "mapfile", "readarray", "let"), _Reader.assign_unknown),
    **dict.fromkeys(("eval", "trap"), _Reader.commands_in_words),
    **dict.fromkeys(_NAMES["declares"], lambda reader, call: reader.declare(call.program, call.words, call.line)),
}  # fmt: skip

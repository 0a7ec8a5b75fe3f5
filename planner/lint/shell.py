"""Follow a shell script and return the environment of each program start: exported variables and launcher options.

The script is never run; its statements are followed in the order in which bash would execute them. If the status of a
command is unknown before a run, a copy of the shell state takes the other path, so both outcomes of each such command
are followed at least once. OPEN replaces text that comes from a program, an argument or the outer environment.
Specification: POSIX shell (XCU 2.9 commands), bash(1). docs/decisions/0039 lists what is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from tree_sitter import Node

from planner.lint.expansion import MOST_LEVELS, WORK_OF_WORD, Function, Input, Shell, parse_lines, walk
from planner.lint.programs import Call, Programs, name_of, program_behind
from planner.lint.script import NAMED, OPEN, Assigned, Script, Word, is_judged, words

_MOST_COMMANDS = 20_000  # limit of followed commands; each loop iteration, path and function call counts
_MOST_ROUNDS = 64  # limit of iterations of one loop

# A variable that an arithmetic expression changes
_CHANGED = re.compile(r"\b([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)([A-Za-z_]\w*)")
_USED = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")
_PATTERN = re.compile(r"[*?[]|\{.*(?:,|\.\.)")  # a word that expands to several words
_QUOTED = re.compile(r"""'[^']*'|"[^"]*"|\\.|\$\{[^}]*\}|\$\(.*\)""", re.DOTALL)
_IN_DOCUMENT = re.compile(r"(?<!\\)\$(?:\w+|\{[^{}\n]*\})")
_NAMES = words()["shell"]
# A statement that ends the script or function
_LEAVES = re.compile(r"(?:^|[;{\s])(?:exit|return)\b[^\n;]*[;}\s]*\Z")
_PARTS = ("pipeline", "list", "&&", "||")  # nodes that the grammar puts inside a here-document redirection

Shells = list[Shell]
"""The possible shell states after a statement: one per execution path."""


def read_shell(
    text: str, *, known: Mapping[str, str] | None = None, line: int = 1, before: Sequence[Assigned] = ()
) -> Script:
    """Return the environment of each program start in a script.

    `known` are variables that are set but not exported, `before` are exported variables. `line` is the number of the
    first line.
    """
    reader = _Reader(known or {}, before)
    return reader.finish(reader.follow_text(text, line))


def read_words(words: Sequence[str], line: int = 1, before: Sequence[Assigned] = ()) -> Script:
    """Return the environment of each program start of a command given as words, such as `command:` of a manifest."""
    reader = _Reader({}, before)
    return reader.finish(reader.run([Word(word, word, line) for word in words], line))


def read_assignment(text: str, known: Mapping[str, str], line: int) -> list[Assigned]:
    """Return the variables that `NAME=value` sets, including names that lint does not check."""
    reader = _Reader(known, ())
    reader.follow_text(f"export {text}", line)
    return [each for each in reader.shell.variables.values() if each.exported]


def expand(text: str) -> str:
    """Expand a value with references such as `${NAME:-default}` (Compose, envsubst); unknown parts become OPEN."""
    reader = _Reader({}, ())
    reader.source, root = parse_lines(('"' + text.replace('"', '\\"') + '"').encode("utf-8", "replace"))
    name = next(walk(root, "string"), None)
    return OPEN if name is None or name.end_byte != len(reader.source) else reader.value(name)


class _Reader(Programs):
    """Follows the statements of a script, and records the environment of each program that it starts."""

    def __init__(self, known: Mapping[str, str], before: Sequence[Assigned]) -> None:
        super().__init__(known, before)
        self._texts: dict[tuple[str, int], tuple[bytes, Node | None]] = {}
        self._called: set[int] = set()  # ids of the bodies of called functions
        self._blocks = self._commands = self._loops = 0
        self._ways: set[tuple[int, bool]] = set()  # followed outcomes of conditions: id of the node, outcome
        self._tried: dict[str, int] = {}  # condition -> number of earlier unlikely outcomes on its path
        self._only_assigns = True

    # -- the whole text

    def follow_text(self, text: str, line: int) -> Shells:
        """Follow a text in the current shell."""
        saved, ends = (self.source, self.first), [self.shell]
        if (text, line) not in self._texts:
            self._texts[text, line] = parse_lines(text.encode("utf-8", "replace"))
        (self.source, root), self.first = self._texts[text, line], line
        if root is None:
            self.unread(line, "the script is nested or broken beyond what is read")
        else:
            ends = self._follow(root.children, ends)
        self.source, self.first = saved
        return ends

    def finish(self, ends: Shells) -> Script:
        """Return the settings of all launches and of single launches, and the settings that no launch gets."""
        ends = [each for each in ends if each.left != "exit"]
        if self._only_assigns:  # a list of variables is meant to be exported
            for self.shell in ends:
                for name in list(self.shell.variables):
                    self.export(name, 0)
        if not any(each.sure for each in self.launches):
            for self.shell in ends:
                self.launch("the end", sure=False)
        if self.runs_unknown or not any(each.sure for each in self.launches):
            self._follow_functions(ends[:1])
        self.merge_launches()
        return self.script

    def _follow_functions(self, ends: Shells) -> None:
        """Follow functions that were not called, because a script that sources this one may call them."""
        for end in ends:
            for name, function in end.functions.items():
                body, self.source, self.first = function
                self._tried, self._ways = {}, set()
                if body.id not in self._called:
                    started, self.shell = self.started, end.copy()
                    self.shell.choices[name] = (True, f"function {name}")
                    self.shell.turns = (*end.turns, name)
                    self._follow([body], [self.shell])
                    if self.started == started:
                        self.launch(f"function {name}", sure=False)

    def _not_understood(self, node: Node, shells: Shells) -> None:
        """Report lines with invalid syntax near settings; statements inside are followed."""
        near = NAMED.search(self.text(node)) is not None
        plain = _NAMES["expansions"] | {"word", "number", "variable_name"}
        for child in node.children or [node]:
            if child.is_named and child != node and child.type not in plain:
                self._visit(child, shells)
            elif near and not re.fullmatch(r"[\s<>&|;()\\]*", self.text(child)):
                self.unread(self.line(child), "unknown shell syntax")
        for shell in shells:
            shell.status, shell.likely = None, None

    # -- ways through the script

    def _follow(self, nodes: Sequence[Node], shells: Shells) -> Shells:
        """Follow statements in sequence, in each of the shell states."""
        for at, node in enumerate(nodes):
            if node.is_named and node.type != "comment":
                here, gone = [each for each in shells if not each.left], [each for each in shells if each.left]
                if not here:
                    break
                if at + 1 < len(nodes) and nodes[at + 1].type == "&":
                    for shell in here:
                        self._apart([node], shell)
                else:
                    here = self._visit(node, here)
                shells = self._merged([*here, *gone])
        return shells

    def _visit(self, node: Node, shells: Shells) -> Shells:
        """Follow one statement in shell states that have not exited."""
        self._blocks += 1
        self._commands += sum(1 + len(shell.variables) // 32 for shell in shells)
        ways, simple = _FOLLOW.get(node.type), _EACH.get(node.type)
        if self._blocks > MOST_LEVELS or self._commands > _MOST_COMMANDS or not self.spend(0):
            self.unread(self.line(node), "too many or too deeply nested commands")
            for shell in shells:
                shell.left = "exit"
        elif node.is_missing or node.type == "ERROR" or (node.type == "test_command" and node.has_error):
            self._not_understood(node, shells)
        elif ways or simple:
            if node.type not in ("program", "variable_assignment", "variable_assignments"):
                self._only_assigns = False
            for shell in shells:
                shell.status, shell.likely = True, True
            if ways:
                shells = ways(self, node, shells)
            elif simple:
                ends = Shells()
                for self.shell in shells:
                    ends += simple(self, node, self.shell)
                shells = ends
        else:
            for shell in shells:
                shell.write(OPEN)
        self._blocks -= 1
        return shells

    def _apart(self, nodes: Sequence[Node], shell: Shell, *, reads: bool = False) -> Input:
        """Follow statements in a subshell. Returns their output if it is read."""
        inside, tried, ways = shell.copy(), self._tried, self._ways
        inside.output = Input() if reads else shell.output
        self._tried, self._ways = dict(tried), set(ways)
        ends = self._follow(nodes, [inside])
        self.shell, self._tried, self._ways = shell, tried, ways
        shell.status, shell.likely = ends[0].status if len(ends) == 1 else None, ends[0].likely
        written = ends[0].output or Input()
        if ends[0].choices.keys() - shell.choices.keys():
            written = Input(OPEN, written.line)
        if not reads and shell.output is not None:
            shell.output = written
        return written

    def capture(self, nodes: Sequence[Node]) -> str:
        """Return the output of a command substitution."""
        return self._apart(nodes, self.shell, reads=True).text

    def _merged(self, shells: Shells) -> Shells:
        """Merge equal shell states. Assumptions in which merged states differ are dropped."""
        found = Shells()
        for shell in sorted(shells, key=lambda each: len(each.turns)):  # the most likely path first
            same = next((each for each in found if each.is_like(shell)), None)
            if same is None:
                found.append(shell)
                continue
            for key in [key for key, choice in same.choices.items() if shell.choices.get(key) != choice]:
                del same.choices[key]
            if same.status != shell.status:
                same.status, same.likely = None, same.status is not False
        return found

    def _decide(self, shells: Shells, node: Node, label: str) -> tuple[Shells, Shells]:
        """Return the shell states in which a command succeeds, and those in which it fails.

        A state keeps its assumed outcome of a condition as long as the condition reads the same values. If the status
        is unknown, the most likely state takes both outcomes. So does one state if an outcome has not yet been followed
        at this node.
        """
        ways: dict[bool, Shells] = {True: [], False: []}
        place = node.id
        while node.type == "list":  # open only where its last command is, which may stand alone elsewhere
            node = node.children[-1]
        text = self.text(node)
        used = dict.fromkeys(_USED.findall(text))
        undecided = [each for each in shells if each.status is None and not each.left]
        for shell in shells:
            if shell in undecided:
                self.shell = shell
                key = "\0".join([text, *map(self.parameter, used)])
                if key not in shell.choices:
                    shell.choices[key] = (bool(shell.likely), "")
                    if len(shell.turns) < self._tried.get(key, MOST_LEVELS):
                        self._tried[key] = len(shell.turns)
                        self._turn(shell, key, label, ways)
                shell.status = shell.choices[key][0]
            ways[bool(shell.left or shell.status)].append(shell)
        for way, taken in ways.items():
            if undecided and not taken and (place, way) not in self._ways:
                self.shell = undecided[0]
                self._turn(self.shell, "\0".join([text, *map(self.parameter, used)]), label, ways)
            self._ways.add((place, way))
        return ways[True], ways[False]

    def _turn(self, shell: Shell, key: str, label: str, ways: Mapping[bool, Shells]) -> None:
        """Add a copy of the shell state with the other outcome."""
        other, way = shell.copy(), not shell.choices[key][0]
        other.turns, other.status = (*shell.turns, key), way
        other.choices[key] = (way, label if way else f"else of {label}")
        ways[way].append(other)

    def _list(self, node: Node, shells: Shells) -> Shells:
        """Follow `a && b || c`. The grammar nests such lists to the left, so a loop replaces deep recursion."""
        chain: list[tuple[str, Node]] = []
        while node.type == "list":
            chain.append((node.children[1].type, node.children[-1]))
            node = node.children[0]
        ends = self._follow([node], shells)
        for sign, each in reversed(chain):
            if self._leaves([each]):
                for end in ends:
                    end.likely = sign == "||"
            yes, no = self._decide(ends, node, f"if {self._title([node])}")
            on, rest = (yes, no) if sign == "&&" else (no, yes)
            ends, node = self._merged([*self._follow([each], on), *rest]), each
        return ends

    def _negated(self, node: Node, shells: Shells) -> Shells:
        ends = self._follow(node.children[-1:], shells)
        for each in ends:
            each.negate()
        return ends

    def _block(self, node: Node, shells: Shells) -> Shells:
        """Follow a block of statements, or an arithmetic command `((...))`, which the grammar parses as a block."""
        if not node.children or node.children[0].type != "((":
            return self._follow(node.children, shells)
        text, line = self.text(node), self.line(node)
        for self.shell in shells:
            self.arithmetic(text)
            for match in _CHANGED.finditer(text):
                self.assign(match[1] or match[2], OPEN, text, line)
            self.shell.status, self.shell.likely = None, False
        return shells

    def _subshell(self, node: Node, shell: Shell) -> Shells:
        self._apart(node.children, shell)
        return [shell]

    def _define(self, node: Node, shell: Shell) -> Shells:
        name = node.child_by_field_name("name") or node
        body = node.child_by_field_name("body") or node.named_children[-1]
        shell.functions[self.text(name)] = Function(body, self.source, self.first)
        return [shell]

    def _leaves(self, nodes: Sequence[Node]) -> bool:
        """Whether statements end the script or function. Such a branch is taken to be unlikely."""
        last = [each for each in nodes if each.is_named and each.type != "comment"][-1:]
        return any(_LEAVES.search(self.text(each)) for each in last)

    def _title(self, nodes: Sequence[Node]) -> str:
        text = " ".join(self.text(node)[:400] for node in nodes[:80])
        return re.sub(r"\s+", " ", re.sub(r"[\"']", "", text)).strip()[:80]

    def _if(self, node: Node, shells: Shells) -> Shells:
        """Follow the conditions and branches of `if`."""
        ends, todo = Shells(), shells
        clauses = [node, *(each for each in node.children if each.type in ("elif_clause", "else_clause"))]
        for clause, after in zip(clauses, [*clauses[1:], None], strict=True):
            children = [each for each in clause.children if each.type not in ("elif_clause", "else_clause")]
            then = next((at for at, each in enumerate(children) if each.type == "then"), 0)
            condition, yes = [each for each in children[1:then] if each.is_named], todo
            todo = []
            if condition:
                yes = self._follow(condition, yes)
                otherwise = after is not None and after.type == "else_clause" and self._leaves(after.children)
                for each in yes if otherwise or self._leaves(children) else ():
                    each.likely = otherwise
                yes, todo = self._decide(yes, condition[-1], f"if {self._title(condition)}")
            ends += self._follow(children[then + 1 :], yes)
        for each in todo:
            each.status = True
        return self._merged([*ends, *todo])

    def _case(self, node: Node, shells: Shells) -> Shells:
        """Follow each item of `case` on its own path. The value is not compared with the patterns."""
        of = node.child_by_field_name("value") or node
        for self.shell in shells:
            self.value(of)
        ends, todo = Shells(), shells
        items = [each for each in node.children if each.type == "case_item"]
        last = next((each for each in reversed(items) if not self._leaves(each.children)), None)
        for item in items:
            patterns = item.children_by_field_name("value")
            for each in todo:
                each.status, each.likely = True if "*" in map(self.text, patterns) else None, item == last
            yes, todo = self._decide(todo, item, f"case {self._title([of])} in {self._title(patterns)}"[:80])
            ends += self._follow([each for each in item.children if each not in patterns], yes)
            if item.children[-1].type in (";&", ";;&"):
                self.unread(self.line(item), "an item of case that goes on to the next one")
        for each in todo:
            each.status = True
        return self._merged([*ends, *todo])

    def _loop(self, node: Node, shell: Shell) -> Shells:
        """Follow a loop: one iteration per word of a `for`, or three if the words or the condition are unknown.

        Variables that the second of the three changes become unknown for the third.
        """
        body, given = node.child_by_field_name("body") or node, self._words_of_loop(node)
        ends, todo = Shells(), [shell]
        for number in range(3 if given is None else len(given)):
            todo = self._begin_round(node, todo, given[number] if given is not None else None)
            if given is None and not number:  # on one path the loop has no iteration
                todo, ends = self._decide(todo, node, f"the loop of line {self.line(node)}")
                for each in ends:
                    each.status = True
            begun, todo = todo, Shells()
            for each in begun:
                before = each.copy()
                self._loops += 1
                after = self._follow([body], [each])
                self._loops -= 1
                for end in after:
                    if given is None and number == 1:
                        _forget(end, before)
                    (ends if end.left not in ("", "continue") else todo).append(end)
                    end.left = "" if end.left in ("break", "continue") else end.left
            todo = self._merged(todo)
        return self._merged([*ends, *todo])

    def _words_of_loop(self, node: Node) -> list[Word] | None:
        """Return the words of a `for`; None if unknown, such as `{0..7}` or the files that `*` matches."""
        if node.type != "for_statement" or node.children[0].type != "for":
            return None
        given = node.children_by_field_name("value")
        words = [word for each in given for word in self.words(each)]
        several = not given or any(_PATTERN.search(_QUOTED.sub("", self.text(each))) for each in given)
        return None if several or len(words) > _MOST_ROUNDS or any(OPEN in word.text for word in words) else words

    def _begin_round(self, node: Node, todo: Shells, word: Word | None) -> Shells:
        """Start an iteration: follow the condition of a loop, or set the variable of a `for`."""
        body, name = node.child_by_field_name("body"), node.child_by_field_name("variable")
        if node.type == "while_statement":
            todo = self._follow([e for e in node.named_children if e != body and e.type != "comment"], todo)
            for each in todo if node.children[0].type == "until" else ():
                each.negate()
            return todo
        head = self.source[node.start_byte : body.start_byte if body else node.end_byte].decode("utf-8", "replace")
        word = word or Word(OPEN, head.partition(" in ")[2].split(";")[0].strip())
        for self.shell in todo:
            self.shell.status, self.shell.likely = None, True
            for changed in [self.text(name)] if name else {m[1] or m[2] for m in _CHANGED.finditer(head)}:
                self.assign(changed, word.text, word.raw, self.line(node))
        return todo

    def _pipeline(self, node: Node, shell: Shell) -> Shells:
        """Follow a pipeline: each command runs in a subshell and reads the output of the previous one."""
        parts = [child for child in node.children if child.is_named]
        for part in parts[:-1]:
            written = self._apart([part], shell, reads=True)
            self.input = Input(written.text, written.line or self.line(part))
        self._apart(parts[-1:], shell)
        self.input = Input()
        return [shell]

    def _redirected(self, node: Node, shell: Shell) -> Shells:
        """Follow a statement with its output file and its here-document."""
        document, target, body = self._document(node), self._target(node), node.child_by_field_name("body")
        after = [each for each in _redirects(node) if each.type in _PARTS]
        self.input = document if document.text else self.input
        before, ends = shell.output, [shell]
        if target or after:
            shell.output = Input()
        if body is None:
            shell.write(OPEN)
        else:
            ends = self._visit(body, [shell])
        if self.input.text and document.text:
            self.read_input("", self.input, target)
        self.input, written = Input(), ends[0].output or Input()
        written = Input(written.text, written.line or self.line(node))
        for end in ends if target or after else ():
            end.output = before
        if target and not target.startswith("/dev/") and written.text.strip(OPEN + "\n"):
            self.write_file(target, written)
        for each in _redirects(node):
            if each.type == "ERROR":
                self._not_understood(each, ends)
        for each in after:
            for part in [child for child in each.children if child.is_named] or [each]:
                self.input = written
                self._apart([part], shell)
        return ends

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

    def _document(self, node: Node) -> Input:
        """Return the here-document or here-string of a statement. Variables in a here-document are unknown."""
        for redirect in node.children:
            if redirect.type == "herestring_redirect":
                return Input(self.value(redirect.children[-1]), self.line(redirect))
            body, start = (next(walk(redirect, kind), None) for kind in ("heredoc_body", "heredoc_start"))
            if redirect.type != "heredoc_redirect" or body is None or start is None:
                continue
            text = self.text(body)
            if redirect.children[0].type == "<<-":
                text = re.sub(r"^\t+", "", text, flags=re.MULTILINE)
            self.spend(4 * len(text))
            if self.text(start)[:1] not in "'\"\\":  # the grammar misses expansions after an escaped `$`
                text = _IN_DOCUMENT.sub(OPEN, text).replace("\\$", "$")
            return Input(text, self.line(body))
        return Input()

    def _test(self, node: Node, shell: Shell) -> Shells:
        """Follow the operands of `[ ]` or `[[ ]]`; the result is unknown."""
        for child in node.named_children:
            self.value(child)
        shell.status, shell.likely = None, False
        return [shell]

    # -- simple commands

    def _assignments(self, node: Node, shell: Shell) -> Shells:
        for each in [node] if node.type == "variable_assignment" else node.named_children:
            self.set(self.evaluate(each))
        shell.status = None if "$(" in self.text(node) or "`" in self.text(node) else True
        shell.likely = True
        return [shell]

    def _declaration(self, node: Node, shell: Shell) -> Shells:
        """Follow export, declare, typeset, local, readonly or unset. bash expands all words before it assigns."""
        given: list[Assigned | Word] = []
        for each in node.children[1:]:
            if each.type == "variable_assignment":
                given.append(self.evaluate(each))
            elif each.is_named and each.type != "comment":
                given += self.words(each)
        self.declare(self.text(node.children[0]), given, self.line(node))
        shell.status = True
        return [shell]

    def _words(self, node: Node) -> list[Word]:
        """Return the expanded words of a simple command."""
        words: list[Word] = []
        for child in node.children:
            if child.type == "command_name":
                words += self.words(child.children[0]) if child.children else []
            elif child.is_named and not child.type.endswith(("_redirect", "assignment")) and child.type != "comment":
                words += self.words(child)
        return words

    def _command(self, node: Node, shell: Shell) -> Shells:
        words, ends = self._words(node), [shell]
        for child in node.children:
            if child.has_error and child.type not in _NAMES["expansions"]:
                for error in walk(child, "ERROR"):
                    self._not_understood(error, ends)
        self.shell = shell
        document = self._document(node)
        self.input = document if document.text else self.input
        hidden: dict[str, Assigned | None] = {}
        for each in [child for child in node.children if child.type == "variable_assignment"]:
            given = self.evaluate(each)
            if words:
                hidden.setdefault(given.name, shell.variables.get(given.name))
            self.set(given, exported=True if words else None)
        if any(map(is_judged, hidden)) and _NAMES["declares"].intersection(word.text for word in words[:2]):
            self.unread(self.line(node), "an assignment before export or another declaration")
        if words:
            ends = self.run(words, self.line(node))
        for end in ends:
            end.restore(hidden)
        return ends

    def run(self, words: list[Word], line: int) -> Shells:
        """Follow one simple command: a built-in, a function, or a program."""
        given, self.input = self.input, Input()
        self.spend(WORK_OF_WORD * len(words))
        self._only_assigns = False
        shell, at = self.shell, program_behind(words)
        wrappers, program = [name_of(each) for each in words[:at]], name_of(words[at]) if at < len(words) else ""
        own = program in ("cat", "tee") or _NAMES["of_shell"].issuperset(wrappers)
        if own and (builtin := _BUILTINS.get(program)):
            shell.status, shell.likely = True, True
            return builtin(self, Call(program, words[at + 1 :], line, given)) or [shell]
        if program in shell.functions and program not in self.active and not wrappers:
            return self._call(words[at:], line, shell)
        if program:
            self.shell = shell.copy()
            self.remove(words)
            for word in words[:at]:  # sudo accepts NAME=VALUE before the program
                self.set_for_program(word, line, shell)
            self.run_program(words[at:], line, given, shell)
        self.shell = shell
        shell.status, shell.likely = None, True
        shell.write(OPEN)
        if program and "exec" in wrappers:
            shell.left = "exit"
        return [shell]

    def _call(self, words: list[Word], line: int, shell: Shell) -> Shells:
        """Follow the call of a function. Its arguments may be a command that it runs."""
        name = name_of(words[0])
        if any(NAMED.search(word.text) for word in words[1:]):
            self.shell = shell.copy()
            self.run_program([Word("env", "env"), *words[1:]], line, Input(), shell)
            self.shell = shell
        saved = self.source, self.first, self._loops
        (body, self.source, self.first), self._loops = shell.functions[name], 0
        self._called.add(body.id)
        self.active.append(name)  # recursive calls are not followed
        self.local.append(set())
        before = dict(shell.variables)
        ends = self._visit(body, [shell])
        hidden = {each: before.get(each) for each in self.local.pop()}
        for end in ends:
            end.left = "" if end.left == "return" else end.left
            end.restore(hidden)
        self.active.pop()
        self.source, self.first, self._loops = saved
        return self._merged(ends)

    def nested(self, text: str, line: int, *, surely: bool = True) -> None:
        """Follow a script run by another shell: `bash -c`, ssh, a here-document. `surely` False: it may be prose."""
        started, unread, shell = self.started, len(self.script.unread), self.shell
        given = {name: each for name, each in shell.variables.items() if each.exported}
        self.shell = Shell(given, choices=dict(shell.choices), turns=shell.turns)
        self.follow_text(text, line)
        self.shell = shell
        if not surely:
            del self.script.unread[unread:]
            if self.started == started:
                self.launch(f"the command of line {line}", sure=False)

    # -- built-ins that change the control flow

    def _end_block(self, call: Call) -> None:
        """Follow exit, return, break or continue."""
        if call.program in ("exit", "return") and call.words:
            self.shell.status = call.words[0].text == "0" if call.words[0].text.isdecimal() else None
        elif call.words and call.words[0].text != "1":
            self.unread(call.line, f"{call.program} of several loops")
        if {"exit": 1, "return": len(self.active)}.get(call.program, self._loops):
            self.shell.left = call.program

    def _source(self, call: Call) -> None:
        path = call.words[0].text if call.words else ""
        if path and path != "/dev/null":
            self.script.files.append(call.words[0].raw + f" (line {call.line})" * bool(call.line))
        self.shell.status = None
        self.shell.write(OPEN)

    def _truth(self, call: Call) -> None:
        self.shell.status = call.program != "false"


def _forget(shell: Shell, before: Shell) -> None:
    """Mark every variable that changed since `before` as unknown."""
    for name, each in shell.variables.items():
        if each != before.variables.get(name):
            shell.variables[name] = replace(each, value=OPEN, items=None)


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


_FOLLOW: Mapping[str, Callable[[_Reader, Node, Shells], Shells]] = {
    **dict.fromkeys(("program", "compound_statement", "do_group", "else_clause", "case_item"), _Reader._block),
    "list": _Reader._list, "negated_command": _Reader._negated, "if_statement": _Reader._if,
    "case_statement": _Reader._case,
}  # fmt: skip
_EACH: Mapping[str, Callable[[_Reader, Node, Shell], Shells]] = {
    "redirected_statement": _Reader._redirected, "pipeline": _Reader._pipeline, "subshell": _Reader._subshell,
    **dict.fromkeys(("for_statement", "while_statement", "c_style_for_statement"), _Reader._loop),
    "test_command": _Reader._test, "function_definition": _Reader._define, "command": _Reader._command,
    **dict.fromkeys(("variable_assignment", "variable_assignments"), _Reader._assignments),
    **dict.fromkeys(("declaration_command", "unset_command"), _Reader._declaration),
}  # fmt: skip

_BUILTINS: Mapping[str, Callable[[_Reader, Call], Shells | None]] = {
    "echo": _Reader.echo, "printf": _Reader.printf, "cat": _Reader.cat, "tee": _Reader.tee,
    **dict.fromkeys((".", "source"), _Reader._source), "set": _Reader.options_of_shell,
    **dict.fromkeys(("exit", "return", "break", "continue"), _Reader._end_block),
    "setenv": lambda reader, call: reader.unread(call.line, "setenv belongs to the C shell, which is not supported"),
    **dict.fromkeys((":", "true", "false"), _Reader._truth),
    **dict.fromkeys(("read", "getopts", "mapfile", "readarray", "let"), _Reader.assign_unknown),
    **dict.fromkeys(("eval", "trap"), _Reader.commands_in_words),
    **dict.fromkeys(_NAMES["declares"], lambda reader, call: reader.declare(call.program, call.words, call.line)),
}  # fmt: skip

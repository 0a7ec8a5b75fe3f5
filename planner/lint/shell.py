"""Follow a shell script and return the environment of each program start: exported variables and launcher options.

The script is never run; its statements are followed in the order in which bash would execute them, first on the likely
way. Then the script is followed again for each condition that only a run decides, with the other outcome of it. OPEN
replaces text that comes from a program, an argument or the outer environment.
Specification: POSIX shell (XCU 2.9 commands, 2.14 special built-ins), bash(1); fish set; mpirun(1) -x, Hydra -genv,
srun(1) and sbatch(1) --export, docker-run(1) -e. docs/decisions/0135 lists what is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

from tree_sitter import Node

from contracts.tables import read_table
from planner.lint.expansion import MAX_LEVELS, NEXT_ITEM, WORK_OF_WORD, Expander, Shell, parse, walk
from planner.lint.findings import finding
from planner.lint.programs import (
    MAX_OPTIONS,
    find_program,
    is_idle,
    is_launcher,
    list_removed,
    name_of,
    split_command,
)
from planner.lint.script import (
    JOB_SIZE,
    NAME,
    NAMED,
    OPEN,
    WORDS,
    Assigned,
    Inner,
    Script,
    Settings,
    Unread,
    Word,
    is_judged,
    pattern,
)
from planner.nccl_env import is_read

_MAX_COMMANDS = 20_000  # limit of followed commands; each loop iteration, way and function call counts
_MAX_ROUNDS = 64  # iterations of one loop
_MAX_LAUNCHES = 1000  # launches or ways with different settings

_SCHEDULED = re.compile(rb"(?m)^\s*#(?:SBATCH|PBS|BSUB|FLUX:)\s")  # its daemons start ranks with all variables
# The end of the line behind `A=1 B=2`; the grammar joins the next line with such assignments
_ENDS_LINE = re.compile(rb"(?:[ \t]|\\\n)*(?:#[^\n]*)?\n")
_NAMES = WORDS["shell"]

_Way = Mapping[str, tuple[bool, str]]
"""One way through the script: the conditions whose outcome is not the likely one, each with its outcome and label."""


class _Launch(NamedTuple):
    """A program start, with its settings on one way through the script."""

    label: str  # "the launch of line 3"; "" at the end of the script
    sure: bool  # the program is a launcher; False: it may be one
    way: tuple[str, ...]  # unlikely outcomes that lead to it
    settings: Settings


def read_shell(text: str, *, line: int = 1, before: Iterable[Assigned] = ()) -> Script:
    """Return the environment of each program start in a script.

    `before` are variables that are set before it; `line` is the number of the first line, or 0.
    """
    reader = _Reader(before)
    of_fish = read_table(__file__, "data/forms.toml")["fish"] if pattern("fish").match(text) else ()
    for expression, replacement in of_fish:
        text = re.sub(expression, replacement, text)
    for number, row in enumerate(text.splitlines()):
        if (match := pattern("directive").match(row)) and "=" in match[1]:  # such as `#SBATCH --export=...`
            given = re.sub(r"(?:\A|\s)-v\s+", " --export=ALL,", match[1].split(" #")[0])  # -v of PBS
            options = read_shell("sbatch " + given, line=line and line + number)
            for settings in options.settings():
                reader.scope.variables |= settings
            reader.script.files += options.files
            reader.script.unread += options.unread
            if pattern("exports_none").match(row):  # the steps inherit it
                reader.scope.variables["SLURM_EXPORT_ENV"] = Assigned("SLURM_EXPORT_ENV", "NONE")
    reader.follow_ways(text, line)
    return reader.script


def read_assignment(text: str, before: Iterable[Assigned], line: int) -> list[Assigned]:
    """Return the variables that `NAME=value` sets, including names that lint does not check."""
    reader = _Reader(before)
    reader.follow_text(f"export {text}", line)
    return [each for each in reader.scope.variables.values() if each.exported]


def expand(text: str) -> str:
    """Expand a value with references such as `${NAME:-default}` (Compose, envsubst); unknown parts become OPEN."""
    assigned = read_assignment('A="' + text.replace('"', '\\"') + '"', (), 0)
    return assigned[0].value if [each.name for each in assigned] == ["A"] else OPEN


class _Reader(Expander):
    """Follows the statements of a script, and records the environment of each program that it starts."""

    def __init__(self, before: Iterable[Assigned] = ()) -> None:
        super().__init__(Shell({each.name: each for each in before}))
        self.script = Script()
        self._ways: list[_Way] = []
        self._way: _Way = {}
        self._met: set[str] = set()  # conditions, on all ways
        self._outcomes: dict[str, bool] = {}  # of the conditions that were met on this way
        self._known: dict[int, bool] = {}  # id of the list that was followed last, and its outcome if that is certain
        self._launches: dict[object, _Launch] = {}
        self._started = self._commands = 0  # number of program starts and of commands, repetitions included
        self._called: set[str] = set()  # functions
        self._calls_any = False  # an unknown command may call each function: `"$@"`, eval, `export -f`
        self._parse = cache(lambda text: parse(text.encode("utf-8", "replace")))  # once for all ways
        self._active: tuple[str, ...] = ()  # functions on the call stack
        self._arguments = [OPEN]  # of the function that is followed; those of the script are unknown
        self._pair = ""  # argument of `export` that this function has set already
        self._hidden: dict[str, Assigned | None] = {}  # what local variables of the function hide
        self._left = ""  # how this block was left: exit, return, break or continue
        self._target = ""  # the file or program that gets the output; empty: none that is known
        self._written: dict[str, Inner] = {}  # what echo and printf write on this way, by target
        self._input = OPEN  # the here-document that the next `read -d ''` reads

    # -- the whole text

    def follow_ways(self, text: str, line: int) -> None:
        """Follow every way through a script. Store the settings of its launches, and those that no launch gets."""
        root = self._parse(text)
        types = {each.type for each in root.named_children} if root is not None else set()
        self.scope.exports_all = types <= _NAMES["list_nodes"]  # a list of variables is meant to be exported
        self._follow_each_way(partial(self.follow_text, text, line))
        end = self.scope
        # Other scripts call the functions of a library
        for name in end.functions if types <= _NAMES["library_nodes"] or self._calls_any else ():
            if name not in self._called:
                self.scope = end.copy()
                self._follow_each_way(partial(self._call, [Word(name, name)], 0))
        self._store_launches()
        self.script.inner = list(dict.fromkeys(self.script.inner))

    def _follow_each_way(self, start: Callable[[], None]) -> None:
        """Follow a script or function on the likely way, and with the other outcome of each condition that it meets."""
        first, self._ways, self._met = self.scope, [{}], set()
        for way in self._ways:
            self.scope, self._way, self._left, self._written, self._outcomes = first.copy(), way, "", {}, {}
            if self._commands > _MAX_COMMANDS or not self.spend(0):
                break
            start()
            if not self._left:
                self._launch("", 0, sure=False)
            for each in self._written.values():
                self._pass_on(each)

    def _store_launches(self) -> None:
        """Store the settings of each launch and way, without repetitions.

        If the script starts launchers, what other programs get counts only for variables that no launcher gets.
        """
        launches = sorted(self._launches.values(), key=lambda each: (len(each.way), not each.sure))
        launched = {name for each in launches if each.sure for name in each.settings}
        has_launcher = any(each.sure for each in launches)
        by_settings: dict[frozenset[tuple[str, str]], _Launch] = {}
        for each in launches:
            settings = {name: variable for name, variable in each.settings.items() if each.sure or name not in launched}
            if each.label or not has_launcher:
                by_settings.setdefault(_get_pairs(settings), each._replace(settings=settings))
        for content, each in list(by_settings.items()):
            if any(content < other and each.way == launch.way for other, launch in by_settings.items()):
                del by_settings[content]
        several = len([each for each in by_settings.values() if not each.way]) > 1
        for each in by_settings.values():
            label = "; ".join(filter(None, [each.label if several else "", *each.way]))
            self.script.ways.append((label, each.settings))
        if len(by_settings) == 1:
            self.script.always = self.script.ways.pop()[1]
        for name in {name for each in launches for name in each.settings}:
            self.script.loose.pop(name, None)

    def follow_text(self, text: str, line: int) -> None:
        """Follow a text in the current shell."""
        root = self._parse(text)
        if root is None:
            self._report(line, "the script is nested or broken beyond what is read")
            return
        with self.during(source=text.encode("utf-8", "replace"), first=line):
            self._follow(root.children)

    def _report(self, line: int, reason: str) -> None:
        """Report a line that cannot be followed."""
        self.script.unread.append(Unread(line=line, why=reason))

    def _report_syntax(self, node: Node) -> None:
        """Report lines with invalid syntax near settings; statements inside are followed."""
        near = NAMED.search(self.text(node)) is not None
        for child in node.children or [node]:
            if child.type in _FOLLOW and child != node:
                self._follow([child])
            elif near and child.type != "comment" and not re.fullmatch(r"[\s<>&|;()\\]*", self.text(child)):
                self._report(self.line(child), "unknown shell syntax")

    # -- control flow

    def _follow(self, nodes: Sequence[Node]) -> None:
        """Follow statements in sequence."""
        for node, after in zip(nodes, [*nodes[1:], None], strict=False):
            if node.is_named and not self._left:
                if after is not None and after.type == "&":  # in the background
                    self._follow_apart([node])
                else:
                    self._visit(node)

    def _visit(self, node: Node) -> None:
        """Follow one statement."""
        is_broken = node.type == "ERROR" or (node.type == "test_command" and node.has_error)
        follow = _Reader._report_syntax if is_broken else _FOLLOW.get(node.type)
        if follow is None:
            return
        self._commands += 1
        if self.level >= MAX_LEVELS or self._commands > _MAX_COMMANDS or not self.spend(0):
            self._report(self.line(node), "too many or too deeply nested commands")
            self._left = "exit"
            return
        if node.type in ("command", "declaration_command") and pattern("unlike_setting").match(self.text(node)):
            self._report(self.line(node), "bash does not read this as a setting")
        before = self.source[max(0, node.start_byte - 400) : node.start_byte].decode("utf-8", "replace")
        if node.type == "command" and pattern("cut_off").search(before) and NAMED.search(before + self.text(node)):
            self._report(self.line(node), "a comment or blank behind `\\` ended the command above")
        with self.during(level=self.level + 1):
            follow(self, node)

    def _follow_apart(self, nodes: Sequence[Node]) -> None:
        """Follow statements in a subshell."""
        with self.during(scope=self.scope.copy(), _left=""):
            self._follow(nodes)

    def follow_substitution(self, nodes: Sequence[Node]) -> None:
        """Follow the commands of `$( )`."""
        with self.during(_target="a text"):
            self._follow_apart(nodes)

    def _decide(self, key: str, label: str, *, likely: bool) -> bool:
        """Return the outcome of a condition on this way. A condition that is met for the first time adds a way.

        Conditions with the same text and the same values of its variables have the same outcome.
        """
        key = "\0".join([key, *map(self.parameter, re.findall(r"[A-Za-z_]\w*", key))])
        if key not in self._met:
            self._met.add(key)
            self._ways.append({**self._way, key: (not likely, f"else of {label}" if likely else label)})
        outcome, _ = self._way.get(key, (likely, ""))
        return self._outcomes.setdefault(key, outcome)

    def _succeeds(self, node: Node, title: str, *, likely: bool | None = None) -> bool:
        """Return whether a command succeeds on this way. By default a program is likely to, and a test to fail."""
        if node.id in self._known:  # a list whose last command was not run
            return self._known[node.id]
        while node.type == "list":  # its last command decides
            node = node.children[-1]
        text = self.text(node)
        is_assigned = node.type in _NAMES["certain_nodes"] and "$(" not in text and "`" not in text
        is_certain = text.partition(" ")[0] in _NAMES["certain"] and next(walk(node, "pipeline"), None) is None
        if is_assigned or is_certain:
            return True
        if likely is None:
            tested = node.children[-1] if node.type == "negated_command" else node
            is_test = tested.type == "test_command" or text.startswith("((")
            likely = is_test == (node.type == "negated_command")
        succeeds = self._decide(text, f"if {title}", likely=likely)
        for test, name in re.findall(r"-([nz])\s+\"?\$\{?(\w+)", text):  # the variable is not empty behind this test
            if succeeds == (test == "n") and (variable := self.scope.variables.get(name)) and not variable.value:
                self.scope.variables[name] = variable._replace(value=OPEN)
        return succeeds

    def _list(self, node: Node) -> None:
        """Follow `a && b || c`. The grammar nests such lists to the left, so a loop replaces deep recursion."""
        list_id, chain = node.id, list[tuple[str, Node]]()
        while node.type == "list":
            chain.append((node.children[1].type, node.children[-1]))
            node = node.children[0]
        self._follow([node])
        success, is_followed = True, True
        for sign, each in reversed(chain):
            if is_followed and not self._left:
                is_guard = node.type == "test_command" and each.type != "test_command"  # what it guards is unlikely
                likely = sign == "||" if is_guard else None
                success = self._succeeds(node, self._title([node]), likely=likely)
            is_followed = success == (sign == "&&")
            self._follow([each] if is_followed else [])
            node = each
        self._known = {} if is_followed else {list_id: success}

    def _follow_block(self, node: Node) -> None:
        """Follow a block of statements. The grammar parses an arithmetic command `((...))` as a block, too."""
        if node.children and node.children[0].type == "((":
            self._forget(self.text(node), node)
        else:
            self._follow(node.children)

    def _forget(self, arithmetic: str, node: Node) -> None:
        """Make the variables of an arithmetic expression unknown, because it may change them."""
        for name in re.findall(r"[A-Za-z_]\w*", arithmetic):
            if name in self.scope.variables:
                self.set(Assigned(name, OPEN, self.text(node)[:80], self.line(node)))

    def _define(self, node: Node) -> None:
        name = node.child_by_field_name("name") or node
        body = node.child_by_field_name("body") or node.named_children[-1]
        self.scope.functions[self.text(name)] = body, self.source, self.first

    def _title(self, nodes: Sequence[Node]) -> str:
        text = " ".join(self.text(node)[:400] for node in nodes[:80])
        return re.sub(r"\s+", " ", re.sub(r"[\"']", "", text)).replace(OPEN, "...").strip()[:80]

    def _follow_if(self, node: Node) -> None:
        """Follow the conditions of `if` up to the branch that is taken."""
        clauses = [node, *(each for each in node.children if each.type in ("elif_clause", "else_clause"))]
        for clause in clauses:
            children = [each for each in clause.children if each not in clauses]
            then = next((index for index, each in enumerate(children) if each.type == "then"), 0)
            condition, branch = [each for each in children[1:then] if each.is_named], children[then + 1 :]
            self._follow(condition)
            leaves = any(pattern("leaves").search(self.text(each)) for each in branch)
            if not condition or self._succeeds(condition[-1], self._title(condition), likely=False if leaves else None):
                self._follow(branch)
                break

    def _follow_case(self, node: Node) -> None:
        """Follow each item of `case` on a separate way. The value is not compared with the patterns."""
        of, items = node.named_children[0], [each for each in node.children if each.type == "case_item"]
        self.value(of)
        last = next((each for each in reversed(items) if not pattern("leaves").search(self.text(each))), None)
        for item in items:
            patterns = item.children_by_field_name("value")
            if item.children[-1].type in (";&", ";;&"):
                self._report(self.line(item), "an item of case that falls through to the next one")
            label = f"case {self._title([of])} in {self._title(patterns)}"[:80]
            if "*" in map(self.text, patterns) or self._decide(label, label, likely=item == last):
                self._follow([each for each in item.children if each not in patterns])
                break

    def _loop(self, node: Node) -> None:
        """Follow the body of a loop: once for each literal word of a `for`, else once with an unknown variable."""
        body, name = node.child_by_field_name("body") or node, node.child_by_field_name("variable")
        items = node.children_by_field_name("value")
        head = self.source[node.start_byte : body.start_byte].decode("utf-8", "replace")
        list(map(self.value, items))
        if node.type == "while_statement":
            self._follow([each for each in node.named_children if each != body])
        elif name is None:
            self._forget(head, node)
        literal = 0 < len(items) <= _MAX_ROUNDS and all(pattern("literal").fullmatch(self.text(word)) for word in items)
        for word in map(self.text, items) if literal else (OPEN,):
            if name is not None:
                raw = word if literal else head.partition(" in ")[2].split(";")[0].strip()
                self.set(Assigned(self.text(name), word, raw, self.line(node)))
            with self.during(loops=self.loops + 1):
                self._follow([body])
            left, self._left = self._left, "" if self._left in ("break", "continue") else self._left
            if left == "break":
                break

    # -- texts that commands write and read

    def _follow_pipeline(self, node: Node) -> None:
        """Follow the commands of a pipeline, each in a subshell. What they write is for the last one."""
        parts = node.named_children
        reader = self._find_reader(parts[-1])
        with self.during(_target=reader):
            for part in parts[:-1]:
                self._follow_apart([part])
        if reader in _NAMES["shells"] and reader in self._written:
            self._pass_on(self._written.pop(reader))
        self._follow_apart(parts[-1:])

    def _find_reader(self, node: Node) -> str:
        """Return the program that reads the input of a command, or the file that tee or `cat > FILE` writes."""
        command = [Word(each, each) for each in pattern("set_before").sub("", self.text(node)[:1000]).split()]
        program = find_program(command) if command else 0
        if program >= len(command):
            return ""
        if match := re.search(r"\s-c\s+[\"']cat\s*>+\s*([^\s\"'>]+)[\"']", self.text(node)[:1000]):
            return match[1]
        files = [each.text for each in command[program + 1 :] if each.text[:1] not in ("-", ">", "<")]
        return files[0] if files and name_of(command[program]) == "tee" else name_of(command[program])

    def _follow_redirection(self, node: Node) -> None:
        """Follow a statement with its output file and its here-document."""
        body, target = node.child_by_field_name("body"), ""
        behind: list[Node] = []  # `| b` and `&& b` behind `a <<E`, which the grammar puts inside the redirection
        inside = [each for child in node.children if child.type == "heredoc_redirect" for each in child.children]
        for each in [*node.children, *inside]:
            to = each.child_by_field_name("destination")
            if each.type == "file_redirect" and to is not None:
                targets = self.words(to)[:1]  # this follows commands inside, too
                writes = re.match(r"&?>", self.text(each)) is not None
                target = targets[0].text if writes and targets and not targets[0].text.isdigit() else target
            elif each in inside and each.type in _NAMES["heredoc_nodes"]:
                behind += each.named_children or [each]
                target = target or (self._find_reader(behind[-1]) if each.type == "pipeline" else "")
            elif each.type == "ERROR":
                self._report_syntax(each)
        with self.during(_target=target or self._target):
            self._read_document(node, body)
            self._follow([body] if body is not None else [])
        for each in behind:
            self._follow_apart([each])

    def _read_document(self, node: Node, command: Node | None) -> None:
        """Follow the here-document or here-string of a command. Variables in a here-document are unknown."""
        reader = self._find_reader(command) if command is not None else ""
        target = self._target if reader in ("", "cat") else reader
        for redirect in node.children:
            if redirect.type == "herestring_redirect":
                self._pass_on(Inner(self.value(redirect.children[-1]), target, self.line(redirect)))
            body, start = (next(walk(redirect, kind), None) for kind in ("heredoc_body", "heredoc_start"))
            if redirect.type == "heredoc_redirect" and body is not None and start is not None:
                text = self.text(body)
                self.spend(4 * len(text))
                if redirect.children[0].type == "<<-":
                    text = re.sub(r"(?m)^\t+", "", text)
                if self.text(start)[:1] not in "'\"\\":  # the grammar misses expansions after an escaped `$`
                    text = re.sub(r"(?<!\\)\$(?:\w+|\{[^{}\n]*\})", OPEN, text).replace("\\$", "$")
                self._pass_on(Inner(text, target, self.line(body)))

    def _pass_on(self, inner: Inner) -> None:
        """Follow a text that is written into a file, or read by a program: a shell, Python, kubectl, ssh."""
        target = {"kubectl": "manifest.yaml", "oc": "manifest.yaml"}.get(inner.target, inner.target)
        if target in _NAMES["shells"]:
            inherited = {name: each for name, each in self.scope.variables.items() if each.exported}
            with self.during(scope=Shell(inherited), _left=""):
                self.follow_text(inner.text, inner.line)
        elif target == "read":
            self._input = inner.text
        elif inner.text.strip(OPEN + "\n") and target not in _NAMES["idle"] and not target.startswith("/dev/"):
            self.script.inner.append(inner._replace(target=target.replace(OPEN, "...")))

    def _write(self, program: str, arguments: Sequence[Word], line: int) -> None:
        """Store the output of echo or printf. What several of them write into the same file is one text."""
        parts = [each.text for each in arguments if each.text not in ("-e", "-n", "-E")]
        if program == "printf" and parts[:1] == ["-v"]:
            self._read_variables(program, arguments[1:2], line)
            return
        text = (" ".join(parts) if program == "echo" else "".join(parts[:1])).replace("\\n", "\n")
        text = OPEN if program == "printf" and "%" in text else text
        if overrides := [Word(row, row) for row in text.splitlines() if pattern("dotted").match(row)]:
            with self.during(scope=self.scope.copy()):  # for a launcher that reads the output
                self._start([Word("hydra", "hydra"), *overrides], 0, line)
        if self._target not in ("", "a text") and text.strip():
            end = "\n" if program == "echo" and arguments[0].text != "-n" else ""
            written = self._written.get(self._target, Inner("", self._target, line))
            self._written[self._target] = written._replace(text=written.text + text + end)

    # -- variables

    def set(self, assigned: Assigned, *, exported: bool | None = None) -> None:
        """Set a variable. If `exported` is None, it is exported if it was before, or if `set -a` is active."""
        if not NAME.match(assigned.name):
            return
        self.spend(WORK_OF_WORD)
        before = self.scope.variables.get(assigned.name)
        if exported is None:
            exported = self.scope.exports_all or (before is not None and before.exported)
        self.scope.variables[assigned.name] = assigned = assigned._replace(exported=exported)
        if not exported and not assigned.unset and NEXT_ITEM not in assigned.value:
            self.script.loose[assigned.name] = assigned

    def _follow_declaration(self, node: Node) -> None:
        """Follow export, declare, typeset, local, readonly or unset. bash expands all words before it assigns."""
        keyword, line = self.text(node.children[0]), self.line(node)
        assigned, options = list[Assigned](), ""
        for child in node.named_children:
            if child.type == "variable_assignment":
                assigned.append(self.evaluate(child))
                continue
            for word in self.words(child):
                name, equals, value = word.text.partition("=")
                options += f" {name}" if name[:1] in ("-", "+") else ""
                assigned.append(Assigned(name, value, value, line, exported=False, unset=not equals))
                if OPEN in name and NAME.match(name.replace(OPEN, "A")) and word.text != self._pair:
                    self._report(line, f"the names of the variables that {keyword} gets are unknown")
        exports = keyword == "export" or re.search(r"-\w*x", options) is not None
        if keyword != "unset" and re.search(r"-\w*n|\+\w*x", options):  # `export -n` and name references
            self._report(line, keyword + options)
        self._calls_any = self._calls_any or (exports and "-f" in options)
        is_local = keyword in ("local", "declare", "typeset") and "g" not in options
        for each in assigned if "-f" not in options else ():
            if is_local:
                self._hidden.setdefault(each.name, self.scope.variables.get(each.name))
            if keyword == "unset" and NAME.match(each.name):
                self.scope.variables[each.name] = each
            elif not each.unset:
                self.set(each, exported=True if exports else None)
            elif exports:
                unknown = Assigned(each.name, OPEN, f"${each.name}", line)  # its value comes from the environment
                self.set(self.scope.variables.get(each.name, unknown), exported=True)

    # -- commands

    def _command(self, node: Node) -> None:
        """Follow a simple command: a built-in, a function or a program, with the variables that are set for it."""
        command, line = list[Word](), self.line(node)
        assignments = [each for each in node.children if each.type == "variable_assignment"]
        end = assignments[-1].end_byte if assignments else node.end_byte
        if (match := _ENDS_LINE.match(self.source, end)) and match.end() < node.end_byte:
            self._follow(assignments)
            tail = self.source[end : node.end_byte].decode("utf-8", "replace")
            self.follow_text(tail, line and self.first + assignments[-1].end_point.row)
            return
        for child in node.named_children:
            if child.type == "command_name":
                command += self.words(child.children[0]) if child.children else []
            elif child.type == "subshell":  # `time ( ... )`
                self._follow([child])
            elif child.type == "ERROR":
                self._report_syntax(child)
            elif not child.type.endswith(("_redirect", "assignment", "comment")):
                command += self.words(child)
        self.spend(WORK_OF_WORD * len(command))
        self._read_document(node, node)
        if assignments and _NAMES["declares"].intersection(each.text for each in command[:2]):
            if NAMED.search(self.text(node)):
                self._report(line, "assignments before export or another declaration")
            return
        before: dict[str, Assigned | None] = {}
        for each in map(self.evaluate, assignments):
            before.setdefault(each.name, self.scope.variables.get(each.name))
            self.set(each, exported=True if command else None)
        if command:
            self._run(command, line)
            self._restore(before)

    def _restore(self, before: Mapping[str, Assigned | None]) -> None:
        """Restore variables that were set only for a command or function; None: was not set."""
        for name, earlier in before.items():
            self.scope.variables.pop(name, None)
            if earlier is not None:
                self.scope.variables[name] = earlier

    def _run(self, words: list[Word], line: int) -> None:
        """Follow a simple command with its expanded words."""
        index = find_program(words)
        wrappers, program = [name_of(each) for each in words[:index]], words[index].text if index < len(words) else ""
        of_shell = _NAMES["of_shell"].issuperset(wrappers)
        if of_shell and program in _BUILTINS:
            _BUILTINS[program](self, program, words[index + 1 :], line)
        elif of_shell and program in self.scope.functions and program not in self._active:
            self._call(words[index:], line)
        elif program:
            if of_shell and OPEN in program:  # a function may call another one that its arguments name: `run setup`
                self._calls_any = self._calls_any or any(OPEN in each for each in self._arguments)
                for name in {*self._arguments}.intersection(self.scope.functions).difference(self._active):
                    self._call([Word(name, name)], line)
            with self.during(scope=self.scope.copy()):
                self._start(words, index, line)
            self._left = "exit" if "exec" in wrappers else self._left

    def _call(self, command: list[Word], line: int) -> None:
        """Follow the call of a function. Its arguments may be a command that it runs. Recursion is not followed."""
        body, source, first = self.scope.functions[command[0].text]
        self._called.add(command[0].text)
        text = source[body.start_byte : body.end_byte][:1000].decode(errors="replace")
        is_pair = len(command) == 3 and NAME.match(command[1].text) and pattern("exports_pair").match(text)
        if is_pair:
            self.set(Assigned(command[1].text, command[2].text, command[2].raw, line), exported=True)
        elif any(NAMED.search(word.text) for word in command[1:]):
            with self.during(scope=self.scope.copy()):
                self._start([Word("env", "env"), *command[1:]], 0, line)
        active = (*self._active, command[0].text)
        state = {"_arguments": [each.text for each in command[1:]], "_pair": f"{OPEN}={OPEN}" if is_pair else ""}
        with self.during(source=source, first=first, loops=0, _active=active, _hidden={}, **state):
            self._follow([body])
            self._restore(self._hidden)
        self._left = "" if self._left == "return" else self._left

    def _start(self, argv: list[Word], index: int, line: int) -> None:
        """Start the program `argv[index]`. It gets the exported variables, changed by the words of its command."""
        started, program, sets = self._started, argv[index:], False
        idle = is_idle(program)
        command = " ".join(word.text for word in argv)[:MAX_OPTIONS] + " "
        why = f"{name_of(argv[0])} in line {line} does not pass it on"
        if name_of(program[0]) == "srun" and "--export" not in command and self.parameter("SLURM_EXPORT_ENV") == "NONE":
            command = f"srun --export=NONE {command}"
            why = "srun passes nothing on because of --export=NONE, unless the script has `export SLURM_EXPORT_ENV=ALL`"
        is_remote = pattern("mpirun_to_hosts").match(command) and not _SCHEDULED.search(self.source)
        for name, each in self.scope.variables.items() if is_remote else ():
            if each.exported and not each.unset and is_read(name) and name not in command:
                note = finding("env.name.unexported/mpirun", name, each.value.replace(OPEN, "..."))
                self.script.findings += [] if note in self.script.findings else [note]
        for name in list_removed(command, self.scope.variables):
            if self.scope.variables.pop(name).exported and argv[0].line:
                self.script.removed[name] = why
        for part in split_command(argv):
            if isinstance(part, Assigned):
                sets = sets or is_judged(part.name)
                self.set(part._replace(line=part.line or line), exported=True)
            elif isinstance(part, Unread):
                self._report(part.line or line, part.why)
            elif part.target == "":
                self.script.files.append(part.text)
            else:
                unread = len(self.script.unread)
                self._pass_on(part)
                if idle:  # it may be prose: `git commit -m "..."`
                    del self.script.unread[unread:]
        sure = not idle and is_launcher(program)
        if sure and any(pattern("starts_ranks").fullmatch(word.text) for word in program):
            self.script.starts.append(line)
        if self._started == started and (sets or not idle):
            self._launch("launch", line, sure=sure)

    def _launch(self, kind: str, line: int, *, sure: bool) -> None:
        """Record a program start with the checked variables of its environment."""
        label = f"the {kind} of line {line}" if line else f"a {kind}" if kind else ""  # empty: the end of the script
        self._started += 1
        settings: Settings = {}
        for each in self.scope.variables.values():
            name = pattern("in_container").sub("", each.name)
            is_passed_on = each.exported and not each.unset and NEXT_ITEM not in each.value  # arrays are not
            if is_passed_on and (is_judged(name) or name in JOB_SIZE):
                settings[name] = each._replace(name=name)
        self.spend(WORK_OF_WORD * len(settings))
        if len(self._launches) < _MAX_LAUNCHES:
            launch = _Launch(label, sure, tuple(name for _, name in self._way.values()), settings)
            self._launches.setdefault((label, sure, _get_pairs(settings)), launch)
        else:
            self._report(0, "too many commands that start programs")

    # -- built-ins

    def _leave(self, program: str, arguments: Sequence[Word], line: int) -> None:
        if program in ("break", "continue") and arguments and arguments[0].text != "1":
            self._report(line, f"{program} of several loops")
        if {"exit": True, "return": bool(self._active)}.get(program, self.loops > 0):
            self._left = program

    def _source(self, _program: str, arguments: Sequence[Word], line: int) -> None:
        if arguments and arguments[0].text not in ("", "/dev/null"):
            self.script.files.append(arguments[0].raw + f" (line {line})" * bool(line))

    def _read_variables(self, program: str, arguments: Sequence[Word], line: int) -> None:
        """Set the variables of read, mapfile or let. Only a here-document of `read -d ''` is known."""
        names = [re.split(r"\W", word.text)[0] for word in arguments]
        is_whole = "" in [word.text for word in arguments] and sum(map(bool, names)) == 1  # else each name gets a word
        for name in names:  # read removes blanks at both ends
            self.set(Assigned(name, self._input.strip() if is_whole else OPEN, f"(set by {program})", line))
        self._input = OPEN

    def _evaluate(self, program: str, arguments: Sequence[Word], line: int) -> None:
        """Follow the commands of eval as far as they are known. Report those of trap."""
        text = " ".join(each.text for each in arguments)
        if program == "trap":
            if NAMED.search(text):
                self._report(line, "the commands of trap")
        elif text.strip(f"{OPEN} "):
            self.follow_text(text, line)
        else:
            self._calls_any = True
            self._launch("command", line, sure=False)
        if program == "eval" and re.match(rf"\s*\w*{OPEN}", text):
            self.script.files.append("the commands of eval" + f" in line {line}" * bool(line))

    def _set_options(self, _program: str, arguments: Sequence[Word], line: int) -> None:
        """Follow `set -a`. Names that set gets are arguments, outside fish."""
        options = [each.text for each in arguments]
        if any(map(NAMED.search, options)):
            self._report(line, "the arguments of set")
        elif match := re.match(r"(?:[-+]\w+ (?:\w+ )?)*?([-+])\w*(?:a\w*|o allexport) ", " ".join([*options, ""])):
            self.scope.exports_all = match[1] == "-"


def _get_pairs(settings: Settings) -> frozenset[tuple[str, str]]:
    """Return the pairs of name and value."""
    return frozenset((name, each.value) for name, each in settings.items())


_FOLLOW: Mapping[str, Callable[[_Reader, Node], object]] = {
    **dict.fromkeys(("compound_statement", "do_group", "else_clause"), _Reader._follow_block),
    "list": _Reader._list, "if_statement": _Reader._follow_if, "case_statement": _Reader._follow_case,
    "negated_command": lambda reader, node: reader._follow(node.children[-1:]),
    "redirected_statement": _Reader._follow_redirection, "pipeline": _Reader._follow_pipeline,
    "test_command": lambda reader, node: list(map(reader.value, node.named_children)),
    **dict.fromkeys(("for_statement", "while_statement", "c_style_for_statement"), _Reader._loop),
    "subshell": lambda reader, node: reader._follow_apart(node.children), "function_definition": _Reader._define,
    "variable_assignment": lambda reader, node: reader.set(reader.evaluate(node)),
    "variable_assignments": lambda reader, node: reader._follow(node.children),
    **dict.fromkeys(("declaration_command", "unset_command"), _Reader._follow_declaration), "command": _Reader._command,
}  # fmt: skip

_BUILTINS: Mapping[str, Callable[[_Reader, str, Sequence[Word], int], None]] = {
    **dict.fromkeys((":", "true", "false", "cat", "tee"), lambda *_: None), "set": _Reader._set_options,
    **dict.fromkeys(("echo", "printf"), _Reader._write), **dict.fromkeys((".", "source"), _Reader._source),
    **dict.fromkeys(("exit", "return", "break", "continue"), _Reader._leave),
    **dict.fromkeys(("eval", "trap"), _Reader._evaluate),
    **dict.fromkeys(("read", "getopts", "mapfile", "readarray", "let"), _Reader._read_variables),
    "setenv": lambda reader, _program, _given, line: reader._report(line, "setenv belongs to the C shell"),
}  # fmt: skip

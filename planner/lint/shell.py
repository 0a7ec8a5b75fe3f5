"""What each launch of a shell script gets: the exported variables at that place, and the options of launchers.

A script is followed in the order in which bash would run it, and never run. Where a branch is decided only at run time,
both ways are followed, and a variable has from then on several values, each with its condition. OPEN replaces text that
comes from a program, an argument or the environment outside. Specification: POSIX shell (XCU 2.9 commands), bash(1).
What is not followed is in docs/decisions/0039.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

from tree_sitter import Node

from planner.lint.expansion import MOST_LEVELS, MOST_VALUE, USED, WORK_OF_WORD, Shell, join, parse_lines, walk
from planner.lint.programs import Call, Hidden, Input, Launch, Programs, content, name_of, number_of
from planner.lint.script import NAMED, OPEN, Assigned, Script, Settings, Unread, Word, is_judged, words

_MOST_SCRIPTS = 6  # scripts in quotes in scripts
_MOST_COMMANDS = 20_000  # that are followed, loops and calls of functions counted each time
_MOST_ROUNDS = 64  # of one loop
_MOST_VIEWS = 8  # values of the variables of one command, for each of which it is followed
_MOST_PATTERN = 1 << 12  # characters of a value and of a pattern that it is compared with

# What arithmetic changes
_CHANGED = re.compile(r"\b([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)([A-Za-z_]\w*)")
_PATTERN = re.compile(r"[*?[]|\{.*(?:,|\.\.)")  # a word that stands for several
_QUOTED = re.compile(r"""'[^']*'|"[^"]*"|\\.|\$\{[^}]*\}|\$\(.*\)""", re.DOTALL)
_IN_DOCUMENT = re.compile(r"(?<!\\)\$(?:([A-Za-z_]\w*|\d)|\{([A-Za-z_]\w*|\d+)(?:(:?-)([^{}$]*))?\})")
_NAMES = words()["shell"]
_COMPARISONS = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")  # of numbers, as module operator names them
_SIMPLE = ("command", "redirected_statement", "variable_assignment", "variable_assignments", "declaration_command",
           "unset_command", "test_command")  # fmt: skip

Status = bool | None
"""How a command ends; None where it depends on the run."""
Left = list[tuple[str, Shell]]
"""Shells that left a function or a loop early, each with its condition."""


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
    reader = _Reader(known, ())
    reader.follow_text(f"export {text}", line)
    return [found[-1] for found in reader.shell.variables.values() if found[-1].exported]


def expand(text: str) -> str:
    """Fill in a value with `${NAME:-default}` in it (compose, envsubst)."""
    reader = _Reader({}, ())
    reader.source, root = parse_lines(('"' + text.replace('"', '\\"') + '"').encode("utf-8", "replace"))
    name = next(walk(root, "string"), None)
    return OPEN if name is None or name.end_byte != len(reader.source) else reader.value(name)


class _Reader(Programs):
    """Follows the statements of a script, and notes what each program gets that it starts."""

    def __init__(self, known: Mapping[str, str], before: Sequence[Assigned]) -> None:
        super().__init__(known, before)
        self._scripts = self._blocks = self._commands = 0
        self._called: set[str] = set()
        self._returns: list[Left] = []
        self._loops: list[tuple[Left, Left]] = []  # where `continue` and where `break` left
        self._ended = ""  # why nothing more runs here
        self._only_assigns = True

    # -- the whole text

    def follow_text(self, text: str, line: int) -> Status:
        """Follow a text in this shell."""
        if self._scripts > _MOST_SCRIPTS:
            self.unread(line, "scripts in quotes nested too deeply")
            return None
        self._scripts += 1
        saved, status = (self.source, self.first), None
        self.first = line
        self.source, root = parse_lines(text.encode("utf-8", "replace"))
        if root is None:
            self.unread(line, "the script is nested or broken beyond what is read")
        else:
            status = self._all(root.children)
        self.source, self.first = saved
        self._scripts -= 1
        return status

    def finish(self) -> Script:
        """Give what every launch gets, and what only some get; name the settings that none gets."""
        if self._only_assigns:  # a list of variables, whether it says export or not
            for name in self.shell.variables:
                self.export(name, 0)
        if not any(each.sure for each in self.launches) and "exit" not in self._ended:
            self.launch("the end", sure=False)
        self._follow_functions()
        _merge_launches(self.launches, self.script)
        found = {(each.name, each.line) for settings in self.script.settings() for each in settings.values()}
        why = "no program that is started gets it"
        gone = [each for place, each in self.exported.items() if place not in found and is_judged(each.name)]
        self.script.unreached += [Unread(name=each.name, line=each.line, why=why) for each in gone]
        exported = {name for name, _ in self.exported}
        self.script.loose = {name: each for name, each in self.loose.items() if name not in exported}
        return self.script

    def _follow_functions(self) -> None:
        """Follow functions that a script which sources this one may call; name the settings of uncalled ones."""
        closed = any(each.sure for each in self.launches) and not self.runs_unknown
        end = self.shell.copy()
        for name in [name for name in self.functions if name not in self._called]:
            body, self.source, self.first = self.functions[name]
            before = self.started
            if closed:
                self._skip([body], f"the function {name} is not called")
            elif name not in self._called:
                self._branch(end.copy(), f"function {name}", [body])
                if self.started == before:
                    self.launch(f"function {name}", sure=False)

    def _skip(self, nodes: Sequence[Node], why: str) -> None:
        """Name the settings of parts of the text that never run."""
        for node in nodes:
            self.skip(self.text(node), self.line(node), why)

    def _not_understood(self, node: Node) -> None:
        """Name the lines that are not shell syntax and have settings near; statements inside are followed."""
        near = NAMED.search(self.text(node)) is not None
        plain = _NAMES["expansions"] | {"word", "number", "variable_name"}
        for child in node.children or [node]:
            if child.is_named and child != node and child.type not in plain:
                self._visit(child)
            elif near and not re.fullmatch(r"[\s<>&|;()\\]*", self.text(child)):
                self.unread(self.line(child), "unknown shell syntax")

    # -- ways through the script

    def _all(self, nodes: Sequence[Node]) -> Status:
        """Follow statements one after another; what runs in the background changes nothing here."""
        status: Status = None
        for at, node in enumerate(nodes):
            if at + 1 < len(nodes) and nodes[at + 1].type == "&":
                self._apart([node])
            elif node.is_named and node.type != "comment":
                status = self._visit(node)
        return status

    @contextmanager
    def _inside(self, shell: Shell) -> Iterator[None]:
        """Follow commands in another shell, whose changes end with it."""
        saved = self.shell, self._ended, self._loops, self._returns
        self.shell, self._loops, self._returns = shell, [], []
        yield
        self.shell, self._ended, self._loops, self._returns = saved

    def _apart(self, nodes: Sequence[Node]) -> None:
        """Follow statements in a subshell."""
        with self._inside(self.shell.copy()):
            self._all(nodes)

    def capture(self, nodes: Sequence[Node]) -> str:
        """What the commands of a substitution write."""
        self._apart(nodes)
        return self._output(nodes[0]) if len(nodes) == 1 else OPEN

    def _output(self, node: Node) -> str:
        """What echo, printf and cat write, where it is known; else OPEN."""
        document, target = Input(), ""
        if node.type == "redirected_statement":
            document, target, node = self._document(node), self._target(node), node.child_by_field_name("body") or node
        if target or node.type not in ("command", "compound_statement"):
            return OPEN
        if node.type == "compound_statement":
            return "".join(self._output(each) for each in node.named_children)
        words = self._words(node)
        texts, program = [word.text for word in words[1:]], name_of(words[0]) if words else ""
        if program in self.functions:
            return OPEN
        if program == "echo":
            text = " ".join(each for each in texts if each not in ("-e", "-n", "-E"))
            return text.replace("\\n", "\n") + ("" if texts[:1] == ["-n"] else "\n")
        if program == "printf" and texts:
            return OPEN if "%" in texts[0] else texts[0].replace("\\n", "\n")
        names = [text for text in texts if text[:1] != "-"]
        if program == "cat":
            return "".join(self.written(each) or OPEN for each in names) or document.text or self.input.text or OPEN
        return OPEN

    def _end(self, word: str, left: Left | None = None) -> None:
        """Nothing more runs here; the shell goes on elsewhere, or not at all."""
        if left is not None:
            left.append((self.scope, self.shell))
        self._ended = f"it comes after {word}"

    def _now(self) -> Shell | None:
        return None if self._ended else self.shell

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
            self._skip(nodes, "its condition never holds")
            return None
        self.shell, self._ended = start, ""
        with self._under(label):
            self._all(nodes)
        return self._now()

    @contextmanager
    def _under(self, label: str) -> Iterator[None]:
        """Let what is set now hold under one more condition."""
        outer, self.scope = self.scope, _both(self.scope, label)
        yield
        self.scope = outer

    def _holds(self, nodes: Sequence[Node]) -> tuple[Shell | None, Shell | None]:
        """Follow statements as a condition. Returns the shells where the last one succeeds and where it fails."""
        self._all(nodes[:-1])
        if self._ended or not nodes:
            return self._now(), self.shell.copy() if not nodes else None
        node = nodes[-1]
        if node.type == "negated_command":
            yes, no = self._holds(node.children[-1:])
            return no, yes
        if node.type == "list":
            return self._chain(node)
        ways: list[tuple[Shell | None, Shell | None]] = []
        for _ in self._views(node):
            status = self._visit(node, split=False)
            yes = None if self._ended or status is False else self.shell
            ways.append((yes, None if self._ended or status is True else self.shell.copy()))
        return join(*(yes for yes, _ in ways)), join(*(no for _, no in ways))

    def _chain(self, node: Node) -> tuple[Shell | None, Shell | None]:
        """`a && b || c`: the grammar nests it to the left, as deep as it is long."""
        chain: list[tuple[Node, str]] = []
        while node.type == "list":
            chain.append((node.children[-1], node.children[1].type))
            node = node.children[0]
        yes, no = self._holds([node])
        for each, sign in reversed(chain):
            start, other = (yes, no) if sign == "&&" else (no, yes)
            if start is None:
                self._skip([each], self._ended or "its condition never holds")
                continue
            self.shell, self._ended = start, ""
            with self._under(f"after {sign}" if other is not None else ""):
                ran, failed = self._holds([each])
            yes, no = (ran, join(no, failed)) if sign == "&&" else (join(yes, ran), failed)
        return yes, no

    def _list(self, node: Node) -> Status:
        yes, no = self._holds([node])
        status = None if yes is not None and no is not None else yes is not None
        self._resume(yes, no)
        return status

    def _views(self, node: Node) -> Iterator[None]:
        """Enter each condition under which the variables of a statement have one value, one after another."""
        variables = self.shell.variables
        names = [name for name in dict.fromkeys(USED.findall(self.text(node))) if len(variables.get(name, ())) > 1]
        scopes = list(dict.fromkeys(each.scope for name in names for each in variables[name]))
        if len(scopes) < 2 or len(scopes) > _MOST_VIEWS:
            yield
            return
        start, ends = self.shell, list[Shell | None]()
        saved = outer, _, _ = self.scope, self.view, self.split
        self.splits += 1
        for scope in scopes:
            self.shell, self._ended = start.copy(), ""
            for name in names:
                found = [each for each in variables[name] if each.scope == scope]
                found = found or [each for each in variables[name] if not each.scope]
                self.shell.variables[name] = tuple(found)[-1:] or variables[name][-1:]
            self.scope = scope if scope.startswith(outer) else _both(outer, scope)
            self.view, self.split = scope and self.scope, self.splits
            yield
            ends.append(None if self._ended else self.shell.copy())
        self.scope, self.view, self.split = saved
        self._resume(*ends)

    def _visit(self, node: Node, *, split: bool = True) -> Status:
        """Follow one statement, once for each value that its variables may have."""
        if split and node.type in _SIMPLE and not self._ended and self.spend(0):
            found = [self._visit(node, split=False) for _ in self._views(node)]
            return found[0] if len(found) == 1 else None
        status: Status = None
        self._blocks += 1
        self._commands += 1 + len(self.shell.variables) // 32
        if self._blocks > MOST_LEVELS or self._commands > _MOST_COMMANDS or not self.spend(0):
            self.unread(self.line(node), "too many or too deeply nested commands")
        elif self._ended:
            self._skip([node], self._ended)
        elif node.is_missing or node.type == "ERROR" or (node.type == "test_command" and node.has_error):
            self._not_understood(node)
        elif follow := _FOLLOW.get(node.type):
            assigns = ("variable_assignment", "variable_assignments")
            self._only_assigns = self._only_assigns and node.type in assigns
            status = follow(self, node)
        self._blocks -= 1
        return status

    def _block(self, node: Node) -> Status:
        """Statements; the grammar has `((...))` among them."""
        if not node.children or node.children[0].type != "((":
            return self._all(node.children)
        text, line = self.text(node), self.line(node)
        changed = list(_CHANGED.finditer(text))
        found = self.arithmetic(text)
        for match in changed:
            self.assign(match[1] or match[2], OPEN, text, line)
        return None if found is None or self.assumed or changed else found != 0

    def _define(self, node: Node) -> None:
        name = node.child_by_field_name("name") or node
        body = node.child_by_field_name("body") or node.named_children[-1]
        self.functions[self.text(name)] = body, self.source, self.first

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
            if rest is not None and condition:
                self.shell, self._ended = rest, ""
                yes, no = self._holds(condition)
            open_ = title if no is not None and (yes is not None or open_) else open_
            ends.append(self._branch(yes, title if no is not None or open_ else "", children[then + 1 :]))
            rest = no
        self._resume(*ends, rest)

    def _case(self, node: Node) -> None:
        """Each item whose pattern fits, or may fit."""
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
            sure = sure and (taken or never)
            label = "" if sure else f"case {self._title([of])} in {self._title(patterns)}"[:80]
            ran = self._branch(start, label, [each for each in item.children if each not in patterns])
            on = any(each.type in (";&", ";;&") for each in item.children)
            through = ran.copy() if on and ran else None
            ends += [] if on else [ran]
            rest = None if taken and not any(each.type == ";;&" for each in item.children) else rest
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
        if value is None or OPEN in pattern or len(value) + len(pattern) > _MOST_PATTERN:
            return None
        return fnmatchcase(value, pattern)

    def _loop(self, node: Node) -> None:
        """Follow a loop once for each word of its `for`; where these are not known, as of `while`, for two rounds.

        What the second of these still changes becomes unknown, and a third round follows.
        """
        body, line, words = node.child_by_field_name("body"), self.line(node), self._words_of_loop(node)
        ends, breaks, rest = list[Shell | None](), Left(), self._now()
        for number in range(4 if words is None else len(words) + 1):
            if rest is None or body is None:
                break
            before = rest.copy()
            self.shell, self._ended = rest, ""
            yes, no = self._enter_loop(node, words, number)
            ends.append(no)
            if yes is None and number == 0:
                self._skip([body], "its condition never holds")
            if yes is None or (number == 3 and words is None):
                break
            self.shell, self._ended = yes, ""
            self._loops.append(([], breaks))
            with self._under(f"the loop of line {line}" if no is not None else ""):
                self._visit(body)
            rest = join(self._now(), early=self._loops.pop()[0])
            if rest is not None and words is None and number == 1:
                _forget(rest, before)
        self._ended = ""
        self._resume(join(join(*ends), early=breaks))
        if not any(ends) and not breaks:
            self._ended = "it comes after a loop without end"

    def _words_of_loop(self, node: Node) -> list[Word] | None:
        """The words of a `for`; None where they are not known, as `{0..7}` and the files that `*` matches."""
        if node.type != "for_statement" or node.children[0].type != "for":
            return None
        given = node.children_by_field_name("value")
        words = [word for each in given for word in self.words(each)]
        if not given and not any(child.type == "in" for child in node.children):
            words = list(self.items("@") or (Word(OPEN, "$@"),))
        several = any(each.type != "string" and _PATTERN.search(_QUOTED.sub("", self.text(each))) for each in given)
        return None if several or len(words) > _MOST_ROUNDS or any(OPEN in word.text for word in words) else words

    def _enter_loop(self, node: Node, words: list[Word] | None, number: int) -> tuple[Shell | None, Shell | None]:
        """Begin a round. Returns the shell in which it runs, and that with which the loop ends before it."""
        body, name = node.child_by_field_name("body"), node.child_by_field_name("variable")
        if node.type == "while_statement":
            yes, no = self._holds([each for each in node.named_children if each != body and each.type != "comment"])
            return (no, yes) if node.children[0].type == "until" else (yes, no)
        if words is not None and number == len(words):
            return None, self.shell
        head = self.source[node.start_byte : body.start_byte if body else node.end_byte].decode("utf-8", "replace")
        word = words[number] if words is not None else Word(OPEN, head.partition(" in ")[2].split(";")[0].strip())
        self.assumed = word.assumed
        for each in [self.text(name)] if name else {match[1] or match[2] for match in _CHANGED.finditer(head)}:
            self.assign(each, word.text, word.raw, self.line(node))
        return self.shell, None if words is not None else self.shell.copy()

    def _pipeline(self, node: Node) -> None:
        """Each part runs in a shell of its own and reads what the part before it writes."""
        parts = [child for child in node.children if child.is_named]
        for part in parts:
            line = self._document(part).line or self.line(part)
            written = Input(self._output(part), line) if part != parts[-1] else Input()
            self._apart([part])
            self.input = written

    def _redirected(self, node: Node) -> Status:
        """A statement with the file that it writes to and the document that it reads."""
        document, target, body = self._document(node), self._target(node), node.child_by_field_name("body")
        self.input = document if document.text else self.input
        written = Input(self._output(body) if body else "", document.line or self.line(node))
        status = self._visit(body, split=False) if body is not None else None
        if self.input.text and document.text:
            self.read_input("", self.input, target)
        self.input = Input()
        if target and not target.startswith("/dev/") and written.text.strip(OPEN + "\n"):
            self.write_file(target, written)
        for each in _redirects(node):
            if each.type == "ERROR":
                self._not_understood(each)
            elif each.type in ("pipeline", "list", "&&", "||"):
                for part in [child for child in each.children if child.is_named] or [each]:
                    self.input = written
                    self._apart([part])
        return status

    def _target(self, node: Node) -> str:
        """The file that a statement writes to; commands inside other redirections are followed."""
        target = ""
        for redirect in _redirects(node):
            to = redirect.child_by_field_name("destination")
            if redirect.type == "file_redirect" and to is not None:
                found = self.words(to)[:1]
                writes = re.match(r"&?>", self.text(redirect)) is not None
                target = found[0].text if writes and found and not found[0].text.isdigit() else target
        return target

    def _document(self, node: Node) -> Input:
        """The here-document or here-string of a statement, known variables filled in, and its first line."""
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
            return Input(text if self.text(start)[:1] in "'\"\\" else self._filled(text), self.line(body))
        return Input()

    def _filled(self, text: str) -> str:
        """A here-document with the known variables put in. The grammar loses expansions there after an escaped `$`."""

        def put(match: re.Match[str]) -> str:
            value = self.parameter(match[1] or match[2])
            if match[3] and (value == OPEN or (not value and match[3] == ":-")):
                value = match[4]
            return match.group() if value == OPEN or len(value) > MOST_VALUE >> 4 else value

        return _IN_DOCUMENT.sub(put, text).replace("\\$", "$")[: 1 << 20]

    def _test(self, node: Node) -> Status:
        inside = [child for child in node.named_children if child.type != "comment"]
        return self._decided(inside[0], glob=node.children[0].type == "[[") if len(inside) == 1 else None

    def _decided(self, node: Node, *, glob: bool) -> Status:
        """How a test of one or two words ends; None where that is not the same in every run."""
        kind, parts = node.type, node.children
        if kind == "unary_expression" and len(parts) == 2:
            sign = self.text(parts[0])
            if sign == "!":
                found = self._decided(parts[1], glob=glob)
                return None if found is None else not found
            value = self._known(parts[1])
            return None if value is None or sign not in ("-n", "-z") else (value != "") == (sign == "-n")
        if kind != "binary_expression" or len(parts) != 3:
            value = self._known(node)
            return None if value is None else value != ""
        sign, one, other = self.text(parts[1]), self._known(parts[0]), self._known(parts[2])
        if one is None or other is None:
            return None
        if sign in ("=", "==", "!="):
            pattern = glob and parts[2].type not in ("string", "raw_string")
            same = self._fits(one, parts[2]) if pattern else one == other
            return None if same is None else same == (sign != "!=")
        numbers = sign in _COMPARISONS and re.fullmatch(r"-?\d{1,18} -?\d{1,18}", f"{one} {other}")
        return bool(getattr(operator, sign[1:])(int(one), int(other))) if numbers else None

    def _known(self, node: Node) -> str | None:
        """The value of a word that is the same in every run. The grammar takes `1 -lt 2 && a` for one side of a `=`."""
        if node.type.endswith("_expression"):
            return None
        self.assumed = False
        value = self.value(node)
        return None if OPEN in value or self.assumed else value

    # -- simple commands

    def _assignments(self, node: Node) -> Status:
        for each in [node] if node.type == "variable_assignment" else node.named_children:
            self.set(self.evaluate(each))
        return None if "$(" in self.text(node) or "`" in self.text(node) else True

    def _declaration(self, node: Node) -> Status:
        """export, declare, typeset, local, readonly, unset. bash expands all words, then assigns."""
        given: list[Assigned | Word] = []
        for each in node.children[1:]:
            if each.type == "variable_assignment":
                given.append(self.evaluate(each))
            elif each.is_named and each.type != "comment":
                given += self.words(each)
        return self.declare(self.text(node.children[0]), given, self.line(node))

    def _words(self, node: Node) -> list[Word]:
        """The words of a simple command."""
        words: list[Word] = []
        for child in node.children:
            if child.type == "command_name":
                words += self.words(child.children[0]) if child.children else []
            elif child.is_named and not child.type.endswith(("_redirect", "assignment")) and child.type != "comment":
                words += self.words(child)
        return words

    def _command(self, node: Node) -> Status:
        words, status = self._words(node), None
        for child in node.children:
            if child.has_error and child.type not in _NAMES["expansions"]:
                for error in walk(child, "ERROR"):
                    self._not_understood(error)
        document = self._document(node)
        self.input = document if document.text else self.input
        saved: Hidden = {}
        for each in [child for child in node.children if child.type == "variable_assignment"]:
            given = self.evaluate(each)
            if words:
                saved.setdefault(given.name, self.shell.variables.get(given.name))
            self.set(given, exported=True if words else None)
        self.passing.append(saved)
        if words:
            status = self.run(words, self.line(node))
        self.restore(self.passing.pop())
        return status

    def run(self, words: list[Word], line: int) -> Status:
        """Run one simple command: a built-in, a function, or a program that gets what is exported here."""
        given, self.input = self.input, Input()
        self.spend(WORK_OF_WORD * len(words))
        self._only_assigns = False
        outer, at, wrappers = self.shell, 0, list[str]()
        if name_of(words[0]) in _NAMES["wrappers"]:
            self.shell = outer.copy()
            self.remove(words)
            at = self.after_wrappers(words, line)
            wrappers = [name_of(each) for each in words[:at]]
        program = name_of(words[at]) if at < len(words) else ""
        own = program == "tee" or not wrappers or wrappers[-1] in _NAMES["of_shell"]
        if own and (builtin := _BUILTINS.get(program)):
            self.shell = outer
            return builtin(self, Call(program, words[at + 1 :], line, given))
        if program in self.functions and program not in self.active and not wrappers:
            return self._call(program, words[at + 1 :])
        if program:
            self.shell = outer.copy() if self.shell is outer else self.shell
            self.run_program(words[at:], line, given, outer)
        self.shell = outer
        if program and "exec" in wrappers and not self._ended:
            self._end("exec")
        return None

    def _call(self, name: str, rest: Sequence[Word]) -> Status:
        """Call a function: with its own arguments, and with variables of its own that end with it."""
        saved = self._loops, self.source, self.first
        body, self.source, self.first = self.functions[name]
        self._called.add(name)
        self.active.append(name)  # a function that calls itself ends here
        self.locals.append({"@": self.shell.variables.get("@")})
        self.give(rest)
        self._returns.append([])
        self._loops = []
        status = self._visit(body)
        returned = self._returns.pop()
        self._resume(join(self._now(), early=returned))
        self.restore(self.locals.pop())
        self.active.pop()
        self._loops, self.source, self.first = saved
        return None if returned else status

    def nested(self, text: str, line: int, rest: Sequence[Word] | None = None, *, surely: bool = True) -> None:
        """Follow a script that another shell runs: `bash -c`, ssh, a here-document; not `surely` where it may be prose.

        `rest` are its arguments, None where they are not known.
        """
        started, unread, variables = self.started, len(self.script.unread), self.shell.variables
        given = {name: found for name, found in variables.items() if any(each.exported for each in found)}
        with self._inside(Shell(given)):
            self.give(rest)
            self.follow_text(text, line)
            if not surely:
                del self.script.unread[unread:]
                if self.started == started:
                    self.launch(f"the command of line {line}", sure=False)

    # -- built-ins that change the way through the script

    def _break(self, call: Call) -> None:
        """break and continue: which loop goes on, and how."""
        if self._loops:
            place = self._loops[-min(max(number_of(call), 1), len(self._loops))]
            self._end(call.program, place[call.program == "break"])

    def _eval(self, call: Call) -> Status:
        text = " ".join(word.text for word in call.words)
        if text.strip(OPEN + " "):
            return self.follow_text(text, call.line)
        self.script.files.append(f"the commands that eval gets in line {call.line}")
        return None

    def _source(self, call: Call) -> Status:
        path = call.words[0].text if call.words else ""
        if (text := self.written(path)) is not None:
            return self.follow_text(text, 0)
        if path and path != "/dev/null":
            self.script.files.append(f"{call.words[0].raw} (line {call.line})")
        return None

    def _truth(self, call: Call) -> bool:
        self.read_input(":", call.given, "")
        return call.program != "false"


def _merge_launches(launches: Sequence[Launch], script: Script) -> None:
    """Note what all launches get; where they get different settings, all that each gets, under its line.

    A name that no launcher gets counts if a program gets it that may be one. A launch whose settings
    are a part of another's is left out.
    """
    named = {name for each in launches if each.sure for way in each.ways.values() for name in way}
    different: dict[frozenset[frozenset[tuple[str, str]]], tuple[Launch, dict[str, Settings]]] = {}
    for launch in sorted(launches, key=lambda each: not each.sure):
        ways = {
            scope: {name: each for name, each in way.items() if launch.sure or name not in named}
            for scope, way in launch.ways.items()
        }
        different.setdefault(frozenset(map(content, ways.values())), (launch, ways))
    every = [key for keys in different for key in keys]
    found = [both for keys, both in different.items() if not all(any(key < other for other in every) for key in keys)]
    first, *others = [content(way) for _, ways in found for way in ways.values()] or [frozenset()]
    always = first.intersection(*others)
    labels = Counter[str]()
    for launch, ways in found:
        labels[launch.label] += 1
        label = launch.label + (f", time {labels[launch.label]}" if labels[launch.label] > 1 else "")
        script.ways += [(_both(label if len(found) > 1 else "", scope), way) for scope, way in ways.items()]
    if script.ways:
        label, way = script.ways[0]
        script.always = {n: e for n, e in way.items() if (n, e.value) in always} if label else script.ways.pop(0)[1]
    for _, way in script.ways:
        way |= {name: replace(each, unset=True) for name, each in script.always.items() if name not in way}


def _forget(shell: Shell, before: Shell) -> None:
    """Mark every variable that changed since `before` as unknown."""
    for name, values in shell.variables.items():
        if values != before.variables.get(name):
            shell.variables[name] = tuple(replace(each, value=OPEN, items=None) for each in values)


def _both(*conditions: str) -> str:
    return "; ".join(filter(None, conditions))


def _redirects(node: Node) -> Iterator[Node]:
    """Redirections of a statement, and what the grammar puts inside a here-document's line after its start."""
    kinds = ("file_redirect", "pipeline", "list", "&&", "||", "ERROR")
    for child in node.children:
        yield child
        yield from (e for e in child.children if child.type == "heredoc_redirect" and e.type in kinds)


def directives(text: str) -> Iterator[tuple[int, str]]:
    """`#SBATCH --export=...` and the same of other schedulers: the line's number and its words."""
    for number, row in enumerate(text.splitlines(), start=1):
        match = re.match(r"\s*#(?:SBATCH|PBS|BSUB|FLUX:|\$)\s+(.*)", row)
        if match and "=" in match[1]:
            yield number, match[1].split(" #")[0]


_FOLLOW: Mapping[str, Callable[[_Reader, Node], Status]] = {
    **dict.fromkeys(("program", "compound_statement", "do_group", "else_clause", "case_item"), _Reader._block),
    "command": _Reader._command, "redirected_statement": _Reader._redirected, "list": _Reader._list,
    "negated_command": _Reader._list, "pipeline": _Reader._pipeline, "if_statement": _Reader._if,
    "case_statement": _Reader._case, "for_statement": _Reader._loop, "while_statement": _Reader._loop,
    "c_style_for_statement": _Reader._loop, "test_command": _Reader._test, "function_definition": _Reader._define,
    "variable_assignment": _Reader._assignments, "variable_assignments": _Reader._assignments,
    "declaration_command": _Reader._declaration, "unset_command": _Reader._declaration,
    "subshell": lambda reader, node: reader._apart(node.children),
}  # fmt: skip

_BUILTINS: Mapping[str, Callable[[_Reader, Call], Status]] = {
    "echo": _Reader.echo, "printf": _Reader.gets, "tee": _Reader.tee,
    "return": lambda reader, _: reader._end("return", reader._returns[-1]) if reader._returns else None,
    "eval": _Reader._eval, ".": _Reader._source, "source": _Reader._source,
    "shift": _Reader.shift, "set": _Reader.options_of_shell, "break": _Reader._break, "continue": _Reader._break,
    "exit": lambda reader, _: reader._end("exit"),
    "setenv": lambda reader, call: reader.unread(call.line, "setenv belongs to the C shell, which is not supported"),
    **dict.fromkeys((":", "true", "false"), _Reader._truth),
    **dict.fromkeys(("read", "getopts", "mapfile", "readarray", "let"), _Reader.gets),
    **dict.fromkeys(_NAMES["declares"], lambda reader, call: reader.declare(call.program, call.words, call.line)),
}  # fmt: skip

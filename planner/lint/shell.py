"""What a shell script hands to its programs: assignments, exports, and the options of launchers that carry variables.

The grammar is tree-sitter-bash's; this module follows the tree in the order in which bash would run it. Specification:
POSIX shell (XCU 2.2 quoting, 2.6 expansions, 2.9 commands), bash(1) arrays; fish set; mpirun(1) -x,
Hydra -genv, srun(1) and sbatch(1) --export, docker-run(1) -e, apptainer --env.

A script is read, not run: what a program prints, an argument or the environment outside gives, is unknown.
"""

from __future__ import annotations

import ast
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from planner.lint.script import NAME, NAMED, Assigned, Inner, Script, Unread
from planner.lint.tables import forms, words

_BASH = Language(tree_sitter_bash.language())
_MOST_SECONDS = 2.0  # of CPU for one text: 1 MiB of ordinary script takes 0.5, a hostile one is quadratic
_MOST_PIPES = 4_000  # one step of the parser's recovery takes as long as the pipeline is
_BUDGET: ContextVar[list[float]] = ContextVar("CPU seconds left for parsing one text")
_MOST_VALUE = 1 << 16  # characters; a variable that doubles itself has no end
_MOST_LEVELS = 60  # of blocks, substitutions and defaults inside each other
_MOST_SCRIPTS = 6  # scripts in quotes in scripts
_MOST_COMMANDS = 50_000  # that are followed, loops and calls of functions counted each time
_MOST_ROUNDS = 64  # of one loop over words
_MOST_OPTIONS = 1 << 12  # characters of a command in which what it does not hand on is looked for
_MOST_PASSES = 4  # over a text whose lines the grammar joins

_DOTTED = re.compile(r"(?:--?[\w-]+=)?\+{0,2}(?:[\w\[\]-]+\.)+((?:TORCH_)?NCCL_[A-Z0-9_]+)=")
_SETTER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_SETTING = re.compile(r"\b(?:TORCH_)?NCCL_[A-Z0-9_]+=|\b(?:FI|OFI|GLOO|RCCL|UCX)_[A-Z0-9_]+=")
_ROOT = re.compile(rb"(?<=[ \t])/(?=[ \t]+\]{1,2}(?:[ \t;)]|$))", re.MULTILINE)
_COMMANDS = re.compile(r"\bexport\s|(?:^|\s)(?:-x|-e|--env)[\s=]|\benv\s+\w+=|&&|;|\n")  # in a text: not prose
_TAKES_SETTING = re.compile(r"-x|-e|-env|--(?:[\w-]+-)?env(?:s|ironment)?(?:[-_]vars?)?")
_NAMES = words()["shell"]
_WRAPPERS = words()["wrappers"]
_EXPANSIONS = _NAMES["expansions"]
_SPLITS = ("simple_expansion", "expansion", "command_substitution")  # without quotes around them
# Statements after which the script goes on, whatever ended inside them.
_MAYBE = ("list", "pipeline", "for_statement", "c_style_for_statement", "while_statement", "subshell")


class Word(NamedTuple):
    """One word of a command after expansion."""

    value: str | None  # None: part of it is not known
    raw: str  # as it is written, without its quotes
    line: int = 0

    @property
    def text(self) -> str:
        """The value where it is known, else what is written."""
        return self.raw if self.value is None else self.value


class Output(NamedTuple):
    """Where a command's output goes and what it reads."""

    target: str = ""  # file
    document: str = ""  # here-document or string, filled in
    line: int = 0  # of the document's first row
    piped: bool = False  # its output goes into the next command


def read_shell(text: str, *, known: dict[str, str | None] | None = None, depth: int = 0, line: int = 1) -> Script:
    """Read all that a script sets. `known` are variables set before it, `line` the number of its first line."""
    return _Reader({} if known is None else dict(known), depth).read(text, line)


def read_words(words: Sequence[str], line: int = 1) -> Script:
    """Read a command given as a list of words, as `command:` and `args:` of a manifest are."""
    reader = _Reader({}, 0)
    reader.run([Word(word, word, line) for word in words], line, "", Output())
    return reader.script


def expand(text: str) -> str | None:
    """Fill in a value with `${NAME:-default}` in it (compose, envsubst); None where it stays open."""
    quoted = '"' + text.replace('"', '\\"') + '"'
    return _Reader({}, 0).read_value(quoted)


def limit_parsing() -> None:
    """Give the text that is read next a new budget of CPU time, all texts inside it included."""
    _BUDGET.set([_MOST_SECONDS])


def _parse(source: bytes) -> Node | None:
    """The tree's root; None where the text takes too long."""
    left, start = _BUDGET.get([_MOST_SECONDS]), time.process_time()
    if source.count(b"|") > _MOST_PIPES:
        return None

    def stop(_offset: int, _has_error: bool) -> bool:
        return time.process_time() - start > left[0]

    try:
        tree = Parser(_BASH).parse(lambda offset, _point: source[offset : offset + 65536], progress_callback=stop)
    except ValueError:  # "Parsing failed": it was stopped
        return None
    finally:
        left[0] -= time.process_time() - start
    return tree.root_node


def _parse_lines(source: bytes) -> tuple[bytes, Node | None]:
    """The text and its tree, with a `;` after assignments that end their line, and quotes around the `/` of `[ -d / ]`.

    The grammar takes the first words of the next line for the command of `A=1 B=2`, and `/ ]` for a division, whose
    test has no end. No line changes its number.
    """
    source = _ROOT.sub(b'"/"', source)
    for _ in range(_MOST_PASSES):
        root = _parse(source)
        ends = sorted({end for command in _assigning(root) for end in _ends_of_lines(command, source)})
        if not ends:
            break
        source = b";".join(source[start:end] for start, end in pairwise([0, *ends, len(source)]))
    return source, root


def _assigning(root: Node | None) -> Iterator[Node]:
    """Every command that begins with an assignment. A query of tree-sitter takes 30 s for 200,000 backticks."""
    waiting = [root] if root is not None else []
    while waiting:
        each = waiting.pop()
        inside = each.named_children
        waiting += inside
        if each.type == "command" and inside and inside[0].type == "variable_assignment":
            yield each


def _ends_of_lines(command: Node, source: bytes) -> Iterator[int]:
    """Where an assignment before a command is the last word of its line."""
    for each, after in pairwise(command.children):
        gap = source[each.end_byte : after.start_byte].replace(b"\\\n", b"")
        if after.type == "comment" or b"\n" in gap:
            yield each.end_byte
        if after.type == "command_name":
            break


class _Reader:
    """Follows the statements of one script with the values that are known so far."""

    def __init__(self, known: dict[str, str | None], depth: int) -> None:
        self.values = known
        self.script = Script()
        self._depth = depth
        self._source, self._first = b"", 1
        self._arrays: dict[str, list[Word]] = {}
        self._functions: dict[str, Node] = {}
        self._called: set[str] = set()
        self._exported: set[str] = set()
        self._export_everything = False
        self._held: dict[str, Assigned] = {}  # set and not exported yet
        self._written: dict[str, str] = {}  # files that the script itself writes
        self._scopes: list[str] = []
        self._piped = ""  # text that the command before writes into this one
        self._active: set[str] = set()  # functions that are followed at this moment
        self._reached = 0  # settings before the last command that may get them
        self._launches: list[int] = []  # the line of each launcher
        self._handed: dict[int, tuple[int, int]] = {}  # setting to the launcher that gets it first: `_reached`, line
        self._waiting: list[int] = []  # settings that no launcher after them has got
        self._met = 0  # settings before the last launcher
        self._hidden: list[Callable[[int, str], bool]] = []  # settings that the commands followed now do not hand on
        self._ended = ""  # the word after which nothing more of the script runs: exit, return or exec
        self._level = 0
        self._commands = 0

    def read(self, text: str, line: int) -> Script:
        """Follow a whole text."""
        self._first = line
        self._source, root = _parse_lines(text.encode("utf-8", "replace"))
        if root is None:
            self.script.unread.append(Unread(line=line, why="the script is nested or broken beyond what is read"))
            return self.script
        for node in root.children:
            self._visit(node)
        self._ended = ""
        if self._launches and self._depth == 0:
            waiting = [self.script.assigned[at] for at in self._waiting]
            self._split()
            self._drop([*self.script.assigned[self._reached :], *waiting])
        for name, body in list(self._functions.items()):
            if name not in self._called and self._launches and text.count(name) == 1:
                self._skip_text(self._text(body), self._line(body), f"the function {name} is not called")
            elif name not in self._called:  # a library: a script that loads it may call it
                self._inside(f"function {name}", body.children)
        return self.script

    def _split(self) -> None:
        """Let a setting that is replaced after a launch hold for that launch."""
        later = dict[str, int]()
        for at, each in reversed([*enumerate(self.script.assigned)]):
            reached, line = self._handed.get(at, (0, 0))
            if line and not each.scope and reached <= later.get(each.name, -1):
                self.script.assigned.insert(self._reached, replace(each, scope=f"the launch of line {line}"))
                self._reached += 1
            later[each.name] = later.get(each.name, at) if each.scope else at

    def _launch(self, line: int) -> None:
        """Note a launcher, and the settings that it is the first to get."""
        reached = len(self.script.assigned)
        waiting, self._waiting = [*self._waiting, *range(self._met, reached)], []
        for at in waiting:
            if any(hides(at, self.script.assigned[at].name) for hides in self._hidden):
                self._waiting.append(at)
            else:
                self._handed[at] = reached, line
        self._met = reached
        self._launches.append(line)

    def _drop(self, settings: Sequence[Assigned], start: int = 0) -> None:
        """Take settings from `start` on back: no program was started that gets them. Equal ones elsewhere stay."""
        gone, why = {id(each) for each in settings}, "no program that is started gets it"
        named = [each for each in settings if not each.unset]
        self.script.unreached += [Unread(name=each.name, line=each.line, why=why) for each in named]
        self.script.assigned[start:] = [each for each in self.script.assigned[start:] if id(each) not in gone]

    def _skip_text(self, text: str, line: int, why: str) -> None:
        """Name the settings of a part of the text that never runs."""
        for number, row in enumerate(text.splitlines()):
            for match in _SETTING.finditer(row) if not row.lstrip().startswith("#") else ():
                self.script.unreached.append(Unread(name=match[0][:-1], line=line and line + number, why=why))

    def read_value(self, text: str) -> str | None:
        """The value of a text that is one word."""
        self._source = text.encode("utf-8", "replace")
        root = _parse(self._source)
        name = next((node for node in _descend(root, "string")), None) if root else None
        return None if name is None or name.end_byte != len(self._source) else self._value(name)

    # -- text and values

    def _text(self, node: Node) -> str:
        return self._source[node.start_byte : node.end_byte].decode("utf-8", "replace")

    def _line(self, node: Node) -> int:
        return self._first + node.start_point.row if self._first else 0

    def _value(self, node: Node) -> str | None:
        """A word's text after expansion; None where part of it is not known."""
        self._level += 1
        try:
            if self._level > _MOST_LEVELS:
                return None
            return self._value_of(node)
        finally:
            self._level -= 1

    def _value_of(self, node: Node) -> str | None:
        match node.type:
            case "raw_string":
                return self._text(node)[1:-1]
            case "ansi_c_string":
                return _ansi(self._text(node)[2:-1])
            case "string":
                return self._mixed(node, node.start_byte + 1, node.end_byte - 1, r"\\([\"\\`$])|\\\n")
            case "translated_string":
                return self._value(node.children[-1])
            case "simple_expansion":
                name = self._text(node)[1:]
                self.script.used.add(name)
                return self.values.get(name)
            case "expansion":
                return self._braced(node)
            case "arithmetic_expansion":
                return self._arithmetic(self._text(node))
            case "command_substitution":
                return self._substituted(node)
            case "process_substitution":
                return None
        return self._mixed(node, node.start_byte, node.end_byte, r"\\(.)|\\\n")

    def _mixed(self, node: Node, start: int, end: int, escape: str) -> str | None:
        """Literal text with expansions in it. What no child covers is literal: the grammar drops some blanks."""
        found, at = "", start
        for child in node.children:
            if child.type not in _EXPANSIONS or child.start_byte < at:
                continue
            value = self._value(child)
            found += self._literal(at, child.start_byte, escape)
            if value is None or len(found) + len(value) > _MOST_VALUE:
                self._mark(node)
                return None
            found, at = found + value, child.end_byte
        return found + self._literal(at, end, escape)

    def _literal(self, start: int, end: int, escape: str) -> str:
        text = self._source[start:end].decode("utf-8", "replace")
        return re.sub(escape, r"\1", text) if "\\" in text else text

    def _mark(self, node: Node) -> None:
        """Count every variable named in a text as used, whether its value is known or not."""
        self.script.used.update(re.findall(r"\$\{?[!#]?([A-Za-z_]\w*)", self._text(node)))

    def _braced(self, node: Node) -> str | None:
        """`${NAME}` and its forms with a default; what cuts or replaces a value is unknown."""
        self._mark(node)
        match = re.match(r"\$\{([A-Za-z_]\w*|\d+)(:?[-=+?])?", self._text(node))
        if match is None:
            return None
        name, sign = match[1], match[2] or ""
        got = self.values.get(name)
        if not sign:
            return got if self._text(node) == f"${{{name}}}" else None
        empty = got is None or (got == "" and sign[0] == ":")
        if sign[-1] == "?" or (sign[-1] in "-=" and not empty):
            return got
        if sign[-1] == "+" and (name not in self.values or got == ""):
            return "" if name in self.values else None
        start = node.start_byte + len(match[0].encode())
        other = self._mixed(node, start, node.end_byte - 1, r"\\([\"\\`$}])|\\\n")
        if sign[-1] == "=":
            self._put(name, other, self._text(node), self._line(node), exported=False)
        return other

    def _arithmetic(self, text: str) -> str | None:
        """`$((512 * 1024))`, where every name in it is a known number."""
        inside = text.removeprefix("$((").removesuffix("))").removeprefix("$[").removesuffix("]")

        def put(match: re.Match[str]) -> str:
            self.script.used.add(match[1])
            return self.values.get(match[1]) or "?"

        filled = re.sub(r"(?<![\w$])\$?\{?([A-Za-z_]\w*)\}?", put, inside).strip()
        if not re.fullmatch(r"[\d\s+*/%()<>-]{1,80}", filled):
            return None
        try:
            return str(_number(ast.parse(re.sub(r"\s+", " ", filled).replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return None

    def _substituted(self, node: Node) -> str | None:
        """`$(cat <<EOF ...)`, `$(cat FILE)` of a file that the script wrote, `$(echo ...)`; else unknown."""
        body = [child for child in node.children if child.is_named and child.type != "comment"]
        if len(body) != 1:
            return None
        if body[0].type == "redirected_statement":
            return self._document(body[0])[0].rstrip("\n") if self._text(body[0]).startswith("cat") else None
        if body[0].type != "command":
            return None
        words = self._words(body[0])[1]
        if len(words) == 2 and words[0].text == "cat":
            written = self._written.get(words[1].text)
            return None if written is None else written.rstrip("\n")
        known = [word.value for word in words[1:] if word.value is not None]
        return " ".join(known) if words and words[0].text == "echo" and len(known) == len(words) - 1 else None

    def _word(self, node: Node) -> list[Word]:
        """The words that a word becomes: an unquoted variable may hold several, an array too."""
        text, line = self._text(node), self._line(node)
        bare = text[1:-1] if node.type == "string" else text
        array = re.fullmatch(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}", bare)
        if array and array[1] in self._arrays:
            self.script.used.add(array[1])
            return self._arrays[array[1]]
        value = self._value(node)
        if value is not None and node.type in _SPLITS and re.search(r"\s", value):
            return [Word(each, each, line) for each in value.split()]
        return [Word(value, self._raw(node), line)]

    def _raw(self, node: Node) -> str:
        """What stands there without the quotes around it."""
        text = self._text(node)
        if node.type == "concatenation":
            return re.sub(r"[\"']", "", text)
        return text[1:-1] if node.type in ("string", "raw_string") else text

    def _words(self, node: Node) -> tuple[list[Node], list[Word]]:
        """The assignments before a command, and its words."""
        before = [child for child in node.children if child.type == "variable_assignment"]
        words: list[Word] = []
        for child in node.children:
            if child.type == "command_name":
                words += self._word(child.children[0]) if child.children else []
            elif child.is_named and not child.type.endswith(("_redirect", "assignment")) and child.type != "comment":
                words += self._word(child)
        return before, words

    # -- statements

    def _visit(self, node: Node) -> None:
        """Follow one statement."""
        self._level += 1
        self._commands += 1
        if self._ended:
            self._skip_text(self._text(node), self._line(node), f"it stands after {self._ended}")
        elif self._level > _MOST_LEVELS or self._commands > _MOST_COMMANDS:
            if not any(each.why.startswith("too") for each in self.script.unread):
                self.script.unread.append(Unread(line=self._line(node), why="too many or too deeply nested commands"))
        else:
            self._statement(node)
        self._level -= 1

    def _statement(self, node: Node) -> None:
        follow: dict[str, Callable[[Node], None]] = {
            "ERROR": self._not_understood, "redirected_statement": self._redirected, "if_statement": self._if,
            "case_statement": self._case, "for_statement": self._for, "list": self._list, "pipeline": self._pipeline,
        }  # fmt: skip
        kind, ended = node.type, self._ended
        if node.is_missing:
            self._not_understood(node)
        elif kind in follow:
            follow[kind](node)
        elif kind == "command":
            self._command(node, Output())
        elif kind in ("variable_assignment", "variable_assignments"):
            for each in [node] if kind == "variable_assignment" else node.named_children:
                self._assign(each, exported=False)
        elif kind in ("declaration_command", "unset_command"):
            assignments, words = self._words(node)
            self._declare(node.children[0].type, words, self._line(node), assignments)
        elif kind == "function_definition":
            self._functions[self._text(node.child_by_field_name("name") or node)] = node.named_children[-1]
            self.script.commands += 1
        elif kind == "subshell":
            kept, start = dict(self.values), len(self.script.assigned)
            self._inside(f"the command of line {self._line(node)}", node.children)
            self.values = kept
            if self._reached <= start and self._depth == 0:
                self._drop(self.script.assigned[start:], start)
        elif kind in ("while_statement", "c_style_for_statement"):
            self._repeat(node.children)
        elif kind != "comment" and (kind != "test_command" or node.has_error):
            for child in node.children:
                self._visit(child)
        if kind in _MAYBE:
            self._ended = ended

    def _not_understood(self, node: Node) -> None:
        """Name the lines of what fits nowhere, where settings are near; statements inside are followed."""
        near = NAMED.search(self._text(node)) is not None
        for child in node.children or [node]:
            if child.is_named and child != node and child.type not in _EXPANSIONS | {"word", "number", "variable_name"}:
                self._visit(child)
            elif near and not re.fullmatch(r"[\s<>&|;()\\]*", self._text(child)):
                self.script.unread.append(Unread(line=self._line(child), why="no shell syntax that is known"))

    def _inside(self, scope: str, nodes: Iterable[Node]) -> None:
        """Follow statements that run only under a condition or for one command."""
        if scope:
            self._scopes.append(scope)
        ended = self._ended
        for node in nodes:
            self._visit(node)
        if scope:
            self._scopes.pop()
            self._ended = ended

    def _title(self, nodes: Sequence[Node]) -> str:
        text = " ".join(self._text(node) for node in nodes)
        return re.sub(r"\s+", " ", re.sub(r"[\"']", "", text)).strip()[:80]

    def _certain(self, condition: Sequence[Node]) -> bool | None:
        """How a condition ends that is the same in every run; None for all others."""
        return {"true": True, ":": True, "false": False}.get(self._title(condition))

    def _if(self, node: Node) -> None:
        """Each branch under its own condition; what a condition itself runs is followed too."""
        self.script.commands += 1
        title, condition, body, others = "", list[Node](), list[Node](), list[Node]()
        certain: bool | None = None
        for child in node.children:
            if child.type in ("if", "elif", "fi", ";", "\n"):
                continue
            if child.type == "then":
                title, condition, certain = "if " + self._title(condition), [], self._certain(condition)
            elif child.type in ("elif_clause", "else_clause"):
                others.append(child)
            elif title:
                body.append(child)
            else:
                condition.append(child)
                self._visit(child)
        if certain is not False:
            self._inside("" if certain else title, body)
        for child in (*(body if certain is False else ()), *(others if certain else ())):
            self._skip_text(self._text(child), self._line(child), "its condition never holds")
        for child in others if not certain else ():
            if child.type == "elif_clause":
                self._if(child)
                title = "if " + self._title([each for each in child.children[1:] if each.is_named][:1])
            else:
                self._inside("" if certain is False else f"else of {title}", child.children)

    def _case(self, node: Node) -> None:
        self.script.commands += 1
        of = self._title([node.child_by_field_name("value") or node])
        for item in node.children:
            if item.type == "case_item":
                patterns = item.children_by_field_name("value")
                rest = [each for each in item.children if each not in patterns]
                self._inside(f"case {of} in {self._title(patterns)}"[:80], rest)

    def _for(self, node: Node) -> None:
        """Follow the body once for each known word; else once with an unknown one."""
        self.script.commands += 1
        variable = self._text(node.child_by_field_name("variable") or node)
        words = [word for each in node.children_by_field_name("value") for word in self._word(each)]
        body = node.child_by_field_name("body")
        known = [word.value for word in words] if all(word.value for word in words) else [None]
        for value in known[:_MOST_ROUNDS] or [None]:
            self.values[variable] = value
            if body is not None:
                self._visit(body) if value is not None else self._repeat([body])

    def _repeat(self, nodes: Sequence[Node]) -> None:
        """Follow a loop's body, and once more where a launch of the next round gets what follows its last launch."""
        launches = len(self._launches)
        self._inside("", nodes)
        if len(self._launches) > launches and len(self.script.assigned) > self._met:
            self._inside("", nodes)

    def _list(self, node: Node) -> None:
        """`a && b || c`: the grammar nests it to the left, as deep as it is long."""
        chain: list[tuple[Node, str]] = []
        while node.type == "list":
            chain.append((node.children[-1], f"after {node.children[1].type}"))
            node = node.children[0]
        self._visit(node)
        for each, scope in reversed(chain):
            self._inside("" if self._scopes else scope, [each])

    def _pipeline(self, node: Node) -> None:
        parts = [child for child in node.children if child.is_named]
        for number, part in enumerate(parts):
            if number < len(parts) - 1:
                self._run_piped(part)
            else:
                self._visit(part)
        self._piped = ""

    def _run_piped(self, node: Node) -> None:
        if node.type == "command":
            self._command(node, Output(piped=True))
        elif node.type == "redirected_statement":
            self._redirected(node, piped=True)
        else:
            self._visit(node)

    def _redirected(self, node: Node, *, piped: bool = False) -> None:
        body = node.child_by_field_name("body")
        document, line = self._document(node)
        target, follow = "", list[Node]()
        for redirect in _redirects(node):
            if redirect.type == "file_redirect" and self._text(redirect).lstrip("&0123456789")[:1] == ">":
                destination = redirect.child_by_field_name("destination")
                found = self._word(destination)[0].text if destination is not None else ""
                target = target if redirect.children[0].type == "file_descriptor" or found.isdigit() else found
            elif redirect.type in ("pipeline", "list", "&&", "||"):
                follow += [child for child in redirect.children if child.is_named]
            elif redirect.type == "ERROR":
                self._not_understood(redirect)
        output = Output(target, document, line, piped or bool(follow))
        if body is None:
            self._read_by("", output)
        elif body.type == "command":
            self._command(body, output)
        else:
            self._visit(body)
            if document:
                self._read_by("", output)
        for number, each in enumerate(follow):
            self._run_piped(each) if number < len(follow) - 1 else self._visit(each)

    def _document(self, node: Node) -> tuple[str, int]:
        """The here-document or here-string of a statement, known variables filled in, and its first line."""
        for redirect in node.children:
            if redirect.type == "herestring_redirect":
                return (self._value(redirect.children[-1]) or self._text(redirect.children[-1])), self._line(redirect)
            if redirect.type != "heredoc_redirect":
                continue
            body = next((child for child in redirect.children if child.type == "heredoc_body"), None)
            start = next((child for child in redirect.children if child.type == "heredoc_start"), None)
            if body is None or start is None:
                continue
            text = self._text(body)
            if redirect.children[0].type == "<<-":
                text = re.sub(r"^\t+", "", text, flags=re.MULTILINE)
            if self._text(start)[:1] not in "'\"\\":
                text = self._filled(text)
            return text, self._line(body)
        return "", 0

    def _filled(self, text: str) -> str:
        """A here-document with the known variables put in. The grammar loses expansions there after an escaped `$`."""

        def put(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            self.script.used.add(name)
            value = self.values.get(name)
            if value is None and match[3]:
                value = match[3]
            return match.group() if value is None or len(value) > _MOST_VALUE >> 4 else value

        found = re.sub(r"(?<!\\)\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?-([^{}$]*))?\})", put, text)
        return found.replace("\\$", "$")[: 1 << 20]

    # -- assignments

    def _assign(self, node: Node, *, exported: bool, scope: str = "") -> None:
        """`NAME=value`, `NAME+=value`, `NAME=(an array)`; with `scope` for one command only."""
        name_node, value_node = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name_node is None or name_node.type != "variable_name":
            return
        name, raw = self._text(name_node), self._text(value_node) if value_node else ""
        if value_node is not None and value_node.type == "array":
            items = [word for each in value_node.named_children for word in self._word(each)]
            kept = self._arrays.get(name, []) if node.children[1].type == "+=" else []
            self._arrays[name], self.values[name] = [*kept, *items][: _MOST_VALUE >> 4], None
            return
        for inner in _descend(value_node, "command_substitution") if "NCCL_" in raw else ():
            if self._value(inner) is None:
                self._inside(f"the command of line {self._line(inner)}", inner.children)
        used = set(self.script.used)
        value = self._value(value_node) if value_node else ""
        if name not in used:
            self.script.used.discard(name)  # to hand on one's own value is no use of it
        if node.children[1].type == "+=":
            before = self.values.get(name)
            value = None if value is None or before is None else (before + value)[:_MOST_VALUE]
        raw = self._raw(value_node) if value_node else ""
        self._put(name, value, raw, self._line(node), exported=exported, scope=scope)

    def _put(self, name: str, value: str | None, raw: str, line: int, *, exported: bool, scope: str = "") -> None:
        if not NAME.match(name):
            return
        for outer in ("SINGULARITYENV_", "APPTAINERENV_"):  # apptainer hands these in without the prefix
            name = name.removeprefix(outer)
        if not scope:
            self.values[name] = value
            if exported or self._export_everything:
                self._exported.add(name)
        seen = exported or self._export_everything or name in self._exported
        where = "; ".join((*self._scopes, scope) if scope else self._scopes)
        found = Assigned(name=name, value=value, raw=raw, line=line, scope=where, exported=seen)
        if seen:
            self._held.pop(name, None)
        else:
            self._held[name] = found
        self.script.assigned.append(found)

    def _declare(self, keyword: str, words: list[Word], line: int, assignments: Iterable[Node] = ()) -> None:
        """export, declare, typeset, local, readonly, unset: of names, of assignments, and of words that hold one."""
        if keyword == "unset":
            self._unset([word.text for word in words], line)
            return
        self.script.commands += 1
        options = " ".join(word.text for word in words if word.text[:1] in ("-", "+"))
        ends = re.search(r"-\w*n" if keyword == "export" else r"\+\w*x", options) is not None
        exported = not ends and (keyword == "export" or re.search(r"-\w*x", options) is not None)
        for each in assignments:
            if ends:
                self._end_export(self._text(each.children[0]), line)
            self._assign(each, exported=exported)
        for word in words:
            name, equals, value = (word.value or "").partition("=")
            if ends:
                self._end_export(name, line)
            if equals:
                self._put(name, value, value, line, exported=exported)
            elif exported and NAME.match(name):
                self._export(name, line)

    def _end_export(self, name: str, line: int) -> None:
        """`export -n`: the shell keeps the variable, and programs no longer get it."""
        value = self.values.get(name)
        self._unset([name] if NAME.match(name) else [], line)
        if value is not None:
            self.values[name] = value
            self._held[name] = Assigned(name=name, value=value, raw=value, line=line, exported=False)

    def _export(self, name: str, line: int) -> None:
        self._exported.add(name)
        held = self._held.pop(name, None)
        if held is not None:
            self._put(name, held.value, held.raw, held.line, exported=True)
        elif name not in self.values:
            self.script.assigned.append(Assigned(name=name, value=None, raw=f"${name}", line=line))

    def _unset(self, names: Iterable[str], line: int) -> None:
        for name in names:
            self.values.pop(name, None)
            self._exported.discard(name)
            where = "; ".join(self._scopes)
            self.script.assigned.append(Assigned(name=name, value="", raw="", line=line, scope=where, unset=True))

    # -- commands

    def _command(self, node: Node, output: Output) -> None:
        line = self._line(node)
        piped, self._piped = self._piped, ""
        before, words = self._words(node)
        start, where = len(self.script.assigned), f"the command of line {line}"
        declared = [word.text for word in words] if words and words[0].text in _NAMES["declares"] else []
        for each in before:
            stays = self._text(each.children[0]) in declared  # `N=1 export N` sets it for all that follows
            self._assign(each, exported=not stays, scope="" if stays else where)
        for child in node.children:
            if child.has_error and child.type not in _EXPANSIONS:
                for error in _descend(child, "ERROR"):
                    self._not_understood(error)
        command = " ".join(word.text for word in words)[:_MOST_OPTIONS] + " "
        own, removes = self._own_settings(start, where), removed_by(command)
        names = {each.name for each in own}
        self._hidden.append(lambda at, name: at < start and (name in names or removes(name)))
        at, ends = self._after_wrappers(words, line, where)
        words = words[at:]
        if words:
            self.run(words, line, piped, output)
            program = words[0].text.rsplit("/", 1)[-1]
            if program in _NAMES["utilities"] - self._functions.keys():
                starts = _NAMES["launchers"].intersection(word.text for word in words)  # `conda run python t.py`
                if not starts and program not in _NAMES["evaluates"]:
                    self._drop(own, start)
            elif program not in self._functions:
                self._reached = len(self.script.assigned)
                prepares = program.startswith("python") and len(words) > 1 and words[1].text in ("-c", "-m", "-")
                if program in _NAMES["launchers"] | {"env"} and not prepares:
                    names |= {each.name for each in self._own_settings(start, where)}
                    self._launch(line)
            self._ended = self._ended or ("exec" if ends else "")
        self._hidden.pop()

    def _own_settings(self, start: int, where: str) -> list[Assigned]:
        """The settings, from `start` on, that one command gives to its program alone."""
        scope = "; ".join((*self._scopes, where))
        return [each for each in self.script.assigned[start:] if each.scope == scope]

    def _after_wrappers(self, words: Sequence[Word], line: int, where: str) -> tuple[int, bool]:
        """Find the program behind sudo, timeout and the like: its place, and whether the script ends with it (exec)."""
        at, ends = 0, False
        while at < len(words) and (first := words[at].text.rsplit("/", 1)[-1]) in _NAMES["wrappers"]:
            ends, at = ends or first == "exec", at + 1
            options = _WRAPPERS.get(first, frozenset())
            while at < len(words) and first != "command":  # `command -v` starts nothing
                text = words[at].text
                if first == "sudo" and _SETTER.match(text):
                    self._setting(text, words[at].value, line, where)
                elif text[:1] != "-":
                    break
                at += 2 if text in options else 1
            at += first in _NAMES["takes_operand"]
        return at, ends

    def run(self, words: list[Word], line: int, piped: str, output: Output) -> None:
        """Take from one simple command what it sets."""
        self.script.commands += 1
        program, rest = words[0].text.rsplit("/", 1)[-1], words[1:]
        texts = [word.text for word in rest]
        if program == "setenv":
            self.script.unread.append(Unread(line=line, why="setenv is of the C shell, whose scripts are not read"))
        elif program in _NAMES["declares"]:  # `! export N=1`, `Y=1 export N=1`
            self._declare(program, rest, line)
        elif program == "set":
            self._set(rest, texts, line)
        elif program in ("read", "getopts", "mapfile", "readarray"):
            self.values.update(dict.fromkeys(name for name in texts if NAME.match(name)))
        elif program in ("echo", "printf", "cat", "tee"):
            self._write(program, rest, line, piped, output)
            return
        elif program == "exit" or (program == "return" and self._active):
            self._ended = program
        elif program in self._functions and program not in self._active:
            self._call(program, rest)
        else:
            self._options(words, line)
        self._read_by(program, output if output.document else Output(output.target, piped, line))

    def _call(self, name: str, rest: list[Word]) -> None:
        kept = {str(at): self.values.get(str(at)) for at in range(1, 10)}
        self.values.update({str(at): rest[at - 1].value if at <= len(rest) else None for at in range(1, 10)})
        self._called.add(name)  # a function that calls itself ends here
        self._active.add(name)
        self._visit(self._functions[name])
        self._active.discard(name)
        self._ended = "" if self._ended == "return" else self._ended
        self.values.update(kept)

    def _set(self, rest: list[Word], texts: list[str], line: int) -> None:
        """`set -a`, fish's `set -x NAME value`."""
        if _NAMES["fish"] & {*texts[:2]} and len([each for each in texts if each[:1] != "-"]) > 1:
            named = [word for word in rest if not word.text.startswith("-")]
            known = [word.value for word in named[1:] if word.value is not None]
            value = " ".join(known) if len(known) == len(named) - 1 else None
            self._put(named[0].text, value, " ".join(word.raw for word in named[1:]), line, exported=True)
            return
        for number, text in enumerate(texts):
            everything = text in ("-o", "+o") and texts[number + 1 : number + 2] == ["allexport"]
            if everything or re.fullmatch(r"[-+][a-z]*a[a-z]*", text):
                self._export_everything = text[0] == "-"

    def _write(self, program: str, rest: list[Word], line: int, piped: str, output: Output) -> None:
        """Take what echo, printf, cat and tee write into a file or hand on; on the terminal it sets nothing."""
        text, start, target = output.document, output.line, output.target
        if program in ("echo", "printf"):
            words = [word.text for word in rest if word.raw not in ("-e", "-n", "-E")]
            text, start = ("\n" if program == "printf" else " ").join(words).replace("\\n", "\n"), line
        elif program == "tee":
            text, target = text or piped, next((word.text for word in rest if word.text[:1] != "-"), "")
        elif not text and len(rest) == 1:
            text = self._written.get(rest[0].text, "")
        if target and text:
            kept = self._written.get(target, "") + text.rstrip("\n") + "\n"
            self._written[target] = kept[-_MOST_VALUE:]
            self.script.inner.append(Inner(text=text, target=target, line=start))
        elif output.piped:
            self._piped = text
        for row in text.splitlines() if program == "echo" and not target else ():
            if dotted := _DOTTED.match(row):  # for a launcher that reads the script's output
                self._pair(dotted[1], row[dotted.end() :], row[dotted.end() :], line, f"line {line}")

    def _read_by(self, program: str, output: Output) -> None:
        """Text that a program reads from its standard input: a shell, Python, kubectl, ssh."""
        text, line = output.document, output.line
        if not text:
            return
        if program in _NAMES["idle"]:
            self._skip_text(text, line, "no program reads its here-document")
        elif output.target and not program:
            self.script.inner.append(Inner(text=text, target=output.target, line=line))
        elif program in _NAMES["shells"]:
            self._nested(text, line, f"here-document of line {line}")
        else:
            target = "manifest.yaml" if program in ("kubectl", "oc") else program
            self.script.inner.append(Inner(text=text, target=target, line=line))

    def _options(self, words: list[Word], line: int) -> None:
        """Variables in the words of any program: options of launchers, `env A=1`, scripts in quotes."""
        where = f"the command of line {line}"
        settings, at = [word.text for word in words[:3]] == ["kubectl", "set", "env"], 0
        starts = next(
            (at for at, each in enumerate(words) if each.text.rsplit("/", 1)[-1] in _NAMES["takes_script"]), None
        )
        after = range(len(words) if starts is None else starts + 1, len(words))
        end = next((at for at in after if re.fullmatch(r"[^-:=][^:=]*\.(?:py|sh)", words[at].text)), len(words))
        while at < len(words):
            word = words[at]
            if at > end and not _DOTTED.match(word.text):
                self._skip_text(word.text, line, f"it is an argument of {words[end].text}")
                at += 1
                continue
            taken = self._launcher_option(words, at, line, where)
            if taken is None:
                self._plain_word(words, at, line, where, settings=settings)
                unset = at > 0 and words[at - 1].text in ("-u", "-C")
                more = unset or re.match(r"-|[A-Za-z_]\w*=|(?:kubectl|set)\Z", word.text)
                settings = word.text.rsplit("/", 1)[-1] == "env" or (settings and bool(more))
            at += 1 + (taken or 0)

    def _plain_word(self, words: list[Word], at: int, line: int, where: str, *, settings: bool) -> None:
        word, text = words[at], words[at].text
        program = words[0].text.rsplit("/", 1)[-1]
        runs = at > 0 and re.fullmatch(r"-\w*c", words[at - 1].text) and program not in ("srun", "gcc")
        if program == "eval" and at == 1:
            self._nested(" ".join(each.text for each in words[1:]), line, "")
        elif program.startswith("python") and runs:
            self.script.inner.append(Inner(text=text, target="python", line=word.line or line))
        elif runs:
            self._nested(text, word.line or line, where)
        elif dotted := _DOTTED.match(text):  # Hydra's and Helm's way to a key: env_vars.NAME=VALUE
            tail = text[dotted.end() :].strip("\"'")
            self._pair(dotted[1], None if word.value is None else tail, tail, line, where)
        elif _SETTER.match(text) and (settings or (at and words[at - 1].text[:1] == "-" and _SETTING.match(text))):
            self._setting(text, word.value, line, where)
        elif at and program in _NAMES["remote"] and re.search(r"\s", text) and NAMED.search(text):
            self._nested(text, word.line or line, where)
        elif at:
            self._text_in_word(text, word.line or line, where)

    def _launcher_option(self, words: list[Word], at: int, line: int, where: str) -> int | None:
        """Take a launcher's option that sets variables: how many words after it belong to it, None if it is none."""
        word, after = words[at], words[at + 1] if at + 1 < len(words) else Word(None, "")
        text = word.text
        option, equals, tail = text.partition("=")
        if text in _NAMES["takes_pair"] or (text == "-env" and "=" not in after.text and at + 2 < len(words)):
            if at + 2 < len(words):
                self._pair(after.text, words[at + 2].value, words[at + 2].raw, line, where)
            return 2
        if _TAKES_SETTING.fullmatch(text):
            self._setting(after.text, after.value, line, where)
            return 1
        if equals and _TAKES_SETTING.fullmatch(option):
            self._setting(tail, None if word.value is None else tail, line, where)
        elif text.startswith(("-xNCCL_", "-eNCCL_")):
            self._setting(text[2:], None if word.value is None else text[2:], line, where)
        elif option in _NAMES["takes_list"]:
            for part in (tail if equals else after.text).split(","):  # a comma ends a value: a list is cut
                name, sign, value = part.partition("=")
                if sign:
                    self._pair(name, None if "$" in value else value, value, line, where)
            return 0 if equals else 1
        elif option in _NAMES["takes_file"]:
            self.script.files.append(tail if equals else after.text)
            return 0 if equals else 1
        else:
            return None
        return 0

    def _setting(self, text: str, value: str | None, line: int, scope: str) -> None:
        """NAME=VALUE, several with commas between them (apptainer), or NAME alone, which hands on what is set."""
        for part in re.split(r",(?=[A-Z_][A-Z0-9_]*=)", text):
            name, equals, tail = part.partition("=")
            if equals:
                self._pair(name, None if value is None else tail, tail, line, scope)
            elif name in self._held:
                self.script.used.add(name)

    def _pair(self, name: str, value: str | None, raw: str, line: int, scope: str) -> None:
        if NAME.match(name):
            where = "; ".join((*self._scopes, scope))
            self.script.assigned.append(Assigned(name=name, value=value, raw=raw, line=line, scope=where))
            if _SETTING.search(raw) and not name.startswith("NCCL_"):
                self._text_in_word(raw, line, scope)

    def _text_in_word(self, text: str, line: int, scope: str) -> None:
        """A script, JSON or options inside one word."""
        if not NAMED.search(text):
            return
        inside = text.split("=", 1)[1] if re.match(r"--?[\w.-]+=", text) else text
        if inside.lstrip().startswith(("{", "[")) and '"' in inside:
            self.script.inner.append(Inner(text=inside, target="option.json", line=line))
        elif "os.environ" in inside:
            self.script.inner.append(Inner(text=inside, target="python", line=line))
        elif _COMMANDS.search(inside):
            self._nested(inside, line, scope, surely=False)

    def _nested(self, text: str, line: int, scope: str, *, surely: bool = True) -> None:
        """A script inside this one: `bash -c`, eval, ssh, a here-document; not `surely` where it may be prose."""
        if self._depth >= _MOST_SCRIPTS:
            self.script.unread.append(Unread(line=line, why="scripts in quotes nested too deeply"))
            return
        inner = _Reader(dict(self.values), self._depth + 1)
        inner._scopes = [*self._scopes, scope] if scope else list(self._scopes)
        inner._commands = self._commands
        inner.read(text, line)
        self._commands = inner._commands
        if not scope:
            self.values = inner.values
        if not surely:
            inner.script.unread.clear()
        self.script.add(inner.script)
        self._reached = len(self.script.assigned)
        for at_line in inner._launches[:1]:
            self._launch(at_line)


def removed_by(command: str) -> Callable[[str], bool]:
    """Which names a command does not hand on: env(1) -i and -u, sudo(8) without -E, srun(1) --export."""
    names = {*re.findall(forms()["removed"]["names"], command)}
    everything = re.match(forms()["removed"]["all"], command) is not None
    return lambda name: name in names or (everything and name not in command)


def _redirects(node: Node) -> Iterator[Node]:
    """Redirections of a statement, and what the grammar puts inside a here-document's line after its start."""
    for child in node.children:
        yield child
        if child.type == "heredoc_redirect":
            yield from (each for each in child.children if each.type in ("file_redirect", "pipeline", "list", "ERROR"))


def _descend(node: Node | None, kind: str) -> Iterator[Node]:
    """The outermost nodes of one kind, in order."""
    waiting = [node] if node is not None else []
    while waiting:
        each = waiting.pop()
        if each.type == kind:
            yield each
        else:
            waiting += reversed(each.children)


def _ansi(text: str) -> str:
    names = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "e": "\x1b", "a": "\a"}
    return re.sub(r"\\(.)", lambda match: names.get(match[1], match[0]), text, flags=re.DOTALL)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip


def _number(node: ast.expr) -> int:
    """The value of an expression of integers. Raises ValueError for anything else, and beyond 63 bits."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        found = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = -_number(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left), _number(node.right)
        if isinstance(node.op, ast.LShift | ast.RShift) and not 0 <= right < 63:
            raise ValueError("shifted out")
        found = _OPERATORS[type(node.op)](left, right)
    else:
        raise ValueError("no number")
    if abs(found) >= 1 << 63:
        raise ValueError("too large")
    return found


# -- schedulers


def directives(text: str) -> Iterator[tuple[int, str]]:
    """`#SBATCH --export=...` and the same of other schedulers: the line's number and its words."""
    for number, row in enumerate(text.splitlines(), start=1):
        match = re.match(r"\s*#(?:SBATCH|PBS|BSUB|FLUX:|\$)\s+(.*)", row)
        if match and "=" in match[1]:
            yield number, match[1].split(" #")[0]

"""Words of a shell script after expansion, with the values that variables have at that place.

The grammar is tree-sitter-bash's. Specification: POSIX shell (XCU 2.2 quoting, 2.6 expansions), bash(1) arrays.
"""

from __future__ import annotations

import ast
import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from planner.lint.script import OPEN, Assigned, Script, Word, words

_BASH = Language(tree_sitter_bash.language())
_MOST_SECONDS = 2.0  # of CPU for one text: 1 MiB of ordinary script takes 0.5, a hostile one is quadratic
_MOST_PIPES = 4_000  # one step of the parser's recovery takes as long as the pipeline is
_BUDGET: ContextVar[list[float]] = ContextVar("CPU seconds left for parsing one text")
_MOST_PASSES = 4  # over a text whose lines the grammar joins
WORK_OF_WORD = 256  # expanding and judging one word takes about as long as reading so many characters
MOST_VALUE = 1 << 16  # characters; a variable that doubles itself has no end
MOST_LEVELS = 60  # of blocks, substitutions and defaults inside each other
_MOST_WORK = 1 << 25  # characters that are read, those of every round of a loop counted; a few seconds

# The reserved word, which may stand before assignments, functions and `(`; the grammar takes it for a program.
_TIME = re.compile(rb"((?:^|[;&|(){]|\b(?:then|do|else|if))[ \t]*)time(?:[ \t]+-p)?(?=[ \t]+[\w({])", re.MULTILINE)
_BRACED = re.compile(r"\$\{([A-Za-z_]\w*|\d{1,9}|[@*#])(\[[@*]\])?(\}\Z|:?[-=+?])")
_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_EXPANSIONS = words()["shell"]["expansions"]
_SPLITS = ("simple_expansion", "expansion", "command_substitution")  # without quotes around them


class Input(NamedTuple):
    """A text that commands write and read."""

    text: str = ""
    line: int = 0  # of its first row


class Function(NamedTuple):
    """A function of a script."""

    body: Node
    source: bytes
    first: int  # the number of the text's first line


@dataclass(slots=True, eq=False)
class Shell:
    """What a shell has at one place of a script, on one of the ways there."""

    variables: dict[str, Assigned] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    exports_all: bool = False  # set -a
    left: str = ""  # the command after which nothing more runs here: exit, return, break, continue
    status: bool | None = True  # how the last command ended; None where that depends on the run
    likely: bool | None = True  # which end is more likely where it depends on the run
    choices: dict[str, tuple[bool, str]] = field(default_factory=dict)  # what only a run decides: the end, in words
    turns: tuple[str, ...] = ()  # those of them that are not the likely end
    output: Input | None = None  # what its commands wrote, where something reads it

    def copy(self) -> Shell:
        """A shell that starts with the same."""
        return replace(self, variables=dict(self.variables), functions=dict(self.functions), choices=dict(self.choices))

    def is_like(self, other: Shell) -> bool:
        """Whether what follows is the same in both."""
        return (
            (self.left, self.exports_all, self.output) == (other.left, other.exports_all, other.output)
            and self.variables == other.variables
            and self.functions == other.functions
        )

    def negate(self) -> None:
        """`!` before the last command."""
        self.status, self.likely = (None if self.status is None else not self.status), not self.likely

    def write(self, text: str, line: int = 0) -> None:
        """Take in what a command writes."""
        if self.output is not None:
            self.output = Input((self.output.text + text)[:MOST_VALUE], self.output.line or line)

    def restore(self, hidden: Mapping[str, Assigned | None]) -> None:
        """Bring back what variables were that only a command or a function had."""
        for name, before in hidden.items():
            self.variables.pop(name, None)
            if before is not None:
                self.variables[name] = before


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


def parse_lines(source: bytes) -> tuple[bytes, Node | None]:
    """The text as the grammar understands it, and its tree. No line changes its number.

    The word `time` is left out. Assignments that end their line get a `;`, because the grammar takes the first words of
    the next line for their command.
    """
    source = _TIME.sub(lambda found: found[1].ljust(len(found[0])), source)
    for _ in range(_MOST_PASSES):
        root = _parse(source)
        ends = sorted({end for command in walk(root, "command") for end in _ends_of_lines(command, source)})
        if not ends:
            break
        source = b";".join(source[start:end] for start, end in pairwise([0, *ends, len(source)]))
    return source, root


def _ends_of_lines(command: Node, source: bytes) -> Iterator[int]:
    """Where an assignment before a command is the last word of its line."""
    children = command.children
    for each, after in pairwise(children if children[0].type == "variable_assignment" else ()):
        gap = source[each.end_byte : after.start_byte].replace(b"\\\n", b"")
        if after.type == "comment" or b"\n" in gap:
            yield each.end_byte
        if after.type == "command_name":
            break


def walk(node: Node | None, *kinds: str) -> Iterator[Node]:
    """All nodes of some kinds, in order. A query of tree-sitter takes 30 s for 200,000 backticks."""
    waiting = [node] if node is not None else []
    while waiting:
        each = waiting.pop()
        waiting += reversed(each.children)
        if each.type in kinds:
            yield each


class Expander:
    """Expands words with the variables of `shell`. What only a run can tell stays open."""

    capture: Callable[[Sequence[Node]], str]  # what the commands of a substitution write
    assign: Callable[[str, str, str, int], None]  # gives a variable its default: name, value, text, line

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.script = Script()
        self.source, self.first = b"", 1
        self._level = 0
        self._work = 0

    def spend(self, characters: int) -> bool:
        """Count work done. Returns whether more of it may follow."""
        self._work += characters
        return self._work < _MOST_WORK

    def text(self, node: Node) -> str:
        """The node as it is written."""
        return self.source[node.start_byte : node.end_byte].decode("utf-8", "replace")

    def line(self, node: Node) -> int:
        """The number of its line in the whole text; 0 if unknown."""
        return self.first + node.start_point.row if self.first else 0

    def look_up(self, name: str) -> str | None:
        """The value of a variable; None where it is not set, OPEN in it where that is not known."""
        found = self.shell.variables.get(name)
        if found is None:
            return OPEN
        return None if found.unset else found.value

    def items(self, name: str) -> tuple[Word, ...] | None:
        """The words of an array; None where they are not known."""
        found = self.shell.variables.get(name)
        return found.items if found is not None else None

    def value(self, node: Node) -> str:
        """A word's text after expansion."""
        self._level += 1
        try:
            found = self._value(node) if self._level <= MOST_LEVELS and self.spend(64) else OPEN
            self.spend(len(found))
            return found
        finally:
            self._level -= 1

    def _value(self, node: Node) -> str:
        match node.type:
            case "raw_string":
                return self.text(node)[1:-1]
            case "ansi_c_string" | "translated_string":
                return OPEN
            case "string":
                return self._mixed(node, node.start_byte + 1, node.end_byte - 1, r"\\([\"\\`$])|\\\n")
            case "simple_expansion":
                name = self.text(node)[1:]  # bash takes one digit: `$12` is `${1}2`
                return self.parameter(name[:1]) + name[1:] if name[:1].isdecimal() else self.parameter(name)
            case "expansion":
                return self._braced(node)
            case "arithmetic_expansion":
                number = self.arithmetic(self.text(node))
                return OPEN if number is None else str(number)
            case "command_substitution" | "process_substitution":
                found = self.capture(node.named_children).rstrip("\n")
                return found if node.type == "command_substitution" else OPEN
        return self._mixed(node, node.start_byte, node.end_byte, r"\\(.)|\\\n")

    def parameter(self, name: str) -> str:
        """The value of `$NAME`; OPEN for an argument."""
        self.spend(64)
        return self.look_up(name) or ("" if name in self.shell.variables else OPEN)

    def _mixed(self, node: Node, start: int, end: int, escape: str) -> str:
        """Literal text with expansions in it. What no child covers is literal: the grammar drops some blanks."""
        found, at = "", start
        for child in node.children:
            if child.type not in _EXPANSIONS or child.start_byte < at:
                continue
            value = self.value(child)
            found += self._literal(at, child.start_byte, escape)
            if len(found) + len(value) > MOST_VALUE:
                return OPEN
            found, at = found + value, child.end_byte
        return found + self._literal(at, end, escape)

    def _literal(self, start: int, end: int, escape: str) -> str:
        text = self.source[start:end].decode("utf-8", "replace")
        return re.sub(escape, r"\1", text) if "\\" in text else text

    def _braced(self, node: Node) -> str:
        """`${NAME}`, all items of an array, or a default; one item, and what cuts or replaces a value, is not known."""
        match = _BRACED.match(self.text(node))
        if match is None or (match[2] and match[3] != "}"):
            return OPEN
        name, index, sign = match.groups()
        if index:
            items = self.items(name) or ()
            short = sum(len(each.text) + 1 for each in items) < MOST_VALUE
            separated = index == "[*]" and "IFS" in self.shell.variables  # by what IFS says
            return " ".join(each.text for each in items) if items and short and not separated else OPEN
        if sign == "}":
            return self.parameter(name)
        known, got = name in self.shell.variables, self.look_up(name)
        missing = not got if sign[0] == ":" else got is None
        if known and not missing and got != OPEN:
            if sign[-1] != "+":
                return got or ""
        elif sign[-1] in "+?":
            return "" if known and missing else OPEN
        start = node.start_byte + len(match[0].encode())
        other = self._mixed(node, start, node.end_byte - 1, r"\\([\"\\`$}])|\\\n")
        if sign[-1] == "=":
            self.assign(name, other, self.text(node), self.line(node))
        return other

    def arithmetic(self, text: str) -> int | None:
        """The value of `$((512 * 1024))`, where every name in it is a known number."""
        inside = re.sub(r"\A\$?(?:\(\(|\[)|(?:\)\)|\])\Z", "", text)

        def put(match: re.Match[str]) -> str:
            number = self.parameter(match[1]) or "0"
            return number if match[0][0] == "$" else f"({number})"

        if not self.spend(len(text)):
            return None
        filled = re.sub(r"(?<![\w$])\$?\{?([A-Za-z_]\w*)\}?", put, inside).strip()
        if not re.fullmatch(r"[\d\s+*/%()<>-]{1,80}", filled):
            return None
        try:
            return _number(ast.parse(re.sub(r"\s+", " ", filled).replace("/", "//"), mode="eval").body)
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return None

    def words(self, node: Node) -> list[Word]:
        """The words that a word becomes: an unquoted variable may hold several, an array too."""
        text, line = self.text(node), self.line(node)
        bare = text[1:-1] if node.type == "string" else text
        array = _ARRAY.fullmatch(bare)
        if array and not (node.type == "string" and "*" in bare):  # "${NAME[*]}" is one word
            items = self.items(array[1])
            if items is not None and self.spend(WORK_OF_WORD * len(items)):
                return list(items)
        value = self.value(node)
        if node.type in _SPLITS and (re.search(r"\s", value) or not value):
            parts = value.split()
            self.spend(WORK_OF_WORD * len(parts))
            return [Word(each, each, line) for each in parts]
        return [Word(value, self.raw(node), line)]

    def raw(self, node: Node) -> str:
        """The text of a word, without the quotes around it."""
        text = self.text(node)
        if node.type == "concatenation":
            return re.sub(r"[\"']", "", text)
        return text[1:-1] if node.type in ("string", "raw_string") else text


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip


def _number(node: ast.expr) -> int:
    """The value of an expression, each part of it a number from 0 to 2^63. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left), _number(node.right)
        shifts_far = isinstance(node.op, ast.LShift | ast.RShift) and right > 62
        if not shifts_far and 0 <= (found := _OPERATORS[type(node.op)](left, right)) < 1 << 63:
            return found
    raise ValueError("no number that bash has too")

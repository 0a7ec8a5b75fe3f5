"""Parse shell scripts, and expand their words with the values of variables at that point of a script.

The grammar is tree-sitter-bash's. Specification: POSIX shell (XCU 2.2 quoting, 2.6 expansions), bash(1) arrays.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from planner.lint.script import OPEN, WORDS, Assigned, Word, pattern

_BASH = Language(tree_sitter_bash.language())
_MAX_SECONDS = 2.0  # CPU seconds per text: 1 MiB of ordinary script takes 0.5; a hostile text can take quadratic time
_MAX_PIPES = 4_000  # `|` per text; each error recovery of the parser takes time linear in the pipeline
_BUDGET: ContextVar[list[float]] = ContextVar("CPU seconds left for parsing one text")
WORK_OF_WORD = 256  # cost of expanding and checking one word, in characters read
MAX_VALUE = 1 << 16  # characters; a variable can double itself in each step
MAX_LEVELS = 60  # nesting of blocks, substitutions and defaults
_MAX_WORK = 1 << 25  # characters read, loop iterations included; takes a few seconds

# A comment in backticks between two options: `# the ranks`. The grammar ends it only at the end of the line.
_COMMENT = re.compile(rb"(?<!\S)`[ \t]*#[^`\n]*`")
# An unknown part of a text in `$(( ))`, where the grammar takes only names and numbers
_OPEN_NUMBER = re.compile(rb"\$\(\((?:(?!\)\)|\n).){0,200}\)\)")
NEXT_ITEM = "\0"  # ends each item in the value of an array
_NODES = WORDS["shell"]


Function = tuple[Node, bytes, int]
"""A function of a script: its body, and the text that has it with the number of its first line."""


@dataclass(slots=True)
class Shell:
    """State of a shell at one point of a script."""

    variables: dict[str, Assigned] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    exports_all: bool = False  # `set -a` is active

    def copy(self) -> Shell:
        """Return an independent copy."""
        return replace(self, variables=dict(self.variables), functions=dict(self.functions))


def limit_parsing() -> None:
    """Reset the CPU time budget for parsing. It applies to the next text, nested texts included."""
    _BUDGET.set([_MAX_SECONDS])


def parse(source: bytes) -> Node | None:
    """Return the root of the syntax tree; None if parsing exceeds the limits."""
    left, start = _BUDGET.get([_MAX_SECONDS]), time.process_time()
    if source.count(b"|") > _MAX_PIPES:
        return None
    source = _COMMENT.sub(lambda match: b" " * len(match[0]), source)
    source = _OPEN_NUMBER.sub(lambda match: match[0].replace(OPEN.encode(), b"000"), source)
    source = source.replace(b"\0", b" ")  # bash drops NUL; the parser takes quadratic time for them

    def stop(_offset: int, _has_error: bool) -> bool:
        return time.process_time() - start > left[0]

    try:
        tree = Parser(_BASH).parse(lambda offset, _point: source[offset : offset + 65536], progress_callback=stop)
    except ValueError:  # "Parsing failed": it was stopped
        return None
    finally:
        left[0] -= time.process_time() - start
    return tree.root_node


def walk(node: Node | None, *kinds: str) -> Iterator[Node]:
    """Yield all nodes of some kinds, in order. (A tree-sitter query takes 30 s for 200,000 backticks.)"""
    waiting = [node] if node is not None else []
    while waiting:
        each = waiting.pop()
        waiting += reversed(each.children)
        if each.type in kinds:
            yield each


class Expander:
    """Expands words with the variables of `scope`. Values that are unknown before a run become OPEN."""

    follow_substitution: Callable[[Sequence[Node]], None]  # follows the commands of `$( )`
    set: Callable[[Assigned], None]  # sets a variable

    def __init__(self, scope: Shell) -> None:
        self.scope = scope
        self.source, self.first = b"", 1
        self.loops = 0  # loops around the statement
        self.level = self._work = 0  # level: nesting of statements and words

    @contextmanager
    def during(self, **state: object) -> Iterator[None]:
        """Replace attributes until the end of a block."""
        saved = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        try:
            yield
        finally:
            vars(self).update(saved)

    def spend(self, characters: int) -> bool:
        """Count work in characters. Returns whether the limit is not yet reached."""
        self._work += characters
        return self._work < _MAX_WORK

    def text(self, node: Node) -> str:
        """Return the source text of a node."""
        return self.source[node.start_byte : node.end_byte].decode("utf-8", "replace")

    def raw(self, node: Node) -> str:
        """Return the source text of a word without its quotes."""
        text = self.text(node)
        if node.type == "concatenation":
            return re.sub(r"[\"']", "", text)
        return text[1:-1] if node.type in ("string", "raw_string") else text

    def line(self, node: Node) -> int:
        """Return the line number of a node in the whole text; 0 if unknown."""
        return self.first + node.start_point.row if self.first else 0

    def value(self, node: Node) -> str:
        """Return the text of a word after expansion."""
        with self.during(level=self.level + 1):
            value = self._value(node) if self.level <= MAX_LEVELS and self.spend(64) else OPEN
        self.spend(len(value))
        return value

    def _value(self, node: Node) -> str:
        match node.type:
            case "raw_string":
                return self.text(node)[1:-1]
            case "ansi_c_string" | "translated_string":
                return OPEN
            case "string":
                return self._mixed(node, node.start_byte + 1, node.end_byte - 1, r"\\([\"\\`$])|\\\n")
            case "simple_expansion":
                return self.parameter(self.text(node)[1:])
            case "expansion":
                return self._braced(node)
            case "arithmetic_expansion":
                return self._product(self.text(node))
            case "command_substitution" | "process_substitution":
                self.follow_substitution(node.named_children)
                return OPEN
        text = self._mixed(node, node.start_byte, node.end_byte, r"\\(.)|\\\n")
        is_home = re.match(r"(?:\w+=)?~(?:/|$)", self.text(node)) is not None  # bash replaces it with $HOME
        return text.replace("~", OPEN, 1) if is_home else text

    def parameter(self, name: str) -> str:
        """Return the value of `$NAME`, "" if it is unset, OPEN if it is unknown as `$1` is."""
        self.spend(64)
        variable = self.scope.variables.get(name)
        return OPEN if variable is None else variable.value.partition(NEXT_ITEM)[0]

    def _mixed(self, node: Node, start: int, end: int, escape: str) -> str:
        """Expand text between two offsets. Text outside child nodes is literal, as the grammar omits some blanks."""
        text, offset = "", start
        for child in node.children:
            if child.type not in _NODES["expansions"] or child.start_byte < offset:
                continue
            value = self.value(child)
            text += self._literal(offset, child.start_byte, escape)
            if len(text) + len(value) > MAX_VALUE:
                return OPEN
            text, offset = text + value, child.end_byte
        return text + self._literal(offset, end, escape)

    def _literal(self, start: int, end: int, escape: str) -> str:
        text = self.source[start:end].decode("utf-8", "replace")
        return re.sub(escape, r"\1", text) if "\\" in text else text

    def _braced(self, node: Node) -> str:
        """Expand `${NAME}`, an array, or a default. Single items, and operators that edit a value, give OPEN."""
        match = pattern("braced").match(self.text(node))
        if match is None or (match[2] and match[3] != "}"):
            return OPEN
        name, index, sign = match.groups()
        found, value = self.scope.variables.get(name), self.parameter(name)
        if index:
            is_separated = index == "[*]" and "IFS" in self.scope.variables  # items are joined with IFS
            return OPEN if found is None or is_separated else found.value.rstrip(NEXT_ITEM).replace(NEXT_ITEM, " ")
        if sign == "}":
            return value
        is_missing = found is not None and (found.unset or (sign[0] == ":" and not value))
        if is_missing or value == OPEN:
            if sign[-1] in "+?":
                return "" if is_missing else OPEN
        elif sign[-1] != "+":
            return value
        start = node.start_byte + len(match[0].encode())
        other = self._mixed(node, start, node.end_byte - 1, r"\\([\"\\`$}])|\\\n")
        if sign[-1] == "=":
            self.set(Assigned(name, other, self.text(node), self.line(node)))
        return other

    def _product(self, text: str) -> str:
        """Return the value of a product such as `$((8 * 1024 * SIZE))`; OPEN for other arithmetic and in loops."""
        factors = re.sub(r"\s|\$\{?(?=[A-Za-z_])|\}", "", text.removeprefix("$((")[:-2]).split("*")
        numbers = [each if each[:1].isdecimal() else self.parameter(each) for each in factors]
        if self.loops or len(factors) > 8 or not all(re.fullmatch(r"0|[1-9]\d{0,18}", each) for each in numbers):
            return OPEN
        product = math.prod(map(int, numbers))
        return str(product) if product < 1 << 63 else OPEN

    def words(self, node: Node) -> list[Word]:
        """Return the words after expansion and word splitting of a word."""
        value, raw, line = self.value(node), self.raw(node), self.line(node)
        array = pattern("array").fullmatch(self.text(node))
        parts = value.split() if node.type in _NODES["split_nodes"] else [value]
        if array and (found := self.scope.variables.get(array[1])) and (NEXT_ITEM in found.value or not found.value):
            parts = found.value.split(NEXT_ITEM)[:-1]
        self.spend(WORK_OF_WORD * len(parts))
        return [Word(each, raw if parts == [value] else each, line) for each in parts]

    def evaluate(self, node: Node) -> Assigned:
        """Evaluate `NAME=value`, `NAME+=value` or `NAME=(array)`. `NAME[i]=value` makes the variable unknown."""
        target, assigned = node.child_by_field_name("name") or node, node.child_by_field_name("value")
        name, adds = self.text(target).partition("[")[0], node.children[1].type == "+="
        before = self.scope.variables.get(name, Assigned(name, OPEN)).value if adds else ""
        if assigned is not None and assigned.type == "array":
            value = "".join(word.text + NEXT_ITEM for each in assigned.named_children for word in self.words(each))
            before += NEXT_ITEM * (before not in ("", before.rstrip(NEXT_ITEM) + NEXT_ITEM))
        else:
            value = self.value(assigned) if assigned else ""
        value = (before + value)[:MAX_VALUE] if target.type == "variable_name" else OPEN
        return Assigned(name, value, self.raw(assigned) if assigned else "", self.line(node))

"""Expand the words of a shell script, with the values of variables at that point of the script.

The grammar is tree-sitter-bash's. Specification: POSIX shell (XCU 2.2 quoting, 2.6 expansions), bash(1) arrays.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from planner.lint.script import OPEN, Assigned, Script, Word, words

_BASH = Language(tree_sitter_bash.language())
_MOST_SECONDS = 2.0  # CPU seconds per text: 1 MiB of ordinary script takes 0.5; a hostile text can take quadratic time
_MOST_PIPES = 4_000  # `|` per text; each error recovery of the parser takes time linear in the pipeline
_BUDGET: ContextVar[list[float]] = ContextVar("CPU seconds left for parsing one text")
WORK_OF_WORD = 256  # cost of expanding and checking one word, in characters read
MOST_VALUE = 1 << 16  # characters; a variable can double itself in each step
MOST_LEVELS = 60  # nesting of blocks, substitutions and defaults
_MOST_WORK = 1 << 25  # characters read, loop iterations included; takes a few seconds

_BRACED = re.compile(r"\$\{([A-Za-z_]\w*|\d{1,9}|[@*#])(\[[@*]\])?(\}\Z|:?[-=+?])")
_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_EXPANSIONS = words()["shell"]["expansions"]
_SPLITS = ("simple_expansion", "expansion", "command_substitution")  # unquoted, these are split at blanks


class Function(NamedTuple):
    """A function definition of a script."""

    body: Node
    source: bytes
    first: int  # line number of the start of `source`


@dataclass(slots=True)
class Shell:
    """State of a shell at one point of a script."""

    variables: dict[str, Assigned] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    exports_all: bool = False  # `set -a` is active

    def copy(self) -> Shell:
        """Return an independent copy."""
        return replace(self, variables=dict(self.variables), functions=dict(self.functions))

    def restore(self, hidden: Mapping[str, Assigned | None]) -> None:
        """Restore variables that were set only for a command or function; None: was not set."""
        for name, before in hidden.items():
            self.variables.pop(name, None)
            if before is not None:
                self.variables[name] = before


def limit_parsing() -> None:
    """Reset the CPU time budget for parsing. It applies to the next text, nested texts included."""
    _BUDGET.set([_MOST_SECONDS])


def parse(source: bytes) -> Node | None:
    """Return the root of the syntax tree; None if parsing exceeds the limits."""
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


def walk(node: Node | None, *kinds: str) -> Iterator[Node]:
    """Yield all nodes of some kinds, in order. (A tree-sitter query takes 30 s for 200,000 backticks.)"""
    waiting = [node] if node is not None else []
    while waiting:
        each = waiting.pop()
        waiting += reversed(each.children)
        if each.type in kinds:
            yield each


class Expander:
    """Expands words with the variables of `shell`. Values that are unknown before a run become OPEN."""

    capture: Callable[[Sequence[Node]], None]  # follows a command substitution
    set: Callable[[Assigned], None]  # sets a variable

    def __init__(self, shell: Shell) -> None:
        self.scope = shell
        self.script = Script()
        self.source, self.first = b"", 1
        self.loops = 0  # loops around the statement
        self._level = self._work = 0

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
        return self._work < _MOST_WORK

    def text(self, node: Node) -> str:
        """Return the source text of a node."""
        return self.source[node.start_byte : node.end_byte].decode("utf-8", "replace")

    def line(self, node: Node) -> int:
        """Return the line number of a node in the whole text; 0 if unknown."""
        return self.first + node.start_point.row if self.first else 0

    def items(self, name: str) -> tuple[Word, ...] | None:
        """Return the items of an array; None if unknown."""
        found = self.scope.variables.get(name)
        return found.items if found is not None else None

    def value(self, node: Node) -> str:
        """Return the text of a word after expansion."""
        self._level += 1
        try:
            found = self._value(node) if self._level <= MOST_LEVELS and self.spend(64) else OPEN
        finally:
            self._level -= 1
        self.spend(len(found))
        return found

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
                self.capture(node.named_children)
                return OPEN
        found = self._mixed(node, node.start_byte, node.end_byte, r"\\(.)|\\\n")
        is_home = re.match(r"(?:\w+=)?~(?:/|$)", self.text(node)) is not None  # bash replaces it with $HOME
        return found.replace("~", OPEN, 1) if is_home else found

    def parameter(self, name: str) -> str:
        """Return the value of `$NAME`, "" if it is unset, OPEN if it is unknown as `$1` is."""
        self.spend(64)
        found = self.scope.variables.get(name)
        return OPEN if found is None else found.value

    def _mixed(self, node: Node, start: int, end: int, escape: str) -> str:
        """Expand text between two offsets. Text outside child nodes is literal, as the grammar omits some blanks."""
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
        """Expand `${NAME}`, an array, or a default. Single items, and operators that edit a value, give OPEN."""
        match = _BRACED.match(self.text(node))
        if match is None or (match[2] and match[3] != "}"):
            return OPEN
        name, index, sign = match.groups()
        if index:
            items = self.items(name) or ()
            short = sum(len(each.text) + 1 for each in items) < MOST_VALUE
            separated = index == "[*]" and "IFS" in self.scope.variables  # items are joined with IFS
            return " ".join(each.text for each in items) if items and short and not separated else OPEN
        if sign == "}":
            return self.parameter(name)
        found, value = self.scope.variables.get(name), self.parameter(name)
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

    def arithmetic(self, text: str) -> int | None:
        """Return the value of an expression such as `$((512 * 1024))`; None if a name in it is no known number.

        In a loop, whose later rounds are not followed, no name has a known number.
        """
        inside = re.sub(r"\A\$?(?:\(\(|\[)|(?:\)\)|\])\Z", "", text)

        def put(match: re.Match[str]) -> str:
            number = self.parameter(match[1]) or "0"
            return number if number.isdecimal() and not self.loops else OPEN

        if not self.spend(len(text)):
            return None
        filled = re.sub(r"(?<![\w$])\$?\{?([A-Za-z_]\w*)\}?", put, inside)
        try:
            return _number(filled) if re.fullmatch(r"[\d\s+*/%<>-]{1,80}", filled) else None
        except (ValueError, ZeroDivisionError):
            return None

    def words(self, node: Node) -> list[Word]:
        """Return the words after expansion and word splitting of a word."""
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
        """Return the source text of a word without its quotes."""
        text = self.text(node)
        if node.type == "concatenation":
            return re.sub(r"[\"']", "", text)
        return text[1:-1] if node.type in ("string", "raw_string") else text

    def evaluate(self, node: Node) -> Assigned:
        """Evaluate `NAME=value`, `NAME+=value` or `NAME=(array)`. `NAME[i]=value` makes the variable unknown."""
        target, given = node.child_by_field_name("name") or node, node.child_by_field_name("value")
        name, adds = self.text(target).partition("[")[0], node.children[1].type == "+="
        items = None
        if target.type != "variable_name":
            list(map(self.value, node.named_children))
            value = OPEN
        elif given is not None and given.type == "array":
            before = self.items(name) if adds else ()
            more = tuple(word for each in given.named_children for word in self.words(each))
            indexed = any(re.match(r"\[[^]]*\]\+?=", self.text(each)) for each in given.named_children)
            before = (Word(OPEN, ""),) if before is None else before  # unknown number of items
            items = None if indexed else (*before, *more)[: MOST_VALUE >> 4]
            value = OPEN if items is None else items[0].text if items else ""
        else:
            value = self.value(given) if given else ""
            value = ((self.parameter(name) + value) if adds else value)[:MOST_VALUE]
        return Assigned(name, value, self.raw(given) if given else "", self.line(node), items=items)


# In the order of their precedence, the lowest first
_OPERATORS: Sequence[Mapping[str, Callable[[int, int], int]]] = (
    {"<<": operator.lshift, ">>": operator.rshift},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": operator.floordiv, "%": operator.mod},
)


def _number(text: str) -> int:
    """Evaluate an expression whose intermediate results are in 0 to 2^63 - 1. Raises ValueError otherwise."""
    for group in _OPERATORS:
        if match := re.fullmatch(rf"(?s)(.*)({'|'.join(map(re.escape, group))})(.*)", text):  # at the last of them
            left, right = _number(match[1]), _number(match[3])
            if (group is _OPERATORS[0] and right > 62) or not 0 <= (result := group[match[2]](left, right)) < 1 << 63:
                raise ValueError("no number that bash has too")
            return result
    if not re.fullmatch(r"\s*(?:0|[1-9]\d{0,18})\s*", text):
        raise ValueError("no decimal number")
    return int(text)

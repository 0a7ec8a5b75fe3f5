"""Changes of a YAML text that leave every other character where it stands: comments, order, anchors, quotes.

Specification: YAML 1.1 as PyYAML marks its events. A text is read, its data are changed by the caller, and what is new
in them is put in as lines of its own; the result is read again and must be what was wanted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from contracts.yaml_text import load_all

MOST_ALIASES = 1000


class EditError(ValueError):
    """An addition for which the text has no place; the message names the way to it."""


@dataclass(slots=True)
class _Node:
    """One value of the text: where it begins and ends in characters, and what lies in it."""

    kind: str  # "mapping", "sequence", "scalar"
    start: int
    end: int
    flow: bool = False
    pairs: list[tuple[_Node, _Node]] = field(default_factory=list)
    items: list[_Node] = field(default_factory=list)
    text: str = ""  # of a scalar
    target: _Node | None = None  # of an alias


class _Dumper(yaml.SafeDumper):
    """Lists stand deeper than their names, and nothing is an alias."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - PyYAML's
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def documents(text: str) -> list[Any]:
    """Every document as data, in which an alias and its anchor are one object. Raises YamlTextError."""
    return load_all(_whole(text), most_aliases=MOST_ALIASES)


def _whole(text: str) -> str:
    """The text with a newline at its end: a script in its last lines is the same then as with lines after it."""
    return text if text.endswith("\n") else f"{text}\n"


def extended(text: str, wanted: list[Any]) -> str:
    """The text with what `wanted` has more than it: new keys of mappings, new last items of lists.

    Raises EditError where `wanted` differs in another way, or has something new where no line can be put in.
    """
    edits = _Edits(_whole(text))
    for node, old, new in zip(_trees(_whole(text)), documents(text), wanted, strict=True):
        edits.compare(node, old, new, "")
    if not edits:
        return text
    made = edits.made()
    if not _same(documents(made), wanted):
        raise EditError("the text cannot be changed line by line; write anchors, merges and long scalars of it out")
    return made


def _same(one: Any, other: Any) -> bool:
    """Equal, and a text no number."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


class _Edits:
    """What is put in, by the character that it comes before, what lies deeper first."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines: dict[int, list[str]] = {}
        self._seen: set[int] = set()  # an anchor's value is met at each of its aliases

    def __bool__(self) -> bool:
        return bool(self._lines)

    def made(self) -> str:
        """The text with all of it."""
        newline = "\r\n" if "\r\n" in self._text else "\n"
        made = self._text
        for at, lines in sorted(self._lines.items(), reverse=True):
            made = made[:at] + "".join(lines).replace("\n", newline) + made[at:]
        return made

    def compare(self, node: _Node, old: Any, new: Any, way: str) -> None:
        """Note what `new` has more than `old`, which stands at `node`."""
        node = node.target or node
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        if isinstance(old, dict) and isinstance(new, dict):
            for key, value in old.items():
                inside = _value(node, key)
                if key not in new or inside is None:
                    raise EditError(f"{way or 'document'}: {key} cannot be found")
                self.compare(inside, value, new[key], f"{way}.{key}")
            if added := {key: value for key, value in new.items() if key not in old}:
                self._add_keys(node, added, way)
        elif isinstance(old, list) and isinstance(new, list) and len(old) <= len(new):
            for number, (inside, before) in enumerate(zip(node.items, old, strict=True)):
                self.compare(inside, before, new[number], f"{way}[{number}]")
            if len(new) > len(old):
                self._add_items(node, new[len(old) :], way)
        elif old is None and isinstance(new, dict | list) and not node.text:  # `metadata:` with nothing after it
            self._put(_line_end(self._text, node.end), _block(new, _indent(self._text, node.start) + 2))
        elif old != new:
            raise EditError(f"{way or 'document'}: {old!r} is the user's, and would become {new!r}")

    def _add_keys(self, node: _Node, added: dict[str, Any], way: str) -> None:
        if node.flow:
            words = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in added.items())
            self._in_brackets(node, words)
        elif node.pairs:
            first = node.pairs[0][0].start
            self._put(_end(self._text, node), _block(added, first - _line_start(self._text, first)))
        else:
            raise EditError(f"{way}: is written in a way that takes no more keys")

    def _add_items(self, node: _Node, added: list[Any], way: str) -> None:
        if node.flow:
            self._in_brackets(node, ", ".join(map(json.dumps, added)))
        elif node.items:
            dash = self._text.rfind("-", 0, node.items[0].start)
            self._put(_end(self._text, node), _block(added, dash - _line_start(self._text, dash)))
        else:
            raise EditError(f"{way}: is written in a way that takes no more items")

    def _in_brackets(self, node: _Node, words: str) -> None:
        last = len(self._text[: node.end - 1].rstrip())
        lead = "" if not (node.pairs or node.items) else " " if self._text[last - 1] == "," else ", "
        self._lines.setdefault(last, []).append(lead + words)

    def _put(self, where: int, lines: str) -> None:
        """Whole lines at `where`, which is the start of a line."""
        self._lines.setdefault(where, []).append(lines)


def _block(value: Any, indent: int) -> str:
    made = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    return "".join(f"{' ' * indent if line else ''}{line}\n" for line in made.splitlines())


def _end(text: str, node: _Node) -> int:
    """Where the line after a block mapping or sequence begins."""
    last = node
    while not last.flow and (last.pairs or last.items):
        last = last.pairs[-1][1] if last.pairs else last.items[-1]
    if last.end and text[last.end - 1] == "\n":  # a block scalar: its last line is over
        keeps = "+" in text[last.start : last.start + 3]
        return last.end if keeps else _line_end(text, len(text[: last.end].rstrip()))
    return _line_end(text, last.end)


def _line_start(text: str, where: int) -> int:
    return text.rfind("\n", 0, where) + 1


def _line_end(text: str, where: int) -> int:
    """Where the next line begins."""
    found = text.find("\n", where)
    return len(text) if found < 0 else found + 1


def _indent(text: str, where: int) -> int:
    """Of the key whose value is at `where`: dashes before it count as blanks."""
    start = _line_start(text, where)
    line = text[start:where]
    return len(line) - len(line.lstrip(" -"))


def _value(node: _Node, key: Any) -> _Node | None:
    """The value of a key in a mapping, or in what is merged into it."""
    merged = []
    for name, value in reversed(node.pairs):  # the last of two is what a reader gets
        if name.text == str(key) or (name.kind == "scalar" and _plain(name.text) == key):
            return value
        if name.text == "<<":
            merged += (value.target or value).items or [value]
    for each in merged:
        if (found := _value(each.target or each, key)) is not None:
            return found
    return None


def _plain(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _trees(text: str) -> list[_Node]:
    """Each document's values with their places."""
    found: list[_Node] = []
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    anchors: dict[str, _Node] = {}
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            anchors = {}
            found.append(_node(next(events), events, anchors))
    return found


def _node(event: Any, events: Iterator[Any], anchors: dict[str, _Node]) -> _Node:
    start, end, anchor = event.start_mark.index, event.end_mark.index, event.anchor
    if isinstance(event, yaml.AliasEvent):
        return _Node("alias", start, end, target=anchors[anchor])
    if isinstance(event, yaml.ScalarEvent):
        made = _Node("scalar", start, end, text=event.value)
    else:
        made = _Node("sequence", start, end, flow=bool(event.flow_style))
        if isinstance(event, yaml.MappingStartEvent):
            made.kind = "mapping"
    if anchor:
        anchors[anchor] = made
    if made.kind == "scalar":
        return made
    for inner in events:
        if isinstance(inner, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            mark: Any = inner.end_mark
            made.end = mark.index if made.flow else made.end
            break
        first = _node(inner, events, anchors)
        if made.kind == "mapping":
            made.pairs.append((first, _node(next(events), events, anchors)))
        else:
            made.items.append(first)
    return made

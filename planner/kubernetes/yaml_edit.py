"""Add keys and list items to a YAML text without changing its comments, order or quotes.

The caller parses the text and changes the data. The additions are inserted into the text. The result is parsed again
and must equal the changed data. ruamel.yaml was tried instead (docs/decisions/0033).
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from contracts.yaml_text import load_all

MOST_ALIASES = 1000
_COMMA = re.compile(r"#[^\n]*|(,)")  # comma in a flow collection, outside comments


class EditError(ValueError):
    """An addition cannot be inserted into the text; the message names the key."""


class _Alias(yaml.ScalarNode):
    """An alias with its own position in the text; PyYAML returns the anchor's node instead."""

    def __init__(self, target: yaml.Node, event: Any) -> None:
        super().__init__("", "", event.start_mark, event.end_mark)
        self.target = target


class _Composer(yaml.SafeLoader):
    """Composes nodes, with an `_Alias` for every alias."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node as PyYAML does, except for aliases."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        return _Alias(node, event) if isinstance(event, yaml.AliasEvent) and node is not None else node


class _Dumper(yaml.SafeDumper):
    """Indents lists below their keys, and never writes an alias."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - PyYAML's
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def documents(text: str) -> list[Any]:
    """Parse every document; an alias and its anchor become one object. Raises YamlTextError."""
    return load_all(text, most_aliases=MOST_ALIASES)


def extended(text: str, target: list[Any]) -> str:
    """Return the text with the additions in `target`: new keys of mappings, new items at the end of lists.

    Raises EditError if `target` differs from the text in another way, or if an addition cannot be inserted.
    """
    before = documents(text)
    newline = "" if text.endswith("\n") else "\r\n" if "\r\n" in text else "\n"
    whole = text + newline
    edits, nodes = _Edits(whole), list(yaml.compose_all(whole, _Composer))
    for node, old, new in zip(nodes, before, target, strict=True):
        edits.compare(node, old, new, "")
    if not edits:
        return text
    if newline and edits.at_end and not _is_same(documents(whole), before):
        edits.strip(nodes[-1])
    made = edits.made()
    if newline and not edits.at_end:
        made = made.removesuffix(newline)
    if not _is_same(documents(made), target):
        raise EditError("the text cannot be changed line by line; write anchors, merges and long scalars of it out")
    return made


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types ("1" differs from 1)."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)


class _Edits:
    """The insertions into a text, by the index of the character before which they are inserted."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines: dict[int, list[str]] = {}
        self._seen: set[int] = set()  # an anchor's value is visited once per alias

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def at_end(self) -> bool:
        """Whether lines are appended to the end of the text."""
        return max(self._lines) == len(self._text)

    def made(self) -> str:
        """Return the text with all insertions."""
        newline = "\r\n" if "\r\n" in self._text else "\n"
        made = self._text
        for at, lines in sorted(self._lines.items(), reverse=True):
            made = made[:at] + "".join(lines).replace("\n", newline) + made[at:]
        return made

    def strip(self, node: yaml.Node) -> None:
        """Change the chomping of a block scalar at the end of the document, so it has no final newline, as before."""
        last: Any = _find_last(node)
        at = self._text.index(last.style, _get_start(last)) + 1  # index of its chomping indicator
        header = self._text[at : at + 2]
        if "+" in header:
            self._text = self._text[:at] + header.replace("+", "-") + self._text[at + 2 :]
        else:
            self._lines.setdefault(at, []).append("-")

    def compare(self, node: yaml.Node, old: Any, new: Any, way: str) -> None:
        """Insert the additions of `new` to `old`, whose text is at `node`. `way` is the path for error messages."""
        node = _resolve_alias(node)
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        if isinstance(old, dict) and isinstance(new, dict):
            for key, value in old.items():
                inside = _find_value(node, key)
                if key not in new or inside is None:
                    raise EditError(f"{way or 'document'}: {key} cannot be found")
                self.compare(inside, value, new[key], f"{way}.{key}")
            if added := {key: value for key, value in new.items() if key not in old}:
                self._add_members(node, added, [{key: value} for key, value in added.items()], way)
        elif isinstance(old, list) and isinstance(new, list) and len(old) <= len(new):
            for number, (inside, before) in enumerate(zip(node.value, old, strict=True)):
                self.compare(inside, before, new[number], f"{way}[{number}]")
            if len(new) > len(old):
                self._add_members(node, new[len(old) :], [[value] for value in new[len(old) :]], way)
        elif old is None and isinstance(new, dict | list) and not node.value:  # an empty value, such as `metadata:`
            self._insert(
                _find_line_end(self._text, _get_stop(node)),
                _format_block(new, _count_indent(self._text, _get_start(node)) + 2),
            )
        elif old != new:
            raise EditError(f"{way or 'document'}: {old!r} is the user's, and would become {new!r}")

    def _add_members(self, node: Any, added: dict[str, Any] | list[Any], members: list[Any], way: str) -> None:
        """Insert keys or items at the end of a collection; `members` are the same, each in a collection of its own."""
        if node.flow_style:
            self._add_in_brackets(node, members)
        elif node.value:
            is_mapping = isinstance(added, dict)
            first = _get_start(node.value[0][0] if is_mapping else node.value[0])
            first = first if is_mapping else self._text.rfind("-", 0, first)
            self._insert(_find_end(self._text, node), _format_block(added, first - _find_line_start(self._text, first)))
        else:
            what = "keys" if isinstance(added, dict) else "items"
            raise EditError(f"{way}: is written in a way that takes no more {what}")

    def _add_in_brackets(self, node: Any, added: list[Any]) -> None:
        """Insert members into a flow collection, in the style and layout of its existing members.

        Each element of `added` is a collection with one member.
        """
        is_quoted = _is_quoted(node) if node.value else self._text.lstrip().startswith("{")
        words = [_format_flow(one, is_quoted) for one in added]
        bracket = _get_stop(node) - 1
        if not node.value:
            self._insert(len(self._text[:bracket].rstrip()), ", ".join(words))
            return
        first, last = node.value[-1] if isinstance(node.value[-1], tuple) else (node.value[-1],) * 2
        end = _get_stop(last)
        comma = next((end + found.start(1) for found in _COMMA.finditer(self._text[end:bracket]) if found[1]), None)
        after, line = end if comma is None else comma + 1, _find_line_end(self._text, comma or end)
        if line > bracket:  # the bracket is on the line of the last member
            self._insert(after, (", " if comma is None else " ") + ", ".join(words))
            return
        start = _get_start(first)
        lead = self._text[_find_line_start(self._text, start) : start]
        lead = lead if not lead.strip() else " " * (_count_indent(self._text, start) + 2)
        if comma is None:
            self._insert(after, ",")
        self._insert(line, lead + f",\n{lead}".join(words) + ("\n" if comma is None else ",\n"))

    def _insert(self, where: int, lines: str) -> None:
        """Insert whole lines at the start of a line, or members in a flow collection."""
        self._lines.setdefault(where, []).append(lines)


def _format_block(value: Any, indent: int) -> str:
    made = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    return "".join(f"{' ' * indent if line else ''}{line}\n" for line in made.splitlines())


def _is_quoted(node: Any) -> bool:
    """Whether the first key or text of a flow collection is in double quotes, as in JSON."""
    while isinstance(node, yaml.CollectionNode):
        if not node.value:
            return False
        node = node.value[0][0] if isinstance(node, yaml.MappingNode) else node.value[0]
    return getattr(node, "style", None) == '"'


def _format_flow(value: Any, is_quoted: bool) -> str:
    """Format the only member of a mapping or list for a flow collection, without brackets."""
    made: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=1 << 20
    ).strip()
    return (json.dumps(value) if is_quoted or "\n" in made else made)[1:-1]


def _get_start(node: yaml.Node) -> int:
    """Return the index of the node's first character."""
    mark: Any = node.start_mark
    return int(mark.index)


def _get_stop(node: yaml.Node) -> int:
    """Return the index after the node; for a block collection, that of the next token."""
    mark: Any = node.end_mark
    return int(mark.index)


def _resolve_alias(node: yaml.Node) -> yaml.Node:
    return node.target if isinstance(node, _Alias) else node


def _find_last(node: yaml.Node) -> yaml.Node:
    """Return the innermost node at the end of a block mapping or sequence."""
    last: Any = node
    while isinstance(last, yaml.CollectionNode) and not last.flow_style and last.value:
        last = last.value[-1]
        last = last[1] if isinstance(last, tuple) else last
    return last  # type: ignore[no-any-return]


def _find_end(text: str, node: yaml.Node) -> int:
    """Return the index of the line after a block mapping or sequence."""
    last = _find_last(node)
    start, stop = _get_start(last), _get_stop(last)
    if stop and text[stop - 1] == "\n":  # a block scalar, which ends with its last line
        keeps = "+" in text[start : start + 3]
        return stop if keeps else _find_line_end(text, len(text[:stop].rstrip()))
    return _find_line_end(text, stop)


def _find_line_start(text: str, where: int) -> int:
    return text.rfind("\n", 0, where) + 1


def _find_line_end(text: str, where: int) -> int:
    """Return the index of the next line."""
    found = text.find("\n", where)
    return len(text) if found < 0 else found + 1


def _count_indent(text: str, where: int) -> int:
    """Return the indentation of the key whose value is at `where`; dashes before the key count as spaces."""
    start = _find_line_start(text, where)
    line = text[start:where]
    return len(line) - len(line.lstrip(" -"))


def _find_value(node: yaml.Node, key: Any) -> yaml.Node | None:
    """Return the value of a key in a mapping or in a merged mapping (`<<`); None if it is missing."""
    merged: list[yaml.Node] = []
    for name, value in reversed(node.value if isinstance(node, yaml.MappingNode) else ()):  # the last duplicate counts
        if name.value == str(key) or (isinstance(name, yaml.ScalarNode) and _parse_scalar(name.value) == key):
            return value  # type: ignore[no-any-return]
        if name.value == "<<":
            mapping = _resolve_alias(value)
            merged += mapping.value if isinstance(mapping, yaml.SequenceNode) else [value]
    return next((found for each in merged if (found := _find_value(_resolve_alias(each), key)) is not None), None)


def _parse_scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text

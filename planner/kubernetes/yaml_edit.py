"""Edit YAML as text: add keys and list items, and leave every other character where it is: comments, order, quotes.

The text is read, the caller changes its data, and what is new in them is inserted as new lines. The result is read
again and must equal the changed data. ruamel.yaml was tried instead (docs/decisions/0033).
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from contracts.yaml_text import load_all

MOST_ALIASES = 1000
_COMMA = re.compile(r"#[^\n]*|(,)")  # after a member of a flow collection, where a comment may hold commas


class EditError(ValueError):
    """An addition for which the text has no place; the message names the key."""


class _Alias(yaml.ScalarNode):
    """An alias at its own place in the text; PyYAML composes it as the anchor's node."""

    def __init__(self, target: yaml.Node, event: Any) -> None:
        super().__init__("", "", event.start_mark, event.end_mark)
        self.target = target


class _Composer(yaml.SafeLoader):
    """Composes nodes with the place of every alias."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As PyYAML's, but for aliases."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        return _Alias(node, event) if isinstance(event, yaml.AliasEvent) and node is not None else node


class _Dumper(yaml.SafeDumper):
    """Indents lists below their keys, and writes no alias."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - PyYAML's
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def documents(text: str) -> list[Any]:
    """Every document as data, in which an alias and its anchor are one object. Raises YamlTextError."""
    return load_all(text, most_aliases=MOST_ALIASES)


def extended(text: str, target: list[Any]) -> str:
    """The text with what is new in `target`: new keys of mappings, new last items of lists.

    Raises EditError where `target` differs in another way, or has something new where no line can be put in.
    """
    before = documents(text)
    newline = "" if text.endswith("\n") else "\r\n" if "\r\n" in text else "\n"
    whole = text + newline
    edits, nodes = _Edits(whole), list(yaml.compose_all(whole, _Composer))
    for node, old, new in zip(nodes, before, target, strict=True):
        edits.compare(node, old, new, "")
    if not edits:
        return text
    if newline and edits.at_end and not _same(documents(whole), before):
        edits.strip(nodes[-1])
    made = edits.made()
    if newline and not edits.at_end:
        made = made.removesuffix(newline)
    if not _same(documents(made), target):
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
    """The insertions, by the character that they come before, the deepest first."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines: dict[int, list[str]] = {}
        self._seen: set[int] = set()  # an anchor's value is met at each of its aliases

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def at_end(self) -> bool:
        """Whether lines come after the last one of the text."""
        return max(self._lines) == len(self._text)

    def made(self) -> str:
        """Return the text with all insertions."""
        newline = "\r\n" if "\r\n" in self._text else "\n"
        made = self._text
        for at, lines in sorted(self._lines.items(), reverse=True):
            made = made[:at] + "".join(lines).replace("\n", newline) + made[at:]
        return made

    def strip(self, node: yaml.Node) -> None:
        """Let the block scalar that ends this document go without a newline at its end, as in a text that has none."""
        last: Any = _last(node)
        at = self._text.index(last.style, _start(last)) + 1  # of its chomping indicator
        header = self._text[at : at + 2]
        if "+" in header:
            self._text = self._text[:at] + header.replace("+", "-") + self._text[at + 2 :]
        else:
            self._lines.setdefault(at, []).append("-")

    def compare(self, node: yaml.Node, old: Any, new: Any, way: str) -> None:
        """Insert what `new` has more than `old`, whose text is at `node`."""
        node = _target(node)
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
            for number, (inside, before) in enumerate(zip(node.value, old, strict=True)):
                self.compare(inside, before, new[number], f"{way}[{number}]")
            if len(new) > len(old):
                self._add_items(node, new[len(old) :], way)
        elif old is None and isinstance(new, dict | list) and not node.value:  # `metadata:` with nothing after it
            self._put(_line_end(self._text, _stop(node)), _block(new, _indent(self._text, _start(node)) + 2))
        elif old != new:
            raise EditError(f"{way or 'document'}: {old!r} is the user's, and would become {new!r}")

    def _add_keys(self, node: Any, added: dict[str, Any], way: str) -> None:
        if node.flow_style:
            self._in_brackets(node, [{key: value} for key, value in added.items()])
        elif node.value:
            first = _start(node.value[0][0])
            self._put(_end(self._text, node), _block(added, first - _line_start(self._text, first)))
        else:
            raise EditError(f"{way}: is written in a way that takes no more keys")

    def _add_items(self, node: Any, added: list[Any], way: str) -> None:
        if node.flow_style:
            self._in_brackets(node, [[value] for value in added])
        elif node.value:
            dash = self._text.rfind("-", 0, _start(node.value[0]))
            self._put(_end(self._text, node), _block(added, dash - _line_start(self._text, dash)))
        else:
            raise EditError(f"{way}: is written in a way that takes no more items")

    def _in_brackets(self, node: Any, added: list[Any]) -> None:
        """Insert collections of one member each as further members, written and laid out as those that are there."""
        is_quoted = _is_quoted(node) if node.value else self._text.lstrip().startswith("{")
        words = [_flow(one, is_quoted) for one in added]
        bracket = _stop(node) - 1
        if not node.value:
            self._put(len(self._text[:bracket].rstrip()), ", ".join(words))
            return
        first, last = node.value[-1] if isinstance(node.value[-1], tuple) else (node.value[-1],) * 2
        end = _stop(last)
        comma = next((end + found.start(1) for found in _COMMA.finditer(self._text[end:bracket]) if found[1]), None)
        after, line = end if comma is None else comma + 1, _line_end(self._text, comma or end)
        if line > bracket:  # which stands on the line of the last member
            self._put(after, (", " if comma is None else " ") + ", ".join(words))
            return
        start = _start(first)
        lead = self._text[_line_start(self._text, start) : start]
        lead = lead if not lead.strip() else " " * (_indent(self._text, start) + 2)
        if comma is None:
            self._put(after, ",")
        self._put(line, lead + f",\n{lead}".join(words) + ("\n" if comma is None else ",\n"))

    def _put(self, where: int, lines: str) -> None:
        """Insert whole lines where a line starts, or words within a flow collection."""
        self._lines.setdefault(where, []).append(lines)


def _block(value: Any, indent: int) -> str:
    made = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    return "".join(f"{' ' * indent if line else ''}{line}\n" for line in made.splitlines())


def _is_quoted(node: Any) -> bool:
    """Whether the first key or text of a flow collection stands in double quotes, as in JSON."""
    while isinstance(node, yaml.CollectionNode):
        if not node.value:
            return False
        node = node.value[0][0] if isinstance(node, yaml.MappingNode) else node.value[0]
    return getattr(node, "style", None) == '"'


def _flow(value: Any, is_quoted: bool) -> str:
    """The only member of a mapping or a list, as it is written between the brackets of a flow collection."""
    made: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=1 << 20
    ).strip()
    return (json.dumps(value) if is_quoted or "\n" in made else made)[1:-1]


def _start(node: yaml.Node) -> int:
    """The node's first character."""
    mark: Any = node.start_mark
    return int(mark.index)


def _stop(node: yaml.Node) -> int:
    """The character after the node; after a block collection that of the next token."""
    mark: Any = node.end_mark
    return int(mark.index)


def _target(node: yaml.Node) -> yaml.Node:
    return node.target if isinstance(node, _Alias) else node


def _last(node: yaml.Node) -> yaml.Node:
    """The innermost node at the end of a block mapping or sequence."""
    last: Any = node
    while isinstance(last, yaml.CollectionNode) and not last.flow_style and last.value:
        last = last.value[-1]
        last = last[1] if isinstance(last, tuple) else last
    return last  # type: ignore[no-any-return]


def _end(text: str, node: yaml.Node) -> int:
    """Where the line after a block mapping or sequence begins."""
    last = _last(node)
    start, stop = _start(last), _stop(last)
    if stop and text[stop - 1] == "\n":  # a block scalar: its last line is over
        keeps = "+" in text[start : start + 3]
        return stop if keeps else _line_end(text, len(text[:stop].rstrip()))
    return _line_end(text, stop)


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


def _value(node: yaml.Node, key: Any) -> yaml.Node | None:
    """The value of a key in a mapping, or in what is merged into it."""
    merged: list[yaml.Node] = []
    for name, value in reversed(node.value if isinstance(node, yaml.MappingNode) else ()):  # a reader gets the last
        if name.value == str(key) or (isinstance(name, yaml.ScalarNode) and _plain(name.value) == key):
            return value  # type: ignore[no-any-return]
        if name.value == "<<":
            mapping = _target(value)
            merged += mapping.value if isinstance(mapping, yaml.SequenceNode) else [value]
    return next((found for each in merged if (found := _value(_target(each), key)) is not None), None)


def _plain(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text

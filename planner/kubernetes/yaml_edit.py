"""Add keys and list items to a YAML text without changing its comments, order or quotes.

The caller parses the text and changes the data. The additions are inserted into the text. A collection in brackets that
gets an addition is written anew. The result is parsed again and must equal the changed data. ruamel.yaml was tried
instead (docs/decisions/0033).
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import yaml

from contracts.yaml_text import YamlTextError, load_all

MOST_ALIASES = 1000
_QUOTED = re.compile(r"""(?<![^\s\[{,:])(?:"(?:\\.|[^"\\])*"|'[^']*')""")


class EditError(ValueError):
    """An addition cannot be inserted into the text; the message names the key."""


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

    The text must end with a newline. Raises EditError if a value in `target` is another one than in the text, or if an
    addition cannot be inserted.
    """
    before = documents(text)
    edits, nodes = _Edits(text), list(yaml.compose_all(text, yaml.SafeLoader))  # a list keeps the ids of all nodes
    for node, old, new in zip(nodes, before, target, strict=True):
        edits.compare(node, old, new)
    made = edits.made()
    with suppress(YamlTextError):
        if _is_same(documents(made), target):
            return made
    raise EditError("the text cannot be changed line by line; write anchors, merges and long scalars of it out")


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types ("1" differs from 1)."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)


class _Edits:
    """The replacements in a text: index of the first character, index after the last one, and the new text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._edits: list[tuple[int, int, str]] = []
        self._seen: set[int] = set()  # PyYAML composes an alias as the node of its anchor

    def made(self) -> str:
        """Return the text with all replacements."""
        newline = "\r\n" if "\r\n" in self._text else "\n"
        made, at = "", 0
        for start, stop, new in sorted(self._edits, key=lambda edit: edit[0]):
            made, at = made + self._text[at:start] + new.replace("\n", newline), stop
        return made + self._text[at:]

    def compare(self, node: Any, old: Any, new: Any) -> None:
        """Insert the additions of `new` to `old`, whose text is at `node`."""
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        start, stop = node.start_mark.index, node.end_mark.index
        if isinstance(node, yaml.CollectionNode) and node.flow_style:
            if not _is_same(old, new):
                start = self._text.index("{" if isinstance(old, dict) else "[", start)  # after an anchor or a tag
                self._edits.append((start, stop, self._format_flow(self._text[start:stop], new)))
        elif isinstance(old, dict) and isinstance(new, dict):
            values = {key.value: value for key, value in node.value}
            for key in old:
                if str(key) in values:  # else it comes from a merge, and its anchor is compared on its own
                    self.compare(values[str(key)], old[key], new[key])
            column = node.value[0][0].start_mark.column
            self._insert(_find_end(self._text, node), {key: new[key] for key in new if key not in old}, column)
        elif isinstance(old, list) and isinstance(new, list):
            for inside, one, other in zip(node.value, old, new, strict=False):
                self.compare(inside, one, other)
            first = max(node.value[0].start_mark.index, start + 1)  # a first item that is an alias stands elsewhere
            dash = self._text.rfind("-", 0, first)
            self._insert(_find_end(self._text, node), new[len(old) :], dash - self._text.rfind("\n", 0, dash) - 1)
        elif old is None and new is not None and not node.value:  # an empty value, such as `metadata:`
            line = self._text[self._text.rfind("\n", 0, start) + 1 : start]
            self._insert(start, new, len(line) - len(line.lstrip(" -")) + 2)

    def _insert(self, end: int, added: Any, indent: int) -> None:
        """Insert lines after the line of `end`."""
        if added:
            at = self._text.index("\n", end) + 1
            made = yaml.dump(added, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
            self._edits.append((at, at, "".join(f"{' ' * indent if row else ''}{row}\n" for row in made.splitlines())))

    def _format_flow(self, text: str, value: Any) -> str:
        """Write a collection in brackets: as JSON if its words are in double quotes, in lines if it has several."""
        if re.search(r"(?m)(?:^|\s)#", _QUOTED.sub("", text)):
            raise EditError(f"{text[:60]!r}: takes no addition, because a comment is between its brackets")
        if re.match(r'[\[{\s]+"', text):
            return json.dumps(value, indent=2 if "\n" in text else None, ensure_ascii=False)
        return str(yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True,
                             width=1 << 20)).strip()  # fmt: skip


def _find_end(text: str, node: Any) -> int:
    """Return the index after the last scalar, bracket or alias of a block mapping or sequence."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        *before, last = [part for each in node.value for part in (each if isinstance(each, tuple) else (each,))]
        if last.end_mark.index <= max((each.end_mark.index for each in before), default=node.start_mark.index):
            return text.rfind("*", 0, node.end_mark.index)  # PyYAML composes an alias as the node of its anchor
        node = last
    start, stop = node.start_mark.index, node.end_mark.index
    keeps_newlines = getattr(node, "style", None) in ("|", ">") and "+" in text[start : start + 3]
    return stop - 1 if keeps_newlines else len(text[:stop].rstrip())

"""Add keys and list items to a YAML text without changing its comments, order or quotes.

The caller parses the text and changes the data. The additions are inserted into the text, also between brackets; only
`null` is replaced. The result is parsed again and must equal the changed data. ruamel.yaml was tried instead
(docs/decisions/0033).
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import yaml

from contracts.yaml_text import YamlTextError, load_all
from planner.kubernetes.manifests import Dumper

MAX_ALIASES = 1000


class EditError(ValueError):
    """An addition cannot be inserted into the text; the message names the key."""


class _Dumper(Dumper):
    """Indents lists below their keys."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - PyYAML's
        super().increase_indent(flow, False)


def documents(text: str) -> list[Any]:
    """Parse every document; an alias and its anchor become one object. Raises YamlTextError."""
    return load_all(text, most_aliases=MAX_ALIASES)


def extend(text: str, target: list[Any]) -> str:
    """Return the text with the additions in `target`: new keys of mappings, new items at the end of lists.

    The text must end with a newline. Raises EditError if a value in `target` is another one than in the text, or if an
    addition cannot be inserted.
    """
    before = documents(text)
    edits, nodes = _Edits(text), list(yaml.compose_all(text, yaml.SafeLoader))  # a list keeps the ids of all nodes
    for node, old, new in zip(nodes, before, target, strict=True):
        edits.compare(node, old, new)
    edited = edits.apply()
    with suppress(YamlTextError):
        if repr(documents(edited)) == repr(target):  # values and types: "1" differs from 1
            return edited
    raise EditError("the text cannot be changed line by line; write anchors, merges and long scalars of it out")


class _Edits:
    """The changes of a text: index of the first character, index of the next one that stays, and the new text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._edits: list[tuple[int, int, str]] = []
        self._seen: set[int] = set()  # PyYAML composes an alias as the node of its anchor

    def apply(self) -> str:
        """Return the text with all changes."""
        newline = "\r\n" if "\r\n" in self._text else "\n"
        text, offset = "", 0
        for start, stop, new in sorted(self._edits, key=lambda edit: edit[0]):
            text, offset = text + self._text[offset:start] + new.replace("\n", newline), stop
        return text + self._text[offset:]

    def compare(self, node: Any, old: Any, new: Any, *, in_brackets: bool = False) -> None:
        """Insert the additions of `new` to `old`, whose text is at `node`."""
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        added: Any = None
        if isinstance(old, dict) and isinstance(new, dict):
            values = {key.value: value for key, value in node.value}
            for key in old:
                if str(key) in values:  # else it comes from a merge, and its anchor is compared on its own
                    self.compare(values[str(key)], old[key], new[key], in_brackets=node.flow_style)
            added = {key: new[key] for key in new if key not in old}
        elif isinstance(old, list) and isinstance(new, list):
            for inside, before, other in zip(node.value, old, new, strict=False):
                self.compare(inside, before, other, in_brackets=node.flow_style)
            added = new[len(old) :]
        elif old is None and new is not None:
            self._fill(node, new, in_brackets=in_brackets)
        if added and node.flow_style:
            self._insert_in_brackets(node, added)
        elif added:
            start = (node.value[0] if isinstance(old, list) else node.value[0][0]).start_mark.index
            if isinstance(old, list):  # its dash; PyYAML gives an alias the place of its anchor
                start = self._text.rfind("-", 0, max(start, node.start_mark.index + 1))
            self._insert(_find_end(self._text, node), added, start - self._text.rfind("\n", 0, start) - 1)

    def _fill(self, node: Any, new: Any, *, in_brackets: bool) -> None:
        """Insert a value after a key without one, such as `metadata:`, or replace `null`."""
        start, stop = node.start_mark.index, node.end_mark.index
        if node.value or in_brackets:
            text = _dump(new, as_json=_starts_with_quotes(self._text))
            self._edits.append((start, stop, text if node.value else f" {text}"))
            return
        line = self._text[self._text.rfind("\n", 0, start) + 1 : start]
        self._insert(start, new, len(line) - len(line.lstrip(" -")) + 2)

    def _insert(self, end: int, added: Any, indent: int) -> None:
        """Insert lines after the line of `end`."""
        start = self._text.index("\n", end) + 1
        rows = _dump(added, flow=False).splitlines()
        self._edits.append((start, start, "".join(f"{' ' * indent if row else ''}{row}\n" for row in rows)))

    def _insert_in_brackets(self, node: Any, added: Any) -> None:
        """Insert after the last member: as JSON if the words are in double quotes, in lines if that member is."""
        text, start, stop = self._text, node.start_mark.index, node.end_mark.index
        end = start = text.index("{" if isinstance(added, dict) else "[", start) + 1  # after an anchor or a tag
        between = ", "
        if node.value:
            first, end = _find_last(text, node)
            line = text.rfind("\n", 0, first) + 1
            between = f",\n{text[line:first]}" if line > start and text[line:first].isspace() else between
        comma = re.match(r"\s*,", text[end:stop])
        if "#" in text[end:stop]:
            raise EditError(f"{text[start - 1 : start + 60]!r}: takes no addition, because a comment is at its end")
        as_json = _starts_with_quotes(text[start - 1 : stop]) or _starts_with_quotes(text)
        members = [{key: added[key]} for key in added] if isinstance(added, dict) else [[value] for value in added]
        made = between.join(_dump(each, as_json=as_json)[1:-1] for each in members)
        if comma:
            end, made = end + comma.end(), f"{between[1:]}{made},"
        elif node.value:
            made = between + made
        self._edits.append((end, end, made))


def _starts_with_quotes(text: str) -> bool:
    """Whether the first word between brackets is in double quotes, as in JSON."""
    return re.match(r'[\[{\s]+"', text) is not None


def _dump(value: Any, *, flow: bool = True, as_json: bool = False) -> str:
    if as_json:
        return json.dumps(value, ensure_ascii=False)
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=1 << 20)
    return str(text).strip() if flow else str(text)


def _find_last(text: str, node: Any) -> tuple[int, int]:
    """Return start and end of the last member of a collection."""
    members = [each if isinstance(each, tuple) else (each,) for each in node.value]
    *before, last = [part for each in members for part in each]
    if last.end_mark.index > max((each.end_mark.index for each in before), default=node.start_mark.index):
        return members[-1][0].start_mark.index, last.end_mark.index
    alias = text.rfind("*", 0, node.end_mark.index)  # PyYAML composes an alias as the node of its anchor
    return alias, alias + len(re.split(r"[\s,\]}]", text[alias:], maxsplit=1)[0])


def _find_end(text: str, node: Any) -> int:
    """Return the index after the last scalar, bracket or alias of a block mapping or sequence."""
    start, stop = node.start_mark.index, node.end_mark.index
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1][-1] if isinstance(node, yaml.MappingNode) else node.value[-1]
        _, end = _find_last(text, node)
        return _find_end(text, last) if end == last.end_mark.index else end
    keeps_newlines = getattr(node, "style", None) in ("|", ">") and "+" in text[start : start + 3]
    return stop - 1 if keeps_newlines else len(text[:stop].rstrip())

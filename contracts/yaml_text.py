"""YAML of strangers as plain data: bounded in size, in aliases and in what merge keys make of them.

Specification: YAML 1.1 as PyYAML's safe loader reads it. That loader makes plain data only, but an alias in a list of
aliases, or a merge key over merge keys, still multiplies, and a broken scalar raises whatever its constructor raises.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MOST_CHARACTERS = 1 << 20  # PyYAML reads some 100 kB a second
MOST_LEVELS = 100
MOST_PAIRS = 1000  # of one mapping, merged ones included
MOST_MERGED = 64  # mappings under one merge key


class YamlTextError(ValueError):
    """The text is no YAML, or no YAML that is read here."""


def _deepest(text: str) -> int:
    """How deep brackets nest, those in texts counted too: PyYAML's scanner looks at every open one for every token."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


class _Loader(yaml.SafeLoader):
    """The safe loader, with an end to merging."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge" and len(getattr(value, "value", ())) > MOST_MERGED:
                raise YamlTextError(f"a merge key with more than {MOST_MERGED} mappings")
        super().flatten_mapping(node)
        if len(node.value) > MOST_PAIRS:
            raise YamlTextError(f"a mapping of more than {MOST_PAIRS} members")


class Plain(str):
    """A scalar that stands without quotes and tag: another reader may take it for a number or a truth."""

    __slots__ = ()


class _Texts(_Loader):
    """The same with every scalar as the text that stands there: 022 is no 18, and `on` no True."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """A tag fixes the type of a scalar, as quotes do."""
        tagged = self.peek_event().tag is not None  # type: ignore[no-untyped-call]
        node = super().compose_scalar_node(anchor)
        node.style = node.style or ("'" if tagged else None)
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """The text, and whether anything says that it is one."""
        found = super().construct_scalar(node)
        return Plain(found) if getattr(node, "style", "") is None and isinstance(found, str) else found

    yaml_implicit_resolvers = {  # noqa: RUF012  # as PyYAML's classes carry it
        "<": [("tag:yaml.org,2002:merge", re.compile(r"<<\Z"))]
    }


class _Once(_Loader):
    """The same, where a mapping that holds a key twice is an error: the loader takes the last and says nothing."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Before merge keys are resolved: what stands beside one may say again what it brings."""
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                raise YamlTextError(
                    f"{key.value!r} stands twice, in lines {seen[key.value]} and {line}; once is allowed"
                )
            seen[key.value] = line
        return node


def load_all(text: str, *, most_aliases: int, texts: bool = False, once: bool = False) -> list[Any]:
    """Every document in the text.

    With `texts` no scalar becomes a number, a date or a truth; with `once` no mapping may hold a key twice. Raises
    YamlTextError.
    """
    if len(text) > MOST_CHARACTERS:
        raise YamlTextError(f"{len(text)} characters of YAML are more than the {MOST_CHARACTERS} that are read")
    if _deepest(text) > MOST_LEVELS:
        raise YamlTextError(f"brackets nested more than {MOST_LEVELS} levels deep")
    try:
        events = yaml.parse(text, Loader=yaml.SafeLoader)
        if sum(isinstance(event, yaml.AliasEvent) for event in events) > most_aliases:
            raise YamlTextError(f"more than {most_aliases} aliases")
        return list(yaml.load_all(text, Loader=_Texts if texts else _Once if once else _Loader))
    except YamlTextError:
        raise
    except yaml.YAMLError as error:
        raise YamlTextError(f"not YAML: {' '.join(str(error).split())[:300]}") from None
    except RecursionError:
        raise YamlTextError("not YAML: nested too deeply") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        # `!!int ""`, `!!bool x`, `!!timestamp x`, 5000 digits: the constructors check nothing
        raise YamlTextError(f"not YAML: a value that its tag does not fit ({type(error).__name__})") from None

"""YAML from untrusted sources as plain data, with limits on size, on depth and on aliases.

Specification: YAML 1.1, as PyYAML's safe loader reads it. That loader creates only plain data, but nested aliases, also
under merge keys, still grow exponentially, and an invalid scalar raises any exception of its constructor.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MOST_CHARACTERS = 1 << 20  # PyYAML parses about 100 kB per second
MOST_LEVELS = 100
MOST_NODES = 200_000  # of the expanded text: each alias counts as the nodes of its anchor


class YamlTextError(ValueError):
    """The text is not YAML, or uses YAML that is not supported here."""


class Text(str):
    """A scalar, with the line of its first character. 0: a text of several lines that is no literal block (`|`)."""

    line = 0


class Plain(Text):
    """A scalar without quotes or tag: another YAML reader may parse it as a number or a boolean."""


class _Texts(yaml.SafeLoader):
    """The loader that keeps every scalar as text: 022 does not become 18, and `on` does not become True."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Record whether the scalar has a tag, which fixes its type as quotes do."""
        tagged = self.peek_event().tag is not None  # type: ignore[no-untyped-call]
        node = super().compose_scalar_node(anchor)
        node.style = node.style or ("'" if tagged else None)
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Return the text, its line, and whether quotes or a tag mark it as a string."""
        found, style = super().construct_scalar(node), getattr(node, "style", "")
        if isinstance(found, str):
            found = Plain(found) if style is None else Text(found)
            if style == "|" or "\n" not in found.strip():
                found.line = node.start_mark.line + (2 if style in ("|", ">") else 1)
        return found

    yaml_implicit_resolvers = {  # noqa: RUF012  # as PyYAML's classes carry it
        "<": [("tag:yaml.org,2002:merge", re.compile(r"<<\Z"))]
    }


class _UniqueKeyLoader(yaml.SafeLoader):
    """The loader that rejects a mapping with a repeated key. The safe loader silently keeps the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check before merge keys are resolved, because a key of the mapping may override a merged one."""
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                raise YamlTextError(f"{key.value!r} occurs twice, in lines {seen[key.value]} and {line}")
            seen[key.value] = line
        return node


def _check_size(text: str, most_aliases: int) -> None:
    """Raise YamlTextError for more levels, more aliases, or more nodes of the expanded text, than are read."""
    sizes, starts, nodes, aliases = dict[str | None, int](), list[tuple[str | None, int]](), 0, 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            aliases += 1
            nodes += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, start = starts.pop()
            sizes[anchor] = nodes - start
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
            is_start = isinstance(event, yaml.CollectionStartEvent)
            sizes[event.anchor] = MOST_NODES if is_start else 1  # an alias inside its own anchor has no end
            starts += [(event.anchor, nodes - 1)] if is_start else []
        if len(starts) > MOST_LEVELS:  # PyYAML's scanner checks each open bracket for each token
            raise YamlTextError(f"nested more than {MOST_LEVELS} levels deep")
        if aliases > most_aliases:
            raise YamlTextError(f"more than {most_aliases} aliases")
        if nodes > MOST_NODES:
            raise YamlTextError(f"more than {MOST_NODES} nodes, with the anchors of its aliases written out")


def load_all(text: str, *, most_aliases: int, texts: bool = False, once: bool = False, first: int = 1) -> list[Any]:
    """Parse every document in the text, whose first line has the number `first`.

    With `texts`, scalars stay text. With `once`, a repeated key in a mapping is an error. Raises YamlTextError.
    """

    def make_loader(text: str) -> yaml.SafeLoader:
        loader = (_Texts if texts else _UniqueKeyLoader if once else yaml.SafeLoader)(text)
        loader.line = first - 1
        return loader

    if len(text) > MOST_CHARACTERS:
        raise YamlTextError(f"{len(text)} characters of YAML are more than the {MOST_CHARACTERS} that are read")
    try:
        _check_size(text, most_aliases)
        return list(yaml.load_all(text, Loader=make_loader))  # type: ignore[arg-type]  # PyYAML only calls it
    except YamlTextError:
        raise
    except yaml.YAMLError as error:
        raise YamlTextError(f"not YAML: {' '.join(str(error).split())[:300]}") from None
    except RecursionError:
        raise YamlTextError("not YAML: nested too deeply") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        # `!!int ""`, `!!bool x`, `!!timestamp x`, 5000 digits: the constructors do not validate
        raise YamlTextError(f"not YAML: a value that its tag does not fit ({type(error).__name__})") from None

"""YAML from untrusted sources as plain data, with limits on size, on depth and on aliases.

Specification: YAML 1.1, as PyYAML's safe loader reads it. That loader creates only plain data, but nested aliases, also
under merge keys, still grow exponentially, and an invalid scalar raises any exception of its constructor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

MAX_CHARACTERS = 1 << 20  # PyYAML parses about 100 kB per second
MAX_LEVELS = 100
MAX_NODES = 200_000  # of the expanded text: each alias counts as the nodes of its anchor


class YamlTextError(ValueError):
    """The text is not YAML, or uses YAML that is not supported here."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """The loader that rejects a mapping with a repeated key. The safe loader silently keeps the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check before merge keys are resolved, because a key of the mapping may override a merged one."""
        node = super().compose_mapping_node(anchor)
        key_lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in key_lines:
                raise YamlTextError(f"{key.value!r} occurs twice, in lines {key_lines[key.value]} and {line}")
            key_lines[key.value] = line
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
            sizes[event.anchor] = MAX_NODES if is_start else 1  # an alias inside its own anchor has no end
            starts += [(event.anchor, nodes - 1)] if is_start else []
        if len(starts) > MAX_LEVELS:  # PyYAML's scanner checks each open bracket for each token
            raise YamlTextError(f"nested more than {MAX_LEVELS} levels deep")
        if aliases > most_aliases:
            raise YamlTextError(f"more than {most_aliases} aliases")
        if nodes > MAX_NODES:
            raise YamlTextError(f"more than {MAX_NODES} nodes, with the anchors of its aliases written out")


def load_all(
    text: str, *, most_aliases: int, once: bool = False, make_loader: Callable[[str], yaml.SafeLoader] | None = None
) -> list[Any]:
    """Parse every document in the text, by default with the safe loader.

    With `once`, a repeated key in a mapping is an error. Raises YamlTextError.
    """
    if len(text) > MAX_CHARACTERS:
        raise YamlTextError(f"{len(text)} characters of YAML are more than the {MAX_CHARACTERS} that are read")
    try:
        _check_size(text, most_aliases)
        loader: Any = make_loader or (_UniqueKeyLoader if once else yaml.SafeLoader)
        return list(yaml.load_all(text, Loader=loader))
    except YamlTextError:
        raise
    except yaml.YAMLError as error:
        raise YamlTextError(f"not YAML: {' '.join(str(error).split())[:300]}") from None
    except RecursionError:
        raise YamlTextError("not YAML: nested too deeply") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        # `!!int ""`, `!!bool x`, `!!timestamp x`, 5000 digits: the constructors do not validate
        raise YamlTextError(f"not YAML: a value that its tag does not fit ({type(error).__name__})") from None

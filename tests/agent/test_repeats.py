"""Objects that repeat are parsed once, and nothing else about them differs from json.loads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cluster.nodes import from_resource
from agent.cluster.repeats import MOST_KINDS, REPEATED, Repeats

TEXTS = st.sampled_from(("a", '"', "\\", 'gpu":{', '"gpu":{}', '\\"pci": {', "é", "\x00")) | st.text(max_size=4)
NAMES = st.sampled_from(REPEATED) | TEXTS
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


@given(st.lists(VALUES, max_size=6), st.booleans(), st.booleans())
def test_the_values_are_those_of_json(values: list[Any], spaced: bool, ascii_only: bool) -> None:
    """Whatever the names, quotes and backslashes; of several texts in a row, each of which repeats the one before."""
    parsed = Repeats()
    separators = (", ", ": ") if spaced else (",", ":")
    for document in (values, values[::-1], [values, values]):
        text = json.dumps(document, separators=separators, ensure_ascii=ascii_only)
        assert repr(parsed.loads(text.encode())) == repr(json.loads(text))


@given(st.text(alphabet='{}[]":,\\ gpu1', max_size=40))
def test_what_is_no_json_stays_none(text: str) -> None:
    """Cutting out what repeats makes no broken text whole."""
    parsed = Repeats()
    parsed.loads(b'{"gpu":{"a":1}}')
    for one in (text, text.replace("gpu", '"gpu":{"a":1}')):
        try:
            wanted: Any = json.loads(one)
        except ValueError:
            with pytest.raises(json.JSONDecodeError):
                parsed.loads(one.encode())
        else:
            assert parsed.loads(one.encode()) == wanted


def test_equal_objects_are_one_and_more_kinds_than_are_kept_come_through() -> None:
    """The second of a kind is the first; kinds past the limit are read as they are."""
    parsed = Repeats()
    rows = [{"gpu": {"number": number}} for number in range(2 * MOST_KINDS)]
    first, second = (parsed.loads(json.dumps(rows).encode()) for _ in range(2))
    assert first == second == rows
    assert [a["gpu"] is b["gpu"] for a, b in zip(first, second, strict=True)] == [True] * MOST_KINDS + [
        False
    ] * MOST_KINDS


def test_a_record_has_one_key_however_it_was_read() -> None:
    """One of a list has the key that it has when a watch brings it, whatever the order of names."""
    machine = {"gpu": {"a": 1, "b": [2.5, "x"]}, "limits": {"c": None}, "gpuMemoryUsedBytes": {"0": 5}}
    item = {"metadata": {"name": "n"}, "status": {"machine": machine}}
    other = {"metadata": {"name": "n"}, "status": {"machine": {**machine, "gpu": {"b": [2.5, "x"], "a": 1}}}}
    parsed = Repeats()
    listed = [from_resource(parsed.loads(json.dumps(item).encode())) for _ in range(2)]
    assert {(one.graph, one.facts) for one in (*listed, from_resource(item), from_resource(other))} == {
        (listed[0].graph, listed[0].facts)
    }
    machine["gpu"]["a"] = 2
    assert from_resource(item).graph != listed[0].graph

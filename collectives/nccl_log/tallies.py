"""Tables of limited size: the memory for a log must not grow with its length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Tally(Counter[Key]):
    """Counts of keys. Keys beyond the first `most` are not counted."""

    def __init__(self, most: int = 512) -> None:
        super().__init__()
        self.most = most

    def add(self, key: Key, times: int = 1) -> None:
        """Count the key."""
        if key in self or len(self) < self.most:
            self[key] += times

    def merge(self, other: Mapping[Key, int]) -> None:
        """Add the counts of another table."""
        for key, times in other.items():
            self.add(key, times)


class Firsts(dict[Key, Value]):
    """The first value of each key, for at most `most` keys."""

    def __init__(self, most: int = 512) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: Key, value: Value) -> None:
        """Store the value, unless the key already has one."""
        if len(self) < self.most:
            self.setdefault(key, value)

    def merge(self, other: Mapping[Key, Value]) -> None:
        """Add the values of another table."""
        for key, value in other.items():
            self.keep(key, value)


class Lasts(Firsts[Key, Value]):
    """The last value of each key, for at most `most` keys."""

    def keep(self, key: Key, value: Value) -> None:
        """Store the value in place of an earlier one."""
        if key in self or len(self) < self.most:
            self[key] = value


def merge_attributes(mine: object, theirs: object, names: Iterable[str]) -> None:
    """Merge these attributes of `theirs` into `mine`: add tables, and take the larger of two plain values.

    None is the smallest value, and True is larger than False.
    """
    for name in names:
        own, other = getattr(mine, name), getattr(theirs, name)
        if hasattr(own, "merge"):
            own.merge(other)
        else:
            setattr(mine, name, max((each for each in (own, other) if each is not None), default=None))

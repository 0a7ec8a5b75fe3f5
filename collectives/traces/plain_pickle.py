"""A pickle of plain values, read by a machine that knows nothing else: no name is looked up, nothing is called.

Specification: Lib/pickletools.py of CPython, the opcodes of protocols 2 to 4 that numbers, texts, lists, tuples and
dicts take; PyTorch's flight recorder writes protocol 2 (torch/csrc/jit/serialization/pickler.cpp). Python's own reader
imports what a pickle names, and sizes its memo by a number in the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

MOST_VALUES = 8_000_000  # opcodes; 2,000 calls with stacks take some 200,000


class PickleError(ValueError):
    """No pickle, or one of more than plain values."""


_MARK = object()
_NUMBERS = {b"J": "<i", b"K": "<B", b"M": "<H", b"G": ">d"}
_CONSTANTS: dict[bytes, Callable[[], Any]] = {
    b"N": lambda: None, b"\x88": lambda: True, b"\x89": lambda: False, b"]": list, b"}": dict, b")": tuple,
}  # fmt: skip
_TEXTS = {b"X": "<I", b"\x8c": "<B", b"T": "<I", b"U": "<B", b"B": "<I", b"C": "<B", b"\x8d": "<Q"}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_LONGS = {b"\x8a": "<B", b"\x8b": "<I"}
_GETS, _PUTS = {b"h": "<B", b"j": "<I"}, {b"q": "<B", b"r": "<I"}
_REFUSED = {
    b"c": "names a class or a function", b"\x93": "names a class or a function", b"R": "calls something",
    b"b": "sets an object's state", b"o": "makes an object", b"i": "makes an object", b"\x81": "makes an object",
    b"P": "names a persistent object", b"Q": "names a persistent object",
}  # fmt: skip


class _Machine:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def take(self, size: int) -> bytes:
        found = self.raw[self.at : self.at + size]
        if len(found) < size:
            raise PickleError("the pickle ends too early")
        self.at += size
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def since_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                found = self.stack[place + 1 :]
                del self.stack[place:]
                return found
        raise PickleError("an end without its beginning")

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise PickleError(f"no {kind.__name__} where one is added to")
        return self.stack[-1]

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise PickleError("a value is missing")
        return self.stack.pop()

    def fill(self, pairs: list[Any]) -> None:
        found = self.top(dict)
        for key, value in zip(pairs[::2], pairs[1::2], strict=False):
            if not isinstance(key, str | int):
                raise PickleError("a key that is neither text nor number")
            found[key] = value

    def step(self, code: bytes) -> None:
        if code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code]())
        elif code in _NUMBERS:
            self.stack.append(self.number(_NUMBERS[code]))
        elif code in _TEXTS:
            self.stack.append(self.take(self.number(_TEXTS[code])).decode("utf-8", errors="replace"))
        elif code in _LONGS:
            size = self.number(_LONGS[code])
            if size > 9:
                raise PickleError("a whole number of more than 64 bits")
            self.stack.append(int.from_bytes(self.take(size), "little", signed=True))
        elif code in _GETS:
            self.stack.append(self.memo.get(self.number(_GETS[code])))
        elif code in _PUTS or code == b"\x94":
            key = len(self.memo) if code == b"\x94" else self.number(_PUTS[code])
            if self.stack:
                self.memo[key] = self.stack[-1]
        elif code in _TUPLES:
            found = [self.pop() for _ in range(_TUPLES[code])]
            self.stack.append(tuple(found[::-1]))
        else:
            self.gather(code)

    def gather(self, code: bytes) -> None:
        if code == b"(":
            self.stack.append(_MARK)
        elif code == b"t":
            self.stack.append(tuple(self.since_mark()))
        elif code == b"a":
            value = self.pop()
            self.top(list).append(value)
        elif code == b"e":
            values = self.since_mark()
            self.top(list).extend(values)
        elif code == b"s":
            value, key = self.pop(), self.pop()
            self.fill([key, value])
        elif code == b"u":
            self.fill(self.since_mark())
        elif code == b"\x80":
            self.take(1)
        elif code == b"\x95":
            self.take(8)  # a frame's length says nothing about its values
        else:
            raise PickleError(_REFUSED.get(code, f"an opcode {code!r} that plain values do not take"))


def loads(raw: bytes) -> Any:
    """The value. Raises PickleError; nothing of the pickle is ever run."""
    machine = _Machine(raw)
    for _ in range(MOST_VALUES):
        code = machine.take(1)
        if code == b".":
            return machine.pop()
        machine.step(code)
    raise PickleError(f"more than {MOST_VALUES} values")

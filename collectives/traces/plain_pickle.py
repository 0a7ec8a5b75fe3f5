"""Read a pickle of plain values: numbers, texts, lists, tuples and dicts. No name is imported and nothing is called.

Specification: Lib/pickletools.py of CPython; PyTorch's flight recorder writes protocol 2
(torch/csrc/jit/serialization/pickler.cpp). Python's own reader is given only the opcodes that plain values need, and a
budget of opcodes, open marks and seconds, because a few bytes of a pickle can ask for much time and memory.
"""

from __future__ import annotations

import io
import pickle
import struct
import time
from collections.abc import Callable
from typing import Any

MOST_OPCODES = 2_000_000  # 2,000 calls with stacks take some 200,000; the dearest, an empty dict, takes 72 bytes
MOST_MARKS = 10_000  # open at once, each a list of its own; plain values nest a few levels deep
MOST_SECONDS = 20.0  # of CPU; what is allowed above takes some 4
LONGEST_NUMBER = 9  # bytes; 64 bits and a sign
_LOOK = 4096  # opcodes between two looks at the clock
_ALLOWED = (  # noqa: SIM905 - a list of 40 quoted words takes three times the lines
    "PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE"
    " SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES EMPTY_LIST EMPTY_DICT EMPTY_TUPLE"
    " TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE"
    " GLOBAL STACK_GLOBAL INST"  # these three end in find_class, which says why they are refused
).split()


class PickleError(ValueError):
    """The bytes are no pickle, hold more than plain values, or take too much time or memory."""


class _Budget:
    """The table in which the reader looks up each opcode: it counts them."""

    def __init__(self) -> None:
        self._count, self._until = 0, time.thread_time() + MOST_SECONDS

    def __getitem__(self, code: int) -> Callable[[Any], None]:
        self._count += 1
        if self._count % _LOOK == 0:
            if self._count > MOST_OPCODES:
                raise PickleError(f"more than {MOST_OPCODES} values")
            if time.thread_time() > self._until:
                raise PickleError(f"reading it takes more than {MOST_SECONDS:.0f} s of CPU")
        try:
            return _STEPS[code]
        except KeyError:
            raise PickleError(f"an opcode {bytes([code])!r} that plain values do not take") from None


class _PlainUnpickler(pickle._Unpickler):
    """Python's reader, without what imports, calls, or allocates by a number in the file."""

    stack: list[Any]  # of the base class, which has no types
    metastack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw), encoding="utf-8", errors="replace")
        self.dispatch = _Budget()  # type: ignore[assignment,misc]

    def find_class(self, _module: str, _name: str) -> Any:
        """Refuse every name."""
        raise PickleError("names a class or a function")

    def load_mark(self) -> None:
        """Begin the members of a list, a tuple or a dict."""
        if len(self.metastack) >= MOST_MARKS:
            raise PickleError(f"more than {MOST_MARKS} levels deep")
        super().load_mark()  # type: ignore[misc]

    def load_text(self, form: str) -> None:
        """Push a text; Python's own reader ends at a byte that is not UTF-8."""
        self.append(self._take(form).decode("utf-8", errors="replace"))

    def load_number(self, form: str) -> None:
        """Push a whole number of at most 64 bits; larger ones break whoever prints them."""
        raw = self._take(form)
        if len(raw) > LONGEST_NUMBER:
            raise PickleError("a whole number of more than 64 bits")
        self.append(int.from_bytes(raw, "little", signed=True))

    def _take(self, form: str) -> bytes:
        size = struct.unpack(form, self.read(struct.calcsize(form)))[0]
        found: bytes = self.read(size) if size >= 0 else b""
        if len(found) != size:
            raise PickleError("the pickle ends too early")
        return found

    def load_pairs(self) -> None:
        """Add pairs to a dict; hashing a deep tuple overflows the stack of the process, so such keys are refused."""
        self._fill(self.pop_mark())

    def load_pair(self) -> None:
        """Add one pair to a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def _fill(self, pairs: list[Any]) -> None:
        found = self.stack[-1]
        if not isinstance(found, dict) or len(pairs) % 2 or not all(isinstance(key, str | int) for key in pairs[::2]):
            raise PickleError("a dict whose keys are not texts and numbers")
        found.update(zip(pairs[::2], pairs[1::2], strict=True))

    def load_items(self) -> None:
        """Add to a list."""
        items = self.pop_mark()
        self._list().extend(items)

    def load_item(self) -> None:
        """Add one value to a list."""
        item = self.stack.pop()
        self._list().append(item)

    def _list(self) -> list[Any]:
        if not isinstance(self.stack[-1], list):
            raise PickleError("no list where one is added to")
        found: list[Any] = self.stack[-1]
        return found


_STEPS: dict[int, Callable[[Any], None]] = {
    **{code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _ALLOWED)},
    pickle.MARK[0]: _PlainUnpickler.load_mark,
    pickle.SETITEMS[0]: _PlainUnpickler.load_pairs, pickle.SETITEM[0]: _PlainUnpickler.load_pair,
    pickle.APPENDS[0]: _PlainUnpickler.load_items, pickle.APPEND[0]: _PlainUnpickler.load_item,
    pickle.BINUNICODE[0]: lambda reader: reader.load_text("<I"),
    pickle.SHORT_BINUNICODE[0]: lambda reader: reader.load_text("<B"),
    pickle.BINUNICODE8[0]: lambda reader: reader.load_text("<Q"),
    pickle.LONG1[0]: lambda reader: reader.load_number("<B"), pickle.LONG4[0]: lambda reader: reader.load_number("<i"),
}  # fmt: skip


def loads(raw: bytes) -> Any:
    """Return the value. Raises PickleError; nothing that the pickle names is ever run."""
    try:
        return _PlainUnpickler(raw).load()
    except PickleError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever Python's reader makes of bytes that are no pickle
        raise PickleError(f"no pickle: {type(error).__name__}: {error}") from None

"""Texts in messages that name a fault, with the problem code of each (messages.toml).

A text is looked for first; its regular expression is compiled and run only on a message that contains the text.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sign:
    """One text and what it stands for."""

    needle: bytes
    code: str
    pattern: bytes = b""  # regular expression that must match too; empty: the text alone is enough
    rising: bool = False  # the first number that the pattern finds must be below the second
    own: bool = True  # only NCCL, its plugins, a launcher or the kernel prints it: it counts on any line

    def is_in(self, message: bytes) -> bool:
        """Whether a message that contains the text says what the sign stands for."""
        if not self.pattern:
            return True
        match = _compiled(self.pattern).search(message)
        return match is not None and (not self.rising or float(match[1]) < float(match[2]))


@cache
def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern)


def load_signs(text: str) -> tuple[Sign, ...]:
    """Read the rows of messages.toml; a row with several texts gives a sign for each."""
    data = tomllib.loads(text)
    pieces: dict[str, str] = data["pieces"]
    signs = []
    for row in data["messages"]["rows"]:
        texts = row["text"] if isinstance(row["text"], list) else [row["text"]]
        pattern = re.sub(r"<<(\w+)>>", lambda name: pieces[name[1]], row.get("pattern", ""))
        signs += [
            Sign(one.encode(), row["code"], pattern.encode(), row.get("rising", False), row.get("own", True))
            for one in texts
        ]
    return tuple(signs)


SIGNS = load_signs(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8"))

# Warnings that say nothing about the wire on any healthy system.
HARMLESS = re.compile(
    rb"NET/Plugin|TUNER/Plugin|PROFILER/Plugin|MSCCL|CollNet|COLLNET|SHARP|[Ss]ervice thread|ncclCommAbort|"
    rb"set by environment|GDRCOPY|gdrcopy|NCCL version"
)


# What must be looked for where no header of NCCL's stands before it.
SEARCHED: tuple[bytes, ...] = tuple(dict.fromkeys(sign.needle for sign in SIGNS if sign.own))
_NEEDLES: tuple[bytes, ...] = tuple(dict.fromkeys(sign.needle for sign in SIGNS))
_OF_NEEDLE = {
    needle: tuple(number for number, sign in enumerate(SIGNS) if sign.needle == needle) for needle in _NEEDLES
}


@lru_cache(maxsize=4_096)
def _needles_in(shape: bytes) -> tuple[bytes, ...]:
    """Needles of a message without its digits, which no needle has: messages differ by their numbers most."""
    return tuple(needle for needle in _NEEDLES if needle in shape)


def codes_of(message: bytes, *, foreign: bool = False) -> tuple[str, ...]:
    """Codes that the message stands for, each once, in the order of the table.

    ``foreign``: nothing says that the line is NCCL's; only texts that nobody else prints count.
    """
    needles = _needles_in(message.translate(None, b"0123456789"))
    if not needles:  # the usual case
        return ()
    numbers = sorted(number for needle in needles for number in _OF_NEEDLE[needle])
    rows = (SIGNS[number] for number in numbers)
    return tuple(dict.fromkeys(sign.code for sign in rows if (sign.own or not foreign) and sign.is_in(message)))

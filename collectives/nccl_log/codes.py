"""The tables for reading NCCL logs: problems by code (codes.toml), and texts that indicate a problem (messages.toml).

A text is searched first; its regular expression is compiled and run only on a message that contains the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from collectives.nccl_log.transport import LogProblem
from contracts.tables import insert_pieces, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """One code: its meaning, and the first action. codes.toml describes the marks."""

    severity: str  # "info", "warn", "fail"
    message: str
    action: str
    gdr: bool = False
    ends: bool = False
    breaks: bool = False
    verbs: bool = False
    either_end: bool = False
    note: str = ""
    alone: str = ""
    symptom: int = 0
    no_rdma: bool = False
    vague: int = 0
    proof: Sequence[str] = ()
    variables: Sequence[str] = ()
    other_provider: str = ""
    cases: Sequence[Mapping[str, str]] = ()


CODES: dict[str, Meaning] = {code: Meaning(**row) for code, row in read_table(__file__, "codes.toml").items()}
_MESSAGES = read_table(__file__, "messages.toml")


def make_problem(code: str, detail: str = "", **members: Any) -> LogProblem:
    """Create the problem with this code; `members` may override the severity or the action."""
    meaning = CODES[code]
    texts = {"message": f"{meaning.message}{': ' + detail if detail else ''}", "action": meaning.action}
    return LogProblem(code=code, **{**texts, "severity": meaning.severity, **members})


def find_case(meaning: Meaning, text: str) -> dict[str, str]:
    """Return the texts of the code's first case that `text` shows, with the groups of its expression filled in."""
    matches = ((case, re.search(case["seen"], text)) for case in meaning.cases)
    case, match = next(((case, match) for case, match in matches if match), ({}, None))
    return {name: match.expand(words) for name, words in case.items() if match and name != "seen"}


def list_codes(mark: str) -> tuple[str, ...]:
    """Return the codes that have this mark in codes.toml."""
    return tuple(code for code, meaning in CODES.items() if getattr(meaning, mark))


@dataclass(frozen=True, slots=True)
class Sign:
    """A text in a message and the code that it indicates."""

    needle: bytes
    code: str
    pattern: bytes = b""  # regular expression that must also match; empty: the text is sufficient
    rising: bool = False  # the first number in the pattern must be lower than the second
    own: bool = True  # printed only by NCCL, its plugins, a launcher or the kernel: counts on any line

    def is_in(self, message: bytes) -> bool:
        """Return whether a message that contains the text indicates the code."""
        match = _compiled(self.pattern).search(message)
        return match is not None and (not self.rising or float(match[1]) < float(match[2]))


@cache
def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern)


def _read_signs() -> tuple[Sign, ...]:
    """Read messages.toml; a row with several texts gives one sign for each."""
    pieces: dict[str, str] = _MESSAGES["pieces"]
    signs = []
    for row in _MESSAGES["messages"]["rows"]:
        texts = row["text"] if isinstance(row["text"], list) else [row["text"]]
        pattern = insert_pieces(row.get("pattern", ""), pieces)
        members = (row["code"], pattern.encode(), row.get("rising", False), row.get("own", True))
        signs += [Sign(text.encode(), *members) for text in texts]
    return tuple(signs)


SIGNS = _read_signs()
DIGITS = b"0123456789"
_SHAPES = tuple((sign.needle.translate(None, DIGITS), sign) for sign in SIGNS)
LOGGING: dict[str, str] = _MESSAGES["logging"]
HARMLESS = re.compile(insert_pieces(_MESSAGES["harmless"], _MESSAGES["pieces"]).encode())
WORDS_OF = {name: tuple(_MESSAGES[name]) for name in ("tuning", "set_by_ofi", "bridges", "local")}
PROVIDERS: tuple[tuple[str, str], ...] = tuple((start, code) for start, code in _MESSAGES["providers"])
PATHS: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = tuple(
    ((row["minor"], row["patch"]), tuple(row["names"].split())) for row in _MESSAGES["paths"]
)
FACT_WORDS, DULL_STARTS = (tuple(text.encode() for text in _MESSAGES[name]) for name in ("fact_words", "dull_starts"))

# Texts to search for in lines without an NCCL header.
SEARCHED: tuple[bytes, ...] = tuple(dict.fromkeys(sign.needle for sign in SIGNS if sign.own))


@lru_cache(maxsize=256)  # a line has at most 16 KiB
def _signs_in(shape: bytes) -> tuple[Sign, ...]:
    """Return the signs whose texts a message of this shape, which is the message without digits, may contain."""
    return tuple(sign for text, sign in _SHAPES if text in shape)


def find_codes(message: bytes, *, foreign: bool = False) -> tuple[str, ...]:
    """Return the codes that the message indicates, each once, in table order.

    ``foreign``: the line may not be NCCL's; only texts that no other library prints count.
    """
    candidates = _signs_in(message.translate(None, DIGITS))  # lines of one kind differ in their digits
    signs = (sign for sign in candidates if sign.needle in message and (sign.own or not foreign))
    codes = tuple(dict.fromkeys(sign.code for sign in signs if sign.is_in(message)))
    causes = any(CODES[code].symptom < 1 and not CODES[code].vague for code in codes)
    return tuple(code for code in codes if not (causes and CODES[code].symptom > 0))


def cut_to_sign(line: bytes, code: str) -> bytes:
    """Cut a line to 300 bytes: its start, or the part with the text that indicates the code."""
    limit = 300
    if len(line) <= limit:
        return line
    texts = [sign.pattern or re.escape(sign.needle) for sign in SIGNS if sign.code == code and sign.needle in line]
    end = min((match.end() for text in texts if (match := _compiled(text).search(line))), default=0)
    return line[:limit] if end <= limit else b"..." + line[min(end + 100, len(line)) - limit + 3 :][: limit - 3]

"""The texts of why.toml: what a rank does and what to do about it; and what the errors of ranks say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from collectives.nccl_log.codes import CODES as LOG_CODES, find_case, find_codes
from contracts.tables import read_table

WORDS = read_table(__file__, "why.toml")
LOST_PEER, TIMED_OUT, IN_CALL, OF_GPU, PASSES_ON = (
    re.compile("|".join(WORDS["text"][name]), re.IGNORECASE if name in ("lost_peer", "timed_out") else 0)
    for name in ("lost_peer", "timed_out", "in_call", "of_gpu", "passes_on")
)
LIMIT = re.compile(r"(?:Timed out waiting |Timeout\(ms\)=)(\d{1,12})")
# gloo/transport/tcp/pair.cc
CLOSED = re.compile(r"(?:by peer|error) \[([0-9a-fA-F.:]{2,45})\]:(\d{1,5})(?!: Connection timed out|: No route)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a rank does that others wait for, or how it ended. why.toml describes the members."""

    does: str = "is at work"
    code: str = "rank.behind"
    action: str = WORDS["kind"]["unknown"]["action"]
    is_long: bool = False
    is_on_host: bool = False
    is_of_program: bool = False
    if_short: str = ""


KINDS = {name: Kind(**row) for name, row in WORDS["kind"].items()}
ANSWERS: dict[str, str] = WORDS["answer"]
LONG_PHASES = tuple(name for name, kind in KINDS.items() if kind.is_long)
PHASES = tuple(name for name, row in WORDS["kind"].items() if "does" in row)
WORK = tuple(name for name in PHASES if name != "collective")
ENDED = ("gone", "stopped")  # states for which waiting is useless


def get_kind(name: str) -> Kind:
    """Return the row of why.toml; that of "unknown" if it has none."""
    return KINDS.get(name, KINDS["unknown"])


def headline(error: str) -> str:
    """The first line of an exception's message, and its last one."""
    lines = [line.strip() for line in error.splitlines() if re.search(r"\w", line)]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1])))[:400] if lines else error


def find_remedy(error: str) -> str:
    """What to do about an exception, by the codes of logs; what its traceback shows if they say no more."""
    codes = find_codes(error.encode(), foreign=True) or ("python_traceback",)
    code = min(codes, key=lambda code: LOG_CODES[code].vague)
    general = KINDS["raised"].action if code in ("python_traceback", "job_failed") else LOG_CODES[code].action
    return find_case(LOG_CODES[code], error).get("action", general)


def is_own(error: str) -> bool:
    """Whether an error is not about another rank."""
    return not LOST_PEER.search(error)


def are_alike(errors: Sequence[str]) -> bool:
    """Return whether several ranks ended with the same kind of error, so that none caused the others' errors."""
    return len(errors) > 1 and len({error.partition(":")[0] for error in errors}) == 1

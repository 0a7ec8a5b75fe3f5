"""The texts of why.toml: what a rank does and what to do about it, and patterns of the errors of ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

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

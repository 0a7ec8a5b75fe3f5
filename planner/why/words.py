"""The texts of why.toml: what a rank does and what to do about it, and patterns of the errors of ranks."""

from __future__ import annotations

import re

from contracts.tables import read_table

WORDS = read_table(__file__, "why.toml")
LOST_PEER, TIMED_OUT, IN_CALL, OF_GPU, PASSES_ON = (
    re.compile("|".join(WORDS["text"][name]), re.IGNORECASE if name in ("lost_peer", "timed_out") else 0)
    for name in ("lost_peer", "timed_out", "in_call", "of_gpu", "passes_on")
)
LIMIT = re.compile(r"(?:Timed out waiting |Timeout\(ms\)=)(\d{1,12})")
# gloo/transport/tcp/pair.cc
CLOSED = re.compile(r"(?:by peer|error) \[([0-9a-fA-F.:]{2,45})\]:(\d{1,5})(?!: Connection timed out|: No route)")
# phases that may take long: others wait for them up to the limit
LONG_PHASES = ("save", "evaluate", "compile", "server", "prompt", "join")
ENDED = ("gone", "stopped")  # states for which waiting is useless
ON_HOST = ("rank.idle", "rank.io", "rank.server", "rank.prompt", "rank.stopped")  # the rank's GPU has no part in it
DOING, ANSWERS, ACTIONS, CODES, OF_PROGRAM = (WORDS[n] for n in ("doing", "answer", "action", "code", "of_program"))
BUSY_KINDS = frozenset(DOING) - {"collective"}

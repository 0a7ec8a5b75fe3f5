"""Texts that users give in place of a log: NCCL's RAS (format: collectives/traces/ras.py)."""

from __future__ import annotations

from contracts.tables import read_patterns

_TEXTS = read_patterns(__file__, "facts.toml", "kinds", str.encode)


def kind_of(start: bytes) -> str | None:
    """Recognise a text by its beginning: "RAS"; None if it may be a log."""
    return "RAS" if _TEXTS["RAS"].search(start) else None

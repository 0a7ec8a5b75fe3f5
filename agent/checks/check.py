"""One verdict about one subject, apart from the gate that makes most of them: `lint-env` loads no probe for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "info", "unknown", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One verdict of the gate about one subject of one node."""

    id: str  # finding code
    status: Status
    node: str
    subject: str = ""
    message: str = ""
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    required: bool = False
    pending: bool = False  # a failure that one scan of the resident agent found, and no second one yet

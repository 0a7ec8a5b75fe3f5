"""Findings about variables: their codes, and their texts in data/findings.toml."""

from __future__ import annotations

from collections.abc import Mapping

from contracts.finding import Finding, Status
from contracts.tables import read_table

TEXTS: Mapping[str, Mapping[str, str]] = read_table(__file__, "data/findings.toml")
"""Texts of the findings, with fields that the rules fill in."""
CODES = tuple(sorted({key.partition("/")[0] for key in TEXTS}))
"""Every code that lint may return."""


def finding(
    key: str, name: str, value: str, /, *evidence: str, status: Status | None = None, **fields: object
) -> Finding:
    """Create a finding from a row of data/findings.toml and its fields.

    Its subject is the variable, its first evidence the setting. `status` overrides the status of the row.
    """
    row = TEXTS[key]
    message, remedy = (row[part].format(name=name, value=value, **fields) for part in ("message", "remedy"))
    return Finding(
        code=key.partition("/")[0], status=status or Status(row["status"]), subject=name,
        message=message[:1].upper() + message[1:], remedy=remedy,
        evidence=(f"{name}={value}", *([row["evidence"]] if "evidence" in row else ()), *evidence),
    )  # fmt: skip

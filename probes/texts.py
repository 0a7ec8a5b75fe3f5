"""The words of a probe's findings as a table: a key is the finding's code, and after a space which of its cases."""

from __future__ import annotations

from collections.abc import Mapping

from contracts.finding import Finding, Status

Texts = Mapping[str, tuple[str, str]]
"""Key -> message and remedy, both with the names of values in braces; the remedy is empty only for INFO."""


def codes_of(texts: Texts) -> tuple[str, ...]:
    """Every code of the table, in its order."""
    return tuple(dict.fromkeys(key.partition(" ")[0] for key in texts))


def finding(
    texts: Texts, key: str, status: Status, subject: str = "", evidence: tuple[str, ...] = (), **values: object
) -> Finding:
    """The finding of that key, its message and remedy filled in."""
    message, remedy = (text.format(**values) for text in texts[key])
    return Finding(
        code=key.partition(" ")[0],
        status=status,
        subject=subject,
        message=message,
        evidence=evidence,
        remedy=remedy,
    )

"""The texts of a probe's findings: `findings.toml` in the folder of the probe.

A key is the finding's code, and after a space which of its cases.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from contracts.finding import Finding, Status

Texts = Mapping[str, Mapping[str, str]]
"""Key -> "message" and "remedy", both with the names of values in braces; only what is INFO has no remedy."""


def read_texts(module: str, name: str = "findings.toml") -> Texts:
    """Read a table of texts from the folder of a module, whose `__file__` is given."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def codes_of(texts: Texts) -> tuple[str, ...]:
    """Every code of the table, in its order."""
    return tuple(dict.fromkeys(key.partition(" ")[0] for key in texts))


def finding(
    texts: Texts, key: str, status: Status, subject: str = "", evidence: tuple[str, ...] = (), **values: object
) -> Finding:
    """The finding of that key, its message and remedy filled in."""
    message, remedy = (texts[key].get(part, "").format(**values) for part in ("message", "remedy"))
    return Finding(
        code=key.partition(" ")[0], status=status, subject=subject, message=message, evidence=evidence, remedy=remedy
    )

"""A probe is made of the files of its folder: `findings.toml` with the texts of its findings, `metrics.toml`, its code.

A key of the texts is the finding's code, and after a space which of its cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from contracts.finding import Finding, Status
from contracts.tables import read_table
from probes.api import Metric, Probe
from probes.host.protocol import Host

F = TypeVar("F")

Texts = Mapping[str, Mapping[str, Any]]
"""Key -> "message", and "status", "evidence" (a text or several) and "remedy" where the check does not give them.

Texts have the names of values in braces; only what is INFO has no remedy.
"""


def probe_of(
    module: str, facts: type[F], read: Callable[[Host], F], check: Callable[[F], Iterable[Finding]], **more: Any
) -> Probe[F]:
    """Make the probe of a module's folder, whose name is the probe's; codes and metric families are from its tables.

    A probe without `samples` has no `metrics.toml`.
    """
    codes = codes_of(read_table(module, "findings.toml"))
    rows = read_table(module, "metrics.toml") if "samples" in more else {}
    metrics = tuple(Metric(name=name, **row | {"labels": tuple(row.get("labels", ()))}) for name, row in rows.items())
    return Probe(
        name=Path(module).parent.name, facts=facts, read=read, check=check, codes=codes, metrics=metrics, **more
    )


def codes_of(texts: Texts) -> tuple[str, ...]:
    """Every code of the table, in its order."""
    return tuple(dict.fromkeys(key.partition(" ")[0] for key in texts))


def finding(
    texts: Texts, key: str, status: Status | None = None, subject: str = "", evidence: tuple[str, ...] = (),
    **values: object,
) -> Finding:  # fmt: skip
    """The finding of that key, its texts filled in; `status` and `evidence` go before those of the table."""
    row = texts[key]
    seen = row.get("evidence", ())
    message, remedy, *own = (
        text.format(subject=subject, **values)
        for text in (row["message"], row.get("remedy", ""), *([seen] if isinstance(seen, str) else seen))
    )
    return Finding(
        code=key.partition(" ")[0],
        status=status or Status(row["status"]),
        subject=subject,
        message=message,
        evidence=evidence or tuple(own),
        remedy=remedy,
    )

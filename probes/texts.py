"""A probe as its folder has it: `findings.toml`, the texts of its findings, `metrics.toml`, and the code beside them.

A key of the texts is the finding's code, and after a space which of its cases.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from contracts.finding import Finding, Status
from probes.api import Metric, Probe
from probes.host.protocol import Host

F = TypeVar("F")

Texts = Mapping[str, Mapping[str, Any]]
"""Key -> "message", and "status", "evidence" (a text or several) and "remedy" where the check does not give them.

Texts have the names of values in braces; only what is INFO has no remedy.
"""


@cache
def read_texts(module: str, name: str = "findings.toml") -> Texts:
    """Read a table of texts from the folder of a module, whose `__file__` is given."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def _metrics(module: str) -> tuple[Metric, ...]:
    """The families of `metrics.toml` in the folder of a module; none where it has no such file."""
    file = Path(module).with_name("metrics.toml")
    rows = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return tuple(Metric(name=name, **row | {"labels": tuple(row.get("labels", ()))}) for name, row in rows.items())


def probe_of(
    module: str, facts: type[F], read: Callable[[Host], F], check: Callable[[F], Iterable[Finding]], **more: Any
) -> Probe[F]:
    """The probe of a module's folder, by whose name it goes; its codes and metric families are those of the tables."""
    codes, metrics = codes_of(read_texts(module)), _metrics(module)
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

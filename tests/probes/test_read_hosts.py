"""What a probe reads of a small host, and what it finds there, whole: tests/golden/probes.jsonl has a host a line."""

from __future__ import annotations

from typing import Any

from dicthost import DictHost
from rigs.tables import golden_rows

from probes.api import UnavailableError
from probes.registry import BY_NAME
from probes.worker import reader


def said(row: dict[str, Any]) -> Any:
    """The facts, the findings, and the codes that these facts cannot decide."""
    probe = BY_NAME[row["probe"]]
    try:
        facts = reader(probe.name)(DictHost(**row["host"]))
    except UnavailableError as error:
        return {"absent": str(error)}
    found = [[each.code, each.status, each.subject, each.message] for each in probe.check(facts)]
    return {"facts": facts, "findings": found, "unjudged": dict(probe.unjudged(facts))}


def test_golden_hosts() -> None:
    """A row says what it shows: two that differ in one fact stand beside each other."""
    golden_rows("probes.jsonl", "says", said)

"""Findings that somebody has seen and lives with until a time: annotations of the node's NodeTopology.

One annotation holds one finding of a node, so that two people never overwrite one another. Who may write them is said
by RBAC (deploy/daemonset/base/rbac.yaml); a verdict counts an acknowledged finding as any other.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from agent.cluster.node_facts import clean

Json = dict[str, Any]
PREFIX = "ack.topoflight.io/"
SAID = "acknowledged by"
MOST = 64  # of one node, as it has findings at most
MOST_TEXT = 2048  # characters of an annotation
LONGEST_SECONDS = 90 * 86400.0  # an end is an end: who still lives with it then says so again
FIELDS = ("code", "subject", "who", "reason", "at", "until")


def annotation(code: str, subject: str) -> str:
    """The name under which it is kept, within Kubernetes' 63 characters: the code is legible, the digest unique."""
    return f"{PREFIX}{code[:46].rstrip('._-')}.{hashlib.sha256(f'{code} {subject}'.encode()).hexdigest()[:12]}"


def document(
    code: str, subject: str, *, who: str, reason: str, until: float, at: float | None = None
) -> dict[str, str]:
    """The annotation as it is written: its name and its text."""
    stored = {"code": code, "subject": subject, "who": clean(who, 253), "reason": clean(reason),
              "at": _time(time.time() if at is None else at), "until": _time(until)}  # fmt: skip
    return {annotation(code, subject): json.dumps(stored)}


def read(annotations: Any) -> tuple[Json, ...]:
    """What is acknowledged, by whatever wrote the annotations; what is none of ours is left out."""
    found = []
    for name, text in annotations.items() if isinstance(annotations, dict) else ():
        if str(name).startswith(PREFIX) and isinstance(text, str) and len(text) <= MOST_TEXT:
            try:
                stored = json.loads(text)
                made = {field: clean(str(stored[field])) for field in FIELDS} | {
                    "until_seconds": _seconds(stored["until"])
                }
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            found.append(made)
    return tuple(found[:MOST])


def words(acknowledged: Iterable[Json], now: float) -> Mapping[tuple[str, str], tuple[str, ...]]:
    """Of each finding (code, subject) that is acknowledged and not over: by whom, until when and why."""
    return {
        (one["code"], one["subject"]): (f"{SAID} {one['who']} until {one['until']}: {one['reason']}",)
        for one in acknowledged
        if one["until_seconds"] > now
    }


def over(annotations: Any, now: float) -> list[str]:
    """Names of annotations of ours whose end has passed."""
    held = annotations if isinstance(annotations, dict) else {}
    return [name for name, text in held.items() for one in read({name: text}) if one["until_seconds"] <= now]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()

"""Settings, needs of a pod and notes, and their texts as data/advice.toml holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from contracts.tables import read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why: the rule, the probed fact it rests on, and where the rule is written."""

    rule: str
    evidence: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One environment variable, never without its reason."""

    name: str
    value: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNeed:
    """Something the job needs that is no environment variable: shm size, memlock, a resource, an annotation."""

    name: str  # "shm_bytes", "memlock", "resource", "network", "capability", "compute_domain"
    value: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something left alone on purpose, or to be known: "NCCL finds the HCAs by itself: set nothing"."""

    topic: str
    text: str
    evidence: str = ""


def texts() -> Mapping[str, Mapping[str, str]]:
    """The table as written: "name", "text", and "source" of what is set or needed."""
    return read_table(__file__, "data/advice.toml")


def note(key: str, evidence: str = "", /, *more: str, **fields: object) -> Note:
    """Fill in a note's text; `more` are keys of texts that follow it."""
    return Note(topic=texts()[key]["name"], text=_filled((key, *more), fields), evidence=evidence)


def setting(key: str, value: str, evidence: str, /, *more: str, **fields: object) -> Setting:
    """Fill in a setting's reason; `more` are keys of texts that follow its rule."""
    return Setting(name=texts()[key]["name"], value=value, reason=_reason(key, evidence, more, fields))


def need(key: str, value: str, evidence: str, /, *more: str, **fields: object) -> PodNeed:
    """Fill in the reason of something that a pod needs."""
    return PodNeed(name=texts()[key]["name"], value=value, reason=_reason(key, evidence, more, fields))


def _reason(key: str, evidence: str, more: Iterable[str], fields: Mapping[str, object]) -> Reason:
    return Reason(rule=_filled((key, *more), fields), evidence=evidence, source=texts()[key]["source"])


def _filled(keys: Iterable[str], fields: Mapping[str, object]) -> str:
    return "".join(texts()[key]["text"].format(**fields) for key in keys)

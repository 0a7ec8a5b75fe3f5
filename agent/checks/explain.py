"""Entries for finding codes, diagnoses and alerts, read from the reference pages of the documentation."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path

_CHAPTER = re.compile(r"^## ", re.MULTILINE)
_FINDING = re.compile(r"^### (?=`)", re.MULTILINE)  # its heading: codes that share a section, each with its severities
_CODE = re.compile(r"`([a-z0-9_.]+)`(?: \(([a-z, ]+)\))?")
_POINT = re.compile(r"^(?:- )?\*\*(\w+):\*\* (.+?)(?=^(?:- )?\*\*|\n\n|\Z)", re.MULTILINE | re.DOTALL)


class UnknownCodeError(KeyError):
    """A code that the page does not have; the message names close ones."""

    def __str__(self) -> str:
        return str(self.args[0])


@cache
def sections() -> dict[str, str]:
    """Every code and every alert with its text: the name, then what it Means, its Severity, how to See and Mend it."""
    return {**_causes(_page("diagnoses.md")), **_findings(_page("findings.md")), **_alerts(_page("alerts.md"))}


def _causes(page: str) -> dict[str, str]:
    """Causes that `why` names: a row of the table in docs/reference/diagnoses.md tells of several."""
    rows = re.findall(r"^\| ((?:`[a-z._]+`(?:, )?)+) \| (.+) \|$", page, flags=re.MULTILINE)
    return {
        code: f"{code}\n\n- **Means:** {codes}: {text}"
        for codes, text in rows
        for code in re.findall(r"[a-z._]+", codes)
    }


def _findings(page: str) -> dict[str, str]:
    """A section says what its chapter does not say for it; codes that share one each have their own severities."""
    found: dict[str, str] = {}
    for chapter in _CHAPTER.split(page)[1:]:
        opening, *parts = _FINDING.split(chapter)
        shared = dict(_POINT.findall(opening))
        for part in parts:
            heading, _, body = part.partition("\n")
            waiting: list[str] = []
            for code, severities in _CODE.findall(heading):
                waiting.append(code)
                if severities:
                    found |= {each: _explanation(each, body, shared, severities) for each in waiting}
                    waiting = []
            found |= {each: _explanation(each, body, shared) for each in waiting}
    return found


def _alerts(page: str) -> dict[str, str]:
    parts = re.split(r"^## (Topoflight\w+)\n", page, flags=re.MULTILINE)
    return {name: _explanation(name, body, {}) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _explanation(name: str, body: str, shared: dict[str, str], severities: str = "") -> str:
    means = _POINT.sub("", body).strip()
    points = {"Means": means, "Severity": severities.replace(", ", " or "), **shared, **dict(_POINT.findall(body))}
    return "\n".join((f"{name}\n", *(f"- **{point}:** {text.strip()}" for point, text in points.items() if text)))


def _page(name: str) -> str:
    places = (Path(__file__).with_name(name), Path(__file__).parents[2] / "docs" / "reference" / name)
    page = next((place for place in places if place.exists()), None)
    if page is None:
        raise UnknownCodeError(f"docs/reference/{name} is not packaged with this installation")
    return page.read_text(encoding="utf-8")


def section(code: str) -> str:
    """The text of one code or alert; UnknownCodeError names close ones."""
    known = sections()
    if code in known:
        return known[code]
    close = get_close_matches(code, known, n=3, cutoff=0.4)
    hint = f"; close: {', '.join(close)}" if close else ""
    raise UnknownCodeError(f"{code}: no such finding code or alert{hint}")


def mend(code: str) -> str:
    """How to mend it, in the page's words; empty where it does not say."""
    try:
        text = section(code)
    except UnknownCodeError:
        return ""
    found = dict(_POINT.findall(text)).get("Mend", "")
    return " ".join(found.split())

"""Read the entries of finding codes, diagnoses and alerts from the reference pages of the documentation."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path

PAGES = ("findings", "settings", "log-problems", "diagnoses", "alerts")
_ENTRY = re.compile(r"^### `([\w.]+)`\n\n((?:- \*\*\w+:\*\* .+\n)+)", re.MULTILINE)
_POINT = re.compile(r"^- \*\*(\w+):\*\* (.+)$", re.MULTILINE)


class UnknownCodeError(LookupError):
    """No page has this code; the message names similar codes."""


@cache
def sections() -> dict[str, str]:
    """Return the entry of every code and alert: the name, then its points as a Markdown list."""
    return {name: f"{name}\n\n{points}" for page in PAGES for name, points in _ENTRY.findall(_page(page))}


def _page(name: str) -> str:
    places = (Path(__file__).with_name("pages"), Path(__file__).parents[2] / "docs" / "reference")
    page = next((place / f"{name}.md" for place in places if (place / f"{name}.md").exists()), None)
    if page is None:
        raise UnknownCodeError(f"docs/reference/{name}.md is not packaged with this installation")
    return page.read_text(encoding="utf-8")


def section(code: str) -> str:
    """Return the entry of a code or alert. Raises UnknownCodeError that names similar codes."""
    known = sections()
    if exact := {name.lower(): name for name in known}.get(code.lower()):
        return known[exact]
    family = [name for name in known if name.startswith(f"{code.lower()}.")]
    close = ", ".join(family[:8] or get_close_matches(code, known, n=3, cutoff=0.4))
    raise UnknownCodeError(f"{code}: no such code or alert{close and f'; close: {close}'}; --list lists all")


def point(code: str, name: str) -> str:
    """Return one point of an entry, such as "Remedy"; empty if there is no such entry or point."""
    found: dict[str, str] = dict(_POINT.findall(sections().get(code, "")))
    return found.get(name, "")

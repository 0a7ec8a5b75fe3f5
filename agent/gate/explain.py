"""Explanations of finding codes and of alerts: sections of docs/findings.md and docs/runbook.md, packaged with it."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path

_FINDINGS = r"^### `([a-z0-9_.]+)`\n"
_ALERTS = r"^## Alert Name: (\w+)\n"


class UnknownCodeError(KeyError):
    """A code that the page does not have; the message names close ones."""

    def __str__(self) -> str:
        return str(self.args[0])


@cache
def sections() -> dict[str, str]:
    """Every code and every alert with its text, its name first."""
    return {**_split("findings.md", _FINDINGS), **_split("runbook.md", _ALERTS)}


def _split(name: str, heading: str) -> dict[str, str]:
    places = (Path(__file__).with_name(name), Path(__file__).parents[2] / "docs" / name)
    page = next((place for place in places if place.exists()), None)
    if page is None:
        raise UnknownCodeError(f"docs/{name} is not packaged with this installation")
    parts = re.split(heading, page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    # parts: preamble, code, text, code, text ...; a text ends where the next section of the page begins
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return {
        code: f"{code}\n\n{re.split(r'^## ', text, maxsplit=1, flags=re.MULTILINE)[0].strip()}" for code, text in pairs
    }


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
    found = re.search(r"^- \*\*Mend:\*\* (.+?)(?=^- |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""

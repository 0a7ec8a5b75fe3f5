"""The explanation of a finding as HTML: the few marks that docs/findings.md uses, nothing else of Markdown."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from agent.explain import UnknownCodeError, section


def explained(code: str) -> Markup:
    """What the code means, how to see it, mend it and prove it mended; empty where the page has no such code."""
    try:
        text = section(code)
    except UnknownCodeError:
        return Markup()
    body = text.split("\n\n", 1)[1] if "\n\n" in text else ""
    items = re.split(r"^- ", body, flags=re.MULTILINE)
    lead, points = items[0].strip(), [item.strip() for item in items[1:]]
    html = f"<p>{_inline(lead)}</p>" if lead else ""
    if points:
        html += "<ul>" + "".join(f"<li>{_inline(point)}</li>" for point in points) + "</ul>"
    return Markup(html)  # noqa: S704 - every piece went through `_inline`


def _inline(text: str) -> str:
    safe = str(escape(" ".join(text.split())))
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", safe)

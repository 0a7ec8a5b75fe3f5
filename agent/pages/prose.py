"""Findings and their explanations as HTML: the few marks that docs/findings.md uses, nothing else of Markdown."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from agent.gate.explain import UnknownCodeError, section
from agent.view import Group

# Path classes as `nvidia-smi topo -m` names them, nearest first, for people who do not know them by heart.
CLASSES = (
    ("nv", "NVLink"),
    ("pix", "PIX: one PCIe switch"),
    ("pxb", "PXB: several switches"),
    ("phb", "PHB: host bridge"),
    ("node", "NODE: host bridges of one NUMA node (PHB to NCCL)"),
    ("sys", "SYS: between CPUs"),
)
_COMMANDS = ("modprobe", "sysctl", "kubectl", "ulimit", "mount", "dmesg")


def explained(code: str) -> Markup:
    """What the code means, how to see it and what mends it; empty where the page has no such code."""
    try:
        text = section(code)
    except UnknownCodeError:
        return Markup()
    body = text.split("\n\n", 1)[1] if "\n\n" in text else ""
    items = re.split(r"^- ", body, flags=re.MULTILINE)
    lead, points = items[0].strip(), [item.strip() for item in items[1:]]
    html = f"<p>{inline(lead)}</p>" if lead else ""
    if points:
        html += "<ul>" + "".join(f"<li>{inline(point)}</li>" for point in points) + "</ul>"
    return Markup(html)  # noqa: S704 - every piece went through `inline`


def inline(text: str) -> Markup:
    """One line of prose: code between backticks, and strong words."""
    safe = str(escape(" ".join(text.split())))
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", safe))  # noqa: S704 - escaped above


def headline(group: Group) -> Markup:
    """What is wrong and with what: "GPU5: the driver cannot reach this GPU"."""
    message = group.message if group.alike else group.message.split(";")[0]
    first = group.checks[0].subject
    if first and (len(group.subjects) == 1 or not group.alike):
        return told(first, message)
    return inline(sentence(message))


def told(subject: str, message: str) -> Markup:
    """A message behind its subject, where it does not begin with it."""
    if not subject or re.match(rf"{re.escape(subject)}(?![\w.:])", message):
        return inline(sentence(message))
    return Markup("<code>{}</code>: {}").format(subject, inline(message))


def sentence(text: str) -> str:
    """A capital letter at the start, where a plain word stands there and not a name such as eth0 or a command."""
    plain = re.match(r"([a-z]+)(?:[ ,]|$)", text)
    return text[:1].upper() + text[1:] if plain and plain[1] not in _COMMANDS else text

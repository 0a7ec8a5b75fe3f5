"""The filter for secrets in all output: recordings, bundles, run records and HTTP responses.

A secret is recognised by the name before it (`PASSWORD=`, `--token X`, `"auth": `, a header, a manifest's variable) or
by its own form (`ghp_...`, a private key, a password in a URL). Text that only looks similar is kept: token counts,
secrets' names and paths, references such as `$TOKEN`, `auth: required`. redaction.toml has the patterns.
"""

from __future__ import annotations

import dataclasses
import re
from enum import Enum
from typing import Any

from contracts.tables import read_table

LEFT_OUT = "(left out)"
MAX_NAME = 256  # characters; longer text is not a name

_TABLE = read_table(__file__, "redaction.toml")
_SECRET, _HEADER, _ABOUT = (re.compile("|".join(_TABLE[name]), re.IGNORECASE) for name in ("secret", "header", "about"))
_HARMLESS = re.compile(
    rf"(?:(?:bearer|basic|token)[ \t]+)?(?:{'|'.join(_TABLE['harmless'])})", re.IGNORECASE | re.DOTALL
)
_FORMS = re.compile("|".join(_TABLE["forms"]), re.DOTALL)
_NUMBER = re.compile(r"[\d.,_]+(?:e[+-]?\d+)?[kmgbt]?\w?", re.IGNORECASE)

_VALUE = re.compile(r"""(?P<open>\\*["'])(?P<quoted>(?:(?!(?P=open))[^\n])*)|(?P<bare>\(left out\)|[^\s,;"'\\]+)""")
_REST_OF_LINE = re.compile(r"""(?P<open>)(?P<bare>[^\n"'\\{]+)""")
_NAMES = (  # each pattern ends where the value begins
    re.compile(r"""(?P<name>(?<![\w.-])[\w.-]++)\\*["']?[ \t]*[=:][ \t]*(?:[|>][+-]?[ \t]*\n[ \t]*)?"""),
    re.compile(r"(?P<name>(?<![\w-])--?[A-Za-z][\w-]*+)[ \t]+(?!-)"),
    re.compile(r"""\bname\\*["']?\s*:\s*\\*["']?(?P<name>[\w.-]++)\\*["']?\s*,?\s*\\*["']?value\\*["']?\s*:\s*"""),
)


def redact(text: str) -> str:
    """Return the text with every secret replaced by LEFT_OUT."""
    for pattern in _NAMES if _SECRET.search(text) or _HEADER.search(text) else ():
        pieces, position = [], 0
        for match in pattern.finditer(text):
            if match.end() < position or not _names_a_secret(match["name"]):
                continue
            line = _REST_OF_LINE.match(text, match.end()) if _HEADER.fullmatch(match["name"]) else None
            value = line or _VALUE.match(text, match.end())
            if value is None:
                continue
            group = "quoted" if value["open"] else "bare"
            if is_secret(match["name"], value[group]):
                pieces += [text[position : value.start(group)], LEFT_OUT]
                position = value.end(group)
        text = "".join([*pieces, text[position:]])
    return _FORMS.sub(LEFT_OUT, text)


def without_secrets(value: Any) -> Any:
    """Return a copy of plain values (dict, list, text, numbers) or of a dataclass, with every secret replaced.

    A name marks the value that follows it: in a mapping, in `{"name": "API_KEY", "value": ...}` of a manifest, or as an
    option followed by its argument in a list of arguments.
    """
    if isinstance(value, str):
        return value if isinstance(value, Enum) else redact(value)  # a member is one of our own constants
    if isinstance(value, dict):
        variable = value.get("name") if isinstance(value.get("value"), str) else None
        return {
            key: _redact_member(str(variable) if key == "value" and variable else str(key), member)
            for key, member in value.items()
        }  # fmt: skip
    if isinstance(value, list | tuple):
        options = ["", *(item if isinstance(item, str) and re.fullmatch(r"--?[\w-]+", item) else "" for item in value)]
        items = [_redact_member(option, item) for option, item in zip(options, value, strict=False)]
        return tuple(items) if type(value) is tuple else items
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        members = {name: getattr(value, name) for name in fields}
        changed = {name: redacted for name, one in members.items() if (redacted := _redact_member(name, one)) != one}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _redact_member(name: str, value: Any) -> Any:
    if isinstance(value, str) and name and is_secret(name, value):
        return LEFT_OUT
    return without_secrets(value)


def is_secret(name: str, value: str) -> bool:
    """Whether a value is a secret, judged by its name."""
    if not _names_a_secret(name) or _HARMLESS.fullmatch(value.strip()):
        return False
    return not ("tokens" in name.lower() and _NUMBER.fullmatch(value))  # a number of tokens is not a secret


def _names_a_secret(name: str) -> bool:
    if len(name) > MAX_NAME:
        return False
    if _HEADER.fullmatch(name):
        return True
    return _SECRET.search(name.lstrip("-")) is not None and _ABOUT.search(name) is None

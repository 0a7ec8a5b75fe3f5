"""A setting taken out of a manifest or script, or set to another value, where it stands and nowhere else.

What a remedy of planner.lint asks for is read from its imperative sentence; the places are those that the reader of
planner.lint.documents has found; the characters are those of contracts.yaml_edit.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from contracts.yaml_edit import GONE, EditError, documents, edited
from contracts.yaml_text import YamlTextError
from planner.lint.documents import Carrier, DocumentError, carriers_of, scalar
from planner.lint.sources import guess_kind

MOST_CHARACTERS = 64 << 10  # it is read anew after each change

_WORD = r"(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|\\.|[^\s;&|<>()\"'`\\])*"
_FLAGS = ("-x", "-e", "--env", "-env")  # of mpirun, docker and srun, with a setting after them
_EXPORTS = ("", "export", "declare -x", "typeset -x", "declare -gx")


class ChangeError(ValueError):
    """The text cannot be changed so; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is asked of one setting."""

    name: str
    was: str
    to: str | None  # None: it is to be unset

    @property
    def words(self) -> str:
        """For a person."""
        if self.to == self.was:
            return f"{self.name}={self.was} in quotes"
        return f"remove {self.name}={self.was}" if self.to is None else f"{self.name}={self.to} in place of {self.was}"


def parse_remedy(name: str, was: str, remedy: str) -> Change | None:
    """The change that a remedy asks for; None where it leaves the choice to a person."""
    written = re.match(rf"Write {re.escape(name)}=(\S+?)[.,]?(?:\s|\Z)", remedy)
    quoted = re.match(r'Write "(.*)" in quotes\.', remedy)
    if written or quoted:
        return Change(name=name, was=was, to=(written or quoted)[1])  # type: ignore[index]
    unset = re.match(rf"Unset {re.escape(name)}\b(?! or )", remedy) or re.search(
        rf", or unset (?:it|{re.escape(name)})\b", remedy
    )
    return Change(name=name, was=was, to=None) if unset and "Did you mean" not in remedy else None


def elsewhere(text: str, file: str) -> list[str]:
    """What a manifest takes its environment from and does not hold: "ConfigMap nccl"."""
    if guess_kind(text, file) not in ("yaml", "pod", "json"):
        return []
    try:
        return carriers_of(documents(text))[2]
    except (YamlTextError, DocumentError):
        return []


def changed(text: str, file: str, change: Change, source: str) -> str:
    """The text in which `source`, as lint names it, has the setting no more, or as asked. Raises ChangeError."""
    kind = guess_kind(text, file)
    if kind in ("shell", "env", "conf"):
        return in_shell(text, change)
    if kind not in ("yaml", "pod", "json"):
        raise ChangeError(f"a text read as {kind} is not changed")
    if len(text) > MOST_CHARACTERS:
        raise ChangeError(f"more than {MOST_CHARACTERS} characters")
    number, hits = 0, 0
    while True:  # one place after the other: each is found in the text that the last one left
        try:
            data = documents(text)
            carriers, taken, _ = carriers_of(data)
            own = [each for each in carriers if _of(each.source, source, taken)]
            while number < len(own) and not _edit(own[number], change):
                number += 1
            if number == len(own):
                break
            before, text = text, edited(text, data)
        except (YamlTextError, DocumentError, EditError) as error:
            raise ChangeError(str(error)) from None
        hits += text != before
        number += change.to is not None
    if not hits:
        raise ChangeError("is set where no text of this file holds it by itself")
    return text


def _of(carrier: str, source: str, taken: dict[str, set[str]]) -> bool:
    if source == carrier or source.startswith(f"{carrier}, "):
        return True
    return any(carrier in configs for at, configs in taken.items() if source == at or source.startswith(f"{at}, "))


def _edit(carrier: Carrier, change: Change) -> bool:
    """Change the data where this carrier sets the variable; whether it does."""
    holder, key = carrier.holder, carrier.key
    value = holder[key]
    if carrier.name == change.name:
        where = next((k for k in ("value", "Value", "default") if isinstance(value, dict) and k in value), None)
        if scalar(value[where] if where else value) != change.was:
            return False
        if change.to is None:
            holder[key] = GONE
        elif where:
            value[where] = change.to
        else:
            holder[key] = change.to
        return True
    if carrier.name or not isinstance(value, str) or f"{change.name}=" not in value:
        return False
    if value == f"{change.name}={change.was}" and isinstance(holder, list):
        holder[key] = GONE if change.to is None else f"{change.name}={change.to}"
        if change.to is None and key and holder[key - 1] in _FLAGS:
            holder[key - 1] = GONE
        return True
    try:
        holder[key] = in_shell(value, change)
    except ChangeError:
        return False
    return True


def in_shell(text: str, change: Change) -> str:
    """A script, command line or env file with the setting taken out, or set as asked. Raises ChangeError."""
    flags = "|".join(map(re.escape, _FLAGS))
    pattern = re.compile(rf"(?<![\w.$-])(?:(?:{flags})[ =])?{re.escape(change.name)}=(?P<value>{_WORD})")
    made, hits = text, 0
    for found in reversed(list(pattern.finditer(text))):
        line = text.rfind("\n", 0, found.start()) + 1
        if re.search(r"(?:^|\s)#", text[line : found.start()]) or _unquoted(found["value"]) != change.was:
            continue
        hits += 1
        if change.to is not None:
            made = made[: found.start("value")] + shlex.quote(change.to) + made[found.end() :]
        else:
            start, end = _cut(text, found.start(), found.end())
            made = made[:start] + made[end:]
    if not hits:
        raise ChangeError(f"no word of it sets {change.name}={change.was}")
    return made


def _unquoted(word: str) -> str:
    try:
        return "".join(shlex.split(word))
    except ValueError:
        return word


def _cut(text: str, start: int, end: int) -> tuple[int, int]:
    """From where to where a setting goes: its whole statement where it is alone in it, else the word."""
    line = text.rfind("\n", 0, start) + 1
    continued = text[: max(0, line - 1)].rstrip("\r").endswith("\\")
    before = text[line:start]
    lead = re.search(r"(?:;|&&)[^;&]*\Z", before)
    statement = re.sub(r"\s+", " ", before[lead.start() :].lstrip(";& ") if lead else before).strip()
    after = re.match(r"[ \t]*(?:(?P<next>;|&&)[ \t]*|(?P<end>#[^\n]*)?(?P<newline>\r?\n|\Z))", text[end:])
    if statement in _EXPORTS and after and not continued:
        first = line + len(before) - len(before.lstrip()) if not lead else line + lead.start()
        if after["next"]:
            first = line + lead.end() - len(lead[0].lstrip(";& ")) if lead else first
            return first, end + after.end()
        return (first, end + after.start("newline")) if lead else (line, end + after.end())
    alone = re.match(r"[ \t]*\\\r?\n", text[end:])
    if alone and not before.strip():
        return line, end + alone.end()
    blanks = len(text[end:]) - len(text[end:].lstrip(" \t"))
    if re.match(r"[ \t]*(?:\r?\n|\Z)", text[end:]) and before.strip():
        return len(text[:start].rstrip(" \t")), end + blanks
    return start, end + blanks

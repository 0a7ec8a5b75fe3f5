"""Read the variables that a Dockerfile sets: ENV of its stages, and texts that RUN writes into files.

Specification: Dockerfile reference (both forms of ENV, ARG, stages, `# escape=`); for here-documents BuildKit's
frontend/dockerfile/parser: each unquoted word of RUN, COPY and ADD that begins with `<<`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from planner.lint.script import NAMED, OPEN, Assigned, Script, Unread, words
from planner.lint.shell import read_assignment, read_shell

_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:\\.|[^"\\])*"|'[^']*')+""", re.DOTALL)
_HEREDOC = re.compile(r"\d*<<(-?)([\"']?)([^<\"'\s]+)\2\Z")
_INSTRUCTIONS = words()["documents"]["instructions"]


class _Instruction(NamedTuple):
    line: int
    name: str
    rest: str  # arguments, with continued lines joined and without here-documents


class _Stage(NamedTuple):
    name: str
    known: dict[str, str]  # ENV and ARG
    assigned: list[Assigned]


def read_dockerfile(text: str) -> Script:
    """Return the variables of containers of the last stage, and the texts written into files. Reports unread lines."""
    script, stage, named = Script(), _Stage("", {}, []), dict[str, _Stage]()
    arguments = stage.known  # of ARG instructions before the first stage
    for each in _instructions(text, script):
        if each.name == "FROM":
            rest = re.sub(r"\$\{?(\w+)\}?", lambda match: arguments.get(match[1]) or match[0], each.rest)
            words = [word.lower() for word in rest.split() if not word.startswith("--")]
            base = named.get(words[0], _Stage("", {}, [])) if words else stage
            name = words[2] if len(words) > 2 else str(len(named))
            stage = named[name] = _Stage(name, dict(base.known), list(base.assigned))
        elif each.name in ("ENV", "ARG"):
            _variables(each, stage)
        elif each.name in ("CMD", "ENTRYPOINT") and NAMED.search(each.rest):
            script.unread.append(Unread(line=each.line, why=f"a variable in {each.name}"))
        elif each.name == "RUN":
            _run(each, stage.known, script)
    script.always.update({each.name: each for each in stage.assigned})
    return script


def _variables(each: _Instruction, stage: _Stage) -> None:
    """Take the variables of ENV (both forms) or ARG; references use the values before the instruction."""
    before = dict(stage.known)
    words = _WORD.findall(each.rest)
    if each.name == "ENV" and words and "=" not in words[0]:
        name, _, value = each.rest.partition(" ")
        words = [f'{name}="' + value.strip().strip('"').replace('"', '\\"') + '"']
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals:
            stage.known.setdefault(name, OPEN)
            continue
        for found in read_assignment(word, before, each.line):
            stage.known[found.name] = found.value
            if each.name == "ENV":
                stage.assigned.append(found)


def _run(each: _Instruction, known: dict[str, str], script: Script) -> None:
    """Take the files that RUN writes. Variables that it exports do not outlive the instruction."""
    rest = re.sub(r"^(?:--\w+\S*\s+)+", "", each.rest)
    found = read_shell(rest + "\n", known=known, line=each.line)
    script.inner += [one for one in found.inner if one.target != "python" or one.text not in rest]
    if NAMED.search(rest):
        script.unread += found.unread


def _instructions(text: str, script: Script) -> Iterator[_Instruction]:
    """Yield each instruction with its continued lines and here-documents; report other lines as unread."""
    escape = re.match(r"(?:#.*\n)*#[ \t]*escape[ \t]*=[ \t]*`", text, re.IGNORECASE)
    mark = "`" if escape else "\\"
    rows = text.splitlines()
    at = 0
    while at < len(rows):
        first, row = at, rows[at].strip()
        at += 1
        match = re.match(r"([A-Za-z]+)\s+(.+)", row, re.DOTALL)
        if not row or row.startswith("#"):
            continue
        if match is None or match[1].upper() not in _INSTRUCTIONS:
            script.unread.append(Unread(line=first + 1, why="not a Dockerfile instruction"))
            continue
        body = [match[2]]
        while body[-1].rstrip().endswith(mark) and at < len(rows):
            body[-1] = body[-1].rstrip()[:-1]
            while at < len(rows) and (not rows[at].strip() or rows[at].lstrip().startswith("#")):
                at += 1
            if at < len(rows):
                body.append(rows[at])
                at += 1
        rest, name = " ".join(body).strip(), match[1].upper()
        for word in _WORD.findall(rest) if name in ("RUN", "COPY", "ADD") and "<<" in rest else ():
            here = _HEREDOC.match(word)
            end = here and next((n for n in range(at, len(rows)) if _is_end(rows[n], here)), None)
            if here and end is None:
                script.unread.append(Unread(line=first + 1, why=f"the here-document {here[3]} has no end"))
            elif here and end is not None:
                if NAMED.search("\n".join(rows[at:end])):
                    script.unread.append(Unread(line=at + 1, why="a here-document"))
                at, rest = end + 1, rest.replace(word, "")
        yield _Instruction(first + 1, name, rest)


def _is_end(row: str, here: re.Match[str]) -> bool:
    return (row.lstrip("\t") if here[1] else row) == here[3]

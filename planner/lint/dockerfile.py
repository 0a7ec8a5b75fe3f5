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
    known: dict[str, str]  # ENV and ARG
    assigned: list[Assigned]


def read_dockerfile(text: str) -> Script:
    """Return the variables of containers of the last stage, and the texts written into files. Reports unread lines."""
    script, stage, named = Script(), _Stage({}, []), dict[str, _Stage]()
    arguments = stage.known  # of ARG instructions before the first stage
    for each in _instructions(text, script):
        if each.name == "FROM":
            rest = re.sub(r"\$\{?(\w+)\}?", lambda match: arguments.get(match[1]) or match[0], each.rest)
            words = [word.lower() for word in rest.split() if not word.startswith("--")]
            base = named.get(words[0], _Stage({}, [])) if words else stage
            name = words[2] if len(words) > 2 else str(len(named))
            stage = named[name] = _Stage(dict(base.known), list(base.assigned))
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
    end_of_line = rf"{'`' if escape else chr(92) * 2}[ \t]*\n(?:[ \t]*(?:#.*)?\n)*"  # and comments after it
    pattern = re.compile(rf"[ \t]*(?:#.*|(?:([A-Za-z]+)[ \t]+)?((?:.*{end_of_line})*.*))\n?")
    at, line = 0, 1
    while at < len(text):
        first, match = line, pattern.match(text, at)
        assert match is not None  # noqa: S101 - it matches every text
        at, line, name = match.end(), line + match[0].count("\n"), (match[1] or "").upper()
        if name not in _INSTRUCTIONS:
            if match[2] and match[2].strip():
                script.unread.append(Unread(line=first, why="not a Dockerfile instruction"))
            continue
        rest = re.sub(end_of_line, " ", match[2]).strip()
        for word in _WORD.findall(rest) if name in ("RUN", "COPY", "ADD") and "<<" in rest else ():
            if (here := _HEREDOC.match(word)) is None:
                continue
            tabs = r"\t*" if here[1] else ""
            end = re.compile(rf"^{tabs}{re.escape(here[3])}(?:\n|\Z)", re.MULTILINE).search(text, at)
            if end is None:
                script.unread.append(Unread(line=first, why=f"the here-document {here[3]} has no end"))
                continue
            if NAMED.search(text[at : end.start()]):
                script.unread.append(Unread(line=line, why="a here-document"))
            line, at, rest = line + text.count("\n", at, end.end()), end.end(), rest.replace(word, "")
        yield _Instruction(first, name, rest)

"""Read environments from any supported format: a process, an env file, a script, a manifest, a Dockerfile, a log.

Specification: proc(5) environ; docker --env-file; NCCL src/misc/param.cc setEnvFile (nccl.conf). Other formats are
read by the modules `shell` and `documents`. Lines that cannot be parsed are reported with their number.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from contracts.tables import read_table
from planner.lint.findings import finding
from planner.lint.script import (
    JOB_SIZE,
    NAMED,
    OPEN,
    SETS,
    Assigned,
    EnvironmentTextError,
    NamedEnvironment,
    Script,
    Settings,
    Unread,
    is_judged,
    pattern,
)
from planner.nccl_env import is_read

_PATTERNS = read_table(__file__, "data/forms.toml")  # patterns for the format of a text; the first match counts
FORMS: Mapping[str, str] = _PATTERNS["forms"]
KINDS = tuple(kind for kind in FORMS if kind != "other")
_DOCUMENTS = ("yaml", "json", "toml")
_PROGRAMS = ("shell", "dockerfile")
_LIMITS = {"log": 16 << 20, **dict.fromkeys(("env", "conf", "process"), 8 << 20)}  # characters
_LIMIT_SCRIPT = 1 << 20  # characters of the other formats, which are parsed completely
_LIMIT_DEPTH = 4  # nesting of texts inside texts
_MAX_NAMES = 2000  # checked variables; each unknown name is compared with all known ones


class Reading(NamedTuple):
    """All environments of one text, and the format of the text."""

    form: str
    environments: tuple[NamedEnvironment, ...]
    files: tuple[str, ...] = ()  # referenced but not read: env files, ConfigMaps outside the text
    unread: tuple[Unread, ...] = ()  # lines that could not be parsed, in order
    unreached: tuple[Unread, ...] = ()  # settings that no started program gets; not checked
    nodes: int | None = None  # number of nodes of the job; None if the text does not contain it
    gpus: int | None = None  # number of GPUs of a pod or node whose GPUs no other one reaches; None if unknown

    def names(self) -> tuple[str, ...]:
        """Return the names of all variables found, sorted."""
        return tuple(sorted({name for each in self.environments for name in each.lines} - {*JOB_SIZE}))


def read_text(text: str, kind: str | None = None, name: str = "") -> Reading:
    """Return every environment in a text, and its format. Raises EnvironmentTextError.

    If `kind` is None, the format is recognised from the text and the file name. Only variables that concern
    communication are returned, because others may contain secrets.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    named_kind, other = (kind, kind) if kind else (guess_kind(text, name), guess_kind(text))
    for each in (named_kind, other) if named_kind != other else ():  # a name may mislead
        with contextlib.suppress(EnvironmentTextError):
            if (reading := _read_as(text, each)).names():
                return reading
    return _read_as(text, named_kind)


def _read_as(text: str, kind: str) -> Reading:
    if len(text) > (limit := _LIMITS.get(kind, _LIMIT_SCRIPT)):
        raise EnvironmentTextError(f"{len(text)} characters are more than the {limit} that are read of a {kind}")
    if kind not in _LIMITS or pattern("exports").search(text):
        from planner.lint.expansion import limit_parsing  # not needed for plain lists of variables

        limit_parsing()
    title, parts = _read(text, kind, 0)
    used = frozenset(pattern("used").findall(pattern("own_name").sub("", text)) if kind not in _LIMITS else ())
    all_reduce = kind not in _LIMITS and pattern("only_all_reduce").match(text) is not None
    environments = tuple(each for source, script in parts for each in _environments(source, script, used, all_reduce))
    if (count := len(set[str]().union(*(each.lines for each in environments)))) > _MAX_NAMES:
        raise EnvironmentTextError(f"{count} variables are more than the {_MAX_NAMES} that are read")
    if kind in ("json", "toml"):  # their parsers know no lines: take the one that names a variable
        rows: dict[str, int] = {}
        for number, row in enumerate(text.splitlines(), start=1):
            rows |= {name: 0 if name in rows else number for name in {*NAMED.findall(row)}}
        for each in environments:
            each.lines.update({name: rows.get(name, 0) for name in each.lines})
    unread = [each for _, script in parts for each in script.unread]
    names = {name.strip() for _, script in parts for settings in script.settings() for name in settings}
    reason = "no started program is known to get it"
    lost = _find_unread(text, names, pattern("setting"), reason) if kind in (*_PROGRAMS, *_DOCUMENTS) else ()
    lines = {each.line for each in unread}
    removed = {name: why for _, script in parts for name, why in script.removed.items()}
    explained = (each._replace(why=removed.get(each.name, each.why)) for each in lost)
    unreached = {each.name: each for each in explained if is_read(each.name) and each.line not in lines}
    if kind in _DOCUMENTS:
        names |= {*unreached}
        unread = [*_find_unread(text, names, SETS, "{name} is in a place where no variable is read"), *unread]
    return Reading(
        form=title, environments=environments,
        files=tuple(dict.fromkeys(file.replace(OPEN, "...") for _, each in parts for file in each.files)),
        unread=tuple(sorted({each.line: each for each in unread}.values())), nodes=_count_nodes(text),
        gpus=_count_gpus(text) if kind not in _LIMITS else None,
        unreached=tuple(unreached.values()),
    )  # fmt: skip


def _find_unread(text: str, names: set[str], pattern: re.Pattern[str], reason: str, first: int = 1) -> Iterator[Unread]:
    """Yield the lines that look like an assignment of a variable that no reader found."""
    for number, row in enumerate(text.splitlines()):
        for match in pattern.finditer(row) if not row.lstrip().startswith("#") else ():
            name = re.search(r"(?:[A-Z]+_)?[A-Z]+_\w+", match[0])
            if name and name[0] not in names:
                cause = "--container-env takes names only" if "--container-env" in row else reason
                yield Unread(line=first and first + number, why=cause.replace("{name}", name[0]), name=name[0])


def _count_nodes(text: str) -> int | None:
    """Return the largest number of nodes that the text requests; None if it contains none."""
    matches, master = pattern("nodes").finditer(text), "Master:" in text
    found = [int(each[each.lastgroup]) + (each.lastgroup == "workers" and master) for each in matches if each.lastgroup]
    return max(found, default=1 if pattern("standalone").search(text) else None)


def _count_gpus(text: str) -> int | None:
    """Return the largest number of GPUs that a pod or node gets; None if it is unknown, or reaches those of others."""
    counts = [number for match in pattern("gpus").findall(text) for number in match if number]
    if not counts or not all(map(str.isdecimal, counts)) or pattern("reaches_gpus").search(text):
        return None
    return max(map(int, counts))


def explain_nothing(text: str, reading: Reading) -> str:
    """Return the error message for a text in which no variable was found."""
    lines = {number: row for number, row in enumerate(text.splitlines(), start=1) if pattern("named").search(row)}
    read_as = reading.form + (f". Not read: {', '.join(reading.files[:3])}" if reading.files else "")
    if not lines:
        return f"no variable of NCCL, its plugins or PyTorch's process groups is set; it was read as: {read_as}"
    if reading.form != FORMS["other"] and all(row.lstrip().startswith("#") for row in lines.values()):
        return f"NCCL's variables are named only in comments ({list_lines(lines)}); it was read as: {read_as}"
    looks = _first(_PATTERNS["foreign"], text)
    count = f"{len(lines)} lines name" if len(lines) > 1 else "1 line names"
    like = f" It looks like {looks}." if looks and (looks != "Markdown" or not text.startswith("#!")) else ""
    return (
        f"{count} NCCL's variables ({list_lines(lines)}), and none sets one in a form that is read. It was read as: "
        f"{read_as}.{like} Forms that are read: {', '.join(KINDS)} (--kind)"
    )


def list_lines(lines: Iterable[int]) -> str:
    """Format line numbers: "line 3", "lines 3, 7, 9"; at most ten numbers."""
    numbers = sorted(set(lines))
    listed = ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")
    return f"line{'s' if len(numbers) > 1 else ''} {listed}"


_Parts = list[tuple[str, Script]]


def _read(text: str, kind: str, depth: int, first: int = 1) -> tuple[str, _Parts]:
    """Return the name of the format, and the result for each place. `first` is the first line's number; 0: unknown."""
    if kind in _DOCUMENTS:
        from planner.lint.documents import read_documents

        title, scripts = read_documents(text, kind, max(first, 1))
        parts: _Parts = []
        for place, script in scripts.items():
            parts += [(place, script), *_read_inner(script, place, depth)]
        return title, parts
    title, script = FORMS[kind], Script()
    if kind == "dockerfile":
        from planner.lint.documents import read_dockerfile

        script = read_dockerfile(text)
    elif kind == "shell" or (kind == "env" and pattern("exports").search(text)):
        from planner.lint.shell import read_shell

        script = read_shell(f"set -a; {text}" if kind == "env" else text, line=first)  # for dotenv, or `set -a`
        title = "Slurm batch script" if re.search(r"^#SBATCH\s", text, re.MULTILINE) else title
    elif kind in ("env", "conf"):
        script = _read_lines(text, kind, first)
    elif kind != "other":
        entries = re.findall(r"(?:^|\0)([^=\0]+)=([^\0]*)", text)[::-1]  # getenv(3) uses the first duplicate
        pairs = entries if kind == "process" else pattern("logged").findall(text)
        script.always = {name: Assigned(name, value, value) for name, value in pairs}
    return title, [("log" if kind == "log" else title, script), *_read_inner(script, title, depth)]


def _read_lines(text: str, kind: str, first: int) -> Script:
    """Read an env file or nccl.conf: the value is everything after the first `=`, quotes included.

    docker uses the last of duplicate entries. NCCL keeps all blanks, accepts `#` only in the first column, and uses the
    first of duplicate entries.
    """
    script = Script()
    for index, row in enumerate(text.splitlines()):
        number, bare = first and first + index, row.lstrip()
        name, equals, value = (bare if kind == "env" else row).partition("=")
        if not bare or (bare[0] == "#" and (kind == "env" or row[0] == "#")):
            continue
        if kind == "env" and (not equals or " " in name.strip()):
            if not re.fullmatch(r"\w+", bare.strip()):  # NAME alone: docker takes the value from its own environment
                script.unread.append(Unread(line=number, why="no NAME=VALUE"))
        elif name and equals:
            given = Assigned(name, value, value, number)
            before = script.always.pop(name, given)  # variables are in the order of their lines
            script.always[name], lost = (given, before) if kind == "env" else (before, given)
            if before.value != value and is_read(name):
                applied, at = script.always[name].value, f" in line {lost.line}" * bool(lost.line)
                which = "last" if kind == "env" else "first"
                note = finding("env.pair.shadowed/lines", name, applied, lost=lost.value, at=at, which=which)
                script.findings = [*(each for each in script.findings if each.subject != name), note]
    return script


def _read_inner(script: Script, source: str, depth: int) -> _Parts:
    """Return the results of nested texts: files that a script writes, JSON in an option."""
    parts: _Parts = []
    texts: set[str] = set()
    for inner in script.inner if depth < _LIMIT_DEPTH else ():
        if not pattern("judged").search(inner.text) or inner.text.strip() in texts:
            continue
        texts.add(inner.text.strip())
        kind = guess_kind(inner.text, inner.target)
        where = inner.target if "/" in inner.target or "." in inner.target else f"{inner.target} of line {inner.line}"
        where = f"line {inner.line}" if where == "option.json" else where
        where = source if source.endswith(where) else f"{source} > {where}"  # a ConfigMap's key names its file
        inner_parts: _Parts = []
        with contextlib.suppress(EnvironmentTextError):  # its lines are reported below
            inner_parts = _read(inner.text, "other" if kind == "log" else kind, depth + 1, inner.line)[1]
        parts += [(f"{where} > {place}" if kind in _DOCUMENTS and place != "document" else where, each)
                  for place, each in inner_parts]  # fmt: skip
        is_read = any(settings for _, each in inner_parts for settings in each.settings())
        if not is_read and not inner.target.endswith((".txt", ".log", ".out", ".err")):  # those are for a reader
            script.unread += _find_unread(inner.text, set(), SETS, f"a setting inside {inner.target}", inner.line)
    return parts


def _environments(source: str, script: Script, used: frozenset[str], all_reduce: bool) -> Iterator[NamedEnvironment]:
    """Yield the unconditional environment, then the complete environment of each launch or condition."""
    names = {name for settings in script.settings() for name in settings}
    loose = {name: each.raw for name, each in script.loose.items() if is_judged(name) and name not in used}
    findings = tuple(script.findings)
    for label, way in (("", Settings()), *script.ways):
        both = script.always | way
        variables = {name: each for name, each in both.items() if is_judged(name) or name in JOB_SIZE}
        if not any(map(is_judged, [*variables, *loose])):
            continue
        yield NamedEnvironment(
            source=", ".join(filter(None, (source, label))), place=source,
            environment={name: each.value for name, each in variables.items() if OPEN not in each.value},
            unresolved={name: each.raw.replace(OPEN, "...") for name, each in variables.items() if OPEN in each.value},
            unexported=loose, used=used, also_set=frozenset(names - {*script.loose}), findings=findings,
            lines={name: (variables.get(name) or script.loose[name]).line for name in (*loose, *variables)},
            only_all_reduce=all_reduce,
        )  # fmt: skip
        loose, findings = {}, ()


def guess_kind(text: str, name: str = "") -> str:
    """Return the format of a text, recognised from the file name first, then from the text."""
    if re.match(r"[A-Za-z_][^\s\0=]*=[^\0]*\0", text):  # /proc/PID/environ; another file with a NUL is binary
        return "process"
    by_name = _first(_PATTERNS["by_name"], name)
    if by_name and (by_name, text[:2]) != ("env", "#!") and (by_name != "json" or text.lstrip().startswith(("{", "["))):
        return by_name
    if kind := _first(_PATTERNS["surely"], text):
        return kind
    foreign = _first(_PATTERNS["foreign"], text)
    if foreign == "Markdown" or (foreign and not pattern("exports").search(text)):
        return "other"
    return _first(_PATTERNS["looks"], text) or ("shell" if pattern("mixed").search(text) else "env")


def _first(patterns: Mapping[str, str], text: str) -> str:
    return next((kind for kind, pattern in patterns.items() if re.search(pattern, text)), "")

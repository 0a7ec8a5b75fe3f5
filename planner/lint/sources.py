"""Environments wherever they are written: a process, an env file, a script, a manifest, a Dockerfile, code, a log.

Specification: proc(5) environ; docker --env-file; NCCL src/misc/param.cc setEnvFile (nccl.conf). The other forms:
`lint_shell`, `lint_documents`, `lint_code`. A text in which nothing is found is an error that says what it looks like.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from planner.lint.code import read_dockerfile, read_python, read_systemd
from planner.lint.documents import DocumentError, form, parse, read_documents
from planner.lint.pairs import JOB_SIZE
from planner.lint.shell import Assigned, Script, is_csh, lines_of, read_shell, sbatch_directives
from probes.api import Finding, Snapshot
from probes.hostinfo.probe import HostinfoFacts

KINDS = (
    "env", "shell", "conf", "pod", "yaml", "json", "toml", "dockerfile", "systemd", "python", "markdown", "log",
    "process",
)  # fmt: skip
FORMS: Mapping[str, str] = {
    "env": "env file", "shell": "shell script", "conf": "nccl.conf", "toml": "TOML", "dockerfile": "Dockerfile",
    "systemd": "systemd unit", "python": "Python", "markdown": "Markdown", "log": "NCCL log", "process": "process",
}  # fmt: skip
_LIMIT_CHARACTERS = 8 << 20  # an environment or a manifest is kilobytes; a log is cut by its own reader
_LIMIT_SCRIPT = 1 << 20  # of what is taken apart sign by sign
_LIMIT_DEPTH = 4  # texts in texts
_LIMIT_SCOPES = 200

# What the lint judges, misspelt names included; everything else of an environment (tokens, keys) is not even kept.
_JUDGED = re.compile(
    r"^[ \t]*(?:export\s+)?(?:TORCH_)?NCCL_|^(?:TORCH|GLOO|PYTORCH|FI|OFI|RDMAV|PET|CUDA|OMP|RCCL|UCX)_", re.IGNORECASE
)
_YAML_HINT = re.compile(
    r"^[ \t]*(?:-\s+)?(?:apiVersion|kind|spec|containers|env|envs|metadata|template|services|environment|resources"
    r"|env_vars|runtime_env|values)\s*:",
    re.MULTILINE,
)
_SHELL_HINT = re.compile(
    r"^#!.*\b(?:ba|z|da|k|c|tc|fi)?sh\b|^[ \t]*(?:export|declare|typeset|setenv|set\s+-\w*x)\s|(?:^|\s)-x\s+[A-Z]+_"
    r"|\b(?:mpirun|mpiexec|srun|torchrun|sbatch|docker\s+run|podman\s+run|singularity|apptainer)\b|^#SBATCH\s"
    r"|^[ \t]*(?:if|for|case)\s.*(?:then|do|in)\b|^[ \t]*(?:[A-Z_]+=\S*[ \t]+)+(?:python|bash|\./)"
    r"|\bbash\s+-\w*c\b|\bnsys\b",
    re.MULTILINE,
)
_PYTHON_HINT = re.compile(r"\bos\.(?:environ|putenv)\b|^(?:import|from)\s+\w+|^[ \t]*def\s+\w+\(", re.MULTILINE)
_DOCKER_HINT = re.compile(r"^[ \t]*FROM\s+\S+(?:\s+AS\s+\S+)?[ \t]*$|^[ \t]*ENV\s+\w+[=\s]", re.MULTILINE)
_SYSTEMD_HINT = re.compile(r"^\[(?:Service|Unit|Container)\][ \t]*$", re.MULTILINE)
_TOML_HINT = re.compile(r"^\[[\w.\"-]+\][ \t]*$", re.MULTILINE)
_FENCE = re.compile(
    r"^[ \t]*(?P<mark>`{3,8}|~{3,8})[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)(?:^[ \t]*(?P=mark)[ \t]*$|\Z)",
    re.M | re.S,
)
_NAMED_ANYWHERE = re.compile(r"\b(?:TORCH_)?NCCL_[A-Z0-9_]{2,}\b")
# What else names NCCL's variables and is not read: the error says which it is.
_UNREAD: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("Terraform or HCL", re.compile(r"^[ \t]*(?:resource|variable|locals|module|job|task)\b[^\n]*\{", re.MULTILINE)),
    ("C or C++", re.compile(r"^[ \t]*#include\s*[<\"]", re.MULTILINE)),
    ("Lua", re.compile(r"^[ \t]*(?:setenv|prepend_path)\s*\(|^[ \t]*local\s+\w+\s*=", re.MULTILINE)),
    ("a patch", re.compile(r"^@@ -\d+", re.MULTILINE)),
    ("XML or HTML", re.compile(r"^[ \t]*<[?!a-zA-Z]")),
    ("Java, Go, Rust or JavaScript", re.compile(r"^[ \t]*(?:package|func|fn|public|const|let)\s", re.MULTILINE)),
)


class EnvironmentTextError(ValueError):
    """A text that cannot be read as the kind it was said to be, or in which no variable was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEnvironment:
    """One environment and where it stands."""

    source: str  # "env file", "nccl.conf", "TrainJob/sft trainer", "shell script, if [ ... ]", "log"
    environment: dict[str, str]
    form: str = ""
    unresolved: dict[str, str] = field(default_factory=dict)  # set from elsewhere: name to how it is written
    unexported: dict[str, str] = field(default_factory=dict)  # shell variables that no program sees
    used: frozenset[str] = frozenset()  # names that the script itself reads
    lines: dict[str, int] = field(default_factory=dict)  # where each name is set last
    base: NamedEnvironment | None = None  # what holds where this environment's condition does not
    names: tuple[str, ...] = ()  # those that this one sets itself
    findings: tuple[Finding, ...] = ()  # about the text itself, whatever NCCL makes of its values


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All environments of one text, and what they were read as."""

    form: str
    environments: tuple[NamedEnvironment, ...]
    files: tuple[str, ...] = ()  # named in the text and not read: env files, ConfigMaps of elsewhere
    nodes: int | None = None  # of the job, where the text says so

    def names(self) -> tuple[str, ...]:
        """The variables found, each once."""
        found = {
            name
            for each in self.environments
            for name in (*each.environment, *each.unresolved, *each.unexported)
            if name not in JOB_SIZE
        }
        return tuple(sorted(found))


def read_environment(text: str, kind: str | None = None, name: str = "") -> tuple[NamedEnvironment, ...]:
    """Every environment in a text; without `kind` it is recognised by its looks and its file's name.

    Only variables that concern communication are kept: the rest may hold secrets.
    """
    return read_text(text, kind, name).environments


def read_text(text: str, kind: str | None = None, name: str = "") -> Reading:
    """The same with the form it was read as. Raises EnvironmentTextError."""
    if len(text) > _LIMIT_CHARACTERS:
        raise EnvironmentTextError(
            f"{len(text)} characters: more than {_LIMIT_CHARACTERS}, no environment is that large"
        )
    text = text.replace("\r\n", "\n")
    guessed = kind or guess_kind(text, name)
    if guessed not in KINDS:
        raise EnvironmentTextError(f"kind {guessed!r}: must be one of {', '.join(KINDS)}")
    if kind is not None:
        return _reading(text, kind)
    by_looks = guess_kind(text)
    try:
        found = _reading(text, guessed)
    except EnvironmentTextError:
        other = _otherwise(text, by_looks) if by_looks != guessed else None
        if other is None:
            raise
        return other
    if not found.names() and by_looks != guessed:  # the file's name said something else than its text
        return _otherwise(text, by_looks) or found
    return found


def _otherwise(text: str, kind: str) -> Reading | None:
    """The text read as another kind, where that finds something."""
    try:
        found = _reading(text, kind)
    except EnvironmentTextError:
        return None
    return found if found.names() else None


def _reading(text: str, kind: str) -> Reading:
    if kind not in ("env", "conf", "log", "process") and len(text) > _LIMIT_SCRIPT:
        raise EnvironmentTextError(f"{len(text)} characters: more than the {_LIMIT_SCRIPT} that are read of a {kind}")
    title, parts, files = _read(text, kind, 0)
    own = _own(text)
    environments = tuple(each for source, script in parts for each in _environments(source, script, title, own))
    return Reading(
        form=title, environments=environments, files=tuple(dict.fromkeys(files)),
        nodes=None if kind == "markdown" else _nodes(text),  # a page tells of several jobs
    )  # fmt: skip


_USED = re.compile(r"\$[({]?\s*\{?\s*(?:env\.)?([A-Za-z_]\w*)")


def _own(text: str) -> frozenset[str]:
    """Names that the text itself reads, other than to hand on their own value (`A=${A:-1}`)."""
    found = set()
    for match in _USED.finditer(text):
        before = text[max(0, match.start() - len(match[1]) - 2) : match.start()].rstrip("\"'")
        if not before.endswith(f"{match[1]}="):
            found.add(match[1])
    return frozenset(found)


# torchrun --nnodes, Slurm -N, TrainJob, PyTorchJob and MPIJob, Ray, LeaderWorkerSet, Indexed Job
_NODES = re.compile(
    r"--nnodes[= ](?:\d+:)?(\d+)\b|^#SBATCH\s+(?:-N\s*|--nodes[= ])(\d+)[ \t]*$|--num[-_]nodes[= ](\d+)\b"
    r"|^[ \t]*num_?[nN]odes\s*:\s*(\d+)[ \t]*$|^[ \t]*Worker:\s*\n\s*replicas:\s*(\d+)|\bsrun\b[^\n]*\s-N\s*(\d+)\b",
    re.MULTILINE,
)


def _nodes(text: str) -> int | None:
    """The most nodes that a launcher or an object in the text asks for; None where none says."""
    found = [int(number) for match in _NODES.findall(text) for number in match if number]
    return max(found) if found else None


def why_nothing(text: str, reading: Reading) -> str:
    """The sentence for a text in which no variable was found."""
    lines = [number for number, row in enumerate(text.splitlines(), start=1) if _NAMED_ANYWHERE.search(row)]
    if not lines:
        return f"no variable of NCCL, PyTorch's process groups or their plugins in it; it was read as: {reading.form}"
    looks = next((what for what, pattern in _UNREAD if pattern.search(text)), "")
    where = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
    count = f"{len(lines)} lines name" if len(lines) > 1 else "1 line names"
    like = f", and looks like {looks}" if looks else ""
    return (
        f"{count} NCCL's variables (line {where}), and none sets one in a form that is read; it was "
        f"read as: {reading.form}{like}. Forms that are read: {', '.join(KINDS)} (--kind)"
    )


_Parts = list[tuple[str, Script]]


def _read(text: str, kind: str, depth: int) -> tuple[str, _Parts, list[str]]:
    """The form in words, each place's script, and files that it names."""
    title = FORMS.get(kind, kind)
    if kind in ("pod", "yaml", "json", "toml"):
        return _documents(text, "yaml" if kind == "pod" else kind, depth)
    if kind == "markdown":
        return _markdown(text, depth)
    script = _script(text, kind)
    if kind == "shell":
        if is_csh(text):
            title = "C shell script"
        elif re.search(r"^#SBATCH\s", text, re.MULTILINE):
            title = "Slurm batch script"
    parts: _Parts = [({"process": "process", "log": "log"}.get(kind, title), script)]
    parts += _inner(script, title, depth)
    return title, parts, script.files


def _script(text: str, kind: str) -> Script:
    match kind:
        case "process":
            return _plain(_pairs(text.split("\0")))
        case "env":
            return _plain(_env_file(text))
        case "conf":
            return _plain(_nccl_conf(text))
        case "log":
            return _plain({name: (value, 0) for name, value in _log(text).items()})
        case "dockerfile":
            return read_dockerfile(text)
        case "systemd":
            return read_systemd(text)
        case "python":
            return read_python(text)
    script = Script()
    for number, words in sbatch_directives(text):
        found = read_shell("sbatch " + words, line=number)
        script.assigned += [
            Assigned(name=each.name, value=each.value, raw=each.raw, line=number) for each in found.assigned
        ]
        script.files += found.files
    found = lines_of(read_shell(text))
    script.assigned += found.assigned
    script.inner += found.inner
    script.files += found.files
    script.used |= found.used
    return script


def _plain(pairs: Mapping[str, tuple[str, int]]) -> Script:
    script = Script()
    for name, (value, line) in pairs.items():
        script.assigned.append(Assigned(name=name, value=value, raw=value, line=line))
    return script


def _documents(text: str, kind: str, depth: int) -> tuple[str, _Parts, list[str]]:
    try:
        documents = parse(text, kind)
        places = read_documents(documents)
    except DocumentError as error:
        raise EnvironmentTextError(str(error)) from None
    title = form(documents, kind)
    parts: _Parts = []
    files: list[str] = []
    for place in places:
        parts.append((place.source, place.script))
        parts += _inner(place.script, place.source, depth)
        files += place.script.files
    return title, parts, files


def _markdown(text: str, depth: int) -> tuple[str, _Parts, list[str]]:
    """Each fenced or indented block by its own looks."""
    parts: _Parts = []
    files: list[str] = []
    for number, (language, body) in enumerate(_blocks(text), start=1):
        if depth >= _LIMIT_DEPTH or not _JUDGED_ANYWHERE.search(body):
            continue
        kind = _LANGUAGES.get(language) or guess_kind(body)
        if kind == "markdown":
            continue
        if kind == "shell":
            body = re.sub(r"^[ \t]*[$#>]\s+(?=\w)", "", body, flags=re.MULTILINE)
        try:
            title, found, named = _read(body, kind, depth + 1)
        except EnvironmentTextError:
            continue
        parts += [
            (f"block {number} ({title}){'' if source == title else ' ' + source}", each) for source, each in found
        ]
        files += named
    return "Markdown", parts, files


_LANGUAGES = {
    "bash": "shell", "sh": "shell", "shell": "shell", "console": "shell", "yaml": "yaml", "yml": "yaml", "json": "json",
    "toml": "toml", "python": "python", "py": "python", "dockerfile": "dockerfile",
}  # fmt: skip
_INDENTED = re.compile(r"(?:\A|\n[ \t]*\n)((?:(?: {3,}|\t)[^\n]*(?:\n|\Z)|[ \t]*\n)+)")


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Blocks of code of Markdown and reStructuredText with their languages: fenced ones, then indented ones."""
    rest = text
    if not re.search(r"^\.\. \w[\w-]*::", text, re.MULTILINE):  # there ~~~ underlines a title
        for match in _FENCE.finditer(text):
            yield match["language"].lower(), textwrap.dedent(match["body"])
        rest = _FENCE.sub("\n", text)
    for match in _INDENTED.finditer(rest):
        yield "", textwrap.dedent(match[1])


_JUDGED_ANYWHERE = re.compile(r"NCCL_|\b(?:FI|OFI|GLOO|RCCL|UCX)_[A-Z]")


def _inner(script: Script, source: str, depth: int) -> _Parts:
    """Texts inside: what a script writes into a file, JSON in an option."""
    parts: _Parts = []
    for inner in script.inner if depth < _LIMIT_DEPTH else ():
        if not _JUDGED_ANYWHERE.search(inner.text):
            continue
        kind = guess_kind(inner.text, inner.target)
        if kind == "log":
            continue
        try:
            _title, found, _files = _read(inner.text, kind, depth + 1)
        except EnvironmentTextError:
            continue
        where = inner.target if "/" in inner.target or "." in inner.target else f"{inner.target} of line {inner.line}"
        if where in ("x.py", "string.sh", "option.json"):
            where = f"line {inner.line}" if inner.line else "code"
        parts += [(f"{source}, {where}", each) for _inside, each in found]
    return parts


def _environments(source: str, script: Script, title: str, own: frozenset[str]) -> Iterable[NamedEnvironment]:
    """What holds always, then each condition or command with what it sets besides."""
    judged = [each for each in script.assigned if _JUDGED.search(each.name) or each.name in JOB_SIZE]
    if not any(_JUDGED.search(each.name) for each in judged):
        return
    exported = {each.name for each in judged if each.exported}
    loose = {each.name: each.raw for each in judged if not each.exported and each.name not in exported | own}
    base, scopes = _scopes(judged)
    always = NamedEnvironment(
        source=source, form=title, environment=base.environment, unresolved=base.unresolved,
        unexported={} if title == "Markdown" else loose,
        lines=base.lines, names=tuple(base.lines), used=own, findings=tuple(script.findings),
    )  # fmt: skip
    live = [(name, scope) for name, scope in scopes.items() if scope.lines or scope.gone][:_LIMIT_SCOPES]
    if base.lines or always.unexported:
        yield always
    elif len(live) == 1:
        name, scope = live[0]
        yield NamedEnvironment(
            source=source if name.startswith("the command") else f"{source}, {name}", form=title,
            environment=scope.environment, unresolved=scope.unresolved, lines=scope.lines, names=tuple(scope.lines),
            used=own,
        )  # fmt: skip
        return
    yield from _each_besides(always, source, live)


def _each_besides(always: NamedEnvironment, source: str, live: list[tuple[str, _Scope]]) -> Iterable[NamedEnvironment]:
    """Each condition or command that sets something else than the ones before it."""
    seen: set[tuple[tuple[str, str], ...]] = set()
    for name, scope in live:
        adds = {key: value for key, value in scope.environment.items() if always.environment.get(key) != value}
        asks = {key: raw for key, raw in scope.unresolved.items() if key not in always.lines}
        key = tuple(sorted((*adds.items(), *asks.items(), *((gone, "") for gone in scope.gone))))
        if key and key not in seen:
            seen.add(key)
            yield _besides(always, f"{source}, {name}", scope, (*adds, *asks))


def _scopes(judged: list[Assigned]) -> tuple[_Scope, dict[str, _Scope]]:
    """What is exported for all, and under each condition or for each command."""
    base = _Scope()
    scopes: dict[str, _Scope] = {}
    settled = _settled(judged)
    for each in judged:
        if not each.exported:
            continue
        if each.scope and each.name not in settled:
            scopes.setdefault(each.scope, _Scope()).take(each)
        else:
            base.take(each)
            for scope in scopes.values():  # what is set for all afterwards ends what a condition set before
                scope.drop(each.name)
    return base, scopes


def _besides(always: NamedEnvironment, source: str, scope: _Scope, names: tuple[str, ...]) -> NamedEnvironment:
    """What holds always with what one condition or command sets besides."""
    ended = {*scope.unresolved, *scope.gone}
    kept = {each: value for each, value in always.environment.items() if each not in ended}
    return NamedEnvironment(
        source=source, form=always.form, environment={**kept, **scope.environment},
        unresolved={**always.unresolved, **scope.unresolved}, lines={**always.lines, **scope.lines},
        base=always, names=names, used=always.used,
    )  # fmt: skip


_OF_A_COMMAND = re.compile(r"(?:the command of line|here-document of line|\w+ of line|line) \d+")


def _settled(judged: list[Assigned]) -> set[str]:
    """Names that commands set for themselves, without a condition, and nothing sets otherwise: they hold throughout."""
    found: dict[str, set[str | None]] = {}
    for each in judged:
        if each.exported:
            plain = all(_OF_A_COMMAND.fullmatch(part) for part in each.scope.split("; ") if part)
            found.setdefault(each.name, set()).add(each.value if plain and not each.unset else f"\0{each.scope}")
    return {
        name for name, values in found.items() if len(values) == 1 and not any((v or "")[:1] == "\0" for v in values)
    }


class _Scope:
    """What one condition or command sets."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.unresolved: dict[str, str] = {}
        self.lines: dict[str, int] = {}
        self.gone: set[str] = set()

    def take(self, each: Assigned) -> None:
        """The last of several counts; what hands on the value it had changes nothing."""
        if each.unset:
            self.drop(each.name)
            if each.scope:
                self.gone.add(each.name)
            return
        itself = re.fullmatch(r"\$\{?" + re.escape(each.name) + r"\}?", each.raw.strip("\"'"))
        if each.value is None and itself and each.name in self.environment:
            return
        self.drop(each.name)
        self.lines[each.name] = each.line
        if each.value is None:
            self.unresolved[each.name] = each.raw
        else:
            self.environment[each.name] = each.value

    def drop(self, name: str) -> None:
        """Forgets a name."""
        for mapping in (self.environment, self.unresolved):
            mapping.pop(name, None)
        self.lines.pop(name, None)


def recorded_environments(snapshot: Snapshot) -> tuple[NamedEnvironment, ...]:
    """What the scan itself saw: the variables of its process, and nccl.conf."""
    facts = snapshot.facts(HostinfoFacts)
    if facts is None:
        return ()
    found = (("process", facts.nccl_environment), ("nccl.conf", facts.nccl_conf))
    return tuple(
        NamedEnvironment(source=f"{snapshot.hostname} {source}", environment=dict(environment))
        for source, environment in found
        if environment
    )


_BY_NAME: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?:^|/)\.?nccl\.conf$"), "conf"),
    (re.compile(r"(?:^|/)(?:Docker|Container)file[^/]*$|\.(?:docker|container)file$", re.IGNORECASE), "dockerfile"),
    (re.compile(r"\.(?:service|socket|container)$|/[^/]+\.service\.d/"), "systemd"),
    (re.compile(r"\.py$"), "python"),
    (re.compile(r"\.toml$"), "toml"),
    (re.compile(r"\.json$"), "json"),
    (re.compile(r"\.ipynb$"), "json"),
    (re.compile(r"\.ya?ml(?:\.(?:j2|tmpl|tpl|template|in))?$"), "yaml"),
    (re.compile(r"\.(?:sh|bash|zsh|csh|tcsh|fish|sbatch|slurm|sub|qsub|pbs|lsf)$"), "shell"),
    (re.compile(r"(?:^|/)\.?(?:bashrc|profile|bash_profile)$"), "shell"),
    (re.compile(r"\.(?:md|markdown|rst)$"), "markdown"),
    (re.compile(r"/etc/environment$"), "env"),
)  # fmt: skip

_BY_TEXT: tuple[tuple[re.Pattern[str], str], ...] = (
    (_PYTHON_HINT, "python"),
    (_SHELL_HINT, "shell"),
    (_TOML_HINT, "toml"),
    (re.compile(r"^[ \t]*ENV\s+\w+[=\s]", re.MULTILINE), "dockerfile"),
)


def guess_kind(text: str, name: str = "") -> str:
    """What a text looks like; its file's name comes first where it tells."""
    if "\0" in text:
        return "process"
    by_name = next((kind for pattern, kind in _BY_NAME if pattern.search(name)), None)
    if by_name == "json" and not text.lstrip().startswith(("{", "[")):
        by_name = None
    if by_name is not None:
        return by_name
    if "NCCL INFO" in text or "NCCL WARN" in text or "NCCL ATTN" in text:
        return "log"
    if text.startswith("#!"):
        return "python" if "python" in text.split("\n", 1)[0] else "shell"
    if text.lstrip().startswith("{") and _is_json(text):
        return "json"
    if _FENCE.search(text) and re.search(r"^#{1,4}[ \t]+\S|^\S[^\n]*[a-z] [a-z]", text, re.MULTILINE):
        return "markdown"
    if _SYSTEMD_HINT.search(text):
        return "systemd"
    if re.search(r"^FROM\s+\S+", text, re.MULTILINE) and _DOCKER_HINT.search(text):
        return "dockerfile"
    if _YAML_HINT.search(text) or text.lstrip().startswith(("{", "[{", '["')) or _yaml_like(text):
        return "pod"
    for hint, kind in _BY_TEXT:
        if hint.search(text):
            return kind
    return "env" if not _mixed(text) else "shell"


def _is_json(text: str) -> bool:
    return bool(re.match(r"\s*\{\s*(?:\"|\})", text))


def _yaml_like(text: str) -> bool:
    """Mappings and lists with NCCL's names in them, whatever the keys around."""
    return bool(
        re.search(
            r"^[ \t]*(?:-\s*)?(?:name:\s*[\"']?)?(?:TORCH_)?NCCL_\w+[\"']?\s*(?::\s|$)|^[ \t]+-[ \t]+[\"']?NCCL_\w+=",
            text,
            re.M,
        )
    )


def _mixed(text: str) -> bool:
    """Whether there is a line that is neither empty, a comment nor an assignment, and one whose value needs a shell."""
    rows = [row.strip() for row in text.splitlines()]
    rows = [row for row in rows if row and not row.startswith("#")]
    commands = any("=" not in row.split(" ", 1)[0] for row in rows)
    resolved = any(re.match(r"\w+=.*\$[\w({]", row) for row in rows)
    return bool(rows) and (resolved or (commands and any(re.search(r"NCCL_\w+=", row) for row in rows)))


def _pairs(entries: list[str]) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if equals and name:
            found.setdefault(name, (value, 0))  # getenv(3) finds the first of two
    return found


def _env_file(text: str) -> dict[str, tuple[str, int]]:
    """No quoting, no export: the value is all that follows the first `=`."""
    found: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.lstrip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = stripped.partition("=")
        if equals:
            found[name] = (value, number)  # docker takes the last of two
    return found


def _nccl_conf(text: str) -> dict[str, tuple[str, int]]:
    """As NCCL reads it: nothing is trimmed, `#` comments only in the first column, the first of two names wins."""
    found: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, (value, number))
    return found


def _log(text: str) -> dict[str, str]:
    from collectives.nccl_log.evidence import read

    return dict(read(text.splitlines()).environment)

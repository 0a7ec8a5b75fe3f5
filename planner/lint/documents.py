"""Read variables from YAML, JSON and TOML (Kubernetes, Helm, Compose, maps of variables), and from Dockerfiles.

In a document a variable is recognised by its key path (`env`, `environment`, `env_vars`, ...) or, at any other place,
by its name. In a Dockerfile ENV sets it, and RUN may write it into files.
Specification: Kubernetes EnvVar and EnvFromSource; the Compose specification (environment in both forms,
interpolation). JSON and TOML have the same structures. Dockerfile reference (both forms of ENV, ARG, stages);
for here-documents BuildKit's frontend/dockerfile/parser: each unquoted word of RUN, COPY and ADD that
begins with `<<`.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from contracts.finding import Status
from contracts.yaml_text import YamlTextError, load_all
from planner.lint.findings import finding
from planner.lint.script import (
    NAME,
    NAMED,
    OPEN,
    WORDS,
    Assigned,
    EnvironmentTextError,
    Inner,
    Script,
    Settings,
    Unread,
    is_judged,
    pattern,
)
from planner.lint.shell import expand, read_assignment, read_shell
from planner.lint.values import VALUES
from planner.nccl_env import is_read

_LIMIT_DEPTH = 60
_LIMIT_ALIASES = 1000
_MAX_BRANCHES = 8  # maximum number of texts of one template
_CONTINUES = r"\\[ \t]*\n(?:[ \t]*(?:#.*)?\n)*"  # the end of a line of a Dockerfile, and comments after it
_INSTRUCTION = re.compile(rf"[ \t]*(?:#.*|(?:([A-Za-z]+)[ \t]+)?((?:.*{_CONTINUES})*.*))\n?")
_INSTRUCTIONS = WORDS["documents"]["instructions"]
_ENV_FROM = {"secretRef": "Secret", "configMapRef": "ConfigMap"}


class Text(str):
    """A scalar, with the line of its first character. 0: a text of several lines that is no literal block (`|`)."""

    line = 0


class Plain(Text):
    """A scalar without quotes: another YAML reader may parse it as a number or a boolean."""


class _Texts(yaml.SafeLoader):
    """The loader that keeps every scalar as text: 022 does not become 18, and `on` does not become True."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Return the text, its line, and whether quotes mark it as a string."""
        text, style = super().construct_scalar(node), getattr(node, "style", "")
        value = Plain(text) if style is None else Text(text)
        if style == "|" or "\n" not in value.strip():
            value.line = node.start_mark.line + (2 if style in ("|", ">") else 1)
        return value

    yaml_implicit_resolvers = {  # noqa: RUF012  # as PyYAML's classes carry it
        "<": [("tag:yaml.org,2002:merge", re.compile(r"<<\Z"))]
    }


def _parse(text: str, kind: str, first: int) -> list[Any]:
    """Return the documents of YAML, JSON or TOML, whose first line is `first`. Raises EnvironmentTextError."""

    def make_loader(text: str) -> yaml.SafeLoader:
        loader = _Texts(text)
        loader.line = first - 1
        return loader

    try:
        if kind == "toml":
            return [tomllib.loads(text)]
        if kind == "json":
            return [json.loads(text)]
        filled = pattern("string_tag").sub(r"'\1'", pattern("tag").sub("", pattern("tag_with_value").sub(OPEN, text)))
        return load_all(filled, most_aliases=_LIMIT_ALIASES, make_loader=make_loader)
    except (YamlTextError, tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise EnvironmentTextError(str(error)) from None


def _remove_templates(text: str, first: int) -> tuple[list[str], list[Unread]]:
    """Remove Helm and Jinja templates: lines with only a template are dropped, values become unknown (OPEN).

    Returns a text with the first branch of each condition, and more until each branch is in one of them; and the
    lines with variables that are in none.
    """
    plain = re.sub(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    last: list[int] = []  # the last branch of each block
    inside: list[int] = []  # the enclosing blocks
    rows: list[tuple[str, dict[int, int]]] = []  # with the branch in each enclosing block
    for row in plain.splitlines():
        step = pattern("template_step").match(row.strip())
        if step and step[1].startswith("end"):
            inside = inside[:-1]
        elif step and step[1] in ("else", "elif") and inside:
            last[inside[-1]] += 1
        elif step and len(inside) < _LIMIT_DEPTH and not pattern("closed_template").search(step[2]):
            inside = [*inside, len(last)]
            last.append(0)
        drops = pattern("only_template").fullmatch(row.strip()) and not re.match(r".*:\s*\{\{", row)
        row = "" if drops else pattern("template").sub(OPEN, row)
        rows.append((row, {block: last[block] for block in inside}))
    texts: list[str] = []
    left = [(number, *row) for number, row in enumerate(rows, start=first)]
    while left and len(texts) < _MAX_BRANCHES:
        # Take the branches that have the first line that is in no text yet. Each other condition takes its next branch.
        taken = [left[0][2].get(block, min(len(texts), highest)) for block, highest in enumerate(last)]
        shown = [all(taken[block] == branch for block, branch in branches.items()) for _, branches in rows]
        texts.append("\n".join(row if shows else "" for (row, _), shows in zip(rows, shown, strict=True)))
        left = [each for each in left if each[1].strip() and any(taken[at] != branch for at, branch in each[2].items())]
    reason = f"only {_MAX_BRANCHES} branches of the template are read"
    return texts or [""], [Unread(line=number, why=reason) for number, row, _ in left if NAMED.search(row)]


def read_documents(text: str, kind: str, first: int) -> tuple[str, dict[str, Script]]:
    """Return the name of the format, and the variables of each place in the documents, by the place's name.

    Settings that only a later branch of a template has are conditional. Raises EnvironmentTextError.
    """
    is_template = kind == "yaml" and re.search(r"\{[{%]", text) is not None
    texts, unread = _remove_templates(text, first) if is_template else ([text], [])
    branches = [_parse(each, kind, first) for each in texts]
    scripts: dict[str, Script] = {}
    for number, documents in enumerate(branches):
        for source, script in _Walk(documents, text).found.items():
            before = scripts.setdefault(source, Script() if number else script)
            if number:
                changed = {name: each for name, each in script.always.items() if each != before.always.get(name)}
                before.ways += [(f"branch {number + 1} of the template", changed)] if changed else []
                for part in ("ways", "inner", "findings", "unread", "files"):
                    listed = getattr(before, part)
                    listed.extend(each for each in getattr(script, part) if each not in listed)
    if unread:
        scripts.setdefault("document", Script()).unread += unread
    return _name_form(branches[0], kind), scripts


def _compare_replicas(scripts: Mapping[str, Script], *, over_ssh: bool) -> None:
    """Add a finding for each variable that pods of a job must share, and do not, or that no rank gets (`over_ssh`)."""
    launched = {name for place, script in scripts.items() if " Launcher " in place for name in script.always}
    for script in [each for place, each in scripts.items() if over_ssh and re.match(r"MPIJob/\S+ Worker ", place)]:
        lost = [each for name, each in script.always.items() if is_read(name) and name not in launched]
        script.findings += [finding("env.name.unexported/worker", each.name, each.raw) for each in lost]
    groups: dict[tuple[str, str], list[Script]] = {}
    for place, script in scripts.items():
        if match := pattern("replicas").match(place):
            groups.setdefault((match[1], match[2]), []).append(script)
    for first, second in itertools.combinations(groups, 2):
        for group, other in ((first, second), (second, first)) if first[0] == second[0] else ():
            theirs = {name: each.value for sibling in groups[other] for name, each in sibling.always.items()}
            files = [file for each in groups[other] for file in each.files if not file.startswith("Secret ")]
            for script, name in itertools.product(groups[group], () if files else VALUES["names"]["same_on_all_ranks"]):
                value, its = script.always.get(name, Assigned(name)).value, theirs.get(name, "")
                # Two values are reported once. 0 is the default; the other pods of Volcano or a leader may have no rank
                only_here = value != "0" and name != "NCCL_BUFFSIZE" and group[0].startswith("PyTorchJob")
                reports = group == first if its else only_here
                if value and value.lower() != its.lower() and OPEN not in value + its and reports:
                    effect = f"have {name}={its}" if its else "do not set it"
                    script.findings.append(finding("env.pair.differs", name, value, other=other[1], theirs=effect))


def _name_form(documents: list[Any], kind: str) -> str:
    """Return the name of the format, such as "Kubernetes manifest"."""
    tops = [each for each in documents if isinstance(each, dict)]
    if any("apiVersion" in each or ("kind" in each and "metadata" in each) for each in tops):
        return "Kubernetes manifest"
    if any(isinstance(each.get("services"), dict) for each in tops):
        return "Compose file"
    return {"json": "JSON", "toml": "TOML"}.get(kind, "YAML")


class _Walk:
    """Collects variables from objects of any kind. Raises EnvironmentTextError if they are nested too deeply."""

    def __init__(self, documents: list[Any], text: str) -> None:
        self.found: dict[str, Script] = {}
        self._configs: dict[str, str] = {}  # place -> "ConfigMap NAME", or "service NAME" of a Compose file
        self._included: list[tuple[Script, str, str]] = []  # of each envFrom or `extends`: such a name, and its prefix
        self._references: list[tuple[Script, Assigned, dict[Any, Any]]] = []  # configMapKeyRef
        self._read_shell = cache(read_shell)  # a script with an anchor occurs several times
        self._compose = _name_form(documents, "") == "Compose file"
        self._kubernetes = any(isinstance(each, dict) and "kind" in each for each in documents)
        titles = Counter[str]()
        for document in filter(None, documents):
            titles[name := title(document)] += 1
            self._visit(document, f"{name} ({titles[name]})" if titles[name] > 1 else name, 0)
        self._take_configs()
        # Version 1 of MPIJob starts ranks with exec. A Worker may write its variables to a file that its sshd reads
        _compare_replicas(self.found, over_ssh="kubeflow.org/v2beta1" in text and "/environment" not in text)

    def _take_configs(self) -> None:
        """Add the values of ConfigMaps and extended services to places; `env` and a later `envFrom` override them."""
        configs = {name: self._at(place) for place, name in self._configs.items()}
        for script, each, reference in self._references:
            config = configs.get(f"ConfigMap {reference.get('name')}", Script())
            if script.always.get(each.name) is each and (entry := config.always.get(str(reference.get("key")))):
                script.always[each.name] = entry._replace(name=each.name)
        included = [each for each in self._included if each[1] in configs]
        for script, name, prefix in [*reversed(included), *included]:  # the base of a base may come before or after it
            entries = configs[name].always.items()
            added = {prefix + key: each._replace(name=prefix + key) for key, each in entries if NAME.match(key)}
            script.always = added | script.always
        for script, name, _ in reversed(included):
            script.findings += configs[name].findings
            script.files.remove(name)
        used = {name for _, name, _ in included if name.startswith("ConfigMap")}
        self.found = {place: each for place, each in self.found.items() if self._configs.get(place) not in used}

    def _visit(self, node: Any, source: str, depth: int, key: str = "") -> None:
        """Visit a node and its children; `source` is the name of its place."""
        if isinstance(node, str):
            self._text(node, source, key)
            return
        if depth > _LIMIT_DEPTH:
            raise EnvironmentTextError(f"more than {_LIMIT_DEPTH} levels are not read")
        if isinstance(node, list):
            self._list(node, source, depth, key)
        elif isinstance(node, dict):
            self._walk_mapping(node, source, depth, key)

    def _include(self, source: str, name: str, prefix: str = "") -> None:
        """Add the variables of another place later; it is a file that is not read if the text has no such place."""
        self._at(source).files.append(name)
        self._included.append((self._at(source), name, prefix))

    def _walk_mapping(self, node: dict[Any, Any], source: str, depth: int, key: str) -> None:
        if node.get("kind") == "ConfigMap" and isinstance(node.get("metadata"), dict):
            self._configs[source] = f"ConfigMap {node['metadata'].get('name')}"
        if key == "services" and self._compose:
            self._configs |= {f"{source} {name}": f"service {name}" for name in node}
        base = node.get("extends") if self._compose else None
        base = {"service": base} if isinstance(base, str) else base
        if isinstance(base, dict):
            self._include(source, str(base.get("file") or f"service {base.get('service')}"))
        for field, kind in _ENV_FROM.items() if key == "envFrom" else ():
            if isinstance(origin := node.get(field), dict):
                self._include(source, f"{kind} {origin.get('name')}", str(node.get("prefix") or ""))
        if self._kubernetes and key in WORDS["documents"]["containers"]:
            self._container(node, source)
        is_item = pattern("own").match(str(node.get("name"))) is not None  # of `env`, which a patch adds
        if is_item and isinstance(node.get("value"), str | int | float):
            self._take_entry(node, node["name"], source)
            return
        here, is_data = bool(pattern("place").fullmatch(key)), key == "data" and source in self._configs
        for name, value in node.items():
            if (key == "environment" and self._compose) or is_data:
                self._check_type(source, str(name), value)
            word = name if isinstance(name, str) else ""
            is_variable = pattern("own").match(word) or (here and NAME.match(word)) or (is_data and is_judged(word))
            if pattern("own").match(word) and isinstance(value, dict):
                self._add(source, word, value.get("value", value.get("default", OPEN)))
            elif is_variable and not isinstance(value, dict | list):
                is_inherited = self._compose and isinstance(value, Plain) and value in ("", "~", "null")
                self._add(source, word, f"${{{word}}}" if is_inherited else value, getattr(value, "line", 0))
            else:
                of_files = {"configMapGenerator": ("env", "envs")}.get(key, ("env_file",) * self._compose)
                if name in of_files:
                    files = [each.get("path", each.get("file")) if isinstance(each, dict) else each
                             for each in (value if isinstance(value, list) else [value])]  # fmt: skip
                    self._at(source).files += [str(each) for each in files if each]
                if is_data and "\n" not in scalar(value):  # a reference may give it another name
                    self._add(source, str(name), value)
                self._visit(
                    value, source if name in WORDS["documents"]["silent"] else f"{source} {name}", depth + 1, word
                )

    def _list(self, node: list[Any], source: str, depth: int, key: str) -> None:
        texts, here = [word for word in node if isinstance(word, str)], bool(pattern("place").fullmatch(key))
        if any("NCCL_" in word for word in texts):
            self._words(texts, source, here)
        for item in node:
            name = item.get("name") if isinstance(item, dict) else None
            name = name if isinstance(name, str) else title(item) if key == "items" and self._kubernetes else ""
            if pattern("own").match(name) or (here and NAME.match(name)):
                self._take_entry(item, name, source)
            elif not isinstance(item, str):
                self._visit(item, f"{source} {name}" if name else source, depth + 1, key)

    def _container(self, node: dict[Any, Any], source: str) -> None:
        """Check the `env` of a Kubernetes container: types that the API rejects, duplicates, order of references."""
        notes, env = self._at(source).findings, node["env"] if isinstance(node.get("env"), list) else []
        entries = [each for each in env if isinstance(each, dict) and isinstance(each.get("name"), str)]
        before: dict[str, str] = {}
        for entry in entries:
            name, text = entry["name"], "valueFrom" if "valueFrom" in entry else scalar(entry.get("value"))
            self._check_type(source, name, entry.get("value"))
            # envFrom may set the variable, and is evaluated before env
            used = pattern("reference").findall(text) if is_judged(name) and not node.get("envFrom") else ()
            gone = next((each for each in used if each not in before and not pattern("service").match(each)), None)
            if gone:
                later = "is set after it" if any(each["name"] == gone for each in entries) else "is not set"
                notes.append(finding("env.value.kind/reference", name, text, other=gone, when=later))
            if name in before and is_judged(name):
                status = Status.WARN if before[name] != text else Status.INFO
                notes.append(finding("env.pair.shadowed/twice", name, before[name], status=status, last=text))
            before[name] = text

    def _check_type(self, source: str, name: str, value: Any) -> None:
        """Report an unquoted value that Kubernetes or Compose does not read as a string."""
        text, reader = scalar(value), "Compose" if self._compose else "Kubernetes"
        kind = "a truth value" if pattern(f"truth_of_{reader}").fullmatch(text) else ""
        kind = "a number" if reader == "Kubernetes" and pattern("number").fullmatch(text) else kind
        if kind and isinstance(value, Plain | bool | int | float):
            text = text if is_judged(name) else "..."  # values of variables that are not checked may be secret
            note = finding("env.value.kind/untyped", name, text, text=text, kind=kind, reader=reader)
            self._at(source).findings.append(note)

    def _take_entry(self, item: dict[Any, Any], name: str, source: str) -> None:
        """Take an entry of a container's `env`."""
        if "valueFrom" not in item:
            self._add(source, name, item.get("value", item.get("default", "")))
        else:
            origin = item["valueFrom"]
            kind = next(iter(origin), "elsewhere") if isinstance(origin, dict) else "elsewhere"
            assigned = Assigned(name=name, value=OPEN, raw=f"valueFrom {kind}")
            self._at(source).set(assigned)
            if kind == "configMapKeyRef" and isinstance(origin[kind], dict):
                self._references.append((self._at(source), assigned, origin[kind]))

    def _words(self, texts: list[str], source: str, here: bool) -> None:
        """Take a list of strings: NAME=VALUE entries (any value if `here`), words of a command, lines of a script."""
        names = (word.partition("=")[0].rstrip() for word in texts)
        if all(map(NAME.match, names)) and (here or not re.search(r"\n|;|&&", " ".join(texts))):
            for word in texts:  # NAME alone: Compose takes its value from its own environment
                name, equals, value = word.partition("=")
                self._add(source, name, value if equals else f"${{{name}}}", getattr(word, "line", 0))
            return
        first, text = getattr(texts[0], "line", 0), "\n".join(texts)
        if not re.search(r"\s", texts[0]):  # words of one command, each on its line; else lines, as in `script:`
            text = ""
            for word in texts:
                gap = getattr(word, "line", 0) - first - text.count("\n")
                text += "\\\n" * gap + shlex.quote(word) + " "
        self._at(source).add(self._read_shell(text, line=first))

    def _text(self, text: str, source: str, key: str) -> None:
        """Take a string value that contains assignments, a script, a command line or another document."""
        if not pattern("script").search(text) or len(text) < 8:
            return
        line = getattr(text, "line", 0)
        rows = [row.strip().rstrip(";") for row in text.splitlines()]
        if pattern("place").fullmatch(key) and all(re.match(r"[A-Za-z_]\w*=|#|\Z", row) for row in rows):
            for number, row in enumerate(rows, start=line):
                self._add(source, *row.partition("=")[::2], line and number)
            return
        if key.endswith((".py", ".conf", ".yaml", ".yml", ".json", ".toml", ".env")) or "os.environ" in text:
            self._at(source).inner.append(Inner(text=text, target=key if "." in key else "x.py", line=line))
        elif pattern("document").search(text) and "<<" not in text:
            self._at(source).inner.append(Inner(text=text, target=f"{key or 'text'}.yaml", line=line))
        else:
            self._at(source).add(self._read_shell(text, line=line))

    def _add(self, source: str, name: str, value: Any, line: int = 0) -> None:
        text = scalar(value)
        expanded = expand(text) if "$" in text else text
        if pattern("outside").search(text):
            expanded = OPEN
        raw = text.replace(OPEN, "{{...}}")
        self._at(source).set(Assigned(name=name, value=expanded, raw=raw, line=line or getattr(value, "line", 0)))

    def _at(self, source: str) -> Script:
        return self.found.setdefault(source, Script())


def scalar(value: Any) -> str:
    """Return the value as the string that a program gets in its environment."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if isinstance(value, dict | list) or value in (None, "~", "null") else str(value)


def title(document: Any) -> str:
    """Return kind and name of an object, such as "Job/train"."""
    if not isinstance(document, dict):
        return "document"
    metadata = document.get("metadata")
    name = (metadata if isinstance(metadata, dict) else document).get("name")
    parts = (document.get("kind"), name if isinstance(name, str) else None)
    return "/".join(str(part) for part in parts if part).replace(OPEN, "...") or "document"


# -- Dockerfiles


def read_dockerfile(text: str) -> Script:
    """Return the variables of containers of the last stage, and the texts written into files. Reports unread lines."""
    script, stage, stages = Script(), Settings(), dict[str, Settings]()  # ENV (exported) and ARG
    arguments = stage  # of ARG instructions before the first stage
    for line, instruction, tail, document in _split_instructions(text, script):
        if instruction == "FROM":
            tail = re.sub(r"\$\{?(\w+)\}?", lambda m: arguments[m[1]].value if m[1] in arguments else m[0], tail)
            from_words = [word.lower() for word in tail.split() if not word.startswith("--")]
            name = from_words[2] if len(from_words) > 2 else str(len(stages))
            stage = stages[name] = dict(stages.get(from_words[0], {}) if from_words else stage)
        elif instruction in ("ENV", "ARG"):
            _set_variables(instruction, tail, line, stage)
        elif instruction in ("CMD", "ENTRYPOINT") and NAMED.search(tail):
            script.unread.append(Unread(line=line, why=f"a variable in {instruction}"))
        elif instruction == "RUN" or document:  # it may write files; variables that it exports do not outlive it
            command = re.sub(r"^(?:--\w+\S*\s*)+", "", tail).strip() if instruction == "RUN" else ""
            if command.startswith("<<") and (program := re.match(r"(?:#!(.*))?", document)):
                command = f"{program[1] or 'sh'} {command}"  # the document is a script
            command += f"\n{document}\n"
            inner = read_shell(command, before=stage.values(), line=line)
            script.inner += [one for one in inner.inner if one.target != "python" or one.text not in command]
            script.unread += inner.unread if NAMED.search(command) else []
    script.always = {name: each for name, each in stage.items() if each.exported}
    return script


def _set_variables(instruction: str, text: str, line: int, stage: Settings) -> None:
    """Take the variables of ENV (both forms) or ARG; references use the values before the instruction."""
    before = [variable._replace(exported=False) for variable in stage.values()]
    first, _, rest = text.replace("\\\n", "").strip().partition(" ")
    if instruction == "ENV" and "=" not in first:
        text = f'{first}="' + rest.strip().strip('"').replace('"', '\\"') + '"'
    for match in pattern("docker_word").finditer(text):
        word, word_line = match[0], line + text.count("\n", 0, match.start())
        alone = [Assigned(word, OPEN)] if NAME.match(word) else []  # `ARG NAME`
        for one in read_assignment(word, before, word_line) if "=" in word else alone:
            if instruction == "ENV" or one.name not in stage or ("=" in word and not stage[one.name].exported):
                stage[one.name] = one._replace(exported=instruction == "ENV")


def _split_instructions(text: str, script: Script) -> Iterator[tuple[int, str, str, str]]:
    """Yield line, name, arguments and here-documents of each instruction; report other lines as unread."""
    offset, line = 0, 1
    while offset < len(text) and (match := _INSTRUCTION.match(text, offset)):  # it matches every text
        first = line
        offset, line, name = match.end(), line + match[0].count("\n"), (match[1] or "").upper()
        if name not in _INSTRUCTIONS:
            if match[2] and match[2].strip():
                script.unread.append(Unread(line=first, why="not a Dockerfile instruction"))
            continue
        tail = re.sub(_CONTINUES, lambda each: "\\\n" * each[0].count("\n"), match[2]).strip()
        tail, document = tail if name == "ENV" else tail.replace("\\\n", ""), ""  # variables of ENV have lines
        for word in pattern("docker_word").findall(tail) if name in ("RUN", "COPY", "ADD") and "<<" in tail else ():
            if (here := pattern("docker_heredoc").match(word)) is None:
                continue
            tabs = r"\t*" if here[1] else ""
            end = re.compile(rf"^{tabs}{re.escape(here[3])}(?:\n|\Z)", re.MULTILINE).search(text, offset)
            if end is None:
                script.unread.append(Unread(line=first, why=f"the here-document {here[3]} has no end"))
                continue
            document += "" if name == "RUN" else f"cat > {tail.rpartition(' ')[2]} {word}\n"
            document += text[offset : end.end()]
            line, offset = line + text.count("\n", offset, end.end()), end.end()
        yield first, name, tail, document

"""Variables in YAML, JSON and TOML of any schema: Kubernetes objects, Helm values, Compose, NeMo, Ray, SkyPilot, ECS.

A variable is recognised by its place (`env`, `environment`, `env_vars`, ...) or, wherever it stands, by its name.
Specification: Kubernetes EnvVar and EnvFromSource; the Compose specification (environment in both forms,
interpolation); JSON and TOML hold the same shapes.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from contracts.yaml_text import YamlTextError, load_all
from planner.lint.shell import Assigned, Inner, Script, expand, lines_of, read_shell, read_words
from planner.lint.values import finding
from probes.api import Finding, Severity

_LIMIT_NODES = 200_000
_LIMIT_DEPTH = 60
_LIMIT_ALIASES = 1000

_PLACES = re.compile(
    r"(?:extra|container|remote|worker|global|common|pod|additional|job|train(?:ing)?)?[_-]?"
    r"(?:envs?|envvars?|environment|environment[_-]?variables?|env[_-]vars?|env[_-]variables?|env[_-]?dict|variables)\Z",
    re.IGNORECASE,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_OWN = re.compile(r"(?:TORCH_)?NCCL_[A-Z0-9_]+\Z")
_OWN_SETTING = re.compile(r"(?:TORCH_)?NCCL_[A-Z0-9_]+=")
_OPEN = "\ue000"  # stands for {{ ... }} of a template, whose value is not known
# CloudFormation's and other tags: what they put in is not known; the rest are removed and their values kept.
_OTHERS_VALUE = re.compile(r"(?<=[\s\[,])!(?:Ref|GetAtt|ImportValue|FindInMap|env|vault|secret)\s+[^\s#\[\],]+")
_TAG = re.compile(r"(?<=[\s\[,])![A-Za-z][\w.:/-]*(?=\s)")
_SCRIPT = re.compile(r"\b(?:TORCH_)?NCCL_[A-Z0-9_]+(?:=|:\s|\s+\S)|os\.environ")
_DOCUMENT_INSIDE = re.compile(
    r"^[ \t]*(?:-\s+)?(?:name:\s*)?[\"']?(?:TORCH_)?NCCL_[A-Z0-9_]+[\"']?(?::\s|\s*$)", re.MULTILINE
)


class DocumentError(ValueError):
    """A text that is not the document it looks like."""


@dataclass(slots=True)
class Place:
    """The variables of one container, service or section."""

    source: str
    script: Script = field(default_factory=Script)


def parse(text: str, kind: str) -> list[Any]:
    """The documents of a YAML, JSON or TOML text; templates keep their shape. Raises DocumentError."""
    try:
        if kind == "toml":
            return [tomllib.loads(text)]
        if kind == "json":
            return [json.loads(text)]
        filled = _without_templates(text) if "{{" in text or "{%" in text else text
        filled = _OTHERS_VALUE.sub(_OPEN, filled)
        filled = _TAG.sub("", filled)
        return list(load_all(filled, most_aliases=_LIMIT_ALIASES, texts=True))
    except (YamlTextError, tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DocumentError(str(error)) from None


def _without_templates(text: str) -> str:
    """Helm and Jinja: lines that are all template go, values that are become unknown."""
    rows = []
    text = re.sub(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", "", text, flags=re.DOTALL)
    for row in text.splitlines():
        bare = row.strip()
        if re.fullmatch(r"(?:-\s+)?(?:\{\{.*\}\}|\{%.*%\})(?:\s*#.*)?", bare) and not re.match(r".*:\s*\{\{", bare):
            continue
        row = re.sub(r"\"\s*\$?\{\{[^{}]*\}\}\s*\"|'\s*\$?\{\{[^{}]*\}\}\s*'", _OPEN, row)
        rows.append(re.sub(r"\$?\{\{[^{}]*\}\}|\{%.*?%\}", _OPEN, row))
    return "\n".join(rows)


def read_documents(documents: list[Any]) -> tuple[Place, ...]:
    """Every place with variables. Raises DocumentError where the text has no end."""
    walk = _Walk(documents)
    for document in documents:
        walk.visit(document, title(document), 0)
    used = {name for names in walk.taken.values() for name in names}
    return tuple(
        place
        for source, place in walk.found.items()
        if (place.script.assigned or place.script.inner) and walk.config_of.get(source) not in used
    )


def form(documents: list[Any], kind: str) -> str:
    """What the document is, in words."""
    tops = [each for each in documents if isinstance(each, dict)]
    if any("apiVersion" in each or ("kind" in each and "metadata" in each) for each in tops):
        return "Kubernetes manifest"
    if any(isinstance(each.get("services"), dict) for each in tops):
        return "Compose file"
    if any("cells" in each and "nbformat" in each for each in tops):
        return "notebook"
    if any(("run" in each or "setup" in each) and ("resources" in each or "envs" in each) for each in tops):
        return "SkyPilot task"
    return {"json": "JSON", "toml": "TOML"}.get(kind, "YAML")


class _Walk:
    """Finds variables in any object, whatever its kind."""

    def __init__(self, documents: list[Any]) -> None:
        self.found: dict[str, Place] = {}
        self.config_of: dict[str, str] = {}  # source to the name of the ConfigMap that it is
        self.taken: dict[str, set[str]] = {}  # source to the ConfigMaps that it takes in
        self._configs = dict(_configs(documents))
        self._seen: set[int] = set()  # anchors make a node appear twice, and a bomb appear without end
        self._left = _LIMIT_NODES

    def visit(self, node: Any, source: str, depth: int, key: str = "") -> None:
        """Walks one node; `source` names the way to it."""
        self._left -= 1
        if isinstance(node, str):
            self._text(node, source, key)
            return
        if not isinstance(node, dict | list) or id(node) in self._seen:
            return
        if self._left < 0 or depth > _LIMIT_DEPTH:
            raise DocumentError(f"more than {_LIMIT_NODES} nodes or {_LIMIT_DEPTH} levels: no manifest is that large")
        self._seen.add(id(node))
        if isinstance(node, list):
            self._list(node, source, depth, key)
        else:
            self._mapping(node, source, depth, key)

    def _mapping(self, node: dict[Any, Any], source: str, depth: int, key: str) -> None:
        if node.get("kind") == "ConfigMap" and isinstance(node.get("metadata"), dict):
            self.config_of[source] = str(node["metadata"].get("name"))
        if node.get("cell_type") == "code":
            cell = node.get("source")
            text = "".join(str(row) for row in cell) if isinstance(cell, list) else str(cell)
            self._at(source).inner.append(Inner(text=text, target="x.py", line=0))
            return
        here = bool(_PLACES.fullmatch(key))
        for name, value in node.items():
            if isinstance(name, str) and not isinstance(value, dict | list):
                if _OWN.match(name) or (here and _NAME.match(name)):
                    self._add(source, name, value)
                    continue
                if _OWN_SETTING.match(name) and value is None:  # a list written without dashes
                    self._add(source, *name.split("=", 1))
                    continue
            elif isinstance(name, str) and isinstance(value, dict) and _OWN.match(name):
                self._add(source, name, value.get("value", value.get("default", _OPEN)))
                continue
            if name == "envFrom":
                self._env_from(value, source)
            inside = str(name) if isinstance(name, str) else ""
            self.visit(value, f"{source}{_step(name)}", depth + 1, inside)

    def _list(self, node: list[Any], source: str, depth: int, key: str) -> None:
        words = [item for item in node if isinstance(item, str)]
        if words and any("NCCL_" in word for word in words):
            self._words(words, source)
        for item in node:
            if isinstance(item, dict):
                name = item.get("name", item.get("key", item.get("Name")))
                if isinstance(name, str) and (_OWN.match(name) or (_PLACES.fullmatch(key) and _NAME.match(name))):
                    self._entry(item, name, source)
                    continue
            if not isinstance(item, str):
                self.visit(item, f"{source}{_item(item)}", depth + 1, key)

    def _entry(self, item: dict[Any, Any], name: str, source: str) -> None:
        """One entry of a container's `env:`."""
        if "valueFrom" in item:
            self._from(item["valueFrom"], name, source)
        else:
            self._add(source, name, item.get("value", item.get("Value", item.get("default", ""))))

    def _from(self, origin: Any, name: str, source: str) -> None:
        reference = origin.get("configMapKeyRef") if isinstance(origin, dict) else None
        if isinstance(reference, dict):
            data = self._configs.get(str(reference.get("name")), {})
            if reference.get("key") in data:
                self._add(source, name, data[reference["key"]])
                return
        kind = next(iter(origin), "elsewhere") if isinstance(origin, dict) else "elsewhere"
        self._at(source).assigned.append(Assigned(name=name, value=None, raw=f"valueFrom {kind}", line=0))

    def _env_from(self, entries: Any, source: str) -> None:
        for entry in entries if isinstance(entries, list) else ():
            reference = entry.get("configMapRef") if isinstance(entry, dict) else None
            name = str(reference.get("name")) if isinstance(reference, dict) else ""
            if not name:
                continue
            if name not in self._configs:
                self._at(source).files.append(f"ConfigMap {name}")
                continue
            self.taken.setdefault(source, set()).add(name)
            for key, value in self._configs[name].items():
                if _NAME.match(str(key)):
                    self._add(source, f"{entry.get('prefix', '')}{key}", value)

    def _words(self, words: list[str], source: str) -> None:
        """A command as a list of words, or a list of NAME=VALUE."""
        if all(_NAME.match(word.partition("=")[0]) and not re.search(r"\n|;|&&", word) for word in words):
            for word in words:
                name, equals, value = word.partition("=")
                if equals:
                    self._add(source, name, value)
            return
        lines = re.search(r"\s", words[0]) is not None  # a list of lines, as `script:` of a pipeline
        self._take(source, lines_of(read_shell("\n".join(words), line=0)) if lines else read_words(words, 0))

    def _text(self, text: str, source: str, key: str) -> None:
        """A script, a command line or a document inside a scalar."""
        if not _SCRIPT.search(text) or len(text) < 8:
            return
        rows = [
            row.strip().rstrip(";") for row in text.splitlines() if row.strip() and not row.lstrip().startswith("#")
        ]
        if _PLACES.fullmatch(key) and all(re.match(r"[A-Za-z_]\w*=", row) for row in rows):
            for row in rows:
                self._add(source, *row.split("=", 1))
            return
        if key.endswith((".py", ".conf", ".yaml", ".yml", ".json", ".toml", ".env")) or "os.environ" in text:
            target = key if "." in key else "x.py"
            self._at(source).inner.append(Inner(text=text, target=target, line=0))
        elif _DOCUMENT_INSIDE.search(text) and "\n" in text and "<<" not in text:
            self._at(source).inner.append(Inner(text=text, target=f"{key or 'text'}.yaml", line=0))
        elif "NCCL" in text:
            self._take(source, lines_of(read_shell(text.replace(_OPEN, "${TEMPLATE}"), line=0)))

    def _add(self, source: str, name: str, value: Any) -> None:
        text = scalar(value)
        found = None if _OPEN in text else expand(text) if "$" in text else text
        if re.search(r"\$\([A-Za-z_]", text):  # Kubernetes puts in what the container has
            found = None
        raw = text.replace(_OPEN, "{{...}}")
        self._at(source).assigned.append(Assigned(name=name, value=found, raw=raw, line=0))

    def _take(self, source: str, script: Script) -> None:
        if script.assigned or script.inner:
            here = self._at(source)
            here.assigned += script.assigned
            here.inner += script.inner
            here.used |= script.used

    def _at(self, source: str) -> Script:
        return self.found.setdefault(source, Place(source)).script


def _configs(documents: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for document in documents:
        if (
            isinstance(document, dict)
            and document.get("kind") == "ConfigMap"
            and isinstance(document.get("data"), dict)
        ):
            metadata = document.get("metadata")
            yield str(metadata.get("name")) if isinstance(metadata, dict) else "", document["data"]
        elif isinstance(document, dict) and isinstance(document.get("items"), list):
            yield from _configs(document["items"])


def scalar(value: Any) -> str:
    """A value as the text that a program gets."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value in ("~", "null"):
        return ""
    return "" if value is None or isinstance(value, dict | list) else str(value)


def title(document: Any) -> str:
    """An object's kind and name."""
    if not isinstance(document, dict):
        return "document"
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else document.get("name")
    kind = document.get("kind")
    name = name if isinstance(name, str) else None
    return f"{kind}/{name}" if kind and name else str(kind or name or "document")


# Steps of the way that say nothing to a reader.
_SILENT = {
    "spec", "template", "containers", "metadata", "pytorchReplicaSpecs", "mpiReplicaSpecs", "jobTemplate", "env",
    "envs",
    "environment", "data", "env_vars", "command", "args", "services", "variables", "leaderWorkerTemplate",
}  # fmt: skip


def _step(key: Any) -> str:
    return "" if key in _SILENT else f" {key}"


def _item(item: Any) -> str:
    name = item.get("name") if isinstance(item, dict) else None
    return f" {name}" if isinstance(name, str) else ""


def refused(text: str, form_of: str) -> Iterator[Finding]:
    """What the API server or Compose refuses in variables, and what Kubernetes takes otherwise than it reads.

    EnvVar's value is a string; the last of two of a name counts; $(NAME) is put in only where NAME stands before it.
    Compose refuses truths; its reader takes only true and false for such, as YAML 1.2 does.
    """
    try:
        typed = load_all(text, most_aliases=_LIMIT_ALIASES)
        texts = load_all(text, most_aliases=_LIMIT_ALIASES, texts=True)
    except YamlTextError:
        return  # a template
    if form_of == "Compose file":
        for name, value in _compose(typed, texts):
            yield finding("env.value.kind", Severity.FAIL, name, value, "Compose refuses a boolean here.",
                          f'Write {name}: "{value}".')  # fmt: skip
        return
    for entries in (each for document in typed for each in _env_lists(document, 0)):
        names = [str(each.get("name")) for each in entries]
        for place, each in enumerate(entries):
            name, given = names[place], each.get("value")
            shown = scalar(given) if _OWN.match(name) else "..."  # another's may be a secret
            if isinstance(given, bool | int | float):
                yield finding(
                    "env.value.kind",
                    Severity.FAIL,
                    name,
                    shown,
                    "Kubernetes refuses the manifest: the value of a variable must be a string.",
                    "Write it in quotes.",
                )
            if name in names[place + 1 :] and _OWN.match(name):
                yield finding("env.pair.shadowed", Severity.WARN, name, scalar(given), "it is set again in the same "
                              "container, and the last counts.", "Keep one of them.")  # fmt: skip
            for other in re.findall(r"(?<!\$)\$\(([A-Za-z_]\w*)\)", given) if isinstance(given, str) else ():
                if other in names[place:] and other not in names[:place]:
                    yield finding(
                        "env.value.kind",
                        Severity.WARN,
                        name,
                        shown,
                        f"$({other}) stays as it is written: {other} is set only after it.",
                        f"Set {other} before {name}.",
                    )


def _compose(typed: list[Any], texts: list[Any]) -> Iterator[tuple[str, str]]:
    for document, written in zip(typed, texts, strict=True):
        services = document.get("services") if isinstance(document, dict) else None
        for service, body in services.items() if isinstance(services, dict) else ():
            variables = body.get("environment") if isinstance(body, dict) else None
            for name, value in variables.items() if isinstance(variables, dict) else ():
                if isinstance(value, bool):
                    raw = str(written["services"][str(service)]["environment"].get(str(name)))
                    if raw.lower() in ("true", "false"):
                        yield str(name), raw


def _env_lists(node: Any, depth: int) -> Iterator[list[dict[str, Any]]]:
    """Every container's list of variables."""
    if depth > _LIMIT_DEPTH:
        return
    if isinstance(node, list):
        for each in node:
            yield from _env_lists(each, depth + 1)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "env" and isinstance(value, list):
                yield [each for each in value if isinstance(each, dict)]
            else:
                yield from _env_lists(value, depth + 1)

"""Environments wherever they are written: a process, an env file, shell exports, nccl.conf, a pod spec, a log.

Specification: proc(5) environ; docker --env-file; NCCL src/misc/param.cc setEnvFile (nccl.conf); Kubernetes EnvVar.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from probes.api import Snapshot
from probes.hostinfo import HostinfoFacts
from probes.yaml_text import YamlTextError, load_all

KINDS = ("env", "shell", "conf", "pod", "log", "process")
_LIMIT_CHARACTERS = 8 << 20  # an environment or a manifest is kilobytes; a log is cut by its own reader
_LIMIT_NODES = 200_000
_LIMIT_DEPTH = 60
_LIMIT_ALIASES = 1000

# What the lint judges, misspelt names included; everything else of an environment (tokens, keys) is not even kept.
_JUDGED = re.compile(r"NCCL|^(TORCH|GLOO|PYTORCH|FI|OFI|RDMAV|PET|CUDA|OMP)_", re.IGNORECASE)
_IN_COMMAND = re.compile(
    r"""(?:^|[\s;&|(])(?:export\s+|-x\s*|-e\s*|--env[=\s]\s*|env\s+)?   # export A=1; mpirun -x A=1; docker -e A=1
        ((?:NCCL|TORCH_NCCL|GLOO|FI|OFI)_[A-Z0-9_]+)=("[^"]*"|'[^']*'|[^\s;&|)]*)""",
    re.VERBOSE,
)
_YAML_HINT = re.compile(r"^\s*(-\s+)?(apiVersion|kind|spec|containers|env|metadata|template)\s*:", re.MULTILINE)
_SHELL_HINT = re.compile(
    r"^\s*(export|declare|typeset|setenv)\s|(?:^|\s)-x\s+[A-Z]+_|\bmpirun\b|\bsrun\b", re.MULTILINE
)


class EnvironmentTextError(ValueError):
    """A text that cannot be read as the kind it was said to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEnvironment:
    """One environment and where it stands."""

    source: str  # "env", "nccl.conf", "TrainJob/sft trainer", "PyTorchJob/sft-roce Master/pytorch", "log"
    environment: dict[str, str]


def read_environment(text: str, kind: str | None = None) -> tuple[NamedEnvironment, ...]:
    """Every environment in a text; without `kind` it is recognised by its looks.

    Only variables that concern communication are kept: the rest may hold secrets.
    """
    found = _read(text, kind)
    return tuple(
        NamedEnvironment(
            source=each.source, environment={k: v for k, v in each.environment.items() if _JUDGED.search(k)}
        )
        for each in found
    )


def _read(text: str, kind: str | None) -> tuple[NamedEnvironment, ...]:
    if len(text) > _LIMIT_CHARACTERS:
        raise EnvironmentTextError(
            f"{len(text)} characters: more than {_LIMIT_CHARACTERS}, no environment is that large"
        )
    kind = kind or guess_kind(text)
    match kind:
        case "process":
            return (NamedEnvironment(source="process", environment=_pairs(text.split("\0"))),)
        case "env":
            return (NamedEnvironment(source="env file", environment=_env_file(text)),)
        case "conf":
            return (NamedEnvironment(source="nccl.conf", environment=_nccl_conf(text)),)
        case "shell":
            return (NamedEnvironment(source="shell", environment=dict(_shell(text))),)
        case "pod":
            return _pod(text)
        case "log":
            return (NamedEnvironment(source="log", environment=_log(text)),)
    raise EnvironmentTextError(f"kind {kind!r}: must be one of {', '.join(KINDS)}")


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


def guess_kind(text: str) -> str:
    """What a text looks like."""
    if "\0" in text:
        return "process"
    if "NCCL INFO" in text or "NCCL WARN" in text:
        return "log"
    if _YAML_HINT.search(text) or text.lstrip().startswith(("{", "[")):
        return "pod"
    if _SHELL_HINT.search(text):
        return "shell"
    return "env"


def _pairs(entries: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if equals and name:
            found.setdefault(name, value)  # getenv(3) finds the first of two
    return found


def _env_file(text: str) -> dict[str, str]:
    """No quoting, no export: the value is all that follows the first `=`."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        stripped = line.lstrip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = stripped.partition("=")
        if equals:
            found[name] = value  # docker takes the last of two
    return found


def _nccl_conf(text: str) -> dict[str, str]:
    """As NCCL reads it: nothing is trimmed, `#` comments only in the first column, the first of two names wins."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, value)
    return found


def _shell(text: str) -> Iterator[tuple[str, str]]:
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = line.split()  # a quote that spans lines: take what stands here
        for word in words:
            name, equals, value = word.removeprefix("-x").removeprefix("-e").lstrip().partition("=")
            if name == "--env":
                name, equals, value = value.partition("=")
            if equals and name.isidentifier():
                yield name, value


def _log(text: str) -> dict[str, str]:
    from collectives.evidence import read

    return dict(read(text.splitlines()).environment)


def _pod(text: str) -> tuple[NamedEnvironment, ...]:
    try:
        documents = load_all(text, most_aliases=_LIMIT_ALIASES)
    except YamlTextError as error:
        raise EnvironmentTextError(str(error)) from None
    walk = _Walk()
    for document in documents:
        walk.visit(document, _title(document), 0)
    return tuple(NamedEnvironment(source=source, environment=env) for source, env in walk.found.items())


class _Walk:
    """Finds every `env:` list and every NAME=value in commands, in any object whatever its kind."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, str]] = {}
        self._seen: set[int] = set()  # anchors make a node appear twice, and a bomb appear without end
        self._left = _LIMIT_NODES

    def visit(self, node: Any, source: str, depth: int) -> None:
        """Walk one node; `source` names the way to it."""
        self._left -= 1
        if not isinstance(node, dict | list) or id(node) in self._seen:
            return
        if self._left < 0 or depth > _LIMIT_DEPTH:
            raise EnvironmentTextError(
                f"more than {_LIMIT_NODES} nodes or {_LIMIT_DEPTH} levels: no manifest is that large"
            )
        self._seen.add(id(node))
        if isinstance(node, list):
            for item in node:
                self.visit(item, f"{source}{_item(item)}", depth + 1)
            return
        env = {**self._of_commands(node), **_of_list(node.get("env")), **_of_data(node.get("data"))}
        if env:
            self.found.setdefault(source, {}).update(env)
        for key, value in node.items():
            if key not in ("env", "data"):
                self.visit(value, f"{source}{_step(key)}", depth + 1)

    @staticmethod
    def _of_commands(node: dict[Any, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for key in ("command", "args"):
            words = node.get(key)
            texts = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
            for name, value in _IN_COMMAND.findall(" ".join(texts)):
                found[name] = value.strip("\"'")
        return found


def _of_list(env: Any) -> dict[str, str]:
    """A container's `env:`; values that come from elsewhere (valueFrom) are unknown and left out."""
    found: dict[str, str] = {}
    if isinstance(env, dict):  # Helm values and some job APIs write a mapping
        return {str(name): _scalar(value) for name, value in env.items() if not isinstance(value, dict | list)}
    for entry in env if isinstance(env, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and "valueFrom" not in entry:
            found[entry["name"]] = _scalar(entry.get("value", ""))
    return found


def _of_data(data: Any) -> dict[str, str]:
    """A ConfigMap that carries environment variables."""
    pairs = data.items() if isinstance(data, dict) else ()
    return {name: _scalar(value) for name, value in pairs if isinstance(name, str) and _JUDGED.search(name)}


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None or isinstance(value, dict | list) else str(value)


def _title(document: Any) -> str:
    if not isinstance(document, dict):
        return "manifest"
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    kind = document.get("kind")
    return f"{kind}/{name}" if kind and name else str(kind or name or "manifest")


# Steps of the way that say nothing to a reader.
_SILENT = {"spec", "template", "containers", "metadata", "pytorchReplicaSpecs", "mpiReplicaSpecs", "jobTemplate"}


def _step(key: Any) -> str:
    return "" if key in _SILENT else f" {key}"


def _item(item: Any) -> str:
    name = item.get("name") if isinstance(item, dict) else None
    return f" {name}" if isinstance(name, str) else ""

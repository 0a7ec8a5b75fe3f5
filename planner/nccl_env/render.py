"""Settings as text that other tools read: an env file, shell exports, a Kubernetes `env:` list, JSON or YAML.

Specification: docker run --env-file (one NAME=value per line, no quoting); POSIX shell; Kubernetes EnvVar.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from planner.advice import Note, PodNeed, Setting

# Injected by the launcher; Kubeflow Trainer's webhook rejects a TrainJob that sets one (pkg/apply, reserved names).
RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


class RenderError(ValueError):
    """A setting that the format cannot carry; the message names it."""


def render_env(settings: Sequence[Setting]) -> str:
    """An env file: values stand as they are, as `docker run --env-file` takes them, reasons as comments."""
    lines: list[str] = []
    for setting in _checked(settings):
        lines += [f"# {setting.reason.rule}", f"{setting.name}={setting.value}"]
    return _text(lines, "# nothing to set")


def render_shell(settings: Sequence[Setting]) -> str:
    """Exports that a POSIX shell can source."""
    lines: list[str] = []
    for setting in _checked(settings):
        lines += [f"# {setting.reason.rule}", f"export {setting.name}={shlex.quote(setting.value)}"]
    return _text(lines, "# nothing to set")


def k8s_env(settings: Sequence[Setting]) -> list[dict[str, str]]:
    """The `env:` list of a container."""
    return [{"name": setting.name, "value": setting.value} for setting in _checked(settings)]


def render_k8s(settings: Sequence[Setting]) -> str:
    """The `env:` list as YAML; every value is a string, also where it looks like a number."""
    return yaml.safe_dump(k8s_env(settings), sort_keys=False, allow_unicode=True, width=10_000)


def reasons(settings: Sequence[Setting], notes: Sequence[Note] = (), needs: Sequence[PodNeed] = ()) -> dict[str, Any]:
    """Everything with its reasons, as plain lists and dicts."""
    return {
        "settings": [_reasoned(setting) for setting in _checked(settings)],
        "notes": [{"topic": note.topic, "text": note.text, "evidence": note.evidence} for note in notes],
        "needs": [_reasoned(need) for need in needs],
    }


def render_json(settings: Sequence[Setting], notes: Sequence[Note] = (), needs: Sequence[PodNeed] = ()) -> str:
    """Everything with its reasons, as JSON."""
    return json.dumps(reasons(settings, notes, needs), indent=2, ensure_ascii=False) + "\n"


def render_yaml(settings: Sequence[Setting], notes: Sequence[Note] = (), needs: Sequence[PodNeed] = ()) -> str:
    """Everything with its reasons, as YAML."""
    return yaml.safe_dump(reasons(settings, notes, needs), sort_keys=False, allow_unicode=True, width=100)


def _reasoned(item: Setting | PodNeed) -> dict[str, Any]:
    reason = item.reason
    why = {"rule": reason.rule, "evidence": reason.evidence, "source": reason.source}
    return {"name": item.name, "value": item.value, "reason": why}


def _checked(settings: Sequence[Setting]) -> Sequence[Setting]:
    for setting in settings:
        if setting.name in RESERVED:
            raise RenderError(f"{setting.name}: reserved for the launcher, must not be set")
        if not setting.name.isidentifier() or not setting.name.isascii():
            raise RenderError(f"{setting.name!r}: not a name of an environment variable")
        if any(mark in setting.value for mark in "\n\r\0"):
            raise RenderError(
                f"{setting.name}: the value {setting.value!r} has a line break, which no env file can carry"
            )
    return settings


def _text(lines: Sequence[str], empty: str) -> str:
    return "\n".join(line.replace("\n", " ") for line in lines or (empty,)) + "\n"

"""Settings as text that other tools read: an env file, shell exports, a Kubernetes `env:` list.

Specification: docker run --env-file (one NAME=value per line, no quoting); POSIX shell; Kubernetes EnvVar.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import yaml

from planner.advice import Setting

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

"""Renders one JobSpec for the job APIs in use: TrainJob with its TrainingRuntime, PyTorchJob, JobSet, Indexed Job.

Specifications: trainer.kubeflow.org/v1alpha1 (Kubeflow Trainer 2.0 to 2.3), kubeflow.org/v1 (Training Operator 1.7 to
1.9; resource claims need 1.9), jobset.x-k8s.io/v1alpha2, batch/v1, resource.k8s.io/v1, resource.nvidia.com/v1beta1
(NVIDIA's DRA driver 25.3 to 0.4). The manifests are templates/*.yaml.j2. This module quotes every value that a template
prints, and the YAML library makes the text for people from the parsed documents, so hostile names stay data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from contracts.plain import PlainError, loads
from contracts.run_record import KILLED, RESUMABLE
from planner.kubernetes.job import END_SECONDS, MOUNT, JobSpec

Document = dict[str, Any]
NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"


def attached(documents: Any) -> list[str]:
    """Interfaces that Multus makes in the pods of these documents: as their networks name them, else net1 to netN."""
    found: list[str] = []
    for one in mappings(documents):
        marks = one.get("annotations")
        networks = marks.get(NETWORKS_ANNOTATION) if isinstance(marks, dict) else None
        found += _interfaces(networks) if isinstance(networks, str) else []
    return list(dict.fromkeys(found))


def mappings(document: Any) -> Iterator[Document]:
    """Every mapping within a document, or a list of them, the outer ones first."""
    if isinstance(document, dict):
        yield document
    for one in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from mappings(one)


def _interfaces(networks: str) -> list[str]:
    """Of the annotation's value: "name", "namespace/name@interface", each after a comma, or a JSON list of objects."""
    rows: Any = [{"interface": word.strip().partition("@")[2]} for word in networks.split(",") if word.strip()]
    if networks.lstrip().startswith("["):
        rows = []
        with suppress(PlainError):
            rows = loads(networks)
    names = [one.get("interface") if isinstance(one, dict) else None for one in rows[:32]]
    return [str(name or f"net{number}")[:15] for number, name in enumerate(names, 1)]


# What each API's controller labels a job's pods with, its name as the value.
POD_LABELS = {
    "job": "job-name",
    "pytorchjob": "training.kubeflow.org/job-name",
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
    "jobset": "jobset.sigs.k8s.io/jobset-name",
}
PORT = 29500  # where pod 0 listens for the others: torchrun's own default
# How a pod ends that another one shall take the place of: it saved and ended, SIGKILL, SIGTERM. All else fails the job.
RETRIED = (RESUMABLE, KILLED + 9, KILLED + 15)
# Exit codes that no lost peer causes: settings refused, a check failed, out of memory, no disk, another layout than the
# planned one (docs/reference/finetune-job.md). Under an operator these fail the job at once; all others restart it.
FINAL = (2, 3, 71, 74, 76)
AGENT_AUDIENCE = "topoflight"  # whom the agent's TokenReview expects a token to be for


class _Dumper(yaml.SafeDumper):
    """Safe YAML that keeps the lines of files inside a ConfigMap, and never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        """Manifests are read by people and by tools that know no aliases."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=_style(value))


def _style(value: str) -> str | None:
    """A file as its lines, where that reads back as it was; PyYAML does not correct a style that cannot hold it."""
    if not all(letter.isprintable() or letter in "\n\t" for letter in value):
        return '"'
    lines = value.split("\n")
    whole = not value[:1].isspace() and all(line == line.rstrip() for line in lines)
    return "|" if len(lines) > 1 and whole else None


_Dumper.add_representer(str, _text)


def render(documents: Iterable[Document]) -> str:
    """Documents as one YAML stream."""
    return str(yaml.dump_all(list(documents), Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True))


class _Loader(yaml.SafeLoader):
    """Safe YAML with two tags for a document that is a text in a manifest: `!json`, and `!json-lines` with indents."""


def _json(loader: yaml.SafeLoader, node: yaml.MappingNode, indent: int | None = None) -> str:
    return json.dumps(_without_empty(loader.construct_mapping(node, deep=True)), indent=indent)


_Loader.add_constructor("!json", _json)
_Loader.add_constructor("!json-lines", partial(_json, indent=2))


def _without_empty(value: Any) -> Any:
    """The value without the members that have none: a template names them whether the job has them or not."""
    if isinstance(value, dict):
        return {key: _without_empty(one) for key, one in value.items() if one is not None}
    return [_without_empty(one) for one in value] if isinstance(value, list) else value


@cache
def _templates() -> Any:
    """The environment of the templates. A value is printed as quoted YAML, whatever it holds; macros print as they are.

    JSON is YAML but for letters beyond 16 bits, which JSON writes as two halves and YAML as they are.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def quoted(value: Any) -> Markup:
        if isinstance(value, Markup):
            return value
        halves = re.compile(r"\\ud[89ab]..\\ud[c-f]..")
        text = halves.sub(lambda pair: str(json.loads(f'"{pair[0]}"')), json.dumps(value, default=dict))
        return Markup(text)  # noqa: S704 - no HTML: quoted above

    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    return Environment(
        loader=loader, autoescape=True, finalize=quoted, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip


def from_template(template: str, **values: Any) -> tuple[Document, ...]:
    """The documents of a template, with these values in it."""
    text = _templates().get_template(f"{template}.yaml.j2").render(values)
    found = yaml.load_all(text, Loader=_Loader)
    return tuple(_without_empty(document) for document in found if document is not None)


def _job(api: str, spec: JobSpec) -> tuple[Document, ...]:
    """The job as this API wants it, after what it needs; the job is the last document."""
    return from_template(
        api, spec=spec, api=api, pod_label=POD_LABELS[api], mount=MOUNT, port=PORT, end_seconds=END_SECONDS,
        audience=AGENT_AUDIENCE, final=FINAL, retried=RETRIED,
    )  # fmt: skip


APIS: dict[str, Callable[[JobSpec], tuple[Document, ...]]] = {
    api: partial(_job, api) for api in ("trainjob", "pytorchjob", "jobset", "job")
}


def claims(spec: JobSpec) -> tuple[Document, ...]:
    """What the job's pods claim by DRA: first the ResourceClaimTemplate of GPU and NIC, where the job asks for one."""
    return from_template("claims", spec=spec)


def config_map(spec: JobSpec, files: dict[str, str]) -> Document:
    """The ConfigMap with the job's configuration and plan."""
    if not spec.config_map:
        raise ValueError("config_map: the job names none")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": spec.config_map, "namespace": spec.namespace},
        "data": dict(files),
    }

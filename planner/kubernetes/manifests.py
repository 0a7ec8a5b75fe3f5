"""Render a JobSpec for each supported job API: TrainJob with its TrainingRuntime, PyTorchJob, JobSet, Indexed Job.

Specifications: trainer.kubeflow.org/v1alpha1 (Kubeflow Trainer 2.0 to 2.3), kubeflow.org/v1 (Training Operator 1.7 to
1.9; resource claims need 1.9), jobset.x-k8s.io/v1alpha2, batch/v1, resource.k8s.io/v1, resource.nvidia.com/v1beta1
(NVIDIA's DRA driver 25.3 to 0.4). The manifests are templates/*.yaml.j2. This module quotes every value that a template
prints, parses the result, and writes the parsed documents with the YAML library. So a hostile name cannot change the
structure of a manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from contracts.run_record import KILLED, RESUMABLE
from planner.kubernetes.job import END_SECONDS, MOUNT, JobSpec

Document = dict[str, Any]
NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"


def mappings(document: Any) -> Iterator[Document]:
    """Yield every mapping in a document or a list of documents; outer mappings come before the inner ones."""
    if isinstance(document, dict):
        yield document
    for one in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from mappings(one)


# The label with the job's name that each API's controller sets on the pods.
POD_LABELS = {
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
    "pytorchjob": "training.kubeflow.org/job-name",
    "jobset": "jobset.sigs.k8s.io/jobset-name",
    "job": "job-name",
}
PORT = 29500  # where pod 0 listens for the other pods; the default of torchrun
# Exit codes after which a pod is replaced: a checkpoint was saved, SIGKILL, SIGTERM. Any other code fails the job.
RETRIED = (RESUMABLE, KILLED + 9, KILLED + 15)
# Exit codes that the loss of another pod cannot cause: rejected settings, a failed check, out of memory, disk full, a
# layout that differs from the plan (docs/reference/finetune-job.md). With an operator these codes fail the job
# immediately, and all other codes restart it.
FINAL = (2, 3, 71, 74, 76)
AGENT_AUDIENCE = "topoflight"  # audience that the agent's TokenReview expects in a token


class _Dumper(yaml.SafeDumper):
    """Writes the files in a ConfigMap as block scalars, and never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        """Always return True, because some tools that read manifests do not support aliases."""
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=_choose_style(value))


def _choose_style(value: str) -> str | None:
    """Return the block style for a text of several lines that it can represent; PyYAML does not check this."""
    if not all(letter.isprintable() or letter in "\n\t" for letter in value):
        return '"'
    lines = value.split("\n")
    whole = not value[:1].isspace() and all(line == line.rstrip() for line in lines)
    return "|" if len(lines) > 1 and whole else None


_Dumper.add_representer(str, _represent_text)


def render(documents: Iterable[Document]) -> str:
    """Return the documents as one YAML stream."""
    return str(yaml.dump_all(list(documents), Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True))


class _Loader(yaml.SafeLoader):
    """Loads YAML with tags that turn a nested document into a string: `!json`, and `!json-lines` with indentation."""


def _dump_json(loader: yaml.SafeLoader, node: yaml.MappingNode, indent: int | None = None) -> str:
    return json.dumps(_drop_empty(loader.construct_mapping(node, deep=True)), indent=indent)


_Loader.add_constructor("!json", _dump_json)
_Loader.add_constructor("!json-lines", partial(_dump_json, indent=2))


def _drop_empty(value: Any) -> Any:
    """Return the value without mapping members that are None, which a template writes for unused settings."""
    if isinstance(value, dict):
        return {key: _drop_empty(one) for key, one in value.items() if one is not None}
    return [_drop_empty(one) for one in value] if isinstance(value, list) else value


@cache
def _templates() -> Any:
    """Return the jinja2 environment of the templates. It prints a value as a quoted YAML scalar, and macros unquoted.

    The quoting is JSON's. JSON writes a character beyond U+FFFF as a surrogate pair, which YAML does not accept, so
    pairs are replaced by the character.
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
    """Return the parsed documents of a template that is rendered with these values."""
    text = _templates().get_template(f"{template}.yaml.j2").render(values)
    found = yaml.load_all(text, Loader=_Loader)
    return tuple(_drop_empty(document) for document in found if document is not None)


def _render_job(api: str, spec: JobSpec) -> tuple[Document, ...]:
    """Return the documents of a job for one API: first the objects that it needs, last the job itself."""
    return from_template(
        api, spec=spec, api=api, pod_label=POD_LABELS[api], mount=MOUNT, port=PORT, end_seconds=END_SECONDS,
        audience=AGENT_AUDIENCE, final=FINAL, retried=RETRIED,
    )  # fmt: skip


APIS: dict[str, Callable[[JobSpec], tuple[Document, ...]]] = {api: partial(_render_job, api) for api in POD_LABELS}


def claims(spec: JobSpec) -> tuple[Document, ...]:
    """Return the DRA objects of a job: the ResourceClaimTemplate of GPU and NIC and the ComputeDomain, if used."""
    return from_template("claims", spec=spec)


def config_map(spec: JobSpec, files: dict[str, str]) -> Document:
    """Return the ConfigMap with the job's configuration and plan. Raises ValueError if the job has no name for it."""
    if not spec.config_map:
        raise ValueError("config_map: the job names none")
    (document,) = from_template("config_map", spec=spec, files=files)
    return document

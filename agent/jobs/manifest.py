"""The manifest of a job as `why` reads it: the machine that it asks for, and its forecast without a fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agent.advice.advise import advise
from agent.advice.request import Request
from agent.base import units
from agent.base.hosts import snapshots
from agent.base.inputs import InputError
from agent.jobs.wrapped import advised as advice_for
from contracts.yaml_text import YamlTextError, documents
from planner.forecast.machines import names
from planner.kubernetes.manifests import mappings
from planner.kubernetes.wrap import WrapError, jobs_in
from planner.lint.documents import DocumentError, missing_sources
from planner.lint.sources import guess_kind

_INSTANCE = "node.kubernetes.io/instance-type"  # kubernetes.io/docs/reference/labels-annotations-taints


def placed(text: str, request: Request) -> Request:
    """The question with the machine that the manifest asks for by its instance type, and its nodes, where not given."""
    if "apiVersion" not in text or ((request.hosts or request.machine) and request.nodes):
        return request
    with suppress(WrapError, YamlTextError):
        found = documents(text)
        if not request.hosts and request.machine is None:
            known = (name for word in _values(found, _INSTANCE) if (name := word.removeprefix("Standard_")) in names())
            request = replace(request, machine=next(known, None))
        if request.machine and request.nodes is None:
            request = replace(request, nodes=jobs_in(found)[0].nodes)
    return request


def _values(document: Any, label: str) -> Iterator[str]:
    """Values of a label in selectors: `label: value`, and `key: label, values: [value]`."""
    for found in mappings(document):
        if isinstance(found.get(label), str):
            yield found[label]
        if found.get("key") == label and isinstance(found.get("values"), list):
            yield from (one for one in found["values"] if isinstance(one, str))


def elsewhere(text: str, file: str) -> list[str]:
    """Name what a manifest takes its environment from and does not hold: "ConfigMap nccl"."""
    if guess_kind(text, file) not in ("yaml", "json"):
        return []
    try:
        return missing_sources(documents(text))
    except (YamlTextError, DocumentError):
        return []


def forecast_after(text: str, file: str, request: Request) -> tuple[str, str]:
    """Return (the step time that is forecast on sound nodes, the command that would tell it where it is unknown).

    The layout is that of the first job's own arguments, else the best layout of the model in the question.
    """
    told, command = _by_arguments(text, file, request)
    if told or request.model is None or not (request.machine or request.hosts):
        return told, command
    advice = advise(request, lambda: snapshots(request.hosts))
    if advice.chosen is None:
        return "", "topoflight recommend: " + (advice.rejected[0].reason if advice.rejected else "no layout is allowed")
    step = units.interval(advice.chosen.forecast.step_seconds, "s")
    return f"after the change a step takes {step} in the best layout ({advice.chosen.layout.family})", ""


def _by_arguments(text: str, file: str, request: Request) -> tuple[str, str]:
    command = f"topoflight why --manifest {file} --machine NAME, or --host FILE"
    if "apiVersion" not in text:
        return "", "topoflight recommend --model NAME --machine NAME --nodes N"
    if not request.allow_files or not (request.machine or request.hosts):  # its arguments name files, and the hub
        return "", command
    options = {"hosts": request.hosts, "root": request.root, "machine": request.machine, "config": None}
    try:
        job = jobs_in(documents(text))[0]
        advice, said = advice_for(job, () if request.machine else snapshots(request.hosts), options)
    except (WrapError, YamlTextError, InputError) as error:
        return "", f"topoflight recommend: {error}"
    if advice.chosen is None:
        return "", f"topoflight recommend; {next((line for line in said if 'unknown' in line), 'no layout is allowed')}"
    step = units.interval(advice.chosen.forecast.step_seconds, "s")
    return f"after the change a step of {job.kind}/{job.name} takes {step}", ""

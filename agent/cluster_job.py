"""A fine-tune job for a cluster: what the command line asks for, rendered by the planner's manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.kube import ApiError, Client, path_of
from agent.launch import plan_document
from planner import exports, manifests, network_manifests
from planner.advice import Recommendation
from planner.job import JobError, JobSpec, from_advice
from probes.api import Snapshot

Document = dict[str, Any]
APIS = tuple(manifests.APIS)


def spec_of(advice: Recommendation, given: Mapping[str, Any]) -> JobSpec:
    """The job that the options describe, with the recommendation inside. JobError names what is missing."""
    if not given["image"]:
        raise JobError("--image: name the fine-tune image; a job for a cluster has none by default")
    name = given["name"]
    optional = {
        "claim": given["claim"],
        "queue": given["queue"],
        "topology_label": given["topology"],
        "service_account": given["service_account"],
        "preflight_image": given["preflight_image"],
        "preflight_require": tuple(given["require"]),
        "resource_claim_template": f"{name}-gpu-nic" if given["dra"] else None,
        "tolerate": tuple(given["tolerate"]),
        "node_selector": dict(_pair(word, "--node-selector") for word in given["node_selector"]),
        "limits": dict(_pair(word, "--resource") for word in given["resources"]),
    }
    return from_advice(
        advice, name=name, namespace=given["namespace"], image=given["image"], nodes=given["nodes"] or 1,
        allocatable=tuple(optional["limits"]), config_map=f"{name}-config", **optional,
    )  # fmt: skip


def documents(advice: Recommendation, spec: JobSpec, api: str, config: Path | None) -> tuple[Document, ...]:
    """ConfigMap with configuration and plan, then the job of the API asked for."""
    text = config.read_text(encoding="utf-8") if config else _config(advice, spec)
    files = {"config.yaml": text, "plan.json": json.dumps(plan_document(advice), indent=1) + "\n"}
    return (manifests.config_map(spec, files), *manifests.APIS[api](spec))


def network(found: Sequence[Snapshot], namespace: str) -> tuple[Document, ...]:
    """The network resources that the probed interfaces call for."""
    return network_manifests.network(network_manifests.from_snapshots(found, namespace=namespace))


PLURALS = {
    "ConfigMap": "configmaps", "Service": "services", "Job": "jobs", "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes", "PyTorchJob": "pytorchjobs",
    "ResourceClaimTemplate": "resourceclaimtemplates",
}  # fmt: skip


def create(client: Client, made: Sequence[Document], *, dry_run: bool = False) -> Iterator[str]:
    """Create the objects through the API, after the server has admitted each of them in a dry run.

    The job, which is the last, must be new; what it needs is applied over what an earlier launch left. Yields a line
    per object. JobError says what the server refused, and what was made before it.
    """
    done: list[str] = []
    for really in (False,) if dry_run else (False, True):
        for document in made:
            name = f"{document['kind'].lower()}/{document['metadata']['name']}"
            try:
                _send(client, document, last=document is made[-1], dry_run=not really)
            except ApiError as error:
                so_far = f"; made before it: {', '.join(done)}" if done else "; nothing was made"
                raise JobError(f"{name}: the API server says {error.status}: {error}{so_far}") from None
            if really or dry_run:
                done += [name] if really else []
                yield f"{name} {'created' if really else 'admitted (dry run)'}"


def _send(client: Client, document: Document, *, last: bool, dry_run: bool) -> None:
    about, version = document["metadata"], document["apiVersion"]
    plural, namespace = PLURALS[document["kind"]], about.get("namespace") or client.access.namespace
    if last:
        client.create(path_of(version, plural, namespace=namespace), document, dry_run=dry_run)
    else:
        client.apply(path_of(version, plural, about["name"], namespace=namespace), document, dry_run=dry_run)


def _config(advice: Recommendation, spec: JobSpec) -> str:
    return exports.export("finetune", exports.request_of(advice, ranks_per_node=spec.processes_per_node))


def _pair(word: str, option: str) -> tuple[str, str]:
    name, found, value = word.partition("=")
    if not found or not name or not value:
        raise JobError(f"{option} {word!r}: must be NAME=VALUE")
    return name, value

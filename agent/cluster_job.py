"""A fine-tune job for a cluster: what the command line asks for, rendered by the planner's manifests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def _config(advice: Recommendation, spec: JobSpec) -> str:
    return exports.export("finetune", exports.request_of(advice, ranks_per_node=spec.processes_per_node))


def _pair(word: str, option: str) -> tuple[str, str]:
    name, found, value = word.partition("=")
    if not found or not name or not value:
        raise JobError(f"{option} {word!r}: must be NAME=VALUE")
    return name, value

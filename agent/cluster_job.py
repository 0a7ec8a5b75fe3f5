"""A fine-tune job for a cluster: what the command line asks for, rendered by the planner's manifests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent import dra, job_settings
from agent.advise import RequestError
from agent.kube import ApiError, Client, path_of
from agent.launch import plan_document
from planner import exports, manifests, models, network_manifests, network_rails
from planner.advice import Recommendation
from planner.job import COMMAND, MOUNT, JobError, JobSpec, family, from_advice
from probes.api import Snapshot

Document = dict[str, Any]
APIS = tuple(manifests.APIS)
# Device plugins' names of the devices that a DRA claim takes: GPUs, and NICs shared, by SR-IOV or of EFA.
NICS = ("rdma/", "openshift.io/", "vpc.amazonaws.com/efa")
DEVICES = ("nvidia.com/", *NICS)


def spec_of(advice: Recommendation, given: Mapping[str, Any], offered: Sequence[str] | None = None) -> JobSpec:
    """The job that the options describe, with the recommendation inside. JobError names what is missing.

    `offered` are the nodes' resources where the cluster was asked; what --resource names comes before them. With
    given["dra"] the claim takes GPU and NIC, which the device plugins must then not be asked for as well.
    """
    if not given["image"]:
        raise JobError("--image: name the fine-tune image; a job for a cluster has none by default")
    name = given["name"]
    optional = {
        "claim": claim_of(given),
        "token_secret": given.get("token_secret"),
        "queue": given["queue"],
        "topology_label": given["topology"],
        "service_account": given["service_account"],
        "preflight_image": given["preflight_image"],
        "preflight_require": tuple(given["require"]),
        "agent": given.get("agent"),
        "resource_claim_template": f"{name}-gpu-nic" if given["dra"] else None,
        **({"device_classes": given["device_classes"]} if given.get("device_classes") else {}),
        "tolerate": tuple(given["tolerate"]),
        "node_selector": dict(_pair(word, "--node-selector") for word in given["node_selector"]),
        "limits": dict(_pair(word, "--resource") for word in given["resources"]),
    }
    named = tuple(optional["limits"])
    if given["dra"]:
        if twice := [word for word in named if word.startswith(DEVICES)]:
            raise JobError(f"--resource {twice[0]}: with --dra the claim takes GPU and NIC; leave one of the two away")
        kept = (n for n in advice.needs if n.name != "resource" or not n.value.startswith(DEVICES))
        advice = replace(advice, needs=tuple(kept))
    wanted = [need.value.partition(": ")[0] for need in advice.needs if need.name == "resource"]
    known = named if any(family(name, named) for name in wanted if name.endswith("/*")) else offered
    spec = from_advice(
        advice, name=name, namespace=given["namespace"], image=given["image"], nodes=given["nodes"] or 1,
        allocatable=known, config_map=f"{name}-config", command=(*COMMAND, *settings(advice, given)), **optional,
    )  # fmt: skip
    if not given["dra"]:
        return spec
    return replace(spec, limits={name: n for name, n in spec.limits.items() if not name.startswith(DEVICES)})


def against_dra(advice: Recommendation, given: Mapping[str, Any]) -> str:
    """Why this job is better off with the device plugins, whatever the cluster can; empty: nothing speaks against."""
    if advice.backend != "nccl" or advice.chosen is None:
        return "the plan has no GPU"
    if named := [word for word in given["resources"] if word.startswith(DEVICES)]:
        return f"--resource {named[0]} asks for the devices by name"
    if given["queue"]:
        return "Kueue counts a queue's quota in the device plugins' resources"
    if attached := [need.value for need in advice.needs if need.name == "network"]:
        return f"the plan's environment is for {attached[0]}, which Multus attaches"
    ranks = advice.chosen.layout.world_size // (given["nodes"] or 1)
    for need in advice.needs:
        name, _, count = need.value.partition(": ")
        if need.name == "resource" and name.startswith(NICS) and int(count) > ranks:
            return f"the plan's pods take {count} of {name}, the claim would one for each of {ranks} GPUs"
    return ""


def dra_able(client: Client, advice: Recommendation, given: Mapping[str, Any]) -> dra.Able:
    """How the cluster can serve this job's claims, or why not: the exceptions of agent.dra.able."""
    spec = spec_of(advice, {**given, "dra": True})
    nodes = None
    if selector := ",".join(given["node_selector"]):
        pages = client.pages(path_of("v1", "nodes"), {"labelSelector": selector})
        nodes = {node["metadata"]["name"] for page, _ in pages for node in page}
    return dra.able(client, spec, nodes)


def documents(
    advice: Recommendation, spec: JobSpec, api: str, config: Path | None, found: Sequence[Snapshot] = ()
) -> tuple[Document, ...]:
    """ConfigMap with configuration and plan, then the job of the API asked for; `found` are the hosts it is for."""
    text = config.read_text(encoding="utf-8") if config else _config(advice, spec)
    files = {"config.yaml": text, "plan.json": json.dumps(plan_document(advice, found), indent=1) + "\n"}
    return (manifests.config_map(spec, files), *manifests.APIS[api](spec))


def network(found: Sequence[Snapshot], namespace: str) -> tuple[Document, ...]:
    """The network resources that the probed interfaces call for."""
    return network_manifests.network(network_manifests.from_snapshots(found, namespace=namespace))


def on_rails(advice: Recommendation, given: Mapping[str, Any], found: Sequence[Snapshot]) -> Recommendation:
    """The recommendation for pods on the networks that --network prints with the job, where these are several.

    A record of a pod that is on them already says so itself, and a job of one node needs none.
    """
    if not given["with_network"] or (given["nodes"] or 1) == 1 or network_manifests.seen_from_a_pod(found):
        return advice
    spec = network_manifests.from_snapshots(found, namespace=given["namespace"])
    if len(spec.interfaces) < 2 or any(need.name == "network" for need in advice.needs):
        return advice
    named = family("rdma/*", _named_by_user(given))
    return network_rails.attached(
        advice, found, networks=[f"{rail.namespace}/{rail.name}" for rail in spec.rails()], interfaces=spec.interfaces,
        resource=None if named else f"rdma/{spec.resource_name}",
    )  # fmt: skip


def addresses_in_use(found: Sequence[Snapshot]) -> str:
    """What is wrong with the addresses of several network resources; empty: the nodes have none of them."""
    rails = network_manifests.from_snapshots(found).rails()
    if len(rails) < 2 or misnamed(found):
        return ""
    taken = network_rails.in_use([rail.range for rail in rails], found)
    todo = "put free ranges in their place in MacvlanNetwork and NetworkAttachmentDefinition"
    return f"{taken}: {todo}" if taken else ""


def misnamed(found: Sequence[Snapshot]) -> str:
    """What is wrong with the interfaces' names in the network resources; empty: they are the nodes' own."""
    names = network_manifests.seen_from_a_pod(found)
    if not names:
        return ""
    return (
        f"{', '.join(names)}: so a pod calls it, not the node; put the node's own name in its place in "
        "NicClusterPolicy, MacvlanNetwork and NetworkAttachmentDefinition, or capture with the overlay host-network"
    )


def claim_of(given: Mapping[str, Any]) -> str | None:
    """The claim's name; one that is made without a name is called "shared"."""
    return given["claim"] or ("shared" if given.get("storage_class") else None)


def storage(given: Mapping[str, Any]) -> tuple[Document, ...]:
    """The claim itself, where a storage class says to make it."""
    if not given["storage_class"]:
        return ()
    claim = network_manifests.shared_claim(
        name=claim_of(given) or "", namespace=given["namespace"], size=given["storage_size"],
        storage_class=given["storage_class"],
    )  # fmt: skip
    return (claim,)


def settings(advice: Recommendation, given: Mapping[str, Any]) -> tuple[str, ...]:
    """The job's settings on its command line: --set's, the run on the claim, and the model that was planned for."""
    said = _said(given)
    more = []
    if claim_of(given) and "output_dir" not in said:
        more.append(f"output_dir={MOUNT}/{given['name']}")
    model = models.hub_id(advice.model.name) if advice.model else None
    if given.get("config") and model and "model_name_or_path" not in said:
        more.append(f"model_name_or_path={model}")
    return (*more, *given.get("overrides", ()))


def refuse_what_cannot_train(advice: Recommendation, given: Mapping[str, Any]) -> None:
    """JobError where the pods would start and train nothing, or train nothing that lasts; it says what to give."""
    said, nodes = _said(given), given["nodes"] or 1
    if given["model"] and (why := job_settings.untrainable(advice, said)):
        raise JobError(why)
    if nodes > 1 and not claim_of(given):
        raise JobError(
            f"--claim: {nodes} nodes write one run, so they need one folder; give --claim NAME of a ReadWriteMany "
            "PersistentVolumeClaim, or --storage-class NAME to have one made"
        )
    output = said.get("output_dir")
    if nodes > 1 and output is not None and not str(output).startswith(f"{MOUNT}/"):
        raise JobError(f"output_dir={output}: {nodes} nodes write one run: must be below {MOUNT}, where the claim is")


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    """What --config and, over it, --set say."""
    try:
        return job_settings.said(given.get("config"), given.get("overrides", ()))
    except RequestError as error:
        raise JobError(str(error)) from None


def unnamed(advice: Recommendation, given: Mapping[str, Any]) -> bool:
    """Whether the pods need a device whose name only the cluster, or the user, knows."""
    if given["dra"]:
        return False
    named = _named_by_user(given)
    return any(name.endswith("/*") and not family(name, named) for name in _devices(advice))


def fixed(advice: Recommendation, given: Mapping[str, Any]) -> list[str]:
    """NICs that the pods need and that go by one name on every cluster, as EFA's do."""
    nics = [name for name in _devices(advice) if name.startswith(NICS) and not name.endswith("/*")]
    return [] if given["dra"] else [name for name in nics if name not in _named_by_user(given)]


def _named_by_user(given: Mapping[str, Any]) -> list[str]:
    return [word.partition("=")[0] for word in given["resources"]]


def _devices(advice: Recommendation) -> list[str]:
    return [need.value.partition(": ")[0] for need in advice.needs if need.name == "resource"]


def offered(client: Client, given: Mapping[str, Any]) -> tuple[str, ...]:
    """The extended resources that enough of the selected nodes have to give away (node.status.allocatable)."""
    query = {"labelSelector": ",".join(given["node_selector"])} if given["node_selector"] else {}
    having: Counter[str] = Counter()
    for nodes, _ in client.pages(path_of("v1", "nodes"), query):
        for node in nodes:
            allocatable = (node.get("status") or {}).get("allocatable") or {}
            having.update(name for name, count in allocatable.items() if "/" in name and str(count) != "0")
    return tuple(sorted(name for name, count in having.items() if count >= (given["nodes"] or 1)))


PLURALS = {
    "PersistentVolumeClaim": "persistentvolumeclaims",
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

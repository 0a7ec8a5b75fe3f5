"""Whether a cluster can give a job GPU and NIC from one PCIe root by DRA (Dynamic Resource Allocation), and why not.

Surface: API resource.k8s.io (Kubernetes API reference 1.34): discovery, DeviceClass (agent.cluster.dra_classes),
ResourceSlice.
What the claim template of planner.kubernetes.manifests asks for is what is looked for here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from agent import units
from agent.cluster.client import ApiError, Client, path_of
from agent.cluster.dra_classes import GPU, NIC, CannotError, find
from planner.kubernetes.job import JobSpec
from planner.kubernetes.manifests import claim_templates

Json = dict[str, Any]


class Able(NamedTuple):
    """How a cluster can."""

    words: str
    device_classes: tuple[str, str]  # of GPU and NIC, by their names in this cluster


def able(client: Client, spec: JobSpec, nodes: Collection[str] | None = None) -> Able:
    """How the cluster can serve the claims of this job's pods; `nodes` are those it may run on.

    CannotError says why it cannot, ApiError what could not be asked, UnknownError what is not understood: those are
    unknown.
    """
    (template,) = claim_templates(spec)
    api = template["apiVersion"]
    group, _, version = api.partition("/")
    _serves(client, group, version)
    classes = find(client, api, GPU), find(client, api, NIC)
    constraints = template["spec"]["spec"]["devices"]["constraints"]
    attribute = constraints[0]["matchAttribute"]
    rooted = [Counter[tuple[str, str]]() for _ in classes]  # of each class, (node, PCIe root): devices
    for driver in {one.driver for one in classes}:
        for node, device in _devices(client, api, driver):
            root = ((device.get("attributes") or {}).get(attribute) or {}).get("string")
            for one, found in zip(classes, rooted, strict=True):
                if one.driver == driver and root and (nodes is None or node in nodes) and one.fits(device):
                    found[node, root] += 1
    if bare := [one.name for one, found in zip(classes, rooted, strict=True) if not found]:
        raise CannotError(f"no device of class {' or '.join(bare)} on these nodes has the attribute {attribute}")
    gpu, nic = classes
    return Able(_fit(rooted, each=len(constraints), spec=spec), (gpu.name, nic.name))


def _fit(rooted: Sequence[Counter[tuple[str, str]]], *, each: int, spec: JobSpec) -> str:
    """Whether enough nodes have `each` times one device of every class under one root."""
    first, *others = rooted
    pairs: Counter[str] = Counter()
    for (node, root), count in first.items():
        pairs[node] += min(count, *(found[node, root] for found in others))
    pods = sum(count // each for count in pairs.values())
    what = f"{each} GPU{'s' if each > 1 else ''} each with a NIC under its PCIe root"
    if pods < spec.nodes:
        raise CannotError(f"the nodes have room for {pods} of {spec.nodes} pods of {what}")
    return f"{units.count(sum(count >= each for count in pairs.values()), 'node')} with {what}"


def _serves(client: Client, group: str, version: str) -> None:
    try:
        known = client.get(f"/apis/{group}")
    except ApiError as error:
        if error.status != 404:
            raise
        raise CannotError(f"the cluster serves no {group}") from None
    versions = [str(each.get("version")) for each in known.get("versions") or ()]
    if version not in versions:
        raise CannotError(f"{group} {', '.join(versions)} is too old: {version} came with Kubernetes 1.34")


def _devices(client: Client, api: str, driver: str) -> Iterator[tuple[str, Json]]:
    """(node, device) of the driver's slices; of each pool the newest generation counts."""
    newest: dict[str, int] = {}
    kept: dict[str, list[tuple[str, Json]]] = {}
    for slices, _ in client.pages(path_of(api, "resourceslices"), {"fieldSelector": f"spec.driver={driver}"}):
        for spec in (each.get("spec") or {} for each in slices):
            pool, node = spec.get("pool") or {}, spec.get("nodeName")
            name, generation = str(pool.get("name")), int(pool.get("generation") or 0)
            if spec.get("driver") != driver or not node or generation < newest.get(name, generation):
                continue
            if generation > newest.get(name, generation):
                kept[name] = []
            newest[name] = generation
            kept.setdefault(name, []).extend((str(node), device) for device in spec.get("devices") or ())
    for devices in kept.values():
        yield from devices

"""Whether a cluster can give a job GPU and NIC from one PCIe root by DRA (Dynamic Resource Allocation), and why not.

Surface: API resource.k8s.io (Kubernetes API reference 1.34): discovery, DeviceClass, ResourceSlice. What the claim
template of planner.manifests asks for is what is looked for here; nothing is taken from a driver's name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from agent.kube import ApiError, Client, path_of
from planner.job import JobSpec
from planner.manifests import claim_templates

Json = dict[str, Any]
# What a DeviceClass's CEL expressions say of the driver and, of NVIDIA's, of whole GPUs against slices of one.
_DRIVER = re.compile(r"device\.driver\s*==\s*[\"']([\w.-]{1,253})[\"']")
_TYPE = re.compile(r"\.type\s*==\s*[\"'](\w{1,64})[\"']")


class CannotError(Exception):
    """Why the cluster cannot, in a few words."""


class Kind(NamedTuple):
    """The devices that a class stands for."""

    driver: str
    type: str  # empty: any


def able(client: Client, spec: JobSpec, nodes: Collection[str] | None = None) -> str:
    """In a few words how the cluster can serve the claims of this job's pods; `nodes` are those it may run on.

    CannotError says why it cannot, ApiError what could not be asked: that is unknown.
    """
    (template,) = claim_templates(spec)
    group, _, version = template["apiVersion"].partition("/")
    _serves(client, group, version)
    devices = template["spec"]["spec"]["devices"]
    class_of = {request["name"]: request["exactly"]["deviceClassName"] for request in devices["requests"]}
    kinds = {name: _class(client, template["apiVersion"], name) for name in dict.fromkeys(class_of.values())}
    attribute = devices["constraints"][0]["matchAttribute"]
    rooted = {name: Counter[tuple[str, str]]() for name in kinds}  # class: (node, PCIe root): devices
    for driver in {kind.driver for kind in kinds.values()}:
        for node, device in _devices(client, template["apiVersion"], driver):
            told = device.get("attributes") or {}
            root = (told.get(attribute) or {}).get("string")
            for name, kind in kinds.items():
                right = kind.type in ("", (told.get("type") or {}).get("string"))
                if kind.driver == driver and right and root and (nodes is None or node in nodes):
                    rooted[name][node, root] += 1
    if bare := [name for name, found in rooted.items() if not found]:
        raise CannotError(f"no device of class {' or '.join(bare)} on these nodes has the attribute {attribute}")
    return _fit(list(rooted.values()), each=len(devices["constraints"]), spec=spec)


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
    return f"{sum(count >= each for count in pairs.values())} nodes have {what}"


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


def _class(client: Client, api: str, name: str) -> Kind:
    try:
        found = client.get(path_of(api, "deviceclasses", name))
    except ApiError as error:
        if error.status != 404:
            raise
        raise CannotError(f"there is no DeviceClass {name}") from None
    selectors = (found.get("spec") or {}).get("selectors") or ()
    text = " ".join(str((each.get("cel") or {}).get("expression", "")) for each in selectors)
    driver, kind = _DRIVER.search(text), _TYPE.search(text)
    return Kind(driver[1] if driver else name, kind[1] if kind else "")


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

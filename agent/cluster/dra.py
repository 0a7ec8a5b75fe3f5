"""Whether a cluster can give a job GPU and NIC from one PCIe root by DRA (Dynamic Resource Allocation), and why not.

Surface: API resource.k8s.io (Kubernetes API reference 1.34): discovery, DeviceClass, ResourceSlice. What a DeviceClass
selects is a program (CEL) that only the scheduler runs: of the class that NVIDIA's driver installs, and of RDMA NICs in
that of DRANET's examples, it is known, and devices are counted; a class of another name is taken at the user's word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from agent.base import units
from agent.cluster.client import ApiError, Client, path_of
from planner.kubernetes.job import DEVICE_CLASSES, JobSpec
from planner.kubernetes.manifests import claims

Json = dict[str, Any]
MOST_LISTED = 20  # DeviceClasses in a message


class CannotError(Exception):
    """Why the cluster cannot, in a few words."""


class Installed(NamedTuple):
    """The devices that a claim takes of a class: an attribute of the driver's domain, and its value."""

    driver: str
    attribute: str
    value: str | bool

    def fits(self, device: Json) -> bool:
        """Whether a device of a ResourceSlice of this driver is one; a name without domain is of the driver's own."""
        attributes = device.get("attributes") or {}
        found = attributes.get(f"{self.driver}/{self.attribute}") or attributes.get(self.attribute) or {}
        return self.value in found.values()


INSTALLED = dict(
    zip(
        DEVICE_CLASSES,
        (Installed("gpu.nvidia.com", "type", "gpu"), Installed("dra.net", "rdma", True)),  # whole GPUs, RDMA NICs
        strict=True,
    )
)


def check(client: Client, spec: JobSpec) -> None:
    """CannotError says that the API or a DeviceClass that the job's claims name is not there; ApiError: unknown."""
    api = claims(spec)[0]["apiVersion"]
    group, _, version = api.partition("/")
    serves(client, group, version)
    for kind, name in zip(("gpu", "nic"), spec.device_classes, strict=True):
        try:
            client.get(path_of(api, "deviceclasses", name))
        except ApiError as error:
            if error.status != 404:
                raise
            there = sorted(one["metadata"]["name"] for page, _ in client.pages(path_of(api, "deviceclasses"))
                           for one in page)  # fmt: skip
            more = f" and {len(there) - MOST_LISTED} more" if len(there) > MOST_LISTED else ""
            words = f"there are {', '.join(there[:MOST_LISTED])}{more}" if there else "there is none at all"
            raise CannotError(f"there is no DeviceClass {name}: {words}; --dra {kind}=NAME names it") from None


def able(client: Client, spec: JobSpec, nodes: Collection[str] | None = None) -> str:
    """How the cluster can serve the claims of this job's pods; `nodes` are those it may run on.

    The job's classes are those that drivers install. CannotError says why it cannot, ApiError what could not be asked:
    that is unknown.
    """
    check(client, spec)
    template = claims(spec)[0]
    constraints = template["spec"]["spec"]["devices"]["constraints"]
    attribute = constraints[0]["matchAttribute"]
    rooted: list[Counter[tuple[str, str]]] = []  # of each class, (node, PCIe root): devices
    for name in spec.device_classes:
        one, found = INSTALLED[name], Counter[tuple[str, str]]()
        for node, device in _devices(client, template["apiVersion"], one.driver):
            root = ((device.get("attributes") or {}).get(attribute) or {}).get("string")
            if root and (nodes is None or node in nodes) and one.fits(device):
                found[node, root] += 1
        if not found:
            raise CannotError(f"no device of class {name} on these nodes has the attribute {attribute}")
        rooted.append(found)
    return _fit(rooted, each=len(constraints), spec=spec)


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


def serves(client: Client, group: str, version: str) -> None:
    """CannotError where the cluster does not have this version of the API."""
    try:
        known = client.get(f"/apis/{group}")
    except ApiError as error:
        if error.status != 404:
            raise
        raise CannotError(f"the cluster serves no {group}") from None
    versions = [str(each.get("version")) for each in known.get("versions") or ()]
    if version not in versions:
        since = " came with Kubernetes 1.34" if group == "resource.k8s.io" else " is what this job is written for"
        raise CannotError(f"{group} {', '.join(versions)} is too old: {version}{since}")


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

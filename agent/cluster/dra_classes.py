"""Which DeviceClass stands for GPUs and which for RDMA NICs: by what its selectors ask of a device, not by name alone.

Surface: resource.k8s.io DeviceClass (Kubernetes API reference 1.34, the same in v1, v1beta2 and v1beta1): a device must
satisfy every spec.selectors[].cel.expression. Of CEL, comparisons of `device.driver` and of attributes with text, true
and false are understood, and `has()` of attributes, joined by `&&`. Of a class with another selector nothing is known.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from agent.cluster.client import ApiError, Client, path_of
from planner.kubernetes.job import DEVICE_CLASSES

Json = dict[str, Any]
Want = tuple[str, str, str | bool | None]  # an attribute's domain, its name, and its value; None: any

_TEXT = r"(?:\"([^\"\\]{1,253})\"|'([^'\\]{1,253})')"
_DRIVER = re.compile(rf"device\.driver\s*==\s*{_TEXT}")
_ATTRIBUTE = re.compile(rf"device\.attributes\[\s*{_TEXT}\s*\]\.(\w{{1,32}})(?:\s*==\s*(?:{_TEXT}|(true|false)))?")
_HAS = re.compile(rf"has\(\s*device\.attributes\[\s*{_TEXT}\s*\]\.(\w{{1,32}})\s*\)")


class UnknownError(Exception):
    """What a class stands for is not known: its selectors are not understood."""


class CannotError(Exception):
    """Why the cluster cannot, in a few words."""


class Usual(NamedTuple):
    """The devices that are looked for: the name that their class usually has, their driver, and what they are."""

    name: str
    driver: str
    want: Want


GPU = Usual(DEVICE_CLASSES[0], "gpu.nvidia.com", ("gpu.nvidia.com", "type", "gpu"))  # and no slice of one
NIC = Usual(DEVICE_CLASSES[1], "dra.net", ("dra.net", "rdma", True))


class DeviceClass(NamedTuple):
    """What a class asks of a device."""

    name: str
    driver: str
    wants: frozenset[Want]

    def fits(self, device: Json) -> bool:
        """Whether a device of a ResourceSlice of this driver has every attribute that is asked for."""
        told = device.get("attributes") or {}
        for domain, name, value in self.wants:
            found = told.get(f"{domain}/{name}") or (told.get(name) if domain == self.driver else None)
            if not found or (value is not None and value not in found.values()):
                return False
        return True


def find(client: Client, api: str, usual: Usual) -> DeviceClass:
    """The class of the usual name; where there is none, the one that asks for these devices and for the least besides.

    CannotError says that there is none, UnknownError that what there is may be it, ApiError what could not be asked.
    """
    try:
        return read(client.get(path_of(api, "deviceclasses", usual.name)))
    except ApiError as error:
        if error.status != 404:
            raise
    found, odd = [], ""
    for page, _ in client.pages(path_of(api, "deviceclasses")):
        for document in page:
            try:
                one = read(document)
            except UnknownError as error:
                odd = odd or (str(error) if usual.driver in _text(document) else "")
                continue
            configured = (document.get("spec") or {}).get("config")  # passed through to a virtual machine, say
            if one.driver == usual.driver and not configured and not _others(one, usual):
                found.append(one)
    if not found and odd:
        raise UnknownError(odd)
    if not found:
        raise CannotError(f"there is no DeviceClass {usual.name}, and no other of driver {usual.driver}")
    return _least(found, usual)


def _others(one: DeviceClass, usual: Usual) -> bool:
    """Whether the class asks for the other devices of this driver: slices of GPUs, NICs without RDMA."""
    domain, name, value = usual.want
    return any(want[:2] == (domain, name) and want[2] not in (value, None) for want in one.wants)


def _least(found: list[DeviceClass], usual: Usual) -> DeviceClass:
    """Of classes that ask for different things none is more right than another."""

    def rank(one: DeviceClass) -> tuple[bool, int]:
        more = {want for want in one.wants if want[:2] != usual.want[:2]}
        return usual.want not in one.wants, len(more)

    best = [one for one in found if rank(one) == min(map(rank, found))]
    if len({one.wants for one in best}) > 1:
        names = ", ".join(sorted(one.name for one in best))
        raise CannotError(f"there is no DeviceClass {usual.name}, and several others of driver {usual.driver}: {names}")
    return min(best, key=lambda one: one.name)


def read(document: Json) -> DeviceClass:
    """What a class asks for. UnknownError names the first thing that is not understood."""
    name = str((document.get("metadata") or {}).get("name", ""))[:253]
    drivers: set[str] = set()
    wants: set[Want] = set()
    for term in filter(None, map(str.strip, _text(document).split("&&"))):
        if driver := _DRIVER.fullmatch(term):
            drivers.add(driver[1] or driver[2])
        elif has := _HAS.fullmatch(term):
            wants.add((has[1] or has[2], has[3], None))
        elif asked := _ATTRIBUTE.fullmatch(term):  # a bare one is true
            wants.add((asked[1] or asked[2], asked[3], asked[4] or asked[5] or asked[6] != "false"))
        else:
            raise UnknownError(f"the selectors of DeviceClass {name} are not understood: {term[:80]!r}")
    if len(drivers) != 1:
        raise UnknownError(f"the selectors of DeviceClass {name} do not name one driver")
    return DeviceClass(name, drivers.pop(), frozenset(wants))


def _text(document: Json) -> str:
    """All of a class's expressions as one, since all must hold; an || within one is not understood anyway."""
    selectors = (document.get("spec") or {}).get("selectors") or ()
    return " && ".join(str((each.get("cel") or {}).get("expression", "")) for each in selectors)

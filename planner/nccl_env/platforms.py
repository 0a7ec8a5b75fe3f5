"""Which platform a node is, and what is published for it: data/platforms.toml, one row per platform with its source.

Recognised from facts on the machine alone: DMI, PCI devices and their drivers, files on the disk. No metadata service
and no other host is asked. A platform that no fact tells is not recognised, and its recipe is not applied.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from planner.advice import Reason, Setting
from planner.nccl_env.situation import NodeView, Situation
from probes.hostinfo.probe import HostinfoFacts

# Chassis asset tags of clouds in DMI: cloud-init, tools/ds-identify (Azure), DataSourceOracle (OCI, bare metal too).
_ASSET_TAGS = {"OracleCloud.com": "oci", "7783-7084-3265-9085-8269-3286-77": "azure"}
_CLOUD_IDS = {"aws": "aws", "azure": "azure", "gce": "gcp", "oracle": "oci"}  # cloud-init's names of them
_VENDORS = (("Amazon EC2", "aws"), ("Google", "gcp"), ("Microsoft Corporation", "azure"), ("Oracle", "oci"))
_SHAPE = re.compile(r"^(BM|VM)\.GPU")  # OCI names its shapes so
CLOUDS = {"aws": "AWS", "azure": "Azure", "gcp": "Google Cloud", "oci": "OCI"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a recipe is written, and the date of the revision that was read."""

    name: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What one source publishes."""

    source: Source
    values: Mapping[str, str]
    set: frozenset[str] = frozenset()  # advised as they stand where the platform is recognised
    by: str = ""  # who sets them, where that is not the user


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One row: the facts that recognise it, and its recipes."""

    name: str
    cloud: str | None = None
    product: str | None = None
    gpu: str | None = None
    fabric: str | None = None
    nics: int = 0
    amd: bool = False
    recognised: bool = True
    recipes: tuple[Recipe, ...] = ()
    script: tuple[str, ...] = ()  # of the vendor, sourced before the job: the first that is there
    plugin: str = ""
    machine: str | None = None
    catalogue: tuple[str, ...] = ()  # names that --machine knows it by
    more: tuple[Source, ...] = field(default=())

    def values(self) -> dict[str, tuple[str, Recipe]]:
        """Every published variable with its recipe."""
        return {name: (value, recipe) for recipe in self.recipes for name, value in recipe.values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Platforms:
    """The whole table."""

    rows: tuple[Platform, ...]
    why: Mapping[str, str]  # variable -> why ours may differ from what is published


@cache
def platforms() -> Platforms:
    """The table as written."""
    data = tomllib.loads((files("planner.nccl_env") / "data" / "platforms.toml").read_text(encoding="utf-8"))
    sources = {name: Source(**row) for name, row in data["source"].items()}
    recipes, more = {}, {}
    for name, row in data["recipe"].items():
        recipes[name] = Recipe(
            source=sources[row["source"]], values=row["values"], set=frozenset(row.get("set", ())), by=row.get("by", "")
        )
        more[name] = tuple(sources[each] for each in row.get("more", ()))
    rows = []
    for row in data["platform"]:
        named = row.pop("recipes")
        rows.append(
            Platform(
                **{**row, "script": tuple(row.get("script", ())), "catalogue": tuple(row.get("catalogue", ()))},
                recipes=tuple(recipes[name] for name in named),
                more=tuple(source for name in named for source in more[name]),
            )
        )
    return Platforms(rows=tuple(rows), why=data["why"])


def cloud_of(info: HostinfoFacts) -> tuple[str, str] | None:
    """The cloud a machine is of and the fact that tells: "oci", "chassis asset tag OracleCloud.com"; else None."""
    tag, vendor, product = info.chassis_asset_tag or "", info.vendor or "", info.product or ""
    if tag in _ASSET_TAGS:
        return _ASSET_TAGS[tag], f"chassis asset tag {tag}"
    if info.cloud_id in _CLOUD_IDS:
        return _CLOUD_IDS[info.cloud_id], f"/run/cloud-init/cloud-id: {info.cloud_id}"
    if _SHAPE.match(product):
        return "oci", f"product {product}"
    found = next((cloud for mark, cloud in _VENDORS if vendor.startswith(mark)), None)
    if found is None and product == "Google Compute Engine":
        found = "gcp"
    return (found, f"DMI vendor {vendor}, product {product}") if found else None


def fabrics(node: NodeView) -> dict[str, int]:
    """What could carry data between nodes, with the number of ports: "efa", "cxi", "infiniband", "roce", "ethernet"."""
    found = {"efa": node.efa_count(), "cxi": len(node.cxi())}
    for view in node.verbs_ports():
        layer = {"InfiniBand": "infiniband", "Ethernet": "roce"}.get(view.port.link_layer or "")
        if layer and view.device.kind == "hca":
            found[layer] = found.get(layer, 0) + 1
    facts = node.interfaces()
    plain = [each for each in facts.interfaces if each.role in ("host", "secondary", "pod-default")] if facts else []
    wired = [each for each in plain if each.master is None and each.running is not False]
    if not any(found.values()):
        found["ethernet"] = len(wired)
    return {name: count for name, count in found.items() if count}


def recognise(node: NodeView) -> Platform | None:
    """The row whose facts all hold for a probed node, or that a machine of the catalogue is of; None where none is."""
    info = node.hostinfo()
    if info is None:
        sku = node.topology.sku if node.topology and not node.snapshot else None
        return next((row for row in platforms().rows if sku in row.catalogue), None)
    cloud = cloud_of(info)
    names = " ".join(node.gpu_names())
    there = fabrics(node)
    for row in platforms().rows:
        if not row.recognised or (row.cloud and (cloud is None or cloud[0] != row.cloud)):
            continue
        if row.product and re.search(row.product, info.product or "") is None:
            continue
        if row.amd != bool(node.amd_gpus() and not node.gpu_count()):
            continue
        if row.gpu and re.search(row.gpu, names) is None:
            continue
        if row.fabric and there.get(row.fabric, 0) < max(1, row.nics):
            continue
        return row
    return None


def which_platform(case: Situation) -> str:
    """The platform of the nodes by name, or "unknown platform, because ..." with the facts that no row knows."""
    for node in case.nodes:
        if (row := recognise(node)) is not None:
            return f"platform {row.name}"
    return "unknown platform, because " + (_unknown(case) or "no node was probed")


def _unknown(case: Situation) -> str:
    for node in case.nodes:
        info = node.hostinfo()
        if info is None:
            continue
        said = " ".join(filter(None, (info.vendor, info.product))) or "nothing"
        cloud = cloud_of(info)
        of = f", which is of {CLOUDS[cloud[0]]}" if cloud else ""
        gpus = f" with {names[0]}" if (names := node.gpu_names()) else ""
        return f"DMI of {node.hostname} says {said}{of}{gpus}, and no published recipe is known for it"
    return ""


def published(case: Situation, name: str) -> Setting | None:
    """A variable's published value, where every node is of one platform that has it among those to set."""
    probed = [node for node in case.nodes if node.snapshot] or list(case.nodes)
    rows = [recognise(node) for node in probed]
    row = rows[0] if rows and all(each == rows[0] for each in rows) else None
    if row is None or row.amd:
        return None
    value, recipe = row.values().get(name, ("", None))
    if recipe is None or name not in recipe.set:
        return None
    if any(name in (info.nccl_conf or {}) for node in probed if (info := node.hostinfo())):
        return None  # the machine's own file says it already, and may say it otherwise
    evidence = "; ".join(dict.fromkeys(_evidence(node, row) for node in probed))
    rule = f"Published for {row.name}; nothing that a probe sees says it"
    source = f"{recipe.source.name}, {recipe.source.date}"
    return Setting(name=name, value=value, reason=Reason(rule=rule, evidence=evidence, source=source))


def settings_as_published(case: Situation) -> Iterator[Setting]:
    """Every variable that the nodes' platform publishes and that is advised as it stands."""
    for name in dict.fromkeys(
        name for row in platforms().rows for recipe in row.recipes for name in sorted(recipe.set)
    ):
        if (found := published(case, name)) is not None:
            yield found


def _evidence(node: NodeView, row: Platform) -> str:
    info = node.hostinfo()
    if info is None:
        return f"{node.hostname}: of the catalogue"
    cloud = cloud_of(info)
    parts = [cloud[1]] if cloud and row.cloud else []
    if row.product:
        parts.append(f"product {info.product}")
    if row.gpu:
        parts.append(", ".join(sorted(set(node.gpu_names()))))
    if row.fabric:
        count = fabrics(node).get(row.fabric, 0)
        parts.append(f"{count} {row.fabric} port{'' if count == 1 else 's'}")
    return f"{node.hostname}: {'; '.join(dict.fromkeys(parts))}"

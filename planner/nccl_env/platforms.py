"""Recognises the platform of a node, and its consequences: published settings, vendor scripts or plugins, SHARP, RCCL.

Recognition uses only facts on the machine: DMI, PCI devices and their drivers, files on disk. No metadata service or
other host is queried. If no fact identifies a platform, its recipe is not applied. Sources: data/platforms.toml, per
row; NCCL docs/userguide/source/{env,troubleshooting}.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from planner.nccl_env.names import Platform, platforms
from planner.nccl_env.situation import NodeView, Note, Reason, Setting, Situation, by_host, note, setting
from probes.hostinfo.probe import HostinfoFacts


def amd(case: Situation) -> Note | None:
    """Report AMD GPUs, which are not checked: for RCCL, NCCL's variables have another meaning or none."""
    if not case.amd:
        return None
    found = [(node.hostname, gpus) for node in case.nodes if (gpus := node.amd_gpus())]
    seen = by_host((host, f"{len(gpus)} AMD GPUs ({gpus[0]})") for host, gpus in found)
    how = "seen (PCI class and vendor)" if any(node.snapshot for node in case.nodes) else "of the catalogue"
    known = [row.name for node in case.nodes if (row := recognise(node)) is not None and row.amd]
    more = ["rccl.published"] if known else []
    return note("rccl.not_judged", seen, *more, how=how, platform=next(iter(known), ""))


def vendor_script(case: Situation) -> Note | None:
    """Report a platform whose vendor's plugin has its own environment, which must not be overridden."""
    for node in case.nodes:
        row = recognise(node)
        if row is None or not row.plugin:
            continue
        info = node.hostinfo()
        there = next((path for path in row.script if info and path in info.vendor_files), None)
        listed = " ".join(f"{name}={value}" for name, (value, _) in row.values().items())
        source = row.recipes[0].source
        if not row.script:
            how = f"set the variables that Google publishes with the installer of the {row.plugin} plugin"
        elif there or info is None:
            how = f"source {there or row.script[0]} in the job's command"
        else:
            how = f"install the {row.plugin} plugin and source its script, {row.script[0]}: it is not on this disk"
        evidence = f"{node.hostname}: {row.name}; {source.name}, {source.date}"
        return note("platform.vendor_script", evidence, how=how, listed=listed)
    return None


def has_vendor_script(case: Situation) -> bool:
    """Whether a node's platform has its own script; then no NCCL_ variable is recommended."""
    return any((row := recognise(node)) is not None and row.plugin for node in case.nodes)


def unknown_platform(case: Situation) -> Note | None:
    """Report a cloud machine that is not in the table: its provider may publish settings that probes cannot see."""
    if any(recognise(node) for node in case.nodes):
        return None
    for node in case.nodes:
        info = node.hostinfo()
        cloud = cloud_of(info) if info else None
        if info is None or not (cloud or info.virtual_machine):
            continue
        of = CLOUDS[cloud[0]] if cloud else info.virtual_machine
        text = which_platform(case)
        return note("platform.unknown", f"{node.hostname}: {of}", platform=text[:1].upper() + text[1:])
    return None


def slingshot_protocol(case: Situation) -> Setting | Note | None:
    """NCCL_PROTO for Slingshot with Grace Hopper: LL128 over GPUDirect produced wrong data there."""
    if not case.cxi or case.older_than((2, 27, 0)):
        return None
    for node in case.nodes:
        if (facts := node.gpu()) and any(gpu.c2c_links for gpu in facts.gpus):
            evidence = f"{node.hostname}: C2C links, {len(_list_cxi(case))} Cassini NICs"
            return setting("proto.slingshot", "^LL128", evidence)
    return None


def slingshot_tuning(case: Situation) -> Note | None:
    """Report settings on which sites with Slingshot disagree."""
    if not case.cxi:
        return None
    return note("cxi.sites_differ", f"{case.nodes[0].hostname}: {', '.join(_list_cxi(case)[:8])}")


def _list_cxi(case: Situation) -> tuple[str, ...]:
    return next((found for node in case.nodes if (found := node.cxi())), ())


# Chassis asset tags of clouds in DMI: cloud-init, tools/ds-identify (Azure), DataSourceOracle (OCI, also bare metal).
_ASSET_TAGS = {"OracleCloud.com": "oci", "7783-7084-3265-9085-8269-3286-77": "azure"}
_CLOUD_IDS = {"aws": "aws", "azure": "azure", "gce": "gcp", "oracle": "oci"}  # names used by cloud-init
_VENDORS = (("Amazon EC2", "aws"), ("Google", "gcp"), ("Microsoft Corporation", "azure"), ("Oracle", "oci"))
_SHAPE = re.compile(r"^(BM|VM)\.GPU")  # OCI's names of shapes
CLOUDS = {"aws": "AWS", "azure": "Azure", "gcp": "Google Cloud", "oci": "OCI"}


def cloud_of(info: HostinfoFacts) -> tuple[str, str] | None:
    """Return the cloud of a machine, and the evidence: "oci", "chassis asset tag OracleCloud.com"; else None."""
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
    """Count the ports of each possible network between nodes: "efa", "cxi", "infiniband", "roce", "ethernet"."""
    found = {"efa": node.efa_count(), "cxi": len(node.cxi())}
    for view in node.verbs_ports():
        layer = {"InfiniBand": "infiniband", "Ethernet": "roce"}.get(view.port.link_layer or "")
        if layer and view.device.kind == "hca":
            found[layer] = found.get(layer, 0) + 1
    plain = [each for each in node.links if each.role in ("host", "secondary", "pod-default")]
    wired = [each for each in plain if each.master is None and each.running is not False]
    if not any(found.values()):
        found["ethernet"] = len(wired)
    return {name: count for name, count in found.items() if count}


def recognise(node: NodeView) -> Platform | None:
    """Return the platform whose facts all match a probed node, or of a catalogue machine; None if there is none."""
    info = node.hostinfo()
    if info is None:
        sku = node.topology.sku if node.topology and not node.snapshot else None
        return next((row for row in platforms() if sku in row.catalogue), None)
    cloud = cloud_of(info)
    names = " ".join(node.gpu_names())
    there = fabrics(node)
    for row in platforms():
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
    """Return the name of the nodes' platform, or "unknown platform, because ..." with the unmatched facts."""
    for node in case.nodes:
        if (row := recognise(node)) is not None:
            return f"platform {row.name}"
    for node in case.nodes:
        if (info := node.hostinfo()) is None:
            continue
        says = " ".join(filter(None, (info.vendor, info.product))) or "nothing"
        cloud = cloud_of(info)
        of = f", which is of {CLOUDS[cloud[0]]}" if cloud else ""
        gpus = f" with {names[0]}" if (names := node.gpu_names()) else ""
        return (
            f"unknown platform, because DMI of {node.hostname} says {says}{of}{gpus}, and no published recipe is known "
            "for it"
        )
    return "unknown platform, because no node was probed"


def published(case: Situation, name: str) -> Setting | None:
    """Return a variable's published value, if all nodes have one platform that recommends it."""
    probed = [node for node in case.nodes if node.snapshot] or list(case.nodes)
    rows = [recognise(node) for node in probed]
    row = rows[0] if rows and all(each == rows[0] for each in rows) else None
    if row is None or row.amd:
        return None
    value, recipe = row.values().get(name, ("", None))
    if recipe is None or name not in recipe.set:
        return None
    if any(name in (info.nccl_conf or {}) for node in probed if (info := node.hostinfo())):
        return None  # the machine's configuration file already sets it, possibly differently
    evidence = "; ".join(dict.fromkeys(_describe_evidence(node, row) for node in probed))
    rule = f"Published for {row.name}. Nothing that a probe reads on a node can confirm the value"
    source = f"{recipe.source.name}, {recipe.source.date}"
    return Setting(name=name, value=value, reason=Reason(rule=rule, evidence=evidence, source=source))


def settings_as_published(case: Situation) -> Iterator[Setting]:
    """Yield every variable that the nodes' platform publishes and that is recommended without change."""
    for name in dict.fromkeys(name for row in platforms() for recipe in row.recipes for name in sorted(recipe.set)):
        if (found := published(case, name)) is not None:
            yield found


def _describe_evidence(node: NodeView, row: Platform) -> str:
    info = node.hostinfo()
    if info is None:
        return f"{node.hostname} is a machine of the catalogue; no node was probed"
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

"""A fine-tune job for a cluster, built from the command line and rendered by the planner's manifests."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from agent.advice import job_settings
from agent.advice.advise import in_pods
from agent.advice.job_settings import grace, job_plan
from agent.base.output import print_text
from agent.checks.measured import ALL_CODES
from agent.checks.verdict import select
from agent.cluster.client import AccessError, ApiError, Client, connect, path_of
from contracts.job_plan import JobPlan, dumps
from contracts.tables import read_texts
from planner.advice import Recommendation
from planner.kubernetes import manifests, networks
from planner.kubernetes.manifests import (
    COMMAND,
    DEVICE_CLASSES,
    MOUNT,
    SAVE_SECONDS,
    Document,
    JobError,
    JobSpec,
    check_form,
    check_size,
    family,
    from_advice,
    storage_rate,
)
from probes.api import Snapshot

# Resource names of device plugins for the devices that a DRA claim requests: NICs shared, by SR-IOV, or of EFA.
NICS = ("rdma/", "openshift.io/", "vpc.amazonaws.com/efa")
DEVICES = ("nvidia.com/", *NICS)
_texts = read_texts(__file__, "cluster_job.toml")


def spec_of(advice: Recommendation, options: Mapping[str, Any], offered: Sequence[str] | None = None) -> JobSpec:
    """Return the job for these options, including the recommendation. Raises JobError, GateError: they name the option.

    `offered` are the nodes' resources, if the cluster was queried; those in --resource come first. With options["dra"]
    the claim requests GPU and NIC, so the job must not also request them from the device plugins.
    """
    if not options["image"]:
        raise JobError("--image: name the fine-tune image; a job for a cluster has none by default")
    name = options["name"]
    optional = {
        **{key: options.get(key) for key in ("token_secret", "queue", "service_account", "preflight_image", "agent")},
        "claim": claim_of(options),
        "topology_label": options["topology"],
        "preflight_require": tuple(options["require"]),
        "measure": bool(options.get("measure")),
        **({"restarts": options["restarts"]} if options.get("restarts") is not None else {}),
        "save_seconds": grace(advice, storage_rate(options.get("storage_rate")), SAVE_SECONDS),
        "resource_claim_template": f"{name}-gpu-nic" if options["dra"] else None,
        **({"device_classes": _device_classes(options["dra"])} if options["dra"] else {}),
        "tolerate": tuple(options["tolerate"]),
        "node_selector": dict(_pair(word, "--node-selector") for word in options["node_selector"]),
        "limits": dict(_pair(word, "--resource") for word in options["resources"]),
    }
    select((), require=options["require"], known=ALL_CODES)
    if options["require"] and not options["preflight_image"]:
        raise JobError(_texts("no_gate", check=options["require"][0]))
    named = tuple(optional["limits"])
    if options["dra"]:
        if twice := [word for word in named if word.startswith(DEVICES)]:
            raise JobError(f"--resource {twice[0]}: with --dra the claim requests GPU and NIC; use only one of the two")
        needs = (n for n in advice.needs if n.name != "resource" or not n.value.startswith(DEVICES))
        advice = replace(advice, needs=tuple(needs))
    spec = from_advice(
        advice, name=name, namespace=options["namespace"], image=options["image"], nodes=options["nodes"] or 1,
        allocatable=offered, named=named, config_map=f"{name}-config", command=COMMAND,
        **optional,
    )  # fmt: skip
    if not options["dra"]:
        return spec
    return replace(spec, limits={name: n for name, n in spec.limits.items() if not name.startswith(DEVICES)})


def warnings(spec: JobSpec) -> Iterator[str]:
    """Warn about problems of a job that can be launched."""
    nics = [name for name in spec.limits if family("rdma/*", [name]) or name.startswith(NICS)]
    has_nic = spec.resource_claim_template or any(spec.limits[name] != "0" for name in nics)
    if spec.nodes > 1 and spec.ipc_lock and not has_nic:
        yield _texts("no_rdma")
    classes = (
        *(spec.device_classes if spec.resource_claim_template else ()),
        *(("compute-domain-default-channel.nvidia.com",) if spec.compute_domain else ()),
    )
    if spec.queue and classes:
        yield _texts("queue_of_claims", queue=spec.queue, classes=", ".join(classes))
    if not spec.claim:
        yield _texts("no_claim")


def _device_classes(words: Sequence[str]) -> tuple[str, str]:
    """Return the DeviceClasses of GPU and NIC from --dra gpu=NAME and nic=NAME, by default the usual names."""
    found = dict(zip(("gpu", "nic"), DEVICE_CLASSES, strict=True))
    for word in words:
        kind, name = _pair(word, "--dra")
        if kind not in found:
            raise JobError(f"--dra {word}: must be gpu=NAME or nic=NAME, NAME a DeviceClass of the cluster")
        check_form("object", "--dra=", name)
        found[kind] = name
    return found["gpu"], found["nic"]


def without_compute_domain(advice: Recommendation) -> Recommendation:
    """Remove the ComputeDomain, and print what that means to stderr."""
    needs = tuple(need for need in advice.needs if need.name != "compute_domain")
    if len(needs) < len(advice.needs):
        print_text("warning: no ComputeDomain: between nodes NCCL uses the network, not NVLink", err=True)
    return replace(advice, needs=needs)


def for_pods(
    advice: Recommendation, options: Mapping[str, Any], found: Sequence[Snapshot]
) -> tuple[Recommendation, list[str]]:
    """Remove settings that apply to a host but not to a pod; return a line for each removed setting."""
    # without --host this machine was scanned: a pod of the node, or the administrator's machine
    here = not options.get("hosts") and not options.get("machine")
    return in_pods(advice, found, here=here)


def documents(spec: JobSpec, api: str, plan: JobPlan) -> tuple[Document, ...]:
    """Return the ConfigMap with the job's plan, then the job for the chosen API."""
    return (manifests.config_map(spec, {"plan.json": dumps(plan)}), *manifests.APIS[api](spec))


def network(found: Sequence[Snapshot], namespace: str, host_mofed: bool | None = None) -> tuple[Document, ...]:
    """Return the network resources for the scanned interfaces; `host_mofed` None: as the nodes show it."""
    named = {} if host_mofed is None else {"host_mofed": host_mofed}
    return networks.network(networks.from_snapshots(found, namespace=namespace, **named))


def on_rails(advice: Recommendation, options: Mapping[str, Any], found: Sequence[Snapshot]) -> Recommendation:
    """Adapt the recommendation to the networks that --network prints with the job, if there are several.

    The record of a pod attached to them already contains them, and a single-node job does not need them.
    """
    if not options["with_network"] or (options["nodes"] or 1) == 1 or networks.seen_from_a_pod(found):
        return advice
    spec = networks.from_snapshots(found, namespace=options["namespace"])
    if len(spec.interfaces) < 2 or any(need.name == "network" for need in advice.needs):
        return advice
    named = family("rdma/*", _named_by_user(options))
    return networks.attached(
        advice, found, networks=[f"{rail.namespace}/{rail.name}" for rail in spec.rails()], interfaces=spec.interfaces,
        resource=None if named else f"rdma/{spec.resource_name}",
    )  # fmt: skip


def network_warnings(found: Sequence[Snapshot], host_mofed: bool | None) -> Iterator[str]:
    """Warn about the network resources of these nodes."""
    names, spec = networks.seen_from_a_pod(found), networks.from_snapshots(found)
    if names:
        yield _texts("names_of_pods", names=", ".join(names))
    elif len(rails := spec.rails()) > 1 and (taken := networks.in_use([rail.range for rail in rails], found)):
        yield _texts("ranges_in_use", taken=taken)
    if host_mofed is None and spec.host_mofed is None:
        yield _texts("driver_unknown")


def claim_of(options: Mapping[str, Any]) -> str | None:
    """Return the claim's name; a claim created without a name is called "shared"."""
    return options["claim"] or ("shared" if options.get("storage_class") else None)


def storage(options: Mapping[str, Any]) -> tuple[Document, ...]:
    """Return the claim to create, if a storage class is given."""
    if not options["storage_class"]:
        return ()
    check_form("object", "--storage-class=", options["storage_class"])
    check_size("--storage-size", options["storage_size"])
    claim = networks.shared_claim(
        name=claim_of(options) or "", namespace=options["namespace"], size=options["storage_size"],
        storage_class=options["storage_class"],
    )  # fmt: skip
    return (claim,)


def plan_of(advice: Recommendation, options: Mapping[str, Any], found: Sequence[Snapshot] = ()) -> JobPlan:
    """The job's document: the run on the claim, unless the settings say where. JobError where nothing can train."""
    output = str(_explicit_settings(options).get("output_dir", ""))
    folder = _on_claim(output or options["name"])
    more = (f"output_dir={folder}",) if claim_of(options) else ()
    plan = job_plan(advice, options.get("config"), (*options.get("overrides", ()), *more), found)
    if not more or output in ("", folder):
        return plan
    return replace(plan, notes=(*plan.notes, f"output_dir: {output} is {folder}, on the claim"))


def _on_claim(folder: str) -> str:
    """Return a folder of the settings as the pods see it; a relative path is on the claim."""
    return posixpath.normpath(posixpath.join(MOUNT, folder))


def refuse_what_cannot_train(advice: Recommendation, options: Mapping[str, Any]) -> None:
    """Raise JobError if the pods would train nothing, or could not store the result; the message says what to add."""
    explicit, nodes = _explicit_settings(options), options["nodes"] or 1
    if why := job_settings.untrainable(advice, explicit):
        raise JobError(why)
    if nodes > 1 and not claim_of(options):
        raise JobError(_texts("one_folder", nodes=nodes))
    output = explicit.get("output_dir")
    if nodes > 1 and output is not None and not _on_claim(str(output)).startswith(f"{MOUNT}/"):
        raise JobError(f"output_dir={output}: {nodes} nodes write the same run: must be below {MOUNT}, the claim")


def _explicit_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of --config, overridden by --set."""
    trainer = options.get("trainer", job_settings.OURS)
    return job_settings.settings(options.get("config"), options.get("overrides", ()), trainer).explicit


def resources_for(advice: Recommendation, options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the resources that the nodes offer, if the job needs a family ("rdma/*") of which the user named none."""
    needed = [need.value.partition(": ")[0] for need in advice.needs if need.name == "resource"]
    named = _named_by_user(options)
    if options["dra"] or not any(name.endswith("/*") and not family(name, named) for name in needed):
        return None
    try:
        return _offered(connect(options["context"]), options)
    except (AccessError, ApiError) as error:
        why = f"the nodes' resources: {error}; --resource NAME=COUNT needs no cluster"
        raise click.ClickException(why) from None


def _named_by_user(options: Mapping[str, Any]) -> list[str]:
    return [word.partition("=")[0] for word in options["resources"]]


def _offered(client: Client, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return extended resources that enough of the selected nodes can allocate (node.status.allocatable)."""
    query = {"labelSelector": ",".join(options["node_selector"])} if options["node_selector"] else {}
    having: Counter[str] = Counter()
    for node in client.items(path_of("v1", "nodes"), query):
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        having.update(name for name, count in allocatable.items() if "/" in name and str(count) != "0")
    return tuple(sorted(name for name, count in having.items() if count >= (options["nodes"] or 1)))


def _pair(word: str, option: str) -> tuple[str, str]:
    name, found, value = word.partition("=")
    if not found or not name or not value:
        raise JobError(f"{option} {word!r}: must be NAME=VALUE")
    return name, value

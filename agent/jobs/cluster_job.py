"""A fine-tune job for a cluster: build it from the command line, create it, and read the state of its pods.

The planner's manifests render the job. Surface: the job APIs, and pods of core/v1 in the job's namespace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.advice import job_plan
from agent.base.options import split_pair
from agent.base.output import print_text
from agent.checks.host_checks import ALL_CODES
from agent.checks.verdict import select
from agent.cluster.client import ApiError, Client, json_object, make_path
from agent.jobs.launch import LaunchOptions
from contracts.job_config import JobPlan, dump_plan
from contracts.redaction import redact
from contracts.run_record import RunRecord, record_of
from contracts.tables import read_texts
from planner.advice import Recommendation
from planner.kubernetes import manifests, networks
from planner.kubernetes.manifests import MOUNT, RESTARTS, SAVE_SECONDS, Document, JobError, JobSpec, find_resources
from probes.api import Snapshot

DEVICES = ("nvidia.com/", *networks.NICS)  # resource names of device plugins for what a DRA claim requests
_texts = read_texts(__file__, "cluster_job.toml")


def build_spec(advice: Recommendation, options: LaunchOptions) -> JobSpec:
    """Return the job for these options, including the recommendation. Raises JobError, GateError: they name the option.

    With --dra the claim requests GPU and NIC, so the job must not also request them from the device plugins.
    """
    if not options.image:
        raise JobError("--image: name the fine-tune image; a job for a cluster has none by default")
    device_classes = _parse_device_classes(options.dra)
    node_selector = dict(split_pair("--node-selector", word) for word in options.node_selector)
    limits = dict(split_pair("--resource", word) for word in options.resources)
    select((), require=options.require, codes=ALL_CODES)
    if options.require and not options.preflight_image:
        raise JobError(_texts("no_gate", check=options.require[0]))
    if options.dra:
        if twice := [word for word in limits if word.startswith(DEVICES)]:
            raise JobError(f"--resource {twice[0]}: with --dra the claim requests GPU and NIC; use only one of the two")
        needs = (n for n in advice.needs if n.name != "resource" or not n.value.startswith(DEVICES))
        advice = replace(advice, needs=tuple(needs))
    spec = manifests.make_job_spec(
        advice, name=options.name, namespace=options.namespace, image=options.image, nodes=options.nodes or 1,
        limits=limits, config_map=f"{options.name}-config", claim=name_claim(options), queue=options.queue,
        token_secret=options.token_secret, topology_label=options.topology, service_account=options.service_account,
        node_selector=node_selector, tolerate=options.tolerate, agent=options.agent, measure=options.measure,
        preflight_image=options.preflight_image, preflight_require=options.require, device_classes=device_classes,
        resource_claim_template=f"{options.name}-gpu-nic" if options.dra else None,
        restarts=RESTARTS if options.restarts is None else options.restarts,
        save_seconds=job_plan.estimate_grace(advice, options.storage_rate, SAVE_SECONDS),
    )  # fmt: skip
    if not options.dra:
        return spec
    return replace(spec, limits={name: n for name, n in spec.limits.items() if not name.startswith(DEVICES)})


def list_warnings(spec: JobSpec) -> Iterator[str]:
    """Warn about problems of a job that can be launched."""
    nics = [name for name in spec.limits if find_resources("rdma/*", [name]) or name.startswith(networks.NICS)]
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


def _parse_device_classes(arguments: Sequence[str]) -> tuple[str, str]:
    """Return the DeviceClasses of GPU and NIC from --dra gpu=NAME and nic=NAME, by default the usual names."""
    classes = dict(zip(("gpu", "nic"), manifests.DEVICE_CLASSES, strict=True))
    for word in arguments:
        kind, name = split_pair("--dra", word)
        if kind not in classes:
            raise JobError(f"--dra {word}: must be gpu=NAME or nic=NAME, NAME a DeviceClass of the cluster")
        manifests.check_form("object", "--dra=", name)
        classes[kind] = name
    return classes["gpu"], classes["nic"]


def without_compute_domain(advice: Recommendation) -> Recommendation:
    """Remove the ComputeDomain, and print what that means to stderr."""
    needs = tuple(need for need in advice.needs if need.name != "compute_domain")
    if len(needs) < len(advice.needs):
        print_text("warning: no ComputeDomain: between nodes NCCL uses the network, not NVLink", err=True)
    return replace(advice, needs=needs)


def build_documents(spec: JobSpec, api: str, plan: JobPlan) -> tuple[Document, ...]:
    """Return the ConfigMap with the job's plan, then the job for the chosen API."""
    config_map = manifests.from_template("config_map", spec=spec, files={"plan.json": dump_plan(plan)})
    return config_map + manifests.APIS[api](spec)


def add_rails(advice: Recommendation, options: LaunchOptions, snapshots: Sequence[Snapshot]) -> Recommendation:
    """Adapt the recommendation to the networks that --network prints with the job, if there are several.

    The record of a pod attached to them already contains them, and a single-node job does not need them.
    """
    if not options.with_network or (options.nodes or 1) == 1 or networks.list_pod_netdevs(snapshots):
        return advice
    spec = networks.from_snapshots(snapshots, namespace=options.namespace)
    if len(spec.interfaces) < 2 or any(need.name == "network" for need in advice.needs):
        return advice
    own_resource = find_resources("rdma/*", [word.partition("=")[0] for word in options.resources])
    return networks.attach(
        advice, snapshots, networks=[f"{rail.namespace}/{rail.name}" for rail in spec.rails()],
        interfaces=spec.interfaces, resource=None if own_resource else f"rdma/{networks.RESOURCE}",
    )  # fmt: skip


def list_network_warnings(snapshots: Sequence[Snapshot], host_mofed: bool | None) -> Iterator[str]:
    """Warn about the network resources of these nodes."""
    names, spec = networks.list_pod_netdevs(snapshots), networks.from_snapshots(snapshots)
    if names:
        yield _texts("names_of_pods", names=", ".join(names))
    elif len(rails := spec.rails()) > 1 and (
        ranges_in_use := networks.find_overlaps([rail.range for rail in rails], snapshots)
    ):
        yield _texts("ranges_in_use", taken=ranges_in_use)
    if host_mofed is None and spec.host_mofed is None:
        yield _texts("driver_unknown")


def name_claim(options: LaunchOptions) -> str | None:
    """Return the claim's name; a claim created without a name is called "shared"."""
    return options.claim or ("shared" if options.storage_class else None)


def build_claim(options: LaunchOptions) -> tuple[Document, ...]:
    """Return the claim to create, if a storage class is given."""
    if not options.storage_class:
        return ()
    manifests.check_form("object", "--storage-class=", options.storage_class)
    manifests.check_size("--storage-size", options.storage_size)
    return manifests.from_template(
        "claim", name=name_claim(options) or "", namespace=options.namespace, size=options.storage_size,
        storage_class=options.storage_class,
    )  # fmt: skip


def build_plan(advice: Recommendation, options: LaunchOptions, snapshots: Sequence[Snapshot]) -> JobPlan:
    """Return the job's plan, which writes to the claim unless the settings name a folder. Raises RequestError."""
    output = str(job_plan.read_explicit_settings(advice, options.request).get("output_dir", ""))
    folder = manifests.place_on_claim(output or options.name)
    more = (f"output_dir={folder}",) if name_claim(options) else ()
    plan = job_plan.build_job_plan(advice, options.request.with_settings(*more), snapshots)
    if not more or output in ("", folder):
        return plan
    return replace(plan, notes=(*plan.notes, f"output_dir: {output} is {folder}, on the claim"))


def refuse_untrainable(advice: Recommendation, options: LaunchOptions) -> None:
    """Raise JobError if the pods would train nothing, or could not store the result; the message says what to add."""
    explicit, nodes = job_plan.read_explicit_settings(advice, options.request), options.nodes or 1
    if refusal := job_plan.explain_untrainable(advice, explicit):
        raise JobError(refusal)
    if nodes > 1 and not name_claim(options):
        raise JobError(_texts("one_folder", nodes=nodes))
    output = explicit.get("output_dir")
    if nodes > 1 and output is not None and not manifests.place_on_claim(str(output)).startswith(f"{MOUNT}/"):
        raise JobError(f"output_dir={output}: {nodes} nodes write the same run: must be below {MOUNT}, the claim")


# Create the job in its cluster, and read its state.


def create(client: Client, documents: Sequence[Document]) -> Iterator[str]:
    """Create the objects through the API, after the server has accepted each in a dry run.

    The job, which is last, must be new. An existing claim is not changed; other objects are applied over those of an
    earlier launch. Yields a line per object. Raises ApiError with what the server refused and what was created before.
    """
    done: list[str] = []
    for really in (False, True):
        for document in documents:
            name = name_object(document)
            try:
                line = _send(client, document, is_job=document is documents[-1], dry_run=not really)
            except ApiError as error:
                so_far = f"; created before it: {', '.join(done)}" if done else "; nothing was created"
                raise ApiError(error.status, f"{name}: {error}{so_far}") from None
            if really:
                done += [name] if line == "created" else []
                yield f"{name} {line}"


def name_object(document: Document) -> str:
    """Return kind and name as kubectl writes them: "job/sft"."""
    return f"{document['kind'].lower()}/{document['metadata']['name']}"


def make_object_path(client: Client, document: Document, name: str = "") -> str:
    """Return the URL path of an object, or of its kind without a name."""
    namespace = document["metadata"].get("namespace") or client.namespace
    return make_path(document["apiVersion"], f"{document['kind'].lower()}s", name, namespace=namespace)


def _send(client: Client, document: Document, *, is_job: bool, dry_run: bool) -> str:
    """Create an object, or apply it over that of an earlier launch; return what was done."""
    path = make_object_path(client, document, document["metadata"]["name"])
    if not is_job and document["kind"] != "PersistentVolumeClaim":
        new, _ = client.apply(path, document, dry_run=dry_run)
        return "created" if new else "was there: updated"
    try:  # applying another size would resize a claim that is not ours, and a job must be new
        client.create(make_object_path(client, document), document, dry_run=dry_run)
        return "created"
    except ApiError as error:
        if error.status != 409:
            raise
        if not is_job:
            return "already exists and was not changed"
        state = read_job_state(client.get(path))
        if state == "failed":
            namespace = document["metadata"].get("namespace") or client.namespace
            delete = f"`kubectl delete {name_object(document)} -n {namespace}`"
            again = f"{delete}, then the same command resumes from its checkpoints"
            raise ApiError(409, f"{error}, and has failed: {again}") from None
        state_text = "complete: --name gives the next one another name" if state == "complete" else "not done"
        raise ApiError(409, f"{error}, and is {state_text}") from None


def list_pods(client: Client, job: Document, api: str) -> list[Document]:
    """Return the pods of a job. Raises ApiError."""
    about = job["metadata"]
    path = make_path("v1", "pods", namespace=about.get("namespace") or client.namespace)
    listed = client.items(path, {"labelSelector": f"{manifests.POD_LABELS[api]}={about['name']}"})
    return list({pod["metadata"]["name"]: pod for pod in listed}.values())


def read_job_state(job: Document) -> str:
    """Return "failed", "complete" or "", from the conditions that job APIs write."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    true = {str(each.get("type")) for each in conditions if str(each.get("status")) == "True"}
    return "failed" if "Failed" in true else "complete" if true & {"Complete", "Completed", "Succeeded"} else ""


def _read_termination_message(container: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the termination message of a container, and its members if it is a fine-tune job's short record."""
    text = str(((container.get("state") or {}).get("terminated") or {}).get("message") or "")
    return text, json_object(text) or {}


def read_short_record(pod: Mapping[str, Any]) -> RunRecord | None:
    """Return the short record that pod 0 left as its termination message; None if there is none."""
    for each in (pod.get("status") or {}).get("containerStatuses") or ():
        _text, record = _read_termination_message(each)
        with contextlib.suppress(ValueError):  # a record of another program
            if "transports" in record:
                return record_of(record)
    return None


def list_condition_reasons(job: Document, condition: str) -> list[str]:
    """Return the reasons of a condition in a job's own status, because its pods may be gone or not exist yet."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return [_line(str(each.get("reason") or condition), "", each.get("message")) for each in conditions
            if each.get("type") == condition and str(each.get("status")) == "True"]  # fmt: skip


def explain_waiting(pod: Mapping[str, Any]) -> str:
    """Return why a pod does not run: a container that cannot start, the scheduler, or its phase; empty if it runs."""
    status = pod.get("status") or {}
    waiting = [(each.get("state") or {}).get("waiting") or {} for each in _list_containers(status)]
    reasons = [each for each in waiting if each.get("reason") not in (None, "PodInitializing")]
    reasons += [each for each in status.get("conditions") or ()
              if each.get("type") == "PodScheduled" and each.get("status") == "False"]  # fmt: skip
    reasons += [{"reason": "Pending"}] if status.get("phase") == "Pending" else []
    return _line(pod["metadata"]["name"], str(reasons[0].get("reason")), reasons[0].get("message")) if reasons else ""


def _list_containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def describe_failure(pod: Mapping[str, Any]) -> str:
    """Return which container of a failed pod exited with which code; empty if it did not fail."""
    status = pod.get("status") or {}
    if status.get("phase") != "Failed":
        return ""
    for each in _list_containers(status):
        ended = (each.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            reason = "" if ended.get("reason") in (None, "Error", "Completed") else f" ({ended['reason']})"
            text, record = _read_termination_message(each)
            ending = f"{each.get('name')} ended with exit code {ended['exitCode']}{reason}"
            return _line(pod["metadata"]["name"], ending, redact(str(record.get("reason") or "") if record else text))
    return _line(pod["metadata"]["name"], str(status.get("reason") or "Failed"), status.get("message"))


def _line(name: str, reason: str, message: object) -> str:
    return ": ".join(part for part in (name, reason, " ".join(str(message or "").split())[:400]) if part)

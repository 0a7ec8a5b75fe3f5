"""Renders one JobSpec for the job APIs in use: TrainJob with its TrainingRuntime, PyTorchJob, plain Indexed Job.

Specifications: trainer.kubeflow.org/v1alpha1 (Kubeflow Trainer 2.0 to 2.3), kubeflow.org/v1 (Training Operator 1.7 to
1.9; resource claims need 1.9), batch/v1, resource.k8s.io/v1. Documents are dicts: text is made by the YAML library
alone, so hostile names stay data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import yaml

from planner.job import MOUNT, JobSpec

Document = dict[str, Any]
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-required-topology"
GROUP_ANNOTATION = "kueue.x-k8s.io/podset-group-name"  # of Kueue 0.13: two pod sets placed as one
NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"
AGENT_AUDIENCE = "topoflight"  # whom the agent's TokenReview expects a token to be for
AGENT_TOKEN = "/var/run/secrets/topoflight"  # noqa: S105 - a folder


class _Dumper(yaml.SafeDumper):
    """Safe YAML that keeps the lines of files inside a ConfigMap, and never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        """Manifests are read by people and by tools that know no aliases."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=_style(value))


def _style(value: str) -> str | None:
    """A file as its lines, where that reads back as it was; PyYAML does not mend a style that cannot hold the text."""
    if not all(letter.isprintable() or letter in "\n\t" for letter in value):
        return '"'
    lines = value.split("\n")
    whole = not value[:1].isspace() and all(line == line.rstrip() for line in lines)
    return "|" if len(lines) > 1 and whole else None


_Dumper.add_representer(str, _text)


def render(documents: Iterable[Document]) -> str:
    """Documents as one YAML stream."""
    return str(yaml.dump_all(list(documents), Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True))


def trainjob(spec: JobSpec) -> tuple[Document, ...]:
    """A namespaced TrainingRuntime that holds what a TrainJob cannot patch (shm, IPC_LOCK, networks), and the job."""
    pod = pod_template(spec, container="node")
    container = pod["spec"]["containers"][0]
    # The Trainer carries limits and requests of a TrainJob over to the pod and nothing else of its resources
    # (pkg/runtime/core/trainingruntime.go, plugins/jobset/builder.go): claims reach it from the runtime alone, and only
    # where the TrainJob has no resources of its own.
    resources = {} if spec.resource_claim_template else container.pop("resources", {})
    environment = container.pop("env", [])
    container.pop("command", None)
    # Said once more than the Trainer needs: Kueue 0.15.0 counts a TrainJob's pods by its runtime's Job, not by numNodes
    body: Document = {"parallelism": spec.nodes, "completions": spec.nodes, "template": pod}
    if spec.active_deadline_seconds:  # of the batch/v1 Job below: a TrainJob has a deadline of its own from 2.2 only
        body["activeDeadlineSeconds"] = spec.active_deadline_seconds
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(spec, labels={"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": spec.nodes, "torch": {}},
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                "spec": body,
                            },
                        }
                    ]
                }
            },
        },
    }
    trainer: Document = {
        "image": spec.image,
        "command": list(spec.command),
        "numNodes": spec.nodes,
        "numProcPerNode": spec.processes_per_node,
        "env": environment,
        "resourcesPerNode": resources,
    }
    job: Document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(spec, labels=_queue(spec)),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": spec.name},
            "trainer": {key: value for key, value in trainer.items() if value not in ([], {})},
        },
    }
    if spec.queue:
        job["spec"]["suspend"] = True  # Kueue admits it
    return (*claim_templates(spec), runtime, job)


def pytorchjob(spec: JobSpec) -> tuple[Document, ...]:
    """PyTorchJob v1: Master 1 and Worker n-1, container `pytorch`, as OpenShift AI 2.19 documents it."""
    counts = {"Master": 1, "Worker": spec.nodes - 1} if spec.nodes > 1 else {"Master": 1}
    replicas: Document = {}
    for role, count in counts.items():
        template = pod_template(spec, container="pytorch")
        if spec.topology_label and spec.nodes > 1:
            # Kueue holds each pod set to one domain by itself; in a group Master and Worker share theirs
            template["metadata"]["annotations"][GROUP_ANNOTATION] = spec.name
        replicas[role] = {"replicas": count, "restartPolicy": "OnFailure", "template": template}
    policy: Document = {}
    if spec.queue:
        policy["suspend"] = True
    if spec.active_deadline_seconds:
        policy["activeDeadlineSeconds"] = spec.active_deadline_seconds
    job: Document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(spec, labels=_queue(spec)),
        "spec": {"nprocPerNode": str(spec.processes_per_node), "pytorchReplicaSpecs": replicas},
    }
    if policy:
        job["spec"]["runPolicy"] = policy
    return (*claim_templates(spec), job)


def indexed_job(spec: JobSpec) -> tuple[Document, ...]:
    """A headless Service and an Indexed Job whose pods meet through torchrun: needs no operator."""
    port = 29500  # torchrun's own default
    address = f"{spec.name}-0.{spec.name}"
    pod = pod_template(spec, container="rank")
    body = pod["spec"]
    body.update(subdomain=spec.name, restartPolicy="Never")
    container = body["containers"][0]
    rest = (
        [word for word in spec.command if word != "torchrun"]
        if spec.command[:1] == ("torchrun",)
        else list(spec.command)
    )
    container["command"] = [
        "torchrun", f"--nnodes={spec.nodes}", f"--nproc-per-node={spec.processes_per_node}", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={address}:{port}", f"--rdzv-id={spec.name}", *rest,
    ]  # fmt: skip
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the pods must find each other before any is ready
            "selector": {"job-name": spec.name},
            "ports": [{"name": "rendezvous", "port": port}],
        },
    }
    job: Document = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(spec, labels=_queue(spec)),
        "spec": {
            "completions": spec.nodes,
            "parallelism": spec.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": pod,
        },
    }
    if spec.queue:
        job["spec"]["suspend"] = True
    if spec.active_deadline_seconds:
        job["spec"]["activeDeadlineSeconds"] = spec.active_deadline_seconds
    return (*claim_templates(spec), service, job)


def pod_template(spec: JobSpec, *, container: str) -> Document:
    """The pod of every API: resources, environment, shm, networks, and the gate before it."""
    main: Document = {
        "name": container,
        "image": spec.image,
        "command": list(spec.command),
        "env": [{"name": name, "value": value} for name, value in {**spec.environment, **_agent(spec)}.items()]
        + _token(spec),
        "resources": _resources(spec),
        "securityContext": _security(spec),
        "volumeMounts": _mounts(spec),
    }
    body: Document = {"containers": [{key: value for key, value in main.items() if value not in ([], {})}]}
    if spec.preflight_image:
        body["initContainers"] = [_gate(spec)]
    volumes = _volumes(spec)
    if volumes:
        body["volumes"] = volumes
    if spec.resource_claim_template:
        body["resourceClaims"] = [{"name": "gpu-nic", "resourceClaimTemplateName": spec.resource_claim_template}]
    if spec.service_account:
        body["serviceAccountName"] = spec.service_account
    if spec.node_selector:
        body["nodeSelector"] = dict(spec.node_selector)
    if spec.tolerate:
        body["tolerations"] = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in spec.tolerate]
    template: Document = {"spec": body}
    annotations: dict[str, str] = {}
    if spec.networks:
        annotations[NETWORKS_ANNOTATION] = spec.qualified_networks
    if spec.topology_label:
        annotations[TOPOLOGY_ANNOTATION] = spec.topology_label
    if annotations:
        template["metadata"] = {"annotations": annotations}
    return template


def _gate(spec: JobSpec) -> Document:
    """The preflight as an init container: its exit code stops the pod before the job starts."""
    words = ["topoflight", "preflight", "-o", "table"]
    for check in spec.preflight_require:
        words += ["--require", check]
    gate: Document = {"name": "preflight", "image": spec.preflight_image, "command": words}
    gate["resources"] = _resources(spec)  # it judges the devices that this pod gets, not the node's
    gate["securityContext"] = _security(spec)
    gate["volumeMounts"] = [mount for mount in _mounts(spec) if mount["mountPath"] == "/dev/shm"]  # noqa: S108
    return {key: value for key, value in gate.items() if value not in ([], {})}


def _token(spec: JobSpec) -> list[Document]:
    if not spec.token_secret:
        return []
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": spec.token_secret, "key": "HF_TOKEN"}}}]


def _agent(spec: JobSpec) -> dict[str, str]:
    """Where the job leaves its flight record besides its output folder (docs/finetune.md)."""
    if not spec.agent:
        return {}
    return {"TOPOFLIGHT_AGENT": spec.agent, "TOPOFLIGHT_AGENT_TOKEN_FILE": f"{AGENT_TOKEN}/token"}


def _resources(spec: JobSpec) -> Document:
    resources: Document = {}
    if spec.limits:
        # an extended resource must be requested as it is limited, or the pod is refused
        resources = {"limits": dict(spec.limits), "requests": dict(spec.limits)}
        if any(name.startswith("hugepages-") for name in spec.limits) and not {"cpu", "memory"} & spec.limits.keys():
            # Kubernetes refuses huge pages alone ("HugePages require cpu or memory"); each rank keeps one core busy
            resources["requests"]["cpu"] = str(spec.processes_per_node)
    if spec.resource_claim_template:
        resources["claims"] = [{"name": "gpu-nic"}]
    return resources


def _security(spec: JobSpec) -> Document:
    return {"capabilities": {"add": ["IPC_LOCK"]}} if spec.ipc_lock else {}


def _mounts(spec: JobSpec) -> list[Document]:
    mounts: list[Document] = []
    if spec.config_map:
        mounts.append({"name": "config", "mountPath": "/etc/config"})
    if spec.claim:
        mounts.append({"name": "shared", "mountPath": MOUNT})
    if spec.shm_bytes:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - the pod's own
    if spec.agent:
        mounts.append({"name": "agent-token", "mountPath": AGENT_TOKEN, "readOnly": True})
    return mounts


def _volumes(spec: JobSpec) -> list[Document]:
    volumes: list[Document] = []
    if spec.config_map:
        volumes.append({"name": "config", "configMap": {"name": spec.config_map}})
    if spec.claim:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": spec.claim}})
    if spec.shm_bytes:
        size = f"{-(-spec.shm_bytes // 2**20)}Mi"
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    if spec.agent:  # of the pod's service account, good for the agent alone, renewed by the kubelet
        token = {"audience": AGENT_AUDIENCE, "expirationSeconds": 3600, "path": "token"}
        volumes.append({"name": "agent-token", "projected": {"sources": [{"serviceAccountToken": token}]}})
    return volumes


def claim_templates(spec: JobSpec) -> tuple[Document, ...]:
    """A DRA ResourceClaimTemplate that takes GPU and NIC from one PCIe root, where the job asks for one."""
    if not spec.resource_claim_template:
        return ()
    count = spec.processes_per_node
    classes = tuple(zip(("gpu", "nic"), spec.device_classes, strict=True))
    requests = [{"name": name, "exactly": {"deviceClassName": device, "count": count}} for name, device in classes]
    align = {"requests": ["gpu", "nic"], "matchAttribute": "resource.kubernetes.io/pcieRoot"}
    devices: Document = {"requests": requests}
    if count == 1:  # a constraint holds for all devices of its requests: several GPUs do not share one root
        devices["constraints"] = [align]
    else:
        devices["requests"] = [
            {"name": f"{name}{i}", "exactly": {"deviceClassName": device, "count": 1}}
            for i in range(count)
            for name, device in classes
        ]
        devices["constraints"] = [
            {"requests": [f"gpu{i}", f"nic{i}"], "matchAttribute": "resource.kubernetes.io/pcieRoot"}
            for i in range(count)
        ]
    return (
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": spec.resource_claim_template, "namespace": spec.namespace},
            "spec": {"spec": {"devices": devices}},
        },
    )


def config_map(spec: JobSpec, files: dict[str, str]) -> Document:
    """The ConfigMap with the job's configuration and plan."""
    if not spec.config_map:
        raise ValueError("config_map: the job names none")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": spec.config_map, "namespace": spec.namespace},
        "data": dict(files),
    }


def _metadata(spec: JobSpec, labels: dict[str, str] | None = None) -> Document:
    return {"name": spec.name, "namespace": spec.namespace, **({"labels": labels} if labels else {})}


def _queue(spec: JobSpec) -> dict[str, str]:
    return {QUEUE_LABEL: spec.queue} if spec.queue else {}


APIS: dict[str, Callable[[JobSpec], tuple[Document, ...]]] = {
    "trainjob": trainjob,
    "pytorchjob": pytorchjob,
    "job": indexed_job,
}

"""Renders one JobSpec for the job APIs in use: TrainJob with its TrainingRuntime, PyTorchJob, JobSet, Indexed Job.

Specifications: trainer.kubeflow.org/v1alpha1 (Kubeflow Trainer 2.0 to 2.3), kubeflow.org/v1 (Training Operator 1.7 to
1.9; resource claims need 1.9), jobset.x-k8s.io/v1alpha2, batch/v1, resource.k8s.io/v1, resource.nvidia.com/v1beta1
(NVIDIA's DRA driver 25.3 to 0.4). Documents are dicts: text is made by the YAML library alone, so hostile names stay
data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import yaml

from contracts.plain import PlainError, loads
from contracts.run_record import KILLED, RESUMABLE
from planner.kubernetes.job import CACHE, DEVICE_CLASSES, END_SECONDS, MOUNT, JobSpec, toleration

Document = dict[str, Any]
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-required-topology"
GROUP_ANNOTATION = "kueue.x-k8s.io/podset-group-name"  # of Kueue 0.13: two pod sets placed as one
NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"


def attached(documents: Any) -> list[str]:
    """Interfaces that Multus makes in the pods of these documents: as their networks name them, else net1 to netN."""
    found: list[str] = []
    for one in mappings(documents):
        marks = one.get("annotations")
        networks = marks.get(NETWORKS_ANNOTATION) if isinstance(marks, dict) else None
        found += _interfaces(networks) if isinstance(networks, str) else []
    return list(dict.fromkeys(found))


def mappings(document: Any) -> Iterator[Document]:
    """Every mapping within a document, or a list of them, the outer ones first."""
    if isinstance(document, dict):
        yield document
    for one in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from mappings(one)


def _interfaces(networks: str) -> list[str]:
    """Of the annotation's value: "name", "namespace/name@interface", each after a comma, or a JSON list of objects."""
    rows: Any = [{"interface": word.strip().partition("@")[2]} for word in networks.split(",") if word.strip()]
    if networks.lstrip().startswith("["):
        rows = []
        with suppress(PlainError):
            rows = loads(networks)
    names = [one.get("interface") if isinstance(one, dict) else None for one in rows[:32]]
    return [str(name or f"net{number}")[:15] for number, name in enumerate(names, 1)]


# What each API's controller labels a job's pods with, its name as the value.
POD_LABELS = {
    "job": "job-name",
    "pytorchjob": "training.kubeflow.org/job-name",
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
    "jobset": "jobset.sigs.k8s.io/jobset-name",
}
# DRANET publishes every NIC of a node, and its examples' class takes any of them (dranet 1.4.0, pkg/inventory/db.go)
RDMA_OF_DRANET = 'device.attributes["dra.net"].rdma == true'
CHANNEL = "compute-domain-channel"  # a pod's claim of an IMEX channel
PORT = 29500  # where pod 0 listens for the others: torchrun's own default
# How a pod ends that another one shall take the place of: it saved and ended, SIGKILL, SIGTERM. All else fails the job.
RETRIED = (RESUMABLE, KILLED + 9, KILLED + 15)
# Exit codes that no lost peer causes: settings refused, a check failed, out of memory, no disk, another layout than the
# planned one (docs/finetune.md). Under an operator these fail the job at once; all others restart it.
FINAL = (2, 3, 71, 74, 76)
# JobSet counts its restarts in this label of every pod (jobset.x-k8s.io, "restart-attempt").
RESTARTS_OF_JOBSET = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
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
    pod = pod_template(spec, api="trainjob", container="node", meet=f"{spec.name}-node-0-0.{spec.name}")
    pod["spec"]["restartPolicy"] = "Never"  # JobSet's default is OnFailure, which takes no failure policy
    container = pod["spec"]["containers"][0]
    # The Trainer carries limits and requests of a TrainJob over to the pod and nothing else of its resources
    # (pkg/runtime/core/trainingruntime.go, plugins/jobset/builder.go): claims reach it from the runtime alone, and only
    # where the TrainJob has no resources of its own.
    resources = {} if _claims(spec) else container.pop("resources", {})
    environment = container.pop("env", [])
    command = container.pop("command")
    # More than the Trainer needs: Kueue 0.15.0 counts a TrainJob's pods by its runtime's Job, not by numNodes, and a
    # TrainJob has a deadline of its own from 2.2 only.
    body = _child(spec, pod)
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(spec, labels={"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": spec.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": _failure_policy(spec),
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                "spec": body,
                            },
                        }
                    ],
                }
            },
        },
    }
    trainer: Document = {
        "image": spec.image,
        "command": command,
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
    return (*claim_templates(spec), *compute_domain(spec), runtime, job)


def jobset(spec: JobSpec) -> tuple[Document, ...]:
    """A JobSet of one Job, whose pods meet through the Service that JobSet makes: needs its controller and no Kubeflow.

    JobSet restarts all pods together and counts; the Job has the deadline, which a JobSet does not have.
    """
    pod = pod_template(spec, api="jobset", container="rank", meet=f"{spec.name}-node-0-0.{spec.name}")
    pod["spec"]["restartPolicy"] = "Never"
    job: Document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(spec, labels=_queue(spec)),
        "spec": {
            "failurePolicy": _failure_policy(spec),
            "replicatedJobs": [{"name": "node", "template": {"spec": _child(spec, pod)}}],
        },
    }
    if spec.queue:
        job["spec"]["suspend"] = True
    return (*claim_templates(spec), *compute_domain(spec), job)


def _failure_policy(spec: JobSpec) -> Document:
    """Of a JobSet: all pods start again when one fails, `restarts` times; an exit code of FINAL ends the job at once.

    Specification: jobset.x-k8s.io/v1alpha2, FailurePolicy; rules need JobSet 0.6.
    """
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"maxRestarts": spec.restarts, "rules": [final]}


def _child(spec: JobSpec, pod: Document) -> Document:
    """The batch/v1 Job of a JobSet, its own or a TrainJob's: it fails with its first pod, and JobSet makes it anew."""
    rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(FINAL)}}
    body: Document = {
        "parallelism": spec.nodes, "completions": spec.nodes, "backoffLimit": 0, "podFailurePolicy": {"rules": [rule]},
        "template": pod,
    }  # fmt: skip
    if spec.active_deadline_seconds:
        body["activeDeadlineSeconds"] = spec.active_deadline_seconds
    return body


def pytorchjob(spec: JobSpec) -> tuple[Document, ...]:
    """PyTorchJob v1: Master 1 and Worker n-1, container `pytorch`, as OpenShift AI 2.19 documents it.

    Its operator starts the container of a pod again where it failed, makes a lost pod anew, and fails the job at
    `backoffLimit` restarts of all pods together (training-operator pkg/core/job.go, PastBackoffLimit), so each restart
    counts as many as there are pods.
    """
    counts = {"Master": 1, "Worker": spec.nodes - 1} if spec.nodes > 1 else {"Master": 1}
    replicas: Document = {}
    for role, count in counts.items():
        template = pod_template(spec, api="pytorchjob", container="pytorch", meet=f"{spec.name}-master-0")
        if spec.topology_label and spec.nodes > 1:
            # Kueue holds each pod set to one domain by itself; in a group Master and Worker share theirs
            template["metadata"]["annotations"][GROUP_ANNOTATION] = spec.name
        replicas[role] = {
            "replicas": count,
            "restartPolicy": "OnFailure" if spec.restarts else "Never",
            "template": template,
        }
    policy: Document = {"cleanPodPolicy": "None"}  # the pods' logs stay
    if spec.restarts:
        policy["backoffLimit"] = spec.restarts * spec.nodes  # not 0, which would end the job at the first failure
    if spec.queue:
        policy["suspend"] = True
    if spec.active_deadline_seconds:
        policy["activeDeadlineSeconds"] = spec.active_deadline_seconds
    job: Document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(spec, labels=_queue(spec)),
        "spec": {
            "nprocPerNode": str(spec.processes_per_node), "runPolicy": policy, "pytorchReplicaSpecs": replicas,
        },
    }  # fmt: skip
    return (*claim_templates(spec), *compute_domain(spec), job)


def indexed_job(spec: JobSpec) -> tuple[Document, ...]:
    """A headless Service and an Indexed Job whose pods meet through torchrun: needs no operator."""
    pod = pod_template(spec, api="job", container="rank", meet=f"{spec.name}-0.{spec.name}")
    pod["spec"].update(subdomain=spec.name, restartPolicy="Never")
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the pods must find each other before any is ready
            "selector": {"job-name": spec.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
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
            **_failures(spec),
            "template": pod,
        },
    }
    if spec.queue:
        job["spec"]["suspend"] = True
    if spec.active_deadline_seconds:
        job["spec"]["activeDeadlineSeconds"] = spec.active_deadline_seconds
    return (*claim_templates(spec), *compute_domain(spec), service, job)


def _failures(spec: JobSpec) -> Document:
    """Of a batch/v1 Job: pods that were lost, or saved and ended, come again; any other exit code ends it at once.

    One interruption may take every pod, so each restart counts as many failures. The gate's exit code is one of the
    others. Specification: Kubernetes, "Handling retriable and non-retriable pod failures with Pod failure policy".
    """
    return {
        "backoffLimit": spec.restarts * spec.nodes,
        "podFailurePolicy": {
            "rules": [
                {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": list(RETRIED)}},
            ]
        },
    }


def pod_template(spec: JobSpec, *, api: str, container: str, meet: str) -> Document:
    """The pod of every API: resources, environment, shm, networks, and the gate before it; `meet` names pod 0."""
    main: Document = {
        "name": container,
        "image": spec.image,
        "command": _command(spec, meet, once=api != "job"),
        "env": _variables({**_environment(spec), **_agent(spec)}) + _token(spec) + _restart_count(api),
        "resources": _resources(spec),
        "securityContext": _security(spec),
        "volumeMounts": _mounts(spec),
    }
    body: Document = {"containers": [{key: value for key, value in main.items() if value not in ([], {})}]}
    if spec.preflight_image:
        body["initContainers"] = [_gate(spec)]
    body["terminationGracePeriodSeconds"] = spec.save_seconds + END_SECONDS
    if spec.nodes > 1:  # one pod per node
        apart = {
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": {"matchLabels": {POD_LABELS[api]: spec.name}},
        }
        body["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    if volumes := _volumes(spec):
        body["volumes"] = volumes
    if claims := _claims(spec):
        body["resourceClaims"] = [
            {"name": name, "resourceClaimTemplateName": template} for name, template in claims.items()
        ]
    if spec.service_account:
        body["serviceAccountName"] = spec.service_account
    if spec.node_selector:
        body["nodeSelector"] = dict(spec.node_selector)
    if spec.tolerate:
        body["tolerations"] = [toleration(taint) for taint in spec.tolerate]
    template: Document = {"spec": body}
    annotations: dict[str, str] = {}
    if spec.networks:
        annotations[NETWORKS_ANNOTATION] = spec.qualified_networks
    if spec.topology_label:
        annotations[TOPOLOGY_ANNOTATION] = spec.topology_label
    if annotations:
        template["metadata"] = {"annotations": annotations}
    return template


def _command(spec: JobSpec, meet: str, *, once: bool) -> list[str]:
    """finetune.pod, which starts torchrun; in an Indexed Job it also waits for the other pods and restarts ranks."""
    words = [
        "python", "-m", "finetune.pod", f"--nodes={spec.nodes}", f"--ranks={spec.processes_per_node}",
        f"--meet={meet}:{PORT}", f"--wait={spec.peer_wait_seconds}", f"--save={spec.save_seconds}",
        "--once" if once else f"--restarts={spec.restarts}",
    ]  # fmt: skip
    if spec.measure:  # where the pods meet, not in an init container: a pod that is made anew would have no peers there
        words.append("--measure")
    return [*words, "--", *(() if spec.command[:1] == ("torchrun",) else ("torchrun",)), *spec.command]


def _restart_count(api: str) -> list[Document]:
    """JobSet's count of restarts for the run's record. PyTorchJob has none; in an Indexed Job the pods count."""
    if api not in ("jobset", "trainjob"):
        return []
    return [{"name": "TOPOFLIGHT_RESTARTS", "valueFrom": {"fieldRef": {"fieldPath": RESTARTS_OF_JOBSET}}}]


def _gate(spec: JobSpec) -> Document:
    """The preflight as an init container: its exit code stops the pod before the job starts."""
    words = ["topoflight", "preflight", "-o", "table"]
    for check in spec.preflight_require:
        words += ["--require", check]
    mounts = [mount for mount in _mounts(spec) if mount["mountPath"] == "/dev/shm"]  # noqa: S108
    gate: Document = {"name": "preflight", "image": spec.preflight_image, "command": words}
    # it judges what the job will run with
    gate["env"] = [node_name(), *_variables(_environment(spec))]
    gate["resources"] = _resources(spec)  # it judges the devices that this pod gets, not the node's
    gate["securityContext"] = _security(spec)
    gate["volumeMounts"] = mounts
    return {key: value for key, value in gate.items() if value not in ([], {})}


def node_name() -> Document:
    """The variable by which findings name the node: a pod's own host name changes with every pod."""
    return {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}


def _environment(spec: JobSpec) -> dict[str, str]:
    """The job's own, with the hub's cache on the claim: else every pod downloads the model, at every start."""
    return {**({"HF_HOME": CACHE} if spec.claim else {}), **spec.environment}


def _variables(values: Mapping[str, str]) -> list[Document]:
    return [{"name": name, "value": value} for name, value in values.items()]


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
    if claims := _claims(spec):
        resources["claims"] = [{"name": name} for name in claims]
    return resources


def _claims(spec: JobSpec) -> dict[str, str]:
    """Of a pod: the claim's name in it, and the ResourceClaimTemplate that it is made from."""
    claims = {"gpu-nic": spec.resource_claim_template} if spec.resource_claim_template else {}
    return claims | ({CHANNEL: f"{spec.name}-{CHANNEL}"} if spec.compute_domain else {})


def _security(spec: JobSpec) -> Document:
    """Pod Security's profile "restricted", of each container by itself: what an operator adds to the pod is its own.

    IPC_LOCK, which RDMA wants, is beyond that profile, and only root in the container keeps it.
    """
    common: Document = {"allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"}}
    if spec.ipc_lock:
        return {**common, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    return {**common, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}


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
    gpu, nic = spec.device_classes
    wanted: dict[str, Document] = {"gpu": {"deviceClassName": gpu}, "nic": {"deviceClassName": nic}}
    if nic == DEVICE_CLASSES[1]:
        wanted["nic"]["selectors"] = [{"cel": {"expression": RDMA_OF_DRANET}}]
    # a constraint holds for all devices of its requests: several GPUs do not share one root
    pairs = [{name: f"{name}{i}" if count > 1 else name for name in wanted} for i in range(count)]
    devices: Document = {
        "requests": [
            {"name": name, "exactly": {**wanted[kind], "count": 1}} for pair in pairs for kind, name in pair.items()
        ],
        "constraints": [
            {"requests": list(pair.values()), "matchAttribute": "resource.kubernetes.io/pcieRoot"} for pair in pairs
        ],
    }
    return (
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": spec.resource_claim_template, "namespace": spec.namespace},
            "spec": {"spec": {"devices": devices}},
        },
    )


def compute_domain(spec: JobSpec) -> tuple[Document, ...]:
    """A ComputeDomain, whose controller makes the ResourceClaimTemplate that it names, where the job asks for one.

    Its spec cannot be changed. numNodes 0, which 25.x wants written: the pods meet by themselves, whatever their number
    (dra-driver-nvidia-gpu 0.4.1, CRD).
    """
    if not spec.compute_domain:
        return ()
    channel = {"resourceClaimTemplate": {"name": _claims(spec)[CHANNEL]}}
    return (
        {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "ComputeDomain",
            "metadata": _metadata(spec),
            "spec": {"numNodes": 0, "channel": channel},
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
    "jobset": jobset,
    "job": indexed_job,
}

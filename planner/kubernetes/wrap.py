"""Add the preflight check, the recommended environment and the needs of the pods to a user's training manifest.

Kinds: PyTorchJob, TrainJob with its runtime, JobSet, Job of batch and of Volcano; specifications as in
planner.kubernetes.manifests. A value that the user has set is not changed, and a note names the recommended one. The
reason of each addition is an annotation of the pod.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.kubernetes.job import RUNS_GATE, family, quantity
from planner.kubernetes.manifests import NETWORKS_ANNOTATION, Document
from planner.kubernetes.yaml_edit import documents, extended
from planner.nccl_env.names import RESERVED
from planner.nccl_env.situation import Setting

PREFIX = "topoflight.io"  # prefix of annotation names
GATE, MONITOR = "preflight", "topoflight-monitor"
_MONITOR_FOLDER = f"/{MONITOR}"  # mount path of the files that finetune/rank_monitor.py copies
_MONITOR_START = f"{_MONITOR_FOLDER}/finetune/autostart"
_KINDS = ("PyTorchJob", "TrainJob", "TrainingRuntime", "ClusterTrainingRuntime", "JobSet", "Job")
_BY_HAND = "what to add by hand: topoflight recommend -o env"
_OTHERS = {
    "MPIJob": "mpirun passes only what -x names to its ranks: topoflight recommend -o env, each line with -x",
    **dict.fromkeys(("RayJob", "RayCluster", "RayService"),
                    "Ray's workers take theirs from runtime_env's env_vars: topoflight recommend -o env"),
}  # fmt: skip
_MAIN = {"PyTorchJob": "pytorch", "TrainingRuntime": "node", "ClusterTrainingRuntime": "node"}
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"  # label of the replicated jobs of a runtime
_OF_A_NETWORK = re.compile(r"_SOCKET_IFNAME$|_IB_HCA$|_GID_INDEX$")  # values that are only valid on one network
_GPU = re.compile(r"(nvidia|amd)\.com/(p?gpu|mig-.*)|gpu\.intel\.com/.*")
_LIKE_GPU = re.compile(r"gpu|cuda|/mig-", re.IGNORECASE)  # also other vendors' names of GPUs and of shared GPUs
_REASON_LIMIT = 1000  # characters per annotation; Kubernetes allows 256 KiB for all annotations


class WrapError(ValueError):
    """The manifest has no job that can be wrapped; the message says which kinds were looked for."""


@dataclass(slots=True)
class Part:
    """One description of a job's training container: in a pod template, or in the `trainer` of a TrainJob."""

    where: str  # "PyTorchJob/sft Master"
    kind: str
    pod: Document | None  # pod template; None for a TrainJob, whose runtime has the template
    container: Document
    replicas: int | None
    restart: str | None = None  # restartPolicy of a PyTorchJob's replicas; default OnFailure

    @property
    def command(self) -> list[str]:
        """The container's command and arguments."""
        words = [*(self.container.get("command") or ()), *(self.container.get("args") or ())]
        return [word for word in words if isinstance(word, str)]

    @property
    def limits(self) -> dict[str, Any]:
        """Resource limits of the container, devices included."""
        return dict(self.resources.get("limits") or {})

    @property
    def resources(self) -> Document:
        """The `resources` of the container: limits, requests, claims."""
        return dict(self.container.get("resourcesPerNode" if self.kind == "TrainJob" else "resources") or {})

    @property
    def host_network(self) -> bool:
        """Whether the pod uses the network of its node (hostNetwork)."""
        return bool(((self.pod or {}).get("spec") or {}).get("hostNetwork"))

    @property
    def without_gpus(self) -> bool:
        """Whether the container certainly gets no GPU: no resource, claim or RuntimeClass can give it one."""
        requested = {**(self.resources.get("requests") or {}), **self.limits}
        body = (self.pod or {}).get("spec") or {}
        elsewhere = self.resources.get("claims") or body.get("resourceClaims") or body.get("runtimeClassName")
        return not asks_for_gpus(requested) and not elsewhere

    @property
    def gpus(self) -> int | None:
        """Number of GPUs of a pod; None if it requests none or the number is not an integer."""
        found = [str(count) for name, count in self.limits.items() if _GPU.fullmatch(name)]
        return sum(map(int, found)) if found and all(count.isdecimal() for count in found) else None


def asks_for_gpus(resources: Mapping[str, Any]) -> bool:
    """Whether any of these resources may be a GPU, judged by its name."""
    return any(_LIKE_GPU.search(name) and str(count) != "0" for name, count in resources.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of a manifest: its pods, their number, and the files of its ConfigMaps."""

    name: str
    kind: str
    document: Document
    parts: tuple[Part, ...]
    nodes: int | None
    ranks_per_node: int | None
    files: dict[str, str] = field(default_factory=dict)  # path in the container -> text
    shares_runtime: bool = False  # a TrainJob whose runtime may also be used by other TrainJobs

    @property
    def without_gpus(self) -> bool:
        """Whether certainly no pod gets a GPU; False if a runtime outside the manifest may request one."""
        if self.kind.endswith("Runtime"):
            return False
        if self.kind == "TrainJob" and len(self.parts) == 1 and not self.parts[0].resources:
            return False
        return all(part.without_gpus for part in self.parts)

    @property
    def command(self) -> list[str]:
        """Command of the first part that has one."""
        return next((part.command for part in self.parts if part.command), [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """The additions to one job."""

    settings: tuple[Setting, ...] = ()
    needs: tuple[Setting, ...] = ()
    resources: dict[str, str] = field(default_factory=dict)  # given by the user with --resource
    gate_image: str | None = None
    require: tuple[str, ...] = ()
    log: bool = False  # write NCCL's log to a file, if a claim is mounted
    monitor: bool = False  # add the rank monitor, which is copied from the image of the preflight check
    annotations: dict[str, str] = field(default_factory=dict)  # of the job


def jobs_in(manifest: list[Any]) -> tuple[Job, ...]:
    """Return every job of a supported kind in the documents. Raises WrapError if there is none."""
    objects = list(_list_objects(manifest))
    configs = {
        _get_name(each): each["data"] for each in objects if each.get("kind") == "ConfigMap" and each.get("data")
    }
    jobs = [job for each in objects if (job := _parse_job(each, configs)) is not None]
    runtimes = {(job.kind, job.name): job for job in jobs if job.kind.endswith("Runtime")}
    users = Counter(_runtime_of(job) for job in jobs if job.kind == "TrainJob")
    for at, job in enumerate(jobs):
        if job.kind == "TrainJob" and (runtime := runtimes.get(_runtime_of(job))) is not None:
            shared = runtime.kind == "ClusterTrainingRuntime" or users[_runtime_of(job)] > 1
            jobs[at] = replace(job, parts=(*job.parts, *runtime.parts), files={**job.files, **runtime.files},
                               nodes=job.nodes or runtime.nodes, shares_runtime=shared,
                               ranks_per_node=job.ranks_per_node or runtime.ranks_per_node)  # fmt: skip
    found = tuple(job for job in jobs if not (job.kind.endswith("Runtime") and (job.kind, job.name) in users))
    if not found:
        kinds = dict.fromkeys(str(each.get("kind")) for each in objects)
        hint = next((_OTHERS[kind] for kind in kinds if kind in _OTHERS), _BY_HAND)
        raise WrapError(f"no training job: holds {', '.join(kinds) or 'no Kubernetes object and no line with #!'}; "
                        f"one of {', '.join(_KINDS)} is wrapped, also in an AppWrapper or a List; {hint}")  # fmt: skip
    return found


def _runtime_of(job: Job) -> tuple[str, str]:
    """Return kind and name of the runtime that a TrainJob refers to."""
    named = job.document["spec"].get("runtimeRef") or {}
    return str(named.get("kind", "ClusterTrainingRuntime")), str(named.get("name"))


def others_in(manifest: list[Any]) -> list[str]:
    """Return a note for each object that trains or requests GPUs, but whose kind is not supported."""
    asks = re.compile(r"'containers':.*'(nvidia|amd)\.com/(gpu|mig-[^']*)':")  # a GPU in the repr of a mapping
    known = (*_KINDS, "AppWrapper")
    return [f"{each['kind']}/{_get_name(each)}: left alone: {_OTHERS.get(str(each['kind']), _BY_HAND)}"
            for each in _list_objects(manifest) if each.get("kind") in _OTHERS or (
                each.get("kind", known[0]) not in known and asks.search(str(each)))]  # fmt: skip


def wrap(text: str, additions: Sequence[Additions | None]) -> tuple[str, list[str]]:
    """Return the manifest with additions to its jobs, in the order of `jobs_in`, and notes on unchanged values.

    Raises WrapError, and EditError of planner.kubernetes.yaml_edit if lines cannot be inserted into the text.
    """
    text = text if text.endswith("\n") else text + "\n"
    manifest = documents(text)
    notes: list[str] = []
    for job, wanted in zip(jobs_in(manifest), additions, strict=True):
        if wanted is None:
            continue
        for part in job.parts:
            _Wrapper(job, part, wanted, notes).run()
        metadata = _ensure(job.document, "metadata", {})
        for name, value in wanted.annotations.items():
            _ensure(metadata, "annotations", {}).setdefault(f"{PREFIX}/{name}", value)
    return extended(text, manifest), list(dict.fromkeys(notes))


class _Wrapper:
    """Changes one part in place. Existing values are not changed; a note names the recommended value instead."""

    def __init__(self, job: Job, part: Part, wanted: Additions, notes: list[str]) -> None:
        self._job, self._part, self._wanted, self._notes = job, part, wanted, notes
        self._reasons: dict[str, str] = {}
        self._other_network = part.host_network and any(need.name == "network" for need in wanted.needs)

    def run(self) -> None:
        """Make all additions."""
        part, wanted, job_kind = self._part, self._wanted, self._job.kind
        if part.kind == job_kind or job_kind != "TrainJob":  # values of a TrainJob override those of its runtime
            for setting in wanted.settings:
                if self._other_network and _OF_A_NETWORK.search(setting.name):
                    self._note(f"{setting.name}={setting.value} is not added: hostNetwork is set, and the recording is "
                              "of a pod on a network of its own; capture the host")  # fmt: skip
                    continue
                self._add_variable(setting.name, setting.value, f"{setting.reason.rule}: {setting.reason.evidence}")
            if wanted.log:
                self._add_log()
            if wanted.monitor:
                self._add_monitor_variables()
            if empty := ", ".join(name for name, count in part.limits.items() if count is None):
                self._note(f"{empty} has no number: give one here and in the gate, if one runs")
            self._add_resources()
        if (pod := part.pod) is None:
            self._annotate(self._job.document)
            if len(self._job.parts) == 1:
                self._note("init container, shared memory, networks and IPC_LOCK are its runtime's: not added, unless "
                          "the runtime stands in the same file")  # fmt: skip
            return
        self._add_needs(pod)
        self._add_gate(pod)
        if wanted.monitor:
            self._add_monitor_files(pod)
        if part.restart == "Never":
            self._note("restartPolicy is Never: no pod is recreated, neither after a failed gate nor after its "
                      "node was lost; launch the job again to resume from its last checkpoint")  # fmt: skip
        self._annotate(pod)

    def _add_needs(self, pod: Document) -> None:
        for need in self._wanted.needs:
            reason = f"{need.reason.rule}: {need.reason.evidence}"
            if need.name == "shm_bytes":
                self._add_shared_memory(pod, int(need.value), reason)
            elif need.name == "network" and not self._other_network:
                self._add_network(pod, need.value, reason)
            elif need.name == "capability":
                self._add_capability(need.value, reason)
            elif need.name == "compute_domain" and not (pod.get("spec") or {}).get("resourceClaims"):
                self._note(f"no claim of a ComputeDomain, and none is added: `launch` shows one ({reason})")

    @property
    def _trainer(self) -> Part:
        """The part whose resources apply to the training container.

        Limits or requests of a TrainJob replace all resources of its runtime's container (Kubeflow Trainer,
        pkg/runtime/framework/plugins/jobset/builder.go).
        """
        of_job, of_runtime = (self._job.parts[0], self._part if self._part.pod is not None else self._job.parts[-1])
        own = of_job.kind == "TrainJob" and (of_job.limits or of_job.resources.get("requests"))
        return of_job if own else of_runtime

    def _annotate(self, document: Document) -> None:
        """Add the reasons of the additions as annotations of the pod, or of the TrainJob."""
        if self._reasons:
            made = _ensure(_ensure(document, "metadata", {}), "annotations", {})
            for name, value in self._reasons.items():
                made.setdefault(f"{PREFIX}/{name}", value[:_REASON_LIMIT])

    def _note(self, text: str) -> None:
        self._notes.append(f"{self._part.where}: {text}")

    def _add_variable(self, name: str, value: str, reason: str) -> None:
        if self._part.kind == "TrainJob" and name in RESERVED:
            return
        container = self._part.container
        for entry in container.get("env") or ():
            if isinstance(entry, dict) and entry.get("name") == name:
                present = entry.get("value", "a value from elsewhere")
                if present != value:
                    self._note(f"{name}={present} is set in the manifest and stays; recommended is {value} ({reason})")
                return
        if any(re.search(rf"(^|[\s;&]){re.escape(name)}=", word) for word in self._part.command):
            self._note(f"{name} is set in the command and stays; recommended is {value} ({reason})")
            return
        for source in container.get("envFrom") or ():
            named = ((source or {}).get("configMapRef") or {}).get("name") if isinstance(source, dict) else None
            if named is None:
                continue
            if (names := self._job.files.get(f"configmap:{named}")) is None:
                self._note(f"{name}={value} is not added: what ConfigMap {named} sets is unknown; give it in the same "
                          "file")  # fmt: skip
                return
            if f"{source.get('prefix', '')}{name}" in names.split():
                self._note(f"{name} is set by ConfigMap {named} and stays; recommended is {value} ({reason})")
                return
        _ensure(container, "env", []).append({"name": name, "value": value})
        self._reasons[name] = f"{value}: {reason}"

    def _add_log(self) -> None:
        folder = self._find_lasting_folder()
        self._add_variable("NCCL_DEBUG", "INFO", "what `topoflight evidence` reads")
        if folder is None:
            self._note("no claim is mounted; NCCL logs into the pod's log: `kubectl logs POD | topoflight evidence -`")
            return
        log = f"{folder}/nccl-{self._job.name}.%h.%p.log"
        self._add_variable("NCCL_DEBUG_FILE", log, f"read by: topoflight evidence {log.split('%')[0]}*")

    def _add_monitor_variables(self) -> None:
        """Set the variables with which Python starts the rank monitor in each rank (finetune/autostart)."""
        folder = self._find_lasting_folder()
        written = str((self._part.container.get("env"), self._part.command))
        if folder is None:
            why = "the ranks write what they do into a volume that outlives the pod, and no claim is mounted"
        elif all(part.pod is None for part in self._job.parts):
            why = "the pods are described by a runtime that is not in this file"
        elif "PYTHONPATH" in written and "TOPOFLIGHT_RUN" not in written:
            why = "the manifest sets PYTHONPATH, which starts the monitor"
        else:
            why = ""
        if why:
            self._note(f"--monitor adds nothing: {why}")
        elif "TOPOFLIGHT_RUN" not in written:
            run = f"{folder}/topoflight-{self._job.name}"
            self._add_variable("TOPOFLIGHT_RUN", run, f"read by: topoflight why --run {run}")
            self._add_variable("PYTHONPATH", _MONITOR_START, "starts the rank monitor in each rank")

    def _find_lasting_folder(self) -> str | None:
        """Return the mount path of a writable volume that outlives the pod; for a TrainJob, that of its runtime."""
        part = self._part
        if part.kind == "TrainJob":
            part = next((each for each in self._job.parts if each.pod is not None), part)
        volumes = ((part.pod or {}).get("spec") or {}).get("volumes") or ()
        lasting = [
            v.get("name") for v in volumes if isinstance(v, dict) and {"persistentVolumeClaim", "ephemeral"} & set(v)
        ]
        mounts = [each for each in part.container.get("volumeMounts") or () if isinstance(each, dict)]
        return next((str(each.get("mountPath")).rstrip("/") for each in mounts
                     if each.get("name") in lasting and not each.get("readOnly")), None)  # fmt: skip

    def _add_resources(self) -> None:
        wanted = dict(self._wanted.resources)
        for need in self._wanted.needs:
            if need.name == "resource":
                name, _, count = need.value.partition(": ")
                if not _GPU.fullmatch(name) and not family(name, list(wanted)):
                    wanted[name] = count
        resources = self._trainer.resources
        if resources.get("claims"):
            self._note(f"devices come by its resource claims; not added: {', '.join(wanted) or 'none'}")
            return
        has = {**(resources.get("requests") or {}), **self._trainer.limits}
        if self._trainer.kind == "TrainJob" and not has and wanted and not asks_for_gpus(wanted):
            self._note(f"{', '.join(wanted)} is not added: resourcesPerNode replaces all resources of the runtime, and "
                      "the runtime is not in this file. Give resourcesPerNode all resources of a node")  # fmt: skip
            return
        for name, count in wanted.items():
            there = family(name, list(has)) if name.endswith("/*") else [n for n in has if n == name]
            if there:
                present = str(has[there[0]])
                if present != count and quantity(present) != quantity(count):
                    self._note(f"{there[0]}: {present} is set in the manifest and stays; recommended is {count}")
            elif name.endswith("/*"):
                self._note(f"needs {name}: {count}, but its name on the nodes is unknown: add --resource NAME=COUNT")
            else:
                self._add_limit(name, count, has)
        self._note_missing_rdma({*has, *wanted})

    def _add_limit(self, name: str, count: str, has: Document) -> None:
        """Add a limit; Kubernetes sets the request of an extended resource to its limit."""
        key = "resourcesPerNode" if self._part.kind == "TrainJob" else "resources"
        resources = _ensure(self._part.container, key, {})
        if self._trainer is not self._part:  # copy the runtime's resources, which a limit in the TrainJob replaces
            for kind in ("limits", "requests"):
                if given := self._trainer.resources.get(kind):
                    _ensure(resources, kind, {}).update(copy.deepcopy(given))
        limits = _ensure(resources, "limits", {})
        if name.startswith("hugepages-") and not {"cpu", "memory"} & {*has, *limits}:
            self._note(f"{name}: {count} is not added: Kubernetes refuses it without cpu or memory; set either")
            return
        limits[name] = count

    def _note_missing_rdma(self, names: set[str]) -> None:
        """Add a note if the nodes have RDMA but the pod requests no RDMA device."""
        needs = {need.value.partition(":")[0] for need in self._wanted.needs}
        security = self._part.container.get("securityContext") or {}
        marks = ((self._part.pod or {}).get("metadata") or {}).get("annotations") or {}
        if (
            self._job.nodes == 1
            or not any(need.name == "memlock" for need in self._wanted.needs)
            or {"rdma/*", "vpc.amazonaws.com/efa"} & needs
            or family("rdma/*", sorted(names))
            or security.get("privileged")
            or "networking.gke.io/interfaces" in marks  # on GKE this annotation also provides the device
        ):
            return
        self._note("requests no RDMA device, and without one NCCL uses TCP: --resource NAME=COUNT adds it, by the "
                  "name that the nodes' device plugin offers (rdma/..., openshift.io/..., nvidia.com/...)")  # fmt: skip

    def _add_shared_memory(self, pod: Document, wanted_bytes: int, reason: str) -> None:
        container, body = self._part.container, _ensure(pod, "spec", {})
        size = f"{-(-wanted_bytes // 2**20)}Mi"
        memory = quantity(str(self._trainer.limits.get("memory", "")))
        mount = next(iter(_list_shm_mounts(container)), None)
        if mount is not None:
            volume: Document = next((v for v in body.get("volumes") or () if v.get("name") == mount.get("name")), {})
            limit = quantity(str((volume.get("emptyDir") or {}).get("sizeLimit", "")))
            if limit is not None and limit < wanted_bytes:
                self._note(f"shared memory of {limit // 2**20} MiB is set in the manifest and stays; needed: {size} "
                           f"({reason})")  # fmt: skip
            if limit is not None and memory is not None and limit > memory:
                self._note(f"shared memory may grow to {limit // 2**20} MiB, and counts towards the memory limit of "
                           f"{memory // 2**20} MiB: the container is killed before it is full. Lower the sizeLimit of "
                           "the volume, or raise the limit")  # fmt: skip
            return
        if body.get("hostIPC"):
            self._note(f"hostIPC is set, so /dev/shm is the node's own, and no volume is added over it; needed: {size}")
            return
        if memory is not None and wanted_bytes > memory / 2:
            # files in /dev/shm count as memory of the container; half of the memory is the default size of tmpfs(5)
            size = f"{max(1, int(memory / 2) >> 20)}Mi"
            self._note(f"shared memory has {size}, half of the memory limit, in which it counts; needed: "
                      f"{-(-wanted_bytes // 2**20)}Mi ({reason})")  # fmt: skip
        taken = {volume.get("name") for volume in body.get("volumes") or ()}
        name = "shm" if "shm" not in taken else "topoflight-shm"
        _ensure(body, "volumes", []).append({"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}})
        _ensure(container, "volumeMounts", []).append({"name": name, "mountPath": "/dev/shm"})  # noqa: S108
        self._reasons["shm"] = f"{size}: {reason}"

    def _add_network(self, pod: Document, network: str, reason: str) -> None:
        made = _ensure(_ensure(pod, "metadata", {}), "annotations", {})
        there = made.get(NETWORKS_ANNOTATION)
        if there is None:
            made[NETWORKS_ANNOTATION] = network
            self._reasons["network"] = f"{network}: {reason}"
        elif network not in str(there):
            self._note(f"network {there} is set in the manifest and stays; recommended is {network} ({reason})")

    def _add_capability(self, name: str, reason: str) -> None:
        security = self._part.container.get("securityContext") or {}
        added = (security.get("capabilities") or {}).get("add") or ()
        if security.get("privileged") or {name, "ALL", f"CAP_{name}"} & set(added):
            return
        made = _ensure(self._part.container, "securityContext", {})
        _ensure(_ensure(made, "capabilities", {}), "add", []).append(name)
        self._reasons[f"capability-{name}"] = reason
        if security.get("runAsNonRoot"):
            self._note(f"{name} is added, and runAsNonRoot stays: only root in the container keeps it")

    def _add_gate(self, pod: Document) -> None:
        image = self._wanted.gate_image
        if image is None:
            self._note("no gate runs before this job; --preflight-image IMAGE adds it")
            return
        container, body = self._part.container, _ensure(pod, "spec", {})
        inits = body.get("initContainers") or ()
        taken = {each.get("name") for each in (*(body.get("containers") or ()), *inits)}
        for each in inits:
            if RUNS_GATE.search(" ".join(map(str, (*(each.get("command") or ()), *(each.get("args") or ()))))):
                if each.get("image") != image:
                    self._note(f"the gate {each.get('name')} of image {each.get('image')} is in the manifest and stays")
                return
        command = ["topoflight", "preflight", "-o", "table"]
        for check in self._wanted.require:
            command += ["--require", check]
        gate: Document = {"name": f"topoflight-{GATE}" if GATE in taken else GATE, "image": image, "command": command}
        # Requests of an init container apply to the whole pod, and so to the other TrainJobs of the runtime.
        asks = self._part if self._job.shares_runtime else self._trainer
        of_pod = self._job.kind != "TrainJob" or self._job.shares_runtime
        trainer = container if of_pod else self._job.parts[0].container
        resources = copy.deepcopy(asks.resources)
        # The check gets the job's variables, and the node's name, because every pod has another host name.
        node = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
        gate["env"] = [node, *_list_plain_variables(trainer)]
        sources = [each for each in trainer.get("envFrom") or () if isinstance(each, dict) and "configMapRef" in each]
        if sources:  # without Secrets, which the check does not need
            gate["envFrom"] = copy.deepcopy(sources)
        if resources:
            gate["resources"] = {k: v for k, v in resources.items() if k in ("limits", "requests", "claims")}
        if container.get("securityContext"):
            gate["securityContext"] = copy.deepcopy(container["securityContext"])
        if shm := _list_shm_mounts(container):
            gate["volumeMounts"] = copy.deepcopy(shm)
        _ensure(body, "initContainers", []).append(gate)
        if self._job.shares_runtime:
            self._note(
                "other TrainJobs use this runtime too, and what is added to it applies to all of them. The gate "
                f"has the runtime's own resources and variables, not those of {self._job.kind}/{self._job.name}"
            )
        if self._part.kind == "PyTorchJob" and self._part.restart != "Never":
            self._note("its operator tries a failed gate again and again, unless the replicas' restartPolicy is Never")

    def _add_monitor_files(self, pod: Document) -> None:
        """Add an init container that copies the rank monitor from its image into a volume of the training container."""
        holder = self._job.parts[0].container if self._job.kind == "TrainJob" else self._part.container
        start = {"name": "PYTHONPATH", "value": _MONITOR_START}
        body = _ensure(pod, "spec", {})
        if start not in (holder.get("env") or ()) or MONITOR in [v.get("name") for v in body.get("volumes") or ()]:
            return
        mount = {"name": MONITOR, "mountPath": _MONITOR_FOLDER}
        copy_files: Document = {"name": MONITOR, "image": self._wanted.gate_image, "volumeMounts": [mount],
                                "command": ["python", "-m", "finetune.rank_monitor", _MONITOR_FOLDER]}  # fmt: skip
        if self._part.container.get("securityContext"):
            copy_files["securityContext"] = copy.deepcopy(self._part.container["securityContext"])
        _ensure(body, "initContainers", []).append(copy_files)
        _ensure(body, "volumes", []).append({"name": MONITOR, "emptyDir": {}})
        _ensure(self._part.container, "volumeMounts", []).append({**mount, "readOnly": True})


def _list_shm_mounts(container: Document) -> list[Document]:
    mounts = container.get("volumeMounts") or ()
    return [m for m in mounts if str(m.get("mountPath")).rstrip("/") == "/dev/shm"]  # noqa: S108


def _list_plain_variables(container: Document) -> list[Document]:
    """Return the variables that the preflight check reads: those about communication, with a plain value."""
    judged = re.compile(r"(?!NCCL_DEBUG_FILE)(?:(?:TORCH_)?NCCL_|GLOO_|FI_|OFI_|RDMAV_|UCX_|OMP_)")
    entries = [each for each in container.get("env") or () if isinstance(each, dict)]
    # $(NAME) refers to a variable that may not be copied
    return [each for each in entries if judged.match(str(each.get("name"))) and "$(" not in str(each.get("value"))]


def _ensure(mapping: Document, key: str, empty: Any) -> Any:
    """Return a member of a mapping; a missing or empty member is set to `empty` first."""
    if mapping.get(key) is None:
        mapping[key] = empty
    return mapping[key]


def _list_objects(manifest: Sequence[Any]) -> Iterator[Document]:
    for each in manifest:
        if not isinstance(each, dict):
            continue
        if str(each.get("kind", "")).endswith("List") and isinstance(each.get("items"), list):
            yield from _list_objects(each["items"])
        elif each.get("kind") == "AppWrapper":  # kueue.sigs.k8s.io/docs/tasks/run/appwrappers
            components = (each.get("spec") or {}).get("components") or ()
            yield from _list_objects([one.get("template") for one in components if isinstance(one, dict)])
            yield each
        else:
            yield each


def _get_name(document: Document) -> str:
    metadata = document.get("metadata") or {}
    return str(metadata.get("name") or str(metadata.get("generateName", "")).rstrip("-"))


def _member(mapping: Document, key: str) -> Any:
    """Return a member that the API requires. Raises KeyError where it is missing or empty."""
    if mapping.get(key) in (None, {}, []):
        raise KeyError(key)
    return mapping[key]


def _parse_number(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() else None


def _parse_job(document: Document, configs: dict[str, Any]) -> Job | None:
    kind, spec = document.get("kind"), document.get("spec") or {}
    if kind not in _KINDS:
        return None
    name = _get_name(document)
    try:
        parts = tuple(_parse_parts(kind, name, spec))
    except KeyError as error:
        raise WrapError(f"{kind}/{name}: {error.args[0]} is missing or empty, so there is no pod to wrap") from None
    except (AttributeError, TypeError) as error:
        raise WrapError(f"{kind}/{name}: is not built as a {kind} is: {error}") from None
    if not parts:
        raise WrapError(f"{kind}/{name}: no container, or several without GPUs, so the one that trains is unknown")
    parts = tuple(part for part in parts if part.gpus) or parts  # a launcher pod without GPUs has no rank
    counted = [part.replicas for part in parts]
    nodes = sum(n or 0 for n in counted) if None not in counted else None
    ranks = {"PyTorchJob": spec.get("nprocPerNode"), "TrainJob": (spec.get("trainer") or {}).get("numProcPerNode")}
    if kind.endswith("Runtime"):
        policy = spec.get("mlPolicy") or {}
        nodes = _parse_number(policy.get("numNodes", 1))
        ranks[kind] = (policy.get("torch") or policy.get("mpi") or {}).get("numProcPerNode")
    return Job(
        name=name, kind=kind, document=document, parts=parts, nodes=nodes or None,
        ranks_per_node=_parse_number(ranks.get(kind)) or parts[0].gpus, files=_list_files(parts, configs),
    )  # fmt: skip


def _parse_parts(kind: str, name: str, spec: Document) -> Iterator[Part]:
    if kind == "TrainJob":
        _member(spec, "runtimeRef")
        trainer = spec.setdefault("trainer", {})
        yield Part(f"{kind}/{name}", kind, None, trainer, _parse_number(trainer.get("numNodes")))
        return
    templates: list[tuple[str, Document, int | None]] = []
    restarts: dict[str, str] = {}
    if kind == "PyTorchJob":
        for role, replica in _member(spec, "pytorchReplicaSpecs").items():
            templates.append((f" {role}", replica["template"], _parse_number(replica.get("replicas", 1))))
            restarts[f" {role}"] = str(replica.get("restartPolicy", "OnFailure"))
    elif kind == "Job" and "tasks" in spec:  # a Job of Volcano
        for task in _member(spec, "tasks"):
            templates.append((f" {task.get('name')}", task["template"], _parse_number(task.get("replicas", 1))))
    elif kind == "Job":
        templates.append(("", _member(spec, "template"), _parse_number(spec.get("parallelism", 1))))
    else:
        jobs = _member(_member(spec, "template"), "spec") if kind.endswith("Runtime") else spec
        for replicated in _member(jobs, "replicatedJobs"):
            labels = (replicated["template"].get("metadata") or {}).get("labels") or {}
            if str(labels.get(_STEP, "trainer")) != "trainer":  # a step that downloads the dataset or the model
                continue
            body = replicated["template"]["spec"]
            counts = [_parse_number(each) for each in (replicated.get("replicas", 1), body.get("parallelism", 1))]
            pods = None if None in counts else math.prod(n or 1 for n in counts)
            templates.append((f" {replicated['name']}", body["template"], pods))
    for where, template, replicas in templates:
        containers = template["spec"]["containers"]
        main = _find_trainer(kind, containers)
        if main is not None:
            yield Part(f"{kind}/{name}{where}", kind, template, main, replicas, restarts.get(where))


def _find_trainer(kind: str, containers: Sequence[Document]) -> Document | None:
    """Return the training container: the one with the API's name, else the one with GPUs, else the only one."""
    named = [each for each in containers if each.get("name") == _MAIN.get(kind)]
    with_gpus = [each for each in containers if any(
        _GPU.fullmatch(n) for n in ((each.get("resources") or {}).get("limits") or {}))]  # fmt: skip
    for found in (named, with_gpus, containers if kind != "TrainingRuntime" else []):
        if len(found) == 1:
            return found[0]
    return None


def _list_files(parts: Sequence[Part], configs: dict[str, Any]) -> dict[str, str]:
    """Return the files of the manifest's ConfigMaps by container path; `configmap:NAME` has the keys of a ConfigMap."""
    found = {f"configmap:{name}": " ".join(map(str, data)) for name, data in configs.items()}
    for part in parts:
        volumes = {v.get("name"): v for v in (((part.pod or {}).get("spec") or {}).get("volumes") or ())}
        for mount in part.container.get("volumeMounts") or ():
            config = (volumes.get(mount.get("name"), {}).get("configMap") or {}).get("name")
            for key, text in configs.get(str(config), {}).items():
                found[f"{str(mount.get('mountPath')).rstrip('/')}/{key}"] = str(text)
    return found

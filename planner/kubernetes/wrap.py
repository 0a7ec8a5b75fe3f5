"""Add the preflight check, the recommended environment and the needs of the pods to a user's training manifest.

Kinds: PyTorchJob, TrainJob with its runtime, JobSet, Job of batch and of Volcano; specifications as in
planner.kubernetes.manifests. A TrainJob and its runtime are wrapped separately. A value that the user has set is not
changed, and a note names the recommended one.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from contracts.tables import read_texts
from planner.kubernetes.manifests import NETWORKS_ANNOTATION, RUNS_GATE, Document, find_resources, quantity
from planner.kubernetes.yaml_edit import documents, extend
from planner.nccl_env import RESERVED
from planner.nccl_env.situation import Setting

PREFIX = "topoflight.io"  # prefix of annotation names
GATE, MONITOR = "preflight", "topoflight-monitor"
_MONITOR_FOLDER = f"/{MONITOR}"  # mount path of the files that agent/jobs/autostart copies
_MONITOR_START = f"{_MONITOR_FOLDER}/agent/jobs/autostart"
_SHM = "/dev/shm"  # noqa: S108
_KINDS = ("PyTorchJob", "TrainJob", "TrainingRuntime", "ClusterTrainingRuntime", "JobSet", "Job")
_OTHERS = {"MPIJob": "mpi_job", "RayJob": "ray", "RayCluster": "ray", "RayService": "ray"}  # kind -> note
_MAIN = {"PyTorchJob": "pytorch", "TrainingRuntime": "node", "ClusterTrainingRuntime": "node"}
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"  # label of the replicated jobs of a runtime
_OF_A_NETWORK = re.compile(r"_SOCKET_IFNAME$|_IB_HCA$|_GID_INDEX$")  # values that are only valid on one network
_MPIRUN = re.compile(r"\bmpi(?:run|exec)\b")
_GPU = re.compile(r"(nvidia|amd)\.com/(p?gpu|mig-.*)|gpu\.intel\.com/.*")
_LIKE_GPU = re.compile(r"gpu|cuda|/mig-", re.IGNORECASE)  # also other vendors' names of GPUs and of shared GPUs
_text = read_texts(__file__, "notes.toml")


class WrapError(ValueError):
    """The manifest has no job that can be wrapped; the message says which kinds were looked for."""


def _get(node: Any, *path: str) -> Any:
    """Return a member of nested mappings; an empty mapping where a member on the way is missing or empty."""
    for key in path:
        node = (node or {}).get(key)
    return node or {}


@dataclass(slots=True)
class Part:
    """One description of a job's training container: in a pod template, or in the `trainer` of a TrainJob."""

    where: str  # "PyTorchJob/sft Master"
    pod: Document | None  # pod template; None for a TrainJob, whose runtime has the template
    container: Document
    replicas: int | None
    restart: str | None = None  # restartPolicy of a PyTorchJob's replicas; None for other kinds
    resources_key: str = "resources"  # the member of the container with the resources of a pod

    @property
    def command(self) -> list[str]:
        """The container's command and arguments."""
        command = [*_get(self.container, "command"), *_get(self.container, "args")]
        return [word for word in command if isinstance(word, str)]

    @property
    def resources(self) -> Document:
        """The resources of the container: limits, requests, claims."""
        return dict(_get(self.container, self.resources_key))

    @property
    def limits(self) -> dict[str, Any]:
        """Resource limits of the container, devices included."""
        return dict(_get(self.resources, "limits"))

    @property
    def requested(self) -> dict[str, Any]:
        """Requests and limits of the container. Kubernetes sets a request that is missing to the limit."""
        return {**_get(self.resources, "requests"), **self.limits}

    @property
    def without_gpus(self) -> bool:
        """Whether the container certainly gets no GPU: no resource, claim or RuntimeClass can give it one."""
        body = _get(self.pod, "spec")
        elsewhere = self.resources.get("claims") or body.get("resourceClaims") or body.get("runtimeClassName")
        return not asks_for_gpus(self.requested) and not elsewhere

    @property
    def gpus(self) -> int | None:
        """Number of GPUs of a pod; None if it requests none or the number is not an integer."""
        counts = [str(count) for name, count in self.limits.items() if _GPU.fullmatch(name)]
        return sum(map(int, counts)) if counts and all(count.isdecimal() for count in counts) else None


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
    command: list[str]  # that starts the ranks
    files: dict[str, str] = field(default_factory=dict)  # path in the container -> text

    @property
    def without_gpus(self) -> bool:
        """Whether certainly no pod gets a GPU; False if a runtime outside the manifest may request one."""
        of_runtime = self.kind == "TrainJob" and not self.parts[0].resources
        return not (of_runtime or self.kind.endswith("Runtime")) and all(part.without_gpus for part in self.parts)


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


def find_jobs(manifest: list[Any]) -> tuple[Job, ...]:
    """Return every job of a supported kind in the documents. Raises WrapError if there is none."""
    objects = list(_list_objects(manifest))
    config_maps = [each for each in objects if each.get("kind") == "ConfigMap" and each.get("data")]
    configs = {_get_name(each): each["data"] for each in config_maps}
    jobs = [job for each in objects if (job := _parse_job(each, configs)) is not None]
    places = {(job.kind, job.name): at for at, job in enumerate(jobs)}
    for index, job in enumerate(jobs):
        if job.kind == "TrainJob" and (of_runtime := places.get(_get_runtime(job))) is not None:
            runtime = jobs[of_runtime]  # its pods are those of the TrainJob
            nodes, ranks = job.nodes or runtime.nodes, job.ranks_per_node or runtime.ranks_per_node
            is_shared = sum(_get_runtime(each) == _get_runtime(job) for each in jobs if each.kind == "TrainJob") > 1
            for place in (index,) if is_shared else (index, of_runtime):
                jobs[place] = replace(jobs[place], nodes=nodes, ranks_per_node=ranks)
    if not jobs:
        kinds = dict.fromkeys(str(each.get("kind", "an object without kind")) for each in objects)
        hint = _text(next((_OTHERS[kind] for kind in kinds if kind in _OTHERS), "by_hand"))
        found_kinds = ", ".join(kinds) or "no Kubernetes object and no line with #!"
        raise WrapError(_text("no_job", held=found_kinds, known=", ".join(_KINDS), hint=hint))
    return tuple(jobs)


def _get_runtime(job: Job) -> tuple[str, str]:
    """Return kind and name of the runtime that a TrainJob refers to."""
    reference = _get(job.document, "spec", "runtimeRef")
    return str(reference.get("kind", "ClusterTrainingRuntime")), str(reference.get("name"))


def note_others(manifest: list[Any]) -> list[str]:
    """Return a note for each object that trains or requests GPUs, but whose kind is not supported."""
    asks = re.compile(r"'containers':.*'(nvidia|amd)\.com/(gpu|mig-[^']*)':")  # a GPU in the repr of a mapping
    kinds = (*_KINDS, "AppWrapper")
    return [f"{each['kind']}/{_get_name(each)}: left alone: {_text(_OTHERS.get(str(each['kind']), 'by_hand'))}"
            for each in _list_objects(manifest) if each.get("kind") in _OTHERS or (
                each.get("kind", kinds[0]) not in kinds and asks.search(str(each)))]  # fmt: skip


def wrap(text: str, additions: Sequence[Additions | None]) -> tuple[str, list[str]]:
    """Return the manifest with additions to its jobs, in the order of `find_jobs`, and notes on unchanged values.

    Raises WrapError, and EditError of planner.kubernetes.yaml_edit if lines cannot be inserted into the text.
    """
    end = "" if text.endswith("\n") else "\n"  # of the last line; it is removed from the result
    manifest = documents(text + end)
    notes: list[str] = []
    for job, added in zip(find_jobs(manifest), additions, strict=True):
        if added is None:
            continue
        for part in job.parts:
            _Wrapper(job, part, added, notes).run()
        for name, value in added.annotations.items():
            annotations = _ensure(_ensure(job.document, "metadata", {}), "annotations", {})
            annotations.setdefault(f"{PREFIX}/{name}", value)
    return extend(text + end, manifest).removesuffix(end), list(dict.fromkeys(notes))


class _Wrapper:
    """Changes one part in place. Existing values are not changed; a note names the recommended value instead."""

    def __init__(self, job: Job, part: Part, additions: Additions, notes: list[str]) -> None:
        self._job, self._part, self._wanted, self._notes = job, part, additions, notes
        self._container, self._security = part.container, _get(part.container, "securityContext")
        self._body = _get(part.pod, "spec")

    def run(self) -> None:
        """Make all additions."""
        part, additions = self._part, self._wanted
        self._add_variables()
        if empty := ", ".join(name for name, count in part.limits.items() if count is None):
            self._note("no_number", names=empty)
        if additions.settings and _MPIRUN.search(" ".join(self._job.command)):
            self._note("mpirun")
        self._add_resources()
        if part.pod is None:
            self._note("of_runtime")
            return
        for need in additions.needs:
            self._add_need(part.pod, need)
        self._add_gate()
        if additions.monitor:
            self._add_monitor_files()
        if part.restart == "Never":
            self._note("never")

    def _note(self, key: str, **fields: object) -> None:
        """Add a note of notes.toml."""
        self._notes.append(f"{self._part.where}: {_text(key, **fields)}")

    # -- variables

    def _add_variables(self) -> None:
        """Add the recommended settings, and those of the log and the monitor."""
        in_own_network = any(need.name == "network" for need in self._wanted.needs)
        for setting in self._wanted.settings:
            if self._body.get("hostNetwork") and in_own_network and _OF_A_NETWORK.search(setting.name):
                self._note("other_network", name=setting.name, value=setting.value)
            else:
                self._add_variable(setting.name, setting.value, f"{setting.reason.rule}: {setting.reason.evidence}")
        if self._wanted.log:
            self._add_variable("NCCL_DEBUG", "INFO", "what `topoflight evidence` reads")
        if self._part.pod is None:  # the volumes, and so the log and the monitor, are those of the runtime
            return
        folder, job = self._find_lasting_folder(), self._job
        written = str((self._container.get("env"), self._part.command))
        if self._wanted.log:
            log = f"{folder}/nccl-{job.name}."
            if folder is None and "NCCL_DEBUG_FILE" not in written:
                self._note("log")
            elif folder is not None:
                self._add_variable("NCCL_DEBUG_FILE", f"{log}%h.%p.log", f"read by: topoflight evidence {log}*")
        if not self._wanted.monitor:
            return
        if folder is None:
            self._note("monitor_claim")
        elif "TOPOFLIGHT_RUN" not in written and "PYTHONPATH" in written:
            self._note("monitor_path")
        elif "TOPOFLIGHT_RUN" not in written:
            run = f"{folder}/topoflight-{job.name}"
            self._add_variable("TOPOFLIGHT_RUN", run, f"read by: topoflight why --run {run}")
            self._add_variable("PYTHONPATH", _MONITOR_START, "starts the rank monitor in each rank")

    def _add_variable(self, name: str, value: str, reason: str) -> None:
        if self._part.pod is None and name in RESERVED:
            return
        for entry in _get(self._container, "env"):
            if isinstance(entry, dict) and entry.get("name") == name:
                present = entry.get("value", "a value from elsewhere")
                if str(present).lower() != value.lower():
                    self._note(
                        "present", present=f"{name}={present} is set in the manifest", value=value, reason=reason
                    )
                return
        if any(re.search(rf"(^|[\s;&]){re.escape(name)}=", word) for word in self._part.command):
            self._note("present", present=f"{name} is set in the command", value=value, reason=reason)
            return
        for source in _get(self._container, "envFrom"):
            config = _get(source, "configMapRef").get("name") if isinstance(source, dict) else None
            names = self._job.files.get(f"configmap:{config}")
            if config is not None and names is None:
                self._note("config_map", name=name, value=value, config=config)
                return
            if config is not None and f"{source.get('prefix', '')}{name}" in str(names).split():
                present = f"{name} is set by ConfigMap {config}"
                self._note("present", present=present, value=value, reason=reason)
                return
        _ensure(self._container, "env", []).append({"name": name, "value": value})

    def _find_lasting_folder(self) -> str | None:
        """Return the mount path of a writable volume that outlives the pod."""
        lasting = [each.get("name") for each in _get(self._body, "volumes")
                   if isinstance(each, dict) and {"persistentVolumeClaim", "ephemeral"} & set(each)]  # fmt: skip
        mounts = [each for each in _get(self._container, "volumeMounts") if isinstance(each, dict)]
        return next((str(each.get("mountPath")).rstrip("/") for each in mounts
                     if each.get("name") in lasting and not each.get("readOnly")), None)  # fmt: skip

    # -- resources

    def _add_resources(self) -> None:
        resources = dict(self._wanted.resources)
        for need in self._wanted.needs:
            name, _, count = need.value.partition(": ")
            if need.name == "resource" and not _GPU.fullmatch(name) and not find_resources(name, list(resources)):
                resources[name] = count
        part = self._part
        if part.resources.get("claims"):
            if resources:
                self._note("claims", names=", ".join(resources))
            return
        has = part.requested
        if part.pod is None and not has and resources and not asks_for_gpus(resources):
            self._note("resources_of_runtime", names=", ".join(resources))
            return
        for name, count in resources.items():
            there = find_resources(name, list(has)) if name.endswith("/*") else [name] if name in has else []
            if there:
                present = str(has[there[0]])
                if present != count and quantity(present) != quantity(count):
                    self._note("resource", name=there[0], present=present, value=count)
            elif name.endswith("/*"):
                self._note("resource_name", name=name, value=count)
            elif name.startswith("hugepages-") and not {"cpu", "memory"} & {*has, *part.limits}:
                self._note("huge_pages", name=name, value=count)
            else:  # Kubernetes sets the request of an extended resource to its limit
                _ensure(_ensure(self._container, part.resources_key, {}), "limits", {})[name] = count
        if self._lacks_rdma({*has, *resources}):
            self._note("no_rdma")

    def _lacks_rdma(self, names: set[str]) -> bool:
        """Whether the nodes have RDMA, and the pod requests none of these resources or others that give it a device."""
        needs = {need.value.partition(":")[0] for need in self._wanted.needs}
        return (
            self._job.nodes != 1
            and any(need.name == "memlock" for need in self._wanted.needs)
            and not {"rdma/*", "vpc.amazonaws.com/efa"} & needs
            and not find_resources("rdma/*", sorted(names))
            and not self._security.get("privileged")
            # on GKE this annotation also provides the device
            and "networking.gke.io/interfaces" not in _get(self._part.pod, "metadata", "annotations")
        )

    # -- other needs of the pod

    def _add_need(self, pod: Document, need: Setting) -> None:
        reason = f"{need.reason.rule}: {need.reason.evidence}"
        if need.name == "shm_bytes":
            self._add_shared_memory(int(need.value), reason)
        elif need.name == "network" and not self._body.get("hostNetwork"):
            annotations = _ensure(_ensure(pod, "metadata", {}), "annotations", {})
            there = annotations.get(NETWORKS_ANNOTATION)
            if there is None:
                annotations[NETWORKS_ANNOTATION] = need.value
            elif need.value not in str(there):
                present = f"network {there} is set in the manifest"
                self._note("present", present=present, value=need.value, reason=reason)
        elif need.name == "capability":
            self._add_capability(need.value)
        elif need.name == "compute_domain" and not self._body.get("resourceClaims"):
            self._note("compute_domain", reason=reason)

    def _add_shared_memory(self, wanted_bytes: int, reason: str) -> None:
        size = f"{-(-wanted_bytes // 2**20)}Mi"
        memory = quantity(str(self._part.limits.get("memory", "")))
        volumes = _get(self._body, "volumes")
        if mounts := self._list_shm_mounts():
            volume = next((each for each in volumes if each.get("name") == mounts[0].get("name")), None)
            limit = quantity(str(_get(volume, "emptyDir").get("sizeLimit", "")))
            if limit is not None and limit < wanted_bytes:
                self._note("shm", mib=limit // 2**20, size=size, reason=reason)
            if limit is not None and memory is not None and limit > memory:
                self._note("shm_limit", mib=limit // 2**20, limit=memory // 2**20)
            return
        if self._body.get("hostIPC"):
            self._note("shm_host", size=size)
            return
        if memory is not None and wanted_bytes > memory / 2:
            # files in /dev/shm count as memory of the container; half of the memory is the default size of tmpfs(5)
            half = f"{max(1, int(memory / 2) >> 20)}Mi"
            self._note("shm_half", half=half, size=size, reason=reason)
            size = half
        name = "topoflight-shm" if any(each.get("name") == "shm" for each in volumes) else "shm"
        self._mount({"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}}, mountPath=_SHM)

    def _mount(self, volume: Document, **mount: Any) -> None:
        """Add a volume to the pod, and mount it in the training container."""
        _ensure(self._body, "volumes", []).append(volume)
        _ensure(self._container, "volumeMounts", []).append({"name": volume["name"], **mount})

    def _add_capability(self, name: str) -> None:
        added = _get(self._security, "capabilities", "add")
        if self._security.get("privileged") or {name, "ALL", f"CAP_{name}"} & set(added):
            return
        context = _ensure(self._container, "securityContext", {})
        _ensure(_ensure(context, "capabilities", {}), "add", []).append(name)
        if self._security.get("runAsNonRoot"):
            self._note("not_root", name=name)

    # -- init containers

    def _add_gate(self) -> None:
        image, part, body = self._wanted.gate_image, self._part, self._body
        if image is None:
            self._note("no_gate")
            return
        if self._job.kind.endswith("Runtime") and part.without_gpus:
            self._note("gate_of_runtime")
            return
        inits = _get(body, "initContainers")
        for each in inits:
            if RUNS_GATE.search(" ".join(map(str, (*_get(each, "command"), *_get(each, "args"))))):
                if each.get("image") != image:
                    self._note("gate", name=each.get("name"), image=each.get("image"))
                return
        is_taken = any(each.get("name") == GATE for each in (*_get(body, "containers"), *inits))
        # The check gets the job's variables, and the node's name, because every pod has another host name.
        node = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
        sources = [each for each in _get(self._container, "envFrom") if isinstance(each, dict)]
        self._add_init_container(
            name=f"topoflight-{GATE}" if is_taken else GATE, image=image,
            command=["topoflight", "preflight", "-o", "table",
                     *(word for check in self._wanted.require for word in ("--require", check))],
            env=[node, *_list_plain_variables(self._container)],
            # without Secrets, which the check does not need
            envFrom=[each for each in sources if "configMapRef" in each],
            resources={k: part.resources[k] for k in part.resources if k in ("limits", "requests", "claims")},
            securityContext=self._container.get("securityContext"), volumeMounts=self._list_shm_mounts(),
        )  # fmt: skip
        if part.restart not in (None, "Never"):
            self._note("gate_repeats")

    def _add_init_container(self, **members: Any) -> None:
        """Add an init container without members that are empty."""
        container = {key: copy.deepcopy(value) for key, value in members.items() if value}
        _ensure(self._body, "initContainers", []).append(container)

    def _list_shm_mounts(self) -> list[Document]:
        mounts = _get(self._container, "volumeMounts")
        return [each for each in mounts if str(each.get("mountPath")).rstrip("/") == _SHM]

    def _add_monitor_files(self) -> None:
        """Add an init container that copies the rank monitor from its image into a volume of the training container."""
        starts = {"name": "PYTHONPATH", "value": _MONITOR_START} in [*_get(self._container, "env")]
        if not starts or MONITOR in [each.get("name") for each in _get(self._body, "volumes")]:
            return
        self._add_init_container(
            name=MONITOR, image=self._wanted.gate_image,
            volumeMounts=[{"name": MONITOR, "mountPath": _MONITOR_FOLDER}],
            command=["python", "-m", "agent.jobs.autostart.sitecustomize", _MONITOR_FOLDER],
            securityContext=self._container.get("securityContext"),
        )  # fmt: skip
        self._mount({"name": MONITOR, "emptyDir": {}}, mountPath=_MONITOR_FOLDER, readOnly=True)


def _list_plain_variables(container: Document) -> list[Document]:
    """Return the variables that the preflight check reads: those about communication, with a plain value."""
    judged = re.compile(r"(?!NCCL_DEBUG_FILE)(?:(?:TORCH_)?NCCL_|GLOO_|FI_|OFI_|RDMAV_|UCX_|OMP_)")
    entries = [each for each in _get(container, "env") if isinstance(each, dict)]
    # $(NAME) refers to a variable that may not be copied
    return [each for each in entries if judged.match(str(each.get("name"))) and "$(" not in str(each.get("value"))]


def _ensure(mapping: Document, key: str, empty: Any) -> Any:
    """Return a member of a mapping; a missing or empty member is set to `empty` first."""
    if mapping.get(key) is None:
        mapping[key] = empty
    return mapping[key]


# -- the jobs of a manifest


def _list_objects(manifest: Sequence[Any]) -> Iterator[Document]:
    for each in manifest:
        if not isinstance(each, dict):
            continue
        if str(each.get("kind", "")).endswith("List") and isinstance(each.get("items"), list):
            yield from _list_objects(each["items"])
            continue
        if each.get("kind") == "AppWrapper":  # kueue.sigs.k8s.io/docs/tasks/run/appwrappers
            components = _get(each, "spec", "components")
            yield from _list_objects([one.get("template") for one in components if isinstance(one, dict)])
        yield each


def _get_name(document: Document) -> str:
    metadata = _get(document, "metadata")
    return str(metadata.get("name") or str(metadata.get("generateName", "")).rstrip("-"))


def _get_member(spec: Document, *path: str) -> Any:
    """Return a member of the spec that the API requires. Raises KeyError with its path if it is missing or empty."""
    if not (value := _get(spec, *path)):
        raise KeyError(".".join(("spec", *path)))
    return value


def _parse_number(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() else None


def _parse_job(document: Document, configs: dict[str, Any]) -> Job | None:
    kind, spec = document.get("kind"), _get(document, "spec")
    if kind not in _KINDS:
        return None
    name = _get_name(document)
    try:
        parts = tuple(_parse_parts(kind, name, spec))
    except KeyError as error:
        raise WrapError(f"{kind}/{name}: {error.args[0]} is missing or empty, so its pods are unknown") from None
    except (AttributeError, TypeError) as error:
        raise WrapError(f"{kind}/{name}: is not built as a {kind} is: {error}") from None
    if not parts:
        raise WrapError(f"{kind}/{name}: no container, or several without GPUs, so the one that trains is unknown")
    # The command that starts the ranks: mpirun of a launcher, or that of a part with GPUs
    commands = [part.command for part in sorted(parts, key=lambda part: not part.gpus) if part.command]
    command = next((each for each in commands if _MPIRUN.search(" ".join(each))), commands[0] if commands else [])
    parts = tuple(part for part in parts if part.gpus) or parts  # a launcher pod without GPUs has no rank
    counted = [part.replicas for part in parts]
    nodes = sum(n or 0 for n in counted) if None not in counted else None
    ranks = {"PyTorchJob": spec.get("nprocPerNode"), "TrainJob": _get(spec, "trainer").get("numProcPerNode")}.get(kind)
    if kind.endswith("Runtime"):
        policy = _get(spec, "mlPolicy")
        nodes = _parse_number(policy.get("numNodes", 1))
        ranks = (_get(policy, "torch") or _get(policy, "mpi")).get("numProcPerNode")
    return Job(
        name=name, kind=kind, document=document, parts=parts, nodes=nodes or None, command=command,
        ranks_per_node=_parse_number(ranks) or parts[0].gpus, files=_list_files(parts, configs),
    )  # fmt: skip


def _parse_parts(kind: str, name: str, spec: Document) -> Iterator[Part]:
    if kind == "TrainJob":
        _get_member(spec, "runtimeRef", "name")
        trainer = spec.setdefault("trainer", {})
        nodes = _parse_number(trainer.get("numNodes"))
        yield Part(f"{kind}/{name}", None, trainer, nodes, resources_key="resourcesPerNode")
        return
    for place, template, pods, restart in _list_templates(kind, spec):
        if (main := _find_trainer(kind, template["spec"]["containers"])) is not None:
            yield Part(f"{kind}/{name}{place}", template, main, pods, restart)


def _list_templates(kind: str, spec: Document) -> Iterator[tuple[str, Document, int | None, str | None]]:
    """Yield name, pod template, number of pods and restart policy of each group of pods."""
    if kind == "PyTorchJob":
        for role, each in _get_member(spec, "pytorchReplicaSpecs").items():
            restart = str(each.get("restartPolicy", "OnFailure"))
            yield f" {role}", each["template"], _parse_number(each.get("replicas", 1)), restart
    elif kind == "Job" and "tasks" in spec:  # a Job of Volcano
        for each in _get_member(spec, "tasks"):
            yield f" {each.get('name')}", each["template"], _parse_number(each.get("replicas", 1)), None
    elif kind == "Job":
        yield "", _get_member(spec, "template"), _parse_number(spec.get("parallelism", 1)), None
    else:
        of_jobs = ("template", "spec", "replicatedJobs") if kind.endswith("Runtime") else ("replicatedJobs",)
        for each in _get_member(spec, *of_jobs):
            labels = _get(each["template"], "metadata", "labels")
            if str(labels.get(_STEP, "trainer")) != "trainer":  # a step that downloads the dataset or the model
                continue
            body = each["template"]["spec"]
            counts = [_parse_number(count) for count in (each.get("replicas", 1), body.get("parallelism", 1))]
            pods = None if None in counts else math.prod(n or 1 for n in counts)
            yield f" {each['name']}", body["template"], pods, None


def _find_trainer(kind: str, containers: Sequence[Document]) -> Document | None:
    """Return the training container: the one with the API's name, else the one with GPUs, else the only one."""
    main = [each for each in containers if each.get("name") == _MAIN.get(kind)]
    with_gpus = [each for each in containers if any(map(_GPU.fullmatch, _get(each, "resources", "limits")))]
    for candidates in (main, with_gpus, containers if kind != "TrainingRuntime" else []):
        if len(candidates) == 1:
            return candidates[0]
    return None


def _list_files(parts: Sequence[Part], configs: dict[str, Any]) -> dict[str, str]:
    """Return the files of the manifest's ConfigMaps by container path; `configmap:NAME` has the keys of a ConfigMap."""
    files = {f"configmap:{name}": " ".join(map(str, data)) for name, data in configs.items()}
    for part in parts:
        volumes = {each.get("name"): each for each in _get(part.pod, "spec", "volumes")}
        for mount in _get(part.container, "volumeMounts"):
            config = _get(volumes.get(mount.get("name")), "configMap").get("name")
            for key, text in configs.get(str(config), {}).items():
                files[f"{str(mount.get('mountPath')).rstrip('/')}/{key}"] = str(text)
    return files

"""One description of a fine-tune job on Kubernetes, from which every job API is rendered."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.advice import Recommendation

DEVICE_CLASSES = ("gpu.nvidia.com", "dranet.net")  # the usual names: of NVIDIA's DRA driver and of DRANET
# RFC 1123 label, as Kubernetes wants the names of namespaces.
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# RFC 1035 label: a job's name becomes a Service's; TrainJob (Trainer 2.1), PyTorchJob and JobSet refuse a first digit.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME_LIMIT = 63  # bytes of a host name's label: the pods' names, too
# Extended resource: DNS subdomain / name.
_RESOURCE = re.compile(r"[a-z0-9.-]{1,253}/[A-Za-z0-9._-]{1,63}|hugepages-[0-9]+[KMG]i")
_GPU = re.compile(r"nvidia\.com/(p?gpu|mig-)")  # NVIDIA's device plugins name GPUs so, its network operator NICs not
_AGENT = re.compile(r"https?://[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?/?")
_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# The Trainer's webhook refuses these in a TrainJob: it sets them itself (Kubeflow Trainer v2 torch plugin).
RESERVED_ENVIRONMENT = frozenset(
    {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
)


MOUNT = "/mnt/shared"  # where the pods see the claim
AGENT = "http://topoflight-node.topoflight:9402"  # the Service of deploy/daemonset that stays on the pod's own node
COMMAND = ("torchrun", "-m", "finetune.train", "--config", "/etc/config/config.yaml", "--plan", "/etc/config/plan.json")


class JobError(ValueError):
    """A job that cannot be rendered; names the setting, its value and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What to launch, and what its pods ask for."""

    name: str
    image: str
    nodes: int
    processes_per_node: int
    command: tuple[str, ...]  # of one pod: torchrun reads the rest from the job controller's environment
    namespace: str = "default"
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)  # per pod: cpu, memory, nvidia.com/gpu, rdma/..., efa
    networks: tuple[str, ...] = ()  # Multus: "rdmashared-net" or "namespace/name"
    shm_bytes: int | None = None
    ipc_lock: bool = False
    config_map: str | None = None  # mounted at /etc/config
    claim: str | None = None  # PersistentVolumeClaim mounted at MOUNT
    token_secret: str | None = None  # Secret whose key HF_TOKEN opens gated models of the Hugging Face hub
    queue: str | None = None  # Kueue LocalQueue
    topology_label: str | None = None  # Kueue topology level that all pods must share
    service_account: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerate: tuple[str, ...] = ()  # taint keys, any value
    preflight_image: str | None = None  # runs the gate in an init container
    preflight_require: tuple[str, ...] = ()
    agent: str | None = None  # URL of the node's agent, which is told how the job flew
    resource_claim_template: str | None = None  # DRA: GPU and NIC under one PCIe root
    device_classes: tuple[str, str] = DEVICE_CLASSES  # DRA: of GPU and NIC, as the cluster calls them
    active_deadline_seconds: int | None = None

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.namespace):
            raise JobError(f"namespace={self.namespace!r}: must be lower-case letters, digits and '-', 63 at most")
        if not _NAME.fullmatch(self.name):
            raise JobError(
                f"name={self.name!r}: must be lower-case letters, digits and '-', a letter first, 63 at most"
            )
        for what in ("nodes", "processes_per_node"):
            if getattr(self, what) < 1:
                raise JobError(f"{what}={getattr(self, what)}: must be at least 1")
        last = f"-worker-{self.nodes - 1}"  # what PyTorchJob and JobSet ("-node-0-1") add at most
        if len(self.name) + len(last) > _NAME_LIMIT:
            allowed = _NAME_LIMIT - len(last)
            raise JobError(f"name={self.name!r}: {allowed} characters at most, for its pods are named NAME{last}")
        for name in self.environment:
            if not _ENVIRONMENT.fullmatch(name):
                raise JobError(f"environment {name!r}: not a variable's name")
            if name in RESERVED_ENVIRONMENT:
                raise JobError(f"environment {name}: set by the job controller, which refuses it from outside")
        for name in self.limits:
            if name not in ("cpu", "memory", "ephemeral-storage") and not _RESOURCE.fullmatch(name):
                raise JobError(f"resource {name!r}: must be cpu, memory or domain/name")

        if self.agent is not None and not _AGENT.fullmatch(self.agent):
            raise JobError(f"agent={self.agent!r}: must be http://HOST:PORT or https://HOST:PORT")

    @property
    def qualified_networks(self) -> str:
        """Value of the annotation k8s.v1.cni.cncf.io/networks."""
        return ",".join(self.networks)


def from_advice(
    advice: Recommendation,
    *,
    name: str,
    image: str,
    nodes: int,
    allocatable: Sequence[str] | None = None,
    **settings: object,
) -> JobSpec:
    """A job with the recommendation inside: environment, processes per node, and what the pods need.

    `allocatable` names the extended resources that the nodes offer, None where they were not asked; a need that names
    a family ("rdma/*: 1") takes the one of that family, and is an error where it is missing or not the only one.
    """
    if advice.chosen is None:
        raise JobError("there is no layout to launch: " + "; ".join(r.reason for r in advice.rejected[:3]))
    world = advice.chosen.layout.world_size
    if world % nodes:
        raise JobError(f"nodes={nodes}: does not divide the layout's {world} ranks")
    limits: dict[str, str] = {}
    networks: list[str] = []
    shm: int | None = None
    lock = False
    for need in advice.needs:
        if need.name == "resource":
            resource, _, count = need.value.partition(": ")
            limits[_named(resource, allocatable)] = count
        elif need.name == "network":
            networks.append(need.value)
        elif need.name == "shm_bytes":
            shm = int(need.value)
        elif need.name == "capability":
            lock = lock or need.value == "IPC_LOCK"
    if advice.backend == "nccl":
        limits["nvidia.com/gpu"] = str(world // nodes)
    given = dict(settings)
    given.setdefault("command", COMMAND)
    given["limits"] = {**limits, **dict(given.get("limits") or {})}  # type: ignore[call-overload]
    return JobSpec(
        name=name, image=image, nodes=nodes, processes_per_node=world // nodes,
        environment={s.name: s.value for s in advice.settings}, networks=tuple(dict.fromkeys(networks)),
        shm_bytes=shm, ipc_lock=lock, **given,  # type: ignore[arg-type]
    )  # fmt: skip


def family(resource: str, names: Sequence[str]) -> list[str]:
    """Those of `names` that may stand for a need.

    An RDMA device is offered by the shared device plugin as rdma/..., by SR-IOV operators under names of their own.
    """
    if resource != "rdma/*":
        return [name for name in names if name.startswith(resource.removesuffix("*"))]
    for prefix in ("rdma/", "openshift.io/", "nvidia.com/"):
        if found := [name for name in names if name.startswith(prefix) and not _GPU.match(name)]:
            return found
    return []


def _named(resource: str, allocatable: Sequence[str] | None) -> str:
    if not resource.endswith("/*"):
        return resource
    found = family(resource, allocatable or ())
    if len(found) == 1:
        return found[0]
    offered = f"the nodes offer {', '.join(found) or 'none'}"
    asked = offered if allocatable is not None else "not asked what the nodes offer (KUBECONFIG or --context would)"
    raise JobError(f"resource {resource}: {asked}; name the one to use with --resource NAME=COUNT")

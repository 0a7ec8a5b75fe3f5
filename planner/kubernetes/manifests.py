"""Describe a fine-tune job on Kubernetes, check its settings, and render it for each supported job API.

Specifications: trainer.kubeflow.org/v1alpha1 (Kubeflow Trainer 2.0 to 2.3), kubeflow.org/v1 (Training Operator 1.7 to
1.9; resource claims need 1.9), jobset.x-k8s.io/v1alpha2, batch/v1, resource.k8s.io/v1, resource.nvidia.com/v1beta1
(NVIDIA's DRA driver 25.3 to 0.4). The manifests are templates/*.yaml.j2. This module quotes every value that a template
prints, parses the result, and writes the parsed documents with the YAML library. So a hostile name cannot change the
structure of a manifest.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from contracts.run_record import KILLED, RESUMABLE
from contracts.tables import read_table
from planner.advice import Recommendation
from planner.nccl_env import RESERVED

CHANNEL = "compute-domain-channel"  # name of the pod's resource claim for an IMEX channel
DEVICE_CLASSES = ("gpu.nvidia.com", "dranet.net")  # defaults of NVIDIA's DRA driver and of DRANET's examples
_NAME_LIMIT = 63  # characters of a DNS label; pod names are DNS labels
_GPU = re.compile(r"nvidia\.com/(p?gpu|mig-)")  # names that NVIDIA's device plugins use for GPUs, not for NICs
# Format of Kubernetes apimachinery, pkg/api/resource: a number with an optional suffix, here without sign.
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")

MOUNT = "/mnt/shared"  # mount path of the PersistentVolumeClaim in the pods
CACHE = f"{MOUNT}/.cache"  # HF_HOME on the claim, so that all pods and later jobs share one download
RESTARTS = 3  # how often an interrupted job is restarted automatically
RUNS_GATE = re.compile(r"\b(topoflight|agent\.cli)\s+preflight\b")  # a command that already runs preflight
SAVE_SECONDS = 100  # minimum time from SIGTERM to the saved checkpoint
END_SECONDS = 20  # time from the checkpoint to the end of the pod, or of Slurm's batch script
COMMAND = ("torchrun", "-m", "finetune.train", "--plan", "/etc/config/plan.json")


class JobError(ValueError):
    """The job cannot be rendered; the message names the setting, its value and the allowed values."""


def quantity(text: str) -> Decimal | None:
    """Return the number of a Kubernetes quantity ("500m", "96Gi", "1e3"); None if invalid or negative."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix in _BINARY:
        return number * Decimal(1 << _BINARY[suffix])
    return number.scaleb(_DECIMAL.get(suffix, 0) if suffix in _DECIMAL else int(suffix[1:] or 0))


def parse_toleration(taint: str) -> dict[str, str]:
    """Return the toleration for a taint KEY[=VALUE][:EFFECT]; default effect NoSchedule. Raises JobError."""
    pair, colon, effect = taint.partition(":")
    key, equals, value = pair.partition("=")
    allowed = _has_form("label_key", key) and _has_form("label_value", value) and (not colon or effect in _EFFECTS)
    if not allowed:
        raise JobError(f"--tolerate {taint!r}: must be KEY[=VALUE][:EFFECT] with EFFECT one of {', '.join(_EFFECTS)}")
    matched = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **matched, "effect": effect or "NoSchedule"}


def check_form(form: str, setting: str, value: str) -> None:
    """Raise JobError if a value does not match a format of names.toml; `setting` ("name=") precedes it."""
    if not _has_form(form, value):
        raise JobError(f"{setting}{value!r}: must be {read_table(__file__, 'names.toml')[form]['words']}")


def _has_form(form: str, value: str) -> bool:
    row = read_table(__file__, "names.toml")[form]
    return len(value) <= row.get("most", len(value)) and re.fullmatch(row["pattern"], value) is not None


def check_size(setting: str, size: str) -> None:
    """Raise JobError if a size is not a quantity above 0 (bytes or cores)."""
    if not quantity(size):  # None, or 0
        raise JobError(f"{setting}={size!r}: must be a quantity above 0, such as 4, 500m, 96Gi or 100G")


def check_limit(name: str, amount: str) -> None:
    """Raise JobError for an invalid amount: not a whole number of devices, or not a multiple of the page size."""
    if name in ("cpu", "memory", "ephemeral-storage"):
        check_size(f"resource {name}", amount)
        return
    check_form("resource", "resource ", name)
    if name.startswith("hugepages-"):
        page, bytes_wanted = quantity(name.removeprefix("hugepages-")), quantity(amount)
        if not page or not bytes_wanted or bytes_wanted % page:
            raise JobError(f"resource {name}={amount!r}: must be bytes in whole pages, such as 5120Mi")
    elif not amount.isdecimal():
        raise JobError(f"resource {name}={amount!r}: must be a whole number, because devices cannot be divided")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The job to launch, and the requirements of its pods."""

    name: str
    image: str
    nodes: int
    processes_per_node: int
    command: tuple[str, ...]  # of one pod; torchrun reads ranks and addresses from the controller's variables
    namespace: str = "default"
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)  # per pod: cpu, memory, nvidia.com/gpu, rdma/..., efa
    networks: tuple[str, ...] = ()  # Multus: "rdmashared-net" or "namespace/name"
    shm_bytes: int | None = None
    ipc_lock: bool = False
    config_map: str | None = None  # mounted at /etc/config
    claim: str | None = None  # PersistentVolumeClaim mounted at MOUNT
    token_secret: str | None = None  # Secret with the key HF_TOKEN, for gated models of the Hugging Face hub
    queue: str | None = None  # Kueue LocalQueue
    topology_label: str | None = None  # node label of the Kueue topology level within which all pods must run
    service_account: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerate: tuple[str, ...] = ()  # taints as KEY[=VALUE][:EFFECT]
    preflight_image: str | None = None  # image of the init container that runs the preflight check
    preflight_require: tuple[str, ...] = ()
    preflight_skip: tuple[str, ...] = ()  # checks that preflight does not run
    measure: bool = False  # all pods benchmark their network together before the training
    agent: str | None = None  # URL of the node's agent, to which the run record is posted
    resource_claim_template: str | None = None  # DRA: template that allocates GPU and NIC below one PCIe root
    device_classes: tuple[str, str] = DEVICE_CLASSES  # DRA: the cluster's device classes of GPU and NIC
    compute_domain: bool = False  # NVIDIA's DRA driver: one IMEX channel per pod, for NVLink between nodes
    restarts: int = RESTARTS  # of ranks that saved a checkpoint and exited, and of lost pods
    save_seconds: int = SAVE_SECONDS  # time for a checkpoint after the pod's SIGTERM

    def __post_init__(self) -> None:
        for form, row in read_table(__file__, "names.toml").items():
            for what in row.get("settings", ()):
                if (value := getattr(self, what)) is not None:
                    check_form(form, f"{what}=", value)
        last = f"-worker-{self.nodes - 1}"  # the longest suffix of PyTorchJob and JobSet ("-node-0-1")
        if len(self.name) + len(last) > _NAME_LIMIT:
            allowed = str(_NAME_LIMIT - len(last))
            raise JobError(f"name={self.name!r}: {allowed} characters at most, for its pods are named NAME{last}")
        for name in self.environment:
            check_form("variable", "environment ", name)
            if name in RESERVED:
                raise JobError(f"environment {name}: the job controller sets it, and refuses a value from outside")
        for name, amount in self.limits.items():
            check_limit(name, amount)
        # with an invalid node label or taint the pods would stay Pending forever
        for key in filter(None, (*self.node_selector, self.topology_label)):
            check_form("label_key", "label ", key)
        for key, value in self.node_selector.items():
            check_form("label_value", f"label {key}=", value)
        for taint in self.tolerate:
            parse_toleration(taint)

    @property
    def variables(self) -> dict[str, str]:
        """The environment, with HF_HOME on the claim; otherwise every pod downloads the model at every start."""
        return {**({"HF_HOME": CACHE} if self.claim else {}), **self.environment}

    @property
    def requests(self) -> dict[str, str]:
        """Resource requests of a pod; for an extended resource Kubernetes accepts only a request equal to the limit.

        Kubernetes also rejects huge pages without cpu or memory ("HugePages require cpu or memory"). Then one core per
        rank is requested, because each rank keeps one core busy.
        """
        alone = not {"cpu", "memory"} & self.limits.keys()
        pages = alone and any(name.startswith("hugepages-") for name in self.limits)
        return {**self.limits, **({"cpu": str(self.processes_per_node)} if pages else {})}

    @property
    def claims(self) -> dict[str, str]:
        """Resource claims of a pod: name of the claim in the pod, and its ResourceClaimTemplate."""
        claims = {"gpu-nic": self.resource_claim_template} if self.resource_claim_template else {}
        return claims | ({CHANNEL: f"{self.name}-{CHANNEL}"} if self.compute_domain else {})

    @property
    def tolerations(self) -> list[dict[str, str]]:
        """Tolerations of the pods, as in a pod spec."""
        return [parse_toleration(taint) for taint in self.tolerate]


def make_job_spec(
    advice: Recommendation, *, name: str, image: str, nodes: int, limits: Mapping[str, str], **settings: Any
) -> JobSpec:
    """Return a job that follows a recommendation: environment, processes per node, and resources of the pods.

    `limits` are the resources given by the user. A need with a family of resources ("rdma/*: 1") is met by one of
    them. Raises JobError if there is none.
    """
    if advice.chosen is None:
        raise JobError("there is no layout to launch: " + "; ".join(r.reason for r in advice.rejected[:3]))
    world = advice.chosen.layout.world_size
    if world % nodes:
        raise JobError(f"nodes={nodes}: does not divide the layout's {world} ranks")
    needed: dict[str, str] = {}
    needs = {kind: [need.value for need in advice.needs if need.name == kind] for kind in
             ("resource", "network", "shm_bytes", "capability", "compute_domain")}  # fmt: skip
    for need in needs["resource"]:
        resource, _, count = need.partition(": ")
        if not resource.endswith("/*"):
            needed[resource] = count
        elif not find_resources(resource, limits):
            raise JobError(f"resource {resource}: give the name that `kubectl get nodes -o yaml` shows in "
                           f"status.allocatable, with --resource NAME={count}")  # fmt: skip
    environment = {s.name: s.value for s in advice.settings}
    if advice.backend == "nccl":
        needed["nvidia.com/gpu"] = str(world // nodes)
        environment.setdefault("NCCL_DEBUG", "INFO")  # `kubectl logs POD | topoflight evidence -` reads this output
    limits = {**needed, **limits}
    gpus = limits.get("nvidia.com/gpu", "")
    if advice.backend == "nccl" and gpus.isdecimal() and int(gpus) < world // nodes:
        raise JobError(f"resource nvidia.com/gpu={gpus}: the plan has {world // nodes} ranks in a pod, one per GPU")
    return JobSpec(
        name=name, image=image, nodes=nodes, processes_per_node=world // nodes, limits=limits, command=COMMAND,
        environment=environment, networks=tuple(dict.fromkeys(needs["network"])),
        shm_bytes=max(map(int, needs["shm_bytes"]), default=None), ipc_lock="IPC_LOCK" in needs["capability"],
        compute_domain=nodes > 1 and bool(needs["compute_domain"]), **settings,
    )  # fmt: skip


def place_on_claim(folder: str) -> str:
    """Return a folder of the job's settings as the pods see it; a relative path is on the claim."""
    return posixpath.normpath(posixpath.join(MOUNT, folder))


def find_resources(resource: str, names: Collection[str]) -> list[str]:
    """Return the resource names among `names` that can meet the need `resource`, such as "rdma/*".

    The RDMA shared device plugin offers devices as rdma/..., and SR-IOV operators use other prefixes.
    """
    if resource != "rdma/*":
        return [name for name in names if name.startswith(resource.removesuffix("*"))]
    for prefix in ("rdma/", "openshift.io/", "nvidia.com/"):
        if members := [name for name in names if name.startswith(prefix) and not _GPU.match(name)]:
            return members
    return []


# -- rendering

Document = dict[str, Any]
NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"


def list_mappings(document: Any) -> Iterator[Document]:
    """Yield every mapping in a document or a list of documents; outer mappings come before the inner ones."""
    if isinstance(document, dict):
        yield document
    for member in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from list_mappings(member)


# The label with the job's name that each API's controller sets on the pods.
POD_LABELS = {
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
    "pytorchjob": "training.kubeflow.org/job-name",
    "jobset": "jobset.sigs.k8s.io/jobset-name",
    "job": "job-name",
}
PORT = 29500  # where pod 0 listens for the other pods; the default of torchrun
# Exit codes after which a pod is replaced: a checkpoint was saved, SIGKILL, SIGTERM. Any other code fails the job.
RETRIED = (RESUMABLE, KILLED + 9, KILLED + 15)
AGENT_AUDIENCE = "topoflight"  # audience that the agent's TokenReview expects in a token


class Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as files, as block scalars, and never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        """Always return True, because some tools that read manifests do not support aliases."""
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """Write a text of several lines as a block. PyYAML does not check that a block can represent all its characters."""
    is_plain = all(letter.isprintable() or letter in "\n\t" for letter in value)
    style = ("|" if "\n" in value else None) if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


Dumper.add_representer(str, _represent_text)


def render(documents: Iterable[Document]) -> str:
    """Return the documents as one YAML stream."""
    return str(yaml.dump_all(list(documents), Dumper=Dumper, sort_keys=False, allow_unicode=True, explicit_start=True))


class _Loader(yaml.SafeLoader):
    """Loads YAML with tags that turn a nested document into a string: `!json`, and `!json-lines` with indentation."""


def _dump_json(loader: yaml.SafeLoader, node: yaml.MappingNode, indent: int | None = None) -> str:
    return json.dumps(_drop_empty(loader.construct_mapping(node, deep=True)), indent=indent)


_Loader.add_constructor("!json", _dump_json)
_Loader.add_constructor("!json-lines", partial(_dump_json, indent=2))


def _drop_empty(value: Any) -> Any:
    """Return the value without mapping members that are None, which a template writes for unused settings."""
    if isinstance(value, dict):
        return {key: _drop_empty(member) for key, member in value.items() if member is not None}
    return [_drop_empty(item) for item in value] if isinstance(value, list) else value


@cache
def _templates() -> Any:
    """Return the jinja2 environment of the templates. It prints a value as a quoted YAML scalar, and macros unquoted.

    The quoting is JSON's. JSON writes a character beyond U+FFFF as a surrogate pair, which YAML does not accept, so
    pairs are replaced by the character.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def quoted(value: Any) -> Markup:
        if isinstance(value, Markup):
            return value
        halves = re.compile(r"\\ud[89ab]..\\ud[c-f]..")
        text = halves.sub(lambda pair: str(json.loads(f'"{pair[0]}"')), json.dumps(value, default=dict))
        return Markup(text)  # noqa: S704 - no HTML: quoted above

    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    return Environment(
        loader=loader, autoescape=True, finalize=quoted, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip


def from_template(template: str, **values: Any) -> tuple[Document, ...]:
    """Return the parsed documents of a template that is rendered with these values."""
    text = _templates().get_template(f"{template}.yaml.j2").render(values)
    documents = yaml.load_all(text, Loader=_Loader)
    return tuple(_drop_empty(document) for document in documents if document is not None)


def _render_job(api: str, spec: JobSpec) -> tuple[Document, ...]:
    """Return the documents of a job for one API: first the objects that it needs, last the job itself."""
    return from_template(
        api, spec=spec, api=api, pod_label=POD_LABELS[api], mount=MOUNT, port=PORT, end_seconds=END_SECONDS,
        audience=AGENT_AUDIENCE, retried=RETRIED,
    )  # fmt: skip


APIS: dict[str, Callable[[JobSpec], tuple[Document, ...]]] = {api: partial(_render_job, api) for api in POD_LABELS}

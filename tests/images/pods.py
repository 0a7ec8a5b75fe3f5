"""Jobs on podman: what a job's controller, the kubelet and Multus would do with a rendered Job, done by this rig."""

from __future__ import annotations

import copy
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from api_server import ApiServer
from containers import playable, podman
from pyroute2 import IPRoute, NetNS

Document = dict[str, Any]
BRIDGE, MACVLAN, PARENT = "topoflight-bridge", "topoflight-macvlan", ("tfparent0", "tfparent1")
SUBNETS = {BRIDGE: "10.245.0.0/24", MACVLAN: "10.245.1.0/24"}
INTERFACES = {BRIDGE: "eth0", MACVLAN: "net1"}
END_SECONDS = 420.0


@contextmanager
def two_networks() -> Iterator[None]:
    """The pods' own network, a bridge, and a secondary one, macvlan over a veth; both are gone at the end."""
    _remove()
    with IPRoute() as host:
        host.link("add", ifname=PARENT[0], kind="veth", peer=PARENT[1])
        for name in PARENT:
            host.link("set", index=host.link_lookup(ifname=name)[0], state="up")
    try:
        for name, options in ((BRIDGE, ("--internal",)), (MACVLAN, ("-d", "macvlan", "-o", f"parent={PARENT[0]}"))):
            podman("network", "create", "--disable-dns", *options, "--subnet", SUBNETS[name], name)
        yield
    finally:
        _remove()


def _remove() -> None:
    """Both networks, and what they stand on."""
    podman("network", "rm", "--force", BRIDGE, MACVLAN, check=False)
    with IPRoute() as host:
        for index in host.link_lookup(ifname=PARENT[0]):
            host.link("del", index=index)


def address(network: str, index: int) -> str:
    """IPv4 of a pod."""
    return f"{SUBNETS[network].rpartition('.')[0]}.{index + 10}"


def pod_of_job(job: Document, index: int, shared: Path) -> Document:
    """Pod `index` as the Job's controller makes it, with what this engine does not know taken out by name.

    Out go: affinity and subdomain (one host, no DNS: `hostAliases` names pod 0), the volume `shm` (a tmpfs of Memory:
    the engine mounts its own /dev/shm). The claim is a folder. In comes what a kubelet adds: the index, the address of
    the API server in the environment, and the file of the termination message.
    """
    name = job["metadata"]["name"]
    template = copy.deepcopy(job["spec"]["template"])
    spec = template["spec"]
    for unknown in ("affinity", "subdomain"):
        spec.pop(unknown, None)
    spec["hostAliases"] = [{"ip": address(BRIDGE, 0), "hostnames": [f"{name}-0.{name}"]}]
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "shm"]
    for volume in spec["volumes"]:
        if volume.pop("persistentVolumeClaim", None):
            volume["hostPath"] = {"path": str(shared), "type": "Directory"}
    word = said_at(shared, name, index)
    word.touch()
    word.chmod(0o666)
    spec["volumes"].append({"name": "word", "hostPath": {"path": str(word), "type": "File"}})
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        container["volumeMounts"] = [one for one in container.get("volumeMounts", ()) if one["name"] != "shm"]
    (rank,) = spec["containers"]
    rank["volumeMounts"].append({"name": "word", "mountPath": "/dev/termination-log"})
    rank.setdefault("env", []).extend(
        {"name": key, "value": value}
        for key, value in (("JOB_COMPLETION_INDEX", str(index)), ("KUBERNETES_SERVICE_HOST", "10.96.0.1"))
    )
    labels = {**(template.get("metadata") or {}).get("labels", {}), "job-name": name}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{name}-{index}", "labels": labels}, "spec": spec}
    return playable(pod)


def said_at(shared: Path, job: str, index: int) -> Path:
    """Where a pod leaves its last word."""
    return shared / f"{job}-{index}.word"


def start(pod: Document, maps: Sequence[Document], networks: Sequence[str], index: int, place: Path) -> None:
    """Play one pod on the networks, the first of which is its own."""
    place.write_text(yaml.safe_dump_all([*maps, pod]))
    words = [f"--network={name}:interface_name={INTERFACES[name]},ip={address(name, index)}" for name in networks]
    podman("kube", "play", *words, str(place))


def shape(pod: str, interface: str, bits_per_second: float) -> None:
    """tc-tbf(8) on an interface of a running pod, of what it sends."""
    container = f"{pod}-rank"
    pid = podman("inspect", "--format", "{{.State.Pid}}", container).stdout.strip()
    with NetNS(f"/proc/{pid}/ns/net", flags=0) as inside:
        (index,) = inside.link_lookup(ifname=interface)
        rate = int(bits_per_second / 8)
        inside.tc("add", "tbf", index, 0, rate=rate, burst=max(65536, rate // 100), latency="400ms")


def end(pod: str) -> tuple[int, str]:
    """Wait for its container; its exit code and log."""
    code = int(podman("wait", f"{pod}-rank", timeout=END_SECONDS).stdout)
    done = podman("logs", f"{pod}-rank", check=False)
    return code, done.stdout + done.stderr


class Cluster(ApiServer):
    """An API server whose Jobs run as pods of podman; `networks_of` says which networks a Job's pods join."""

    def __init__(self, shared: Path, started: Callable[[str], None]) -> None:
        super().__init__()
        self.shared, self.started = shared, started
        self.controllers = False
        self.logs: dict[str, str] = {}

    def put(self, collection: str, namespace: str, document: Document) -> Document:
        """As ever; a new Job is run."""
        new = document.get("kind") == "Job" and "status" not in document
        made = super().put(collection, namespace, document)
        if new:
            threading.Thread(
                target=self._run, args=(collection, namespace, copy.deepcopy(document)), daemon=True
            ).start()
        return made

    def _run(self, collection: str, namespace: str, job: Document) -> None:
        """Its pods, their status, then its own."""
        name = job["metadata"]["name"]
        try:
            codes = self._pods(namespace, job)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:  # told by the Job's status
            self.logs[name] = repr(error)
            codes = [1]
        state = "Failed" if any(codes) else "Complete"
        job["status"] = {"conditions": [{"type": state, "status": "True"}]}
        self.put(collection, namespace, job)

    def _pods(self, namespace: str, job: Document) -> list[int]:
        name = job["metadata"]["name"]
        attached = (job["spec"]["template"].get("metadata") or {}).get("annotations", {})
        networks = [BRIDGE, *([MACVLAN] if "k8s.v1.cni.cncf.io/networks" in attached else [])]
        maps = [{**one, "apiVersion": "v1"} for one in self.of_kind("ConfigMap")
                if one["metadata"]["name"] == f"{name}-config"]  # fmt: skip
        pods = [pod_of_job(job, index, self.shared) for index in range(job["spec"]["completions"])]
        for index, pod in enumerate(pods):
            start(pod, maps, networks, index, self.shared / f"{name}-{index}.yaml")
            self.started(pod["metadata"]["name"])
        codes = []
        for index, pod in enumerate(pods):
            code, self.logs[pod["metadata"]["name"]] = end(pod["metadata"]["name"])
            ended = {"exitCode": code, "message": said_at(self.shared, name, index).read_text()}
            status = {
                "phase": "Failed" if code else "Succeeded",
                "containerStatuses": [{"state": {"terminated": ended}}],
            }
            made = {"kind": "Pod", "metadata": pod["metadata"], "status": status}
            self.put("/api/v1/pods", namespace, made)
            codes.append(code)
        podman("pod", "rm", "--force", *(pod["metadata"]["name"] for pod in pods), check=False)
        return codes

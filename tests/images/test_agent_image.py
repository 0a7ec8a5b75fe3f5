"""The agent's image, built and run as the DaemonSet runs it: what is in it, what it answers, what it holds."""

import contextlib
import http.client
import json
import subprocess
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import resident
from api_server import ApiServer, write_kubeconfig
from containers import BASE, ROOT, clear, memory, play, playable, podman, size_bytes
from kustomization import render
from rigs.waiting import eventually

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

VERBS = ("scan", "topo", "recommend", "preflight", "explain rdma.port.down", "--version", "capture")
MIB = 1 << 20


def test_the_image_holds_the_agent_and_little_else(agent_image: str) -> None:
    """At most 70 MB above its base; no torch, no pip; a number for a user; labels; modules that all can be imported."""
    assert size_bytes(agent_image) - size_bytes(BASE) <= 70e6
    (about,) = json.loads(podman("image", "inspect", agent_image).stdout)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert about["Labels"]["org.opencontainers.image.version"] == version
    assert about["User"] == "65532:0"
    code = (
        "import importlib.util as u, pkgutil, agent, probes, topology, planner, collectives\n"
        "print([n for n in ('torch', 'pip', 'setuptools', 'wheel', 'aiohttp') if u.find_spec(n)])\n"
        "import kubernetes.client, kubernetes.config, kubernetes.config.incluster_config\n"
    )
    assert (
        podman("run", "--rm", "--network", "none", "--entrypoint", "python", agent_image, "-c", code).stdout == "[]\n"
    )


def test_the_bill_of_materials_names_what_is_installed(agent_image: str, tmp_path: Path) -> None:
    """`make image` writes it next to the image, from the image's own packages."""
    mount = ("--volume", f"{ROOT / 'locks'}:/src/locks:ro")
    words = ("python", agent_image, "/src/locks/inventory.py", "--sbom", "/dev/stdout")
    document = json.loads(podman("run", "--rm", "--network", "none", *mount, "--entrypoint", *words).stdout)
    code = "from importlib import metadata as m; print(*sorted(d.name for d in m.distributions()))"
    installed = podman(
        "run", "--rm", "--network", "none", "--entrypoint", "python", agent_image, "-c", code
    ).stdout.split()
    names = sorted(name.lower().replace("_", "-") for name in installed if name != "topoflight")
    assert sorted(one["name"] for one in document["components"]) == names


def pod_of(folder: Path, image: str) -> tuple[dict, list[dict]]:
    """The DaemonSet's pod as this engine can play it, and the ConfigMaps it mounts."""
    documents = render(folder)
    template = next(d for d in documents if d["kind"] == "DaemonSet")["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node", "labels": template["metadata"]["labels"]},
           "spec": template["spec"]}  # fmt: skip
    return playable(pod, image), [d for d in documents if d["kind"] == "ConfigMap"]


def answers(port: int, path: str) -> bool:
    """Whether the agent answers 200."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return resident.get(port, path)[0] == 200
    return False


class Agent:
    """A pod of the DaemonSet with an API server to publish to."""

    def __init__(self, folder: Path, image: str, api: ApiServer, place: Path) -> None:
        self.port = resident.free_port()
        pod, maps = pod_of(folder, image)
        kubeconfig = write_kubeconfig(place / "kubeconfig", api.url, namespace="topoflight").read_text()
        maps.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "way-in"}, "data": {"config": kubeconfig}}
        )
        pod["spec"]["volumes"].append({"name": "way-in", "configMap": {"name": "way-in"}})
        (container,) = pod["spec"]["containers"]
        container["args"] = [str(self.port) if word == "9402" else word for word in container["args"]]
        container["volumeMounts"].append({"name": "way-in", "mountPath": "/etc/kube", "readOnly": True})
        container["env"].append({"name": "KUBECONFIG", "value": "/etc/kube/config"})
        play([*maps, pod], place / "pod.yaml")
        self.name = f"node-{container['name']}"
        eventually(lambda: answers(self.port, "/readyz?wait=40"), f"{self.name} is ready")

    def run(self, words: str) -> subprocess.CompletedProcess[str]:
        """`kubectl exec`."""
        return podman("exec", self.name, "topoflight", *words.split(), check=False)

    def held_bytes(self) -> int:
        """What its cgroup is charged with, page cache that can be dropped apart."""
        folder = memory(self.name)
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(stat.get("rss") or stat["anon"]) + int(stat.get("mapped_file") or stat.get("file_mapped") or 0)

    def is_running(self) -> bool:
        """Whether the first process still lives."""
        return podman("inspect", "--format", "{{.State.Running}}", self.name).stdout.strip() == "true"


@pytest.fixture(scope="module")
def agent(agent_image, tmp_path_factory):
    """The base's pod, which publishes to the stand-in API server."""
    with ApiServer() as api:
        yield Agent(ROOT / "deploy/daemonset/base", agent_image, api, tmp_path_factory.mktemp("pod"))
    clear()


def test_it_runs_as_the_daemonset_says(agent: Agent) -> None:
    """User, read-only root, no capability and the limit are the manifest's, seen from inside and from the engine."""
    status = dict(
        line.split(":\t", 1)
        for line in podman("exec", agent.name, "cat", "/proc/1/status").stdout.splitlines() if ":\t" in line
    )  # fmt: skip
    assert status["Uid"].split()[0] == "65532" and status["NoNewPrivs"] == "1"
    assert all(int(status[name], 16) == 0 for name in ("CapEff", "CapPrm", "CapBnd"))
    refused = podman("exec", agent.name, "python", "-c", "open('/opt/x', 'w')", check=False)
    assert "Read-only file system" in refused.stderr
    limit = podman("inspect", "--format", "{{.HostConfig.Memory}}", agent.name).stdout
    assert int(limit) == 256 * MIB


def test_what_it_holds(agent: Agent) -> None:
    """At most 110 MiB with Kubernetes on, before a costly question starts the worker (ten idle minutes end it)."""
    assert agent.held_bytes() <= 110 * MIB


def test_every_endpoint_answers(agent: Agent) -> None:
    """All reads of the OpenAPI document, none of them with a fault of the server."""
    paths = json.loads(resident.get(agent.port, "/openapi.json")[1])["paths"]
    for path in [name for name, verbs in paths.items() if "get" in verbs and "{" not in name]:
        status, body = resident.get(agent.port, path)
        assert body and status in (200, 404), f"{path}: {status} {body[:300]!r}"  # 404: it needs a run first


def test_every_verb_answers_from_inside(agent: Agent) -> None:
    """`kubectl exec` of each probe, with the exit codes of a host without GPUs."""
    for words in VERBS:
        done = agent.run(words)
        assert done.returncode in (0, 4, 5), f"{words}: {done.returncode} {done.stderr[-800:]}"
        assert done.stdout.strip(), words


@pytest.mark.nightly
def test_a_dozen_verbs_at_once_do_not_kill_it(agent: Agent) -> None:
    """The container's limit counts them all; each alone is right, and the agent's first process is the same after."""
    before = podman("inspect", "--format", "{{.State.Pid}}", agent.name).stdout
    with ThreadPoolExecutor(12) as pool:
        done = list(pool.map(lambda _: agent.run("preflight"), range(12)))
    assert {one.returncode for one in done} == {0}, [one.stderr[-300:] for one in done if one.returncode]
    assert agent.is_running() and podman("inspect", "--format", "{{.State.Pid}}", agent.name).stdout == before


def test_it_comes_back_after_a_kill(agent: Agent) -> None:
    """SIGKILL, started again: it answers; its state was on a volume."""
    podman("kill", "--signal", "KILL", agent.name)
    eventually(lambda: not agent.is_running() or answers(agent.port, "/readyz?wait=40"), "it ended or was restarted")

    def is_back() -> bool:
        """Start it again, as the kubelet does: podman refuses while it still cleans up after the kill."""
        return agent.is_running() or podman("start", agent.name, check=False).returncode == 0

    eventually(lambda: is_back() and answers(agent.port, "/readyz?wait=40"), "it is ready again")

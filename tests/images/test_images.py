"""The images, built and run: the agent's as the DaemonSet runs it, the fine-tune's on rendered Jobs.

What is in the agent's image, what it answers, what it holds. Pods of the Jobs are run as a Job's controller and a
kubelet would. Images and containers are real, without a registry: a base of Debian packages, buildah, podman and runc.
All of it is Debian's and installed on demand; images, containers and configuration lie under .cache, so that nothing of
the machine's own is touched. Seen on hosts that are containers themselves: crun refuses their cgroups, limits may not
be raised, a build can only chroot.
"""

import contextlib
import copy
import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import resident
import yaml
from api_server import ApiServer, write_kubeconfig
from kustomization import render
from rigs.command import topoflight
from rigs.packages import CACHE, apt_installed, debian_root, one_installs
from rigs.tables import PYPROJECT, ROOT
from rigs.waiting import eventually

HOME = CACHE / "containers"
BASE = "localhost/base:debian"
SECONDS = 900.0
_CONFIGURATION = """\
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
log_driver = "k8s-file"
[network]
network_config_dir = "{networks}"
"""


def ready() -> None:
    """Install the engine, and make the base image once; skips where it cannot be had."""
    apt_installed("/usr/lib/podman/netavark", "podman", "netavark")  # podman may be there without what it recommends
    for program in ("podman", "runc", "catatonit", "buildah", "iptables"):  # netavark calls the last
        apt_installed(program, program)
    HOME.mkdir(parents=True, exist_ok=True)
    (HOME / "containers.conf").write_text(_CONFIGURATION.format(networks=HOME / "networks"))
    with one_installs("base-image"):
        if podman("image", "exists", BASE, check=False).returncode:
            archive = HOME / "base.tar"
            words = ["tar", "--one-file-system", "-C", debian_root(), "-cf", archive, "."]
            subprocess.run(words, check=True, timeout=SECONDS)
            podman("import", "--quiet", str(archive), BASE)
            archive.unlink()


def _engine(program: str, *words: str, check: bool, timeout: float) -> subprocess.CompletedProcess[str]:
    place = ("--root", str(HOME / "storage"), "--runroot", str(HOME / "run"))
    environment = {**os.environ, "CONTAINERS_CONF": str(HOME / "containers.conf")}
    done = subprocess.run([program, *place, *words], env=environment, capture_output=True, text=True, timeout=timeout,
                          check=False, cwd=ROOT if program == "buildah" else HOME)  # fmt: skip
    assert not check or done.returncode == 0, f"{program} {' '.join(words)}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    return done


def podman(*words: str, check: bool = True, timeout: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """One command of podman, with this rig's storage."""
    return _engine("podman", *words, check=check, timeout=timeout)


def build(kind: str) -> str:
    """Build an image as the Kubernetes page does, each stage committed once. Returns its name."""
    tag = f"localhost/topoflight-{kind}:test"
    _engine(
        "buildah", "build", "--layers=false", "--isolation", "chroot", "--network", "host", *_pip_mounts(),
        "--build-arg", f"PYTHON_IMAGE={BASE}", "-f", f"deploy/images/Containerfile.{kind}", "-t", tag, ".",
        check=True, timeout=SECONDS,
    )  # fmt: skip
    return tag


def _pip_mounts() -> Iterator[str]:
    """This machine's pip settings (index, proxy, certificate) and the local folders they name, for the build to see."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    settings = {key.rpartition(".")[2]: value for key, value in re.findall(r"^(\S+)='(.*)'$", listed, re.MULTILINE)}
    path = HOME / "pip.conf"
    path.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    yield from ("--volume", f"{path}:/etc/pip.conf:ro")
    words = {word.removeprefix("file://") for value in settings.values() for word in value.split()}
    for place in sorted(
        {Path(word).parent if word.endswith("/simple") else Path(word) for word in words if word[0] == "/"}
    ):
        if place.exists():
            yield from ("--volume", f"{place}:{place}:ro")


def size_bytes(image: str) -> int:
    """What `podman images` calls its size: all layers, unpacked."""
    return int(podman("image", "inspect", "--format", "{{.Size}}", image).stdout)


def playable(pod: dict, image: str = "") -> dict:
    """The pod as this engine knows the fields; what it does not know is taken out here, by name, and nothing else.

    Podman 4.3's `kube play` has no downward API beyond a pod's name, no projected or secret volumes, maps each port of
    a container to the host, and ignores what a scheduler reads.
    """
    spec = pod["spec"]
    for volume in spec.get("volumes", ()):
        for unknown in ("downwardAPI", "projected", "secret"):
            if volume.pop(unknown, None):
                volume["emptyDir"] = {}
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        container["image"] = image or container["image"]
        container.pop("ports", None)
        for variable in container.get("env", ()):
            if variable.pop("valueFrom", None):
                variable["value"] = f"of-{variable['name'].lower().replace('_', '-')}"
        # the pod has the host's network here: it listens on loopback only
        container["args"] = ["127.0.0.1" if word == "::" else word for word in container.get("args", ())]
    return pod


def play(documents: Sequence[dict], place: Path) -> None:
    """Start pods and ConfigMaps from Kubernetes' own YAML."""
    place.write_text(yaml.safe_dump_all(documents))
    podman("kube", "play", "--network", "host", str(place))


def clear() -> None:
    """End every container of this rig, and no other."""
    podman("pod", "rm", "--force", "--all", "--time", "2", check=False)
    podman("rm", "--force", "--all", "--time", "2", check=False)


def memory(container: str) -> Path:
    """The folder of a container's memory cgroup, of version 1 or 2."""
    pid = podman("inspect", "--format", "{{.State.Pid}}", container).stdout.strip()
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return Path("/sys/fs/cgroup") / lines[0][2].lstrip("/")


@pytest.fixture(scope="session")
def engine():
    """Podman, buildah and the base image."""
    ready()
    clear()
    yield
    clear()


@pytest.fixture(scope="session")
def agent_image(engine: None) -> str:
    """The agent's image of this checkout."""
    return build("agent")


pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

VERBS = ("scan", "topo", "recommend", "preflight", "explain rdma.port.down", "--version", "capture")
MIB = 1 << 20


def test_the_image_holds_the_agent_and_little_else(agent_image: str) -> None:
    """At most 70 MB above its base; no torch, no pip; a number for a user; labels; modules that all can be imported."""
    assert size_bytes(agent_image) - size_bytes(BASE) <= 70e6
    (about,) = json.loads(podman("image", "inspect", agent_image).stdout)
    version = PYPROJECT["project"]["version"]
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


STEPS = 8
JOB = (
    "--api", "job", "--model", "tiny-llama", "--nodes", "2", "--ranks", "1", "--global-batch", "4",
    "--sequence-length", "64", "--claim", "shared", "--name", "sft", "--set", "dataset_name=synthetic:arithmetic",
    "--set", f"max_steps={STEPS}", "--set", "save_strategy=no", "--set", "eval_strategy=no",
)  # fmt: skip
BRIDGE, SUBNET = "topoflight-bridge", "10.245.0.0/24"
END_SECONDS = 420.0


@contextmanager
def network() -> Iterator[None]:
    """The pods' own network, a bridge; it is gone at the end."""
    podman("network", "rm", "--force", BRIDGE, check=False)
    podman("network", "create", "--disable-dns", "--internal", "--subnet", SUBNET, BRIDGE)
    try:
        yield
    finally:
        podman("network", "rm", "--force", BRIDGE, check=False)


def address(index: int) -> str:
    """IPv4 of a pod."""
    return f"{SUBNET.rpartition('.')[0]}.{index + 10}"


def pod_of_job(job: dict, index: int, shared: Path) -> dict:
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
    spec["hostAliases"] = [{"ip": address(0), "hostnames": [f"{name}-0.{name}"]}]
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


def start(pod: dict, maps: Sequence[dict], index: int, place: Path) -> None:
    """Play one pod on the network."""
    place.write_text(yaml.safe_dump_all([*maps, pod]))
    podman("kube", "play", f"--network={BRIDGE}:interface_name=eth0,ip={address(index)}", str(place))


def end(pod: str) -> tuple[int, str]:
    """Wait for its container; its exit code and log."""
    code = int(podman("wait", f"{pod}-rank", timeout=END_SECONDS).stdout)
    done = podman("logs", f"{pod}-rank", check=False)
    return code, done.stdout + done.stderr


@pytest.fixture(scope="module")
def finetune_image(engine: None) -> str:
    """Of this checkout: minutes where the cache holds no packages, seconds after."""
    return build("finetune")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """The folder that is the claim: writable by the image's user, on a path that it may walk."""
    clear()
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o777)
    with network():
        yield tmp_path
        clear()


def rendered(*words: str) -> tuple[dict, list[dict]]:
    """The Job that `launch` prints, and its ConfigMaps."""
    done = topoflight("launch", *JOB, *words, "--dry-run")
    assert done.exit_code == 0, done.output
    documents = list(yaml.safe_load_all(done.stdout))
    (job,) = (one for one in documents if one["kind"] == "Job")
    return job, [one for one in documents if one["kind"] == "ConfigMap"]


@pytest.mark.nightly
def test_the_rendered_job_trains_after_its_gate(finetune_image: str, agent_image: str, shared: Path) -> None:
    """Two pods: the agent's image judges in the init container, then the fine-tune's trains to its end."""
    job, maps = rendered("--image", finetune_image, "--preflight-image", agent_image)
    assert [one["image"] for one in job["spec"]["template"]["spec"]["initContainers"]] == [agent_image]
    for index in range(2):
        start(pod_of_job(job, index, shared), maps, index, shared / f"{index}.yaml")
    ended = [end(f"sft-{index}") for index in range(2)]
    assert [code for code, _ in ended] == [0, 0], ended
    word = json.loads(said_at(shared, "sft", 0).read_text())
    assert (word["status"], word["steps_done"]) == ("complete", STEPS)

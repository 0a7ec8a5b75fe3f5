"""The fine-tune's image, built, and rendered Jobs on it, as a Job's controller and a kubelet would run their pods."""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from containers import build, clear, playable, podman
from rigs.command import topoflight

pytestmark = [pytest.mark.containers, pytest.mark.nightly, pytest.mark.timeout(1800)]

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

"""The fine-tune's image, built; rendered Jobs on it; and compare-networks over two networks of podman."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import write_kubeconfig
from containers import ROOT, build, clear, rebuild
from pods import BRIDGE, Cluster, end, pod_of_job, said_at, shape, start, two_networks

pytestmark = [pytest.mark.containers, pytest.mark.nightly, pytest.mark.timeout(1800)]

SLOW_BITS = 60e6  # what tbf lets through the pod network
STEPS = 8
JOB = (
    "--api", "job", "--model", "tiny-llama", "--nodes", "2", "--ranks", "1", "--global-batch", "4",
    "--sequence-length", "64", "--claim", "shared", "--name", "sft", "--set", "dataset_name=synthetic:arithmetic",
    "--set", f"max_steps={STEPS}", "--set", "save_strategy=no", "--set", "eval_strategy=no",
)  # fmt: skip


@pytest.fixture(scope="module")
def finetune_image(engine: None) -> str:
    """Of this checkout: minutes where the cache holds no packages, seconds after."""
    return build("finetune")[0]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """The folder that is the claim: writable by the image's user, on a path that it may walk."""
    clear()
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o777)
    with two_networks():
        yield tmp_path
        clear()


def verb(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command of the product."""
    argv = [sys.executable, "-m", "agent.cli", *words]
    return subprocess.run(
        argv, capture_output=True, text=True, cwd=ROOT, check=False, timeout=1200, env={**os.environ, **environment}
    )


def test_a_change_of_code_leaves_the_layer_with_torch(finetune_image: str) -> None:
    """In seconds: the packages come from the cache, the code does not."""
    packages, project, seconds = rebuild("finetune", "finetune/__init__.py")
    step = "install.sh /opt/topoflight finetune"
    assert packages.partition(f"{step} packages")[2].lstrip("\n").startswith("--> Using cache"), packages
    assert not project.partition(f"{step} project")[2].lstrip("\n").startswith("--> Using cache")
    assert seconds < 60.0


def test_the_rendered_job_trains_after_its_gate(finetune_image: str, agent_image: str, shared: Path) -> None:
    """Two pods: the agent's image judges in the init container, then the fine-tune's trains to its end."""
    images = ("--image", finetune_image, "--preflight-image", agent_image)
    done = verb("launch", *JOB, *images, "--dry-run")
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    (job,) = (one for one in documents if one["kind"] == "Job")
    maps = [one for one in documents if one["kind"] == "ConfigMap"]
    assert [one["image"] for one in job["spec"]["template"]["spec"]["initContainers"]] == [agent_image]
    for index in range(2):
        start(pod_of_job(job, index, shared), maps, [BRIDGE], index, shared / f"{index}.yaml")
    ended = [end(f"sft-{index}") for index in range(2)]
    assert [code for code, _ in ended] == [0, 0], ended
    word = json.loads(said_at(shared, "sft", 0).read_text())
    assert (word["status"], word["steps_done"]) == ("complete", STEPS)


def test_a_gate_that_fails_lets_no_rank_start(finetune_image: str, agent_image: str, shared: Path) -> None:
    """It requires an active RDMA port, of which nothing is known here: the pod does not start, nothing is trained."""
    images = ("--image", finetune_image, "--preflight-image", agent_image, "--require", "rdma.port.none_active")
    done = verb("launch", *JOB, *images, "--dry-run")
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    (job,) = (one for one in documents if one["kind"] == "Job")
    maps = [one for one in documents if one["kind"] == "ConfigMap"]
    with pytest.raises(AssertionError, match=r"init container .* exited with code 5"):
        start(pod_of_job(job, 0, shared), maps, [BRIDGE], 0, shared / "0.yaml")
    assert said_at(shared, "sft", 0).read_text() == ""


def bars(shared: Path, image: str, *over: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """compare-networks against jobs that run here, the pod network shaped in each pod. Exit code, bars, all it said."""
    with Cluster(shared, lambda pod: shape(pod, "eth0", SLOW_BITS)) as cluster:
        config = write_kubeconfig(shared / "config", cluster.url)
        words = [word for one in over for word in ("--over", one)]
        done = verb("compare-networks", *JOB, "--image", image, *words, "--report", str(shared / "report"),
                    "-o", "json", KUBECONFIG=str(config))  # fmt: skip
        said = f"{done.stdout}\n{done.stderr}\n" + "\n".join(f"{n}: {log[-2000:]}" for n, log in cluster.logs.items())
    found = json.loads(done.stdout)["bars"] if done.stdout.startswith("{") else []
    return done.returncode, {bar["network"]: bar for bar in found}, said


def test_bars_over_bridge_and_macvlan(finetune_image: str, shared: Path) -> None:
    """The shaped bridge is slower than macvlan; each run's sockets prove its network; a forecast stands beside each."""
    code, found, said = bars(shared, finetune_image, "eth0,60M", "net1=default/macvlan,10G")
    assert code == 0, said
    eth0, net1 = found["eth0"], found["net1"]
    assert [eth0["proof"], net1["proof"]] == [
        ["gloo: TCP over eth0 (10.245.0.10)"],
        ["gloo: TCP over net1 (10.245.1.10)"],
    ]
    assert eth0["step_seconds"] > 1.5 * net1["step_seconds"], said
    assert eth0["forecast"]["mid"] > net1["forecast"]["mid"] > 0
    assert (shared / "report/networks.svg").read_text().count("a step") >= 2


def test_a_run_over_a_network_that_its_pods_have_not_is_no_bar(finetune_image: str, shared: Path) -> None:
    """Told to take net1, attached to none: it fails, and has no number."""
    code, found, said = bars(shared, finetune_image, "net1,10G")
    assert (code, found["net1"]["status"], found["net1"]["step_seconds"]) == (3, "failed", None), said

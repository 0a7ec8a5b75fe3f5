"""compare-networks on a cluster: a job a network, its pods' words read back; the API server is the stand-in."""

import json
from pathlib import Path

import pytest
import yaml
from api_server import write_kubeconfig
from click.testing import CliRunner
from networks_cluster import Networks
from rigs.command import topoflight
from rigs.recorded import path_of
from rigs.tables import each_row, rows_of

from agent.cli.bench import compare_networks
from agent.jobs import networks
from contracts.finding import Interval
from contracts.job_config import RunForecast

rows = rows_of(__file__)

WORDS = [
    "--host", str(path_of()), "--model", "Llama-3.1-8B", "--nodes", "2", "--image", "registry.example/f:1",
    "--api", "job", "--claim", "shared", "--set", "dataset_name=synthetic:arithmetic", "--set", "max_steps=100",
    "--name", "sft",
    "--over", "eth0,10G", "--over", "net1=training/macvlan,25G", "--over", "rdma=training/macvlan",
]  # fmt: skip
SECONDS = {"eth0": 9.0, "net1": 4.0, "rdma": 3.0}  # of a step


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    forecast = RunForecast(step_seconds=Interval(low=1.0, mid=2.0, high=5.0))
    with Networks(tmp_path, "sft", SECONDS, forecast) as server:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", server.url)))
        yield server


def compare(folder: Path, *words: str) -> tuple[int, dict, str]:
    done = CliRunner().invoke(compare_networks, [*WORDS, "--report", str(folder), "-o", "json", *words])
    return done.exit_code, json.loads(done.stdout) if done.stdout.startswith("{") else {}, done.output


def test_each_network_has_a_job_and_each_record_comes_back(cluster: Networks, tmp_path: Path) -> None:
    """Three bars, in the order asked for; time and money of 100 steps on two nodes."""
    code, found, output = compare(tmp_path, "--price", "98")
    assert code == 0, output
    bars = {bar["network"]: bar for bar in found["bars"]}
    assert {name: bar["step_seconds"] for name, bar in bars.items()} == SECONDS
    assert [bar["within"] for bar in bars.values()] == [False, True, True]
    assert bars["net1"]["proof"] == ["NCCL: NET/Socket over net1"]
    assert bars["rdma"]["proof"] == ["NET/IB/0/GDRDMA"]
    assert bars["eth0"]["cost"] == pytest.approx(9.0 * 100 * 2 * 98 / 3600)
    jobs = {job["metadata"]["name"]: job["spec"]["template"] for job in cluster.of_kind("Job")}
    assert list(jobs) == ["sft-eth0", "sft-net1", "sft-rdma"]
    annotation = "k8s.v1.cni.cncf.io/networks"
    attached = {name: (pod.get("metadata") or {}).get("annotations", {}).get(annotation) for name, pod in jobs.items()}
    assert attached == {"sft-eth0": None, "sft-net1": "training/macvlan@net1", "sft-rdma": "training/macvlan"}
    assert (tmp_path / "networks.svg").read_text().count("a step") >= 3


def test_a_job_over_tcp_is_told_its_interface_and_asks_for_no_rdma(cluster: Networks, tmp_path: Path) -> None:
    """The plan's own environment is RDMA's; it is one dry run away from being seen."""
    done = CliRunner().invoke(compare_networks, [*WORDS, "--dry-run", "--resource", "rdma/shared=1"])
    assert done.exit_code == 0, done.output
    assert cluster.of_kind("Job") == []
    documents = list(yaml.safe_load_all(done.stdout))
    pods = {d["metadata"]["name"]: d["spec"]["template"]["spec"]["containers"][0] for d in documents
            if d["kind"] == "Job"}  # fmt: skip
    told = {name: {one["name"]: one["value"] for one in pod["env"]} for name, pod in pods.items()}
    assert told["sft-net1"]["NCCL_SOCKET_IFNAME"] == "net1"
    assert told["sft-net1"]["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_DISABLE" not in told["sft-rdma"]
    plans = {d["metadata"]["name"]: json.loads(d["data"]["plan.json"]) for d in documents if d["kind"] == "ConfigMap"}
    steps = [plans[f"sft-{name}-config"]["forecast"]["step_seconds"]["mid"] for name in ("eth0", "net1", "rdma")]
    assert steps[0] > steps[1] > steps[2]
    layouts = [plan["layout"] for plan in plans.values()]
    assert layouts[0] == layouts[1] == layouts[2]
    assert plans["sft-net1-config"]["environment"]["NCCL_SOCKET_IFNAME"] == "net1"
    assert plans["sft-net1-config"]["config"]["output_dir"] == "/mnt/shared/sft-net1"


def test_the_gate_of_a_tcp_job_does_not_judge_what_the_comparison_sets(cluster: Networks, tmp_path: Path) -> None:
    """On a node with RDMA, whose memlock is low: the gate as rendered finds there what it finds without the job's
    variables. The RDMA job's judges all of it."""
    node = "r760xa-2xA40-bf3-memlock-8MiB"
    words = [word if word != str(path_of()) else str(path_of(node)) for word in WORDS]
    words += ["--dry-run", "--preflight-image", "registry.example/p:1", "--require", "limits.memlock.low"]
    done = CliRunner().invoke(compare_networks, [*words, "--resource", "rdma/shared=1"])
    assert done.exit_code == 0, done.output
    recording = json.loads(path_of(node).read_text())

    def failed(environment: dict[str, str], options: list[str]) -> set[str]:
        recording["answers"]["environment"] = {"": environment}
        (tmp_path / "node.json").write_text(json.dumps(recording))
        judged = topoflight("preflight", "--host", tmp_path / "node.json", "-o", "json", *options)
        checks = json.loads(judged.stdout)["checks"]
        return {check["code"] for check in checks if check["status"] == "fail" or check["required"]}

    bare = failed({}, [])
    assert {"limits.memlock.low", "interfaces.choice.wrong"} <= bare
    for job in (one for one in yaml.safe_load_all(done.stdout) if one["kind"] == "Job"):
        (gate,) = job["spec"]["template"]["spec"]["initContainers"]
        environment = {one["name"]: one["value"] for one in gate["env"] if "value" in one}
        options = gate["command"][gate["command"].index("table") + 1 :]
        if job["metadata"]["name"] == "sft-rdma":
            assert options == ["--require", "limits.memlock.low"]
        else:
            assert environment["NCCL_IB_DISABLE"] == "1" and "env.rdma.disabled" in failed(environment, [])
            assert failed(environment, options) == bare - {"limits.memlock.low", "interfaces.choice.wrong"}


@pytest.mark.parametrize(("condition", "pods", "takes", "code", "status", "why"), rows("proofs")())
def test_a_comparison_without_proof_of_the_network_is_no_pass(
    cluster, tmp_path, condition, pods, takes, code, status, why
):
    """Each says why; the other jobs are run all the same."""
    cluster.condition, cluster.controllers, cluster.takes = condition, pods, takes
    waited = ("--timeout", "1") if condition["type"] == "Suspended" else ()
    ended, found, output = compare(tmp_path, *waited)
    assert ended == code, output
    bars = found["bars"][1:2] if takes else found["bars"]
    assert {(bar["status"], bar["step_seconds"]) for bar in bars} == {(status, None)}
    assert all(bar["why"] == why if status == "failed" else why in bar["why"] for bar in bars)


@each_row(("words", "told"), rows("refused"))
def test_what_cannot_be_meant_is_refused(cluster: Networks, tmp_path: Path, words: list[str], told: str) -> None:
    """Exit code 2, with what is allowed."""
    done = CliRunner().invoke(compare_networks, [*WORDS, *words])
    assert (done.exit_code, told in done.output) == (2, True), done.output


def test_rdma_that_no_host_has_is_not_had_and_no_job(cluster: Networks, tmp_path: Path) -> None:
    """It is told, never drawn."""
    words = [word if word != str(path_of()) else str(path_of("cpu-only-vm")) for word in WORDS]
    done = CliRunner().invoke(compare_networks, [*words, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "rdma: not available: no RDMA device" in done.stderr
    assert "sft-rdma" not in done.stdout
    assert "GLOO_SOCKET_IFNAME" in done.stdout


def test_a_rate_is_written_as_recommend_takes_it() -> None:
    """Fractions and megabits too."""
    wide, narrow = networks.parse(["eth0,8.4G", "net1=training/macvlan,800M"], here=False)
    assert (wide.rate, narrow.rate, narrow.attachment) == ("8.4G", "800M", "training/macvlan")

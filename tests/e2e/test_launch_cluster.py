"""launch --api and compare-networks create jobs through the API; pods' words are read back.

Launch does the same against a real server where its CRDs are installed; of compare-networks the server is the stand-in.
"""

import json
from pathlib import Path

import pytest
import yaml
from api_server import write_kubeconfig
from click.testing import CliRunner
from networks_cluster import Networks
from rigs.command import topoflight
from rigs.recorded import path_of
from rigs.tables import data_of, each_row, rows_of

from agent.cli.bench import compare_networks
from agent.cli.launch import launch
from agent.jobs import cluster_job, networks
from contracts.finding import Interval
from contracts.job_config import JobPlan, RunForecast, read_plan

rows = rows_of(__file__)

H100 = path_of()
WORDS = [
    "--host", str(H100), "--model", "Llama-3.1-8B", "--nodes", "2", "--image", "registry.example/f:1",
    "--claim", "shared", "--set", "dataset_name=synthetic:arithmetic",  # whose rows no process need be asked for
]  # fmt: skip
GSM = ["--set", "dataset_name=openai/gsm8k", "--set", "dataset_config=main"]


def printed(*words: str) -> dict[str, dict]:
    """What the dry run prints, by kind; as a user's kubectl reads it."""
    done = CliRunner().invoke(launch, [*words, "--dry-run", "-o", "yaml"])
    assert done.exit_code == 0, done.output
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}


def test_the_dry_run_prints_yaml_and_json_of_the_same_objects(kubeconfig):
    """-o yaml is a stream, -o json a List; both are the objects that the launch makes, and nothing is made."""
    done = CliRunner().invoke(launch, [*WORDS, "--api", "trainjob", "--dry-run", "-o", "json"])
    assert done.exit_code == 0, done.output
    listed = json.loads(done.stdout)
    assert listed["kind"] == "List"
    assert {each["kind"]: each for each in listed["items"]} == printed(*WORDS, "--api", "trainjob")
    assert kubeconfig.of_kind("ConfigMap") == []


def planned(made: dict[str, dict], folder: Path) -> JobPlan:
    """What the job's own reader makes of the ConfigMap."""
    (folder / "plan.json").write_text(made["ConfigMap"]["data"]["plan.json"])
    return read_plan(folder / "plan.json")


def test_the_job_that_is_printed_trains_the_model_named_on_the_data_named(tmp_path: Path) -> None:
    """The job's own reader takes the ConfigMap and the command line: weights, data, and the run on the claim."""
    made = printed(*WORDS, *GSM, "--api", "job", "--name", "sft", "--token-secret", "hub", "--restarts", "5")
    container = made["Job"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}} in container["env"]
    assert container["command"][-2:] == ["--plan", "/etc/config/plan.json"] and "--restarts=5" in container["command"]
    assert made["Job"]["spec"]["backoffLimit"] == 5 * 2, "for each of two pods"
    config = planned(made, tmp_path).config
    assert config.model_name_or_path == "meta-llama/Llama-3.1-8B"
    assert (config.dataset_name, config.dataset_config) == ("openai/gsm8k", "main")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert config.output_dir == f"{mounts['shared']}/sft"


@each_row(("words", "url"), rows("joined"))
def test_the_job_is_told_whose_runs_it_joins_where_that_is_asked_for(words: list[str], url: str | None) -> None:
    """Without a URL the Service that deploy/daemonset makes; without the option none, and no token either."""
    made = printed(*WORDS, "--api", "job", *words)["Job"]["spec"]["template"]["spec"]
    environment = {each["name"]: each.get("value") for each in made["containers"][0]["env"]}
    assert environment.get("TOPOFLIGHT_AGENT") == url
    assert ("agent-token" in str(made)) == (url is not None)


@each_row("text", ["dataset_name: a/b\noutput_dir: /mnt/shared/a\n", "dataset_name: a/b\noutput_dir: ./a\n"])
def test_a_configuration_of_the_users_keeps_its_word(tmp_path: Path, text: str) -> None:
    """What the file says remains; what it leaves open is the model of the plan. A folder is one of the claim."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    words = ["--host", str(H100), "--model", "NousResearch/Meta-Llama-3.1-8B", "--image", "r.example/f:1"]
    made = printed(*words, "--claim", "c", "--api", "job", "--nodes", "2", "--config", str(path), "--name", "sft")
    config = planned(made, tmp_path).config
    assert (config.model_name_or_path, config.output_dir) == ("NousResearch/Meta-Llama-3.1-8B", "/mnt/shared/a")


DRY = ["--api", "job", "--dry-run", "--no-preflight"]
NO_CLAIM = [word for word in WORDS if word not in ("--claim", "shared")]


AZURE = [str(path_of("azure-nd-a100-flat-vm")) if word == str(H100) else word for word in WORDS]
BASES = {
    "none": [], "claim": [*WORDS, *DRY], "no claim": [*NO_CLAIM, *DRY], "no data": [*WORDS[:-2], *DRY],
    "with a gate": [*WORDS, *DRY[:-1]], "azure": [*AZURE, *DRY],
    "one pod": [*("1" if word == "2" else word for word in NO_CLAIM), *DRY],
}  # fmt: skip
LAUNCHES = data_of(__file__, "launches.yaml")


@each_row(("base", "words", "told"), LAUNCHES["refused"])
def test_options_that_no_cluster_could_follow_are_refused(base: str, words: list[str], told: str) -> None:
    """Usage: the message names the option and its value; nothing is asked of a cluster."""
    done = CliRunner().invoke(launch, [*BASES[base], *words])
    assert done.exit_code == 2 and told in done.output, done.output


@each_row(("base", "words", "told"), LAUNCHES["warned"])
def test_what_a_dry_run_warns_of(base: str, words: list[str], told: str) -> None:
    """On stderr, so that what is printed stays YAML."""
    said = CliRunner().invoke(launch, [*BASES[base], *words]).stderr
    assert told in said if told else said == ""


def test_the_claim_is_printed_and_made(kubeconfig):
    """--storage-class makes the claim that the pods mount, writable by all of them."""
    more = ["--api", "job", "--name", "sft", "--storage-class", "cephfs", "--storage-size", "80Gi"]
    claim = printed(*NO_CLAIM, *more)["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "80Gi"
    done = CliRunner().invoke(launch, [*NO_CLAIM, *more])
    assert done.exit_code == 0, done.output
    (made,) = kubeconfig.of_kind("PersistentVolumeClaim")
    (job,) = kubeconfig.of_kind("Job")
    claims = (volume.get("persistentVolumeClaim") for volume in job["spec"]["template"]["spec"]["volumes"])
    mounted = [each["claimName"] for each in claims if each]
    assert mounted == [made["metadata"]["name"]] == ["shared"]
    assert made["spec"] == claim["spec"]


ROCE = [str(path_of("r760xa-2xA40-bf3")) if word == str(H100) else word for word in WORDS]


def limits(*words: str) -> dict[str, str]:
    """What each pod of the printed job asks for."""
    container = printed(*ROCE, *words, "--api", "job")["Job"]["spec"]["template"]["spec"]["containers"][0]
    found: dict[str, str] = container["resources"]["limits"]
    return found


def test_the_users_resources_are_requested_and_a_missing_one_is_asked_for() -> None:
    """Only the device plugin of the cluster knows the name of its RDMA resource."""
    assert limits("--resource", "rdma/mine=1").keys() == {"rdma/mine", "nvidia.com/gpu"}
    assert limits("--resource", "rdma/a=1", "--resource", "rdma/b=1").keys() == {"rdma/a", "rdma/b", "nvidia.com/gpu"}
    refused = CliRunner().invoke(launch, [*ROCE, "--api", "job", "--dry-run"])
    assert refused.exit_code == 2 and "--resource NAME=1" in refused.output


COLLECTIONS: dict[str, str] = rows("collections")()


def launched(*words: str):
    """The verb, against the stand-in."""
    return CliRunner().invoke(launch, [*WORDS, "--name", "sft", *words])


@pytest.mark.parametrize(
    ("kind", "condition", "code", "told"),
    [
        *((kind, "Failed", 1, f"has failed: `kubectl delete {kind}/sft -n ") for kind in COLLECTIONS),
        ("trainjob", "Complete", 1, "is complete: --name"),
        ("job", None, 1, "is not done; nothing was created"),
    ],
)
def test_a_job_that_was_there_stays_and_its_state_is_said(kubeconfig, kind, condition, code, told):
    """What is left to do is in the message."""
    assert launched("--api", kind).exit_code == 0
    ((_, namespace, name), former) = next(
        (key, o) for key, o in kubeconfig.objects.items() if key[0] == COLLECTIONS[kind]
    )
    word = {"Complete": "Succeeded"}.get(condition or "", condition) if kind == "pytorchjob" else condition
    former["status"] = {"conditions": [{"type": word, "status": "True"}] if word else []}
    before = former["metadata"]["uid"]
    again = launched("--api", kind)
    assert again.exit_code == code and told in again.output, again.output
    now = kubeconfig.objects[COLLECTIONS[kind], namespace, name]
    assert now["metadata"]["uid"] == before


def test_what_was_there_is_not_called_created(kubeconfig):
    """A claim stays as it is, whatever its size; a ConfigMap is updated."""
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, "spec": {"resources": "of its owner"}}
    kubeconfig.put("/api/v1/persistentvolumeclaims", "default", claim)
    kubeconfig.put("/api/v1/configmaps", "default", {"kind": "ConfigMap", "metadata": {"name": "sft-config"}})
    done = CliRunner().invoke(launch, [*NO_CLAIM, "--api", "job", "--name", "sft", "--storage-class", "cephfs"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "persistentvolumeclaim/shared already exists and was not changed", "configmap/sft-config was there: updated",
        "service/sft created", "job/sft created",
    ]  # fmt: skip
    assert kubeconfig.of_kind("PersistentVolumeClaim")[0]["spec"] == {"resources": "of its owner"}


def test_the_api_servers_warnings_are_shown_once(kubeconfig):
    """Although each object is sent twice."""
    kubeconfig.warnings = ['would violate PodSecurity "restricted:latest"', "spec.x: deprecated"]
    done = launched("--api", "job")
    assert done.exit_code == 0
    warned = [line for line in done.stderr.splitlines() if line.startswith("warning: the API server says: ")]
    assert [line.partition("says: ")[2] for line in warned] == kubeconfig.warnings


@each_row(("status", "words"), rows("pods"))
def test_the_state_of_a_pod_in_words(status: dict, words: str) -> None:
    """Why it waits, or which container ended and why."""
    pod = {"metadata": {"name": "sft-0"}, "status": status}
    assert (cluster_job.describe_failure(pod) or cluster_job.explain_waiting(pod)) == words


COMPARED = [
    "--host", str(path_of()), "--model", "Llama-3.1-8B", "--nodes", "2", "--image", "registry.example/f:1",
    "--api", "job", "--claim", "shared", "--set", "dataset_name=synthetic:arithmetic", "--set", "max_steps=100",
    "--name", "sft",
    "--over", "eth0,10G", "--over", "net1=training/macvlan,25G", "--over", "rdma=training/macvlan",
]  # fmt: skip
SECONDS = {"eth0": 9.0, "net1": 4.0, "rdma": 3.0}  # of a step


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(networks, "POLL_SECONDS", 0.1)
    forecast = RunForecast(step_seconds=Interval(low=1.0, mid=2.0, high=5.0))
    with Networks(tmp_path, "sft", SECONDS, forecast) as server:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", server.url)))
        yield server


def compare(folder: Path, *words: str) -> tuple[int, dict, str]:
    done = CliRunner().invoke(compare_networks, [*COMPARED, "--report", str(folder), "-o", "json", *words])
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
    done = CliRunner().invoke(compare_networks, [*COMPARED, "--dry-run", "--resource", "rdma/shared=1"])
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
    words = [word if word != str(path_of()) else str(path_of(node)) for word in COMPARED]
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
    done = CliRunner().invoke(compare_networks, [*COMPARED, *words])
    assert (done.exit_code, told in done.output) == (2, True), done.output


def test_rdma_that_no_host_has_is_not_had_and_no_job(cluster: Networks, tmp_path: Path) -> None:
    """It is told, never drawn."""
    words = [word if word != str(path_of()) else str(path_of("cpu-only-vm")) for word in COMPARED]
    done = CliRunner().invoke(compare_networks, [*words, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "rdma: not available: no RDMA device" in done.stderr
    assert "sft-rdma" not in done.stdout
    assert "GLOO_SOCKET_IFNAME" in done.stdout


def test_a_rate_is_written_as_recommend_takes_it() -> None:
    """Fractions and megabits too."""
    wide, narrow = networks.parse(["eth0,8.4G", "net1=training/macvlan,800M"], here=False)
    assert (wide.rate, narrow.rate, narrow.attachment) == ("8.4G", "800M", "training/macvlan")

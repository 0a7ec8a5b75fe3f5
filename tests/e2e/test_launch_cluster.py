"""launch --api creates the job through the API; the same against a real server where its CRDs are installed."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from rigs.recorded import path_of
from rigs.tables import each_row, rows_of

from agent.cli.launch import launch
from agent.jobs import cluster_job
from contracts.job_config import JobPlan, read_plan

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
LAUNCHES = yaml.safe_load(Path(__file__).with_name("launches.yaml").read_text())


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
    assert (cluster_job.describe_failure(pod) or cluster_job.why_waiting(pod)) == words

"""`launch --api` with claims of devices (--dra) and with a ComputeDomain; TRL settings files on each job API."""

import json
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result
from rigs.recorded import path_of
from rigs.tables import data_of, each_row, rows_of

from agent.cli.launch import launch
from contracts.job_config import read_config, read_plan

rows = rows_of(__file__)

ROOT = "resource.kubernetes.io/pcieRoot"
WORDS = [
    "--model", "Llama-3.1-8B", "--nodes", "2", "--image", "registry.example/f:1", "--claim", "shared", "--no-preflight",
    "--set", "dataset_name=synthetic:arithmetic", "--api", "job", "--name", "sft",
]  # fmt: skip


DRA = ("--dra", "gpu=gpu.nvidia.com", "--dra", "nic=dranet.net")


def run_job(*words: str, host: Path | None = None, code: int = 0) -> Result:
    done = CliRunner().invoke(launch, ["--host", str(host or path_of()), *WORDS, *words])
    assert done.exit_code == code, done.output
    return done


def limits(document: dict) -> dict[str, str]:
    """What the job's pods ask of device plugins."""
    found: dict[str, str] = document["spec"]["template"]["spec"]["containers"][0]["resources"].get("limits", {})
    return found


def test_the_claim_takes_the_devices_and_nothing_else_does(kubeconfig):
    """A request of GPU and NIC for each rank, one PCIe root for each pair; the GPUs are not asked for twice."""
    run_job(*DRA)
    (template,) = kubeconfig.of_kind("ResourceClaimTemplate")
    devices = template["spec"]["spec"]["devices"]
    assert len(devices["requests"]) == 16
    assert [each["matchAttribute"] for each in devices["constraints"]] == [ROOT] * 8
    (job,) = kubeconfig.of_kind("Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpu-nic", "resourceClaimTemplateName": template["metadata"]["name"]}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpu-nic"}]
    assert limits(job) == {}


def test_without_the_option_the_device_plugins_are_asked(kubeconfig):
    """Whatever the cluster serves; nothing of its DRA is read."""
    run_job()
    assert kubeconfig.of_kind("ResourceClaimTemplate") == []
    assert limits(kubeconfig.of_kind("Job")[0])["nvidia.com/gpu"] == "8"
    assert not any("resource.k8s.io" in path for _, path in kubeconfig.requests)


def test_of_dranet_s_nics_the_claim_takes_those_with_rdma(kubeconfig):
    """The class of its examples takes every NIC of a node; another class selects what its maker meant.

    A class that is not named has its usual name.
    """
    for words, nics, selected in rows("nics")():
        done = run_job(*words, "--dry-run", "-o", "json")
        (template,) = (each for each in yaml.safe_load(done.stdout)["items"] if each["kind"] == "ResourceClaimTemplate")
        kubernetes_validate.validate(template, "1.34", strict=True)
        for each in template["spec"]["spec"]["devices"]["requests"]:
            nic = each["name"].startswith("nic")
            wanted = [{"cel": {"expression": selected}}] if nic and selected else None
            assert each["exactly"].get("selectors") == wanted
            assert each["exactly"]["deviceClassName"] == (nics if nic else "team-gpu")


@each_row(
    ("words", "classes"),
    [
        (["--host", str(path_of()), "--dra", "gpu=gpu.nvidia.com"], "gpu.nvidia.com, dranet.net"),
        (["--machine", "gb200-nvl72"], "compute-domain-default-channel.nvidia.com"),
    ],
)
def test_a_queue_is_told_of_classes_that_it_must_count(kubeconfig, words, classes):
    """Kueue leaves a workload of unmapped classes waiting; without a queue nothing is said."""
    for queue in (["--queue", "team"], []):
        done = CliRunner().invoke(launch, [*words, *WORDS, *queue, "--dry-run"])
        assert done.exit_code == 0, done.output
        assert (f"deviceClassMappings name {classes};" in done.stderr) == bool(queue)


def test_a_cluster_without_dra_refuses_the_claim(kubeconfig):
    """Its API server does, in the dry run, by its own words and the object; nothing is made."""
    for path in [path for path in kubeconfig.kinds if "resource.k8s.io" in path]:
        del kubeconfig.kinds[path]
    done = run_job(*DRA, code=1)
    assert "nothing was created" in done.output
    assert "resourceclaimtemplate/sft-gpu-nic: the API server says 404" in done.output
    assert "may lack the definition of /apis/resource.k8s.io/v1/" in done.output
    assert kubeconfig.of_kind("Job") == []


@each_row(("words", "told"), rows("no_class"))
def test_what_names_no_class_is_refused(kubeconfig, words, told):
    """By its option, as a usage error."""
    assert told in run_job(*words, code=2).output


def test_beside_multus_the_claim_takes_the_rdma_device_once(kubeconfig):
    """Without the claim the device plugin has it."""
    roce, named = path_of("r760xa-2xA40-bf3"), ("--resource", "rdma/shared_eth=1")
    made = {each["kind"]: each for each in yaml.safe_load_all(run_job("--dry-run", *named, host=roce).stdout)}
    assert limits(made["Job"])["rdma/shared_eth"] == "1"
    forced = {each["kind"]: each for each in yaml.safe_load_all(run_job("--dry-run", *DRA, host=roce).stdout)}
    assert limits(forced["Job"]) == {}
    both = run_job("--dry-run", *DRA, "--resource", "rdma/x=1", host=roce, code=2)
    assert "--resource rdma/x: with --dra the claim requests GPU and NIC" in both.output


RACK = ["--machine", "gb200-nvl72", *WORDS]


@pytest.mark.parametrize("words", [(), ("--no-compute-domain",)])
def test_a_job_over_nvlink_is_made_with_its_compute_domain_unless_told_otherwise(kubeconfig, words):
    """The GPUs stay the device plugin's. Without it the job runs over the network."""
    done = CliRunner().invoke(launch, [*RACK, *words])
    assert done.exit_code == 0, done.output
    (job,) = kubeconfig.of_kind("Job")
    claims = job["spec"]["template"]["spec"].get("resourceClaims", [])
    domains = [each["spec"]["numNodes"] for each in kubeconfig.of_kind("ComputeDomain")]
    assert limits(job)["nvidia.com/gpu"] == "4"
    assert domains == ([] if words else [0])
    assert [each["resourceClaimTemplateName"] for each in claims] == ([] if words else ["sft-compute-domain-channel"])
    assert ("no ComputeDomain: between nodes NCCL uses the network" in done.stderr) == bool(words)


USERS = Path(__file__).parents[1] / "finetune" / "jobs" / "llama_gsm8k_trl.yaml"  # the user's file, unchanged

ROWS = data_of(__file__, "launches.yaml")


def launched(kind: str, *more: str, config: Path = USERS, host: tuple[str, ...] = ("--host", str(path_of()))) -> Result:
    words = [*host, "--nodes", "2", "--image", "registry.example/f:1", "--claim", "shared", "--config", str(config)]
    return CliRunner().invoke(launch, [*words, "--api", kind, "--name", "sft", *more])


@pytest.mark.parametrize(("kind", "created"), [("trainjob", "TrainJob"), ("pytorchjob", "PyTorchJob"), ("job", "Job")])
def test_the_user_s_file_is_launched_as_it_stands(kubeconfig, tmp_path, kind, created):
    """Admitted and created; the pods' one document says what the file says, and the plan is made around it."""
    dry = launched(kind, "--dry-run", "-o", "json")
    assert dry.exit_code == 0, dry.output
    done = launched(kind)
    assert done.exit_code == 0, done.output
    (job,), (files,) = kubeconfig.of_kind(created), kubeconfig.of_kind("ConfigMap")
    assert set(files["data"]) == {"plan.json"}
    printed = {each["kind"]: each for each in json.loads(dry.stdout)["items"]}
    assert printed["ConfigMap"]["data"]["plan.json"] == files["data"]["plan.json"]
    assert "--config" not in str(job) and "/etc/config/plan.json" in str(printed)
    (tmp_path / "plan.json").write_text(files["data"]["plan.json"])
    plan, (config, _, notes, *_) = read_plan(tmp_path / "plan.json"), read_config(USERS)
    assert plan.config == config  # every setting, and nothing else
    assert plan.notes == tuple(notes) and all(f"note: {text}" in done.stderr for text in notes)
    layout = plan.layout
    assert layout is not None and layout.family == "FSDP"
    assert (layout.world_size, layout.dp_shard, layout.micro_batch, layout.global_batch) == (16, 16, 32, 512)
    assert (layout.precision, layout.checkpointing, layout.fused_cross_entropy) == ("bf16", "full", True)
    assert plan.forecast.memory_bytes is not None and plan.forecast.memory_bytes.mid < 80e9


A40 = ("--machine", "2xa40-roce")  # the machine that the user's file is published for


def test_the_user_s_file_is_taken_on_its_own_machine_without_a_hub(tmp_path, monkeypatch):
    """Nothing says how long the rows are: 4096 tokens are assumed and named, and refuse nothing."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    wrong, memory = [], []
    for kind in ("job", "local"):  # the other APIs: the test above
        words = ["--config", str(USERS), *A40, "--nodes", "2", "--api", kind, "--dry-run", "-o", "json"]
        pods = [] if kind == "local" else ["--image", "registry.example/f:1", "--claim", "shared"]
        for lengths, notes in (((), ("were not measured", "are assumed to have 4096 tokens", "at most 2")),
                               (("--lengths", "100:7000,249:473"), ())):  # fmt: skip
            done = CliRunner().invoke(launch, [*words, *pods, *lengths])
            text = done.stdout.replace('\\"', '"').replace(" ", "")  # the plan is text inside the ConfigMap
            right = done.exit_code == 0 and '"reshard_after_forward":true' in text and '"micro_batch":32' in text
            said = all(note in done.stderr for note in notes) and ("assumed" in done.stderr) == bool(notes)
            if not (right and said):
                wrong.append((kind, lengths, done.exit_code, done.stderr[-800:]))
    assert not wrong, wrong
    for batch in (8, 112):
        words = ["--lengths", "100:7000,249:473", "--set", f"per_device_train_batch_size={batch}", "-o", "json"]
        done = CliRunner().invoke(launch, ["--config", str(USERS), *A40, "--nodes", "2", "--dry-run", *words])
        memory.append(json.loads(done.stdout)["forecast"]["memory_bytes"]["mid"])
        assert "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --nproc-per-node=2 " in done.stderr, (
            done.stderr
        )
    assert memory == sorted(set(memory)) and memory[-1] < 48e9, memory


def test_what_cannot_run_is_refused_before_anything_starts(kubeconfig, tmp_path):
    """On 48 GB cards 32 rows of 4096 tokens do not fit: the largest batch that does is named, with accumulation."""
    there = (*A40, "--lengths", "4096:7473")
    done = launched("job", host=there)
    assert done.exit_code == 3, done.output
    told = " ".join(done.output.split())
    assert "bf16: true, gradient_checkpointing: true, per_device_train_batch_size: 32, fsdp: full_shard" in told
    assert "at max_length: 4096 does not fit" in told
    assert "what can: per_device_train_batch_size: 16, gradient_accumulation_steps: 2 (" in told
    assert kubeconfig.of_kind("ConfigMap") == kubeconfig.of_kind("Job") == []
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({**yaml.safe_load(USERS.read_text()), "per_device_train_batch_size": 16,
                                   "gradient_accumulation_steps": 2}))  # fmt: skip
    took = launched("job", config=job, host=there)
    assert took.exit_code == 0, took.output  # what was named does run
    large = launched("job", "--set", "model_name_or_path=Llama-3.1-405B", host=A40)  # not for the assumed length alone
    assert large.exit_code == 3 and "with rows of one token either" in large.output, large.output


@each_row(("changed", "words"), ROWS["trl"])
def test_other_words_of_such_a_file_are_what_is_planned(tmp_path, changed, words):
    """Each value of the layout that is printed is the file's."""
    job = tmp_path / "job.yaml"
    file = {**yaml.safe_load(USERS.read_text()), **changed}
    job.write_text(yaml.safe_dump({name: value for name, value in file.items() if value is not None}))
    done = launched("job", "--dry-run", "--lengths", "100:7000,249:473", config=job)
    assert done.exit_code == 0, done.output
    files = next(each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "ConfigMap")
    document = yaml.safe_dump(json.loads(files["data"]["plan.json"]))
    assert [word for word in words if word not in document] == [], document

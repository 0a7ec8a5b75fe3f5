"""With --dra `launch` takes GPU and NIC from one PCIe root by a claim; a job over NVLink gets a ComputeDomain."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result
from rigs.recorded import path_of
from rigs.tables import each_row, rows_of

from agent.cli.launch import launch

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
    assert "is resource.k8s.io/v1 served by this cluster?" in done.output
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

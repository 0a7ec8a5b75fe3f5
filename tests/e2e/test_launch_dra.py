"""launch takes GPU and NIC from one PCIe root by DRA where the cluster can, and says on stderr why or why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from api_server import ApiServer
from click.testing import CliRunner, Result
from rigs.recorded import path_of
from rigs.tables import each_row, rows_of

from agent.cli.launch import launch

rows = rows_of(__file__)

API = "/apis/resource.k8s.io/v1"
ROOT = "resource.kubernetes.io/pcieRoot"
WORDS = [
    "--model", "Llama-3.1-8B", "--nodes", "2", "--image", "registry.example/f:1", "--claim", "shared", "--no-preflight",
    "--set", "dataset_name=synthetic:arithmetic", "--api", "job", "--name", "sft",
]  # fmt: skip


@pytest.fixture
def cluster(kubeconfig: ApiServer) -> ApiServer:
    """With the classes of both drivers as their installations make them."""
    for name in ("gpu.nvidia.com", "dranet.net"):
        class_of(kubeconfig, name)
    return kubeconfig


def class_of(api: ApiServer, name: str) -> None:
    api.put(f"{API}/deviceclasses", "", {"metadata": {"name": name}, "spec": {}})


def slice_of(
    api: ApiServer, node: str, driver: str, roots: list[str], *, generation: int = 1, kind: str = "gpu",
    rdma: bool = True,
) -> None:  # fmt: skip
    """A ResourceSlice with a device per root; an empty one has no such attribute."""
    devices = []
    for number, root in enumerate(roots):
        told: dict[str, Any] = {ROOT: {"string": root}} if root else {}
        told |= {"type": {"string": kind}} if driver == "gpu.nvidia.com" else {"dra.net/rdma": {"bool": rdma}}
        devices.append({"name": f"d{number}", "attributes": told})
    spec = {
        "driver": driver, "nodeName": node, "devices": devices,
        "pool": {"name": f"{node}-{driver}", "generation": generation, "resourceSliceCount": 1},
    }  # fmt: skip
    name = f"{node}-{driver}-{generation}-{kind}"
    api.put(f"{API}/resourceslices", "", {"metadata": {"name": name}, "spec": spec})


def node_of(api: ApiServer, name: str, gpus: list[str], nics: list[str]) -> None:
    slice_of(api, name, "gpu.nvidia.com", gpus)
    slice_of(api, name, "dra.net", nics)


DRA = ("--dra", "gpu=gpu.nvidia.com", "--dra", "nic=dranet.net")
EIGHT = [f"pci0000:{number:02x}" for number in range(8)]


def run_job(*words: str, host: Path | None = None) -> Result:
    done = CliRunner().invoke(launch, ["--host", str(host or path_of()), *WORDS, "--wait", "0", *words])
    assert done.exit_code == 0, done.output
    return done


def limits(document: dict[str, Any]) -> dict[str, str]:
    """What the job's pods ask of device plugins."""
    found: dict[str, str] = document["spec"]["template"]["spec"]["containers"][0]["resources"].get("limits", {})
    return found


def of_dra(stderr: str) -> list[str]:
    """The lines about DRA; pods without it are told, too, that they ask for no RDMA device."""
    return [line for line in stderr.splitlines() if line.startswith("DRA: ")]


def test_where_the_cluster_can_the_claim_takes_the_devices_and_nothing_else_does(cluster: ApiServer) -> None:
    """A request of GPU and NIC for each rank, one PCIe root for each pair; the GPUs are not asked for twice."""
    two_nodes(cluster, EIGHT, EIGHT[::-1])
    done = run_job()
    assert done.stderr == (
        "DRA: used: 2 nodes with 8 GPUs each with a NIC under its PCIe root; --no-dra turns it off\n"
    )
    (template,) = cluster.of_kind("ResourceClaimTemplate")
    devices = template["spec"]["spec"]["devices"]
    assert len(devices["requests"]) == 16
    assert [each["matchAttribute"] for each in devices["constraints"]] == [ROOT] * 8
    (job,) = cluster.of_kind("Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpu-nic", "resourceClaimTemplateName": template["metadata"]["name"]}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpu-nic"}]
    assert limits(job) == {}


@pytest.mark.parametrize("words", [("--no-dra",), ("--resource", "nvidia.com/gpu=8"), ("--queue", "team")])
def test_what_was_said_comes_before_what_the_cluster_can(cluster: ApiServer, words: tuple[str, ...]) -> None:
    """--no-dra asks nothing and says nothing; a device by name and a queue are the device plugins'."""
    two_nodes(cluster, EIGHT, EIGHT)
    done = run_job(*words)
    assert len(of_dra(done.stderr)) == (words != ("--no-dra",))
    assert cluster.of_kind("ResourceClaimTemplate") == []
    assert limits(cluster.of_kind("Job")[0])["nvidia.com/gpu"] == "8"
    assert not any("resource.k8s.io" in path for _, path in cluster.requests)


def test_a_plan_of_more_nics_than_gpus_stays_with_the_device_plugins(cluster: ApiServer) -> None:
    """A claim would leave three of four EFA devices of a p5 behind."""
    done = CliRunner().invoke(launch, ["--machine", "p5.48xlarge", *WORDS, "--dry-run"])
    told = "the plan's pods take 32 of vpc.amazonaws.com/efa, the claim would request one for each of 8 GPUs"
    assert done.stderr.splitlines()[0] == f"DRA: not used: {told}"


def two_nodes(api: ApiServer, gpus: list[str], nics: list[str], **more: Any) -> None:
    """Two nodes of these GPUs, and of these NICs."""
    for node in ("a", "b"):
        slice_of(api, node, "gpu.nvidia.com", gpus, **({"kind": more["kind"]} if "kind" in more else {}))
        slice_of(api, node, "dra.net", nics, **({"rdma": more["rdma"]} if "rdma" in more else {}))


def bare(api: ApiServer) -> None:
    for path in [path for path in api.kinds if "resource.k8s.io" in path]:
        del api.kinds[path]
    for key in [key for key in api.objects if key[0] not in api.kinds]:
        del api.objects[key]


def old(api: ApiServer) -> None:
    bare(api)
    api.kinds["/apis/resource.k8s.io/v1beta1/resourceslices"] = "ResourceSlice"


def outdated(api: ApiServer) -> None:
    """Of a pool only the newest generation counts: its GPUs have gone."""
    two_nodes(api, EIGHT, EIGHT)
    for node in ("a", "b"):
        slice_of(api, node, "gpu.nvidia.com", EIGHT[:4], generation=2)


def closed(api: ApiServer, what: str) -> None:
    """Nobody may read these."""
    two_nodes(api, EIGHT, EIGHT)
    api.forbidden.add(f"{API}/{what}")


NO_ATTRIBUTE = "no device of class {} on these nodes has the attribute"


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (bare, "the cluster serves no resource.k8s.io"),
        (old, "resource.k8s.io v1beta1 is too old: v1 came with Kubernetes 1.34"),
        (lambda api: api.delete(f"{API}/deviceclasses", "", "dranet.net"),
         "there is no DeviceClass dranet.net: there are gpu.nvidia.com; --dra nic=NAME names it"),
        (lambda api: two_nodes(api, EIGHT, [""] * 8), f"{NO_ATTRIBUTE.format('dranet.net')} {ROOT}"),
        (lambda api: node_of(api, "a", EIGHT, EIGHT),
         "the nodes have room for 1 of 2 pods of 8 GPUs each with a NIC under its PCIe root"),
        (lambda api: two_nodes(api, EIGHT, [f"{root}f" for root in EIGHT]), "the nodes have room for 0 of 2 pods"),
        (lambda api: two_nodes(api, EIGHT, EIGHT, kind="mig"), NO_ATTRIBUTE.format("gpu.nvidia.com")),
        (lambda api: two_nodes(api, EIGHT, EIGHT, rdma=False), NO_ATTRIBUTE.format("dranet.net")),
        (outdated, "the nodes have room for 0 of 2 pods"),
        (lambda api: closed(api, "deviceclasses"), "unknown whether the cluster can: .*deviceclasses is forbidden"),
        (lambda api: closed(api, "resourceslices"), "unknown whether the cluster can: .*resourceslices is forbidden"),
    ],
)  # fmt: skip
def test_where_the_cluster_cannot_the_device_plugins_are_asked(cluster: ApiServer, made: Any, told: str) -> None:
    """One line says why, in the server's words where it refuses; the job is made as ever."""
    made(cluster)
    done = run_job()
    (line,) = of_dra(done.stderr)
    assert line.startswith(f"DRA: not used: {told}") or (".*" in told and re.match(f"DRA: not used: {told}", line))
    assert limits(cluster.of_kind("Job")[0])["nvidia.com/gpu"] == "8"
    assert cluster.of_kind("ResourceClaimTemplate") == []


def test_the_nodes_that_are_selected_are_those_that_count(cluster: ApiServer) -> None:
    """Pages of one: the answer is of all of them."""
    cluster.page = 1
    for node in ("a", "b", "c"):
        node_of(cluster, node, EIGHT, EIGHT)
        if node != "c":
            cluster.put("/api/v1/nodes", "", {"kind": "Node", "metadata": {"name": node, "labels": {"pool": "h100"}}})
    assert "DRA: used: 2 nodes with" in run_job("--node-selector", "pool=h100").stderr


def test_a_dry_run_asks_a_cluster_that_is_named_and_no_other(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one DRA is off, unless it is asked for; then GPU and NIC are the claim's alone."""
    two_nodes(cluster, EIGHT, EIGHT)
    asked = run_job("--dry-run")
    assert "DRA: used" in asked.stderr and "ResourceClaimTemplate" in asked.stdout
    monkeypatch.delenv("KUBECONFIG")
    quiet = run_job("--dry-run")
    assert of_dra(quiet.stderr) == [] and "ResourceClaimTemplate" not in quiet.stdout
    forced = {each["kind"]: each for each in yaml.safe_load_all(run_job("--dry-run", *DRA).stdout)}
    assert "ResourceClaimTemplate" in forced and limits(forced["Job"]) == {}


def test_the_claim_names_the_classes_that_were_named(cluster: ApiServer) -> None:
    """A class of another name is taken at the user's word: no device is counted, and nothing more is said."""
    class_of(cluster, "team-gpu")
    done = run_job("--dra", "gpu=team-gpu")
    assert of_dra(done.stderr) == []
    (template,) = cluster.of_kind("ResourceClaimTemplate")
    requests = template["spec"]["spec"]["devices"]["requests"]
    assert {each["exactly"]["deviceClassName"] for each in requests} == {"team-gpu", "dranet.net"}
    assert limits(cluster.of_kind("Job")[0]) == {}


def test_of_dranet_s_nics_the_claim_takes_those_with_rdma(cluster: ApiServer) -> None:
    """The class of its examples takes every NIC of a node; another class selects what its maker meant."""
    class_of(cluster, "efa.networking.k8s.aws")
    for words, selected in (
        ((), 'device.attributes["dra.net"].rdma == true'),
        (("--dra", "nic=efa.networking.k8s.aws"), None),
    ):
        done = run_job("--dra", "gpu=gpu.nvidia.com", *words, "--dry-run", "-o", "json")
        (template,) = (each for each in yaml.safe_load(done.stdout)["items"] if each["kind"] == "ResourceClaimTemplate")
        kubernetes_validate.validate(template, "1.34", strict=True)
        for each in template["spec"]["spec"]["devices"]["requests"]:
            nic = each["name"].startswith("nic")
            wanted = [{"cel": {"expression": selected}}] if nic and selected else None
            assert each["exactly"].get("selectors") == wanted


@each_row(
    ("words", "classes"),
    [
        (["--host", str(path_of()), "--dra", "gpu=gpu.nvidia.com"], "gpu.nvidia.com, dranet.net"),
        (["--machine", "gb200-nvl72"], "compute-domain-default-channel.nvidia.com"),
    ],
)
def test_a_queue_is_told_of_classes_that_it_must_count(cluster: ApiServer, words: list[str], classes: str) -> None:
    """Kueue leaves a workload of unmapped classes waiting; without a queue nothing is said."""
    for queue in (["--queue", "team"], []):
        done = CliRunner().invoke(launch, [*words, *WORDS, *queue, "--dry-run"])
        assert done.exit_code == 0, done.output
        assert (f"deviceClassMappings name {classes};" in done.stderr) == bool(queue)


def refused(*words: str) -> Result:
    done = CliRunner().invoke(launch, ["--host", str(path_of()), *WORDS, "--wait", "0", *words])
    assert done.exit_code in (1, 2), done.output
    return done


def test_a_class_that_is_not_there_is_refused_with_those_that_are(cluster: ApiServer) -> None:
    """One that was named, and one that was not and is needed; nothing is made."""
    class_of(cluster, "team-nic")
    told = "there is no DeviceClass team-gpu: there are dranet.net, gpu.nvidia.com, team-nic; --dra gpu=NAME names it"
    assert told in refused("--dra", "gpu=team-gpu").output
    cluster.delete(f"{API}/deviceclasses", "", "dranet.net")
    told = "there is no DeviceClass dranet.net: there are gpu.nvidia.com, team-nic; --dra nic=NAME names it"
    assert told in refused("--dra", "gpu=gpu.nvidia.com").output
    bare(cluster)
    assert "the cluster serves no resource.k8s.io" in refused(*DRA).output
    assert cluster.of_kind("Job") == []


def test_a_class_that_may_not_be_read_is_taken_as_named(cluster: ApiServer) -> None:
    """403: whether it is there is unknown, and said so."""
    cluster.forbidden.add(f"{API}/deviceclasses")
    (line,) = of_dra(run_job(*DRA).stderr)
    assert line.startswith("DRA: used, as --dra says: unknown whether the cluster can:")
    assert len(cluster.of_kind("ResourceClaimTemplate")) == 1


@each_row(("words", "told"), rows("no_class"))
def test_what_names_no_class_is_refused(cluster: ApiServer, words: tuple[str, ...], told: str) -> None:
    """By its option, as a usage error."""
    done = refused(*words)
    assert done.exit_code == 2 and told in done.output


def test_a_pod_s_own_network_stays_multus(cluster: ApiServer) -> None:
    """The plan names the interface that Multus makes; asked for, DRA takes the RDMA device all the same, once."""
    roce = path_of("r760xa-2xA40-bf3")
    two_nodes(cluster, EIGHT, EIGHT)
    for node in ("a", "b"):
        status = {"allocatable": {"rdma/shared_eth": "1k"}}
        cluster.put("/api/v1/nodes", "", {"kind": "Node", "metadata": {"name": node}, "status": status})
    done = run_job("--dry-run", host=roce)
    assert re.fullmatch(r"DRA: not used: the plan's environment is for \S+, which Multus attaches\n", done.stderr)
    made = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert limits(made["Job"])["rdma/shared_eth"] == "1"
    forced = {each["kind"]: each for each in yaml.safe_load_all(run_job("--dry-run", *DRA, host=roce).stdout)}
    assert limits(forced["Job"]) == {}
    both = CliRunner().invoke(launch, ["--host", str(roce), *WORDS, "--dry-run", *DRA, "--resource", "rdma/x=1"])
    assert both.exit_code == 2
    assert "--resource rdma/x: with --dra the claim requests GPU and NIC" in both.output


RACK = ["--machine", "gb200-nvl72", *WORDS]


@pytest.mark.parametrize(
    ("served", "words", "why"),
    [(True, (), ""), (False, (), "the cluster serves no resource.nvidia.com"), (True, ("--no-dra",), "--no-dra")],
)
def test_a_job_over_nvlink_is_made_with_its_compute_domain_or_told_that_it_has_none(
    cluster: ApiServer, served: bool, words: tuple[str, ...], why: str
) -> None:
    """The GPUs stay the device plugin's. Without NVIDIA's DRA driver the job runs all the same, over the network."""
    if not served:
        del cluster.kinds["/apis/resource.nvidia.com/v1beta1/computedomains"]
    done = CliRunner().invoke(launch, [*RACK, "--wait", "0", *words])
    assert done.exit_code == 0, done.output
    (job,) = cluster.of_kind("Job")
    claims = job["spec"]["template"]["spec"].get("resourceClaims", [])
    domains = [each["spec"]["numNodes"] for each in cluster.of_kind("ComputeDomain")]
    assert limits(job)["nvidia.com/gpu"] == "4"
    assert domains == ([] if why else [0])
    assert [each["resourceClaimTemplateName"] for each in claims] == ([] if why else ["sft-compute-domain-channel"])
    none = f"no ComputeDomain: {why}; between nodes NCCL uses the network, not NVLink"
    assert (none in done.stderr) == bool(why)

"""Every manifest against the schema of the API that will read it, unknown fields refused."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from rigs.crds import of_version, strict, validate
from rigs.pods import templates
from rigs.tables import ROOT, each_row

from agent.base.options import read_snapshots
from planner.kubernetes import manifests, networks as network_manifests
from planner.kubernetes.manifests import JobError, JobSpec
from probes.registry import ALL

ROWS = yaml.safe_load(Path(__file__).with_name("manifest_values.yaml").read_text(encoding="utf-8"))
SPEC = JobSpec(
    name="sft-roce", namespace="training", image="registry.example/finetune:1", nodes=2, processes_per_node=2,
    command=("torchrun", "-m", "finetune.train", "--config", "/etc/config/config.yaml"),
    environment={"NCCL_SOCKET_IFNAME": "net1", "NCCL_IB_HCA": "=mlx5_1"},
    limits={"cpu": "4", "memory": "96Gi", "nvidia.com/gpu": "2", "rdma/rdma_shared_device_eth": "1"},
    networks=("rdmashared-net",), shm_bytes=2 << 30, ipc_lock=True, config_map="sft", claim="shared", queue="team",
    topology_label="cloud.example/rack", service_account="trainer",
    node_selector={"nvidia.com/gpu.product": "NVIDIA-A40"},
    tolerate=("nvidia.com/gpu",), preflight_image="registry.example/topoflight:1",
    preflight_require=("rdma.port.down",), measure=True, agent="http://topoflight-node.topoflight:9402",
    resource_claim_template="gpu-nic", compute_domain=True,
)  # fmt: skip
NETWORK = network_manifests.NetworkSpec(interfaces=("ens8f0np0",), mtu_bytes=9000)

SHARED_CLAIM = manifests.from_template("claim", name="shared", namespace="default", size="500Gi", storage_class="CLASS")


def documents() -> list[dict]:
    """Everything we render, through YAML and back, as a user's kubectl would see it."""
    made = [d for api in manifests.APIS.values() for d in api(SPEC)]
    made += list(network_manifests.network(NETWORK))
    made += SHARED_CLAIM
    made += manifests.from_template("config_map", spec=SPEC, files={"config.yaml": "a: 1\n"})
    return list(yaml.safe_load_all(manifests.render(made)))


def least_job(**given) -> JobSpec:
    """The least that a job is, and what is given."""
    least = {"name": "a", "image": "i", "nodes": 1, "processes_per_node": 1, "command": ("true",)}
    return JobSpec(**{**least, **given})


CORE = ("v1", "batch/v1", "resource.k8s.io/v1")


@pytest.mark.long
@pytest.mark.corpus
def test_custom_resources_have_no_field_their_api_would_drop(corpus: Path) -> None:
    """The CRD's own schema, with unknown fields refused; those of eight rails too."""
    rails = network_manifests.network(replace(NETWORK, interfaces=tuple(f"ens{i}f0np0" for i in range(8))))
    judged, wrong = 0, []
    for document in [*documents(), *yaml.safe_load_all(manifests.render(rails))]:
        if document["apiVersion"] in CORE or document["kind"] == "ComputeDomain":
            continue
        judged += 1
        try:
            validate(corpus, document)
        except jsonschema.ValidationError as error:
            wrong.append((document["kind"], error.json_path, error.message[:300]))
    assert not wrong
    assert judged > 20


def test_a_compute_domain_is_as_its_definition_has_it() -> None:
    """The fields of the CRD of NVIDIA's DRA driver 0.4.1 (whole CRDs: TOPOFLIGHT_CRDS); 25.x requires numNodes too.

    Each pod claims the channel of the template that the ComputeDomain names, and its containers see that claim.
    """
    for render in manifests.APIS.values():
        made = render(replace(SPEC, limits={"nvidia.com/gpu": "4"}))
        (domain,) = (each for each in made if each["kind"] == "ComputeDomain")
        assert domain["apiVersion"] == "resource.nvidia.com/v1beta1"
        assert domain["metadata"] == {"name": "sft-roce", "namespace": "training"}
        jsonschema.validate(domain["spec"], strict(ROWS["compute_domain"]))
        named = {"name": "compute-domain-channel",
                 "resourceClaimTemplateName": domain["spec"]["channel"]["resourceClaimTemplate"]["name"]}  # fmt: skip
        for pod in (each["spec"] for document in made for each in templates(document)):
            assert named in pod["resourceClaims"]
            for container in (*pod["containers"], *pod["initContainers"]):
                assert {"name": "compute-domain-channel"} in container["resources"]["claims"]
                assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}  # the driver counts GPUs elsewhere
        assert not [each for each in render(replace(SPEC, compute_domain=False)) if each["kind"] == "ComputeDomain"]


@each_row("document", lambda: [d for d in documents() if d["apiVersion"] in CORE])
def test_core_kinds_are_strictly_valid(document: dict) -> None:
    """As the API server with strict field validation."""
    kubernetes_validate.validate(document, "1.35", strict=True)


@each_row("api", ["trainjob", "pytorchjob"])
def test_pod_templates_of_custom_jobs_are_valid_pods(api: str) -> None:
    """A CRD admits a pod template that the API server later refuses as a pod: judge it as one."""
    for document in manifests.APIS[api](SPEC):
        for template in templates(document):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": template["spec"]}
            kubernetes_validate.validate(pod, "1.35", strict=True)
            for container in template["spec"]["containers"] + template["spec"].get("initContainers", []):
                resources = container.get("resources", {})
                assert resources.get("limits") == resources.get("requests"), "an extended resource needs both"


def test_pytorchjob_carries_the_names_openshift_ai_documents() -> None:
    """Container, annotation, resources and replicas of the documented RoCE job."""
    job = manifests.APIS["pytorchjob"](SPEC)[-1]
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert job["spec"]["nprocPerNode"] == "2"
    assert worker["replicas"] == 1
    assert worker["template"]["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdmashared-net"
    container = worker["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"]["rdma/rdma_shared_device_eth"] == "1"
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "net1"} in container["env"]


def test_trainjob_environment_is_in_the_trainer_and_not_in_the_runtime() -> None:
    """The webhook refuses environment patches of the container `node`."""
    runtime, job = manifests.APIS["trainjob"](SPEC)[-2:]
    assert {"name": "NCCL_IB_HCA", "value": "=mlx5_1"} in job["spec"]["trainer"]["env"]
    assert "env" not in next(templates(runtime))["spec"]["containers"][0]


@each_row(("field", "value", "message"), ROWS["refused"])
def test_what_the_api_server_would_refuse_is_refused(field: str, value, message: str) -> None:
    """By name and value: an object that cannot exist would otherwise leave the pods waiting for it."""
    with pytest.raises(JobError, match=re.escape(message)):
        least_job(**{field: tuple(value) if isinstance(value, list) else value})


@each_row(("taint", "made"), ROWS["taints"])
def test_a_taint_is_tolerated_as_kubectl_writes_it(taint: str, made: dict[str, str]) -> None:
    """KEY[=VALUE][:EFFECT]."""
    spec = least_job(tolerate=(taint,))
    (_, job) = manifests.APIS["job"](spec)
    assert job["spec"]["template"]["spec"]["tolerations"] == [made]


@each_row("amount", ["4", "500m", "1.5", ".5Gi", "96Gi", "1e3", "100G"])
def test_quantities_as_kubernetes_writes_them_are_accepted(amount: str) -> None:
    """Every form of apimachinery's."""
    limits = {"memory": amount, "nvidia.com/gpu": "8", "hugepages-2Mi": "5Gi", "vpc.amazonaws.com/efa": "0"}
    assert least_job(limits=limits).limits["memory"] == amount


@each_row(("given", "cpu"), [({}, "2"), ({"cpu": "4"}, "4"), ({"memory": "8Gi"}, None)])
def test_huge_pages_are_never_the_only_resource(given: dict[str, str], cpu: str | None) -> None:
    """Kubernetes refuses a container with huge pages and neither cpu nor memory."""
    limits = {"nvidia.com/gpu": "2", "hugepages-2Mi": "5120Mi", **given}
    for document in manifests.APIS["job"](replace(SPEC, limits=limits)):
        if document["kind"] == "Job":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            assert container["resources"]["requests"].get("cpu") == cpu
            assert container["resources"]["limits"] == limits


def test_the_deployed_example_is_what_the_probed_facts_call_for() -> None:
    """deploy/network has what is printed for a recorded node; TOPOFLIGHT_UPDATE_GOLDEN=1 rewrites it."""
    path = ROOT / "deploy" / "network" / "roce-shared-device.yaml"
    found = read_snapshots([ROOT / "tests" / "machines" / "l40s-4x-pcie.json"], ALL)
    documents = (*network_manifests.network(network_manifests.from_snapshots(found)), *SHARED_CLAIM)
    head = path.read_text().split("---\n", 1)[0] if path.exists() else ""
    if os.environ.get("TOPOFLIGHT_UPDATE_GOLDEN") == "1":
        path.write_text(head + manifests.render(documents))
    assert path.read_text() == head + manifests.render(documents)


@pytest.mark.corpus
def test_each_release_accepts_what_we_render() -> None:
    """TOPOFLIGHT_CRDS names a folder of folders of CRDs, one a release; the docs list those that passed."""
    place = os.environ.get("TOPOFLIGHT_CRDS")
    if not place:
        pytest.skip("TOPOFLIGHT_CRDS names no folder of releases")
    sys.path.insert(0, str(ROOT / "tests/agent"))
    from kustomization import render

    ours = [*documents(), *(d for name in ("prometheus-operator", "openshift")
                            for d in render(ROOT / "deploy/daemonset/overlays" / name))]  # fmt: skip
    wrong, seen = [], 0
    for file in sorted(Path(place).glob("*/*.yaml")):
        for crd in yaml.load_all(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            about, kind = crd["spec"], crd["spec"]["names"]["kind"]
            mine = [d for d in ours if d["kind"] == kind and d["apiVersion"].startswith(f"{about['group']}/")]
            served = {f"{about['group']}/{v['name']}": v for v in about["versions"] if v["served"]}
            for document in mine:
                seen += 1
                if document["apiVersion"] not in served:
                    wrong.append(f"{file.parent.name}: no {document['apiVersion']} {kind}")
                    continue
                made = of_version(served[document["apiVersion"]], kind)
                wrong += [f"{file.parent.name}: {kind}: {error.json_path}: {error.message[:200]}"
                          for error in jsonschema.Draft202012Validator(made).iter_errors(document)]  # fmt: skip
    assert seen
    # Training Operator 1.7 and 1.8 know resource claims of an older form: with DRA it is 1.9
    wrong = [line for line in wrong if not re.match(r"training-operator-v1\.[78]\.\d+: .*resourceClaims", line)]
    assert wrong == [], "\n".join(wrong)

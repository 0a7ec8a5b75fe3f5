"""Every manifest against the schema of the API that will read it; several RoCE interfaces, each with its own range."""

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import build
import jsonschema
import kubernetes_validate
import pytest
import yaml
from nccl_env_hosts import cluster, host, interface, port, settings
from rigs.crds import of_version, strict, validate
from rigs.pods import Document, launched, templates
from rigs.recorded import path_of, snapshot
from rigs.tables import ROOT, data_of, each_row, hold_file, rows_of

from agent.base.options import read_snapshots
from planner.advice import Recommendation
from planner.kubernetes import manifests, networks as network_manifests
from planner.kubernetes.manifests import JobError, JobSpec
from probes.api import Snapshot
from probes.interfaces.facts import Interface
from probes.rdma.facts import RdmaDevice, RdmaPort
from probes.registry import ALL

ROWS = data_of(__file__, "manifest_values.yaml")
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
    hold_file(path, head + manifests.render(documents))


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


rows = rows_of(__file__)

NETWORKS = "k8s.v1.cni.cncf.io/networks"


def spec(count: int, **more) -> network_manifests.NetworkSpec:
    """Networks of this many interfaces."""
    names = tuple(f"ens{i}f0np0" for i in range(count))
    return network_manifests.NetworkSpec(**{"interfaces": names, "mtu_bytes": 9000, **more})


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def node(name: str = "a", *, rails: int = 8, links: Sequence[Interface] = (), devices: Sequence[RdmaDevice] = ()):
    """A node on its host network: a RoCE port for each rail, and Ethernet."""
    names = [f"ens{i}f0np0" for i in range(rails)]
    roce = [port(f"mlx5_{i}", layer="Ethernet", netdev=each, netdev_mtu_bytes=9000) for i, each in enumerate(names)]
    known = {link.name for link in links}
    found = [interface(each, "host", f"10.1.{i}.1/24") for i, each in enumerate(names) if each not in known]
    return host(
        name, rdma=[*roce, *devices], interfaces=[interface("eno1", "host"), *found, *links], default_route="eno1"
    )


def test_the_network_of_one_interface_has_no_number() -> None:
    """No number in its name; InfiniBand alone has no network."""
    one = spec(1)
    assert one.rails() == (one,)
    documents = network_manifests.network(one)
    assert [document["metadata"]["name"] for document in documents[3:]] == ["rdmashared-net", "rdmashared-net"]
    assert json.loads(documents[3]["spec"]["ipam"]) == {"type": "whereabouts", "range": "192.168.2.0/24"}
    assert network_manifests.NetworkSpec(interfaces=(), infiniband=True).rails() == ()


@each_row("count", [2, 8])
def test_each_interface_has_its_network(count: int) -> None:
    """Numbered in the order of the interfaces, each on its own master, with the next addresses of the same size.

    The device plugin shares all rails as one resource: one unit of it brings every HCA into the pod.
    """
    documents = network_manifests.network(spec(count, namespace="training"))
    made = of_kind(documents, "MacvlanNetwork")
    assert [d["metadata"]["name"] for d in made] == [f"rdmashared-net-{i + 1}" for i in range(count)]
    assert [d["spec"]["master"] for d in made] == [f"ens{i}f0np0" for i in range(count)]
    assert {d["spec"]["networkNamespace"] for d in made} == {"training"}
    said = [json.loads(d["spec"]["ipam"]) for d in made]
    assert [each["range"] for each in said] == [f"192.168.{2 + i}.0/24" for i in range(count)]
    attachments = of_kind(documents, "NetworkAttachmentDefinition")
    configs = [json.loads(d["spec"]["config"]) for d in attachments]
    assert [d["metadata"]["name"] for d in attachments] == [d["metadata"]["name"] for d in made]
    assert [(c["name"], c["master"], c["ipam"]) for c in configs] == [
        (d["metadata"]["name"], d["spec"]["master"], ipam) for d, ipam in zip(made, said, strict=True)
    ]
    (policy,) = of_kind(documents, "NicClusterPolicy")
    (shared,) = json.loads(policy["spec"]["rdmaSharedDevicePlugin"]["config"])["configList"]
    assert shared["selectors"]["ifNames"] == [d["spec"]["master"] for d in made]


def interfaces(*snapshots: Snapshot) -> tuple[str, ...]:
    return network_manifests.from_snapshots(snapshots).interfaces


@each_row(("second", "rails"), rows("bridge_members"))
def test_a_member_of_a_bridge_gets_no_macvlan(second: dict[str, str], rails: list[str]) -> None:
    """One network that cannot be created would stop every pod at its start."""
    link = interface("ens1f0np0", "host", **second)
    links = (link, interface("br0", "bridge", kind="bridge"), interface("vrf-a", "virtual", kind="vrf"))
    assert interfaces(node(rails=3, links=links)) == tuple(rails)


def test_rails_are_what_all_nodes_have_and_no_management_next_to_others() -> None:
    """By their names. The only interface is one: there is no better. A slower port of another model is none."""
    assert interfaces(node("a"), node("b", rails=3)) == ("ens0f0np0", "ens1f0np0", "ens2f0np0")
    assert interfaces(node(rails=1, links=[interface("ens0f0np0", "host", "", master="ovs-system")])) == ("ens0f0np0",)
    slow = port("mlx5_9", layer="Ethernet", gbit=25, model="ConnectX-6 Lx", netdev="eno1")
    assert interfaces(node(rails=2, devices=[slow])) == ("ens0f0np0", "ens1f0np0")
    assert interfaces(node(rails=0, devices=[slow])) == ("eno1",)


def test_ranges_that_a_node_uses_are_named() -> None:
    """With the interface and its network."""
    found = network_manifests.find_overlaps(["10.1.0.0/24", "10.1.200.0/24"], [node(rails=2)])
    assert found == "10.1.0.0/24 (ens0f0np0 of a has 10.1.0.0/24)"
    assert network_manifests.find_overlaps(["192.168.2.0/24"], [node()]) == ""


def advice(*snapshots: Snapshot) -> Recommendation:
    """The environment and the pods' needs alone."""
    found = settings(snapshots, cluster(*snapshots), multi_node=True)
    return Recommendation(settings=found.settings, notes=found.notes, needs=found.needs)


def pod(name: str, rails: int) -> Snapshot:
    """A pod on the networks of a node's rails, which also sees an HCA that it has no network on."""
    devices = [port(f"mlx5_{i}", layer="Ethernet", netdev=f"net{i + 1}") for i in range(rails)]
    links = [
        interface(f"net{i + 1}", "secondary", f"192.168.{2 + i}.1/24", kind="macvlan", rdma_device=f"mlx5_{i}",
                  multus_network=f"default/rdmashared-net-{i + 1}")
        for i in range(rails)
    ]  # fmt: skip
    eth = interface("eth0", "pod-default", "10.128.0.5/23")
    storage = port(f"mlx5_{rails}", layer="Ethernet")
    return host(name, rdma=[*devices, storage], interfaces=[eth, *links], default_route="eth0")


def environment(given: Recommendation) -> dict[str, str]:
    return {setting.name: setting.value for setting in given.settings}


@each_row("rails", [2, 8, 12])
def test_a_job_for_several_rails_has_the_environment_that_its_pods_would_find(rails: int) -> None:
    """Sockets on net1, every rail's HCA and no other, each ring on its rail, and all networks in their order."""
    storage = port(f"mlx5_{rails}", layer="Ethernet")
    nodes = [node(name, rails=rails, devices=[storage]) for name in "ab"]
    found = network_manifests.from_snapshots(nodes)
    names = [f"{rail.namespace}/{rail.name}" for rail in found.rails()]
    by_number = sorted(found.interfaces, key=lambda name: (len(name), name))  # ens2 before ens10
    device = "rdma/rdma_shared_device_eth"
    given = network_manifests.attach(advice(*nodes), nodes, networks=names, interfaces=by_number, resource=device)
    seen = advice(pod("a", rails), pod("b", rails))
    assert environment(given) == environment(seen)
    assert environment(given)["NCCL_SOCKET_IFNAME"] == ("=net1" if rails > 9 else "net1"), "net1 begins net10 as well"
    hcas = environment(given)["NCCL_IB_HCA"]
    assert set(hcas.lstrip("=").split(",")) == {f"mlx5_{i}" for i in range(rails)}
    assert [need.value for need in given.needs if need.name == "network"] == names
    assert names == [need.value for need in seen.needs if need.name == "network"]
    assert "rdma/rdma_shared_device_eth: 1" in [need.value for need in given.needs if need.name == "resource"]
    assert not {note.topic for note in given.notes} & {setting.name for setting in given.settings}


def attached(nodes: Sequence[Snapshot]) -> Recommendation:
    return network_manifests.attach(
        advice(*nodes), nodes, networks=["default/n-1", "default/n-2"], interfaces=("ens0f0np0", "ens1f0np0"),
        resource=None,
    )  # fmt: skip


def test_hcas_are_listed_only_if_their_names_are_equal_and_one_is_left_out() -> None:
    """No list fits nodes with different names; they get the same networks."""
    other = host("b", rdma=[port(f"rocep{i}", layer="Ethernet", netdev=f"ens{i}f0np0") for i in range(2)])
    for second in (other, node("b", rails=2)):
        given = attached([node("a", rails=2), second])
        assert environment(given)["NCCL_SOCKET_IFNAME"] == "net1" and "NCCL_IB_HCA" not in environment(given)
        assert [need.value for need in given.needs if need.name == "network"] == ["default/n-1", "default/n-2"]


def test_rails_that_training_does_not_use_change_no_job() -> None:
    """Storage over RoCE next to the InfiniBand that the job uses."""
    nodes = [node(name, rails=2, devices=[port(f"mlx5_{i}") for i in range(4, 12)]) for name in "ab"]
    assert network_manifests.from_snapshots(nodes).interfaces == ("ens0f0np0", "ens1f0np0")
    assert attached(nodes) == advice(*nodes)


@pytest.fixture(scope="module")
def four_rails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of a node of four L40S, each with a RoCE port next to it, and Ethernet."""
    path = tmp_path_factory.mktemp("rails") / "rails-01.json"
    path.write_text(build.dumps(build.record(build.MACHINES["four-rails"])), encoding="utf-8")
    return path


def networked(recording: Path, *more: str) -> tuple[list[Document], str]:
    """What `launch --network` prints for a node like this, and its stderr."""
    return launched("--host", recording, "--network", "--no-preflight", "--claim", "shared", "--model",
                    "Qwen/Qwen2.5-0.5B", *more)  # fmt: skip


def test_the_job_printed_with_the_networks_is_on_all_of_them(four_rails: Path) -> None:
    """Annotation, environment and device of its pods; the networks whose addresses the node has are named."""
    documents, stderr = networked(four_rails, "--nodes", "2", "--namespace", "training")
    made = of_kind(documents, "MacvlanNetwork")
    assert [d["spec"]["master"] for d in made] == [f"ens{i}f0np0" for i in range(4)]
    (job,) = of_kind(documents, "Job")
    template = job["spec"]["template"]
    assert template["metadata"]["annotations"][NETWORKS] == ",".join(f"training/{d['metadata']['name']}" for d in made)
    (container,) = template["spec"]["containers"]
    said = {each["name"]: each["value"] for each in container["env"]}
    assert said["NCCL_SOCKET_IFNAME"] == "net1" and "NCCL_IB_HCA" not in said  # every port is a rail
    assert container["resources"]["limits"]["rdma/rdma_shared_device_eth"] == "1"
    (files,) = of_kind(documents, "ConfigMap")
    planned = json.loads(files["data"]["plan.json"])["environment"]
    assert planned.items() <= said.items() and planned["NCCL_SOCKET_IFNAME"] == "net1"
    assert "warning: 192.168.3.0/24 (ens1f0np0 of rails-01 has 192.168.3.0/24): choose free ranges" in stderr


def test_only_the_device_that_the_user_names_is_requested(four_rails: Path) -> None:
    """A cluster whose device plugin was there before."""
    documents, _ = networked(four_rails, "--nodes", "2", "--resource", "openshift.io/rails=4")
    (container,) = next(templates(of_kind(documents, "Job")))["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4", "openshift.io/rails": "4"}


@each_row("more", [(), ("--nodes", "1")])
def test_a_job_of_one_node_needs_no_network(four_rails: Path, more: tuple[str, ...]) -> None:
    """The networks are printed, for the jobs to come."""
    documents, _ = networked(four_rails, *more)
    (job,) = of_kind(documents, "Job")
    assert "metadata" not in job["spec"]["template"] and len(of_kind(documents, "MacvlanNetwork")) == 4


def test_one_rail_does_not_change_the_job() -> None:
    """A record of one RoCE port: the network, and a job that does not mention it."""
    documents, stderr = networked(path_of("l40s-4x-pcie"), "--nodes", "2")
    (job,) = of_kind(documents, "Job")
    assert "metadata" not in job["spec"]["template"]
    assert stderr.startswith("warning: the nodes have RDMA devices, but the pods request none")
    assert stderr.count("\n") == 1
    assert [d["metadata"]["name"] for d in of_kind(documents, "MacvlanNetwork")] == ["rdmashared-net"]


# -- what the operators look for


def roce(*links: Interface, netdev: str, bond: str | None = None) -> Snapshot:
    """A node with one active RoCE port, whose interfaces are `links`."""
    port = RdmaPort(port=1, state="ACTIVE", link_layer="Ethernet", netdev=netdev, netdev_mtu_bytes=9000)
    return host("n", rdma=[RdmaDevice(name="mlx5_0", kind="hca", bond=bond, ports=(port,))], interfaces=links)


@each_row(("links", "port", "ports", "master", "mtu_bytes"), rows("plugin"))
def test_the_device_plugin_looks_for_pci_netdevs(links, port, ports, master, mtu_bytes):
    """It finds HCAs by the netdevs of their PCI functions, where no bond and no VLAN is; a macvlan is on those."""
    found = roce(*(Interface(role="host", **link) for link in links), **port)
    documents = network_manifests.network(network_manifests.from_snapshots([found]))
    kinds = {document["kind"]: document["spec"] for document in documents}
    config = json.loads(kinds["NicClusterPolicy"]["rdmaSharedDevicePlugin"]["config"])
    assert (config["configList"][0]["selectors"]["ifNames"], kinds["MacvlanNetwork"]["master"]) == (ports, master)
    assert network_manifests.list_pod_netdevs([found]) == ()
    assert network_manifests.from_snapshots([found]).mtu_bytes == mtu_bytes, "a bond's own, not its member's"


@each_row("machine", ["hgx-h100-8xH100-8hca", "azure-nd-a100-flat-vm", "polaris-4xA100-nv4"])
def test_infiniband_is_shared_and_needs_no_second_network(machine: str) -> None:
    """Verbs go by the device alone, and a port's netdev need not be known: the link type finds it on every node."""
    documents = network_manifests.network(network_manifests.from_snapshots([snapshot(machine)]))
    assert [d["kind"] for d in documents] == ["MachineConfig", "NicClusterPolicy", "ClusterPolicy"]
    (shared,) = json.loads(documents[1]["spec"]["rdmaSharedDevicePlugin"]["config"])["configList"]
    assert shared["resourceName"] == "rdma_shared_device_ib"
    assert shared["selectors"] == {"linkTypes": ["infiniband"]}


def test_a_node_with_both_shares_both() -> None:
    """Storage over RoCE and compute over InfiniBand are two resources; the pod requests one by name."""
    ports = (
        RdmaPort(port=1, state="ACTIVE", link_layer="Ethernet", netdev="ens8f0np0"),
        RdmaPort(port=2, state="ACTIVE", link_layer="InfiniBand"),
    )
    both = host("n", rdma=[RdmaDevice(name="mlx5_0", kind="hca", ports=ports)])
    documents = network_manifests.network(network_manifests.from_snapshots([both]))
    config = json.loads(documents[1]["spec"]["rdmaSharedDevicePlugin"]["config"])
    assert [each["selectors"] for each in config["configList"]] == [
        {"ifNames": ["ens8f0np0"]},
        {"linkTypes": ["infiniband"]},
    ]
    assert "MacvlanNetwork" in [d["kind"] for d in documents]


def test_efa_needs_none_of_it() -> None:
    """The error says that EFA needs none."""
    with pytest.raises(JobError, match="EFA needs none"):
        network_manifests.from_snapshots([snapshot("aws-p4d-8xA100-4efa")])


def test_a_name_from_inside_a_pod_is_named() -> None:
    """No node has an interface net1: what is printed for it needs another name."""
    assert network_manifests.list_pod_netdevs([snapshot("r760xa-2xA40-bf3")]) == ("net1",)
    assert network_manifests.list_pod_netdevs([snapshot("l40s-4x-pcie")]) == ()
    words = ("--network", "--no-preflight", "--model", "Qwen/Qwen2.5-0.5B", "--resource",
             "rdma/rdma_shared_device_eth=1")  # fmt: skip
    _, stderr = launched("--host", path_of("r760xa-2xA40-bf3"), *words)
    assert "warning: net1: these are names inside a pod;" in stderr

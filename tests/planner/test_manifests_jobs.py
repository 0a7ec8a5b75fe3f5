"""What a job's manifests say of failures, security, placement, the gate and the environment, for each API."""

import json
from dataclasses import fields, replace
from inspect import signature

import pytest
from click import Command
from nccl_env_hosts import host, interface
from rigs.command import topoflight
from rigs.pods import launched, templates
from rigs.recorded import changed, path_of, snapshot
from rigs.tables import each_row, rows_of

from agent.advice.advise import adapt_to_pods, advise
from agent.advice.job_plan import build_job_plan
from agent.advice.request import Request
from agent.base.options import _rows
from agent.cli.bench import compare_networks
from agent.cli.launch import launch
from agent.cli.preflight import preflight
from agent.jobs import cluster_job
from agent.jobs.launch import LaunchOptions
from agent.jobs.preflight import PreflightOptions
from finetune import pod
from planner.forecast.specs import TrainSpec
from planner.kubernetes import manifests, networks as network_manifests
from planner.kubernetes.manifests import JobError, JobSpec
from probes.api import Snapshot
from probes.pci.facts import PciFacts

rows = rows_of(__file__)
SPEC = JobSpec(
    name="sft", namespace="training", image="registry.example/finetune:1", nodes=3, processes_per_node=2,
    command=("torchrun", "-m", "finetune.train"), limits={"cpu": "4", "nvidia.com/gpu": "2"}, claim="shared",
    config_map="sft-config", environment={"NCCL_IB_HCA": "mlx5_1"}, preflight_image="registry.example/topoflight:1",
    preflight_require=("rdma.*",),
)  # fmt: skip
APIS = sorted(manifests.APIS)


def test_launch_offers_every_api() -> None:
    """The names in verbs/cluster.toml and verbs/launch.toml are those of the templates of Kubernetes, and Slurm."""
    (api,) = (param for param in launch.params if param.name == "api")
    assert tuple(api.type.choices) == ("local", *manifests.APIS, "slurm")
    assert _rows("launch")["--output"]["excludes"] == [f"--api={'|'.join(manifests.APIS)}"]


@each_row(
    ("verb", "options"), [(launch, LaunchOptions), (compare_networks, LaunchOptions), (preflight, PreflightOptions)]
)
def test_every_option_is_a_field_of_the_options_or_of_the_request(verb: Command, options: type) -> None:
    """`Request.of` ignores what it does not know, so a field that is missing would be an option without effect."""
    known = {field.name for kind in (options, Request, TrainSpec) for field in fields(kind)}
    of_the_verb = {*signature(verb.callback).parameters, "lengths", "ranks"}
    assert {param.name for param in verb.params} <= known | of_the_verb


def container_of(documents: tuple[dict, ...]) -> dict:
    """Command and environment of the main container; those of a TrainJob are in its trainer."""
    trainers = [d["spec"]["trainer"] for d in documents if d["kind"] == "TrainJob"]
    return trainers[0] if trainers else next(templates(list(documents)))["spec"]["containers"][0]


def command_of(documents: tuple[dict, ...]) -> list[str]:
    return list(container_of(documents)["command"])


def variables_of(documents: tuple[dict, ...]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container_of(documents)["env"]}


def meant_for_retry(job: dict, code: int) -> bool:
    """Whether batch/v1's policy replaces a pod that ended with this code: the first rule that matches decides."""
    for rule in job["podFailurePolicy"]["rules"]:
        on = rule.get("onExitCodes")
        if on and (code in on["values"]) is (on["operator"] == "In"):
            return bool(rule["action"] != "FailJob")
    return True


def test_75_and_lost_pods_of_an_indexed_job_come_again_and_other_codes_end_it() -> None:
    """A pod that went with its node is counted."""
    spec = manifests.APIS["job"](SPEC)[-1]["spec"]
    assert spec["backoffLimit"] == SPEC.restarts * SPEC.nodes
    assert [code for code in range(1, 256) if meant_for_retry(spec, code)] == [75, 137, 143]
    first = spec["podFailurePolicy"]["rules"][0]
    assert first == {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "a failure policy goes with nothing else"


@each_row("api", ["jobset", "trainjob"])
def test_jobset_restarts_all_pods_and_the_jobs_own_codes_end_it(api: str) -> None:
    """The first pod that fails ends the Job, which JobSet creates again; its pods know how often it has."""
    documents = manifests.APIS[api](SPEC)
    spec = documents[0]["spec"]
    spec = spec["template"]["spec"] if api == "trainjob" else spec
    assert spec["failurePolicy"]["maxRestarts"] == SPEC.restarts
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (replicated,) = spec["replicatedJobs"]
    child = replicated["template"]["spec"]
    assert child["backoffLimit"] == 0
    assert [code for code in range(256) if not meant_for_retry(child, code)] == [2, 3, 71, 74, 76]
    (count,) = [each for each in container_of(documents)["env"] if each["name"] == "TOPOFLIGHT_RESTARTS"]
    assert "restart-attempt" in count["valueFrom"]["fieldRef"]["fieldPath"]


def test_a_pytorchjobs_operator_restarts_its_containers() -> None:
    """And counts their restarts over all pods, with a claim or without."""
    for spec in (SPEC, replace(SPEC, claim=None)):
        (job,) = manifests.APIS["pytorchjob"](spec)
        assert {r["restartPolicy"] for r in job["spec"]["pytorchReplicaSpecs"].values()} == {"OnFailure"}
        assert job["spec"]["runPolicy"] == {"cleanPodPolicy": "None", "backoffLimit": 9}
    (job,) = manifests.APIS["pytorchjob"](replace(SPEC, restarts=0))
    assert {r["restartPolicy"] for r in job["spec"]["pytorchReplicaSpecs"].values()} == {"Never"}
    assert job["spec"]["runPolicy"] == {"cleanPodPolicy": "None"}


@each_row("api", APIS)
def test_every_pod_knows_where_pod_0_is_and_how_long_to_wait(api: str) -> None:
    """The names that each controller gives it; torchrun's own words follow."""
    command = command_of(manifests.APIS[api](SPEC))
    of_jobset = "sft-node-0-0.sft"
    meet = {"job": "sft-0.sft", "trainjob": of_jobset, "jobset": of_jobset, "pytorchjob": "sft-master-0"}[api]
    assert command[:3] == ["python", "-m", "finetune.pod"]
    policy = "--restarts=3" if api == "job" else "--once"
    assert {"--nodes=3", "--ranks=2", f"--meet={meet}:29500", policy, "--wait=3600"} <= set(command)
    assert command[command.index("--") + 1 :] == ["torchrun", "-m", "finetune.train"]
    waits = command_of(manifests.APIS[api](replace(SPEC, restarts=1)))
    assert ("--restarts=1" in waits) is (api == "job")


@each_row("api", APIS)
def test_pods_measure_together_only_if_requested(api: str) -> None:
    """In the job's own container, so with its image, environment, networks and devices; nothing else differs."""
    without, words = (command_of(manifests.APIS[api](replace(SPEC, measure=measure))) for measure in (False, True))
    assert "--measure" not in without and [word for word in words if word != "--measure"] == without
    assert words.index("--measure") < words.index("--")


def restricted(container: dict, pod: dict) -> list[str]:
    """What Pod Security's profile "restricted" (1.36) finds wrong with a container of a pod."""
    mine, common = container.get("securityContext", {}), pod.get("securityContext", {})
    seccomp = (mine.get("seccompProfile") or common.get("seccompProfile") or {}).get("type")
    capabilities = mine.get("capabilities", {})
    wrong = {
        "allowPrivilegeEscalation": mine.get("allowPrivilegeEscalation") is not False,
        "capabilities": "ALL" not in capabilities.get("drop", ())
        or not set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"},
        "runAsNonRoot": mine.get("runAsNonRoot", common.get("runAsNonRoot")) is not True,
        "runAsUser": mine.get("runAsUser", common.get("runAsUser")) == 0,
        "seccompProfile": seccomp not in ("RuntimeDefault", "Localhost"),
        "host": any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")),
        "volumes": any(
            set(volume) - {"name", "configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret", "ephemeral"}
            for volume in pod.get("volumes", ())
        ),
    }  # fmt: skip
    return [name for name, bad in wrong.items() if bad]


FULL = replace(SPEC, agent="http://a:1", shm_bytes=1 << 30, token_secret="hub")  # noqa: S106 - its name
ROOT_KEEPS = ["capabilities", "runAsNonRoot"]  # IPC_LOCK, which only root gets; everything else is dropped


@each_row("api", APIS)
@each_row(
    ("spec", "beyond"),
    [(SPEC, []), (FULL, []), (replace(SPEC, nodes=1), []), (replace(SPEC, ipc_lock=True), ROOT_KEEPS)],
)
def test_pods_meet_the_restricted_profile_but_for_what_rdma_needs(api: str, spec: JobSpec, beyond: list[str]) -> None:
    """The main container and the gate; separately, because an operator adds containers to the pod."""
    found = list(templates(list(manifests.APIS[api](spec))))
    assert found
    for template in found:
        pod = template["spec"]
        for container in [*pod["containers"], *pod["initContainers"]]:
            assert restricted(container, pod) == beyond, container["name"]
            if beyond:
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert beyond or "runAsNonRoot" not in pod.get("securityContext", {}), "PyTorchJob's init container is root's"


@each_row("api", APIS)
def test_pods_of_one_job_run_on_different_nodes(api: str) -> None:
    """By the label that the job's controller gives its pods; a single pod needs none of it."""
    of_jobset = "jobset.sigs.k8s.io/jobset-name"
    label = {"job": "job-name", "trainjob": of_jobset, "jobset": of_jobset,
             "pytorchjob": "training.kubeflow.org/job-name"}[api]  # fmt: skip
    for template in templates(list(manifests.APIS[api](SPEC))):
        (term,) = template["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"] == {"matchLabels": {label: "sft"}}
    for template in templates(list(manifests.APIS[api](replace(SPEC, nodes=1)))):
        assert "affinity" not in template["spec"]


@each_row("api", APIS)
def test_the_gate_judges_with_the_jobs_environment_and_the_hubs_cache_is_on_the_claim(api: str) -> None:
    """Not with its tokens. One download for all pods; without a claim the image's place; the user's setting stays."""
    documents = manifests.APIS[api](replace(SPEC, token_secret="hub", agent="http://a:1"))  # noqa: S106 - its name
    for template in templates(list(documents)):
        (gate,) = template["spec"]["initContainers"]
        said = {each["name"]: each.get("value") for each in gate["env"]}
        assert said.items() >= {"NCCL_IB_HCA": "mlx5_1", "HF_HOME": "/mnt/shared/.cache"}.items()
        assert not {"HF_TOKEN", "TOPOFLIGHT_AGENT_TOKEN_FILE"} & said.keys()
    assert variables_of(documents)["HF_HOME"] == "/mnt/shared/.cache"
    assert "HF_HOME" not in variables_of(manifests.APIS[api](replace(SPEC, claim=None)))
    named = replace(SPEC, environment={"HF_HOME": "/mnt/shared/hub"})
    assert variables_of(manifests.APIS[api](named))["HF_HOME"] == "/mnt/shared/hub"


GIVEN = LaunchOptions(request=Request(), **rows("given")())


def test_nccl_writes_its_log() -> None:
    """So that `logs POD | topoflight evidence -` has something to read; gloo has no such log."""
    request = Request.of(hosts=(path_of("r760xa-2xA40-bf3"),), model="Qwen/Qwen2.5-0.5B", nodes=2)
    advice = advise(request, (snapshot("r760xa-2xA40-bf3"),))
    assert cluster_job.build_spec(advice, GIVEN).environment["NCCL_DEBUG"] == "INFO"
    request = Request.of(hosts=(path_of("cpu-only-vm"),), model="tiny-llama", nodes=2, ranks_per_node=1)
    advice = advise(request, (snapshot("cpu-only-vm"),))
    assert "NCCL_DEBUG" not in cluster_job.build_spec(advice, GIVEN).environment


def node(name: str, role: str) -> Snapshot:
    """A machine without GPUs, whose address is on this interface."""
    links = (interface("lo", "loopback", "127.0.0.1/8"), interface(name, role))
    return host("node-a", gpus=0, interfaces=links)


@each_row(("name", "role", "recorded", "inside", "stays"), rows("interfaces"))
def test_interfaces_are_named_as_a_pod_calls_them_or_not_at_all(monkeypatch, name, role, recorded, inside, stays):
    """A host's ens5 in a pod ends the job at its first connection: left out, with the reason."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if inside:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    found = node(name, role)
    advice = advise(Request.of(model="tiny-llama", nodes=2, ranks_per_node=1), [found])
    assert any(setting.name == "GLOO_SOCKET_IFNAME" for setting in advice.settings)
    made, notes = adapt_to_pods(advice, [found], here=not recorded)
    assert any(setting.name == "GLOO_SOCKET_IFNAME" for setting in made.settings) is stays
    assert bool(notes) is not stays
    if notes:
        where = "node-a" if recorded else "this machine"
        assert f"is left out: {advice.settings[0].value} is an interface of {where}" in notes[0]
    spec = cluster_job.build_spec(made, replace(GIVEN, resources=()))
    (files, *_) = cluster_job.build_documents(spec, "job", build_job_plan(made, Request()))
    planned = json.loads(files["data"]["plan.json"])["environment"]
    assert ("GLOO_SOCKET_IFNAME" in planned) is ("GLOO_SOCKET_IFNAME" in spec.environment) is stays


@each_row(("role", "stays"), [("host", False), ("pod-default", False), ("secondary", True)])
def test_an_index_of_a_hosts_gid_table_is_not_put_into_pods(role: str, stays: bool) -> None:
    """A pod on a macvlan has other GIDs than its node."""
    found = node("net1" if role == "secondary" else "ens5", role)
    advice = advise(Request.of(model="tiny-llama", nodes=2, ranks_per_node=1), [found])
    index = replace(advice.settings[0], name="NCCL_IB_GID_INDEX", value="3")
    made, notes = adapt_to_pods(replace(advice, settings=(index,)), [found], here=False)
    assert (made.settings == (index,)) is stays and bool(notes) is not stays


def test_an_environment_for_pods_names_no_interface_of_the_host() -> None:
    """recommend -o k8s is pasted into a pod; -o shell is for the host."""
    words = ("recommend", "--host", path_of("cpu-only-vm"), "--nodes", 2, "--model", "tiny-llama", "-o")
    shell, k8s = (topoflight(*words, form) for form in ("shell", "k8s"))
    assert (shell.exit_code, k8s.exit_code) == (0, 0), shell.output + k8s.output
    assert "GLOO_SOCKET_IFNAME" in shell.stdout
    assert "GLOO_SOCKET_IFNAME" not in k8s.stdout and "is left out" in k8s.stderr


def test_a_dry_run_without_a_host_names_no_interface_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The administrator's machine is no node's pod, whatever its interfaces are called."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    documents, _ = launched("--nodes", "2", "--no-preflight", "--claim", "c")
    assert "SOCKET_IFNAME" not in str(documents)


def test_the_installer_of_the_nics_driver_follows_from_the_node_or_an_option() -> None:
    """If nvidia_peermem is loaded, that driver is on the node; ofedDriver and useHostMofed exclude each other."""

    def made(loaded: bool | None, **settings) -> tuple[dict, dict]:
        found = changed(snapshot("l40s-4x-pcie"), PciFacts, peermem_loaded=loaded)
        spec = network_manifests.from_snapshots([found], **settings)
        kinds = {document["kind"]: document["spec"] for document in network_manifests.network(spec)}
        return kinds["ClusterPolicy"]["driver"]["rdma"], kinds["NicClusterPolicy"].get("ofedDriver", {})

    assert made(True) == ({"enabled": True, "useHostMofed": True}, {})
    assert made(None) == made(False) == ({"enabled": True}, {})
    brought = {"repository": "nvcr.io/nvidia/mellanox", "image": "doca-driver"}
    assert made(True, host_mofed=False) == ({"enabled": True}, brought)
    assert made(None, host_mofed=True) == ({"enabled": True, "useHostMofed": True}, {})


def test_a_launch_requests_the_option_for_the_nics_driver(tmp_path):
    """A record without nvidia_peermem, with and without the option."""
    words = ("--host", path_of("sick-h100-no-peermem"), "--network", "--claim", "c", "--model",
             "Qwen/Qwen2.5-0.5B", "--no-preflight")  # fmt: skip
    assert "--no-host-mofed if the network operator installs it" in launched(*words)[1]
    documents, stderr = launched(*words, "--no-host-mofed")
    assert "host-mofed" not in stderr
    kinds = {each["kind"]: each for each in documents}
    assert "ofedDriver" in kinds["NicClusterPolicy"]["spec"]
    assert kinds["ClusterPolicy"]["spec"]["driver"]["rdma"] == {"enabled": True}


@each_row("api", APIS)
def test_a_pod_ends_after_its_ranks_have_had_their_time_to_save(api: str) -> None:
    """The kubelet waits longer than the pod's own process does; both by one number."""
    documents = manifests.APIS[api](replace(SPEC, save_seconds=700))
    settings = pod.read_settings(command_of(documents)[3:], {})
    for template in templates(list(documents)):
        assert template["spec"]["terminationGracePeriodSeconds"] == settings.save + 20 == 720


@each_row(("method", "trained"), [("full", 7_615_616_512), ("lora", 40_370_176)])
def test_the_time_to_save_fits_a_checkpoint_at_the_rate_that_storage_takes(method: str, trained: int) -> None:
    """Two checkpoints, because one may still be written, and one step; a rate that is unknown is assumed and named."""
    words = ("--host", path_of(), "--model", "Qwen/Qwen2.5-7B", "--method", method,
             "--claim", "shared")  # fmt: skip
    found = {}
    for rate, per_second in ((None, 125 * 2**20), ("1G", 1e9), ("5M", 5e6)):
        documents, stderr = launched(*words, *(["--storage-rate", rate] if rate else []))
        (template,) = templates(documents)
        found[rate] = template["spec"]["terminationGracePeriodSeconds"] - 20
        writing = 2 * 12 * trained / per_second
        assert found[rate] == 100 or writing < found[rate] < writing + 60
        assert found[rate] > 100 or writing <= 100
        assert ("--storage-rate" in stderr) is (rate is None and writing > 100)
    assert (found["5M"] > 100) and (found["1G"] > 100) is (method == "full")
    with pytest.raises(AssertionError, match=r"2: (.|\n)*--storage-rate': 'fast': must be bytes"):
        launched(*words, "--storage-rate", "fast")


def test_a_trainjobs_claims_are_where_the_trainer_carries_them_to_the_pod() -> None:
    """resourcesPerNode loses its claims on the way, and replaces the runtime's resources; without claims it is used."""
    runtime, job = manifests.APIS["trainjob"](replace(SPEC, resource_claim_template="sft-gpu-nic"))[-2:]
    (container,) = next(templates(runtime))["spec"]["containers"]
    assert container["resources"]["claims"] == [{"name": "gpu-nic"}]
    assert container["resources"]["limits"] == SPEC.limits
    assert "resourcesPerNode" not in job["spec"]["trainer"]
    runtime, job = manifests.APIS["trainjob"](SPEC)
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"] == SPEC.limits
    assert "resources" not in next(templates(runtime))["spec"]["containers"][0]


def test_kueue_finds_all_pods_of_a_trainjob_in_its_runtime() -> None:
    """Kueue 0.15.0 takes the quota of the runtime's Job, which without these two is one pod's."""
    runtime, job = manifests.APIS["trainjob"](replace(SPEC, queue="team"))
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    said = replicated["template"]["spec"]
    assert said["parallelism"] == said["completions"] == job["spec"]["trainer"]["numNodes"] == 3


@each_row(("changes", "annotations"), rows("domains"))
def test_master_and_workers_of_a_pytorchjob_share_one_topology_domain(changes, annotations):
    """Two pod sets of the same required level may still land in two domains, unless they are a group.

    Kueue's webhook refuses a group of one pod set, or without a topology; of two, one must have one pod.
    """
    (job,) = manifests.APIS["pytorchjob"](replace(SPEC, **changes))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    said = [replica["template"].get("metadata", {}).get("annotations", {}) for replica in replicas.values()]
    assert said == [annotations] * len(replicas)
    assert replicas["Master"]["replicas"] == 1


@each_row(("nodes", "allowed"), [(1, 54), (10, 54), (11, 53), (64, 53), (1000, 52)])
def test_a_jobs_name_leaves_room_for_its_pods_names(nodes: int, allowed: int) -> None:
    """PyTorchJob's NAME-worker-62 and JobSet's NAME-node-0-63 are labels of a host name."""
    assert replace(SPEC, nodes=nodes, name="x" * allowed).nodes == nodes
    with pytest.raises(JobError, match=f"{allowed} characters at most"):
        replace(SPEC, nodes=nodes, name="x" * (allowed + 1))

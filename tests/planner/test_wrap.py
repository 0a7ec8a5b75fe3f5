"""The user's own manifests, wrapped: what is added stands as lines of its own, and all else stays where it was."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from contracts.yaml_edit import EditError, documents, extended
from planner.advice import PodNeed, Reason, Setting
from planner.kubernetes.wrap import Additions, WrapError, jobs_in, wrap
from planner.stacks.arguments import as_run, read_command

WHY = Reason(rule="rails", evidence="two NICs", source="a test")
ADDED = Additions(
    settings=(Setting(name="NCCL_IB_HCA", value="=mlx5_0,mlx5_1", reason=WHY),
              Setting(name="NCCL_CROSS_NIC", value="0", reason=WHY)),
    needs=(PodNeed(name="shm_bytes", value=str(8 << 30), reason=WHY),
           PodNeed(name="capability", value="IPC_LOCK", reason=WHY),
           PodNeed(name="network", value="rdmashared-net", reason=WHY),
           PodNeed(name="resource", value="rdma/*: 1", reason=WHY)),
    resources={"rdma/rdma_shared_device_eth": "1"}, gate_image="registry.example/topoflight:1", log=True,
    annotations={"forecast-step": "step 1 s"},
)  # fmt: skip
# The PyTorchJob of the published recipe for OpenShift AI, its anchors and all; with two comments.
SFT = """\
# the baseline
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: sft-baseline
spec:
  nprocPerNode: "2"
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      template: &template
        spec:
          containers:
            - name: pytorch
              command:
                - bash
                - -c
                - torchrun /etc/config/sft.py --config /etc/config/config.yaml
              env:
                - name: HF_HOME
                  value: /mnt/shared/.cache
                - name: HF_TOKEN
                  value: ""
                - name: PYTORCH_CUDA_ALLOC_CONF
                  value: "expandable_segments:True"
                - name: NCCL_DEBUG
                  value: INFO   # what tells
              image: "quay.io/modh/training:py311-cuda121-torch241"
              resources:
                limits: &resources
                  cpu: "4"
                  memory: 96Gi
                  nvidia.com/gpu: "2"
                requests: *resources
              volumeMounts:
                - mountPath: /etc/config
                  name: config
                - mountPath: /mnt/shared
                  name: shared
                - name: shm
                  mountPath: /dev/shm
          volumes:
            - configMap:
                name: sft
              name: config
            - name: shared
              persistentVolumeClaim:
                claimName: shared
            - name: shm
              emptyDir:
                medium: Memory
                sizeLimit: 2Gi
    Worker:
      replicas: 1
      template: *template
"""
POD = {"containers": [{"name": "main", "command": ["python", "train.py"]}]}
TRAINJOB: list[dict[str, Any]] = [
    {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime", "metadata": {"name": "torch"},
     "spec": {"mlPolicy": {"torch": {}}, "template": {"spec": {"replicatedJobs": [
         {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [{"name": "node"}]}}}}}]}}}},
    {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "sft"},
     "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "torch"},
              "trainer": {"numNodes": 2, "numProcPerNode": 4, "command": ["torchrun", "sft.py"]}}},
]  # fmt: skip


def of_all(text: str, added: Additions = ADDED) -> dict[str, Additions]:
    return {job.name: added for job in jobs_in(documents(text))}


def test_the_published_job_keeps_every_line_and_wrapping_it_again_changes_nothing() -> None:
    """Both replicas share one template by an anchor, limits and requests another: one line serves both."""
    made, notes = wrap(SFT, of_all(SFT))
    lines = iter(made.splitlines())
    assert all(any(line == row for row in lines) for line in SFT.splitlines())
    job = yaml.safe_load(made)
    master, worker = (job["spec"]["pytorchReplicaSpecs"][role]["template"] for role in ("Master", "Worker"))
    assert master == worker
    (container,), (gate,) = master["spec"]["containers"], master["spec"]["initContainers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1" and variables["NCCL_DEBUG"] == "INFO"
    assert variables["NCCL_DEBUG_FILE"] == "/mnt/shared/nccl-sft-baseline.%h.%p.log"
    assert container["resources"]["limits"] == container["resources"]["requests"] == gate["resources"]["limits"]
    assert container["resources"]["limits"]["rdma/rdma_shared_device_eth"] == "1"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    annotations = master["metadata"]["annotations"]
    assert annotations["k8s.v1.cni.cncf.io/networks"] == "rdmashared-net"
    assert annotations["topoflight.io/NCCL_CROSS_NIC"] == "0: rails: two NICs"
    assert {each["name"] for each in gate["env"]} == {"NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_CROSS_NIC"}
    assert any("2048 MiB is the manifest's and stays; needed: 8192Mi" in note for note in notes)
    assert wrap(made, of_all(made)) == (made, [note for note in notes if "failed gate" not in note])


def test_what_is_set_stays_and_is_named() -> None:
    theirs = SFT.replace(
        'name: HF_TOKEN\n                  value: ""', "name: NCCL_IB_HCA\n                  value: mlx5_9"
    )
    theirs = theirs.replace("torchrun /etc", "NCCL_CROSS_NIC=2 torchrun /etc")
    made, notes = wrap(theirs, of_all(theirs))
    said = " ".join(notes)
    assert "value: mlx5_9" in made and "=mlx5_0,mlx5_1" not in made
    assert "NCCL_IB_HCA=mlx5_9 is the manifest's and stays; recommended is =mlx5_0,mlx5_1 (rails: two NICs)" in said
    assert "NCCL_CROSS_NIC is set in the command and stays" in said


def test_variables_of_a_config_map_that_is_not_here_are_not_set_over() -> None:
    """A container's `env` comes before its `envFrom`."""
    theirs = SFT.replace(
        "              image:", "              envFrom: [{configMapRef: {name: nccl}}]\n              image:"
    )
    made, notes = wrap(theirs, of_all(theirs))
    assert "NCCL_IB_HCA" not in made and any("what ConfigMap nccl sets is unknown" in note for note in notes)
    known = theirs + "---\nkind: ConfigMap\nmetadata: {name: nccl}\ndata: {NCCL_IB_HCA: mlx5_9}\n"
    made, notes = wrap(known, of_all(known))
    assert "name: NCCL_IB_HCA" not in made and "name: NCCL_CROSS_NIC" in made
    assert any("NCCL_IB_HCA is set by ConfigMap nccl and stays" in note for note in notes)


def test_a_train_job_has_its_variables_and_its_runtime_the_pod() -> None:
    text = yaml.safe_dump_all(TRAINJOB, sort_keys=False)
    runtime, job = documents(wrap(text, of_all(text))[0])
    trainer = job["spec"]["trainer"]
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert {each["name"] for each in trainer["env"]} >= {"NCCL_IB_HCA", "NCCL_DEBUG"}
    assert trainer["resourcesPerNode"] == {"limits": {"rdma/rdma_shared_device_eth": "1"}}
    assert "env" not in pod["spec"]["containers"][0] and "resources" not in pod["spec"]["containers"][0]
    assert pod["spec"]["initContainers"][0]["resources"] == trainer["resourcesPerNode"]
    alone = yaml.safe_dump(TRAINJOB[1])
    made, notes = wrap(alone, of_all(alone))
    assert "initContainers" not in made and any("are its runtime's: not added" in note for note in notes)


@pytest.mark.parametrize(
    "document",
    [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"},
         "spec": {"parallelism": 2, "template": {"spec": POD}}},
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "a"},
         "spec": {"replicatedJobs": [{"name": "w", "replicas": 2, "template": {"spec": {"template": {"spec": POD}}}}]}},
    ],
    ids=["Job", "JobSet"],
)  # fmt: skip
@pytest.mark.parametrize("flow", [False, True])
def test_other_kinds_in_block_and_in_brackets(document: dict[str, Any], flow: bool) -> None:
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=flow).rstrip("\n")
    (job,) = jobs_in(documents(text))
    assert job.nodes == 2
    made, notes = wrap(text, of_all(text))
    assert made.count("preflight") >= 2 and any("topoflight evidence -" in note for note in notes)
    assert wrap(made, of_all(made))[0] == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: Deployment\nmetadata: {name: a}\n", "holds Deployment"),
        ("[]", "no Kubernetes object"),
        ("kind: Job\nmetadata: {name: a}\nspec: {template: {spec: {containers: []}}}", "which container trains"),
        ("kind: PyTorchJob\nmetadata: {name: a}\nspec: {pytorchReplicaSpecs: 3}", "is not built as a PyTorchJob is"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_with_its_reason(text: str, says: str) -> None:
    with pytest.raises(WrapError, match=says):
        jobs_in(documents(text))


def test_an_edit_adds_and_never_changes() -> None:
    text = "a: 1   # one\nb:\n- x\nc: |\n  text\n\nd: &d {e: [1]}\nf: *d\ng:\n"
    found = documents(text)
    found[0]["b"].append({"y": [2]})
    found[0]["d"]["e"].append("it's")
    found[0]["g"] = {"h": None}
    found[0]["i"] = "new"
    made = extended(text, found)
    assert documents(made) == found and made.startswith("a: 1   # one\nb:\n- x\n- y:\n")
    assert 'd: &d {e: [1, "it\'s"]}\nf: *d\ng:\n  h: null\ni: new\n' in made
    assert extended(text.replace("\n", "\r\n"), found).count("\n") == extended(text.replace("\n", "\r\n"), found).count(
        "\r\n"
    )
    for changed in ({**found[0], "a": 2}, {"b": ["x"]}):
        with pytest.raises(EditError):
            extended(text, [changed])


FILES = {"zero.json": '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
         "fsdp.yaml": "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\nmixed_precision: bf16\n"
                      "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n",
         "sft.yaml": "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 4\n"}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "nodes", "ranks", "settings"),
    [
        (["bash", "-c", "set -e; cd /work && NCCL_DEBUG=INFO torchrun --nnodes=1:4 --nproc-per-node 8 sft.py "
          "--config sft.yaml --packing --no-bf16 | tee log"], 4, 8,
         {"model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 4, "packing": True, "bf16": False}),
        (["accelerate", "launch", "--config_file=fsdp.yaml", "train.py", "--learning_rate", "1e-4"], 2, 8,
         {"fsdp": True, "bf16": True, "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}}),
        (["deepspeed", "--num_gpus=8", "train.py", "--deepspeed", "zero.json", "--lora_target_modules", "q", "v"],
         None, 8,
         {"lora_target_modules": ["q", "v"],
          "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}}),
        (["python", "-m", "torch.distributed.run", "-m", "my.trainer", "--use_peft"], None, None, {"use_peft": True}),
        (["trl", "sft", "--model_name_or_path", "m"], None, None, {"model_name_or_path": "m"}),
    ],
)  # fmt: skip
def test_a_command_says_what_it_trains(
    words: list[str], nodes: int | None, ranks: int | None, settings: dict[str, Any]
) -> None:
    said = read_command(words, FILES.get)
    assert (said.nodes, said.ranks_per_node, said.unknown) == (nodes, ranks, [])
    assert settings.items() <= said.settings.items()


def test_what_a_command_does_not_say_is_unknown_or_the_trainers_default_by_name() -> None:
    said = read_command(["torchrun", "sft.py", "--config", "gone.yaml", "--my_own", "3"], FILES.get)
    assert said.unknown == ["gone.yaml: what the file says, which is not here"]
    assert "my_own" in said.notes[0] and "my_own" not in said.settings
    assert read_command(["bash", "-c", "./start.sh"], FILES.get).unknown
    made = as_run(said)
    assert made["fsdp"] is False and "per_device_train_batch_size=8" in said.notes[-1]


MIB = 2**20


def gpu_job(**resources: Any) -> str:
    container = {"name": "preflight", "command": ["torchrun", "t.py"], "resources": resources}
    pod = {"metadata": {}, "spec": {"containers": [container]}}
    return yaml.safe_dump({"kind": "Job", "metadata": {"name": "j"}, "spec": {"parallelism": 2, "template": pod}})


@pytest.mark.parametrize("kind", ["limits", "requests"])
@pytest.mark.parametrize("asked", [{}, {"cpu": "4"}, {"memory": "64Gi"}])
def test_huge_pages_come_with_cpu_or_memory_in_every_container(asked: dict[str, str], kind: str) -> None:
    """Kubernetes validation: "HugePages require cpu or memory"; names of containers are unique with init containers."""
    resources = {"limits": {"nvidia.com/gpu": 8}, "requests": {"nvidia.com/gpu": 8}}
    resources[kind] = {**resources[kind], **asked}
    text = gpu_job(**resources)
    pages = PodNeed(name="resource", value="hugepages-2Mi: 5120Mi", reason=WHY)
    made, notes = wrap(text, of_all(text, Additions(needs=(pages,), gate_image="x")))
    body = yaml.safe_load(made)["spec"]["template"]["spec"]
    containers = [*body["containers"], *body["initContainers"]]
    assert len({each["name"] for each in containers}) == 2
    for each in containers:
        limits, requests = each["resources"]["limits"], each["resources"].get("requests", {})
        assert limits["hugepages-2Mi"] == "5120Mi" and {"cpu", "memory"} & {*limits, *requests}
    assert any("requests cpu: 8" in note for note in notes) == (not asked)


def test_shared_memory_stays_within_half_of_the_memory_limit() -> None:
    text = gpu_job(limits={"nvidia.com/gpu": 1, "memory": "8Gi"})
    shm = PodNeed(name="shm_bytes", value=str(8192 * MIB), reason=WHY)
    made, notes = wrap(text, of_all(text, Additions(needs=(shm,))))
    (volume,) = yaml.safe_load(made)["spec"]["template"]["spec"]["volumes"]
    assert volume["emptyDir"]["sizeLimit"] == "4096Mi" and any("half of the memory limit" in note for note in notes)


def test_a_pod_without_an_rdma_device_is_told_of() -> None:
    text = gpu_job(limits={"nvidia.com/gpu": 8})
    memlock = PodNeed(name="memlock", value="unlimited", reason=WHY)
    _, notes = wrap(text, of_all(text, Additions(needs=(memlock,))))
    assert any("no RDMA device" in note for note in notes)
    _, notes = wrap(text, of_all(text, Additions(needs=(memlock,), resources={"rdma/hca": "1"})))
    assert not any("no RDMA device" in note for note in notes)


@pytest.mark.parametrize(
    ("resources", "alone"),
    [({}, True), ({"limits": {"google.com/tpu": 4}}, True), ({"limits": {"cpu": "4", "nvidia.com/gpu": 0}}, True),
     ({"limits": {"nvidia.com/gpu": 1}}, False), ({"limits": {"amd.com/gpu": 1}}, False),
     ({"limits": {"nvidia.com/mig-1g.5gb": 1}}, False), ({"limits": {"volcano.sh/vgpu-number": 1}}, False),
     ({"claims": [{"name": "gpu"}]}, False)],
)  # fmt: skip
def test_which_jobs_have_no_gpu(resources: dict[str, Any], alone: bool) -> None:
    (job,) = jobs_in(documents(gpu_job(**resources)))
    assert job.without_gpus is alone


def test_a_runtime_class_may_give_gpus_and_the_gate_gets_no_variable_made_of_others() -> None:
    env = [{"name": "NCCL_IB_HCA", "value": "$(HCA)"}, {"name": "NCCL_NET", "value": "IB"}]
    pod = {"runtimeClassName": "nvidia", "containers": [{"name": "main", "env": env}]}
    text = yaml.safe_dump({"kind": "Job", "metadata": {"name": "a"}, "spec": {"template": {"spec": pod}}})
    (job,) = jobs_in(documents(text))
    assert not job.without_gpus
    (gate,) = yaml.safe_load(wrap(text, of_all(text))[0])["spec"]["template"]["spec"]["initContainers"]
    assert {"NCCL_NET"} <= {each["name"] for each in gate["env"]} and "$(" not in str(gate["env"])

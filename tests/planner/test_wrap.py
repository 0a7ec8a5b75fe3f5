"""The user's own manifests, wrapped: what is added stands as lines of its own, and all else stays where it was."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rigs.tables import each_row

from contracts.job_config import parse_config
from planner.kubernetes.wrap import Additions, WrapError, jobs_in, others_in, wrap
from planner.kubernetes.yaml_edit import EditError, documents, extended
from planner.nccl_env.texts import PodNeed, Reason, Setting
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
SFT = Path(__file__).with_name("wrap_sft.yaml").read_text(encoding="utf-8")
POD = {"containers": [{"name": "main", "command": ["python", "train.py"]}]}
TRAINJOB: list[dict[str, Any]] = [
    {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime", "metadata": {"name": "torch"},
     "spec": {"mlPolicy": {"torch": {}}, "template": {"spec": {"replicatedJobs": [
         {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [{"name": "node"}]}}}}}]}}}},
    {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "sft"},
     "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "torch"},
              "trainer": {"numNodes": 2, "numProcPerNode": 4, "command": ["torchrun", "sft.py"]}}},
]  # fmt: skip


def of_all(text: str, added: Additions = ADDED) -> list[Additions]:
    return [added for _ in jobs_in(documents(text))]


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
    assert {each["name"] for each in gate["env"]} == {"NODE_NAME", "NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_CROSS_NIC"}
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
    assert "resourcesPerNode" not in made and any("replaces all resources of the runtime" in note for note in notes)


EIGHT = {"nvidia.com/gpu": 8, "memory": "8Gi"}
RDMA = {"rdma/ib": "8"}


@each_row(
    ("kind", "of_runtime", "of_job", "jobs", "of_gate", "limits", "shm", "note"),
    [
        # a TrainJob's own resources replace its runtime's, and half of its memory is what /dev/shm may have
        ("TrainingRuntime", {}, EIGHT, 1, {**EIGHT, **RDMA}, {**EIGHT, **RDMA}, "4096Mi",
         "a TrainJob of this runtime that asks for less"),
        ("TrainingRuntime", {"memory": "64Gi"}, {"memory": "4Gi"}, 1, {"memory": "4Gi", **RDMA},
         {"memory": "4Gi", **RDMA}, "2048Mi", "half of the memory limit"),
        # where it has none, what is added must not replace those of the runtime
        ("TrainingRuntime", EIGHT, None, 1, {**EIGHT, **RDMA}, {**EIGHT, **RDMA}, "4096Mi",
         "the gate requests nvidia.com/gpu: 8"),
        # a runtime of other jobs too: its gate asks for nothing of one job
        ("ClusterTrainingRuntime", {}, EIGHT, 1, None, {**EIGHT, **RDMA}, "4096Mi",
         "not judge nvidia.com/gpu, rdma/ib of TrainJob/sft"),
        ("ClusterTrainingRuntime", {"nvidia.com/gpu": 1}, {"nvidia.com/gpu": 8}, 1, {"nvidia.com/gpu": 1},
         {"nvidia.com/gpu": 8, **RDMA}, "8192Mi", "not judge rdma/ib of TrainJob/sft"),
        ("TrainingRuntime", {}, EIGHT, 2, None, {**EIGHT, **RDMA}, "4096Mi", "other TrainJobs use this runtime too"),
    ],
)  # fmt: skip
def test_a_runtime_gets_of_one_train_job_what_no_other_lacks(
    kind: str, of_runtime: dict[str, Any], of_job: dict[str, Any] | None, jobs: int, of_gate: dict[str, Any] | None,
    limits: dict[str, Any], shm: str, note: str,
) -> None:  # fmt: skip
    """An init container's request counts for every pod of the runtime."""
    runtime, job = copy.deepcopy(TRAINJOB)
    runtime["kind"] = job["spec"]["runtimeRef"]["kind"] = kind
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    node["template"]["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": of_runtime}
    if of_job is not None:
        job["spec"]["trainer"]["resourcesPerNode"] = {"limits": of_job}
    others = [{**job, "metadata": {"name": f"other-{n}"}} for n in range(1, jobs)]
    text = "---\n".join(yaml.safe_dump(each, sort_keys=False) for each in (runtime, job, *others))
    added = replace(ADDED, needs=ADDED.needs[:1], resources=RDMA)
    made, notes = wrap(text, of_all(text, added))
    runtime, job, *_ = documents(made)
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    body = node["template"]["spec"]["template"]["spec"]
    assert ((body["initContainers"][0].get("resources") or {}).get("limits") or None) == of_gate
    assert ("NCCL_IB_HCA" in str(body["initContainers"])) is (kind == "TrainingRuntime" and jobs == 1)
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"] == limits
    assert body["volumes"][0]["emptyDir"]["sizeLimit"] == shm
    assert any(note in each for each in notes), notes


@each_row(
    "document",
    [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"},
         "spec": {"parallelism": 2, "template": {"spec": POD}}},
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "a"},
         "spec": {"replicatedJobs": [{"name": "w", "replicas": 2, "template": {"spec": {"template": {"spec": POD}}}}]}},
    ],
    ids=["Job", "JobSet"],
)  # fmt: skip
@each_row("flow", [False, True])
def test_other_kinds_in_block_and_in_brackets(document: dict[str, Any], flow: bool) -> None:
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=flow).rstrip("\n")
    (job,) = jobs_in(documents(text))
    assert job.nodes == 2
    made, notes = wrap(text, of_all(text))
    assert made.count("preflight") >= 2 and any("topoflight evidence -" in note for note in notes)
    assert wrap(made, of_all(made))[0] == made


@each_row(
    ("text", "says"),
    [
        ("kind: Deployment\nmetadata: {name: a}\n", "holds Deployment.*by hand: topoflight recommend"),
        ("kind: MPIJob\nmetadata: {name: a}\n", "holds MPIJob.*only what -x names"),
        ("kind: RayJob\nmetadata: {name: a}\n", "holds RayJob.*env_vars"),
        ("[]", "no Kubernetes object"),
        ("kind: Job\nmetadata: {name: a}\nspec: {template: {spec: {containers: []}}}", "which container trains"),
        ("kind: PyTorchJob\nmetadata: {name: a}\nspec: {pytorchReplicaSpecs: 3}", "is not built as a PyTorchJob is"),
        ("kind: JobSet\nmetadata: {name: a}\nspec:\n  # TODO\n", "JobSet/a: replicatedJobs is missing or empty"),
        ("kind: JobSet\nmetadata: {name: a}\nspec: {replicatedJobs: []}", "replicatedJobs is missing or empty"),
        ("kind: JobSet\nmetadata: {name: a}\nspec: none", "is not built as a JobSet is"),
        ("kind: Job\nmetadata: {name: a}\n", "Job/a: template is missing or empty"),
        ("kind: PyTorchJob\nmetadata: {name: a}\nspec: {}", "pytorchReplicaSpecs is missing or empty"),
        ("kind: TrainJob\nmetadata: {name: a}\nspec:\n", "TrainJob/a: runtimeRef is missing or empty"),
        ("kind: TrainingRuntime\nmetadata: {name: a}\nspec: {template: {spec: {}}}", "spec is missing or empty"),
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


@each_row(
    ("text", "end"),
    [
        ("a:\n- x\nb: |\n  sh\n  end", "b: |-\n  sh\n  end\nnew: 1\n"),
        ("a:\n- x\nb: &b !!str >2\n    sh", "b: &b !!str >-2\n    sh\nnew: 1\n"),
        ("a:\n- x\nb: |+\n  end", "b: |-\n  end\nnew: 1\n"),
        ("a:\n- x\nb: |-\n  end", "b: |-\n  end\nnew: 1\n"),
        ("a:\r\n- x\r\nb: |\r\n  end", "b: |-\r\n  end\r\nnew: 1\r\n"),
        ("a:\n- x\nb: |\n  end\n# note", "b: |\n  end\nnew: 1\n# note"),
        ("a:\n- x\nb: 'end'", "b: 'end'\nnew: 1\n"),
    ],
)
def test_a_text_without_a_newline_at_its_end_keeps_its_last_value(text: str, end: str) -> None:
    """Lines after a block scalar give it a newline, unless its header says that it has none."""
    (before,) = documents(text)
    made = extended(text, [{**before, "new": 1}])
    assert made.endswith(end) and documents(made) == [{**before, "new": 1}]
    assert extended(text, [{**before, "a": ["x", "y"]}]).endswith(text[text.index("b: ") :])


FILES = {"zero.json": '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
         "fsdp.yaml": "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\nmixed_precision: bf16\n"
                      "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n",
         "sft.yaml": "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 4\n"}  # fmt: skip


@each_row(
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


def test_accelerates_context_parallelism_is_the_layouts() -> None:
    """FSDP alone leaves all ranks to data parallelism, beside degrees that the file names."""
    config = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n" \
             "parallelism_config: {parallelism_config_cp_size: 2, parallelism_config_dp_shard_size: 1}\n"  # fmt: skip
    said = read_command(["accelerate", "launch", "--config_file", "cp.yaml", "train.py"], {"cp.yaml": config}.get)
    _, settings, _ = parse_config(as_run(said))
    assert {"cp": 2, "tp": 1, "dp_shard": 1, "sharding": "zero3"}.items() <= settings["layout"].items()


def test_what_a_command_does_not_say_is_unknown_or_the_trainers_default_by_name() -> None:
    said = read_command(["torchrun", "sft.py", "--config", "gone.yaml", "--my_own", "3"], FILES.get)
    assert said.unknown == ["gone.yaml: what the file says, which is not here"]
    assert "my_own" in said.notes[0] and "my_own" not in said.settings
    assert read_command(["bash", "-c", "./start.sh"], FILES.get).unknown
    trl = ["trl", "sft", "--model_name_or_path", "m"]
    assert as_run(read_command(trl, FILES.get))["dtype"] == "float32"
    assert as_run(read_command([*trl, "--dtype", "bfloat16"], FILES.get))["dtype"] == "bfloat16"
    assert as_run(read_command([*trl, "--use_peft"], FILES.get))["dtype"] == "float32"
    assert "dtype" not in as_run(read_command([*trl, "--use_peft", "--load_in_4bit"], FILES.get))
    made = as_run(said)
    assert "dtype" not in made
    assert made["fsdp"] is False and "per_device_train_batch_size=8" in said.notes[-1]


@each_row(
    ("line", "says"),
    [
        ("torchrun sft.py --use_peft_lora True --lr_decay 1", "use_peft_lora=True"),
        ("torchrun sft.py --model_max_length 2048", "model_max_length=2048"),
        ("torchrun sft.py --cutoff_len 2048 --eval_batch_size 4 --use_nested False", "cutoff_len=2048"),
        ("torchrun sft.py $COMMON --packing", "$COMMON"),
        ("torchrun recipes/dpo.py --packing", "recipes/dpo.py: what its loss takes"),
        ("trl grpo --packing", "grpo: what its loss takes"),
        ("accelerate launch --mixed_precision fp8 sft.py", "mixed_precision=fp8"),
        ("accelerate launch --use_megatron_lm sft.py", "distributed_type=None"),
    ],
)  # fmt: skip
def test_what_no_forecast_reads_and_memory_hangs_on_leaves_it_unknown(line: str, says: str) -> None:
    said = read_command(["sh", "-c", line], FILES.get)
    assert len(said.unknown) == 1 and says in said.unknown[0]


@each_row(
    "line",
    [
        "torchrun sft.py --dataset_name a/b#100 --max_length 2048 > log.txt 2>&1  # a night",
        "torchrun sft.py --max_length 2048 2>&1 | tee log.txt",
        "torchrun sft.py rows.yaml --dataset_name a/b",
        "torchrun sft.py --eval_batch_size 4 --max_length 2048",
    ],
)
def test_a_shells_words_and_a_file_by_its_place_are_read(line: str) -> None:
    said = read_command(["sh", "-c", line], {"rows.yaml": "max_length: 2048\n"}.get)
    assert said.unknown == [] and said.settings["max_length"] == 2048


def test_zero_on_the_command_line_goes_over_the_file() -> None:
    file = {"a.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n"}.get
    said = read_command(["accelerate", "launch", "--config_file", "a.yaml", "--zero_stage", "3", "sft.py"], file)
    assert said.settings["deepspeed"] == {"zero_optimization": {"stage": 3}}


MIB = 2**20


def gpu_job(**resources: Any) -> str:
    container = {"name": "preflight", "command": ["torchrun", "t.py"], "resources": resources}
    pod = {"metadata": {}, "spec": {"containers": [container]}}
    return yaml.safe_dump({"kind": "Job", "metadata": {"name": "j"}, "spec": {"parallelism": 2, "template": pod}})


@each_row("kind", ["limits", "requests"])
@each_row("asked", [{}, {"cpu": "4"}, {"memory": "64Gi"}])
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


def test_jobs_without_a_name_are_each_wrapped() -> None:
    """Of generateName, as batch jobs often are: no two share a name before they are made."""
    text = gpu_job(limits={"nvidia.com/gpu": 8}).replace("name: j", "generateName: sweep-")
    made, notes = wrap(f"{text}---\n{text}", [Additions(log=True), Additions(log=True)])
    assert made.count("NCCL_DEBUG") == made.count("kind: Job") * 2 == 4  # its reason, and itself
    assert any(note.startswith("Job/sweep: ") for note in notes)


def test_only_the_trainer_of_a_runtime_is_wrapped() -> None:
    """Trainer's runtimes name by a label which of their jobs fetch data or the model."""
    runtime = copy.deepcopy(TRAINJOB[0])
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    fetch = copy.deepcopy(node)
    for job, step in ((node, "trainer"), (fetch, "dataset-initializer")):
        job["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": step}}
    fetch["name"] = "dataset-initializer"
    runtime["spec"]["template"]["spec"]["replicatedJobs"].insert(0, fetch)
    text = yaml.safe_dump_all([runtime, TRAINJOB[1]])
    made = list(yaml.safe_load_all(wrap(text, of_all(text))[0]))
    first, second = made[0]["spec"]["template"]["spec"]["replicatedJobs"]
    assert first == fetch and second["template"]["spec"]["template"]["spec"]["initContainers"]


def test_a_job_in_an_app_wrapper_is_wrapped() -> None:
    job = yaml.safe_load(gpu_job(limits={"nvidia.com/gpu": 8}))
    outer = {"kind": "AppWrapper", "metadata": {"name": "a"}, "spec": {"components": [{"template": job}]}}
    text = yaml.safe_dump(outer)
    (component,) = yaml.safe_load(wrap(text, of_all(text))[0])["spec"]["components"]
    assert component["template"]["spec"]["template"]["spec"]["initContainers"]


def test_shared_memory_stays_within_half_of_the_memory_limit() -> None:
    text = gpu_job(limits={"nvidia.com/gpu": 1, "memory": "8Gi"})
    shm = PodNeed(name="shm_bytes", value=str(8192 * MIB), reason=WHY)
    made, notes = wrap(text, of_all(text, Additions(needs=(shm,))))
    (volume,) = yaml.safe_load(made)["spec"]["template"]["spec"]["volumes"]
    assert volume["emptyDir"]["sizeLimit"] == "4096Mi" and any("half of the memory limit" in note for note in notes)


def test_the_shared_memory_of_the_node_has_no_volume_over_it() -> None:
    job = yaml.safe_load(gpu_job(limits={"nvidia.com/gpu": 1}))
    job["spec"]["template"]["spec"]["hostIPC"] = True
    text = yaml.safe_dump(job)
    made, notes = wrap(text, of_all(text, replace(ADDED, needs=ADDED.needs[:1])))
    assert "emptyDir" not in made and "/dev/shm" not in made and "topoflight.io/shm" not in made
    assert [note for note in notes if "hostIPC is set" in note and "8192Mi" in note and WHY.rule not in note]


def test_a_pod_without_an_rdma_device_is_told_of() -> None:
    text = gpu_job(limits={"nvidia.com/gpu": 8})
    memlock = PodNeed(name="memlock", value="unlimited", reason=WHY)
    _, notes = wrap(text, of_all(text, Additions(needs=(memlock,))))
    assert any("no RDMA device" in note for note in notes)
    _, notes = wrap(text, of_all(text, Additions(needs=(memlock,), resources={"rdma/hca": "1"})))
    assert not any("no RDMA device" in note for note in notes)


@each_row(
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


def pods(*containers: dict[str, Any], **body: Any) -> dict[str, Any]:
    return {"spec": {"containers": list(containers), **body}}


GPUS = {"resources": {"limits": {"nvidia.com/gpu": 8}}}


def test_volcanos_job_has_tasks_and_other_kinds_beside_a_job_are_named() -> None:
    worker = pods({"name": "x", "command": ["sshd", "-D"], **GPUS})
    tasks = [{"name": "d", "template": pods({"name": "d"})}, {"name": "w", "replicas": 3, "template": worker}]
    volcano = {"kind": "Job", "metadata": {"name": "v"}, "spec": {"tasks": tasks}}
    other = {"kind": "MPIJob", "metadata": {"name": "m"}, "spec": {"mpiReplicaSpecs": {}}}
    bare = {"kind": "Pod", "metadata": {"name": "p"}, **pods({"name": "x", **GPUS})}
    quota = {"kind": "ResourceFlavor", "metadata": {"name": "f"}, "spec": {"nodeLabels": {"nvidia.com/gpu": "yes"}}}
    text = yaml.safe_dump_all([volcano, other, bare, quota])
    (job,) = jobs_in(documents(text))
    assert (job.nodes, job.ranks_per_node, job.parts[0].where) == (3, 8, "Job/v w")
    made, _ = wrap(text, of_all(text))
    assert made.count("name: preflight") == 1 and wrap(made, of_all(made))[0] == made
    assert [line.split(":")[0] for line in others_in(documents(text))] == ["MPIJob/m", "Pod/p"]


def test_a_train_job_counts_by_its_runtimes_policy_where_it_says_nothing() -> None:
    jobs = [{"name": "node", "template": {"spec": {"template": pods({"name": "node"})}}}]
    policy = {"numNodes": 4, "torch": {"numProcPerNode": 2}}
    runtime = {"kind": "ClusterTrainingRuntime", "metadata": {"name": "torch"},
               "spec": {"mlPolicy": policy, "template": {"spec": {"replicatedJobs": jobs}}}}  # fmt: skip
    train = {"kind": "TrainJob", "metadata": {"name": "a"}, "spec": {"runtimeRef": {"name": "torch"}}}
    (job,) = jobs_in([train, runtime])
    assert (job.kind, job.nodes, job.ranks_per_node) == ("TrainJob", 4, 2) and len(job.parts) == 2
    assert jobs_in([train])[0].nodes is None  # its runtime, which is elsewhere, says


def test_pods_on_their_nodes_network_get_no_name_of_a_pods_own() -> None:
    spec = {"template": pods({"name": "x", **GPUS}, hostNetwork=True)}
    text = yaml.safe_dump({"kind": "Job", "metadata": {"name": "a"}, "spec": spec})
    made, notes = wrap(text, of_all(text))
    assert "NCCL_IB_HCA" not in made and "rdmashared-net" not in made and "NCCL_CROSS_NIC" in made
    assert any("NCCL_IB_HCA==mlx5_0,mlx5_1 is not added: hostNetwork" in note for note in notes)


def test_a_count_that_is_missing_is_said() -> None:
    text = gpu_job(limits={"nvidia.com/gpu": None})
    assert any("nvidia.com/gpu has no number" in note for note in wrap(text, of_all(text, Additions()))[1])

"""Exports for the fine-tune job that ships: its YAML, the torchrun line, and the environment in three shapes.

Surface: contracts.job_config (names of the YAML), torchrun's options, Kubernetes' EnvVar and ResourceRequirements.
"""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import yaml

from contracts.layout import Layout
from planner.exports.frameworks import Request, refuse
from planner.forecast.models import hub_id
from planner.forecast.stacks import TOPOFLIGHT
from planner.rules import Question, engine_runs, method_runs

_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Layout) if f.default is not dataclasses.MISSING}
# Said by names of their own in the job's YAML.
_NAMED = {"micro_batch", "gradient_accumulation", "fused_cross_entropy", "compile"}


def _check(request: Request) -> None:
    from planner.forecast.links import Links, Speed  # only to ask the rules, which do not look at the links

    speed = Speed(bytes_per_second=1.0, how="assumed", link="")
    links = Links(ranks_per_node=request.ranks_per_node, nodes=request.nodes, island_size=request.ranks_per_node,
                  island=speed, node=speed, network=None)  # fmt: skip
    question = Question(model=request.model, train=request.train, links=links, stack=TOPOFLIGHT, has_gpu=request.on_gpu)
    broken = (engine_runs(question, request.layout), method_runs(question, request.layout))
    refuse("the fine-tune job", [reason for reason in broken if reason])


def finetune_yaml(request: Request) -> str:
    """The job's YAML; data set and output folder are the user's to set."""
    _check(request)
    layout, train = request.layout, request.train
    name = request.model.name
    data: dict[str, Any] = {"model_name_or_path": "random:tiny-llama" if name == "tiny-llama" else hub_id(name) or name}
    if train.method in ("lora", "qlora"):
        data |= {"use_peft": True, "lora_r": train.lora_rank, "lora_target_modules": list(train.lora_targets)}
        if train.saved_modules:
            data["lora_modules_to_save"] = list(train.saved_modules)
    if train.method == "qlora":
        data["load_in_4bit"] = True
    data |= {"max_length": train.sequence_length, "packing": train.packing}
    if train.steps is not None:
        data["max_steps"] = train.steps
    data |= {
        "per_device_train_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.gradient_accumulation,
        "attn_implementation": {"flash": "flash_attention_2"}.get(train.attention, train.attention),
        "fused_cross_entropy": layout.fused_cross_entropy,
        "compile": layout.compile,
    }
    values = dataclasses.asdict(layout)
    changed = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if key not in _NAMED and key != "world_size" and value != _DEFAULTS.get(key)
    }
    changed |= {"precision": layout.precision, "sharding": layout.sharding, "dp_shard": layout.dp_shard}
    data["layout"] = changed
    return yaml.safe_dump(data, sort_keys=False)


def torchrun_line(request: Request) -> str:
    """The command; with several nodes run it on each, MASTER_ADDR naming the first."""
    words = ["torchrun", f"--nproc-per-node={request.ranks_per_node}", f"--nnodes={request.nodes}"]
    if request.nodes > 1:
        tail = '--rdzv-backend=c10d --rdzv-endpoint="${MASTER_ADDR}:${MASTER_PORT:-29500}"'
    else:
        tail = "--standalone"
    return f"{shlex.join(words)} {tail} -m finetune.train --config finetune.yaml\n"


def env_file(request: Request) -> str:
    """For --env-file and systemd's EnvironmentFile: no quoting, no comments."""
    return "".join(f"{s.name}={s.value}\n" for s in request.settings)


def shell_exports(request: Request) -> str:
    """For `source`."""
    lines = [f"# {s.reason.rule}\nexport {s.name}={shlex.quote(s.value)}\n" for s in request.settings]
    return "".join(lines) or "# nothing to set\n"


def pod_env(request: Request) -> str:
    """The container's part of a pod spec."""
    data: dict[str, Any] = {"env": [{"name": s.name, "value": s.value} for s in request.settings]}
    limits: dict[str, str] = {}
    if request.on_gpu:
        limits["nvidia.com/gpu"] = str(request.ranks_per_node)
    for need in request.needs:
        key, colon, value = need.value.rpartition(": ")
        if need.name == "resource" and colon and "*" not in key:  # a wildcard is the user's to name
            limits[key] = value
    if limits:
        data["resources"] = {"limits": limits}
    capabilities = [need.value for need in request.needs if need.name == "capability"]
    if capabilities:
        data["securityContext"] = {"capabilities": {"add": capabilities}}
    shm = [need.value for need in request.needs if need.name == "shm_bytes"]
    if shm:
        data["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - a mount point, not a temp file
    return yaml.safe_dump(data, sort_keys=False)

"""Compare the layout that runs with the layout that was asked for.

Surface: DTensor placements and meshes, module classes, process groups. The observed layout is read from these objects
only, so that a library that silently does something else is found out.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from contracts.job_config import EndedError
from contracts.layout import Layout
from contracts.run_record import EffectiveLayout, RunRecord
from finetune import channels
from finetune.parallel import COLUMN, ROW, SCHEDULES, Engine


class MismatchError(EndedError):
    """What runs is not what was asked for."""

    code, status = 76, "mismatch"  # EX_PROTOCOL


def observe(engine: Engine) -> EffectiveLayout:
    """Return the effective layout of this rank."""
    layers = [layer for chunk in engine.chunks for layer in chunk.layers]
    return EffectiveLayout(
        **observe_modules(engine.modules, engine.named_parameters(), engine.device),
        pp=dist.get_world_size(engine.pipeline) if engine.pipeline is not None else 1,
        schedule=type(engine.schedule).__name__ if engine.schedule is not None else None,
        stage_layers=[len(chunk.layers) for chunk in engine.chunks],
        precision=_observe_precision(engine),
        checkpointed_layers=sum("forward" in vars(layer) for layer in layers),
    )


def observe_accelerate(trainer: Any) -> EffectiveLayout:
    """Return the layout that accelerate built, read from its objects."""
    model, accelerator = trainer.model_wrapped, trainer.accelerator
    layers = trainer.model.config.get_text_config().num_hidden_layers  # Gemma 3 also has an image model
    cp = accelerator.parallelism_config.cp_size if accelerator.parallelism_config else 1
    recomputes = trainer.model.is_gradient_checkpointing or (
        trainer.is_fsdp_enabled and accelerator.state.fsdp_plugin.activation_checkpointing
    )
    return EffectiveLayout(
        **observe_modules([model], dict(model.named_parameters()), trainer.device, cp),
        precision={"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        pp=1, stage_layers=[layers], checkpointed_layers=layers if recomputes else 0,
    )  # fmt: skip


def observe_modules(
    roots: Sequence[nn.Module], parameters: Mapping[str, torch.Tensor], device: torch.device, cp: int = 1
) -> dict[str, Any]:
    """Return what wrappers and placements show, as members of EffectiveLayout; `cp` ranks share a sequence."""
    degrees = {"dp_replicate": 1, "dp_shard": 1, "tp": 1}
    placements: Counter[str] = Counter()
    whole_bytes = local_bytes = unsharded = projections = split = 0
    for name, p in parameters.items():
        local = p.to_local() if isinstance(p, DTensor) else p
        whole_bytes += p.numel() * p.element_size()
        local_bytes += local.numel() * local.element_size()
        axes = {}
        if isinstance(p, DTensor):  # accelerate's mesh of FSDP alone has no names
            axes = dict(zip(p.device_mesh.mesh_dim_names or ("dp_shard",), p.placements, strict=False))
        placements[" ".join(f"{axis}:{placed}" for axis, placed in axes.items()) or "plain"] += 1
        for number, (axis, placed) in enumerate(axes.items()):
            size = p.device_mesh.size(number)
            if axis == "dp_shard_cp":
                axis, size = "dp_shard", size // cp
            if placed.is_shard() or "Shard" in type(placed).__name__ or axis == "dp_replicate":
                degrees[axis] = max(degrees[axis], size)
        unsharded += not any("Shard" in type(axes.get(axis)).__name__ for axis in ("dp_shard", "dp_shard_cp"))
        if re.search(rf"\.({'|'.join(COLUMN + ROW)})(\.base_layer)?\.weight$", name):
            projections, split = projections + 1, split + ("tp" in axes)
    replicas = [root for root in roots if isinstance(root, DistributedDataParallel)]
    if replicas:
        degrees["dp_replicate"] = dist.get_world_size(replicas[0].process_group)
    kinds = {"FSDP" if isinstance(root, FSDPModule) else "DDP" if root in replicas else "none" for root in roots}
    backend = str(dist.group.WORLD._get_backend(device).name())
    return {
        **degrees, "cp": cp, "world_size": dist.get_world_size(),
        "wrapper": "+".join(sorted(kinds)), "device": str(device), "backend": backend,
        "reshard_after_forward": _reshards(roots), "placements": dict(placements), "unsharded_parameters": unsharded,
        "split_projections": [split, projections], "parameter_bytes": whole_bytes,
        "local_parameter_bytes": local_bytes,
    }  # fmt: skip


def _observe_precision(engine: Engine) -> str:
    kinds = set()
    for module, chunk in zip(engine.modules, engine.chunks, strict=True):
        kind = chunk.autocast
        if isinstance(module, FSDPModule):
            kind = module._get_fsdp_state()._mp_policy.param_dtype
        kinds.add({None: "fp32", torch.bfloat16: "bf16"}.get(kind, str(kind)))
    return "+".join(sorted(kinds))


def _reshards(roots: Sequence[nn.Module]) -> bool | None:
    """Whether layers release gathered weights between forward and backward pass; None if none are sharded."""
    inner = [one for root in roots for one in root.modules() if isinstance(one, FSDPModule) and one is not root]
    groups = [group for module in inner for group in module._get_fsdp_state()._fsdp_param_groups]
    return all(group._reshard_after_forward for group in groups) if groups else None


def compare(requested: Layout, actual: EffectiveLayout, environment: Mapping[str, str]) -> list[str]:
    """Return each difference between what was asked for and what runs, in one sentence."""
    layers = sum(actual.stage_layers)
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(requested, name), getattr(actual, name))
        for name in ("world_size", "dp_replicate", "dp_shard", "tp", "cp", "pp", "precision")
    }
    pairs["checkpointed_layers"] = layers if requested.checkpointing != "none" else 0, actual.checkpointed_layers
    if requested.sharding != "ddp" and requested.dp_shard * requested.cp > 1:
        reshards = requested.reshard_after_forward and requested.sharding == "zero3"
        pairs["wrapper"] = "FSDP", actual.wrapper
        pairs["unsharded_parameters"] = 0, actual.unsharded_parameters
        pairs["reshard_after_forward"] = reshards, actual.reshard_after_forward
    if requested.tp > 1:
        split, projections = actual.split_projections
        pairs["projections split over tp"] = projections, split
    if requested.pp > 1:
        pairs["schedule"] = SCHEDULES[requested.schedule].__name__, actual.schedule
    pairs["backend"] = "nccl" if str(actual.device).startswith("cuda") else "gloo", actual.backend
    pairs |= {f"environment variable {name}": (value, os.environ.get(name)) for name, value in environment.items()}
    wrong = [f"{name}: asked {expected}, got {built}" for name, (expected, built) in pairs.items() if expected != built]
    if requested.pp > 1 and requested.stage_layers and not set(actual.stage_layers) <= set(requested.stage_layers):
        wrong.append(f"stage_layers: asked {requested.stage_layers}, this rank holds {actual.stage_layers}")
    return wrong


def check(record: RunRecord, requested: Layout, actual: EffectiveLayout) -> None:
    """Compare on every rank; raises on every rank where one differs. Records what this rank observed."""
    differences = _gather(compare(requested, actual, record.plan.environment))
    require_equal([f"rank {rank}: {text}" for rank, texts in enumerate(differences) for text in texts])
    record.layout.effective = actual


def require_equal(wrong: Sequence[str]) -> None:
    """Raise MismatchError with the first few differences in one line, if there are any."""
    if wrong:
        raise MismatchError("; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""))


def _gather(value: Any) -> list[Any]:
    """Return the value of each rank, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def record_transports(record: RunRecord) -> list[str]:
    """Record which transports the collectives take, and return the differences from the plan.

    All ranks call it together, after a step: NCCL connects a communicator at its first collective, from 2.22 on the
    channels of each algorithm at the first one that takes it, and a mesh has a communicator per axis. A collective at
    the start would connect the world's alone.
    """
    backend = record.layout.effective.backend if record.layout.effective else None
    if backend == "gloo":
        record.transports = channels.gloo_transports(_gather(channels.read_gloo_connections()))
    if backend != "nccl":
        return []
    host = os.environ.get("NCCL_HOSTID") or os.uname().nodename  # as NCCL's getHostHash, without the boot id
    hosts = len(set(_gather(host)))
    planned = channels.planned_channels(record.plan.transport)
    path = channels.log_path(os.environ.get("NCCL_DEBUG_FILE"), os.uname().nodename, os.getpid())
    ranks = _gather(channels.read_log(path, planned, hosts=hosts))
    record.nccl = channels.record(ranks, planned, hosts=hosts)
    record.transports = list(record.nccl.channels)
    return [f"rank {rank}: {text}" for rank, report in enumerate(ranks) for text in report.wrong]

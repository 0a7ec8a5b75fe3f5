"""Asked is got: reads from the built objects what layout really runs and compares it with the one asked for.

Surface: DTensor placements and meshes, module classes, process groups. Nothing here reads what was asked until
`compare`, so that a library that quietly does something else is found out.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from contracts.job_config import EndedError
from contracts.job_plan import JobPlan
from contracts.layout import Layout
from contracts.run_record import EffectiveLayout, NcclChannels, RunRecord
from finetune import channels
from finetune.parallel import COLUMN, ROW, Engine, shards


class MismatchError(EndedError):
    """What runs is not what was asked for."""

    code, status = 76, "mismatch"  # EX_PROTOCOL


def observe(engine: Engine) -> EffectiveLayout:
    """The effective layout of this rank."""
    named = engine.named_parameters()
    cp = max(chunk.across.size() if chunk.across is not None else 1 for chunk in engine.chunks)
    found = observe_parameters(named, cp)
    for module in engine.modules:
        if isinstance(module, DistributedDataParallel):
            found["dp_replicate"] = dist.get_world_size(module.process_group) // cp
    stages = engine.schedule
    return EffectiveLayout(
        **found,
        cp=cp,
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        pp=dist.get_world_size(engine.mesh.get_group("pp")) if stages is not None and engine.mesh else 1,
        schedule=type(stages).__name__ if stages is not None else None,
        stage_layers=[len(chunk.layers) for chunk in engine.chunks],
        wrapper="+".join(sorted({_wrapper(module) for module in engine.modules})),
        backend=backend_of(engine.device),
        precision=_precision(engine),
        reshard_after_forward=_reshards(engine),
        checkpointed_layers=sum("forward" in vars(layer) for c in engine.chunks for layer in c.layers),
        compiled_layers=sum(layer._compiled_call_impl is not None for c in engine.chunks for layer in c.layers),
        device=str(engine.device),
    )


def observe_parameters(named: Mapping[str, torch.Tensor], cp: int) -> dict[str, Any]:
    """What the placements of these parameters say, as members of EffectiveLayout; `cp` ranks share a sequence."""
    degrees = {"dp_replicate": 1, "dp_shard": 1, "tp": 1}
    spelled: Counter[str] = Counter()
    whole_bytes = local_bytes = 0
    unsharded = []
    for name, p in named.items():
        whole_bytes += p.numel() * p.element_size()
        local = p.to_local() if isinstance(p, DTensor) else p
        local_bytes += local.numel() * local.element_size()
        axes = {}
        if isinstance(p, DTensor):  # accelerate's mesh of FSDP alone has no names
            axes = dict(zip(p.device_mesh.mesh_dim_names or ("dp_shard",), p.placements, strict=False))
        spelled[" ".join(f"{axis}:{placed}" for axis, placed in axes.items()) or "plain"] += 1
        for number, (axis, placed) in enumerate(axes.items()):
            size = p.device_mesh.size(number)
            if axis == "dp_shard_cp":
                axis, size = "dp_shard", size // cp
            if placed.is_shard() or "Shard" in type(placed).__name__ or axis == "dp_replicate":
                degrees[axis] = max(degrees[axis], size)
        if not {"dp_shard", "dp_shard_cp"} & axes.keys() or local.numel() > _even_share(p):
            unsharded.append(name)
    return {
        **degrees, "placements": dict(spelled), "unsharded_parameters": len(unsharded),
        "split_projections": _split_projections(named), "parameter_bytes": whole_bytes,
        "local_parameter_bytes": local_bytes,
    }  # fmt: skip


def _even_share(p: DTensor) -> int:
    """Weights of a rank that has its share of each split side, rounded up to whole rows as DTensor cuts them."""
    sides = list(p.shape)
    for placed, size in zip(p.placements, p.device_mesh.shape, strict=True):
        if not placed.is_replicate():
            sides[placed.dim] = -(-sides[placed.dim] // size)
    return math.prod(sides)


def _wrapper(module: torch.nn.Module) -> str:
    if isinstance(module, FSDPModule):
        return "FSDP"
    return "DDP" if isinstance(module, DistributedDataParallel) else "none"


def backend_of(device: torch.device) -> str:
    """The library that this device's collectives go through."""
    if not dist.is_initialized():
        return "none"
    return str(dist.group.WORLD._get_backend(device).name())


def _precision(engine: Engine) -> str:
    kinds = set()
    for module, chunk in zip(engine.modules, engine.chunks, strict=True):
        kind = chunk.autocast
        if isinstance(module, FSDPModule):
            kind = module._get_fsdp_state()._mp_policy.param_dtype
        kinds.add({None: "fp32", torch.bfloat16: "bf16"}.get(kind, str(kind)))
    return "+".join(sorted(kinds))


def _reshards(engine: Engine) -> bool | None:
    """Whether layers give their gathered weights back between forward and backward; None where none are sharded."""
    states = [one._get_fsdp_state() for c in engine.chunks for one in c.layers if isinstance(one, FSDPModule)]
    # of one module several groups from torch 2.13 on, one or none before
    groups = [g for s in states for g in getattr(s, "_fsdp_param_groups", [getattr(s, "_fsdp_param_group", None)]) if g]
    return all(group._reshard_after_forward for group in groups) if groups else None


def _split_projections(named: Mapping[str, torch.Tensor]) -> list[int]:
    """How many projection weights are split over tp, of how many."""
    weights = [p for n, p in named.items() if re.search(rf"\.({'|'.join(COLUMN + ROW)})(\.base_layer)?\.weight$", n)]
    split = [p for p in weights if isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ())]
    return [len(split), len(weights)]


def compare(requested: Layout, got: EffectiveLayout, environment: Mapping[str, str]) -> list[str]:
    """Each difference between what was asked for and what runs, in one sentence."""
    layers, sharded, (split, projections) = sum(got.stage_layers), shards(requested) > 1, got.split_projections
    reshards = requested.reshard_after_forward and requested.sharding == "zero3"
    kinds = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
    expected = "nccl" if str(got.device).startswith("cuda") else "gloo"
    wrong = {
        **{f"{name}: asked {getattr(requested, name)}, got {getattr(got, name)}":
               getattr(requested, name) != getattr(got, name)
           for name in ("world_size", "dp_replicate", "dp_shard", "tp", "cp", "pp", "precision")},
        f"asked {requested.family}, got {'DDP' if got.wrapper == 'DDP' else 'no sharding'}":
            sharded and got.wrapper != "FSDP",
        f"{got.unsharded_parameters} parameters are not sharded over dp_shard":
            sharded and bool(got.unsharded_parameters),
        f"reshard_after_forward: asked {reshards}, got {got.reshard_after_forward}":
            sharded and got.reshard_after_forward != reshards,
        f"tp={requested.tp}: {split} of {projections} projections are split":
            requested.tp > 1 and split != projections,
        f"schedule: asked {requested.schedule}, got {got.schedule}":
            requested.pp > 1 and got.schedule != kinds[requested.schedule],
        f"stage_layers: asked {requested.stage_layers}, this rank holds {got.stage_layers}":
            requested.pp > 1 and bool(requested.stage_layers)
            and not set(got.stage_layers) <= set(requested.stage_layers),
        f"checkpointing: asked {requested.checkpointing}, {got.checkpointed_layers} layers do it":
            (got.checkpointed_layers == layers) != (requested.checkpointing != "none"),
        f"compile: asked {requested.compile}, {got.compiled_layers} layers are compiled":
            (got.compiled_layers == layers) != requested.compile,
        f"backend: {got.backend}, expected {expected} on {got.device}": got.backend not in (expected, "none"),
        **{f"environment: the plan sets {name}={value}, this process has {os.environ.get(name)!r}":
               os.environ.get(name) != value for name, value in environment.items()},
    }  # fmt: skip
    return [text for text, holds in wrong.items() if holds]


def check(requested: Layout, got: EffectiveLayout, environment: Mapping[str, str]) -> EffectiveLayout:
    """Compare on every rank; raises on every rank where one differs. Returns what this rank observed."""
    found = _everyone(compare(requested, got, environment))
    wrong = [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]
    if got.backend == "gloo":  # the ranks have just talked: their connections are up
        got.transports = channels.gloo_transports(_everyone(channels.read_gloo_connections()))
    if wrong:
        raise mismatch(wrong)
    return got


def mismatch(wrong: Sequence[str]) -> MismatchError:
    """The first few of them, in one line."""
    return MismatchError("; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""))


def _everyone(value: Any) -> list[Any]:
    """The value of each rank, by rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def record_transports(record: RunRecord, plan: JobPlan) -> list[str]:
    """Record which transports the collectives take, and return the differences from the plan.

    All ranks call it together.
    """
    effective = record.layout.effective
    record.transports = list(effective.transports) if effective else []
    if effective is None or effective.backend != "nccl":
        return []
    record.nccl, wrong = nccl_channels(plan.environment, plan.transport)
    record.transports += record.nccl.channels
    return wrong


def nccl_channels(environment: Mapping[str, str], transport: Mapping[str, Any]) -> tuple[NcclChannels, list[str]]:
    """What each rank's NCCL log says of its channels, for the record, and each difference from the plan.

    It is called after a step: NCCL connects a communicator at its first collective, from 2.22 on the channels of each
    algorithm at the first one that takes it, and a mesh has a communicator per axis. A collective at the start would
    connect the world's alone.
    """
    hosts = len(set(_everyone(channels.own_host())))
    plan = channels.planned_channels(environment, transport)
    path = channels.log_path(os.environ.get("NCCL_DEBUG_FILE"), os.uname().nodename, os.getpid())
    ranks = _everyone(channels.read_log(path, plan, hosts=hosts))
    wrong = [f"rank {rank}: {text}" for rank, seen in enumerate(ranks) for text in seen.wrong]
    return channels.record(ranks, plan, hosts=hosts), wrong

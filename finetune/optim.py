"""AdamW, its schedules, and a gradient norm that is right under every sharding.

Surface: `torch.optim.AdamW`; schedule shapes as transformers' `SchedulerType` names them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from contracts.job_config import JobConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: JobConfig) -> torch.optim.AdamW:
    """AdamW over what trains. Weights of one mesh form a group: torch does not mix them in one fused step."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        if p.requires_grad:
            groups.setdefault((_mesh(p), p.ndim >= 2), []).append(p)
    return torch.optim.AdamW(
        [{"params": ps, "weight_decay": config.weight_decay if matrix else 0.0} for (_, matrix), ps in groups.items()],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def learning_rate(config: JobConfig, step: int, steps: int) -> float:
    """The rate of the zero-based step."""
    warmup = round(config.warmup_steps * steps) if config.warmup_steps < 1 else round(config.warmup_steps)
    peak, kind = config.learning_rate, config.lr_scheduler_type
    if step < warmup and kind != "constant":
        return peak * (step + 1) / (warmup + 1)
    left = (step - warmup) / max(1, steps - warmup)
    if kind == "linear":
        return peak * max(0.0, 1 - left)
    if kind == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, left)))
    if kind == "inverse_sqrt":
        scale = warmup or 10_000  # transformers' timescale where there is no warm-up
        return peak * math.sqrt(scale / (step - warmup + scale))
    return peak


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, pipeline: dist.ProcessGroup | None) -> float:
    """Scale gradients to a global norm of at most `limit` (0: only measure); returns the norm.

    Norms of the local parts are summed over the mesh dimensions that split them, replicated ones count once, and
    pipeline ranks add theirs. On plain tensors: an operation on a DTensor costs its dispatch each time.
    """
    grads: list[torch.Tensor] = []
    groups: dict[Any, list[torch.Tensor]] = {}
    for p in parameters:
        if p.grad is None:
            continue
        if isinstance(p.grad, DTensor) and any(placed.is_partial() for placed in p.grad.placements):
            # norms under sequence parallelism see a part of the tokens each
            p.grad = p.grad.redistribute(placements=p.placements)
        grad = p.grad
        grads.append(grad)
        groups.setdefault(_mesh(grad), []).append(grad.to_local() if isinstance(grad, DTensor) else grad)
    device = grads[0].device if grads else torch.device("cpu")
    square = torch.zeros((), dtype=torch.float32, device=device)
    for where, local in groups.items():
        part = torch.stack([norm.float() for norm in torch._foreach_norm(local)]).square().sum()
        for dim, placed in enumerate(where[1] if where else ()):
            if not placed.is_replicate():
                dist.all_reduce(part, group=where[0].get_group(dim))
        square += part.to(device)
    if pipeline is not None:
        dist.all_reduce(square, group=pipeline)
    norm = float(square.sqrt())
    if limit and norm > limit:
        for local in groups.values():
            torch._foreach_mul_(local, limit / (norm + 1e-6))
    return norm


def _mesh(p: torch.Tensor) -> tuple[DeviceMesh, tuple[Any, ...]] | None:
    return (p.device_mesh, tuple(p.placements)) if isinstance(p, DTensor) else None

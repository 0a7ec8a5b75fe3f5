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

from finetune.config import JobConfig


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

    Sharded gradients are summed over their own mesh, replicated ones count once, and pipeline ranks add theirs.
    """
    grads: dict[Any, list[torch.Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            grads.setdefault(_mesh(p), []).append(p.grad)
    device = next((gs[0].device for gs in grads.values()), torch.device("cpu"))
    square = torch.zeros((), dtype=torch.float32, device=device)
    for gs in grads.values():
        norm = nn.utils.get_total_norm(gs)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        square += whole.to(device).float() ** 2
    if pipeline is not None:
        dist.all_reduce(square, group=pipeline)
    norm = float(square.sqrt())
    if limit and norm > limit:
        for gs in grads.values():
            for grad in gs:
                grad.mul_(limit / (norm + 1e-6))
    return norm


def _mesh(p: torch.Tensor) -> tuple[DeviceMesh, tuple[Any, ...]] | None:
    return (p.device_mesh, tuple(p.placements)) if isinstance(p, DTensor) else None

"""A training script as people write it: DDP or FSDP, nothing of Topoflight in it. `topoflight run` monitors it.

training.py KIND FAULT [CULPRIT]: what goes wrong, or only looks so, happens on one rank from step WHY_AT on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

KIND, FAULT = sys.argv[1:3]
CULPRIT = int(sys.argv[3]) if len(sys.argv) > 3 else 1
STEPS = int(os.environ.get("WHY_STEPS", "100000"))
AT = int(os.environ.get("WHY_AT", "200"))


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def prepare_data() -> None:
    busy(25)


def generate_samples() -> None:
    busy(30)


def push_to_hub() -> None:
    until = time.perf_counter() + 30
    while time.perf_counter() < until:
        with Path("/dev/zero").open("rb") as source:
            source.read(1 << 20)
        time.sleep(0.05)


def save() -> None:
    time.sleep(30)


def forward_backward(model: torch.nn.Module, rows: torch.Tensor, seconds: float) -> None:
    time.sleep(seconds)
    model(rows).square().mean().backward()


def happens(step: int, rank: int) -> None:
    if step != AT or rank != CULPRIT:
        return
    Path(os.environ["TOPOFLIGHT_RUN"], "happened").touch()
    if FAULT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "raises":
        raise ValueError("the loss is not a number\nin batch 7")
    if FAULT == "extra-call":
        dist.all_reduce(torch.ones(3))
    if FAULT == "hangs":
        time.sleep(600)
    {"generates": generate_samples, "uploads": push_to_hub, "saves": save}.get(FAULT, lambda: None)()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if FAULT == "prepares" and rank == 0:
        prepare_data()
    dist.barrier()
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    if KIND == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.ones(8, 64)
    for step in range(STEPS):
        happens(step, rank)
        late = FAULT == "straggler" and rank == CULPRIT and step >= AT
        forward_backward(model, rows, 0.15 if late else 0.03)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            dist.all_reduce(torch.ones(()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

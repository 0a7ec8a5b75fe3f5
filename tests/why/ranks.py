"""A training loop of gloo ranks in which one thing goes wrong: torchrun ... ranks.py FOLDER FAULT [RANK].

Each step loads rows, computes, reduces a gradient and gathers a number; now and then it evaluates and saves.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from collectives.bench import processes
from finetune import rank_monitor

FOLDER, FAULT, CULPRIT = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 2
STEPS = int(os.environ.get("WHY_STEPS", "100000"))
AT = int(os.environ.get("WHY_AT", "60"))  # the step at which it happens
WORK = 0.02  # seconds of a step's computing


class Rows(Dataset):  # type: ignore[type-arg]
    """Rows that cost nothing, or that come late."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if mine("loader-hangs") and index == AT:
            time.sleep(600)
        if mine("loader-slow"):
            time.sleep(3 * WORK)
        return torch.ones(8)


def mine(fault: str) -> bool:
    return fault == FAULT and dist.get_rank() == CULPRIT


def compute(seconds: float) -> None:
    time.sleep(seconds)


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def evaluate(seconds: float) -> None:
    compute(seconds)


def save_checkpoint(seconds: float) -> None:
    torch.save({"step": 1}, FOLDER / f"checkpoint-{dist.get_rank()}.pt")
    compute(seconds)


def step(number: int, rank: int, groups: dict[tuple[int, int], dist.ProcessGroup]) -> None:
    gradient, small = torch.ones(SIZE), torch.ones(4)
    if number == AT:
        one_off(number, rank, gradient, small)
    seconds = WORK
    if mine("compute-slow") or (FAULT == "all-slow" and number > AT):
        seconds = 4 * WORK
    if mine("spins"):
        spin(3 * WORK)
    if FAULT == "uneven-last-batch" and number == STEPS - 1 and rank == CULPRIT:
        seconds = 20 * WORK
    if mine("throttled"):
        spin(WORK)
    else:
        compute(seconds)
    if number == AT and mine("order"):
        dist.all_gather_into_tensor(torch.empty(4 * dist.get_world_size()), small)
        dist.all_reduce(gradient)
    else:
        dist.all_reduce(gradient)
        dist.all_gather_into_tensor(torch.empty(4 * dist.get_world_size()), small)
    if FAULT.startswith("link"):
        for pair, group in sorted(groups.items()):
            if rank in pair:
                dist.all_reduce(gradient, group=group)


def one_off(number: int, rank: int, gradient: torch.Tensor, small: torch.Tensor) -> None:
    """What happens once. Its file says so, since a rank that ends or stops here may not have written its counts."""
    if mine(FAULT) and not FAULT.startswith("none"):
        (FOLDER / "happened").touch()
    if mine("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if mine("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if mine("segfault"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if mine("raises"):
        raise RuntimeError("the loss is not a number")
    if mine("exits"):
        sys.exit(0)
    if mine("other-collective"):
        dist.broadcast(gradient, 0)
    if mine("other-size"):
        dist.all_reduce(torch.ones(SIZE // 2))
    if mine("other-dtype"):
        dist.all_reduce(torch.ones(SIZE, dtype=torch.float64))
    if mine("extra-collective"):
        dist.barrier()
    if mine("skips"):
        dist.all_gather_into_tensor(torch.empty(4 * dist.get_world_size()), small)
    if mine("computes-forever"):
        spin(600)
    if mine("sleeps-forever"):
        compute(600)
    if mine("reads-forever"):
        read_batch()
    if mine("killed-saving"):
        killer = threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGKILL))
        killer.start()
        save_checkpoint(30)
    if mine("long-checkpoint") or mine("save-outlasts"):
        save_checkpoint(30 if FAULT == "long-checkpoint" else 600)
    if mine("long-evaluation"):
        evaluate(30)
    if FAULT == "all-evaluate":
        evaluate(20)


def read_batch() -> None:
    """A pipe that nobody writes to, as a mount that does not answer."""
    read, _ = os.pipe()
    os.read(read, 1)


def compiled_first_step(rank: int) -> None:
    """One rank's compiler takes long: a real one, of a function that is large."""
    if mine("compile-outlasts") or mine("first-step-compile"):
        count = 400 if FAULT == "first-step-compile" else 100_000  # the timeout ends it

        def many(x: torch.Tensor) -> torch.Tensor:
            for i in range(count):
                x = torch.sin(x) + i * torch.cos(x)
            return x

        torch.compile(many, backend="eager" if os.environ.get("WHY_EAGER") else "inductor")(torch.ones(64))


SIZE = int(os.environ.get("WHY_SIZE", "4096"))


def main() -> None:
    if os.environ.get(processes.RUN_VARIABLE):  # of a launcher that may be killed
        processes.die_with_parent()
    rank_monitor.prepare()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(os.environ.get("WHY_TIMEOUT", "120"))))
    rank, world = dist.get_rank(), dist.get_world_size()
    watching = rank_monitor.start(FOLDER, interval_seconds=float(os.environ.get("WHY_LOOK", "0.2")))
    pairs = [(a, b) for a in range(world) for b in range(a + 1, world)] if FAULT.startswith("link") else []
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    loader = iter(DataLoader(Rows(), batch_size=None))
    compiled_first_step(rank)
    for number in range(STEPS):
        next(loader)
        step(number, rank, groups)  # type: ignore[arg-type]
        if number and number % 200 == 0 and rank == 0 and FAULT == "often-saves":
            save_checkpoint(1.0)
    watching.end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

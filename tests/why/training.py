"""A training script as people write it: DDP, FSDP or transformers' Trainer. `topoflight run` monitors it unchanged.

training.py KIND FAULT [CULPRIT]: what goes wrong, or only looks so, happens on one rank at step WHY_AT, or from it on.
"""

import contextlib
import ctypes
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

KIND, FAULT = sys.argv[1:3]
CULPRIT = int(sys.argv[3]) if len(sys.argv) > 3 else 1
STEPS = int(os.environ.get("WHY_STEPS", "100000"))
AT = int(os.environ.get("WHY_AT", "200"))
LONG = float(os.environ.get("WHY_LONG", "30"))  # seconds that harmless work takes
STEP = 0.03  # seconds of a step's work on a device
WIDTH = 64


def nap(seconds: float) -> None:
    """Sleep; time.sleep fails where faketime shifts the clock."""
    threading.Event().wait(seconds)


def is_culprit() -> bool:
    return int(os.environ.get("RANK", "0")) == CULPRIT


class Rows(Dataset):  # type: ignore[type-arg]
    """Rows that cost nothing, or that one rank's loader is slow with, fails in, or never returns."""

    def __len__(self) -> int:
        return STEPS * 8

    def __getitem__(self, index: int) -> torch.Tensor:
        step = index // 8
        if is_culprit() and index % 8 == 0:
            if FAULT == "loader-hangs" and step == AT:
                happened()
                nap(600)
            if FAULT == "loader-fails" and step == AT:
                happened()
                raise ValueError(f"row {index} is broken")
            if FAULT == "loader-slow" and step >= AT:
                nap(0.15)
        return torch.ones(WIDTH)


def happened() -> None:
    Path(os.environ["TOPOFLIGHT_RUN"], "happened").touch()


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def prepare_data() -> None:
    busy(25)


def generate_samples() -> None:
    busy(LONG)


def evaluate() -> None:
    busy(LONG)


def push_to_hub() -> None:
    until = time.perf_counter() + LONG
    while time.perf_counter() < until:
        with Path("/dev/zero").open("rb") as source:
            source.read(1 << 20)
        nap(0.05)


def save() -> None:
    nap(LONG)


class Shard:
    """A part of a state that takes long to pickle, in one call that holds Python's lock."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[int]]:
        ctypes.PyDLL(None).sleep(round(LONG))  # unlike CDLL, a PyDLL keeps the lock
        return int, (1,)


def write_state() -> None:
    pickle.dumps(Shard())


def hang() -> None:
    nap(600)


def wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def read_pipe() -> None:
    os.read(os.pipe()[0], 1)


def fail() -> None:
    raise ValueError("the loss is not a number\nin batch 7")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def save_and_die() -> None:
    threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    save()


# What one rank does once, at step AT.
ONCE: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exits": lambda: sys.exit(0), "raises": fail, "out-of-memory": run_out_of_memory, "killed-saving": save_and_die,
    "extra-call": lambda: dist.all_reduce(torch.ones(3)), "other-size": lambda: dist.all_reduce(torch.ones(7)),
    "other-call": lambda: dist.broadcast(torch.ones(1), 0), "extra-barrier": dist.barrier,
    "hangs": hang, "deadlock": wait_for_lock, "reads-pipe": read_pipe, "computes-forever": lambda: busy(600),
    "generates": generate_samples, "uploads": push_to_hub, "saves": save, "evaluates": evaluate,
    "pickles": write_state,
}  # fmt: skip


def happens(step: int, rank: int) -> None:
    if step == AT and FAULT == "all-evaluate":
        evaluate()
    if rank == CULPRIT and step > 0 and step % 50 == 0 and FAULT == "saves-often":
        nap(1.5)
    if step == AT and rank == CULPRIT and FAULT in (*ONCE, "straggler", "loader-slow", "all-slow"):
        happened()
        ONCE.get(FAULT, float)()


def work_of(step: int, rank: int) -> float:
    """Seconds of a step's work on the device."""
    mine = rank == CULPRIT
    if (FAULT == "straggler" and mine and step >= AT) or (FAULT == "late-from-start" and mine):
        return 5 * STEP
    if FAULT == "all-slow" and step >= AT:
        return 5 * STEP
    if FAULT == "long-last-batch" and mine and step == STEPS - 1:
        return 3.0
    if FAULT == "uneven-steps":
        return random.expovariate(1 / STEP)
    if FAULT == "logs-each-step" and rank == 0:
        return STEP + 0.002
    return STEP


def report(step: int, rank: int, group: dist.ProcessGroup) -> None:
    """Reduce a metric in a second group. An exception that is caught makes a rank leave the call out."""
    with contextlib.suppress(ValueError):
        if step == AT and rank == CULPRIT:
            happened()
            fail()
        dist.all_reduce(torch.ones(()), group=group)


def forward_backward(model: torch.nn.Module, rows: torch.Tensor, seconds: float) -> None:
    nap(seconds)
    model(rows).square().mean().backward()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    if KIND == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer)
        return fully_shard(model)
    return DistributedDataParallel(model, bucket_cap_mb=0.02)


def main() -> None:
    if FAULT == "never-joins" and is_culprit():
        happened()
        nap(600)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if FAULT == "prepares" and rank == 0:
        prepare_data()
    if FAULT == "killed-early" and rank == CULPRIT:
        happened()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    model = wrapped(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    second = dist.new_group() if FAULT.startswith("skips") else None
    loader = DataLoader(Rows(), batch_size=8, num_workers=1 if FAULT.startswith("loader") else 0)
    for step, rows in enumerate(loader):
        if step == STEPS:
            break
        happens(step, rank)
        accumulates = FAULT == "accumulates" and step % 4 < 3
        with model.no_sync() if accumulates else contextlib.nullcontext():  # type: ignore[operator]
            forward_backward(model, rows, work_of(step, rank))
        optimizer.step()
        optimizer.zero_grad()
        if second is not None:
            report(step, rank, second)
        if step % 20 == 0:
            dist.all_reduce(torch.ones(()))
    if FAULT == "uploads-at-end" and rank == 0:
        happened()
        push_to_hub()
    dist.destroy_process_group()


def train_by_trainer() -> None:
    """The same by transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layers(x).square().mean()}

    class Happens(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, _args: object, state: object, _control: object, **_more: object) -> None:
            step, rank = state.global_step, dist.get_rank()  # type: ignore[attr-defined]
            happens(step, rank)
            nap(work_of(step, rank))

    class ByName(Rows):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"x": super().__getitem__(index)}

    arguments = TrainingArguments(
        output_dir=os.environ["TOPOFLIGHT_RUN"] + "/out", use_cpu=True, max_steps=STEPS, report_to="none",
        per_device_train_batch_size=8, save_strategy="no", logging_strategy="no", disable_tqdm=True,
        ddp_backend="gloo",
    )  # fmt: skip
    Trainer(model=Model(), args=arguments, train_dataset=ByName(), callbacks=[Happens()]).train()


if __name__ == "__main__":
    train_by_trainer() if KIND == "trainer" else main()

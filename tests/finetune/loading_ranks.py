"""Ranks that load a model, report the peak of their own memory above its start, and export the model.

`loading_ranks.py CASES RANKS`: forked from one process. One line of JSON for each case of rank 0, which has all ranks'
numbers. Counted are pages without a file (proc(5), statm): those of mapped files are the system's to take back.
"""

import contextlib
import gc
import json
import mmap
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from equivalence_ranks import fork

from contracts.job_config import JobConfig
from contracts.layout import Layout
from finetune import checkpoint
from finetune.model import build_model
from finetune.parallel import Engine, build_mesh
from finetune.recorder import EXACT_BYTES, forget_highest_rss, return_freed
from finetune.weights import fill, open_source


def anonymous(statm):
    """Bytes of this process that no file holds: pages that are resident and not of a file, of its opened statm."""
    _, resident, shared, *_ = os.pread(statm, 200, 0).split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


@contextlib.contextmanager
def watched():
    """A list that holds, once the block is over, the most that was seen above its beginning."""
    gc.collect()  # modules refer to each other: what an earlier case made is still there
    forget_highest_rss()
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    began, most, over, found = anonymous(statm), 0, threading.Event(), []

    def watch():
        nonlocal most
        while not over.is_set():
            most = max(most, anonymous(statm) - began)
            time.sleep(0.001)

    looking = threading.Thread(target=watch)
    looking.start()
    try:
        yield found
    finally:
        over.set()
        looking.join()
        found.append(max(most, anonymous(statm) - began))
        os.close(statm)


class NoTokenizer:
    """A tokenizer has nothing to say here."""

    def save_pretrained(self, folder):
        """Nothing."""


def run(case, world, folder):
    """Load under the case's layout; where asked export what was loaded. Returns the bytes that loading took."""
    config = JobConfig(
        model_name_or_path=str(folder / "base"), tokenizer_name="builtin:bytes", lora_r=4,
        output_dir=str(folder / case["name"]), **case["settings"],
    )  # fmt: skip
    layout = Layout(world_size=world, precision="fp32", **case["layout"])
    cpu = torch.device("cpu")
    mesh = build_mesh(layout, cpu)
    with watched() as loading:
        model = build_model(config, layout.precision)
        engine = Engine(model, layout, cpu, mesh, fill=partial(fill, open_source(config), config.seed))
        del model
    told = {"loading": loading[0]}
    if case.get("export"):
        path = folder / case["name"] / "checkpoint"
        named = engine.named_parameters()
        dcp.save({f"model.{n}": p.detach() for n, p in named.items() if p.requires_grad}, checkpoint_id=path)
        told |= checkpoint.export(config, layout.precision, path, NoTokenizer())
        dist.barrier()
    return told


def main(path, rank, world):
    """Run the cases of a file."""
    return_freed(EXACT_BYTES)
    dist.init_process_group("gloo", init_method=f"file://{path}.{world}", rank=rank, world_size=world)
    for case in json.loads(Path(path).read_text()):
        told = [None] * world
        dist.all_gather_object(told, run(case, world, Path(path).parent))
        if rank == 0:
            print("CASE " + json.dumps({"name": case["name"], "ranks": told}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(fork(sys.argv[1], int(sys.argv[2]), main))

"""One rank of many, traced: a step of a model of any size under a layout, with no weights and no other ranks.

`fake_ranks.py CASES` prints a line of JSON per case. torch's FakeTensorMode gives tensors shapes without memory, its
fake process group gives collectives without peers. What the job builds and sends is real: DTensor placements, FSDP's
buffers with their padding, TP's and the pipeline's messages. Nothing here knows what is expected.
"""

import contextlib
import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contracts.job_config import JobConfig
from contracts.layout import Layout
from finetune.model import build_model
from finetune.parallel import Engine, build_mesh
from finetune.rows import Batch
from finetune.verify import compare, observe

KINDS = {
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "allreduce_": "all_reduce", "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce", "send": "send", "broadcast_": "broadcast",
}  # fmt: skip


class Listening(TorchDispatchMode):
    """Notes each collective: over which axis, which kind, and the bytes of its whole (the larger side)."""

    def __init__(self, axes):
        super().__init__()
        self.axes, self.heard = axes, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # the pipeline's vote, which a fake peer does not cast: every stage knows what it passes on
        result = func(*args, **(kwargs or {}))
        kind = KINDS.get(func._schema.name.split("::")[1])
        if func in collective_ops and func not in sync_ops and kind is not None:
            group = CollectiveOp.get_process_group(func, args)
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            if tensors:  # the vote is of whole numbers
                self.note(group.group_name, kind, max(t.numel() * t.element_size() for t in tensors))
        return result

    def note(self, group, kind, size):
        """One collective."""
        self.heard[self.axes.get(group, "world"), kind, size] += 1

    def reduce(self, _state, bucket):
        """In place of DDP's all-reduce, which wants a future's result: a fake work has none."""
        self.heard["dp_replicate", "all_reduce", bucket.buffer().numel() * bucket.buffer().element_size()] += 1
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


class FourBit(torch.autograd.Function):
    """The shapes of a product with 4-bit weights: bitsandbytes' arithmetic takes no tensor without memory."""

    @staticmethod
    def forward(ctx, wide, x):
        """What the layer gives."""
        ctx.width = x.shape[-1]
        return x.new_empty((*x.shape[:-1], wide))

    @staticmethod
    def backward(ctx, gradient):
        """What its input gets; no 4-bit weight is trained."""
        return None, gradient.new_empty((*gradient.shape[:-1], ctx.width))


def without_memory(model, fake):
    """Every parameter and buffer as a tensor on the CPU that has no memory; tied ones stay tied."""
    made = {}
    with fake:
        for module in model.modules():
            for name, p in list(module._parameters.items()):
                if type(p).__name__ == "Params4bit":
                    column = torch.empty((p.numel() // 4, 1), dtype=p.quant_storage)  # 16 bits hold four weights
                    made[id(p)] = torch.nn.Parameter(column, requires_grad=False)
                    module.forward = partial(FourBit.apply, p.shape[0])
                elif p is not None and id(p) not in made:
                    made[id(p)] = torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
                if p is not None:
                    module._parameters[name] = made[id(p)]
            for name, b in list(module._buffers.items()):
                if b is not None:
                    module._buffers[name] = torch.empty(b.shape, dtype=b.dtype)
    return model


def trace(case):
    """What rank 0 of a pipeline stage holds and sends in one optimizer step."""
    layout, length, stage = Layout(**case["layout"]), case["length"], case["stage"]
    device, began = torch.device("cpu"), time.monotonic()
    rank = stage * layout.world_size // layout.pp
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        mesh = build_mesh(layout, device)
        axes = {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names if mesh[name].size() > 1}
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        method = case["method"]
        config = JobConfig(
            model_name_or_path=case["model"], use_peft=method != "full", load_in_4bit=method == "qlora",
        )  # fmt: skip
        with torch.device("meta"):
            model = build_model(config, layout.precision)
        engine = Engine(without_memory(model, fake), layout, device, mesh)
        shape, listening = (layout.micro_batch, length), Listening(axes)
        for module in engine.modules:
            if isinstance(module, DistributedDataParallel):
                module.register_comm_hook(None, listening.reduce)
        with fake:
            batch = Batch(
                tokens=torch.zeros(shape, dtype=torch.long), labels=torch.zeros(shape, dtype=torch.long),
                positions=torch.arange(length)[None].expand(shape),
            )  # fmt: skip
            with listening:
                engine.train_step([batch] * layout.gradient_accumulation, 1)
        seen = observe(engine)
        wrong = [w for w in compare(layout, seen, {}) if not w.startswith("backend")]
    finally:
        dist.destroy_process_group()
    return {
        "name": case["name"], "sent": [[*key, times] for key, times in sorted(listening.heard.items())],
        "placements": seen.placements, "local_bytes": seen.local_parameter_bytes, "mismatches": wrong,
        "seconds": round(time.monotonic() - began, 2),
    }  # fmt: skip


def main(path):
    """Each case in a separate process, forked: torch remembers the groups of a mesh after they are gone."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for case in json.loads(Path(path).read_text()):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    told = trace(case)
                print("CASE " + json.dumps(told), flush=True)
                code = 0
            except BaseException:  # noqa: BLE001  a child must end here, whatever it was
                print(case["name"], file=sys.stderr)
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(code)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1])

"""Started by torchrun: runs a list of layouts one after the other and compares each with one process alone.

Prints one line of JSON per case: name, losses, the largest relative difference of losses and of gradients.
"""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from finetune.config import JobConfig
from finetune.data import Loader, prepare
from finetune.model import build_model
from finetune.optim import build_optimizer, clip_gradients
from finetune.parallel import Engine, build_mesh
from finetune.rows import load_tokenizer
from finetune.verify import compare, observe
from planner.layout import Layout

SEQUENCES = 16  # per optimizer step
STEPS = 2


def config_for(case):
    """The job of a case: a micro Llama on sums, or the model that it names."""
    return JobConfig(
        model_name_or_path=case.get("model", "random:micro-llama"), tokenizer_name="builtin:bytes",
        use_peft=case["method"] != "full", load_in_4bit=case["method"] == "qlora", lora_r=4, lora_alpha=8,
        learning_rate=1e-2, dataset_rows=128, max_length=96 if case["packing"] else 48, packing=case["packing"],
        completion_only_loss=True, seed=7, max_grad_norm=0.5,
        lora_modules_to_save=("lm_head",) if case.get("save_head") else (),
    )  # fmt: skip


@cache
def examples_of(packing):
    """The rows, which no case changes."""
    config = config_for({"method": "full", "packing": packing})
    return prepare(config, "train", load_tokenizer(config))[0]


@cache
def mesh_of(*degrees):
    """One mesh for all cases of the same degrees: their process groups take longer to make than a step."""
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    layout = Layout(world_size=dist.get_world_size(), **dict(zip(names, degrees, strict=True)))
    return build_mesh(layout, torch.device("cpu"))


def run(case, layout, mesh):
    """Losses, clipped norms, the full gradients of the first step; where asked, the collectives of a step."""
    config = config_for(case)
    examples = examples_of(case["packing"])
    model = build_model(config, layout.precision)
    randomise_lora_b(model)
    engine = Engine(model, layout, torch.device("cpu"), mesh)
    got = observe(engine) if mesh else None
    named = engine.named_parameters()
    optimizer = build_optimizer(named.values(), config)
    at = mesh.get_local_rank("dp_replicate") * layout.dp_shard + mesh.get_local_rank("dp_shard") if mesh else 0
    loader = Loader(
        examples=examples, pad=2, micro_batch=layout.micro_batch, micro_batches=layout.gradient_accumulation,
        rank=at, ranks=layout.data_parallel, seed=1,
        fixed_length=config.max_length if layout.pp > 1 or layout.compile else None,  # one shape, one compilation
    )  # fmt: skip
    losses, norms, grads, events = [], [], {}, ()
    # Counted in one step more: in the second DDP orders its buckets anew, once in a run.
    counts = mesh is not None and bool(case.get("counts"))
    for step, share in zip(range(STEPS + counts), loader.epoch(0), strict=False):
        with torch.profiler.profile() if step == STEPS else contextlib.nullcontext() as profiler:
            loss = engine.train_step(share.batches, share.counted)
        events = profiler.events() if profiler else ()
        if mesh is not None:
            dist.all_reduce(loss)
        norms.append(clip_gradients(named.values(), config.max_grad_norm, mesh.get_group("pp") if mesh else None))
        if step == 0:
            for name, p in named.items():
                if p.grad is not None:
                    whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                    grads[name.replace("module.", "")] = whole.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    trainable = [name for name, p in named.items() if p.requires_grad]
    missing = sorted(set(trainable) - set(grads))
    collectives = Counter(e.name.removeprefix("gloo:") for e in events if e.name.startswith("gloo:"))
    return losses[:STEPS], norms[:STEPS], grads, missing, got, collectives


def randomise_lora_b(model):
    """LoRA starts with B = 0, where A has no gradient to compare: give B values, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.05)


def shape_of(layout):
    """The family; zero2 is FSDP that keeps its weights gathered, under another name."""
    return layout.family.replace("ZeRO-2", "HSDP" if layout.dp_replicate > 1 else "FSDP")


def main(path):
    """Run the cases of a file."""
    torch.set_num_threads(1)
    cases = json.loads(Path(path).read_text())
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    references = {}
    for case in cases:
        began = time.monotonic()
        layout = Layout(world_size=world, precision="fp32", **case["layout"])
        key = (case["method"], case["packing"], bool(case.get("save_head")), case.get("model"))
        if key not in references:
            alone = Layout(world_size=1, precision="fp32", micro_batch=SEQUENCES, sharding="ddp")
            told = [run(case, alone, None)[:3] if dist.get_rank() == 0 else None]  # the others leave it the cores
            dist.broadcast_object_list(told)
            references[key] = told[0]
        ref_losses, ref_norms, ref_grads = references[key]
        assert layout.global_batch == SEQUENCES, (case, layout.global_batch)
        mesh = mesh_of(layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
        losses, norms, grads, missing, got, collectives = run(case, layout, mesh)
        # What runs is what was asked, and is not taken for any other layout of the list.
        others = [Layout(world_size=world, precision="fp32", **c["layout"]) for c in cases]
        confused = [o.family for o in others if shape_of(o) != shape_of(layout) and not compare(o, got, {})]
        worst = max(
            (float((grads[n] - ref_grads[n]).norm() / ref_grads[n].norm().clamp_min(1e-8)) for n in grads), default=0.0
        )
        graphs = counters["stats"]["unique_graphs"]
        torch._dynamo.reset()  # ten compilations of one function, and it is run as it stands
        names = [None] * world
        dist.all_gather_object(names, (sorted(grads), worst, missing, compare(layout, got, {})))
        if dist.get_rank() == 0:
            seen = sorted({n for one, *_ in names for n in one})
            print("CASE " + json.dumps({
                "name": case["name"], "family": layout.family, "losses": losses, "reference": ref_losses,
                "norms": norms, "reference_norms": ref_norms,
                "gradient_difference": max(w for _, w, *_ in names), "all_gradients": seen == sorted(ref_grads),
                "missing": sorted({m for _, _, one, _ in names for m in one}),
                "mismatches": [m for *_, one in names for m in one], "confused_with": confused,
                "collectives": collectives, "graphs": graphs, "seconds": round(time.monotonic() - began, 2),
            }), flush=True)  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()
    # gloo threads of the many meshes may still be leaving; nothing is left to save
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

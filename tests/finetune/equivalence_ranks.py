"""Ranks that run a list of layouts one after the other and compare each with one process alone.

`equivalence_ranks.py CASES RANKS`: forked from one process, so that what takes longest, importing torch and
transformers, is done once. Prints one line of JSON per case: name, losses, the largest relative difference of losses
and of gradients.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
import zlib
from collections import Counter
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from filled import filled_model
from torch.distributed.tensor import DTensor

from contracts.job_config import JobConfig
from contracts.layout import Layout
from finetune.loop import build_optimizer, clip_gradients
from finetune.model import build_model
from finetune.parallel import Engine, build_mesh
from finetune.rows import Loader, load_tokenizer, prepare
from finetune.verify import compare, observe
from finetune.weights import fill, open_source, place

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


def run(case, layout, mesh, stored=None):
    """Losses, clipped norms, the full gradients of the first step; where asked, the collectives of a step.

    `stored`: the precision that the weights are made for, where another computes with the same weights.
    """
    config = config_for(case)
    examples = examples_of(case["packing"])
    if stored in (None, layout.precision):
        model = build_model(config, layout.precision)
    else:
        model = filled_model(config, stored).float()
    engine = Engine(model, layout, torch.device("cpu"), mesh, fill=partial(fill, open_source(config), config.seed))
    got = observe(engine) if mesh else None
    named = engine.named_parameters()
    randomise_lora_b(named)
    optimizer = build_optimizer(named.values(), config)
    at = mesh.get_local_rank("dp_replicate") * layout.dp_shard + mesh.get_local_rank("dp_shard") if mesh else 0
    loader = Loader(
        examples=examples, pad=2, micro_batch=layout.micro_batch, micro_batches=layout.gradient_accumulation,
        rank=at, ranks=layout.data_parallel, seed=1,
        fixed_length=config.max_length if layout.pp > 1 else None,
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


def save_base(folder):
    """The micro Llama in a folder, of whole 64-weight blocks, the same for every rank and layout."""
    if dist.get_rank() == 0:
        filled_model(config_for({"method": "full", "packing": False})).save_pretrained(folder)
    dist.barrier()
    return str(folder)


def randomise_lora_b(named):
    """LoRA starts with B = 0, where A has no gradient to compare: give B values, the same under every layout."""
    for name, p in named.items():
        if "lora_B" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.removeprefix("module.").encode()))
            place(p, (torch.randn(p.shape, generator=generator) * 0.05).__getitem__)


def shape_of(layout):
    """The family; zero2 is FSDP that keeps its weights gathered, under another name."""
    return layout.family.replace("ZeRO-2", "HSDP" if layout.dp_replicate > 1 else "FSDP")


def layout_of(case, world):
    """What a case asks for; fp32 where it says nothing."""
    return Layout(world_size=world, **{"precision": "fp32", **case["layout"]})


def furthest(grads, others):
    """The largest relative difference of a gradient, tensor by tensor."""
    return max((float((grads[n] - others[n]).norm() / others[n].norm().clamp_min(1e-8)) for n in grads), default=0.0)


def alone(case, precision, stored):
    """What rank 0 computes by itself, told to all; the others leave it the cores."""
    layout = Layout(world_size=1, precision=precision, micro_batch=SEQUENCES, sharding="ddp")
    told = [run(case, layout, None, stored)[:3] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    return told[0]


def fork(path, world, main):
    """Start the ranks, which run `main`; where one fails the others are ended. Returns the exit code."""
    torch.set_num_threads(1)
    build_model(config_for({"method": "lora", "packing": False}), "fp32")  # imports the rest; starts no thread
    ranks = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                main(path, rank, world)
                code = 0
            except BaseException:  # noqa: BLE001  a child must end here, whatever it was
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # gloo threads of the many meshes may still be leaving; nothing is left to save
        ranks.append(pid)
    failed = False
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not failed:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return int(failed)


def main(path, rank, world):
    """Run the cases of a file."""
    cases = json.loads(Path(path).read_text())
    dist.init_process_group("gloo", init_method=f"file://{path}.{world}", rank=rank, world_size=world)
    if any(case["method"] == "qlora" for case in cases):
        base = save_base(Path(path).parent / "base")
        cases = [{**case, "model": base} if case["method"] == "qlora" else case for case in cases]
    references = {}
    for case in cases:
        began = time.monotonic()
        layout = layout_of(case, world)
        of = (case["method"], case["packing"], bool(case.get("save_head")), case.get("model"), layout.precision)
        for precision in dict.fromkeys((layout.precision, "fp32")):
            if (*of, precision) not in references:
                references[*of, precision] = alone(case, precision, layout.precision)
        ref_losses, ref_norms, ref_grads = references[*of, layout.precision]
        exact_losses, _, exact_grads = references[*of, "fp32"]  # the same weights, computed in fp32
        assert layout.global_batch == SEQUENCES, (case, layout.global_batch)
        mesh = mesh_of(layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
        losses, norms, grads, missing, got, collectives = run(case, layout, mesh)
        # What runs is what was asked, and is not taken for any other layout of the list.
        others = [layout_of(c, world) for c in cases]
        confused = [o.family for o in others if shape_of(o) != shape_of(layout) and not compare(o, got, {})]
        worst = furthest(grads, ref_grads), furthest(grads, exact_grads)
        names = [None] * world
        dist.all_gather_object(names, (sorted(grads), worst, missing, compare(layout, got, {})))
        if dist.get_rank() == 0:
            seen = sorted({n for one, *_ in names for n in one})
            print("CASE " + json.dumps({
                "name": case["name"], "precision": layout.precision, "losses": losses, "reference": ref_losses,
                "norms": norms, "reference_norms": ref_norms,
                "gradient_difference": max(w[0] for _, w, *_ in names), "all_gradients": seen == sorted(ref_grads),
                "exact": exact_losses, "exact_difference": max(w[1] for _, w, *_ in names),
                "missing": sorted({m for _, _, one, _ in names for m in one}),
                "mismatches": [m for *_, one in names for m in one], "confused_with": confused,
                "collectives": collectives, "seconds": round(time.monotonic() - began, 2),
            }), flush=True)  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(fork(sys.argv[1], int(sys.argv[2]), main))

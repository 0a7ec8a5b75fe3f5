"""Memory that runs out: told apart from other errors, with what was held and the nearest layout that fits.

Surface: torch.OutOfMemoryError, torch.cuda's counts; on a CPU RLIMIT_DATA (getrlimit(2)) and MemTotal (proc(5)).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from contracts import trl
from contracts.job_config import EndedError, JobConfig
from contracts.job_plan import RunForecast
from contracts.layout import Layout, LayoutError
from finetune.model import build_model, causal_lm
from finetune.plan import refusals
from hardware.units import GIB

# What torch and NCCL raise as another error than OutOfMemoryError.
WORDS = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "Cuda failure 2 'out of memory'")
HEAVIER = {"none": ("none", "selective", "full"), "selective": ("selective", "full"), "full": ("full",)}


class MemoryRanOutError(EndedError):
    """A rank needed more memory than there is: started again it would again."""

    code, status = 71, "out_of_memory"  # EX_OSERR


def ran_out(error: BaseException) -> bool:
    """Whether this is what torch says where an allocation fails."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


def capacity_of(device: torch.device, taken: int) -> int:
    """Bytes that a rank may have: the GPU's; of the host's, those above what the process took before it had a model."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if limit == resource.RLIM_INFINITY:
        return max(0, total - taken)
    return max(0, min(total - taken, limit - _data_bytes(taken)))


def _data_bytes(taken: int) -> int:
    """What of RLIMIT_DATA the process had before: mapped is more than resident, by what libraries reserve."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {
        line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith(("VmData", "RssAnon"))
    }
    return taken + max(0, sizes["VmData"] - sizes["RssAnon"])


def held(device: torch.device, capacity: int, taken: int, rss: int) -> str:
    """What this rank had when an allocation failed."""
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return f"{allocated / GIB:.2f} GiB allocated, {reserved / GIB:.2f} GiB reserved of {capacity / GIB:.2f} GiB"
    return f"{(rss - taken) / GIB:.2f} GiB resident beside the program, of {capacity / GIB:.2f} GiB"


def forecast_words(forecast: RunForecast) -> str:
    """What the plan said of this layout's memory."""
    due = forecast.memory_bytes
    if due is None:
        return "no plan forecast its memory"
    return f"the plan's forecast is {due.mid / GIB:.2f} GiB ({due.low / GIB:.2f}-{due.high / GIB:.2f})"


def nearest(config: JobConfig, layout: Layout, length: int, device: torch.device, capacity: int) -> str:
    """The layout with the fewest changes that fits by the forecast, as settings; the global batch stays.

    This layout has needed all that there is: where it is forecast to need less, so much more is added to the others.
    """
    from planner.forecast.memory import DEFAULT_MEMORY, memory_parts
    from planner.forecast.models import ModelError, model_from_config
    from planner.forecast.specs import TrainSpec
    from planner.stacks.topoflight import ENGINE

    shape = causal_lm(build_model(config, layout.precision)).config
    try:
        model = model_from_config(shape.to_dict())
    except ModelError as error:
        return f"no layout is forecast: {error}"
    train = TrainSpec(
        method="qlora" if config.load_in_4bit else "lora" if config.use_peft else "full", sequence_length=length,
        lora_rank=config.lora_r, lora_targets=config.lora_target_modules, saved_modules=config.lora_modules_to_save,
        packing=config.packing, precision=layout.precision,
        attention={"flash_attention_2": "flash"}.get(config.attn_implementation, config.attn_implementation),
    )  # fmt: skip

    def bytes_of(one: Layout) -> float:
        return memory_parts(model, train, one, ENGINE, on_cpu=device.type != "cuda").total

    scale = max(1.0, capacity / bytes_of(layout))
    for one in lighter(layout):
        needs = bytes_of(one) * scale
        if needs <= capacity * DEFAULT_MEMORY.safe_share and not refusals(one, shape, config.use_peft):
            differs = [name for name in Layout.__dataclass_fields__ if getattr(one, name) != getattr(layout, name)]
            words = "; ".join(trl.spelled(name, getattr(one, name)) for name in differs)
            return f"nearest layout that fits: {words} ({needs / GIB:.2f} GiB)"
    return f"no layout of {layout.world_size} ranks is forecast to fit"


def lighter(layout: Layout) -> Iterator[Layout]:
    """Layouts that take less memory for the same ranks and global batch, those with the fewest changes first."""
    fusings = dict.fromkeys((layout.fused_cross_entropy, True))
    halvings = [n for n in range(layout.micro_batch.bit_length()) if layout.micro_batch % (1 << n) == 0]
    whole = layout.dp_shard < layout.data_parallel or layout.sharding != "zero3"
    shardings = (False, True) if whole and layout.data_parallel > 1 else (False,)
    offloads = dict.fromkeys((layout.offload, "all")) if layout.data_parallel > 1 else (layout.offload,)
    choices = product(fusings, HEAVIER[layout.checkpointing], halvings, shardings, offloads)

    def changes(choice: tuple[bool, str, int, bool, str]) -> tuple[int, ...]:
        """How many; among as many those that cost a step the least time."""
        fused, again, times, sharded, offload = choice
        deeper, offloaded = HEAVIER[layout.checkpointing].index(again), offload != layout.offload
        count = (fused != layout.fused_cross_entropy) + deeper + times + sharded + 2 * offloaded
        return count, offloaded, sharded, deeper, times

    for choice in sorted(choices, key=changes)[1:]:
        fused, again, times, sharded, offload = choice
        degrees: dict[str, Any] = {"dp_shard": layout.data_parallel, "dp_replicate": 1, "sharding": "zero3"}
        try:
            yield replace(
                layout, fused_cross_entropy=fused, checkpointing=again, micro_batch=layout.micro_batch >> times,
                gradient_accumulation=layout.gradient_accumulation << times, offload=offload,
                **(degrees if sharded else {}),
            )  # fmt: skip
        except LayoutError:
            continue

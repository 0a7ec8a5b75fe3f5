"""The fine-tune job: `torchrun ... -m finetune.train --config job.yaml | --plan plan.json [key=value ...]`.

The command: settings, ranks, `loop.Trainer`, exports, and with which code and record it ends. torchrun turns every
failure into 1; run.json keeps the job's own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError

from contracts.job_config import ConfigError, EndedError, choose_plan
from contracts.run_record import RESUMABLE
from finetune import channels, checkpoint, hub, post, rank_monitor
from finetune.loop import Trainer
from finetune.recorder import MemoryRanOutError, Recorder, is_out_of_memory
from planner.stacks.exports import settle_layout


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code."""
    parser = argparse.ArgumentParser(prog="finetune.train", description="Fine-tune under a planned layout.")
    parser.add_argument("--config", type=Path, help="job settings (YAML); without it, the built-in small job")
    parser.add_argument("--plan", type=Path, help="plan.json, in place of --config: settings, layout, environment")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(argv)
    try:
        plan, config = choose_plan(options.plan, options.config, options.overrides)
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    except ConfigError as error:
        return _report(error)
    except OSError as error:
        return _report(ConfigError(f"output_dir={config.output_dir!r}: the folder cannot be made: {error.strerror}"))
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # its calls of deprecated names
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # rank 0 exports alone
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, whose CPU kernels are a download more
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)
    if torch.cuda.is_available():
        channels.start_log(Path(config.output_dir) / "nccl")
    device = join_ranks(Path(config.output_dir))
    recorder: Recorder | None = None
    ended: EndedError | None = None
    alone = False  # only this rank ends here; the others wait for it, perhaps in a collective, until torchrun ends them
    try:
        world = dist.get_world_size()
        layout = settle_layout(plan, world, device.type == "cuda", int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        plan = dataclasses.replace(plan, layout=layout)
        recorder = Recorder(Path(config.output_dir), plan, layout, device)
        config = dataclasses.replace(config, **checkpoint.on_rank_zero(partial(hub.resolve_commits, config)))
        recorder.record.plan = dataclasses.replace(plan, config=config)
        if plan.trl is not None:
            from finetune import sft_trl  # which imports TRL

            sft_trl.train(config, layout, recorder)
        else:
            Trainer(config, layout, recorder).train()
    except EndedError as error:
        ended = error
    except (OSError, RuntimeError, MemoryError, SafetensorError) as error:
        folder, alone = Path(config.output_dir), True
        if recorder is not None and is_out_of_memory(error):
            ended = MemoryRanOutError(recorder.describe_memory(str(error) or type(error).__name__))
        elif checkpoint.is_full(folder) or getattr(error, "errno", None) in hub.DISK_ERRORS:
            rank = f"rank {os.environ.get('RANK', '0')} on {os.uname().nodename}"
            ended = checkpoint.SaveError(f"{rank}: {checkpoint.describe_disk(folder, error)}")
        else:
            raise
    code = _report(ended, alone=alone) if ended else 0
    if recorder is not None:
        recorder.writes |= alone
        with contextlib.suppress(OSError):  # the disk may be what is full
            recorder.end(ended.status if ended else "complete", code, str(ended) if ended else None)
        post.upload_run_record(recorder)
    if code in (0, RESUMABLE):  # all ranks end alike: leave together; else torchrun ends the others
        dist.barrier()
    if not alone or dist.get_world_size() == 1:
        dist.destroy_process_group()
    return code


def _report(error: EndedError, *, alone: bool = False) -> int:
    if alone or os.environ.get("RANK", "0") == "0":
        print(f"finetune: {error.status}: {error}", file=sys.stderr)  # noqa: T201  the command's own message
    return error.code


def join_ranks(folder: Path) -> torch.device:
    """The process group, and this rank's device. Alone, without torchrun, a group of one.

    The monitor, which writes into `folder`, starts before the ranks meet.
    """
    if torch.cuda.is_available():
        device = bound = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # gloo too: checkpoints are agreed on over the CPU
    else:
        device, bound, backend = torch.device("cpu"), None, "gloo"
    if "RANK" in os.environ:
        join = rank_monitor.starting(dist.init_process_group, folder)
        join(backend, device_id=bound, timeout=checkpoint.WAIT)  # NCCL connects at once, and no barrier guesses a GPU
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


if __name__ == "__main__":
    sys.exit(main())

"""The fine-tune job: `torchrun ... -m finetune.train --config job.yaml [--plan plan.json] [key=value ...]`.

Reads top to bottom: settings, ranks, model and layout, the check that asked is got, the loop, the exports. Exit codes
are those of sysexits.h; torchrun turns every failure into 1, flight.json keeps the job's own.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from finetune import checkpoint, data, flight, model, optim, parallel, verify
from finetune.config import ConfigError, JobConfig, read_config
from finetune.loop import RESUMABLE, Run, StoppedError, say
from finetune.plan import Plan, read_plan, settle_layout
from finetune.rows import Example, load_tokenizer
from planner.layout import Layout

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
OK, CONFIG, DISK, MISMATCH = 0, 2, 74, 76  # EX_IOERR, EX_PROTOCOL; loop has DIVERGED and RESUMABLE

log = logging.getLogger("finetune")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code."""
    parser = argparse.ArgumentParser(prog="finetune.train", description="Fine-tune under a planned layout.")
    parser.add_argument("--config", type=Path, help="job settings (YAML); without it, the built-in small job")
    parser.add_argument("--plan", type=Path, help="plan.json: layout, forecast, environment")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(argv)
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        config, _, notes = read_config(options.config, options.overrides)
        plan = read_plan(options.plan) if options.plan else None
    except ConfigError as error:
        if speaks:
            print(f"finetune: {error}", file=sys.stderr)  # noqa: T201  the command's own message
        return CONFIG
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # its own calls of its own names
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)
    before = signal.getsignal(signal.SIGTERM)
    device = join_ranks()
    recorder: flight.Recorder | None = None
    code, status, reason = OK, "complete", None
    try:
        layout = settle_layout(config, plan, dist.get_world_size(), device.type == "cuda")
        recorder = flight.Recorder(Path(config.output_dir), layout, plan.forecast if plan else {}, device)
        for text in notes:
            recorder.note(text)
        train(config, layout, plan, device, recorder)
    except ConfigError as error:
        code, status, reason = CONFIG, "refused", str(error)
    except verify.MismatchError as error:
        code, status, reason = MISMATCH, "mismatch", str(error)
    except StoppedError as error:
        code, status, reason = error.code, "interrupted" if error.code == RESUMABLE else "failed", str(error)
    except checkpoint.SaveError as error:
        code, status, reason = DISK, "failed", str(error)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        code, status, reason = DISK, "failed", str(error)
    if reason and speaks:
        print(f"finetune: {status}: {reason}", file=sys.stderr)  # noqa: T201
    if recorder is not None:
        with contextlib.suppress(OSError):  # the disk may be what is full
            recorder.end(status, code, reason)
    leave_ranks(agreed=code in (OK, RESUMABLE))
    signal.signal(signal.SIGTERM, before)
    return code


def join_ranks() -> torch.device:
    """The process group, and this rank's device. Alone, without torchrun, a group of one."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # gloo too: checkpoints are agreed on over the CPU
    else:
        device, backend = torch.device("cpu"), "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def leave_ranks(agreed: bool) -> None:
    """Leave together where all ranks end alike; else go, and let torchrun end the others."""
    if agreed:
        dist.barrier()
    dist.destroy_process_group()


def train(
    config: JobConfig, layout: Layout, plan: Plan | None, device: torch.device, recorder: flight.Recorder
) -> None:
    """Build, check, train, save."""
    if config.tf32:
        if device.type != "cuda":
            raise ConfigError("tf32=true: needs an NVIDIA GPU")
        torch.backends.cuda.matmul.allow_tf32 = True
    recorder.open_logs(config.report_to)
    tokenizer = load_tokenizer(config)
    examples, told = data.prepare(config, config.dataset_train_split, tokenizer)
    test: list[Example] = []
    if config.eval_strategy != "no":
        test, _ = data.prepare(config, config.dataset_test_split, tokenizer)
    _, note = model.attention_that_exists(config.attn_implementation)
    if note:
        recorder.note(note)
    net = model.build_model(config, layout.precision)
    counts = [(p.numel(), p.requires_grad) for p in net.parameters()]
    shape = model.causal_lm(net).config
    mesh = parallel.build_mesh(layout, device) if layout.world_size > 1 else None
    engine = parallel.Engine(net, layout, device, mesh, config.packing)
    del net
    named = engine.named_parameters()
    optimizer = optim.build_optimizer(named.values(), config)

    effective = verify.check(layout, engine, plan.environment if plan else {})
    length = sum(len(e.tokens) for e in examples) / len(examples)
    parameters, trainable = sum(n for n, _ in counts), sum(n for n, grows in counts if grows)
    recorder.flops = flight.flops_per_token(parameters, trainable, shape, length)
    recorder.document["layout"]["effective"] = effective
    recorder.write(
        model={"name": config.model_name_or_path, "parameters": parameters, "trainable": trainable},
        data={"name": config.dataset_name, "mean_tokens": length, **told},
        environment=plan.environment if plan else {},
    )
    say(f"{layout.family} on {layout.world_size} x {device.type}: {effective['placements']}; "
        f"{trainable:,} of {parameters:,} parameters train")  # fmt: skip

    run = Run(config, layout, engine, named, optimizer, recorder, examples, test, tokenizer.pad_token_id)
    place = run.resume()
    run.go(place)
    peak = torch.tensor([recorder.peak_memory()[0]], device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    recorder.fullest = int(peak)
    recorder.document["transports"] = verify.transports_seen()
    exported(config, layout, run, recorder, tokenizer)


def exported(config: JobConfig, layout: Layout, run: Run, recorder: flight.Recorder, tokenizer: Any) -> None:
    """Adapter and merged model, written by rank 0 from the last checkpoint."""
    failed: list[str | None] = [None]
    if dist.get_rank() == 0:
        last = checkpoint.list_checkpoints(run.store.folder)[-1]
        recorder.document["checkpoint"] = str(last)
        try:
            recorder.document.update(checkpoint.export(config, layout.precision, last, tokenizer))
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            failed = [f"export: {error}"]
    dist.broadcast_object_list(failed, src=0)
    if failed[0]:
        raise checkpoint.SaveError(failed[0])


if __name__ == "__main__":
    sys.exit(main())

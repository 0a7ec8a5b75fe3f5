"""The fine-tune job: `torchrun ... -m finetune.train --config job.yaml [--plan plan.json] [key=value ...]`.

Reads top to bottom: settings, ranks, model and layout, the check that asked is got, the loop, the exports. Exit codes
are those of sysexits.h; torchrun turns every failure into 1, flight.json keeps the job's own.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from finetune import checkpoint, data, flight, model, optim, parallel, verify
from finetune.config import ConfigError, JobConfig, Plan, read_config, read_plan, settle_layout
from planner.layout import Layout

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
OK, CONFIG, DIVERGED, DISK, RESUMABLE, MISMATCH = 0, 2, 65, 74, 75, 76

log = logging.getLogger("finetune")


class StoppedError(RuntimeError):
    """The run ends before its last step, in order; carries the exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


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


@dataclass(slots=True)
class Place:
    """Where in the run the next step stands."""

    step: int = 0
    epoch: int = 0
    samples: int = 0  # of this epoch: survives another world size


def train(
    config: JobConfig, layout: Layout, plan: Plan | None, device: torch.device, recorder: flight.Recorder
) -> None:
    """Build, check, train, save."""
    if config.tf32:
        if device.type != "cuda":
            raise ConfigError("tf32=true: needs an NVIDIA GPU")
        torch.backends.cuda.matmul.allow_tf32 = True
    recorder.open_logs(config.report_to)
    tokenizer = data.load_tokenizer(config)
    examples, told = data.prepare(config, config.dataset_train_split, tokenizer)
    test: list[data.Example] = []
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


class Run:
    """The loop: steps, evaluations, checkpoints, and the reasons to stop."""

    def __init__(
        self, config: JobConfig, layout: Layout, engine: parallel.Engine, named: dict[str, Any],
        optimizer: torch.optim.Optimizer, recorder: flight.Recorder, examples: Sequence[data.Example],
        test: Sequence[data.Example], pad: int,
    ) -> None:  # fmt: skip
        self.config, self.layout, self.engine, self.named = config, layout, engine, named
        self.optimizer, self.recorder = optimizer, recorder
        mesh = engine.mesh
        at = mesh.get_local_rank("dp_replicate") * layout.dp_shard + mesh.get_local_rank("dp_shard") if mesh else 0
        fixed = max(len(e.tokens) for e in (*examples, *test)) if layout.pp > 1 or layout.tp > 1 else None
        if fixed is not None and layout.sequence_parallel:
            fixed = math.ceil(fixed / layout.tp) * layout.tp
        common: Any = {
            "pad": pad,
            "rank": at,
            "ranks": layout.data_parallel,
            "seed": config.seed,
            "fixed_length": fixed,
        }
        self.loader = data.Loader(
            examples=examples, micro_batch=layout.micro_batch, micro_batches=layout.gradient_accumulation,
            by_length=config.train_sampling_strategy == "group_by_length", **common,
        )  # fmt: skip
        # A pipeline evaluates in the shape that it trains in.
        piped = layout.pp > 1
        self.test = data.Loader(
            examples=test, shuffle=False, micro_batches=layout.gradient_accumulation if piped else 1,
            micro_batch=layout.micro_batch if piped else config.per_device_eval_batch_size or layout.micro_batch,
            **common,
        )  # fmt: skip
        self.data_rank = at
        self.steps = config.max_steps or math.ceil(config.num_train_epochs * self.loader.steps)
        self.pipeline = mesh.get_group("pp") if mesh is not None and piped else None
        self.store = checkpoint.Checkpoints(Path(config.output_dir), config.save_total_limit)
        self.asked_to_stop = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, _signal: int, _frame: Any) -> None:
        self.asked_to_stop = True

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that loads it."""
        c = self.config
        return {"model": c.model_name_or_path, "use_peft": c.use_peft, "lora_r": c.lora_r if c.use_peft else None,
                "lora_target_modules": list(c.lora_target_modules) if c.use_peft else None, "seed": c.seed}  # fmt: skip

    def resume(self) -> Place:
        """Load the checkpoint to go on from, if any."""
        found = [checkpoint.find_resume(self.config)]
        dist.broadcast_object_list(found, src=0)
        path = found[0]
        if path is None:
            return Place()
        about = checkpoint.read_about(path)
        for name, value in self.identity().items():
            was = about["identity"].get(name)
            if was != value:
                raise ConfigError(f"resume_from_checkpoint: {path} has {name}={was!r}, this run has {value!r}")
        checkpoint.start_moments(self.named, self.optimizer, about["step"])
        self.store.load(path, checkpoint.training_state(self.named, self.optimizer))
        self.recorder.note(f"resumed from {path.name}, written under {about['layout']}")
        say(f"resumed from {path}")
        return Place(step=about["step"], epoch=about["epoch"], samples=about["samples"])

    def go(self, place: Place) -> None:
        """All steps that are left."""
        profile = Profiler(self.config.profile_steps, first=place.step + flight.WARM_UP + 1)
        with progress(self.steps, place.step) as bar:
            while place.step < self.steps:
                first = math.ceil(place.samples / self.loader.global_batch)
                for share in self.loader.epoch(place.epoch, first):
                    self._one(place, share, profile, bar)
                    if place.step >= self.steps:
                        break
                else:
                    place.epoch, place.samples = place.epoch + 1, 0
                self._end_of_epoch(place)
        if self.config.save_strategy != "no" or not checkpoint.list_checkpoints(self.store.folder):
            self._save(place)
        self.store.finish()

    def _one(self, place: Place, share: data.Share, profile: Profiler, bar: Progress) -> None:
        """One optimizer step."""
        # Dropout draws the same after a resume; ranks of one data share draw alike, as TP needs.
        torch.manual_seed(self.config.seed + 1_000_003 * (place.step + 1) + self.data_rank)
        rate = optim.learning_rate(self.config, place.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with profile.at(place.step) as profiled:
            began = time.perf_counter()
            loss = self.engine.train_step(share.batches, share.counted)
            # One small all-reduce carries the loss and every rank's reason to stop.
            told = torch.stack([loss, *(loss.new_tensor(float(b)) for b in (self.asked_to_stop, self.store.failed()))])
            dist.all_reduce(told)
            mean, stop, failed = told.tolist()
            norm = optim.clip_gradients(self.named.values(), self.config.max_grad_norm, self.pipeline)
            if not math.isfinite(mean) or not math.isfinite(norm):
                self.store.finish()
                raise StoppedError(
                    DIVERGED, f"step {place.step + 1}: loss {mean}, gradient norm {norm}; checkpoints are kept"
                )
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.engine.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        if profile.result is not None:
            self.recorder.document["communication"], profile.result = profile.result, None
        place.step += 1
        place.samples += self.loader.global_batch
        self.recorder.step(seconds, mean, share.tokens, profiled)
        self.recorder.document["steps_done"] = place.step
        bar.show(place.step, mean, share.tokens / seconds, self.recorder)
        if self.config.logging_strategy == "steps" and (
            place.step % self.config.logging_steps == 0 or place.step in (1, self.steps)
        ):
            numbers = {"loss": mean, "learning_rate": rate, "grad_norm": norm, "seconds": seconds}
            pace = {"tokens_per_second": share.tokens / seconds, "epoch": float(place.epoch)}
            self.recorder.log(place.step, {**numbers, **pace})
            bar.line(place.step, mean, share.tokens / seconds)
        if failed:
            self.store.finish()
            raise checkpoint.SaveError("a checkpoint could not be written")
        if stop:
            self._save(place)
            self.store.finish()
            raise StoppedError(RESUMABLE, f"SIGTERM: saved at step {place.step}; start again to go on")
        if self.config.save_strategy == "steps" and place.step % self.config.save_steps == 0:
            self._save(place)
            self.recorder.write()
        if self.config.eval_strategy == "steps" and place.step % self.config.eval_steps == 0:
            self.evaluate(place)

    def _end_of_epoch(self, place: Place) -> None:
        if self.config.eval_strategy == "epoch":
            self.evaluate(place)
        if self.config.save_strategy == "epoch":
            self._save(place)
        self.recorder.write()

    def evaluate(self, place: Place) -> float:
        """Mean loss per counted token of the test split."""
        total = torch.zeros((), device=self.engine.device)
        counted = 0
        for share in self.test.epoch(0):
            total += self.engine.eval_step(share.batches)
            counted += share.counted
        dist.all_reduce(total)
        loss = float(total) / max(1, counted)
        self.recorder.log(place.step, {"eval_loss": loss})
        self.recorder.document.setdefault("eval_loss", []).append({"step": place.step, "loss": loss})
        say(f"step {place.step}: eval loss {loss:.4f}")
        return loss

    def _save(self, place: Place) -> None:
        about = {"epoch": place.epoch, "samples": place.samples, "identity": self.identity(),
                 "layout": asdict(self.layout)}  # fmt: skip
        if place.step == 0:
            return
        self.store.save(place.step, checkpoint.training_state(self.named, self.optimizer), about)


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


class Profiler:
    """torch's profiler over a few steps, for the communication share."""

    def __init__(self, steps: int, first: int) -> None:
        self.range = range(first, first + steps)
        self.result: dict[str, Any] | None = None
        self._tool: Any = None
        self._wall = 0.0

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[bool]:
        """Around one step; true where it is profiled."""
        if step not in self.range or dist.get_world_size() == 1:
            yield False
            return
        if self._tool is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its notices are not the job's
            self._tool = torch.profiler.profile()
            self._tool.start()
        began = time.perf_counter()
        yield True
        self._wall += time.perf_counter() - began
        if step == self.range[-1]:
            self._tool.stop()
            self.result = flight.communication_share(self._tool.events(), self._wall)
            self._tool = None


class Progress:
    """A bar on a terminal, plain lines elsewhere; rank 0 only."""

    def __init__(self, bar: Any, total: int) -> None:
        self.bar, self.total = bar, total

    def show(self, step: int, loss: float, rate: float, recorder: flight.Recorder) -> None:
        """Move the bar."""
        if self.bar is None:
            return
        now = recorder.measured()
        extra = {"loss": f"{loss:.3f}", "tok/s": f"{rate:,.0f}", "mem": f"{now['memory_bytes'] / 2**30:.2f}G"}
        if now["mfu"] is not None:
            extra["mfu"] = f"{now['mfu']:.0%}"
        if recorder.document["communication"]:
            extra["comm"] = f"{recorder.document['communication']['share']:.0%}"
        self.bar.set_postfix(extra, refresh=False)
        self.bar.update(step - self.bar.n)

    def line(self, step: int, loss: float, rate: float) -> None:
        """A plain line where there is no bar."""
        if self.bar is None:
            say(f"step {step}/{self.total}: loss {loss:.4f}, {rate:,.0f} tokens/s")


@contextlib.contextmanager
def progress(total: int, done: int) -> Iterator[Progress]:
    """The run's progress display."""
    if dist.get_rank() != 0 or not sys.stderr.isatty():
        yield Progress(None, total)
        return
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    with tqdm(total=total, initial=done, unit="step", file=sys.stderr) as bar:
        yield Progress(bar, total)


def say(text: str) -> None:
    """A plain line from rank 0, on stderr."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)  # noqa: T201  progress for a person or a pod log


if __name__ == "__main__":
    sys.exit(main())

"""The loop: steps, evaluations, checkpoints, and the reasons to stop.

Surface: SIGTERM; `torch.profiler`; stderr. Exit codes are those of sysexits.h.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from finetune import checkpoint, data, flight, optim, parallel
from finetune.config import ConfigError, JobConfig
from finetune.rows import Example
from planner.layout import Layout

DIVERGED, RESUMABLE = 65, 75  # EX_DATAERR, EX_TEMPFAIL


class StoppedError(RuntimeError):
    """The run ends before its last step, in order; carries the exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(slots=True)
class Place:
    """Where in the run the next step stands."""

    step: int = 0
    epoch: int = 0
    samples: int = 0  # of this epoch: survives another world size


class Run:
    """The loop: steps, evaluations, checkpoints, and the reasons to stop."""

    def __init__(
        self, config: JobConfig, layout: Layout, engine: parallel.Engine, named: dict[str, Any],
        optimizer: torch.optim.Optimizer, recorder: flight.Recorder, examples: Sequence[Example],
        test: Sequence[Example], pad: int,
    ) -> None:  # fmt: skip
        self.config, self.layout, self.engine, self.named = config, layout, engine, named
        self.optimizer, self.recorder = optimizer, recorder
        mesh = engine.mesh
        at = mesh.get_local_rank("dp_replicate") * layout.dp_shard + mesh.get_local_rank("dp_shard") if mesh else 0
        fixed = max(len(e.tokens) for e in (*examples, *test)) if layout.pp > 1 or layout.sequence_parallel else None
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
                began = time.perf_counter()
                for share in self.loader.epoch(place.epoch, first):
                    self._one(place, share, profile, bar, began)
                    began = time.perf_counter()  # the next batch's making counts; saving and evaluating do not
                    if place.step >= self.steps:
                        break
                else:
                    place.epoch, place.samples = place.epoch + 1, 0
                self._end_of_epoch(place)
        if self.config.save_strategy != "no" or not checkpoint.list_checkpoints(self.store.folder):
            self._save(place)
        self.store.finish()

    def _one(self, place: Place, share: data.Share, profile: Profiler, bar: Progress, began: float) -> None:
        """One optimizer step."""
        # Dropout draws the same after a resume; ranks of one data share draw alike, as TP needs.
        torch.manual_seed(self.config.seed + 1_000_003 * (place.step + 1) + self.data_rank)
        rate = optim.learning_rate(self.config, place.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with profile.at(place.step) as profiled:
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

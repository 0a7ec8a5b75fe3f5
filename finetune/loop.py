"""One run: build everything in order, then run steps, evaluations and checkpoints, and handle the reasons to stop.

Surface: SIGTERM; stderr. `Trainer.step` is one optimizer step; `parallel.Engine` is its forward and backward pass.
"""

from __future__ import annotations

import importlib.util
import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import get_scheduler

from contracts.job_config import EndedError, JobConfig
from contracts.layout import Layout
from contracts.run_record import RESUMABLE, EvalLoss, RunModel
from finetune import checkpoint, model, parallel, recorder as runs, rows, verify, weights


class DivergedError(EndedError):
    """Loss or gradients are no longer finite."""

    code = 65  # EX_DATAERR


class StoppedError(EndedError):
    """The run was asked to stop; it can resume from its checkpoint."""

    code, status = RESUMABLE, "interrupted"


@dataclass(slots=True)
class Place:
    """The position of the next step in the run."""

    step: int = 0
    epoch: int = 0
    samples: int = 0  # of this epoch: valid for another world size


class Trainer:
    """The training run."""

    def __init__(self, config: JobConfig, layout: Layout, recorder: runs.Recorder) -> None:
        self.config, self.layout, self.recorder, device = config, layout, recorder, recorder.device
        if config.tf32:
            torch.backends.cuda.matmul.allow_tf32 = True
        liger = device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None
        if config.layout.get("fused_cross_entropy") and not liger:
            recorder.note("fused_cross_entropy: Liger's kernel is not here; torch computes the loss in parts")
        self.tokenizer = rows.load_tokenizer(config)
        examples, data_counts = rows.prepare(config, config.dataset_train_split, self.tokenizer)
        test: Sequence[Any] = []
        if config.eval_strategy != "no":
            test = rows.prepare(config, config.dataset_test_split, self.tokenizer)[0]

        net = model.build_model(config, layout.precision, recorder.note, layout)
        counts = [(p.numel(), p.requires_grad) for p in net.parameters()]  # before 4-bit weights are packed
        shape = model.causal_lm(net).config
        rows.check_vocabulary((e.tokens for e in (*examples, *test)), self.tokenizer, shape.vocab_size, config)
        mesh = parallel.build_mesh(layout, device) if layout.world_size > 1 else None
        fill = partial(weights.fill, weights.open_source(config), config.seed)
        recorder.baseline_rss = runs.rss_bytes()  # with libraries and rows, without weights
        self.engine = parallel.Engine(net, layout, device, mesh, fill)
        del net
        self.named = self.engine.named_parameters()
        self.optimizer = build_optimizer(self.named.values(), config)

        parameters, trainable = sum(n for n, _ in counts), sum(n for n, grows in counts if grows)
        length = sum(len(e.tokens) for e in examples) / len(examples)
        record, effective = recorder.record, verify.observe(self.engine)
        verify.check(record, layout, effective)
        record.model = RunModel(name=config.model_name_or_path, parameters=parameters, trainable=trainable)
        record.data = {"name": config.dataset_name, "mean_tokens": length, **data_counts}
        recorder.write()
        runs.print_once(f"{record.placements}; {trainable:,} of {parameters:,} parameter values are trained")

        self.data_rank = dist.get_rank() // layout.tp % layout.data_parallel  # tp is innermost in a mesh, pp outermost
        self.loader, self.test = self._loaders(examples, test)
        self.steps = config.max_steps or math.ceil(config.num_train_epochs * self.loader.steps)
        self.share_at = build_schedule(self.optimizer, config, self.steps)
        self.store = checkpoint.Checkpoints(Path(config.output_dir), config.save_total_limit)
        self.stop_requested = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop_requested", True))

    def _loaders(self, examples: Sequence[Any], test: Sequence[Any]) -> tuple[rows.Loader, rows.Loader]:
        layout, config, fixed = self.layout, self.config, None
        if layout.pp > 1 or layout.sequence_parallel:  # one shape for the whole run; divided evenly by tp
            fixed = max(len(e.tokens) for e in (*examples, *test))
            fixed = math.ceil(fixed / layout.tp) * layout.tp
        common: Any = {"pad": self.tokenizer.pad_token_id, "rank": self.data_rank, "ranks": layout.data_parallel,
                       "seed": config.seed, "fixed_length": fixed}  # fmt: skip
        batch, times = layout.micro_batch, layout.gradient_accumulation
        train = rows.Loader(examples=examples, micro_batch=batch, micro_batches=times,
                            by_length=config.train_sampling_strategy == "group_by_length", **common)  # fmt: skip
        if layout.pp == 1:  # a pipeline evaluates in its training shape
            batch, times = config.per_device_eval_batch_size or batch, 1
        return train, rows.Loader(examples=test, shuffle=False, micro_batch=batch, micro_batches=times, **common)

    def train(self) -> None:
        """Run all remaining steps, write the last checkpoint, and export adapter, merged model or whole model."""
        config, place = self.config, self.resume()
        self.recorder.watch_memory()
        with self.recorder.profile(config.profile_steps) as profiler:
            while place.step < self.steps:
                first = math.ceil(place.samples / self.loader.global_batch)
                began = time.perf_counter()
                for share in self.loader.epoch(place.epoch, first):
                    metrics, stop = self.step(place.step, share)
                    seconds = time.perf_counter() - began
                    place.step, place.samples = place.step + 1, place.samples + self.loader.global_batch
                    self.recorder.step(place.step, seconds, metrics["loss"], share.tokens)
                    profiler.step()
                    self._after(place, metrics, share.tokens / seconds, stop)
                    began = time.perf_counter()  # the next batch's making counts; saving and evaluating do not
                    if place.step >= self.steps:
                        break
                else:
                    place.epoch, place.samples = place.epoch + 1, 0
                if config.eval_strategy == "epoch":
                    self.evaluate(place)
                if config.save_strategy == "epoch":
                    self.save(place)
                self.recorder.write()
        if config.save_strategy != "no" or not checkpoint.list_checkpoints(self.store.folder):
            self.save(place)
        self.recorder.find_fullest_rank()
        for text in verify.record_transports(self.recorder.record):
            self.recorder.note(text)  # connected later, for example by a checkpoint: the training is done
        record, last = self.recorder.record, checkpoint.list_checkpoints(self.store.folder)[-1]
        record.checkpoint = str(last)
        write = partial(checkpoint.export, config, self.layout.precision, last, self.tokenizer)
        for name, exported in checkpoint.on_rank_zero(write).items():
            setattr(record, name, exported)

    def step(self, number: int, share: rows.Share) -> tuple[dict[str, float], bool]:
        """Run one optimizer step: forward and backward of this rank's share, agreement, clipping, AdamW.

        Returns what is logged of it, and whether a rank got a request to stop; both are equal on every rank.
        """
        # Dropout repeats after a resume; ranks of one data share use the same seed, as TP requires.
        torch.manual_seed(self.config.seed + 1_000_003 * (number + 1) + self.data_rank)
        rate = self.config.learning_rate * self.share_at(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.engine.train_step(share.batches, share.counted)
        # One small all-reduce sends the loss and every rank's request to stop.
        reduced = torch.stack([loss, loss.new_tensor(float(self.stop_requested))])
        dist.all_reduce(reduced)
        mean, stop = reduced.tolist()
        norm = clip_gradients(self.named.values(), self.config.max_grad_norm, self.engine.pipeline)
        if not math.isfinite(mean) or not math.isfinite(norm):
            raise DivergedError(f"step {number + 1}: loss {mean}, gradient norm {norm}; the checkpoints remain")
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        return {"loss": mean, "learning_rate": rate, "grad_norm": norm}, stop > 0

    def _after(self, place: Place, metrics: dict[str, float], pace: float, stop: bool) -> None:
        """Do what follows a step: print a line, write a checkpoint, evaluate, or end."""
        config, step = self.config, place.step
        if len(self.recorder.losses) == 1:  # all connections for a step exist now
            verify.require_equal(verify.record_transports(self.recorder.record))
            self.recorder.write()
        if config.logging_strategy == "steps" and (step % config.logging_steps == 0 or step in (1, self.steps)):
            now, communication = self.recorder.measured(), self.recorder.record.communication
            self.recorder.log(step, {
                **metrics, "seconds": self.recorder.seconds[-1], "tokens_per_second": pace, "epoch": float(place.epoch),
                "mfu": now.mfu, "memory_bytes": now.memory_bytes,
                "communication_share": communication.share if communication else None,  # from the profiled steps on
            })  # fmt: skip
            runs.print_once(f"step {step}/{self.steps}: loss {metrics['loss']:.4f}, {pace:,.0f} tokens/s")
        if stop:
            self.save(place)
            raise StoppedError(f"SIGTERM: saved at step {step}; start again to resume")
        if config.save_strategy == "steps" and step % config.save_steps == 0:
            self.save(place)
            self.recorder.write()
        if config.eval_strategy == "steps" and step % (config.eval_steps or config.logging_steps) == 0:
            self.evaluate(place)

    def evaluate(self, place: Place) -> None:
        """Compute the mean loss per counted token of the test split."""
        total, counted = torch.zeros((), device=self.engine.device), 0
        for share in self.test.epoch(0):
            total += self.engine.eval_step(share.batches)
            counted += share.counted
        dist.all_reduce(total)
        loss = float(total) / max(1, counted)
        self.recorder.log(place.step, {"eval_loss": loss})
        self.recorder.record.eval_loss.append(EvalLoss(step=place.step, loss=loss))
        runs.print_once(f"step {place.step}: eval loss {loss:.4f}")

    def save(self, place: Place) -> None:
        """Write a checkpoint of this position."""
        about = {"epoch": place.epoch, "samples": place.samples, "layout": asdict(self.layout),
                 "identity": checkpoint.identify_run(self.config)}  # fmt: skip
        if place.step:
            self.store.save(place.step, checkpoint.training_state(self.named, self.optimizer), about)

    def resume(self) -> Place:
        """Load the checkpoint to resume from, if any."""
        path, about = checkpoint.on_rank_zero(lambda: checkpoint.find_resume(self.config))
        if path is None:
            return Place()
        self.store.load(path, checkpoint.training_state(self.named, self.optimizer, about["step"]))
        self.recorder.note(f"resumed from {path.name}, written under {about['layout']}")
        runs.print_once(f"resumed from {path}")
        return Place(step=about["step"], epoch=about["epoch"], samples=about["samples"])


# AdamW, its schedules, and a gradient norm that is correct for every sharding.


def build_optimizer(parameters: Iterable[nn.Parameter], config: JobConfig) -> torch.optim.AdamW:
    """Create AdamW for trained weights. Weights of one mesh form a group, because torch cannot fuse several meshes."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        if p.requires_grad:
            groups.setdefault((_mesh_of(p), p.ndim >= 2), []).append(p)
    decays = {True: config.weight_decay, False: 0.0}  # matrices alone decay
    parameters = [{"params": ps, "weight_decay": decays[is_matrix]} for (_, is_matrix), ps in groups.items()]
    betas = config.adam_beta1, config.adam_beta2
    return torch.optim.AdamW(parameters, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, fused=True)


def build_schedule(optimizer: torch.optim.Optimizer, config: JobConfig, steps: int) -> Callable[[int], float]:
    """Return transformers' schedule: the share of the learning rate in a step, counted from zero."""
    warmup = math.ceil(config.warmup_steps * steps) if config.warmup_steps < 1 else int(config.warmup_steps)
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    return cast(Callable[[int], float], scheduler.lr_lambdas[0])


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, pipeline: dist.ProcessGroup | None) -> float:
    """Scale gradients to a global norm of at most `limit` (0: only measure); return the norm.

    torch computes the norm of gradients of one mesh only; pipeline ranks add theirs.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        if isinstance(p.grad, DTensor) and any(placed.is_partial() for placed in p.grad.placements):
            # under sequence parallelism each norm sees a part of the tokens
            p.grad = p.grad.redistribute(placements=p.placements)
        if p.grad is not None:
            groups.setdefault(_mesh_of(p.grad), []).append(p)
    square = torch.zeros(())
    for group in groups.values():
        norm = get_total_norm([p.grad for p in group if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        square = square.to(norm.device) + norm.float().square()
    if pipeline is not None:
        dist.all_reduce(square, group=pipeline)
    total = square.sqrt()
    for group in groups.values() if limit else ():
        clip_grads_with_norm_(group, limit, total)
    return float(total)


def _mesh_of(p: torch.Tensor) -> tuple[DeviceMesh, tuple[Any, ...]] | None:
    return (p.device_mesh, tuple(p.placements)) if isinstance(p, DTensor) else None

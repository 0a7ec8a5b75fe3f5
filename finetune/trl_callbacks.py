"""Callbacks of TRL's trainer: they record each step and the evidence, and stop the run.

Surface: transformers' TrainerCallback; accelerate's AcceleratorState.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from contracts.job_config import JobConfig
from contracts.job_plan import JobPlan
from contracts.layout import Layout
from contracts.run_record import EffectiveLayout, EvalLoss
from finetune import loop, parts, recorder, verify


class Recording(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Writes the run's record as the built-in trainer does, and stops the run on SIGTERM or a loss that diverges."""

    trainer: transformers.Trainer  # set before it trains: it takes its callbacks when it is made

    def __init__(
        self, config: JobConfig, layout: Layout, plan: JobPlan, device: torch.device, made: recorder.Recorder
    ) -> None:
        self.config, self.layout, self.plan, self.device, self.recorder = config, layout, plan, device, made
        self.around, self.profiler = contextlib.ExitStack(), parts.Profiler(0, 0, layout)
        self.stop_requested, self.stopped, self.began, self.is_profiled = False, False, 0.0, False
        self.sums = torch.zeros(2, dtype=torch.float64)  # loss and tokens of this rank's micro-batches
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop_requested", True))

    def add(self, loss: torch.Tensor, tokens: Any) -> None:
        """Add one micro-batch."""
        self.sums += torch.tensor([float(loss), float(tokens)], dtype=torch.float64)

    def close(self) -> None:
        """Stop the profiler, which must not outlive the run."""
        self.around.close()
        self.profiler.close()

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Check that the layout which was built is the layout of the plan."""
        observed = observe(self.trainer, self.device)
        self.recorder.record.layout.effective = verify.check(self.layout, observed, self.plan.environment)
        first = state.global_step + recorder.WARM_UP + 1
        self.profiler = parts.Profiler(self.config.profile_steps, first, self.layout)
        self.recorder.watch_memory()

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Start the clock: the batch has been read."""
        self.is_profiled = self.around.enter_context(self.profiler.at(state.global_step))
        self.began = time.perf_counter()

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step, agree on a stop, and check the transports after the first step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, layout = time.perf_counter() - self.began, self.layout
        self.around.close()
        sums = torch.tensor([*self.sums.tolist(), self.stop_requested], dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        loss, tokens, stop = sums.tolist()
        self.sums.zero_()
        mean = loss / layout.world_size
        self.recorder.step(seconds, mean, round(tokens / (layout.tp * layout.cp)), self.is_profiled,
                           self.profiler.result)  # fmt: skip
        self.recorder.record.steps_done = state.global_step
        is_first = len(self.recorder.losses) == 1  # what a step needs is connected now
        if is_first and (wrong := verify.record_transports(self.recorder.record, self.plan)):
            raise verify.mismatch(wrong)
        if not math.isfinite(mean):
            raise loop.DivergedError(f"step {state.global_step}: loss {mean}; checkpoints are kept")
        if stop:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Write a line of metrics."""
        self.recorder.log(state.global_step, {k: v for k, v in logs.items() if isinstance(v, int | float)})
        if "loss" in logs:
            recorder.print_once(f"step {state.global_step}/{state.max_steps}: loss {float(logs['loss']):.4f}")

    def on_evaluate(self, _args: Any, state: Any, _control: Any, metrics: dict[str, float], **_: Any) -> None:
        """Record an evaluation."""
        self.recorder.record.eval_loss.append(EvalLoss(step=state.global_step, loss=metrics["eval_loss"]))

    def on_save(self, *_: Any, **_words: Any) -> None:
        """Write the record when a checkpoint is complete."""
        self.recorder.write()


def text_shape(model: Any) -> Any:
    """The configuration of the text model, which is a part of that of a model that also reads images (Gemma 3)."""
    return model.config.get_text_config()


def observe(trainer: transformers.Trainer, device: torch.device) -> EffectiveLayout:
    """The layout that accelerate built, read from its objects."""
    model, accelerator = trainer.model_wrapped, trainer.accelerator
    number = text_shape(trainer.model).num_hidden_layers
    plugin = accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    cp = accelerator.parallelism_config.cp_size if accelerator.parallelism_config else 1
    is_sharded, is_copied = isinstance(model, FSDPModule), isinstance(model, DistributedDataParallel)
    found = verify.observe_parameters(dict(model.named_parameters()), cp)
    if is_copied:
        found["dp_replicate"] = dist.get_world_size(model.process_group)
    recomputes = trainer.model.is_gradient_checkpointing or (plugin and plugin.activation_checkpointing)
    compiled = accelerator.state.dynamo_plugin.backend.value != "NO"
    return EffectiveLayout(
        **found, cp=cp, pp=1, world_size=dist.get_world_size(), stage_layers=[number], device=str(device),
        wrapper="FSDP" if is_sharded else "DDP" if is_copied else "none", backend=verify.backend_of(device),
        precision={"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        reshard_after_forward=bool(plugin.reshard_after_forward) if plugin and is_sharded else None,
        checkpointed_layers=number if recomputes else 0, compiled_layers=number if compiled else 0,
    )  # fmt: skip

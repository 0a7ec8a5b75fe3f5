"""The second trainer: TRL's SFTTrainer under the same plan, for what the built-in trainer does not have.

Surface: TRL 1.16 in the order of its scripts/sft.py, transformers' TrainerCallback, accelerate 1.15 (FSDP2 plugin,
AcceleratorState). `finetune.train` starts it where plan.json has `trl`. Without a GPU, accelerate and the planner use
DDP only. On GPUs FSDP2 has been run (docs/measurements/gpu.md), not HSDP, TP or CP.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import trl
from jinja2 import TemplateError
from transformers.trainer_utils import get_last_checkpoint

from contracts.job_config import ConfigError, JobConfig
from contracts.layout import Layout
from contracts.run_record import EvalLoss, RunModel
from finetune import checkpoint, hub, loop, recorder, rows, trl_inputs, verify


def train(config: JobConfig, layout: Layout, run_recorder: recorder.Recorder) -> None:
    """Run all remaining steps of TRL's trainer, and write the model."""
    trainer = _make_trainer(config, layout, run_recorder)
    args, record = trainer.args, run_recorder.record
    if resume := checkpoint.on_rank_zero(lambda: checkpoint.find_resume(config, "trl"))[0]:
        run_recorder.note(f"resumed from {resume.name}")
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    run_recorder.find_fullest_rank()
    record.checkpoint = get_last_checkpoint(args.output_dir)
    if trainer.stopped and trainer.state.global_step < trainer.state.max_steps:
        raise loop.StoppedError(f"SIGTERM: saved at step {trainer.state.global_step}; start again to resume")
    trainer.save_model(args.output_dir)
    setattr(record, "adapter" if config.use_peft else "saved_model", args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=config.dataset_name)


def _make_trainer(config: JobConfig, layout: Layout, run_recorder: recorder.Recorder) -> _Trainer:
    """Load the model and the rows, and write what they are to the record. Raises ConfigError for what TRL refuses."""
    plan, on_gpu = run_recorder.record.plan, run_recorder.device.type != "cpu"
    script, args, model, mixture = trl_inputs.parse(plan, config, layout, on_gpu, run_recorder.note)
    train_rows, test_rows = trl_inputs.load_data(plan, config, script, mixture, args.eval_strategy != "no")
    tokenizer = rows.load_tokenizer(config)
    transformers.set_seed(args.seed)
    options = {"revision": config.model_revision, "trust_remote_code": args.trust_remote_code,
               "attn_implementation": model.attn_implementation, "dtype": model.dtype,
               "quantization_config": trl.get_quantization_config(model), **(args.model_init_kwargs or {})}  # fmt: skip
    run_recorder.baseline_rss = recorder.rss_bytes()  # with libraries and rows, without weights
    with hub.explain_errors("model_name_or_path", model.model_name_or_path, config.model_revision):
        net = transformers.AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **options)
    args.model_init_kwargs = None
    counts = net.num_parameters()
    try:
        trainer = _Trainer(
            layout, run_recorder, model=net, args=args, train_dataset=train_rows, eval_dataset=test_rows,
            processing_class=tokenizer, peft_config=trl.get_peft_config(model),
        )  # fmt: skip
    except (ValueError, TypeError, ImportError, LookupError, AttributeError, TemplateError) as error:
        hint = " (lora_target_modules, for example all-linear)" if "target_modules" in str(error) else ""
        raise ConfigError(f"TRL {trl.__version__} refuses the run: {type(error).__name__}: {error}{hint}") from error
    trainer.remove_callback(transformers.PrinterCallback)
    tokens = [row["input_ids"] for row in trainer.train_dataset.take(1000)]
    if not tokens:
        raise ConfigError(f"dataset_name={script.dataset_name!r}: no row has a token that counts")
    rows.check_vocabulary(tokens, tokenizer, net.config.get_text_config().vocab_size, config)
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    run_recorder.record.model = RunModel(name=config.model_name_or_path, parameters=counts, trainable=trainable)
    run_recorder.record.data = {"name": script.dataset_name, "mean_tokens": statistics.fmean(map(len, tokens))}
    run_recorder.note(f"trained by TRL {trl.__version__}'s SFTTrainer")
    run_recorder.write()
    return trainer


class _Trainer(trl.SFTTrainer, transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """TRL's trainer as its own callback.

    It writes the run's record as the built-in trainer does, and stops on SIGTERM or a loss that diverges.
    """

    def __init__(self, layout: Layout, run_recorder: recorder.Recorder, **options: Any) -> None:
        self.layout, self.recorder, self.device = layout, run_recorder, run_recorder.device
        self.stop_requested, self.stopped, self.began = False, False, 0.0
        self.sums = torch.zeros(2, dtype=torch.float64)  # loss and tokens of this rank's micro-batches
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop_requested", True))
        super().__init__(callbacks=[self], **options)

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> torch.Tensor:
        """One micro-batch."""
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else mask.sum()
        loss: torch.Tensor = super().training_step(model, inputs, *arguments, **options)
        self.sums += torch.tensor([float(loss), float(tokens)], dtype=torch.float64)
        return loss

    def on_train_begin(self, *_: Any, **_words: Any) -> None:
        """Check that the layout which was built is the layout of the plan."""
        verify.check(self.recorder.record, self.layout, verify.observe_accelerate(self))
        self.recorder.watch_memory()

    def on_step_begin(self, *_: Any, **_words: Any) -> None:
        """Start the clock: the batch has been read."""
        self.began = time.perf_counter()

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step, agree on a stop, and check the transports after the first step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, layout = time.perf_counter() - self.began, self.layout
        sums = torch.tensor([*self.sums.tolist(), self.stop_requested], dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        loss, tokens, stop = sums.tolist()
        self.sums.zero_()
        mean = loss / layout.world_size
        self.recorder.step(state.global_step, seconds, mean, round(tokens / (layout.tp * layout.cp)))
        if len(self.recorder.losses) == 1:  # what a step needs is connected now
            verify.require_equal(verify.record_transports(self.recorder.record))
            self.recorder.write()
        if not math.isfinite(mean):
            raise loop.DivergedError(f"step {state.global_step}: loss {mean}; the checkpoints remain")
        if stop:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Write a line of metrics, and record the loss of an evaluation."""
        self.recorder.log(state.global_step, {k: v for k, v in logs.items() if isinstance(v, int | float)})
        if "eval_loss" in logs:
            self.recorder.record.eval_loss.append(EvalLoss(step=state.global_step, loss=logs["eval_loss"]))
        if "loss" in logs:
            recorder.print_once(f"step {state.global_step}/{state.max_steps}: loss {float(logs['loss']):.4f}")

    def on_save(self, args: Any, state: Any, *_: Any, **_words: Any) -> None:
        """Write the record when a checkpoint is complete, and into the checkpoint of which run it is."""
        if self.recorder.writes:
            about = {"identity": checkpoint.identify_run(self.recorder.record.plan.config or JobConfig(), "trl")}
            Path(args.output_dir, f"checkpoint-{state.global_step}", checkpoint.STATE).write_text(json.dumps(about))
        self.recorder.write()

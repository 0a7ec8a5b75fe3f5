"""The second trainer: TRL's SFTTrainer under the same plan, for what the built-in trainer does not have.

Surface: TRL 1.16, in the order of its scripts/sft.py. `finetune.train` starts it where plan.json has `trl`.
`trl_inputs` makes its arguments and its rows, `trl_callbacks` writes its record. Without a GPU accelerate runs DDP
only, so the planner plans only DDP there. FSDP2, HSDP, TP and CP have never been run on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from transformers.trainer_utils import get_last_checkpoint

from contracts.job_config import ConfigError, JobConfig
from contracts.job_plan import JobPlan
from contracts.layout import Layout
from contracts.run_record import RunModel
from finetune import hub, loop, recorder, rows, trl_inputs
from finetune.trl_callbacks import Recording, text_shape


def train(config: JobConfig, layout: Layout, plan: JobPlan, device: torch.device, made: recorder.Recorder) -> None:
    """Run all remaining steps of TRL's trainer, and write the model."""
    trainer = _make_trainer(config, layout, plan, device, made)
    args, seen, record = trainer.args, trainer.seen, made.record
    resume = find_resume(config.resume_from_checkpoint, args.output_dir)
    if resume:
        made.note(f"resumed from {Path(resume).name}")
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        seen.close()
    made.profile(seen.profiler.result)
    made.find_fullest_rank()
    record.checkpoint = get_last_checkpoint(args.output_dir)
    if seen.stopped and trainer.state.global_step < trainer.state.max_steps:
        raise loop.StoppedError(f"SIGTERM: saved at step {trainer.state.global_step}; start again to go on")
    trainer.save_model(args.output_dir)
    setattr(record, "adapter" if config.use_peft else "saved_model", args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=config.dataset_name)


def find_resume(requested: bool | str | None, output_dir: str) -> str | None:
    """The checkpoint to resume from: "auto" and true take the newest. Raises ConfigError if there is none."""
    newest = get_last_checkpoint(output_dir)
    found = newest if requested in ("auto", True) else str(requested) if requested else None
    if requested and requested != "auto" and not (found and Path(found).is_dir()):
        raise ConfigError(f"resume_from_checkpoint={requested!r}: there is no such checkpoint")
    return found


def _make_trainer(
    config: JobConfig, layout: Layout, plan: JobPlan, device: torch.device, made: recorder.Recorder
) -> _Trainer:
    """Load the model and the rows, and write what they are to the record. Raises ConfigError for what TRL refuses."""
    script, args, model, mixture = trl_inputs.parse(plan, config, layout, device.type != "cpu", made.note)
    made.open_logs(())
    train_rows, test_rows = trl_inputs.load_data(plan, config, script, mixture, args.eval_strategy != "no")
    transformers.set_seed(args.seed)
    options = {"revision": config.model_revision, "trust_remote_code": args.trust_remote_code,
               "attn_implementation": model.attn_implementation, "dtype": model.dtype,
               "quantization_config": trl.get_quantization_config(model), **(args.model_init_kwargs or {})}  # fmt: skip
    with hub.asking("model_name_or_path", model.model_name_or_path, config.model_revision):
        net = transformers.AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **options)
    args.model_init_kwargs = None
    counts = sum(map(loop.weights_in, net.parameters()))
    seen = Recording(config, layout, plan, device, made)
    try:
        trainer = _Trainer(
            model=net, args=args, train_dataset=train_rows, eval_dataset=test_rows,
            processing_class=rows.load_tokenizer(config), peft_config=trl.get_peft_config(model), callbacks=[seen],
        )  # fmt: skip
    except (ValueError, TypeError, ImportError, KeyError) as error:
        raise ConfigError(f"TRL {trl.__version__} refuses the run: {error}") from error
    trainer.seen, seen.trainer = seen, trainer
    trainer.remove_callback(transformers.PrinterCallback)
    net, examples = trainer.model, trainer.train_dataset
    lengths = [len(row["input_ids"]) for row in examples.take(1000)]
    mean = sum(lengths) / len(lengths)
    made.flops = recorder.flops_per_token(*loop.multiplied(net), text_shape(net), mean)
    trainable = sum(p.numel() for p in net.parameters() if p.requires_grad)
    made.record.model = RunModel(name=config.model_name_or_path, parameters=counts, trainable=trainable)
    made.record.data = {"name": config.dataset_name, "mean_tokens": mean}
    made.note(f"trained by TRL {trl.__version__}'s SFTTrainer")
    made.write()
    return trainer


class _Trainer(trl.SFTTrainer):  # type: ignore[misc, unused-ignore]
    """TRL's trainer, which reports the loss and the tokens of each micro-batch to the callbacks."""

    seen: Recording

    def training_step(self, model: Any, inputs: dict[str, Any], *words: Any, **more: Any) -> torch.Tensor:
        """One micro-batch."""
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else mask.sum()
        loss: torch.Tensor = super().training_step(model, inputs, *words, **more)
        self.seen.add(loss, tokens)
        return loss

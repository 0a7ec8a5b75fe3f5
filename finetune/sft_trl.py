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


class Run:
    """One run of TRL's trainer."""

    def __init__(
        self, config: JobConfig, layout: Layout, plan: JobPlan, device: torch.device, made: recorder.Recorder
    ) -> None:
        self.config, self.layout, self.plan, self.recorder, self.device = config, layout, plan, made, device
        script, self.args, model, mixture = trl_inputs.parse(plan, config, layout, device.type != "cpu", made.note)
        made.open_logs(())
        train, test = trl_inputs.load_data(plan, config, script, mixture, self.args.eval_strategy != "no")
        transformers.set_seed(self.args.seed)
        options = {"revision": config.model_revision, "trust_remote_code": self.args.trust_remote_code,
                   "attn_implementation": model.attn_implementation, "dtype": model.dtype,
                   "quantization_config": trl.get_quantization_config(model),
                   **(self.args.model_init_kwargs or {})}  # fmt: skip
        with hub.asking("model_name_or_path", model.model_name_or_path, config.model_revision):
            net = transformers.AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **options)
        self.args.model_init_kwargs = None
        counts = sum(map(loop.weights_in, net.parameters()))
        seen = Recording(self)
        try:
            self.trainer = _Trainer(
                model=net, args=self.args, train_dataset=train, eval_dataset=test,
                processing_class=rows.load_tokenizer(config), peft_config=trl.get_peft_config(model),
                callbacks=[seen],
            )  # fmt: skip
            self.trainer.seen = seen
        except (ValueError, TypeError, ImportError, KeyError) as error:
            raise ConfigError(f"TRL {trl.__version__} refuses the run: {error}") from error
        self.trainer.remove_callback(transformers.PrinterCallback)
        net, examples = self.trainer.model, self.trainer.train_dataset
        lengths = [len(row["input_ids"]) for row in examples.take(1000)]
        mean = sum(lengths) / len(lengths)
        made.flops = recorder.flops_per_token(*loop.multiplied(net), text_shape(net), mean)
        trainable = sum(p.numel() for p in net.parameters() if p.requires_grad)
        made.record.model = RunModel(name=config.model_name_or_path, parameters=counts, trainable=trainable)
        made.record.data = {"name": config.dataset_name, "mean_tokens": mean}
        made.note(f"trained by TRL {trl.__version__}'s SFTTrainer")
        made.write()

    def _find_resume(self) -> str | None:
        """The checkpoint to resume from: "auto" and true take the newest. Raises ConfigError if there is none."""
        asked, newest = self.config.resume_from_checkpoint, get_last_checkpoint(self.args.output_dir)
        found = newest if asked in ("auto", True) else str(asked) if asked else None
        if asked and asked != "auto" and not (found and Path(found).is_dir()):
            raise ConfigError(f"resume_from_checkpoint={asked!r}: there is no such checkpoint")
        return found

    def train(self) -> None:
        """Run all remaining steps, and write the model."""
        resume = self._find_resume()
        if resume:
            self.recorder.note(f"resumed from {Path(resume).name}")
        try:
            self.trainer.train(resume_from_checkpoint=resume)
        finally:
            self.trainer.seen.close()
        trainer, record = self.trainer, self.recorder.record
        self.recorder.profile(self.trainer.seen.profiler.result)
        self.recorder.find_fullest_rank()
        record.checkpoint = get_last_checkpoint(self.args.output_dir)
        if trainer.seen.stopped and trainer.state.global_step < trainer.state.max_steps:
            raise loop.StoppedError(f"SIGTERM: saved at step {trainer.state.global_step}; start again to resume")
        trainer.save_model(self.args.output_dir)
        setattr(record, "adapter" if self.config.use_peft else "saved_model", self.args.output_dir)
        if self.args.push_to_hub:
            trainer.push_to_hub(dataset_name=self.config.dataset_name)


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

"""The second trainer: TRL's SFTTrainer under the same plan, for what the built-in trainer does not have.

Surface: TRL 1.16 (TrlParser, SFTTrainer and the order of its scripts/sft.py), transformers' TrainerCallback, and
accelerate 1.15 (FSDP2 plugin, ParallelismConfig). `finetune.train` starts it where plan.json has `trl`. Without an
accelerator accelerate has DDP alone, and the planner asks for nothing else there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
import trl  # type: ignore[import-untyped, unused-ignore]
from accelerate.parallelism_config import ParallelismConfig  # type: ignore[import-untyped, unused-ignore]
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import get_last_checkpoint

from contracts import trl as names
from contracts.job_config import ConfigError, JobConfig
from contracts.job_plan import JobPlan
from contracts.layout import Layout
from contracts.run_record import RunModel
from finetune import hub, loop, mixtures, recorder, rows
from finetune.trl_callbacks import Recording


def parse(plan: JobPlan, config: JobConfig, layout: Layout, on_gpu: bool, note: Any) -> tuple[Any, ...]:
    """TRL's arguments of the plan: the file's settings, and the layout in accelerate's words. Raises ConfigError."""
    settings = {**(plan.trl or {}), "output_dir": config.output_dir, "model_revision": config.model_revision}
    os.environ.update({str(name): str(value) for name, value in (settings.pop("env", None) or {}).items()})
    settings.pop("dataset_mixture", None)
    settings.setdefault("disable_tqdm", not sys.stderr.isatty())
    if settings.get("attn_implementation") == "flash_attention_2" and not (on_gpu and _is_here("flash_attn")):
        settings["attn_implementation"] = "sdpa"
        note("attn_implementation: flash_attention_2 is not here (flash-attn and a GPU); sdpa is used")
    if settings.get("use_liger_kernel") and not (on_gpu and _is_here("liger_kernel")):
        del settings["use_liger_kernel"]
        note("use_liger_kernel: Liger's kernel is not here (liger-kernel and a GPU); TRL's own loss is used")
    if "8bit" in str(settings.get("optim")) and not on_gpu:
        note(f"optim: {settings.pop('optim')} needs a GPU; adamw_torch_fused is used")
    if isinstance(targets := settings.get("report_to"), str | list):
        wanted = [targets] if isinstance(targets, str) else targets
        here = [one for one in wanted if one in ("none", "all", *get_available_reporting_integrations())]
        for one in set(wanted) - set(here):
            note(f"report_to: {one} is not installed; metrics.jsonl holds the same numbers")
        settings["report_to"] = here or "none"
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig))
    known = {action.dest for action in parser._actions}
    for name in [name for name in settings if name not in known]:
        if name not in names.option_names().no_effect:
            raise ConfigError(f"unknown setting {name!r}: TRL {trl.__version__} has none of that name")
        note(f"{name}: no effect, TRL {trl.__version__} has no such setting")
        del settings[name]
    parser.set_defaults_with_config(**settings, **_of_layout(layout, on_gpu))
    try:
        return tuple(parser.parse_args_into_dataclasses(args=[]))
    except (ValueError, TypeError, ImportError, SystemExit) as error:
        raise ConfigError(f"TRL {trl.__version__} refuses the settings: {error}") from error


def _is_here(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _of_layout(layout: Layout, on_gpu: bool) -> dict[str, Any]:
    recompute, sharded = layout.checkpointing != "none", layout.sharding == "zero3" and layout.dp_shard > 1
    made: dict[str, Any] = {
        "per_device_train_batch_size": layout.micro_batch, "bf16": layout.precision == "bf16",
        "gradient_accumulation_steps": layout.gradient_accumulation, "fp16": layout.precision == "fp16",
        "torch_compile": layout.compile, "use_cpu": not on_gpu, "gradient_checkpointing": recompute and not sharded,
    }  # fmt: skip
    if sharded:  # FSDP recomputes by itself: both together would do it twice
        made["fsdp"], made["fsdp_config"] = True, {
            "version": 2, "reshard_after_forward": layout.reshard_after_forward, "activation_checkpointing": recompute,
            "cpu_offload": layout.offload == "all", "cpu_ram_efficient_loading": True,
        }  # fmt: skip
    if max(layout.tp, layout.cp) > 1 or (sharded and layout.dp_replicate > 1):
        made["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=layout.dp_replicate, dp_shard_size=layout.dp_shard, tp_size=layout.tp,
            cp_size=layout.cp,
        )  # fmt: skip
    return made


class Run:
    """One run of TRL's trainer."""

    def __init__(
        self, config: JobConfig, layout: Layout, plan: JobPlan, device: torch.device, made: recorder.Recorder
    ) -> None:
        self.config, self.layout, self.plan, self.recorder, self.device = config, layout, plan, made, device
        script, self.args, model, mixture = parse(plan, config, layout, device.type != "cpu", made.note)
        made.open_logs(())
        train, test = mixtures.load_data(plan, config, script, mixture, self.args.eval_strategy != "no")
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
        self.length, mean = max(lengths), sum(lengths) / len(lengths)
        made.flops = recorder.flops_per_token(*loop.multiplied(net), net.config, mean)
        trainable = sum(p.numel() for p in net.parameters() if p.requires_grad)
        made.record.model = RunModel(name=config.model_name_or_path, parameters=counts, trainable=trainable)
        made.record.data = {"name": config.dataset_name, "mean_tokens": mean}
        made.note(f"trained by TRL {trl.__version__}'s SFTTrainer")
        made.write()

    def train(self) -> None:
        """Run all remaining steps, and write the model."""
        resume = self.config.resume_from_checkpoint
        if resume == "auto":
            resume = get_last_checkpoint(self.args.output_dir)
        try:
            self.trainer.train(resume_from_checkpoint=resume or None)
        finally:
            self.trainer.seen.close()
        trainer, record = self.trainer, self.recorder.record
        self.recorder.profile(self.trainer.seen.profiler.result)
        fullest = torch.tensor(self.recorder.peak_memory(), device=self.device)
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
        self.recorder.fullest = recorder.Peak(*fullest.tolist())
        record.checkpoint = get_last_checkpoint(self.args.output_dir)
        if trainer.seen.stopped and trainer.state.global_step < trainer.state.max_steps:
            raise loop.StoppedError(f"SIGTERM: saved at step {trainer.state.global_step}; start again to go on")
        trainer.save_model(self.args.output_dir)
        setattr(record, "adapter" if self.config.use_peft else "saved_model", self.args.output_dir)
        if self.args.push_to_hub:
            trainer.push_to_hub(dataset_name=self.config.dataset_name)


class _Trainer(trl.SFTTrainer):  # type: ignore[misc, unused-ignore]
    """TRL's trainer, which adds up what each step computed."""

    seen: Recording

    def training_step(self, model: Any, inputs: dict[str, Any], *words: Any, **more: Any) -> torch.Tensor:
        """One micro-batch."""
        kept = inputs.get("attention_mask", inputs["input_ids"])
        tokens = kept.sum() if kept is not inputs["input_ids"] else kept.numel()
        loss: torch.Tensor = super().training_step(model, inputs, *words, **more)
        self.seen.add(loss, tokens)
        return loss

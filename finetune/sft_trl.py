"""The second trainer: TRL's SFTTrainer under the same plan, for what the built-in trainer does not have.

Surface: TRL 1.16, in the order of its scripts/sft.py (TrlParser and its dataclasses), transformers' TrainerCallback,
accelerate 1.15 (FSDP2 plugin, ParallelismConfig, AcceleratorState), `datasets` over the files that `finetune.rows`
finds, and alignment-handbook, src/alignment/data.py. `finetune.train` starts it where plan.json has `trl`. Without a
GPU, accelerate and the planner use DDP only. On GPUs FSDP2 has been run (docs/measurements/gpu.md), not HSDP, TP or CP.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import signal
import statistics
import sys
import time
from typing import Any

import datasets
import torch
import torch.distributed as dist
import transformers
import trl
from accelerate.parallelism_config import ParallelismConfig
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from contracts import trl as names
from contracts.job_config import ConfigError, JobConfig, JobPlan
from contracts.layout import Layout
from contracts.run_record import EffectiveLayout, EvalLoss, RunModel
from finetune import checkpoint, hub, loop, recorder, rows, verify
from planner.stacks.exports import make_trl_settings


def train(config: JobConfig, layout: Layout, run_recorder: recorder.Recorder) -> None:
    """Run all remaining steps of TRL's trainer, and write the model."""
    trainer = _make_trainer(config, layout, run_recorder)
    args, record = trainer.args, run_recorder.record
    if resume := checkpoint.find_resume(config, TRAINER_STATE_NAME):
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
    plan = run_recorder.record.plan
    script, args, model, mixture = parse(plan, config, layout, run_recorder.device.type != "cpu", run_recorder.note)
    train_rows, test_rows = load_data(plan, config, script, mixture, args.eval_strategy != "no")
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
            processing_class=rows.load_tokenizer(config), peft_config=trl.get_peft_config(model),
        )  # fmt: skip
    except (ValueError, TypeError, ImportError, KeyError) as error:
        raise ConfigError(f"TRL {trl.__version__} refuses the run: {error}") from error
    trainer.remove_callback(transformers.PrinterCallback)
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset.take(1000)]
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    run_recorder.record.model = RunModel(name=config.model_name_or_path, parameters=counts, trainable=trainable)
    run_recorder.record.data = {"name": config.dataset_name, "mean_tokens": statistics.fmean(lengths)}
    run_recorder.note(f"trained by TRL {trl.__version__}'s SFTTrainer")
    run_recorder.write()
    return trainer


# Its inputs: the arguments of TRL's parser, from the plan, and the rows.


def parse(plan: JobPlan, config: JobConfig, layout: Layout, on_gpu: bool, note: Any) -> tuple[Any, ...]:
    """TRL's arguments for the plan: the file's settings, and the layout as accelerate names it. Raises ConfigError."""
    settings = {**(plan.trl or {}), "output_dir": config.output_dir, "model_revision": config.model_revision}
    os.environ.update({str(name): str(value) for name, value in (settings.pop("env", None) or {}).items()})
    settings.pop("dataset_mixture", None)
    settings.setdefault("disable_tqdm", not sys.stderr.isatty())
    settings.setdefault("use_bnb_nested_quant", True)
    has_flash = on_gpu and layout.cp == 1 and importlib.util.find_spec("flash_attn") is not None
    runs = {"attn_implementation": has_flash or settings.get("attn_implementation") != "flash_attention_2",
            "use_liger_kernel": on_gpu and importlib.util.find_spec("liger_kernel") is not None,
            "optim": on_gpu or "8bit" not in str(settings.get("optim"))}  # fmt: skip
    for name in [name for name in runs if settings.get(name) and not runs[name]]:
        note(f"{name}: {settings.pop(name)} needs a GPU, its package and, for attention, cp = 1; TRL's default is used")
    if isinstance(targets := settings.get("report_to"), str | list):
        targets = {targets} if isinstance(targets, str) else {*targets}
        missing = targets - {"none", "all", *get_available_reporting_integrations()}
        if missing:
            note(f"report_to: not installed: {', '.join(sorted(missing))}; metrics.jsonl holds the same numbers")
        settings["report_to"] = sorted(targets - missing) or "none"
    of_layout = make_trl_settings(layout)
    accumulation = of_layout.pop("accelerator_config", {}).get("gradient_accumulation_kwargs", {})
    if max(layout.tp, layout.cp) > 1 or ("fsdp" in of_layout and layout.dp_replicate > 1):
        of_layout["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=layout.dp_replicate, dp_shard_size=layout.dp_shard, tp_size=layout.tp, cp_size=layout.cp
        )
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig))
    unknown = parser.set_defaults_with_config(**{**settings, **of_layout, "use_cpu": not on_gpu})[::2]
    for name in (option.removeprefix("--") for option in unknown):
        if name not in {*names.option_names()["no_effect"], *names.option_names()["only"]}:
            raise ConfigError(f"unknown setting {name!r}: TRL {trl.__version__} has no such setting")
        note(f"{name}: no effect, TRL {trl.__version__} has no such setting")
    try:
        parsed = tuple(parser.parse_args_into_dataclasses(args=[]))
    except (OSError, ValueError, TypeError, ImportError, SystemExit) as error:
        raise ConfigError(f"TRL {trl.__version__} refuses the settings: {error}") from error
    accelerator = parsed[1].accelerator_config  # read by transformers: from a mapping, JSON text or a file
    given = accelerator.gradient_accumulation_kwargs
    if not isinstance(given, dict | None):
        raise ConfigError(f"accelerator_config.gradient_accumulation_kwargs={given!r}: must be a mapping")
    accelerator.gradient_accumulation_kwargs = {**accumulation, **(given or {})}
    return parsed


def load_data(plan: JobPlan, config: JobConfig, script: Any, mixture: Any, tested: bool) -> tuple[Any, Any]:
    """Load the rows to train and to evaluate on: splits of a data set, or a mixture of TRL or the alignment handbook.

    Raises ConfigError for rows that cannot be read.
    """
    if (handbook_mixture := (plan.trl or {}).get("dataset_mixture")) is not None:
        splits = _mix_as_handbook(handbook_mixture, config)
    elif mixture.datasets:
        splits = trl.get_dataset(mixture)
    else:
        splits = {"train": _load_split(config, config.dataset_train_split, script.dataset_streaming)}
        if tested:
            splits["test"] = _load_split(config, config.dataset_test_split, False)
    if tested and "test" not in splits:
        raise ConfigError("eval_strategy: the mixture has no rows to evaluate on; set its test_split_size")
    return splits["train"], splits["test"] if tested else None


def _mix_as_handbook(mixture: Any, config: JobConfig) -> Any:
    """Mix as alignment-handbook, src/alignment/data.py: shuffle each and cut it to its weight, then shuffle all."""
    pieces = mixture.get("datasets") if isinstance(mixture, dict) else None
    if not isinstance(pieces, list) or not pieces or not all(isinstance(one, dict) and "id" in one for one in pieces):
        raise ConfigError("dataset_mixture: must have datasets, a list of mappings with id")
    seed, size, parts = mixture.get("seed", 0), mixture.get("test_split_size"), []
    for entry in pieces:
        named_config = dataclasses.replace(config, dataset_name=entry["id"], dataset_config=entry.get("config"))
        piece = _load_split(named_config, entry.get("split", "train"), False)
        piece = piece.select_columns(entry["columns"]) if entry.get("columns") else piece
        weight = entry.get("weight")
        parts.append(piece if weight is None else piece.shuffle(seed).select(range(int(len(piece) * weight))))
    mixed = datasets.concatenate_datasets(parts).shuffle(seed)
    return mixed.train_test_split(size, seed=seed) if size else {"train": mixed}


def _load_split(config: JobConfig, split: str, streaming: bool) -> Any:
    files = rows.find_files(config, split)
    kind = rows.get_reader(files[0])
    try:
        dataset = datasets.load_dataset(kind, data_files=[*map(str, files)], split="train", streaming=streaming)
    except datasets.exceptions.DatasetsError as error:
        raise rows.unreadable(f"dataset_name={config.dataset_name!r}: not {kind}", error) from error
    dataset = dataset if config.dataset_rows is None else dataset.take(config.dataset_rows)
    first: dict[str, Any] = next(iter(dataset), {})
    return dataset if rows.make_messages(first) is first else dataset.map(rows.make_messages)


# What is recorded of the run, and what stops it.


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
        verify.check(self.recorder.record, self.layout, observe(self))
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


def observe(trainer: _Trainer) -> EffectiveLayout:
    """Return the layout that accelerate built, read from its objects."""
    model, accelerator = trainer.model_wrapped, trainer.accelerator
    layers = trainer.model.config.get_text_config().num_hidden_layers  # Gemma 3 also has an image model
    cp = accelerator.parallelism_config.cp_size if accelerator.parallelism_config else 1
    recomputes = trainer.model.is_gradient_checkpointing or (
        trainer.is_fsdp_enabled and accelerator.state.fsdp_plugin.activation_checkpointing
    )
    return EffectiveLayout(
        **verify.observe_modules([model], dict(model.named_parameters()), trainer.device, cp),
        precision={"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision),
        pp=1, stage_layers=[layers], checkpointed_layers=layers if recomputes else 0,
    )  # fmt: skip

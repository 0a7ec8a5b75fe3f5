"""The inputs of TRL's trainer: the arguments of its parser, from the plan, and the rows.

Surface: TRL 1.16 (TrlParser and the dataclasses of its scripts/sft.py), accelerate 1.15 (FSDP2 plugin,
ParallelismConfig), `datasets`, over the files that `finetune.rows` finds; alignment-handbook, src/alignment/data.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from typing import Any

import datasets
import trl
from accelerate.parallelism_config import ParallelismConfig
from transformers.integrations import get_available_reporting_integrations

from contracts import trl as names
from contracts.job_config import ConfigError, JobConfig
from contracts.job_plan import JobPlan
from contracts.layout import Layout
from finetune import hub, rows
from finetune.model import usable_attention


def parse(plan: JobPlan, config: JobConfig, layout: Layout, on_gpu: bool, note: Any) -> tuple[Any, ...]:
    """TRL's arguments for the plan: the file's settings, and the layout as accelerate names it. Raises ConfigError."""
    settings = {**(plan.trl or {}), "output_dir": config.output_dir, "model_revision": config.model_revision}
    os.environ.update({str(name): str(value) for name, value in (settings.pop("env", None) or {}).items()})
    settings.pop("dataset_mixture", None)
    settings.setdefault("disable_tqdm", not sys.stderr.isatty())
    if "attn_implementation" in settings:
        settings["attn_implementation"] = usable_attention(settings["attn_implementation"], note)
    if settings.get("use_liger_kernel") and not (on_gpu and importlib.util.find_spec("liger_kernel")):
        del settings["use_liger_kernel"]
        note("use_liger_kernel: Liger's kernels are not here (liger-kernel and a GPU); the model's own are used")
    if "8bit" in str(settings.get("optim")) and not on_gpu:
        note(f"optim: {settings.pop('optim')} needs a GPU; adamw_torch_fused is used")
    if isinstance(targets := settings.get("report_to"), str | list):
        targets = [targets] if isinstance(targets, str) else targets
        installed = [one for one in targets if one in ("none", "all", *get_available_reporting_integrations())]
        for one in sorted({*targets} - {*installed}):
            note(f"report_to: {one} is not installed; metrics.jsonl holds the same numbers")
        settings["report_to"] = installed or "none"
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig))
    known = {action.dest for action in parser._actions}
    for name in [name for name in settings if name not in known]:
        if name not in names.option_names().no_effect:
            raise ConfigError(f"unknown setting {name!r}: TRL {trl.__version__} has no such setting")
        note(f"{name}: no effect, TRL {trl.__version__} has no such setting")
        del settings[name]
    parser.set_defaults_with_config(**settings, **_of_layout(layout, on_gpu))
    try:
        return tuple(parser.parse_args_into_dataclasses(args=[]))
    except (ValueError, TypeError, ImportError, SystemExit) as error:
        raise ConfigError(f"TRL {trl.__version__} refuses the settings: {error}") from error


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


def load_data(plan: JobPlan, config: JobConfig, script: Any, mixture: Any, tested: bool) -> tuple[Any, Any]:
    """The rows to train and to evaluate on: a data set's splits, or a mixture as TRL or the alignment handbook has.

    Raises ConfigError for rows that cannot be read.
    """
    own = (plan.trl or {}).get("dataset_mixture")
    if own is None and not mixture.datasets:
        train = _split(config, config.dataset_train_split, script.dataset_streaming)
        return train, _split(config, config.dataset_test_split, False) if tested else None
    if own is None:
        made = trl.get_dataset(mixture)
    else:  # alignment-handbook, src/alignment/data.py: each shuffled and cut to its weight, then all shuffled
        seed, found = own.get("seed", 0), []
        for one in own.get("datasets") or []:
            named = dataclasses.replace(config, dataset_name=one["id"], dataset_config=one.get("config"))
            piece = _split(named, one.get("split", "train"), False)
            piece = piece.select_columns(one["columns"]) if one.get("columns") else piece
            weight = one.get("weight")
            found.append(piece if weight is None else piece.shuffle(seed).select(range(int(len(piece) * weight))))
        whole, size = datasets.concatenate_datasets(found).shuffle(seed), own.get("test_split_size")
        made = whole.train_test_split(size, seed=seed) if size else {"train": whole}
    if tested and "test" not in made:
        raise ConfigError("eval_strategy: the mixture has no rows to evaluate on; set its test_split_size")
    return made["train"], made["test"] if tested else None


def _split(config: JobConfig, split: str, streaming: bool) -> Any:
    files = rows.find_files(config, split)
    kind, names = rows.reader_of(files[0]), [str(path) for path in files]
    try:
        found = datasets.load_dataset(kind, data_files=names, split="train", streaming=streaming)
    except datasets.exceptions.DatasetsError as error:
        why = error.__cause__ or error
        if isinstance(why, OSError) and why.errno in hub.DISK_ERRORS:
            raise why from error
        raise ConfigError(f"dataset_name={config.dataset_name!r}: not {kind}: {rows.first_line(why)}") from error
    found = found if config.dataset_rows is None else found.take(config.dataset_rows)
    if {"question", "answer"} <= set(found.column_names) and not {"messages", "prompt"} & set(found.column_names):
        return found.map(rows.as_messages, remove_columns=found.column_names)
    return found

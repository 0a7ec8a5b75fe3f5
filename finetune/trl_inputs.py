"""The inputs of TRL's trainer: the arguments of its parser, made from the plan, and the rows to train on.

Surface: TRL 1.16 (TrlParser and the dataclasses of its scripts/sft.py), accelerate's ParallelismConfig, `datasets` over
the files that `finetune.rows` finds, and alignment-handbook, src/alignment/data.py.
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
from contracts.job_config import ConfigError, JobConfig, JobPlan
from contracts.layout import Layout
from finetune import rows
from planner.stacks.exports import make_trl_settings


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
        piece = _load_split(named_config, entry.get("split", "train"), False, entry.get("columns"))
        weight = entry.get("weight")
        parts.append(piece if weight is None else piece.shuffle(seed).select(range(int(len(piece) * weight))))
    mixed = datasets.concatenate_datasets(parts).shuffle(seed)
    return mixed.train_test_split(size, seed=seed) if size else {"train": mixed}


def _load_split(config: JobConfig, split: str, streaming: bool, columns: list[str] | None = None) -> Any:
    """Load the rows of one split, of these columns, in a form that TRL reads."""
    files = rows.find_files(config, split)
    kind = rows.READERS[files[0].suffix]
    try:
        options = rows.read_header(files[0]) if kind == "csv" else {}
        options |= {"data_files": [*map(str, files)], "streaming": streaming}
        dataset = datasets.load_dataset(kind, split="train", **options)
        dataset = dataset.select_columns(columns) if columns else dataset
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        place = f"not {kind} (cached in {datasets.config.HF_DATASETS_CACHE})"
        raise rows.unreadable(f"dataset_name={config.dataset_name!r}: {place}", error) from error
    dataset = dataset if config.dataset_rows is None else dataset.take(config.dataset_rows)
    first: dict[str, Any] = next(iter(dataset), {})
    row = rows.make_messages(first)
    dataset = dataset if row is first else dataset.map(rows.make_messages)
    if "messages" in row and "completion" not in row:  # TRL would read these in their place
        return dataset.remove_columns([*{"conversations", "prompt"} & row.keys()])
    if not {"completion", config.dataset_text_field, "input_ids"} & row.keys():
        raise ConfigError(f"{files[0]}: a row holds {sorted(row)}: needs {rows.FORMS} or {config.dataset_text_field!r}")
    return dataset

"""The rows of TRL's trainer: the splits of a data set, or a mixture in TRL's or in the alignment handbook's words.

Surface: `datasets`, over the files that `finetune.rows` finds; alignment-handbook, src/alignment/data.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import datasets
import trl  # type: ignore[import-untyped, unused-ignore]

from contracts.job_config import ConfigError, JobConfig
from contracts.job_plan import JobPlan
from finetune import rows


def load_data(plan: JobPlan, config: JobConfig, script: Any, mixture: Any, tested: bool) -> tuple[Any, Any]:
    """The rows to train and to evaluate on: a data set's splits, or a mixture as TRL or the alignment handbook has."""
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
    files = [str(path) for path in rows.find_files(config, split)]
    kind = rows.READERS[Path(files[0]).suffix]
    found = datasets.load_dataset(kind, data_files=files, split="train", streaming=streaming)
    found = found if config.dataset_rows is None else found.take(config.dataset_rows)
    if {"question", "answer"} <= set(found.column_names) and not {"messages", "prompt"} & set(found.column_names):

        def talk(row: dict[str, Any]) -> dict[str, Any]:
            turns = [("user", row["question"]), ("assistant", row["answer"])]
            return {"messages": [{"role": role, "content": content} for role, content in turns]}

        return found.map(talk, remove_columns=found.column_names)
    return found

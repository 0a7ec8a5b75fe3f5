"""The rows of the data set that a job trains on: counted, and measured with the model's tokenizer, in a child process.

The planner's process loads no transformers. Where data or tokenizer are not at hand the rows stay unknown, and the
advice says why.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.advice.request import Request, rows_of
from agent.base.inputs import InputError
from contracts import bounded
from planner.forecast.models import hub_id

TIMEOUT_SECONDS = 120.0  # a data set may first have to be fetched
EPOCHS = 3.0  # the job's own default (contracts/default.yaml)
FILES = (".jsonl", ".json", ".parquet", ".csv")  # as finetune.rows reads them
WRONG_DATA = 3  # finetune.lengths' exit code where the rows themselves are at fault, and no tokenizer or hub
_NAMES = (
    "dataset_name", "dataset_revision", "dataset_config", "dataset_train_split", "dataset_text_field", "dataset_rows",
    "tokenizer_name", "tokenizer_revision", "model_name_or_path", "model_revision", "chat_template",
    "completion_only_loss",
)  # fmt: skip


def with_rows(request: Request, settings: Mapping[str, Any]) -> Request:
    """The question with the lengths of the rows that these settings of the job name; user's lengths stand above them.

    The data that the job makes itself, and a model of a name that no hub has, are left as they are. Raises InputError
    where rows of this host cannot be read.
    """
    name = settings.get("dataset_name")
    if not isinstance(name, str) or name.startswith("synthetic:") or request.train.length_histogram:
        return request
    if name.startswith(("/", ".", "~")) and not bounded.exists(Path(name).expanduser()):
        return replace(request, unmeasured=_words(name, "not on this host", request))
    named_settings = {key: settings[key] for key in _NAMES if settings.get(key) is not None}
    if "model_name_or_path" not in named_settings and "tokenizer_name" not in named_settings:
        tokenizer = hub_id(request.model) if request.model else None
        if tokenizer is None:
            why = f"no tokenizer of {request.model or 'the model'} is known"
            return replace(request, unmeasured=_words(name, why, request))
        named_settings["tokenizer_name"] = tokenizer
    try:
        found = _measured(named_settings)
    except LookupError as error:
        return replace(request, unmeasured=_words(name, str(error), request))
    if not found["histogram"]:
        words = _words(name, found["why"], request)
        return replace(request.changed(rows=request.rows or found["rows"]), unmeasured=words)
    lengths = ",".join(f"{tokens}:{rows}" for tokens, rows in found["histogram"])
    return request.changed(lengths=lengths, rows=request.rows or found["rows"])


def for_whole_run(request: Request, settings: Mapping[str, Any]) -> Request:
    """The question for as many steps as the job's settings say, where its rows are known."""
    if settings.get("max_steps"):
        return request.changed(steps=settings["max_steps"])
    if rows_of(request) is None:
        return request
    return replace(request, epochs=float(settings.get("num_train_epochs") or EPOCHS))


def named(dataset: str, tokenizer: str | None, model: str | None) -> dict[str, Any]:
    """The job's settings for "openai/gsm8k:main", a file or a folder; a model that lies in a folder spells its rows.

    Raises InputError for a file that is not there.
    """
    if Path(dataset).suffix in FILES and not bounded.exists(Path(dataset).expanduser()):
        raise InputError(f"--dataset {dataset}: no such file; give a file, a folder, or a data set's name on the hub")
    name, _, part = dataset.rpartition(":") if not bounded.exists(dataset) else (dataset, "", "")
    settings = {"dataset_name": name, "dataset_config": part} if name and part else {"dataset_name": dataset}
    if tokenizer is None and model is not None and bounded.is_folder(model):
        tokenizer = model
    return {**settings, **({"tokenizer_name": tokenizer} if tokenizer else {})}


def _words(name: str, why: str, request: Request) -> str:
    return (
        f"the rows of {name} were not measured ({why}). Each row is assumed to have {request.train.sequence_length} "
        "tokens. Give --lengths and --rows"
    )


def _measured(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the job's own reader. LookupError says why there is no answer, InputError what is wrong with the rows."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "finetune.lengths"], input=json.dumps(settings), capture_output=True,
            text=True, timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LookupError(f"no answer within {TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode == WRONG_DATA:
        raise InputError(done.stderr.strip()[-600:])
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no words"]
        raise LookupError(last[0][:300])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found

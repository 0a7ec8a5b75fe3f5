"""Rows: where they come from, how they become text, and tokens with labels.

Surface: JSON lines, JSON and parquet files, folders of them, hub data sets (through `datasets`), and one built-in
set. Row shapes are TRL's: `messages`, `prompt` + `completion`, `text`; and `question` + `answer` as GSM8K has them.
Every label is the *next* token's id, or -100 where it does not count, so that no model or stage has to shift.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config import ConfigError, JobConfig

IGNORED = -100  # torch's cross_entropy ignore_index
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row, or several packed into one: tokens, their next-token labels, their positions."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]
    positions: tuple[int, ...]


def load_tokenizer(config: JobConfig) -> Any:
    """The model's tokenizer, or the built-in one that knows bytes."""
    from transformers import AutoTokenizer

    name = config.tokenizer_name or config.model_name_or_path
    folder = name.removeprefix("random:")
    if name == "builtin:bytes" or (folder != name and not Path(folder).is_dir()):
        tokenizer = _byte_tokenizer()
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=config.model_revision, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _byte_tokenizer() -> Any:
    """256 bytes and three marks, made at run time: nothing to download, nothing it cannot spell."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", "<pad>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")  # noqa: S106


def load_rows(config: JobConfig, split: str) -> list[dict[str, Any]]:
    """The rows of one split."""
    name, path = config.dataset_name, Path(config.dataset_name).expanduser()
    if name == "synthetic:arithmetic":
        rows = _sums(config.dataset_rows or 1024, split)
    elif path.is_file():
        rows = _read_file(path)
    elif path.is_dir():
        rows = [row for file in _split_files(path, split) for row in _read_file(file)]
    elif path.suffix in (".jsonl", ".json", ".parquet"):
        raise ConfigError(f"dataset_name={name!r}: no such file")
    else:
        rows = _read_hub(config, split)
    if not rows:
        raise ConfigError(f"dataset_name={name!r}: split {split!r} holds no rows")
    return rows[: config.dataset_rows]


def _sums(count: int, split: str) -> list[dict[str, Any]]:
    """Sums of two numbers below 100; train and test draw from different streams."""
    draw = random.Random(f"sums {split}")  # noqa: S311  a data set, not a secret
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [{"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}"} for a, b in pairs]


def _split_files(folder: Path, split: str) -> list[Path]:
    """Files named after the split, as the hub lays data sets out: train.jsonl, main/train-00000-of-00001.parquet."""
    found = [f for f in sorted(folder.rglob("*")) if f.suffix in (".jsonl", ".json", ".parquet")]
    chosen = [f for f in found if f.stem.split("-")[0] == split or split in f.relative_to(folder).parts[:-1]]
    if not chosen and split == "train" and len(found) == 1:
        return found
    if not chosen:
        raise ConfigError(f"{folder}: no .jsonl, .json or .parquet file named after the split {split!r}")
    return chosen


def _read_file(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]]
    if path.suffix == ".parquet":
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(f"{path}: parquet needs pyarrow (pip install pyarrow); .jsonl needs nothing")
        import pyarrow.parquet  # type: ignore[import-not-found, unused-ignore]

        rows = pyarrow.parquet.read_table(path).to_pylist()
    else:
        text = path.read_text()
        try:
            rows = (
                json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
            )
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON lines: {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: every row must be a mapping")
    return rows


def _read_hub(config: JobConfig, split: str) -> list[dict[str, Any]]:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"dataset_name={config.dataset_name!r}: no such file or folder, and a hub id needs the datasets package "
            "(pip install datasets)"
        )
    import datasets  # type: ignore[import-not-found, unused-ignore]

    return list(datasets.load_dataset(config.dataset_name, config.dataset_config, split=split))


def encode(row: dict[str, Any], tokenizer: Any, config: JobConfig) -> Example | None:
    """One row as tokens and labels; None where nothing is left to learn from."""
    text, answers = _spell(row, tokenizer, config)
    enc = tokenizer(text, add_special_tokens=False, return_offsets_mapping=answers is not None)
    ids = enc["input_ids"][: config.max_length]
    if answers is None:
        counts = [True] * len(ids)
    else:
        spans = enc["offset_mapping"][: config.max_length]
        counts = [any(a <= start < b for a, b in answers) for start, _ in spans]
    labels = [ids[i + 1] if counts[i + 1] else IGNORED for i in range(len(ids) - 1)]
    if all(label == IGNORED for label in labels):
        return None
    return Example(tokens=tuple(ids), labels=(*labels, IGNORED), positions=tuple(range(len(ids))))


def _spell(row: dict[str, Any], tokenizer: Any, config: JobConfig) -> tuple[str, list[tuple[int, int]] | None]:
    """The row's text and, where only answers count, the character spans of its answers."""
    if "question" in row and "answer" in row:
        row = {"messages": [_said("user", row["question"]), _said("assistant", row["answer"])]}
    elif isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        row = {"messages": [*row["prompt"], *row["completion"]]}
    if "messages" in row:
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        return text, _answer_spans(row["messages"], text, tokenizer) if config.completion_only_loss else None
    if "prompt" in row and "completion" in row:
        text = f"{row['prompt']}{row['completion']}{tokenizer.eos_token}"
        return text, [(len(row["prompt"]), len(text))] if config.completion_only_loss else None
    if isinstance(row.get(config.dataset_text_field), str):
        if config.completion_only_loss:
            raise ConfigError("completion_only_loss=true: rows of plain text do not say which part is the answer")
        return row[config.dataset_text_field] + tokenizer.eos_token, None
    raise ConfigError(
        f"a row holds {sorted(row)}: needs messages, prompt + completion, question + answer, "
        f"or {config.dataset_text_field!r} (dataset_text_field)"
    )


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _answer_spans(messages: Sequence[Any], text: str, tokenizer: Any) -> list[tuple[int, int]]:
    """Where the assistant's turns stand in the templated text."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        through = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        if not text.startswith(through) or not through.startswith(before):
            raise ConfigError(
                "completion_only_loss=true: this chat template rewrites earlier turns; give a chat_template"
            )
        spans.append((len(before), len(through)))
    return spans

"""Rows of a data set: how they are loaded, how they become text, tokens with labels, and the batches of a rank.

Surface: `datasets` finds the files of a split (JSON, JSON lines, parquet and CSV), by their names or by the `configs`
in the front matter of README.md, and reads them as a stream. Nothing is written into its cache, and it never asks the
hub: `finetune.hub` downloads the files. transformers' tokenizers and their chat templates spell them. Row shapes are
TRL's: `messages`, ShareGPT's `conversations`, `prompt` + `completion`, `text`; and `question` + `answer` as GSM8K has
them. Every label is the *next* token's id, or -100 where it does not count, so that no model or stage has to shift.

`python -m finetune.rows`: how long the rows are in the model's tokens: the job's settings on stdin, a histogram on
stdout. The planner asks this in a process of its own.
"""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import sys
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, GPT2Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from contracts.job_config import ConfigError, JobConfig, parse_config
from finetune import hub

# suffix -> builder of `datasets`; .arrow: its save_to_disk
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
# Every rank holds its rows in memory, as tokens about thirty times their bytes: more than this is the wrong file.
MAX_BYTES = 4 << 30
BATCH = 1024  # parquet rows that are unpacked at a time
COLUMNS = ("messages", "conversations", "prompt", "completion", "question", "answer", "tools", "chat_template_kwargs")
FORMS = "messages, prompt + completion, question + answer,"  # of a row, besides plain text


class Row(NamedTuple):
    """One row of a data set, without null members, and where it comes from."""

    file: str
    number: int  # within the file, from 1
    members: dict[str, Any]


def load_rows(config: JobConfig, split: str) -> list[Row]:
    """Return the rows of one split, at most dataset_rows. Raises ConfigError that names the file and the row."""
    if config.dataset_name == "synthetic:arithmetic":
        sums = enumerate(_make_sums(config.dataset_rows or 1024, split), 1)
        return [Row(config.dataset_name, number, members) for number, members in sums]
    stream = (row for path in find_files(config, split) for row in _read_file(path, config))
    rows, size = [], 0
    for row in islice(stream, config.dataset_rows):
        size += len(repr(row.members))
        if size > MAX_BYTES:
            raise ConfigError(f"{row.file}: more than {MAX_BYTES >> 30} GiB of rows in one split: set dataset_rows")
        rows.append(row)
    if not rows:
        raise ConfigError(f"dataset_name={config.dataset_name!r}: split {split!r} holds no rows")
    return rows


def _make_sums(count: int, split: str) -> list[dict[str, Any]]:
    """Sums of two numbers below 100; train and test draw from different streams."""
    draw = random.Random(f"sums {split}")  # noqa: S311  a data set, not a secret
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [{"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}"} for a, b in pairs]


def find_files(config: JobConfig, split: str) -> list[Path]:
    """Return the files of one split, downloaded from the hub if the name is an id. Raises ConfigError."""
    name, path = config.dataset_name, Path(config.dataset_name).expanduser()
    setting = f"dataset_name={name!r}"
    if path.is_file():
        if split != config.dataset_train_split:
            raise ConfigError(f"{setting}: one file has no split {split!r}: name a folder with a file for each split")
        if path.suffix not in READERS:
            raise ConfigError(f"{path}: must be one of {', '.join(READERS)}")
        return [path]
    choose = partial(files_of_split, part=config.dataset_config, split=split, setting=setting)
    if path.is_dir():
        return [path / file for file in choose(path)]
    hub.is_id("dataset_name", name)  # refuses what is neither here nor an id
    return hub.download_data(name, config.dataset_revision, choose)


def files_of_split(folder: Path, part: str | None, split: str, setting: str) -> list[str]:
    """Paths in a folder of one split, of the part `part` (dataset_config), by `datasets`' rules. Raises ConfigError."""
    import datasets

    subfolder = part if part and (folder / part).is_dir() else None
    try:
        parts = datasets.get_dataset_config_names(str(folder))
        has_card = parts != ["default"]
        if has_card and part not in parts and (part is not None or (len(parts) > 1 and "default" not in parts)):
            wrong = "dataset_config" if part is None else f"dataset_config={part!r}:"
            raise ConfigError(f"{setting}: {wrong} must be one of {', '.join(sorted(parts))}")
        with TemporaryDirectory() as cache:
            options = {"name": part} if has_card else {"data_dir": subfolder}
            files = datasets.load_dataset_builder(str(folder), cache_dir=cache, **options).config.data_files or {}
    except ConfigError:
        raise
    except Exception as error:  # any kind: `datasets` passes on what YAML, pyarrow and its own code raise
        raise unreadable(f"{setting}: README.md" if (folder / "README.md").is_file() else setting, error) from error
    if split not in files:
        raise ConfigError(f"{setting}: no split {split!r}: {part or 'it'} has {', '.join(sorted(map(str, files)))}")
    names = [Path(file).relative_to(folder).as_posix() for file in files[split] if Path(file).suffix in READERS]
    if not names:
        raise ConfigError(f"{setting}: no {', '.join(READERS)} file in split {split!r}")
    tops = sorted({file.partition("/")[0] for file in names if "/" in file})
    if part is None and not has_card and len(tops) > 1:
        raise ConfigError(f"{setting}: several folders hold {split!r}; dataset_config must be one of {', '.join(tops)}")
    return names


def _read_file(path: Path, config: JobConfig) -> Iterator[Row]:
    """Stream the rows of one file; of parquet only the columns that the job reads."""
    import datasets
    import pyarrow.parquet

    kind, number, size = READERS[path.suffix], 0, path.stat().st_size
    options: dict[str, Any] = {}
    if kind != "parquet" and not size:
        return
    if kind == "json" and size > MAX_BYTES:
        with path.open("rb") as file:
            if file.read(1) == b"[":  # `datasets` reads a list whole, which takes twelve times its bytes
                raise ConfigError(f"{path}: a JSON list of more than {MAX_BYTES >> 30} GiB: write JSON lines")
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its lines say less than the ConfigError
    try:
        if kind == "csv":
            options = read_header(path)
        if kind == "parquet":
            names = pyarrow.parquet.read_schema(path).names
            columns = [name for name in names if name in (*COLUMNS, config.dataset_text_field)]
            options = {"columns": columns or None, "batch_size": BATCH}
        with TemporaryDirectory() as cache:
            rows = datasets.load_dataset(
                kind, data_files=str(path), split="train", streaming=True, cache_dir=cache, **options
            )
            for number, members in enumerate(rows, 1):
                yield Row(str(path), number, _without_nulls(members))
    except Exception as error:  # any kind: pyarrow's, pandas' and `datasets`' own
        raise unreadable(f"{path}: not {kind}, after row {number}", error) from error


def read_header(path: Path) -> dict[str, Any]:
    """Return the options with which `datasets` reads every cell of a CSV file as text, also "2" and "NA"."""
    import datasets

    with path.open(encoding="utf-8", newline="") as file:
        names = next(csv.reader(file), [])
    return {"features": datasets.Features(dict.fromkeys(names, datasets.Value("string"))), "keep_default_na": False}


def unreadable(source: str, error: Exception) -> Exception:
    """Return the error to raise for one of `datasets`: a ConfigError with its cause, or that of a disk or of memory."""
    cause = error.__cause__ or error
    if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in hub.DISK_ERRORS):
        return cause
    return ConfigError(f"{source}: {(str(cause).strip().splitlines() or [type(cause).__name__])[0][:500]}")


def _without_nulls(value: Any) -> Any:
    """A value without the nulls that a table has where a row says nothing."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


# Rows as text, and as tokens with labels.

IGNORED = -100  # torch's cross_entropy ignore_index
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """One row, or several packed into one: tokens, their next-token labels, their positions, int64 [tokens]."""

    tokens: Any
    labels: Any
    positions: Any

    @property
    def counted(self) -> int:
        """Labels that the loss counts."""
        return int((self.labels != IGNORED).sum())


def load_tokenizer(config: JobConfig) -> Any:
    """The model's tokenizer, or the built-in one that knows bytes."""
    setting, name, revision = "tokenizer_name", config.tokenizer_name, config.tokenizer_revision
    if name is None:
        setting, name, revision = "model_name_or_path", config.model_name_or_path, config.model_revision
    folder = name.removeprefix("random:")
    if name == "builtin:bytes" or (folder != name and not os.path.isdir(folder)):
        tokenizer = _byte_tokenizer()
    else:
        with hub.explain_errors(setting, name, revision):
            tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{setting}={name!r}: the tokenizer has no mark for the end of a text (eos_token)")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _byte_tokenizer() -> Any:
    """256 bytes and three marks, made at run time: nothing to download, nothing it cannot spell."""
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    vocab = {token: index for index, token in enumerate([*marks.values(), *sorted(ByteLevel.alphabet())])}
    return GPT2Tokenizer(vocab=vocab, merges=[], unk_token=None, **marks)


def encode_row(row: Row, tokenizer: Any, config: JobConfig) -> Example | None:
    """Encode a row of a data set. Raises ConfigError that names its file and its number."""
    try:
        return encode(row.members, tokenizer, config)
    except (ConfigError, TypeError, ValueError) as error:  # the last two: `tools` or `chat_template_kwargs` of a row
        raise ConfigError(f"{row.file}: row {row.number}: {error}") from None


def encode(row: dict[str, Any], tokenizer: Any, config: JobConfig) -> Example | None:
    """One row as tokens and labels; None where nothing is left to learn from."""
    text, answers = _render(row, tokenizer, config)
    enc = tokenizer(text, add_special_tokens=False, return_offsets_mapping=answers is not None)
    ids = np.array(enc["input_ids"][: config.max_length], dtype=np.int64)
    labels = np.append(ids[1:], IGNORED)
    if answers is not None:
        begins = np.array([begin for begin, _ in enc["offset_mapping"][1 : config.max_length]], dtype=np.int64)
        counts = np.zeros(len(begins), dtype=bool)
        for first, end in answers:
            counts |= (first <= begins) & (begins < end)
        labels[:-1][~counts] = IGNORED
    example = Example(tokens=ids, labels=labels, positions=np.arange(len(ids)))
    return example if example.counted else None


def _render(row: dict[str, Any], tokenizer: Any, config: JobConfig) -> tuple[str, list[tuple[int, int]] | None]:
    """The row's text and, where only answers count, the character spans of its answers."""
    for names in (("question", "answer"), ("prompt", "completion")):
        kinds = {type(row.get(name)) for name in names}
        if all(name in row for name in names) and "messages" not in row and kinds not in ({str}, {list}):
            both = " and ".join(f"{name}={repr(row[name])[:100]}" for name in names)
            raise ConfigError(f"a row's {both}: must be two texts, or two lists of messages")
    row, tools, first, only_answers = make_messages(row), row.get("tools"), 0, bool(config.completion_only_loss)
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list) and "messages" not in row:
        first, only_answers = len(row["prompt"]), config.completion_only_loss is not False
        row = {**row, "messages": [*row["prompt"], *row["completion"]]}
    if "messages" in row:
        options = {"tools": tools, **row.get("chat_template_kwargs", {})}
        text = _apply_template(row["messages"], tokenizer, **options)
        return text, _answer_spans(row["messages"], text, tokenizer, first, **options) if only_answers else None
    # A template writes the mark of the beginning itself; plain text gets it where the tokenizer would set it.
    begin = tokenizer.bos_token if tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] else ""
    if "prompt" in row and "completion" in row:
        before = f"{begin}{row['prompt']}"
        text = f"{before}{row['completion'].removesuffix(tokenizer.eos_token)}{tokenizer.eos_token}"
        return text, None if config.completion_only_loss is False else [(len(before), len(text))]
    if isinstance(row.get(config.dataset_text_field), str):
        if config.completion_only_loss:
            raise ConfigError("only answers count, and rows of plain text do not say which part is the answer")
        return begin + row[config.dataset_text_field].removesuffix(tokenizer.eos_token) + tokenizer.eos_token, None
    raise ConfigError(f"a row holds {sorted(row)}: needs {FORMS} or {config.dataset_text_field!r} (dataset_text_field)")


def make_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the messages that it says in another form: question and answer, or ShareGPT's turns."""
    turns = row.get("conversations")
    if "question" in row and "answer" in row:
        turns = [{"from": "user", "value": row["question"]}, {"from": "assistant", "value": row["answer"]}]
    if {"messages", "completion"} & {*row} or not isinstance(turns, list):
        return row
    names, roles = {"from": "role", "value": "content"}, {"human": "user", "gpt": "assistant"}
    messages = [{names.get(name, name): turn[name] for name in turn} for turn in turns if isinstance(turn, dict)]
    return {**row, "messages": [{**m, "role": roles.get(str(m.get("role")), m.get("role"))} for m in messages]}


def _apply_template(messages: Any, tokenizer: Any, **options: Any) -> str:
    """The talk as the chat template writes it."""
    turns = messages if isinstance(messages, list) else []
    if not turns or not all(isinstance(m, dict) and isinstance(m.get("role"), str) and len(m) > 1 for m in turns):
        raise ConfigError(f"a row's messages are {str(messages)[:200]!r}: each must be a mapping with role and content")
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, **options))
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"chat_template: {error}: for {str(turns)[:200]}") from None
    if lists := [m["content"] for m in turns if isinstance(m.get("content"), list) and str(m["content"]) in text]:
        raise ConfigError(f"content={str(lists[0])[:200]}: must be a text: this chat template does not read lists")
    return text


def _answer_spans(messages: Any, text: str, tokenizer: Any, first: int, **options: Any) -> list[tuple[int, int]]:
    """Return where answers are in the templated text: as the template marks them, or turns from `first` on."""
    template = tokenizer.get_chat_template(tools=options["tools"])
    if not first and re.search(r"{%-?\s*generation\b", template):
        marks: Any = {**tokenizer.special_tokens_map, "chat_template": template, **options}
        return list(render_jinja_template([messages], return_assistant_tokens_mask=True, **marks)[1][0])
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < first:
            continue
        before = _apply_template(messages[:i], tokenizer, add_generation_prompt=True, **options)
        through = _apply_template(messages[: i + 1], tokenizer, **options)
        if not text.startswith(through) or not through.startswith(before):
            wrong = "only answers count, and this chat template rewrites earlier turns"
            raise ConfigError(f"{wrong}: give another chat_template, or --trainer trl")
        spans.append((len(before), len(through)))
    return spans


# Examples as batches: packing or padding, and the order for the ranks. Every rank computes the same order from the
# seed, and takes its own share.


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors of [sequences, tokens], padded on the right, where causal attention never looks."""

    tokens: Any
    labels: Any
    positions: Any
    packed: bool = False  # whether a sequence has several documents, of which each begins at position 0

    def to(self, device: Any) -> Batch:
        """Copy to the device without waiting; to a GPU this requires pinned memory."""
        tensors = {name: getattr(self, name) for name in ("tokens", "labels", "positions")}
        if device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


def pack(examples: Sequence[Example], length: int) -> list[Example]:
    """Pack rows into sequences of at most `length` tokens: best fit, longest first.

    Positions restart with every row, so that attention does not cross rows.
    """
    bins: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # free tokens of a bin, and its index; sorted
    for example in sorted(examples, key=lambda e: -len(e.tokens)):
        size = len(example.tokens)
        position = bisect_left(room, (size, 0))
        if position == len(room):
            room.append((length, len(bins)))
            bins.append([])
        left, index = room.pop(position)
        bins[index].append(example)
        insort(room, (left - size, index))
    names = [field.name for field in fields(Example)]
    return [Example(**{name: np.concatenate([getattr(e, name) for e in one]) for name in names}) for one in bins]


def collate(examples: Sequence[Example], count: int, length: int, pad: int) -> Batch:
    """Return a batch of `count` sequences of `length` tokens; missing ones are padding without loss.

    Padding belongs to a row's last document.
    """
    import torch

    shape = (count, length)
    tokens, labels, positions = np.full(shape, pad), np.full(shape, IGNORED), np.tile(np.arange(length), (count, 1))
    for row, e in enumerate(examples):
        size = len(e.tokens)
        tokens[row, :size], labels[row, :size], positions[row, :size] = e.tokens, e.labels, e.positions
        positions[row, size:] = e.positions[-1] + np.arange(1, length - size + 1)
    return Batch(
        tokens=torch.from_numpy(tokens), labels=torch.from_numpy(labels), positions=torch.from_numpy(positions),
        packed=any((e.positions[1:] == 0).any() for e in examples),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's micro-batches of a global batch, and counts of the whole global batch."""

    batches: list[Batch]
    counted: int  # labels of the global batch that count in the loss, by which every rank divides
    tokens: int  # tokens of the global batch without padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """The batches of one data-parallel rank. All ranks compute the same order without communication."""

    examples: Sequence[Example]
    pad: int
    micro_batch: int
    micro_batches: int
    rank: int
    ranks: int
    seed: int = 0
    by_length: bool = False
    shuffle: bool = True
    fixed_length: int | None = None  # pipelines need one shape for the whole run

    @property
    def global_batch(self) -> int:
        """Return the sequences per step over all ranks."""
        return self.micro_batch * self.micro_batches * self.ranks

    @property
    def steps(self) -> int:
        """Return the steps per epoch, at least 1; the last step has the remaining rows."""
        return max(1, math.ceil(len(self.examples) / self.global_batch))

    def order(self, epoch: int) -> list[int]:
        """Return the row indices of the epoch, in the order of the global batches; by length as transformers groups."""
        order = list(range(len(self.examples)))
        if not self.shuffle:
            return order
        if self.by_length:
            import torch
            from transformers.trainer_pt_utils import get_length_grouped_indices

            draw = torch.Generator().manual_seed(self.seed + epoch)
            lengths = [len(e.tokens) for e in self.examples]
            return list(get_length_grouped_indices(lengths, self.global_batch, generator=draw))
        random.Random(f"{self.seed} {epoch}").shuffle(order)  # noqa: S311
        return order

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Share]:
        """Return this rank's shares of the global batches of an epoch, starting at `first_step`."""
        order = self.order(epoch)
        for step in range(first_step, self.steps):
            examples = [self.examples[i] for i in order[step * self.global_batch : (step + 1) * self.global_batch]]
            counted = sum(e.counted for e in examples)
            tokens = sum(len(e.tokens) for e in examples)
            yield Share(batches=self.deal(examples), counted=counted, tokens=tokens)

    def deal(self, examples: Sequence[Example]) -> list[Batch]:
        """Return this rank's micro-batches; neighbours in the order form one micro-batch over all ranks."""
        batches = []
        for micro in range(self.micro_batches):
            first = (micro * self.ranks + self.rank) * self.micro_batch
            own_examples = examples[first : first + self.micro_batch]
            length = self.fixed_length or max((len(e.tokens) for e in own_examples), default=2)
            batches.append(collate(own_examples, self.micro_batch, length, self.pad))
        return batches


def prepare(config: JobConfig, split: str, tokenizer: Any) -> tuple[list[Example], dict[str, int]]:
    """Return the examples of a split, packed if configured, and how many rows were dropped or cut."""
    rows = load_rows(config, split)
    encoded = [encode_row(row, tokenizer, config) for row in rows]
    usable = [e for e in encoded if e is not None]
    if not usable:
        raise ConfigError(f"dataset_name={config.dataset_name!r}: no row of {split!r} has a token that counts")
    counts = {
        "rows": len(rows),
        "dropped_rows": len(rows) - len(usable),
        "cut_rows": sum(len(e.tokens) == config.max_length for e in usable),
        "tokens": sum(len(e.tokens) for e in usable),
    }
    return (pack(usable, config.max_length) if config.packing else usable), counts


def check_vocabulary(tokens: Iterable[Any], tokenizer: Any, vocabulary: int, config: JobConfig) -> None:
    """Reject another model's tokenizer by the tokens of rows, instead of by an index error inside the first step."""
    highest = max(tokenizer.pad_token_id, *(int(np.max(row)) for row in tokens))
    if highest >= vocabulary:
        name = config.tokenizer_name or config.model_name_or_path
        raise ConfigError(f"tokenizer_name={name!r} gives token {highest}: the model embeds {vocabulary} tokens")


# How long the rows are: read and spelled as the job itself does; of many, a part that lies evenly over the whole is
# measured, and stands for the rest.

WRONG_ROWS = 3  # exit code, as agent.advice.job_plan knows it
MEASURED_ROWS = 4000  # the mean of rows whose lengths scatter by their own mean is then known to 1.6 %
LONGEST = 1_000_000  # tokens; longer rows count as so long


def measure_lengths(config: JobConfig) -> dict[str, Any]:
    """Rows of the training split, how many were measured, and (tokens, rows) of those that the job would keep.

    Rows of this host are counted where the tokenizer is not at hand too: `why` says what is missing.
    """
    if config.tokenizer_name is not None:  # the model, which may be behind a gate, spells nothing then
        config = replace(config, model_name_or_path=JobConfig().model_name_or_path)
    if config.eval_strategy != "no" and Path(config.dataset_name).expanduser().exists():
        find_files(config, config.dataset_test_split)
    try:
        config = replace(config, **hub.resolve_commits(config), max_length=LONGEST)
        tokenizer = load_tokenizer(config)
    except ConfigError as error:
        if not Path(config.dataset_name).expanduser().exists():
            raise
        count = len(load_rows(config, config.dataset_train_split))
        return {"rows": count, "measured": 0, "histogram": [], "why": str(error)}
    rows = load_rows(config, config.dataset_train_split)
    picked = rows[:: max(1, -(-len(rows) // MEASURED_ROWS))]
    counts = Counter(len(e.tokens) for row in picked if (e := encode_row(row, tokenizer, config)) is not None)
    if not counts:
        raise ConfigError(f"dataset_name={config.dataset_name!r}: no row has a token that counts")
    count = len(rows) * sum(counts.values()) // len(picked)
    return {"rows": count, "measured": len(picked), "histogram": sorted(counts.items())}


def main() -> None:
    """Measure. Errors go to stderr: rows of this host end with WRONG_ROWS, what cannot be had with exit code 1."""
    config = JobConfig()
    try:
        config = parse_config(json.load(sys.stdin)).config
        sys.stdout.write(json.dumps(measure_lengths(config)) + "\n")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(WRONG_ROWS if Path(config.dataset_name).expanduser().exists() else 1)


if __name__ == "__main__":
    main()

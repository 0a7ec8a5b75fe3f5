"""Rows: how they become text, and tokens with labels.

Surface: transformers' tokenizers and their chat templates. Row shapes are TRL's: `messages`, `prompt` + `completion`,
`text`; and `question` + `answer` as GSM8K has them. Every label is the *next* token's id, or -100 where it does not
count, so that no model or stage has to shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError

from contracts import bounded
from contracts.job_config import ConfigError, JobConfig
from finetune import hub
from finetune.sources import Row

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
    from transformers import AutoTokenizer

    setting, revision = "tokenizer_name", config.tokenizer_revision
    name = config.tokenizer_name
    if name is None:
        setting, name, revision = "model_name_or_path", config.model_name_or_path, config.model_revision
    folder = name.removeprefix("random:")
    if name == "builtin:bytes" or (folder != name and not bounded.is_folder(folder)):
        tokenizer = _byte_tokenizer()
    else:
        with hub.asking(setting, name, revision):
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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", "<pad>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")  # noqa: S106


def encode_row(row: Row, tokenizer: Any, config: JobConfig) -> Example | None:
    """Encode a row of a data set. Raises ConfigError that names its file and its number."""
    try:
        return encode(row.members, tokenizer, config)
    except ConfigError as error:
        raise ConfigError(f"{row.file}: row {row.number}: {error}") from None


def encode(row: dict[str, Any], tokenizer: Any, config: JobConfig) -> Example | None:
    """One row as tokens and labels; None where nothing is left to learn from."""
    text, answers = _spell(row, tokenizer, config)
    enc = tokenizer(text, add_special_tokens=False, return_offsets_mapping=answers is not None)
    ids = np.array(enc["input_ids"][: config.max_length], dtype=np.int64)
    labels = np.append(ids[1:], IGNORED)
    if answers is not None:
        begins = np.array([begin for begin, _ in enc["offset_mapping"][1 : config.max_length]], dtype=np.int64)
        counts = np.zeros(len(begins), dtype=bool)
        for first, end in answers:
            counts |= (first <= begins) & (begins < end)
        labels[:-1][~counts] = IGNORED
    made = Example(tokens=ids, labels=labels, positions=np.arange(len(ids)))
    return made if made.counted else None


def _spell(row: dict[str, Any], tokenizer: Any, config: JobConfig) -> tuple[str, list[tuple[int, int]] | None]:
    """The row's text and, where only answers count, the character spans of its answers."""
    for names in (("question", "answer"), ("prompt", "completion")):
        kinds = {type(row.get(name)) for name in names}
        if all(name in row for name in names) and "messages" not in row and kinds not in ({str}, {list}):
            both = " and ".join(f"{name}={repr(row[name])[:100]}" for name in names)
            raise ConfigError(f"a row's {both}: must be two texts, or two lists of messages")
    if "question" in row and "answer" in row and "messages" not in row:
        row = {"messages": [_message("user", row["question"]), _message("assistant", row["answer"])]}
    elif isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        row = {"messages": [*row["prompt"], *row["completion"]]}
    if "messages" in row:
        text = _templated(row["messages"], tokenizer)
        return text, _answer_spans(row["messages"], text, tokenizer) if config.completion_only_loss else None
    # A template writes the mark of the beginning itself; plain text gets it where the tokenizer would set it.
    begin = tokenizer.bos_token if tokenizer("").input_ids[:1] == [tokenizer.bos_token_id] else ""
    if "prompt" in row and "completion" in row:
        before = f"{begin}{row['prompt']}"
        text = f"{before}{row['completion']}{tokenizer.eos_token}"
        return text, [(len(before), len(text))] if config.completion_only_loss else None
    if isinstance(row.get(config.dataset_text_field), str):
        if config.completion_only_loss:
            raise ConfigError("completion_only_loss=true: rows of plain text do not say which part is the answer")
        return begin + row[config.dataset_text_field] + tokenizer.eos_token, None
    raise ConfigError(
        f"a row holds {sorted(row)}: needs messages, prompt + completion, question + answer, "
        f"or {config.dataset_text_field!r} (dataset_text_field)"
    )


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _templated(messages: Any, tokenizer: Any, **more: Any) -> str:
    """The talk as the chat template writes it."""
    turns = messages if isinstance(messages, list) else []
    if not turns or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in turns):
        raise ConfigError(
            f"a row's messages are {str(messages)[:200]!r}: must be a list of mappings with role and content"
        )
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **more))
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"chat_template: {error}: for {str(turns)[:200]}") from None


def _answer_spans(messages: Sequence[Any], text: str, tokenizer: Any) -> list[tuple[int, int]]:
    """Where the assistant's turns stand in the templated text."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _templated(messages[:i], tokenizer, add_generation_prompt=True)
        through = _templated(messages[: i + 1], tokenizer)
        if not text.startswith(through) or not through.startswith(before):
            raise ConfigError(
                "completion_only_loss=true: this chat template rewrites earlier turns; give a chat_template"
            )
        spans.append((len(before), len(through)))
    return spans

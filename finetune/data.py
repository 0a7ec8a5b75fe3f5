"""Convert examples to batches: packing or padding, and the order for the ranks.

Surface: none outside; every rank computes the same order from the seed, and takes its own share.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from contracts.job_config import ConfigError, JobConfig
from finetune.rows import IGNORED, Example, encode_row, load_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors of [sequences, tokens], padded on the right, where causal attention never looks."""

    tokens: Any
    labels: Any
    positions: Any
    packed: bool = False  # whether a sequence has several documents, of which each begins at position 0

    def to(self, device: Any) -> Batch:
        """Copy to the device without waiting; to a GPU this requires pinned memory."""
        named = {name: getattr(self, name) for name in ("tokens", "labels", "positions")}
        if device.type == "cuda":
            named = {name: tensor.pin_memory() for name, tensor in named.items()}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in named.items()})


def pack(examples: Sequence[Example], length: int) -> list[Example]:
    """Pack rows into sequences of at most `length` tokens: first fit, longest first.

    Positions restart with every row, so that attention does not cross rows.
    """
    bins: list[list[Example]] = []
    room: dict[int, list[int]] = {}  # free tokens -> bins with that much space
    for example in sorted(examples, key=lambda e: -len(e.tokens)):
        size = len(example.tokens)
        left = min((r for r, at in room.items() if r >= size and at), default=None)
        if left is None:
            bins.append([])
            index, left = len(bins) - 1, length
        else:
            index = room[left].pop()
        bins[index].append(example)
        room.setdefault(left - size, []).append(index)
    return [
        Example(
            tokens=np.concatenate([e.tokens for e in one]),
            labels=np.concatenate([e.labels for e in one]),
            positions=np.concatenate([e.positions for e in one]),
        )
        for one in bins
    ]


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
            chosen = [self.examples[i] for i in order[step * self.global_batch : (step + 1) * self.global_batch]]
            counted = sum(e.counted for e in chosen)
            tokens = sum(len(e.tokens) for e in chosen)
            yield Share(batches=self.deal(chosen), counted=counted, tokens=tokens)

    def deal(self, chosen: Sequence[Example]) -> list[Batch]:
        """Return this rank's micro-batches; neighbours in the order form one micro-batch over all ranks."""
        batches = []
        for micro in range(self.micro_batches):
            at = (micro * self.ranks + self.rank) * self.micro_batch
            mine = chosen[at : at + self.micro_batch]
            length = self.fixed_length or max((len(e.tokens) for e in mine), default=2)
            batches.append(collate(mine, self.micro_batch, length, self.pad))
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


def check_vocabulary(examples: Sequence[Example], tokenizer: Any, vocabulary: int, config: JobConfig) -> None:
    """Reject another model's tokenizer here, instead of by an index error inside the first step."""
    highest = max(tokenizer.pad_token_id, *(int(e.tokens.max()) for e in examples))
    if highest >= vocabulary:
        name = config.tokenizer_name or config.model_name_or_path
        raise ConfigError(
            f"tokenizer_name={name!r} gives token {highest}: the model has embeddings for {vocabulary} tokens"
        )

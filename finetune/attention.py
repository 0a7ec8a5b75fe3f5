"""Attention inside documents: packed rows without a mask of tokens x tokens.

Surface: transformers' `AttentionInterface`; torch's `varlen_attn` (flash attention over lengths) on a GPU in 16 bits,
and `scaled_dot_product_attention` document by document elsewhere. Sliding windows are as transformers means them: a
token sees itself and the window - 1 before it. Context parallelism is Ulysses' (arXiv 2309.14509): ranks that have a
part of the tokens each exchange them for a part of the heads, so that masks stay those of whole rows.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

try:
    from torch.nn.attention.varlen import varlen_attn

    # Windows and shared key heads came after the function itself.
    _HAS_VARLEN = {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
except ImportError:
    _HAS_VARLEN = False

NAME = "by_document"


class Documents(NamedTuple):
    """Where the documents of a batch end, its rows laid end to end."""

    bounds: torch.Tensor  # int32, [documents + 1]: 0, then each end; on a GPU empty documents fill it up
    lengths: list[int] | None  # of the documents, where the host knows them: on a CPU

    @classmethod
    def of(cls, ends: torch.Tensor, length: int) -> Documents:
        """From each row's ends, [rows, documents], filled up with the row's length. Waits for no GPU."""
        rows = torch.arange(len(ends), device=ends.device, dtype=torch.int32)[:, None] * length
        bounds = functional.pad((ends + rows).flatten().int(), (1, 0))
        lengths = None if ends.is_cuda else [n for n in bounds.diff().tolist() if n]
        return cls(bounds, lengths)


def attend(
    _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, *,
    across: dist.ProcessGroup | None = None, **how: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention of [rows, heads, tokens, head size], within documents where there are any.

    `across`: ranks that have a part of the tokens each. Returns [rows, tokens, heads, head size].
    """
    if across is None:
        return _causal(query, key, value, **how), None
    return _tokens_apart(_causal(*_heads_apart(query, key, value, across), **how), across), None


def _heads_apart(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Of all heads a part of the tokens, [rows, heads, tokens, size], for all tokens of this rank's heads."""
    each = [one.unflatten(1, (group.size(), -1)) for one in (query, key, value)]
    got = _exchanged(torch.cat(each, dim=2).transpose(0, 1), group)
    whole = got.permute(1, 2, 0, 3, 4).flatten(2, 3)
    mine: tuple[torch.Tensor, ...] = whole.split([one.shape[2] for one in each], dim=1)
    return mine


def _tokens_apart(out: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """And back: [rows, all tokens, this rank's heads, size] for [rows, tokens, heads, size]."""
    got = _exchanged(out.unflatten(1, (group.size(), -1)).transpose(0, 1), group)
    return got.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The first dimension is one of ranks: what goes to each, and what came from each."""
    return collectives.wait_tensor(collectives.all_to_all_single_autograd(parts.contiguous(), None, None, group))


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, documents: Documents | None = None, **_more: Any,
) -> torch.Tensor:  # fmt: skip
    rows, _, length, _ = query.shape
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if documents is None and window is None:
        out: torch.Tensor = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)
    if not dropout and _varlen_takes(query):
        if documents is None:
            documents = Documents.of(torch.full((rows, 1), length, device=query.device), length)
        flat = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
        bounds = documents.bounds
        back = -1 if window is None else window - 1
        packed: torch.Tensor = varlen_attn(
            *flat, bounds, bounds, length, length, scale=scaling, window_size=(back, 0), enable_gqa=True
        )
        return packed.unflatten(0, (rows, length))
    lengths = [length] * rows
    if documents is not None:
        lengths = documents.lengths or [n for n in documents.bounds.diff().tolist() if n]
    # split, whose gradient is one concatenation: slices would each add a gradient of the whole
    each = [one.transpose(0, 1).flatten(1, 2)[None].split(lengths, dim=2) for one in (query, key, value)]
    parts = [_document(q, k, v, dropout, scaling, window) for q, k, v in zip(*each, strict=True)]
    whole = torch.cat(parts, dim=2)[0].unflatten(1, (rows, length))
    return whole.permute(1, 2, 0, 3)


def _varlen_takes(query: torch.Tensor) -> bool:
    """Flash attention's terms: an Ampere or later GPU, 16 bits, heads of 256 at most."""
    if not (_HAS_VARLEN and query.is_cuda and query.element_size() == 2 and query.shape[-1] <= 256):
        return False
    capability: tuple[int, int] = torch.cuda.get_device_capability(query.device)
    return capability >= (8, 0)


def _document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of one document; under a window, of as many queries at a time as it is long."""
    how: Any = {"dropout_p": dropout, "scale": scaling, "enable_gqa": True}
    length = query.shape[2]
    if window is None or length <= window:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, **how)
    blocks, parts = [one.split(window, dim=2) for one in (query, key, value)], []
    for number, some in enumerate(blocks[0]):
        keys, values = (torch.cat(one[max(0, number - 1) : number + 1], dim=2) for one in blocks[1:])
        here = torch.arange(keys.shape[2], device=query.device)
        back = here[-some.shape[2] :, None] - here
        seen = (back >= 0) & (back < window)
        parts.append(functional.scaled_dot_product_attention(some, keys, values, attn_mask=seen, **how))
    return torch.cat(parts, dim=2)


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_args, **_more: None)  # no mask is ever made

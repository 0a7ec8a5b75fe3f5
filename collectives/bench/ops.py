"""The collectives: one record each; only this module defines how much data each of them moves.

S, algbw and busbw are those of nccl-tests (doc/PERFORMANCE.md): algbw = S / t, busbw = algbw x factor. The data of a
verified round is a pattern of source rank, round and position, so that stale, misplaced or foreign data is detected.
Its sums are exact in float32 for up to 67,000 ranks. docs/reference/bus-bandwidth.md lists the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

GRAIN_BYTES = 16  # nccl-tests rounds the count of a rank down to a multiple of 16 bytes
PERIOD = 251  # prime, so no shift by a power of two maps the pattern onto itself; 250 x 67,000 < 2**24
UNKNOWN_SOURCE = -1  # a sum is wrong, but it does not show whose data is wrong


@dataclass(slots=True, kw_only=True)
class Side:
    """One rank's side of a collective: its position in the group, and its buffers."""

    group: Any  # torch.distributed.ProcessGroup
    ranks: tuple[int, ...]  # global ranks of the group
    me: int  # position in the group
    send_buffer: Any  # input tensor
    output: Any  # output tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A collective: how much it moves, how it runs, and how its result is verified."""

    name: str
    shapes: Callable[[int, int], tuple[int, int]]  # (part elements, n) -> input elements, output elements
    run: Callable[[Side], None]
    find_wrong: Callable[[Side, int], tuple[int, ...]]  # positions in the group whose data is wrong; () if none
    factor: Callable[[int], float] = lambda n: (n - 1) / n
    split: bool = True  # S is the total over the ranks: each rank's part is S / n
    in_place: bool = False  # input and output are one tensor


def part_elements(op: Op, size_bytes: int, n: int) -> int:
    """Return the float32 elements of one part, at least one grain."""
    part = size_bytes // n if op.split else size_bytes
    return max(part // GRAIN_BYTES, 1) * GRAIN_BYTES // 4


def moved_bytes(op: Op, size_bytes: int, n: int) -> int:
    """Return the S that is actually run, after rounding."""
    return part_elements(op, size_bytes, n) * 4 * (n if op.split else 1)


def allocate(op: Op, size_bytes: int, group: Any, ranks: tuple[int, ...], rank: int, device: str) -> Side:
    """Allocate the buffers of one rank."""
    import torch

    send_elements, output_elements = op.shapes(part_elements(op, size_bytes, len(ranks)), len(ranks))
    out = torch.zeros(output_elements, dtype=torch.float32, device=device)
    into = out if op.in_place else torch.zeros(send_elements, dtype=torch.float32, device=device)
    return Side(group=group, ranks=ranks, me=ranks.index(rank), send_buffer=into, output=out)


def fill(side: Side, turn: int) -> None:
    """Write this rank's data for this round, and clear the data of an earlier round."""
    side.output.fill_(-1.0)
    write_pattern(side.send_buffer, (side.ranks[side.me],), turn)


def pattern(sources: tuple[int, ...], turn: int, start: int, device: Any) -> Any:
    """Return one period of the sum of the sources' data, starting at position `start`."""
    import torch

    place = torch.arange(start, start + PERIOD, device=device, dtype=torch.int64)
    total = torch.zeros(PERIOD, device=device, dtype=torch.int64)
    for source in sources:
        step = 1 + (turn + source // PERIOD) % (PERIOD - 1)
        total += (place * step + source * 13 + turn * 29) % PERIOD
    return total.to(torch.float32)


def write_pattern(tensor: Any, sources: tuple[int, ...], turn: int) -> None:
    """Fill a flat tensor with the sources' data."""
    period = pattern(sources, turn, 0, tensor.device)
    length = tensor.numel() // PERIOD * PERIOD
    tensor[:length].view(-1, PERIOD).copy_(period.expand(length // PERIOD, PERIOD))
    tensor[length:].copy_(period[: tensor.numel() - length])


def matches(tensor: Any, sources: tuple[int, ...], turn: int, start: int = 0) -> bool:
    """Return whether every element of a flat tensor is the sum of the sources' data starting at `start`."""
    period = pattern(sources, turn, start, tensor.device)
    length = tensor.numel() // PERIOD * PERIOD
    body = bool((tensor[:length].view(-1, PERIOD) == period).all())
    return body and bool((tensor[length:] == period[: tensor.numel() - length]).all())


def _find_wrong_chunks(side: Side, turn: int, start: int) -> tuple[int, ...]:
    chunks = zip(side.ranks, side.output.chunk(len(side.ranks)), strict=True)
    return tuple(i for i, (rank, chunk) in enumerate(chunks) if not matches(chunk, (rank,), turn, start))


def _find_wrong_sum(side: Side, turn: int) -> tuple[int, ...]:
    start = side.me * side.output.numel() if side.send_buffer.numel() != side.output.numel() else 0
    return () if matches(side.output, side.ranks, turn, start) else (UNKNOWN_SOURCE,)


def _distributed() -> Any:
    """Return torch.distributed, which only ranks import."""
    import torch.distributed as dist

    return dist


_RECORDS = (
    Op(
        name="all_gather",
        shapes=lambda part, n: (part, part * n),
        run=lambda side: _distributed().all_gather_into_tensor(side.output, side.send_buffer, group=side.group),
        find_wrong=lambda side, turn: _find_wrong_chunks(side, turn, 0),
    ),
    Op(
        name="reduce_scatter",
        shapes=lambda part, n: (part * n, part),
        run=lambda side: _distributed().reduce_scatter_tensor(side.output, side.send_buffer, group=side.group),
        find_wrong=_find_wrong_sum,
    ),
    Op(
        name="all_reduce",
        factor=lambda n: 2 * (n - 1) / n,
        split=False,
        shapes=lambda part, _n: (part, part),
        run=lambda side: _distributed().all_reduce(side.output, group=side.group),
        find_wrong=_find_wrong_sum,
        in_place=True,
    ),
    Op(
        name="all_to_all",
        shapes=lambda part, n: (part * n, part * n),
        run=lambda side: _distributed().all_to_all_single(side.output, side.send_buffer, group=side.group),
        find_wrong=lambda side, turn: _find_wrong_chunks(side, turn, side.me * side.output.numel() // len(side.ranks)),
    ),
)

OPS: Mapping[str, Op] = MappingProxyType({op.name: op for op in _RECORDS})

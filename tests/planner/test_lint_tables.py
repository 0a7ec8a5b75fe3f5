"""The tables of lint's names, values and pairs: every name is one that NCCL or PyTorch reads, every row is whole."""

from __future__ import annotations

from planner.lint.tables import settings, values
from planner.nccl_env.names import names, plugin_of, torch_names

OTHERS = {"CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "RDMAV_FORK_SAFE", "RDMAV_HUGEPAGES_SAFE"}


def test_every_name_is_one_that_something_reads() -> None:
    table, more = values(), settings()
    used = {
        *table.tokens, *table.word_lists, *table.shapes, *table.ranges, *table.choices, *table.zero, *table.bytes,
        *table.flags, *table.carries_data, *table.zero_is_unset, *more.plugin_values, *more.effects, *more.efa_needless,
        *more.torch, *more.needs, *(other for other, _ in more.needs.values()), *(row[0] for row in more.shadows),
        *(name for row in more.shadows for name in row[2]), *(name for row in more.bounds for name in row[:2]),
    }  # fmt: skip
    known = {*names(), *torch_names(), *OTHERS}
    assert not [name for name in sorted(used) if name not in known and not plugin_of(name)]


def test_every_row_is_whole() -> None:
    table, more = values(), settings()
    assert not [name for name, (low, high) in table.ranges.items() if low >= high]
    assert not [name for name, row in table.tokens.items() if not row.words or not row.effect]
    assert not [name for name, (separator, words) in table.word_lists.items() if len(separator) != 1 or not words]
    assert {how for _, how, _ in more.shadows} <= {"one", "nonzero", "positive", "index", "socket"}
    texts = [*more.effects.values(), *table.zero.values(), *(row[2] for row in more.bounds)]
    texts += [why for why, _ in more.efa_needless.values()]
    assert all(text and text[-1] != "." for text in texts)

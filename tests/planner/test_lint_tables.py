"""The tables of lint's names, values and pairs: every name is one that NCCL or PyTorch reads, every row is whole."""

from __future__ import annotations

import re

from planner.lint.environment import settings
from planner.lint.values import values
from planner.nccl_env.names import names, plugin_of, torch_names

OTHERS = {"CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "RDMAV_FORK_SAFE", "RDMAV_HUGEPAGES_SAFE"}


def test_every_name_is_one_that_something_reads() -> None:
    table, more = values(), settings()
    used = {
        *(name for part in ("text", "range", "choice", "zero") for name in table[part]),
        *(name for members in table["names"].values() for name in members),
        *(name for part in ("plugin_values", "effect", "efa_needless", "torch", "needs") for name in more[part]),
        *(row["other"] for row in more["needs"].values()), *(row["cause"] for row in more["shadows"]),
        *(name for row in more["shadows"] for name in row["names"]),
        *(row[part] for row in more["bounds"] for part in ("least", "most")),
    }  # fmt: skip
    known = {*names(), *torch_names(), *OTHERS}
    assert not [name for name in sorted(used) if name not in known and not plugin_of(name)]


def test_every_row_is_whole() -> None:
    table, more = values(), settings()
    assert set(table["names"]) == {"bytes", "flags", "carries_data", "zero_is_unset"}
    assert not [name for name, (low, high) in table["range"].items() if low >= high]
    for row in table["text"].values():
        assert bool(row.get("words")) != (bool(re.compile(row.get("pattern", "")).pattern) and bool(row.get("wanted")))
        assert bool(row.get("effect")) != (len(row.get("separator", "")) == 1)
    assert {row["set"] for row in more["shadows"]} <= {"one", "nonzero", "positive", "index", "socket"}
    assert all({*row} == {"cause", "set", "names"} for row in more["shadows"])
    assert all({*row} == {"least", "most", "effect"} for row in more["bounds"])
    assert all({*row} == {"other", "why"} for row in more["needs"].values())
    assert all({*row} == {"when", "finding", "status", "effect"} for row in more["torch"].values())
    texts = [*more["effect"].values(), *table["zero"].values(), *(row["effect"] for row in more["bounds"])]
    texts += [row["why"] for part in ("efa_needless", "needs") for row in more[part].values()]
    assert all(text and text[-1] != "." for text in texts)

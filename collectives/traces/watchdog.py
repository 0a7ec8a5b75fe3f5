"""What PyTorch's watchdog wrote into a log: each rank that waited in vain, and in which call.

Specification: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, releases 1.13 to 2.13. A rank speaks of the call that
timed out, and in a second line of the last that it has called and the last that was over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from collectives.traces.calls import Call, RankTrace

_WORK = re.compile(
    r"(?:\[PG ID \d{1,6} PG GUID [^\]]{1,80}? Rank (\d{1,7})\]|\[PG [^\]]{1,80}? Rank (\d{1,7})\]|\[Rank (\d{1,7})\])"
    r" Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w{1,40})(?:, NumelIn=(\d{1,18}), NumelOut=\d{1,18})?"
)
_LAST = re.compile(
    r"\[(?:PG ID \d{1,6} )?PG (?:GUID )?([^\] ]{1,80}?)(?:\(([^)\]]{1,80})\)| \(([^)\]]{1,80})\))? Rank (\d{1,7})\]"
    r".{0,200}?"
    r"last enqueued (?:NCCL )?work: (\d{1,18}), last completed (?:NCCL )?work: (\d{1,18})"
)
MOST = 1 << 16  # lines that are kept


@dataclass(slots=True)
class _Rank:
    group: str = "default"
    number: int = 0
    op: str = ""
    numel: int | None = None
    enqueued: int = 0
    default: bool = True


def read(lines: Iterable[str]) -> dict[int, RankTrace]:
    """By rank: the call that timed out first, and the newest that was called. Empty where no watchdog spoke."""
    found: dict[int, _Rank] = {}
    for line in lines:
        if "Watchdog caught" in line and (work := _WORK.search(line)):
            rank = int(next(word for word in work.groups()[:3] if word))
            one = found.setdefault(rank, _Rank()) if len(found) < MOST else found.get(rank)
            if one is not None and (not one.op or int(work[4]) < one.number):
                one.number, one.op, one.numel = int(work[4]), work[5].lower(), int(work[6]) if work[6] else None
        elif "last enqueued" in line and (last := _LAST.search(line)) and int(last[4]) in found:
            one = found[int(last[4])]
            one.group, one.enqueued = last[1], int(last[5])
            one.default = (last[2] or last[3]) in (None, "default_pg")
    return {rank: _trace(rank, one) for rank, one in found.items() if one.op}


def _trace(rank: int, one: _Rank) -> RankTrace:
    call = Call(group=one.group, number=one.number, op=one.op, sizes=((one.numel,),) if one.numel is not None else ())
    return RankTrace(
        rank=rank, source="watchdog", calls=(call,), enqueued={one.group: max(one.enqueued, one.number)},
        names={one.group: "default_pg"} if one.default else {},
    )  # fmt: skip

"""What PyTorch's watchdog wrote into a log: each rank that waited in vain, and in which call.

Specification: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, releases 1.13 to 2.13. A rank speaks of the call that
timed out, and in a second line of the last that it has called and the last that was over. "Rank" in both is the number
within the process group; the number in the job is that of the prefix, "[rank12]:", which 2.2 and newer give each line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from collectives.traces.calls import Call, RankTrace

_WORK = re.compile(
    r"(?:\[PG ID \d{1,6} PG GUID [^\]]{1,80}? Rank (\d{1,7})\]|\[PG [^\]]{1,80}? Rank (\d{1,7})\]|\[Rank (\d{1,7})\])"
    r" Watchdog caught collective operation timeout: "
    r"WorkNCCL\((?:SeqNum=(\d{1,18}), )?OpType=(\w{1,40})(?:, (?:NumelIn|TensorShape)=([\d\[\], ]{1,60}?), |, |\))"
)
_LAST = re.compile(
    r"\[(?:PG ID \d{1,6} )?PG (?:GUID )?([^\] ]{1,80}?)(?:\(([^)\]]{1,80})\)| \(([^)\]]{1,80})\))? Rank (\d{1,7})\]"
    r".{0,200}?"
    r"(?:work(?: sequence id)?: (\d{1,18})[ ,].{0,40}?)?"
    r"last enqueued (?:NCCL )?work: (\d{1,18}), last completed (?:NCCL )?work: (\d{1,18})"
)
# ProcessGroupWrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL, and monitored_barrier of gloo, which name ranks of their group
_CHECKED = re.compile(
    r"Rank (\d{1,7}) is running (?:\w{1,20} )?collective: CollectiveFingerPrint\((?:SequenceNumber=(\d{1,18}), )?"
    r"OpType=(\w{1,40})(?:, TensorShape=\[([\d, ]{0,80})\])?"
)
_BARRIER = re.compile(r"Ranks? ([\d, ]{1,2000}) failed to pass monitoredBarrier in (\d{1,12}) ms")
_ERROR = re.compile(
    r"\[rank(\d{1,7})\]:\s{1,8}((?:\w{1,60}\.){0,6}\w{0,60}(?:Error|Exception|Interrupt|Exit)): ?(.{0,400})"
)
_PREFIX = re.compile(r"\[rank(\d{1,7})\]:")
_DEFAULT = "default_pg"
MOST = 1 << 16  # ranks that are kept


@dataclass(slots=True)
class _Rank:
    local: int  # within the group
    number: int = 0
    op: str = ""
    numel: int | None = None
    group: str = "0"
    enqueued: int = 0
    default: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What the watchdogs of a log say."""

    traces: Mapping[int, RankTrace] = field(default_factory=dict)  # the call that timed out first, by rank
    heard: frozenset[int] = frozenset()  # ranks that wrote anything with their prefix
    errors: Mapping[int, str] = field(default_factory=dict)  # the first exception of each, in the order of the log
    late: Mapping[int, str] = field(default_factory=dict)  # ranks that a monitored barrier has missed, and its words


def read(lines: Iterable[str]) -> Waits:
    """Who waited in vain, and in what. Empty where no watchdog spoke."""
    named: dict[int, _Rank] = {}
    bare: dict[int, _Rank] = {}  # of lines without a prefix: of old releases; of newer ones the same once more
    heard: set[int] = set()
    errors: dict[int, str] = {}
    late: dict[int, str] = {}
    for line in lines:
        prefix = _PREFIX.search(line[:200]) if "[rank" in line else None
        rank = int(prefix[1]) if prefix else None
        if rank is not None and len(heard) < MOST:
            heard.add(rank)
        found = bare if rank is None else named
        if rank is not None and (error := _ERROR.search(line)) and len(errors) < MOST:
            errors.setdefault(rank, f"{error[2].rpartition('.')[2]}: {error[3]}".strip())
        if "Watchdog caught" in line and (work := _WORK.search(line)):
            local = int(next(word for word in work.groups()[:3] if word))
            key = local if rank is None else rank
            if key not in found and len(found) < MOST:
                numel = work[6] if work[6] and work[6].isdecimal() else None
                found[key] = _Rank(local, int(work[4] or 0), work[5].lower(), int(numel) if numel else None)
        elif "last enqueued" in line and (last := _LAST.search(line)):
            one = found.get(int(last[4]) if rank is None else rank)
            if one is None or one.enqueued or (last[5] and int(last[5]) != one.number):
                continue
            one.group, one.enqueued = last[1], int(last[6])
            one.default = (last[2] or last[3] or (_DEFAULT if last[1] == "0" else "")) == _DEFAULT
            one.group = "0" if one.default else one.group
        elif "CollectiveFingerPrint" in line:
            for told in _CHECKED.finditer(line[:8192]):
                bare.setdefault(int(told[1]), _checked(told))
        elif "monitoredBarrier" in line and (missed := _BARRIER.search(line)):
            words = f"has not come to the barrier within {int(missed[2]) / 1000:g} s"
            late.update({int(word): words for word in missed[1].split(",") if word.strip().isdecimal()})
    kept = named or bare
    groups: dict[str, dict[int, int]] = {}
    for rank, one in kept.items():
        if not one.default:
            groups.setdefault(one.group, {})[one.local] = rank
    members = {group: inside for group, places in groups.items() if (inside := _members(places))}
    return Waits(traces={rank: _trace(rank, one, members) for rank, one in kept.items()}, heard=frozenset(heard),
                 errors=errors, late=late)  # fmt: skip


def _checked(told: re.Match[str]) -> _Rank:
    """What DETAIL says that a rank called."""
    shape = [int(word[:18]) for word in (told[4] or "").split(",") if word.strip().isdecimal()]
    numel = prod(shape) if told[4] is not None else None
    return _Rank(int(told[1]), int(told[2] or 0), told[3].lower(), numel)


def _members(places: Mapping[int, int]) -> tuple[int, ...]:
    """Ranks of a group, up to the last that spoke, by local number -> rank: groups are cut evenly from all ranks.

    Empty where those that spoke do not lie evenly.
    """
    (first, at), *rest = sorted(places.items())
    if not rest:
        return ()
    last, end = rest[-1]
    step, uneven = divmod(end - at, last - first)
    even = all(rank == at + step * (local - first) for local, rank in rest)
    start = at - step * first
    if uneven or not even or step < 1 or start < 0 or last > MOST:
        return ()
    return tuple(start + step * local for local in range(last + 1))


def _trace(rank: int, one: _Rank, members: Mapping[str, tuple[int, ...]]) -> RankTrace:
    call = Call(group=one.group, number=one.number, op=one.op, sizes=((one.numel,),) if one.numel is not None else ())
    inside = members.get(one.group)
    return RankTrace(
        rank=rank, source="watchdog", calls=(call,), enqueued={one.group: max(one.enqueued, one.number)},
        names={one.group: _DEFAULT} if one.default else {}, groups={one.group: inside} if inside else {},
    )  # fmt: skip

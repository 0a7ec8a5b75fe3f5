"""What is known of a run's ranks, and the verdict on it: the types, and the limits that the rules share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from collectives.traces.calls import RankTrace
from collectives.traces.watchdog import LogFacts
from contracts.rank_state import RankState
from contracts.tables import read_table

SCHEMA_VERSION = 1
EXPLAINS = 0.8  # share of the wait; a cause below it is listed with its share, and no rank is named alone
STALL_SECONDS = 15.0  # after which the monitor of a rank dumps its calls
LONGER = 2.0  # times the longest pause or the usual pace that this run has had before
STALE_SECONDS = 30.0  # three of the intervals at which a rank writes its file
COPIED_STALE_SECONDS = 120.0  # the same in a copied folder, where only the hosts' clocks tell; they may differ by 40 s
SILENT_RUN_SECONDS = 60.0  # six of these intervals, after which a run that nobody writes for has ended
# PyTorch ends a job whose ranks wait for 600 s (default of NCCL's process group): half of it leaves time to act.
BUSY_SECONDS = 300.0
IDLE_SECONDS = 60.0  # of a rank that neither computes nor reads nor writes: one tenth of PyTorch's 600 s
IDLE_SHARE = 0.05  # of a CPU: below it a main thread does not compute
MOST_RANKS = 1 << 17  # that a job may have
# what only those write that have waited for as long as their group allows (gloo, ProcessGroupNCCL)
TIMED_OUT = re.compile(
    r"Timed out waiting|watchdog.{0,40}timeout|collective operation timeout|NCCL operation timed out", re.IGNORECASE
)
_WORDS = read_table(__file__, "why.toml")
LONG_PHASES = ("save", "evaluate", "compile")  # phases that may take long: others wait for them up to the limit
DOING, ACTIONS, TRUST, CODES = (_WORDS[part] for part in ("doing", "action", "trust", "code"))
ACTIONS_OF_LONG = _WORDS["action_of_long"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause of a verdict. A verdict lists the strongest cause first."""

    code: str  # "rank.gone", "call.size", "link", or a code of the log's reader
    message: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    share: float | None = None  # of the wait that it explains; None: all of it, or not measured
    evidence: tuple[str, ...] = ()
    action: str = ""
    cost: float | None = None  # share of the run's time that it takes while it lasts
    price: str = ""  # the cost in words, and in hours and money where steps and prices are known


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A question that no source answers, and the command that would answer it."""

    what: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of `topoflight why`."""

    state: str  # "stuck", "slow", "failed", "fine" or "unknown"
    line: str
    ranks: tuple[int, ...] = ()  # that are the cause; a rank that waits is never among them
    nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    waiting: tuple[int, ...] = ()
    not_at_fault: tuple[str, ...] = ()  # what looks like a fault and is none, as sentences
    disagree: tuple[str, ...] = ()  # sources that differ, and which one was believed
    unknown: tuple[Unknown, ...] = ()
    sources: tuple[str, ...] = ()
    change: tuple[str, ...] = ()  # settings to change, of an environment or a manifest
    forecast: str = ""  # after the change
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """All that the sources tell of a run's ranks."""

    traces: Mapping[int, RankTrace] = field(default_factory=dict)  # of the flight recorder
    states: Mapping[int, RankState] = field(default_factory=dict)  # of the monitors inside the ranks
    processes: Mapping[int, str] = field(default_factory=dict)  # "runs", "stopped", "gone", where this host has them
    ages: Mapping[int, float] = field(default_factory=dict)  # seconds by which a rank's file is older than the newest
    copied: bool = False  # the folder is a copy: `ages` compare the hosts' own clocks
    silence: float | None = None  # seconds since any rank wrote; None where a rank is known to run
    stacks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # innermost first, of py-spy or faulthandler
    unranked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # stacks of processes whose rank is not told
    log: LogFacts = field(default_factory=LogFacts)  # what PyTorch and gloo wrote into the logs
    in_order: bool = True  # `log` is one file, so the first of its errors came first
    first: int | None = None  # rank that torchrun saw fail first
    hosts: Mapping[int, str] = field(default_factory=dict)  # by rank, from torchrun's table of failures
    world: int | None = None
    now: float = 0.0
    limit: float = BUSY_SECONDS  # for which ranks may wait for one that is at work

    @cached_property
    def gave_up(self) -> dict[int, float]:
        """When those ranks last wrote that ended because they had waited for as long as their group allows."""
        return {
            rank: state.written for rank, state in self.states.items()
            if rank in self.log.traces or (state.ended and state.error and TIMED_OUT.search(state.error))
        }  # fmt: skip

    def host(self, rank: int) -> str | None:
        """The host of a rank, where its own file or torchrun names it."""
        state = self.states.get(rank)
        return (state.host if state else None) or self.hosts.get(rank)

    def has_moved_on(self, rank: int) -> bool:
        """Whether a rank has called more collectives than its dump holds: its dump is old."""
        state, trace = self.states.get(rank), self.traces.get(rank)
        return state is not None and trace is not None and state.calls > sum(trace.enqueued.values())


def ranks_of(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 1, 2, 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:16]))}{' ...' if len(ranks) > 16 else ''}"


def verdict_of(
    state: str, causes: tuple[Cause, ...], facts: RunFacts, ranks: tuple[int, ...] = (), waiting: tuple[int, ...] = ()
) -> Verdict:
    """The verdict that these causes make, with the hosts and GPUs of the ranks that are named."""
    hosts = {facts.host(rank) for rank in ranks} | {node for cause in causes for node in cause.nodes}
    gpus = [f"{s.host} GPU {s.gpu}" for r in ranks if (s := facts.states.get(r)) and s.gpu is not None and s.host]
    return Verdict(
        state=state, line=f"{state}: {causes[0].message}" if causes else state, ranks=ranks, causes=causes,
        nodes=tuple(sorted(host for host in hosts if host)), gpus=tuple(gpus), waiting=waiting,
    )  # fmt: skip


def open_verdict(state: str, cause: Cause, facts: RunFacts, waiting: tuple[int, ...], what: str, how: str) -> Verdict:
    """A verdict that names no rank, with the question that stays open and the command that answers it."""
    return replace(verdict_of(state, (cause,), facts, (), waiting), unknown=(Unknown(what=what, command=how),))


def is_open(verdict: Verdict) -> bool:
    """Whether the verdict says that ranks wait, but not for which rank."""
    return bool(verdict.causes) and verdict.causes[0].code == "call.timeout"

"""The known facts about a run's ranks, the verdict, the limits that the rules share, and what each rank is doing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from collectives.traces.rank_files import Mark, RankState, RankTrace
from collectives.traces.watchdog import LogFacts
from contracts.run_record import FailedRank
from planner.why import limits, words
from planner.why.words import KINDS, WORDS, are_alike, find_remedy, get_kind, headline, is_own

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause of a verdict. A verdict lists the strongest cause first."""

    code: str  # "rank.gone", "call.size", "link", or a code of the log's reader
    message: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    share: float | None = None  # fraction of the wait that it explains; None: all of it, or not measured
    evidence: tuple[str, ...] = ()
    action: str = ""
    of_program: bool = False  # the same would happen on other nodes than `nodes`


def make_cause(
    key: str, *, ranks: tuple[int, ...] = (), nodes: tuple[str, ...] = (), share: float | None = None,
    evidence: tuple[str, ...] = (), **fields: object,
) -> Cause:  # fmt: skip
    """Return the cause with this key in why.toml, its fields filled in."""
    row = WORDS["cause"][key]
    message, action = (row.get(part, "").format(**fields) for part in ("message", "action"))
    return Cause(code=row["code"], message=message, action=action, ranks=ranks, nodes=nodes, share=share,
                 evidence=evidence)  # fmt: skip


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
    ranks: tuple[int, ...] = ()  # ranks that are the cause; never a waiting rank
    nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    waiting: tuple[int, ...] = ()
    not_at_fault: tuple[str, ...] = ()  # observations that look like a fault but are not, as sentences
    disagree: tuple[str, ...] = ()  # sources that contradict each other, and which one was used
    unknown: tuple[Unknown, ...] = ()
    sources: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def names_nobody(self) -> bool:
        """Return whether the verdict says that ranks wait, but not for which rank."""
        return bool(self.causes) and self.causes[0].code == "call.timeout"

    def with_causes(self, state: str, *causes: Cause, **changes: Any) -> Verdict:
        """Return it with another state and other causes, the first of which is its line."""
        return replace(self, state=state, line=f"{state}: {causes[0].message}", causes=causes, **changes)

    def with_question(self, key: str, **fields: object) -> Verdict:
        """Return it with a question of why.toml that stays open; where no fault was found, it may be unknown for it."""
        line, missing, how = (WORDS["open"][key].get(part, "").format(**fields) for part in ("line", "what", "how"))
        verdict = replace(self, unknown=(*self.unknown, Unknown(what=missing, command=how)))
        if not line or self.state not in ("fine", "unknown"):
            return verdict
        return replace(verdict, state="unknown", line=f"unknown: {line}")


class Activity(NamedTuple):
    """What a rank is doing."""

    kind: str  # "gone", "stopped", "silent", a phase, "gpu" or "unknown"
    words: str  # "computes for 20 s, in step (train.py:31)"
    grace: float = 0.0  # seconds for which others may wait for it before this is a fault


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """All facts that the sources contain about a run's ranks."""

    traces: Mapping[int, RankTrace] = field(default_factory=dict)  # from the flight recorder
    states: Mapping[int, RankState] = field(default_factory=dict)  # from the monitors inside the ranks
    nodes: Mapping[int, RankState] = field(default_factory=dict)  # by node: torchrun, which has started no rank yet
    processes: Mapping[int, str] = field(default_factory=dict)  # "runs", "stopped", "gone", where this host has them
    starting: Mapping[int, int] = field(default_factory=dict)  # pids of ranks that run, and are not at the rendezvous
    ages: Mapping[int, float] = field(default_factory=dict)  # seconds by which a rank's file is older than the newest
    copied: bool = False  # the folder is a copy: `ages` compare the hosts' own clocks
    silence: float | None = None  # seconds since any rank wrote; None if a rank is known to run
    full: str = ""  # the run's folder, if its file system is full: the ranks cannot write
    # innermost first, of py-spy or faulthandler: by rank, or by the name of a process whose rank is unknown
    stacks: Mapping[int | str, tuple[str, ...]] = field(default_factory=dict)
    log: LogFacts = field(default_factory=LogFacts)  # messages of PyTorch and gloo in the logs
    in_order: bool = True  # `log` is one file, so the first of its errors came first
    first: int | None = None  # rank that torchrun saw fail first
    stopped: str = ""  # the signal that torchrun of a job on one node received, and when; it then ends its ranks
    failed: Mapping[int, FailedRank] = field(default_factory=dict)  # by rank, as torchrun reports
    hosts: Mapping[int, str] = field(default_factory=dict)  # of ranks, as the logs name them
    world: int | None = None
    now: float = 0.0
    limit: float = limits.BUSY_SECONDS  # for which ranks may wait for one that is at work

    # How the run and its ranks have ended ----------------------------------------------------------------------------

    @cached_property
    def gave_up(self) -> frozenset[int]:
        """Return the ranks that ended because their wait timed out."""
        return frozenset(rank for rank, state in self.states.items() if rank in self.log.traces or (
            state.ended and state.error and words.TIMED_OUT.search(state.error)))  # fmt: skip

    @cached_property
    def lost_a_peer(self) -> frozenset[int]:
        """Return the ranks that ended because they lost another rank."""
        return frozenset(r for r, s in self.states.items() if s.ended and s.error and not is_own(s.error))

    @cached_property
    def is_over(self) -> bool:
        """Return whether every rank has ended by itself, without an error."""
        return bool(self.states) and all(state.ended and not state.error for state in self.states.values())

    @cached_property
    def end_from_outside(self) -> str:
        """Return the signal that ended all ranks, "unknown" if they are gone at the same time; "" if neither is so."""
        states, terminated = self.states.values(), self.log.terminated
        errors = {*self.log.errors.values(), *(state.error for state in states if state.error)}
        if not states or self.first is not None or any(state.asked for state in states):
            return ""
        if own_errors := list(filter(is_own, errors)):
            return "SIGINT" if all(error.startswith("KeyboardInterrupt") for error in own_errors) else ""
        if self.stopped:
            return self.stopped
        if self.log.stopped and terminated and all(state.ended or state.pid in terminated for state in states):
            return {"2": "SIGINT", "15": "SIGTERM", "1": "SIGHUP"}.get(self.log.stopped, self.log.stopped)
        ages = [self.ages.get(rank, 0.0) for rank, state in self.states.items()
                if self.processes.get(rank) == "gone" and not state.ended]  # fmt: skip
        is_complete = len(ages) == max(len(states), self.world or 1) > 1
        return "unknown" if is_complete and max(ages) - min(ages) <= limits.TOGETHER_SECONDS else ""

    @property
    def before_end(self) -> RunFacts:
        """The same facts, as they were when the ranks last wrote: only those that ended well long before had ended."""
        states = {rank: state if state.ended and not state.error and self.ages.get(rank, 0.0) > limits.TOGETHER_SECONDS
                  else replace(state, ended=False, error=None) for rank, state in self.states.items()}  # fmt: skip
        processes = {rank: kind for rank, kind in self.processes.items() if kind != "gone"}
        log = replace(self.log, stopped="", errors={})
        return replace(self, states=states, processes=processes, silence=None, log=log, stopped="")

    def outlived(self, rank: int) -> bool:
        """Whether a rank without a final state still wrote when the first of the others gave up waiting.

        Then the launcher ended it, and what it was at counts. A rank that is killed is noticed at once by those that
        are connected to it: they lose a peer, they do not wait in vain; and torchrun sees it fail first.
        """
        state, given_up = self.states.get(rank), self.gave_up
        if state is None or state.ended or rank in given_up or rank == self.first or not given_up:
            return False
        return self.ages.get(rank, 0.0) <= max(self.ages.get(one, 0.0) for one in given_up) + limits.STALE_SECONDS

    def error_of(self, rank: int) -> str | None:
        """Return the exception that ended a rank, by its own file or the log."""
        state = self.states.get(rank)
        return (state.error if state else None) or self.log.errors.get(rank)

    def find_first_to_end(self, ranks: Sequence[int]) -> int | None:
        """The rank whose error is its own; else the one that the others' errors lead to: a peer that was lost."""
        errors = {rank: error for rank in ranks if (error := self.error_of(rank))}
        if self.first is not None and self.first in ranks and is_own(errors.get(self.first, "")):
            clean = [rank for rank in ranks if (state := self.states.get(rank)) and state.ended and not state.error]
            left = [rank for rank in clean if self.first not in errors
                    and 0 < self.count_calls(rank) < self.count_calls(self.first)]  # fmt: skip
            return left[0] if len(left) == 1 else self.first
        own = sorted((rank for rank in errors if is_own(errors[rank])), key=lambda rank: -self.ages.get(rank, 0.0))
        if own:
            unclear = len(own) > 1 and (are_alike([errors[one] for one in own]) or not self._ended_before(*own[:2]))
            return None if unclear else own[0]
        closed = (found for error in errors.values() if (found := words.CLOSED.search(error)))
        ends = [(match[1].removeprefix("::ffff:"), match[2]) for match in closed]
        # those that the launcher has ended wrote no final state either
        quiet = [r for r, s in self.states.items() if not s.error and s.pid not in self.log.terminated]
        owners = {end: rank for rank in quiet for end in self.states[rank].ends}
        there = {address: [rank for rank in quiet if address in self.states[rank].addresses] for address, _ in ends}
        pointed = Counter(owners[end] for one, port in ends if (end := f"{one}:{port}") in owners)
        # a rank that connected itself has another port than the one that its peer knows
        pointed = pointed or Counter(there[address][0] for address, _ in ends if len(there[address]) == 1)
        if pointed:
            return pointed.most_common(1)[0][0]
        quiet = [rank for rank in quiet if rank in ranks]
        if ends and self.lost_a_peer == set(self.states) and (self.world or 0) <= limits.MAX_RANKS:
            # all that have written lost another, which was killed before its monitor wrote
            quiet = [rank for rank in range(self.world or 0) if rank not in self.states and rank not in self.traces]
        return quiet[0] if len(quiet) == 1 else None

    @property
    def has_one_group(self) -> bool:
        """Return whether the dumps show calls of one group only, so that their numbers can be compared."""
        return len({group for trace in self.traces.values() for group in trace.enqueued}) < 2

    def count_calls(self, rank: int) -> int:
        """Return how many collectives a rank has called, by a dump as new as its state; 0: unknown."""
        state, trace = self.states[rank], self.traces.get(rank)
        if trace is None or not self.has_one_group:
            return 0
        is_new = (trace.taken or 0.0) >= state.written - 1 or not (state.ended or self.has_moved_on(rank))
        return sum(trace.enqueued.values()) if is_new else 0

    def _ended_before(self, first: int, second: int) -> bool:
        """Whether a rank ended before another one, by the order of a log or by more than their clocks can differ."""
        if first not in self.states:
            return self.in_order
        one_clock = not self.copied and self.host(first) is not None and self.host(first) == self.host(second)
        margin = limits.ORDER_SECONDS if one_clock else limits.CLOCKS_SECONDS
        return self.ages.get(first, 0.0) - self.ages.get(second, 0.0) > margin

    def end_of(self, rank: int) -> Activity:
        """Return how a lost rank ended; if its host is not visible, only the other ranks show it."""
        now = self.activity(rank)
        if now.kind in (*words.ENDED, "silent"):
            return now
        return Activity("gone", "has closed its connections, and wrote no final state")

    # What each rank is doing -----------------------------------------------------------------------------------------

    def host(self, rank: int) -> str | None:
        """Return the host of a rank, if its own file, torchrun or another line of the logs names it."""
        sources = self.states.get(rank), self.failed.get(rank)
        return next((one.host for one in sources if one and one.host), self.hosts.get(rank))

    def has_moved_on(self, rank: int) -> bool:
        """Return whether a rank has called more collectives than its dump contains, so that the dump is old."""
        state, trace = self.states.get(rank), self.traces.get(rank)
        return state is not None and trace is not None and state.calls > sum(trace.enqueued.values())

    def activity(self, rank: int) -> Activity:
        """Return what a rank is doing, from the process table, else its own file, else its stack."""
        state, process, stack = self.states.get(rank), self.processes.get(rank), self.stacks.get(rank)
        if state is not None and state.ended:
            return Activity("gone", f"ended with {headline(state.error)}" if state.error else "has ended by itself")
        if process == "gone" and not self.outlived(rank):
            return Activity("gone", "is gone: its process has ended, and it wrote no final state")
        if process == "stopped":  # perhaps for a moment only, as py-spy and gdb do it
            is_new = self.ages.get(rank, 0.0) < limits.STALL_SECONDS + limits.WRITE_SECONDS
            is_brief = is_new and "runs" in self.processes.values()
            text = "is stopped (state T of its process: a signal or a debugger)"
            return Activity("stopped", text, limits.STALL_SECONDS if is_brief else 0.0)
        if state is None:
            unseen = "has no known position: no log, trace or RAS report covers it"
            return Activity("unknown", f"is in {' < '.join(stack[:3])}" if stack else unseen)
        age, stale = self.ages.get(rank, 0.0), limits.CLOCKS_SECONDS if self.copied else limits.STALE_SECONDS
        is_mute = age > stale and not self.outlived(rank)
        if is_mute and process != "runs":  # its host may be down, or one call holds the GIL
            text = f"has written no heartbeat for {age:.0f} s, while other ranks have"
            return Activity("silent", text, 0.0 if self._is_unreachable(state) else self.limit)
        kind, frames = find_main_phase(state) or "unknown", state.own or state.where or stack or ()
        place = f", in {frames[0]}" if frames else ""
        if is_mute:  # a call that holds the GIL, such as pickle, blocks the monitor
            return Activity(kind, f"runs, but has written no heartbeat for {age:.0f} s{place}", self.limit)
        since = f" for {state.written - state.since:.0f} s" if state.since and state.written > state.since else ""
        effort = "" if state.cpu_share is None else f" ({state.cpu_share:.0%} of a CPU)"
        if state.cpu_share is not None and state.cpu_share < limits.IDLE_SHARE:
            effort = f" (no CPU time; its process moves {'' if state.is_active else 'hardly any '}data)"
        return Activity(kind, f"{get_kind(kind).does}{since}{place}{effort}", self._get_grace(state))

    def _is_unreachable(self, state: RankState) -> bool:
        """Whether other ranks have lost a peer, or send bytes again to this rank's host, which does not answer."""
        others = [peer_state for peer_state in self.states.values() if peer_state.host != state.host]
        return bool(self.lost_a_peer) or any(
            peer.held.get(address) and peer.resent.get(address) for peer in others for address in state.addresses
        )

    def _get_grace(self, state: RankState) -> float:
        """Seconds for which others may wait for a rank at work, by the evidence on what it does.

        Long work that only one rank does (data before the first step, evaluation, generation, upload, a checkpoint)
        may take the limit. In lines that ordinary steps run through, all the way from the script, it may take no longer
        than a stall: a model's own code also runs in an evaluation, but another line calls it there. A main thread that
        does not compute, in a process that hardly moves data, may take limits.IDLE_SECONDS once the training has begun.
        """
        if state.phase in words.LONG_PHASES or state.calls < len(state.groups) + limits.START_CALLS:
            return self.limit
        if state.own and set(state.own) <= set(state.usual):
            return min(limits.STALL_SECONDS, self.limit)
        is_idle = state.cpu_share is None or find_main_phase(state, "compute") == "idle"
        return min(limits.IDLE_SECONDS, self.limit) if is_idle else self.limit

    def find_activity_since(self, rank: int, begun: float) -> Activity:
        """activity(), but what a rank did since the others' wait began counts, where it does something else only now.

        A rank that has just come back from a checkpoint computes by now; the wait is the checkpoint's.
        """
        now, state = self.activity(rank), self.states.get(rank)
        if state is None or now.kind not in ("data", "workers", "compute", "idle", "io", "collective") or not begun:
            return now
        until = state.written + self.ages.get(rank, 0.0)  # a file may be older than those of the ranks that wait
        if state.written - begun < now.grace:  # time without samples is no time at one place
            now = now._replace(grace=min(now.grace + until - state.written, self.limit))
        old = next((one for one in reversed(state.marks) if one.at <= begun), Mark(at=begun if state.marks else until))
        looks = {phase: n - old.samples.get(phase, 0) for phase, n in state.samples.items()}
        # a call that holds the GIL prevents looks
        if sum(looks.values()) * limits.LOOK_SECONDS < (until - old.at) / 2:
            text = f"{KINDS[now.kind].does} by its last sample, and for most of the wait its monitor could not run"
            return Activity(now.kind, text, self.limit)
        total = sum(n for phase, n in looks.items() if phase != "collective")
        long = {phase: n for phase, n in looks.items() if phase in words.LONG_PHASES}
        if not state.since or state.since <= begun or total <= 0 or sum(long.values()) / total <= 1 - limits.EXPLAINS:
            return now
        busy = max(long, key=lambda phase: long[phase])
        share = f"{long[busy] / total:.0%} of the samples since then"
        return Activity(busy, f"{KINDS[busy].does} in {share}; now it {KINDS[now.kind].does}", self.limit)

    # Causes and verdicts ---------------------------------------------------------------------------------------------

    def verdict(
        self, state: str, *causes: Cause, waiting: tuple[int, ...] = (), ranks: tuple[int, ...] | None = None
    ) -> Verdict:
        """Return the verdict with these causes. It names `ranks` (default: of the causes), their hosts and GPUs."""
        if ranks is None:
            ranks = tuple(sorted({rank for cause in causes for rank in cause.ranks}))
        hosts = {self.host(rank) for rank in ranks} | {node for cause in causes for node in cause.nodes}
        codes = {kind.code for kind in KINDS.values() if kind.is_on_host}
        on_host = {rank for cause in causes if cause.code in codes for rank in cause.ranks}
        gpus = [f"{s.host} GPU {s.gpu}" for r in ranks
                if r not in on_host and (s := self.states.get(r)) and s.gpu is not None and s.host]  # fmt: skip
        return Verdict(
            state=state, line=f"{state}: {causes[0].message}", ranks=ranks, causes=causes,
            nodes=tuple(sorted(host for host in hosts if host)), gpus=tuple(gpus), waiting=waiting,
        )  # fmt: skip

    def named(self, key: str, *, state: str = "", waiting: tuple[int, ...] = (), **fields: Any) -> Verdict:
        """Return the verdict with one cause of why.toml, filled in with `fields`, and with its open question if any."""
        row = WORDS["cause"][key]
        if row["code"] == "rank.behind":  # their hosts may be at fault
            fields["nodes"] = tuple(sorted({host for rank in fields["ranks"] if (host := self.host(rank))}))
        verdict = self.verdict(state or row.get("state", "failed"), make_cause(key, **fields), waiting=waiting)
        return replace(verdict, unknown=(Unknown(what=row["what"], command=row["how"]),)) if "what" in row else verdict

    def cause_of(self, rank: int, activity: Activity, *evidence: str, share: float | None = None) -> Cause:
        """Return the cause that names this rank, with its host, its stack and the command that shows more."""
        state, host = self.states.get(rank), self.host(rank)
        own, stack = (state.own if state else ()), self.stacks.get(rank) or (state.where if state else ())
        error = self.error_of(rank) if activity.kind == "gone" else None
        row = self.failed.get(rank) if activity.kind == "gone" else None
        ended = [row.at, f"exit code {row.exit_code}", row.signal, f"pid {row.pid}" * bool(row.pid)] if row else []
        rows = (*evidence, f"torchrun: {', '.join(filter(None, ended))}" if row else "",
                *([error] if error and len(error.splitlines()) > 1 else []),  # the whole message
                *(f"its {name}: {' < '.join([one for one in frames if not words.PASSES_ON.search(one)][:4])}"
                  for name, frames in (("own code", own), ("stack", stack)) if frames))  # fmt: skip
        kind = activity.kind
        if kind == "gone" and error:
            kind = "cuda" if words.OF_GPU.search(error) else "raised"
        elif row and 0 < (row.exit_code or 0) < 128:  # no signal ended it, nor its child if it is a shell
            kind = "exited"
        elif kind == "gone" and state and state.ended:
            kind = "left"
        action = find_remedy(error) if error else get_kind(kind).action
        if state and state.pid:
            action = action.replace("--pid PID", f"--pid {state.pid}").replace("-CONT PID", f"-CONT {state.pid}")
        message = f"rank {rank}{f' on {host}' if host else ''} {activity.words}"
        return Cause(
            code=get_kind(activity.kind).code, message=message, ranks=(rank,), share=share,
            nodes=(host,) if host else (), evidence=tuple(filter(None, rows)), action=action,
            of_program=get_kind(kind).is_of_program,
        )  # fmt: skip

    def blame_timeout(self, busy: Mapping[int, Activity], wait: str, waiting: tuple[int, ...]) -> Verdict:
        """The others gave up waiting for ranks at work that may take long: the timeout is at fault, no rank is."""
        errors = [state.error or "" for state in self.states.values()]
        limit = next((int(match[1]) / 1000 for error in errors if (match := words.LIMIT.search(error))), None)
        texts = tuple(f"rank {rank} {activity.words}" for rank, activity in sorted(busy.items()))
        timeouts = (error[:200] for error in errors if words.TIMED_OUT.search(error))
        other = get_kind(busy[min(busy)].kind).if_short
        verdict = self.named("timeout", limit=f" of {limit:.0f} s" if limit else "", first=texts[0], other=other,
                             waiting=waiting, evidence=(*filter(None, [wait]), *texts[1:4], *timeouts)[:6])  # fmt: skip
        return replace(verdict, not_at_fault=texts)


def make_open_verdict(rows: Sequence[str], seconds: float, waiting: tuple[int, ...] = ()) -> Verdict:
    """No fault so far: what others wait for, as sentences, and the wait from which on it is one."""
    line = f"nothing is stuck yet: {rows[0]}; it counts as a fault after {seconds:.0f} s (--limit)"
    return Verdict(state="fine", line=line, not_at_fault=tuple(rows[:8]), waiting=waiting)


def ranks_of(ranks: Sequence[int], kind: str = "rank") -> str:
    """ "rank 2", "nodes 1, 2, 3"."""
    numbers = ", ".join(map(str, ranks[:16])) + " ..." * (len(ranks) > 16)
    return f"{kind}{'s' * (len(ranks) != 1)} {numbers}"


def find_main_phase(state: RankState, phase: str | None = None) -> str | None:
    """The phase of a rank, or another one that it was mostly in: what is not on a CPU does not compute."""
    phase = phase or state.phase
    if phase != "compute" or state.cpu_share is None or state.cpu_share >= limits.IDLE_SHARE:
        return phase
    return "io" if state.is_active else "idle"

"""What a rank does: whether its process is there, and whether others may have to wait for what it is at."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from contracts.rank_state import RankState
from planner.why.facts import (
    ACTIONS,
    ACTIONS_OF_LONG,
    CODES,
    COPIED_STALE_SECONDS,
    DOING,
    EXPLAINS,
    IDLE_SECONDS,
    IDLE_SHARE,
    LONG_PHASES,
    STALE_SECONDS,
    STALL_SECONDS,
    TIMED_OUT,
    Cause,
    RunFacts,
    Verdict,
    verdict_of,
)  # fmt: skip

# errors of a rank that lost another, or waited for it in vain (gloo/transport/tcp, c10d/socket.cpp, ProcessGroupNCCL)
LOST_PEER = re.compile(r"closed by peer|Read error|Write error|onnection reset|Timed out waiting|Broken pipe|"
                       r"remote process exited|watchdog|DistNetworkError|onnection refused|store->get|DistStoreError|"
                       r"NCCL error|NCCL operation |NCCL Async Error|"
                       r"DistBackendError|collective operation timeout|Detected mismatch|wait timeout",
                       re.IGNORECASE)  # fmt: skip
_LIMIT = re.compile(r"(?:Timed out waiting |Timeout\(ms\)=)(\d{1,12})")
_PEER = re.compile(r"\[([0-9a-fA-F.:]{2,45})\]:(\d{1,5})")
ENDED = ("gone", "stopped", "silent")  # kinds for which nothing is to be waited


class Activity(NamedTuple):
    """What a rank does."""

    kind: str  # "gone", "stopped", "silent", a phase, "gpu" or "unknown"
    words: str  # "computes for 20 s, in step (train.py:31)"
    grace: float = 0.0  # seconds for which others may wait for it before that is a fault


def activity(rank: int, facts: RunFacts) -> Activity:
    """What a rank does by the process table, else by its own file, else by its stack."""
    state, process = facts.states.get(rank), facts.processes.get(rank)
    if state is not None and state.ended:
        return Activity("gone", f"ended with {headline(state.error)}" if state.error else "has ended by itself")
    if process == "gone" and not outlived(rank, facts):
        return Activity("gone", "its process is gone, without an end of its own")
    if process == "stopped":
        return Activity("stopped", "its process is stopped (state T: a signal or a debugger)")
    stack = facts.stacks.get(rank)
    if state is None:
        if stack:
            return Activity("unknown", f"is in {' < '.join(stack[:3])}")
        return Activity("unknown", "its position is unknown: no log, trace or RAS report covers it")
    stale, age = COPIED_STALE_SECONDS if facts.copied else STALE_SECONDS, facts.ages.get(rank, 0.0)
    is_mute = age > stale and not outlived(rank, facts)
    if is_mute and process != "runs":
        return Activity("silent", f"has written no heartbeat for {age:.0f} s, while other ranks have")
    since = f" for {state.written - state.since:.0f} s" if state.since and state.written > state.since else ""
    frames = state.own or state.where or stack or ()
    where = f", in {frames[0]}" if frames else ""
    kind = state.phase or "unknown"
    if is_mute:  # a call that holds Python's lock, as of pickle, keeps the monitor from writing
        return Activity(kind, f"runs, but has written no heartbeat for {age:.0f} s{where}", facts.limit)
    return Activity(kind, f"{DOING.get(kind, 'is at work')}{since}{where}{_effort(state)}", grace(state, facts))


def headline(error: str) -> str:
    """The first line of an exception's message, and its last one, which often is the cause."""
    lines = [line.strip() for line in error.splitlines() if re.search(r"\w", line)]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1])))[:400] if lines else error


def _effort(state: RankState) -> str:
    if state.cpu_share is None:
        return ""
    return " (no CPU time, reads or writes)" if _is_idle(state) else f" ({state.cpu_share:.0%} of a CPU)"


def _is_idle(state: RankState) -> bool:
    return state.cpu_share is not None and state.cpu_share < IDLE_SHARE and not state.is_active


def grace(state: RankState, facts: RunFacts) -> float:
    """Seconds for which others may wait for a rank at work, by the evidence on what it does.

    Long work that only one rank does (data before the first step, evaluation, generation, upload, a checkpoint) may
    take the limit. In lines that ordinary steps run through, all the way from the script, it may take no longer than a
    stall: a model's own code also runs in an evaluation, but another line calls it there. A main thread that neither
    computes nor reads nor writes may take IDLE_SECONDS once the training has begun.
    """
    if state.phase in LONG_PHASES or state.calls < len(state.groups) + 8:
        return facts.limit
    if state.own and set(state.own) <= set(state.usual):
        return min(STALL_SECONDS, facts.limit)
    if state.cpu_share is None or _is_idle(state):
        return min(IDLE_SECONDS, facts.limit)
    return facts.limit


def since_wait_began(rank: int, facts: RunFacts, begun: float) -> Activity:
    """activity(), but what a rank did since the others' wait began counts, where it does something else only now.

    A rank that has just come back from a checkpoint computes by now; the wait is the checkpoint's.
    """
    now = activity(rank, facts)
    state = facts.states.get(rank)
    if state is None or now.kind not in ("data", "compute") or not begun or not state.since or state.since <= begun:
        return now
    old = next((mark.samples for mark in reversed(state.marks) if mark.at <= begun), {})
    looks = {one: n - old.get(one, 0) for one, n in state.samples.items() if one != "collective"}
    total, long = sum(looks.values()), {one: n for one, n in looks.items() if one in LONG_PHASES}
    if total <= 0 or sum(long.values()) / total <= 1 - EXPLAINS:
        return now
    busy = max(long, key=lambda one: long[one])
    words = f"{DOING[busy]} in {long[busy] / total:.0%} of the looks at it since then; now it {DOING[now.kind]}"
    return Activity(busy, words, facts.limit)


def outlived(rank: int, facts: RunFacts) -> bool:
    """Whether a rank without an end of its own still wrote when the first of the others gave up waiting.

    Then the launcher ended it, and what it was at counts. A rank that is killed is noticed at once by those that are
    connected to it: they lose a peer, they do not wait in vain; and torchrun sees it fail first.
    """
    state, given_up = facts.states.get(rank), facts.gave_up
    if state is None or state.ended or rank in given_up or rank == facts.first or not given_up:
        return False
    return state.written >= min(given_up.values()) - STALE_SECONDS


def lost_a_peer(facts: RunFacts) -> frozenset[int]:
    """Ranks that ended with the loss of another."""
    return frozenset(r for r, s in facts.states.items() if s.ended and s.error and LOST_PEER.search(s.error))


def cause_of(rank: int, what: Activity, facts: RunFacts, *evidence: str, share: float | None = None) -> Cause:
    """The cause that a rank is, with its host, its stack and the command that looks further."""
    state, stack = facts.states.get(rank), facts.stacks.get(rank)
    shown = stack or (state.where if state else ())
    rows = [one for one in evidence if one]
    if what.kind == "gone" and (error := (state.error if state else None) or facts.log.errors.get(rank)):
        rows += [error] if len(error.splitlines()) > 1 else []  # the whole message
    if state and state.own:
        rows.append(f"its own code: {' < '.join(state.own[:4])}")
    if shown:
        rows.append(f"its stack: {' < '.join(shown[:4])}")
    host = facts.host(rank)
    message = f"rank {rank}{f' on {host}' if host else ''} {what.words}"
    if what.words.startswith("its "):
        message = f"rank {rank}{f' on {host}' if host else ''}: {what.words}"
    action = ACTIONS.get(what.kind, ACTIONS["unknown"])
    if state and state.pid:
        action = action.replace("--pid PID", f"--pid {state.pid}").replace("-CONT PID", f"-CONT {state.pid}")
    return Cause(code=CODES.get(what.kind, "rank.behind"), message=message, ranks=(rank,),
                 nodes=(host,) if host else (), share=share, evidence=tuple(rows), action=action)  # fmt: skip


def timeout_too_short(
    busy: Mapping[int, Activity], facts: RunFacts, wait: str, waiting: tuple[int, ...]
) -> Verdict:  # fmt: skip
    """The others gave up waiting for ranks at work that may take long: the timeout is at fault, no rank is."""
    errors = [state.error or "" for state in facts.states.values()]
    limit = next((int(found[1]) / 1000 for error in errors if (found := _LIMIT.search(error))), None)
    words = [f"rank {rank} {what.words}" for rank, what in sorted(busy.items())]
    shorter = f"the group's timeout{f' of {limit:.0f} s' if limit else ''} is shorter than what is waited for"
    action = "init_process_group(timeout=...) longer than that"
    action += ACTIONS_OF_LONG.get(busy[min(busy)].kind, "")
    evidence = (*([wait] if wait else []), *words[1:4], *(error[:200] for error in errors if TIMED_OUT.search(error)))
    cause = Cause(code="timeout.short", message=f"{shorter}: {words[0]}", evidence=evidence[:6], action=action)
    return replace(verdict_of("failed", (cause,), facts, (), waiting), not_at_fault=tuple(words))


def are_alike(errors: Sequence[str]) -> bool:
    """Whether several ranks ended with one kind of error: then none of them is the cause of the others'."""
    return len(errors) > 1 and len({error.partition(":")[0] for error in errors}) == 1


def first_to_end(ranks: Sequence[int], facts: RunFacts) -> int | None:
    """The rank whose error is its own; else the one that the others' errors lead to: a peer that was lost."""
    errors = {rank: facts.states[rank].error or "" for rank in ranks if facts.states[rank].error}
    if facts.first is not None and facts.first in ranks and not LOST_PEER.search(errors.get(facts.first, "")):
        return facts.first
    own = [rank for rank, error in errors.items() if not LOST_PEER.search(error)]
    if len(own) > 1 and (facts.copied or are_alike([errors[rank] for rank in own])):
        return None
    if own:
        return max(own, key=lambda rank: facts.ages.get(rank, 0.0))
    owner = {end: rank for rank, state in facts.states.items() for end in state.ends}
    ends = {rank: f"{p[1].removeprefix('::ffff:')}:{p[2]}" for rank, e in errors.items() if (p := _PEER.search(e))}
    quiet = [rank for rank in ranks if not facts.states[rank].ended or not facts.states[rank].error]
    pointed = Counter(owner[end] for end in ends.values() if owner.get(end) in quiet)
    if pointed:
        return pointed.most_common(1)[0][0]
    return quiet[0] if len(quiet) == 1 else None

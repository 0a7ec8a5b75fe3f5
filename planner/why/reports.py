"""Verdicts from log messages of ranks and launchers, and from ranks that have ended."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from time import gmtime, strftime

from collectives.traces import watchdog
from planner.why import limits, words
from planner.why.blocked import mismatch, signature
from planner.why.facts import Activity, RunFacts, Verdict, make_open_verdict, ranks_of
from planner.why.words import ENDED, LONG_PHASES, TIMED_OUT, are_alike, find_remedy, headline, is_own

# gloo connects each rank to every other one after the ranks have met
_MESH = re.compile(r"connectFullMesh failed.*remote=\[([^\]]+)\]:(\d+)")


def judge_clash(facts: RunFacts) -> Verdict | None:
    """Use calls that torch itself compared before they were made, with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    rows = facts.log.clash
    if len({signature(call) for call in rows.values()}) >= 2:
        return facts.verdict("failed", mismatch(rows, size=facts.world or len(rows), lines={}))
    if len({call.number for call in rows.values()}) < 2:
        return None
    # the same call with different numbers: a rank has made one more call than the others
    each = tuple(f"rank {rank} calls {call.words}, number {call.number}" for rank, call in sorted(rows.items()))
    return facts.named("clash_numbers", who=ranks_of(sorted(rows)), each="; ".join(each[:4]), evidence=each[:8])


def judge_models(facts: RunFacts) -> Verdict | None:
    """Use DDP's own check for parameters without a gradient, and for ranks whose model differs.

    Only a majority of the ranks whose models are known makes another rank the odd one. Shapes are compared with those
    of rank 0, so a rank of the run that reports none has them. DDP refuses a model without parameters before it
    compares, so a count of 0 did not arrive.
    """
    errors = "\n".join(state.error for state in facts.states.values() if state.error)
    if unused := facts.log.unused or watchdog.read(errors.splitlines()).unused:
        return facts.named("unused", evidence=(unused,))
    rows = facts.log.models
    if unheard := sorted(rank for rank, kind in rows.items() if kind == "0 parameters"):
        return facts.named("no_counts", who=ranks_of(unheard))
    kinds = Counter(rows.values())
    if len(kinds) < 2:
        return None
    if rows.get(0, "").startswith("params["):
        kinds[rows[0]] += len(facts.states.keys() - rows.keys())
    usual, count = kinds.most_common(1)[0]
    is_certain = 2 * count > max(facts.world or 3, len(rows))
    odd = tuple(sorted(rank for rank, kind in rows.items() if kind != usual)) if is_certain else ()
    each = "; ".join(f"rank {rank} has {kind}" for rank, kind in sorted(rows.items())[:8])
    who = f"{ranks_of(odd)} {'has' if len(odd) == 1 else 'have'} a different model than the others" if odd else (
        "the ranks' models differ")  # fmt: skip
    return facts.named("models", who=who, each=each, ranks=odd)


def judge_meeting(facts: RunFacts) -> Verdict | None:
    """Find why ranks, or torchrun on several nodes, have not met, by the files of those that wait at the rendezvous.

    Those that wait are never named. A file from before the first of them asked is of an earlier start.
    """
    kind, everyone = ("node", facts.nodes) if facts.nodes else ("rank", facts.states)
    here = {rank: state for rank, state in sorted(everyone.items()) if state.asked}
    ages = {rank: facts.ages.get(rank, 0.0) for rank in everyone}
    waits = {rank: state.written - (state.since or state.written) for rank, state in here.items()}
    age = max(waits.values(), default=0.0)
    began = max((waits[rank] + ages[rank] for rank in here), default=0.0)
    if not here or any(ages[rank] <= began for rank in set(everyone) - set(here)):
        return None
    errors = [state.error for state in here.values() if state.error]
    if own_error := next(filter(is_own, errors), None):
        return facts.named("launcher", error=headline(own_error), evidence=(own_error,)) if kind == "node" else None
    for error in errors:
        if match := _MESH.search(error):
            who = ranks_of([rank for rank, state in here.items() if state.error == error], kind)
            return facts.named("mesh", who=who, peer=f"{match[1]}:{match[2]}", evidence=(error,))
    by_log = judge_rendezvous(replace(facts, log=watchdog.read([*facts.log.attempts, *errors])))
    if by_log and by_log.causes[0].code == "port_in_use":
        return by_log
    world = max(state.world_size or 0 for state in here.values())
    numbers = range(min(world, limits.MAX_RANKS) if max(here) < world else 0)
    absent = tuple(number for number in numbers if number not in here)
    missing = ranks_of(absent, kind) if absent else f"{world - len(here)} of {world} {kind}s"
    gave_up = [ages[rank] for rank, state in here.items() if state.answer == "connected" and state.ended]
    obstacles: dict[str, list[int]] = {"unresolved": [], "unreached": [], "late": []}  # ranks that have no connection
    for rank, state in here.items():
        # one that gave up may have hosted the store: a connection that was closed then shows no fault of the network
        if state.answer not in ("connected", "pending", *["closed"] * bool(gave_up)):
            is_late = gave_up and waits[rank] + ages[rank] <= max(gave_up) + limits.ORDER_SECONDS
            kind_of_loss = "unresolved" if state.answer == "unresolved" else "unreached"
            obstacles["late" if is_late else kind_of_loss].append(rank)
    place = here[(obstacles["unresolved"] or obstacles["unreached"] or [*here])[0]].asked
    rows = tuple(f"{kind} {rank}{f' on {state.host}' if state.host else ''}: asks {state.asked} since "
                 f"{strftime('%H:%M:%S', gmtime(state.since))} UTC, {words.ANSWERS.get(state.answer, state.answer)}"
                 for rank, state in here.items())  # fmt: skip
    reasons = {  # the first that holds
        "unresolved": obstacles["unresolved"], "places": len({state.asked for state in here.values()}) > 1,
        "unreached": obstacles["unreached"], "absent": len(here) < world, "late": obstacles["late"], "unmet": True,
    }  # fmt: skip
    key = next(filter(reasons.get, reasons))
    accused, limit = absent if key == "absent" and kind == "rank" else (), limits.IDLE_SECONDS
    if accused and facts.starting.keys() >= set(accused):
        key, limit = "starting", facts.limit
    over = any(state.ended or (kind == "rank" and facts.processes.get(rank) == "gone") for rank, state in here.items())
    verdict = facts.named(
        key, state="failed" if over else "stuck", kind=kind, name=place.rpartition(":")[0], place=place,
        missing=missing, who=ranks_of([*here], kind), seconds=round(age), each="; ".join(rows[:4]),
        verb="waits" if len(here) == 1 else "wait", pids=", ".join(str(facts.starting.get(one)) for one in absent[:8]),
        late=ranks_of(obstacles["late"], kind), evidence=(*rows[:8], *errors[:1]),
        waiting=tuple(here) if kind == "rank" else (), ranks=accused,
    )  # fmt: skip
    return verdict if over or age >= limit else make_open_verdict([verdict.causes[0].message, *rows], limit)


def judge_rendezvous(facts: RunFacts) -> Verdict | None:
    """Find ranks that did not meet. The rank that wrote the line was waiting, and is never named."""
    met, evidence = facts.log.rendezvous, tuple(facts.log.attempts)
    joined, world = map(int, met.get("clients", (0, 0)))
    if "unresolved" in met:
        return facts.named("unresolved", name=(*met["unresolved"], "of a host")[0], evidence=evidence)
    if "taken" in met:
        port = "".join(f"port {number}" for number in met["taken"]) or "the port"
        return facts.named("taken", port=port, evidence=evidence)
    if joined < world:
        return facts.named("too_few", joined=joined, world=world, evidence=evidence)
    if "unreached" in met:
        host, port = met["unreached"]
        is_here = host in ("0.0.0.0", "::", "localhost") or host.startswith("127.")  # noqa: S104 - compared, not bound
        return facts.named("nowhere" if is_here else "unreached", place=f"{host}:{port}", evidence=evidence)
    return None


def judge_joins(facts: RunFacts) -> Verdict | None:
    """Find ranks that have not joined a process group during its creation."""
    overfull = next((join for join in facts.log.joins.values() if join.joined > join.world > 0), None)
    if overfull is not None:
        state = "failed" if overfull.over else "stuck"
        return facts.named("too_many", state=state, joined=overfull.joined, world=overfull.world)
    join = next((join for join in facts.log.joins.values() if 0 < join.joined < join.world <= limits.MAX_RANKS), None)
    if join is None:
        return None
    state, count = "failed" if join.over else "stuck", f"{join.joined} of {join.world} ranks have joined"
    waiting = tuple(sorted(join.ranks))
    missing = tuple(rank for rank in range(join.world) if rank not in join.ranks)
    if len(missing) == join.world - join.joined:  # each rank that has joined reports this
        text = f"did not join the process group; {count}"
        return facts.named("missed", state=state, who=ranks_of(missing), text=text, ranks=missing, waiting=waiting)
    return facts.named("not_joined", state=state, waiting=waiting, count=count)


def judge_errors(facts: RunFacts) -> Verdict | None:
    """Use errors in the log: a barrier that names the missing ranks, else exceptions of the ranks themselves."""
    if facts.log.late:
        ranks = tuple(sorted(facts.log.late))
        limit = facts.log.late[ranks[0]]
        text = f"did not come to the barrier within {int(limit) / 1000:g} s" if limit else (
            "did not come to a collective that the other ranks have called")  # fmt: skip
        return facts.named("missed", state="failed" if limit else "stuck", who=ranks_of(ranks), text=text, ranks=ranks)
    raised = {rank: error for rank, error in facts.log.errors.items() if is_own(error)}
    if not raised or facts.states or (facts.first is not None and facts.first not in facts.log.errors):
        return None
    waiting = tuple(sorted(rank for rank, trace in facts.log.traces.items() if trace.calls and rank not in raised))
    wait = (f"watchdog: {ranks_of(waiting)} timed out waiting",) if waiting else ()
    if (first := facts.find_first_to_end([*raised])) is None:
        return _judge_several(raised, facts, *wait, waiting=waiting)
    which = "torchrun saw it fail first" if first == facts.first else "the first exception of the log"
    cause = facts.cause_of(first, Activity("gone", f"ended with {headline(raised[first])}"), which, *wait)
    return facts.verdict("failed", cause, waiting=waiting)


def _judge_several(raised: Mapping[int, str], facts: RunFacts, *wait: str, waiting: tuple[int, ...] = ()) -> Verdict:
    """Return the verdict if several ranks ended with their own errors: which was first is unknown."""
    each = [f"rank {rank} ended with {headline(error)}" for rank, error in sorted(raised.items())]
    key = "several_alike" if are_alike(list(raised.values())) else "several"
    return facts.named(key, waiting=waiting, who=ranks_of(sorted(raised)), each="; ".join(each[:4]),
                       error=headline(raised[min(raised)]), evidence=(*wait, *each[:4]),
                       todo=find_remedy(raised[min(raised)]))  # fmt: skip


def judge_other_lines(facts: RunFacts) -> Verdict | None:
    """Use lines that do not show which rank is missing, if no source says more.

    A rank whose own watchdog hung is named if no collective was outstanding, so it waited for nobody. A peer that
    closed its connection ended first, or had lost another. gloo's error of a wait that took too long names no peer.
    """
    log = facts.log
    if hung := sorted(log.hung):
        idle = tuple(rank for rank in hung if rank in log.idle)
        no_call = f"; no collective was outstanding on {ranks_of(idle)}" if idle else ""
        time = next((f" for {seconds} s" for seconds in log.hung.values() if seconds), "")
        return facts.named("watchdog", who=ranks_of(hung), time=time, no_call=no_call, ranks=idle)
    if lost := tuple(sorted(log.lost)):
        hosts = ", ".join(sorted(set(log.lost.values()))[:4])
        return facts.named("peer", waiting=lost, who=ranks_of(lost), hosts=hosts)
    rows = {rank: error for rank, error in sorted(log.errors.items()) if TIMED_OUT.search(error)}
    if not rows or facts.states:
        return None
    return facts.named("in_vain", waiting=tuple(rows), who=ranks_of(list(rows)), evidence=tuple(rows.values())[:2])


def judge_torchrun(facts: RunFacts) -> Verdict | None:
    """Use the rank that torchrun saw fail first, if no other source says more."""
    if facts.first is None or not is_own(facts.log.errors.get(facts.first, "")):
        return None  # it had waited for another rank
    return facts.verdict("failed", facts.cause_of(facts.first, Activity("gone", "failed first, according to torchrun")))


def judge_uneven_ends(facts: RunFacts) -> Verdict | None:
    """Half of the ranks or more ended without an error, and all others wait for them or lost them.

    The ranks that ended are not named, because they are the majority. The others are named if they made more calls,
    and if all ranks that ended made the same number. A rank that torchrun saw fail first did not end well, though it
    left no error: it called sys.exit(1). If no other rank is on a host of a rank that ended, these hosts may have been
    shut down: then the others are not at fault.
    """
    ended = sorted(rank for rank, state in facts.states.items() if state.ended and not state.error)
    rest = sorted(set(facts.states) - set(ended))
    if not rest or facts.first in ended or 2 * len(ended) < max(len(facts.states), facts.world or 0) or not all(
            _is_waiting(rank, facts) or rank in facts.lost_a_peer for rank in rest):  # fmt: skip
        return None
    calls_of = {rank: facts.count_calls(rank) for rank in facts.states}
    few, highest = ([calls for rank in ranks if (calls := calls_of[rank])] for ranks in (ended, rest))
    if len(set(few)) > 1 or (few and highest and min(highest) <= few[0]):
        return None  # one of them left before the others, or a call that all have come to failed
    hosts, others = ({facts.host(rank) for rank in ranks} for ranks in (ended, rest))
    is_certain = len(ended) > len(rest) and all(calls_of.values()) and not hosts.isdisjoint(others)
    how = f"{ranks_of(rest)} called more than they did" if is_certain else (
        f"they ended too early, or {ranks_of(rest)} called too much")  # fmt: skip
    evidence = tuple(f"rank {rank}: {calls} collectives" for rank, calls in calls_of.items() if calls)[:8]
    return facts.named("uneven_ends", ended=ranks_of(ended), who=ranks_of(rest), how=how, evidence=evidence,
                       ranks=tuple(rest) if is_certain else (), waiting=() if is_certain else tuple(rest))  # fmt: skip


def judge_states(facts: RunFacts) -> Verdict | None:
    """Use rank states without calls: ranks that have ended, are stopped, or are silent while others still write."""
    what = {rank: facts.activity(rank) for rank in facts.states}
    if busy := {rank: one for rank, one in sorted(what.items()) if one.kind != "collective" and facts.outlived(rank)}:
        return _judge_work(busy, facts)
    bad = [rank for rank, activity in what.items() if (activity.kind in ENDED and not activity.grace) or (
        activity.kind == "silent" and facts.ages.get(rank, 0.0) >= activity.grace)]  # fmt: skip
    errors = [rank for rank in bad if facts.states[rank].error]
    clean = [rank for rank in bad if facts.states[rank].ended and not facts.states[rank].error]
    raised = {rank: error for rank in bad if (error := facts.states[rank].error) and is_own(error)}
    if (errors or facts.first in bad) and (first := facts.find_first_to_end(bad)) is not None:
        bad, what[first] = [first], facts.end_of(first)
    elif len(raised) > 1:
        return _judge_several(raised, facts)
    elif len(bad) == len(what) > len(clean) and not any(activity.kind == "stopped" for activity in what.values()):
        return _all_ended(bad, facts)
    elif len(clean) == len(what):
        return None
    else:
        losers = facts.lost_a_peer
        bad = [rank for rank in bad if rank not in clean and rank not in losers]
        if not bad and losers:
            return _all_ended(sorted(losers), facts)
        if not bad and facts.has_one_group and all(_is_waiting(rank, facts) for rank in set(what) - set(clean)):
            bad = clean  # the others are about to end, or the last rank works alone, as in an upload
    if not bad:
        rows = [f"rank {rank} {activity.words}" for rank, activity in what.items() if activity.kind == "stopped"]
        return make_open_verdict(rows, limits.STALL_SECONDS) if rows else None
    lost = sorted(facts.lost_a_peer - set(bad))
    wait = f"rank states: {ranks_of(lost)} lost a peer: {(facts.states[lost[0]].error or '')[:160]}" if lost else ""
    causes = [facts.cause_of(rank, what[rank], wait) for rank in sorted(bad)]
    state = "failed" if any(cause.code == "rank.gone" for cause in causes) else "stuck"
    return facts.verdict(state, *causes, waiting=tuple(sorted(set(facts.states) - set(bad))))


def _judge_work(busy: Mapping[int, Activity], facts: RunFacts) -> Verdict:
    """Return the verdict on ranks that were at work when the others gave up: the timeout may have been too short."""
    waited = tuple(sorted(facts.gave_up))
    wait = f"rank states: {ranks_of(waited)} timed out waiting"
    if all(activity.kind in LONG_PHASES for activity in busy.values()):
        return facts.blame_timeout(busy, wait, waited)
    causes = [facts.cause_of(rank, one, wait) for rank, one in busy.items() if one.kind not in LONG_PHASES]
    return facts.verdict("failed", *causes, waiting=waited)


def _is_waiting(rank: int, facts: RunFacts) -> bool:
    """Whether a rank has been in a collective for as long as a stall, by its own file."""
    state = facts.states[rank]
    return state.phase == "collective" and state.written - (state.since or state.written) >= limits.STALL_SECONDS


def _all_ended(ranks: Sequence[int], facts: RunFacts, age: str = "") -> Verdict:
    """Return the verdict if all ranks have ended, none by an error in its own code: which was first is unknown."""
    if facts.first is not None and facts.first not in facts.states and (first := judge_torchrun(facts)):
        return replace(first, waiting=tuple(ranks))  # it ended before its monitor wrote
    errors = tuple(f"rank {rank}: {facts.states[rank].error}"[:200] for rank in ranks if facts.states[rank].error)
    silent = [rank for rank in ranks if not facts.states[rank].ended]
    if not errors:
        if aborted := [rank for rank, row in facts.failed.items() if row.signal == "SIGABRT"]:
            return facts.named("aborted", who=f"rank {aborted[0]}")
        return facts.named("all_silent", who=ranks_of(silent), age=age)
    todo = f"Read the logs of {ranks_of(silent)}: one of them ended first." if silent else ""
    key = "all_lost" if len(ranks) == len(facts.states) else "some_lost"
    return facts.named(key, who=ranks_of(ranks), todo=todo, age=age, evidence=errors[:4])


def judge_stacks(facts: RunFacts) -> Verdict | None:
    """Use one stack per rank: it shows who is in a collective, but not whether it moves, so no rank is named."""
    if not facts.stacks or facts.states or facts.traces:
        return None
    rows: dict[str, list[str]] = {}
    for name, stack in facts.stacks.items():
        call = next((frame.rpartition(" ")[2] for frame in stack if words.IN_CALL.search(frame)), "")
        frames = [frame for frame in stack if not words.PASSES_ON.search(frame)]
        place = f"a collective ({call})" if call else " < ".join(frames[:8])
        place = "the backward pass, which computes or waits for the others' gradients" if "backward" in call else place
        rows.setdefault(place, []).append(f"rank {name}" if isinstance(name, int) else name)
    listed = [f"{', '.join(who[:16])}{' ...' * (len(who) > 16)} {'is' if len(who) == 1 else 'are'} in {place}"
              for place, who in rows.items()]  # fmt: skip
    return Verdict(state="unknown", line="").with_question("stacks", seen="; ".join(listed[:8]))


def judge_end(facts: RunFacts) -> Verdict | None:
    """Return the verdict on a run whose ranks have ended by themselves, or were ended together from outside.

    If no rank has written for a while, and none is known to run, it ended without a message.
    """
    if facts.is_over:
        return Verdict(state="fine", line=f"the run has ended: {len(facts.states)} ranks have ended by themselves")
    if facts.end_from_outside == "unknown":
        return _all_ended(sorted(facts.states), facts, "; they ended together")
    if facts.end_from_outside:
        return facts.named("stopped", who=ranks_of(sorted(facts.states)), signal=facts.end_from_outside)
    if (
        facts.silence is None
        or facts.silence < limits.SILENT_RUN_SECONDS
        or all(s.ended for s in facts.states.values())
    ):
        return None
    age = f"; the last heartbeat is {timedelta(seconds=round(facts.silence))} old"
    return _all_ended(tuple(facts.states), facts, age)

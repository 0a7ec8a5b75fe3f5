"""Add to a verdict what the run record, the scheduler, the gate before the job and scans of the nodes show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from contracts.finding import Finding
from contracts.run_record import RESUMABLE, RunRecord
from planner import why
from planner.why import Cause, Verdict
from planner.why.facts import STALE_SECONDS, cause_named

_ENDED_WELL = ("running", "complete", "interrupted", "unknown")


def with_record(verdict: Verdict, record: RunRecord) -> Verdict:
    """Add how the run ended and how its step times compare with the forecast, from the run record."""
    restart = f", restart {record.restarts}" if record.restarts else ""
    source = f"record: {record.status}, {len(record.step_seconds)} steps{restart}"
    verdict = replace(verdict, sources=(*verdict.sources, source))
    if record.status not in _ENDED_WELL and verdict.state == "fine":
        cause = Cause(code=f"job.{record.status}", message=(record.reason or record.status)[:500])
        return replace(verdict, state="failed", line=f"failed: {cause.message}", causes=(cause,))
    measured, forecast = record.measured.step_seconds, record.forecast.step_seconds
    if measured and forecast and forecast.high and measured > forecast.high and verdict.state in ("fine", "slow"):
        times = measured / forecast.mid if forecast.mid else measured / forecast.high
        sentence = f"a step takes {measured:.3g} s, {forecast.low:.3g} to {forecast.high:.3g} s were forecast"
        exposed = record.communication.exposed_share if record.communication else None
        waiting = (f"collectives that nothing hides take {exposed:.0%} of the step",) if exposed else ()
        cause = Cause(
            code="step.slow", message=f"{times:.1f} times slower than forecast", evidence=(sentence, *waiting),
            cost=max(0.0, 1 - forecast.mid / measured),
        )  # fmt: skip
        causes = (*verdict.causes, cause)
        return replace(
            verdict, state="slow", line=verdict.line if verdict.causes else f"slow: {cause.message}", causes=causes
        )
    return verdict


# Log problems that mean the job was asked to stop. Slurm and torchrun also log them for a job that saved a checkpoint.
_STOP_REQUESTS = {"job_cancelled", "job_requeued", "job_stopped", "job_preempted", "time_limit_reached"}


def with_end_of_job(verdict: Verdict, ages: Mapping[int, float]) -> Verdict:
    """Name the end of the whole Slurm job as the cause, if the ranks that are gone wrote their files until then.

    `ages` are the seconds by which the file of a rank is older than the newest one. A rank that was gone before stays
    the cause, and so does a rank whose loss ended a step of the job (`*** STEP` in the log).
    """
    ends = [one for one in verdict.causes if one.code in _STOP_REQUESTS and "*** JOB " in " ".join(one.evidence)]
    gone = [one for one in verdict.causes if one not in ends]
    early = any(ages.get(rank, 0.0) > STALE_SECONDS for one in gone for rank in one.ranks or ages)
    if not (ends and gone) or early or {one.code for one in gone} - {"rank.gone", "ranks.gone"}:
        return verdict
    line = f"failed: {ends[0].message}"
    return replace(verdict, line=line, causes=tuple(ends), ranks=(), nodes=(), gpus=(), unknown=())


def with_restart(verdict: Verdict, record: RunRecord | None, again: str | None) -> Verdict:
    """Add that the run can be resumed, or that the scheduler has requeued it.

    `again` says what a requeued job is doing now. "" means that the job has ended for good, None that this is unknown.
    """
    stopped = verdict.state == "failed" and verdict.causes and {one.code for one in verdict.causes} <= _STOP_REQUESTS
    if not stopped and verdict.state not in ("fine", "unknown"):
        return verdict
    saved = ""
    if record is not None and record.status == "interrupted" and record.exit_code == RESUMABLE:
        reason = f": {record.reason}" if record.reason else ""
        saved = f"the run ended so that it can resume (run.json: interrupted, exit code {RESUMABLE}{reason})"
    words = "; ".join(filter(None, (saved, again)))
    if not stopped:
        line = words if saved else "; ".join(filter(None, (verdict.line, again)))
        return replace(verdict, state="fine" if saved else verdict.state, line=line)
    if again and not saved and "COMPLETED" not in again:
        line = f"unknown: {again}; no source shows whether its ranks had saved a checkpoint"
        return replace(verdict, state="unknown", line=line)
    first, *rest = verdict.causes
    if again:
        line = f"the log has: {first.message}. Slurm writes this of each job that it signals; run.json is believed"
        return replace(verdict, state="fine", line=words, causes=(), disagree=(*verdict.disagree, line))
    if saved:
        action = "Start it again with the same command: it resumes from its checkpoint."
        verdict = replace(verdict, causes=(replace(first, evidence=(*first.evidence, saved), action=action), *rest))
    return verdict


# Printed by the batch scripts of `launch --api slurm` and `wrap` if the gate stops the job.
_GATE = re.compile(r"^The job is not started: ([^(\n]{1,80}) \(exit code (\d{1,3})\)\..*$", re.MULTILINE)
_OF_GATE = re.compile(r"^(?!srun: |slurmstepd)([\w.-]{1,253}): \S.*$", re.MULTILINE)  # a line of `-o reason`
_GATE_CAUSES = {"3": "gate_failed", "5": "gate_unknown"}  # by exit code of `preflight`


def with_gate(verdict: Verdict, log: str) -> Verdict:
    """Add the cause if the gate stopped the job before any rank started, as shown at the end of the batch script's log.

    Findings of other readers are removed in this case, because they come from the gate's own output.
    """
    stops = list(_GATE.finditer(log))
    if not stops:
        return verdict
    stop = stops[-1]
    lines = list(_OF_GATE.finditer(log, 0, stop.start()))[-4:]
    nodes = tuple(dict.fromkeys(line[1] for line in lines))
    evidence = (*(line[0] for line in lines), stop[0])
    key = _GATE_CAUSES.get(stop[2], "gate_unfinished")
    cause = cause_named(key, nodes=nodes, evidence=evidence, reason=stop[1], code=stop[2])
    return Verdict(state="failed", line=f"failed: {cause.message}", nodes=nodes, causes=(cause,),
                   sources=verdict.sources)  # fmt: skip


_NETWORK = ("link", "network")  # causes that a faulty NIC can explain
_OF_NIC, _OF_GPU = ("rdma.", "interfaces."), ("gpu.", "pci.")


def with_nodes(verdict: Verdict, checks: Sequence[Finding]) -> Verdict:
    """Add findings of node scans: NIC findings for network causes, GPU findings for all other causes.

    A finding can explain a cause that was already found. A finding alone is not a cause.
    """
    sources = (*verdict.sources, f"nodes: {len({check.node for check in checks})}")
    causes, nics, gpus = [], list(verdict.nics), list(verdict.gpus)
    for cause in verdict.causes:
        kinds, named = (_OF_NIC, nics) if cause.code.startswith(_NETWORK) else (_OF_GPU, gpus)
        found = [
            check for check in checks
            if check.node in cause.nodes and check.status in ("fail", "warn") and check.code.startswith(kinds)
        ]  # fmt: skip
        found.sort(key=lambda check: check.status != "fail")
        named += [
            subject for check in found[:8] if check.status == "fail" and check.subject
            and (subject := f"{check.node} {check.subject}") not in named
        ]  # fmt: skip
        said = tuple(f"{check.node}: {check.code} {check.subject}: {check.message}"[:300] for check in found[:4])
        action = found[0].remedy if found and found[0].remedy else cause.action
        causes.append(replace(cause, evidence=(*cause.evidence, *said), action=action))
    scanned = {check.node for check in checks}
    for node in [node for node in verdict.nodes if node not in scanned][:4]:
        verdict = why.left_open(verdict, "node", node=node)
    return replace(verdict, causes=tuple(causes), nics=tuple(nics), gpus=tuple(gpus), sources=sources)

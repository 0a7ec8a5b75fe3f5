"""Add costs to the causes of a `topoflight why` verdict, and add causes found in a manifest or in node scans.

TCP and RDMA are compared by their forecasts. Slow steps are read from the run record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from agent.advice import advise
from agent.advice.request import Request, cluster_of, model_of, price_of
from agent.base import units
from agent.base.options import InputError, RequestError
from agent.checks.lint import lint_text
from collectives.nccl_log.transport import Evidence
from contracts import bounded
from contracts.finding import Finding
from contracts.layout import LayoutError
from contracts.run_record import RESUMABLE, RunRecord
from contracts.yaml_text import YamlTextError
from hardware.units import GIGA
from planner import why
from planner.forecast import machines
from planner.kubernetes.manifests import attached
from planner.kubernetes.yaml_edit import documents
from planner.lint.documents import missing_sources
from planner.lint.script import EnvironmentTextError
from planner.lint.sources import guess_kind
from planner.recommend import forecast_layout, plan
from planner.why import Cause, Verdict
from planner.why.facts import STALE_SECONDS, cause_named
from probes.api import Snapshot
from probes.interfaces.facts import InterfacesFacts
from probes.rdma.facts import RdmaFacts


def with_sockets(
    verdict: Verdict, found: Evidence, request: Request, layout: str, snapshots: Sequence[Snapshot],
    manifest: Path | None,
) -> Verdict:  # fmt: skip
    """Add the cost of TCP as forecast by `topoflight recommend`, if the log shows TCP instead of RDMA.

    Only recommended settings that make NCCL choose RDMA are listed, because no other setting explains the use of TCP.
    Raises RequestError if the forecast rejects the layout or the machine.
    """
    if verdict.state not in ("slow", "fine"):
        return verdict
    if not (found.inter_node_transport or "").startswith("Socket"):
        wants_cost = verdict.state == "slow" and request.model is not None
        return why.left_open(verdict, "cost_of_others") if wants_cost else verdict
    interface = found.socket_interface or "its interface"
    model = model_of(request)
    if model is None or not (request.machine or snapshots):
        return why.left_open(verdict, "cost_of_tcp", interface=interface)
    over = rdma_of(snapshots, found, manifest)
    rdma = f"RDMA over {over}" if over else "RDMA"
    snapshots = () if request.machine else snapshots
    rate = request.network or _socket_rate(snapshots, found.socket_interface)
    request = replace(request, network=None)
    try:
        cluster = cluster_of(request, snapshots, request.ranks_per_node)
        if rate is None:
            return why.left_open(verdict, "rate_of_tcp", interface=interface)
        slow = machines.over_network(cluster, rate, "tcp")
        advice = advise.for_layout(request, layout, cluster, snapshots)
        if (would := advice.chosen) is None:
            raise RequestError("no layout fits this machine: give the layout that ran with --layout")
        was = forecast_layout(plan(slow, snapshots, model, request.train), would.layout)  # compare the same layout
    except (LayoutError, machines.MachineError, ValueError) as error:
        raise RequestError(str(error)) from None
    before, after = was.forecast.step_seconds.mid, would.forecast.step_seconds.mid
    price = f"TCP over {found.socket_interface or 'sockets'} ({rate}) instead of {rdma}: {before / after:.1f} x"
    step = f"{units.seconds(after)} a step instead of {units.seconds(before)}"
    if steps := advice.total_steps:
        extra = (before - after) * steps
        price += f", +{units.duration(extra)}{price_of_time(request, len(cluster.nodes), extra)}"
        step += f", {units.duration(after * steps)} instead of {units.duration(before * steps)}"
    change = tuple(f"{one.name}={one.value}" for one in advice.settings if one.name in ("NCCL_IB_HCA", "NCCL_NET"))
    step += f" ({request.train.method}, sequences of {request.train.sequence_length} tokens, {would.layout.family}, "
    step += f"micro-batch {would.layout.micro_batch}, checkpointing {would.layout.checkpointing} on both networks)"
    verdict = replace(
        verdict, causes=tuple(replace(one, price=price) if one is verdict.causes[0] else one for one in verdict.causes),
        change=(*verdict.change, *change), forecast=f"with {rdma}: {step}", assumed=advice.unknowns,
    )  # fmt: skip
    return verdict if over else why.left_open(verdict, "rdma")


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
        parts = tuple(
            f"{part.words}: {record.seconds_of(part):.3g} s, {part.share:.0%} of the step" for part in record.parts[:4]
        )
        cause = Cause(code="step.slow", message=f"{times:.1f} times slower than forecast", evidence=(sentence, *parts),
                      cost=max(0.0, 1 - forecast.mid / measured))  # fmt: skip
        causes = (*verdict.causes, cause)
        return replace(
            verdict, state="slow", line=verdict.line if verdict.causes else f"slow: {cause.message}", causes=causes
        )
    return verdict


# Log problems that mean the job was asked to stop. Slurm and torchrun also log them for a job that saved a checkpoint.
_TOLD_TO_END = {"job_cancelled", "job_requeued", "job_stopped", "job_preempted", "time_limit_reached"}


def with_end_of_job(verdict: Verdict, ages: Mapping[int, float]) -> Verdict:
    """Name the end of the whole Slurm job as the cause, if the ranks that are gone wrote their files until then.

    `ages` are the seconds by which the file of a rank is older than the newest one. A rank that was gone before stays
    the cause, and so does a rank whose loss ended a step of the job (`*** STEP` in the log).
    """
    ends = [one for one in verdict.causes if one.code in _TOLD_TO_END and "*** JOB " in " ".join(one.evidence)]
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
    told = verdict.state == "failed" and verdict.causes and {one.code for one in verdict.causes} <= _TOLD_TO_END
    if not told and verdict.state not in ("fine", "unknown"):
        return verdict
    saved = ""
    if record is not None and record.status == "interrupted" and record.exit_code == RESUMABLE:
        why = f": {record.reason}" if record.reason else ""
        saved = f"the run ended so that it can resume (run.json: interrupted, exit code {RESUMABLE}{why})"
    words = "; ".join(filter(None, (saved, again)))
    if not told:
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


def with_price(verdict: Verdict, record: RunRecord, request: Request, hosts: int) -> Verdict:
    """Add the cost of each cause over the whole run: its share of the measured step times the steps and the price."""
    step, config = record.measured.step_seconds, record.plan.config
    steps = request.train.steps or (config.max_steps if config else None)
    if not step or not steps:
        return verdict
    causes = []
    for cause in verdict.causes:
        if cause.cost:
            extra = cause.cost * step * steps
            words = f"+{units.duration(extra)} of {units.duration(step * steps)} for {steps} steps"
            words += price_of_time(request, hosts or request.nodes or 1, extra)
            cause = replace(cause, price=", ".join(filter(None, (cause.price, words))))
        causes.append(cause)
    first = next((cause for cause in causes if cause.cost), None)
    forecast = verdict.forecast
    if first is not None and first.cost is not None and not forecast:
        better = step * (1 - first.cost)
        forecast = f"without it: {units.seconds(better)} a step instead of {units.seconds(step)}"
    return replace(verdict, causes=tuple(causes), forecast=forecast)


def price_of_time(request: Request, nodes: int, seconds: float) -> str:
    """Format the price of `seconds` on `nodes` nodes, such as ", +412 of your prices"; empty without a price."""
    each = price_of(request)
    return f", +{each * nodes * seconds / 3600:,.0f} of your prices" if each is not None else ""


def rdma_of(snapshots: Sequence[Snapshot], found: Evidence, manifest: Path | None) -> str:
    """Return what RDMA would run over, such as "net1, net2"; empty if no source shows it.

    The sources, in this order: interfaces of the active RDMA ports in a scan (or the devices, if a port has no
    interface), devices in the log, and interfaces that Multus creates for the networks of the manifest.
    """
    found_facts = filter(None, (snapshot.facts(RdmaFacts) for snapshot in snapshots))
    names = [
        port.netdev or device.name for facts in found_facts for device in facts.devices for port in device.ports
        if device.kind in ("hca", "efa") and port.state == "ACTIVE"
    ]  # fmt: skip
    names = names or [name.partition(":")[0] for name in found.hcas]
    origin = ""
    if not names and manifest is not None:
        with suppress(OSError, bounded.TooLargeError, YamlTextError):
            names = attached(documents(bounded.read_text(manifest, 16 << 20)))
            origin = " of the manifest's networks"
    return units.some(list(dict.fromkeys(names)), most=4) + origin if names else ""


def _socket_rate(snapshots: Sequence[Snapshot], interface: str | None) -> str | None:
    """Return the link rate of the interface in the form that --network accepts."""
    found = [snapshot.facts(InterfacesFacts) for snapshot in snapshots]
    speeds = [
        one.speed_bytes_per_second for facts in found if facts for one in facts.interfaces
        if one.name == interface and one.speed_bytes_per_second
    ]  # fmt: skip
    return f"{min(speeds) * 8 / GIGA:g}G" if speeds else None


# Findings of `topoflight lint-env` and of node scans.


def with_manifest(verdict: Verdict, path: Path) -> Verdict:
    """Add the settings of the job's environment for which `topoflight lint-env` reports a warning."""
    try:
        text = bounded.read(path, 16 << 20).decode("utf-8", errors="replace")
    except (OSError, bounded.TooLargeError) as error:
        raise InputError(f"--manifest {path}: {error}") from None
    try:
        linted = lint_text(text, "auto", nccl_version=None, machine=None, name=path.name)
        read, wrong = linted.read, [check for check in linted.checks if check.status in ("fail", "warn")]
    except InputError:
        if re.search(r"^[^#\n]*NCCL_[A-Z]", text, re.MULTILINE):
            raise
        read, wrong = "sets no variable of NCCL", []
    wrong.sort(key=lambda check: check.status != "fail")
    causes = tuple(
        Cause(code=one.code, message=f"{one.subject}: {one.message}" if one.subject else one.message,
              evidence=one.evidence[:2], action=one.remedy)
        for one in wrong[:8]
    )  # fmt: skip
    change = tuple(dict.fromkeys(f"{path.name}: {one.remedy}" for one in wrong[:8] if one.remedy))
    if verdict.state == "fine" and any(c.status == "fail" or c.code == "env.debug.leftover" for c in wrong):
        verdict = replace(verdict, state="slow", line=f"slow by its manifest: {causes[0].message}")
    elif verdict.state == "fine" and causes:
        verdict = replace(verdict, line=f"fine except for its manifest: {causes[0].message}")
    for name in _named_elsewhere(text, path.name)[:4]:
        verdict = why.left_open(verdict, "elsewhere", name=name, lower=name.lower(), file=path.name)
    if causes and not verdict.forecast:
        verdict = why.left_open(verdict, "forecast")
    return replace(verdict, causes=(*verdict.causes, *causes), change=(*verdict.change, *change),
                   sources=(*verdict.sources, f"manifest: {read}"))  # fmt: skip


def _named_elsewhere(text: str, file: str) -> list[str]:
    """Name the objects that the manifest's environment refers to but does not contain, such as "ConfigMap nccl"."""
    if guess_kind(text, file) not in ("yaml", "json"):
        return []
    try:
        return missing_sources(documents(text))
    except (YamlTextError, EnvironmentTextError):
        return []


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

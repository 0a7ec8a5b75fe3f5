"""What the causes of `topoflight why` cost: TCP compared with RDMA by the forecast, slow steps by the run's record."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agent.advice import advise
from agent.advice.request import Request, cluster_of, model_of, price_of
from agent.base import units
from agent.base.inputs import RequestError
from collectives.nccl_log.transport import Evidence
from contracts import bounded
from contracts.layout import LayoutError, values_of
from contracts.run_record import RunRecord
from contracts.yaml_text import YamlTextError
from hardware.units import GIGA
from planner.forecast import machines
from planner.kubernetes.manifests import attached
from planner.kubernetes.yaml_edit import documents
from planner.recommend import forecast_named, plan
from planner.why import Cause, Unknown, Verdict
from probes.api import Snapshot
from probes.interfaces.facts import InterfacesFacts
from probes.rdma.facts import RdmaFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCost:
    """What a job pays for a slower network; empty where it cannot be forecast, with the options that it needs."""

    price: str = ""  # "TCP over eth0 (8.4G) instead of RDMA over net1: 2.5 x, +1 h 55 min"
    forecast: str = ""  # "with RDMA over net1: 12 s a step instead of 30 s"
    change: tuple[str, ...] = ()  # settings that are advised for RDMA
    unknown: tuple[Unknown, ...] = ()


def cost_of_sockets(
    found: Evidence, request: Request, layout: str, snapshots: Sequence[Snapshot], manifest: Path | None = None
) -> NetworkCost:  # fmt: skip
    """What the sockets of a log cost. Raises RequestError where the forecast refuses the layout or the machine."""
    model = model_of(request)
    what = f"what TCP over {found.socket_interface or 'its interface'} costs"
    if model is None or not (request.machine or snapshots):
        options = "--model NAME --machine NAME (or --host FILE) --nodes N --epochs N --lengths ..."
        return NetworkCost(unknown=(Unknown(what=what, command=options),))
    over = rdma_of(snapshots, found, manifest)
    hint = Unknown(what="over which interface RDMA would run", command="topoflight capture on a node: --host FILE")
    if request.machine:
        snapshots = ()
    try:
        cluster = cluster_of(replace(request, network=None), snapshots, request.ranks_per_node)
        rate = request.network or _socket_rate(snapshots, found.socket_interface)
        if rate is None:
            options = "--network RATE: what that interface carries, as 10G"
            return NetworkCost(unknown=(Unknown(what=what, command=options),))
        slow = machines.over_network(cluster, rate, "tcp")
        planned = [plan(one, snapshots, model, request.train) for one in (slow, cluster)]
        values = values_of(layout)
        if not values:
            best = advise.of_cluster(replace(request, network=None), cluster, snapshots).chosen
            values = {k: v for k, v in asdict(best.layout).items() if k != "world_size"} if best else {}
        was, would = (forecast_named(one, values).forecast for one in planned)
        steps = advise.steps_of(request, forecast_named(planned[1], values)) if _has_budget(request) else None
    except (LayoutError, machines.MachineError, ValueError) as error:
        raise RequestError(str(error)) from None
    before, after = was.step_seconds.mid, would.step_seconds.mid
    rdma = f"RDMA over {over}" if over else "RDMA"
    words = f"TCP over {found.socket_interface or 'sockets'} ({rate}) instead of {rdma}: {before / after:.1f} x"
    advised = advise.environment_only(replace(request, network=None), cluster, snapshots).settings
    change = tuple(f"{one.name}={one.value}" for one in advised if one.name.startswith("NCCL_"))
    step = f"{units.seconds(after)} a step instead of {units.seconds(before)}"
    if steps:
        extra = (before - after) * steps
        words += f", +{units.duration(extra)}{price_of_time(request, len(cluster.nodes), extra)}"
        step += f", {units.duration(after * steps)} instead of {units.duration(before * steps)}"
    unknown = () if over else (hint,)
    return NetworkCost(price=words, forecast=f"with {rdma}: {step}", change=change, unknown=unknown)


def with_sockets(
    verdict: Verdict, found: Evidence, request: Request, layout: str, snapshots: Sequence[Snapshot],
    manifest: Path | None,
) -> Verdict:  # fmt: skip
    """The price of TCP, where the log shows it instead of RDMA, as `topoflight recommend` forecasts it."""
    if not (found.inter_node_transport or "").startswith("Socket") or verdict.state not in ("slow", "fine"):
        return verdict
    cost = cost_of_sockets(found, request, layout, snapshots, manifest)
    causes = verdict.causes
    if cost.price and causes:
        causes = (replace(causes[0], price=cost.price), *causes[1:])
    return replace(verdict, causes=causes, change=(*verdict.change, *cost.change), forecast=cost.forecast,
                   unknown=(*verdict.unknown, *cost.unknown))  # fmt: skip


_ENDED_WELL = ("running", "complete", "interrupted", "unknown")


def with_record(verdict: Verdict, record: RunRecord) -> Verdict:
    """The run's own record: how it ended, and its steps compared with their forecast."""
    sources = (*verdict.sources, f"record: {record.status}, {len(record.step_seconds)} steps")
    verdict = replace(verdict, sources=sources)
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


def with_price(verdict: Verdict, record: RunRecord, request: Request, hosts: int) -> Verdict:
    """What each cause costs over the whole run: its share of the measured step, times the steps, times the prices."""
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
    """ ", +412 of your prices" of so many seconds of so many nodes; empty without a price."""
    each = price_of(request)
    return f", +{each * nodes * seconds / 3600:,.0f} of your prices" if each is not None else ""


def rdma_of(snapshots: Sequence[Snapshot], found: Evidence, manifest: Path | None) -> str:
    """ "net1, net2": what RDMA would run over; empty where no source names it.

    By a scan the interfaces of the active ports, or devices without one; else the devices of the log; else the
    interfaces that Multus makes of the manifest's networks.
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


def _has_budget(request: Request) -> bool:
    return any(one is not None for one in (request.train.steps, request.tokens, request.hours, request.epochs))


def _socket_rate(snapshots: Sequence[Snapshot], interface: str | None) -> str | None:
    """What the interface is linked at, as --network takes it."""
    found = [snapshot.facts(InterfacesFacts) for snapshot in snapshots]
    speeds = [
        one.speed_bytes_per_second for facts in found if facts for one in facts.interfaces
        if one.name == interface and one.speed_bytes_per_second
    ]  # fmt: skip
    return f"{min(speeds) * 8 / GIGA:g}G" if speeds else None

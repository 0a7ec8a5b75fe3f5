"""What RDMA writes between two hosts are held against, and whether they hold: the wire rate of the port.

The bars are those of agent.checks.judged: as it should be, and as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agent.base import units
from agent.checks.codes import RDMA_BENCH_CODES
from agent.checks.groups import ORDER
from agent.checks.judged import IS, SHOULD, bar_words, baseline_bar, make_finding, status_of
from agent.checks.verdict import GateError
from collectives.bench.perftest import Port
from collectives.bench.results import Bar, RdmaResult, RdmaWrite
from contracts.finding import Finding, Status
from probes.api import Snapshot
from probes.rdma.facts import RdmaDevice, RdmaFacts, RdmaPort, nccl_gid_index
from topology.build import build
from topology.check import RAW_OVER_PLAN
from topology.graph import NicNode

(LOW_BANDWIDTH,) = RDMA_BENCH_CODES
# Of the payload a wire carries. Azure's node health checks (Azure/azurehpc-health-checks, ib_write_bw) ask for 380 of
# 400 Gb/s and 170 to 180 of 200; they report 393 of a healthy node and 351 of one that was taken out.
LEAST, USUAL = 0.90, 0.97
# Of a packet, beside its payload: RoCE v2 over Ethernet has preamble, gap, header and FCS (38), IPv4 and UDP (28), BTH
# and ICRC (16); InfiniBand LRH, BTH, both CRCs and delimiters (IBTA vol. 1, 5.2; annex A17).
HEADER_BYTES = {"Ethernet": 82, "InfiniBand": 28}


def ports_of(snapshot: Snapshot, wanted: Sequence[str]) -> list[Port]:
    """The ACTIVE ports of this host in order, or those of `wanted` ("mlx5_0", "mlx5_0:1"). Raises GateError."""
    every = [(device, port) for device, port in _ports(snapshot) if port.state == "ACTIVE"]
    found = [Port(device=d.name, port=p.port, gid_index=nccl_gid_index(p)) for d, p in every]
    for name in wanted:
        if not any(name in (port.device, str(port)) for port in found):
            have = ", ".join(map(str, found)) or "none"
            raise GateError(f"--device {name}: no ACTIVE RDMA port of that name; ACTIVE here: {have}")
    return [port for port in found if not wanted or port.device in wanted or str(port) in wanted]


def _ports(snapshot: Snapshot) -> list[tuple[RdmaDevice, RdmaPort]]:
    facts = snapshot.facts(RdmaFacts)
    return [(device, port) for device in facts.devices for port in device.ports] if facts else []


def with_bars(result: RdmaResult, snapshot: Snapshot, before: Mapping[str, RdmaWrite]) -> RdmaResult:
    """The result, each port with its rate and what its writes are held against."""
    known = {f"{device.name}:{port.port}": (device, port) for device, port in _ports(snapshot)}
    nics = {nic.name: nic for nic in build(snapshot).nics}
    made = []
    for write in result.writes:
        device, port = known[write.port]
        equals = [p for d, p in known.values() if (d.kind, d.model) == (device.kind, device.model)]
        bars = _of_port(write, device, port, equals, nics.get(device.name))
        then = before.get(write.port)
        if then is not None:
            mtu = (f"in packets of {then.mtu_bytes} bytes",) if then.mtu_bytes else ()
            bars = (baseline_bar(then.bytes_per_second, *mtu), *bars)
        made.append(replace(write, rate_bytes_per_second=port.rate_bytes_per_second, bars=bars))
    return replace(result, writes=tuple(made))


def _of_port(
    write: RdmaWrite, device: RdmaDevice, port: RdmaPort, equals: Sequence[RdmaPort], nic: NicNode | None
) -> tuple[Bar, ...]:
    """As it should be: the fastest of its equals on this host, in its slot. As it is: its own rate, PCIe as it runs."""
    if device.kind == "rxe":
        why = ("Soft-RoCE moves data by the processors: its rate says nothing; --baseline compares",)
        return (Bar(name=SHOULD, why=why), Bar(name=IS, why=why))
    slot = nic.pcie_bytes_per_second if nic else None
    running = (nic.pcie_running_bytes_per_second or slot) if nic else None
    due = max((max(p.rate_bytes_per_second or 0.0, p.rate_max_bytes_per_second or 0.0) for p in equals), default=0.0)
    return (_bar(SHOULD, write, port, due, slot), _bar(IS, write, port, port.rate_bytes_per_second, running))


def _bar(name: str, write: RdmaWrite, port: RdmaPort, rate: float | None, pcie: float | None) -> Bar:
    if not rate:
        return Bar(name=name, why=("the port's rate is not known",))
    header, mtu = HEADER_BYTES.get(port.link_layer or "", 0), write.mtu_bytes or port.active_mtu_bytes or 4096
    payload = mtu / (mtu + header)
    why = [f"the port carries {units.bits(rate)}, {payload:.1%} of it as payload in packets of {mtu} bytes"]
    wire = rate * payload
    if pcie is not None and pcie * RAW_OVER_PLAN < wire:
        wire = pcie * RAW_OVER_PLAN
        why.append(f"its PCIe link carries {units.rate(wire)}")
    return Bar(name=name, low=LEAST * wire, typical=USUAL * wire, high=wire, why=tuple(why))


def checks_of_writes(result: RdmaResult, before: Mapping[str, RdmaWrite]) -> list[Finding]:
    """One check for each port that was measured."""
    return [_held_write(write, result, before.get(write.port)) for write in result.writes]


def _held_write(write: RdmaWrite, result: RdmaResult, then: RdmaWrite | None) -> Finding:
    value = write.bytes_per_second
    known = [bar for bar in write.bars if bar.low is not None]
    evidence = tuple(f"{bar.name}: {bar_words(bar)}" for bar in write.bars) + tuple(
        dict.fromkeys(why for bar in write.bars for why in bar.why)
    )
    shown = "; ".join(f"{bar_words(bar)} {bar.name}" for bar in known)
    message = f"{units.rate(value)} to {result.peer}" + (f" of {shown}" if shown else "")
    status = min((status_of(value, bar) for bar in known), key=ORDER.index, default=Status.UNKNOWN)
    if status == "unknown":
        message += f": {write.bars[0].why[0]}" if write.bars else ""
    if status in ("unknown", "pass"):
        key = f"{LOW_BANDWIDTH} pass"
        return make_finding(key, result.host, status, subject=write.port, evidence=evidence, measured=message)
    cause, remedy = _cause_of_write(write, result, then)
    return make_finding(LOW_BANDWIDTH, result.host, status, subject=write.port, evidence=evidence, measured=message,
                cause=cause, remedy=remedy)  # fmt: skip


def _changed(write: RdmaWrite, then: RdmaWrite) -> tuple[str, str] | None:
    """What of the port itself is less than in the baseline."""
    if (write.rate_bytes_per_second or 0.0) < (then.rate_bytes_per_second or 0.0):
        now, before = units.bits(write.rate_bytes_per_second), units.bits(then.rate_bytes_per_second)
        return f"the port runs at {now}, {before} in the baseline", (
            "Reseat or replace the cable or transceiver; see rdma.port.rate."
        )
    if write.mtu_bytes and then.mtu_bytes and write.mtu_bytes < then.mtu_bytes:
        return f"packets of {write.mtu_bytes} bytes, {then.mtu_bytes} in the baseline", (
            "Raise the MTU of the interface and of the switch ports on the way; see rdma.mtu.small."
        )
    return None


def _cause_of_write(write: RdmaWrite, result: RdmaResult, then: RdmaWrite | None) -> tuple[str, str]:
    """Why, as far as this side can tell, and what to do next."""
    if then is not None and (changed := _changed(write, then)):
        return changed
    now = next((bar for bar in write.bars if bar.name == IS and bar.low is not None), None)
    if now is not None and now.low is not None and write.bytes_per_second >= now.low:
        return f"the port is what limits it: {'; '.join(now.why)}", (
            "See rdma.port.rate and topology.nic.pcie_bound for this device."
        )
    return (
        f"the port of {result.host} is as it was, so the fault is on the link between {result.host} and {result.peer}"
        if then
        else f"the port of {result.host} could carry more, so the fault is on the link between {result.host} and "
        f"{result.peer}, or at its other end"
    ), (
        "Measure the other way round, then each of the two with a third host: the one that is slow with both has the "
        "bad port, cable or switch port. rdma.counters.rising on either side names packet loss."
    )

"""What a measurement is held against, and whether it holds: bus bandwidth, NVLS, MNNVL and RDMA writes.

The first bar is that of the recognised machine, of a baseline or of equal nodes; the second that of the links that are
left. Below the first alone names the missing links; below the second is a fault that no link shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import cattrs

from agent.base import units
from agent.checks.groups import ORDER
from agent.checks.verdict import GateError
from collectives.bench.perftest import Port
from collectives.bench.plan import Expect
from collectives.bench.results import Bar, BenchResult, Measurement, RdmaResult, RdmaWrite
from contracts.finding import Finding, Status
from contracts.tables import read_table
from probes.api import Snapshot, finding
from probes.rdma.facts import RdmaDevice, RdmaFacts, RdmaPort, nccl_gid_index
from topology.build import build
from topology.check import RAW_OVER_PLAN
from topology.expected import FAILS_BELOW, Expected, Paths
from topology.expected import expected as bandwidth
from topology.graph import NicNode, NodeTopology
from topology.paths import Bar as BarName
from topology.paths import Due, host_links, joined
from topology.reference import departures

BUSBW, NVLS, MNNVL = "bench.busbw.low", "bench.nvls.unused", "bench.mnnvl.off"
SHOULD: Final = "as it should be"
IS: Final = "as it is"
BASELINE: Final = "as in the baseline"
BARS: tuple[BarName, ...] = (SHOULD, IS)
JUDGED_OPS = ("all_gather", "reduce_scatter", "all_reduce")
JUDGED_BYTES_PER_RANK = 64 << 20
MOST_JUDGED_BYTES = 8 << 30  # S that is judged whatever each rank's part of it is: more has no room beside a job's
BASELINE_LEAST = 0.8  # of a baseline's own value; healthy links lie within 0.88 to 0.98 of each other (plan.SearchPlan)
_NVLS_SINCE = (2, 17)
LOW_BANDWIDTH = "bench.rdma.low_bandwidth"
RDMA_BENCH_CODES = (LOW_BANDWIDTH,)
# Of the payload a wire carries. Azure's node health checks (Azure/azurehpc-health-checks, ib_write_bw) ask for 380 of
# 400 Gb/s and 170 to 180 of 200; they report 393 of a healthy node and 351 of one that was taken out.
LEAST, USUAL = 0.90, 0.97
# Of a packet, beside its payload: RoCE v2 over Ethernet has preamble, gap, header and FCS (38), IPv4 and UDP (28), BTH
# and ICRC (16); InfiniBand LRH, BTH, both CRCs and delimiters (IBTA vol. 1, 5.2; annex A17).
HEADER_BYTES = {"Ethernet": 82, "InfiniBand": 28}


_TEXTS = read_table(__file__, "findings.toml")


def make_finding(
    key: str, node: str, status: Status | None = None, *, subject: str = "", evidence: tuple[str, ...] = (),
    **values: object,
) -> Finding:  # fmt: skip
    """The finding of that key of findings.toml on a node, its texts filled in."""
    return replace(finding(_TEXTS, key, status, subject, evidence, **values), node=node)


def is_judged(op: str, size_bytes: int, ranks: int) -> bool:
    """Whether a result of this size says something of the links: smaller ones measure latency."""
    return op in JUDGED_OPS and (size_bytes >= JUDGED_BYTES_PER_RANK * ranks or size_bytes >= MOST_JUDGED_BYTES)


def judged_bytes(ranks: int) -> int:
    """S that `ranks` are judged by."""
    return min(JUDGED_BYTES_PER_RANK * ranks, MOST_JUDGED_BYTES)


def links_of(found: Sequence[Snapshot], ranks: int, due: Due | None = None) -> dict[str, Any]:
    """This host's links in plain values, for the ranks of other hosts; empty without a GPU."""
    if not found:
        return {}
    node = build(found[0])
    if not node.gpus:
        return {}
    links = {name: host_links(node, range(ranks), name, due) for name in BARS}
    plain: dict[str, Any] = {name: asdict(each) for name, each in links.items()}
    return plain | {"nvlink_domain": links[IS].domain}


def expected(found: Sequence[Snapshot], local_ranks: int) -> Expect | None:
    """The bars of each result of a run with `local_ranks` on each host; None where this host shows no GPU."""
    node = build(found[0]) if found else None
    if node is None or not node.gpus:
        return None

    def bars(op: str, size_bytes: int, ranks: tuple[int, ...], hello: Sequence[Mapping[str, Any]]) -> tuple[Bar, ...]:
        nccl = bool(hello) and "nccl" in (hello[0].get("versions") or {})  # gloo's speed is the processors'
        if op not in JUDGED_OPS or len(ranks) < 2 or not nccl:
            return ()
        return tuple(_bar_of(name, node, op, size_bytes, ranks, hello, local_ranks) for name in BARS)

    return bars


def _bar_of(
    name: BarName, node: NodeTopology, op: str, size_bytes: int, ranks: tuple[int, ...],
    hello: Sequence[Mapping[str, Any]], local_ranks: int,
) -> Bar:  # fmt: skip
    rows = [hello[rank] for rank in ranks]
    by_host: dict[str, list[int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        by_host.setdefault(str(row["host"]), []).append(rank)
    nvls, words = nvls_of(rows[0])
    hosts = [_links(name, node, hello, mine, alone=len(by_host) == 1, local_ranks=local_ranks)
             for mine in by_host.values()]  # fmt: skip
    if any(each is None for each in hosts):
        return Bar(name=name, why=("the links of a host are not known: its ranks did not tell them",))
    paths = joined([each for each in hosts if each is not None], len(ranks), nvls=nvls)
    found = bandwidth(paths, op, size_bytes, len(ranks))
    if not isinstance(found, Expected):
        return Bar(name=name, why=tuple(dict.fromkeys((found.words(), *paths.words))))
    ring = bandwidth(paths, op, size_bytes, len(ranks), ring=True) if found.algorithm == "NVLS" else None
    other = ring.interval.high if isinstance(ring, Expected) else None
    known = found.interval
    return Bar(
        name=name, low=known.low, typical=known.mid, high=known.high, algorithm=found.algorithm, ring_high=other,
        why=(*words, *found.derivation),
    )  # fmt: skip


def _links(
    name: BarName, node: NodeTopology, hello: Sequence[Mapping[str, Any]], mine: Sequence[int], *, alone: bool,
    local_ranks: int,
) -> Paths | None:  # fmt: skip
    """What one host's ranks told of its links; of a part of one host's own ranks the links between just these."""
    if alone and len(mine) < local_ranks:
        first = min(rank for rank, row in enumerate(hello) if row["host"] == hello[mine[0]]["host"])
        return host_links(node, [rank - first for rank in mine], name)
    links = hello[mine[0]].get("links") or {}
    try:
        return cattrs.structure(links[name], Paths)
    except (cattrs.BaseValidationError, KeyError, TypeError, ValueError):
        return None


def nvls_of(row: Mapping[str, Any]) -> tuple[bool | None, tuple[str, ...]]:
    """Whether the ranks' library may reduce in the switch, and why not; None where its version is not known."""
    environment = row.get("environment") or {}
    if environment.get("NCCL_NVLS_ENABLE") == "0":
        return False, ("NCCL_NVLS_ENABLE=0 in the environment: NVLS is off by choice",)
    algorithms = environment.get("NCCL_ALGO")
    if algorithms and not _allows_nvls(algorithms):
        return False, (f"NCCL_ALGO={algorithms} in the environment: NVLS is off by choice",)
    version = re.match(r"(\d+)\.(\d+)", str((row.get("versions") or {}).get("nccl", "")))
    if version is None:
        return None, ()
    return (int(version[1]), int(version[2])) >= _NVLS_SINCE, ()


def _allows_nvls(text: str) -> bool:
    """NCCL's list: "ring,tree", "^nvls" for all but these, "allreduce:nvls;allgather:ring" by collective."""
    for part in text.lower().split(";"):
        collective, _, names = part.rpartition(":")
        if collective not in ("", "allreduce"):
            continue
        listed = {name.strip() for name in names.lstrip("^").split(",")}
        return ("nvls" in listed) is not names.strip().startswith("^")
    return True


# Whether a measurement holds against its bars.


def checks_of_bars(result: BenchResult, snapshots: Sequence[Snapshot]) -> list[Finding]:
    """The judgements of all that was measured with enough bytes."""
    node = ", ".join(sorted(set(result.hosts)))
    judged = [m for m in result.measurements if m.verified and is_judged_result(m)]
    return [*_busbw(judged, result, snapshots, node), _nvls(judged, result, node), _mnnvl(judged, result, node)]


def least_of(m: Measurement) -> float | None:
    """The greatest of the low ends of its bars, in bytes per second: what it is judged by; None where none is known."""
    return max((bar.low for bar in m.bars if bar.low is not None), default=None)


def is_judged_result(m: Measurement) -> bool:
    """Whether it was measured with enough bytes, or against a baseline."""
    return any(bar.name == BASELINE for bar in m.bars) or (bool(m.bars) and is_judged(m.op, m.bytes, len(m.ranks)))


def baseline_bar(then: float, *more: str) -> Bar:
    """The bar that a baseline's value makes, in bytes per second."""
    why = (f"the baseline measured {units.rate(then)}", f"runs of one machine lie within {1 - BASELINE_LEAST:.0%}")
    return Bar(
        name=BASELINE, low=BASELINE_LEAST * then, typical=then, high=then / BASELINE_LEAST, why=(*why, *more)
    )  # fmt: skip


def _busbw(
    judged: Sequence[Measurement], result: BenchResult, snapshots: Sequence[Snapshot], node: str
) -> Iterable[Finding]:
    if not judged:
        yield make_finding(f"{BUSBW} unknown", node, why=_why_not(result))
    for m in judged:
        yield _held(m, node, snapshots)


def _why_not(result: BenchResult) -> str:
    if not result.measurements:
        return "nothing was measured"
    if result.backend != "nccl":
        return f"{result.backend} moves data by the processors: no links to hold it against; --baseline compares"
    if not any(m.bars for m in result.measurements):
        return "nothing is known of the links to hold the results against"
    return "no result of 64 MiB and more of every rank: smaller ones measure latency, not links"


def _held(m: Measurement, node: str, snapshots: Sequence[Snapshot]) -> Finding:
    """One measurement against its bars: the first gives what it should be, "as it is" the links that are left."""
    value = m.busbw_bytes_per_second
    first = next((bar for bar in m.bars if bar.name != IS), None)
    now = next((bar for bar in m.bars if bar.name == IS), None)
    known = [bar for bar in m.bars if bar.low is not None]
    evidence = tuple(f"{bar.name}: {bar_words(bar)}" for bar in m.bars) + tuple(
        why for bar in m.bars for why in bar.why
    )
    if not known:
        why, key = m.bars[0].why[0] if m.bars[0].why else "unknown", f"{BUSBW} none"
        rate, size = units.rate(value), units.size(m.bytes)
        return make_finding(key, node, subject=m.op, evidence=evidence, rate=rate, size=size, why=why)
    status = min((status_of(value, bar) for bar in known), key=ORDER.index)
    shown = "; ".join(f"{bar_words(bar)} {bar.name}" for bar in m.bars)
    measured = f"{units.rate(value)} at {units.size(m.bytes)} of {shown}"
    if status == "pass":
        case = "open" if first is None or first.low is None else "pass"
        return make_finding(f"{BUSBW} {case}", node, subject=m.op, evidence=evidence, measured=measured)
    cause, remedy = _cause(m, first, now, value, snapshots)
    return make_finding(
        BUSBW, node, status, subject=m.op, evidence=evidence, measured=measured, cause=cause, remedy=remedy
    )


def expected_words(m: Measurement) -> str:
    """What a measurement is held against, for a table: its first bar that is known, with the interval."""
    bar = next((bar for bar in m.bars if bar.low is not None), None)
    return bar_words(bar) if bar else units.rate(m.expected_busbw_bytes_per_second)


def bar_words(bar: Bar) -> str:
    """ "332 GB/s (278 GB/s to 424 GB/s)", "unknown"."""
    if bar.low is None:
        return "unknown"
    return f"{units.rate(bar.typical)} ({units.rate(bar.low)} to {units.rate(bar.high)})"


def status_of(value: float, bar: Bar) -> Status:
    """By cost: under the low end warns, under half of it fails."""
    low = bar.low or 0.0
    return Status.PASS if value >= low else Status.WARN if value >= low * FAILS_BELOW else Status.FAIL


def _cause(
    m: Measurement, first: Bar | None, now: Bar | None, value: float, snapshots: Sequence[Snapshot]
) -> tuple[str, str]:
    """Why, as far as the two bars tell, and what to do next."""
    hosts = len(set(m.hosts))
    if first and first.ring_high and value <= first.ring_high and (first.low or 0.0) > value:
        return "no more than the ring carries", "See bench.nvls.unused."
    due = (first.low if first else None) or 0.0
    if now is not None and now.low is not None and now.low <= value and now.low < due:
        missing = [text for snapshot in snapshots for text in departures(build(snapshot))]
        words = "; ".join(missing) or _difference(first, now)
        return f"the links that are left carry this much, and links are missing: {words}", (
            "Mend the missing links; `topoflight preflight` names each of them."
        )
    if hosts > 1:
        nccl = m.backend == "nccl"
        one = "NIC at a time with NCCL_IB_HCA" if nccl else "interface at a time with GLOO_SOCKET_IFNAME"
        return f"no link of a host explains it: the fault is between the {hosts} hosts, or in how they are used", (
            f"`topoflight bench --search` finds a slow host by pairs; then one {one}, and each host alone."
        )
    return "the links look whole, so the fault is one that no link shows", (
        "Measure pairs of GPUs (CUDA_VISIBLE_DEVICES and --ranks 2), and once with NCCL_NVLS_ENABLE=0; compare the "
        "transports in the evidence with `topoflight topo`."
    )


def _difference(first: Bar | None, now: Bar) -> str:
    due = [why for why in (first.why if first else ()) if why not in now.why]
    have = [why for why in now.why if first is None or why not in first.why]
    return f"{have[0]}, where {due[0]}" if have and due else "fewer than on its equals"


def _nvls(judged: Sequence[Measurement], result: BenchResult, node: str) -> Finding:
    """All-reduce that stays within the ring's value although the switch could reduce."""
    found = [m for m in judged if m.op == "all_reduce" and len(set(m.hosts)) == 1]
    fabric = result.evidence.fabric if result.evidence else ()
    lines = tuple(f"line {line.line}: {line.text}" for line in fabric if "NVLS" in line.proves)
    off = next((why for m in found for bar in m.bars for why in bar.why if "NVLS is off by choice" in why), "")
    if off:
        return make_finding(f"{NVLS} off", node, evidence=lines, why=off)
    expecting = [(m, bar) for m in found for bar in m.bars[:1] if bar.ring_high and bar.low]
    if not expecting:
        return make_finding(f"{NVLS} unknown", node)
    m, bar = max(expecting, key=lambda each: each[0].bytes)
    value, low, ring = m.busbw_bytes_per_second, bar.low or 0.0, bar.ring_high or 0.0
    if value >= low or value > ring:
        case, shown = (" pass", lines) if value >= low else (" between", ())
        return make_finding(f"{NVLS}{case}", node, evidence=shown, rate=units.rate(value))
    shown = lines or ("the log has no line on NVLS",)
    return make_finding(NVLS, node, status_of(value, bar), subject=m.op, evidence=shown, rate=units.rate(value),
                bar=bar_words(bar), ring=units.rate(ring))  # fmt: skip


def _mnnvl(judged: Sequence[Measurement], result: BenchResult, node: str) -> Finding:
    """Hosts of one NVLink domain whose ranks do not reach each other over it."""
    hosts, domains = len(set(result.hosts)), result.nvlink_domains
    if hosts < 2 or len(domains) != 1 or not domains[0]:
        why = "one host alone" if hosts < 2 else "the hosts share no NVLink domain that is known"
        return make_finding(f"{MNNVL} unknown", node, why=why)
    proof = result.evidence
    lines = tuple(f"line {row.line}: {row.text}" for row in (proof.fabric if proof else ()) if "MNNVL" in row.proves)
    remote = proof.inter_node_transport if proof else None
    if remote == "NVLink (MNNVL)":
        return make_finding(f"{MNNVL} pass", node, evidence=lines)
    slow = [
        m for m in judged if len(set(m.hosts)) > 1 and any(b.low and m.busbw_bytes_per_second < b.low for b in m.bars)
    ]
    if not (lines or remote not in (None, "unknown") or slow):
        return make_finding(f"{MNNVL} unknown", node, why="the log does not say how NCCL joins the hosts")
    off = result.environment.get("NCCL_MNNVL_ENABLE") == "0"
    return make_finding(
        MNNVL, node, evidence=lines or ("the log has no line on MNNVL",), hosts=hosts, domain=domains[0],
        by=f"over {remote}" if remote not in (None, "unknown") else "by another way",
        choice=" (NCCL_MNNVL_ENABLE=0 in the environment)" if off else "",
    )  # fmt: skip


# RDMA writes between two hosts: the wire rate of the port, as it should be and as it is.


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

"""Prometheus: the metric families of one view, created from it each time, so that a lost GPU leaves no stale series.

The agent's own families and all labels with their limits are in metrics.toml next to this module. Each probe declares
its families, and their values in its `samples`. dashboards/generate.py creates docs/reference/metrics.md. Metrics of
node_exporter or dcgm-exporter are not repeated; the scraper adds `node` and `instance`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric as Samples
from prometheus_client.exposition import choose_encoder

from agent.base import version
from agent.checks.history import PARTS
from agent.checks.host_checks import is_gdrdma_possible
from agent.checks.measured import find_least_bandwidth, is_judged_result
from agent.checks.view import View
from agent.cluster.nodes import parse_time
from collectives.bench.results import BenchResult
from collectives.nccl_log.transport import Evidence
from collectives.search.plan import SearchResult
from contracts.run_record import Communication, RunRecord, compare
from contracts.tables import read_table
from probes.api import Failed, Metric, Ok, make_metric
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts
from probes.registry import ALL
from topology.graph import UNKNOWN, NodeTopology, Pair

MAX_SIZES = 4  # the largest values of size_bytes; /measurements has the curves
MAX_RANKS = 8  # the latest stragglers
MAX_TRANSPORTS = 16
BOUNDS = ("low", "mid", "high")
STATUSES = ("pass", "info", "warn", "unknown", "fail")
MAX_COLLECTIVES = 16  # kinds of collectives in a step

TABLE = read_table(__file__, "metrics.toml")  # dashboards/generate.py reads what it says about labels
OWN: tuple[Metric, ...] = tuple(make_metric(row["name"], row) for row in TABLE["metrics"])
_RUN_FACTS = {row["name"]: attrgetter(row["fact"]) for row in TABLE["metrics"] if "fact" in row}
CATALOGUE: tuple[Metric, ...] = (*OWN, *(metric for probe in ALL for metric in probe.metrics))

MAX_SUBJECT = 96  # characters per label; the longest subject of the project's machines has 41

Values = list[tuple[tuple[str, ...], float]]
Counted = Mapping[tuple[str, ...], float]  # what a thread of the agent counts, by family and label values


def expose(view: View, accept: str, counted: Counted | None = None) -> tuple[bytes, str]:
    """Return the exposition and its content type, negotiated by the Accept header. Pure: valid as long as the view."""
    encoder, content_type = choose_encoder(accept)
    registry: Any = SimpleNamespace(collect=lambda: collect_families(view, counted or {}))  # all that an encoder needs
    return encoder(registry), content_type


def collect_families(view: View, counted: Counted) -> Iterator[Samples]:
    """Return every family that has a value: of one view, what its probes export, and `counted`."""
    values = defaultdict(list, list_agent_values(view))
    for (name, *labels), value in sorted(dict(counted).items()):  # a copy, because the thread still counts
        values[name].append((tuple(labels), value))
    for probe in ALL:
        outcome = view.snapshots[0].outcomes.get(probe.name)
        for sample in probe.samples(outcome.facts) if isinstance(outcome, Ok) else ():
            values[sample.metric].append((sample.labels, sample.value))
    yield InfoMetricFamily("topoflight_build", "Version of the agent.", {"version": version()})
    for family in CATALOGUE:
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        metric = kind(family.exposed, family.help, labels=family.labels)
        for label_values, value in values[family.name]:
            metric.add_metric(label_values, value)
        if metric.samples:
            yield metric


# Values of the agent's own families for one view. An unknown value has no sample, never a zero.


def list_agent_values(view: View) -> Iterator[tuple[str, Values]]:
    """Pairs of family name and its samples."""
    yield from _list_scan_values(view)
    yield from _list_link_values(view.topologies[0])
    if view.snapshots[0].facts(RdmaFacts) and view.snapshots[0].facts(PciFacts):
        yield "gdrdma_possible", [((), float(is_gdrdma_possible(view.snapshots)))]
    if view.bench is not None:
        yield from _list_bench_values(view.bench)
        if view.bench.evidence is not None:
            yield from _list_evidence_values(view.bench.evidence)
    if view.search is not None:
        yield from _list_search_values(view.search)
    if view.runs:
        yield from _list_run_values(view)


def _list_scan_values(view: View) -> Iterator[tuple[str, Values]]:
    (snapshot,) = view.snapshots
    outcomes = snapshot.outcomes.items()
    yield "scan_timestamp_seconds", [((), snapshot.taken_at_seconds)]
    yield "hosts", [((), 1.0)]
    yield "fact_timestamp_seconds", _list_fact_times(view)
    yield "probe_success", [((name,), float(not isinstance(outcome, Failed))) for name, outcome in outcomes]
    yield "probe_duration_seconds", [((name,), float(getattr(outcome, "seconds", 0.0))) for name, outcome in outcomes]
    bad = ("warn", "fail")  # only these have a label for their subject, which alerts use
    missed = Counter(
        (check.code, str(check.status), check.subject[:MAX_SUBJECT] if check.status in bad else "")
        for check in view.checks if check.status != "pass"
    )  # fmt: skip
    yield "findings", [(key, float(count)) for key, count in missed.items()]
    statuses = Counter(str(check.status) for check in view.checks)
    began: dict[tuple[str, ...], float] = {}
    for check in view.checks:
        if (since := view.since.get((check.code, check.subject))) is not None:
            since = float(int(since))  # as the node's record has it: an agent that reads it there says the same
            began[check.code, check.status] = min(since, began.get((check.code, check.status), since))
    yield "finding_since_seconds", list(began.items())
    changed = {event.code: event.at_seconds for event in sorted(view.events, key=lambda e: e.at_seconds)
               if event.code in PARTS and not event.is_finding}  # fmt: skip
    yield "change_timestamp_seconds", [((part,), float(int(changed_at))) for part, changed_at in changed.items()]
    yield "checks", [((status,), float(statuses[status])) for status in STATUSES]
    yield "gate_status", [((word,), float(view.verdict.word == word)) for word in STATUSES if word != "info"]


def _list_fact_times(view: View) -> Values:
    """Return the time of each probe's facts; a failed probe has no fact and therefore no time."""
    (snapshot,) = view.snapshots
    answered = (name for name, outcome in snapshot.outcomes.items() if not isinstance(outcome, Failed))
    times = dict.fromkeys(answered, snapshot.taken_at_seconds)
    if view.bench is not None:
        times["bench"] = view.bench.started_at_seconds + view.bench.seconds
    if view.search is not None:
        times["search"] = view.search.began + view.search.seconds
    if view.runs and (ended := parse_time(view.runs[0].ended_at or view.runs[0].started_at)):
        times["run"] = ended
    return [((name,), seconds) for name, seconds in times.items()]


def _list_link_values(node: NodeTopology) -> Iterator[tuple[str, Values]]:
    index = {gpu.name: str(gpu.index) for gpu in node.gpus}
    pairs = (p for p in node.pairs if p.label != UNKNOWN)  # no sample for a lost GPU, or if the driver does not answer
    between = [(index[p.a], index[p.b], p) for p in pairs if p.a in index and p.b in index]
    both = [*between, *((b, a, p) for a, b, p in between)]
    yield "gpu_link_distance", [((a, b), float(p.path)) for a, b, p in both if p.path is not None]
    yield "gpu_link_nvlinks", [((a, b), float(p.nvlinks)) for a, b, p in both if node.nvlink_known]
    to_nics = _pair_nics(node, index)
    yield "gpu_nic_info", [((gpu, nic, p.label, near), 1.0) for gpu, nic, near, p in to_nics]
    yield "gpu_nic_distance", [((gpu, nic), float(p.path)) for gpu, nic, _, p in to_nics if p.path is not None]


def _pair_nics(node: NodeTopology, index: dict[str, str]) -> list[tuple[str, str, str, Pair]]:
    """Return GPU, NIC, whether it is one of its nearest, and the link between them."""
    nics = {nic.name for nic in node.nics}
    nearest = {near.gpu: set(near.nics) for near in node.nearest_nic}
    rows: list[tuple[str, str, str, Pair]] = []
    for pair in node.pairs:
        gpu, nic = (pair.a, pair.b) if pair.a in index else (pair.b, pair.a)
        if gpu in index and nic in nics:
            rows.append((index[gpu], nic, "true" if nic in nearest.get(gpu, ()) else "false", pair))
    return rows


def _list_bench_values(result: BenchResult) -> Iterator[tuple[str, Values]]:
    verified = [m for m in result.measurements if m.verified]
    sizes = sorted({m.bytes for m in verified})[-MAX_SIZES:]
    # if several groups measured one size, the slowest counts, because a job waits for it
    largest = (m for m in verified if m.bytes in sizes)
    fastest_first = sorted(largest, key=lambda m: m.busbw_bytes_per_second, reverse=True)
    slowest = {(m.op, str(m.bytes)): m for m in fastest_first}
    is_complete = result.complete and bool(verified) and len(verified) == len(result.measurements)
    yield "bench_success", [((), float(is_complete))]
    yield "bench_busbw_bytes_per_second", [(k, m.busbw_bytes_per_second) for k, m in slowest.items()]
    expected: Values = [(k, v) for k, m in slowest.items() if (v := m.expected_busbw_bytes_per_second)]
    yield "bench_expected_busbw_bytes_per_second", expected
    lowest = {k: find_least_bandwidth(m) for k, m in slowest.items() if is_judged_result(m)}
    yield "bench_least_busbw_bytes_per_second", [(k, low) for k, low in lowest.items() if low is not None]
    yield "bench_slow_ranks", [((), float(len(result.stragglers)))]
    latest = sorted(result.stragglers, key=lambda s: s.late_seconds, reverse=True)[:MAX_RANKS]
    yield "bench_rank_late_seconds", list({(str(s.rank),): s.late_seconds for s in latest}.items())


def _list_evidence_values(log: Evidence) -> Iterator[tuple[str, Values]]:
    counts = (("send", log.send), ("receive", log.receive))
    yield "gdrdma_channels_ratio", [((name,), c.gdrdma / c.total) for name, c in counts if c.total]
    common = sorted(log.transports.items(), key=lambda item: (-item[1], item[0]))[:MAX_TRANSPORTS]
    yield "transport_channels", [((name,), float(count)) for name, count in common]
    names = (log.inter_node_transport or "none", log.intra_node_transport or "none", log.gdrdma)
    yield "transport_info", [(names, 1.0)]
    problems = Counter({(p.code, p.severity): p.count for p in log.problems})
    yield "log_problems", [(key, float(count)) for key, count in problems.items()]


def _list_search_values(result: SearchResult) -> Iterator[tuple[str, Values]]:
    count = Counter(verdict.state for verdict in result.verdicts)
    yield "search_nodes", [((state,), float(count[state])) for state in ("good", "bad", "not judged")]
    yield "search_bad_links", [((), float(len(result.links)))]
    if result.visible_loss is not None:
        yield "search_visible_loss_ratio", [((), result.visible_loss)]


def _list_run_values(view: View) -> Iterator[tuple[str, Values]]:
    ends = Counter(record.status for record in view.runs)
    yield "runs", [((status,), float(count)) for status, count in ends.most_common(8)]
    last = view.runs[0]
    communication = last.communication or Communication()
    yield "run_success", [((), float(last.status == "complete"))]
    for name, get_fact in _RUN_FACTS.items():
        if (number := get_fact(replace(last, communication=communication))) is not None:
            yield name, [((), float(number))]
    yield "run_forecast_step_seconds", _list_bounds(last, "step_seconds")
    yield "run_forecast_memory_bytes", _list_bounds(last, "memory_bytes")
    compared = [line for line in compare(last) if line.within is not None]
    yield "run_within_forecast", [((line.quantity,), float(line.within is True)) for line in compared]
    losses = (("first", last.loss.first), ("last", last.loss.last))
    yield "run_loss", [((phase,), loss) for phase, loss in losses if loss is not None]
    largest = sorted(communication.seconds_by_kind.items(), key=lambda item: -item[1])[:MAX_COLLECTIVES]
    yield "run_communication_seconds", [((name[:64],), seconds) for name, seconds in largest]


def _list_bounds(record: RunRecord, quantity: str) -> Values:
    limits = getattr(record.plan.forecast, quantity)
    return [((bound,), getattr(limits, bound)) for bound in BOUNDS] if limits else []

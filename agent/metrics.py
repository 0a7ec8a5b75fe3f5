"""Prometheus: the families one view exports, built fresh for every scan.

Specification: https://prometheus.io/docs/practices/naming/. Nothing here that node_exporter or dcgm-exporter
already exports; `node` and `instance` come from the scraper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from agent.flight import parse
from agent.version import VERSION
from agent.view import View
from probes.api import Failed, Ok
from probes.registry import ALL

PREFIX = "topoflight_"

# name, help, labels: the families of the agent itself; the probes' own follow from `Probe.metrics`
OWN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("build_info", "Version of the agent.", ("version",)),
    ("probe_success", "1 where the probe answered or found nothing to look at, 0 where it failed.", ("probe",)),
    ("probe_absent", "1 where the host has nothing for this probe to look at.", ("probe",)),
    ("probe_duration_seconds", "Duration of the probe's last run.", ("probe",)),
    ("scan_timestamp_seconds", "Unix time of the last scan.", ()),
    ("findings", "Findings of the last scan.", ("code", "severity")),
    ("gate_status", "1 for the status the gate is in: pass, warn, unknown, fail.", ("status",)),
    ("link_class", "1 for the class of the link between two GPUs, or a GPU and a NIC.", ("device", "peer", "class")),
    ("link_expected_bytes_per_second", "Planned bandwidth of the link, one direction.", ("device", "peer")),
    ("expected_busbw_bytes_per_second", "Bus bandwidth derived from the links.", ("op", "scope")),
    ("bench_timestamp_seconds", "Unix time of the last benchmark result.", ()),
    ("bench_success", "1 where the last benchmark was complete and verified.", ()),
    ("bench_algbw_bytes_per_second", "Algorithm bandwidth of the last benchmark.", ("op", "size_bytes")),
    ("bench_busbw_bytes_per_second", "Bus bandwidth of the last benchmark.", ("op", "size_bytes")),
    ("bench_latency_seconds", "Latency (alpha) of the last benchmark.", ("op",)),
    ("gdrdma_channels_ratio", "Share of inter-node channels with GPUDirect RDMA in the last log.", ("direction",)),
    ("transport_info", "Transports proven by the last log.", ("inter_node", "intra_node", "gdrdma")),
    ("flight_step_seconds", "Median step time of the last flight.", ()),
    ("flight_forecast_step_seconds", "Forecast of that step time.", ("bound",)),
    ("flight_tokens_per_second", "Tokens per second of the last flight.", ()),
)  # fmt: skip

KEPT_SIZES = 4  # label values of size_bytes: the largest ones; curves are in /measurements


def families(view: View) -> Iterator[Metric]:
    """Every family of one view."""
    yield InfoMetricFamily("topoflight_build", "Version of the agent.", {"version": VERSION})
    values = dict(_agent_values(view))
    for name, text, labels in OWN:
        if name == "build_info" or not values.get(name):
            continue
        yield _gauge(name, text, labels, values[name])
    yield from _probe_families(view)


def exposition(view: View, accept: str) -> tuple[bytes, str]:
    """The whole exposition and its content type, negotiated by the Accept header."""
    encoder, content_type = choose_encoder(accept)
    return encoder(_Registry(lambda: families(view))), content_type


class _Registry:
    """What an encoder needs of a registry."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


Values = list[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Values) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def _probe_families(view: View) -> Iterator[Metric]:
    for probe in ALL:
        samples = [
            sample
            for snapshot in view.snapshots
            if isinstance(outcome := snapshot.outcomes.get(probe.name), Ok)
            for sample in probe.samples(outcome.facts)
        ]
        for metric in probe.metrics:
            mine = [(s.labels, s.value) for s in samples if s.metric == metric.name]
            if not mine:
                continue
            if metric.kind == "counter":
                family: Metric = CounterMetricFamily(PREFIX + metric.name, metric.help, labels=metric.labels)
                for labels, value in mine:
                    family.add_metric(labels, value)  # type: ignore[attr-defined]
                yield family
            else:
                yield _gauge(metric.name, metric.help, metric.labels, mine)


def _agent_values(view: View) -> Iterator[tuple[str, Values]]:
    yield "probe_success", _per_probe(view, lambda o: 0.0 if isinstance(o, Failed) else 1.0)
    yield "probe_absent", _per_probe(view, lambda o: 0.0 if isinstance(o, (Ok, Failed)) else 1.0)
    yield "probe_duration_seconds", _per_probe(view, lambda o: float(getattr(o, "seconds", 0.0)))
    yield "scan_timestamp_seconds", [((), max((s.taken_at_seconds for s in view.snapshots), default=0.0))]
    counted: dict[tuple[str, ...], float] = {}
    for check in view.checks:
        if check.status != "pass":
            key = (check.id, check.status)
            counted[key] = counted.get(key, 0.0) + 1
    yield "findings", list(counted.items())
    yield "gate_status", [((s,), 1.0 if view.verdict.word == s else 0.0) for s in ("pass", "warn", "unknown", "fail")]
    if len(view.topologies) == 1:  # of several recordings the matrix has no place for a host label
        node = view.topologies[0]
        yield "link_class", [((p.a, p.b, p.label), 1.0) for p in node.pairs]
        yield (
            "link_expected_bytes_per_second",
            [((p.a, p.b), p.bytes_per_second) for p in node.pairs if p.bytes_per_second],
        )
        yield (
            "expected_busbw_bytes_per_second",
            list(
                {
                    (e.op, e.scope): e.busbw_bytes_per_second for e in node.expectations if e.busbw_bytes_per_second
                }.items()
            ),
        )
    yield from _bench_values(view)
    yield from _flight_values(view)


def _per_probe(view: View, value: Callable[[object], float]) -> Values:
    """The worst host's value per probe, where recordings of several hosts are served."""
    found: dict[tuple[str, ...], float] = {}
    for snapshot in view.snapshots:
        for name, outcome in snapshot.outcomes.items():
            number = value(outcome)
            found[(name,)] = min(found.get((name,), number), number)
    return list(found.items())


def _bench_values(view: View) -> Iterator[tuple[str, Values]]:
    result = view.bench
    if result is None:
        return
    verified = [m for m in result.measurements if m.verified]
    sizes = sorted({m.bytes for m in verified})[-KEPT_SIZES:]
    kept = [m for m in verified if m.bytes in sizes]
    whole = result.complete and bool(verified) and len(verified) == len(result.measurements)
    if view.bench_at_seconds is not None:
        yield "bench_timestamp_seconds", [((), view.bench_at_seconds)]
    yield "bench_success", [((), 1.0 if whole else 0.0)]
    yield "bench_algbw_bytes_per_second", [((m.op, str(m.bytes)), m.algbw_bytes_per_second) for m in kept]
    yield "bench_busbw_bytes_per_second", [((m.op, str(m.bytes)), m.busbw_bytes_per_second) for m in kept]
    yield "bench_latency_seconds", [((fit.op,), fit.alpha_seconds) for fit in result.latencies]
    found = result.evidence
    if found is not None:
        yield (
            "gdrdma_channels_ratio",
            [
                ((name,), count.gdrdma / count.total)
                for name, count in (("send", found.send), ("receive", found.receive))
                if count.total
            ],
        )
        names = (found.inter_node_transport or "none", found.intra_node_transport or "none", found.gdrdma)
        yield "transport_info", [(names, 1.0)]


def _flight_values(view: View) -> Iterator[tuple[str, Values]]:
    if not view.flights:
        return
    last = parse(view.flights[0])
    if last.step_seconds is not None:
        yield "flight_step_seconds", [((), last.step_seconds)]
    if last.tokens_per_second is not None:
        yield "flight_tokens_per_second", [((), last.tokens_per_second)]
    bounds = last.forecast_step_seconds or {}
    yield "flight_forecast_step_seconds", [((b,), bounds[b]) for b in ("low", "mid", "high") if b in bounds]

"""Prometheus: the families one view exports, built fresh from it: a vanished GPU leaves no stale series.

The families are in `agent.metrics_catalogue`, their values in `agent.metrics_values` and in each probe's `samples`.
Nothing here that node_exporter or dcgm-exporter already exports; `node` and `instance` come from the scraper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from agent.metrics_catalogue import CATALOGUE, OWN, PROBES, Family
from agent.metrics_values import Values, agent_values
from agent.version import VERSION
from agent.view import View
from probes.api import Ok
from probes.registry import ALL

__all__ = ["CATALOGUE", "OWN", "PROBES", "Rendered", "exposition", "families"]


def exposition(view: View, accept: str) -> tuple[bytes, str]:
    """The whole exposition and its content type, negotiated by the Accept header. Pure: keep it as long as the view."""
    encoder, content_type = choose_encoder(accept)
    return encoder(_Registry(lambda: families(view))), content_type


class Rendered:
    """Expositions of one view, each format rendered once: a scan is scraped more often than it is made."""

    def __init__(self) -> None:
        self._view: View | None = None
        self._kept: dict[str, bytes] = {}

    def __call__(self, view: View, accept: str) -> tuple[bytes, str]:
        """As `exposition`; another view drops what was kept."""
        if view is not self._view:
            self._view, self._kept = view, {}
        content_type = choose_encoder(accept)[1]
        if content_type not in self._kept:
            self._kept[content_type] = exposition(view, accept)[0]
        return self._kept[content_type], content_type


def families(view: View) -> Iterator[Metric]:
    """Every family of one view that has a value."""
    values = dict(agent_values(view))
    yield InfoMetricFamily("topoflight_build", "Version of the agent.", {"version": VERSION})
    for family in OWN:
        if values.get(family.name):
            yield _metric(family, values[family.name])
    if len(view.snapshots) == 1:  # devices of several recordings would collide: see docs/metrics.md
        sampled = _sampled(view)
        for family in PROBES:
            if sampled.get(family.name):
                yield _metric(family, sampled[family.name])


class _Registry:
    """What an encoder needs of a registry."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def _metric(family: Family, values: Values) -> Metric:
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.exposed, family.help, labels=family.labels)
    for label_values, value in values:
        metric.add_metric(label_values, value)
    return metric


def _sampled(view: View) -> dict[str, Values]:
    """What the probes of the one host export, by family."""
    found: dict[str, Values] = {}
    for probe in ALL:
        outcome = view.snapshots[0].outcomes.get(probe.name)
        if isinstance(outcome, Ok):
            for sample in probe.samples(outcome.facts):
                found.setdefault(sample.metric, []).append((sample.labels, sample.value))
    return found

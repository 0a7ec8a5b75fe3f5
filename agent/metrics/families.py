"""Prometheus: the families one view exports, built fresh from it: a vanished GPU leaves no stale series.

The families are in `agent.metrics.catalogue`, their values in `agent.metrics.values` and in each probe's `samples`.
Nothing here that node_exporter or dcgm-exporter already exports; `node` and `instance` come from the scraper.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from agent.metrics.catalogue import CATALOGUE, OWN, PROBES, Family
from agent.metrics.values import Values, agent_values
from agent.version import VERSION
from agent.view import View
from probes.api import Ok
from probes.registry import ALL

__all__ = ["CATALOGUE", "OWN", "PROBES", "Rendered", "exposition", "families"]


More = Iterable[tuple[str, Values]]  # families that are not of a view, by name


def exposition(view: View, accept: str, more: More = ()) -> tuple[bytes, str]:
    """The whole exposition and its content type, negotiated by the Accept header. Pure: keep it as long as the view."""
    encoder, content_type = choose_encoder(accept)
    return encoder(_Registry(lambda: families(view, more))), content_type


class Rendered:
    """Expositions of one view, each format rendered once: a scan is scraped more often than it is made."""

    def __init__(self, more: Callable[[], More] = tuple) -> None:
        self._more = more  # asked once for each rendering
        self._made: tuple[View | None, dict[tuple[str, bool], bytes]] = None, {}
        self._asked: dict[tuple[str, bool], str] = {}  # formats asked for since the last scan, with their Accept header

    def __call__(self, view: View, accept: str, *, zipped: bool = False) -> tuple[bytes, str]:
        """As `exposition`, gzipped where wanted; another view drops what was kept."""
        of, kept = self._made
        if view is not of:
            self._made = of, kept = view, {}
        key = choose_encoder(accept)[1], zipped
        self._asked[key] = accept
        if key not in kept:
            kept[key] = _rendered(view, accept, self._more(), zipped=zipped)
        return kept[key], key[0]

    def prepare(self, view: View) -> None:
        """Render for a new view, in the thread that made it, what was asked of the last one."""
        asked, self._asked = self._asked, {}
        made = {key: _rendered(view, accept, self._more(), zipped=key[1]) for key, accept in asked.items()}
        self._made = view, made


def _rendered(view: View, accept: str, more: More, *, zipped: bool) -> bytes:
    body = exposition(view, accept, more)[0]
    return gzip.compress(body, compresslevel=6, mtime=0) if zipped else body


def families(view: View, more: More = ()) -> Iterator[Metric]:
    """Every family of one view, and of `more`, that has a value."""
    values = {**dict(agent_values(view)), **dict(more)}
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

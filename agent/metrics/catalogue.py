"""Every metric family that the agent may export, and the bound of every label.

The agent's own families and all labels are data: catalogue.toml beside this module. Each probe declares its families.
docs/metrics.md is made from both (`python dashboards/generate.py`).
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from probes.api import Metric
from probes.registry import ALL

KEPT_SIZES = 4  # values of size_bytes: the largest ones; curves are in /measurements
KEPT_RANKS = 8  # stragglers, the latest first
KEPT_TRANSPORTS = 16
KEPT_COLLECTIVES = 16  # kinds of collective in the step of a run

_TABLE = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
_COUNTED = {"probe": str(len(ALL)), "fact": str(len(ALL) + 2)}  # a fact is a probe, the benchmark or the run

FORBIDDEN_LABELS = frozenset(_TABLE["forbidden_labels"])
SYMBOLS: dict[str, str] = _TABLE["symbols"]

LABELS: dict[str, tuple[str, str]] = {
    label: (row["text"], _COUNTED.get(label, row.get("most", ""))) for label, row in _TABLE["labels"].items()
}
"""What each label holds, and the most values that one host has of it: a number, a symbol, or "" where the value follows
from the other labels."""

OWN: tuple[Metric, ...] = tuple(Metric(**{**row, "labels": tuple(row.get("labels", ()))}) for row in _TABLE["metrics"])
PROBES: tuple[Metric, ...] = tuple(metric for probe in ALL for metric in probe.metrics)
CATALOGUE: tuple[Metric, ...] = (*OWN, *PROBES)
BY_SOURCE: dict[str, tuple[Metric, ...]] = {"agent": OWN, **{p.name: p.metrics for p in ALL if p.metrics}}


def series_bound(metric: Metric) -> tuple[str, ...]:
    """Return the factors of the most series that one host can have of the family; () is one series."""
    keys = [label for label in metric.labels if not (label == "pci_bus_id" and "gpu" in metric.labels)]
    if metric.kind == "info":  # one series per thing; what is said about the thing multiplies nothing
        keys = [label for label in keys if LABELS[label][1] in ("G", "D", "P")]
    if "code" in keys:  # a code has the severity of its case
        keys.remove("severity")
    return tuple(factor for label in keys if (factor := LABELS[label][1]))

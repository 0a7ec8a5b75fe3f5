"""A node as the page draws it: topology's drawing, with glyphs where findings are and what a benchmark measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial

from markupsafe import Markup

from agent import units
from agent.gate.verdict import Check
from collectives.bench.results import BenchResult
from probes.api import Snapshot
from probes.pci.facts import PciFacts
from topology import svg
from topology.graph import NodeTopology


def picture(
    node: NodeTopology, *, snapshot: Snapshot | None = None, checks: Iterable[Check] = (),
    bench: BenchResult | None = None,
) -> Markup:  # fmt: skip
    """The node as one inline `<svg>`; empty where there is nothing to join."""
    mine = [check for check in checks if not check.node or node.hostname in check.node.split(", ")]
    drawn = svg.picture(
        node, pci=snapshot.facts(PciFacts) if snapshot else None, status=partial(_status, mine),
        measured=_measured(node, bench), more=" The table below says the same.",
    )  # fmt: skip
    return Markup(drawn)  # noqa: S704 - every text from a host is escaped there


def _status(checks: Sequence[Check], names: Iterable[str | None]) -> str:
    """The worst of the findings whose subject names the device."""
    patterns = [re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w.])") for name in names if name]
    said = {c.status for c in checks if c.subject and any(p.search(c.subject) for p in patterns)}
    return next((word for word in ("fail", "warn") if word in said), "")


def _measured(node: NodeTopology, bench: BenchResult | None) -> dict[tuple[str, ...], str]:
    """Of islands that a benchmark of one host ran on as a whole."""
    gathers = [m for m in bench.measurements if m.op == "all_gather" and m.verified] if bench else []
    if bench is None or not gathers or len(set(bench.hosts)) != 1:
        return {}
    best = max(gathers, key=lambda m: m.bytes)
    words = f"{units.rate(best.busbw_bytes_per_second)} bus bandwidth measured (all_gather)"
    return {island.gpus: words for island in node.islands if len(island.gpus) == bench.world_size}

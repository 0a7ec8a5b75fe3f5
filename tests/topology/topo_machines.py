"""Recorded machines as snapshots, each scanned once per test run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from probes.api import Snapshot
from probes.host.recording import load
from probes.scan import scan
from topology.build import build
from topology.graph import NodeTopology

MACHINES = Path(__file__).parent.parent / "machines"
NAMES = sorted(path.stem for path in MACHINES.glob("*.json"))


@cache
def snapshot(name: str) -> Snapshot:
    """One recording, scanned."""
    return scan(load(MACHINES / f"{name}.json"))


@cache
def topology(name: str) -> NodeTopology:
    """One recording's topology."""
    return build(snapshot(name))

"""The environments that a scan itself saw."""

from __future__ import annotations

from planner.lint.named import NamedEnvironment
from probes.api import Snapshot
from probes.hostinfo.probe import HostinfoFacts


def recorded_environments(snapshot: Snapshot) -> tuple[NamedEnvironment, ...]:
    """What the scan itself saw: the variables of its process, and nccl.conf."""
    facts = snapshot.facts(HostinfoFacts)
    if facts is None:
        return ()
    found = (("process", facts.nccl_environment), ("nccl.conf", facts.nccl_conf))
    return tuple(
        NamedEnvironment(source=f"{snapshot.hostname} {source}", environment=dict(environment))
        for source, environment in found
        if environment
    )

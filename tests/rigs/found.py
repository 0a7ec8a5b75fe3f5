"""What the probes find wrong with a snapshot, without the passes and the unknowns that a gate adds."""

from __future__ import annotations

from contracts.finding import Finding
from probes.api import Ok, Snapshot
from probes.registry import BY_NAME, failures, findings_of


def findings(snapshot: Snapshot) -> tuple[Finding, ...]:
    """The findings of every probe; a failed probe is a finding too."""
    answered = [(name, each.facts) for name, each in snapshot.outcomes.items() if isinstance(each, Ok)]
    found = (finding for name, facts in answered for finding in findings_of(snapshot, BY_NAME[name], facts))
    return (*failures(snapshot), *found)

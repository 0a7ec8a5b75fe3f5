"""Errors that rise between two scans: a counter's value alone counts since the driver was loaded and proves nothing.

Sources: Linux Documentation/ABI/stable/sysfs-class-infiniband and NVIDIA's "Understanding mlx5 Linux Counters" for the
meaning of each; thresholds as NVSentinel documents them (docs/configuration/nic-health-monitor.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from probes.api import Finding, Severity
from probes.rdma.probe import RdmaFacts, RdmaPort

HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """More than `count` within `seconds`, or within the interval where that is longer, pro rata."""

    counter: str
    count: float
    seconds: float
    severity: Severity
    meaning: str

    def exceeded(self, rise: int, seconds: float) -> bool:
        """A short interval is held to the whole count: one event is no rate."""
        return rise > self.count * max(seconds / self.seconds, 1.0)


THRESHOLDS = tuple(
    Threshold(counter=counter, count=count, seconds=seconds, severity=severity, meaning=meaning)
    for counter, count, seconds, severity, meaning in (
        ("link_downed", 0, 1, Severity.FAIL, "the link went down"),
        ("excessive_buffer_overrun_errors", 0, 1, Severity.FAIL, "receive buffers overran"),
        ("local_link_integrity_errors", 0, 1, Severity.FAIL, "physical errors exceeded what the link tolerates"),
        ("rnr_nak_retry_err", 0, 1, Severity.FAIL, "a peer never posted receives and retries ran out"),
        ("symbol_error", 120, HOUR_SECONDS, Severity.FAIL, "bit errors"),
        ("link_error_recovery", 5, 60, Severity.WARN, "the link retrained"),
        ("port_rcv_errors", 10, 1, Severity.WARN, "broken packets arrived"),
        ("local_ack_timeout_err", 1, 1, Severity.WARN, "acknowledgements came too late: loss or congestion"),
        ("port_xmit_discards", 100, 1, Severity.WARN, "packets were discarded before sending: congestion"),
        ("roce_slow_restart", 10, 1, Severity.WARN, "RoCE flows started over"),
    )
)


def rising(before: RdmaFacts, after: RdmaFacts, seconds: float) -> Iterator[Finding]:
    """Findings about counters that rose too fast between two scans of one host, `seconds` apart."""
    if not seconds > 0:
        raise ValueError(f"seconds={seconds}: the second scan must be later than the first")
    earlier = {(d.name, p.port): p for d in before.devices for p in d.ports}
    for device in after.devices:
        for port in device.ports:
            past = earlier.get((device.name, port.port))
            if past is not None:
                yield from _port(f"{device.name}:{port.port}", past, port, seconds)


def _port(subject: str, before: RdmaPort, after: RdmaPort, seconds: float) -> Iterator[Finding]:
    for threshold in THRESHOLDS:
        start = (before.counters or {}).get(threshold.counter)
        end = (after.counters or {}).get(threshold.counter)
        # A counter that fell was reset in between: the rise is unknown.
        if start is None or end is None or end < start or not threshold.exceeded(end - start, seconds):
            continue
        yield Finding(
            code="rdma.counters.rising",
            severity=threshold.severity,
            subject=subject,
            message=f"{threshold.counter} rose by {end - start} in {seconds:.0f} s: {threshold.meaning}.",
            evidence=(f"{threshold.counter}: {start}, then {end}, {seconds:.0f} s later",),
            remedy="For link errors reseat or replace cable and transceiver; for congestion look at PFC and ECN.",
        )

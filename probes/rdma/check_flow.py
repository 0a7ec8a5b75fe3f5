"""Judges what keeps RoCE packets from being dropped: priority flow control and ECN.

Source: NVIDIA, "Recommended Network Configuration Examples for RoCE Deployment": a lossless fabric has PFC on one
priority (3 by custom); without it a lossy one lives by ECN and selective repeat, which is a choice and no fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from probes.api import Finding, Severity
from probes.rdma.probe import RdmaDevice, RdmaFacts, RdmaPort

EVIDENCE_MAX = 16


def check_flow(facts: RdmaFacts) -> Iterator[Finding]:
    """ACTIVE RoCE ports with and without PFC."""
    roce = [
        (device, port)
        for device in facts.devices
        for port in device.ports
        if port.state == "ACTIVE" and port.link_layer == "Ethernet" and device.kind == "hca"
    ]
    known = [(device, port) for device, port in roce if port.pfc_priorities is not None]
    if roce and not known:
        yield Finding(
            code="rdma.pfc.off",
            severity=Severity.UNKNOWN,
            subject="",
            message="Whether RoCE ports have priority flow control is unknown: no driver tells, or no netdev is here.",
            evidence=(f"DCB_CMD_IEEE_GET {', '.join(port.netdev or 'no netdev' for _, port in roce)}: no answer",),
            remedy="Look on the host itself: dcb pfc show dev NETDEV, or mlnx_qos -i NETDEV.",
        )
    yield from _mixed(known)
    if known and not any(port.pfc_priorities for _, port in known):
        yield _off([port for _, port in known])


def _mixed(known: list[tuple[RdmaDevice, RdmaPort]]) -> Iterator[Finding]:
    """Among ports of one board: another board may serve storage, on a fabric of its own."""
    boards: dict[tuple[str | None, str | None], list[RdmaPort]] = {}
    for device, port in known:
        boards.setdefault((device.model, device.board), []).append(port)
    for (model, _), ports in boards.items():
        if len({port.pfc_priorities for port in ports}) > 1:
            yield Finding(
                code="rdma.pfc.mixed",
                severity=Severity.WARN,
                subject="",
                message=(
                    f"RoCE ports of {model or 'one board'} have PFC on different priorities: congested flows are "
                    "dropped on some."
                ),
                evidence=_evidence(ports),
                remedy="Give every RoCE port the same PFC setting (mlnx_qos, dcb pfc), the one of the switches.",
            )


def _off(ports: list[RdmaPort]) -> Finding:
    unmarked = [port for port in ports if port.ecn is False]
    return Finding(
        code="rdma.pfc.off",
        severity=Severity.WARN if unmarked else Severity.INFO,
        subject="",
        message=(
            f"{len(unmarked)} RoCE port(s) have neither PFC nor ECN: nothing holds senders back before packets are "
            "dropped."
            if unmarked
            else "No priority of a RoCE port has PFC: right for a fabric that is lossy by design with ECN, wrong for "
            "one that is to be lossless."
        ),
        evidence=(*_evidence(ports), *(f"/sys/class/net/{port.netdev}/ecn/roce_np/enable: 0" for port in unmarked)),
        remedy="Turn on ECN for the RoCE priority, or PFC on NICs and switches alike." if unmarked else "",
    )


def _evidence(ports: Iterable[RdmaPort]) -> tuple[str, ...]:
    return tuple(
        f"DCB_CMD_IEEE_GET {port.netdev}: PFC on {', '.join(map(str, port.pfc_priorities or ())) or 'no priority'}"
        for port in list(ports)[:EVIDENCE_MAX]
    )

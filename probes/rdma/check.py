"""Judges RDMA devices: ports, GIDs, MTU, permissions, and whether memory can really be registered.

Sources: InfiniBand Architecture (port states); NCCL user guide, Troubleshooting ("RoCE", "InfiniBand"); NCCL
src/transport/net_ib (only ACTIVE ports are listed, silently); ibv_reg_mr(3).
"""

from __future__ import annotations

from collections.abc import Iterator

from probes.api import Finding, Severity, by_loss
from probes.rdma.check_flow import check_flow
from probes.rdma.check_port import SYSFS, check_gids, check_mtu, check_width, gbps, subject, where_of
from probes.rdma.probe import RdmaDevice, RdmaFacts, RdmaPort

DOWN_REMEDIES = {
    "INIT": "Start or repair the subnet manager: the port has a link and waits for its address.",
    "ARMED": "Look at the subnet manager: it has configured the port and not activated it.",
}
DOWN_REMEDY = "Check the cable, the transceiver and the switch port, and that the netdev is up."


def check(facts: RdmaFacts) -> Iterator[Finding]:
    """Port by port, device by device, then across devices."""
    yield from _none_active(facts)
    for device in facts.devices:
        for port in device.ports:
            yield from _down(facts, device, port)
            if device.kind != "efa" and port.state == "ACTIVE":
                yield from check_width(device, port)
                yield from check_gids(device, port)
                yield from check_mtu(device, port)
        yield from _permission(device)
    yield from _rates(facts)
    yield from _mixed(facts)
    yield from check_flow(facts)
    yield from _memlock(facts)
    if facts.netns_mode == "shared" and facts.source == "netlink":
        yield Finding(
            code="rdma.netns.shared",
            severity=Severity.INFO,
            subject="",
            message=(
                "RDMA devices are shared between network namespaces: this list may hold devices that are not this "
                "pod's."
            ),
            evidence=("NETLINK_RDMA system: netns shared",),
        )


def _ports(facts: RdmaFacts) -> list[tuple[RdmaDevice, RdmaPort]]:
    return [(device, port) for device in facts.devices for port in device.ports]


def _none_active(facts: RdmaFacts) -> Iterator[Finding]:
    states = [port.state for _, port in _ports(facts)]
    if states and None not in states and "ACTIVE" not in states:
        yield Finding(
            code="rdma.port.none_active",
            severity=Severity.FAIL,
            subject="",
            message=f"None of {len(states)} RDMA ports is ACTIVE: NCCL falls back to sockets without an error.",
            evidence=tuple(f"{where_of(d, p)}/state: {p.state}" for d, p in _ports(facts)[:16]),
            remedy=DOWN_REMEDY,
        )


def _down(facts: RdmaFacts, device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    if port.state is None:
        yield Finding(
            code="rdma.port.unknown",
            severity=Severity.UNKNOWN,
            subject=subject(device, port),
            message="The state of the port could not be read.",
            evidence=(f"{where_of(device, port)}/state: not readable",),
            remedy="Read it with ibstat or `rdma link` as root.",
        )
    elif port.state not in ("ACTIVE", "ACTIVE_DEFER"):
        sisters = sum(p.state == "ACTIVE" and d.model == device.model for d, p in _ports(facts))
        carries = sisters and device.kind in ("hca", "efa")  # software over an interface adds no wire
        yield Finding(
            code="rdma.port.down",
            # its share of the node's ports of that kind; of a kind that carries nothing here none is missed
            severity=by_loss(1.0 / (sisters + 1)) if carries else Severity.WARN,
            subject=subject(device, port),
            message=(
                f"The port is {port.state} ({port.physical_state or 'physical state unknown'}), "
                f"{sisters} {'port of the same model is' if sisters == 1 else 'ports of the same model are'} ACTIVE: "
                "NCCL leaves it out without a word."
            ),
            evidence=(
                f"{where_of(device, port)}/state: {port.state}",
                f"{where_of(device, port)}/phys_state: {port.physical_state}",
            ),
            remedy=DOWN_REMEDIES.get(port.state, DOWN_REMEDY),
        )


def _rates(facts: RdmaFacts) -> Iterator[Finding]:
    """A port slower than its sisters: same model, board and link layer."""
    groups: dict[tuple[str | None, ...], list[tuple[RdmaDevice, RdmaPort]]] = {}
    for device, port in _ports(facts):
        if port.state == "ACTIVE" and port.rate_bytes_per_second and device.kind in ("hca", "efa"):
            groups.setdefault((device.model, device.board, port.link_layer), []).append((device, port))
    for members in groups.values():
        best = max(port.rate_bytes_per_second or 0 for _, port in members)
        for device, port in members:
            if (port.rate_bytes_per_second or 0) < best:
                yield Finding(
                    code="rdma.port.rate",
                    severity=by_loss(1.0 - (port.rate_bytes_per_second or 0.0) / best),
                    subject=subject(device, port),
                    message=(
                        f"The port runs at {gbps(port.rate_bytes_per_second or 0)}, others of the same board at "
                        f"{gbps(best)}."
                    ),
                    evidence=(f"{where_of(device, port)}/rate: {port.rate_text}",),
                    remedy="Compare cable, transceiver and switch port with those of the faster ports.",
                )


def _permission(device: RdmaDevice) -> Iterator[Finding]:
    if device.uverbs is None:
        yield Finding(
            code="rdma.uverbs.missing",
            severity=Severity.UNKNOWN,
            subject=device.name,
            message=(
                "The device is listed, but this process has no node of it below /dev/infiniband: whether a job can "
                "use it is unknown."
            ),
            evidence=(f"/sys/class/infiniband_verbs/*/ibdev: {device.name}, no such node in /dev/infiniband",),
            remedy="Request the RDMA resource of the device plugin in the job's pod, or scan where the job runs.",
        )
    elif device.uverbs_usable is False:
        yield Finding(
            code="rdma.uverbs.permission",
            severity=Severity.FAIL,
            subject=device.name,
            message=f"This user may not open {device.uverbs}: NCCL would fall back to sockets.",
            evidence=(f"access({device.uverbs}, R_OK | W_OK): denied",),
            remedy=(
                f"Give the user read and write access to {device.uverbs} (mode 0666 by rdma-core's udev rules, or the "
                "device plugin)."
            ),
        )


def _mixed(facts: RdmaFacts) -> Iterator[Finding]:
    active = [(d, p) for d, p in _ports(facts) if p.state == "ACTIVE" and p.link_layer]
    layers = sorted({p.link_layer for _, p in active if p.link_layer})
    if len(layers) > 1:
        yield Finding(
            code="rdma.port.mixed_link_layer",
            severity=Severity.WARN,
            subject="",
            message=f"ACTIVE ports are of {' and '.join(layers)}: NCCL may take both, storage ports included.",
            evidence=tuple(f"{where_of(d, p)}/link_layer: {p.link_layer}" for d, p in active[:16]),
            remedy="Name the ports for training in NCCL_IB_HCA.",
        )
    mtus = {p.netdev_mtu_bytes for _, p in active if p.link_layer == "Ethernet" and p.netdev_mtu_bytes}
    if len(mtus) > 1:
        yield Finding(
            code="rdma.mtu.mismatch",
            severity=Severity.WARN,
            subject="",
            message="The netdevs of the RoCE ports differ in MTU: " + ", ".join(str(m) for m in sorted(mtus)) + ".",
            evidence=tuple(
                f"/sys/class/net/{p.netdev}/mtu: {p.netdev_mtu_bytes}" for _, p in active[:16] if p.netdev_mtu_bytes
            ),
            remedy="Set the same MTU on every RoCE netdev of the training network.",
        )
    versions: dict[str, set[str]] = {}
    for device in facts.devices:
        if device.board and device.firmware:
            versions.setdefault(device.board, set()).add(device.firmware)
    for board, found in versions.items():
        if len(found) > 1:
            yield Finding(
                code="rdma.firmware.mixed",
                severity=Severity.INFO,
                subject=board,
                message=f"Boards {board} run different firmware: {', '.join(sorted(found))}.",
                evidence=tuple(f"{SYSFS}/{d.name}/fw_ver: {d.firmware}" for d in facts.devices if d.board == board),
            )


def _memlock(facts: RdmaFacts) -> Iterator[Finding]:
    proof = facts.memlock_proof
    if proof is None or proof.failed_bytes is None:
        return
    no_memory = "errno 12" in (proof.error or "")  # ENOMEM is how the kernel refuses pages beyond RLIMIT_MEMLOCK
    yield Finding(
        code="rdma.memlock.registration",
        severity=Severity.FAIL if no_memory else Severity.UNKNOWN,
        subject=proof.device,
        message=(
            f"Registering {proof.failed_bytes} bytes failed, {proof.registered_bytes} bytes worked: "
            + (
                "the memlock limit binds, and NCCL's buffers of 4 MiB and more do not fit."
                if no_memory
                else f"{proof.error}."
            )
        ),
        evidence=(f"ibv_reg_mr({proof.device}, {proof.failed_bytes}): {proof.error}",),
        remedy=(
            "Set memlock to unlimited for the job (container engine's default_ulimits or --ulimit memlock=-1:-1, "
            "Slurm, PAM)."
        ),
    )

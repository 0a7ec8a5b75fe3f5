"""Judges RDMA devices: ports, GIDs, MTU, flow control, permissions, and whether memory can really be registered.

Sources: InfiniBand Architecture (port states, link widths); NCCL user guide, Troubleshooting ("RoCE", "InfiniBand"),
NCCL_IB_GID_INDEX and NCCL_IB_ADDR_FAMILY; NCCL src/transport/net_ib (only ACTIVE ports are listed, silently);
ibv_reg_mr(3); Linux include/rdma/ib_addr.h (the MTU of RoCE); NVIDIA, "Recommended Network Configuration Examples for
RoCE Deployment": a lossless fabric has PFC on one priority (3 by custom), a lossy one lives by ECN and selective
repeat, which is a choice and no fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hardware.nics import fastest
from probes.api import Finding, Severity, by_loss
from probes.rdma.facts import ROCE_V2, RdmaDevice, RdmaFacts, RdmaPort, ipv4_of, nccl_gid_index, rocev2_gid_index

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
        severity = by_loss(1.0 / (sisters + 1)) if carries else Severity.WARN
        if device.is_vf and port.state == "DOWN" and _is_unused(facts, device):
            severity = Severity.INFO  # a virtual function in stock, beside the physical one that is up
        yield Finding(
            code="rdma.port.down",
            # its share of the node's ports of that kind; of a kind that carries nothing here none is missed
            severity=severity,
            subject=subject(device, port),
            message=(
                f"The port is {port.state} ({port.physical_state or 'physical state unknown'}), "
                f"{sisters} {'port of the same model is' if sisters == 1 else 'ports of the same model are'} ACTIVE: "
                "NCCL ignores the port silently."
            ),
            evidence=(
                f"{where_of(device, port)}/state: {port.state}",
                f"{where_of(device, port)}/phys_state: {port.physical_state}",
            ),
            remedy=DOWN_REMEDIES.get(port.state, DOWN_REMEDY),
        )


def _is_unused(facts: RdmaFacts, device: RdmaDevice) -> bool:
    """Whether a virtual function is in stock: no port of it is up, has an address, and a whole device's port is up."""
    idle = all(port.state == "DOWN" and not any(map(ipv4_of, port.gids)) for port in device.ports)
    return idle and any(port.state == "ACTIVE" and not other.is_vf for other, port in _ports(facts))


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


SYSFS = "/sys/class/infiniband"
ROCE_FULL_MTU_BYTES = 4096
ROCE_WIRE_BYTES = 8 + 14 + 20 + 8 + 12 + 4 + 4 + 12  # IEEE 802.3; InfiniBand Architecture, annex A17 (RoCE v2)
ROCE_FULL_NETDEV_MTU_BYTES = 4200  # 4096 and RoCE's headers, as NIC vendors round it; 9000 serves as well


def subject(device: RdmaDevice, port: RdmaPort) -> str:
    """ "mlx5_2:1"."""
    return f"{device.name}:{port.port}"


def where_of(device: RdmaDevice, port: RdmaPort) -> str:
    """The port's folder in sysfs."""
    return f"{SYSFS}/{device.name}/ports/{port.port}"


def check_width(device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    """Lanes and family of a port that is ACTIVE."""
    # InfiniBand ports of adapters are four lanes wide; fewer is a link that came up degraded. On Ethernet the lane
    # count in the rate's text is only how the kernel expresses a speed.
    if port.link_layer == "InfiniBand" and port.rate_text and any(w in port.rate_text for w in ("(1X ", "(2X ")):
        yield Finding(
            code="rdma.port.rate",
            severity=Severity.FAIL,  # half of the lanes or fewer
            subject=subject(device, port),
            message=f"The link came up with fewer than four lanes: {port.rate_text}.",
            evidence=(f"{where_of(device, port)}/rate: {port.rate_text}",),
            remedy="Reseat or replace the cable or transceiver, and read the link's counters on both sides.",
        )
    yield from _below_max(device, port)
    best = None if port.rate_max_bytes_per_second else fastest(device.model)
    if best and port.rate_bytes_per_second and port.rate_bytes_per_second < best:
        yield Finding(
            code="rdma.port.family_rate",
            severity=Severity.INFO,
            subject=subject(device, port),
            message=(
                f"{gbps(port.rate_bytes_per_second)}; the fastest {device.model} does {gbps(best)}: a slower card "
                "of the "
                "family, a slower switch port, or a link that trained down."
            ),
            evidence=(
                f"{where_of(device, port)}/rate: {port.rate_text}",
                f"{SYSFS}/{device.name}/board_id: {device.board}",
            ),
        )


def _below_max(device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    """A port against its own maximum, which its driver knows: a slower switch port is a choice, but one to know of."""
    rate, most = port.rate_bytes_per_second, port.rate_max_bytes_per_second
    virtual = device.is_vf or (device.model or "").endswith(" VF")  # its rate is what its owner gives it
    if most is None and device.kind == "hca" and not virtual and fastest(device.model) is None:
        yield Finding(
            code="rdma.port.below_max",
            severity=Severity.UNKNOWN,
            subject=subject(device, port),
            message="Whether the port could be faster is unknown: neither its driver nor its model tells.",
            evidence=(f"ethtool {port.netdev or '(no netdev here)'}: no link modes", f"model {device.model}"),
            remedy="Compare the rate with the card's data sheet.",
        )
    if rate and most and rate < most:
        yield Finding(
            code="rdma.port.below_max",
            severity=Severity.WARN,
            subject=subject(device, port),
            message=f"The port runs at {gbps(rate)}, its driver supports up to {gbps(most)}: {rate / most:.0%} of it.",
            evidence=(
                f"{where_of(device, port)}/rate: {port.rate_text}",
                f"ethtool {port.netdev}, supported link modes: up to {most * 8 / 1e6:.0f} Mb/s",
            ),
            remedy="Compare cable, transceiver and switch port with what the card can do; look for a forced speed.",
        )


def gbps(bytes_per_second: float) -> str:
    """A rate in the unit that NICs are sold by."""
    return f"{bytes_per_second * 8 / 1e9:g} Gb/s"


def check_gids(device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    """Whether RoCE v2 is there, and whether NCCL would take it."""
    if port.link_layer != "Ethernet" or not port.gids_known:
        return
    where = f"{where_of(device, port)}/gid_attrs/types"
    listed = tuple(f"{where}/{gid.index}: {gid.type or 'unknown'} ({gid.gid})" for gid in port.gids[:8])
    best, choice = rocev2_gid_index(port), nccl_gid_index(port)
    if best is None:
        unknown = bool(port.gids) and all(gid.type is None for gid in port.gids)
        yield Finding(
            code="rdma.gid.missing_rocev2",
            severity=Severity.UNKNOWN if unknown else Severity.FAIL,
            subject=subject(device, port),
            message=(
                "The types of the GIDs could not be read."
                if unknown
                else "No GID of this RoCE port is RoCE v2: its traffic cannot be routed, and connections fail or stay "
                "in the subnet."
            ),
            evidence=listed or (f"{where}: no used entry",),
            remedy=(
                "Bring the port's netdev up with an IP address, and set the device's default RoCE mode to v2 "
                "(cma_roce_mode)."
            ),
        )
        return
    chosen = next((gid for gid in port.gids if gid.index == choice), None)
    if chosen is None or chosen.type != ROCE_V2:
        yield Finding(
            code="rdma.gid.choice",
            # an empty entry connects to nothing; RoCE v1 works within its subnet
            severity=Severity.FAIL if chosen is None else Severity.WARN,
            subject=subject(device, port),
            message=(
                f"NCCL takes GID index {choice}, which is {chosen.type if chosen else 'empty'}; {_where(port, best)}."
            ),
            evidence=listed,
            remedy=_addressed(port, best),
        )
    elif not any(ipv4_of(gid) for gid in port.gids):
        yield Finding(
            code="rdma.gid.no_ipv4",
            severity=Severity.WARN,
            subject=subject(device, port),
            message=(
                "The port has RoCE v2 GIDs of IPv6 only: NCCL looks for IPv4 unless NCCL_IB_ADDR_FAMILY is AF_INET6."
                if _routed_v6(port)
                else f"NCCL takes GID index {choice}; {_where(port, best)}."
            ),
            evidence=listed,
            remedy=_addressed(port, best),
        )


def _routed_v6(port: RdmaPort) -> bool:
    """Whether a RoCE v2 GID of IPv6 is more than link-local."""
    return any(gid.type == ROCE_V2 and not ipv4_of(gid) and not gid.gid.lower().startswith("fe80") for gid in port.gids)


def _where(port: RdmaPort, best: int) -> str:
    if any(ipv4_of(gid) for gid in port.gids) or _routed_v6(port):
        return f"RoCE v2 is at index {best}"
    return "its RoCE v2 GIDs are link-local only, by which no other subnet is reached and which NCCL does not choose"


def _addressed(port: RdmaPort, best: int) -> str:
    """What helps: an address; where IPv6 is there the family, since an index breaks where tables differ."""
    if any(ipv4_of(gid) for gid in port.gids):
        return f"Set NCCL_IB_GID_INDEX={best}, or NCCL_IB_ROCE_VERSION_NUM=2 with NCCL 2.21 and later."
    if _routed_v6(port):
        return "Give the port's netdev an IPv4 address, or set NCCL_IB_ADDR_FAMILY=AF_INET6 on every node."
    return "Give the port's netdev an IP address: no variable makes link-local GIDs reach another node."


def _payload(mtu_bytes: int) -> float:
    """The share of the wire that data has: Ethernet (preamble, header, FCS, gap), IPv4, UDP, BTH and ICRC come on top.

    2048 of 4096 costs 2 %, 1024 6 %, 512 12 %.
    """
    return mtu_bytes / (mtu_bytes + ROCE_WIRE_BYTES)


def check_mtu(device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    """Whether packets could be larger."""
    if port.link_layer == "Ethernet" and port.active_mtu_bytes and port.active_mtu_bytes < ROCE_FULL_MTU_BYTES:
        yield Finding(
            code="rdma.mtu.small",
            severity=by_loss(1.0 - _payload(port.active_mtu_bytes) / _payload(ROCE_FULL_MTU_BYTES)),
            subject=subject(device, port),
            message=(
                f"RoCE packets carry {port.active_mtu_bytes} bytes because the netdev's MTU is "
                f"{port.netdev_mtu_bytes}; "
                f"{ROCE_FULL_MTU_BYTES} is possible."
            ),
            evidence=(f"/sys/class/net/{port.netdev}/mtu: {port.netdev_mtu_bytes}",),
            remedy=(
                f"Set the MTU of {port.netdev} to {ROCE_FULL_NETDEV_MTU_BYTES} or 9000, on every host and switch port "
                "of this network."
            ),
        )


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
    yield from _mixed_flow_control(known)
    if known and not any(port.pfc_priorities for _, port in known):
        yield _no_flow_control([port for _, port in known])


def _mixed_flow_control(known: list[tuple[RdmaDevice, RdmaPort]]) -> Iterator[Finding]:
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


def _no_flow_control(ports: list[RdmaPort]) -> Finding:
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

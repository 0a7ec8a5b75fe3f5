"""Judges one ACTIVE port: its lanes, its GIDs, the size of its packets.

Sources: InfiniBand Architecture (link widths); NCCL user guide, NCCL_IB_GID_INDEX and NCCL_IB_ADDR_FAMILY; Linux
include/rdma/ib_addr.h (the MTU of RoCE).
"""

from __future__ import annotations

from collections.abc import Iterator

from hardware.nics import fastest
from probes.api import Finding, Severity, by_loss
from probes.rdma.gids import ROCE_V2, ipv4_of, nccl_gid_index, rocev2_gid_index
from probes.rdma.probe import RdmaDevice, RdmaPort

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

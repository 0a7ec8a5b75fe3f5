"""Checks of RDMA devices: ports, GIDs, MTU, flow control, permissions, and whether memory can be registered.

Ports are compared with ports of the same role: rails of the GPUs, or ports for storage and management
(`RdmaDevice.role`). Training does not wait for ports of the second kind, so their findings are one level less severe.

Sources: InfiniBand Architecture (port states, link widths); NCCL user guide, Troubleshooting ("RoCE", "InfiniBand"),
NCCL_IB_GID_INDEX and NCCL_IB_ADDR_FAMILY; NCCL src/transport/net_ib (only ACTIVE ports are used, without a message; a
connection uses the smaller MTU of its ends; GID index selection since 2.21); ibv_reg_mr(3); Linux
include/rdma/ib_addr.h (the MTU of RoCE); NVIDIA, "Recommended Network Configuration Examples for RoCE Deployment": a
lossless fabric enables PFC on one priority (usually 3); a lossy fabric relies on ECN and selective repeat, which is not
a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from contracts.finding import Finding, Status, by_loss
from contracts.tables import read_table
from hardware.nics import fastest
from hardware.units import gigabits, some
from probes.api import Sample, finding, probe_of, sample_facts, sample_known
from probes.rdma.facts import OTHER, RAIL, ROCE_V2, SOURCE, RdmaDevice, RdmaFacts, RdmaPort, find_ipv4, is_link_local

TEXTS, WORDS = read_table(__file__, "findings.toml"), read_table(__file__, "words.toml")
_WAITING = ("INIT", "ARMED")  # for the subnet manager
SYSFS = "/sys/class/infiniband"
MAX_EVIDENCE = 16
ROCE_FULL_MTU_BYTES = 4096
ROCE_WIRE_BYTES = 8 + 14 + 20 + 8 + 12 + 4 + 4 + 12  # IEEE 802.3; InfiniBand Architecture, annex A17 (RoCE v2)

Ports = list[tuple[RdmaDevice, RdmaPort]]


def find_nccl_gid_index(port: RdmaPort) -> int | None:
    """Return the GID index that NCCL 2.21 and newer selects by default: IPv4 first, RoCE v2 before v1, else entry 0.

    None for InfiniBand, where the index has another meaning, and if the table is unknown.
    """
    if port.link_layer != "Ethernet" or not port.gids_known or not port.gids:
        return None
    ipv4 = [gid for gid in port.gids if find_ipv4(gid)]
    best = [gid for gid in ipv4 if gid.type == ROCE_V2] or ipv4
    return best[0].index if best else 0


def find_rocev2_gid_index(port: RdmaPort) -> int | None:
    """Return the first routable RoCE v2 entry: with IPv4, else global IPv6; else a link-local one."""
    routed = [gid for gid in port.gids if gid.type == ROCE_V2]
    routed.sort(key=lambda gid: (find_ipv4(gid) is None, is_link_local(gid), gid.index))
    return routed[0].index if routed else None


def check(facts: RdmaFacts) -> Iterator[Finding]:
    """Check every port and device that is in reach, then compare the devices of each role."""
    yield from (finding(TEXTS, "rdma.uverbs.missing", subject=each.name) for each in facts.devices if not each.uverbs)
    facts = replace(facts, devices=facts.in_reach)
    yield from _check_active(facts)
    rails = tuple(device for device in facts.devices if device.role != OTHER)
    others = tuple(device for device in facts.devices if device.role == OTHER)
    yield from _check_role(rails, facts)
    yield from map(_lower_severity, _check_role(others, facts))
    yield from _compare_devices(rails)
    yield from check_flow(replace(facts, devices=rails))
    yield from _compare_firmware(facts)
    yield from _check_memlock(facts)


def _check_role(devices: tuple[RdmaDevice, ...], facts: RdmaFacts) -> Iterator[Finding]:
    """Compare devices of one role: all carry GPU traffic, or all serve something else."""
    groups = list(_group_alike(devices))
    odd = [each for members in groups for each in _compare_mtus(members)]
    for device in devices:
        for port in device.ports:
            yield from _check_down(facts, device, port)
            if device.kind != "efa" and port.state == "ACTIVE":
                yield from check_rate(device, port)
                yield from check_gids(device, port)
                if all(other.subject != subject(device, port) for other in odd):
                    yield from check_mtu(device, port)
                yield from _check_bond(device, port)
        if device.uverbs_usable is False:
            yield finding(TEXTS, "rdma.uverbs.permission", subject=device.name, node=device.uverbs)
    for members in groups:
        yield from _compare_rates(members)
    yield from odd


def _lower_severity(original: Finding) -> Finding:
    status = {Status.FAIL: Status.WARN, Status.WARN: Status.INFO}.get(original.status, original.status)
    message = f"{original.message} No traffic between GPUs goes over this port: every GPU has a nearer or faster one."
    return original if status is original.status else replace(original, status=status, message=message)


def _list_ports(devices: Iterable[RdmaDevice]) -> Ports:
    return [(device, port) for device in devices for port in device.ports]


def _group_alike(devices: Iterable[RdmaDevice]) -> Iterable[Ports]:
    """Group the ACTIVE ports of adapters by model, board and link layer."""
    groups: dict[tuple[str | None, ...], Ports] = {}
    for device, port in _list_ports(devices):
        if port.state == "ACTIVE" and device.kind in ("hca", "efa"):
            groups.setdefault((device.model, device.board, port.link_layer), []).append((device, port))
    return groups.values()


def _report_port(
    key: str, device: RdmaDevice, port: RdmaPort, status: Status | None = None, evidence: tuple[str, ...] = (),
    **values: object,
) -> Finding:  # fmt: skip
    """Create a finding about a port; its text may refer to `device`, `port` and `where`, the port's path in sysfs."""
    name, place = subject(device, port), locate_port(device, port)
    return finding(TEXTS, key, status, name, evidence, device=device, port=port, where=place, **values)


def _check_active(facts: RdmaFacts) -> Iterator[Finding]:
    states = [port.state for _, port in _list_ports(facts.devices)]
    if states and None not in states and "ACTIVE" not in states:
        evidence = tuple(f"{locate_port(d, p)}/state: {p.state}" for d, p in _list_ports(facts.devices)[:MAX_EVIDENCE])
        waiting = " waiting" * (set(states) <= set(_WAITING))
        yield finding(TEXTS, "rdma.port.none_active" + waiting, None, "", evidence, count=len(states))


def _check_down(facts: RdmaFacts, device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    if port.state is None:
        yield _report_port("rdma.port.unknown", device, port)
    elif port.state != "ACTIVE":
        state = f"{port.state} ({port.physical_state or 'physical state unknown'})"
        if not _is_needed(facts, device, port):
            yield _report_port("rdma.port.down unused", device, port, state=state)
            return
        kin = [(d, p) for d, p in _list_ports(facts.devices) if d.model == device.model]
        sisters = sum(p.state == "ACTIVE" for _, p in kin)
        carries = (sisters or device.role == RAIL) and device.kind in ("hca", "efa")  # software RDMA adds no link
        # a port's share of the ports of its model; no loss if ports of this model carry no GPU traffic
        status = by_loss(1.0 / (sisters + 1)) if carries else Status.WARN
        counted = "1 port of the same model is" if sisters == 1 else f"{sisters} ports of the same model are"
        layers = {p.link_layer for _, p in kin if p.state == "ACTIVE" and p.link_layer}
        other = port.state == "DOWN" and bool(layers and port.link_layer) and port.link_layer not in layers
        case = " efa" if device.kind == "efa" else f" {port.state}" * (port.state in _WAITING) + " layer" * other
        key = "rdma.port.down" + case
        others, listed = f", while {counted} ACTIVE" * bool(sisters), " and ".join(sorted(layers))
        yield _report_port(key, device, port, status, state=state, others=others, layers=listed)


def _is_needed(facts: RdmaFacts, device: RdmaDevice, port: RdmaPort) -> bool:
    """Whether an inactive port is needed: it has an address or a bond, or other cards of its model use this port.

    If the card's other port is active, it may have a single cable by design; then cards of its model on this node are
    cabled alike.
    """
    elsewhere = {gid.gid for _, other in _list_ports(facts.devices) if other.state == "ACTIVE" for gid in other.gids}
    own_gids = {gid.gid for gid in port.gids if not is_link_local(gid)} - elsewhere
    if (port.link_layer == "Ethernet" and own_gids) or device.bond or port.state in _WAITING:
        return True
    if device.role == OTHER:
        return False
    card, place = _get_card(device), (_get_function(device), port.port)
    kin = [(d, p) for d, p in _list_ports(facts.devices) if (d.model, d.board) == (device.model, device.board)]
    if not any(_get_card(d) == card and p.state == "ACTIVE" for d, p in kin):
        return True
    twins = [p.state == "ACTIVE" for d, p in kin if _get_card(d) != card and (_get_function(d), p.port) == place]
    return 2 * sum(twins) > len(twins)


def _get_card(device: RdmaDevice) -> str:
    return device.bus_id.rpartition(".")[0] if device.bus_id else device.name


def _get_function(device: RdmaDevice) -> str:
    return device.bus_id.rpartition(".")[2] if device.bus_id else ""


def _check_bond(device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    """Report a bond (RoCE LAG) with members that are down: the port stays ACTIVE at the rate of one member."""
    if down := [name for name, state in device.bond_members if state == "down"]:
        names, count = ", ".join(down), len(device.bond_members)
        status, seen = by_loss(len(down) / count), tuple(f"/sys/class/net/{name}/operstate: down" for name in down)
        yield _report_port("rdma.port.rate bond", device, port, status, seen, names=names, down=len(down), count=count)


def _compare_rates(members: Ports) -> Iterator[Finding]:
    """Report a port with missing lanes, or one that is slower than ports of the same model."""
    best = max(port.rate_bytes_per_second or 0.0 for _, port in members)
    for device, port in members:
        rate = port.rate_bytes_per_second
        # InfiniBand ports of adapters have four lanes; fewer lanes mean a degraded link. On Ethernet, the lane count in
        # the rate's text only results from how the kernel formats a speed.
        if port.link_layer == "InfiniBand" and any(lanes in (port.rate_text or "") for lanes in ("(1X ", "(2X ")):
            yield _report_port("rdma.port.rate lanes", device, port)
        elif rate and rate < best:
            yield _report_port(
                "rdma.port.rate", device, port, by_loss(1.0 - rate / best), rate=gigabits(rate), best=gigabits(best)
            )


def _compare_mtus(members: Ports) -> Iterator[Finding]:
    """Report a port whose MTU differs from most ports of the same model."""
    ports = [(d, p) for d, p in members if p.link_layer == "Ethernet" and p.netdev_mtu_bytes]
    usual, count = next(iter(Counter(port.netdev_mtu_bytes for _, port in ports).most_common(1)), (None, 0))
    for device, port in ports:
        if port.netdev_mtu_bytes != usual and 2 * count > len(ports):
            yield _report_port("rdma.mtu.mismatch", device, port, count=count, usual=usual)


def _compare_devices(devices: tuple[RdmaDevice, ...]) -> Iterator[Finding]:
    """Report differences between ports that carry GPU traffic."""
    active = [(d, p) for d, p in _list_ports(devices) if p.state == "ACTIVE" and p.link_layer]
    roce, ib = ([subject(d, p) for d, p in active if p.link_layer == layer] for layer in ("Ethernet", "InfiniBand"))
    if roce and ib:
        evidence = tuple(f"{locate_port(d, p)}/link_layer: {p.link_layer}" for d, p in active[:MAX_EVIDENCE])
        yield finding(TEXTS, "rdma.port.mixed_link_layer", None, "", evidence, roce=some(roce), ib=some(ib))
    groups = [
        [port for _, port in members if port.link_layer == "Ethernet" and port.netdev_mtu_bytes]
        for members in _group_alike(devices)
    ]
    common = [Counter(port.netdev_mtu_bytes for port in ports).most_common(1)[0] for ports in groups if ports]
    split = any(2 * count <= len(ports) for (_, count), ports in zip(common, filter(None, groups), strict=True))
    if split or len({mtu for mtu, _ in common}) > 1:
        ports = [port for group in groups for port in group]
        mtus = sorted({port.netdev_mtu_bytes for port in ports if port.netdev_mtu_bytes})
        evidence = tuple(f"/sys/class/net/{port.netdev}/mtu: {port.netdev_mtu_bytes}" for port in ports[:MAX_EVIDENCE])
        listed = ", ".join(map(str, mtus))
        yield finding(TEXTS, "rdma.mtu.mismatch mixed", None, "", evidence, mtus=listed)


def _compare_firmware(facts: RdmaFacts) -> Iterator[Finding]:
    versions: dict[str, set[str]] = {}
    for device in facts.devices:
        if device.board and device.firmware:
            versions.setdefault(device.board, set()).add(device.firmware)
    for board, releases in versions.items():
        if len(releases) > 1:
            evidence = tuple(f"{SYSFS}/{d.name}/fw_ver: {d.firmware}" for d in facts.devices if d.board == board)
            listed = ", ".join(sorted(releases))
            yield finding(TEXTS, "rdma.firmware.mixed", None, board, evidence, board=board, versions=listed)


def _check_memlock(facts: RdmaFacts) -> Iterator[Finding]:
    proof = facts.memlock_proof
    if proof is None or proof.failed_bytes is None:
        return
    no_memory = "errno 12" in (proof.error or "")  # ENOMEM: the kernel refused to lock more than RLIMIT_MEMLOCK
    reason = "the memlock limit binds, and NCCL's buffers of 4 MiB and more do not fit" if no_memory else proof.error
    status = Status.FAIL if no_memory else Status.UNKNOWN
    yield finding(TEXTS, "rdma.memlock.registration", status, proof.device, proof=proof, why=reason)


def subject(device: RdmaDevice, port: RdmaPort) -> str:
    """Return "mlx5_2:1"."""
    return f"{device.name}:{port.port}"


def locate_port(device: RdmaDevice, port: RdmaPort) -> str:
    """Return the port's path in sysfs."""
    return f"{SYSFS}/{device.name}/ports/{port.port}"


def check_rate(device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    """Compare an ACTIVE port's rate with its driver's maximum, else with the fastest card of the family."""
    rate, most = port.rate_bytes_per_second, port.rate_max_bytes_per_second
    virtual = device.is_vf or (device.model or "").endswith(" VF")  # the owner sets its rate
    if most is None and device.kind == "hca" and not virtual and fastest(device.model) is None:
        yield _report_port("rdma.port.below_max unknown", device, port, netdev=port.netdev or "(no netdev here)")
    if rate and most and rate < most:
        values = {"rate": gigabits(rate), "most": gigabits(most), "megabits": most * 8 / 1e6, "share": rate / most}
        yield _report_port("rdma.port.below_max", device, port, None, (), **values)
    best = None if most else fastest(device.model)
    if best and rate and rate < best:
        yield _report_port("rdma.port.family_rate", device, port, rate=gigabits(rate), best=gigabits(best))


def check_gids(device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    """Check whether the port has RoCE v2, and whether NCCL would select it."""
    if port.link_layer != "Ethernet" or not port.gids_known:
        return
    folder = f"{locate_port(device, port)}/gid_attrs/types"
    listed = tuple(f"{folder}/{gid.index}: {gid.type or 'unknown'} ({gid.gid})" for gid in port.gids[:8])
    best, choice = find_rocev2_gid_index(port), find_nccl_gid_index(port)
    if best is None:
        unknown = bool(port.gids) and all(gid.type is None for gid in port.gids)
        status = Status.UNKNOWN if unknown else Status.FAIL
        key = "rdma.gid.missing_rocev2" + " unknown" * unknown
        yield _report_port(key, device, port, status, listed or (f"{folder}: no used entry",))
        return
    selected = next((gid for gid in port.gids if gid.index == choice), None)
    v4 = any(find_ipv4(gid) for gid in port.gids)
    v6 = any(gid.type == ROCE_V2 and not find_ipv4(gid) and not is_link_local(gid) for gid in port.gids)
    reach = "ipv4" if v4 else "ipv6" if v6 else "local"
    remedy = WORDS["gid_remedy"][reach].format(best=best)
    place = WORDS["gid_place"][reach].format(best=best)
    values = {"choice": choice, "place": place, "remedy": remedy}
    if selected is None or selected.type != ROCE_V2:
        # an empty entry cannot connect; RoCE v1 works within one subnet
        status, kind = (Status.WARN, selected.type) if selected else (Status.FAIL, "empty")
        yield _report_port("rdma.gid.choice", device, port, status, listed, kind=kind, **values)
    elif not v4:
        yield _report_port("rdma.gid.no_ipv4" + " routed" * v6, device, port, None, listed, **values)


def _compute_payload_share(mtu_bytes: int) -> float:
    """Return the payload share of the wire rate: Ethernet (preamble, header, FCS, gap), IPv4, UDP, BTH, ICRC add up.

    Compared with an MTU of 4096, 2048 costs 2 %, 1024 6 %, 512 12 %.
    """
    return mtu_bytes / (mtu_bytes + ROCE_WIRE_BYTES)


def check_mtu(device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    """Report a port whose MTU could be larger."""
    active = port.active_mtu_bytes
    if port.link_layer == "Ethernet" and active and active < ROCE_FULL_MTU_BYTES:
        status = by_loss(1.0 - _compute_payload_share(active) / _compute_payload_share(ROCE_FULL_MTU_BYTES))
        yield _report_port("rdma.mtu.small", device, port, status)


def check_flow(facts: RdmaFacts) -> Iterator[Finding]:
    """Compare PFC settings of ACTIVE RoCE ports."""
    roce = [
        (device, port)
        for device, port in _list_ports(facts.devices)
        if port.state == "ACTIVE" and port.link_layer == "Ethernet" and device.kind == "hca"
    ]
    readable = [(device, port) for device, port in roce if port.pfc_priorities is not None]
    if roce and not readable:
        names = ", ".join(port.netdev or "no netdev" for _, port in roce)
        yield finding(TEXTS, "rdma.pfc.off unknown", names=names)
    for members in _group_alike(facts.devices):  # ports of another board may serve storage, on another fabric
        ports = [port for device, port in members if (device, port) in readable]
        often = Counter(port.pfc_priorities for port in ports).most_common()
        if len(often) > 1:
            (usual, largest), (_, next_most), *_ = often
            ports.sort(key=lambda port: port.pfc_priorities == usual)
            odd = [port.netdev or "a port" for port in ports if port.pfc_priorities != usual and largest > next_most]
            few = f": {some(odd, limit=4)} unlike the others" if odd else ""
            evidence, model = _list_evidence(ports), members[0][0].model or "one board"
            yield finding(TEXTS, "rdma.pfc.mixed", None, "", evidence, model=model, few=few, total=len(ports))
    if readable and not any(port.pfc_priorities for _, port in readable):
        yield _report_no_flow_control([port for _, port in readable])


def _report_no_flow_control(ports: list[RdmaPort]) -> Finding:
    unmarked = [port for port in ports if port.ecn is False]
    if not unmarked:
        return finding(TEXTS, "rdma.pfc.off", None, "", _list_evidence(ports))
    evidence = (*_list_evidence(ports), *(f"/sys/class/net/{port.netdev}/ecn/roce_np/enable: 0" for port in unmarked))
    return finding(TEXTS, "rdma.pfc.off unmarked", None, "", evidence, count=len(unmarked))


def _list_evidence(ports: Iterable[RdmaPort]) -> tuple[str, ...]:
    return tuple(
        f"DCB_CMD_IEEE_GET {port.netdev}: PFC on {', '.join(map(str, port.pfc_priorities or ())) or 'no priority'}"
        for port in list(ports)[:MAX_EVIDENCE]
    )


def samples(facts: RdmaFacts) -> Iterator[Sample]:
    """Export what node_exporter's infiniband collector lacks, with its labels: GIDs, MTU, netdev, NUMA node, access."""
    for device in facts.devices:
        yield from sample_facts(__file__, device, (device.name,))
        for port in device.ports:
            labels = (device.name, str(port.port))
            about = (port.link_layer or "", port.netdev or "", device.kind)
            yield Sample(metric="rdma_port_info", value=1, labels=(*labels, *about))
            by_nccl, by_type = find_nccl_gid_index(port), find_rocev2_gid_index(port)
            indices = (("rdma_port_nccl_gid_index", by_nccl), ("rdma_port_rocev2_gid_index", by_type))
            yield from sample_known(indices, labels)
            yield from sample_facts(__file__, port, labels)
    if facts.memlock_proof:
        proof = facts.memlock_proof
        yield Sample(metric="rdma_registered_bytes", value=float(proof.registered_bytes), labels=(proof.device,))


PROBE = probe_of(__file__, SOURCE, check, samples=samples)

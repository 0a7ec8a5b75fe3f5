"""The effect of findings on a forecast: how a node with a finding slows the links and the compute of a job.

The forecast is for the nodes in their current state. faults.toml has one rule per finding code that affects data
transfers or the compute rate of the slowest rank. Some faults are invisible to the scan's graph (no GPUDirect, locked
memory, low clock), and their rules slow the nodes. The cost of these faults, and of RDMA that is off, is the difference
to a forecast of the same nodes without them. The graph already shows other faults (a dead HCA, a link with fewer
lanes), and their rules only add a note. With the codes in `ENDS` a job cannot run. The cost of any other failure is
unknown, and the advice says so. docs/decisions/0020 gives the cost of each code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from contracts.finding import Finding, Status
from contracts.tables import read_table
from hardware.gpus import compute_clock_share
from hardware.nics import nics
from hardware.units import GIGA
from planner.forecast.compute import Rates
from planner.forecast.links import NETWORK_SHARE, TCP_CEILING_BYTES_PER_SECOND, Links, Speed, unknown_network
from probes.api import Snapshot
from probes.gpu.facts import Gpu, GpuFacts
from probes.interfaces.facts import InterfacesFacts
from probes.pci.facts import PciFacts
from topology.cluster import join
from topology.graph import ClusterTopology

Findings = Mapping[str, Sequence[Finding]]  # by host name

# Bus bandwidth of two InfiniBand nodes without and with nvidia_peermem: 33 and 93 GB/s (NVIDIA/nccl issue 1412).
THROUGH_HOST_SHARE = 33 / 93
# nvml.h: HwSlowdown, HwThermalSlowdown and HwPowerBrakeSlowdown reduce the core clocks by a factor of 2 or more.
SLOWDOWN_SHARE = 0.5


@dataclass(slots=True, kw_only=True)
class ClusterState:
    """The current state of a cluster: its links, and the fraction of the maximum clock of its slowest GPU."""

    links: Links
    hosts: Mapping[str, Snapshot]
    interface: str | None = None  # NCCL_SOCKET_IFNAME of the job
    clock: float = 1.0  # slowest GPU, fraction of its maximum clock
    power: float = 1.0  # fraction of the sustained rate that the power limit allows
    words: list[str] = field(default_factory=list)  # causes of a slowdown, which hosts may repeat


Slow = Callable[[ClusterState, str, Finding], None]


# Transport -----------------------------------------------------------------------------------------------------------


def find_socket_speed(snapshot: Snapshot | None, names: str | None) -> Speed:
    """Return TCP's rate on the job's interface, or on the one NCCL selects; if its rate is unknown, an assumption."""
    facts = snapshot.facts(InterfacesFacts) if snapshot else None
    name = (names or "").removeprefix("=").split(",")[0] or (facts.nccl_choice if facts else None)
    interface = next((i for i in facts.interfaces if i.name == name), None) if facts else None
    if interface is None or not interface.speed_bytes_per_second:
        return unknown_network(f"TCP over {name}" if name else "TCP")
    rate = min(interface.speed_bytes_per_second * NETWORK_SHARE, TCP_CEILING_BYTES_PER_SECOND)
    wire = interface.speed_bytes_per_second * 8 / GIGA
    return Speed(bytes_per_second=rate, how="derived", link=f"TCP over {name}", why=f"an interface of {wire:.4g} Gb/s")


def _use_sockets(now: ClusterState, host: str, finding: Finding) -> None:
    network = now.links.network
    if network is None or network.how == "measured" or network.link == "NVLink":
        return
    slow = find_socket_speed(now.hosts.get(host), now.interface)
    if network.link.startswith("TCP over") and network.bytes_per_second <= slow.bytes_per_second:
        return
    now.links = replace(now.links, network=slow)
    now.words.append(f"{finding.code}: no RDMA, {slow.link} at {slow.bytes_per_second / GIGA:.3g} GB/s per node")


def _use_host(now: ClusterState, host: str, finding: Finding) -> None:  # noqa: ARG001 - applies to every host
    network = now.links.network
    if network is None or network.how == "measured" or network.link not in ("RDMA", "EFA", "network"):
        return
    slow = replace(
        network, bytes_per_second=network.bytes_per_second * THROUGH_HOST_SHARE, how="derived",
        link=f"{network.link} through host memory", why="without GPUDirect 33 of 93 GB/s: NVIDIA/nccl issue 1412",
    )  # fmt: skip
    now.links = replace(now.links, network=slow)
    now.words.append(f"{finding.code}: {slow.link} at {slow.bytes_per_second / GIGA:.3g} GB/s per node")


def _use_memory(now: ClusterState, host: str, finding: Finding) -> None:  # noqa: ARG001 - applies to every host
    """GPUs without peer access copy through host memory; the rate is limited by their links to the host."""
    links = now.links
    if links.node.how == "measured" or links.island_size >= links.ranks_per_node:
        return
    slow = min(links.node.bytes_per_second, links.host.bytes_per_second)
    now.links = replace(links, node=replace(links.node, bytes_per_second=slow, link="host memory"))
    now.words.append(f"{finding.code}: GPUs of a node reach each other through host memory at {slow / GIGA:.3g} GB/s")


# Compute -------------------------------------------------------------------------------------------------------------


def _find_gpu(now: ClusterState, host: str, finding: Finding) -> Gpu | None:
    """Return the GPU that a finding is about: "GPU2", "GPU 0000:a1:00.0"."""
    snapshot = now.hosts.get(host)
    facts, subject = snapshot.facts(GpuFacts) if snapshot else None, finding.subject.removeprefix("GPU ")
    gpus = facts.gpus if facts else ()
    return next((g for g in gpus if subject == g.bus_id or subject.partition(":")[0] == f"GPU{g.index}"), None)


def _limit_clock(now: ClusterState, host: str, finding: Finding) -> None:
    """Set the fraction of the maximum clock measured under load; if unknown, half, as documented in nvml.h."""
    gpu = _find_gpu(now, host, finding)
    read = None
    if gpu is not None and gpu.sm_clock_hertz and gpu.sm_clock_max_hertz and gpu.utilization_ratio:
        read = gpu.sm_clock_hertz / gpu.sm_clock_max_hertz
    by_hardware = finding.code in ("gpu.clocks.slowdown", "gpu.power.brake") or (
        gpu is not None and "hw_thermal" in (gpu.throttle_reasons or ())
    )
    if by_hardware and (read is None or read > SLOWDOWN_SHARE) and finding.code != "gpu.thermal.throttling":
        read = SLOWDOWN_SHARE
    if read is None:
        return
    now.clock = min(now.clock, read)
    at = f"at {gpu.sm_clock_hertz / 1e6:.0f} MHz, " if gpu is not None and gpu.sm_clock_hertz else ""
    now.words.append(f"{finding.code} on {finding.subject}: {at}{read:.0%} of its highest clock; all ranks wait for it")


def _limit_power(now: ClusterState, host: str, finding: Finding) -> None:
    """Set the clock that the power limit allows."""
    gpu = _find_gpu(now, host, finding)
    if gpu is None or not gpu.power_limit_watts or not gpu.power_limit_default_watts:
        return
    share = compute_clock_share(gpu.power_limit_watts, gpu.power_limit_default_watts)
    now.power = min(now.power, share)
    now.words.append(
        f"{finding.code} on {finding.subject}: {gpu.power_limit_watts:.0f} of {gpu.power_limit_default_watts:.0f} W, "
        f"{share:.0%} of the clock; all ranks wait for it"
    )


def slowed(rates: Rates, best_gemm: float | None, now: ClusterState) -> Rates:
    """Return the rates of the slowest GPU: the multiplication rate at its clock, at most its sustained rate."""
    if rates.how == "measured" or (now.clock >= 1.0 and now.power >= 1.0):
        return rates
    sustained = rates.gemm / best_gemm if best_gemm else 1.0
    share = min(now.power, now.clock / sustained, 1.0)
    slow = f"GEMM {rates.gemm * share / 1e12:.4g} TFLOP/s on the slowest GPU: derived from its clock and power limit"
    head = rates.head * share if rates.head else None
    return replace(
        rates, gemm=rates.gemm * share, head=head, attention=rates.attention * share, inputs=(*rates.inputs, slow)
    )


_PART_THE_DOMAIN = ("gpu.fabric.split", "imex.channel.missing")


def cut_domains(cluster: ClusterTopology, findings: Findings) -> ClusterTopology:
    """Return the nodes connected by the network only, if a finding says that their NVLink domain is not usable."""
    parted = any(finding.code in _PART_THE_DOMAIN for host_findings in findings.values() for finding in host_findings)
    if not parted or not any(gpu.nvlink_domain for node in cluster.nodes for gpu in node.gpus):
        return cluster
    return join([
        replace(node, gpus=tuple(replace(gpu, nvlink_domain=None) for gpu in node.gpus)) for node in cluster.nodes
    ])  # fmt: skip


# The table -----------------------------------------------------------------------------------------------------------

_TABLE = read_table(__file__, "faults.toml")
_SLOW: Mapping[str, Slow] = {
    "sockets": _use_sockets, "through_host": _use_host, "through_memory": _use_memory, "clock": _limit_clock,
    "power": _limit_power,
}  # fmt: skip
_HOW = {code: name for name, codes in _TABLE["slow"].items() for code in codes}
_SHOWN = {code: note for note, codes in _TABLE["shown"].items() for code in codes}
RULES = frozenset({*_HOW, *_SHOWN})
ENDS = frozenset(_TABLE["ends"])


def pick_costly(findings: Findings, settings: Mapping[str, str]) -> Findings:
    """Return the findings that slow down a job with these settings: failures, and warnings about clocks.

    Findings about ports that NCCL_IB_HCA excludes are ignored.
    """
    solved = {code for name in settings for code in _TABLE["solved"].get(name, ())}
    hcas = settings.get("NCCL_IB_HCA", "")

    def is_excluded(finding: Finding) -> bool:
        if not (hcas and finding.subject and finding.code.startswith("rdma.port.")):
            return False
        from planner.lint.values import NameList

        device, _, port = finding.subject.partition(":")
        return not NameList.parse(hcas).takes(device, int(port) if port.isdecimal() else None)

    return {
        host: tuple(
            finding for finding in host_findings
            if finding.code in RULES and finding.code not in solved and not is_excluded(finding)
            and (finding.status == Status.FAIL or (finding.status == Status.WARN and _HOW.get(finding.code) == "clock"))
        )
        for host, host_findings in findings.items()
    }  # fmt: skip


def find_healthy_links(
    cluster: ClusterTopology, links: Links, findings: Findings, snapshots: Sequence[Snapshot]
) -> Links | None:  # fmt: skip
    """Return the links of the nodes without these faults; None if the graph shows another fault, or a rate is unknown.

    If RDMA is off, no probe reads the rate of the ports. The network is then assumed to have as many of the cards as
    the node has ranks, at the rate of the fastest card of their family.
    """
    listed = [finding for host_findings in findings.values() for finding in host_findings]
    if any(finding.code in _SHOWN and finding.code not in _PART_THE_DOMAIN for finding in listed):
        return None
    off = {finding.subject for finding in listed if _HOW.get(finding.code) == "sockets"}
    if not off or links.network is None or cluster.inter_node_transport in ("rdma", "efa", "nvlink"):
        return links
    pci = snapshots[0].facts(PciFacts) if snapshots else None
    cards = [device for device in (pci.devices if pci else ()) if device.bus_id in off]
    speeds = [
        nic.bytes_per_second for card in cards for nic in nics()
        if nic.vendor == card.vendor_id and card.device_id in nic.devices and nic.bytes_per_second
    ]  # fmt: skip
    if not speeds or len(speeds) < len(cards):
        return None
    used = min(len(cards), max(1, links.ranks_per_node))
    rate = used * min(speeds) * NETWORK_SHARE
    reason = f"{used} cards as the fastest of their family"
    return replace(links, network=Speed(bytes_per_second=rate, how="assumed", link="RDMA", why=reason))


def apply_findings(
    links: Links, findings: Findings, snapshots: Sequence[Snapshot], *, interface: str | None = None
) -> ClusterState:
    """Apply the findings to the links and the slowest GPU; equal hosts share one snapshot."""
    by_host = {snapshot.hostname: snapshot for snapshot in snapshots}
    alone = snapshots[0] if len(snapshots) == 1 else None
    hosts = {host: its for host in findings if (its := alone or by_host.get(host))}
    now = ClusterState(links=links, hosts=hosts, interface=interface)
    for host, host_findings in findings.items():
        for finding in host_findings:
            if finding.code in _SHOWN:
                place = f" on {finding.subject}" if finding.subject else ""
                now.words.append(f"{finding.code}{place}: {_SHOWN[finding.code]}")
            else:
                _SLOW[_HOW[finding.code]](now, host, finding)
    return now

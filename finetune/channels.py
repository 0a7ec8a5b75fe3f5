"""The transport that the ranks' collectives actually use: NCCL's from its log, gloo's from the kernel.

Surface: the file named by NCCL_DEBUG_FILE (NCCL src/debug.cc), read by collectives.nccl_log. Only channel lines are
proof. What the log does not show is reported as unknown; it is neither a pass nor a reason to stop. For gloo: this
process's established TCP connections and the host's interfaces, through psutil (/proc/net/tcp, getifaddrs).
"""

from __future__ import annotations

import io
import ipaddress
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from collectives.nccl_log import evidence
from collectives.nccl_log.transport import Evidence
from contracts.run_record import NcclChannels

MAX_LOG_BYTES = 16 << 20  # per rank; channels are printed when they connect, near the start of the log
MAX_NAMES = 256  # channels of a rank that are sent to the others
VERBOSE = ("INFO", "ABORT", "TRACE")  # log levels that print channels
TCP = ("socket", "fastsocket")  # NCCL's own network, and that of Google's plugin; NCCL_NET is read without case
LIBFABRIC = ("aws libfabric", "libfabric")  # one plugin; its releases print one of these names


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNetwork:
    """The plan's expectation about channels between hosts.

    What NCCL never leaves (NCCL_NET, NCCL_IB_DISABLE, NCCL_SOCKET_IFNAME) is not compared: it fails instead. Without
    usable RDMA devices it falls back to TCP, and without GPUDirect RDMA to host memory.
    """

    rdma: str = ""  # any network except TCP, such as "IB" or "AWS Libfabric"
    gdrdma: str = ""  # why GPUDirect RDMA is expected; empty: it is not

    def meets(self, network: str) -> bool:
        """Whether a channel over this network is what was planned; a plugin that nobody knows is not."""
        prefixes = LIBFABRIC if self.rdma.lower() in LIBFABRIC else ("ib", "gib", "ucx", self.rdma.lower())
        return not self.rdma or network.lower().startswith(prefixes)


class Seen(NamedTuple):
    """One rank's report about its channels."""

    wrong: tuple[str, ...]
    channels: dict[str, int]  # "NET/IB/0/GDRDMA", "P2P/CUMEM": channel lines
    log: str  # path; empty: there is no log
    unknown: str  # why this rank's channels are unknown
    interface: str = ""  # used by its TCP connections, in NCCL's notation


def start_log(folder: Path) -> None:
    """Make NCCL write one log per process in `folder`; the user's values have priority.

    NCCL reads these variables once, before the first communicator.
    """
    if os.environ.get("NCCL_DEBUG", "INFO").upper() not in VERBOSE:
        return
    variables = evidence.environment(folder.absolute())
    del variables["NCCL_RUNTIME_CONNECT"]  # connecting all peers at the start uses memory that the job may never need
    if "NCCL_DEBUG_FILE" not in os.environ:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return  # without the folder NCCL would log to stdout
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def log_path(template: str | None, host: str, pid: int) -> Path | None:
    """Return the path of NCCL_DEBUG_FILE, expanded as by NCCL: %h is the host name up to its first dot."""
    fields = {"h": host.partition(".")[0], "p": str(pid), "%": "%"}
    return Path(re.sub("%(.)", lambda match: fields.get(match[1], match[0]), template)) if template else None


def planned_channels(transport: Mapping[str, Any]) -> PlannedNetwork:
    """Read from `transport` of the plan what it expects of channels between hosts."""
    network, expected = str(transport.get("network") or ""), transport.get("gdrdma")  # the reason to expect it
    return PlannedNetwork(
        rdma="" if network.lower() in TCP else network,  # a better transport than planned is not a fault
        gdrdma=f"gdrdma of the plan ({expected})" if expected else "",
    )


def read_log(path: Path | None, plan: PlannedNetwork, *, hosts: int) -> Seen:
    """Read one process's log up to a size limit, and compare its channels with the plan; `hosts` is the host count."""
    if path is None or not path.is_file():
        return Seen((), {}, "", f"no log at {path}" if path else "NCCL_DEBUG_FILE is not set")
    with path.open("rb") as file:
        log = evidence.read_files([io.BytesIO(file.read(MAX_LOG_BYTES))])
    unknown = "" if log.transports else f"{path} names no channel"
    return Seen(tuple(differences(log, plan, path, hosts=hosts)), channels(log), str(path), unknown,
                log.socket_interface or "")  # fmt: skip


def differences(log: Evidence, plan: PlannedNetwork, path: Path, *, hosts: int) -> list[str]:
    """Return each contradiction between channels and plan, in one sentence with the log line."""
    wrong = []
    networks = {name.removeprefix("NET/"): n for name, n in log.transports.items() if name.startswith("NET/")}
    for name, count in networks.items() if hosts > 1 else ():
        if plan.rdma and name.lower() in TCP:
            proof = _line(log, path, f"NET/{name}: ")
            wrong.append(f"the plan's network {plan.rdma}: {count} channels over NET/{name} ({proof})")
    # Before Ampere, NCCL stages data to send through the host by default, so only received data shows a fault.
    bare = log.receive.total - log.receive.gdrdma
    if hosts > 1 and plan.gdrdma and not wrong and bare:
        proof = _line(log, path, "NET/", "receive without GDRDMA")
        wrong.append(f"{plan.gdrdma}: {bare} receiving channels without GPUDirect RDMA ({proof})")
    return wrong


def _line(log: Evidence, path: Path, start: str, end: str = "") -> str:
    """Return the first line that proves it, in the form FILE:LINE."""
    for proof in log.proof:
        if proof.proves.startswith(start) and proof.proves.endswith(end):
            return f"{path}:{proof.line}: {proof.text}"
    return str(path)


def channels(log: Evidence) -> dict[str, int]:
    """Count channel lines by transport; network channels also by device and GPUDirect RDMA."""
    counts = {name: n for name, n in log.transports.items() if not name.startswith(("NET/", "COLLNET/"))}
    for device, row in log.devices.items():
        family = "NET" if f"NET/{device.rpartition('/')[0]}" in log.transports else "COLLNET"
        counts[f"{family}/{device}/GDRDMA"] = row.gdrdma
        counts[f"{family}/{device}"] = row.total - row.gdrdma
    return dict(Counter({name: n for name, n in counts.items() if n > 0}).most_common(MAX_NAMES))


def record(ranks: Sequence[Seen], plan: PlannedNetwork, *, hosts: int) -> NcclChannels:
    """Return the summary stored in run.json."""
    counts: Counter[str] = Counter()
    for rank_report in ranks:
        counts.update(rank_report.channels)
    networks = {name.split("/")[1] for name in counts if name.startswith("NET/")}
    unknown = [f"rank {rank}: {report.unknown}" for rank, report in enumerate(ranks) if report.unknown]
    if any(report.wrong for report in ranks):
        verdict = "mismatch"
    elif not plan.rdma and not plan.gdrdma:
        verdict = "nothing planned"
    elif hosts == 1:
        verdict = "one host"
    else:  # a rank with channels only inside its host is normal, but some rank must have channels between hosts
        seen_all = bool(networks) and all(plan.meets(name) for name in networks) and not unknown
        verdict = "as planned" if seen_all else "unknown"
    return NcclChannels(
        verdict=verdict, planned="; ".join(word for word in (plan.rdma, plan.gdrdma) if word) or None,
        hosts=hosts, channels=dict(sorted(counts.items())), unknown=unknown[:8],
        interfaces=sorted({report.interface for report in ranks if report.interface})[:8], log=ranks[0].log or None,
    )  # fmt: skip


# Gloo. A connection belongs to gloo if two ranks hold its two ends. The same is true of the store at MASTER_PORT, which
# is excluded. Behind address translation the ends differ, and the transport is reported as unknown.

End = tuple[str, int]


def read_gloo_connections() -> dict[tuple[End, End], str]:
    """Return the interface of each of this rank's connections, by own and remote end; {} if they cannot be read."""
    try:
        sockets = psutil.Process().net_connections("tcp")
        interface_addresses = psutil.net_if_addrs()
    except (psutil.Error, OSError):
        return {}
    interfaces: dict[str, list[str]] = {}
    for name, addresses in interface_addresses.items():
        for entry in addresses:
            if entry.family.name in ("AF_INET", "AF_INET6"):
                interfaces.setdefault(_plain(entry.address), []).append(name)
    store = int(os.environ.get("MASTER_PORT") or 0)
    connections: dict[tuple[End, End], str] = {}
    for seen in sockets:
        if seen.status == psutil.CONN_ESTABLISHED and seen.raddr and store not in (seen.laddr.port, seen.raddr.port):
            local, remote = ((_plain(end.ip), end.port) for end in (seen.laddr, seen.raddr))
            connections[local, remote] = "/".join(interfaces.get(local[0], ())) or "an unknown interface"
    return connections


def _plain(address: str) -> str:
    """Remove the zone, and convert an IPv4-mapped address of a dual-stack socket to IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def gloo_transports(ranks: Sequence[Mapping[tuple[End, End], str]]) -> list[str]:
    """Return each interface with its first address, as `gloo: TCP over net1 (10.0.0.1)`, or that they are unknown.

    The two ends of a connection can be on different networks: a rank accepts at the address of GLOO_SOCKET_IFNAME, and
    the one that connects has the address of the route. Empty for a single rank.
    """
    if len(ranks) < 2:
        return []
    holders = {ends: rank for rank, by_ends in enumerate(ranks) for ends in by_ends}
    addresses: dict[str, str] = {}
    for rank, connections in enumerate(ranks):
        for local, remote in sorted(connections):
            if holders.get((remote, local), rank) != rank:
                addresses.setdefault(connections[local, remote], local[0])
    return [f"gloo: TCP over {name} ({address})" for name, address in addresses.items()] or [
        "gloo: unknown: no connection is seen from both of its ends, as behind address translation (NAT)"
    ]

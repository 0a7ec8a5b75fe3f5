"""What the log of a run proves about its transports: the verdict, and the lines that prove it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofLine:
    """A line that proves a fact."""

    line: int  # number, from 1
    text: str  # at most 300 characters
    proves: str
    file: str = ""  # if several were read
    host: str = ""  # that wrote the line; empty if the line does not name it

    @property
    def origin(self) -> tuple[str, str]:
        """Return the host that wrote the line, and the PCI address that it names."""
        address = re.search(r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\b", self.text)
        return self.host, address[0] if address else ""

    @property
    def place(self) -> str:
        """Return where the line is: "line 7 of node-b.log"."""
        return f"line {self.line}" + (f" of {self.file}" if self.file else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProblem:
    """A problem that the log shows. Its code never changes."""

    code: str  # "ib_without_gdrdma", "socket_fallback", ...
    message: str
    action: str  # what to do first
    severity: str = "warn"  # "info", "warn", "fail"
    lines: tuple[ProofLine, ...] = ()
    count: int = 1
    hosts: tuple[str, ...] = ()  # that have the problem, as far as the log says
    ranks: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        """Return the hosts and ranks in words: "node-b (ranks 4 to 7)"; empty if the log does not say."""
        hosts = ", ".join(self.hosts[:4]) + (f" and {len(self.hosts) - 4} more hosts" if len(self.hosts) > 4 else "")
        ranks = rank_words(self.ranks) if self.ranks else ""
        return f"{hosts} ({ranks})" if hosts and ranks else hosts or ranks


def by_severity(problems: Iterable[LogProblem]) -> tuple[LogProblem, ...]:
    """Sort the problems, failures first, and keep the order of those with one severity."""
    return tuple(sorted(problems, key=lambda problem: ("fail", "warn", "info").index(problem.severity)))


def rank_words(ranks: Collection[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 0 to 3, 6"; at most six ranges."""
    numbers = sorted(ranks)
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    ranges = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    suffix = f" and {len(ranges) - 6} more ranges" if len(ranges) > 6 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(ranges[:6])}{suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelCount:
    """A number of channels, and how many of them have GPUDirect RDMA."""

    total: int = 0
    gdrdma: int = 0

    def __add__(self, other: ChannelCount) -> ChannelCount:
        """Return the channels of both."""
        return ChannelCount(total=self.total + other.total, gdrdma=self.gdrdma + other.gdrdma)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """One run of several in a log."""

    first: ProofLine  # the first line of the run
    inter_node_transport: str | None
    intra_node_transport: str | None
    gdrdma: str
    outcome: str
    proven: bool  # the log shows the expected channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one log proves. A log without a channel line is no evidence, and never a pass."""

    library: str = "nccl"  # or "rccl"
    nccl_version: str | None = None
    inter_node_transport: str | None = None  # "IB", "IB (plugin IBext)", "Socket", "EFA (AWS Libfabric)", "unknown"
    intra_node_transport: str | None = None  # None: no intra-node channel expected or seen
    gdrdma: str = "none"  # "on", "off", "partial", "none" (no evidence)
    send: ChannelCount = field(default_factory=ChannelCount)
    receive: ChannelCount = field(default_factory=ChannelCount)
    transports: dict[str, int] = field(default_factory=dict)  # "NET/IB", "P2P/CUMEM/read", "SHM": channel lines each
    problems: tuple[LogProblem, ...] = ()
    proof: tuple[ProofLine, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)  # "set by environment" lines
    network: str | None = None  # of the "Using network" line
    hcas: tuple[str, ...] = ()  # of the "NET/IB : Using" line: "mlx5_0:1/RoCE"
    link_layer: str | None = None  # "IB", "RoCE", "mixed"
    socket_interface: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    pxn: bool | None = None
    lines_read: int = 0
    undirected: ChannelCount = field(default_factory=ChannelCount)  # network channels whose direction was cut off
    torn_lines: int = 0  # network channels that were cut before their tag; in no other count
    gdrdma_fraction: float | None = None  # of all network channels, 0 to 1
    devices: dict[str, ChannelCount] = field(default_factory=dict)  # "IB/0"; with several hosts "node-1 IB/0"
    by_host: dict[str, dict[str, ChannelCount]] = field(default_factory=dict)  # host: network; if there are several
    notes: tuple[LogProblem, ...] = ()  # no fault: variables that were set for a proven transport, unknown warnings
    gdr_paths: tuple[str, ...] = ()  # "enabled: PXB where PXB is allowed"; what NCCL thought possible
    nvls_use: str = "unknown"  # "used" (a communicator made it), "available" (in hardware), "not available", "unknown"
    mnnvl_use: str = "unknown"  # "used" (channels), "enabled" (a communicator), "available", "off", "unknown"
    mnnvl_clique: int | None = None  # GPUs of the clique that a communicator reaches over NVLink
    outcome: str = "unknown"  # "failed" (a line says how), "finished" (a line says so), "unknown"
    gpus: tuple[str, ...] = ()  # names of GPUs in the log
    runs: tuple[RunEvidence, ...] = ()  # if there are several; the counts above are of all of them
    # The lines that say how NCCL uses NVSwitch (NVLS and MNNVL), and networking by GPUs (GIN).
    fabric: tuple[ProofLine, ...] = field(default=(), compare=False)
    missing_ranks: tuple[int, ...] = ()  # ranks of the largest communicator without a line
    hosts: int | None = None  # hosts that wrote lines of NCCL
    rank_hosts: dict[int, str] = field(default_factory=dict)  # of all ranks that a line places, if there are problems
    schema_version: int = SCHEMA_VERSION

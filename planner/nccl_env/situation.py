"""The input of the rules of the NCCL environment, and the types of their answers.

The input is the nodes, the known facts about the job, and NCCL's release. This module decides nothing. A fact that no
probe read is None or empty, and the rule reports it. Answers are settings, needs of a pod and notes, with texts from
data/advice.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from contracts.tables import read_table
from planner.nccl_env.names import Version, padded
from planner.nccl_env.nodes import RDMA_KINDS, NodeView
from probes.api import Failed, Snapshot
from topology.graph import ClusterTopology, NodeTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All input of one recommendation."""

    nodes: tuple[NodeView, ...]
    cluster: ClusterTopology
    nccl_version: Version | None
    multi_node: bool | None  # None: unknown; the job may use several nodes
    ranks_per_node: int | None = None  # None: one per GPU, or two without GPUs

    @property
    def gpus(self) -> int:
        """Number of GPUs on all nodes."""
        return max(sum(node.gpu_count() for node in self.nodes), 0 if self.amd else self.cluster.world_size)

    @property
    def amd(self) -> bool:
        """Whether the GPUs are from AMD, which RCCL supports."""
        return not any(node.gpu_count() for node in self.nodes if node.snapshot) and any(
            node.amd_gpus() for node in self.nodes
        )

    @property
    def cxi(self) -> bool:
        """Whether any node has HPE Slingshot NICs."""
        return any(node.cxi() for node in self.nodes)

    @property
    def backend(self) -> str:
        """Collective library: "nccl", "rccl" (not checked), or "gloo" without GPUs."""
        if self.amd:
            return "rccl"
        return "nccl" if self.gpus or self.unread("gpu") else "gloo"

    def unread_nodes(self, wanted: Callable[[NodeView], object | None]) -> tuple[str, ...]:
        """Return the nodes of which these facts are unknown, for any reason."""
        return tuple(node.hostname for node in self.nodes if wanted(node) is None)

    def unread(self, probe: str) -> str:
        """Return why a probe failed on some node; empty if it succeeded or found nothing to read."""
        for node in self.nodes:
            outcome = node.snapshot.outcomes.get(probe) if node.snapshot else None
            if isinstance(outcome, Failed):
                return f"{node.hostname}: {probe} probe failed: {outcome.error}"
        return ""

    @property
    def efa(self) -> bool:
        """Whether any node has EFA."""
        return any(node.efa_count() for node in self.nodes)

    @property
    def sockets(self) -> bool:
        """Whether the job must use TCP although nodes have RDMA."""
        return any(node.sockets for node in self.nodes)

    @property
    def rdma_ports(self) -> bool:
        """Whether any node has a port that NCCL's IB transport would use."""
        return any(node.default_ports() for node in self.nodes)

    def ranks_on(self, node: NodeView) -> int:
        """Return the number of ranks on this node; without GPUs two, the minimum for a collective."""
        return self.ranks_per_node or node.gpu_count() or len(node.amd_gpus()) or 2

    @property
    def one_node(self) -> bool:
        """Whether the job certainly runs on a single node."""
        return self.multi_node is False

    def older_than(self, release: Version) -> bool | None:
        """Whether the NCCL in use is older than `release`; None if its version is unknown."""
        return None if self.nccl_version is None else self.nccl_version < release


def situation(
    snapshots: Sequence[Snapshot],
    cluster: ClusterTopology,
    *,
    nccl_version: tuple[int, ...] | None = None,
    multi_node: bool | None = None,
    ranks_per_node: int | None = None,
) -> Situation:
    """Join snapshots and topology by host name. Several nodes mean a multi-node job, unless `multi_node` is False.

    If `multi_node` is None with one snapshot, the job may use several nodes, so network settings are included.
    `ranks_per_node` None: one per GPU, or two without GPUs.
    """
    nodes = tuple(_list_nodes(snapshots, cluster))
    if multi_node is None and max(len(nodes), len(cluster.nodes)) > 1:
        multi_node = True
    version = None if nccl_version is None else padded(nccl_version)
    if multi_node is not False and cluster.inter_node_transport == "tcp" and any(_offers_rdma(node) for node in nodes):
        nodes = tuple(replace(node, sockets=True, topology=_drop_rdma(node.topology)) for node in nodes)
    return Situation(nodes=nodes, cluster=cluster, nccl_version=version, multi_node=multi_node,
                     ranks_per_node=ranks_per_node)  # fmt: skip


def _offers_rdma(node: NodeView) -> bool:
    """Whether NCCL, or its EFA plugin, would use RDMA on this node by default."""
    if node.snapshot:
        return bool(node.efa_count() or node.default_ports())
    return node.topology is not None and any(nic.kind in RDMA_KINDS for nic in node.topology.nics)


def _drop_rdma(node: NodeTopology | None) -> NodeTopology | None:
    return node and replace(node, nics=tuple(nic for nic in node.nics if nic.kind not in RDMA_KINDS), nearest_nic=())


def _list_nodes(snapshots: Sequence[Snapshot], cluster: ClusterTopology) -> Iterator[NodeView]:
    """Yield every probed node, and one node of each kind that was not probed: others would give equal answers.

    Nodes are of one kind if they share their parts; the facts of a probed node apply to all nodes of its kind.
    """
    topologies = {node.hostname: node for node in cluster.nodes}
    probed = {snapshot.hostname for snapshot in snapshots}
    if len(snapshots) == 1 and topologies and not probed & set(topologies):
        # one host planned several times, under generated names
        yield NodeView(hostname=snapshots[0].hostname, snapshot=snapshots[0], topology=cluster.nodes[0])
        return
    for snapshot in snapshots:
        yield NodeView(hostname=snapshot.hostname, snapshot=snapshot, topology=topologies.get(snapshot.hostname))
    probed_hardware = {(id(node.gpus), id(node.nics)) for node in cluster.nodes if node.hostname in probed}
    left = [node for node in cluster.nodes if (id(node.gpus), id(node.nics)) not in probed_hardware]
    kinds = {(id(node.gpus), id(node.nics)): node for node in reversed(left)}
    for node in reversed(kinds.values()):
        yield NodeView(hostname=node.hostname, snapshot=None, topology=node)


def by_host(texts: Iterable[tuple[str, str]]) -> str:
    """Format (host, text) pairs as one text; hosts with the same text are listed together."""
    hosts: dict[str, list[str]] = {}
    for host, text in texts:
        hosts.setdefault(text, []).append(host)
    return "; ".join(f"{some(names)}: {text}" for text, names in hosts.items())


def together(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return one entry per host, with its texts joined."""
    hosts: dict[str, list[str]] = {}
    for host, text in pairs:
        hosts.setdefault(host, []).append(text)
    return [(host, ", ".join(texts)) for host, texts in hosts.items()]


_NAMED_HOSTS = 3  # per group: enough to find one, short enough to read


def some(names: Sequence[str]) -> str:
    """Return the first names, and the number of further ones."""
    more = len(names) - _NAMED_HOSTS
    return ", ".join(names[:_NAMED_HOSTS]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The reason of an answer: the rule, the probed fact, and the source of the rule."""

    rule: str
    evidence: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One environment variable, or another need of a job's pods, with its reason."""

    name: str  # of needs: "shm_bytes", "memlock", "resource", "network", "capability", "compute_domain"
    value: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Information about a variable that is not set on purpose, or about a risk."""

    topic: str
    text: str
    evidence: str = ""


def texts() -> Mapping[str, Mapping[str, str]]:
    """Read the table: "name", "text", and "source" of settings and needs."""
    return read_table(__file__, "data/advice.toml")


def note(key: str, evidence: str = "", /, *more: str, **fields: object) -> Note:
    """Create a note with its text filled in; `more` are keys of texts to append."""
    return Note(topic=texts()[key]["name"], text=_fill_texts((key, *more), fields), evidence=evidence)


def setting(key: str, value: str, evidence: str, /, *more: str, **fields: object) -> Setting:
    """Create a setting or a need with its reason filled in; `more` are keys of texts to append to its rule."""
    reason = Reason(rule=_fill_texts((key, *more), fields), evidence=evidence, source=texts()[key]["source"])
    return Setting(name=texts()[key]["name"], value=value, reason=reason)


def _fill_texts(keys: Iterable[str], fields: Mapping[str, object]) -> str:
    return "".join(texts()[key]["text"].format(**fields) for key in keys)

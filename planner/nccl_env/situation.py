"""What the rules of the NCCL environment ask, and the form of what they answer.

They ask for the nodes, what is known of the job, and NCCL's release. Nothing is decided here; a fact that no probe read
is None or empty, and the rule says so. They answer with settings, needs of a pod and notes, with the texts of
data/advice.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from contracts.tables import read_table
from planner.nccl_env.names import Version, padded, parse_version
from planner.nccl_env.nodes import RDMA_KINDS, NodeView
from probes.api import Failed, Snapshot
from topology.graph import ClusterTopology, NodeTopology

if TYPE_CHECKING:  # a question without a log does not wait for its reader
    from collectives.nccl_log.transport import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that one advice rests on."""

    nodes: tuple[NodeView, ...]
    cluster: ClusterTopology
    nccl_version: Version | None
    multi_node: bool | None  # None: not said and not to be seen; the job may come to span nodes
    evidence: Evidence | None
    ranks_per_node: int | None = None  # None: one per GPU, or two without any

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return max(sum(node.gpu_count() for node in self.nodes), 0 if self.amd else self.cluster.world_size)

    @property
    def amd(self) -> bool:
        """Whether the GPUs are AMD's, which RCCL serves."""
        return not any(node.gpu_count() for node in self.nodes if node.snapshot) and any(
            node.amd_gpus() for node in self.nodes
        )

    @property
    def cxi(self) -> bool:
        """Whether any node has NICs of HPE Slingshot."""
        return any(node.cxi() for node in self.nodes)

    @property
    def backend(self) -> str:
        """What carries the collectives: "nccl", "rccl" (not judged), or "gloo" where there is no GPU."""
        if self.amd:
            return "rccl"
        return "nccl" if self.gpus or self.unread("gpu") else "gloo"

    def unread_nodes(self, wanted: Callable[[NodeView], object | None]) -> tuple[str, ...]:
        """The nodes of which these facts are not known, for whatever reason."""
        return tuple(node.hostname for node in self.nodes if wanted(node) is None)

    def unread(self, probe: str) -> str:
        """Why a probe could not finish on some node; empty where it answered or found nothing to read."""
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
        """Whether the job is to go over TCP though nodes have RDMA."""
        return any(node.sockets for node in self.nodes)

    @property
    def rdma_ports(self) -> bool:
        """Whether any node has a port that NCCL's IB transport would take."""
        return any(node.default_ports() for node in self.nodes)

    def ranks_on(self, node: NodeView) -> int:
        """Ranks of the job on this node; two without GPUs, the least that makes a collective."""
        return self.ranks_per_node or node.gpu_count() or len(node.amd_gpus()) or 2

    @property
    def one_node(self) -> bool:
        """Whether the job certainly stays on one node."""
        return self.multi_node is False

    def older_than(self, release: Version) -> bool | None:
        """Whether the NCCL in use is older; None where its version is unknown."""
        return None if self.nccl_version is None else self.nccl_version < release


def situation(
    snapshots: Sequence[Snapshot],
    cluster: ClusterTopology,
    *,
    nccl_version: tuple[int, ...] | None = None,
    multi_node: bool | None = None,
    evidence: Evidence | None = None,
    ranks_per_node: int | None = None,
) -> Situation:
    """Join snapshots and topology by host name; several nodes are multi-node unless it is denied.

    `multi_node` None with one snapshot means that the job may come to span nodes: the network is then advised on too.
    `ranks_per_node` None: one per GPU, or two without any. `evidence` of an earlier run supplies the NCCL version and
    tells where NCCL fell back to TCP.
    """
    nodes = tuple(_nodes(snapshots, cluster))
    if multi_node is None and max(len(nodes), len(cluster.nodes)) > 1:
        multi_node = True
    version = _version(nccl_version, evidence)
    if multi_node is not False and cluster.inter_node_transport == "tcp" and any(_offers_rdma(node) for node in nodes):
        nodes = tuple(replace(node, sockets=True, topology=_without_rdma(node.topology)) for node in nodes)
    return Situation(nodes=nodes, cluster=cluster, nccl_version=version, multi_node=multi_node, evidence=evidence,
                     ranks_per_node=ranks_per_node)  # fmt: skip


def _offers_rdma(node: NodeView) -> bool:
    """Whether NCCL, or its plugin for EFA, would take RDMA here without being asked."""
    if node.snapshot:
        return bool(node.efa_count() or node.default_ports())
    return node.topology is not None and any(nic.kind in RDMA_KINDS for nic in node.topology.nics)


def _without_rdma(node: NodeTopology | None) -> NodeTopology | None:
    return node and replace(node, nics=tuple(nic for nic in node.nics if nic.kind not in RDMA_KINDS), nearest_nic=())


def _version(version: tuple[int, ...] | None, evidence: Evidence | None) -> Version | None:
    if version is not None:
        return padded(version)
    if evidence is not None and evidence.nccl_version:
        try:
            return parse_version(evidence.nccl_version)
        except ValueError:
            return None  # RCCL and vendor builds print other texts, so the version is unknown
    return None


def _nodes(snapshots: Sequence[Snapshot], cluster: ClusterTopology) -> Iterator[NodeView]:
    """Every probed node, and of the nodes that were not probed one of each kind: the others would answer the same.

    Nodes are of one kind where they share their parts; what was probed of one node holds for all nodes of its kind.
    """
    topologies = {node.hostname: node for node in cluster.nodes}
    probed = {snapshot.hostname for snapshot in snapshots}
    if len(snapshots) == 1 and topologies and not probed & set(topologies):
        # One host planned several times over, under made-up names.
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
    """(host, text) pairs as one text, hosts that say the same named together."""
    hosts: dict[str, list[str]] = {}
    for host, text in texts:
        hosts.setdefault(text, []).append(host)
    return "; ".join(f"{some(names)}: {text}" for text, names in hosts.items())


def together(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """One entry per host, its texts joined."""
    hosts: dict[str, list[str]] = {}
    for host, text in pairs:
        hosts.setdefault(host, []).append(text)
    return [(host, ", ".join(texts)) for host, texts in hosts.items()]


_NAMED_HOSTS = 3  # of a group: enough to find one, short enough to read


def some(names: Sequence[str]) -> str:
    """A few of the names, and how many more there are."""
    more = len(names) - _NAMED_HOSTS
    return ", ".join(names[:_NAMED_HOSTS]) + (f" and {more} more" if more > 0 else "")


# What the rules answer.


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why: the rule, the probed fact it rests on, and where the rule is written."""

    rule: str
    evidence: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One environment variable, never without its reason."""

    name: str
    value: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNeed:
    """Something the job needs that is no environment variable: shm size, memlock, a resource, an annotation."""

    name: str  # "shm_bytes", "memlock", "resource", "network", "capability", "compute_domain"
    value: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something left alone on purpose, or to be known: "NCCL finds the HCAs by itself: set nothing"."""

    topic: str
    text: str
    evidence: str = ""


def texts() -> Mapping[str, Mapping[str, str]]:
    """The table as written: "name", "text", and "source" of what is set or needed."""
    return read_table(__file__, "data/advice.toml")


def note(key: str, evidence: str = "", /, *more: str, **fields: object) -> Note:
    """Fill in a note's text; `more` are keys of texts that follow it."""
    return Note(topic=texts()[key]["name"], text=_filled((key, *more), fields), evidence=evidence)


def setting(key: str, value: str, evidence: str, /, *more: str, **fields: object) -> Setting:
    """Fill in a setting's reason; `more` are keys of texts that follow its rule."""
    return Setting(name=texts()[key]["name"], value=value, reason=_reason(key, evidence, more, fields))


def need(key: str, value: str, evidence: str, /, *more: str, **fields: object) -> PodNeed:
    """Fill in the reason of something that a pod needs."""
    return PodNeed(name=texts()[key]["name"], value=value, reason=_reason(key, evidence, more, fields))


def _reason(key: str, evidence: str, more: Iterable[str], fields: Mapping[str, object]) -> Reason:
    return Reason(rule=_filled((key, *more), fields), evidence=evidence, source=texts()[key]["source"])


def _filled(keys: Iterable[str], fields: Mapping[str, object]) -> str:
    return "".join(texts()[key]["text"].format(**fields) for key in keys)

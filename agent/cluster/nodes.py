"""Every node at a glance: one record per node, made from a scan, carried by the custom resource NodeTopology.

Specification: deploy/daemonset/base/nodetopology-crd.yaml. A record holds the node's graph without host name and
UUIDs, so that equal nodes carry equal text: thousands of nodes are then a handful of graphs.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from agent import units
from agent.cluster import node_facts
from agent.gate.coverage import no_gpu_read
from agent.gate.verdict import Check, judge, worst_first
from agent.version import VERSION
from agent.view import View
from collectives.bench.results import BenchResult
from contracts.plain import loads as plain
from probes.api import Snapshot
from probes.limits.probe import LimitsFacts
from probes.rdma.probe import RdmaFacts
from topology.graph import NodeTopology
from topology.wire import TopologyWireError, node_from_json, to_json

log = logging.getLogger(__name__)

Json = dict[str, Any]
API_VERSION = "topoflight.io/v1alpha1"
KIND = "NodeTopology"
PLURAL = "nodetopologies"
MOST_FINDINGS = 64
MOST_TEXT = 65536  # of the packed graph; HGX H100 with eight HCAs takes 4 KiB
MOST_GRAPH_BYTES = 1 << 20  # unpacked; 64 KiB packed hold ten times what the largest machine needs
SILENT_INTERVALS = 3  # writes missed in a row before a node is called silent
LEAST_SILENT_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What one agent says of its node."""

    name: str  # of the Kubernetes Node, or the host name
    host: str  # as the probes saw it
    verdict: str  # "pass", "warn", "unknown", "fail"
    scanned_at_seconds: float
    interval_seconds: float = 300.0  # between two writes at most
    gpus: int | None = None
    product: str | None = None
    links: str | None = None  # classes of GPU pairs: "NV18 (28 pairs)"
    hcas: int | None = None
    rdma: str | None = None  # "8/8 active"
    memlock: str | None = None  # "unlimited", "8.0 MiB"
    findings: tuple[Json, ...] = ()
    graph: str | None = None  # packed NodeTopology
    facts: str | None = None  # packed facts that advice needs beside the graph (agent.cluster.node_facts)
    addresses: tuple[str, ...] = ()  # the node's own, in place of the facts' numbers
    measured: tuple[Json, ...] = ()  # of its last benchmark on itself alone: op, bytes, job, busbw (bytes per second)
    agent_version: str = VERSION
    stopped_at_seconds: float | None = None  # when its agent ended and said so; None while it runs, or died unheard

    def age_seconds(self, now: float) -> float:
        """Since the scan; clocks that differ do not make it negative."""
        return max(0.0, now - self.scanned_at_seconds)

    def silent(self, now: float) -> bool:
        """Whether its agent has ended, missed too many writes to be believed still, or claims a scan yet to come."""
        if self.stopped_at_seconds is not None or self.scanned_at_seconds > now + LEAST_SILENT_SECONDS:
            return True
        return self.age_seconds(now) > max(LEAST_SILENT_SECONDS, SILENT_INTERVALS * self.interval_seconds)


def records_of(view: View, *, name: str | None = None, interval_seconds: float = 300.0) -> tuple[NodeRecord, ...]:
    """One record per snapshot of the view; `name` is the Node's, where there is one snapshot."""
    pairs = zip(view.snapshots, view.topologies, strict=True)
    only = len(view.snapshots) == 1
    made = tuple(
        _record(snapshot, node, [c for c in view.checks if c.node == snapshot.hostname or only],
                name if only and name else snapshot.hostname, view.made_at_seconds, interval_seconds)
        for snapshot, node in pairs
    )  # fmt: skip
    return (replace(made[0], measured=_measured(view.bench)),) if only and view.bench is not None else made


def _measured(result: BenchResult) -> tuple[Json, ...]:
    """Each op at its largest verified size, where one host measured itself and nothing ended it early."""
    from agent.jobs.bench_history import line_of  # it draws as well, and a report holds records

    line = line_of(result)
    if line.hosts != 1 or not line.complete:
        return ()
    return tuple(
        {"op": one.op[:32], "bytes": one.size_bytes, "job": line.job[:64], "busbw": round(one.busbw_bytes_per_second)}
        for one in line.largest[:8]
    )


def _record(
    snapshot: Snapshot, node: NodeTopology, checks: Sequence[Check], name: str, at: float, interval: float
) -> NodeRecord:
    rdma, limits = snapshot.facts(RdmaFacts), snapshot.facts(LimitsFacts)
    ports = [port for device in rdma.devices for port in device.ports] if rdma else None
    models = Counter(gpu.model for gpu in node.gpus if gpu.model)
    facts, addresses = node_facts.pack(snapshot)
    return NodeRecord(
        name=name, host=snapshot.hostname, verdict=judge(checks).word, scanned_at_seconds=at,
        interval_seconds=interval, gpus=_gpus(node, snapshot), product=models.most_common(1)[0][0] if models else None,
        links=_links(node), hcas=len(rdma.devices) if rdma else None,
        rdma=f"{sum(p.state == 'ACTIVE' for p in ports)}/{len(ports)} active" if ports is not None else None,
        memlock=_memlock(limits), findings=_findings(checks), graph=pack(node),
        facts=facts, addresses=addresses,
    )  # fmt: skip


def _gpus(node: NodeTopology, snapshot: Snapshot) -> int | None:
    """None, and not 0, where the bus shows GPUs that could not be read."""
    return len(node.gpus) or (None if no_gpu_read(snapshot) else 0)


def _links(node: NodeTopology) -> str | None:
    gpus = {gpu.name for gpu in node.gpus}
    labels = Counter(pair.label for pair in node.pairs if pair.a in gpus and pair.b in gpus)
    text = ", ".join(f"{label} ({units.count(count, 'pair')})" for label, count in labels.most_common())
    return text[:64] or None


def _memlock(limits: LimitsFacts | None) -> str | None:
    if limits is None or not limits.memlock_known:
        return None
    if limits.memlock_soft_bytes is None:
        return "unlimited"
    small = limits.memlock_soft_bytes < 2**20
    return f"{limits.memlock_soft_bytes / (2**10 if small else 2**20):.4g} {'KiB' if small else 'MiB'}"


def _findings(checks: Sequence[Check]) -> tuple[Json, ...]:
    """The worst of what did not pass; what could not be measured where it was required, each reason once."""
    bad = [c for c in worst_first(checks) if c.status in ("fail", "warn")]
    unmeasured = {(c.id.split(".")[0], c.message): c for c in reversed(worst_first(checks)) if c.required and
                  c.status == "unknown"}  # fmt: skip
    bad = [*(c for c in bad if c.status == "fail"), *reversed(unmeasured.values()),
           *(c for c in bad if c.status == "warn")][:MOST_FINDINGS]  # fmt: skip
    return tuple(
        {
            "code": c.id[:128],
            "severity": c.status,
            "subject": c.subject[:128],
            "message": c.message[:512],
            "remedy": c.remedy[:512],
        }
        for c in bad
    )


def pack(node: NodeTopology) -> str | None:
    """The graph without what only names one machine; None where it is larger than a record may be."""
    bare = replace(node, hostname="", gpus=tuple(replace(gpu, uuid=None) for gpu in node.gpus))
    text = json.dumps(to_json(bare), separators=(",", ":"), sort_keys=True)
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return packed if len(packed) <= MOST_TEXT else None


def unpack(text: str) -> NodeTopology:
    """Raises ValueError where the text is no graph of this release, or unpacks to too much."""
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(text, validate=True), MOST_GRAPH_BYTES)
        if inflate.unconsumed_tail or not inflate.eof:
            raise ValueError(f"the graph is cut off, or larger than {MOST_GRAPH_BYTES} bytes")
        return node_from_json(plain(raw))
    except (zlib.error, TypeError, TopologyWireError) as error:
        raise ValueError(f"no graph: {error}") from None


def to_resource(record: NodeRecord) -> tuple[Json, Json]:
    """The object, and the object with its status: two writes, as the status is a subresource."""
    about = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": record.name}}
    status = {
        "agentVersion": record.agent_version, "scannedAt": _time(record.scanned_at_seconds),
        "interval": max(1, round(record.interval_seconds)), "verdict": record.verdict, "node": record.host,
        "product": record.product, "gpus": record.gpus, "links": record.links, "hcas": record.hcas,
        "rdma": record.rdma, "memlock": record.memlock, "findings": list(record.findings), "topology": record.graph,
        "facts": record.facts, "addresses": list(record.addresses) or None,
        "measured": list(record.measured) or None,
    }  # fmt: skip
    if record.stopped_at_seconds is not None:  # nothing watches the node now: what was said last is no verdict any more
        status |= {
            "stoppedAt": _time(record.stopped_at_seconds), "verdict": "unknown", "lastVerdict": record.verdict,
        }  # fmt: skip
    return (
        {**about, "spec": {"nodeName": record.name}},
        {**about, "status": {key: value for key, value in status.items() if value is not None}},
    )


def from_resource(item: Json) -> NodeRecord:
    """A record from the API server's object. An agent that has not written yet is an unknown node, never scanned."""
    status = item.get("status") or {}
    name = str(item["metadata"]["name"])
    ended = _seconds(status["stoppedAt"]) if status.get("stoppedAt") else None
    if ended is not None and ended < _seconds(status.get("scannedAt")):
        ended = None  # an agent has scanned since
    last = status.get("lastVerdict") if ended is not None else None
    return NodeRecord(
        name=name, host=str(status.get("node") or name),
        verdict=str(last or status.get("verdict") or "unknown"), stopped_at_seconds=ended,
        scanned_at_seconds=_seconds(status.get("scannedAt")), interval_seconds=float(status.get("interval") or 300),
        gpus=status.get("gpus"), product=status.get("product"), links=status.get("links"), hcas=status.get("hcas"),
        rdma=status.get("rdma"), memlock=status.get("memlock"), findings=tuple(status.get("findings") or ()),
        graph=status.get("topology"), agent_version=str(status.get("agentVersion") or ""),
        facts=status.get("facts"), addresses=tuple(status.get("addresses") or ()),
        measured=tuple(status.get("measured") or ()),
    )  # fmt: skip


class Fleet:
    """All records, by name; what a watch or this agent's own scan feeds, and requests read."""

    def __init__(self) -> None:
        self._records: dict[str, NodeRecord] = {}
        self._texts: dict[str, str] = {}
        self._graphs: dict[str, NodeTopology | None] = {}
        self._facts: dict[str, Snapshot | None] = {}
        self._lock = threading.Lock()

    def replace(self, items: Iterable[Json]) -> None:
        """A whole list of resources."""
        self.set(from_resource(item) for item in items)

    def set(self, records: Iterable[NodeRecord]) -> None:
        """Exactly these records."""
        found = {record.name: self._interned(record) for record in records}
        with self._lock:
            self._records = found
            held = {text for record in found.values() for text in (record.graph, record.facts)}
            self._texts = {text: text for text in held if text}
            self._graphs = {text: graph for text, graph in self._graphs.items() if text in held}
            self._facts = {text: facts for text, facts in self._facts.items() if text in held}

    def put(self, item: Json) -> None:
        """One resource that is new or has changed."""
        record = self._interned(from_resource(item))
        with self._lock:
            self._records = {**self._records, record.name: record}

    def remove(self, item: Json) -> None:
        """One resource that is gone."""
        name = item["metadata"]["name"]
        with self._lock:
            self._records = {key: value for key, value in self._records.items() if key != name}

    def records(self) -> tuple[NodeRecord, ...]:
        """By name."""
        found = self._records
        return tuple(found[name] for name in sorted(found))

    def record(self, name: str) -> NodeRecord | None:
        """What that node publishes; None where nobody speaks for it."""
        return self._records.get(name)

    def topology(self, record: NodeRecord) -> NodeTopology | None:
        """The record's graph under its own host name; nodes with equal graphs share one."""
        if record.graph is None:
            return None
        if record.graph not in self._graphs:
            try:
                self._graphs[record.graph] = unpack(record.graph)
            except ValueError:
                self._graphs[record.graph] = None  # of another release
        graph = self._graphs[record.graph]
        return replace(graph, hostname=record.name) if graph else None

    def snapshot(self, record: NodeRecord) -> Snapshot:
        """What the node's agent read, as far as advice needs it, under the record's name.

        Where the record holds no facts that this release reads, each probe failed for that reason.
        """
        why = f"the record of {record.name} (agent {record.agent_version or 'unknown'}) holds no facts of this release"
        if record.facts is None:
            return node_facts.unpublished(record.name, why)
        if record.facts not in self._facts:
            try:
                self._facts[record.facts] = node_facts.unpack(record.facts)
            except ValueError:
                self._facts[record.facts] = None  # of another release
        facts = self._facts[record.facts]
        try:
            if facts is not None:
                return node_facts.of_node(facts, name=record.name, addresses=record.addresses)
        except ValueError:
            log.warning("the record of %s holds addresses that are not its interfaces'", record.name)
        return node_facts.unpublished(record.name, why)

    def _interned(self, record: NodeRecord) -> NodeRecord:
        """The record with its long texts shared: equal nodes hold each of them once."""
        graph, facts = (self._texts.setdefault(text, text) if text else text for text in (record.graph, record.facts))
        return replace(record, graph=graph, facts=facts)


def row(record: NodeRecord, now: float | None = None) -> Json:
    """One line of /nodes. A silent node's verdict is unknown, whatever it said last."""
    now = time.time() if now is None else now
    silent = record.silent(now)
    made: Json = {
        "name": record.name, "host": record.host, "verdict": "unknown" if silent else record.verdict,
        "silent": silent, "age_seconds": round(record.age_seconds(now), 1), "gpus": record.gpus,
        "product": record.product, "links": record.links, "hcas": record.hcas, "rdma": record.rdma,
        "memlock": record.memlock, "findings": list(record.findings), "agent_version": record.agent_version,
    }  # fmt: skip
    if silent:
        made["last_verdict"] = record.verdict
    return made


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(text: Any) -> float:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0

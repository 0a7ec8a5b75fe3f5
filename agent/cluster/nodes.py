"""One record per node, created from a scan and stored in the custom resource NodeTopology.

Specification: deploy/daemonset/base/nodetopology-crd.yaml. A record contains the machine's facts without host name,
UUIDs and addresses (agent.cluster.node_facts). Equal nodes therefore have equal facts, and thousands of nodes have only
a few distinct machines. `status.graph` (devices, the matrix, islands, nearest NICs) is derived from the facts for human
readers and is never read back. agent.cluster.publish creates the record of the own node.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, TypedDict

from agent.base import version
from agent.cluster import node_facts
from contracts import plain
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.rdma.facts import RdmaFacts
from topology.build import build
from topology.graph import NodeTopology

log = logging.getLogger(__name__)

Json = dict[str, Any]
API_VERSION = "topoflight.io/v1alpha1"
KIND = "NodeTopology"
PLURAL = "nodetopologies"
SILENT_INTERVALS = 3  # missed writes in a row after which a node is silent
LEAST_SILENT_SECONDS = 120.0


class Measured(TypedDict):
    """The result of one collective at its largest verified size."""

    op: str
    bytes: int
    job: str
    busbw: float  # bytes per second


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """The record that one agent publishes about its node."""

    name: str  # name of the Kubernetes Node, or the host name
    host: str  # name that the probes read
    verdict: str  # "pass", "warn", "unknown", "fail"
    scanned_at_seconds: float
    interval_seconds: float = 300.0  # longest time between two writes
    gpus: int | None = None
    product: str | None = None
    links: str | None = None  # link types of GPU pairs: "NV18 (28 pairs)"
    hcas: int | None = None
    rdma: str | None = None  # "8/8 active"
    memlock: str | None = None  # "unlimited", "8 MiB"
    findings: tuple[dict[str, str], ...] = ()
    graph: str | None = None  # key of the graph's inputs: nodes with the same key have equal graphs
    facts: str | None = None  # key of all facts
    machine: dict[str, Json] | None = field(default=None, compare=False, repr=False)  # facts with these keys
    drawn: Json | None = field(default=None, compare=False, repr=False)  # the graph for human readers; own node only
    addresses: tuple[str, ...] = ()  # of the node, they replace the numbers in the facts
    measured: tuple[Measured, ...] = ()  # its last benchmark with all ranks on this node
    changes: tuple[dict[str, str], ...] = ()  # recent changes, oldest first: at, kind, text, code
    agent_version: str = version()
    stopped_at_seconds: float | None = None  # when its agent reported its end; None while it runs, or if it was killed

    @property
    def gpu_text(self) -> str:
        """Return the GPUs in words: "8 × NVIDIA H100"."""
        if not self.gpus:
            return "GPUs unknown" if self.gpus is None else "no GPU"
        return f"{self.gpus} × {self.product or 'unknown model'}"

    @property
    def rdma_text(self) -> str:
        """Return the RDMA ports in words: "8/8 active"."""
        return self.rdma or ("none" if self.hcas == 0 else "unknown")

    def age_seconds(self, now: float) -> float:
        """Return the seconds since the scan, at least 0 even if clocks differ."""
        return max(0.0, now - self.scanned_at_seconds)

    def silent(self, now: float) -> bool:
        """Return whether its agent ended, missed too many writes, or reports a scan in the future."""
        if self.stopped_at_seconds is not None or self.scanned_at_seconds > now + LEAST_SILENT_SECONDS:
            return True
        return self.age_seconds(now) > max(LEAST_SILENT_SECONDS, SILENT_INTERVALS * self.interval_seconds)


def keys_of(machine: Json | None) -> tuple[str | None, str | None]:
    """Return the keys of the graph's inputs and of all facts; equal facts have equal keys. Raises ValueError."""
    if machine is None:
        return None, None
    graph = _key([_key(machine.get(part)) for part in node_facts.GRAPH_PARTS])
    rest = [(part, _key(machine[part])) for part in sorted(machine) if part not in node_facts.GRAPH_PARTS]
    return graph, _key([graph, *rest])


def _key(value: Any) -> str:
    try:
        text = json.dumps(value, sort_keys=True)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# Members of a status and the names of the corresponding members of a record.
NAMES = {
    "agentVersion": "agent_version", "node": "host", "interval": "interval_seconds",
    **{name: name for name in ("product", "gpus", "links", "hcas", "rdma", "memlock", "findings", "machine",
                               "addresses", "measured", "changes")},
}  # fmt: skip
_VERDICTS = ("pass", "warn", "unknown", "fail")
_MOST = {"gpus": 1024, "hcas": 1024, "interval_seconds": 86400}
# The object was written by another release or edited by another client.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


def read_resource(item: Json) -> NodeRecord:
    """Like `from_resource`, but return an unknown node for an object of another program. Raises KeyError."""
    try:
        return from_resource(item)
    except _UNREADABLE as error:
        name = str(item["metadata"]["name"])
        log.warning("the NodeTopology of %s is invalid: %s; its node counts as unknown", name[:253], error)
        return NodeRecord(name=name, host=name, verdict="unknown", scanned_at_seconds=0.0, agent_version="")


def from_resource(item: Json) -> NodeRecord:
    """Create a record from an API object. If its agent has not written yet, the node is unknown and never scanned.

    Raises ValueError for an object of another program, which an old or missing CRD does not reject.
    """
    name, status = str(item["metadata"]["name"]), item.get("status") or {}
    ended = seconds_of(status["stoppedAt"]) if status.get("stoppedAt") else None
    if ended is not None and ended < seconds_of(status.get("scannedAt")):
        ended = None  # an agent has scanned since then
    verdict = (status.get("lastVerdict") if ended is not None else None) or status.get("verdict") or "unknown"
    given = {own: status[theirs] for theirs, own in NAMES.items() if status.get(theirs) not in (None, "")}
    record = plain.read(
        {"host": name, "agent_version": "", **given, "name": name, "verdict": verdict,
         "scanned_at_seconds": seconds_of(status.get("scannedAt")), "stopped_at_seconds": ended}, NodeRecord,
    )  # fmt: skip
    if verdict not in _VERDICTS:
        raise ValueError("status.verdict is no verdict")
    for member, most in _MOST.items():
        if not 0 <= (getattr(record, member) or 0) <= most:
            raise ValueError(f"status.{member} must be a number from 0 to {most}")
    graph, facts = keys_of(record.machine)
    return replace(record, graph=graph, facts=facts)


class _Machine:
    """The facts that equal nodes share, and values derived from them."""

    def __init__(self, facts: dict[str, Json]) -> None:
        self.facts = facts

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """Return the snapshot without host name; None if the facts are of another release."""
        try:
            return node_facts.unpack(self.facts)
        except _UNREADABLE:
            return None

    @cached_property
    def alike(self) -> str:
        """Return a key of all facts except GPU memory in use."""
        parts = (part for part in sorted(self.facts) if part != node_facts.MEMORY_USED)
        return _key([(part, _key(self.facts[part])) for part in parts])


class Fleet:
    """All records by name, from lists of the cluster or from this agent's own scan."""

    def __init__(self) -> None:
        self._records: dict[str, NodeRecord] = {}
        self._versions: dict[str, str] = {}  # resourceVersion of each record
        self._machines: dict[str, _Machine] = {}  # by key of the facts, so that equal nodes share one object
        self._graphs: dict[str, NodeTopology | None] = {}  # by key of their facts, because building one is slow

    def replace(self, items: Iterable[Json]) -> None:
        """Replace all records by a complete list of resources; those that have not changed are not read again."""
        versions: dict[str, str] = {}

        def each() -> Iterator[NodeRecord]:
            for item in items:
                name, version = str(item["metadata"]["name"]), str(item["metadata"].get("resourceVersion", ""))
                versions[name] = version
                known = self._records.get(name) if version and self._versions.get(name) == version else None
                yield known or read_resource(item)

        self.set(each())
        self._versions = versions

    def set(self, records: Iterable[NodeRecord]) -> None:
        """Replace all records by these."""
        self._records = {record.name: self._interned(record) for record in records}
        used = {key for record in self._records.values() for key in (record.graph, record.facts)}
        self._machines = {key: machine for key, machine in self._machines.items() if key in used}
        self._graphs = {key: graph for key, graph in self._graphs.items() if key in used}

    def records(self) -> tuple[NodeRecord, ...]:
        """Return all records, sorted by name."""
        found = self._records
        return tuple(found[name] for name in sorted(found))

    def record(self, name: str) -> NodeRecord | None:
        """Return the record that this node publishes; None if no agent publishes one."""
        return self._records.get(name)

    def topology(self, record: NodeRecord) -> NodeTopology | None:
        """Return the record's graph with its own host name; None without a graph of this release."""
        if record.graph is None:
            return None
        if record.graph not in self._graphs:
            try:
                self._graphs[record.graph] = _graph_of(self._machine(record))
            except _UNREADABLE:
                self._graphs[record.graph] = None  # written by another release
        found = self._graphs[record.graph]
        return replace(found, hostname=record.name) if found else None

    def machine_key(self, record: NodeRecord) -> str | None:
        """Return a key shared by records with equal facts except GPU memory in use; None without readable facts."""
        machine = self._machines.get(record.facts or "")
        return machine.alike if machine is not None and machine.snapshot is not None else None

    def _machine(self, record: NodeRecord) -> Snapshot | None:
        machine = self._machines.get(record.facts or "")
        return machine.snapshot if machine is not None else None

    def snapshot(self, record: NodeRecord) -> Snapshot:
        """Return what the node's agent read, as far as advice needs it, with the record's name.

        If the record contains no facts that this release can read, each probe is failed with that reason.
        """
        facts = self._machine(record)
        try:
            if facts is not None:
                return node_facts.of_node(facts, name=record.name, addresses=record.addresses)
        except _UNREADABLE:
            log.warning("the record of %s holds addresses that are not its interfaces'", record.name)
        why = f"the record of {record.name} (agent {record.agent_version or 'unknown'}) holds no facts of this release"
        return node_facts.unpublished(record.name, why)

    def _interned(self, record: NodeRecord) -> NodeRecord:
        """Return the record with shared machine and key objects, so that equal nodes use memory once."""
        graph, facts = (text and sys.intern(text) for text in (record.graph, record.facts))
        machine = record.machine
        if machine is not None and facts is not None:
            machine = self._machines.setdefault(facts, _Machine(machine)).facts
        return replace(record, graph=graph, facts=facts, machine=machine, drawn=None)


def _graph_of(snapshot: Snapshot | None) -> NodeTopology | None:
    """Build the graph of a record's facts, without host name.

    Raises ValueError if two devices have the same name, or if there are too many, as every pair is evaluated.
    """
    if snapshot is None:
        return None
    gpus, rdma = snapshot.facts(GpuFacts), snapshot.facts(RdmaFacts)
    if len(gpus.gpus if gpus else ()) + len(rdma.devices if rdma else ()) > node_facts.MOST_DEVICES:
        raise ValueError(f"more than {node_facts.MOST_DEVICES} devices")
    node = build(snapshot)
    if len({device.name for device in node.devices}) != len(node.devices):
        raise ValueError("two devices have one name")
    return node


def row(record: NodeRecord, now: float | None = None) -> Json:
    """Return one row of /nodes. A silent node is unknown, whatever its last verdict was."""
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


def time_of(seconds: float) -> str:
    """Format a Unix time as in a record."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: Any) -> float:
    """Parse a time of a record to Unix time; 0 if it is invalid."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0

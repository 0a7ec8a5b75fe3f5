"""Every node at a glance: one record per node, made from a scan, carried by the custom resource NodeTopology.

Specification: deploy/daemonset/base/nodetopology-crd.yaml. A record holds the machine's facts without host name, UUIDs
and addresses (agent.cluster.node_facts), so that equal nodes carry equal facts: thousands of nodes are then a handful
of machines. What people read of it (`status.graph`: devices, the matrix, islands, nearest NICs) follows from the facts;
it is written for them and never read back.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypedDict, cast

from agent.base import units
from agent.base.version import VERSION
from agent.checks.coverage import no_gpu_read
from agent.checks.groups import worst_first
from agent.checks.history import SCANS_TO_RAISE, Event, Kept, Seen
from agent.checks.verdict import judge
from agent.checks.view import View
from agent.cluster import node_facts
from agent.cluster.node_facts import clean
from collectives.bench.results import BenchResult
from contracts import plain
from contracts.finding import Finding, Status
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.limits.probe import LimitsFacts
from probes.rdma.facts import RdmaFacts
from topology.build import build
from topology.graph import SELF, GpuNode, NicNode, NodeTopology, Pairs

log = logging.getLogger(__name__)

Json = dict[str, Any]
API_VERSION = "topoflight.io/v1alpha1"
KIND = "NodeTopology"
PLURAL = "nodetopologies"
MOST_FINDINGS = 64
MOST_CHANGES = 32  # the newest; why so many: docs/decisions/0026
SILENT_INTERVALS = 3  # writes missed in a row before a node is called silent
LEAST_SILENT_SECONDS = 120.0


class Measured(TypedDict):
    """One collective at its largest verified size."""

    op: str
    bytes: int
    job: str
    busbw: float  # bytes per second


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
    findings: tuple[dict[str, str], ...] = ()
    graph: str | None = None  # key of what the graph is built from: nodes with the same one have equal graphs
    facts: str | None = None  # key of the whole machine
    machine: dict[str, Json] | None = field(default=None, compare=False, repr=False)  # of these keys
    drawn: Json | None = field(default=None, compare=False, repr=False)  # the graph for people, of the own node only
    addresses: tuple[str, ...] = ()  # the node's own, in place of the facts' numbers
    measured: tuple[Measured, ...] = ()  # by its last benchmark on itself alone
    changes: tuple[dict[str, str], ...] = ()  # what came, went and changed of late, oldest first: at, kind, text, code
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
    if not only:
        return made
    measured = _measured(view.bench) if view.bench is not None else ()
    return (replace(made[0], measured=measured, changes=_changes(view)),)


def _changes(view: View) -> tuple[Json, ...]:
    return tuple(
        {"at": _time(event.at_seconds), "kind": event.kind, "text": clean(event.text, 300),
         "code": clean(event.code, 128), "subject": clean(event.subject, 128)}
        for event in view.events[-MOST_CHANGES:]
    )  # fmt: skip


def kept_in(record: NodeRecord) -> Kept:
    """The history that the record holds: its changes, and the findings that held with the time since when.

    Raises ValueError, KeyError or TypeError where it is none of ours.
    """
    held = [one for one in record.findings if one.get("severity") in ("fail", "warn")]
    return Kept(
        events=[Event(at_seconds=seconds_of(one["at"]), kind=cast("Any", one["kind"]), text=one.get("text", ""),
                      code=one.get("code", ""), subject=one.get("subject", "")) for one in record.changes],
        open={
            _which(one): Seen(
                checks=(Finding(code=one["code"], status=Status(one["severity"]), node=record.host,
                                subject=one.get("subject", ""), message=one.get("message", ""),
                                remedy=one.get("remedy", "")),),
                since=seconds_of(one.get("since")) or record.scanned_at_seconds, scans=SCANS_TO_RAISE, raised=True)
            for one in held
        },
    )  # fmt: skip


def _measured(result: BenchResult) -> tuple[Measured, ...]:
    """Each op at its largest verified size, where one host measured itself and nothing ended it early."""
    from agent.base.result_store import line_of  # it draws as well, and a report holds records

    line = line_of(result)
    if line.hosts != 1 or not line.complete:
        return ()
    return tuple(
        {"op": one.op[:32], "bytes": one.size_bytes, "job": line.job[:64], "busbw": round(one.busbw_bytes_per_second)}
        for one in line.largest[:8]
    )


def _record(
    snapshot: Snapshot, node: NodeTopology, checks: Sequence[Finding], name: str, at: float, interval: float
) -> NodeRecord:
    rdma, limits = snapshot.facts(RdmaFacts), snapshot.facts(LimitsFacts)
    ports = [port for device in rdma.devices for port in device.ports] if rdma else None
    models = Counter(gpu.model for gpu in node.gpus if gpu.model)
    machine, addresses = node_facts.pack(snapshot)
    graph, facts = _keys(machine)
    return NodeRecord(
        name=clean(name, 253), host=clean(snapshot.hostname, 253), verdict=judge(checks).word, scanned_at_seconds=at,
        interval_seconds=interval, gpus=_gpus(node, snapshot),
        product=clean(models.most_common(1)[0][0], 128) if models else None,
        links=_links(node), hcas=len(rdma.devices) if rdma else None,
        rdma=f"{sum(p.state == 'ACTIVE' for p in ports)}/{len(ports)} active" if ports is not None else None,
        memlock=_memlock(limits), findings=_findings(checks), graph=graph,
        facts=facts, machine=machine, drawn=drawn(node), addresses=addresses,
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


def _findings(checks: Sequence[Finding]) -> tuple[Json, ...]:
    """The worst of what did not pass; what could not be measured where it was required, each reason once."""
    bad = [c for c in worst_first(checks) if c.status in ("fail", "warn")]
    unmeasured = {(c.code.split(".")[0], c.message): c for c in reversed(worst_first(checks)) if c.required and
                  c.status == "unknown"}  # fmt: skip
    bad = [*(c for c in bad if c.status == "fail"), *reversed(unmeasured.values()),
           *(c for c in bad if c.status == "warn")][:MOST_FINDINGS]  # fmt: skip
    return tuple(
        {
            "code": clean(c.code, 128),
            "severity": c.status.value,
            "subject": clean(c.subject, 128),
            "message": clean(c.message),
            "remedy": clean(c.remedy),
        }
        for c in bad
    )


class FirstSeen:
    """Since when each finding is there: by the history, else as far as this process knows."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], str] = {}

    def dated(self, record: NodeRecord, known: Mapping[tuple[str, str], float] = MappingProxyType({})) -> NodeRecord:
        """The record with `since` in each finding; one that was not there before began with this scan."""
        now = _time(record.scanned_at_seconds)
        kept = {**self._since, **{key: _time(at) for key, at in known.items()}}
        since = {key: kept.get(key, now) for key in map(_which, record.findings)}
        self._since = since
        return replace(record, findings=tuple({**each, "since": since[_which(each)]} for each in record.findings))


def _which(finding: Json) -> tuple[str, str]:
    return str(finding.get("code", "")), str(finding.get("subject", ""))


def _keys(machine: Json | None) -> tuple[str | None, str | None]:
    """Keys of what the graph is built from, and of the whole; equal facts have equal keys. Raises ValueError."""
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


def drawn(node: NodeTopology) -> Json | None:
    """The graph as `kubectl get nodetopology -o yaml` shows it; None where there is no device, or too many."""
    if not 1 <= len(node.devices) <= node_facts.MOST_DEVICES:
        return None
    known, names = Pairs(node.pairs), [device.name for device in node.devices]
    made: Json = {
        "devices": [
            {**_device(device), "links": " ".join(_cell(device.name, other, known) for other in names)}
            for device in node.devices
        ],
        "islands": [
            {"gpus": list(island.gpus), "links": list(island.nvlinks_per_pair), "allToAll": island.all_to_all}
            for island in node.islands
        ],
        "nearest": [
            _known(gpu=near.gpu, nics=list(near.nics), link=near.label, why=clean(near.why) or None)
            | ({} if near.decidable else {"decidable": False})
            for near in node.nearest_nic
        ],
        **_known(recognised=node.sku, hidden=clean(node.virtual) if node.virtual else None),
    }  # fmt: skip
    return {name: value for name, value in made.items() if value != []}


def _cell(a: str, b: str, known: Pairs) -> str:
    return SELF if a == b else known.label(a, b)


def _device(device: GpuNode | NicNode) -> Json:
    about = _known(name=device.name, pci=device.bus_id, numa=device.numa_node, pcie=device.pcie_link)
    if isinstance(device, GpuNode):
        more = _known(model=device.model, memoryBytes=device.memory_bytes)
        return {**about, "kind": "gpu", **more, **({} if device.usable else {"usable": False})}
    rate = device.rate_bytes_per_second
    more = _known(bytesPerSecond=None if rate is None else round(rate), linkLayer=device.link_layer)
    return {**about, "kind": device.kind, **more, **({"usable": False} if device.active is False else {})}


def _known(**named: Any) -> Json:
    """What is known of it, texts cleaned."""
    known = {name: value for name, value in named.items() if value is not None}
    return {name: clean(value, 128) if isinstance(value, str) else value for name, value in known.items()}


# Members of a status that are members of a record under another name, or the same one.
_NAMES = {
    "agentVersion": "agent_version", "node": "host", "interval": "interval_seconds",
    **{name: name for name in ("product", "gpus", "links", "hcas", "rdma", "memlock", "findings", "machine",
                               "addresses", "measured", "changes")},
}  # fmt: skip
_VERDICTS = ("pass", "warn", "unknown", "fail")
_MOST = {"gpus": 1024, "hcas": 1024, "interval_seconds": 86400}
# Of another release, or of somebody else's hand
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


def to_resource(record: NodeRecord) -> tuple[Json, Json]:
    """The object, and the object with its status: two writes, as the status is a subresource."""
    about = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": record.name}}
    status = {name: getattr(record, member) for name, member in _NAMES.items()} | {
        "scannedAt": _time(record.scanned_at_seconds), "interval": max(1, round(record.interval_seconds)),
        "verdict": record.verdict, "graph": record.drawn,
    }  # fmt: skip
    if record.stopped_at_seconds is not None:  # nothing watches the node now: what was said last is no verdict any more
        status |= {
            "stoppedAt": _time(record.stopped_at_seconds), "verdict": "unknown", "lastVerdict": record.verdict,
        }  # fmt: skip
    known = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in status.items()
        if value is not None and (value != () or name == "findings")
    }
    return {**about, "spec": {"nodeName": record.name}}, {**about, "status": known}


def read_resource(item: Json) -> NodeRecord:
    """As `from_resource`; an object that is none of ours is an unknown node, and hides no other. Raises KeyError."""
    try:
        return from_resource(item)
    except _UNREADABLE as error:
        name = str(item["metadata"]["name"])
        log.warning("the NodeTopology of %s is not one: %s; its node counts as unknown", name[:253], error)
        return NodeRecord(name=name, host=name, verdict="unknown", scanned_at_seconds=0.0, agent_version="")


def from_resource(item: Json) -> NodeRecord:
    """A record from the API server's object. An agent that has not written yet is an unknown node, never scanned.

    Raises ValueError where it is none of ours: where the definition is older or missing it lets all through.
    """
    name, status = str(item["metadata"]["name"]), item.get("status") or {}
    ended = seconds_of(status["stoppedAt"]) if status.get("stoppedAt") else None
    if ended is not None and ended < seconds_of(status.get("scannedAt")):
        ended = None  # an agent has scanned since
    verdict = (status.get("lastVerdict") if ended is not None else None) or status.get("verdict") or "unknown"
    given = {own: status[theirs] for theirs, own in _NAMES.items() if status.get(theirs) not in (None, "")}
    record = plain.read(
        {"host": name, "agent_version": "", **given, "name": name, "verdict": verdict,
         "scanned_at_seconds": seconds_of(status.get("scannedAt")), "stopped_at_seconds": ended}, NodeRecord,
    )  # fmt: skip
    if verdict not in _VERDICTS:
        raise ValueError("status.verdict is no verdict")
    for member, most in _MOST.items():
        if not 0 <= (getattr(record, member) or 0) <= most:
            raise ValueError(f"status.{member} must be a number from 0 to {most}")
    graph, facts = _keys(record.machine)
    return replace(record, graph=graph, facts=facts)


class _Machine:
    """The facts that equal nodes share, and what follows from them."""

    def __init__(self, facts: dict[str, Json]) -> None:
        self.facts = facts

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """The snapshot without host name; None where the facts are of another release."""
        try:
            return node_facts.unpack(self.facts)
        except _UNREADABLE:
            return None

    @cached_property
    def alike(self) -> str:
        """A key of all of it but for GPU memory in use."""
        parts = (part for part in sorted(self.facts) if part != node_facts.MEMORY_USED)
        return _key([(part, _key(self.facts[part])) for part in parts])


class Fleet:
    """All records, by name; what a watch or this agent's own scan feeds, and requests read."""

    def __init__(self) -> None:
        self._records: dict[str, NodeRecord] = {}
        self._machines: dict[str, _Machine] = {}  # by the key of their facts: equal nodes hold them once
        # By key, and with it the key of an equal graph, whatever else of their facts differs: hashing a graph takes
        # longer than all the rest of an answer
        self._graphs: dict[str, tuple[NodeTopology, str] | None] = {}
        self._kinds: dict[NodeTopology, str] = {}
        self._lock = threading.Lock()

    def replace(self, items: Iterable[Json]) -> None:
        """A whole list of resources."""
        self.set(read_resource(item) for item in items)

    def set(self, records: Iterable[NodeRecord]) -> None:
        """Exactly these records."""
        found = {record.name: self._interned(record) for record in records}
        with self._lock:
            self._records = found
            held = {key for record in found.values() for key in (record.graph, record.facts)}
            self._machines = {key: machine for key, machine in self._machines.items() if key in held}
            self._kinds = {graph: key for graph, key in self._kinds.items() if key in held}
            self._graphs = {key: one for key, one in self._graphs.items() if {key, one[1] if one else key} <= held}

    def put(self, item: Json) -> None:
        """One resource that is new or has changed."""
        record = self._interned(read_resource(item))
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
        """What that node publishes; None where no agent publishes it."""
        return self._records.get(name)

    def topology(self, record: NodeRecord) -> NodeTopology | None:
        """The record's graph under its own host name; nodes with equal graphs share one."""
        found = self._graph(record)
        return replace(found[0], hostname=record.name) if found else None

    def kind(self, record: NodeRecord) -> str | None:
        """A key that records with equal graphs share, to the last link; None without a graph of this release."""
        found = self._graph(record)
        return found[1] if found else None

    def machine_key(self, record: NodeRecord) -> str | None:
        """A key that records share whose facts are equal, but for GPU memory in use; None without readable facts."""
        machine = self._machines.get(record.facts or "")
        return machine.alike if machine is not None and machine.snapshot is not None else None

    def _graph(self, record: NodeRecord) -> tuple[NodeTopology, str] | None:
        if record.graph is not None and record.graph not in self._graphs:
            try:
                graph = _graph_of(self._machine(record))
            except _UNREADABLE:
                graph = None  # of another release
            if graph is None:
                self._graphs[record.graph] = None
            else:  # one object for equal graphs: by that the planner knows that they are alike
                kind = self._kinds.setdefault(graph, record.graph)
                self._graphs[record.graph] = self._graphs.get(kind) or (graph, kind)
        return self._graphs.get(record.graph or "")

    def _machine(self, record: NodeRecord) -> Snapshot | None:
        machine = self._machines.get(record.facts or "")
        return machine.snapshot if machine is not None else None

    def snapshot(self, record: NodeRecord) -> Snapshot:
        """What the node's agent read, as far as advice needs it, under the record's name.

        Where the record holds no facts that this release reads, each probe failed for that reason.
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
        """The record with its machine and its keys shared: equal nodes hold each of them once."""
        graph, facts = (text and sys.intern(text) for text in (record.graph, record.facts))
        machine = record.machine
        if machine is not None and facts is not None:
            machine = self._machines.setdefault(facts, _Machine(machine)).facts
        return replace(record, graph=graph, facts=facts, machine=machine, drawn=None)


def _graph_of(snapshot: Snapshot | None) -> NodeTopology | None:
    """The graph of a record's facts, without host name. Raises ValueError where two devices have one name, or too many
    are there: every pair of them is looked at.
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


def seconds_of(text: Any) -> float:
    """Unix time of a time in a record; 0 where it is none."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0

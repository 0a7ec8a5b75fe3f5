"""One record per node, stored in the custom resource NodeTopology.

Specification: deploy/daemonset/base/nodetopology-crd.yaml. A record contains the machine's facts without host name,
UUIDs and addresses. Equal nodes therefore have equal facts, and thousands of nodes have only a few distinct machines.
agent.http.state publishes the record of the agent's own node.
"""

from __future__ import annotations

import base64
import calendar
import gzip
import io
import ipaddress
import json
import logging
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

from agent.base import units, version
from agent.checks.findings import sort_worst_first
from agent.checks.host_checks import explain_unread_gpus, explain_unread_hcas
from agent.checks.verdict import judge
from agent.checks.view import View
from agent.cluster.client import Client, Json, make_path
from contracts import bounded, plain
from contracts.finding import Finding
from contracts.redaction import redact
from contracts.run_record import timestamp
from contracts.tables import read_table
from probes import wire
from probes.api import Absent, Failed, Ok, Snapshot
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import Interface
from probes.limits.probe import LimitsFacts, format_size as format_limit
from probes.pci.facts import PciDevice, is_network
from probes.rdma.facts import Gid, RdmaFacts
from probes.registry import ALL
from topology.build import build
from topology.graph import NodeTopology

log = logging.getLogger(__name__)

API_VERSION = "topoflight.io/v1alpha1"
KIND = "NodeTopology"
PLURAL = "nodetopologies"
SILENT_INTERVALS = 3  # missed writes in a row after which a node is silent
MIN_SILENT_SECONDS = 120.0
MAX_MACHINES = 128  # whose facts and graph are cached
MAX_FINDINGS = 64
MAX_CHANGES = 32  # the newest; docs/decisions/0131 explains the number


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
    driver: str | None = None
    findings: tuple[dict[str, str], ...] = ()
    facts: str | None = field(default=None, repr=False)  # compressed by `pack_facts`; equal nodes have equal
    changes: tuple[dict[str, str], ...] = ()  # recent changes, oldest first: at, kind, text, code
    agent_version: str = version()
    stopped_at_seconds: float | None = None  # when its agent reported its end; None while it runs, or if it was killed
    resource_version: str = field(default="", compare=False)  # of the object; empty before it was written

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
        if self.stopped_at_seconds is not None or self.scanned_at_seconds > now + MIN_SILENT_SECONDS:
            return True
        return self.age_seconds(now) > max(MIN_SILENT_SECONDS, SILENT_INTERVALS * self.interval_seconds)


_TABLE = read_table(__file__, "nodes.toml")
_VERDICTS = ("pass", "warn", "unknown", "fail")
_MAX_VALUES = {"gpus": 1024, "hcas": 1024, "interval_seconds": 86400}
# The object was written by another release or edited by another client.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


def read_resource(item: Json) -> NodeRecord:
    """Like `from_resource`, but return an unknown node for an object of another program. Raises KeyError."""
    try:
        return from_resource(item)
    except _UNREADABLE as error:
        name = str(item["metadata"]["name"])
        log.warning("the NodeTopology of %s is invalid: %s; its node counts as unknown", name[:253], error)
        return make_unknown_node(name)


def make_unknown_node(name: str) -> NodeRecord:
    """Return the record of a node of which nothing is known: it was never scanned."""
    return NodeRecord(name=name, host=name, verdict="unknown", scanned_at_seconds=0.0, agent_version="")


def from_resource(item: Json) -> NodeRecord:
    """Create a record from an API object. If its agent has not written yet, the node is unknown and never scanned.

    Raises ValueError for an object of another program, which an old or missing CRD does not reject.
    """
    name, status = str(item["metadata"]["name"]), item.get("status") or {}
    ended = parse_time(status["stoppedAt"]) if status.get("stoppedAt") else None
    if ended is not None and ended < parse_time(status.get("scannedAt")):
        ended = None  # an agent has scanned since then
    verdict = (status.get("lastVerdict") if ended is not None else None) or status.get("verdict") or "unknown"
    members = {own: status[theirs] for theirs, own in _TABLE["members"].items() if status.get(theirs) not in (None, "")}
    record = plain.read(
        {"host": name, "agent_version": "", **members, "name": name, "verdict": verdict,
         "scanned_at_seconds": parse_time(status.get("scannedAt")), "stopped_at_seconds": ended,
         "resource_version": str(item["metadata"].get("resourceVersion", ""))}, NodeRecord,
    )  # fmt: skip
    if verdict not in _VERDICTS:
        raise ValueError("status.verdict is no verdict")
    for member, limit in _MAX_VALUES.items():
        if not 0 <= (getattr(record, member) or 0) <= limit:
            raise ValueError(f"status.{member} must be a number from 0 to {limit}")
    return record


# Make a record from a view, and the API objects of a record.


def make_record(view: View, *, name: str | None = None, interval_seconds: float = 300.0) -> NodeRecord:
    """Return the record of the view's host; `name` is the name of the Node."""
    (snapshot,), (node,), checks = view.snapshots, view.topologies, view.checks
    rdma, limits = snapshot.facts(RdmaFacts), snapshot.facts(LimitsFacts)
    has_none = isinstance(snapshot.outcomes.get("rdma"), Absent) and not explain_unread_hcas(snapshot)
    ports = [port for device in rdma.in_reach for port in device.ports] if rdma else None
    models = Counter(gpu.model for gpu in node.gpus if gpu.model)
    gpus = snapshot.facts(GpuFacts)
    names = {gpu.name for gpu in node.gpus}
    labels = Counter(pair.label for pair in node.pairs if {pair.a, pair.b} <= names).most_common()
    changes = tuple(
        {"at": timestamp(event.at_seconds), "kind": event.kind, "text": clean(event.text, 300),
         "code": clean(event.code, 128), "subject": clean(event.subject, 128)}
        for event in view.events[-MAX_CHANGES:]
    )  # fmt: skip
    return NodeRecord(
        name=clean(name or snapshot.hostname, 253), host=clean(snapshot.hostname, 253), verdict=judge(checks).word,
        scanned_at_seconds=view.made_at_seconds, interval_seconds=interval_seconds,
        gpus=len(node.gpus) or (None if explain_unread_gpus(snapshot) else 0),  # on the bus but unread: unknown, not 0
        product=clean(models.most_common(1)[0][0], 128) if models else None,
        links=", ".join(f"{label} ({units.count(count, 'pair')})" for label, count in labels)[:64] or None,
        hcas=len(rdma.in_reach) if rdma else 0 if has_none else None,
        rdma=f"{sum(p.state == 'ACTIVE' for p in ports)}/{len(ports)} active" if ports is not None else None,
        memlock=format_limit(limits.memlock_soft_bytes) if limits is not None and limits.memlock_known else None,
        driver=clean(gpus.driver_version, 64) if gpus and gpus.driver_version else None,
        findings=_list_findings(checks, view.since), facts=pack_facts(snapshot), changes=changes,
    )  # fmt: skip


def _list_findings(checks: Sequence[Finding], since: Mapping[tuple[str, str], float]) -> tuple[Json, ...]:
    """Return the worst checks that did not pass, and required checks that were not measured, each reason once.

    A finding that the history has raised (`since`) has its start time.
    """
    ordered = sort_worst_first(checks)
    unmeasured = {(c.code.split(".")[0], c.message): c for c in reversed(ordered) if c.required and
                  c.status == "unknown"}  # fmt: skip
    bad = [*(c for c in ordered if c.status == "fail"), *reversed(unmeasured.values()),
           *(c for c in ordered if c.status == "warn")][:MAX_FINDINGS]  # fmt: skip
    return tuple(
        {
            "code": clean(c.code, 128), "severity": c.status.value, "subject": clean(c.subject, 128),
            "message": clean(c.message), "remedy": clean(c.remedy),
            **({"since": timestamp(since[c.code, c.subject])} if (c.code, c.subject) in since else {}),
        }
        for c in bad
    )  # fmt: skip


def to_resource(record: NodeRecord) -> tuple[Json, Json]:
    """Return the object, and the object with its status: two writes, because status is a subresource."""
    about = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": record.name}}
    status = {name: getattr(record, member) for name, member in _TABLE["members"].items()} | {
        "scannedAt": timestamp(record.scanned_at_seconds), "interval": max(1, round(record.interval_seconds)),
        "verdict": record.verdict,
    }  # fmt: skip
    if record.stopped_at_seconds is not None:  # no agent watches the node now, so its last verdict is outdated
        stopped_at = timestamp(record.stopped_at_seconds)
        status |= {"stoppedAt": stopped_at, "verdict": "unknown", "lastVerdict": record.verdict}
    values = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in status.items()
        if value is not None and (value != () or name == "findings")
    }
    return {**about, "spec": {"nodeName": record.name}}, {**about, "status": values}


# The facts in a record: those of the probes as JSON, compressed with gzip and encoded in base64. Values that change
# between scans (counters, temperatures) or identify one machine are omitted. Addresses are replaced by their networks.

MAX_DEVICES = 256  # GPUs and NICs together: every pair is evaluated
MAX_LETTERS = 512  # of every text; longer texts are cut
MAX_FACTS_LETTERS = 65536  # of the compressed facts; an HGX H100 needs 5,000
MAX_FACTS_BYTES = 1 << 20  # of the JSON
_PROBES = [probe for probe in ALL if probe.name in ("gpu", "pci", "rdma", "interfaces", "limits", "hostinfo")]

_PROCESS = re.compile(r"^this process, pid \d+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def clean(text: str, limit: int = MAX_LETTERS) -> str:
    """Remove secrets and control characters from a text of the host, and cut it to `limit` characters."""
    return _CONTROL.sub("?", redact(text[: 2 * limit])[:limit])


def pack_facts(snapshot: Snapshot) -> str | None:
    """Return the facts, which equal nodes share; None if they exceed the record limits."""
    outcomes = {
        probe.name: replace(outcome, facts=_omit_fields(outcome.facts)) if isinstance(outcome, Ok) else outcome
        for probe in _PROBES
        if (outcome := snapshot.outcomes.get(probe.name)) is not None
    }
    parts = {name: wire.outcome_to_json(replace(outcome, seconds=0.0)) for name, outcome in outcomes.items()}
    text = json.dumps(_clean_texts(parts), sort_keys=True)
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return None if len(text) > MAX_FACTS_BYTES or len(packed) > MAX_FACTS_LETTERS else packed


def _clean_texts(value: Any) -> Any:
    """Return plain values with every text cleaned."""
    if isinstance(value, dict):
        return {clean(name): _clean_texts(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_clean_texts(each) for each in value]
    return clean(value) if isinstance(value, str) else value


def _omit_fields(value: Any) -> Any:
    """Return facts without the fields that records omit."""
    if isinstance(value, tuple):
        return tuple(_omit_fields(each) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    kind, changes = type(value), {}
    listed, dropped = _TABLE["published"].get(kind.__name__), _TABLE["dropped"].get(kind.__name__, ())
    for member in fields(value):
        if member.name not in dropped and (listed is None or member.name in listed):
            changes[member.name] = _omit_fields(getattr(value, member.name))
        elif member.default_factory is not MISSING:
            changes[member.name] = member.default_factory()
        else:
            changes[member.name] = () if member.default is MISSING else member.default
    if isinstance(value, PciDevice) and value.link_transfers_per_second_max and not is_network(value.class_code):
        changes["link_transfers_per_second"] = None  # a GPU's link is slower while it is idle
    if isinstance(value, Interface):
        changes["addresses"] = tuple(map(_hide_host, value.addresses))
    if isinstance(value, Gid):
        changes["gid"] = _hide_host(value.gid)
    if kind is LimitsFacts:
        changes["whose"] = _PROCESS.sub("the agent's process", changes["whose"])
    if kind is HostinfoFacts:
        changes["hostname"] = ""
    return replace(value, **changes)


def _hide_host(text: str) -> str:
    """Return the network of an address ("10.1.2.3/24" becomes "10.1.2.0/24"), or of a GID, whose prefix is unknown."""
    try:
        if "/" in text:
            return str(ipaddress.ip_interface(text).network)
        gid = ipaddress.IPv6Address(text)
    except ValueError:
        return text
    host_bits = 16 if gid.ipv4_mapped else 64
    return str(ipaddress.IPv6Address(int(gid) >> host_bits << host_bits))


# Equal nodes have equal facts, so each machine is read once, and its graph is built once.


@lru_cache(MAX_MACHINES)
def _read_snapshot(facts: str | None) -> Snapshot | None:
    """Return the snapshot without host name; None if the facts are of another release, or the record has none."""
    try:
        with gzip.open(io.BytesIO(base64.b64decode((facts or "")[:MAX_FACTS_LETTERS]))) as stream:
            parts = plain.loads(bounded.rest(stream, MAX_FACTS_BYTES))
        outcomes = {each.name: wire.outcome_from_json(each, parts[each.name]) for each in _PROBES if each.name in parts}
    except (*_UNREADABLE, EOFError, OSError, zlib.error):  # gzip raises the last three
        return None
    return Snapshot(hostname="", taken_at_seconds=0.0, outcomes=outcomes)


@lru_cache(MAX_MACHINES)
def _read_graph(facts: str | None) -> NodeTopology | None:
    """Return the graph without host name; None also if it has more devices than are read: every pair is evaluated."""
    if (snapshot := _read_snapshot(facts)) is None:
        return None
    gpus, rdma = snapshot.facts(GpuFacts), snapshot.facts(RdmaFacts)
    if len(gpus.gpus if gpus else ()) + len(rdma.devices if rdma else ()) > MAX_DEVICES:
        return None
    try:
        node = build(snapshot)
    except _UNREADABLE:
        return None
    return node if len({device.name for device in node.devices}) == len(node.devices) else None


class Fleet:
    """All records by name, from lists of the cluster or from this agent's own scan."""

    def __init__(self, records: Iterable[NodeRecord] = ()) -> None:
        self._records: dict[str, NodeRecord] = {}
        self._set(records)

    def read(self, client: Client) -> None:
        """Read all records of the cluster. Raises ApiError."""
        self.replace(client.items(make_path(API_VERSION, PLURAL)))

    def replace(self, items: Iterable[Json]) -> None:
        """Replace all records by a complete list of resources; those that have not changed are not read again."""

        def read(item: Json) -> NodeRecord:
            about = item["metadata"]
            previous = self._records.get(str(about["name"]))
            if previous and previous.resource_version and previous.resource_version == about.get("resourceVersion"):
                return previous
            return read_resource(item)

        self._set(map(read, items))

    def _set(self, records: Iterable[NodeRecord]) -> None:
        self._records = {
            record.name: replace(record, facts=record.facts and sys.intern(record.facts)) for record in records
        }

    def records(self) -> tuple[NodeRecord, ...]:
        """Return all records, sorted by name."""
        return tuple(record for _, record in sorted(self._records.items()))

    def record(self, name: str) -> NodeRecord | None:
        """Return the record that this node publishes; None if no agent publishes one."""
        return self._records.get(name)

    def topology(self, record: NodeRecord) -> NodeTopology | None:
        """Return the record's graph with its own host name; None without a graph of this release."""
        graph = _read_graph(record.facts)
        return graph and replace(graph, hostname=record.name)

    def snapshot(self, record: NodeRecord) -> Snapshot:
        """Return what the node's agent read, with the record's name, and networks instead of addresses.

        If the record contains no facts that this release can read, each probe is failed with that reason.
        """
        if (snapshot := _read_snapshot(record.facts)) is not None:
            return replace(snapshot, hostname=record.name)
        reason = f"the record of {record.name} (agent {record.agent_version or 'unknown'}) has no facts of this release"
        # GPUs are in the graph
        outcomes: dict[str, Any] = {each.name: Failed(error=reason) for each in _PROBES if each.name != "gpu"}
        return Snapshot(hostname=record.name, taken_at_seconds=0.0, outcomes=outcomes)


def make_row(record: NodeRecord, now: float) -> Json:
    """Return one row of /nodes. A silent node is unknown, whatever its last verdict was."""
    silent = record.silent(now)
    row: Json = {
        "name": record.name, "host": record.host, "verdict": "unknown" if silent else record.verdict,
        "silent": silent, "age_seconds": round(record.age_seconds(now), 1), "gpus": record.gpus,
        "product": record.product, "links": record.links, "hcas": record.hcas, "rdma": record.rdma,
        "memlock": record.memlock, "findings": list(record.findings), "agent_version": record.agent_version,
    }  # fmt: skip
    if silent:
        row["last_verdict"] = record.verdict
    return row


def parse_time(text: Any) -> float:
    """Parse a time of a record to Unix time; 0 if it is invalid."""
    try:
        return float(calendar.timegm(time.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0

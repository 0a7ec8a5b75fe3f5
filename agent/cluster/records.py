"""The record of the own node, made from a scan: what of it is published, and what people read of it.

Specification: deploy/daemonset/base/nodetopology-crd.yaml. agent.cluster.nodes reads records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from agent.base import units
from agent.base.result_store import line_of
from agent.checks.groups import worst_first
from agent.checks.history import SCANS_TO_RAISE, Event, Kept, Seen
from agent.checks.host_checks import no_gpu_read
from agent.checks.verdict import judge
from agent.checks.view import View
from agent.cluster import node_facts
from agent.cluster.node_facts import clean
from agent.cluster.nodes import API_VERSION, KIND, NAMES, Json, Measured, NodeRecord, keys_of, seconds_of, time_of
from collectives.bench.results import BenchResult
from contracts.finding import Finding, Status
from probes.api import Snapshot
from probes.limits.probe import LimitsFacts
from probes.rdma.facts import RdmaFacts
from topology.graph import SELF, GpuNode, NicNode, NodeTopology, Pairs

MOST_FINDINGS = 64
MOST_CHANGES = 32  # the newest; why so many: docs/decisions/0026


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
        {"at": time_of(event.at_seconds), "kind": event.kind, "text": clean(event.text, 300),
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
    graph, facts = keys_of(machine)
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
        now = time_of(record.scanned_at_seconds)
        kept = {**self._since, **{key: time_of(at) for key, at in known.items()}}
        since = {key: kept.get(key, now) for key in map(_which, record.findings)}
        self._since = since
        return replace(record, findings=tuple({**each, "since": since[_which(each)]} for each in record.findings))


def _which(finding: Json) -> tuple[str, str]:
    return str(finding.get("code", "")), str(finding.get("subject", ""))


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


def to_resource(record: NodeRecord) -> tuple[Json, Json]:
    """The object, and the object with its status: two writes, as the status is a subresource."""
    about = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": record.name}}
    status = {name: getattr(record, member) for name, member in NAMES.items()} | {
        "scannedAt": time_of(record.scanned_at_seconds), "interval": max(1, round(record.interval_seconds)),
        "verdict": record.verdict, "graph": record.drawn,
    }  # fmt: skip
    if record.stopped_at_seconds is not None:  # nothing watches the node now: what was said last is no verdict any more
        status |= {
            "stoppedAt": time_of(record.stopped_at_seconds), "verdict": "unknown", "lastVerdict": record.verdict,
        }  # fmt: skip
    known = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in status.items()
        if value is not None and (value != () or name == "findings")
    }
    return {**about, "spec": {"nodeName": record.name}}, {**about, "status": known}

"""Create this node's record and write it to the cluster, as the NodeTopology resource.

Specifications: deploy/daemonset/base/nodetopology-crd.yaml, whose objects agent.cluster.nodes reads; server-side apply.
"""

from __future__ import annotations

import base64
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.base import units
from agent.checks.findings import worst_first
from agent.checks.host_checks import no_gpu_read, no_hca_read
from agent.checks.verdict import View, judge
from agent.cluster.client import ApiError, Client, Tally, backoff_seconds, path_of, reason_of
from agent.cluster.nodes import API_VERSION, KIND, NAMES, PLURAL, Json, NodeRecord, clean, pack_facts, time_of
from contracts.finding import Finding
from probes.api import Absent
from probes.gpu.facts import GpuFacts
from probes.limits.probe import LimitsFacts
from probes.limits.probe import size as limit_words
from probes.rdma.facts import RdmaFacts

log = logging.getLogger(__name__)

MOST_FINDINGS = 64
MOST_CHANGES = 32  # the newest; docs/decisions/0026 explains the number


def record_of_view(view: View, *, name: str | None = None, interval_seconds: float = 300.0) -> NodeRecord:
    """Return the record of the view's host; `name` is the name of the Node."""
    (snapshot,), (node,), checks = view.snapshots, view.topologies, view.checks
    rdma, limits = snapshot.facts(RdmaFacts), snapshot.facts(LimitsFacts)
    none = isinstance(snapshot.outcomes.get("rdma"), Absent) and not no_hca_read(snapshot)
    ports = [port for device in rdma.devices for port in device.ports] if rdma else None
    models = Counter(gpu.model for gpu in node.gpus if gpu.model)
    gpus = snapshot.facts(GpuFacts)
    names = {gpu.name for gpu in node.gpus}
    labels = Counter(pair.label for pair in node.pairs if {pair.a, pair.b} <= names).most_common()
    changes = tuple(
        {"at": time_of(event.at_seconds), "kind": event.kind, "text": clean(event.text, 300),
         "code": clean(event.code, 128), "subject": clean(event.subject, 128)}
        for event in view.events[-MOST_CHANGES:]
    )  # fmt: skip
    return NodeRecord(
        name=clean(name or snapshot.hostname, 253), host=clean(snapshot.hostname, 253), verdict=judge(checks).word,
        scanned_at_seconds=view.made_at_seconds, interval_seconds=interval_seconds,
        gpus=len(node.gpus) or (None if no_gpu_read(snapshot) else 0),  # on the bus but unread: unknown, not 0
        product=clean(models.most_common(1)[0][0], 128) if models else None,
        links=", ".join(f"{label} ({units.count(count, 'pair')})" for label, count in labels)[:64] or None,
        hcas=len(rdma.devices) if rdma else 0 if none else None,
        rdma=f"{sum(p.state == 'ACTIVE' for p in ports)}/{len(ports)} active" if ports is not None else None,
        memlock=limit_words(limits.memlock_soft_bytes) if limits is not None and limits.memlock_known else None,
        driver=clean(gpus.driver_version, 64) if gpus and gpus.driver_version else None,
        findings=_findings(checks, view.since), facts=pack_facts(snapshot), changes=changes,
    )  # fmt: skip


def _findings(checks: Sequence[Finding], since: Mapping[tuple[str, str], float]) -> tuple[Json, ...]:
    """Return the worst checks that did not pass, and required checks that were not measured, each reason once.

    A finding that the history has raised (`since`) has its start time.
    """
    ordered = worst_first(checks)
    unmeasured = {(c.code.split(".")[0], c.message): c for c in reversed(ordered) if c.required and
                  c.status == "unknown"}  # fmt: skip
    bad = [*(c for c in ordered if c.status == "fail"), *reversed(unmeasured.values()),
           *(c for c in ordered if c.status == "warn")][:MOST_FINDINGS]  # fmt: skip
    return tuple(
        {
            "code": clean(c.code, 128), "severity": c.status.value, "subject": clean(c.subject, 128),
            "message": clean(c.message), "remedy": clean(c.remedy),
            **({"since": time_of(since[c.code, c.subject])} if (c.code, c.subject) in since else {}),
        }
        for c in bad
    )  # fmt: skip


def to_resource(record: NodeRecord) -> tuple[Json, Json]:
    """Return the object, and the object with its status: two writes, because status is a subresource."""
    about = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": record.name}}
    status = {name: getattr(record, member) for name, member in NAMES.items()} | {
        "scannedAt": time_of(record.scanned_at_seconds), "interval": max(1, round(record.interval_seconds)),
        "verdict": record.verdict,
    }  # fmt: skip
    if record.stopped_at_seconds is not None:  # no agent watches the node now, so its last verdict is outdated
        status |= {
            "stoppedAt": time_of(record.stopped_at_seconds), "verdict": "unknown", "lastVerdict": record.verdict,
        }  # fmt: skip
    known = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in status.items()
        if value is not None and (value != () or name == "findings")
    }
    return {**about, "spec": {"nodeName": record.name}}, {**about, "status": known}


# Writing the record.

END_SECONDS = 2.0  # for the final write, within the pod's grace period
MISSING_SECONDS = 300.0  # until a missing CRD is looked for again


class Publisher:
    """A thread that writes a node's record when it changes, and at least every `interval_seconds`."""

    def __init__(
        self, client: Client, latest: Callable[[], NodeRecord | None], *, interval_seconds: float = 300.0,
        look_seconds: float = 5.0,
    ) -> None:  # fmt: skip
        self._shared, self._latest = client, latest
        self._client = client.limited(tries=1)  # this thread backs off: retries of thousands add load
        self._interval, self._look = interval_seconds, look_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="publish", daemon=True)
        self._last: NodeRecord | None = None
        self._due = 0.0
        self._exists = False
        self.writes = 0
        # maximum time between writes of an unchanged record
        self.tally = Tally(float, {("publish_interval_seconds",): interval_seconds, ("publish_attempts_total",): 0.0})
        self.error: str | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; a write in progress gets a short time to finish."""
        self._stop.set()
        self._client.close()
        self._shared.close()
        self._thread.join(timeout=2)
        if self._last is None or self._thread.is_alive():
            return
        # no agent watches the node any more; without an API server only the record's age shows this
        self._client = self._client.limited(tries=1, timeout_seconds=END_SECONDS)
        try:
            self.write(replace(self._last, stopped_at_seconds=time.time()))
        except ApiError as error:
            log.warning("publish: the end was not written: %s", error)
        finally:
            self._client.close()

    def _loop(self) -> None:
        failures = 0
        self._stop.wait(random.uniform(0.0, self._look))  # noqa: S311 - a rollout starts all agents at once
        while not self._stop.is_set():
            pause = self._look
            try:
                record = self._latest()
                if record is not None and self._is_due(record):
                    self.write(record)
                    failures = 0
            except ApiError as error:
                self.error = str(error)
                self.tally["publish_failures_total", reason_of(error.status)] += 1
                log.warning("publish: %s", error)
                pause = MISSING_SECONDS if error.status == 404 else backoff_seconds(failures, error.retry_after)
                failures += 1
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                log.exception("publish: a record could not be made")
                pause = MISSING_SECONDS
            self._stop.wait(pause)

    def _is_due(self, record: NodeRecord) -> bool:
        last = self._last and replace(self._last, scanned_at_seconds=record.scanned_at_seconds)
        return record != last or time.monotonic() >= self._due

    def write(self, record: NodeRecord) -> None:
        """Write the object and its status once. Raises ApiError."""
        self.tally["publish_attempts_total",] += 1
        whole, status = to_resource(record)
        if not self._exists:
            if owner := owner_of(self._client.token(), record.name):
                whole["metadata"] = {**whole["metadata"], "ownerReferences": [owner]}  # `status` shares the old one
            self._client.apply(path_of(API_VERSION, PLURAL, record.name), whole)
            self._exists = True
        try:
            self._client.apply(path_of(API_VERSION, PLURAL, record.name, sub="status"), status)
        except ApiError as error:
            if error.status == 404:
                self._exists = False  # it was deleted: create it again at the next attempt
            raise
        self.writes += 1
        self.error = None
        self.tally["publish_success_timestamp_seconds",] = time.time()
        self._last = record
        # with jitter, so that thousands of agents that started together do not keep writing at the same time
        self._due = time.monotonic() + self._interval * random.uniform(0.8, 1.0)  # noqa: S311 - no secret


def owner_of(token: str, node: str) -> dict[str, Any] | None:
    """Return the Node as an owner reference, so that the object is deleted with it; None if the token has no Node.

    Since Kubernetes 1.30 a pod's own token contains its node's name and uid (bound service account tokens, claim
    kubernetes.io), so the agent needs no permission to get Nodes. In an older cluster the record outlives the Node.
    """
    try:
        claims = token.split(".")[1]
        named = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["kubernetes.io"]["node"]
        if named["name"] == node and named["uid"]:  # signed by the API server; no decision depends on them
            return {"apiVersion": "v1", "kind": "Node", "name": node, "uid": str(named["uid"])}
    except (IndexError, KeyError, TypeError, ValueError):
        pass
    log.info("the record of %s gets no owner, it stays when the Node goes: the token does not name the Node", node)
    return None

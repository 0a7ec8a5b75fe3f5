"""A controller for Kueue's AdmissionCheck: a workload starts once the nodes it is meant for have passed.

Specification: kueue.x-k8s.io/v1beta2. A check is answered in the Workload's status.admissionChecks by Ready, Retry with
requeueAfterSeconds, or Rejected, after quota has been reserved. Node names are known only where Kueue assigned a
topology down to kubernetes.io/hostname; otherwise all nodes that publish are judged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from agent.cluster.client import ApiError, Client, backoff_seconds, path_of
from agent.cluster.nodes import API_VERSION, PLURAL, Fleet
from agent.cluster.watch import Watcher

log = logging.getLogger(__name__)

Json = dict[str, Any]
KUEUE = "kueue.x-k8s.io/v1beta2"
CONTROLLER = "topoflight.io/preflight"
HOSTNAME_LABEL = "kubernetes.io/hostname"
READY_LABEL = {"topoflight.io/ready": "true"}  # what agents publish through NFD
GOOD = ("pass", "warn")
MOST_NAMED = 5
AWAY = (0, 401, 429, 502, 503, 504)  # of the API server as a whole; another status is of the one object


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How to answer."""

    requeue_seconds: int = 60
    reject_after: int | None = None  # retries; None tries for ever
    confine: bool = False  # pods select nodes by READY_LABEL: needs NFD


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What becomes of one check of one workload."""

    state: str  # "Ready", "Retry", "Rejected"
    message: str
    requeue_after_seconds: int | None = None
    node_selector: dict[str, str] | None = None


def decide(workload: Json, fleet: Fleet, policy: Policy, *, retries: int = 0, now: float | None = None) -> Answer:
    """Judge the nodes that the workload was assigned, or that it might get."""
    now = time.time() if now is None else now
    good = {r.name for r in fleet.records() if r.verdict in GOOD and not r.silent(now)}
    assigned = set(assigned_nodes(workload))
    if assigned:
        bad = sorted(assigned - good)
        if not bad:
            return Answer(state="Ready", message=f"all {len(assigned)} assigned nodes passed")
        return _later(f"assigned nodes that did not pass: {_some(bad, fleet, now)}", policy, retries)
    if not good:
        return _later("no node has passed", policy, retries)
    if policy.confine:
        return Answer(state="Ready", message=f"{len(good)} nodes passed; pods are confined to such nodes",
                      node_selector=READY_LABEL)  # fmt: skip
    return Answer(state="Ready", message=f"{len(good)} of {len(fleet.records())} nodes passed")


def _later(why: str, policy: Policy, retries: int) -> Answer:
    if policy.reject_after is not None and retries >= policy.reject_after:
        return Answer(state="Rejected", message=f"{why}; given up after {retries} retries")
    return Answer(state="Retry", message=why, requeue_after_seconds=policy.requeue_seconds)


def _some(names: list[str], fleet: Fleet, now: float) -> str:
    words = []
    for name in names[:MOST_NAMED]:
        record = fleet.record(name)
        why = "publishes nothing" if record is None else "silent" if record.silent(now) else record.verdict
        words.append(f"{name} ({why})")
    return ", ".join(words) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def assigned_nodes(workload: Json) -> Iterator[str]:
    """Node names of the topology assignments, where their lowest level is the host name."""
    admission = (workload.get("status") or {}).get("admission") or {}
    for assignment in admission.get("podSetAssignments") or ():
        topology = assignment.get("topologyAssignment") or {}
        if (topology.get("levels") or [""])[-1] != HOSTNAME_LABEL:
            continue
        for piece in topology.get("slices") or ():
            values = piece["valuesPerLevel"][-1]
            if "universal" in values:
                yield values["universal"]
                continue
            individual = values.get("individual") or {}
            prefix, suffix = individual.get("prefix", ""), individual.get("suffix", "")
            yield from (f"{prefix}{root}{suffix}" for root in individual.get("roots") or ())


class Refused(NamedTuple):
    """A workload's version whose answer was not taken."""

    version: str
    failures: int
    until: float  # monotonic; not tried again before


class Checks:
    """Names of the AdmissionChecks that are ours; a Store."""

    def __init__(self, controller: str) -> None:
        self._controller = controller
        self._ours: dict[str, Json] = {}

    def replace(self, items: Iterable[Json]) -> None:
        """All checks there are."""
        self._ours = {item["metadata"]["name"]: item for item in items if self._is_ours(item)}

    def put(self, item: Json) -> None:
        """One check."""
        if self._is_ours(item):
            self._ours = {**self._ours, item["metadata"]["name"]: item}

    def remove(self, item: Json) -> None:
        """One check is gone."""
        self._ours = {name: check for name, check in self._ours.items() if name != item["metadata"]["name"]}

    def items(self) -> dict[str, Json]:
        """By name."""
        return self._ours

    def _is_ours(self, item: Json) -> bool:
        return (item.get("spec") or {}).get("controllerName") == self._controller


class Workloads:
    """Workloads that wait for an answer of ours; a Store."""

    def __init__(self, checks: Checks, woken: threading.Event) -> None:
        self._checks, self._woken = checks, woken
        self._waiting: dict[tuple[str, str], Json] = {}
        self._lock = threading.Lock()

    def replace(self, items: Iterable[Json]) -> None:
        """All workloads there are."""
        found = {_key(item): item for item in items if _undecided(item)}
        with self._lock:
            self._waiting = found
        self._woken.set()

    def put(self, item: Json) -> None:
        """One workload."""
        with self._lock:
            self._waiting.pop(_key(item), None)
            if _undecided(item):
                self._waiting[_key(item)] = item
        self._woken.set()

    def remove(self, item: Json) -> None:
        """One workload is gone."""
        with self._lock:
            self._waiting.pop(_key(item), None)

    def answered(self, item: Json) -> None:
        """This version has its answer; one that the watch has brought meanwhile still waits for its own."""
        with self._lock:
            held = self._waiting.get(_key(item))
            if held and held["metadata"]["resourceVersion"] == item["metadata"]["resourceVersion"]:
                del self._waiting[_key(item)]

    def waiting(self) -> list[tuple[Json, str, int]]:
        """Workload, name of our check, and how often it was put off."""
        with self._lock:
            items = list(self._waiting.values())
        ours = self._checks.items()
        return [
            (item, check["name"], int(check.get("retryCount") or 0))
            for item in items
            for check in item["status"]["admissionChecks"]
            if check["name"] in ours and check["state"] == "Pending"
        ]


def _key(item: Json) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _undecided(item: Json) -> bool:
    """Quota is reserved, the workload is neither finished nor evicted, and a check is pending."""
    status = item.get("status") or {}
    true = {c["type"] for c in status.get("conditions") or () if c.get("status") == "True"}
    pending = any(check.get("state") == "Pending" for check in status.get("admissionChecks") or ())
    return "QuotaReserved" in true and not true & {"Finished", "Evicted"} and pending


class Controller:
    """Watches nodes, checks and workloads, and answers."""

    def __init__(self, client: Client, policy: Policy, *, controller: str = CONTROLLER) -> None:
        self._client, self._policy = client, policy
        self._once = client.once()  # of answers: the pauses between tries are this controller's
        self._refused: dict[tuple[str, str], Refused] = {}
        self.woken, self._stop = threading.Event(), threading.Event()
        self._fleet, self._checks = Fleet(), Checks(controller)
        self._workloads = Workloads(self._checks, self.woken)
        self._watchers = [
            Watcher(client, path_of(API_VERSION, PLURAL), self._fleet),
            Watcher(client, path_of(KUEUE, "admissionchecks"), self._checks),
            Watcher(client, path_of(KUEUE, "workloads"), self._workloads),
        ]

    def run(self, *, tick_seconds: float = 5.0) -> None:
        """Until `stop`; a thread per watch, one for the answers."""
        for watcher in self._watchers:
            watcher.start()
        failures = 0
        while not self._stop.is_set():
            # no answer before everything was listed once: a node that is not known yet has not failed
            if all(watcher.wait(1.0) for watcher in self._watchers):
                self.woken.clear()
                try:
                    self._activate()
                    self._answer_all()
                    failures = 0
                except ApiError as error:
                    log.warning("%s", error)
                    self._stop.wait(backoff_seconds(failures, error.retry_after))
                    failures += 1
            self.woken.wait(tick_seconds)

    def stop(self) -> None:
        """End."""
        self._stop.set()
        self.woken.set()
        for watcher in self._watchers:
            watcher.stop()
        self._client.close()

    def _activate(self) -> None:
        """Kueue holds a queue back until the check's controller says that it is there."""
        for name, check in self._checks.items().items():
            status = check.get("status") or {}
            active = [c for c in status.get("conditions") or () if c.get("type") == "Active"]
            if active and active[0].get("status") == "True":
                continue
            condition = {
                "type": "Active", "status": "True", "reason": "Active", "message": "the controller is running",
                "lastTransitionTime": _now(), "observedGeneration": check["metadata"].get("generation", 1),
            }  # fmt: skip
            try:
                self._checks.put(self._once.apply(
                    path_of(KUEUE, "admissionchecks", name, sub="status"),
                    {"apiVersion": KUEUE, "kind": "AdmissionCheck", "metadata": {"name": name},
                     "status": {"conditions": [condition]}},
                ))  # fmt: skip
            except ApiError as error:
                if error.status in AWAY:
                    raise
                log.warning("admission check %s: not marked active: %s", name, error)

    def _answer_all(self) -> None:
        """One workload whose answer is refused, or that cannot be read, waits; the others get theirs."""
        waiting = self._workloads.waiting()
        refused, self._refused = self._refused, {}
        for workload, check, retries in waiting:
            key, version = _key(workload), workload["metadata"]["resourceVersion"]
            before = refused.get(key)
            if before and before.version == version and time.monotonic() < before.until:
                self._refused[key] = before
                continue
            try:
                answer = self._answer(workload, check, retries)
            except ApiError as error:
                if error.status in AWAY:
                    self._refused = {**refused, **self._refused}
                    raise
                if error.status in (404, 409):  # gone, or changed since: its event is on the way
                    continue
                why, retry_after = str(error), error.retry_after
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                why, retry_after = f"{type(error).__name__}: {error}", None
            else:
                log.info("%s/%s: %s: %s", *key, answer.state, answer.message)
                continue
            failures = before.failures + 1 if before and before.version == version else 0
            seconds = backoff_seconds(failures, retry_after)
            self._refused[key] = Refused(version, failures, time.monotonic() + seconds)
            log.warning("%s/%s: its answer is refused, again in %.0f s: %s", *key, seconds, why)

    def _answer(self, workload: Json, check: str, retries: int) -> Answer:
        answer = decide(workload, self._fleet, self._policy, retries=retries)
        namespace, name = _key(workload)
        document = answer_document(workload, check, answer)
        self._once.apply(path_of(KUEUE, "workloads", name, namespace=namespace, sub="status"), document)
        self._workloads.answered(workload)
        return answer


def answer_document(workload: Json, check: str, answer: Answer) -> Json:
    """The server-side apply that answers one check; refused where the workload has changed since."""
    namespace, name = _key(workload)
    entry: Json = {
        "name": check, "state": answer.state, "message": answer.message[:32768], "lastTransitionTime": _now(),
    }  # fmt: skip
    if answer.requeue_after_seconds is not None:
        entry["requeueAfterSeconds"] = answer.requeue_after_seconds
    if answer.node_selector:
        sets = (workload.get("spec") or {}).get("podSets") or ()
        entry["podSetUpdates"] = [{"name": s["name"], "nodeSelector": dict(answer.node_selector)} for s in sets]
    version = {"resourceVersion": workload["metadata"]["resourceVersion"]}
    return {
        "apiVersion": KUEUE, "kind": "Workload", "metadata": {"name": name, "namespace": namespace, **version},
        "status": {"admissionChecks": [entry]},
    }  # fmt: skip


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

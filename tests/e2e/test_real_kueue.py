"""The admission check against Kueue's real resource definitions, with the controller's own rights.

Kueue itself does not run: its part of a workload's life, quota and the next question, is played here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from real_cluster import RUN, Document, admin, client_with, kubectl, need, now, real, token
from rigs.waiting import eventually

from agent.cluster.admission import KUEUE, Controller, Policy
from agent.cluster.client import MERGE, ApiError, path_of
from agent.cluster.nodes import NodeRecord
from agent.cluster.publish import Publisher

pytestmark = real()
CHECK, CONTROLLER = f"topoflight-{RUN}", f"topoflight.io/{RUN}"
CHECKS = path_of(KUEUE, "admissionchecks", CHECK)
GOOD, BAD = f"{RUN}-good", f"{RUN}-bad"


@pytest.fixture(autouse=True)
def kueue(cluster: list[Document]) -> None:
    """Its definitions."""
    need(KUEUE, "Workload")
    need(KUEUE, "AdmissionCheck")


def publish(name: str, verdict: str) -> None:
    record = NodeRecord(name=name, host=name, verdict=verdict, scanned_at_seconds=time.time())
    Publisher(admin(), lambda: record, namespace=RUN, labels=False).write(record)


@pytest.fixture
def nodes() -> Iterator[None]:
    """One that passed, one that did not."""
    publish(GOOD, "pass")
    publish(BAD, "fail")
    yield
    kubectl("delete", "nodetopologies", GOOD, BAD, "--ignore-not-found")


@contextmanager
def running(folder: Path, **policy: Any) -> Iterator[None]:
    """The controller with the token of its service account."""
    made = Controller(client_with(folder, token("topoflight-admission", RUN)), Policy(**policy), controller=CONTROLLER)
    thread = threading.Thread(target=made.run, kwargs={"tick_seconds": 0.2}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        made.stop()
        thread.join(60)
        assert not thread.is_alive()


class Job:
    """A Workload, and what Kueue would do to it."""

    def __init__(self, name: str, *, on: tuple[str, ...] = ()) -> None:
        self.name, self.on = f"{RUN}-{name}", on
        self.path = path_of(KUEUE, "workloads", self.name, namespace=RUN)
        pod = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "registry.example/c"}]}}
        admin().create(path_of(KUEUE, "workloads", namespace=RUN), {
            "apiVersion": KUEUE, "kind": "Workload", "metadata": {"name": self.name, "namespace": RUN},
            "spec": {"queueName": "q", "podSets": [{"name": "main", "count": max(1, len(on)), "template": pod}]},
        })  # fmt: skip

    def ask(self, *, retries: int = 0, reserved: bool = True) -> None:
        """Quota is reserved, and every check is pending."""
        quota = {"type": "QuotaReserved", "status": str(reserved), "reason": "QuotaReserved", "message": "e2e",
                 "lastTransitionTime": now()}  # fmt: skip
        status: dict[str, Any] = {"conditions": [quota], "admissionChecks": [
            {"name": "other", "state": "Pending", "message": "", "lastTransitionTime": now()},
            {"name": CHECK, "state": "Pending", "message": "", "lastTransitionTime": now(), "retryCount": retries},
        ]}  # fmt: skip
        if reserved:
            assignment: dict[str, Any] = {"name": "main", "count": max(1, len(self.on))}
            if self.on:
                assignment["topologyAssignment"] = {"levels": ["kubernetes.io/hostname"], "slices": [{
                    "domainCount": len(self.on), "podCounts": {"universal": 1},
                    "valuesPerLevel": [{"individual": {"roots": list(self.on)}}]}]}  # fmt: skip
            status["admission"] = {"clusterQueue": "q", "podSetAssignments": [assignment]}
        admin().request("PATCH", self.path + "/status", body={"status": status}, content_type=MERGE,
                        query={"fieldManager": "kueue-e2e"})  # fmt: skip

    def check(self, name: str = CHECK) -> Document:
        """What the status says of a check."""
        found = admin().get(self.path)["status"]["admissionChecks"]
        return next(c for c in found if c["name"] == name)

    def becomes(self, state: str) -> Document:
        """Wait for the answer."""
        eventually(lambda: self.check()["state"] == state, f"{self.name} becomes {state}")
        assert self.check("other")["state"] == "Pending", "somebody else's check was touched"
        return self.check()


@contextmanager
def job(name: str, **more: Any) -> Iterator[Job]:
    made = Job(name, **more)
    try:
        yield made
    finally:
        kubectl("delete", f"workloads.kueue.x-k8s.io/{made.name}", "-n", RUN, "--ignore-not-found", "--wait=false")


def test_the_check_becomes_active_and_the_job_is_answered(nodes: None, tmp_path: Path) -> None:
    """Not before quota; Retry while an assigned node fails; Ready once it has passed and Kueue asks again."""
    with running(tmp_path, requeue_seconds=7), job("life", on=(GOOD, BAD)) as it:
        eventually(lambda: (admin().get(CHECKS).get("status") or {}).get("conditions"), "the check is active")
        (active,) = admin().get(CHECKS)["status"]["conditions"]
        assert (active["type"], active["status"]) == ("Active", "True")
        it.ask(reserved=False)
        time.sleep(1.0)
        assert it.check()["state"] == "Pending", "no quota yet: not asked"
        it.ask()
        answer = it.becomes("Retry")
        assert answer["requeueAfterSeconds"] == 7 and f"{BAD} (fail)" in answer["message"]
        publish(BAD, "pass")

        def ready() -> bool:
            """As Kueue does after requeueAfterSeconds."""
            if it.check()["state"] == "Retry":
                it.ask(retries=1)
            return str(it.check()["state"]) == "Ready"

        eventually(ready, "mended, and asked again")


def test_a_node_that_never_passes_is_rejected_in_the_end(nodes: None, tmp_path: Path) -> None:
    """After as many retries as allowed."""
    with running(tmp_path, reject_after=2), job("rejected", on=(BAD,)) as it:
        it.ask(retries=1)
        it.becomes("Retry")
        it.ask(retries=2)
        assert "given up after 2 retries" in it.becomes("Rejected")["message"]


def test_pods_are_confined_to_nodes_that_passed(nodes: None, tmp_path: Path) -> None:
    """podSetUpdates as the definition takes them."""
    with running(tmp_path, confine=True), job("confined") as it:
        it.ask()
        answer = it.becomes("Ready")
        assert answer["podSetUpdates"] == [{"name": "main", "nodeSelector": {"topoflight.io/ready": "true"}}]


def test_the_controller_comes_back_to_what_it_missed(nodes: None, tmp_path: Path) -> None:
    """A workload that asked while no controller ran is answered by the next; one that is gone disturbs nothing."""
    with job("missed", on=(GOOD,)) as it, job("gone", on=(GOOD,)) as gone:
        it.ask()
        gone.ask()
        kubectl("delete", f"workloads.kueue.x-k8s.io/{gone.name}", "-n", RUN)
        with running(tmp_path):
            it.becomes("Ready")
            again = it.check()["lastTransitionTime"]
            time.sleep(1.0)
            assert it.check()["lastTransitionTime"] == again, "an answer is given once"


def test_an_answer_to_an_older_question_conflicts(nodes: None) -> None:
    """The server refuses what was decided on a workload that has changed since."""
    from agent.cluster.admission import Answer, answer_document

    with job("conflict", on=(GOOD,)) as it:
        it.ask()
        old = admin().get(it.path)
        it.ask(retries=1)
        with pytest.raises(ApiError) as caught:
            admin().apply(it.path + "/status", answer_document(old, CHECK, Answer(state="Ready", message="m")))
        assert caught.value.status == 409
        assert it.check()["state"] == "Pending"


def test_the_definitions_are_those_of_kueue(kueue: None) -> None:
    """The server itself admits the check by name in a ClusterQueue."""
    need(KUEUE, "ClusterQueue")
    queue = {"apiVersion": KUEUE, "kind": "ClusterQueue", "metadata": {"name": RUN},
             "spec": {"namespaceSelector": {},
                      "admissionChecksStrategy": {"admissionChecks": [{"name": CHECK}]}}}  # fmt: skip
    kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(queue))

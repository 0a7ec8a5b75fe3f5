"""The life of an AdmissionCheck: active, then Ready, Retry or Rejected by what the nodes' agents say."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from api_server import ApiServer, closed
from e2e_client import client_of
from rigs.waiting import eventually

from agent.cluster.admission import (
    CONTROLLER,
    KUEUE,
    Answer,
    Checks,
    Controller,
    Policy,
    Workloads,
    answer_document,
    assigned_nodes,
    decide,
)
from agent.cluster.nodes import Fleet, NodeRecord, to_resource

CHECKS = "/apis/kueue.x-k8s.io/v1beta2/admissionchecks"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/workloads"
NODES = "/apis/topoflight.io/v1alpha1/nodetopologies"


def node(name: str, verdict: str = "pass", age: float = 0.0) -> NodeRecord:
    return NodeRecord(name=name, host=name, verdict=verdict, scanned_at_seconds=time.time() - age)


def workload(name: str = "w", *, state: str = "Pending", reserved: bool = True, nodes: tuple[str, ...] = (),
             retries: int = 0) -> dict[str, Any]:  # fmt: skip
    status: dict[str, Any] = {
        "conditions": [{"type": "QuotaReserved", "status": str(reserved), "reason": "x", "message": "",
                        "lastTransitionTime": "2026-01-01T00:00:00Z"}],
        "admissionChecks": [
            {"name": "other", "state": "Pending", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            {"name": "topoflight", "state": state, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
             "retryCount": retries},
        ],
    }  # fmt: skip
    if nodes:
        status["admission"] = {"clusterQueue": "q", "podSetAssignments": [{
            "name": "main", "count": len(nodes), "topologyAssignment": {
                "levels": ["kubernetes.io/hostname"],
                "slices": [{"domainCount": len(nodes), "podCounts": {"universal": 1}, "valuesPerLevel": [
                    {"individual": {"prefix": "node-", "roots": [n.removeprefix("node-") for n in nodes]}}]}],
            },
        }]}  # fmt: skip
    return {
        "apiVersion": KUEUE, "kind": "Workload", "metadata": {"name": name, "namespace": "team"},
        "spec": {"queueName": "q", "podSets": [{"name": "main", "count": 2}]}, "status": status,
    }  # fmt: skip


def fleet(*records: NodeRecord) -> Fleet:
    made = Fleet()
    made.set(records)
    return made


COLLECTED = time.time()
TABLE = [
    # nodes, assigned, policy, retries -> state
    ((node("node-1"), node("node-2")), ("node-1", "node-2"), Policy(), 0, "Ready"),
    ((node("node-1"), node("node-2", "warn")), ("node-1", "node-2"), Policy(), 0, "Ready"),
    ((node("node-1"), node("node-2", "fail")), ("node-1", "node-2"), Policy(), 0, "Retry"),
    ((node("node-1"), node("node-2", "unknown")), ("node-1", "node-2"), Policy(), 0, "Retry"),
    ((node("node-1"), node("node-2", age=7200)), ("node-1", "node-2"), Policy(), 0, "Retry"),
    ((node("node-1"),), ("node-1", "node-2"), Policy(), 0, "Retry"),
    ((node("node-1", "fail"),), ("node-1",), Policy(reject_after=3), 2, "Retry"),
    ((node("node-1", "fail"),), ("node-1",), Policy(reject_after=3), 3, "Rejected"),
    ((node("node-1"), node("node-2", "fail")), (), Policy(), 0, "Ready"),
    ((node("node-1", "fail"),), (), Policy(), 0, "Retry"),
    ((), (), Policy(), 0, "Retry"),
]


@pytest.mark.parametrize(("nodes", "assigned", "policy", "retries", "state"), TABLE)
def test_the_table_of_answers(nodes: Any, assigned: Any, policy: Policy, retries: int, state: str) -> None:
    """A node that did not pass, is unknown, silent or unheard of is no place to start on."""
    since = time.time() - COLLECTED  # the table is made when tests are collected
    nodes = [replace(one, scanned_at_seconds=one.scanned_at_seconds + since) for one in nodes]
    answer = decide(workload(nodes=assigned), fleet(*nodes), policy, retries=retries)
    assert answer.state == state, answer
    assert (answer.requeue_after_seconds is not None) == (state == "Retry")


def test_reading_topology_assignments() -> None:
    """Prefixes, suffixes, universal values; other lowest levels name no node."""
    made = workload(nodes=("node-1", "node-2"))
    assert list(assigned_nodes(made)) == ["node-1", "node-2"]
    piece = made["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"]
    piece["slices"][0]["valuesPerLevel"] = [{"universal": "n9"}]
    assert list(assigned_nodes(made)) == ["n9"]
    piece["levels"] = ["rack"]
    assert list(assigned_nodes(made)) == []


@pytest.mark.corpus
def test_answers_fit_kueues_own_schema(corpus: Path) -> None:
    """No field that the API server would drop."""
    (crd,) = yaml.safe_load_all((corpus / "crds/kueue.x-k8s.io_workloads.yaml").read_text())
    (version,) = [v for v in crd["spec"]["versions"] if v["name"] == "v1beta2"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["admissionChecks"]
    made = {**workload(), "metadata": {"name": "w", "namespace": "team", "resourceVersion": "1"}}
    for answer in (
        Answer(state="Ready", message="m", node_selector={"a": "b"}),
        Answer(state="Retry", message="m", requeue_after_seconds=60),
        Answer(state="Rejected", message="m"),
    ):
        document = answer_document(made, "topoflight", answer)
        jsonschema.validate(document["status"]["admissionChecks"], closed(schema))


@contextmanager
def running(api: ApiServer, policy: Policy | None = None) -> Iterator[Controller]:
    controller = Controller(client_of(api), policy or Policy())
    thread = threading.Thread(target=controller.run, kwargs={"tick_seconds": 0.05}, daemon=True)
    thread.start()
    yield controller
    controller.stop()
    thread.join(60)
    assert not thread.is_alive()


def state_of(api: ApiServer, name: str = "w") -> tuple[str, dict[str, Any]]:
    checks = api.objects[WORKLOADS, "team", name]["status"]["admissionChecks"]
    mine = next(check for check in checks if check["name"] == "topoflight")
    return mine["state"], mine


def stored(api: ApiServer) -> None:
    api.put(CHECKS, "", {"apiVersion": KUEUE, "kind": "AdmissionCheck", "metadata": {"name": "topoflight"},
                         "spec": {"controllerName": CONTROLLER}})  # fmt: skip
    api.put(CHECKS, "", {"apiVersion": KUEUE, "kind": "AdmissionCheck", "metadata": {"name": "other"},
                         "spec": {"controllerName": "somebody.else/check"}})  # fmt: skip


def test_the_life_of_a_check(api: ApiServer) -> None:
    """Active; Retry while a node fails; Ready once mended and asked again; others' checks untouched."""
    stored(api)
    api.put(NODES, "", to_resource(node("node-1"))[1])
    api.put(NODES, "", to_resource(node("node-2", "fail"))[1])
    with running(api, Policy(requeue_seconds=7)):
        eventually(lambda: api.objects[CHECKS, "", "topoflight"].get("status"), "the check is active")
        assert api.objects[CHECKS, "", "topoflight"]["status"]["conditions"][0]["status"] == "True"
        assert "status" not in api.objects[CHECKS, "", "other"]
        api.put(WORKLOADS, "team", workload(nodes=("node-1", "node-2"), reserved=False))
        time.sleep(0.3)
        assert state_of(api)[0] == "Pending", "no quota yet: not asked"
        api.put(WORKLOADS, "team", workload(nodes=("node-1", "node-2")))
        eventually(lambda: state_of(api)[0] == "Retry", "the failing node puts it off")
        assert state_of(api)[1]["requeueAfterSeconds"] == 7 and "node-2 (fail)" in state_of(api)[1]["message"]
        api.put(NODES, "", to_resource(node("node-2"))[1])

        def ready() -> bool:
            """As Kueue does after requeueAfterSeconds: ask again, for the two watches run apart from each other."""
            if state_of(api)[0] == "Retry":
                api.put(WORKLOADS, "team", workload(nodes=("node-1", "node-2"), retries=1))
            return state_of(api)[0] == "Ready"

        eventually(ready, "mended")
        others = [c for c in api.objects[WORKLOADS, "team", "w"]["status"]["admissionChecks"] if c["name"] == "other"]
        assert others[0]["state"] == "Pending"


def test_pods_can_be_confined_to_nodes_that_passed(api: ApiServer) -> None:
    """podSetUpdates with the label that agents publish, for every pod set."""
    stored(api)
    api.put(NODES, "", to_resource(node("node-1"))[1])
    api.put(WORKLOADS, "team", workload())
    with running(api, Policy(confine=True)):
        eventually(lambda: state_of(api)[0] == "Ready", "an answer")
    selector = {"topoflight.io/ready": "true"}
    assert state_of(api)[1]["podSetUpdates"] == [{"name": "main", "nodeSelector": selector}]


def test_a_question_that_came_during_the_answer_is_not_lost() -> None:
    """The watch may bring a newer version before the answer to the older one has returned."""
    checks = Checks(CONTROLLER)
    checks.put({"metadata": {"name": "topoflight"}, "spec": {"controllerName": CONTROLLER}})
    waiting = Workloads(checks, threading.Event())
    old, new = workload(), workload()
    old["metadata"]["resourceVersion"], new["metadata"]["resourceVersion"] = "11", "12"
    waiting.put(old)
    waiting.put(new)
    waiting.answered(old)
    assert [item["metadata"]["resourceVersion"] for item, _, _ in waiting.waiting()] == ["12"]
    waiting.answered(new)
    assert waiting.waiting() == []


def without_a_name(api: ApiServer) -> None:
    """Its topology assignment is none; the controller cannot read it."""
    api.put(WORKLOADS, "team", workload("a-bad", nodes=("node-1",)))
    made = workload("a-bad", nodes=("node-1",))
    del made["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"]["slices"][0]["valuesPerLevel"]
    api.put(WORKLOADS, "team", made)


def by_the_server(api: ApiServer) -> None:
    """As an admission webhook or the schema does it, each time."""
    api.put(WORKLOADS, "team", workload("a-bad"))


@pytest.mark.parametrize("status", [400, 403, 422, 500])
@pytest.mark.parametrize("bad", [by_the_server, without_a_name])
def test_one_refused_workload_holds_up_no_other(api: ApiServer, bad: Any, status: int) -> None:
    """It is tried again, less and less often; those after it are answered, and it too once it is taken."""
    stored(api)
    api.put(NODES, "", to_resource(node("node-1"))[1])
    api.refused["a-bad"] = status
    bad(api)
    api.put(WORKLOADS, "team", workload("b-good"))
    with running(api):
        eventually(lambda: state_of(api, "b-good")[0] == "Ready", "the other is answered")
        api.put(WORKLOADS, "team", workload("c-good"))
        eventually(lambda: state_of(api, "c-good")[0] == "Ready", "and one that comes later")
        tried = [path for method, path in api.requests if method == "PATCH" and "a-bad" in path]
        assert state_of(api, "a-bad")[0] == "Pending" and len(tried) <= 10
        del api.refused["a-bad"]
        api.put(WORKLOADS, "team", workload("a-bad"))  # changed: tried at once
        eventually(lambda: state_of(api, "a-bad")[0] == "Ready", "once it is taken")


def test_a_check_that_cannot_be_marked_holds_up_no_answer(api: ApiServer) -> None:
    """The workload is answered though the check's own status is refused."""
    stored(api)
    api.refused["topoflight"] = 403
    api.put(NODES, "", to_resource(node("node-1"))[1])
    api.put(WORKLOADS, "team", workload())
    with running(api):
        eventually(lambda: state_of(api)[0] == "Ready", "an answer")


def test_a_conflict_or_an_outage_delays_the_answer_only(api: ApiServer) -> None:
    """409 and 500 on the way."""
    stored(api)
    api.put(NODES, "", to_resource(node("node-1"))[1])
    with running(api):
        eventually(lambda: api.objects[CHECKS, "", "topoflight"].get("status"), "active")
        api.faults = [(409, {})]
        api.put(WORKLOADS, "team", workload())
        eventually(lambda: state_of(api)[0] == "Ready", "after a conflict")
        api.down()
        api.up()
        api.put(WORKLOADS, "team", workload("second"))
        eventually(lambda: state_of(api, "second")[0] == "Ready", "after an outage")

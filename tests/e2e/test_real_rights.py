"""What a real API server lets the agent and its callers do: RBAC, tokens with an audience, and its own node only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import urllib3
from e2e_client import merge
from real_cluster import (
    MACHINES,
    ROOT,
    RUN,
    Document,
    admin,
    client_with,
    config_of,
    kubectl,
    need_controllers,
    node,
    of_kind,
    pod_of,
    real,
    served,
    text,
    token,
    within,
)
from rigs.waiting import eventually
from starlette.testclient import TestClient

from agent.cluster.client import ApiError, Client, path_of
from agent.cluster.nodes import API_VERSION, PLURAL, NodeRecord, from_resource
from agent.cluster.publish import NFD_VERSION, Publisher
from agent.http.access import AUDIENCE, Tokens
from agent.http.problem import ProblemError
from agent.http.server import create
from agent.http.state import State
from probes.host.recording import load
from probes.scan import scan

pytestmark = real()
AGENT, OTHER = f"{RUN}:topoflight", f"{RUN}:nobody"

CAN = [
    # verb, resource, namespace or "" for the cluster, who may
    ("create", "tokenreviews.authentication.k8s.io", "", {AGENT}),
    ("create", "subjectaccessreviews.authorization.k8s.io", "", {AGENT}),
    ("get", "nodetopologies.topoflight.io", "", {AGENT}),
    ("list", "nodetopologies.topoflight.io", "", {AGENT}),
    ("watch", "nodetopologies.topoflight.io", "", {AGENT}),
    ("create", "nodetopologies.topoflight.io", "", {AGENT}),
    ("patch", "nodetopologies.topoflight.io", "", {AGENT}),
    ("patch", "nodetopologies.topoflight.io/status", "", {AGENT}),
    ("delete", "nodetopologies.topoflight.io", "", set()),
    ("deletecollection", "nodetopologies.topoflight.io", "", set()),
    ("update", "customresourcedefinitions.apiextensions.k8s.io", "", set()),
    ("patch", "nodefeatures.nfd.k8s-sigs.io", RUN, {AGENT}),
    ("get", "nodefeatures.nfd.k8s-sigs.io", RUN, set()),
    ("patch", "nodefeatures.nfd.k8s-sigs.io", "kube-system", set()),
    ("list", "nodes", "", {AGENT}),
    ("get", "nodes", "", set()),
    ("watch", "nodes", "", set()),
    ("patch", "nodes", "", set()),
    ("patch", "nodes/status", "", set()),
    ("get", "secrets", RUN, set()),
    ("list", "pods", RUN, set()),
    ("create", "pods", RUN, set()),
    ("create", "pods/exec", RUN, set()),
    ("create", "jobs.batch", RUN, set()),
    ("get", "configmaps", RUN, set()),
    ("create", "serviceaccounts/token", RUN, set()),
    ("impersonate", "users", "", set()),
    ("bind", "clusterroles.rbac.authorization.k8s.io", "", set()),
    ("escalate", "clusterroles.rbac.authorization.k8s.io", "", set()),
]


@pytest.mark.parametrize(("verb", "resource", "namespace", "who"), CAN, ids=lambda v: v if isinstance(v, str) else "")
def test_the_table_of_rights(cluster: list[Document], verb: str, resource: str, namespace: str, who: set[str]) -> None:
    """As the server's own SubjectAccessReview has it, for the agent and any other pod."""
    kind, _, sub = resource.partition("/")
    plural, _, group = kind.partition(".")
    may = set()
    for account in (AGENT, OTHER):
        answer = admin().create(path_of("authorization.k8s.io/v1", "subjectaccessreviews"), {
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {
                "user": f"system:serviceaccount:{account}",
                "groups": ["system:serviceaccounts", f"system:serviceaccounts:{RUN}", "system:authenticated"],
                "resourceAttributes": {"verb": verb, "group": group, "resource": plural, "subresource": sub,
                                       "namespace": namespace},
            }}, repeatable=True)  # fmt: skip
        may |= {account} if answer["status"]["allowed"] else set()
    assert may == who


def test_kubectl_lists_no_right_beyond_the_table(cluster: list[Document], tmp_path: Path, agent_pod: str) -> None:
    """`kubectl auth can-i --list` with the agent's own token: what every account has, and what the table names."""
    mine = kubectl("auth", "can-i", "--list", "-n", RUN, config=config_of(tmp_path, token("topoflight", RUN)))
    kubectl("create", "serviceaccount", "nobody", "-n", RUN)
    any_account = kubectl("auth", "can-i", "--list", "-n", RUN, config=config_of(tmp_path, token("nobody", RUN)))
    more = {line.split()[0] for line in mine.splitlines()} - {line.split()[0] for line in any_account.splitlines()}
    assert more == {
        "tokenreviews.authentication.k8s.io", "subjectaccessreviews.authorization.k8s.io",
        "nodetopologies.topoflight.io", "nodetopologies.topoflight.io/status", "nodes", "nodefeatures.nfd.k8s-sigs.io",
    }  # fmt: skip


@pytest.fixture
def agent_client(cluster: list[Document], agent_pod: str, tmp_path: Path) -> Client:
    """With the token that the kubelet would give to the agent's pod on the test's node."""
    return client_with(tmp_path, token("topoflight", RUN, pod=agent_pod))


def record_of(name: str, **more: Any) -> NodeRecord:
    made = NodeRecord(name=name, host=name, verdict="pass", scanned_at_seconds=time.time(), gpus=8, links="NV18 x 28",
                      hcas=8, rdma="8/8 active", memlock="unlimited")  # fmt: skip
    return replace(made, **more)


@pytest.fixture
def published(gpu_node: str) -> Iterator[str]:
    """The node's name; what was published of it is taken away."""
    yield gpu_node
    kubectl("delete", "nodetopology", gpu_node, "--ignore-not-found")


def test_the_agent_publishes_its_own_node_with_its_own_token(agent_client: Client, published: str) -> None:
    """With no right but its own; kubectl shows the cluster at a glance, and NFD has its labels."""
    record = record_of(published)
    Publisher(agent_client, lambda: record, namespace=RUN).write(record)
    header, line = kubectl("get", "nodetopologies", published).splitlines()
    columns = ["NAME", "GPUS", "LINKS", "HCAS", "RDMA", "MEMLOCK", "VERDICT", "FINDING", "SCANNED", "ENDED", "AGE"]
    assert header.split() == columns
    assert "NV18 x 28" in line and "unlimited" in line and "pass" in line
    assert [r for r in kubectl("get", "nt", "-o", "name").splitlines() if published in r], "the short name"
    if served(NFD_VERSION, "NodeFeature"):
        feature = json.loads(kubectl("get", "nodefeature", f"topoflight-{published}", "-n", RUN, "-o", "json"))
        assert feature["spec"]["labels"]["topoflight.io/ready"] == "true"


def judged(client: Client, path: str, document: Document) -> str | None:
    """Why the server refuses it; None where it does not, for policies come into force a moment after they are made."""
    try:
        client.apply(path, document, dry_run=True)
    except ApiError as error:
        assert error.status in (403, 422), error
        return str(error)
    return None


def test_the_agent_writes_of_no_other_node(agent_client: Client, cluster: list[Document]) -> None:
    """The policy reads the node from the token, which the agent cannot choose."""
    other = f"{RUN}-other"
    about = {"apiVersion": API_VERSION, "kind": "NodeTopology", "metadata": {"name": other}}
    path = path_of(API_VERSION, PLURAL, other)
    eventually(lambda: judged(agent_client, path, {**about, "spec": {"nodeName": other}}), "the policy is in force")
    assert f"may not write of node {other}" in str(judged(agent_client, path, {**about, "spec": {"nodeName": other}}))
    admin().apply(path, {**about, "spec": {"nodeName": other}})
    try:
        refused = judged(agent_client, path + "/status", {**about, "status": {"verdict": "pass"}})
        assert refused and f"may not write of node {other}" in refused
        for noted in ({"annotations": {"a": "b"}}, {"labels": {"a": "b"}}):
            with pytest.raises(ApiError, match="may not write of node"):
                merge(agent_client, path, {"metadata": noted})
    finally:
        admin().request("DELETE", path)


def test_a_token_that_names_no_node_writes_nothing(cluster: list[Document], gpu_node: str, tmp_path: Path) -> None:
    """The agent's account without a pod: a token that somebody made by hand."""
    client = client_with(tmp_path, token("topoflight", RUN))
    about = {"apiVersion": API_VERSION, "kind": "NodeTopology", "metadata": {"name": gpu_node}}
    path = path_of(API_VERSION, PLURAL, gpu_node)
    eventually(lambda: judged(client, path, about), "the policy is in force")
    assert "names no node" in str(judged(client, path, about))


def test_a_record_names_its_own_node(agent_client: Client, gpu_node: str) -> None:
    """spec.nodeName is the object's name."""
    document = {"apiVersion": API_VERSION, "kind": "NodeTopology", "metadata": {"name": gpu_node},
                "spec": {"nodeName": "another"}}  # fmt: skip
    eventually(lambda: judged(agent_client, path_of(API_VERSION, PLURAL, gpu_node), document), "the policy is in force")


def test_the_agent_labels_no_other_node(agent_client: Client, gpu_node: str) -> None:
    """Neither by the object's name nor by the label that NFD reads."""
    if not served(NFD_VERSION, "NodeFeature"):
        pytest.skip(f"the API server has no NodeFeature of {NFD_VERSION}: install NFD's CRDs to run this test")
    for name, meant in ((f"topoflight-{gpu_node}", "another"), ("topoflight-another", gpu_node), ("x", "another")):
        path = path_of(NFD_VERSION, "nodefeatures", name, namespace=RUN)
        document = {"apiVersion": NFD_VERSION, "kind": "NodeFeature", "spec": {"labels": {}}, "metadata": {
            "name": name, "namespace": RUN, "labels": {"nfd.node.kubernetes.io/node-name": meant}}}  # fmt: skip

        def refused(path: str = path, document: Document = document) -> str | None:
            return judged(agent_client, path, document)

        eventually(refused, "the policy is in force")
        assert "may not label node" in str(refused())


def test_the_server_finds_no_fault_in_the_policies(cluster: list[Document]) -> None:
    """It compiles their expressions against the schemas it has; a warning would be in the status."""
    policies = [d["metadata"]["name"] for d in cluster if d["kind"] == "ValidatingAdmissionPolicy"]
    assert len(policies) == 2
    for name in policies:
        path = path_of("admissionregistration.k8s.io/v1", "validatingadmissionpolicies", name)
        need_controllers()
        assert within(lambda path=path: "typeChecking" in admin().get(path).get("status", {}))
        assert admin().get(path)["status"]["typeChecking"].get("expressionWarnings", []) == []


@pytest.fixture
def caller(cluster: list[Document]) -> Iterator[str]:
    """A pipeline's service account."""
    name = "gate"
    kubectl("create", "serviceaccount", name, "-n", RUN)
    yield name
    kubectl("delete", "serviceaccount", name, "-n", RUN, "--ignore-not-found")
    for kind in ("clusterrolebinding", "clusterrole"):
        if made := [name for name in kubectl("get", kind, "-o", "name").split() if f"/{RUN}-load" in name]:
            kubectl("delete", *made)


def grant(words: str) -> None:
    """Do what a refusal said, under names of this run."""
    for line in words.split(" && "):
        kubectl(*line.replace("topoflight-load", f"{RUN}-load").split()[1:])


def test_a_token_is_refused_then_granted(agent_client: Client, caller: str) -> None:
    """TokenReview with audience, then SubjectAccessReview, by the agent; the refusal's own words grant it."""
    good, other = token(caller, RUN, audience=AUDIENCE), token(caller, RUN)
    for wrong in (other, "not-a-token", good[:-4] + "AAAA"):
        with pytest.raises(ProblemError) as caught:
            Tokens(client=agent_client).check(f"Bearer {wrong}", path="/preflight", verb="post")
        assert caught.value.status == 401
    with pytest.raises(ProblemError) as refused:
        Tokens(client=agent_client).check(f"Bearer {good}", path="/preflight", verb="post")
    assert refused.value.status == 403
    grant(refused.value.more["grant"])

    def granted() -> bool:
        try:
            user = Tokens(client=agent_client).check(f"Bearer {good}", path="/preflight", verb="post")
        except ProblemError:
            return False
        return user == f"system:serviceaccount:{RUN}:{caller}"

    eventually(granted, "the grant takes effect")
    with pytest.raises(ProblemError) as elsewhere:
        Tokens(client=agent_client).check(f"Bearer {good}", path="/flights", verb="post")
    assert elsewhere.value.status == 403, "one endpoint is not the other"
    kubectl("delete", "serviceaccount", caller, "-n", RUN)

    def gone() -> bool:
        try:
            Tokens(client=agent_client).check(f"Bearer {good}", path="/preflight", verb="post")
        except ProblemError as error:
            return error.status == 401
        return False

    eventually(gone, "the token of a deleted account is refused")


def test_the_shipped_role_lets_a_job_leave_its_record_and_open_nothing_else(
    cluster: list[Document], agent_client: Client, caller: str, tmp_path: Path
) -> None:
    """The token is the one that a projected volume holds; the agent names its account beside the record."""
    role = next(d["metadata"]["name"] for d in cluster if d["metadata"]["name"].startswith("topoflight-flights"))
    kubectl("create", "clusterrolebinding", f"{RUN}-load", f"--clusterrole={role}", f"--serviceaccount={RUN}:{caller}")
    bearer = {"Authorization": f"Bearer {token(caller, RUN, audience=AUDIENCE)}"}

    def granted() -> bool:
        try:
            return bool(Tokens(client=agent_client).check(bearer["Authorization"], path="/flights", verb="post"))
        except ProblemError:
            return False

    eventually(granted, "the binding takes effect")
    (tmp_path / "state").mkdir()
    snapshot = scan(load(next(MACHINES.glob("hgx-h100*.json"))))
    state = State(lambda: (snapshot,), interval_seconds=3600, folder=tmp_path / "state")
    state.refresh()
    http = TestClient(create(state, tokens=Tokens(client=agent_client)))
    record = {"schema_version": 1, "status": "complete", "host": "sft-0", "started_at": "2026-11-01T10:00:00Z"}
    assert http.post("/flights", headers=bearer, json=record).status_code == 201
    (stored,) = http.get("/flights").json()
    assert record.items() <= stored.items() and stored["posted_by"] == f"system:serviceaccount:{RUN}:{caller}"
    assert http.post("/preflight", headers=bearer).status_code == 403


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


def ask(url: str, *, method: str = "GET", bearer: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    try:
        answer = urllib3.request(method, url, headers=headers, timeout=60, retries=False)
    except urllib3.exceptions.HTTPError:
        return 0, None
    return answer.status, answer.json()


@contextmanager
def serving(config: Path, name: str, log: Path) -> Iterator[str]:
    """The agent as the DaemonSet starts it, on a recorded machine."""
    port = free_port()
    words = [sys.executable, "-m", "agent.cli", "serve", "--host", str(next(MACHINES.glob("hgx-h100*.json"))),
             "--port", str(port), "--publish", "--token-review", "--publish-interval", "10"]  # fmt: skip
    environment = {**os.environ, "KUBECONFIG": str(config), "NODE_NAME": name, "POD_NAMESPACE": RUN}
    with log.open("wb") as stream:
        child = subprocess.Popen(words, env=environment, cwd=ROOT, stdout=stream, stderr=stream)
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: child.poll() is None and ask(url + "/nodes?scope=node")[0] == 200, log.read_text())
        yield url
    finally:
        child.terminate()
        assert child.wait(30) is not None


def test_two_agents_answer_for_the_cluster_and_judge_callers(
    cluster: list[Document], agent_pod: str, published: str, caller: str, tmp_path: Path
) -> None:
    """The whole agent, twice, each with its pod's token: publish, watch, /nodes, doors; no token reaches a log."""
    second = f"{RUN}-second"
    template = of_kind(cluster, "DaemonSet")["spec"]["template"]
    pod = pod_of(template, namespace=RUN, name=f"by-hand-{second}", on=second)
    pod["metadata"].pop("labels")
    with node(second):
        kubectl("create", "-f", "-", stdin=text([pod]))
        first_token, second_token = token("topoflight", RUN, pod=agent_pod), token(
            "topoflight", RUN, pod=pod["metadata"]["name"])  # fmt: skip
        logs = [tmp_path / "first.log", tmp_path / "second.log"]
        try:
            with (
                serving(config_of(tmp_path, first_token), published, logs[0]) as one,
                serving(config_of(tmp_path, second_token), second, logs[1]) as two,
            ):

                def seen(url: str) -> set[str]:
                    return {r["name"] for r in ask(url + "/nodes")[1]["nodes"] if not r["silent"]}

                for url in (one, two):
                    eventually(lambda url=url: {published, second} <= seen(url), "each knows of both")
                kinds = ask(one + "/topology?scope=cluster")[1]["kinds"]
                assert any({published, second} <= set(kind["names"]) for kind in kinds), "equal machines are one kind"
                advice = ask(two + "/recommendations?scope=cluster&model=Llama-3.1-8B&nodes=2")
                assert advice[0] == 200, advice[1]
                good = token(caller, RUN, audience=AUDIENCE)
                assert ask(one + "/preflight", method="POST")[0] == 401
                assert ask(one + "/preflight", method="POST", bearer=token(caller, RUN))[0] == 401
                status, problem = ask(one + "/preflight", method="POST", bearer=good)
                assert status == 403 and "kubectl create clusterrole" in problem["grant"]
                grant(problem["grant"])
                eventually(lambda: ask(one + "/preflight", method="POST", bearer=good)[0] == 200, "granted")
                stored = admin().get(path_of(API_VERSION, PLURAL, published))
                assert from_resource(stored).graph, "published with its graph"
        finally:
            kubectl("delete", "nodetopology", second, "--ignore-not-found")
        for log in logs:
            said = log.read_text()
            assert not [t for t in (first_token, second_token, good) if t in said or t.split(".")[2] in said]
            assert "Traceback" not in said, said


def test_the_gate_judges_published_nodes(agent_client: Client, published: str, tmp_path: Path) -> None:
    """From anywhere with a kubeconfig: by name, by label, by what nobody published."""

    def gate(*words: str) -> int:
        command = [sys.executable, "-m", "agent.cli", "preflight", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=120).returncode

    record = record_of(published)
    publisher = Publisher(agent_client, lambda: record, namespace=RUN, labels=False)
    publisher.write(record)
    assert gate("--nodes", published) == 0
    assert gate("--selector", f"topoflight.io/e2e={RUN},topoflight.io/agent=true") == 0
    assert gate("--selector", "topoflight.io/e2e=nobody") == 2
    assert gate("--nodes", f"{published},{RUN}-unheard-of") == 3
    bad = {"code": "rdma.port.down", "severity": "fail", "subject": "mlx5_0", "message": "down"}
    publisher.write(replace(record, verdict="fail", findings=(bad,)))
    assert gate("--nodes", published) == 3
    assert gate("--nodes", published, "--skip", "rdma.port.down") == 0

"""What a real API server alone can tell: it admits each manifest and changes none; RBAC, tokens, its own node only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from e2e_client import ask, merge, serving
from real_cluster import (
    MACHINES,
    ROOT,
    RUN,
    Document,
    config_of,
    installed,
    kubectl,
    node,
    of_kind,
    overlay,
    pod_of,
    real,
    text,
    token,
)
from rigs.waiting import eventually

from agent.cluster.client import ApiError, Client, connect, path_of
from agent.cluster.nodes import API_VERSION, PLURAL, from_resource
from agent.http.access import AUDIENCE

pytestmark = real()
OVERLAYS = sorted(path.name for path in (ROOT / "deploy/daemonset/overlays").iterdir())


@pytest.fixture
def agent_client(cluster: list[Document], agent_pod: str, tmp_path: Path) -> Client:
    """With the token that the kubelet would give to the agent's pod on the test's node."""
    return connect(environment={"KUBECONFIG": str(config_of(tmp_path, token("topoflight", RUN, pod=agent_pod)))})


@pytest.fixture
def published(gpu_node: str) -> Iterator[str]:
    """The node's name; what was published of it is taken away."""
    yield gpu_node
    kubectl("delete", "nodetopology", gpu_node, "--ignore-not-found")


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
    connect().apply(path, {**about, "spec": {"nodeName": other}})
    try:
        refused = judged(agent_client, path + "/status", {**about, "status": {"verdict": "pass"}})
        assert refused and f"may not write of node {other}" in refused
        for noted in ({"annotations": {"a": "b"}}, {"labels": {"a": "b"}}):
            with pytest.raises(ApiError, match="may not write of node"):
                merge(agent_client, path, {"metadata": noted})
    finally:
        connect().request("DELETE", path)


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


def test_two_agents_answer_for_the_cluster_and_judge_callers(
    cluster: list[Document], agent_pod: str, published: str, caller: str, tmp_path: Path
) -> None:
    """The whole agent, twice, each with its pod's token: publish, /nodes, doors; no token reaches a log."""
    second = f"{RUN}-second"
    template = of_kind(cluster, "DaemonSet")["spec"]["template"]
    pod = pod_of(template, namespace=RUN, name=f"by-hand-{second}", on=second)
    pod["metadata"].pop("labels")
    with node(second):
        kubectl("create", "-f", "-", stdin=text([pod]))
        first_token, second_token = token("topoflight", RUN, pod=agent_pod), token(
            "topoflight", RUN, pod=pod["metadata"]["name"])  # fmt: skip
        words = ("--host", str(next(MACHINES.glob("hgx-h100*.json"))), "--publish-interval", "10")
        logs = [tmp_path / "first.log", tmp_path / "second.log"]
        try:
            with (
                serving(config_of(tmp_path, first_token), published, logs[0], *words) as one,
                serving(config_of(tmp_path, second_token), second, logs[1], *words) as two,
            ):

                def seen(url: str) -> set[str]:
                    return {r["name"] for r in ask(url + "/nodes")[1]["nodes"] if not r["silent"]}

                for url in (one, two):
                    eventually(lambda url=url: {published, second} <= seen(url), "each knows of both")
                good = token(caller, RUN, audience=AUDIENCE)
                assert ask(one + "/preflight", method="POST")[0] == 401
                assert ask(one + "/preflight", method="POST", bearer=token(caller, RUN))[0] == 401
                status, problem = ask(one + "/preflight", method="POST", bearer=good)
                assert status == 403 and "kubectl create clusterrole" in problem["grant"]
                grant(problem["grant"])
                eventually(lambda: ask(one + "/preflight", method="POST", bearer=good)[0] == 200, "granted")
                stored = connect().get(path_of(API_VERSION, PLURAL, published))
                assert from_resource(stored).facts, "published with its graph"
        finally:
            kubectl("delete", "nodetopology", second, "--ignore-not-found")
        for log in logs:
            said = log.read_text()
            assert not [t for t in (first_token, second_token, good) if t in said or t.split(".")[2] in said]
            assert "Traceback" not in said, said


def generations(documents: list[Document]) -> dict[str, int]:
    """How often the server has seen another wish for each object; without the kinds that have no such number, by
    their version, which nobody else moves.
    """
    listed = yaml.safe_load(kubectl("get", "-o", "yaml", "-f", "-", stdin=text(documents)))["items"]
    return {
        f"{item['kind']}/{item['metadata']['name']}":
            int(item["metadata"].get("generation") or item["metadata"]["resourceVersion"])
        for item in listed
    }  # fmt: skip


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_server_admits_every_overlay(definition: None, name: str) -> None:
    """Strictly, for real; applied again nothing changes: no default and no controller argues with a manifest."""
    run = f"{RUN}-{name}"
    with installed(overlay(name, run)) as documents:
        assert {"DaemonSet", "ClusterRole", "NetworkPolicy", "Namespace"} <= {d["kind"] for d in documents}
        before = generations(documents)
        said = kubectl("apply", "--validate=strict", "-f", "-", stdin=text(documents))
        assert not [line for line in said.splitlines() if not line.endswith(" unchanged")]
        assert generations(documents) == before
        # server-side apply by another hand finds nothing to argue about either
        kubectl("apply", "--server-side", "--validate=strict", "--dry-run=server", "--force-conflicts",
                "--field-manager=e2e", "-f", "-", stdin=text(documents))  # fmt: skip
    left = kubectl("get", "clusterroles,clusterrolebindings,priorityclasses,runtimeclasses,namespaces", "-o", "name")
    assert run not in left, "something stayed behind"

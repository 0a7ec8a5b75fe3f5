"""What the shipped roles and policies let the agent do, held against the requests that the agent makes.

The stand-in authorizes as RBAC does.
"""

from __future__ import annotations

import re

import yaml
from api_server import ApiServer, Right, write_kubeconfig
from e2e_client import ROOT, ask, render, serving
from rigs.waiting import eventually

from agent.http.access import AUDIENCE

ACCOUNT = {"kind": "ServiceAccount", "name": "topoflight", "namespace": "topoflight"}
CALLER, TOKEN = "system:serviceaccount:ci:gate", "token-of-a-pipeline"
OVERLAYS = sorted(path.name for path in (ROOT / "deploy/daemonset/overlays").iterdir())
Document = dict


def rights_of(documents: list[Document]) -> set[Right]:
    """What the bindings among the documents give to the agent's account; to another account only the use of an SCC."""
    roles = {(d["kind"], d["metadata"]["name"]): d for d in documents if d["kind"] in ("Role", "ClusterRole")}
    found = set()
    for binding in (d for d in documents if d["kind"].endswith("RoleBinding")):
        place = binding["metadata"].get("namespace", "")
        assert bool(place) is (binding["kind"] == "RoleBinding")
        if binding["roleRef"]["name"].startswith("system:openshift:scc:"):
            continue  # OpenShift's own role: the use of an SCC
        for rule in roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]["rules"]:
            if (rule["apiGroups"], rule["verbs"]) == (["security.openshift.io"], ["use"]):
                continue  # asked for by OpenShift's admission of the pod, in no request of the pod
            assert binding["subjects"] == [ACCOUNT] and set(rule) == {"apiGroups", "resources", "verbs"}
            found |= {(place, g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    return found


def test_every_request_of_the_agent_is_granted_and_every_right_is_used(tmp_path):
    """Start, publish, show the page of the cluster, judge a caller's token, end."""
    granted = {name: rights_of(render(ROOT / "deploy/daemonset/overlays" / name)) for name in OVERLAYS}
    rights = granted["kubernetes"]
    assert not {name: found ^ rights for name, found in granted.items() if found != rights}
    log = tmp_path / "log"
    with ApiServer() as api:
        api.rights = rights
        api.reviewed[TOKEN] = {"authenticated": True, "audiences": [AUDIENCE], "user": {"username": CALLER}}
        config = write_kubeconfig(tmp_path / "config", api.url, namespace="topoflight")
        with serving(config, "n1", log) as url:
            eventually(lambda: api.of_kind("NodeTopology") or api.used - rights, "the record is published")
            eventually(lambda: "n1" in str(ask(url + "/nodes")[1]) or api.used - rights, "the node is seen")
            assert ask(url + "/cluster")[0] == 200
            status, problem = ask(url + "/preflight", method="POST", bearer=TOKEN)
            assert status == 403 and f"{CALLER} may not post /preflight" in problem["detail"]
        assert api.used - rights == set(), "requests that no role grants"
        assert rights - api.used == set(), "rights that no request needs"
        (record,) = api.of_kind("NodeTopology")
        assert record["status"]["stoppedAt"], "the end was written"
        assert "Forbidden" not in log.read_text() and "Traceback" not in log.read_text()
        made = record | {"kind": "NodeTopology"}
        assert refused(made, "n1") == [] and refused(made, "n2") and refused(made, "")


class Tree:
    """A document as CEL reads it: members as attributes, `[?'a']` and `.?a` as `maybe`."""

    def __init__(self, value) -> None:
        self.value = value

    def __getattr__(self, name: str):
        found = self.value[name]
        return Tree(found) if isinstance(found, (dict, list)) else found

    def maybe(self, name: str) -> Tree:
        """The member, or nothing where it is absent."""
        return Tree(self.value.get(name) if isinstance(self.value, dict) else None)

    def __getitem__(self, index: int) -> Tree:
        return Tree(self.value[index] if self.value else None)

    def orValue(self, default: str) -> str:  # noqa: N802 - CEL's name
        """The value, or the default for nothing."""
        return default if self.value is None else self.value

    def has(self, *names: str) -> bool:
        """Whether the member that the path names is there."""
        value = self.value
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value is not None


class Authorizer:
    """CEL's `authorizer`, for the one question that the policies have."""

    def __init__(self, allowed: bool) -> None:
        self.is_allowed = allowed

    def __getattr__(self, _: str):
        return lambda *_: self

    def allowed(self) -> bool:
        """The end of the chain of calls."""
        return self.is_allowed


def evaluate(expression: str, names: dict):
    """A CEL expression of the policies as Python's: the operators and macros that they use."""
    text = re.sub(r"has\((\w+)\.([\w.]+)\)", lambda m: f"{m[1]}.has(*{m[2].split('.')!r})", expression)
    text = re.sub(r"\[\?('[^']+')\]", r".maybe(\1)", text)
    text = re.sub(r"\.\?(\w+)", r".maybe('\1')", text)
    text = re.sub(r"!(?!=)", " not ", text).replace("&&", " and ").replace("||", " or ")
    return eval(text.strip(), {"__builtins__": {}}, names)  # noqa: S307 - of this checkout's own manifests


def refused(document: Document, node: str, *, administrator: bool = False) -> list[str]:
    """What the policies say to a write of the document with a token of a pod on `node`, "" for a token of no pod."""
    extra = {"authentication.kubernetes.io/node-name": [node]} if node else {}
    user = {"username": "system:serviceaccount:topoflight:topoflight", "extra": extra}
    names: dict = {"object": Tree(document), "request": Tree({"userInfo": user}),
                             "authorizer": Authorizer(administrator)}  # fmt: skip
    group, resource = document["apiVersion"].split("/")[0], f"{document['kind'].lower()}s".replace("ys", "ies")
    said = []
    for policy in yaml.safe_load_all((ROOT / "deploy/daemonset/own-node/policy.yaml").read_text()):
        (rule,) = policy["spec"].get("matchConstraints", {}).get("resourceRules", [{"apiGroups": []}])
        if policy["kind"] != "ValidatingAdmissionPolicy" or group not in rule["apiGroups"]:
            continue
        assert resource in rule["resources"] and rule["operations"] == ["CREATE", "UPDATE"]
        if not all(evaluate(one["expression"], names) for one in policy["spec"]["matchConditions"]):
            continue
        names["variables"] = Tree({})
        for variable in policy["spec"]["variables"]:
            names["variables"].value[variable["name"]] = evaluate(variable["expression"], names)
        for one in policy["spec"]["validations"]:
            if not evaluate(one["expression"], names):
                said.append(one.get("message") or evaluate(one["messageExpression"], names))
    return said


def test_the_agent_writes_of_its_own_node_alone() -> None:
    """By the node in the token, which no account chooses; an administrator of the records is not held to a node."""

    def record(name: str, spec: str | None = None) -> Document:
        named = {} if spec is None else {"spec": {"nodeName": spec}}
        return {"apiVersion": "topoflight.io/v1alpha1", "kind": "NodeTopology", "metadata": {"name": name}, **named}

    rows = [
        (record("n1", "n1"), "n1", ""), (record("n1"), "n1", ""), (record("n2"), "n1", "n1 may not write of node n2"),
        (record("n1", "n1"), "", "names no node"), (record("n1", "n2"), "n1", "must be the object's name"),
    ]  # fmt: skip
    wrong = [
        (document, node, found) for document, node, words in rows
        if bool(found := refused(document, node)) is not bool(words) or words not in " ".join(found)
        or refused(document, node, administrator=True)
    ]  # fmt: skip
    assert not wrong

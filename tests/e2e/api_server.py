"""A stand-in for kube-apiserver: the endpoints and errors that the product meets, over real HTTP.

It keeps objects with resource versions, pages lists, applies patches, keeps status apart, validates
NodeTopology by its own CRD, judges tokens, authorizes by RBAC rights where it has them, and fails on demand: 429, 500,
refused connections.
"""

from __future__ import annotations

import json
import socket
import threading
from functools import cache
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import jsonschema
import yaml
from jsonschema.exceptions import best_match
from kubernetes.client import Configuration
from rigs.crds import strict
from rigs.serving import Handler
from rigs.tables import ROOT, data_of

CRD = yaml.safe_load((ROOT / "deploy/daemonset/base/nodetopology-crd.yaml").read_text())
Json = dict
Right = tuple[str, str, str, str]  # namespace, or "" for the cluster; API group; resource[/subresource]; verb
KINDS: dict[str, str] = data_of(__file__, "api_kinds.yaml")
# kind of a job -> the label of its pods
JOBS = {
    "Job": "job-name", "PyTorchJob": "training.kubeflow.org/job-name", "TrainJob": "jobset.sigs.k8s.io/jobset-name",
}  # fmt: skip


def pods_of(job: Json) -> int:
    """How many pods a job has."""
    spec = job["spec"]
    replicas = sum(each["replicas"] for each in spec.get("pytorchReplicaSpecs", {}).values())
    return int(spec.get("parallelism") or spec.get("trainer", {}).get("numNodes") or replicas)


def selected(item: Json, selector: str) -> bool:
    """Whether an object has the labels: NAME=VALUE, and !NAME for a label that it must not have."""
    labels = item["metadata"].get("labels") or {}
    words = [word.partition("=") for word in selector.split(",") if word]
    return all(name[1:] not in labels if name[0] == "!" else labels.get(name) == value for name, _, value in words)


def write_kubeconfig(path: Path, url: str, *, user: str = "{token: agent-token}", namespace: str = "") -> Path:
    """The way to a server, for a user as flow YAML gives it."""
    context = "{cluster: k, user: u" + (f", namespace: {namespace}" if namespace else "") + "}"
    path.write_text(
        f"current-context: c\nclusters: [{{name: k, cluster: {{server: '{url}'}}}}]\n"
        f"users: [{{name: u, user: {user}}}]\ncontexts: [{{name: c, context: {context}}}]\n"
    )
    return path


def configuration(url: str, token: str = "agent-token") -> Configuration:  # noqa: S107 - of the stand-in
    """The same without a file."""
    return Configuration(host=url, api_key={"BearerToken": f"Bearer {token}"})


class ApiServer:
    """Objects in memory, a thread per connection. `with ApiServer() as api: api.url`."""

    def __init__(self) -> None:
        self.kinds = dict(KINDS)
        self.objects: dict[tuple[str, str, str], Json] = {}  # (collection, namespace, name)
        self.applied: dict[tuple[tuple[str, str, str], str], set[str]] = {}  # fields of a status, by object and manager
        self.version = 100
        self.lock = threading.RLock()
        self.tokens = {"agent-token"}  # who may call the API at all
        self.reviewed: dict[str, Json] = {}  # token -> TokenReview status
        self.allowed: set[tuple[str, str, str]] = set()  # user, verb, path
        self.rights: set[Right] | None = None  # what the caller's roles grant; None grants everything
        self.used: set[Right] = set()  # the rights that requests needed, granted or not
        self.forbidden: set[str] = set()  # collections that nobody may read
        self.faults: list[tuple[int, dict[str, str]]] = []  # answers for the next requests
        self.expiries = 0  # how many lists expire at their second page
        self.requests: list[tuple[str, str]] = []
        self.controllers = True  # whether a job's pods are made
        self.warnings: list[str] = []  # sent with each object that is made
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        self._place: socket.socket | None = None  # holds the port while nobody listens: others look for free ones

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ApiServer:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()
        if self._place is not None:
            self._place.close()

    def up(self) -> None:
        """Listen, on the same port as before."""
        if self._place is None:
            self._place = socket.socket()
            self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # shared with who listens
            self._place.bind(("127.0.0.1", 0))
            self.port = self._place.getsockname()[1]
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def down(self) -> None:
        """Stop listening."""
        if self._server is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()

    @property
    def is_up(self) -> bool:
        """Whether it listens."""
        return self._server is not None

    def of_kind(self, kind: str) -> list[Json]:
        """Every object of a kind."""
        with self.lock:
            return [o for (path, _, _), o in self.objects.items() if self.kinds[path] == kind]

    def put(self, collection: str, namespace: str, document: Json) -> Json:
        """Store as if a client had."""
        with self.lock:
            key = collection, namespace, document["metadata"]["name"]
            self.version += 1
            document["metadata"]["resourceVersion"] = str(self.version)
            document["metadata"].setdefault("uid", f"uid-{self.version}")
            document["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
            self.objects[key] = document
            return document

    def delete(self, collection: str, namespace: str, name: str) -> Json:
        """Remove."""
        with self.lock:
            document = self.objects.pop((collection, namespace, name))
            self.version += 1
            document["metadata"]["resourceVersion"] = str(self.version)
            return document


class RefusedError(Exception):
    """What the server says no with."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class _Handler(Handler):
    api: ApiServer

    def _status(self, status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "reason": reason,
                "message": message}  # fmt: skip
        self.send(status, body, headers)

    def respond(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        sent = self.read_body()
        self.api.requests.append((self.command, self.path))
        if not self.api.is_up:
            self.close_connection = True
            return
        if self.api.faults:
            status, headers = self.api.faults.pop(0)
            self._status(status, "Injected", "as asked for", headers)
            return
        if self.token not in self.api.tokens:
            self._status(401, "Unauthorized", "Unauthorized")
            return
        try:
            self._authorize(url.path)
            self._route(url.path, query, json.loads(sent) if sent else None)
        except RefusedError as refused:
            self._status(refused.status, refused.reason, str(refused))
        except BrokenPipeError:
            self.close_connection = True

    def _authorize(self, path: str, verb: str = "") -> None:
        """Refuse what no right grants (Kubernetes: Authorization, "Determine the request verb"; RBAC)."""
        words = path.strip("/").split("/")
        group, words = ("", words[2:]) if words[0] == "api" else (words[1], words[3:])
        namespace, words = (words[1], words[2:]) if words[0] == "namespaces" and len(words) > 2 else ("", words)
        read = "get" if len(words) > 1 else "list"
        verb = verb or {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}.get(self.command, read)
        resource = "/".join([words[0], *words[2:]])
        self.api.used.add((namespace, group, resource, verb))
        if self.api.rights is not None and not self.api.rights & {
            (at, group, resource, verb) for at in (namespace, "")
        }:
            raise RefusedError(403, "Forbidden", f'cannot {verb} resource "{resource}" in API group "{group}"')

    def _route(self, path: str, query: dict[str, str], body) -> None:
        if path == "/apis/authentication.k8s.io/v1/tokenreviews":
            status = self.api.reviewed.get(body["spec"]["token"], {"authenticated": False})
            both = [a for a in status.get("audiences", ()) if a in body["spec"]["audiences"]]
            ok = status["authenticated"] and bool(both)
            self.send(201, {**body, "status": {**status, "audiences": both} if ok else {"authenticated": False}})
            return
        if path == "/apis/authorization.k8s.io/v1/subjectaccessreviews":
            spec = body["spec"]
            asked = spec["nonResourceAttributes"]
            allowed = (spec["user"], asked["verb"], asked["path"]) in self.api.allowed
            self.send(201, {**body, "status": {"allowed": allowed}})
            return
        collection, namespace, name, sub = self._split(path)
        if collection in self.api.forbidden:
            what = collection.rpartition("/")[2]
            raise RefusedError(403, "Forbidden", f'{what} is forbidden: User "u" cannot list resource "{what}"')
        if self.command == "GET" and not name:
            self._list(collection, namespace, query)
        elif self.command == "GET":
            self.send(200, self._stored(collection, namespace, name))
        elif self.command == "POST":
            self._create(collection, namespace, body, query)
        elif self.command == "PATCH":
            self._patch(collection, namespace, name, sub, body, query)
        elif self.command == "DELETE":
            self._stored(collection, namespace, name)
            self.send(200, self.api.delete(collection, namespace, name))
        else:
            raise RefusedError(405, "MethodNotAllowed", self.command)

    def _split(self, path: str) -> tuple[str, str, str, str]:
        words = path.split("/")
        head = 3 if words[1] == "api" else 4
        rest, namespace = words[head:], ""
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        collection = "/".join([*words[:head], *rest[:1]])
        if collection not in self.api.kinds:
            raise RefusedError(404, "NotFound", "the server could not find the requested resource")
        return collection, namespace, rest[1] if len(rest) > 1 else "", rest[2] if len(rest) > 2 else ""

    def _stored(self, collection: str, namespace: str, name: str) -> Json:
        try:
            return self.api.objects[collection, namespace, name]
        except KeyError:
            raise RefusedError(404, "NotFound", f"{collection} {name!r} not found") from None

    def _list(self, collection: str, namespace: str, query: dict[str, str]) -> None:
        with self.api.lock:
            names = sorted(k for k in self.api.objects if k[0] == collection and namespace in ("", k[1]))
            start, version = 0, self.api.version
            if "continue" in query and self.api.expiries:
                self.api.expiries -= 1
                raise RefusedError(410, "Expired", "The provided continue parameter is too old")
            if "continue" in query:
                version, start = map(int, query["continue"].split(":"))
            size = int(query.get("limit", 0)) or len(names) or 1
            items = [self.api.objects[key] for key in names[start : start + size]]
            about: Json = {"resourceVersion": str(version)}
            if start + size < len(names):
                about["continue"] = f"{version}:{start + size}"
            items = [item for item in items if selected(item, query.get("labelSelector", ""))]
            self.send(200, {"kind": self.api.kinds[collection] + "List", "metadata": about, "items": items})

    def _create(self, collection: str, namespace: str, body: Json, query: dict[str, str]) -> None:
        about = body["metadata"]
        name = about.setdefault("name", about.get("generateName", "") + "x7k2p")
        if (collection, namespace, name) in self.api.objects:
            raise RefusedError(409, "AlreadyExists", f"{name} already exists")
        body["metadata"]["namespace"] = namespace
        validate(self.api.kinds[collection], body)
        made = body if query.get("dryRun") else self.api.put(collection, namespace, body)
        if not query.get("dryRun"):
            self._control(made)
        quoted = [json.dumps(text) for text in self.api.warnings]
        self.send(201, made, {"Warning": ", ".join(f"299 - {text}" for text in quoted)} if quoted else None)

    def _control(self, job: Json) -> None:
        """What the job's controller does: its pods."""
        label = JOBS.get(job.get("kind", ""))
        if not label or not self.api.controllers or job["spec"].get("suspend"):
            return
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        for index in range(pods_of(job)):
            about = {"name": f"{name}-{index}", "namespace": namespace, "labels": {label: name}}
            pod = {"kind": "Pod", "metadata": about, "status": {"phase": "Running"}}
            self.api.put("/api/v1/pods", namespace, pod)

    def _patch(self, collection: str, namespace: str, name: str, sub: str, body: Json, query: dict[str, str]) -> None:
        applying = self.headers["Content-Type"] == "application/apply-patch+yaml"
        if applying and "fieldManager" not in query:
            raise RefusedError(422, "Invalid", "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
        with self.api.lock:
            key = collection, namespace, name
            if key not in self.api.objects and (not applying or sub):
                raise RefusedError(404, "NotFound", f"{collection} {name!r} not found")
            if key not in self.api.objects:
                self._authorize(urlsplit(self.path).path, "create")  # apply makes what is not there
            old = self.api.objects.get(key, {})
            given = body.get("metadata", {}).get("resourceVersion")
            if given and old and given != old["metadata"]["resourceVersion"]:
                raise RefusedError(
                    409, "Conflict", "the object has been modified; please apply your changes to the latest version"
                )
            # the status is written through its own door only, and nothing else through that one
            part = {
                k: v for k, v in body.items() if (k == "status") == (sub == "status") or k in ("apiVersion", "kind")
            }
            status, old = 200 if old else 201, json.loads(json.dumps(old))
            if applying and sub == "status":  # fields that the manager no longer applies go
                owned = self.api.applied.get((key, query["fieldManager"]), set())
                for name_of_field in owned - set(part["status"]):
                    old.get("status", {}).pop(name_of_field, None)
                self.api.applied[key, query["fieldManager"]] = set(part["status"])
            made = merged(old, part)
            made.setdefault("metadata", {}).update(name=name, **({"namespace": namespace} if namespace else {}))
            validate(self.api.kinds[collection], made)
            self.send(status, made if query.get("dryRun") else self.api.put(collection, namespace, made))


def merged(old, new):
    """RFC 7396, which is what apply does to fields that one manager owns, less removal."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    for key, value in new.items():
        if value is None:
            old.pop(key, None)
        else:
            old[key] = merged(old.get(key, {}), value)
    return old


def validate(kind: str, document: Json) -> None:
    """NodeTopology by its CRD, unknown fields refused, as fieldValidation=Strict has it."""
    if kind != "NodeTopology":
        return
    if (error := best_match(_definition().iter_errors(document))) is not None:
        raise RefusedError(422, "Invalid", f"{error.json_path}: {error.message}")


@cache
def _definition() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(strict(CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))

"""Submit one job to its cluster: create the job, and wait for its pods.

Surface: discovery of API groups, the job APIs, and pods and events of core/v1 in the job's namespace. If a controller
may not create a pod (Pod Security, quota, an SCC), only an event of the job shows it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agent.base import EXIT_FAILED, EXIT_PASS, EXIT_UNKNOWN, units
from agent.cluster.client import ApiError, Client, path_of
from contracts.redaction import redact
from planner.kubernetes.manifests import POD_LABELS, Document

WAIT_SECONDS = 60.0  # a controller creates pods within seconds; image pulls can take longer
_POLL_SECONDS = 1.0
_REFUSED = ("FailedCreate", "FailedCreatePod")  # of the Job controller and JobSet; of the Training Operator


def create(client: Client, made: Sequence[Document], *, dry_run: bool = False) -> Iterator[str]:
    """Create the objects through the API, after the server has accepted each in a dry run.

    The job, which is last, must be new. An existing claim is not changed; other objects are applied over those of an
    earlier launch. Yields a line per object. Raises ApiError with what the server refused and what was created before.
    """
    done: list[str] = []
    for really in (False,) if dry_run else (False, True):
        for document in made:
            name = named(document)
            try:
                line = _send(client, document, is_job=document is made[-1], dry_run=not really)
            except ApiError as error:
                so_far = f"; created before it: {', '.join(done)}" if done else "; nothing was created"
                unserved = error.status == 404 and not str(error).startswith("namespaces ")
                served = f"; is {document['apiVersion']} served by this cluster?" if unserved else ""
                text = f"{name}: the API server says {error.status}: {error}{served}{so_far}"
                raise ApiError(error.status, text) from None
            if really or dry_run:
                done += [name] if really and line == "created" else []
                yield f"{name} {line if really else 'admitted (dry run)'}"


def named(document: Document) -> str:
    """ "job/sft"."""
    return f"{document['kind'].lower()}/{document['metadata']['name']}"


def _path(client: Client, document: Document, name: str = "") -> str:
    namespace = document["metadata"].get("namespace") or client.namespace
    return path_of(document["apiVersion"], f"{document['kind'].lower()}s", name, namespace=namespace)


def _send(client: Client, document: Document, *, is_job: bool, dry_run: bool) -> str:
    """Create an object, or apply it over that of an earlier launch; return what was done."""
    path = _path(client, document, document["metadata"]["name"])
    if not is_job and document["kind"] != "PersistentVolumeClaim":
        new, _ = client.apply(path, document, dry_run=dry_run)
        return "created" if new else "was there: updated"
    try:  # applying another size would resize a claim that is not ours, and a job must be new
        client.create(_path(client, document), document, dry_run=dry_run)
        return "created"
    except ApiError as error:
        if error.status != 409:
            raise
        if not is_job:
            return "already exists and was not changed"
        state = job_state(client.get(path))
        if state == "failed":
            where = document["metadata"].get("namespace") or client.namespace
            again = f"`kubectl delete {named(document)} -n {where}`, then the same command resumes from its checkpoints"
            raise ApiError(409, f"{error}, and has failed: {again}") from None
        state_text = "complete: --name gives the next one another name" if state == "complete" else "not done"
        raise ApiError(409, f"{error}, and is {state_text}") from None


def stored(client: Client, document: Document) -> Document:
    """Return the object as stored on the server."""
    return client.get(_path(client, document, document["metadata"]["name"]))


def job_state(job: Document) -> str:
    """Return "failed", "complete" or "", from the conditions that job APIs write."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    true = {str(each.get("type")) for each in conditions if str(each.get("status")) == "True"}
    return "failed" if "Failed" in true else "complete" if true & {"Complete", "Completed", "Succeeded"} else ""


def _last_words(ended: Mapping[str, Any]) -> str:
    """Return a container's termination message; for a fine-tune job's short record, its reason."""
    text = str(ended.get("message") or "")
    try:
        record = json.loads(text)
    except ValueError:
        return text
    return str(record.get("reason") or "") if isinstance(record, dict) else text


def why_failed(job: Document) -> list[str]:
    """Return the reasons in a failed job's own status, because its pods may be gone."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return [_line(str(each.get("reason") or "Failed"), "", each.get("message")) for each in conditions
            if each.get("type") == "Failed" and str(each.get("status")) == "True"]  # fmt: skip


class Came(NamedTuple):
    """The state of the pods."""

    exit_code: int
    lines: tuple[str, ...]


def wait(
    client: Client, job: Document, *, api: str, nodes: int, seconds: float, sleep: Callable[[float], None]
) -> Came:
    """Wait at most `seconds` until all pods run or show why they do not."""
    about = job["metadata"]
    namespace, name = about["namespace"], about["name"]
    until = time.monotonic() + seconds
    query = {"labelSelector": f"{POD_LABELS[api]}={name}"}
    while True:
        try:
            pods = list(client.items(path_of("v1", "pods", namespace=namespace), query))
            refused = () if pods else _refusals(client, namespace, name, str(about.get("creationTimestamp", "")))
        except ApiError as error:
            return Came(EXIT_PASS, (f"unknown whether its pods come: {error}",))
        late = time.monotonic() >= until
        if refused:
            return Came(EXIT_FAILED, tuple(f"no pod starts: {text}" for text in refused))
        if ended := [text for pod in pods if (text := how_failed(pod))]:
            return Came(EXIT_FAILED, tuple(ended))
        waiting = [text for pod in pods if (text := why_waiting(pod))]
        if len(pods) >= nodes and not waiting:
            return Came(EXIT_PASS, (f"{units.count(len(pods), 'pod')} started",))
        if late and pods:
            missing = [f"{len(pods)} of {nodes} pods are there"] if len(pods) < nodes else []
            return Came(EXIT_PASS, (*missing, *waiting))
        spec = job["spec"]
        held = spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend")  # suspended until Kueue admits it
        if held and not pods and late:
            return Came(EXIT_PASS, ("no pod yet: the job waits for its queue to admit it",))
        if late:
            why = f"no pod within {seconds:.0f} s, and no event says why: is its operator running?"
            return Came(EXIT_UNKNOWN, (why,))
        sleep(_POLL_SECONDS)


def how_failed(pod: Mapping[str, Any]) -> str:
    """Return which container of a failed pod exited with which code; empty if it did not fail."""
    status = pod.get("status") or {}
    if status.get("phase") != "Failed":
        return ""
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        ended = (each.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            why = "" if ended.get("reason") in (None, "Error", "Completed") else f" ({ended['reason']})"
            words = f"{each.get('name')} ended with exit code {ended['exitCode']}{why}"
            return _line(pod["metadata"]["name"], words, redact(_last_words(ended)))
    return _line(pod["metadata"]["name"], str(status.get("reason") or "Failed"), status.get("message"))


def why_waiting(pod: Mapping[str, Any]) -> str:
    """Return why a pod does not run, in Kubernetes' terms; empty if it runs or has run."""
    status, name = pod.get("status") or {}, pod["metadata"]["name"]
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for each in containers:
        held = (each.get("state") or {}).get("waiting") or {}
        if held.get("reason") not in (None, "PodInitializing"):
            return _line(name, f"{each.get('name')}: {held['reason']}", held.get("message"))
    for each in status.get("conditions") or ():
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            return _line(name, str(each.get("reason")), each.get("message"))
    if status.get("phase") != "Pending":
        return ""
    running = [each.get("name") for each in containers if (each.get("state") or {}).get("running")]
    return _line(name, f"{running[0]} runs" if running else "Pending", "")


def _refusals(client: Client, namespace: str, name: str, since: str) -> tuple[str, ...]:
    """Return events of the job's controllers about pods that could not be created, since the job was created."""
    path = path_of("v1", "events", namespace=namespace)
    found: dict[str, None] = {}
    for event in client.items(path, {"fieldSelector": "type=Warning"}):
        about = event.get("involvedObject") or {}
        owned = about.get("name") in (name, f"{name}-node-0")  # the Job that JobSet creates for a TrainJob
        when = str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")
        if owned and event.get("reason") in _REFUSED and when >= since:
            found[_line(str(event["reason"]), "", event.get("message"))] = None
    return tuple(found)


def _line(what: str, reason: str, message: object) -> str:
    text = " ".join(str(message or "").split())[:400]
    return ": ".join(part for part in (what, reason, text) if part)

"""Whether the pods of a job that was launched come, and why not: its controller's events and the pods' own states.

Surface: pods and events of core/v1 in the job's namespace. A controller that may not make a pod (Pod Security, quota,
an SCC) says so in an event of the job alone: the job stands, and nothing ever runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from agent.base.streams import EXIT_FAILED, EXIT_PASS, EXIT_UNKNOWN
from agent.base.units import count
from agent.cluster.client import ApiError, Client, path_of
from agent.jobs.cluster_job import job_state
from planner.kubernetes.manifests import POD_LABELS

Json = dict[str, Any]
WAIT_SECONDS = 60.0  # a controller makes pods within seconds; the images may take longer
_POLL_SECONDS = 1.0
_REFUSED = ("FailedCreate", "FailedCreatePod")  # of the Job controller and JobSet; of the Training Operator


class Came(NamedTuple):
    """What became of the pods."""

    exit_code: int
    lines: tuple[str, ...]


def wait(client: Client, job: Json, *, api: str, nodes: int, seconds: float, sleep: Callable[[float], None]) -> Came:
    """Wait until all pods run or say why they do not, at most `seconds`."""
    about = job["metadata"]
    namespace, name = about["namespace"], about["name"]
    until = time.monotonic() + seconds
    query = {"labelSelector": f"{POD_LABELS[api]}={name}"}
    while True:
        try:
            pods = [pod for page, _ in client.pages(path_of("v1", "pods", namespace=namespace), query) for pod in page]
            refused = () if pods else _refusals(client, namespace, name, str(about.get("creationTimestamp", "")))
        except ApiError as error:
            return Came(EXIT_PASS, (f"unknown whether its pods come: {error}",))
        late = time.monotonic() >= until
        if refused:
            return Came(EXIT_FAILED, tuple(f"no pod comes: {text}" for text in refused))
        if ended := [text for pod in pods if (text := how_failed(pod))]:
            return Came(EXIT_FAILED, tuple(ended))
        waiting = [text for pod in pods if (text := why_waiting(pod))]
        if len(pods) >= nodes and not waiting:
            return Came(EXIT_PASS, (f"{count(len(pods), 'pod')} started",))
        if late and pods:
            missing = [f"{len(pods)} of {nodes} pods are there"] if len(pods) < nodes else []
            return Came(EXIT_PASS, (*missing, *waiting))
        spec = job["spec"]
        held = spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend")  # Kueue admits it
        if held and not pods and late:
            return Came(EXIT_PASS, ("no pod yet: the job waits for its queue to admit it",))
        if late:
            return Came(EXIT_UNKNOWN, (_silence(client, job, namespace, seconds, api),))
        sleep(_POLL_SECONDS)


def how_failed(pod: Mapping[str, Any]) -> str:
    """Which container of a failed pod ended with which code; empty where it did not fail."""
    status = pod.get("status") or {}
    if status.get("phase") != "Failed":
        return ""
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        ended = (each.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            return _line(pod["metadata"]["name"], f"{each.get('name')} ended with exit code {ended['exitCode']}", "")
    return _line(pod["metadata"]["name"], str(status.get("reason") or "Failed"), status.get("message"))


def why_waiting(pod: Mapping[str, Any]) -> str:
    """Why a pod does not run, in Kubernetes' words; empty where it runs or has run."""
    status = pod.get("status") or {}
    if status.get("phase") != "Pending":
        return ""
    name = pod["metadata"]["name"]
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for each in containers:
        held = (each.get("state") or {}).get("waiting") or {}
        if held.get("reason") not in (None, "PodInitializing"):
            return _line(name, f"{each.get('name')}: {held['reason']}", held.get("message"))
    for each in status.get("conditions") or ():
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            return _line(name, str(each.get("reason")), each.get("message"))
    running = [each.get("name") for each in containers if (each.get("state") or {}).get("running")]
    return _line(name, f"{running[0]} runs" if running else "Pending", "")


def _refusals(client: Client, namespace: str, name: str, since: str) -> tuple[str, ...]:
    """What the job's controllers say of pods that they may not make, since the job is there."""
    path = path_of("v1", "events", namespace=namespace)
    found: dict[str, None] = {}
    for events, _ in client.pages(path, {"fieldSelector": "type=Warning"}):
        for event in events:
            about = event.get("involvedObject") or {}
            owned = about.get("name") in (name, f"{name}-node-0")  # the Job that JobSet makes of a TrainJob
            when = str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")
            if owned and event.get("reason") in _REFUSED and when >= since:
                found[_line(str(event["reason"]), "", event.get("message"))] = None
    return tuple(found)


def _silence(client: Client, job: Json, namespace: str, seconds: float, api: str) -> str:
    """Neither pods nor an event: what the job itself says, or that no controller works on it."""
    try:
        now = client.get(path_of(job["apiVersion"], f"{api}s", job["metadata"]["name"], namespace=namespace))
    except ApiError as error:
        return f"no pod within {seconds:.0f} s, and the job cannot be read: {error}"
    conditions: Sequence[Mapping[str, Any]] = (now.get("status") or {}).get("conditions") or ()
    messages = [str(each.get("message") or each.get("reason")) for each in conditions if each.get("status") == "True"]
    state = job_state(now) or (
        messages[-1] if messages else "its controller has reported nothing: is its operator running?"
    )
    return f"no pod within {seconds:.0f} s: {state}"


def _line(what: str, reason: str, message: object) -> str:
    text = " ".join(str(message or "").split())[:400]
    return ": ".join(part for part in (what, reason, text) if part)

"""A run that stands still, slows down or fails as an Event of Kubernetes, on the pod behind it.

Specification: core/v1 Event; an Event of a Pod lies in that Pod's namespace. The pod is the one that the verdict names,
where it is in this namespace and may be read, else the pod that watches. Who may not write Events is told so once, and
the watch goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from agent.checks.view import View
from agent.cluster.client import AccessError, ApiError, Client, connect, path_of
from agent.cluster.publish import REFUSED, claims_of
from planner.why import Verdict

log = logging.getLogger(__name__)

REASONS = {"stuck": "RunStuck", "slow": "RunSlow", "failed": "RunFailed"}
GOES_ON = "RunGoesOn"
MOST_TEXT = 1024  # characters of a message, as events.k8s.io bounds its note


class RunEvents:
    """Writes one Event for each new kind of verdict on a run: another state, cause or culprit."""

    def __init__(self, client: Client, namespace: str, say: Callable[[str], None] = log.warning) -> None:
        self._client, self._namespace, self._say = client.brief(), namespace, say
        self._told: dict[str, tuple[object, ...]] = {}
        self._refused = False

    def of_view(self, view: View) -> None:
        """Tell what is new of the runs that an agent watches, without waiting for the API server."""
        new = [(one.run, one.verdict) for one in view.runs if self._is_new(one.run, one.verdict)]
        for one in new:
            threading.Thread(target=self._write, args=one, name="events", daemon=True).start()

    def tell(self, run: str, verdict: Verdict) -> None:
        """Tell a verdict where it is new. Raises nothing: a refusal is said once."""
        if self._is_new(run, verdict):
            self._write(run, verdict)

    def _is_new(self, run: str, verdict: Verdict) -> bool:
        before = self._told.get(run)
        if verdict.state not in REASONS and (verdict.state != "fine" or before is None):
            return False
        now = (verdict.state, *(cause.code for cause in verdict.causes[:1]), verdict.ranks)
        self._told[run] = now
        if verdict.state == "fine":
            del self._told[run]
        return now != before and not self._refused

    def _write(self, run: str, verdict: Verdict) -> None:
        try:
            own = self._own_pod()
            pod = self._named_pod(verdict) or own
            self._client.create(path_of("v1", "events", namespace=self._namespace),
                                event_of(run, verdict, pod, str(own["name"]), time.time_ns()))  # fmt: skip
        except ApiError as error:
            self._refused = error.status in REFUSED
            more = "; no more are tried: bind the ClusterRole topoflight-run-events" if self._refused else ""
            self._say(f"the Event on run {run} was not written: {error}{more}")

    def _own_pod(self) -> dict[str, Any]:
        """This pod, by the claims of its token; without any by its host name, which is a pod's name as a rule."""
        pod = claims_of(self._client.token()).get("pod")
        known = {key: str(pod[key]) for key in ("name", "uid") if pod.get(key)} if isinstance(pod, dict) else {}
        return {"namespace": self._namespace, "name": os.uname().nodename, **known}

    def _named_pod(self, verdict: Verdict) -> dict[str, Any] | None:
        """The pod of the first node that the verdict names, which is its pod's host name, where it may be read."""
        for name in verdict.nodes[:1]:
            try:
                about = self._client.get(path_of("v1", "pods", name, namespace=self._namespace))["metadata"]
            except (ApiError, KeyError) as error:
                if isinstance(error, ApiError) and error.status not in REFUSED:
                    raise
                return None
            return {"namespace": self._namespace, "name": name, "uid": str(about.get("uid", ""))}
        return None


def event_of(run: str, verdict: Verdict, pod: Mapping[str, Any], reporter: str, at: int) -> dict[str, Any]:
    """The Event, `at` nanoseconds of Unix time."""
    reason = REASONS.get(verdict.state, GOES_ON)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at / 1e9))
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pod['name'][:200]}.{at:x}", "namespace": pod["namespace"]},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", **{k: v for k, v in pod.items() if v}},
        "reason": reason,
        "message": f"run {run[:128]}: {verdict.line}"[:MOST_TEXT],
        "type": "Normal" if reason == GOES_ON else "Warning",
        "source": {"component": "topoflight"},
        "reportingComponent": "topoflight",
        "reportingInstance": reporter[:128],
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }


def of_pod(say: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> RunEvents | None:
    """Where this process runs in a cluster's pod; elsewhere None: a kubeconfig alone is another's cluster."""
    if not environment.get("KUBERNETES_SERVICE_HOST"):
        return None
    try:
        client = connect(None, environment)
    except AccessError as error:
        say(f"no Events are written: {error}")
        return None
    return RunEvents(client, environment.get("POD_NAMESPACE") or client.namespace, say)

"""The records of all nodes, which the worker process lists from the API server for /nodes and /cluster.

A list is used for LIST_SECONDS. If the next list fails, the pages show the older records, and say so.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

from agent.checks.verdict import View
from agent.cluster.client import AccessError, ApiError, Client, connect, path_of
from agent.cluster.nodes import API_VERSION, PLURAL, Fleet, row
from agent.cluster.publish import record_of_view
from agent.http.worker import ProblemError

LIST_SECONDS = 10.0  # the page asks again every 30 s; a list of 1,000 GPU servers has 20 MB
MORE = "only the node of this agent; on Kubernetes, agents started with --publish show every node"


class Records:
    """The records of the cluster, and why the last list failed."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._fleet: Fleet | None = None
        self._listed_at = -math.inf
        self.error: str | None = None

    def fleet(self) -> Fleet:
        """Return the records of all nodes. Raises ProblemError 503 if they have never been listed."""
        if time.monotonic() - self._listed_at > LIST_SECONDS:
            self._list()
        if self._fleet is None:
            detail = f"the cluster's records cannot be read: {self.error}"
            raise ProblemError(503, detail, headers={"Retry-After": "10"})
        return self._fleet

    def _list(self) -> None:
        fleet = self._fleet or Fleet()
        try:
            self._client = self._client or connect().brief()
            fleet.replace(self._client.items(path_of(API_VERSION, PLURAL)))
            self._fleet, self.error = fleet, None
        except (AccessError, ApiError) as error:
            self.error = str(error)
        self._listed_at = time.monotonic()


def own_fleet(view: View, interval_seconds: float) -> Fleet:
    """Return the record of this agent's node alone, for an agent that does not publish."""
    return Fleet([record_of_view(view, interval_seconds=interval_seconds)])


def nodes_document(fleet: Fleet, source: str, behind: str | None = None) -> dict[str, Any]:
    """Return every node as a row, and the number of nodes per verdict; `behind` says why the rows may be outdated."""
    now = time.time()
    rows = [row(record, now) for record in fleet.records()]
    counts = dict(sorted(Counter(made["verdict"] for made in rows).items()))
    more = {"note": MORE} if source != "kubernetes" else {"behind": behind} if behind else {}
    return {"schema_version": 1, "source": source, "counts": counts, "nodes": rows, **more}

"""Time and memory of the cluster's answer: by default 5,000 nodes, three kinds of machine, read over HTTP in pages.

    .venv/bin/python bench/cluster_view.py [NODES]

Prints one line per step: CPU and wall seconds, memory. The records come from a server in a process of its own, so that
the memory is the agent's. bench/cluster_real.py does the same with a real API server and a whole agent.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Process, Queue
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.cluster.nodes import NodeRecord

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
KINDS = ("hgx-h100-8xH100-8hca", "polaris-4xA100-nv4", "l40s-4x-pcie")


def records(nodes: int) -> Iterator[NodeRecord]:
    """`nodes` records, of which every hundredth has failed and every fiftieth is silent."""
    from agent.checks.view import look
    from agent.cluster.nodes import records_of
    from probes.host.recording import load
    from probes.scan import scan

    kinds = [
        records_of(look((scan(load(ROOT / f"tests/machines/{kind}.json")),)), name="x")[0] for kind in KINDS
    ]  # fmt: skip
    for index in range(nodes):
        record = replace(kinds[0 if index % 10 else 1 + index // 10 % 2], name=f"node-{index:05d}")
        if index % 100 == 0:
            record = replace(record, verdict="fail")
        if index % 50 == 1:
            record = replace(record, scanned_at_seconds=record.scanned_at_seconds - 86400)
        yield record


def serve(nodes: int, out: Queue[Any]) -> None:
    """The API server's part."""
    from api_server import ApiServer

    from agent.cluster.nodes import to_resource

    with ApiServer() as api:
        for record in records(nodes):
            api.put("/apis/topoflight.io/v1alpha1/nodetopologies", "", to_resource(record)[1])
        out.put(api.url)
        time.sleep(3600)


def resident_mib() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def step(name: str, work: Callable[[], Any]) -> Any:
    """Do it, and print what it took."""
    began, busy = time.perf_counter(), time.process_time()
    value = work()
    size = len(value.content) if hasattr(value, "content") else 0
    wall, busy = time.perf_counter() - began, time.process_time() - busy
    print(f"{name:50s} {busy:8.3f} CPU s {wall:8.3f} s  {resident_mib():7.1f} MiB resident"
          + (f"  {size / 2**20:6.2f} MiB sent" if size else ""))  # fmt: skip
    if hasattr(value, "status_code") and value.status_code != 200:
        raise SystemExit(value.text)
    return value


def main(nodes: int) -> None:
    """Build the agent, then ask it."""
    out: Queue[Any] = Queue()
    server = Process(target=serve, args=(nodes, out), daemon=True)
    server.start()
    url = out.get()

    from api_server import configuration
    from starlette.testclient import TestClient

    from agent.cluster.client import Client
    from agent.http.cluster import Cluster
    from agent.http.server import create
    from agent.http.state import State
    from probes.host.recording import load
    from probes.scan import scan

    state = State(lambda: (scan(load(ROOT / f"tests/machines/{KINDS[0]}.json")),), interval_seconds=3600)
    state.refresh()
    client = Client(configuration(url))
    http = TestClient(create(state, cluster=Cluster(state, name="node-00002", client=client)))
    step("one node's findings, before any cluster question", lambda: http.get("/findings"))
    step(f"first /nodes of {nodes}: list in pages", lambda: http.get("/nodes"))
    step("/nodes again", lambda: http.get("/nodes"))
    step("/topology?scope=cluster", lambda: http.get("/topology?scope=cluster"))
    step("/recommendations?scope=cluster", lambda: http.get("/recommendations?scope=cluster"))
    advice = step(
        "/recommendations?scope=cluster&model=Llama-3.1-8B",
        lambda: http.get("/recommendations?scope=cluster&model=Llama-3.1-8B"),
    )
    step("the same again", lambda: http.get("/recommendations?scope=cluster&model=Llama-3.1-8B"))
    notes = [note["text"] for note in advice.json()["notes"] if note["topic"] == "cluster"]
    print(json.dumps(notes, indent=1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{'peak':50s} {'':25s}  {peak:7.1f} MiB resident")
    server.terminate()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)

"""Clients that all ask for a large cluster at once: what they share is rendered once, and the agent stays small."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import resident
from api_server import ApiServer, write_kubeconfig
from load_served import H100, Served
from rigs.recorded import view
from rigs.waiting import eventually

from agent.cluster.nodes import NodeRecord
from agent.cluster.publish import records_of, to_resource

RECORDS = 2000
CLIENTS = 36
LIMIT_BYTES = 256 << 20  # of the pod, deploy/daemonset


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An agent of one node among 2,000, of which each has a graph and findings."""
    folder = tmp_path_factory.mktemp("agent")
    (record,) = records_of(view(), name="x")
    with ApiServer() as api:
        for number in range(RECORDS):
            named: NodeRecord = replace(record, name=f"node-{number:05d}")
            api.put("/apis/topoflight.io/v1alpha1/nodetopologies", "", to_resource(named)[1])
        port = resident.free_port()
        words = ["--host", str(H100), "--publish", "--node-name", "node-00000", "--port", str(port), "--no-nfd"]
        environment = {"KUBECONFIG": str(write_kubeconfig(folder / "kubeconfig", api.url))}
        command = [sys.executable, "-m", "agent.cli", "serve", *words, "--state", str(folder / "state")]
        with resident.process(command, environment, folder / "log") as agent:
            resident.wait(port, "/readyz", agent)
            yield Served(agent.pid, port)


def taken(agent: Served) -> float:
    """What the pod would be charged: memory of the agent and of its worker, shared pages once."""
    found = 0
    for one in resident.family(agent.pid):
        with contextlib.suppress(psutil.Error):
            found += one.memory_full_info().pss
    return found


@pytest.mark.long
@pytest.mark.parametrize("path", ["/nodes", "/nodes?format=yaml", "/cluster"])
def test_many_clients_share_one_answer(cluster: Served, path: str) -> None:
    """Each of them slow to read; the agent and its worker stay below the pod's limit, and others are served."""
    clients = []
    for _ in range(CLIENTS):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", cluster.port))
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        clients.append(one)
    highest = 0.0
    clients[0].setblocking(False)

    def begun() -> bool:
        nonlocal highest
        highest = max(highest, taken(cluster))
        with contextlib.suppress(BlockingIOError):
            return bool(clients[0].recv(1, socket.MSG_PEEK))
        return False

    eventually(begun, "the answer is there")
    cluster.honest()
    for one in clients:
        one.settimeout(120)
        first = one.recv(4096)
        highest = max(highest, taken(cluster))
        assert first.startswith(b"HTTP/1.1 200 ") or ("yaml" in path and first.startswith(b"HTTP/1.1 503 "))
        one.close()
    assert highest < LIMIT_BYTES
    cluster.honest()

"""Answers are rendered once per scan and question, also where many ask for a large cluster at once, and given again."""

import contextlib
import socket
import sys
from dataclasses import replace

import psutil
import pytest
import resident
from api_server import ApiServer, write_kubeconfig
from load_served import H100, Served, connect_deaf, get_of
from rigs.agents import agent
from rigs.recorded import path_of, view
from rigs.tables import each_row
from rigs.waiting import eventually
from scanned import scan
from starlette.testclient import TestClient

from agent.cluster.nodes import NodeRecord, make_record, to_resource
from agent.http.server import MAX_ANSWERS, WORTH_BYTES, ResponseCache, create
from agent.http.state import State
from agent.http.worker import Answer
from probes.host.recording import load

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
STORED = ("/metrics", "/recommendations", "/recommendations?model=Llama-3.1-8B", "/findings", "/topology", "/snapshot",
        "/preflight")  # fmt: skip


@pytest.fixture(scope="module")
def client() -> TestClient:
    return agent()


@each_row("path", STORED)
def test_the_second_answer_is_the_first(client: TestClient, path: str) -> None:
    """Byte for byte, compressed or not, until the next scan."""
    first, second = (client.get(path, headers={"Accept-Encoding": "identity"}) for _ in range(2))
    packed = client.get(path, headers={"Accept-Encoding": "br, gzip"})
    assert first.content == second.content == packed.content
    assert first.headers == second.headers
    assert "content-encoding" not in first.headers
    assert "Accept" in first.headers["vary"]
    if len(first.content) >= WORTH_BYTES:
        assert "Accept-Encoding" in first.headers["vary"]
        assert packed.headers["content-encoding"] == "gzip"
        assert int(packed.headers.get("content-length", 0)) < int(first.headers["content-length"])  # 0: in pieces


def test_a_scan_ends_it() -> None:
    """A request after a scan reads that scan."""
    state = State(lambda: (scan(load(path_of())),), interval_seconds=3600)
    state.refresh()
    client = TestClient(create(state))
    before, again = client.get("/snapshot").json(), client.get("/snapshot").json()
    state.refresh()
    after = client.get("/snapshot").json()
    assert before == again
    took = [[outcome["seconds"] for outcome in one["outcomes"].values()] for one in (before, after)]
    assert took[0] != took[1], "no two scans take every probe as long to the nanosecond"


def test_formats_do_not_mix(client: TestClient) -> None:
    """By Accept and by query, each in every order."""
    for _ in range(2):
        assert client.get("/metrics", headers={"Accept": OPENMETRICS}).text.endswith("# EOF\n")
        assert "# EOF" not in client.get("/metrics", headers={"Accept": "text/plain"}).text
        assert client.get("/recommendations?format=env").text != client.get("/recommendations?format=shell").text


def test_stored_answers_are_bounded() -> None:
    rendered, seen = ResponseCache(), view()
    for number in range(2 * MAX_ANSWERS + 1):
        assert rendered.get(seen, number) is None
        rendered.put(seen, number, Answer(body=b"", media_type="text/plain"))
        assert rendered.get(seen, number)
    assert rendered.get(seen, 0) is None


RECORDS = 2000
CLIENTS = 36
LIMIT_BYTES = 256 << 20  # of the pod, deploy/daemonset


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """An agent of one node among 2,000, of which each has a graph and findings."""
    folder = tmp_path_factory.mktemp("agent")
    record = make_record(view(), name="x")
    with ApiServer() as api:
        for number in range(RECORDS):
            named: NodeRecord = replace(record, name=f"node-{number:05d}")
            api.put("/apis/topoflight.io/v1alpha1/nodetopologies", "", to_resource(named)[1])
        port = resident.free_port()
        words = ["--host", str(H100), "--publish", "--node-name", "node-00000", "--port", str(port)]
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
@pytest.mark.parametrize("path", ["/nodes", "/cluster"])
def test_many_clients_share_one_answer(cluster: Served, path: str) -> None:
    """Each of them slow to read; the agent and its worker stay below the pod's limit, and others are served."""
    clients = [connect_deaf(cluster.port, get_of(path, "Connection: close")) for _ in range(CLIENTS)]
    highest = 0.0

    def begun() -> bool:
        nonlocal highest
        highest = max(highest, taken(cluster))
        with contextlib.suppress(BlockingIOError):
            return bool(clients[0].recv(1, socket.MSG_PEEK))
        return False

    eventually(begun, "the answer is there")
    cluster.honest()
    codes = set()
    for one in clients:
        one.settimeout(120)
        codes.add(one.recv(4096)[9:12])
        highest = max(highest, taken(cluster))
        one.close()
    assert b"200" in codes and codes <= {b"200", b"503"}, codes  # 503: on a busy machine, to be asked again
    assert highest < LIMIT_BYTES
    cluster.honest()

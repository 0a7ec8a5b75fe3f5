"""Clients that are slow, silent, endless or many: each limit answers with its own status, honest clients are served.

The agent's process: its memory and descriptors, in the short form of bench/footprint.py, and its end by SIGTERM.
"""

import contextlib
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import footprint
import psutil
import pytest
import resident
import yaml
from api_server import write_kubeconfig
from load_served import H100, Served, connect, connect_deaf, get_of, read
from rigs.tables import ROOT, each_row, rows_of
from rigs.waiting import eventually

from agent.http.access import HEAD_BYTES

pytestmark = pytest.mark.long

QUICK = """
import sys
from agent.http import serve
from agent.base.options import read_snapshots
from agent.http.access import LimitedProtocol
from probes.registry import ALL
from agent.http.state import State
from pathlib import Path
port, LimitedProtocol.most_connections, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
LimitedProtocol.seconds = {"head": seconds, "next head": 2 * seconds, "body": seconds, "reader": seconds}
state = State(lambda: read_snapshots((Path(sys.argv[4]),), ALL), interval_seconds=3600)
app = serve.build_application(state, serve.ServeOptions(**serve.serve.make_context("serve", []).params))
serve.listen(app, serve.bind("127.0.0.1", port))
"""
SECONDS = 2.0  # that a request may take to arrive, instead of the agent's own limit
PLACES = 40
HEAD_END = b"\r\n\r\n"  # of an answer: the connection may stay


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A real agent, which scans the recording every second."""
    folder = tmp_path_factory.mktemp("agent")
    with resident.agent(folder, "--host", str(H100), "--interval", "1") as (pid, port, _):
        yield Served(pid, port)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same listener with shorter limits, so that a test need not wait for them."""
    port, log = resident.free_port(), tmp_path_factory.mktemp("agent") / "log"
    command = [sys.executable, "-c", QUICK, str(port), str(PLACES), str(SECONDS), str(H100)]
    with resident.process(command, log=log) as one:
        resident.wait(port, "/readyz", one)
        yield Served(one.pid, port, log)


HOSTILE = "127.0.0.9"  # hostile clients have their own address; honest ones ask from 127.0.0.1


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


LONG = {
    "\n": "\r\n", "<long>": "a" * (HEAD_BYTES + 100), "<headers>": "".join(f"X-{n}: y\r\n" for n in range(5000)),
    "<chunk>": "a" * 65536, "<zeros>": "\0" * 300,
}  # fmt: skip


def rows(table: str) -> Callable[[], list[tuple]]:
    """Requests of a table, and what is expected of each."""

    def read_table() -> list[tuple]:
        found = []
        for text, wanted in rows_of(__file__)(table)().values():
            for word, meant in LONG.items():
                text = text.replace(word, meant)
            found.append((text.encode("latin-1"), wanted))
        return found

    return read_table


@each_row(("request_bytes", "expected"), rows("refused"))
def test_what_is_too_large_or_no_http_gets_its_own_status(served: Served, request_bytes: bytes, expected: int) -> None:
    with connect(served.port, request_bytes, HOSTILE) as one:
        assert status(read(one, HEAD_END)) == expected
    served.honest()


@each_row(("start", "answers"), rows("endless"))
def test_a_request_that_never_ends_is_closed(impatient: Served, start: bytes, answers: list[int]) -> None:
    """A byte now and then does not buy more time. Where the endpoint refuses before the body, it answers so."""
    with connect(impatient.port, start, HOSTILE) as one:
        began, got = time.monotonic(), b""
        while time.monotonic() - began < 120:
            with contextlib.suppress(OSError):
                one.sendall(b"a" if start else b"")
            if select.select([one], [], [], 0.2)[0]:
                try:
                    piece = one.recv(65536)
                except ConnectionResetError:
                    piece = b""
                if not piece:
                    break
                got += piece
        else:
            raise AssertionError("the connection is still open")
    assert [int(word[:3]) for word in got.split(b"HTTP/1.1 ")[1:]] == answers, got
    impatient.honest()


@pytest.mark.parametrize("how", ["deaf", "half-open", "reset"])
def test_a_client_that_does_not_read_or_leaves_in_the_midst_is_let_go(impatient: Served, how: str) -> None:
    """It reads no response, shuts down its side after half a request, or is killed during the response."""
    before = impatient.descriptors()
    if how == "deaf":
        asked = get_of("/snapshot") * 400  # more than the sockets hold
        left = [connect_deaf(impatient.port, asked, f"127.0.0.{20 + number}") for number in range(10)]
        impatient.honest()
    else:
        asked = get_of("/snapshot") if how == "reset" else get_of("/snapshot")[:-2]
        left = [connect(impatient.port, asked, HOSTILE) for _ in range(10)]
    for one in left:
        if how == "reset":
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            one.close()
        elif how == "half-open":
            one.shutdown(socket.SHUT_WR)
    eventually(lambda: impatient.descriptors() <= before + 1, "their connections are closed")
    for one in left:
        one.close()
    impatient.honest()


def get_once(agent: Served, path: str, source: str = "127.0.0.1") -> int:
    with connect(agent.port, get_of(path, "Connection: close"), source) as one:
        return status(read(one))


@each_row(("start", "times"), rows("idle"))
def test_idle_connections_keep_nobody_out(impatient: Served, start: bytes, times: int) -> None:
    """Three times as many as there are places, held open by five addresses, the kubelet's own among them."""
    held = [connect_deaf(impatient.port, start * times, f"127.0.0.{1 + number % 5}") for number in range(3 * PLACES)]
    for path in ("/healthz", "/readyz", "/metrics") * 20:
        # 503 while every place works on a request of a client that does not read yet
        assert get_once(impatient, path) in ((200, 503) if times > 1 and path == "/metrics" else (200,)), path
    eventually(lambda: get_once(impatient, "/metrics") == 200, "places are free again")
    eventually(lambda: impatient.descriptors() < PLACES + 40, "no more are held than there are places")
    for one in held:
        one.close()


def test_every_place_busy_leaves_health_checks(impatient: Served) -> None:
    """Requests that are worked on are not ended for new ones: who comes then is told so, the kubelet is answered."""
    question = "/recommendations?model=Llama-3.1-405B&nodes=20000&sequence_length={}"
    busy = [connect(impatient.port, get_of(question.format(4096 + n)), f"127.0.1.{1 + n % 8}")
            for n in range(PLACES + 9)]  # fmt: skip
    found = {path: [get_once(impatient, path) for _ in range(5)] for path in ("/metrics", "/healthz", "/readyz")}
    told = [status(read(one, HEAD_END)) for one in select.select(busy, [], [], 5)[0]]
    assert 503 in told and set(told) <= {200, 503}, (found, told)  # none that was asked is ended without a word
    assert found["/healthz"] == found["/readyz"] == [200] * 5
    for one in busy:
        one.close()
    eventually(lambda: get_once(impatient, "/metrics") == 200, "places are free again")


def test_without_descriptors_it_waits_and_does_not_spin(served: Served) -> None:
    """EMFILE at accept(2): the listener pauses, the process keeps quiet, and goes on when there are some again."""
    agent = psutil.Process(served.pid)
    soft, hard = agent.rlimit(psutil.RLIMIT_NOFILE)
    waiting: list[socket.socket] = []

    def is_left_waiting() -> bool:
        """Not where a connection of before was still to be closed, and has made room since."""
        agent.rlimit(psutil.RLIMIT_NOFILE, (served.lowest_free_descriptor(), hard))
        one = connect(served.port, get_of("/healthz", "Connection: close"), HOSTILE)
        one.settimeout(0.2)
        try:
            one.recv(10)
        except TimeoutError:
            waiting.append(one)
        else:
            one.close()
        return bool(waiting)

    def share() -> float:
        """Of a core, in one second."""
        before, began = sum(agent.cpu_times()[:2]), time.monotonic()
        time.sleep(1)
        return (sum(agent.cpu_times()[:2]) - before) / (time.monotonic() - began)

    try:
        eventually(is_left_waiting, "a connection that no descriptor is left for")
        shares = [share() for _ in range(3)]
    finally:
        agent.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    assert min(shares) < 0.5, "a loop that spins takes a whole core in each of them"
    (one,) = waiting
    one.settimeout(120)
    assert status(read(one)) == 200, "who waited is served"
    one.close()
    served.honest()


def test_the_log_stays_short(impatient: Served) -> None:
    """Hundreds of lines of nonsense are none in the log."""
    before = len(impatient.log.read_text().splitlines())
    for _ in range(300):
        with connect(impatient.port, b"nonsense\r\n\r\n", HOSTILE) as client:
            assert status(read(client)) == 400
    impatient.honest()
    assert len(impatient.log.read_text().splitlines()) - before < 10


GRACE_SECONDS = next(
    document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    for document in yaml.safe_load_all((ROOT / "deploy/daemonset/base/daemonset.yaml").read_text())
    if document["kind"] == "DaemonSet"
)
NOISE_MIB = 3.0  # allocators keep freed pages; ten scans and a hundred requests that leak a page each show more
COSTLY = "/recommendations?model=Llama-3.1-405B&nodes=20000"


def crowded() -> list[bytes]:
    """Requests of silent, slow and deaf clients."""
    return [*[b""] * 20, *[b"GET / HTTP/1.1\r\nX: "] * 20, *[get_of("/snapshot") * 100] * 20]


def planning() -> list[bytes]:
    """The worker at work, and a queue before it."""
    return [get_of(f"{COSTLY}&sequence_length={4096 + number}") for number in range(20)]


def asking_the_cluster() -> list[bytes]:
    """Of an API server that takes connections and says nothing; tokens wait to be judged, too."""
    posted = b"POST /preflight HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %020d\r\n\r\n"
    return [*[get_of("/nodes")] * 50, *(posted % number for number in range(20))]


@pytest.fixture
def silent(tmp_path):
    """A kubeconfig of a server that never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield write_kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("busy", [None, crowded, planning, asking_the_cluster], ids=lambda busy: str(busy)[10:20])
def test_it_ends_in_time(busy, silent, tmp_path):
    """Within the grace period of its manifest. None: only the listening socket exists, nothing else is loaded."""
    port = resident.free_port()
    words = ["--publish", "--token-review"] if busy is asking_the_cluster else []
    command = [sys.executable, "-m", "agent.cli", "serve", "--host", str(H100), "--port", str(port), *words,
               "--state", str(tmp_path / "state")]  # fmt: skip
    with resident.process(command, {"KUBECONFIG": str(silent)}, tmp_path / "log") as agent:
        if busy is None:
            eventually(lambda: "page:" in (tmp_path / "log").read_text(), "it listens")
            held = []
        else:
            resident.wait(port, "/readyz", agent)
            held = [connect_deaf(port, request) for request in busy()]
            assert resident.get(port, "/metrics")[0] == 200  # after them: they have arrived
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(GRACE_SECONDS) in (-signal.SIGTERM, 128 + signal.SIGTERM)
        for one in held:
            one.close()


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The recorded machine as the live probes see it."""
    return resident.restore(tmp_path_factory.mktemp("machine"))


def test_memory_with_publishing(restored, tmp_path):
    """Into the stand-in for the API server, measured once it has published: its start is spread over some seconds."""
    root, environment = restored
    with footprint.published(tmp_path) as (words, more, begun):
        loud, _, _ = footprint.at_rest(tmp_path, "--root", root, *words, environment={**environment, **more}, scans=2,
                                       settle=1, begun=begun)  # fmt: skip
    assert loud.pss <= footprint.PUBLISHING


@pytest.mark.timeout(900)
def test_nothing_grows(restored, tmp_path):
    """From the first third of many scans and requests to the last."""
    root, environment = restored
    found = footprint.steady(tmp_path / "busy", root, environment, scans=40, requests=330)
    assert found.errors == 0
    assert found.scans >= 40
    assert found.requests >= 330
    mib, descriptors = found.grown()
    assert descriptors <= 3, "more than connections that are just being closed"
    assert mib < NOISE_MIB

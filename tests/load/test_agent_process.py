"""The agent's process: its memory and descriptors, in the short form of bench/footprint.py, and its end by SIGTERM."""

import signal
import socket
import sys

import footprint
import pytest
import resident
import yaml
from api_server import write_kubeconfig
from load_served import H100, connect_deaf, get_of
from rigs.tables import ROOT
from rigs.waiting import eventually

pytestmark = pytest.mark.long

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

"""What the end-to-end tests share apart from fixtures: a client of the stand-in, and the agent as a process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import resident
import urllib3
from api_server import ApiServer, configuration
from kustomization import render
from rigs.tables import ROOT

from agent.cluster.client import Client


def client_of(server: ApiServer) -> Client:
    return Client(configuration(server.url), namespace="topoflight")


def ask(url: str, *, method: str = "GET", bearer: str | None = None) -> tuple:
    """Status and document of the answer; 0 and None where nothing answers."""
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    try:
        answer = urllib3.request(method, url, headers=headers, timeout=60, retries=False)
    except urllib3.exceptions.HTTPError:
        return 0, None
    return answer.status, answer.json() if "json" in answer.headers["content-type"] else answer.data.decode()


@contextmanager
def serving(config: Path, name: str, log: Path, *words: str) -> Iterator[str]:
    """The agent of node `name` with the DaemonSet's arguments and `words`: its URL."""
    port = resident.free_port()
    (daemonset,) = [d for d in render(ROOT / "deploy/daemonset/overlays/kubernetes") if d["kind"] == "DaemonSet"]
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    local = ("--address", "127.0.0.1", "--port", str(port))
    environment = {"KUBECONFIG": str(config), "NODE_NAME": name}
    command = [sys.executable, "-m", "agent.cli", *container["args"], *local, *words]
    with resident.process(command, environment, log) as child:
        resident.wait(port, "/snapshot", child)
        yield f"http://127.0.0.1:{port}"
        child.terminate()
        child.wait(120)

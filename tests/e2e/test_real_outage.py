"""A real API server that goes away, comes back, and has forgotten: publishing and watching go on by themselves.

Between agent and server stands a door that shuts on demand. With TOPOFLIGHT_E2E_DOWN and TOPOFLIGHT_E2E_UP, commands
that stop and start the API server itself, it goes for real.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest
import urllib3
from kubernetes.client import Configuration
from kubernetes.config import new_client_from_config
from real_cluster import RUN, kubectl, real
from rigs.waiting import eventually

from agent.cluster.client import Client, path_of
from agent.cluster.nodes import API_VERSION, PLURAL, Fleet, NodeRecord
from agent.cluster.publish import Publisher
from agent.cluster.watch import Watcher

pytestmark = real()
NODES = path_of(API_VERSION, PLURAL)


class Door:
    """Passes requests on to the API server while it is open."""

    def __init__(self) -> None:
        self.api, self.is_open, self.watches = new_client_from_config(), True, 0
        self.forget = 0  # watches to come that ask for a version long gone
        self.changed = threading.Event()
        handler = type("Handler", (_Through,), {"door": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def client(self, **more: Any) -> Client:
        """Of whoever stands before the door."""
        return Client(Configuration(host=f"http://127.0.0.1:{self.server.server_address[1]}"), **more)

    def shut(self) -> None:
        """No answer to anybody; watches break off."""
        self.is_open = False


class _Through(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    door: Door

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _pass(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        if not self.door.is_open:
            self.close_connection = True
            return
        if query.get("watch"):
            self.door.watches += 1
            if self.door.forget:
                self.door.forget -= 1
                query["resourceVersion"] = "1"  # the server itself then says that this is too old
        headers = {k: v for k, v in self.headers.items() if k in ("Accept", "Content-Type", "User-Agent")}
        api = self.door.api
        api.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        try:
            answer = api.rest_client.pool_manager.urlopen(
                self.command, f"{api.configuration.host}{url.path}?{urlencode(query)}", body=body, headers=headers,
                preload_content=False, retries=False,
                timeout=urllib3.Timeout(connect=5, read=1 if query.get("watch") else 60),
            )  # fmt: skip
        except urllib3.exceptions.HTTPError:
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._stream(answer)

    def _stream(self, answer: Any) -> None:
        while self.door.is_open:
            try:
                part = answer.read1(65536)
            except urllib3.exceptions.ReadTimeoutError:
                continue
            except urllib3.exceptions.HTTPError:
                break
            if not part:
                self.wfile.write(b"0\r\n\r\n")
                return
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        answer.close()
        self.close_connection = True

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _pass  # noqa: N815 - the standard library's names


@pytest.fixture
def door(definition: None) -> Iterator[Door]:
    made = Door()
    yield made
    made.shut()
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def name(definition: None) -> Iterator[str]:
    """Of a node; its record is taken away."""
    yield f"{RUN}-outage"
    kubectl("delete", "nodetopology", f"{RUN}-outage", "--ignore-not-found")


@contextlib.contextmanager
def watching(client: Client, *, seconds: int = 300) -> Iterator[tuple[Watcher, Fleet]]:
    fleet = Fleet()
    watcher = Watcher(client, NODES, fleet, seconds=seconds)
    watcher.start()
    try:
        assert watcher.wait(120)
        yield watcher, fleet
    finally:
        watcher.stop()


def record_of(name: str, verdict: str = "pass") -> NodeRecord:
    return NodeRecord(name=name, host=name, verdict=verdict, scanned_at_seconds=time.time())


def verdict(fleet: Fleet, name: str) -> str | None:
    return next((r.verdict for r in fleet.records() if r.name == name), None)


def test_watch_and_publisher_outlive_an_outage(door: Door, name: str) -> None:
    """What happened meanwhile arrives on both sides, and the watch goes on from where it was."""
    held = [record_of(name)]
    publisher = Publisher(door.client(tries=1), lambda: held[0], namespace="default", labels=False, look_seconds=0.05)
    publisher.start()
    with watching(door.client()) as (watcher, fleet):
        eventually(lambda: verdict(fleet, name) == "pass", "published and seen")
        door.shut()
        held[0] = replace(held[0], verdict="fail")
        eventually(lambda: publisher.error is not None, "the publisher notices")
        eventually(lambda: watcher.error is not None, "the watcher notices")
        door.is_open = True
        eventually(lambda: publisher.error is None and publisher.writes == 2, "written after all")
        eventually(lambda: verdict(fleet, name) == "fail", "and seen")
        assert watcher.lists == 1
    publisher.stop()

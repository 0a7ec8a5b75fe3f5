"""An API server that is silent, not trusted or not there as the agent starts, and a dead name server."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from api_server import ApiServer, configuration, write_kubeconfig
from drill_ground import MACHINES, Ground, drill, eventually
from relay import Relay, certificate

from agent.cluster.client import Client, path_of
from agent.cluster.nodes import API_VERSION, PLURAL, Fleet, NodeRecord
from agent.cluster.publish import Publisher
from agent.http.cluster import Watcher

pytestmark = pytest.mark.long

NODES = path_of(API_VERSION, PLURAL)
BACK_SECONDS = 150.0  # longer than three of the longest waits between two tries


@dataclass(slots=True)
class Scene:
    """A publisher and a watcher that talk to the stand-in through the relay."""

    api: ApiServer
    relay: Relay
    publisher: Publisher
    watcher: Watcher
    fleet: Fleet
    held: list[NodeRecord]

    def verdicts(self) -> tuple[str | None, str | None]:
        """What the API server holds, and what the watcher has of it."""
        stored = [item.get("status", {}).get("verdict") for item in self.api.of_kind("NodeTopology")]
        return next(iter(stored), None), next((r.verdict for r in self.fleet.records()), None)


@contextlib.contextmanager
def _scene(way: Callable[[Relay], Client], tls: ssl.SSLContext | None = None) -> Iterator[Scene]:
    with ApiServer(nfd=False) as api, Relay(api.port) as relay:
        relay.tls = tls
        record = NodeRecord(name="n1", host="n1", verdict="pass", scanned_at_seconds=time.time(), gpus=8)
        held, fleet = [record], Fleet()
        writing, reading = (way(relay).limited(timeout_seconds=1.0, tries=2) for _ in range(2))
        publisher = Publisher(writing, lambda: held[0], namespace="default", look_seconds=0.05, labels=False)
        watcher = Watcher(reading, NODES, fleet, seconds=2)
        publisher.start()
        watcher.start()
        try:
            yield Scene(api, relay, publisher, watcher, fleet, held)
        finally:
            watcher.stop()
            publisher.stop()
            reading.close()


def _outage(
    ground: Ground, scene: Scene, begin: Callable[[], object], end: Callable[[], object], named: str
) -> list[str]:
    """The node changes while the fault lasts: the change arrives afterwards, and nobody restarted anything."""
    if eventually(lambda: scene.verdicts() == ("pass", "pass") or None) is None:
        return [f"the first record does not arrive: {scene.verdicts()} {scene.publisher.error} {scene.watcher.error}"]
    begin()
    scene.held[0] = replace(scene.held[0], verdict="fail")

    def is_reported() -> bool | None:
        return any(named in (error or "") for error in (scene.publisher.error, scene.watcher.error)) or None

    said = eventually(is_reported)
    time.sleep(ground.random.uniform(0.5, 4.0 if ground.long else 1.0))
    end()
    back = eventually(lambda: scene.verdicts() == ("fail", "fail") or None, seconds=BACK_SECONDS)
    lost = [] if back else [f"the change does not arrive: {scene.verdicts()} {scene.publisher.error}"]
    if not said:
        lost.append(f"no error says {named!r}")
    return lost


@drill(long=10)
def test_api_slow(ground: Ground) -> list[str]:
    """Answers take longer than the client waits; connections are taken and never answered."""
    with _scene(lambda relay: Client(configuration(relay.url))) as scene:

        def begin() -> None:
            scene.relay.delay_seconds, scene.relay.silent = 4.0, True
            scene.relay.break_off()

        def end() -> None:
            scene.relay.delay_seconds, scene.relay.silent = 0.0, False

        return _outage(ground, scene, begin, end, named="timed out")


@drill
def test_api_certificate(ground: Ground) -> list[str]:
    """Refused by name while it is expired; TLS is not given up."""
    expired, valid = (certificate(ground.folder, days) for days in (-1, 1))

    def trusting(relay: Relay) -> Client:
        trust = configuration(relay.url)
        trust.ssl_ca_cert = str(ground.folder / "ca.pem")
        return Client(trust)

    with _scene(trusting, valid) as scene:

        def present(context: ssl.SSLContext) -> None:
            scene.relay.tls = context
            scene.relay.break_off()

        return _outage(ground, scene, lambda: present(expired), lambda: present(valid), named="expired")


@drill
def test_api_down_at_start(ground: Ground) -> list[str]:
    """The agent is ready without it, and publishes once it is there."""
    with ApiServer(nfd=False) as api:
        api.down()
        with _publishing(ground, api.url) as agent:
            lost = [] if agent.ready() else [f"not ready: {agent.words()[-500:]}"]
            api.up()
            if eventually(lambda: api.of_kind("NodeTopology") or None, seconds=BACK_SECONDS) is None:
                lost.append(f"not published: {agent.words()[-500:]}")
            lost += [] if agent.term() is not None else ["the agent does not end"]
    return [*lost, *ground.orphans()]


@contextlib.contextmanager
def _publishing(ground: Ground, server: str, **environment: str) -> Iterator:
    """An agent that publishes to a server, from a recording."""
    config = write_kubeconfig(ground.folder / "kubeconfig", server)
    machine = MACHINES / "hgx-h100-8xH100-8hca.json"
    words = (f"--host={machine}", "--publish", "--node-name=n1")
    with ground.agent(*words, KUBECONFIG=str(config), **environment) as agent:
        yield agent


@drill
def test_dns_dead(ground: Ground) -> list[str]:
    """The agent is ready, serves, names the failure, and ends in order."""
    nowhere = ground.folder / "resolv.conf"
    nowhere.write_text("nameserver 127.0.0.253\noptions timeout:2 attempts:1\n")
    mounts = f"mount --bind {nowhere} $(readlink -f /etc/resolv.conf)"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
        mute.bind(("127.0.0.253", 53))
        with _publishing(ground, "http://api.cluster.invalid:6443", DRILL_MOUNTS=mounts) as agent:
            lost = [] if agent.ready() else [f"not ready: {agent.words()[-500:]}"]
            if ground.long:  # waits for the first list as long as it may, then says why there is none
                status, told = agent.ask("/nodes", seconds=60)
                lost += [] if status == 503 and "api.cluster.invalid" in str(told) else [f"/nodes: {status} {told}"]
            said = eventually(lambda: "api.cluster.invalid" in agent.words() or None)
            lost += [] if said else [f"the failure is not named: {agent.words()[-500:]}"]
            lost += [] if agent.ask("/healthz")[0] == 200 else ["/healthz"]
            lost += [] if agent.term() is not None else ["the agent does not end"]
    return [*lost, *ground.orphans()]

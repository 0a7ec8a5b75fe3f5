"""An API server that is down, slow, busy, forgetful or not trusted, a dead name server, and thousands at once."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from drill_ground import MACHINES, ROOT, Ground, eventually
from drill_register import drill
from relay import Relay, certificate

from agent.cluster.client import LONGEST_WAIT_SECONDS, Client, backoff_seconds, connect, path_of
from agent.cluster.nodes import API_VERSION, PLURAL, Fleet, NodeRecord
from agent.cluster.publish import Publisher
from agent.cluster.watch import Watcher

sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from api_server import ApiServer, configuration, write_kubeconfig

NODES = path_of(API_VERSION, PLURAL)
BACK_SECONDS = 150.0  # longer than three of the longest waits between two tries
AGENTS = 5000


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


def _plain(relay: Relay) -> Client:
    return Client(configuration(relay.url))


def _outage(
    ground: Ground, scene: Scene, begin: Callable[[], object], end: Callable[[], object], named: str = ""
) -> list[str]:
    """The node changes while the fault lasts: the change arrives afterwards, and nobody restarted anything."""
    if eventually(lambda: scene.verdicts() == ("pass", "pass") or None) is None:
        return [f"the first record does not arrive: {scene.verdicts()} {scene.publisher.error} {scene.watcher.error}"]
    begin()
    scene.held[0] = replace(scene.held[0], verdict="fail")

    def told() -> bool | None:
        return any(named in (error or "") for error in (scene.publisher.error, scene.watcher.error)) or None

    said = eventually(told) if named else True
    time.sleep(ground.random.uniform(0.5, 4.0 if ground.long else 1.0))
    end()
    began = time.monotonic()
    back = eventually(lambda: scene.verdicts() == ("fail", "fail") or None, seconds=BACK_SECONDS)
    lost = [] if back else [f"the change does not arrive: {scene.verdicts()} {scene.publisher.error}"]
    if not said:
        lost.append(f"no error says {named!r}")
    ground.notes.append(f"back within {5 * (1 + int((time.monotonic() - began) / 5))} s")
    return lost


@drill("API server: down and up again", short=0, long=10)
def api_down(ground: Ground) -> list[str]:
    """Connections refused, watches broken."""
    with _scene(_plain) as scene:
        return _outage(ground, scene, scene.api.down, scene.api.up, named="cannot be reached")


@drill("API server: slow, then silent", long=10)
def api_slow(ground: Ground) -> list[str]:
    """Answers take longer than the client waits; connections are taken and never answered."""
    with _scene(_plain) as scene:

        def begin() -> None:
            scene.relay.delay_seconds, scene.relay.silent = 4.0, True
            scene.relay.break_off()

        def end() -> None:
            scene.relay.delay_seconds, scene.relay.silent = 0.0, False

        return _outage(ground, scene, begin, end, named="timed out")


def _refusals(ground: Ground, status: int, headers: dict[str, str], times: int) -> list[str]:
    with _scene(_plain) as scene:
        return _outage(ground, scene, lambda: scene.api.faults.extend([(status, headers)] * times), lambda: None)


@drill("API server: answers 429 with Retry-After", short=0, long=10)
def api_429(ground: Ground) -> list[str]:
    """And is not asked before it said: between two refusals of one client lies the second that it asked for."""
    with ApiServer(nfd=False) as api:
        client = Client(configuration(api.url))
        api.faults.extend([(429, {"Retry-After": "1"})] * 2)
        began = time.monotonic()
        client.get(NODES)
        early = time.monotonic() - began < 2.0
    return [*(["asked again before Retry-After"] if early else []), *_refusals(ground, 429, {"Retry-After": "1"}, 3)]


@drill("API server: answers 500", short=0, long=10)
def api_500(ground: Ground) -> list[str]:
    """To reads, writes and watches."""
    return _refusals(ground, 500, {}, 6)


@drill("API server: answers 410 and has forgotten its history", short=0, long=10)
def api_410(ground: Ground) -> list[str]:
    """The watcher lists anew; nothing is missed."""
    with _scene(_plain) as scene:
        return _outage(ground, scene, scene.api.expire, scene.api.expire)


@drill("API server: its certificate has expired, and is renewed", long=5)
def api_certificate(ground: Ground) -> list[str]:
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


@drill("API server: our token is rotated", short=0, long=10)
def api_token(ground: Ground) -> list[str]:
    """The old one is refused; the file is read anew before each request."""
    token, config = ground.folder / "token", ground.folder / "config"
    token.write_text("agent-token\n")

    def way(relay: Relay) -> Client:
        write_kubeconfig(config, relay.url, user="{tokenFile: token}")
        return connect(environment={"KUBECONFIG": str(config)})

    with _scene(way) as scene:

        def rotate() -> None:
            scene.api.tokens = {"new-token"}
            scene.relay.break_off()

        return _outage(ground, scene, rotate, lambda: token.write_text("new-token\n"), named="Unauthorized")


@drill("API server: down while the agent starts")
def api_down_at_start(ground: Ground) -> list[str]:
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


@drill("DNS dead: the name server never answers")
def dns_dead(ground: Ground) -> list[str]:
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


@drill("Thousands of nodes come back at once", long=20)
def thousands_at_once(ground: Ground) -> list[str]:
    """The tries of 5,000 agents after ten minutes of outage, from the function that makes them wait.

    An even spread over the window of the longest wait (15 to 45 s) is the yardstick: no second may see twice as many.
    """
    outage = 600.0
    arrivals = [_first_try_after(outage) - outage for _ in range(AGENTS)]
    window = LONGEST_WAIT_SECONDS
    busiest = max(Counter(int(at) for at in arrivals).values())
    ground.notes.append(f"busiest second {round(busiest, -1)} of {AGENTS} agents")
    lost = [] if busiest <= 2 * AGENTS / window else [f"{busiest} agents in one second"]
    return lost if max(arrivals) <= 1.5 * window else [*lost, f"one comes back only after {max(arrivals):.0f} s"]


def _first_try_after(outage: float) -> float:
    """When one agent asks for the first time after the outage: it looks every 5 s, and pauses after each failure."""
    at, failures = random.uniform(0.0, 5.0), 0
    while True:
        if at >= outage:
            return at
        at += backoff_seconds(failures)
        failures += 1

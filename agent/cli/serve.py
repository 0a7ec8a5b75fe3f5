"""The verb serve."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import click

from agent.cli.hosts import host_option, root_option

ALONE: dict[str, Any] = {  # what `serve` is given where nothing is asked for: no cluster, no doors that make load
    "publish": False, "token_review": False, "token_file": None, "node_name": None, "audience": "topoflight",
    "reads": "open", "publish_interval": 300.0, "nfd": True, "expect": (), "expect_file": None,
}  # fmt: skip
SWITCH_SECONDS = 0.001  # a request waits no longer for a scan or a question that computes in another thread


@click.command()
@host_option
@root_option
@click.option("--address", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=9402, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--interval", default=30.0, show_default=True, type=click.FloatRange(1, 86400), help="Seconds between scans."
)
@click.option("--state", "folder", default="/var/lib/topoflight", show_default=True, envvar="TOPOFLIGHT_STATE",
              type=click.Path(file_okay=False, path_type=Path), help="Results of benchmarks and flights.")  # fmt: skip
@click.option("--expect", multiple=True, metavar="KEY=VALUE,...",
              help="What each node must have, judged at every scan: gpus=8,hcas=8,nvlink=NV18,gdr=on.")  # fmt: skip
@click.option("--expect-file", default=None, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              metavar="FILE", help="The same as a YAML mapping; read anew for each scan.")  # fmt: skip
@click.option("--reads", default="open", type=click.Choice(["open", "token"]), show_default=True,
              help="Whether reading needs a token too.")  # fmt: skip
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Bearer tokens that may make load, one a line. Outside Kubernetes.")  # fmt: skip
@click.option("--token-review", is_flag=True, help="Ask the Kubernetes API server about bearer tokens.")
@click.option("--audience", default="topoflight", show_default=True, help="With --token-review: whom tokens are for.")
@click.option("--publish", is_flag=True, help="Write this node's record into the cluster (NodeTopology).")
@click.option("--publish-interval", default=300.0, show_default=True, type=click.FloatRange(10, 86400),
              help="Seconds between writes of a record that does not change.")  # fmt: skip
@click.option("--nfd/--no-nfd", default=True, show_default=True,
              help="With --publish: labels through Node Feature Discovery, where it is installed.")  # fmt: skip
@click.option("--node-name", envvar="NODE_NAME", default=None, help="This node's name in the cluster.")
def serve(hosts: tuple[Path, ...], root: str, address: str, port: int, interval: float, **given: Any) -> None:
    """Run the HTTP agent: page, JSON, metrics. Doors that make load stay closed without --token-file or -review.

    With --host it serves recordings in place of this host.
    """
    from agent.cli.hosts import snapshots
    from agent.gate.expect import asked
    from agent.http.state import State
    from probes.hostinfo.container import ROLE
    from probes.scanner import Scanner

    _check(hosts, given)
    places = bind(address, port)  # first: who asks while the rest is loaded waits, and is not refused
    os.environ.setdefault(ROLE, "agent")  # before the probe process starts, which inherits it
    scanner = None if hosts else Scanner(root)
    if scanner:  # the child imports while this process does
        threading.Thread(target=scanner.start, name="start", daemon=True).start()
    scan = (lambda: (scanner.scan(),)) if scanner else (lambda: snapshots(hosts))
    state = State(
        scan, interval_seconds=interval, folder=given["folder"],
        expected=lambda: asked(given["expect"], given["expect_file"]),
    )  # fmt: skip
    if port := places[0].getsockname()[1]:
        end = "  (Ctrl-C ends)" if sys.stderr.isatty() else ""
        click.echo(f"page: {_url(address, port)}  metrics: {_url(address, port)}metrics{end}", err=True)
    try:
        listen(application(state, given), address, port, places)
    finally:
        if scanner:
            scanner.close()


def _url(address: str, port: int) -> str:
    """Where a person on this host finds the page."""
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(address, address)  # noqa: S104 - read, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def bind(address: str, port: int) -> list[socket.socket]:
    """Listen at every address that the name stands for. Raises ClickException where that is refused."""
    places: list[socket.socket] = []
    try:
        named = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        for family, host in dict.fromkeys((family, str(found[0])) for family, _, _, _, found in named):
            wanted = places[0].getsockname()[1] if places else port  # of port 0: one for all of them
            places.append(socket.create_server((host, wanted), family=family))
            # Connections inherit it. asyncio sets it only where the socket names its protocol, and without it a kept
            # connection waits 40 ms for each answer: Nagle's algorithm against the client's delayed acknowledgement.
            places[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        for place in places:
            place.close()
        raise click.ClickException(f"--address {address} --port {port}: {error.strerror or error}") from None
    return places


def listen(app: Any, address: str, port: int, places: list[socket.socket] | None = None) -> None:
    """Serve until a signal says to end, at `places` where they are bound already."""
    import uvicorn

    from agent.http.connections import BACKLOG, KEEP_ALIVE_SECONDS, Seldom, protocol

    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(Seldom())
    sys.setswitchinterval(SWITCH_SECONDS)
    http: Any = protocol()
    config = uvicorn.Config(
        app, host=address, port=port, log_level=logging.getLevelName(logging.getLogger().level).lower(),
        access_log=False, ws="none", http=http, timeout_keep_alive=KEEP_ALIVE_SECONDS, backlog=BACKLOG,
        timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):  # raised again by uvicorn once all is closed
        server.run(sockets=places or bind(address, port))
    if not server.started:  # its own words are in the log
        raise click.ClickException("the HTTP agent did not start")


def _check(hosts: tuple[Path, ...], given: dict[str, Any]) -> None:
    from agent.gate.expect import asked
    from agent.gate.verdict import GateError

    try:
        asked(given["expect"], given["expect_file"])
    except GateError as error:
        raise click.UsageError(str(error)) from None
    if given["token_file"] and given["token_review"]:
        raise click.UsageError("--token-file and --token-review: only one of them can judge tokens")
    if given["reads"] == "token" and not (given["token_file"] or given["token_review"]):
        raise click.UsageError("--reads token: needs --token-file or --token-review, or nobody can read")
    if given["publish"] and len(hosts) > 1:
        raise click.UsageError(f"--publish with {len(hosts)} recordings: an agent publishes one node")
    if given["token_file"]:
        from agent.http.access import read_tokens

        try:
            read_tokens(given["token_file"])
        except (OSError, ValueError) as error:
            raise click.UsageError(f"--token-file: {error}") from None


def application(state: Any, given: dict[str, Any]) -> Any:
    """Endpoints, cluster view and publisher around one state."""
    from agent.http.access import Tokens
    from agent.http.cluster import Cluster
    from agent.http.server import create

    client = _client() if given["publish"] or given["token_review"] else None
    name = given["node_name"] or (os.uname().nodename if given["publish"] else None)
    tokens = Tokens(
        client=client.brief() if client and given["token_review"] else None, token_file=given["token_file"],
        audience=given["audience"], reads_open=given["reads"] == "open",
    )  # fmt: skip
    cluster = Cluster(
        state, name=name, client=client if given["publish"] else None,
        interval_seconds=given["publish_interval"] if given["publish"] else max(30.0, state.interval_seconds),
    )  # fmt: skip
    publisher = None
    if given["publish"]:
        from agent.cluster.publish import Publisher

        assert client is not None  # noqa: S101 - made above
        publisher = Publisher(
            client, lambda: next(iter(cluster.own()), None), namespace=_namespace(client),
            interval_seconds=given["publish_interval"], labels=given["nfd"],
        )  # fmt: skip
    return create(state, tokens=tokens, cluster=cluster, publisher=publisher)


def _client() -> Any:
    from agent.cluster.client import AccessError, connect

    try:
        return connect()
    except AccessError as error:
        raise click.ClickException(str(error)) from None


def _namespace(client: Any) -> str:
    return os.environ.get("POD_NAMESPACE") or str(client.namespace)

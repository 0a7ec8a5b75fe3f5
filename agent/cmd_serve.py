"""The verb serve."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import click

from agent.hosts import host_option, root_option

ALONE: dict[str, Any] = {  # what `serve` is given where nothing is asked for: no cluster, no doors that make load
    "publish": False, "token_review": False, "token_file": None, "node_name": None, "audience": "topoflight",
    "reads": "open", "peers": (), "publish_interval": 300.0, "nfd": True,
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
@click.option("--peers", multiple=True, metavar="URL", help="Other agents, for the cluster view without Kubernetes.")
def serve(hosts: tuple[Path, ...], root: str, address: str, port: int, interval: float, **given: Any) -> None:
    """Run the HTTP agent: page, JSON, metrics. Doors that make load stay closed without --token-file or -review.

    With --host it serves recordings in place of this host.
    """
    from agent.hosts import snapshots
    from agent.state import State
    from probes.scanner import Scanner

    _check(hosts, given)
    scanner = None if hosts else Scanner(root)
    if scanner:  # the child imports while this process does
        threading.Thread(target=scanner.start, name="start", daemon=True).start()
    scan = (lambda: (scanner.scan(),)) if scanner else (lambda: snapshots(hosts))
    state = State(scan, interval_seconds=interval, folder=given["folder"])
    if port:
        end = "  (Ctrl-C ends)" if sys.stderr.isatty() else ""
        click.echo(f"page: {_url(address, port)}  metrics: {_url(address, port)}metrics{end}", err=True)
    try:
        listen(application(state, given), address, port)
    finally:
        if scanner:
            scanner.close()


def _url(address: str, port: int) -> str:
    """Where a person on this host finds the page."""
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(address, address)  # noqa: S104 - read, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def listen(app: Any, address: str, port: int) -> None:
    """Serve until a signal says to end."""
    import uvicorn

    from agent.listener import BACKLOG, KEEP_ALIVE_SECONDS, Seldom, protocol

    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(Seldom())
    sys.setswitchinterval(SWITCH_SECONDS)
    http: Any = protocol()
    uvicorn.run(
        app, host=address, port=port, log_level=logging.getLevelName(logging.getLogger().level).lower(),
        access_log=False, ws="none", http=http, timeout_keep_alive=KEEP_ALIVE_SECONDS, backlog=BACKLOG,
        timeout_graceful_shutdown=5,
    )  # fmt: skip


def _check(hosts: tuple[Path, ...], given: dict[str, Any]) -> None:
    if given["token_file"] and given["token_review"]:
        raise click.UsageError("--token-file and --token-review: only one of them can judge tokens")
    if given["reads"] == "token" and not (given["token_file"] or given["token_review"]):
        raise click.UsageError("--reads token: needs --token-file or --token-review, or nobody can read")
    if given["publish"] and len(hosts) > 1:
        raise click.UsageError(f"--publish with {len(hosts)} recordings: an agent publishes one node")
    for peer in given["peers"]:
        if not peer.startswith(("http://", "https://")):
            raise click.UsageError(f"--peers {peer}: must begin with http:// or https://")
    if given["token_file"]:
        from agent.doors import read_tokens

        try:
            read_tokens(given["token_file"])
        except (OSError, ValueError) as error:
            raise click.UsageError(f"--token-file: {error}") from None


def application(state: Any, given: dict[str, Any]) -> Any:
    """Doors, cluster view and publisher around one state."""
    from agent.doors import Doors
    from agent.server import create
    from agent.server_cluster import Cluster

    client = _client() if given["publish"] or given["token_review"] else None
    name = given["node_name"] or (os.uname().nodename if given["publish"] else None)
    doors = Doors(
        client=client if given["token_review"] else None, token_file=given["token_file"], audience=given["audience"],
        reads_open=given["reads"] == "open",
    )  # fmt: skip
    cluster = Cluster(
        state, name=name, client=client if given["publish"] else None, peers=given["peers"],
        interval_seconds=given["publish_interval"] if given["publish"] else max(30.0, state.interval_seconds),
    )  # fmt: skip
    publisher = None
    if given["publish"]:
        from agent.publish import Publisher

        assert client is not None  # noqa: S101 - made above
        publisher = Publisher(
            client, lambda: next(iter(cluster.own()), None), namespace=_namespace(client),
            interval_seconds=given["publish_interval"], labels=given["nfd"],
        )  # fmt: skip
    return create(state, doors=doors, cluster=cluster, publisher=publisher)


def _client() -> Any:
    from agent.kube import Client
    from agent.kube_access import AccessError, find

    try:
        return Client(find())
    except AccessError as error:
        raise click.ClickException(str(error)) from None


def _namespace(client: Any) -> str:
    return os.environ.get("POD_NAMESPACE") or str(client.access.namespace)

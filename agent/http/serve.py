"""The verb serve: check the options, listen, and start the agent with its scans, publisher and HTTP application."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from agent.base import EXIT_INTERRUPTED, raise_as
from agent.base.options import command, read_snapshots
from agent.base.output import explain_unwritable, print_text

if TYPE_CHECKING:
    from fastapi import FastAPI

    from agent.checks.expect import NodeExpectation
    from agent.checks.view import View
    from agent.cluster.client import Client
    from agent.cluster.nodes import NodeRecord
    from agent.http.state import State

log = logging.getLogger(__name__)

BACKLOG = 256  # connections in the listen queue of the kernel; asyncio accepts as many at once
GRACE_SECONDS = 12.0  # from the signal to the exit, even if something hangs; deploy/daemonset gives 15
SWITCH_SECONDS = 0.001  # longest time a request waits for a scan or question that computes in another thread


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of serve. Their help texts (agent/base/verbs/serve.toml) say what each means."""

    hosts: tuple[Path, ...]
    root: str
    address: str
    port: int
    interval: float
    folder: Path  # --state
    expect: tuple[str, ...]
    expect_file: Path | None
    reads: Literal["open", "token"]
    token_file: Path | None
    token_review: bool
    audience: str
    publish: bool
    publish_interval: float
    node_name: str | None


@command("serve")
def serve(**values: Any) -> None:
    """Scan and listen until a signal arrives."""
    from probes.hostinfo.probe import ROLE
    from probes.registry import ALL
    from probes.scanner import Scanner

    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))  # an import may swallow KeyboardInterrupt
    if os.getpid() == 1:  # in a container: process 1 ignores a signal that it does not handle
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    options = ServeOptions(**values)
    _check(options)
    _make_state_folder(options.folder)
    client = None
    if options.publish or options.token_review:
        from agent.cluster.client import connect

        client = connect()
    # before the imports: clients that connect meanwhile wait instead of being refused
    listening = bind(options.address, options.port)
    os.environ.setdefault(ROLE, "agent")  # the probe process inherits it, so it is set first
    scanner = None if options.hosts else Scanner(options.root, probes=ALL)
    if scanner:  # the child imports while this process does
        threading.Thread(target=scanner.start, name="start", daemon=True).start()
    from agent.checks.history import History  # half a second of imports, at the same time as those of the child
    from agent.http.state import State

    scan = (lambda: (scanner.scan(),)) if scanner else (lambda: read_snapshots(options.hosts, ALL))
    state = State(
        scan, interval_seconds=options.interval, folder=options.folder,
        expected=lambda: _read_expected(options.expect, options.expect_file),
        history=None if options.hosts else History(lambda: time.clock_gettime(time.CLOCK_BOOTTIME)),
    )  # fmt: skip
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(options.address, options.address)  # noqa: S104 - read, not bound
    page = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
    end = "  (Ctrl-C ends)" if sys.stderr.isatty() else ""
    print_text(f"page: {page}  metrics: {page}metrics{end}", err=True)
    try:
        listen(build_application(state, options, client), listening)
    finally:
        if scanner:
            scanner.close()


def _read_expected(words: Sequence[str], file: Path | None) -> Sequence[NodeExpectation]:
    """Return the current expectations; the ConfigMap can appear, change and disappear. Raises GateError."""
    from agent.checks.expect import read_expectations

    return read_expectations(words, file if file is not None and file.exists() else None)


def bind(address: str, port: int) -> socket.socket:
    """Listen on the first address of the name; `::` means all addresses, IPv4 included. Raises ClickException."""
    both = address == "::" and socket.has_dualstack_ipv6()
    name = "0.0.0.0" if address == "::" and not both else address  # noqa: S104 - this kernel has no IPv6
    with raise_as(click.ClickException, OSError, f"--address {address} --port {port}: "):
        family, _, _, _, place = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(place[:2], family=family, dualstack_ipv6=both)
    # Connections inherit it. asyncio sets it only if the socket names its protocol. Without it each later response on a
    # connection takes 40 ms more (Nagle's algorithm and the client's delayed acknowledgement).
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def listen(app: FastAPI, listening: socket.socket) -> None:
    """Serve on the socket until a signal arrives."""
    import uvicorn

    from agent.http.access import HEAD_BYTES, KEEP_ALIVE_SECONDS, LimitedProtocol

    sys.setswitchinterval(SWITCH_SECONDS)
    config = uvicorn.Config(
        app,
        # uvicorn logs a warning for each request that is not HTTP: without -v only errors are logged
        log_level=logging.ERROR if logging.getLogger().level >= logging.WARNING else logging.getLogger().level,
        access_log=False, ws="none", http=LimitedProtocol, timeout_keep_alive=KEEP_ALIVE_SECONDS, backlog=BACKLOG,
        h11_max_incomplete_event_size=HEAD_BYTES, timeout_graceful_shutdown=5,
    )  # fmt: skip

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if not self.should_exit:  # the process exits even if something hangs
                end = threading.Timer(GRACE_SECONDS, os._exit, (128 + sig,))
                end.daemon = True
                end.start()
            super().handle_exit(sig, frame)

    server = Server(config)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    server.run(sockets=[listening])  # raises KeyboardInterrupt after Ctrl-C, when all is closed
    if not server.started:  # uvicorn has logged the reason
        raise click.ClickException("the HTTP agent did not start")


def _check(options: ServeOptions) -> None:
    """Reject options that cannot work before the agent listens."""
    from agent.checks.expect import read_expectations
    from probes.registry import ALL

    read_expectations(options.expect, None)
    file = options.expect_file
    if file is not None and not file.exists():
        log.warning("--expect-file %s: there is no such file; nothing is expected of this node until there is", file)
    if options.reads == "token" and not (options.token_file or options.token_review):
        raise click.UsageError("--reads token: needs --token-file or --token-review, or nobody can read")
    if options.hosts and (count := len(read_snapshots(options.hosts, ALL))) != 1:
        raise click.UsageError(f"--host: {count} hosts are recorded; an agent serves one")
    if options.token_file:
        from agent.http.access import read_tokens

        with raise_as(click.UsageError, ValueError, "--token-file "):
            read_tokens(options.token_file)


def _make_state_folder(folder: Path) -> None:
    """Create the folder given by --state or TOPOFLIGHT_STATE. If the default folder is missing, nothing is stored."""
    if click.get_current_context().get_parameter_source("folder") is not ParameterSource.DEFAULT:
        with raise_as(click.UsageError, OSError, f"--state {folder}: the folder cannot be made: "):
            folder.mkdir(parents=True, exist_ok=True)
    if folder.is_dir() and (problem := explain_unwritable(folder, folder=True)):
        log.warning("--state: %s; posted runs and results of benchmarks will not be stored", problem)


def build_application(state: State, options: ServeOptions, client: Client | None = None) -> FastAPI:
    """Connect endpoints and publisher to one state; `client` is needed to publish and to review tokens."""
    from agent.http.access import TokenChecker
    from agent.http.server import create
    from agent.http.state import Publisher

    tokens = TokenChecker(
        client=client.brief() if client and options.token_review else None, token_file=options.token_file,
        audience=options.audience, reads_open=options.reads == "open",
    )  # fmt: skip
    publisher = None
    if options.publish and client is not None:
        publisher = Publisher(client, _latest_record(state, options), interval_seconds=options.publish_interval)
    return create(state, tokens=tokens, publisher=publisher)


def _latest_record(state: State, options: ServeOptions) -> Callable[[], NodeRecord | None]:
    """Return a function that gives the record of the newest view, made once per view; None before the first scan."""
    from agent.cluster.nodes import make_record

    name = options.node_name or os.uname().nodename
    newest: tuple[View | None, NodeRecord | None] = None, None

    def latest() -> NodeRecord | None:
        nonlocal newest
        if (view := state.view) is not None and view is not newest[0]:
            newest = view, make_record(view, name=name, interval_seconds=options.publish_interval)
        return newest[1]

    return latest

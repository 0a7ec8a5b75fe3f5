"""The verb serve."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from agent.hosts import host_option, root_option


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
def serve(hosts: tuple[Path, ...], root: str, address: str, port: int, interval: float, folder: Path) -> None:
    """Run the HTTP agent: page, JSON, metrics. Reads only.

    With --host it serves recordings in place of this host.
    """
    import uvicorn

    from agent.hosts import snapshots
    from agent.server import create
    from agent.state import State
    from probes.scanner import Scanner

    scanner = None if hosts else Scanner(root)
    scan = (lambda: (scanner.scan(),)) if scanner else (lambda: snapshots(hosts))
    state = State(scan, interval_seconds=interval, folder=folder)
    try:
        level = logging.getLevelName(logging.getLogger().level).lower()
        uvicorn.run(
            create(state), host=address, port=port, log_level=level, access_log=False, timeout_graceful_shutdown=5
        )
    finally:
        if scanner:
            scanner.close()

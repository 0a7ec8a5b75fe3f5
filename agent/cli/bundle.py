"""The verb bundle."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agent.base import units
from agent.base.options import with_options
from agent.base.output import say, waiting, write_result


@click.command()
@with_options("bundle")
def bundle(
    root: str, target: str, state: Path, cluster: bool, nodes: tuple[str, ...], namespace: str, context: str | None
) -> None:
    """Create a support bundle: recording, findings, versions, limits, devices of the kubelet, and logs.

    Values that look like secrets are removed. Every command reads the file with `--host bundle.tgz`. Nothing is sent.
    """
    from agent.base.recordings import bundle_differences, pack_bundle
    from agent.jobs import bundle as making

    if cluster:
        with waiting("bundle: asking the agents"):
            hosts = making.of_cluster(namespace, context, nodes)
    else:
        from probes.registry import ALL
        from probes.scanner import Scanner

        with waiting("bundle: asking this host"), Scanner(root, probes=ALL) as scanner:
            snapshot, recording = scanner.capture()
        hosts = {snapshot.hostname: making.of_host(snapshot, recording, root=root, state=state)}
    content = pack_bundle(hosts)
    if target == "-":
        sys.stdout.buffer.write(content)
        return
    write_result(Path(target), content, 0o600)
    failed = [name for name, files in hosts.items() if "error.txt" in files]
    failures = f"; no answer from {', '.join(failed)}" if failed else ""
    written = f"{len(content)} bytes from {units.count(len(hosts), 'host')}"
    say(f"{target}: {written}{failures}. Check the contents before you send it.", err=True)
    for line in bundle_differences(hosts):
        say(line, err=True)
